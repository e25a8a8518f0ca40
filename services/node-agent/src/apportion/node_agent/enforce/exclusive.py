"""A whole device for one run: nobody else may have a context on it while it lasts."""

from collections.abc import Awaitable, Callable
from typing import Final

from apportion.contracts.events import Enforced, Slice
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.contracts.units import MILLI_PER_DEVICE
from apportion.node_agent.enforce.slices import EnforcementFailed, SetUp
from apportion.node_agent.nvml import COMPUTE_MODE_DEFAULT, COMPUTE_MODE_EXCLUSIVE, Devices, NvmlFailed

BY_COMPUTE_MODE: Final = "exclusive_process"
BY_PLACEMENT: Final = "placement"
"""The host doesn't let us set the compute mode: the device is this run's by the pool's book alone, and we say so."""


class Exclusive:
    """The exclusive mode, on every device of the node."""

    def __init__(self, devices: Devices, *, end_idle_mps: Callable[[DeviceUuid], Awaitable[None]]) -> None:
        self._devices = devices
        self._end_idle_mps = end_idle_mps
        self._owners: dict[DeviceUuid, RunId] = {}
        self._usable_mib: dict[DeviceUuid, int] = {}

    async def apply(self, run: RunId, piece: Slice) -> SetUp:
        """Close the device to others; raises EnforcementFailed where somebody sits on it."""
        uuid = piece.device_uuid
        if self._owners.get(uuid, run) != run:
            raise EnforcementFailed(uuid, "owner of the exclusive device", asked=run, observed=self._owners[uuid])
        self._owners[uuid] = run
        await self._end_idle_mps(uuid)
        if uuid not in self._usable_mib:
            self._usable_mib[uuid] = self._devices.info(uuid).usable_mib
        usable_mib = self._usable_mib[uuid]
        by = BY_COMPUTE_MODE if self._set_mode(uuid, COMPUTE_MODE_EXCLUSIVE) else BY_PLACEMENT
        # Read after the door was closed: who came in before is still there, and who didn't can't any more.
        strangers = [process.pid for process in self._devices.processes(uuid)]
        if strangers:
            raise EnforcementFailed(uuid, "processes on the exclusive device", asked="none", observed=strangers)
        if piece.memory_mib > usable_mib:
            raise EnforcementFailed(uuid, "memory", asked=piece.memory_mib, observed=usable_mib)
        return SetUp(
            enforced=(
                Enforced(
                    device_uuid=uuid,
                    what="memory",
                    asked=piece.memory_mib,
                    applied=usable_mib,
                    observed=usable_mib,
                    by=by,
                ),
                Enforced(
                    device_uuid=uuid,
                    what="compute",
                    asked=piece.compute_milli,
                    applied=MILLI_PER_DEVICE,
                    observed=MILLI_PER_DEVICE,
                    by=by,
                ),
                Enforced(device_uuid=uuid, what="fault_domain", asked=1, applied=1, observed=1, by="own_context"),
            ),
        )

    def started(self, run: RunId, piece: Slice, pid: int) -> None:
        """A run that a new agent found again owns its device still."""
        del pid
        self._owners.setdefault(piece.device_uuid, run)

    async def release(self, run: RunId, piece: Slice) -> None:
        """Open the device again, unless it is another's by now."""
        if self._owners.get(piece.device_uuid, run) != run:
            return
        self._set_mode(piece.device_uuid, COMPUTE_MODE_DEFAULT)
        self._owners.pop(piece.device_uuid, None)

    def _set_mode(self, uuid: DeviceUuid, mode: str) -> bool:
        """True where the mode was set and read back; False where the host doesn't let us."""
        try:
            self._devices.set_compute_mode(uuid, mode)
        except NvmlFailed as err:
            if err.name in {"NoPermission", "NotSupported"}:
                return False
            raise
        seen = self._devices.compute_mode(uuid)
        if seen != mode:
            raise EnforcementFailed(uuid, "compute mode", asked=mode, observed=seen)
        return True
