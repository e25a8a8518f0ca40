"""The node's devices, real or simulated: the vendor's units and structs become ours on this page.

The module ``pynvml`` and its stand-in for simulated nodes (simgpu/nvml.py) are used through the same calls. What
NVML refuses is raised as NvmlFailed; what a board or a driver simply doesn't have is None.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import pynvml

from apportion.contracts.ids import DeviceUuid
from apportion.contracts.units import mib_from_bytes, mib_holding_bytes
from apportion.node_agent.health import HealthReading
from apportion.node_agent.nvml_mig import MigBoards
from apportion.node_agent.simgpu.nvml import SimulatedNvml

_CORES_PER_SM: Final = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_SM_SINCE: Final = 128
"""All compute capabilities after 8.0 so far."""
_EVENTS: Final = (
    int(pynvml.nvmlEventTypeXidCriticalError)
    | int(pynvml.nvmlEventTypeDoubleBitEccError)
    | int(pynvml.nvmlEventTypeDramRetirementEvent)
    | int(pynvml.nvmlEventTypeDramRetirementFailure)
    | int(pynvml.nvmlEventTypeNonFatalPoisonError)
    | int(pynvml.nvmlEventTypeFatalPoisonError)
    | int(pynvml.nvmlEventTypeGpuUnavailableError)
    | int(pynvml.nvmlEventTypeGpuRecoveryAction)
)
_MIB: Final = 1024 * 1024
_LIMIT_NONE: Final = int(pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)
_CPU_WORD: Final = 64
_CPU_WORDS: Final = 16

_ARCHITECTURES: Final = {
    getattr(pynvml, name): name.removeprefix("NVML_DEVICE_ARCH_").lower()
    for name in dir(pynvml)
    if name.startswith("NVML_DEVICE_ARCH_")
}

LINK_SWITCH: Final = "switch"
COMPUTE_MODE_DEFAULT: Final = "default"
COMPUTE_MODE_PROHIBITED: Final = "prohibited"
COMPUTE_MODE_EXCLUSIVE: Final = "exclusive_process"
_COMPUTE_MODES: Final = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: COMPUTE_MODE_DEFAULT,
    pynvml.NVML_COMPUTEMODE_PROHIBITED: COMPUTE_MODE_PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: COMPUTE_MODE_EXCLUSIVE,
}


class DriverInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the node's driver is: it decides which ways of enforcing there are."""

    driver_version: str
    driver_branch: int
    """580 in 580.95.05."""
    cuda_version: tuple[int, int]
    is_simulated: bool


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a device is, as long as nobody changes its mode."""

    uuid: DeviceUuid
    index: int
    name: str
    architecture: str
    compute_capability: tuple[int, int]
    memory_mib: int
    """All of the board's memory."""
    usable_mib: int
    """What the driver doesn't keep for itself: what slices may be cut from."""
    sms: int
    pci_bus_id: str
    numa_node: int | None
    cpus: tuple[int, ...]
    """The CPUs near the device; empty where the driver doesn't say."""
    is_mig_capable: bool
    is_mig_enabled: bool
    pcie_generation: int
    """Of slot and board at most; 0 where the driver doesn't say, as with the next three."""
    pcie_lanes: int
    nvlinks: int
    """Links that are up."""
    link_peers: tuple[str, ...]
    """What they lead to: LINK_SWITCH, bus ids of devices, or an empty text where the driver doesn't say."""
    encoder_percent: int
    """H.264 encoding capacity that is free."""


_MEMBERS: Final = {
    int(pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG): "ulVal",
    int(pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG): "ullVal",
}
"""Where in a field's value its number is, by the type that NVML says it has; else in ``uiVal``."""


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """How a device is now; None where the board has no such sensor."""

    uuid: DeviceUuid
    used_mib: int
    """Memory held by processes, rounded up; without what the driver keeps for itself."""
    free_mib: int
    busy_percent: int | None
    """Time in which any kernel ran. It says nothing about how many SMs were used."""
    temperature_c: int | None
    power_mw: int | None
    energy_mj: int | None
    pcie_sent_bytes: int | None
    """As the driver counts them; the count may begin again at 0."""
    pcie_received_bytes: int | None
    ecc_corrected: int | None
    """Since the driver was loaded."""
    ecc_uncorrected: int | None


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One process on one device; ``used_mib`` is rounded up, None where the driver doesn't tell."""

    pid: int
    used_mib: int | None
    is_mps_client: bool


class ProcessAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has used on a device, also after its end."""

    pid: int
    peak_mib: int | None
    busy_percent: int
    is_running: bool


class MemoryLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What a cgroup's processes may have of a device together; None without a limit."""

    hard_mib: int | None
    used_mib: int


class XidSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The driver reports something of a device: a fault by its number, or (0) that its health reads otherwise now."""

    uuid: DeviceUuid
    xid: int


class NvmlFailed(Exception):
    """NVML refused a call: ``code`` is NVML's number, ``name`` its name."""

    def __init__(self, function: str, code: int) -> None:
        name = type(pynvml.NVMLError(code)).__name__.removeprefix("NVMLError_")
        super().__init__(f"{function}: {name} ({code})")
        self.function = function
        self.code = code
        self.name = name


class DeviceLost(NvmlFailed):
    """The device has fallen off the bus, or needs a reset before it answers again."""


class NoDriver(Exception):
    """There is neither a driver nor a simulated node."""


_LOST: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
_MISSING: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})


class Devices:
    """The devices of this node. Calls block for some tens of microseconds; ``wait_xid`` for as long as asked."""

    def __init__(self, module: Any, *, is_simulated: bool) -> None:
        self._nvml = module
        self._is_simulated = is_simulated
        self._handles: dict[DeviceUuid, Any] = {}
        self._events: Any = None
        self.mig = MigBoards(module, call=self._call, handle=self._handle, failure=NvmlFailed)

    def __enter__(self) -> Self:
        """Start the library; raises NoDriver where there is none."""
        try:
            self._nvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoDriver(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Let the library go."""
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
            self._events = None
        self._nvml.nvmlShutdown()

    def driver(self) -> DriverInfo:
        """The driver's versions."""
        version = str(self._call("nvmlSystemGetDriverVersion"))
        cuda = int(self._call("nvmlSystemGetCudaDriverVersion_v2"))
        return DriverInfo(
            driver_version=version,
            driver_branch=int(version.partition(".")[0]),
            cuda_version=(cuda // 1000, cuda % 1000 // 10),
            is_simulated=self._is_simulated,
        )

    def inventory(self) -> tuple[DeviceInfo, ...]:
        """All devices that answer, by index; those that are lost are left out."""
        found = []
        for index in range(int(self._call("nvmlDeviceGetCount"))):
            try:
                handle = self._call("nvmlDeviceGetHandleByIndex", index)
                info = self._info(handle)
            except DeviceLost:
                continue
            self._handles[info.uuid] = handle
            found.append(info)
        return tuple(found)

    def info(self, uuid: DeviceUuid) -> DeviceInfo:
        """What the device is."""
        return self._info(self._handle(uuid))

    def reading(self, uuid: DeviceUuid) -> DeviceReading:
        """How the device is now."""
        handle = self._handle(uuid)
        memory = self._call("nvmlDeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
        rates = self._optional("nvmlDeviceGetUtilizationRates", handle)
        return DeviceReading(
            uuid=uuid,
            used_mib=mib_holding_bytes(int(memory.used)),
            free_mib=mib_from_bytes(int(memory.free)),
            busy_percent=None if rates is None else int(rates.gpu),
            temperature_c=self._optional("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU),
            power_mw=self._optional("nvmlDeviceGetPowerUsage", handle),
            energy_mj=self._optional("nvmlDeviceGetTotalEnergyConsumption", handle),
            # Counters: the throughput that NVML offers beside them takes 20 ms of the caller's time, each way.
            pcie_sent_bytes=self._field(handle, self._nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES),
            pcie_received_bytes=self._field(handle, self._nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES),
            ecc_corrected=self._ecc(handle, self._nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(handle, self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        )

    def processes(self, uuid: DeviceUuid) -> tuple[ProcessMemory, ...]:
        """Who has a context on the device, by pid; one that is no MPS client where it should be escaped its limits.

        The MPS server itself is listed, and is not its own client.
        """
        handle = self._handle(uuid)
        # The unversioned names raise an error of another family on old drivers.
        everybody = self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle)
        clients = {entry.pid: entry for entry in self._call("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)}
        used = {entry.pid: entry.usedGpuMemory for entry in (*everybody, *clients.values())}
        return tuple(
            ProcessMemory(
                pid=pid,
                used_mib=None if count is None else mib_holding_bytes(int(count)),
                is_mps_client=pid in clients,
            )
            for pid, count in sorted(used.items())
        )

    def sm_percent_by_pid(self, uuid: DeviceUuid, *, since_us: int = 0) -> dict[int, int]:
        """SM use by process in the samples after ``since_us`` (the driver's clock); empty where there is none."""
        try:
            samples = self._call("nvmlDeviceGetProcessUtilization", self._handle(uuid), since_us)
        except NvmlFailed as failure:
            if failure.code == pynvml.NVML_ERROR_NOT_FOUND or failure.code in _MISSING:
                return {}
            raise
        return {int(sample.pid): int(sample.smUtil) for sample in samples}

    def compute_mode(self, uuid: DeviceUuid) -> str:
        """Who may have a context: one of COMPUTE_MODE_*."""
        return _COMPUTE_MODES[int(self._call("nvmlDeviceGetComputeMode", self._handle(uuid)))]

    def set_compute_mode(self, uuid: DeviceUuid, mode: str) -> None:
        """Choose who may have a context; needs root on hardware."""
        numbers = {name: number for number, name in _COMPUTE_MODES.items()}
        self._call("nvmlDeviceSetComputeMode", self._handle(uuid), numbers[mode])

    def keep_accounts(self, uuid: DeviceUuid) -> bool:
        """Have the driver remember each process's peak memory beyond its end; False where it can't."""
        handle = self._handle(uuid)
        try:
            if not int(self._call("nvmlDeviceGetAccountingMode", handle)):
                self._call("nvmlDeviceSetAccountingMode", handle, 1)
        except NvmlFailed as failure:
            if failure.code in _MISSING or failure.code == pynvml.NVML_ERROR_NO_PERMISSION:
                return False
            raise
        return True

    def account(self, uuid: DeviceUuid, pid: int) -> ProcessAccount | None:
        """What the process has used; None where no account was kept."""
        try:
            stats = self._call("nvmlDeviceGetAccountingStats", self._handle(uuid), pid)
        except NvmlFailed as failure:
            if failure.code == pynvml.NVML_ERROR_NOT_FOUND or failure.code in _MISSING:
                return None
            raise
        return ProcessAccount(
            pid=pid,
            peak_mib=None if stats.maxMemoryUsage is None else mib_holding_bytes(int(stats.maxMemoryUsage)),
            busy_percent=int(stats.gpuUtilization),
            is_running=bool(stats.isRunning),
        )

    def watch_xids(self, uuids: Iterable[DeviceUuid]) -> None:
        """Have faults of these devices reported by ``wait_xid`` from now on."""
        if self._events is None:
            self._events = self._call("nvmlEventSetCreate")
        for uuid in uuids:
            handle = self._handle(uuid)
            # Older drivers have fewer, and refuse a mask with one that they don't know.
            mask = int(self._call("nvmlDeviceGetSupportedEventTypes", handle)) & _EVENTS
            if mask:
                self._call("nvmlDeviceRegisterEvents", handle, mask, self._events)

    def wait_xid(self, timeout_ms: int) -> XidSeen | None:
        """The next fault of a watched device; None where there is none in time. Blocks: call it in a thread."""
        if self._events is None:
            time.sleep(timeout_ms / 1000)
            return None
        try:
            event = self._call("nvmlEventSetWait_v2", self._events, timeout_ms)
        except NvmlFailed as failure:
            if failure.code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        # The UUID is asked of no lost device: the handle is one that we know.
        is_xid = int(event.eventType) == pynvml.nvmlEventTypeXidCriticalError
        return XidSeen(uuid=self._uuid_of(event.device), xid=int(event.eventData) if is_xid else 0)

    def health(self, uuid: DeviceUuid) -> HealthReading:
        """What the device tells of its own health."""
        handle = self._handle(uuid)
        rows = self._optional("nvmlDeviceGetRemappedRows", handle)
        return HealthReading(
            recovery_action=self._field(handle, self._nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            uncorrectable=self._ecc(handle, self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            temperature_c=self._optional("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU),
            slowdown_c=self._optional(
                "nvmlDeviceGetTemperatureThreshold", handle, self._nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
        )

    def _field(self, handle: Any, number: int) -> int | None:
        values = self._optional("nvmlDeviceGetFieldValues", handle, [number])
        if values is None or int(values[0].nvmlReturn) != pynvml.NVML_SUCCESS:
            return None
        value, kind = values[0].value, int(values[0].valueType)
        return int(getattr(value, _MEMBERS.get(kind, "uiVal")))

    def _ecc(self, handle: Any, kind: int) -> int | None:
        """Memory errors of that kind since the driver was loaded; None where the board doesn't count them."""
        found = self._optional("nvmlDeviceGetTotalEccErrors", handle, kind, self._nvml.NVML_VOLATILE_ECC)
        return None if found is None else int(found)

    def _uuid_of(self, device: Any) -> DeviceUuid:
        for uuid, handle in self._handles.items():
            if handle is device or _address(handle) == _address(device):
                return uuid
        return DeviceUuid(str(self._call("nvmlDeviceGetUUID", device)))

    def _handle(self, uuid: DeviceUuid) -> Any:
        handle = self._handles.get(uuid)
        if handle is None:
            handle = self._handles[uuid] = self._call("nvmlDeviceGetHandleByUUID", uuid)
        return handle

    def _info(self, handle: Any) -> DeviceInfo:
        capability = self._call("nvmlDeviceGetCudaComputeCapability", handle)
        memory = self._call("nvmlDeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
        mig = self._optional("nvmlDeviceGetMigMode", handle)
        peers = self._link_peers(handle)
        architecture = int(self._call("nvmlDeviceGetArchitecture", handle))
        bus_id = self._call("nvmlDeviceGetPciInfo_v3", handle).busId
        words = self._optional("nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS) or ()
        major, minor = int(capability[0]), int(capability[1])
        return DeviceInfo(
            uuid=DeviceUuid(str(self._call("nvmlDeviceGetUUID", handle))),
            index=int(self._call("nvmlDeviceGetIndex", handle)),
            name=str(self._call("nvmlDeviceGetName", handle)),
            architecture=_ARCHITECTURES.get(architecture, "unknown"),
            compute_capability=(major, minor),
            memory_mib=mib_from_bytes(int(memory.total)),
            usable_mib=mib_from_bytes(int(memory.total) - int(memory.reserved)),
            sms=int(self._call("nvmlDeviceGetNumGpuCores", handle))
            // _CORES_PER_SM.get((major, minor), _CORES_PER_SM_SINCE),
            pci_bus_id=bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id),
            numa_node=self._optional("nvmlDeviceGetNumaNodeId", handle),
            cpus=tuple(
                _CPU_WORD * position + bit
                for position, word in enumerate(words)
                for bit in range(_CPU_WORD)
                if int(word) >> bit & 1
            ),
            is_mig_capable=mig is not None,
            is_mig_enabled=mig is not None and int(mig[0]) == self._nvml.NVML_DEVICE_MIG_ENABLE,
            pcie_generation=self._optional("nvmlDeviceGetMaxPcieLinkGeneration", handle) or 0,
            pcie_lanes=self._optional("nvmlDeviceGetMaxPcieLinkWidth", handle) or 0,
            nvlinks=len(peers),
            link_peers=tuple(sorted(set(peers))),
            encoder_percent=self._optional("nvmlDeviceGetEncoderCapacity", handle, self._nvml.NVML_ENCODER_QUERY_H264)
            or 0,
        )

    def _link_peers(self, handle: Any) -> list[str]:
        """What is at the other end of each link that is up: LINK_SWITCH, a PCI bus id, or nothing that is known."""
        peers = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if int(self._call("nvmlDeviceGetNvLinkState", handle, link)):
                    peers.append(self._link_peer(handle, link))
            except NvmlFailed as failure:
                if failure.code in _MISSING or failure.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                    break  # Beyond the board's last link.
                raise
        return peers

    def _link_peer(self, handle: Any, link: int) -> str:
        kind = self._optional("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return LINK_SWITCH
        if kind != pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            return ""
        bus_id = self._call("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link).busId
        return bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)

    def set_memory_limit(self, uuid: DeviceUuid, cgroup: str, *, mib: int | None) -> None:
        """Hold a cgroup's processes together to so much of the device; None lifts it. Lowering takes nothing back."""
        limits = pynvml.c_nvmlSetMemoryLimits_v1_t()
        limits.nameSpace = cgroup.encode()
        limits.softLimit = 0 if mib is None else mib * _MIB
        limits.hardLimit = _LIMIT_NONE if mib is None else mib * _MIB
        self._call("nvmlDeviceSetMemoryLimits_v1", self._handle(uuid), limits)

    def memory_limit(self, uuid: DeviceUuid, cgroup: str) -> MemoryLimit:
        """What was set, and what is in use."""
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t()
        limits.nameSpace = cgroup.encode()
        self._call("nvmlDeviceGetMemoryLimits_v1", self._handle(uuid), limits)
        hard = int(limits.hardLimit)
        return MemoryLimit(
            hard_mib=None if hard >= _LIMIT_NONE else mib_from_bytes(hard),
            used_mib=mib_holding_bytes(int(limits.currentUsed)),
        )

    def memory_limits_answer(self, cgroup: str) -> str:
        """How the driver answers a question for a cgroup's device memory limits: ``ok``, or the error's name.

        Of all devices the best answer counts: one in MIG mode has no such limits, and needs none.
        """
        limits = pynvml.c_nvmlGetMemoryLimits_v1_t()
        limits.nameSpace = cgroup.encode()
        said = "NotFound"
        for index in range(int(self._call("nvmlDeviceGetCount"))):
            try:
                self._call("nvmlDeviceGetMemoryLimits_v1", self._call("nvmlDeviceGetHandleByIndex", index), limits)
            except NvmlFailed as failure:
                said = failure.name
            else:
                return "ok"
        return said

    def _optional(self, function: str, *arguments: Any) -> Any:
        try:
            return self._call(function, *arguments)
        except NvmlFailed as failure:
            if failure.code in _MISSING:
                return None
            raise

    def _call(self, function: str, *arguments: Any) -> Any:
        call: Callable[..., Any] = getattr(self._nvml, function)
        try:
            return call(*arguments)
        except pynvml.NVMLError as error:
            kind = DeviceLost if error.value in _LOST else NvmlFailed
            raise kind(function, error.value) from error


def _address(handle: Any) -> int | None:
    """Where a real handle points; two ctypes pointers to the same device are different objects."""
    contents = getattr(handle, "contents", None) if not isinstance(handle, int) else None
    return None if contents is None else int(pynvml.addressof(contents))


def open_devices(simulated_node: Path | None) -> Devices:
    """The devices of the simulated node at this socket; without one, the machine's own. Not started yet.

    The choice is told, not guessed: a machine with a driver may well run simulated nodes for a demonstration.
    """
    if simulated_node is not None:
        return Devices(SimulatedNvml(simulated_node), is_simulated=True)
    return Devices(pynvml, is_simulated=False)


def has_driver() -> bool:
    """True where NVML can be started on this machine."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True
