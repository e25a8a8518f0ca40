"""The placer as a process of its own, on a real bus: it places, survives kill -9, and places nothing twice."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apportion.contracts import events as ev
from apportion.contracts import subjects
from apportion.contracts.causes import Pending
from apportion.contracts.codec import decode_fact
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import ADMISSION, PLACER, JobId, NodeId, PoolId, agent_author
from apportion.contracts.testing import a_job, a_node, a_queue, a_spec
from apportion.placer import core
from apportion.placer.__main__ import main
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.health import probe
from apportion.runtime.stream import Bus
from tests.speaker import Speaker

pytestmark = pytest.mark.integration

POOL = PoolId("main")


class Service:
    """One placer process, started again where a test kills it."""

    def __init__(self, url: str, data_dir: Path) -> None:
        self._argv = ["-m", "apportion.placer", "--bus-url", url, "--data-dir", str(data_dir)]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *flags: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *self._argv, *flags, stderr=asyncio.subprocess.DEVNULL
        )

    async def end(self, signum: signal.Signals) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signum)
        return await self.process.wait()


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with EmbeddedServer(tmp_path / "data", port=0) as server:
        connected = await Bus.connect(server.url, pool=POOL, name="test")
        await connected.provision()
        yield connected
        await connected.close()


@pytest.fixture
async def service(bus: Bus, tmp_path: Path) -> AsyncIterator[Service]:
    running = Service(bus.url, tmp_path / "placer")
    yield running
    if running.process is not None:
        await running.end(signal.SIGKILL)


async def placer_facts(bus: Bus, count: int) -> list[Entry]:
    """Everything that the placer stated from the beginning but its claims, once there is so much."""
    reader = await bus.reader(Stream.FACTS, after=0)
    found: list[Entry] = []
    async with asyncio.timeout(60):
        async for batch in reader.batches():
            for raw in batch:
                entry = decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at)
                if entry.author == "placer" and not isinstance(entry.event, ev.LeaseClaimed):
                    found.append(entry)
            if len(found) >= count:
                break
    await reader.close()
    return found


async def test_jobs_are_placed_and_a_killed_placer_places_none_twice(bus: Bus, service: Service) -> None:
    """What it decided is on the stream; nothing else is needed to go on."""
    admission, agent = Speaker(bus, ADMISSION), Speaker(bus, agent_author(NodeId("node-1")))
    await admission.state(a_queue(), a_job("job-0"))
    await agent.state(a_node(devices=8))
    await service.start("--reserve-after-s", "7")
    entries = await placer_facts(bus, 1)
    assert isinstance(entries[0].event, ev.RunPlaced)
    basis = entries[0].basis
    assert basis is not None
    assert basis.policy == core.POLICY
    for number in range(1, 24):
        await admission.state(a_job(f"job-{number}"))
        if number == 12:
            await service.end(signal.SIGKILL)
            await service.start()
    await placer_facts(bus, 24)
    assert await service.end(signal.SIGTERM) == 0  # leaves a snapshot
    await service.start()
    await admission.state(a_job("last", devices=9))
    events = [entry.event for entry in await placer_facts(bus, 25)]
    assert [event.job_id for event in events[:-1] if isinstance(event, ev.RunPlaced)] == [
        f"acme/job-{number}" for number in range(24)
    ]
    last = events[-1]
    assert isinstance(last, ev.JobPendingReasonChanged)
    assert (last.job_id, last.code) == (JobId("acme/last"), Pending.NO_MATCHING_DEVICE)

    async def asked(name: str, **question: object) -> dict[str, Any]:
        reply = await bus.client.request(subjects.query(POOL, name), msgspec.json.encode(question), timeout=60)
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    why = await asked("why", job_id="acme/last")
    assert (why["code"], why["could_start"]) == ("NoMatchingDevice", False)
    assert (await asked("why", job_id="acme/nobody"))["error"]["code"] == "JobNotFound"
    plan = await asked("plan", job_id="acme/next", tenant="acme", spec=a_spec())
    assert (plan["starts"], plan["places"][0]["node_id"]) == ("now", "node-1")
    assert (await asked("plan", job_id="acme/last", tenant="acme", spec=a_spec()))["error"]["code"] == "JobIdTaken"
    assert (await asked("plan", spec={}))["error"]["code"] == "QuestionInvalid"


async def test_a_policy_that_nobody_wrote_is_refused(bus: Bus, service: Service) -> None:
    """Before anything is claimed."""
    await service.start("--policy", "best_guess")
    assert service.process is not None
    assert await service.process.wait() == 2
    assert (await bus.position(Stream.FACTS)).last_seq == 0


async def claim_of(bus: Bus, number: int) -> ev.LeaseClaimed:
    """The placer's claim of that number, once there is one."""
    reader = await bus.reader(Stream.FACTS, after=0, filters=(subjects.lease(POOL, PLACER),))
    found: list[ev.LeaseClaimed] = []
    async with asyncio.timeout(60):
        async for batch in reader.batches():
            for raw in batch:
                event = decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at).event
                assert isinstance(event, ev.LeaseClaimed)
                found.append(event)
            if len(found) >= number:
                break
    await reader.close()
    return found[number - 1]


