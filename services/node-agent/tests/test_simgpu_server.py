"""The simulated node as processes see it: real workloads, real tools, and NVML."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from apportion.contracts.ids import DeviceUuid
from apportion.node_agent.nvml import DeviceLost, Devices, NoDriver, XidSeen, open_devices
from apportion.node_agent.simgpu import workload
from apportion.node_agent.simgpu.client import SOCKET_VARIABLE
from apportion.node_agent.simgpu.faults import Faults
from apportion.node_agent.simgpu.model import CONTEXT_MIB
from apportion.node_agent.simgpu.nvml import SimulatedNvml
from apportion.node_agent.simgpu.tools import directory_of

pytestmark = pytest.mark.integration

HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
import client
driver = client.Driver()
for line in sys.stdin:
    name, *arguments = line.split()
    try:
        print(name, getattr(driver, name)(*map(int, arguments)), flush=True)
    except client.GpuError as error:
        print(name, error.code, flush=True)
"""


class Node:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "node.sock"
        self.bin = directory_of(self.socket)
        command = [sys.executable, "-m", "apportion.node_agent.simgpu.server"]
        command += ["--socket", str(self.socket), "--devices", "2", "--profile", "a100-40"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.children: list[subprocess.Popen[Any]] = []

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"simgpu:")

    def env(self, **more: str) -> dict[str, str]:
        return {"PATH": f"{self.bin}:{os.defpath}", SOCKET_VARIABLE: str(self.socket), **more}

    def workload(self, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", workload.__file__, *arguments],
            env=self.env(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(process)
        return process

    def holder(self, **env: str) -> "Holder":
        return Holder(self, env)

    def tool(self, name: str, *arguments: str, text: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.bin / name, *arguments], input=text, env=self.env(**env), capture_output=True, text=True, check=False
        )

    def mps(self, *commands: str, pipe: Path | None = None) -> list[str]:
        done = self.tool(
            "nvidia-cuda-mps-control",
            text="\n".join(commands) + "\n",
            CUDA_MPS_PIPE_DIRECTORY=str(pipe or self.directory / "mps"),
        )
        return done.stdout.splitlines()

    def start_mps(self, device: str = "0") -> str:
        """A daemon for one device; its server's pid."""
        pipe = str(self.directory / "mps")
        env = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_VISIBLE_DEVICES": device}
        assert self.tool("nvidia-cuda-mps-control", "-d", **env).returncode == 0
        (pid,) = self.mps("start_server -uid 0", "get_server_list")
        return pid

    def close(self) -> None:
        if self.process.poll() is None:
            self.mps("quit")
        for child in self.children:
            child.kill()
            child.communicate()
        self.process.terminate()
        self.process.communicate()


class Holder:
    """A process that uses the driver as it is told."""

    def __init__(self, node: Node, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", HOLDER, str(Path(workload.__file__).parent)],
            env=node.env(**env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        node.children.append(self.process)

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer().partition(" ")[2]


@pytest.fixture
def node() -> Iterator[Node]:
    directory = Path(tempfile.mkdtemp(prefix="apportion-simgpu-"))
    made = Node(directory)
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def devices(node: Node) -> Iterator[Devices]:
    with open_devices(node.socket) as opened:
        yield opened


def eventually(claim: Callable[[], bool]) -> None:
    """Wait for what another process does; the test's own time limit is the only one."""
    while not claim():
        time.sleep(0.005)


def first(devices: Devices) -> DeviceUuid:
    return devices.inventory()[0].uuid


def test_a_workload_trains_and_says_what_it_did(node: Node) -> None:
    process = node.workload("train", "--seconds", "0.3", "--memory-mib", "4000", "--exit-code", "5")
    out, err = process.communicate()
    assert (process.returncode, err) == (5, "")
    assert out == "train steps=2 device_ms=300 devices=2 mps=0 terminated=0\n"


def test_a_workload_that_asks_too_much_ends_with_its_own_code(node: Node) -> None:
    process = node.workload("train", "--memory-mib", "50000")
    _, err = process.communicate()
    assert process.returncode == 77
    assert "CUDA_ERROR_OUT_OF_MEMORY" in err


def test_a_workload_checkpoints_when_asked_to_end_and_goes_on_from_there(node: Node, devices: Devices) -> None:
    saved = node.directory / "saved"
    arguments = ("train", "--seconds", "600", "--step-ms", "20", "--checkpoint", str(saved))
    process = node.workload(*arguments)
    eventually(lambda: devices.processes(first(devices)) != ())
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    steps = int(saved.read_text())
    again = node.workload("train", "--seconds", str(0.02 * (steps + 3)), *arguments[3:])
    out, _ = again.communicate()
    assert again.returncode == 0
    assert f"steps={steps + 3} device_ms=60 " in out


def test_memory_belongs_to_the_process_and_ends_with_it(node: Node, devices: Devices) -> None:
    uuid = first(devices)
    before = devices.reading(uuid)
    holder = node.holder()
    assert holder.ask("alloc", 0, 8000).isdecimal()
    (entry,) = devices.processes(uuid)
    assert (entry.pid, entry.used_mib, entry.is_mps_client) == (holder.process.pid, 8000 + CONTEXT_MIB, False)
    assert devices.reading(uuid).used_mib == before.used_mib + 8000 + CONTEXT_MIB
    holder.process.kill()
    eventually(lambda: devices.processes(uuid) == ())
    assert devices.reading(uuid).free_mib == before.free_mib


def test_memory_errors_are_counted_and_what_a_board_does_not_count_is_not_told(node: Node, devices: Devices) -> None:
    """Simulated boards move nothing over PCIe, and don't say that they moved nothing."""
    uuid = first(devices)
    with Faults(node.socket) as faults:
        faults.ecc(0, corrected=3, uncorrected=1)
    reading = devices.reading(uuid)
    assert (reading.ecc_corrected, reading.ecc_uncorrected) == (3, 1)
    assert (reading.pcie_sent_bytes, reading.pcie_received_bytes) == (None, None)


def test_a_child_that_inherited_the_connection_does_not_keep_the_memory(node: Node, devices: Devices) -> None:
    script = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); import client; d = client.Driver(); d.alloc(0, 5000); "
        "child = os.fork(); print(child, flush=True); time.sleep(60 if child == 0 else 0); os._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script, str(Path(workload.__file__).parent)],
        env=node.env(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # which its own end ends
        assert process.stdout is not None
        child = int(process.stdout.readline())
    try:
        eventually(lambda: devices.processes(first(devices)) == ())
    finally:
        os.kill(child, signal.SIGKILL)


def test_mps_limits_hold_for_the_offender_and_its_neighbour_does_not_notice(node: Node, devices: Devices) -> None:
    uuid = first(devices)
    server = node.start_mps()
    node.mps(f"set_device_pinned_mem_limit {server} {uuid} 10G", f"set_active_thread_percentage {server} 50")
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(node.directory / "mps"), "CUDA_VISIBLE_DEVICES": uuid}
    victim, offender = node.holder(**env), node.holder(**env)
    assert victim.ask("alloc", 0, 9000).isdecimal()
    assert offender.ask("alloc", 0, 9000).isdecimal()
    assert offender.ask("alloc", 0, 2000) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert victim.ask("alloc", 0, 900).isdecimal()
    clients = {entry.pid for entry in devices.processes(uuid) if entry.is_mps_client}
    assert clients == {victim.process.pid, offender.process.pid}
    assert node.mps(f"get_client_list {server}") == sorted(map(str, clients), key=int)


def test_without_mps_the_neighbour_runs_out_of_memory(node: Node) -> None:
    """The same two processes with nothing enforced: the one that kept its quota is hurt."""
    offender, victim = node.holder(), node.holder()
    assert offender.ask("alloc", 0, 35000).isdecimal()
    assert victim.ask("alloc", 0, 9000) == "CUDA_ERROR_OUT_OF_MEMORY"


def test_an_illegal_access_fails_the_waiting_neighbour_under_mps_alone(node: Node, devices: Devices) -> None:
    uuid = first(devices)
    node.start_mps()
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(node.directory / "mps"), "CUDA_VISIBLE_DEVICES": uuid}
    neighbour, offender, apart = node.holder(**env), node.holder(**env), node.holder()
    assert apart.ask("alloc", 0, 100).isdecimal()
    assert neighbour.ask("launch", 0, 10, 60_000_000) == "None"
    neighbour.tell("sync", 0)
    devices.watch_xids([uuid])
    assert offender.ask("illegal_access", 0) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert neighbour.answer() == "sync CUDA_ERROR_ILLEGAL_ADDRESS"
    assert apart.ask("alloc", 0, 100).isdecimal()
    assert devices.wait_xid(5000) == XidSeen(uuid=uuid, xid=31)


def test_a_killed_daemon_fails_its_clients_and_leaves_a_stale_pid_file(node: Node) -> None:
    node.start_mps()
    client = node.holder(CUDA_MPS_PIPE_DIRECTORY=str(node.directory / "mps"))
    assert client.ask("alloc", 0, 100).isdecimal()
    daemon = int((node.directory / "mps" / "nvidia-cuda-mps-control.pid").read_text())
    os.kill(daemon, signal.SIGKILL)
    eventually(lambda: node.mps("ps") == ["Cannot find MPS control daemon process"])
    assert client.ask("alloc", 0, 100) == "CUDA_ERROR_MPS_CONNECTION_FAILED"
    assert (node.directory / "mps" / "nvidia-cuda-mps-control.pid").exists()


def test_a_second_daemon_for_the_same_directory_is_refused_and_quit_ends_both_processes(node: Node) -> None:
    server = int(node.start_mps())
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": str(node.directory / "mps")}
    assert node.tool("nvidia-cuda-mps-control", "-d", **pipe).returncode == 1
    daemon = int((node.directory / "mps" / "nvidia-cuda-mps-control.pid").read_text())
    node.mps("quit")

    def is_gone(pid: int) -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    eventually(lambda: is_gone(daemon) and is_gone(server))


def test_the_peak_of_an_ended_process_is_remembered_where_accounts_are_kept(node: Node, devices: Devices) -> None:
    uuid = first(devices)
    assert devices.keep_accounts(uuid)
    holder = node.holder()
    handle = holder.ask("alloc", 0, 7000)
    holder.ask("free", handle)
    holder.ask("alloc", 0, 100)
    holder.process.kill()
    eventually(lambda: devices.processes(uuid) == ())
    account = devices.account(uuid, holder.process.pid)
    assert account is not None
    assert (account.peak_mib, account.is_running) == (7000 + CONTEXT_MIB, False)
    assert devices.account(uuid, 1) is None


def test_a_lost_device_leaves_the_inventory_and_its_calls_say_so(node: Node, devices: Devices) -> None:
    lost, kept = (info.uuid for info in devices.inventory())
    devices.watch_xids([lost, kept])
    with Faults(node.socket) as faults:
        faults.xid(0, 79)
    assert devices.wait_xid(5000) == XidSeen(uuid=lost, xid=79)
    assert devices.wait_xid(0) is None
    assert [info.uuid for info in devices.inventory()] == [kept]
    with pytest.raises(DeviceLost):
        devices.reading(lost)
    with Faults(node.socket) as faults:
        faults.reset(0)
        faults.heat(0, 50)
    assert (devices.reading(lost).temperature_c or 0) > 80


def test_the_inventory_says_what_the_boards_are(devices: Devices) -> None:
    info = devices.inventory()[1]
    assert (info.index, info.name, info.architecture) == (1, "NVIDIA A100-SXM4-40GB", "ampere")
    assert (info.compute_capability, info.sms, info.memory_mib, info.usable_mib) == ((8, 0), 108, 40960, 40448)
    assert (info.is_mig_capable, info.is_mig_enabled, info.numa_node) == (True, False, None)
    driver = devices.driver()
    assert (driver.driver_branch, driver.cuda_version, driver.is_simulated) == (580, (13, 0), True)


def test_the_surface_is_pynvmls(node: Node) -> None:
    """Structs and exceptions are pynvml's own, so the agent's code can't tell the difference."""
    nvml = SimulatedNvml(node.socket)
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert isinstance(nvml.nvmlDeviceGetMemoryInfo(handle), pynvml.c_nvmlMemory_t)
    second = nvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    assert isinstance(second, pynvml.c_nvmlMemory_v2_t)
    assert second.total == second.used + second.free + second.reserved
    assert isinstance(nvml.nvmlDeviceGetUtilizationRates(handle), pynvml.c_nvmlUtilization_t)
    assert isinstance(nvml.nvmlDeviceGetPciInfo(handle), pynvml.nvmlPciInfo_t)
    assert nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(handle)) is handle
    nvml.nvmlDeviceSetComputeMode(handle, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    assert nvml.nvmlDeviceGetComputeMode(handle) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    events = nvml.nvmlEventSetCreate()
    limits = pynvml.c_nvmlGetMemoryLimits_v1_t()
    for refused, call in (
        (pynvml.NVMLError_InvalidArgument, lambda: nvml.nvmlDeviceGetHandleByIndex(7)),
        (pynvml.NVMLError_NotFound, lambda: nvml.nvmlDeviceGetHandleByUUID("GPU-0")),
        (pynvml.NVMLError_NotFound, lambda: nvml.nvmlDeviceGetProcessUtilization(handle, 0)),
        (pynvml.NVMLError_NotFound, lambda: nvml.nvmlDeviceGetAccountingStats(handle, 1)),
        (pynvml.NVMLError_FunctionNotFound, lambda: nvml.nvmlDeviceGetMemoryLimits_v1(handle, limits)),
        (pynvml.NVMLError_Timeout, lambda: nvml.nvmlEventSetWait(events, 0)),
    ):
        with pytest.raises(refused):
            call()
    nvml.nvmlEventSetFree(events)
    nvml.nvmlShutdown()


def test_no_node_at_the_socket_is_no_driver() -> None:
    with pytest.raises(NoDriver), open_devices(Path("/no/such/node.sock")):
        pass


def test_smi_lists_queries_and_sets(node: Node, devices: Devices) -> None:
    uuid = first(devices)
    assert node.tool("nvidia-smi", "-L").stdout.startswith(f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {uuid})\n")
    holder = node.holder()
    holder.ask("alloc", 0, 1000)
    fields = "--query-gpu=index,memory.total,memory.used"
    queried = node.tool("nvidia-smi", "-i", uuid, fields, "--format=csv,noheader,nounits")
    assert queried.stdout == f"0, 40960, {1000 + CONTEXT_MIB}\n"
    apps = node.tool("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    assert apps.stdout == f"{holder.process.pid}, {1000 + CONTEXT_MIB} MiB\n"
    assert node.tool("nvidia-smi", "-i", "0", "-c", "EXCLUSIVE_PROCESS").returncode == 0
    assert devices.compute_mode(uuid) == "exclusive_process"
    assert node.tool("nvidia-smi", "-i", "9").returncode == 6


def test_bad_messages_are_answered_and_the_node_goes_on(node: Node, devices: Devices) -> None:
    from apportion.node_agent.simgpu.client import Channel, GpuError

    channel = Channel(str(node.socket))
    for line in (
        "alloc\x1f0\x1f5",
        "nonsense",
        "hello",
        "alloc\x1fx\x1fy",
        "\ud800".encode("utf-8", "replace").decode(),
    ):
        with pytest.raises(GpuError):
            channel.call(line)
    channel.send('{"op": "device", "index": "x"}')
    assert b"NVML_ERROR_INVALID_ARGUMENT" in channel.read_line()
    channel.close()
    assert len(devices.inventory()) == 2
