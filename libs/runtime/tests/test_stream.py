"""The bus module against a real nats-server: fences hold, batches are whole, readers lose nothing."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PLACER, PoolId
from apportion.contracts.testing import a_job_request, a_placement
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import (
    Bus,
    BusUnreachable,
    Fenced,
    Lease,
    PublishRefused,
    RawMessage,
    StreamReader,
    _Client,
)

pytestmark = pytest.mark.integration

POOL = PoolId("main")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(tmp_path / "data", port=0) as running:
        yield running


@pytest.fixture
async def bus(server: EmbeddedServer) -> AsyncIterator[Bus]:
    connected = await Bus.connect(server.url, pool=POOL, name="test")
    await connected.provision()
    yield connected
    await connected.close()


def a_claim(session: str) -> Message:
    claim = ev.LeaseClaimed(author=PLACER, session=session, core="test@1")
    return codec.encode_fact(POOL, PLACER, claim, event_id=f"claim-{session}")


def placements(label: str, count: int) -> list[Message]:
    return [
        codec.encode_fact(POOL, PLACER, a_placement(job=f"acme/{label}-{i}"), event_id=f"{label}.{i}")
        for i in range(count)
    ]


async def read(reader: StreamReader, count: int) -> list[RawMessage]:
    got: list[RawMessage] = []
    async with asyncio.timeout(60):
        async for batch in reader.batches():
            got += batch
            if len(got) >= count:
                break
    return got


async def claimed(bus: Bus, session: str) -> Lease:
    return await bus.claim(PLACER, a_claim(session))


async def test_a_batch_is_stored_whole_and_in_order(bus: Bus) -> None:
    """A gang's placements appear together; one event alone needs no batch and behaves the same."""
    lease = await claimed(bus, "s1")
    for count in (1, 2, 250, 1000):
        last = await bus.publish_fenced(lease, placements(f"n{count}", count))
    assert last == 1 + 1 + 2 + 250 + 1000
    reader = await bus.reader(Stream.FACTS, after=0)
    got = await read(reader, last)
    assert [m.seq for m in got] == list(range(1, last + 1))
    assert [m.headers["ce-id"] for m in got[4:254] if m.headers] == [f"n250.{i}" for i in range(250)]


async def test_the_same_batch_again_is_stored_once(bus: Bus) -> None:
    """A try that timed out may have been stored: repeating it must be harmless, alone and as a batch."""
    lease = await claimed(bus, "s1")
    for count in (1, 3):
        messages = placements(f"again{count}", count)
        first = await bus.publish_fenced(lease, messages)
        assert await bus.publish_fenced(lease, messages) == first
    assert (await bus.position(Stream.FACTS)).last_seq == 1 + 1 + 3


async def test_a_batch_that_lost_its_first_part_on_the_way_is_tried_again(bus: Bus) -> None:
    """A server's restart in the middle of a batch ended the service that had published it."""
    lease = await claimed(bus, "s1")
    messages = placements("torn", 3)
    last = messages[-1]
    batch = {"Nats-Batch-Id": "torn", "Nats-Batch-Sequence": "3", "Nats-Batch-Commit": "1"}
    assert await bus._ask(last.subject, last.body, {**last.headers, **batch}) is None
    assert await bus.publish_fenced(lease, messages) == 1 + 3


async def test_an_older_session_is_refused_and_leaves_nothing(bus: Bus) -> None:
    """A paused author that wakes up can't write any more, not even the first half of a batch."""
    old = await claimed(bus, "s1")
    new = await claimed(bus, "s2")
    for count in (1, 3):
        with pytest.raises(Fenced, match="placer lost its lease"):
            await bus.publish_fenced(old, placements(f"old{count}", count))
    await bus.publish_fenced(new, placements("new", 2))
    assert (await bus.position(Stream.FACTS)).last_seq == 2 + 2


async def test_a_claim_that_was_stored_unseen_is_recognised(bus: Bus) -> None:
    """Claiming twice with one session is one claim."""
    first = await claimed(bus, "s1")
    assert await claimed(bus, "s1") == first


