"""The reactor on a real bus: one bad message ends nothing, a broken core ends everything."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry, Stream, Undecodable
from apportion.contracts.ids import PLACER, PoolId
from apportion.contracts.testing import a_job_request, a_placement
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.reactor import InvariantBroken, Reactor, SnapshotFile, _collector_off
from apportion.runtime.stream import Bus, RawMessage

pytestmark = pytest.mark.integration

POOL = PoolId("main")


class Seen(msgspec.Struct):
    """How far the core has read, and what it was told."""

    facts: int = 0
    wishes: int = 0
    entries: list[str] = []


class Reader:
    """A core that decides nothing and remembers what it read; with ``breaks_on`` it fails there."""

    POLICY = "reader@1#000000000000"

    def __init__(self, breaks_on: str = "") -> None:
        self.breaks_on = breaks_on

    def initial(self) -> Seen:
        return Seen()

    def evolve(self, state: Seen, entry: Entry) -> Seen:
        name = type(entry.event).__name__
        if name == self.breaks_on:
            raise KeyError("a device that nobody registered")
        state.entries.append(f"{entry.stream} {entry.seq} {name}")
        if entry.stream is Stream.FACTS:
            state.facts = entry.seq
        else:
            state.wishes = entry.seq
        return state

    def decide(self, state: Seen, now: int) -> Sequence[ev.Fact]:
        del state, now
        if self.breaks_on == "decide":
            raise ZeroDivisionError("no devices")
        return ()

    def wake_at(self, state: Seen, now: int) -> int | None:
        return None

    def snapshot(self, state: Seen) -> bytes:
        return msgspec.msgpack.encode(state)

    def restore(self, data: bytes) -> Seen:
        return msgspec.msgpack.decode(data, type=Seen)

    def position(self, state: Seen) -> tuple[int, int]:
        return state.facts, state.wishes


class Watch:
    """A witness that notes what it saw, and is settled when the test says so."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.settled = True
        self.news = asyncio.Event()

    def saw(self, raw: RawMessage, entry: Entry) -> None:
        assert raw.seq == entry.seq
        self.entries.append(entry)
        self.news.set()

    def is_settled(self) -> bool:
        return self.settled

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.entries) < count:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    async with EmbeddedServer(tmp_path / "data", port=0) as server:
        connected = await Bus.connect(server.url, pool=POOL, name="test")
        await connected.provision()
        yield connected
        await connected.close()


async def wish(bus: Bus, name: str) -> None:
    await bus.publish_wish(
        codec.encode_wish(POOL, a_job_request(job_id=name), tenant="acme", event_id=name, source="/t")
    )


async def test_a_message_on_which_the_codec_fails_is_an_entry_and_reading_goes_on(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the same message would end the service after each of its restarts."""
    placed = codec.encode_fact(POOL, PLACER, a_placement(), event_id="p-1")
    await bus.jetstream.publish(placed.subject, placed.body, headers={**placed.headers, "ce-decidedat": "noon"})
    await wish(bus, "one")
    await wish(bus, "two")
    real = codec.decode_wish

    def decode(subject: str, headers: codec.Headers | None, body: bytes, *, seq: int, recorded_at: int) -> Entry:
        if seq == 1:
            raise RuntimeError("a fault of the codec")
        return real(subject, headers, body, seq=seq, recorded_at=recorded_at)

    monkeypatch.setattr(codec, "decode_wish", decode)
    watch, stop = Watch(), asyncio.Event()
    reactor = Reactor(core=Reader(), author=PLACER, bus=bus, reads_wishes=True, witness=watch)
    running = asyncio.create_task(reactor.run(stop))
    await watch.until(4)
    stop.set()
    await running
    assert sorted(reactor.state.entries) == [
        "facts 1 Undecodable",
        "facts 2 LeaseClaimed",
        "wishes 1 Undecodable",
        "wishes 2 JobRequested",
    ]
    assert reactor.undecoded == 2
    refused = next(entry for entry in watch.entries if entry.stream is Stream.WISHES and entry.seq == 1)
    assert isinstance(refused.event, Undecodable)
    assert (refused.tenant, refused.subject_type, refused.event.found) == ("acme", "JobRequested", "RuntimeError")


@pytest.mark.parametrize(
    ("breaks_on", "doing"),
    [("JobRequested", "folding wishes 1 on apportion.v1.main.wish.acme.JobRequested"), ("decide", "deciding after")],
)
async def test_a_core_that_fails_stops_the_service(bus: Bus, breaks_on: str, doing: str) -> None:
    """Going on would decide from a state that isn't what the streams say."""
    await wish(bus, "one")
    reactor = Reactor(core=Reader(breaks_on), author=PLACER, bus=bus, reads_wishes=True)
    with pytest.raises(InvariantBroken) as broken:
        await asyncio.wait_for(reactor.run(asyncio.Event()), 30)
    assert broken.value.doing.startswith(doing)
    assert broken.value.__cause__ is not None


async def test_no_snapshot_forgets_what_the_witness_still_has_to_do(bus: Bus, tmp_path: Path) -> None:
    """A process that ends with work undone reads the same entries again, and does it then."""
    await wish(bus, "one")
    path = tmp_path / "snapshot"
    for settled in (False, True):
        watch, stop = Watch(), asyncio.Event()
        watch.settled = settled
        reactor = Reactor(
            core=Reader(), author=PLACER, bus=bus, reads_wishes=True, witness=watch, snapshots=SnapshotFile(path)
        )
        running = asyncio.create_task(reactor.run(stop))
        await asyncio.wait_for(reactor.ready.wait(), 30)
        stop.set()
        await running
        assert any(entry.stream is Stream.WISHES for entry in watch.entries)
        assert path.exists() is settled


def test_the_collector_rests_while_a_state_is_built_and_no_longer() -> None:
    """Half of a restart was spent on looking for garbage that there can't be."""
    assert gc.isenabled()
    with _collector_off():
        assert not gc.isenabled()
    assert gc.isenabled()
