"""Round robin: shares are dealt out in turn, so that time slices on a device are as long as they can be for everybody.

The next one goes where the fewest runs take turns on a device, then to the node with the fewest; among equals in the
order of their ids, which the dealing itself turns into a round: whoever got one has one more, and comes last.
"""

from typing import Final

from apportion.placer.policies.base import Plain, preference_of
from apportion.placer.rooms import Demand, Fit, NodeRoom

_MODEL: Final = 10**11
_DEVICE: Final = 10**6
_RUNS_MAX: Final = 9_999


class RoundRobin(Plain):
    """See the module."""

    is_blind = True
    name = "round_robin"
    rules = "model,runs on device,runs on node"

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The devices with the fewest runs."""
        ranked = sorted((preference_of(demand, room, (place,)), room.devices[place].runs, place) for place in fits)
        picks = tuple(sorted(place for *_, place in ranked[: demand.devices]))
        return Fit(sum(self.parts(demand, room, picks).values()), picks)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """The device with the most runs counts for all."""
        runs = max((room.devices[place].runs for place in picks), default=0)
        return {
            "model": -preference_of(demand, room, picks) * _MODEL,
            "runs_on_device": -min(runs, _RUNS_MAX) * _DEVICE,
            "runs_on_node": -min(sum(device.runs for device in room.devices), _DEVICE - 1),
        }


ROUND_ROBIN: Final = RoundRobin()
