"""The monitor as a process on a real bus: exactly once under kill -9, and what it answers."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from apportion.contracts import codec, subjects
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import (
    ADMISSION,
    MONITOR,
    OPERATOR,
    PLACER,
    Author,
    JobId,
    NodeId,
    PoolId,
    TenantId,
    agent_author,
)
from apportion.contracts.testing import a_job, a_job_request, a_node, a_placement
from apportion.monitor import attest
from apportion.monitor.checkpoints import side_file
from apportion.monitor.log import log_path, messages_of, verify
from apportion.monitor.signing import key_path, public_key_of, public_key_path
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus, RawMessage

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

POOL = PoolId("main")
NODE = NodeId("node-1")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A bus of this test's own."""
    async with EmbeddedServer(tmp_path / "bus-data", port=0) as running:
        yield running


class Monitor:
    """The monitor's process, as an operator would run it."""

    def __init__(self, url: str, data_dir: Path, *flags: str) -> None:
        self.data_dir = data_dir
        self._arguments = ["--bus-url", url, "--data-dir", str(data_dir), *flags]
        self.process: asyncio.subprocess.Process | None = None
        self.stderr = data_dir.parent / "monitor.err"

    async def start(self) -> None:
        with self.stderr.open("ab") as err:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "apportion.monitor", *self._arguments, stderr=err, stdout=err
            )

    async def end(self, sig: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(sig)
        return await self.process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            await self.end(signal.SIGKILL)


async def a_bus(server: EmbeddedServer) -> Bus:
    bus = await Bus.connect(server.url, pool=POOL, name="test")
    await bus.provision()
    return bus


async def state(bus: Bus, event: ev.Fact, author: Author, event_id: str) -> None:
    """State a fact the way a service does, without a lease: nobody else writes here."""
    message = codec.encode_fact(POOL, author, event, event_id=event_id)
    await bus.jetstream.publish(message.subject, message.body, headers=message.headers)


async def wish(bus: Bus, event: ev.Wish, event_id: str, *, tenant: str = "acme") -> int:
    return await bus.publish_wish(codec.encode_wish(POOL, event, tenant=tenant, event_id=event_id, source="/test"))


async def ask(bus: Bus, name: str, wait_s: float = 30, /, **question: Any) -> dict[str, Any]:
    reply = await bus.client.request(subjects.query(POOL, name), msgspec.json.encode(question), timeout=wait_s)
    answer: dict[str, Any] = msgspec.json.decode(reply.data)
    return answer


def a_record(query_id: str) -> ev.AuditQueryRun:
    return ev.AuditQueryRun(
        query_id=query_id, actor="", statement="", statement_sha256="", elapsed_ms=0, age_ms=0, log_ordinal=0
    )


async def until(bus: Bus, name: str, is_met: Callable[[dict[str, Any]], bool], **question: Any) -> dict[str, Any]:
    """The first answer that is as it should be."""
    last: dict[str, Any] = {}
    async with asyncio.timeout(60):
        while True:
            try:
                last = await ask(bus, name, 5, **question)
            except Exception:  # noqa: BLE001 - the monitor is starting, or was just killed
                await asyncio.sleep(0.1)
                continue
            if is_met(last):
                return last
            await asyncio.sleep(0.05)


def caught_up(status: dict[str, Any]) -> bool:
    return all(one["behind"] == 0 for one in status["streams"].values())


async def test_every_message_is_in_the_log_exactly_once_whatever_is_killed(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """The writer dies without warning, again and again, under load; so does the bus. Log and bus agree to the byte."""
    chance = random.Random(7)
    bus = await a_bus(server)
    stop = asyncio.Event()
    acknowledged = dict.fromkeys(Stream, 0)

    async def wishes() -> None:
        while not stop.is_set():
            number = acknowledged[Stream.WISHES]
            body = a_job_request(job_id=f"j{number}")
            await wish(bus, body, f"w{number}")
            acknowledged[Stream.WISHES] += 1
            await asyncio.sleep(0.005)  # leave the other processes their share of the machine

    async def facts() -> None:
        while not stop.is_set():
            number = acknowledged[Stream.FACTS]
            message = codec.encode_fact(POOL, PLACER, a_placement(f"acme/j{number}"), event_id=f"f{number}")
            if await bus._ask(message.subject, message.body, message.headers) is not None:
                acknowledged[Stream.FACTS] += 1
            await asyncio.sleep(0.002)

    monitor = Monitor(server.url, tmp_path / "monitor", "--log-batch-ms", "20")
    writing = [asyncio.create_task(wishes()), asyncio.create_task(facts())]
    kills = 0
    try:
        async with monitor:
            for round_ in range(4):
                # Into the middle of its work, not of its start: the log has to have grown since the last kill.
                before = acknowledged[Stream.FACTS]
                await until(
                    bus,
                    "status",
                    lambda s, b=before: s["streams"]["facts"]["log_seq"] > b + 5,  # type: ignore[misc]  # a default binds the loop's value
                )
                await asyncio.sleep(chance.random() * 0.3)
                if round_ == 2:
                    assert server.pid is not None
                    os.kill(server.pid, signal.SIGKILL)
                    continue
                await monitor.end(signal.SIGKILL)
                kills += 1
                await monitor.start()
            stop.set()
            await asyncio.gather(*writing)
            await until(bus, "status", caught_up)
            assert await monitor.end() == 0, monitor.stderr.read_text()
    finally:
        stop.set()
        for task in writing:
            task.cancel()
    assert kills == 3
    path = log_path(monitor.data_dir, POOL)
    assert verify(path).ok
    for stream in Stream:
        on_bus = await bus.position(stream)
        stored = list(messages_of(path, stream))
        assert [m.seq for m in stored] == list(range(1, on_bus.last_seq + 1))
        assert len(stored) >= acknowledged[stream]
        reader = await bus.reader(stream, after=0)
        read: list[RawMessage] = []
        async with asyncio.timeout(60):
            while len(read) < len(stored):
                await reader.ready.wait()
                read += reader.take()
        assert [(m.seq, m.recorded_at, m.subject, m.headers, m.body) for m in read] == [
            (m.seq, m.recorded_at, m.subject, m.headers, m.body) for m in stored
        ]
    await bus.close()


async def test_it_answers_what_people_ask(server: EmbeddedServer, tmp_path: Path) -> None:
    """SQL, jobs, a job's story, nodes and how the log stands, while it runs; and stops in order when told to."""
    bus = await a_bus(server)
    await wish(bus, a_job_request(), "w1")
    await wish(bus, a_job_request(job_id="later"), "w2")
    await bus.publish_wish(
        codec.Message(subject=subjects.wish(POOL, TenantId("acme"), ev.JobRequested), headers={}, body=b"\xffnot json")
    )
    await state(bus, a_node(), agent_author(NODE), "f1")
    await state(bus, a_job(), ADMISSION, "f2")
    await state(bus, a_job("later", answers=2), ADMISSION, "f3")
    await state(bus, a_placement(), PLACER, "f4")
    async with Monitor(server.url, tmp_path / "monitor") as monitor:
        status = await until(bus, "status", lambda s: caught_up(s) and s["counts"].get("LeaseClaimed.v1") == 1)
        assert status["log"]["undecodable"] == 1
        assert status["counts"]["JobAdmitted.v1"] == 2

        jobs = await ask(bus, "jobs", tenant="acme")
        assert [(job["job_id"], job["state"]) for job in jobs["jobs"]] == [
            ("acme/train-7", "running"),
            ("acme/later", "queued"),
        ]
        assert (await ask(bus, "jobs", tenant="globex"))["jobs"] == []

        story = await ask(bus, "job", job_id="acme/train-7")
        assert [event["kind"] for event in story["events"]] == ["JobRequested", "JobAdmitted", "RunPlaced"]
        assert story["events"][2]["body"]["node_id"] == "node-1"
        assert story["job"]["runs"][0]["run_id"] == "acme/train-7/0/1"
        assert (await ask(bus, "job", job_id="acme/nobody"))["error"]["code"] == "JobNotFound"

        nodes = await ask(bus, "nodes")
        assert [(n["node_id"], n["state"], n["devices"][0]["used_compute_milli"]) for n in nodes["nodes"]] == [
            ("node-1", "ready", 250)
        ]

        answer = await ask(bus, "sql", statement="SELECT job_id FROM v_pending_now")
        assert answer["rows"] == [["acme/later"]]
        assert answer["as_of"]["ordinal"] >= 8
        assert answer["as_of"]["age_ms"] >= 0
        refused = await ask(bus, "sql", statement="WITH x AS (DELETE FROM events RETURNING *) SELECT * FROM x")
        assert refused["error"]["code"] == "StatementRefused"
        assert (await ask(bus, "sql", statement="SELECT count(*) FROM v_double_slice"))["rows"] == [[0]]

        # Who asked is stored before the answer is given, refusals too.
        odd = await ask(bus, "sql", statement="SELECT 'who'", actor="user:eve")
        newest = await bus.jetstream.get_last_msg(
            bus.stream_name(Stream.FACTS), subjects.fact(POOL, MONITOR, a_record(odd["query_id"]))
        )
        assert json.loads(newest.data or b"")["query_id"] == odd["query_id"]
        recorded = await until(
            bus,
            "sql",
            lambda a: len(a["rows"]) == 2,
            statement="SELECT actor, rows, refused IS NULL FROM v_queries WHERE actor = 'user:eve' OR refused <> ''",
        )
        assert sorted(recorded["rows"]) == [["", 0, False], ["user:eve", 1, True]]

        # What ends while it runs moves from the fold to the log, and a new row is in the next answer.
        await state(bus, ev.JobCancelled(job_id=JobId("acme/later"), actor="alice", answers=4), ADMISSION, "f5")
        ended = await until(bus, "jobs", lambda a: bool(a["jobs"]), state="ended")
        assert ended["jobs"][0]["outcome"] == "JobCancelled"
        fresh = await until(
            bus,
            "sql",
            lambda a: a["rows"] == [["cancelled"]],
            statement="SELECT outcome FROM v_job WHERE ended > '2000-01-01'",
        )
        assert not fresh["truncated"]

        for broken in (
            b"{",
            b"[]",
            b'{"statement": 1}',
            b'{"statement": "SELECT 1", "limit": 0}',
            b'{"x": 1}',
            b"\xff",
        ):
            reply = await bus.client.request(subjects.query(POOL, "sql"), broken, timeout=60)
            assert msgspec.json.decode(reply.data)["error"]["code"] == "QuestionInvalid"
        assert await monitor.end() == 0, monitor.stderr.read_text()
    path = log_path(monitor.data_dir, POOL)
    key = public_key_of(str(public_key_path(key_path(monitor.data_dir))))
    verdict = attest.verify(path, public_key=key, anchors=attest.anchors_in(side_file(path)))
    assert (verdict.ok, verdict.signed_ordinal) == (True, verdict.rows), (
        "a monitor that was told to stop signs all of it"
    )
    await bus.close()


def got(port: int, path: str) -> tuple[int, str, bytes]:
    """Status, content type and body, as any HTTP client has them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read()
    finally:
        connection.close()


async def test_it_serves_the_contract_on_the_bus_and_over_http(server: EmbeddedServer, tmp_path: Path) -> None:
    """Whoever publishes finds what is valid from the pool itself, and it is what the documents say, to the byte."""
    docs = Path(__file__).parents[3] / "docs"
    bus = await a_bus(server)
    async with Monitor(server.url, tmp_path / "monitor") as monitor:
        await until(bus, "status", caught_up)
        listed = await ask(bus, "schemas")
        assert set(listed["schemas"]) == {path.stem for path in (docs / "schemas").glob("*.json")}
        on_file = json.loads((docs / "schemas" / "JobRequested.v1.json").read_bytes())
        assert await ask(bus, "schemas", name="JobRequested.v1") == on_file
        assert (await ask(bus, "schemas", name="JobRequested"))["error"]["code"] == "SchemaNotFound"
        assert (await ask(bus, "schemas", title="x"))["error"]["code"] == "QuestionInvalid"
        assert await ask(bus, "asyncapi") == json.loads((docs / "asyncapi.json").read_bytes())

        port = json.loads((monitor.data_dir / "run" / "monitor.json").read_bytes())["health_port"]
        status, kind, body = await asyncio.to_thread(got, port, "/schemas")
        assert (status, kind, json.loads(body)) == (200, "application/json", listed)
        for path in listed["schemas"].values():
            assert await asyncio.to_thread(got, port, path) == (
                200,
                "application/schema+json",
                (docs / path[1:]).read_bytes(),
            )
        assert await asyncio.to_thread(got, port, listed["asyncapi"]) == (
            200,
            "application/json",
            (docs / "asyncapi.json").read_bytes(),
        )
        assert (await asyncio.to_thread(got, port, "/schemas/../../etc/passwd"))[0] == 404
        assert await monitor.end() == 0, monitor.stderr.read_text()
    await bus.close()


async def test_a_silent_node_is_fenced_and_a_wish_about_it_is_answered(server: EmbeddedServer, tmp_path: Path) -> None:
    """With heartbeats on plain NATS: as long as they come nothing happens, and then it does."""
    bus = await a_bus(server)
    await state(bus, a_node(), agent_author(NODE), "f1")
    await state(bus, a_job(), ADMISSION, "f2")
    await state(bus, a_placement(), PLACER, "f3")
    beating = True

    async def beat() -> None:
        while beating:
            bus.send_soon(subjects.sample(POOL, NODE, "heartbeat"), b'{"session":"node-1-s1","epoch":0,"load":0.1}')
            await asyncio.sleep(0.05)

    heart = asyncio.create_task(beat())
    async with Monitor(server.url, tmp_path / "monitor", "--suspect-ms", "1000", "--lease-ms", "2500") as monitor:
        await until(bus, "status", lambda s: caught_up(s) and s["counts"].get("LeaseClaimed.v1") == 1)
        await wish(bus, ev.NodeCordonRequested(node_id="node-1", reason="fan"), "w1", tenant=OPERATOR)
        await until(bus, "nodes", lambda a: a["nodes"][0]["state"] == "cordoned")
        beating = False
        await heart
        nodes = await until(bus, "nodes", lambda a: a["nodes"][0]["state"] == "fenced")
        assert (nodes["nodes"][0]["epoch"], nodes["nodes"][0]["runs"]) == (1, [])
        story = await until(bus, "job", lambda a: len(a["events"]) == 3, job_id="acme/train-7")
        assert story["events"][-1]["kind"] == "NodeFenced"
        await state(bus, a_node(epoch=1, session="node-1-s2"), agent_author(NODE), "f4")
        status = await until(bus, "status", lambda s: "NodeRecovered.v1" in s["counts"])
        assert status["counts"]["NodeCordoned.v1"] == 1
        assert await monitor.end() == 0, monitor.stderr.read_text()
    await bus.close()


async def test_a_bus_that_came_back_shorter_stops_the_monitor(server: EmbeddedServer, tmp_path: Path) -> None:
    """Exit code 9, the streams and sequences named, and the log untouched."""
    bus = await a_bus(server)
    for number in range(3):
        await wish(bus, a_job_request(job_id=f"j{number}"), f"w{number}")
    monitor = Monitor(server.url, tmp_path / "monitor")
    async with monitor:
        await until(bus, "status", caught_up)
        assert await monitor.end() == 0
    head = verify(log_path(monitor.data_dir, POOL)).head_hash
    await bus.close()
    async with EmbeddedServer(tmp_path / "other-bus", port=0) as other:
        empty = await a_bus(other)
        await wish(empty, a_job_request(job_id="another"), "x")
        again = Monitor(other.url, tmp_path / "monitor")
        async with again:
            assert again.process is not None
            async with asyncio.timeout(60):
                assert await again.process.wait() == 9
        assert "the bus is shorter than the log" in again.stderr.read_text()
        await empty.close()
    assert verify(log_path(monitor.data_dir, POOL)).head_hash == head
