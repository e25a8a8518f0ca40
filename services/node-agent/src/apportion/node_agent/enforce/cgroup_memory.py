"""Device memory by cgroup: the driver refuses what is over it, to all processes of a run together (driver r615 on).

A run's group is made before its limit is set, the limit is read back, and its processes are born in it. Its name is the
run's, so that a successor finds the groups of runs that died with their agent. Before a group goes its limits are
lifted, as the reservations of its parents would stay.
"""

import contextlib
import errno
import hashlib
import os
from collections.abc import Collection
from pathlib import Path

import structlog

from apportion.contracts.events import Slice
from apportion.contracts.ids import NodeId, RunId
from apportion.node_agent import cgroups
from apportion.node_agent.enforce.slices import EnforcementFailed
from apportion.node_agent.nvml import Devices, NvmlFailed
from apportion.node_agent.run_records import directory_name, run_of_directory

log = structlog.get_logger(__name__)


class CgroupMemory:
    """The groups of this node's runs, under one of our own."""

    def __init__(self, devices: Devices, root: Path) -> None:
        self._devices = devices
        self._root = root

    @classmethod
    def found(cls, devices: Devices, node: NodeId, *, state_dir: Path) -> "CgroupMemory | None":
        """The means where they are all there, by trying: a group can be made, and the driver tells its limits.

        The agents of one machine that share a node's name differ in their state directory, and have groups apart.
        """
        mount = cgroups.mount_here()
        if mount is None:
            return None
        root = root_of(mount, node, state_dir)
        try:
            root.mkdir(exist_ok=True)
        except OSError:
            return None
        if devices.memory_limits_answer(str(root)) != "ok":
            with contextlib.suppress(OSError):
                root.rmdir()
            return None
        return cls(devices, root)

    def limit(self, run: RunId, piece: Slice) -> tuple[Path, int]:
        """Hold the run to the slice's memory; its group, and the MiB that were read back.

        Raises EnforcementFailed where they differ, with no limit left.
        """
        group = self._group(run)
        try:
            group.mkdir(exist_ok=True)
            self._devices.set_memory_limit(piece.device_uuid, str(group), mib=piece.memory_mib)
            observed = self._devices.memory_limit(piece.device_uuid, str(group))
        except (OSError, NvmlFailed) as err:
            raise EnforcementFailed(
                piece.device_uuid, "memory limit of the cgroup", asked=piece.memory_mib, observed=err
            ) from err
        if observed.hard_mib != piece.memory_mib:
            self.lift(run, piece)
            raise EnforcementFailed(
                piece.device_uuid, "memory limit of the cgroup", asked=piece.memory_mib, observed=observed.hard_mib
            )
        return group, observed.hard_mib

    def lift(self, run: RunId, piece: Slice) -> None:
        """Lift the limit; the group goes with its last process, or stays for another device's limit."""
        group = self._group(run)
        if not group.exists():
            return
        with contextlib.suppress(NvmlFailed):
            self._devices.set_memory_limit(piece.device_uuid, str(group), mib=None)
        try:
            group.rmdir()
        except OSError as err:
            if err.errno not in {errno.EBUSY, errno.ENOENT}:
                raise
            log.info("cgroup_stays", run_id=run, error=str(err))

    def reconcile(self, live: Collection[RunId]) -> None:
        """Remove the groups of runs that don't live, limits first."""
        uuids = [info.uuid for info in self._devices.inventory()]
        for group in sorted(path for path in self._root.iterdir() if path.is_dir()):
            run = run_of_directory(group.name)
            if run is None or run in live:
                continue
            for uuid in uuids:
                with contextlib.suppress(NvmlFailed):
                    self._devices.set_memory_limit(uuid, str(group), mib=None)
            with contextlib.suppress(OSError):
                group.rmdir()

    def close(self) -> None:
        """Leave no group behind, where no run needs one."""
        with contextlib.suppress(OSError):
            self._root.rmdir()

    def _group(self, run: RunId) -> Path:
        return self._root / directory_name(run)


def root_of(mount: Path, node: NodeId, state_dir: Path) -> Path:
    """The group under which those of the node's runs are."""
    return mount / f"apportion-{node}-{hashlib.sha256(str(state_dir.absolute()).encode()).hexdigest()[:8]}"


def enter(group: Path, pid: int) -> Path | None:
    """Put a process into a group; where it was. None where it was in no unified group."""
    mount = cgroups.mount_here()
    before = None if mount is None else mount / cgroups.group_of(pid).lstrip("/")
    fd = os.open(group / "cgroup.procs", os.O_WRONLY)
    try:
        os.write(fd, str(pid).encode())
    finally:
        os.close(fd)
    return before