async def test_a_standby_places_while_the_first_is_paused_and_the_first_then_ends(bus: Bus, tmp_path: Path) -> None:
    """What the paused one believes when it wakes is stored by nobody; a killed one is followed just so."""
    one, other = Service(bus.url, tmp_path / "one"), Service(bus.url, tmp_path / "other")
    admission, agent = Speaker(bus, ADMISSION), Speaker(bus, agent_author(NodeId("node-1")))
    await admission.state(a_queue(), a_job("job-0"))
    await agent.state(a_node(devices=8))
    try:
        await one.start()
        await placer_facts(bus, 1)
        await other.start("--standby", "--takeover-ms", "1000")
        await until_follows(tmp_path / "other")
        assert one.process is not None
        one.process.send_signal(signal.SIGSTOP)
        await until_it_stands_still(one.process.pid)
        await admission.state(a_job("job-1"))
        taken = await claim_of(bus, 2)
        assert taken.follows
        assert taken.silent_ms >= 1_000
        await placer_facts(bus, 2)
        one.process.send_signal(signal.SIGCONT)
        assert await one.process.wait() == 1
        await one.start("--standby", "--takeover-ms", "1000")
        await until_follows(tmp_path / "one")
        await other.end(signal.SIGKILL)
        await admission.state(a_job("job-2"))
        placed = [entry.event for entry in await placer_facts(bus, 3)]
        assert [event.job_id for event in placed if isinstance(event, ev.RunPlaced)] == [
            f"acme/job-{number}" for number in range(3)
        ]
    finally:
        for service in (one, other):
            await service.end(signal.SIGKILL)


async def until_it_stands_still(pid: int) -> None:
    """A signal takes effect when the kernel gets round to it."""
    async with asyncio.timeout(60):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            await asyncio.sleep(0.01)


async def until_follows(data_dir: Path) -> None:
    """Until the process of that directory stands by."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError, ValueError):
                run = json.loads((data_dir / "run" / "placer.json").read_bytes())
                is_ready, said = await asyncio.to_thread(probe, run["health_port"])
                if is_ready and json.loads(said)["role"] == "standby":
                    return
            await asyncio.sleep(0.05)


def test_a_pool_does_not_keep_memory_back_and_oversubscribe_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The two settings say opposite things of the same memory."""
    argv = ["--pool", "p", "--memory-buffer-pct", "10", "--memory-oversubscribe-pct", "120"]
    assert main(argv) == 2
    assert "expected 0 beside memory_oversubscribe_pct 120, found 10" in capsys.readouterr().err
