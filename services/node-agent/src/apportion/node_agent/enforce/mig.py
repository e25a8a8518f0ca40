"""A hardware partition for one run: made at the place that the placer chose, read back, and taken away afterwards.

What is ours is in a journal, one file for each run, written before the driver is asked. So an agent that dies at any
moment leaves nothing that its successor couldn't name: an instance without a record is somebody else's, and stays. MIG
mode itself is an operator's business, and is never switched here.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from apportion.contracts.events import Enforced, MigInstance, MigPlacement, Slice
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.contracts.units import MILLI_PER_DEVICE
from apportion.node_agent.enforce.slices import EnforcementFailed, SetUp
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.nvml import Devices, NvmlFailed
from apportion.node_agent.nvml_mig import MigInstanceSeen, MigState
from apportion.node_agent.run_records import directory_name

BY: Final = "mig_instance"

_T = TypeVar("_T")

log = structlog.get_logger(__name__)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that we make or made."""

    run_id: RunId
    device_uuid: DeviceUuid
    place: MigPlacement
    uuid: str = ""
    """Of the MIG device; empty until it was made."""


class Mig:
    """The mig mode, on every device of the node."""

    def __init__(self, devices: Devices, watchdog: Watchdog, *, directory: Path) -> None:
        self._devices = devices
        self._watchdog = watchdog
        self._directory = directory
        self._records: dict[RunId, Record] = _read(directory)
        self._locks: dict[DeviceUuid, asyncio.Lock] = {}

    async def apply(self, run: RunId, piece: Slice) -> SetUp:
        """Make the run's instance and read it back; raises EnforcementFailed with nothing left behind."""
        uuid = piece.device_uuid
        place = piece.mig
        if place is None:
            raise EnforcementFailed(uuid, "place of the MIG slice", asked="profile, start and size", observed="none")
        async with self._lock(uuid):
            seen, total_sms, total_slices, slices = await _in_thread(lambda: self._make(run, piece, place))
        self._watchdog.watch(run, piece)
        applied_milli = -(-MILLI_PER_DEVICE * slices // total_slices)
        return SetUp(
            visible=seen.uuid,
            enforced=(
                Enforced(
                    device_uuid=uuid,
                    what="memory",
                    asked=piece.memory_mib,
                    applied=seen.memory_mib,
                    observed=seen.memory_mib,
                    by=BY,
                ),
                Enforced(
                    device_uuid=uuid,
                    what="compute",
                    asked=piece.compute_milli,
                    applied=applied_milli,
                    # Of SMs: some boards give an instance fewer than its part of the slices.
                    observed=MILLI_PER_DEVICE * seen.sms // total_sms,
                    by=BY,
                ),
                Enforced(device_uuid=uuid, what="fault_domain", asked=1, applied=1, observed=1, by=BY),
            ),
        )

    def started(self, run: RunId, piece: Slice, pid: int) -> None:
        """Its memory is read, though the hardware holds it to it."""
        del pid
        self._watchdog.watch(run, piece)

    async def release(self, run: RunId, piece: Slice) -> None:
        """Take the run's instance away; raises NvmlFailed (IN_USE) while a process still uses it."""
        record = self._records.get(run)
        if record is not None and record.device_uuid == piece.device_uuid:
            async with self._lock(piece.device_uuid):
                await _in_thread(lambda: self._unmake(record))
        self._watchdog.forget(run)

    async def reconcile(self, live: Collection[RunId]) -> tuple[RunId, ...]:
        """Take away what is recorded for runs that don't live; those whose instance is still in use, to ask again."""
        left = []
        for run, record in sorted(self._records.items()):
            if run in live:
                continue
            try:
                async with self._lock(record.device_uuid):
                    await _in_thread(lambda record=record: self._unmake(record))  # type: ignore[misc]
            except NvmlFailed as err:
                log.warning("mig_instance_left", run_id=run, device=record.device_uuid, error=str(err))
                left.append(run)
            else:
                log.info("mig_instance_reclaimed", run_id=run, device=record.device_uuid)
        return tuple(left)

    def foreign(self, uuid: DeviceUuid, state: MigState) -> tuple[MigInstance, ...]:
        """The device's instances that no record of ours names."""
        ours = [record for record in self._records.values() if record.device_uuid == uuid]
        return tuple(
            MigInstance(uuid=one.uuid, profile=one.name, start=one.start, size=one.size)
            for one in state.instances
            if not any(_is_of(one, record) for record in ours)
        )

    def records(self) -> Mapping[RunId, Record]:
        """What is journalled as ours."""
        return dict(self._records)

    def _make(self, run: RunId, piece: Slice, place: MigPlacement) -> tuple[MigInstanceSeen, int, int, int]:
        uuid = piece.device_uuid
        state = self._devices.mig.state(uuid)
        if state is None or not state.is_enabled:
            raise EnforcementFailed(uuid, "MIG mode", asked="enabled", observed="disabled")
        size = state.size_named(place.profile)
        if size is None or place.start not in size.starts or place.size != size.size:
            offered = [f"{one.name}@{','.join(map(str, one.starts))}:{one.size}" for one in state.sizes]
            raise EnforcementFailed(uuid, "place", asked=_text(place), observed=" ".join(offered))
        milli = -(-MILLI_PER_DEVICE * size.compute_slices // max(one.compute_slices for one in state.sizes))
        if piece.memory_mib > size.memory_mib or piece.compute_milli > milli:
            raise EnforcementFailed(
                uuid,
                "share",
                asked=f"{piece.memory_mib} MiB and {piece.compute_milli} milli",
                observed=f"{place.profile} has {size.memory_mib} MiB and {milli} milli",
            )
        if (earlier := self._records.get(run)) is not None:
            self._unmake(earlier)  # Of an attempt that died before the run was started.
        record = Record(run_id=run, device_uuid=uuid, place=place)
        self._write(record)
        try:
            made = self._devices.mig.create(uuid, size, place.start)
        except NvmlFailed as err:
            self._forget(record)
            taken = " ".join(f"{one.name}@{one.start}" for one in state.instances)
            raise EnforcementFailed(
                uuid, "MIG instance", asked=_text(place), observed=f"{err}; there: {taken}"
            ) from err
        record = msgspec.structs.replace(record, uuid=made.uuid)
        self._write(record)
        again = self._devices.mig.state(uuid)
        seen = next((one for one in again.instances if one.uuid == made.uuid), None) if again is not None else None
        wanted = (place.start, size.size, size.memory_mib, size.sms)
        found = None if seen is None else (seen.start, seen.size, seen.memory_mib, seen.sms)
        if seen is None or found != wanted:
            self._unmake(record)
            raise EnforcementFailed(uuid, "start, size, MiB and SMs", asked=wanted, observed=found)
        total_slices = max(one.compute_slices for one in state.sizes)
        return seen, self._devices.info(uuid).sms, total_slices, size.compute_slices

    def _unmake(self, record: Record) -> None:
        state = self._devices.mig.state(record.device_uuid)
        for one in () if state is None else state.instances:
            if _is_of(one, record):
                self._devices.mig.destroy(record.device_uuid, one.number)
        self._forget(record)

    def _write(self, record: Record) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(record)
        new = path.with_name(f".{path.name}")
        new.write_bytes(msgspec.json.encode(record))
        # Not synced: what a power failure takes from the journal, it takes from the board as well.
        new.replace(path)
        self._records[record.run_id] = record

    def _forget(self, record: Record) -> None:
        self._path(record).unlink(missing_ok=True)
        self._records.pop(record.run_id, None)

    def _path(self, record: Record) -> Path:
        return self._directory / directory_name(record.run_id)

    def _lock(self, uuid: DeviceUuid) -> asyncio.Lock:
        return self._locks.setdefault(uuid, asyncio.Lock())


async def _in_thread(work: Callable[[], _T]) -> _T:
    # Making an instance takes a board some hundred milliseconds, and the agent has other runs.
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _read(directory: Path) -> dict[RunId, Record]:
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):  # noqa: PTH208  once, at the start
            if name.startswith("."):
                continue
            with contextlib.suppress(msgspec.MsgspecError):
                record = msgspec.json.decode((directory / name).read_bytes(), type=Record)
                found[record.run_id] = record
    return found


def _is_of(one: MigInstanceSeen, record: Record) -> bool:
    """True for the instance that the record is of: by its name, or by its place where it died being made."""
    if record.uuid:
        return one.uuid == record.uuid or (not one.uuid and _is_at(one, record.place))
    return _is_at(one, record.place)


def _is_at(one: MigInstanceSeen, place: MigPlacement) -> bool:
    return (one.name, one.start, one.size) == (place.profile, place.start, place.size)


def _text(place: MigPlacement) -> str:
    return f"{place.profile}@{place.start}:{place.size}"
