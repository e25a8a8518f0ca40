"""A whole device for one run: nobody else may have a context on it while it lasts.

What its compute mode was is in a journal, a file for each device, from before it is changed until it is restored: an
agent that dies in between leaves a device that its successor opens again.
"""

from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Final

import msgspec
import structlog

from apportion.contracts.events import Enforced, Slice
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.contracts.units import MILLI_PER_DEVICE
from apportion.node_agent.enforce.slices import EnforcementFailed, SetUp
from apportion.node_agent.nvml import COMPUTE_MODE_DEFAULT, COMPUTE_MODE_EXCLUSIVE, Devices, NvmlFailed

log = structlog.get_logger(__name__)

BY_COMPUTE_MODE: Final = "exclusive_process"
BY_PLACEMENT: Final = "placement"
"""The host doesn't let us set the compute mode: the device is this run's by the pool's book alone, and we say so."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A device that is, or was about to be, closed for a run."""

    run_id: RunId
    device_uuid: DeviceUuid
    mode_before: str


class Exclusive:
    """The exclusive mode, on every device of the node."""

    def __init__(
        self, devices: Devices, *, end_idle_mps: Callable[[DeviceUuid], Awaitable[None]], directory: Path
    ) -> None:
        self._devices = devices
        self._end_idle_mps = end_idle_mps
        self._directory = directory
        self._records = _read(directory)
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
        self._write(run, uuid)
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
        self._restore(piece.device_uuid)
        self._owners.pop(piece.device_uuid, None)

    async def reconcile(self, live: Collection[RunId]) -> None:
        """Open the devices that an earlier agent had closed for runs that don't live."""
        for record in list(self._records.values()):
            if record.run_id not in live:
                try:
                    self._restore(record.device_uuid)
                except NvmlFailed as err:
                    log.warning("compute_mode_left", device=record.device_uuid, error=str(err))

    def _restore(self, uuid: DeviceUuid) -> None:
        record = self._records.get(uuid)
        self._set_mode(uuid, COMPUTE_MODE_DEFAULT if record is None else record.mode_before)
        self._records.pop(uuid, None)
        (self._directory / uuid).unlink(missing_ok=True)

    def _write(self, run: RunId, uuid: DeviceUuid) -> None:
        # Of two runs in a row the first one knows what the mode was before either.
        before = self._records[uuid].mode_before if uuid in self._records else self._devices.compute_mode(uuid)
        record = Record(run_id=run, device_uuid=uuid, mode_before=before)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._directory / f".{uuid}"
        new.write_bytes(msgspec.json.encode(record))
        new.replace(self._directory / uuid)
        self._records[uuid] = record

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


def _read(directory: Path) -> dict[DeviceUuid, Record]:
    found = {}
    for path in sorted(directory.glob("[!.]*")):
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        found[record.device_uuid] = record
    return found
