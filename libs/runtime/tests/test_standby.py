"""Two processes' worth of one author on a real bus: who is active, and when that changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from apportion.contracts import events as ev
from apportion.contracts.codec import decode_fact
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PLACER, PoolId
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.reactor import Reactor
from apportion.runtime.settings import from_command_line
from apportion.runtime.standby import AuthorSettings, Vigil
from apportion.runtime.stream import Bus, Fenced

from .test_reactor import Reader, Seen

pytestmark = pytest.mark.integration

POOL = PoolId("main")
RENEW_S = 0.02
MS = 1_000_000


class Hand:
    """A monotonic clock that stands where the test puts it."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(tmp_path / "data", port=0) as running:
        yield running


class Process:
    """What one process of an author consists of, as far as this is about."""

    def __init__(self, bus: Bus, *, is_standby: bool) -> None:
        self.bus = bus
        self.clock = Hand()
        self.vigil = Vigil(bus, PLACER, is_standby=is_standby, takeover_ms=1_000, renew_s=RENEW_S, monotonic=self.clock)
        self.reactor: Reactor[Seen] = Reactor(core=Reader(), author=PLACER, bus=bus, vigil=self.vigil)
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.reactor.run(self.stop))

    async def passes(self, ms: int) -> None:
        """Let so much time pass, in steps in which it hears itself, however long that takes here; or takes over."""
        async with asyncio.timeout(60):
            for _ in range(0, ms, 50):
                self.clock.ns += 50 * MS
                while self.vigil._now_ns < self.clock.ns and not self.reactor.ready.is_set():
                    await asyncio.sleep(RENEW_S / 4)
                await asyncio.sleep(2 * RENEW_S)


@asynccontextmanager
async def a_process(server: EmbeddedServer, *, is_standby: bool) -> AsyncIterator[Process]:
    async with AsyncExitStack() as stack:
        bus = await Bus.connect(server.url, pool=POOL, name="test")
        stack.push_async_callback(bus.close)
        await bus.provision()
        process = Process(bus, is_standby=is_standby)
        await until(process, "ready" if not is_standby else "")
        yield process
        process.stop.set()
        await asyncio.gather(process.task, return_exceptions=True)


async def until(process: Process, what: str) -> None:
    async with asyncio.timeout(60):
        while not (process.reactor.ready.is_set() if what == "ready" else process.reactor.is_in_place):
            assert not process.task.done() or process.task.result() is None
            await asyncio.sleep(0.005)


async def claims(bus: Bus) -> list[ev.LeaseClaimed]:
    newest = await bus.newest_claim(PLACER)
    assert newest is not None
    reader = await bus.reader(Stream.FACTS, after=0)
    found = []
    async with asyncio.timeout(60):
        async for batch in reader.batches():
            found += [
                decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at).event
                for raw in batch
            ]
            if batch[-1].seq >= newest.seq:
                break
    await reader.close()
    return [event for event in found if isinstance(event, ev.LeaseClaimed)]


async def test_a_standby_follows_while_the_active_process_speaks(server: EmbeddedServer) -> None:
    """However much time passes by its own clock."""
    async with a_process(server, is_standby=False) as active, a_process(server, is_standby=True) as standby:
        await standby.passes(3_000)
        assert (active.reactor.role, standby.reactor.role) == ("active", "standby")
        assert standby.vigil.silent_ms < 1_000


async def test_a_standby_takes_over_from_a_silent_process_which_then_ends(server: EmbeddedServer) -> None:
    """The silent one is fenced by the bus at its next word, and by itself as soon as it reads of the claim."""
    async with a_process(server, is_standby=False) as active, a_process(server, is_standby=True) as standby:
        await active.vigil.close()  # it is stuck, as far as anybody can hear
        await standby.passes(1_200)
        await until(standby, "ready")
        with pytest.raises(Fenced):
            await active.task
        first, second = await claims(standby.bus)
        assert (second.session, second.follows) == (standby.reactor.session, first.session)
        assert second.silent_ms >= 1_000


async def test_a_process_that_leaves_is_followed_at_once(server: EmbeddedServer) -> None:
    """A planned stop costs no silence."""
    async with a_process(server, is_standby=True) as standby:
        await until(standby, "ready")  # nobody had ever claimed
        async with a_process(server, is_standby=True) as third:
            standby.stop.set()
            await standby.task
            await until(third, "ready")
            assert (await claims(third.bus))[-1].silent_ms < 1_000


async def test_a_standby_that_could_not_hear_takes_nobody_s_place(server: EmbeddedServer) -> None:
    """It was paused, or its bus was: silence in that time says nothing about the active process."""
    async with a_process(server, is_standby=False) as active, a_process(server, is_standby=True) as standby:
        await active.vigil.close()
        standby.clock.ns += 60_000 * MS
        await standby.passes(500)
        assert standby.reactor.role == "standby"
        assert not active.task.done()
        await standby.passes(700)
        await until(standby, "ready")


async def test_of_two_standbys_one_takes_over(server: EmbeddedServer) -> None:
    """The bus stores one claim after the newest; the other standby goes on following."""
    async with (
        a_process(server, is_standby=False) as active,
        a_process(server, is_standby=True) as one,
        a_process(server, is_standby=True) as other,
    ):
        await active.vigil.close()
        await asyncio.gather(one.passes(1_200), other.passes(1_200))
        async with asyncio.timeout(60):
            while not (one.reactor.ready.is_set() or other.reactor.ready.is_set()):
                await asyncio.sleep(RENEW_S)
        assert sorted((one.reactor.role, other.reactor.role)) == ["active", "standby"]
        assert len(await claims(active.bus)) == 2


def test_a_flag_that_is_there_says_yes() -> None:
    """``--standby`` needs no value, and takes one."""
    read = [
        from_command_line(AuthorSettings, "placer", argv, environ={}).settings.standby
        for argv in ([], ["--standby"], ["--standby", "false"])
    ]
    assert read == [False, True, False]
