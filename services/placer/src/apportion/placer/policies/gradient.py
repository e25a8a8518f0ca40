"""Fragmentation gradient: place where what typical demands can no longer use grows least.

After Weng et al., "Beware of Fragmentation" (USENIX ATC 2023), in two dimensions: what is left of a device counts in
thousandths of its compute and of its memory, and is of use to a demand that both suffice for. The typical demands are
the most frequent of what this pool was asked lately, up to 95 in 100. Weighed are the tightest nodes that fit.
"""

from bisect import bisect_right
from typing import Final, NamedTuple

from apportion.placer.market import Market
from apportion.placer.mix import Asked
from apportion.placer.outlook import Outlook
from apportion.placer.packing.fragmentation import LOGISTIC_STEPS
from apportion.placer.policies.base import Plain, preference_of
from apportion.placer.policies.headroom import tightness
from apportion.placer.rooms import Demand, Fit, NodeRoom, amounts_on
from apportion.placer.values import is_untouched

CANDIDATES: Final = 32
PREFERENCE: Final = 1_000
"""What a step down the job's list of models costs: more than fragments ever do."""
_POPULAR_PERCENT: Final = 95
_TYPICAL_MAX: Final = 64
"""Demands that are looked at on each node: the rest are rare, and time is not."""
_Free = tuple[int, int, str, int, int, bool]
"""Free compute and memory, model, what both are in thousandths, size of the device, and whether it is empty."""


class _Typical(NamedTuple):
    demands: list[tuple[Asked, int]]
    weight: int


class Gradient(Plain):
    """See the module."""

    is_blind = True
    name = "fragmentation_gradient"
    version = "2"
    rules = f"model;tightest {CANDIDATES};logistic 0 to 100;popular {_POPULAR_PERCENT} in 100,at most {_TYPICAL_MAX}"
    weighs = CANDIDATES

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The node with the least left, whatever is asked."""
        return Fit(-tightness(room), tuple(fits[: demand.devices]))

    def weigh(self, outlook: Outlook, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """From 0 to 100: the less fragmentation grows, the more. A thousand less for each step down the job's list."""
        typical, weight = typical_of(outlook)
        frees = [_free_of(room, place) for place in range(len(room.devices))]
        before = _useless(typical, room.free_cpu_milli, frees, weight)
        cpu = room.free_cpu_milli - demand.cpu_milli
        if demand.devices == 1 and not demand.is_whole:
            choices: list[tuple[int, ...]] = []
            seen = set()
            for place in fits:
                if frees[place] not in seen:
                    seen.add(frees[place])
                    choices.append((place,))
        else:
            ranked = sorted(
                (preference_of(demand, room, (place,)), room.devices[place].memory_mib, place) for place in fits
            )
            choices = [tuple(sorted(place for *_, place in ranked[: demand.devices]))]
        best: Fit | None = None
        for picks in choices:
            after = [
                free if at not in picks else _rest(demand, room, at, is_whole=demand.is_whole)
                for at, free in enumerate(frees)
            ]
            growth = _useless(typical, cpu, after, weight) - before
            score = bisect_right(LOGISTIC_STEPS, -growth * 500 // weight) if weight else 0
            score -= PREFERENCE * preference_of(demand, room, picks)
            if best is None or score > best.score:
                best = Fit(score, picks)
        assert best is not None
        return best

    def level(self, market: Market, demand: Demand, group: str) -> int:
        """Nodes with devices that the job likes better first, whatever they would fragment."""
        del market
        liked = [demand.models.index(model) for model in group.split("+") if model in demand.models]
        return min(liked, default=0)


def typical_of(outlook: Outlook) -> tuple[list[tuple[Asked, int]], int]:
    """The most frequent demands and how often they were asked, and the sum of that."""
    known = outlook.notes.get(Gradient.name)
    if isinstance(known, _Typical):
        return known.demands, known.weight
    total = sum(many for _, many in outlook.asked)
    typical: list[tuple[Asked, int]] = []
    weight = 0
    for one, many in sorted(outlook.asked, key=lambda each: (-each[1], each[0])):
        if weight * 100 >= total * _POPULAR_PERCENT or len(typical) == _TYPICAL_MAX:
            break
        typical.append((one, many))
        weight += many
    outlook.notes[Gradient.name] = _Typical(typical, weight)
    return typical, weight


def _free_of(room: NodeRoom, place: int) -> _Free:
    device = room.devices[place]
    if not device.is_healthy:
        return (0, 0, device.model, 0, device.memory_mib, False)
    compute, memory = max(0, device.free_compute_milli), max(0, device.free_memory_mib)
    share = compute * 1000 // device.compute_milli + memory * 1000 // device.memory_mib
    return (compute, memory, device.model, share, device.memory_mib, is_untouched(device))


def _rest(demand: Demand, room: NodeRoom, place: int, *, is_whole: bool) -> _Free:
    device = room.devices[place]
    if is_whole:
        return (0, 0, device.model, 0, device.memory_mib, False)
    taken_milli, taken_mib = amounts_on(demand, device)
    compute = device.free_compute_milli - taken_milli
    memory = device.free_memory_mib - taken_mib
    share = compute * 1000 // device.compute_milli + memory * 1000 // device.memory_mib
    return (compute, memory, device.model, share, device.memory_mib, False)


def _useless(typical: list[tuple[Asked, int]], cpu_milli: int, frees: list[_Free], weight: int) -> int:
    """What is left on the devices and of no use to a typical demand, summed over how often each is asked."""
    whole = sum(free[3] for free in frees)
    useful = 0
    for one, many in typical:
        if not one.devices or one.cpu_milli > cpu_milli:
            continue
        usable = fitting = 0
        for compute, memory, model, share, size, is_empty in frees:
            if one.models and model not in one.models:
                continue
            if one.is_whole:
                fits = is_empty and size >= one.memory_mib
            else:
                fits = compute >= one.compute_milli and memory >= one.memory_mib
            if fits:
                fitting += 1
                usable += share
        if fitting >= one.devices:
            useful += many * usable
    return whole * weight - useful


GRADIENT: Final = Gradient()
