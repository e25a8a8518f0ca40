"""The whole agent as a process: a real nats-server, a simulated node, real runs, and deaths at bad moments."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apportion.contracts import subjects
from apportion.contracts.causes import DeviceHealth, Mode, RunCause
from apportion.contracts.codec import decode_fact, encode_fact
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.events import (
    DeviceHealthChanged,
    Fact,
    LeaseClaimed,
    NodeFenced,
    NodeRegistered,
    RunFinished,
    RunPlaced,
    RunReleased,
    RunStarted,
    Slice,
)
from apportion.contracts.ids import MONITOR, PLACER, Author, PoolId
from apportion.contracts.testing import a_placement
from apportion.node_agent.simgpu.faults import Faults
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus, Lease, StreamReader

pytestmark = pytest.mark.integration

POOL = PoolId("main")
PATIENCE_S = 60.0


class Pool:
    """A bus, the placer's and the monitor's voice, and what was stated so far."""

    def __init__(self, bus: Bus, directory: Path) -> None:
        self.bus = bus
        self.directory = directory
        self.entries: list[Entry] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        self.leases: dict[Author, Lease] = {}
        self.count = 0
        self.reader: StreamReader

    def agent(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "apportion.node_agent", "--node-id", "node-1"]
        command += ["--simulated-devices", "1", "--simulated-profile", "a100-40", "--heartbeat-ms", "100"]
        env = {**os.environ, "APPORTION_DATA_DIR": str(self.directory), "APPORTION_BUS_URL": self.bus.url}
        with (self.directory / "agent.log").open("ab") as output:
            process = subprocess.Popen(command, env=env, stderr=output, stdout=output)
        self.agents.append(process)
        return process

    async def say(self, author: Author, *facts: Fact) -> None:
        if author not in self.leases:
            claim = LeaseClaimed(author=author, session="test", core="test@1#0")
            message = encode_fact(POOL, author, claim, event_id=f"{author}.claim")
            self.leases[author] = await self.bus.claim(author, message)
        messages = []
        for fact in facts:
            self.count += 1
            messages.append(encode_fact(POOL, author, fact, event_id=f"test.{self.count}"))
        await self.bus.publish_fenced(self.leases[author], messages)

    def all(self, kind: type[Fact]) -> list[Any]:
        return [entry.event for entry in self.entries if isinstance(entry.event, kind)]

    async def until(self, happened: Callable[[], bool]) -> None:
        """Read until it has happened; the time limit only ends a test that would hang."""
        reader = self.reader
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not happened():
                    await reader.ready.wait()
                    self.entries += [
                        decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at)
                        for raw in reader.take()
                    ]
        except TimeoutError:
            pytest.fail((self.directory / "agent.log").read_text()[-4000:])

    async def has(self, kind: type[Fact], count: int = 1) -> Any:
        await self.until(lambda: len(self.all(kind)) >= count)
        return self.all(kind)[-1]

    def an_order(self, name: str, *command: str, epoch: int = 0) -> RunPlaced:
        device = self.all(NodeRegistered)[-1].devices[0]
        piece = Slice(device_uuid=device.uuid, compute_milli=100, memory_mib=1024, mode=Mode.TIMESLICE)
        return a_placement(f"acme/{name}", command=command, slices=(piece,), node_epoch=epoch, grace_s=1)

    def kill_everything(self) -> None:
        """By what their command lines and environments say: everything of this pool names its directory."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if os.fsencode(self.directory) in said and b"nats-server" not in said:
                    os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="na-") as text:
        directory = Path(text)
        async with EmbeddedServer(directory, port=0) as server:
            bus = await Bus.connect(server.url, pool=POOL, name="test")
            await bus.provision()
            pool = Pool(bus, directory)
            pool.reader = await bus.reader(Stream.FACTS, after=0)
            try:
                yield pool
            finally:
                pool.kill_everything()
                await bus.close()


