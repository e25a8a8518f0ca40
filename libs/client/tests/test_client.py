"""The client against a real bus and a real admission process: one wish, one answer, whatever happens on the way."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apportion.client import (
    Admitted,
    BusUnreachable,
    Cancelled,
    Client,
    Duplicate,
    Finished,
    JobNotFound,
    JobStage,
    Judged,
    OutcomeUnknown,
    PoolNotFound,
    Rejected,
    RequestInvalid,
    Started,
    Stored,
    SyncClient,
    TimedOut,
    Unanswered,
)
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, Refusal, RunCause
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import (
    OPERATOR,
    PLACER,
    Author,
    DeviceUuid,
    JobId,
    NodeId,
    PoolId,
    TenantId,
    agent_author,
    run_id,
)
from apportion.contracts.testing import a_job_request
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

pytestmark = pytest.mark.integration

POOL = PoolId("main")
NODE = NodeId("node-1")


class Admission:
    """The process, ended whatever happens."""

    def __init__(self, url: str, data_dir: Path) -> None:
        self._argv = ["-m", "apportion.admission", "--bus-url", url, "--data-dir", str(data_dir)]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *self._argv, stderr=asyncio.subprocess.DEVNULL
        )

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(tmp_path / "data", port=0) as running:
        yield running


@pytest.fixture
async def bus(server: EmbeddedServer) -> AsyncIterator[Bus]:
    connected = await Bus.connect(server.url, pool=POOL, name="test")
    await connected.provision()
    queue = ev.QueueUpsertRequested(queue="main", tenants=("acme", "globex"))
    await connected.publish_wish(codec.encode_wish(POOL, queue, tenant=OPERATOR, event_id="q-1", source="/test"))
    yield connected
    await connected.close()


@pytest.fixture
async def admission(bus: Bus, tmp_path: Path) -> AsyncIterator[Admission]:
    running = Admission(bus.url, tmp_path / "admission")
    yield running
    if running.process is not None:
        await running.kill()


@pytest.fixture
async def acme(bus: Bus) -> AsyncIterator[Client]:
    async with await Client.connect(bus.url, tenant="acme", source="/orders") as client:
        yield client


class Fleet:
    """States what placer and agent would, so that a job can be followed without them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._count = 0

    async def states(self, author: Author, fact: ev.Fact) -> None:
        self._count += 1
        message = codec.encode_fact(POOL, author, fact, event_id=f"fleet-{self._count}")
        await self._bus.jetstream.publish(message.subject, message.body, headers=message.headers)

    async def registers(self) -> None:
        device = ev.Device(uuid=DeviceUuid("GPU-1"), index=0, model="h200", memory_mib=140_000, modes=(Mode.TIMESLICE,))
        await self.states(
            agent_author(NODE),
            ev.NodeRegistered(
                node_id=NODE, session="s", boot_id="b", epoch=0, devices=(device,), cpu_milli=64_000, memory_mib=100_000
            ),
        )

    async def runs(self, job: str, *, replica: int = 0, attempt: int = 1) -> None:
        run = run_id(JobId(job), replica, attempt)
        tenant = TenantId(job.partition("/")[0])
        a_slice = ev.Slice(device_uuid=DeviceUuid("GPU-1"), compute_milli=100, memory_mib=100, mode=Mode.TIMESLICE)
        placed = ev.RunPlaced(
            run_id=run, job_id=JobId(job), tenant=tenant, node_id=NODE, node_epoch=0, slices=(a_slice,), command=("x",)
        )
        await self.states(PLACER, placed)
        await self.states(agent_author(NODE), ev.RunStarted(run_id=run, node_id=NODE, pid=1, started_at=1))

    async def ends(self, job: str, cause: RunCause, exit_code: int, detail: str = "") -> None:
        run = run_id(JobId(job), 0, 1)
        await self.states(
            agent_author(NODE),
            ev.RunFinished(run_id=run, node_id=NODE, cause=cause, exit_code=exit_code, finished_at=2, detail=detail),
        )
        await self.states(agent_author(NODE), ev.RunReleased(run_id=run, node_id=NODE, released_at=3))


REQUEST: dict[str, Any] = {"queue": "main", "workload": {"command": ["train"]}, "resources": {"gpu_milli": 500}}


