"""Best fit: the tightest device that is large enough, so that what stays free stays useful.

A share goes where the scarcer dimension has least left over afterwards; whole devices come from the smallest that will
do, on the node with the fewest empty ones; a job without a device goes where devices are fewest.
"""

from typing import Final

from apportion.placer.policies.base import Plain
from apportion.placer.rooms import Demand, DeviceRoom, Fit, NodeRoom, amounts_on

MODEL: Final = 10**12
FIRST: Final = 10**8
SECOND: Final = 10**4
_GIB: Final = 1024
_COUNT_MAX: Final = 9_999
"""Each lower part stays below the unit of the one above it, so that parts compare in order."""


class BestFit(Plain):
    """See the module."""

    is_blind = True
    name = "best_fit"
    rules = f"model,{MODEL};first,{FIRST};second,{SECOND};empty_devices,1"

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The tightest devices; the lower UUID where two are alike."""
        wanted = demand.devices
        if wanted == 1:
            best = -1
            best_cost = 0
            for place in fits:
                cost = _cost(demand, room.devices[place])
                if best < 0 or cost < best_cost:
                    best, best_cost = place, cost
            picks: tuple[int, ...] = (best,)
            cost = best_cost
        elif wanted:
            ranked = sorted((_cost(demand, room.devices[place]), place) for place in fits)[:wanted]
            picks = tuple(sorted(place for _, place in ranked))
            cost = ranked[-1][0]
        else:
            picks = ()
            cost = _host_cost(demand, room)
        return Fit(-cost - _empty_left(room, picks), picks)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """The worst of the devices counts for all."""
        if not picks:
            return {
                "devices": -min(len(room.devices), _COUNT_MAX) * FIRST,
                "cpu_left": -_permille(room.free_cpu_milli - demand.cpu_milli, room.cpu_milli) * SECOND,
                "empty_devices": -_empty_left(room, picks),
            }
        cost = max(_cost(demand, room.devices[place]) for place in picks)
        model, rest = divmod(cost, MODEL)
        first, second = divmod(rest, FIRST)
        found = {"model": -model * MODEL, "empty_devices": -_empty_left(room, picks)}
        if demand.is_whole:
            return found | {"device_gib": -first * FIRST}
        return found | {"scarcer_left": -first * FIRST, "other_left": -second}


def _cost(demand: Demand, device: DeviceRoom) -> int:
    model = demand.models.index(device.model) if demand.models else 0
    if demand.is_whole:
        return model * MODEL + min(device.memory_mib // _GIB, _COUNT_MAX) * FIRST
    compute, memory = amounts_on(demand, device)
    compute_left = _permille(device.free_compute_milli - compute, device.compute_milli)
    # What the pool oversubscribes is less than nothing, and no part may be that.
    memory_left = _permille(max(0, device.free_memory_mib - memory), device.memory_mib)
    if compute_left < memory_left:
        return model * MODEL + compute_left * FIRST + memory_left * SECOND
    return model * MODEL + memory_left * FIRST + compute_left * SECOND


def _host_cost(demand: Demand, room: NodeRoom) -> int:
    left = _permille(room.free_cpu_milli - demand.cpu_milli, room.cpu_milli)
    return min(len(room.devices), _COUNT_MAX) * FIRST + left * SECOND


def _permille(left: int, whole: int) -> int:
    return left * 1000 // whole if whole else 0


def _empty_left(room: NodeRoom, picks: tuple[int, ...]) -> int:
    taken = sum(1 for place in picks if not room.devices[place].runs)
    return min(room.empty_devices - taken, _COUNT_MAX)


BEST_FIT: Final = BestFit()
