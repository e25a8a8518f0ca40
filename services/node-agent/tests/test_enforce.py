"""Slices on a real simulated node: what is promised is set, read back, and holds; without it, it doesn't."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apportion.contracts.causes import Mode
from apportion.contracts.events import Slice
from apportion.contracts.ids import DeviceUuid, NodeId, RunId
from apportion.node_agent.enforce.cgroup_memory import CgroupMemory
from apportion.node_agent.enforce.exclusive import Exclusive
from apportion.node_agent.enforce.mps import CONTROL, Mps
from apportion.node_agent.enforce.slices import EnforcementFailed, Slices
from apportion.node_agent.enforce.timeslice import TimeSlice
from apportion.node_agent.enforce.watchdog import Escape, Offence, Watchdog
from apportion.node_agent.machine import inventory_of
from apportion.node_agent.nvml import COMPUTE_MODE_DEFAULT, COMPUTE_MODE_EXCLUSIVE, Devices, open_devices
from apportion.node_agent.simgpu import client
from apportion.node_agent.simnode import SimulatedNode

pytestmark = pytest.mark.integration

A, B = RunId("acme/a/0/1"), RunId("acme/b/0/1")
HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
import client
if sys.argv[2]:
    open(sys.argv[2] + "/cgroup.procs", "w").write("0")
try:
    driver = client.Driver()
    print("mps" if driver.is_mps_client else "direct", driver.devices[0].sms, flush=True)
    for line in sys.stdin:
        try:
            print(driver.alloc(0, int(line)), flush=True)
        except client.GpuError as error:
            print(error.code, flush=True)
except client.GpuError as error:
    print(error.code, flush=True)
"""
PATIENCE_S = 60.0


