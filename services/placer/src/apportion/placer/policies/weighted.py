"""Weighted score: several aims at once, each with a weight that a pool gives.

Written ``weighted:AIM=WEIGHT+AIM=WEIGHT``. Every aim is a number from 0 to 1000, higher is better:

- ``model``: how far up the job's list of accepted models the devices are;
- ``full_device``, ``full_node``: how much of the device, of the node, is in use already;
- ``quiet_device``, ``quiet_node``: the opposite of those;
- ``balance``: how even compute and memory are that the device has left afterwards.

Where ``model`` is no aim, the job's list is kept strictly, whatever the others say. The weights are part of the
policy's name, and so of every decision.
"""

from typing import Final

from apportion.placer.policies.base import Plain, preference_of
from apportion.placer.policies.pack import free_of, node_free
from apportion.placer.rooms import Demand, Fit, NodeRoom

AIMS: Final = ("model", "full_device", "full_node", "quiet_device", "quiet_node", "balance")
_WEIGHT_MAX: Final = 10_000
_MODEL: Final = 10**9
"""A step down the job's list, where it is kept strictly: more than all aims are worth together."""


class Weighted(Plain):
    """See the module."""

    is_blind = True
    version = "2"
    rules = f"{','.join(AIMS)};model first where it is no aim"

    def __init__(self, weights: str) -> None:
        """Raises ValueError where the weights can't be read."""
        self.name = f"weighted:{weights}"
        self._weights: dict[str, int] = {}
        for part in weights.split("+"):
            aim, _, weight = part.partition("=")
            if aim not in AIMS or not weight.isdecimal() or int(weight) > _WEIGHT_MAX:
                raise ValueError(f"{part!r} is no AIM=WEIGHT: aims are {', '.join(AIMS)}, weights 0 to {_WEIGHT_MAX}")
            self._weights[aim] = int(weight)

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The devices with the highest sums."""
        ranked = sorted((-sum(self.parts(demand, room, (place,)).values()), place) for place in fits)
        picks = tuple(sorted(place for _, place in ranked[: demand.devices]))
        return Fit(sum(self.parts(demand, room, picks).values()), picks)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """Each aim's number times its weight; the mean of the devices."""
        count = max(1, len(picks))
        device = sum(free_of(room.devices[place]) for place in picks) // (2 * count)
        node = node_free(room) // (2 if room.devices else 1)
        found = {
            "model": max(0, 1000 - 100 * preference_of(demand, room, picks)),
            "full_device": 1000 - device,
            "full_node": 1000 - node,
            "quiet_device": device,
            "quiet_node": node,
            "balance": 1000 - sum(_unevenness(demand, room, place) for place in picks) // count,
        }
        parts = {aim: found[aim] * weight for aim, weight in self._weights.items()}
        if "model" not in parts and demand.models:
            parts["model"] = -preference_of(demand, room, picks) * _MODEL
        return parts


def _unevenness(demand: Demand, room: NodeRoom, place: int) -> int:
    device = room.devices[place]
    if demand.is_whole:
        return 0
    compute = (device.free_compute_milli - demand.compute_milli) * 1000 // device.compute_milli
    memory = (device.free_memory_mib - (demand.memory_mib or device.memory_mib)) * 1000 // device.memory_mib
    return min(1000, abs(compute - memory))
