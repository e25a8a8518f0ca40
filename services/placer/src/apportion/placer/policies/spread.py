"""Spread: the emptiest node, and on it the emptiest device, so that neighbours are few and a fault takes few along."""

from typing import Final

from apportion.placer.policies.base import Plain, preference_of
from apportion.placer.policies.pack import free_of, node_free
from apportion.placer.rooms import Demand, Fit, NodeRoom

_MODEL: Final = 10**10
_NODE: Final = 10**5


class Spread(Plain):
    """See the module."""

    is_blind = True
    name = "spread"
    rules = "model,node free,device free;the most"

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The emptiest devices of the node."""
        ranked = sorted((preference_of(demand, room, (place,)), -free_of(room.devices[place]), place) for place in fits)
        picks = tuple(sorted(place for *_, place in ranked[: demand.devices]))
        return Fit(sum(self.parts(demand, room, picks).values()), picks)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """What is free counts in thousandths of both dimensions; CPU where the node has no device."""
        return {
            "model": -preference_of(demand, room, picks) * _MODEL,
            "node_free": node_free(room) * _NODE,
            "device_free": sum(free_of(room.devices[place]) for place in picks),
        }


SPREAD: Final = Spread()
