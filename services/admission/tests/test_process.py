"""Admission as a process of its own, on a real bus: it answers, survives kill -9, and still knows what it answered."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.codec import decode_fact
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import OPERATOR, PoolId
from apportion.contracts.testing import a_job_request
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

pytestmark = pytest.mark.integration

POOL = PoolId("main")


class Service:
    """One admission process, started again where a test kills it."""

    def __init__(self, url: str, data_dir: Path) -> None:
        self._argv = ["-m", "apportion.admission", "--bus-url", url, "--data-dir", str(data_dir)]
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
    running = Service(bus.url, tmp_path / "admission")
    yield running
    if running.process is not None:
        await running.end(signal.SIGKILL)


async def facts_until(bus: Bus, count: int, kind: type[ev.Fact] | tuple[type[ev.Fact], ...]) -> list[Entry]:
    """Facts of these kinds from the stream's beginning, once there are so many."""
    reader = await bus.reader(Stream.FACTS, after=0)
    found: list[Entry] = []
    async with asyncio.timeout(60):
        async for batch in reader.batches():
            for raw in batch:
                entry = decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at)
                if isinstance(entry.event, kind):
                    found.append(entry)
            if len(found) >= count:
                break
    await reader.close()
    return found


ANSWERS = (ev.QueueUpserted, ev.JobAdmitted, ev.JobRejected, ev.JobDuplicate, ev.WishRejected, ev.JobCancelled)


async def ask(bus: Bus, wish: ev.Wish, event_id: str, *, tenant: str = "acme") -> None:
    await bus.publish_wish(codec.encode_wish(POOL, wish, tenant=tenant, event_id=event_id, source="/test"))


async def test_wishes_published_by_others_are_answered(bus: Bus, service: Service) -> None:
    """Also those that came before the service did; and bytes that are no wish at all."""
    await ask(bus, ev.QueueUpsertRequested(queue="main", tenants=("acme",)), "q-1", tenant=OPERATOR)
    await ask(bus, a_job_request(), "e-1")
    await service.start("--default-memory-mib-batch", "1234")
    subject = codec.encode_wish(POOL, a_job_request(), tenant="acme", event_id="x", source="/test").subject
    await bus.jetstream.publish(subject, b'{"queue": "main", "gpus": 1}')
    await ask(bus, a_job_request(job_id="half", resources=ev.Resources(gpu_milli=10)), "e-2")
    await ask(bus, ev.JobCancelRequested(job_id="train-7"), "e-3")
    entries = await facts_until(bus, 5, ANSWERS)
    answers: list[Any] = [entry.event for entry in entries]
    assert [(type(answer), answer.answers) for answer in answers] == [
        (ev.QueueUpserted, 1),
        (ev.JobAdmitted, 2),
        (ev.JobRejected, 3),
        (ev.JobAdmitted, 4),
        (ev.JobCancelled, 5),
    ]
    assert (answers[2].code, answers[2].field) == (Refusal.FIELD_UNKNOWN, "gpus")
    assert answers[3].spec.memory_mib == 1234
    basis = entries[-1].basis
    assert basis is not None
    assert basis.policy.startswith("admission@")
    assert await service.end(signal.SIGTERM) == 0


async def test_a_killed_service_goes_on_where_it_was_and_knows_repeats(bus: Bus, service: Service) -> None:
    """What it answered is on the stream; nothing else is needed, and nothing is answered twice."""
    await service.start()
    await ask(bus, ev.QueueUpsertRequested(queue="main", tenants=("acme",)), "q-1", tenant=OPERATOR)
    for number in range(40):
        await ask(bus, a_job_request(job_id=f"j{number}"), f"e-{number}")
        if number == 20:
            await service.end(signal.SIGKILL)
            await service.start()
    await facts_until(bus, 41, ANSWERS)
    assert await service.end(signal.SIGTERM) == 0  # leaves a snapshot
    await service.start()
    # The broker's own window knows the message's id, so that this one comes without it, as after an hour.
    again = codec.encode_wish(POOL, a_job_request(job_id="j7"), tenant="acme", event_id="e-7", source="/test")
    headers = {name: value for name, value in again.headers.items() if name != "Nats-Msg-Id"}
    await bus.jetstream.publish(again.subject, again.body, headers=headers)
    answers: list[Any] = [entry.event for entry in await facts_until(bus, 42, ANSWERS)]
    assert [answer.answers for answer in answers] == list(range(1, 43))
    assert isinstance(answers[-1], ev.JobDuplicate)
    assert (answers[-1].original_job_id, answers[-1].first_wish) == ("acme/j7", 9)


async def test_a_second_session_takes_over_and_the_first_leaves(bus: Bus, service: Service, tmp_path: Path) -> None:
    """Two writers would give two answers; the bus lets one write."""
    await service.start()
    await ask(bus, ev.QueueUpsertRequested(queue="main", tenants=("acme",)), "q-1", tenant=OPERATOR)
    await facts_until(bus, 1, ANSWERS)
    second = Service(bus.url, tmp_path / "second")
    await second.start()
    try:
        await facts_until(bus, 2, ev.LeaseClaimed)
        for number in range(5):
            await ask(bus, a_job_request(job_id=f"j{number}"), f"e-{number}")
        answers: list[Any] = [entry.event for entry in await facts_until(bus, 6, ANSWERS)]
        assert [answer.answers for answer in answers] == list(range(1, 7))
        assert service.process is not None
        async with asyncio.timeout(60):
            assert await service.process.wait() != 0
    finally:
        await second.end(signal.SIGKILL)
