"""What admission's shell does beside its core, on a real bus: answers inline, and copies of what can't be read."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
import pytest

from apportion.contracts import codec, subjects
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import OPERATOR, PoolId, TenantId
from apportion.contracts.testing import a_job_request
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.health import probe
from apportion.runtime.letters import BODY_MAX, Box, Fate, Letter, Mark, mark_of
from apportion.runtime.stream import Bus

pytestmark = pytest.mark.integration

POOL = PoolId("main")
ACME = TenantId("acme")
ASK = subjects.ask(POOL, ACME, ev.JobRequested)
WISH = subjects.wish(POOL, ACME, ev.JobRequested)


class Admission:
    """The process, ended whatever happens."""

    def __init__(self, url: str, data_dir: Path) -> None:
        self._argv = ["-m", "apportion.admission", "--bus-url", url, "--data-dir", str(data_dir)]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *self._argv, stderr=asyncio.subprocess.DEVNULL
        )

    async def end(self, signum: signal.Signals) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signum)
        await self.process.wait()


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with EmbeddedServer(tmp_path / "data", port=0) as server:
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
        await running.end(signal.SIGKILL)


def headers(event_id: str, **more: str) -> dict[str, str]:
    like = codec.encode_wish(POOL, a_job_request(), tenant="acme", event_id=event_id, source="/test")
    return {**like.headers, **more}


async def ask(bus: Bus, body: bytes, given: dict[str, str], subject: str = ASK) -> dict[str, Any]:
    """The reply, once anybody serves requests."""
    async with asyncio.timeout(60):
        while True:
            try:
                reply = await bus.client.request(subject, body, headers=given, timeout=60)
            except nats.errors.NoRespondersError:
                await asyncio.sleep(0.05)
                continue
            assert not reply.headers
            answer: dict[str, Any] = json.loads(reply.data)
            return answer


async def letters(bus: Bus) -> list[Letter]:
    """The pool's dead letters as they are now."""
    stream = subjects.dead_letters_stream(POOL)
    last = (await bus.jetstream.stream_info(stream)).state.last_seq
    box = Box()
    for seq in range(1, last + 1):
        stored = await bus.jetstream.get_msg(stream, seq)
        box.fold(seq=seq, at=seq, subject=stored.subject or "", headers=stored.headers or {}, body=stored.data or b"")
    return box.letters()


async def letters_once(bus: Bus, count: int) -> list[Letter]:
    async with asyncio.timeout(60):
        while len(found := await letters(bus)) < count:
            await asyncio.sleep(0.05)
    return found


async def test_a_request_is_stored_and_answered_inline(bus: Bus, admission: Admission) -> None:
    """Who asks needs one subject and one reply; the wish is in the stream like any other."""
    await admission.start()
    body = codec.encode_body(a_job_request(job_id="one"))
    first = await ask(bus, body, headers("e-1"))
    assert (first["answer"], first["type"], first["job_id"]) == ("JobAdmitted", "JobAdmitted.v1", "acme/one")
    assert first["answers"] == first["wish_seq"] == 2
    stored = await bus.jetstream.get_msg(bus.stream_name(Stream.WISHES), 2)
    assert (stored.subject, stored.data) == (WISH, body)
    again = await ask(bus, body, headers("e-1"))
    assert again == first
    refused = await ask(bus, b'{"queue": "main", "gpus": 1}', headers("e-2"))
    assert (refused["answer"], refused["code"], refused["field"]) == ("JobRejected", "FieldUnknown", "gpus")