class Bench:
    """One device with all enforcers, and processes that use it as a run's would."""

    def __init__(self, simulated: SimulatedNode, devices: Devices, directory: Path) -> None:
        self.devices = devices
        self.path = f"{simulated.tools}:{os.defpath}"
        self.node_env = {client.SOCKET_VARIABLE: str(simulated.socket_path)}
        self.sessions: dict[int, RunId] = {}
        self.watchdog = Watchdog(devices, session_of=self.sessions.get)
        self.directory = directory
        self.mps = self.an_mps()
        self.exclusive = Exclusive(devices, end_idle_mps=self.mps.end_idle, directory=directory / "exclusive")
        self.inventory = inventory_of(devices, path=self.path, is_simulated=True)
        self.slices = Slices(
            devices,
            {
                Mode.EXCLUSIVE: self.exclusive,
                Mode.MPS: self.mps,
                Mode.TIMESLICE: TimeSlice(devices, self.watchdog),
            },
            usable={device.uuid: device for device in self.inventory.devices},
        )
        self.uuid = self.inventory.devices[0].uuid
        self.holders: list[subprocess.Popen[str]] = []

    def an_mps(self, *partitions: int) -> Mps:
        directory = self.directory / "mps"
        return Mps(
            self.devices,
            self.watchdog,
            directory=directory,
            path=self.path,
            env=self.node_env,
            partitions=partitions,
        )

    def a_slice(self, mode: Mode, **changes: Any) -> Slice:
        return Slice(**{"device_uuid": self.uuid, "compute_milli": 250, "memory_mib": 2048, "mode": mode, **changes})

    def hold(self, run: RunId, env: dict[str, str] | None = None, group: Path | None = None) -> "Holder":
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", HOLDER, str(Path(client.__file__).parent), str(group or "")],
            env={**self.node_env, "CUDA_VISIBLE_DEVICES": self.uuid, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.sessions[process.pid] = run
        self.holders.append(process)
        return Holder(process)

    def close(self) -> None:
        for process in self.holders:
            process.kill()
            process.communicate()


class Holder:
    """A process of a run, which allocates what it is told."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid
        assert process.stdout is not None
        self.greeting = process.stdout.readline().split()

    def alloc(self, mib: int) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    driver = getattr(request, "param", "580")
    with tempfile.TemporaryDirectory(prefix="na-") as directory:
        simulated = SimulatedNode(
            NodeId("node-1"), state_dir=Path(directory), devices=1, profile="a100-40", driver=driver
        )
        await simulated.open()
        with open_devices(simulated.socket_path) as devices:
            one = Bench(simulated, devices, Path(directory))
            try:
                yield one
            finally:
                one.close()
        await simulated.close()
        simulated.kill()  # Its MPS daemons end with it, as their channel does.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(simulated.pid, 0)  # noqa: ASYNC222  it was killed a moment ago


def observed(set_up: Any) -> dict[str, tuple[int, int, int, str]]:
    return {one.what: (one.asked, one.applied, one.observed, one.by) for one in set_up.enforced}


async def test_an_exclusive_device_is_closed_to_others(bench: Bench) -> None:
    """Until it is released."""
    piece = bench.a_slice(Mode.EXCLUSIVE, compute_milli=1000)
    set_up = await bench.slices.apply(A, (piece,))
    assert set_up.env["CUDA_VISIBLE_DEVICES"] == bench.uuid
    assert observed(set_up)["compute"] == (1000, 1000, 1000, "exclusive_process")
    assert bench.devices.compute_mode(bench.uuid) == COMPUTE_MODE_EXCLUSIVE
    owner, stranger = bench.hold(A), bench.hold(B)
    assert owner.alloc(1000).isdecimal()
    assert stranger.alloc(1000) == "CUDA_ERROR_DEVICE_UNAVAILABLE"
    await bench.slices.release(A, (piece,))
    assert bench.devices.compute_mode(bench.uuid) == COMPUTE_MODE_DEFAULT
    assert bench.hold(B).alloc(1000).isdecimal()


async def test_without_the_enforcer_a_stranger_gets_in(bench: Bench) -> None:
    """The negative control: nothing but what was configured keeps anybody out."""
    assert bench.hold(A).alloc(1000).isdecimal()
    assert bench.hold(B).alloc(1000).isdecimal()


async def test_an_exclusive_slice_of_a_device_in_use_is_refused(bench: Bench) -> None:
    """And nothing stays set up."""
    assert bench.hold(B).alloc(100).isdecimal()
    with pytest.raises(EnforcementFailed, match="processes on the exclusive device"):
        await bench.slices.apply(A, (bench.a_slice(Mode.EXCLUSIVE),))
    assert bench.devices.compute_mode(bench.uuid) == COMPUTE_MODE_DEFAULT


async def test_a_second_owner_does_not_open_the_firsts_device(bench: Bench) -> None:
    """Whatever the pool's book says."""
    piece = bench.a_slice(Mode.EXCLUSIVE)
    await bench.slices.apply(A, (piece,))
    with pytest.raises(EnforcementFailed, match="owner"):
        await bench.slices.apply(B, (piece,))
    await bench.slices.release(B, (piece,))
    assert bench.devices.compute_mode(bench.uuid) == COMPUTE_MODE_EXCLUSIVE


async def test_a_new_agent_opens_what_a_dead_one_had_closed_for_nobody(bench: Bench) -> None:
    """It died between closing the device and starting the run, and the run was cancelled meanwhile."""
    await bench.slices.apply(A, (bench.a_slice(Mode.EXCLUSIVE),))

    def successor() -> Exclusive:
        return Exclusive(bench.devices, end_idle_mps=bench.mps.end_idle, directory=bench.directory / "exclusive")

    await successor().reconcile({A})
    assert bench.devices.compute_mode(bench.uuid) == COMPUTE_MODE_EXCLUSIVE
    await successor().reconcile(())
    assert bench.devices.compute_mode(bench.uuid) == COMPUTE_MODE_DEFAULT
    assert list((bench.directory / "exclusive").iterdir()) == []


async def test_a_mode_that_is_not_there_is_refused(bench: Bench) -> None:
    """With the modes that are."""
    with pytest.raises(EnforcementFailed, match="exclusive,mps,timeslice"):
        await bench.slices.apply(A, (bench.a_slice(Mode.MIG),))
    with pytest.raises(EnforcementFailed, match="no such device"):
        await bench.slices.apply(A, (bench.a_slice(Mode.MPS, device_uuid=DeviceUuid("GPU-other")),))


async def test_a_timeslice_run_over_its_memory_is_found_in_two_looks(bench: Bench) -> None:
    """Its neighbour is not."""
    for run in (A, B):
        set_up = await bench.slices.apply(run, (bench.a_slice(Mode.TIMESLICE),))
        assert observed(set_up)["memory"] == (2048, 2048, 2048, "watchdog")
        assert observed(set_up)["compute"] == (250, 0, 0, "best_effort")
    good, bad = bench.hold(A), bench.hold(B)
    assert good.alloc(1000).isdecimal()
    assert bad.alloc(3000).isdecimal()
    assert bench.watchdog.look() == []
    assert bench.watchdog.look() == [Offence(run_id=B, device_uuid=bench.uuid, used_mib=3256, limit_mib=2048)]
    assert bench.watchdog.look() == []
    assert bench.watchdog.used_mib == {A: 1256, B: 3256}


async def test_two_processes_of_one_run_count_together(bench: Bench) -> None:
    """Each alone stays within the slice."""
    await bench.slices.apply(A, (bench.a_slice(Mode.TIMESLICE),))
    for _ in range(2):
        assert bench.hold(A).alloc(1000).isdecimal()
    assert bench.watchdog.look() == []
    assert [type(one) for one in bench.watchdog.look()] == [Offence]


async def test_mps_limits_are_set_read_back_and_hold(bench: Bench) -> None:
    """The device itself refuses what is over them."""
    set_up = await bench.slices.apply(A, (bench.a_slice(Mode.MPS),))
    assert observed(set_up) == {
        "memory": (2048, 2048, 2048, "mps_pinned_limit+watchdog"),
        "compute": (250, 250, 250, "mps_active_thread_percentage"),
        "fault_domain": (0, 0, 0, "mps_server"),
    }
    one = bench.hold(A, dict(set_up.env))
    assert one.greeting == ["mps", str(int(108 * 0.25) // 2 * 2)]
    assert one.alloc(1700).isdecimal()
    assert one.alloc(200) == "CUDA_ERROR_OUT_OF_MEMORY"


async def test_a_run_cannot_loosen_its_mps_limits(bench: Bench) -> None:
    """The server's values bind a client that drops its own."""
    set_up = await bench.slices.apply(A, (bench.a_slice(Mode.MPS),))
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": set_up.env["CUDA_MPS_PIPE_DIRECTORY"]}
    assert bench.hold(A, pipe).alloc(2000) == "CUDA_ERROR_OUT_OF_MEMORY"


async def test_without_mps_limits_the_offender_takes_it_all(bench: Bench) -> None:
    """The negative control: the same process, past the daemon."""
    await bench.slices.apply(A, (bench.a_slice(Mode.MPS),))
    offender = bench.hold(A)
    assert offender.greeting[0] == "direct"
    assert offender.alloc(30_000).isdecimal()


async def test_a_terminated_client_is_off_the_server_and_its_neighbour_is_not(bench: Bench) -> None:
    """So that the kill which follows finds no work in flight."""
    holders = []
    for run in (A, B):
        set_up = await bench.slices.apply(run, (bench.a_slice(Mode.MPS),))
        holders.append(bench.hold(run, dict(set_up.env)))
        assert holders[-1].alloc(500).isdecimal()
    bad, good = holders
    await bench.mps.terminate(bench.uuid, {bad.pid})
    assert [process.pid for process in bench.devices.processes(bench.uuid) if process.is_mps_client] == [good.pid]
    assert bad.alloc(1) == "CUDA_ERROR_MPS_CLIENT_TERMINATED"
    assert good.alloc(1).isdecimal()


async def test_a_process_that_escapes_mps_is_found(bench: Bench) -> None:
    """MPS fails open, so that somebody has to look."""
    await bench.slices.apply(A, (bench.a_slice(Mode.MPS),))
    escaped = bench.hold(A)
    escaped.alloc(100)
    assert bench.watchdog.look() == [Escape(run_id=A, device_uuid=bench.uuid, pid=escaped.pid)]


async def test_equal_runs_share_a_server_without_another_command(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command is a process; most runs need none."""
    await bench.slices.apply(A, (bench.a_slice(Mode.MPS),))
    monkeypatch.setattr(bench.mps, "_tool", None)
    assert observed(await bench.slices.apply(B, (bench.a_slice(Mode.MPS),)))["memory"][2] == 2048


async def test_unequal_runs_get_their_own_limits_and_then_the_smallest_binds(bench: Bench) -> None:
    """Whoever comes late gets less than its share, and never more."""
    small = await bench.slices.apply(A, (bench.a_slice(Mode.MPS, memory_mib=1024, compute_milli=100),))
    first = bench.hold(A, dict(small.env))
    bench.mps.started(A, bench.a_slice(Mode.MPS, memory_mib=1024, compute_milli=100), first.pid)
    assert first.alloc(700).isdecimal()
    large_piece = bench.a_slice(Mode.MPS, memory_mib=8192, compute_milli=500)
    large = await bench.slices.apply(B, (large_piece,))
    second = bench.hold(B, dict(large.env))
    bench.mps.started(B, large_piece, second.pid)
    assert (second.greeting[1], second.alloc(7000).isdecimal()) == ("54", True)
    await bench.mps.lower()
    late = bench.hold(B, {"CUDA_MPS_PIPE_DIRECTORY": large.env["CUDA_MPS_PIPE_DIRECTORY"]})
    assert (late.greeting[1], late.alloc(1000)) == ("10", "CUDA_ERROR_OUT_OF_MEMORY")


async def test_a_new_agent_takes_over_the_daemon_that_it_finds(bench: Bench) -> None:
    """Ending it would end its clients."""
    await bench.slices.apply(A, (bench.a_slice(Mode.MPS),))
    pid_file = bench.directory / "mps" / "0" / f"{CONTROL}.pid"
    pid = pid_file.read_text()
    again = bench.an_mps()
    assert observed(await again.apply(B, bench.a_slice(Mode.MPS)))["memory"][2] == 2048
    assert pid_file.read_text() == pid


async def test_a_daemon_that_died_is_replaced(bench: Bench) -> None:
    """Its stale pid file deceives nobody."""
    await bench.slices.apply(A, (bench.a_slice(Mode.MPS),))
    pid = int((bench.directory / "mps" / "0" / f"{CONTROL}.pid").read_text())
    os.kill(pid, 9)
    until = time.monotonic() + PATIENCE_S
    while True:
        # The server's process follows its daemon in a moment; until then its end isn't seen.
        await asyncio.sleep(0.05)
        with contextlib.suppress(EnforcementFailed):
            set_up = await bench.an_mps().apply(B, bench.a_slice(Mode.MPS))
            break
        assert time.monotonic() < until
    assert bench.hold(B, dict(set_up.env)).greeting[0] == "mps"
    assert int((bench.directory / "mps" / "0" / f"{CONTROL}.pid").read_text()) != pid


async def test_an_idle_daemon_gives_way_to_an_exclusive_run(bench: Bench) -> None:
    """Its server's context would be a stranger's."""
    piece = bench.a_slice(Mode.MPS)
    await bench.slices.apply(A, (piece,))
    await bench.slices.release(A, (piece,))
    await bench.slices.apply(B, (bench.a_slice(Mode.EXCLUSIVE),))
    assert not (bench.directory / "mps" / "0" / f"{CONTROL}.pid").exists()


@pytest.mark.parametrize("bench", ["590"], indirect=True)
async def test_runs_get_the_smallest_partition_that_holds_them(bench: Bench) -> None:
    """Exclusive SMs, which a newer agent finds again; who finds none is told so, and gets nothing."""
    mps = bench.an_mps(500, 250)
    large = await mps.apply(A, bench.a_slice(Mode.MPS, compute_milli=300))
    assert observed(large)["compute"] == (300, 444, 444, "mps_sm_partition")
    small = await mps.apply(B, bench.a_slice(Mode.MPS, compute_milli=250))
    holders = [bench.hold(run, dict(set_up.env)) for run, set_up in ((A, large), (B, small))]
    assert [holder.greeting for holder in holders] == [["mps", "48"], ["mps", "24"]]
    with pytest.raises(EnforcementFailed, match="SM partition"):
        await mps.apply(RunId("acme/c/0/1"), bench.a_slice(Mode.MPS, compute_milli=250))
    later = bench.an_mps(500, 250)
    later.started(A, bench.a_slice(Mode.MPS, compute_milli=300), holders[0].pid)
    holders[1].process.kill()
    holders[1].process.wait()
    again = await later.apply(B, bench.a_slice(Mode.MPS, compute_milli=250))
    assert again.env["CUDA_MPS_SM_PARTITION"] == small.env["CUDA_MPS_SM_PARTITION"]


async def test_a_new_agent_ends_the_daemon_that_nobody_uses(bench: Bench) -> None:
    """Whatever killed the old one; a daemon that serves a run stays."""
    await bench.slices.apply(A, (bench.a_slice(Mode.MPS),))
    pid_file = bench.directory / "mps" / "0" / f"{CONTROL}.pid"
    pid = int(pid_file.read_text())
    await bench.an_mps().recover({bench.uuid})
    os.kill(pid, 0)
    await bench.an_mps().recover(())
    assert not pid_file.exists()
    with contextlib.suppress(FileNotFoundError):  # Nobody may have buried it yet.
        assert " Z " in Path(f"/proc/{pid}/stat").read_text()
    assert list(bench.devices.processes(bench.uuid)) == []


@pytest.mark.parametrize("bench", ["615"], indirect=True)
async def test_memory_by_cgroup_holds_for_all_of_a_runs_processes(bench: Bench) -> None:
    """The driver refuses, at once and only the offender; the limit moves live, and nothing of it is left."""
    memory = CgroupMemory.found(bench.devices, NodeId("node-1"), state_dir=bench.directory)
    if memory is None:
        pytest.skip("no unified cgroup hierarchy that we may write to: limits by cgroup can't be tried here")
    slices = TimeSlice(bench.devices, bench.watchdog, memory=memory)
    piece = bench.a_slice(Mode.TIMESLICE)
    set_up = await slices.apply(A, piece)
    assert observed(set_up)["memory"] == (2048, 2048, 2048, "cgroup_memory_limit+watchdog")
    group = Path(set_up.cgroup)
    holders = [bench.hold(A, group=group) for _ in range(2)]
    assert holders[0].alloc(1200).isdecimal()
    assert holders[1].alloc(600) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert bench.hold(B).alloc(5000).isdecimal()
    memory.limit(A, bench.a_slice(Mode.TIMESLICE, memory_mib=4096))
    assert holders[1].alloc(600).isdecimal()
    assert bench.devices.memory_limit(bench.uuid, str(group)).used_mib == 2 * 256 + 1200 + 600
    for holder in holders:
        holder.process.kill()
        holder.process.wait()
    memory.reconcile({A})
    assert group.exists()
    memory.reconcile(())
    assert not group.exists()
    memory.close()
