"""Faults are done to real processes, and undone: by the clock, by a wish, and where the injector dies."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from apportion.cli.injector import Injector
from apportion.contracts import events as ev
from apportion.contracts.causes import FaultEnd, FaultKind
from apportion.contracts.codec import decode_wish, encode_fact
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import MONITOR, PoolId
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus, Lease

pytestmark = pytest.mark.integration

POOL = PoolId("main")


def state_of(pid: int) -> str:
    """The kernel's letter: T stands still, S sleeps; nothing where it has gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return ""
    return stat[stat.rindex(")") + 2]


async def until(holds: Callable[[], bool]) -> None:
    """A signal takes effect when the kernel gets round to it; the limit only ends a test that would hang."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.02)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Monitor:
    """What states faults, as the injector hears it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._lease: Lease | None = None
        self._count = 0

    async def state(self, fact: ev.Fact) -> None:
        if self._lease is None:
            claim = ev.LeaseClaimed(author=MONITOR, session="s", core="c@1#0")
            self._lease = await self._bus.claim(MONITOR, encode_fact(POOL, MONITOR, claim, event_id="claim"))
        self._count += 1
        await self._bus.publish_fenced(self._lease, [encode_fact(POOL, MONITOR, fact, event_id=f"m{self._count}")])

    async def inject(self, kind: FaultKind, target: str, *, for_s: int = 30) -> None:
        await self.state(
            ev.FaultInjected(
                fault_id=f"fault-{self._count}",
                kind=kind,
                target=target,
                for_s=for_s,
                until_at=time.time_ns() + for_s * 1_000_000_000,
                actor="user:eve",
                reason="r",
                answers=1,
            )
        )


@pytest.fixture
async def monitor(tmp_path: Path, victim: subprocess.Popen[bytes]) -> AsyncIterator[Monitor]:
    async with EmbeddedServer(tmp_path / "data", port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="test")
        await bus.provision()
        supervisor = SimpleNamespace(
            plan=SimpleNamespace(pool="main"),
            data_dir=tmp_path,
            services={"placer": SimpleNamespace(pid=victim.pid, health_port=None)},
            server=server,
        )
        injector = Injector(supervisor)  # type: ignore[arg-type]  # what it uses of one
        running = asyncio.create_task(injector.run(bus))
        try:
            await until(lambda: bus._readers != [])
            yield Monitor(bus)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await bus.close()
        await until(lambda: state_of(victim.pid) != "T")  # whatever was still broken is mended


async def test_a_paused_service_goes_on_when_its_fault_is_cleared(
    monitor: Monitor, victim: subprocess.Popen[bytes]
) -> None:
    await monitor.inject(FaultKind.SERVICE_PAUSE, "placer")
    await until(lambda: state_of(victim.pid) == "T")
    cleared = ev.FaultCleared(
        fault_id="fault-0", kind=FaultKind.SERVICE_PAUSE, target="placer", why=FaultEnd.ASKED, answers=2
    )
    await monitor.state(cleared)
    await until(lambda: state_of(victim.pid) == "S")


async def test_a_fault_ends_by_its_own_time_where_nobody_says_so(
    monitor: Monitor, victim: subprocess.Popen[bytes]
) -> None:
    """The monitor may be what was broken. What is still broken when the injector ends is mended, too."""
    await monitor.inject(FaultKind.SERVICE_PAUSE, "placer", for_s=1)
    await until(lambda: state_of(victim.pid) == "T")
    await until(lambda: state_of(victim.pid) == "S")
    await monitor.inject(FaultKind.SERVICE_PAUSE, "placer")
    await until(lambda: state_of(victim.pid) == "T")


async def test_a_killed_service_is_dead_and_what_is_not_there_is_given_up(
    monitor: Monitor, victim: subprocess.Popen[bytes]
) -> None:
    """With a wish to clear it, so that the log says that it was not done."""
    await monitor.inject(FaultKind.SERVICE_KILL, "placer")
    await until(lambda: victim.poll() == -signal.SIGKILL)
    await monitor.inject(FaultKind.SERVICE_PAUSE, "admission")
    bus = monitor._bus
    reader = await bus.reader(Stream.WISHES, after=0)
    async with asyncio.timeout(20):
        await reader.ready.wait()
    (raw,) = reader.take()
    wish = decode_wish(raw.subject, raw.headers, raw.body, seq=1, recorded_at=1).event
    assert isinstance(wish, ev.FaultClearRequested)
    assert "no process of admission" in wish.reason


_HOLDER = """
import os, signal, sys, time
from apportion.cli.injector import Guard
from apportion.cli.places import start_ticks
pid = int(sys.argv[1])
with Guard().holding("x", {"cont": pid, "ticks": start_ticks(pid)}):
    os.kill(pid, signal.SIGSTOP)
    print("held", flush=True)
    time.sleep(60)
"""


async def test_what_an_injector_left_broken_is_mended_when_it_is_killed(victim: subprocess.Popen[bytes]) -> None:
    """No fault outlives whoever injected it, however that one went."""
    injector = subprocess.Popen([sys.executable, "-c", _HOLDER, str(victim.pid)], stdout=subprocess.PIPE)
    try:
        assert injector.stdout is not None
        assert await asyncio.to_thread(injector.stdout.readline) == b"held\n"
        await until(lambda: state_of(victim.pid) == "T")
    finally:
        injector.kill()
        injector.communicate()
    await until(lambda: state_of(victim.pid) == "S")