async def test_a_job_is_admitted_refused_known_again_and_judged(acme: Client, admission: Admission) -> None:
    """Each answer is a type of its own, with the fact that says it."""
    await admission.start()
    first = await acme.submit({**REQUEST, "job_id": "one"}, id="order-1")
    assert isinstance(first, Admitted)
    assert (first.id, first.job_id, first.fact.spec.compute_milli) == ("order-1", "acme/one", 500)
    assert await acme.submit({**REQUEST, "job_id": "one"}, id="order-1") == first
    other = await acme.submit({**REQUEST, "job_id": "two"}, id="order-1b")
    assert isinstance(other, Admitted)
    refused = await acme.submit({**REQUEST, "gpus": 1}, id="order-2")
    assert isinstance(refused, Rejected)
    assert (refused.code, refused.field) == (Refusal.FIELD_UNKNOWN, "gpus")
    judged = await acme.submit(a_job_request(job_id="three", dry_run=True))
    assert isinstance(judged, Judged)
    assert await acme.submit(b"not json at all", id="order-3", wait="finished") == await acme.submit(
        b"not json at all", id="order-3"
    )


async def test_a_repeat_after_the_bus_forgot_it_names_the_first_job(
    acme: Client, bus: Bus, admission: Admission
) -> None:
    """The bus knows repeats for minutes, admission for as long as the log is kept."""
    await admission.start()
    body = json.dumps({**REQUEST, "job_id": "one"}).encode()
    message, _ = acme._message(ev.JobRequested, body, "order-1")
    headers = {name: value for name, value in message.headers.items() if name != "Nats-Msg-Id"}
    await bus.jetstream.publish(message.subject, body, headers=headers)
    again = await acme.submit(body, id="order-1")
    assert isinstance(again, Duplicate)
    assert (again.job_id, again.fact.first_wish) == ("acme/one", 2)


async def test_without_admission_a_wish_is_stored_and_answered_later(
    acme: Client, bus: Bus, admission: Admission
) -> None:
    """Also where it was sent several times in between; an answer older than the call is found too."""
    stored = await acme.submit({**REQUEST, "job_id": "one"}, id="order-1", wait="stored")
    assert stored == Stored(id="order-1", wish_seq=2)
    unanswered = await acme.submit({**REQUEST, "job_id": "one"}, id="order-1", timeout_s=0.5)
    assert unanswered == Unanswered(id="order-1", wish_seq=2)
    asking = asyncio.create_task(acme.submit({**REQUEST, "job_id": "one"}, id="order-1"))
    await asyncio.sleep(0)
    await admission.start()
    answer = await asking
    assert isinstance(answer, Admitted)
    assert (await bus.position(Stream.WISHES)).last_seq == 2
    await admission.kill()
    late = await acme.submit({**REQUEST, "job_id": "one"}, id="order-1")
    assert late == answer


async def test_the_bus_may_die_while_a_wish_is_sent(
    server: EmbeddedServer, bus: Bus, acme: Client, admission: Admission
) -> None:
    """Its outcome is unknown then, and settled by the same id: every order is one job."""
    await admission.start()
    assert isinstance(await acme.submit({**REQUEST, "job_id": "warm"}), Admitted)
    sending = [
        asyncio.create_task(acme.submit({**REQUEST, "job_id": f"j{number}"}, id=f"order-{number}"))
        for number in range(20)
    ]
    await asyncio.sleep(0)
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    answers = await asyncio.gather(*sending)
    assert {answer.job_id for answer in answers if isinstance(answer, Admitted | Duplicate)} == {
        f"acme/j{number}" for number in range(20)
    }
    assert len(await acme.jobs()) == 21


