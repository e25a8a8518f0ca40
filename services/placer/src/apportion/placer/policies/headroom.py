"""Headroom: place where what the pool is asked for could still fit loses least, and pay for what others will need.

A placement costs the drop in its node's value (see ``values``), plus bids (see ``market``): for places for several
devices that it destroys, and for devices of scarce models, each at the odds that the demand to come exceeds what is
left of them. Only the tightest nodes that fit are weighed, so an equal cost goes to the least left over. The mix is
what this pool was asked lately; in a pool that was asked nothing yet every loss is 0, and the tightest node is taken.
"""

from collections.abc import Sequence
from typing import Final

from apportion.placer.market import LEVEL_MILLE, Market, Row
from apportion.placer.outlook import Outlook
from apportion.placer.packing.samples import STREAMS
from apportion.placer.policies.base import Plain, preference_of
from apportion.placer.rooms import Demand, Fit, NodeRoom, amounts_on

CANDIDATES: Final = 16
PREFERENCE_MILLE: Final = 100
"""A step down the list of accepted models counts as much as a tenth of what is asked."""
_FREE: Final = 10**9
_CPU: Final = 10**4
_CPU_MAX: Final = 99_999
_GIB_MAX: Final = 9_999


class Headroom(Plain):
    """See the module."""

    is_blind = True
    name = "headroom"
    rules = (
        f"tightest {CANDIDATES};value lost,both dimensions,{STREAMS} streams;slots,models;preference,{PREFERENCE_MILLE}"
    )
    weighs = CANDIDATES

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The node with the least left, whatever is asked."""
        return Fit(-tightness(room), tuple(fits[: demand.devices]))

    def weigh(self, outlook: Outlook, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """What the node's value drops by, negated; the device of which most remains useful."""
        picks: tuple[int, ...]
        before = outlook.worth(room)
        if demand.devices == 1 and not demand.is_whole:
            # An instance may have more than was asked, and no device of these has less.
            memory = demand.memory_mib or min(amounts_on(demand, room.devices[place])[1] for place in fits)
            place, after = outlook.best_after(
                room, fits, demand.cpu_milli, demand.host_memory_mib, demand.compute_milli, memory
            )
            picks = (place,)
        else:
            picks = _smallest(demand, room, fits)
            after = outlook.worth_without(room, picks, demand.cpu_milli, demand.host_memory_mib)
        if demand.models:
            asked = demand.compute_milli * len(picks)
            after -= PREFERENCE_MILLE * preference_of(demand, room, picks) * asked // 500
        return Fit(after - before, picks)

    def level(self, market: Market, demand: Demand, group: str) -> int:
        """By the price of the models, in steps, and by how much the job likes them."""
        if not demand.devices:
            return 0
        model = group.split("+", 1)[0]
        dislike = PREFERENCE_MILLE * demand.models.index(model) if model in demand.models else 0
        return (market.prices().get(model, 0) + dislike) // LEVEL_MILLE

    def bid(self, market: Market, demand: Demand, room: NodeRoom, picks: Sequence[int]) -> int:
        """The price of the model, and of slots for several devices that would be gone."""
        if not room.devices:
            return 0
        found = 0
        if picks:
            asked = demand.compute_milli * len(picks)
            found = market.prices().get(room.devices[picks[-1]].model, 0) * asked // 1000
        if market.is_dear:
            before = market.slots_on(room)
            if before:
                found += market.bid_for_slots(before, _slots_after(market, demand, room, picks))
        return 2 * found  # a device counts a thousand in each dimension


def tightness(room: NodeRoom) -> int:
    """What is left of the node: of its devices in both dimensions first, then CPU, then host memory."""
    cpu = min(room.free_cpu_milli // 10, _CPU_MAX)
    return room.free_share * _FREE + cpu * _CPU + min(room.free_memory_mib >> 10, _GIB_MAX)


def _smallest(demand: Demand, room: NodeRoom, fits: list[int]) -> tuple[int, ...]:
    """The smallest devices that will do, those that the job likes better first."""
    if len(fits) == demand.devices:
        return tuple(fits)
    devices = room.devices
    if demand.models:
        ranked = sorted([(preference_of(demand, room, (place,)), devices[place].memory_mib, place) for place in fits])
    else:
        ranked = sorted([(0, devices[place].memory_mib, place) for place in fits])
    return tuple(sorted([place for *_, place in ranked[: demand.devices]]))


def _slots_after(market: Market, demand: Demand, room: NodeRoom, picks: Sequence[int]) -> Row:
    taken = sum(1 for place in picks if not room.devices[place].runs)
    return market.slots_left_on(
        room, room.free_cpu_milli - demand.cpu_milli, room.free_memory_mib - demand.host_memory_mib, taken
    )


HEADROOM: Final = Headroom()
