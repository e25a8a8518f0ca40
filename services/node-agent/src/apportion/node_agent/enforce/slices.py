"""One door to all modes: sets up every slice of a run, takes it down again, and says who still sits on a device.

The mode of each slice chooses who enforces it. A run is set up whole or not at all.
"""

from collections.abc import Collection, Mapping
from typing import Final, Protocol

import msgspec

from apportion.contracts.causes import Mode
from apportion.contracts.events import Device, Enforced, Slice
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.node_agent.nvml import Devices, NvmlFailed


class EnforcementFailed(Exception):
    """A slice can't be had as it was promised: what was read back differs, or the mode isn't there."""

    def __init__(self, device: DeviceUuid, what: str, *, asked: object, observed: object) -> None:
        super().__init__(f"{what} on {device}: asked {asked}, observed {observed}")
        self.device = device
        self.what = what
        self.asked = asked
        self.observed = observed


class SetUp(msgspec.Struct, frozen=True, kw_only=True):
    """What one slice takes: variables for the process, and the evidence that was read back."""

    env: Mapping[str, str] = {}
    enforced: tuple[Enforced, ...] = ()
    visible: str = ""
    """What the process names in the device's place, where that is another: a MIG device."""
    cgroup: str = ""
    """The group that the process is to be born in; empty: wherever it is."""


class Enforcer(Protocol):
    """One mode. Every method may be repeated."""

    async def apply(self, run: RunId, piece: Slice) -> SetUp:
        """Set the slice up and read it back; raises EnforcementFailed with nothing left set up."""
        ...

    def started(self, run: RunId, piece: Slice, pid: int) -> None:
        """The run's process runs (or was found running by a new agent)."""
        ...

    async def release(self, run: RunId, piece: Slice) -> None:
        """Take down what ``apply`` set up; the run's processes are gone."""
        ...


class Slices:
    """All slices of the node, by the enforcer of their mode."""

    def __init__(
        self, devices: Devices, enforcers: Mapping[Mode, Enforcer], *, usable: Mapping[DeviceUuid, Device]
    ) -> None:
        self._devices = devices
        self._enforcers = enforcers
        self.usable = usable
        """The devices that there are."""

    def use(self, usable: Mapping[DeviceUuid, Device]) -> None:
        """The devices that there are from now on."""
        self.usable = usable

    async def apply(self, run: RunId, pieces: tuple[Slice, ...]) -> SetUp:
        """Set up every slice; raises EnforcementFailed, and then none is."""
        env: dict[str, str] = {}
        visible: list[str] = []
        cgroup = ""
        enforced: list[Enforced] = []
        done: list[Slice] = []
        instances = [piece for piece in pieces if piece.mode is Mode.MIG]
        if len(instances) > 1:
            # CUDA shows a process one MIG device, whatever it is told.
            raise EnforcementFailed(instances[0].device_uuid, "MIG slices of one run", asked=len(instances), observed=1)
        try:
            for piece in pieces:
                enforcer = self._enforcer(piece)
                done.append(piece)
                one = await enforcer.apply(run, piece)
                env |= one.env
                enforced += one.enforced
                visible.append(one.visible or piece.device_uuid)
                cgroup = one.cgroup or cgroup
        except (EnforcementFailed, NvmlFailed) as err:
            await self.release(run, tuple(done))
            if isinstance(err, NvmlFailed):
                raise EnforcementFailed(
                    done[-1].device_uuid, "answer of the device", asked=done[-1].mode, observed=err
                ) from err
            raise
        # By UUID, never by index: an index means another device wherever the order differs. Without a slice: none.
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        return SetUp(env=env, enforced=tuple(enforced), cgroup=cgroup)

    def started(self, run: RunId, pieces: tuple[Slice, ...], pid: int) -> None:
        """The run's process runs."""
        for piece in pieces:
            if piece.mode in self._enforcers:
                self._enforcers[piece.mode].started(run, piece, pid)

    async def release(self, run: RunId, pieces: tuple[Slice, ...]) -> None:
        """Take every slice down; a device that is lost has nothing set up any more."""
        for piece in pieces:
            if piece.mode in self._enforcers:
                try:
                    await self._enforcers[piece.mode].release(run, piece)
                except NvmlFailed as err:
                    if err.name not in _GONE:
                        raise

    def pids_on(self, devices: Collection[DeviceUuid]) -> dict[DeviceUuid, set[int]]:
        """Who has a context on each of these devices."""
        found: dict[DeviceUuid, set[int]] = {}
        for device in sorted(devices):
            try:
                found[device] = {process.pid for process in self._devices.processes(device)}
            except NvmlFailed as err:
                if err.name not in _GONE:
                    raise
                found[device] = set()
        return found

    def peak_mib(self, pieces: tuple[Slice, ...], pid: int) -> int | None:
        """Most memory that the process had, over all its devices, by the driver's account; None where none was kept."""
        peaks = []
        for piece in pieces:
            try:
                account = self._devices.account(piece.device_uuid, pid)
            except NvmlFailed:
                continue
            if account is not None and account.peak_mib is not None:
                peaks.append(account.peak_mib)
        return sum(peaks) if peaks else None

    def _enforcer(self, piece: Slice) -> Enforcer:
        device = self.usable.get(piece.device_uuid)
        if device is None:
            raise EnforcementFailed(piece.device_uuid, "device", asked=piece.mode, observed="no such device here")
        if piece.mode not in self._enforcers or piece.mode not in device.modes:
            raise EnforcementFailed(piece.device_uuid, "mode", asked=piece.mode, observed=",".join(device.modes))
        return self._enforcers[piece.mode]


_GONE: Final = frozenset({"GpuIsLost", "NotFound", "ResetRequired", "Unknown"})
"""A device that doesn't answer shows nobody, and holds nothing that could be taken down."""
