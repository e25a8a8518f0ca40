"""pynvml's functions for a simulated node: same names, arguments, ctypes structs and exceptions.

``SimulatedNvml`` is used in place of the module: what isn't simulated is pynvml's own (constants, structs, exception
classes), and an NVML function that is missing here fails with FUNCTION_NOT_FOUND, as an older driver would.
"""

# ruff: noqa: D102  the names are pynvml's, and so is their documentation

import ctypes
import os
import socket
import threading
from pathlib import Path
from typing import Any, Final

import msgspec
import pynvml

_MIB: Final = 1024 * 1024
_EVENTS: Final = {
    "xid": int(pynvml.nvmlEventTypeXidCriticalError),
    "double_bit": int(pynvml.nvmlEventTypeDoubleBitEccError),
    "recovery_action": int(pynvml.nvmlEventTypeGpuRecoveryAction),
}
_SUPPORTED_EVENTS: Final = sum(_EVENTS.values())
_NOT_AVAILABLE: Final = 0xFFFFFFFF
_NO_SAMPLE: Final = pynvml.NVML_ERROR_NOT_FOUND


def _raise(code: int) -> Any:
    raise pynvml.NVMLError(code)


class Link:
    """A connection for questions, one at a time, made anew after the node was started again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._buffer = b""

    def open(self) -> None:
        """Connect now; raises OSError where no node listens."""
        with self._lock:
            self._connect()

    def close(self) -> None:
        """Disconnect; the next question connects anew."""
        with self._lock:
            self._drop()

    def ask(self, operation: str, **fields: object) -> Any:
        """The node's answer; its refusals as pynvml's exceptions."""
        request = msgspec.json.encode({"op": operation, **fields}) + b"\n"
        with self._lock:
            try:
                line = self._exchange(request)
            except OSError:
                self._drop()
                try:
                    line = self._exchange(request)
                except OSError as error:
                    self._drop()
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN) from error
        answer = msgspec.json.decode(line)
        if "error" in answer:
            _raise(getattr(pynvml, answer["error"], pynvml.NVML_ERROR_UNKNOWN))
        return answer["ok"]

    def _exchange(self, request: bytes) -> bytes:
        connection = self._socket or self._connect()
        connection.sendall(request)
        while b"\n" not in self._buffer:
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError(self._path)
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _connect(self) -> socket.socket:
        self._drop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            raise
        self._socket = connection
        return connection

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._buffer = b""


class _Handle:
    """A device's handle, or with ``instance`` that of a MIG device; opaque, as NVML's."""

    def __init__(self, index: int, uuid: str, instance: int | None = None) -> None:
        self.index = index
        self.uuid = uuid
        self.instance = instance


class _EventSet:
    """Which devices' events are waited for, and from where on."""

    def __init__(self, link: Link, after: int) -> None:
        self.link = link
        self.after = after
        self.indexes: set[int] = set()
        self.kinds: set[str] = set()