async def test_a_killed_agent_does_not_touch_its_runs_and_the_next_tells_their_ends(pool: Pool) -> None:
    """One ends while nobody looks, one lives on; nothing is started twice."""
    first = pool.agent()
    await pool.has(NodeRegistered)
    long, short = pool.an_order("long", "sleep", "60"), pool.an_order("short", "sleep", "0.5")
    await pool.say(PLACER, long, short)
    await pool.has(RunStarted, 2)
    pids = {fact.run_id: fact.pid for fact in pool.all(RunStarted)}
    first.kill()
    first.wait()
    while Path(f"/proc/{pids[short.run_id]}").exists():
        await asyncio.sleep(0.02)
    pool.agent()
    finished = await pool.has(RunFinished)
    assert (finished.run_id, finished.cause, finished.exit_code) == (short.run_id, RunCause.SUCCESS, 0)
    await pool.has(NodeRegistered, 2)
    os.kill(pids[long.run_id], signal.SIGKILL)
    finished = await pool.has(RunFinished, 2)
    assert (finished.run_id, finished.cause, finished.signal) == (long.run_id, RunCause.KILLED, 9)
    await pool.has(RunReleased, 2)
    assert len(pool.all(RunStarted)) == 2


async def test_an_agent_that_is_asked_to_end_leaves_its_runs_alone(pool: Pool) -> None:
    """An upgrade of the agent is no event in a run's life."""
    agent = pool.agent()
    await pool.has(NodeRegistered)
    await pool.say(PLACER, pool.an_order("long", "sleep", "60"))
    started = await pool.has(RunStarted)
    agent.send_signal(signal.SIGTERM)
    assert await asyncio.get_running_loop().run_in_executor(None, agent.wait, PATIENCE_S) == 0
    os.kill(started.pid, 0)
    assert pool.all(RunFinished) == []


async def test_a_second_agent_of_a_node_is_refused(pool: Pool) -> None:
    """With a sentence that says what to do."""
    pool.agent()
    await pool.has(NodeRegistered)
    second = pool.agent()
    assert await asyncio.get_running_loop().run_in_executor(None, second.wait, PATIENCE_S) == 2
    assert "another agent of node-1 is at work" in (pool.directory / "agent.log").read_text()


async def test_a_fenced_node_comes_back_without_its_runs(pool: Pool) -> None:
    """And takes orders of the new epoch alone."""
    pool.agent()
    await pool.has(NodeRegistered)
    await pool.say(PLACER, pool.an_order("old", "sleep", "60"))
    started = await pool.has(RunStarted)
    await pool.say(MONITOR, NodeFenced(node_id=started.node_id, epoch=1, runs=(started.run_id,)))
    registered = await pool.has(NodeRegistered, 2)
    assert (registered.epoch, pool.all(RunFinished)[-1].cause) == (1, RunCause.NODE_LOST)
    assert not Path(f"/proc/{started.pid}").exists()
    await pool.say(PLACER, pool.an_order("stale", "true"), pool.an_order("new", "true", epoch=1))
    await pool.has(RunReleased, 3)
    assert {fact.run_id: fact.cause for fact in pool.all(RunFinished)[1:]} == {
        "acme/stale/0/1": RunCause.STALE,
        "acme/new/0/1": RunCause.SUCCESS,
    }


async def test_a_device_that_falls_off_the_bus_is_told_and_so_is_its_return(pool: Pool) -> None:
    """Its run ends as by a fault of the device, which costs the job nothing."""
    pool.agent()
    await pool.has(NodeRegistered)
    await pool.say(PLACER, pool.an_order("long", "sleep", "60"))
    await pool.has(RunStarted)
    with Faults(pool.directory / "nodes" / "node-1" / "simgpu" / "node.sock") as faults:
        faults.xid(0, 79)
        change = await pool.has(DeviceHealthChanged)
        assert change.after is DeviceHealth.FAILED
        assert (await pool.has(RunFinished)).cause is RunCause.DEVICE_FAULT
        await pool.has(RunReleased)
        faults.reset(0)
        change = await pool.has(DeviceHealthChanged, 2)
        assert (change.after, change.code) == (DeviceHealth.HEALTHY, "recovered")
        assert change.detail.startswith("lost, ")


async def test_heartbeats_say_which_session_lives(pool: Pool) -> None:
    """The monitor goes by them."""
    beats: asyncio.Queue[bytes] = asyncio.Queue()

    async def heard(message: Any) -> None:
        beats.put_nowait(message.data)

    await pool.bus.client.subscribe(subjects.all_samples(POOL, "heartbeat"), cb=heard)
    pool.agent()
    registered = await pool.has(NodeRegistered)
    beat: dict[str, Any] = {}
    async with asyncio.timeout(PATIENCE_S):
        while beat.get("facts_seq", 0) == 0:
            beat = msgspec.json.decode(await beats.get())
    assert (beat["session"], beat["epoch"]) == (registered.session, 0)
