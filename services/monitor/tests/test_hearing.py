"""What the monitor hears of a real bus, and that a bus which hangs makes nobody silent."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apportion.contracts import subjects
from apportion.contracts.ids import NodeId, PoolId
from apportion.monitor.core import Heard, Resumed, Sign, Tick
from apportion.monitor.hearing import Hearing, Skews
from apportion.runtime.clock import SystemClock
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

pytestmark = pytest.mark.integration

POOL = PoolId("main")
NODE = NodeId("node-1")
BEAT = b'{"session":"s1","epoch":3,"load":0.5}'


class Ears:
    """A monitor that only listens."""

    def __init__(self, server: EmbeddedServer, bus: Bus) -> None:
        self.server = server
        self.bus = bus
        self.fed: list[Sign] = []
        self.hearing = Hearing(bus, SystemClock(), self.fed.append, suspect_ms=600)

    def beat(self, body: bytes = BEAT) -> None:
        self.bus.send_soon(subjects.sample(POOL, NODE, "heartbeat"), body)

    async def until(self, kind: type[Sign], *, after: int = 0) -> int:
        """The place after the next observation of this kind."""
        async with asyncio.timeout(60):
            while not (found := [i for i, one in enumerate(self.fed) if i >= after and isinstance(one, kind)]):
                await asyncio.sleep(0.01)
        return found[0] + 1


@pytest.fixture
async def ears(tmp_path: Path) -> AsyncIterator[Ears]:
    """Listening on a bus of its own."""
    async with EmbeddedServer(tmp_path, port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="test")
        ears = Ears(server, bus)
        await ears.hearing.start()
        stop = asyncio.Event()
        ticking = asyncio.create_task(ears.hearing.run(stop))
        yield ears
        stop.set()
        await ticking
        await bus.close()


async def test_heartbeats_and_time_come_from_the_bus(ears: Ears) -> None:
    """With the instant of their receipt; what is no heartbeat is counted and passed over."""
    for broken in (b"", b"{", b'{"session":1,"epoch":2}', b"\xff"):
        ears.beat(broken)
    ears.beat()
    at = await ears.until(Heard)
    heard = ears.fed[at - 1]
    assert isinstance(heard, Heard)
    assert (heard.node, heard.session, heard.epoch) == (NODE, "s1", 3)
    assert ears.hearing.malformed == 4
    tick = ears.fed[await ears.until(Tick, after=at) - 1]
    assert heard.at_ns <= tick.at_ns


async def test_while_the_bus_hangs_no_time_passes_and_then_a_new_reckoning_begins(ears: Ears) -> None:
    """Nobody is silent for as long as nobody could have been heard."""
    await ears.until(Tick)
    assert ears.server.pid is not None
    os.kill(ears.server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            while Path(f"/proc/{ears.server.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # real time: a real process hangs, and what it had sent before arrives
        frozen = len(ears.fed)
        ears.beat()
        await asyncio.sleep(1.2)
        assert len(ears.fed) == frozen
    finally:
        os.kill(ears.server.pid, signal.SIGCONT)
    await ears.until(Tick, after=await ears.until(Heard, after=frozen))
    assert isinstance(ears.fed[frozen], Resumed), ears.fed[frozen:]
    assert ears.fed[frozen].at_ns <= ears.fed[frozen + 1].at_ns


def test_skew_is_what_the_fastest_heartbeat_tells() -> None:
    """Travel time only ever makes a clock look late, so the best of many is the nearest."""
    skews = Skews()
    node = NodeId("node-1")
    for delay_ms in (40, 3, 900):
        skews.heard(node, said_at=10_000_000_000 + 250_000_000, received_at=10_000_000_000 + delay_ms * 1_000_000)
    assert skews.seconds([node, NodeId("node-2")]) == {node: 0.247}