class SimulatedNvml:
    """In place of the module ``pynvml``, for the node at one socket. Thread-safe, as NVML is."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._link = Link(socket_path)
        self._count = 0
        self._uuids: list[str] = []
        self._handles: list[_Handle] = []

    def __getattr__(self, name: str) -> Any:
        """Pynvml's constants, structs and exceptions; its functions only where they are simulated."""
        if name.startswith("nvml") and callable(getattr(pynvml, name, None)) and not _is_struct(name):
            return _function_not_found
        return getattr(pynvml, name)

    # The library

    def nvmlInit(self) -> None:
        if self._count == 0:
            try:
                self._link.open()
            except OSError as error:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED) from error
            self._uuids = self._link.ask("system")["uuids"]
            self._handles = [_Handle(index, uuid) for index, uuid in enumerate(self._uuids)]
        self._count += 1

    def nvmlShutdown(self) -> None:
        self._check()
        self._count -= 1
        if self._count == 0:
            self._link.close()

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self._ask("system")["driver_version"])

    def nvmlSystemGetNVMLVersion(self) -> str:
        return f"{self._ask('system')['cuda_version'] // 1000}.{self._ask('system')['driver_version']}"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return int(self._ask("system")["cuda_version"])

    nvmlSystemGetCudaDriverVersion = nvmlSystemGetCudaDriverVersion_v2  # noqa: N815

    # Handles

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self._handles)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        self._check()
        if not 0 <= index < len(self._handles):
            _raise(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._device(self._handles[index])  # A lost board has no handle.
        return self._handles[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> _Handle:
        self._check()
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        if text.startswith("MIG-"):
            for handle in self._handles:
                for one in self._mig_devices(handle):
                    if one.uuid == text:
                        return one
        if text not in self._uuids:
            _raise(pynvml.NVML_ERROR_NOT_FOUND)
        return self.nvmlDeviceGetHandleByIndex(self._uuids.index(text))

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str | bytes) -> _Handle:
        self._check()
        text = (pciBusId.decode() if isinstance(pciBusId, bytes) else pciBusId).upper()
        for handle in self._handles:
            if _bus_id(handle.index).endswith(text):
                return self.nvmlDeviceGetHandleByIndex(handle.index)
        return _raise(pynvml.NVML_ERROR_NOT_FOUND)  # type: ignore[no-any-return]

    # What a device is

    def nvmlDeviceGetIndex(self, handle: _Handle) -> int:
        self._check()
        return handle.index

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:
        self._device(handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: _Handle) -> str:
        return str(self._device(handle)["name"])

    def nvmlDeviceGetSerial(self, handle: _Handle) -> str:
        self._device(handle)
        return str(int(handle.uuid[-12:], 16))

    def nvmlDeviceGetMinorNumber(self, handle: _Handle) -> int:
        self._device(handle)
        return handle.index

    def nvmlDeviceGetPciInfo_v3(self, handle: _Handle) -> Any:
        self._device(handle)
        info = pynvml.nvmlPciInfo_t()
        info.domain, info.bus, info.device = 0, _bus(handle.index), 0
        info.busId = _bus_id(handle.index).encode()
        info.busIdLegacy = _bus_id(handle.index)[4:].encode()
        return info

    nvmlDeviceGetPciInfo = nvmlDeviceGetPciInfo_v3  # noqa: N815

    def nvmlDeviceGetArchitecture(self, handle: _Handle) -> int:
        return int(getattr(pynvml, f"NVML_DEVICE_ARCH_{self._device(handle)['architecture']}"))

    def nvmlDeviceGetCudaComputeCapability(self, handle: _Handle) -> tuple[int, int]:
        major, minor = self._device(handle)["compute_capability"]
        return major, minor

    def nvmlDeviceGetNumGpuCores(self, handle: _Handle) -> int:
        return int(self._device(handle)["cores"])

    def nvmlDeviceGetNumaNodeId(self, handle: _Handle) -> int:
        self._device(handle)
        return _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)  # type: ignore[no-any-return]  # as on PCIe boards

    def nvmlDeviceGetCpuAffinity(self, handle: _Handle, cpuSetSize: int) -> Any:
        """All CPUs of this machine: a simulated board is near to each of them."""
        self._device(handle)
        words = (pynvml.c_ulonglong * cpuSetSize)()
        for cpu in range(min(os.cpu_count() or 1, 64 * cpuSetSize)):
            words[cpu // 64] |= 1 << (cpu % 64)
        return words

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: _Handle) -> int:
        return int(self._device(handle)["pcie_generation"])

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: _Handle) -> int:
        self._device(handle)
        return 16

    def nvmlDeviceGetNvLinkState(self, device: _Handle, link: int) -> int:
        links = self._device(device)["nvlinks"]
        if not links:
            _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= links:
            _raise(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: _Handle, link: int) -> int:
        self.nvmlDeviceGetNvLinkState(handle, link)
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)  # as in the machines that these boards are sold in

    def nvmlDeviceGetEncoderCapacity(self, handle: _Handle, encoderQueryType: int) -> int:
        del encoderQueryType
        self._device(handle)
        return _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)  # type: ignore[no-any-return]  # none of these boards has one

    # MIG

    def nvmlDeviceGetMigMode(self, device: _Handle) -> list[int]:
        mig = self._ask("mig", index=device.index)
        return [int(mig["enabled"]), int(mig["pending"])]

    def nvmlDeviceSetMigMode(self, device: _Handle, mode: int) -> int:
        self._ask("set_mig", index=device.index, enabled=bool(mode))
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: _Handle, profile: int, version: int = 2) -> Any:
        if version != 2:
            _raise(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        sizes: list[Any] = self._ask("mig", index=device.index)["sizes"]
        size = next((one for one in sizes if one["profile"] == profile), None) or _raise(
            pynvml.NVML_ERROR_NOT_SUPPORTED
        )
        info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
        info.id, info.sliceCount, info.instanceCount = size["id"], size["compute_slices"], size["instances_max"]
        info.multiprocessorCount, info.memorySizeMB = size["sms"], size["memory_mib"]
        info.copyEngineCount, info.decoderCount = size["copy_engines"], size["decoders"]
        info.jpegCount, info.ofaCount = size["jpegs"], size["ofas"]
        info.name = f"MIG {size['name']}".encode()
        return info

    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: _Handle, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        size = self._size(device, profileId)
        _fill(placementsRef, countRef, [_placement(start, size["size"]) for start in size["starts"]])
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceRemainingCapacity(self, device: _Handle, profileId: int) -> int:
        return int(self._size(device, profileId)["remaining"])

    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: _Handle, profileId: int, placement: Any) -> Any:
        place = _referred(placement)
        number = self._ask(
            "create_instance", index=device.index, profile_id=profileId, start=place.start, size=place.size
        )
        return _pointer(pynvml.c_nvmlGpuInstance_t, device.index, number)

    def nvmlDeviceGetGpuInstances(self, device: _Handle, profileId: int, gpuInstancesRef: Any, countRef: Any) -> int:
        self._size(device, profileId)
        found = [one for one in self._ask("mig", index=device.index)["instances"] if one["profile_id"] == profileId]
        kind = pynvml.c_nvmlGpuInstance_t
        _fill(gpuInstancesRef, countRef, [_pointer(kind, device.index, one["id"]) for one in found])
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetGpuInstanceById(self, device: _Handle, gpuInstanceId: int) -> Any:
        self._instance(device.index, gpuInstanceId)
        return _pointer(pynvml.c_nvmlGpuInstance_t, device.index, gpuInstanceId)

    def nvmlGpuInstanceGetInfo(self, gpuInstance: Any) -> Any:
        index, number = _address(gpuInstance)
        one = self._instance(index, number)
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.id, info.profileId, info.placement = number, one["profile_id"], _placement(one["start"], one["size"])
        return info

    def nvmlGpuInstanceDestroy(self, gpuInstance: Any) -> int:
        self._change(gpuInstance, "destroy")
        return int(pynvml.NVML_SUCCESS)

    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, device: Any, profile: int, engProfile: int, version: int = 2
    ) -> Any:
        """The one size that is simulated: all of the GPU instance."""
        index, number = _address(device)
        one = self._instance(index, number)
        size = self._size(self._handles[index], one["profile_id"])
        if _COMPUTE_PROFILES.get(size["compute_slices"]) != profile or engProfile:
            _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = (
            pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
            if version == 2
            else pynvml.c_nvmlComputeInstanceProfileInfo_t()
        )
        info.id, info.sliceCount, info.instanceCount = profile, size["compute_slices"], 1
        info.multiprocessorCount = size["sms"]
        return info

    def nvmlGpuInstanceCreateComputeInstance(self, gpuInstance: Any, profileId: int) -> Any:
        del profileId
        self._change(gpuInstance, "create_compute")
        return _pointer(pynvml.c_nvmlComputeInstance_t, *_address(gpuInstance))

    def nvmlGpuInstanceGetComputeInstances(
        self, gpuInstance: Any, profileId: int, computeInstancesRef: Any, countRef: Any
    ) -> int:
        index, number = _address(gpuInstance)
        one = self._instance(index, number)
        size = self._size(self._handles[index], one["profile_id"])
        has_it = one["has_compute"] and _COMPUTE_PROFILES.get(size["compute_slices"]) == profileId
        kind = pynvml.c_nvmlComputeInstance_t
        _fill(computeInstancesRef, countRef, [_pointer(kind, index, number)] if has_it else [])
        return int(pynvml.NVML_SUCCESS)

    def nvmlComputeInstanceDestroy(self, computeInstance: Any) -> int:
        self._change(computeInstance, "destroy_compute")
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetMaxMigDeviceCount(self, device: _Handle) -> int:
        return max((one["instances_max"] for one in self._ask("mig", index=device.index)["sizes"]), default=0)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: _Handle, index: int) -> _Handle:
        found = self._mig_devices(device)
        if not 0 <= index < len(found):
            _raise(pynvml.NVML_ERROR_NOT_FOUND)
        return found[index]

    def nvmlDeviceIsMigDeviceHandle(self, device: _Handle) -> int:
        return int(device.instance is not None)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: _Handle) -> _Handle:
        return self._handles[migDevice.index]

    def nvmlDeviceGetGpuInstanceId(self, device: _Handle) -> int:
        if device.instance is None:
            _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._device(device)
        return int(device.instance or 0)

    def nvmlDeviceGetComputeInstanceId(self, device: _Handle) -> int:
        self.nvmlDeviceGetGpuInstanceId(device)
        return 0

    def nvmlDeviceGetAttributes_v2(self, device: _Handle) -> Any:
        one = self._instance(device.index, self.nvmlDeviceGetGpuInstanceId(device))
        size = self._size(self._handles[device.index], one["profile_id"])
        found = pynvml.c_nvmlDeviceAttributes()
        found.multiprocessorCount, found.memorySizeMB = size["sms"], size["memory_mib"]
        found.gpuInstanceSliceCount = found.computeInstanceSliceCount = size["compute_slices"]
        found.sharedCopyEngineCount, found.sharedDecoderCount = size["copy_engines"], size["decoders"]
        return found

    nvmlDeviceGetAttributes = nvmlDeviceGetAttributes_v2  # noqa: N815

    def _mig_devices(self, device: _Handle) -> list[_Handle]:
        try:
            found = self._ask("mig", index=device.index)["instances"]
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return []
            raise
        return [_Handle(device.index, one["uuid"], one["id"]) for one in found if one["has_compute"]]

    def _size(self, device: _Handle, profile_id: int) -> Any:
        sizes = self._ask("mig", index=device.index)["sizes"]
        size = next((one for one in sizes if one["id"] == profile_id), None)
        return size if size is not None else _raise(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _instance(self, index: int, number: int) -> Any:
        found = self._ask("mig", index=index)["instances"]
        one = next((one for one in found if one["id"] == number), None)
        return one if one is not None else _raise(pynvml.NVML_ERROR_NOT_FOUND)

    def _change(self, handle: Any, what: str) -> None:
        index, number = _address(handle)
        self._ask("change_instance", index=index, instance=number, what=what)

    # How it is

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle, version: int | None = None) -> Any:
        state = self._device(handle)
        total, reserved, used = (state[key] * _MIB for key in ("memory_mib", "reserved_mib", "used_mib"))
        if version:
            info = pynvml.c_nvmlMemory_v2_t()
            info.version, info.reserved, info.used = version, reserved, used
        else:
            info = pynvml.c_nvmlMemory_t()
            info.used = used + reserved
        info.total, info.free = total, total - reserved - used
        return info

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> Any:
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu = self._device(handle)["gpu_percent"]
        rates.memory = 0
        return rates

    def nvmlDeviceGetTemperature(self, handle: _Handle, sensor: int) -> int:
        if sensor != pynvml.NVML_TEMPERATURE_GPU:
            _raise(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(self._device(handle)["temperature_c"])

    def nvmlDeviceGetTemperatureThreshold(self, handle: _Handle, threshold: int) -> int:
        if threshold != pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN:
            _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(self._device(handle)["slowdown_c"])

    def nvmlDeviceGetRemappedRows(self, device: _Handle) -> tuple[int, int, int, int]:
        state = self._device(device)
        return 0, int(state["remapped_rows"]), int(state["remap_pending"]), int(state["remap_failed"])

    def nvmlDeviceGetTotalEccErrors(self, handle: _Handle, errorType: int, counterType: int) -> int:
        del counterType
        is_uncorrected = errorType == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return int(self._device(handle)["ecc_uncorrected" if is_uncorrected else "ecc_corrected"])

    def nvmlDeviceGetFieldValues(self, handle: _Handle, fieldIds: list[Any]) -> Any:
        """The fields about health; any other is answered with NOT_SUPPORTED in its own place, as NVML does."""
        state = self._device(handle)
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for place, field in enumerate(fieldIds):
            number = field[0] if isinstance(field, tuple) else field
            values[place].fieldId = number
            name = _FIELDS.get(number)
            values[place].nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if name is None else pynvml.NVML_SUCCESS
            values[place].value.uiVal = 0 if name is None else int(state[name])
        return values

    def nvmlDeviceGetPowerUsage(self, handle: _Handle) -> int:
        return int(self._device(handle)["power_mw"])

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: _Handle) -> int:
        return int(self._device(handle)["limit_mw"])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: _Handle) -> int:
        return int(self._device(handle)["energy_mj"])

    # Who uses it

    def nvmlDeviceGetComputeMode(self, handle: _Handle) -> int:
        return _MODES[self._device(handle)["compute_mode"]]

    def nvmlDeviceSetComputeMode(self, handle: _Handle, mode: int) -> None:
        names = {number: name for name, number in _MODES.items()}
        if mode not in names:
            _raise(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._ask("set_compute_mode", index=handle.index, mode=names[mode])

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: _Handle) -> list[Any]:
        return [_process(*entry) for entry in self._processes(handle, mps=False)]

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: _Handle) -> list[Any]:
        return [_process(*entry) for entry in self._processes(handle, mps=True)]

    def nvmlDeviceGetProcessUtilization(self, handle: _Handle, timeStamp: int) -> list[Any]:
        """SM use of the last second; NOT_FOUND where no process has a context, as without a sample."""
        del timeStamp
        entries = self._ask("process_utilization", index=handle.index, instance=handle.instance)
        if not entries:
            _raise(_NO_SAMPLE)
        samples = []
        for pid, percent in entries:
            sample = pynvml.c_nvmlProcessUtilizationSample_t()
            sample.pid, sample.smUtil = pid, percent
            samples.append(sample)
        return samples

    def nvmlDeviceGetAccountingMode(self, handle: _Handle) -> int:
        return int(self._device(handle)["accounting"])

    def nvmlDeviceSetAccountingMode(self, handle: _Handle, mode: int) -> None:
        self._ask("set_accounting", index=handle.index, enabled=bool(mode))

    def nvmlDeviceGetAccountingPids(self, handle: _Handle) -> list[int]:
        return list(self._ask("accounting_pids", index=handle.index))

    def nvmlDeviceGetAccountingStats(self, handle: _Handle, pid: int) -> Any:
        entry = self._ask("accounting_stats", index=handle.index, pid=pid)
        stats = pynvml.c_nvmlAccountingStats_t()
        stats.gpuUtilization, stats.memoryUtilization = entry["gpu_percent"], 0
        stats.maxMemoryUsage = entry["peak_mib"] * _MIB
        stats.time, stats.startTime = entry["time_ms"], entry["started_at_us"]
        stats.isRunning = int(entry["is_running"])
        return stats

    def nvmlDeviceSetMemoryLimits_v1(self, device: _Handle, limits: Any) -> None:
        self._ask(
            "set_memory_limit",
            index=device.index,
            namespace=_text(limits.nameSpace),
            soft=limits.softLimit,
            hard=limits.hardLimit,
        )

    def nvmlDeviceGetMemoryLimits_v1(self, device: _Handle, limits: Any) -> None:
        limits.softLimit, limits.hardLimit, limits.currentUsed = self._ask(
            "memory_limit", index=device.index, namespace=_text(limits.nameSpace)
        )

    # Events

    def nvmlEventSetCreate(self) -> _EventSet:
        after = self._ask("system")["event_sequence"]
        return _EventSet(Link(self._path), after)  # A wait must not hold up questions, hence a link of its own.

    def nvmlDeviceGetSupportedEventTypes(self, handle: _Handle) -> int:
        self._device(handle)
        return _SUPPORTED_EVENTS

    def nvmlDeviceRegisterEvents(self, handle: _Handle, eventTypes: int, eventSet: _EventSet) -> None:
        self._device(handle)
        if eventTypes & ~_SUPPORTED_EVENTS:
            _raise(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if eventTypes:
            eventSet.indexes.add(handle.index)
            eventSet.kinds |= {kind for kind, number in _EVENTS.items() if eventTypes & number}

    def nvmlEventSetWait_v2(self, eventSet: _EventSet, timeoutms: int) -> Any:
        """The next event; raises NVMLError_Timeout where there is none in time."""
        self._check()
        event = eventSet.link.ask(
            "event",
            after=eventSet.after,
            indexes=sorted(eventSet.indexes),
            kinds=sorted(eventSet.kinds),
            timeout_ms=timeoutms,
        )
        if event is None:
            _raise(pynvml.NVML_ERROR_TIMEOUT)
        eventSet.after = event["sequence"]
        # Pynvml's struct holds a pointer that means nothing here, so a friendly object takes its place.
        return pynvml.nvmlFriendlyObject(
            {
                "device": self._handles[event["device"]],
                "eventType": _EVENTS[event["kind"]],
                "eventData": event["data"],
                "gpuInstanceId": _NOT_AVAILABLE if event["instance"] is None else event["instance"],
                "computeInstanceId": _NOT_AVAILABLE if event["instance"] is None else 0,
            }
        )

    nvmlEventSetWait = nvmlEventSetWait_v2  # noqa: N815

    def nvmlEventSetFree(self, eventSet: _EventSet) -> None:
        eventSet.link.close()

    def _processes(self, handle: _Handle, *, mps: bool) -> Any:
        return self._ask("processes", index=handle.index, mps=mps, instance=handle.instance)

    def _device(self, handle: _Handle) -> Any:
        return self._ask("device", index=handle.index, instance=handle.instance)

    def _ask(self, operation: str, **fields: object) -> Any:
        self._check()
        return self._link.ask(operation, **fields)

    def _check(self) -> None:
        if self._count == 0:
            _raise(pynvml.NVML_ERROR_UNINITIALIZED)


_FIELDS: Final = {
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: "recovery_action",
    pynvml.NVML_FI_DEV_REMAPPED_UNC: "remapped_rows",
    pynvml.NVML_FI_DEV_REMAPPED_PENDING: "remap_pending",
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE: "remap_failed",
}
_COMPUTE_PROFILES: Final[dict[int, int]] = {
    1: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE,
    2: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE,
    3: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE,
    4: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE,
    7: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE,
}
_MODES: Final[dict[str, int]] = {
    "default": pynvml.NVML_COMPUTEMODE_DEFAULT,
    "prohibited": pynvml.NVML_COMPUTEMODE_PROHIBITED,
    "exclusive_process": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
}


def _is_struct(name: str) -> bool:
    return isinstance(getattr(pynvml, name), type)


def _pointer(kind: Any, index: int, number: int) -> Any:
    """An opaque handle as NVML's: a pointer that only the library understands, and nobody follows."""
    return ctypes.cast(ctypes.c_void_p((index + 1) << 8 | number), kind)


def _address(pointer: Any) -> tuple[int, int]:
    value = ctypes.cast(pointer, ctypes.c_void_p).value or 0
    return (value >> 8) - 1, value & 0xFF


def _text(value: str | bytes | None) -> str:
    """Pynvml gives a struct's bytes as text."""
    return value.decode() if isinstance(value, bytes) else value or ""


def _referred(reference: Any) -> Any:
    """What ``byref(x)``, ``pointer(x)`` or an array refers to."""
    if hasattr(reference, "_obj"):
        return reference._obj  # noqa: SLF001  how ctypes keeps it
    return reference.contents if hasattr(reference, "contents") else reference


def _placement(start: int, size: int) -> Any:
    place = pynvml.c_nvmlGpuInstancePlacement_t()
    place.start, place.size = start, size
    return place


def _fill(array_reference: Any, count_reference: Any, found: list[Any]) -> None:
    """Answer into the caller's array as the library does; without one, only the count is told."""
    count = _referred(count_reference)
    if array_reference is not None:
        array = _referred(array_reference)
        if len(array) < len(found):
            count.value = len(found)
            _raise(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for place, one in enumerate(found):
            array[place] = one
    count.value = len(found)


def _function_not_found(*_arguments: object, **_options: object) -> Any:
    _raise(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _bus(index: int) -> int:
    return 0x10 + 8 * index


def _bus_id(index: int) -> str:
    return f"00000000:{_bus(index):02X}:00.0"


def _process(pid: int, mib: int, instance: int | None) -> Any:
    info = pynvml.c_nvmlProcessInfo_v3_t()
    info.pid, info.usedGpuMemory = pid, mib * _MIB
    info.gpuInstanceId = _NOT_AVAILABLE if instance is None else instance
    info.computeInstanceId = _NOT_AVAILABLE if instance is None else 0
    return pynvml.nvmlStructToFriendlyObject(info)