async def test_many_sessions_that_claim_at_once_leave_one_writer(bus: Bus) -> None:
    """Whoever claimed last may write, and nobody else."""
    leases = await asyncio.gather(*(claimed(bus, f"s{i}") for i in range(6)))
    newest = max(leases, key=lambda lease: lease.claim)
    written = 0
    for number, lease in enumerate(leases):
        try:
            await bus.publish_fenced(lease, placements(f"w{number}", 2))
        except Fenced:
            assert lease is not newest
        else:
            written += 1
            assert lease is newest
    assert written == 1


async def test_two_tenants_with_one_source_and_id_are_both_stored(bus: Bus) -> None:
    """The bus tells repeats by one header alone: no wish may vanish because another tenant chose the same words."""
    one, again, other = (
        codec.encode_wish(POOL, a_job_request(), tenant=tenant, event_id="order-17", source="/shop")
        for tenant in ("acme", "acme", "globex")
    )
    assert [await bus.publish_wish(message) for message in (one, again, other)] == [1, 1, 2]


async def test_a_reader_follows_over_a_killed_server(server: EmbeddedServer, bus: Bus) -> None:
    """What was acknowledged arrives once and in order, whatever the server went through."""
    lease = await claimed(bus, "s1")
    reader = await bus.reader(Stream.FACTS, after=0)
    last = 0
    for round_number in range(4):
        last = await bus.publish_fenced(lease, placements(f"r{round_number}", 20))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
    last = await bus.publish_fenced(lease, placements("end", 1))
    got = await read(reader, last)
    assert [m.seq for m in got] == list(range(1, last + 1))


async def test_readers_of_one_stream_share_its_delivery_and_each_gets_all(bus: Bus) -> None:
    """A process that folds a stream and logs it pays for one delivery; who comes later and wants more gets it."""
    lease = await claimed(bus, "s1")
    first = await bus.reader(Stream.FACTS, after=0)
    last = await bus.publish_fenced(lease, placements("early", 300))
    got = await read(first, last)
    second = await bus.reader(Stream.FACTS, after=40)
    third = await bus.reader(Stream.FACTS, after=last)
    writing = asyncio.gather(*(bus.publish_fenced(lease, placements(f"late{number}", 100)) for number in range(5)))
    got += await read(first, 500)
    assert [m.seq for m in got] == list(range(1, last + 501))
    assert [m.seq for m in await read(second, last + 460)] == list(range(41, last + 501))
    assert [m.seq for m in await read(third, 500)] == list(range(last + 1, last + 501))
    await writing
    infos = await bus.jetstream.consumers_info(bus.stream_name(Stream.FACTS))
    assert len(infos) == 1


async def test_filters_narrow_what_is_read_but_not_its_order(bus: Bus) -> None:
    """An agent's reader skips other nodes' facts and misses none of its own."""
    lease = await claimed(bus, "s1")
    reader = await bus.reader(Stream.FACTS, after=0, filters=(f"apportion.v1.{POOL}.fact.placer.run.node-2.>",))
    mine = 0
    for number in range(30):
        node = f"node-{1 + number % 2}"
        event = a_placement(job=f"acme/f-{number}", node=node)
        await bus.publish_fenced(lease, [codec.encode_fact(POOL, PLACER, event, event_id=f"f{number}")])
        mine += node == "node-2"
    got = await read(reader, mine)
    assert len(got) == mine
    assert all(".run.node-2." in m.subject for m in got)


HEADERS = (
    b"ce-id: a\r\nce-type:b\r\n\r\n",
    b"two words: x\r\nfine: y:z\r\nno colon\r\n: empty\r\nempty:\r\n",
    b"\xff: x\r\nk: \xff\xfe\r\n k : spaced \r\ntab\tname: x\r\n",
    b"same: 1\r\nsame: 2\r\nuni: \xc3\xa9\r\n",
    b"",
)


@pytest.mark.parametrize("raw", HEADERS)
def test_headers_read_as_the_library_reads_them(raw: bytes) -> None:
    """Ours is only faster; what it finds is the same."""
    assert _Client._parse_header_lines(raw) == Client._parse_header_lines(raw)