async def test_wishes_are_counted_by_their_form_and_a_refusal_says_what_would_be_better(
    bus: Bus, admission: Admission, tmp_path: Path
) -> None:
    """A publisher that sends no envelope is served, and an operator sees that there is one before a repeat hurts."""
    await admission.start()
    body = codec.encode_body(a_job_request(job_id="one"))
    assert "note" not in await ask(bus, b'{"queue": "main", "gpus": 1}', headers("e-1"))
    whole = {"specversion": "1.0", "id": "e-2", "source": "/test", "type": "io.apportion.JobRequested.v1"}
    event = json.dumps({**whole, "data": json.loads(body)}).encode()
    announced = await ask(bus, event, {"content-type": "application/cloudevents+json"})
    assert (announced["answer"], announced.get("note", "")) == ("JobAdmitted", "")
    unannounced = await ask(bus, json.dumps({**whole, "id": "e-3", "data": {"queue": "main"}}).encode(), {})
    assert (unannounced["answer"], unannounced["code"]) == ("JobRejected", "FieldMissing")
    assert "application/cloudevents+json" in unannounced["note"]
    alone = await ask(bus, b'{"job_id": "none"}', {}, subjects.ask(POOL, ACME, ev.JobCancelRequested))
    assert (alone["answer"], alone["code"]) == ("WishRejected", "JobNotFound")
    assert "without an envelope" in alone["note"]
    assert await metrics_of(tmp_path / "admission") == {
        "apportion_ingress_binary_total": 2,  # the queue, and the misspelled request
        "apportion_ingress_structured_total": 1,
        "apportion_ingress_bare_total": 2,
    }


async def metrics_of(data_dir: Path) -> dict[str, int]:
    """How wishes came, as a scraper sees it."""
    port = json.loads((data_dir / "run" / "admission.json").read_bytes())["health_port"]
    _, text = await asyncio.to_thread(probe, port, "/metrics")
    return {
        line.partition("{")[0].partition(" ")[0]: int(float(line.rpartition(" ")[2]))
        for line in text.splitlines()
        if line.startswith("apportion_ingress_")
    }


async def test_what_the_bus_would_obey_is_not_passed_on(bus: Bus, admission: Admission) -> None:
    """Admission's own credential publishes: a stranger's header must not steer it."""
    await admission.start()
    given = headers("e-1", **{"Nats-Rollup": "all", "Nats-Expected-Last-Sequence": "77", "X-Other": "1"})
    answer = await ask(bus, codec.encode_body(a_job_request(job_id="one")), given)
    assert answer["answer"] == "JobAdmitted"
    stored = await bus.jetstream.get_msg(bus.stream_name(Stream.WISHES), answer["wish_seq"])
    assert {"Nats-Rollup", "Nats-Expected-Last-Sequence", "X-Other"}.isdisjoint(stored.headers or {})


async def test_two_tenants_with_one_message_id_hear_their_own_answers(bus: Bus, admission: Admission) -> None:
    """The bus tells repeats by their id alone, whoever sent them."""
    await admission.start()
    await ask(bus, codec.encode_body(a_job_request(job_id="one")), headers("e-1"))
    subject = subjects.ask(POOL, TenantId("globex"), ev.JobRequested)
    other = await ask(bus, codec.encode_body(a_job_request(job_id="two")), headers("e-1"), subject)
    assert (other["answer"], other["job_id"], other["tenant"]) == ("JobAdmitted", "globex/two", "globex")


async def test_who_was_told_to_come_again_is_looked_at_anew_within_the_bus_window(
    bus: Bus, admission: Admission
) -> None:
    """The bus would swallow the same id for two minutes; a number of seconds in the answer must be one that holds."""
    await admission.start()
    policy = ev.PolicyUpsertRequested(for_tenant="acme", rate_per_min=60, burst=1, reason="slow")
    await bus.publish_wish(codec.encode_wish(POOL, policy, tenant=OPERATOR, event_id="p-1", source="/test"))
    bodies = {name: msgspec.json.encode(a_job_request(job_id=name)) for name in ("one", "two")}
    first = await ask(bus, bodies["one"], headers("e-1"))
    assert first["answer"] == "JobAdmitted"
    put_off = await ask(bus, bodies["two"], headers("e-2"))
    while put_off["answer"] == "JobRejected":
        assert (put_off["code"], put_off["retry_after_s"]) == ("RateLimited", 1)
        again = await ask(bus, bodies["two"], headers("e-2"))
        assert again["wish_seq"] > put_off["wish_seq"]
        put_off = again
    assert (put_off["answer"], put_off["job_id"]) == ("JobAdmitted", "acme/two")
    # Now that it was answered for good, the same id gets that answer.
    assert (await ask(bus, bodies["two"], {**headers("e-2"), "Nats-Msg-Id": "other"}))["answer"] == "JobDuplicate"


