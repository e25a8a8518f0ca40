"""A share of a device in turns: memory is watched or limited, compute is best effort, and the report says just that."""

from apportion.contracts.events import Enforced, Slice
from apportion.contracts.ids import RunId
from apportion.node_agent.enforce.cgroup_memory import CgroupMemory
from apportion.node_agent.enforce.slices import EnforcementFailed, SetUp
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.nvml import COMPUTE_MODE_DEFAULT, Devices


class TimeSlice:
    """The timeslice mode, on every device of the node."""

    def __init__(self, devices: Devices, watchdog: Watchdog, *, memory: CgroupMemory | None = None) -> None:
        """``memory``: limits by cgroup, where the driver has them."""
        self._devices = devices
        self._watchdog = watchdog
        self._memory = memory

    async def apply(self, run: RunId, piece: Slice) -> SetUp:
        """Have the run's memory watched; raises EnforcementFailed where the device is closed to sharing."""
        uuid = piece.device_uuid
        mode = self._devices.compute_mode(uuid)
        if mode != COMPUTE_MODE_DEFAULT:
            raise EnforcementFailed(uuid, "compute mode", asked=COMPUTE_MODE_DEFAULT, observed=mode)
        self._watchdog.watch(run, piece)
        watched = self._watchdog.limit_of(run, uuid)
        if watched != piece.memory_mib:
            raise EnforcementFailed(uuid, "memory", asked=piece.memory_mib, observed=watched)
        group, observed, by = "", watched, "watchdog"
        if self._memory is not None:
            path, observed = self._memory.limit(run, piece)
            group, by = str(path), "cgroup_memory_limit+watchdog"
        return SetUp(
            cgroup=group,
            enforced=(
                Enforced(
                    device_uuid=uuid,
                    what="memory",
                    asked=piece.memory_mib,
                    applied=piece.memory_mib,
                    observed=observed,
                    by=by,
                ),
                # 0 applied: nobody holds a neighbour back, and the tenant is told so.
                Enforced(
                    device_uuid=uuid,
                    what="compute",
                    asked=piece.compute_milli,
                    applied=0,
                    observed=0,
                    by="best_effort",
                ),
                Enforced(device_uuid=uuid, what="fault_domain", asked=1, applied=1, observed=1, by="own_context"),
            ),
        )

    def started(self, run: RunId, piece: Slice, pid: int) -> None:
        """A run that a new agent found again is watched again."""
        del pid
        self._watchdog.watch(run, piece)

    async def release(self, run: RunId, piece: Slice) -> None:
        """Watch it no longer, and lift its limit."""
        self._watchdog.forget(run)
        if self._memory is not None:
            self._memory.lift(run, piece)
