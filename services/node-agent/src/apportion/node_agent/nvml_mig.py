"""MIG by NVML: what a device can be cut into, its instances, making one at a place and taking it away.

Part of nvml.py's surface (``Devices.mig``). Nothing here switches MIG mode, and nothing could: to end the mode is a
reset on many machines, and on some nobody may do that.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pynvml

from apportion.contracts.ids import DeviceUuid
from apportion.contracts.units import mib_from_bytes

_MIB: Final = 1024 * 1024
_ABSENT: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
    }
)
_PLACES_MAX: Final = 16


class MigSize(msgspec.Struct, frozen=True, kw_only=True):
    """One size of instance that a device offers."""

    name: str
    """As in ``1g.10gb``."""
    profile_id: int
    starts: tuple[int, ...]
    size: int
    """In memory slices; 0 where the driver doesn't tell places."""
    memory_mib: int
    sms: int
    compute_slices: int
    instances_max: int


class MigInstanceSeen(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the driver shows it now."""

    number: int
    """NVML's id of the GPU instance; given again after its end."""
    name: str
    start: int
    size: int
    uuid: str = ""
    """Empty without a compute instance: half made, or half taken away."""
    memory_mib: int = 0
    sms: int = 0


class MigState(msgspec.Struct, frozen=True, kw_only=True):
    """A device that can be cut."""

    is_enabled: bool
    is_pending: bool
    """What the mode will be after a reset."""
    sizes: tuple[MigSize, ...]
    instances: tuple[MigInstanceSeen, ...]

    def size_named(self, name: str) -> MigSize | None:
        """The size of this name."""
        return next((size for size in self.sizes if size.name == name), None)


class MigBoards:
    """The MIG calls of NVML, in our units; ``call`` raises NvmlFailed."""

    def __init__(
        self, module: Any, *, call: Callable[..., Any], handle: Callable[[DeviceUuid], Any], failure: type[Exception]
    ) -> None:
        self._nvml = module
        self._call = call
        self._handle = handle
        self._failure = failure

    def state(self, uuid: DeviceUuid) -> MigState | None:
        """What the device can be cut into and is; None where it can't be."""
        handle = self._handle(uuid)
        mode = self._unless_absent("nvmlDeviceGetMigMode", handle)
        if mode is None:
            return None
        sizes = self._sizes(handle)
        is_enabled = int(mode[0]) == pynvml.NVML_DEVICE_MIG_ENABLE
        return MigState(
            is_enabled=is_enabled,
            is_pending=int(mode[1]) == pynvml.NVML_DEVICE_MIG_ENABLE,
            sizes=sizes,
            instances=self._instances(handle, sizes) if is_enabled else (),
        )

    def create(self, uuid: DeviceUuid, size: MigSize, start: int) -> MigInstanceSeen:
        """Make an instance of this size at this place, with one compute instance over all of it; as read back.

        Raises NvmlFailed: INSUFFICIENT_RESOURCES where the place is taken; then nothing is left behind.
        """
        handle = self._handle(uuid)
        place = pynvml.c_nvmlGpuInstancePlacement_t()
        place.start, place.size = start, size.size
        instance = self._call(
            "nvmlDeviceCreateGpuInstanceWithPlacement", handle, size.profile_id, self._nvml.byref(place)
        )
        try:
            self._call("nvmlGpuInstanceCreateComputeInstance", instance, self._compute_profile(instance, size))
            number = int(self._call("nvmlGpuInstanceGetInfo", instance).id)
            return next(one for one in self._instances(handle, (size,)) if one.number == number)
        except self._failure:
            self._destroy(instance)
            raise

    def destroy(self, uuid: DeviceUuid, number: int) -> None:
        """Take an instance away, its compute instances first; one that isn't there is fine. IN_USE while it is used."""
        try:
            instance = self._call("nvmlDeviceGetGpuInstanceById", self._handle(uuid), number)
        except self._failure as err:
            if getattr(err, "code", None) in {pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT}:
                return
            raise
        self._destroy(instance)

    def _destroy(self, instance: Any) -> None:
        for profile in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            info = self._compute_info(instance, profile)
            if info is None:
                continue
            room = (pynvml.c_nvmlComputeInstance_t * _PLACES_MAX)()
            count = ctypes.c_uint(_PLACES_MAX)
            self._call(
                "nvmlGpuInstanceGetComputeInstances", instance, int(info.id), ctypes.byref(room), ctypes.byref(count)
            )
            for place in range(count.value):
                self._call("nvmlComputeInstanceDestroy", room[place])
        self._call("nvmlGpuInstanceDestroy", instance)

    def _compute_profile(self, instance: Any, size: MigSize) -> int:
        """The profile of a compute instance that is as large as the GPU instance."""
        for profile in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            info = self._compute_info(instance, profile)
            if info is not None and int(info.sliceCount) == size.compute_slices:
                return int(info.id)
        return 0

    def _compute_info(self, instance: Any, profile: int) -> Any:
        shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        return self._unless_absent("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, profile, shared)

    def _sizes(self, handle: Any) -> tuple[MigSize, ...]:
        found = []
        for profile in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            info = self._unless_absent("nvmlDeviceGetGpuInstanceProfileInfo", handle, profile)
            if info is None:
                continue
            starts, size = self._places(handle, int(info.id))
            name = info.name.decode() if isinstance(info.name, bytes) else str(info.name)
            found.append(
                MigSize(
                    name=name.removeprefix("MIG "),
                    profile_id=int(info.id),
                    starts=starts,
                    size=size,
                    memory_mib=int(info.memorySizeMB),
                    sms=int(info.multiprocessorCount),
                    compute_slices=int(info.sliceCount),
                    instances_max=int(info.instanceCount),
                )
            )
        return tuple(found)

    def _places(self, handle: Any, profile_id: int) -> tuple[tuple[int, ...], int]:
        room = (pynvml.c_nvmlGpuInstancePlacement_t * _PLACES_MAX)()
        count = ctypes.c_uint(_PLACES_MAX)
        answer = self._unless_absent(
            "nvmlDeviceGetGpuInstancePossiblePlacements", handle, profile_id, ctypes.byref(room), ctypes.byref(count)
        )
        if answer is None:
            return (), 0
        places = [room[place] for place in range(count.value)]
        return tuple(sorted(int(place.start) for place in places)), int(places[0].size) if places else 0

    def _instances(self, handle: Any, sizes: tuple[MigSize, ...]) -> tuple[MigInstanceSeen, ...]:
        devices = self._mig_devices(handle)
        found = []
        for size in sizes:
            room = (pynvml.c_nvmlGpuInstance_t * _PLACES_MAX)()
            count = ctypes.c_uint(_PLACES_MAX)
            answer = self._unless_absent(
                "nvmlDeviceGetGpuInstances", handle, size.profile_id, ctypes.byref(room), ctypes.byref(count)
            )
            for place in range(0 if answer is None else count.value):
                info = self._call("nvmlGpuInstanceGetInfo", room[place])
                uuid, memory_mib, sms = devices.get(int(info.id), ("", 0, 0))
                found.append(
                    MigInstanceSeen(
                        number=int(info.id),
                        name=size.name,
                        start=int(info.placement.start),
                        size=int(info.placement.size),
                        uuid=uuid,
                        memory_mib=memory_mib,
                        sms=sms,
                    )
                )
        return tuple(sorted(found, key=lambda one: one.start))

    def _mig_devices(self, handle: Any) -> dict[int, tuple[str, int, int]]:
        """Uuid, MiB and SMs of each MIG device, by its GPU instance."""
        found = {}
        for index in range(int(self._call("nvmlDeviceGetMaxMigDeviceCount", handle))):
            try:
                device = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
                number = int(self._call("nvmlDeviceGetGpuInstanceId", device))
                uuid = str(self._call("nvmlDeviceGetUUID", device))
                attributes = self._call("nvmlDeviceGetAttributes_v2", device)
            except self._failure:
                continue  # Indexes have holes, and an instance may go while it is looked at.
            memory_mib = mib_from_bytes(int(attributes.memorySizeMB) * _MIB)
            found[number] = (uuid, memory_mib, int(attributes.multiprocessorCount))
        return found

    def _unless_absent(self, function: str, *arguments: Any) -> Any:
        try:
            return self._call(function, *arguments)
        except self._failure as err:
            if getattr(err, "code", None) in _ABSENT:
                return None
            raise
