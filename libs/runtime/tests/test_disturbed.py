"""What a process does to itself: what it reads comes late, twice or never, and nothing of it is lost or done twice."""

import asyncio
import time
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from apportion.contracts import events as ev
from apportion.contracts.causes import FaultEnd, FaultKind
from apportion.contracts.codec import encode_fact, encode_wish
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import MONITOR, OPERATOR, PoolId
from apportion.runtime.clock import NS_PER_S, ManualClock
from apportion.runtime.disturbed import JUMP_S_MAX, Disturbances
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

POOL = PoolId("main")


def a_fault(kind: FaultKind, *, target: str = "placer", number: int = 1, for_s: int = 60) -> ev.FaultInjected:
    return ev.FaultInjected(
        fault_id=f"fault-{number}",
        kind=kind,
        target=target,
        for_s=for_s,
        until_at=0,
        seed=7,
        actor="user:eve",
        reason="r",
        answers=1,
    )


def cleared(fault: ev.FaultInjected) -> ev.FaultCleared:
    return ev.FaultCleared(fault_id=fault.fault_id, kind=fault.kind, target=fault.target, why=FaultEnd.ASKED, answers=2)


async def store(bus: Bus, *facts: ev.Fact, first: int) -> None:
    """State facts as the monitor does, without a lease: nobody else writes here."""
    for number, fact in enumerate(facts, first):
        message = encode_fact(POOL, MONITOR, fact, event_id=f"m{number}")
        await bus.jetstream.publish(message.subject, message.body, headers=message.headers)


@pytest.mark.integration
async def test_what_is_dropped_repeated_and_delayed_is_read_once_and_in_its_order(tmp_path: Path) -> None:
    """The reader finds each gap and asks again; a fault on somebody else is none of ours."""
    async with EmbeddedServer(tmp_path, port=0) as server:
        itself = Disturbances("placer")
        bus = await Bus.connect(server.url, pool=POOL, name="test", disturbances=itself)
        await bus.provision()
        reader = await bus.reader(Stream.FACTS, after=0)

        async def read(count: int) -> list[int]:
            found: list[int] = []
            async with asyncio.timeout(60):
                while len(found) < count:
                    await reader.ready.wait()
                    found += [raw.seq for raw in reader.take()]
            return found

        try:
            thaw = ev.ControlPlaneThawed(silent=1, nodes=2)
            other = a_fault(FaultKind.MESSAGE_DROP, target="admission", number=1)
            # A wish is nobody's word but its tenant's, whatever it claims to be.
            wish = ev.FaultInjectionRequested(kind=FaultKind.MESSAGE_DROP, target="placer", reason="r")
            await bus.publish_wish(encode_wish(POOL, wish, tenant=OPERATOR, event_id="w1", source="/test"))
            asked = await bus.reader(Stream.WISHES, after=0)
            async with asyncio.timeout(60):
                await asked.ready.wait()
            await store(bus, other, *[thaw] * 40, first=1)
            assert await read(41) == list(range(1, 42))
            assert (itself.dropped, itself.repeated, itself.delayed) == (0, 0, 0)

            drop, repeat = a_fault(FaultKind.MESSAGE_DROP, number=2), a_fault(FaultKind.MESSAGE_DUPLICATE, number=3)
            await store(bus, drop, repeat, *[thaw] * 100, first=42)
            assert await read(102) == list(range(42, 144))
            assert itself.dropped > 3
            assert itself.repeated > 30

            await store(bus, cleared(drop), cleared(repeat), a_fault(FaultKind.MESSAGE_DELAY, number=4), first=144)
            assert await read(3) == [144, 145, 146]
            lost, said = itself.dropped, time.monotonic()
            await store(bus, *[thaw] * 20, first=147)
            assert await read(20) == list(range(147, 167))
            assert (itself.dropped, itself.delayed >= 20) == (lost, True)
            assert time.monotonic() - said > 0.5  # of twenty draws up to a second the longest holds up the rest
        finally:
            await bus.close()


def test_a_clock_jumps_for_as_long_as_its_fault_lasts_and_no_deadline_notices() -> None:
    """By the monotonic clock alone it knows when to stop; what was stored long ago is over."""
    clock = ManualClock(now=time.time_ns())
    itself = Disturbances("node-1", clock=clock)
    told: list[Msg] = []

    def hear(fact: ev.Fact, *, recorded_at: int) -> None:
        message = encode_fact(POOL, MONITOR, fact, event_id="m1")
        raw = Msg(Client(), subject=message.subject, data=message.body, headers=message.headers)
        itself.pass_on(raw, recorded_at, told.append)

    jump = a_fault(FaultKind.CLOCK_JUMP, target="node-1", for_s=30)
    hear(jump, recorded_at=time.time_ns() - 31 * NS_PER_S)
    assert itself.now() == clock.now()
    hear(jump, recorded_at=time.time_ns())
    off_s = abs(itself.now() - clock.now()) // NS_PER_S
    assert 0 < off_s <= JUMP_S_MAX
    assert itself.monotonic() == clock.monotonic()
    clock.advance(31 * NS_PER_S)
    assert itself.now() == clock.now()
    hear(jump, recorded_at=time.time_ns())
    assert itself.now() != clock.now()
    hear(cleared(jump), recorded_at=time.time_ns())
    assert itself.now() == clock.now()
    assert len(told) == 4