async def test_the_library_still_asks_us_for_headers(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The day it doesn't, folding a fact costs twice as much, and somebody should know."""
    seen: list[bytes] = []
    real = _Client._parse_header_lines

    def parse(raw: bytes) -> dict[str, str]:
        seen.append(raw)
        return real(raw)

    monkeypatch.setattr(_Client, "_parse_header_lines", staticmethod(parse))
    await claimed(bus, "s1")
    reader = await bus.reader(Stream.FACTS, after=0)
    await read(reader, 1)
    assert seen


async def test_a_slow_reader_slows_the_server_and_loses_nothing(bus: Bus) -> None:
    """Flow control: what isn't taken is not sent, and comes once it is."""
    lease = await claimed(bus, "s1")
    for number in range(8):
        await bus.publish_fenced(lease, placements(f"slow{number}", 1000))
    reader = await bus.reader(Stream.FACTS, after=0)
    await asyncio.sleep(0.5)
    assert reader.waiting < 8001
    got = await read(reader, 8001)
    assert [m.seq for m in got] == list(range(1, 8002))


async def test_a_wish_is_acknowledged_once_for_two_tries(bus: Bus) -> None:
    """The publisher may repeat what it isn't sure of."""
    message = codec.encode_wish(POOL, a_job_request(), tenant="acme", event_id="w1", source="/test")
    assert await bus.publish_wish(message) == await bus.publish_wish(message) == 1


async def test_ten_megabytes_reach_the_stream(bus: Bus) -> None:
    """What is far too large is refused by a fact, not by a cut connection, so it has to get that far."""
    body = b"x" * 10_000_000
    seq = await bus.publish_wish(
        Message(subject="apportion.v1.main.wish.acme.JobRequested", headers={"ce-id": "big"}, body=body)
    )
    reader = await bus.reader(Stream.WISHES, after=0)
    got = await read(reader, 1)
    assert (got[0].seq, len(got[0].body)) == (seq, 10_000_000)


async def test_a_subject_that_no_stream_holds_is_an_error_not_a_wait(bus: Bus) -> None:
    """A publish that nobody stores must not look like success."""
    with pytest.raises((PublishRefused, BusUnreachable)):
        await asyncio.wait_for(
            bus.publish_wish(Message(subject="apportion.v1.main.elsewhere", headers={}, body=b"{}")), 15
        )


async def test_nobody_there_is_said_with_the_address_and_the_next_step() -> None:
    """The operator's next step is in the message."""
    with pytest.raises(BusUnreachable, match=r"127\.0\.0\.1:1 .*ConnectionRefused.*apportion up"):
        await Bus.connect("nats://127.0.0.1:1", pool=POOL, name="test", wait_s=0.5)


async def test_a_question_that_breaks_its_handler_is_answered(bus: Bus) -> None:
    """One bad question doesn't end the service, and isn't left without an answer."""

    async def handler(body: bytes) -> bytes:
        if body == b"bad":
            raise ValueError("no such thing")
        return b"fine"

    await bus.serve("apportion.v1.main.query.test", handler)
    bad = await bus.client.request("apportion.v1.main.query.test", b"bad", timeout=60)
    good = await bus.client.request("apportion.v1.main.query.test", b"good", timeout=60)
    assert b"no such thing" in bad.data
    assert good.data == b"fine"


async def test_a_reader_closes_although_its_cancellation_is_swallowed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12 ``wait_for`` drops a cancellation that comes with its result; a command then never ended."""
    real, is_waiting = bus.jetstream.add_consumer, asyncio.Event()

    async def answered_when_cancelled(*args: Any, **kwargs: Any) -> Any:
        info = await real(*args, **kwargs)
        try:
            is_waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return info

    monkeypatch.setattr(bus.jetstream, "add_consumer", answered_when_cancelled)
    reader = await bus.reader(Stream.FACTS, after=0)
    await asyncio.wait_for(is_waiting.wait(), 10)
    closed, _ = await asyncio.wait({asyncio.create_task(reader.close())}, timeout=60)
    assert closed
