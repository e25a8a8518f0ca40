"""Faults are done to real processes, and undone: by the clock, by a wish, and where the injector dies."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apportion.cli import hogs, relay
from apportion.cli.hogs import CannotBreak
from apportion.cli.injector import Injector
from apportion.contracts import events as ev
from apportion.contracts.causes import FaultEnd, FaultKind
from apportion.contracts.codec import decode_wish, encode_fact
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import MONITOR, NodeId, PoolId
from apportion.node_agent.isolation.party import Party
from apportion.node_agent.nvml import open_devices
from apportion.node_agent.simgpu.client import SOCKET_VARIABLE
from apportion.node_agent.simnode import SimulatedNode
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
    async with asyncio.timeout(60):
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

    def __init__(self, bus: Bus, data_dir: Path) -> None:
        self.bus = bus
        self.data_dir = data_dir
        self._lease: Lease | None = None
        self._count = 0

    async def state(self, fact: ev.Fact) -> None:
        if self._lease is None:
            claim = ev.LeaseClaimed(author=MONITOR, session="s", core="c@1#0")
            self._lease = await self.bus.claim(MONITOR, encode_fact(POOL, MONITOR, claim, event_id="claim"))
        self._count += 1
        await self.bus.publish_fenced(self._lease, [encode_fact(POOL, MONITOR, fact, event_id=f"m{self._count}")])

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

    async def clear(self, kind: FaultKind, target: str) -> None:
        """End the fault that was stated last."""
        fault_id = f"fault-{self._count - 1}"
        await self.state(ev.FaultCleared(fault_id=fault_id, kind=kind, target=target, why=FaultEnd.ASKED, answers=2))

    async def given_up(self) -> str:
        """Why the injector asks that a fault is cleared."""
        reader = await self.bus.reader(Stream.WISHES, after=0)
        async with asyncio.timeout(60):
            await reader.ready.wait()
        (raw,) = reader.take()
        wish = decode_wish(raw.subject, raw.headers, raw.body, seq=1, recorded_at=1).event
        assert isinstance(wish, ev.FaultClearRequested)
        return wish.reason


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
            yield Monitor(bus, tmp_path)
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
    await monitor.clear(FaultKind.SERVICE_PAUSE, "placer")
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
    assert "no process of admission" in await monitor.given_up()


async def test_a_node_that_is_cut_off_hears_and_says_nothing_until_the_cut_ends(monitor: Monitor) -> None:
    """Its connection stands meanwhile, as where a network is partitioned; what was said arrives once that is over."""
    data_dir = monitor.data_dir
    between = relay.Relay(data_dir, monitor.bus.url, ["node-1"])
    relaying = asyncio.create_task(between.run())
    try:
        await until(lambda: relay.ways(data_dir) is not None)
        agent = await Bus.connect((relay.ways(data_dir) or {})["node-1"], pool=POOL, name="agent")
        heard: list[bytes] = []

        async def hear(message: Any) -> None:
            heard.append(message.data)

        await agent.client.subscribe("to.agent", cb=hear)
        await monitor.bus.client.subscribe("to.bus", cb=hear)
        await agent.client.flush()
        await monitor.inject(FaultKind.NODE_PARTITION, "node-1")
        await until(lambda: between.cut_off == {"node-1"})
        await agent.client.publish("to.bus", b"out")
        await monitor.bus.client.publish("to.agent", b"in")
        # What isn't cut has long come round when this has: a message there and back over the whole connection.
        for _ in range(20):
            await monitor.bus.client.flush()
        assert heard == []
        assert agent.client.is_connected
        await monitor.clear(FaultKind.NODE_PARTITION, "node-1")
        await until(lambda: sorted(heard) == [b"in", b"out"])
        # Nobody need clear it: it ends by the relay's own clock.
        relay.cut(relay.cuts_path(data_dir), "forgotten", "node-1", for_s=0.2)
        await until(lambda: between.cut_off == {"node-1"})
        await until(lambda: between.cut_off == frozenset())
        await agent.close()
    finally:
        relaying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await relaying


@pytest.fixture
async def simulated(tmp_path: Path) -> AsyncIterator[SimulatedNode]:
    node = SimulatedNode(NodeId("node-1"), state_dir=tmp_path / "nodes" / "node-1", devices=1, profile="a100-40")
    await node.open()
    try:
        yield node
    finally:
        await node.close()
        node.kill()
        with contextlib.suppress(ChildProcessError):
            await asyncio.to_thread(os.waitpid, node.pid, 0)


async def test_a_device_is_hogged_by_a_process_that_lets_go_at_the_end(
    monitor: Monitor, simulated: SimulatedNode
) -> None:
    """Memory, then SMs: taken from the device itself, for as long as the fault lasts."""
    with open_devices(simulated.socket_path) as devices:
        (device,) = devices.inventory()
        free_mib = devices.reading(device.uuid).free_mib
        await monitor.inject(FaultKind.DEVICE_MEMORY_HOG, "node-1/0")
        await until(lambda: devices.reading(device.uuid).free_mib == 0)
        await monitor.clear(FaultKind.DEVICE_MEMORY_HOG, "node-1/0")
        await until(lambda: devices.reading(device.uuid).free_mib == free_mib)
        await monitor.inject(FaultKind.DEVICE_COMPUTE_HOG, "node-1/0")
        await until(lambda: (devices.reading(device.uuid).busy_percent or 0) > 90)
        await monitor.clear(FaultKind.DEVICE_COMPUTE_HOG, "node-1/0")
        await until(lambda: devices.processes(device.uuid) == ())


async def test_an_mps_server_is_wedged_by_a_client_that_is_killed_with_work_in_flight(
    monitor: Monitor, simulated: SimulatedNode
) -> None:
    """Its neighbours fail with it. Where no server runs there is nothing to wedge, and that is said."""
    await monitor.inject(FaultKind.DEVICE_MPS_WEDGE, "node-1/0")
    assert "no MPS server runs on device 0 of node-1" in await monitor.given_up()
    pipe = monitor.data_dir / "nodes" / "node-1" / "mps" / "0"
    pipe.mkdir(parents=True)
    env = {
        "PATH": f"{simulated.tools}:{os.defpath}",
        SOCKET_VARIABLE: str(simulated.socket_path),
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
    }
    daemon = await asyncio.create_subprocess_exec(simulated.tools / "nvidia-cuda-mps-control", "-d", env=env)
    assert await daemon.wait() == 0
    neighbour = await Party.start(env)
    try:
        assert neighbour.is_mps_client
        assert await neighbour.number("alloc", 100) is not None
        await monitor.inject(FaultKind.DEVICE_MPS_WEDGE, "node-1/0")
        async with asyncio.timeout(60):
            while (said := await neighbour.say("churn", 1, 1)) == ["ok", "0"]:
                await asyncio.sleep(0.02)
        assert said != ["ok", "0"]
    finally:
        await neighbour.end()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system that is nobody else's."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "t", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here to be filled")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


async def test_a_disk_is_full_for_as_long_as_a_process_lives(disk: Path) -> None:
    """What it took is free again however it went."""
    filling = asyncio.create_task(hogs.on_disk(a_fault(FaultKind.DISK_FULL), disk))
    await until(lambda: shutil.disk_usage(disk).free == 0)
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(bytes(65_536))
    filling.cancel()
    await asyncio.gather(filling, return_exceptions=True)
    await until(lambda: shutil.disk_usage(disk).free > 23 << 20)


async def test_a_disk_that_others_use_is_slowed_and_never_filled(tmp_path: Path) -> None:
    with pytest.raises(CannotBreak, match="the same disk"):
        await hogs.on_disk(a_fault(FaultKind.DISK_FULL), tmp_path)
    slowing = asyncio.create_task(hogs.on_disk(a_fault(FaultKind.DISK_SLOW), tmp_path))
    await until(lambda: disk_hogs() != [])
    (hog,) = disk_hogs()
    await until(lambda: io_of(hog)["wchar"] > 8 << 20)
    slowing.cancel()
    await asyncio.gather(slowing, return_exceptions=True)
    await until(lambda: disk_hogs() == [])


def a_fault(kind: FaultKind) -> ev.FaultInjected:
    return ev.FaultInjected(fault_id="f", kind=kind, for_s=60, until_at=0, actor="user:eve", reason="r", answers=1)


def disk_hogs() -> list[int]:
    """Our own children of that name."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if "disk_hog" in Path(f"/proc/{pid}/cmdline").read_text()]


def io_of(pid: int) -> dict[str, int]:
    """What it has read and written."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


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