async def test_an_answer_that_takes_too_long_is_pending_and_found_again(bus: Bus, admission: Admission) -> None:
    """Nodes are the monitor's, which isn't there: nobody answers, and the asker hears that its wish is stored."""
    await admission.start()
    wish = ev.NodeCordonRequested(node_id="node-1", reason="smells")
    like = codec.encode_wish(POOL, wish, tenant=OPERATOR, event_id="c-1", source="/test")
    subject = subjects.ask(POOL, OPERATOR, ev.NodeCordonRequested)
    given = {**like.headers, "Apportion-Wait-Ms": "50"}
    assert await ask(bus, like.body, given, subject) == {"pending": True, "wish_seq": 2}
    assert await ask(bus, like.body, given, subject) == {"pending": True, "wish_seq": 2}


async def test_a_request_that_makes_no_sense_says_what_was_expected(bus: Bus, admission: Admission) -> None:
    """And stores nothing."""
    await admission.start()
    answer = await ask(bus, b"{}", headers("e-1", **{"Apportion-Wait-Ms": "soon"}))
    assert answer["error"]["code"] == "FieldInvalid"
    assert "soon" in answer["error"]["message"]
    assert (await ask(bus, b"{}", {}, "apportion.v1.main.ask.acme"))["error"]["code"] == "TypeUnknown"
    assert (await bus.position(Stream.WISHES)).last_seq == 1


async def test_each_unreadable_message_has_one_copy_whatever_dies(bus: Bus, admission: Admission) -> None:
    """Read again after a kill, the same messages are not copied again."""
    typo = b'{"queue": "main", "gpus": 1}'  # was read, and is refused for its field: that is no dead letter
    bodies = [b"", b"not json", b"[" * 40, b"\xff\xfe", b"x" * (BODY_MAX + 10)]
    await bus.jetstream.publish(WISH, typo, headers=headers("typo"))
    for number, body in enumerate(bodies):
        await bus.jetstream.publish(WISH, body, headers=headers(f"bad-{number}"))
    await admission.start()
    first = await letters_once(bus, len(bodies))
    await admission.end(signal.SIGKILL)
    await bus.jetstream.publish(WISH, b"[]", headers=headers("bad-9"))
    await admission.start()
    found = await letters_once(bus, len(bodies) + 1)
    assert len(found) == len(bodies) + 1
    assert [each.origin_seq for each in sorted(first, key=lambda letter: letter.origin_seq)] == [3, 4, 5, 6, 7]
    by_origin = {each.origin_seq: each for each in found}
    assert [by_origin[seq].code for seq in (4, 5, 6, 7)] == ["NotJson", "TooDeep", "NotUtf8", "TooLarge"]
    deep = by_origin[5]
    assert (deep.subject, deep.stream) == (WISH, "APPORTION_MAIN_WISHES")
    assert (deep.body, deep.is_cut, deep.headers["ce-id"]) == (bodies[2], False, "bad-2")
    large = by_origin[7]
    assert (len(large.body), large.size, large.is_cut) == (BODY_MAX, BODY_MAX + 10, True)


async def test_the_second_to_act_on_a_letter_is_refused(bus: Bus, admission: Admission) -> None:
    """Two operators must not both believe that it was theirs."""
    await bus.jetstream.publish(WISH, b"not json", headers=headers("bad"))
    await admission.start()
    (letter,) = await letters_once(bus, 1)
    assert letter.fate is Fate.OPEN
    for number in range(2):
        mark = mark_of(letter, Mark(fate=Fate.DROPPED, actor=f"user:{number}", reason="spam"))
        if number:
            with pytest.raises(nats.js.errors.APIError):
                await bus.jetstream.publish(mark.subject, mark.body, headers=mark.headers)
        else:
            await bus.jetstream.publish(mark.subject, mark.body, headers=mark.headers)
    (dropped,) = await letters(bus)
    assert (dropped.fate, dropped.marks[0].actor, len(dropped.marks)) == (Fate.DROPPED, "user:0", 1)
    assert msgspec.structs.replace(dropped, marks=(), last_seq=1) == letter