async def test_a_job_is_followed_to_its_end(acme: Client, bus: Bus, admission: Admission) -> None:
    """Started means all replicas; finished carries how."""
    await admission.start()
    fleet = Fleet(bus)
    await fleet.registers()
    two = {**REQUEST, "job_id": "gang", "gang": {"size": 2}}
    starting = asyncio.create_task(acme.submit(two, wait="started"))
    while not any(job.job_id == "acme/gang" for job in await acme.jobs()):
        await asyncio.sleep(0.02)
    await fleet.runs("acme/gang")
    with pytest.raises(TimedOut, match="it waits"):
        await acme.wait("gang", until="started", timeout_s=0.3)
    await fleet.runs("acme/gang", replica=1)
    started = await starting
    assert isinstance(started, Started)
    assert (started.job_id, started.nodes, type(started.first)) == ("acme/gang", ("node-1",), Admitted)

    ending = asyncio.create_task(acme.submit({**REQUEST, "job_id": "one"}, wait="finished"))
    while not any(job.job_id == "acme/one" for job in await acme.jobs()):
        await asyncio.sleep(0.02)
    await fleet.runs("acme/one")
    assert {job.job_id: job.stage for job in await acme.jobs()} == {
        "acme/gang": JobStage.RUNNING,
        "acme/one": JobStage.RUNNING,
    }
    await fleet.ends("acme/one", RunCause.USER_ERROR, 3, "said no")
    finished = await ending
    assert isinstance(finished, Finished)
    assert (finished.is_success, finished.exit_code, finished.detail) == (False, 3, "said no")
    assert (await acme.wait("one")).fact_seq == finished.fact_seq
    seen = [type(entry.event).__name__ async for entry in acme.watch("one")]
    assert seen == ["JobAdmitted", "RunPlaced", "RunStarted", "RunFinished", "RunReleased", "JobFailed"]


async def test_a_waiting_job_is_cancelled_and_a_missing_one_is_refused(acme: Client, admission: Admission) -> None:
    """A refusal is an answer; only what nobody ever heard of is an error."""
    await admission.start()
    await acme.submit({**REQUEST, "job_id": "one"})
    cancelled = await acme.cancel("one", "changed my mind")
    assert isinstance(cancelled, Cancelled)
    assert cancelled.fact.reason == "changed my mind"
    refused = await acme.cancel("never")
    assert isinstance(refused, Rejected)
    assert refused.code is Refusal.JOB_NOT_FOUND
    with pytest.raises(JobNotFound, match="acme/never"):
        await acme.wait("never", timeout_s=5)
    with pytest.raises(JobNotFound):
        async for _ in acme.watch("never"):
            pass
    assert [job.stage for job in await acme.jobs()] == [JobStage.CANCELLED]


async def test_programs_without_asyncio_have_the_same(bus: Bus, admission: Admission) -> None:
    """From any thread, and each call waits."""
    await admission.start()

    def program() -> list[str]:
        with SyncClient.connect(bus.url, tenant="acme") as pool:
            answer = pool.submit({**REQUEST, "job_id": "one"}, id="order-1")
            assert isinstance(answer, Admitted)
            assert isinstance(pool.cancel("one"), Cancelled)
            assert [job.stage for job in pool.jobs()] == [JobStage.CANCELLED]
            assert isinstance(pool.wait("one"), Finished)
            return [type(entry.event).__name__ for entry in pool.watch("one")]

    assert await asyncio.to_thread(program) == ["JobAdmitted", "JobCancelled"]


async def test_errors_say_what_was_expected_what_was_found_and_what_to_do(bus: Bus, server: EmbeddedServer) -> None:
    """Each of them has a next step."""
    with pytest.raises(BusUnreachable) as nobody:
        await Client.connect("nats://127.0.0.1:1", tenant="acme", timeout_s=0.3)
    assert "apportion up" in nobody.value.next_step
    assert "ConnectionRefused" in nobody.value.found, "what kept us out, rather than that we gave up"
    with pytest.raises(RequestInvalid, match="Acme Corp"):
        await Client.connect(bus.url, tenant="Acme Corp")
    async with await Client.connect(bus.url, tenant="acme", pool="other") as client:
        with pytest.raises(PoolNotFound):
            await client.submit(REQUEST, timeout_s=0.3)
        with pytest.raises(PoolNotFound):
            await client.jobs()
    async with await Client.connect(bus.url, tenant="acme") as client:
        with pytest.raises(RequestInvalid, match="JSON"):
            await client.submit({"labels": {1, 2}})
        with pytest.raises(RequestInvalid, match="64 KiB"):
            await client.submit(b"x" * (17 * 1024 * 1024))
        await server.stop()
        with pytest.raises(OutcomeUnknown, match="order-9") as unknown:
            await client.submit(REQUEST, id="order-9", timeout_s=0.5)
        assert unknown.value.id == "order-9"


def test_a_client_that_was_closed_says_so() -> None:
    """And closing one that never connected leaves no thread."""
    with pytest.raises(BusUnreachable):
        SyncClient.connect("nats://127.0.0.1:1", tenant="acme", timeout_s=0.2)
