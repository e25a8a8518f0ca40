"""Least response time: for inference with a latency objective, the device on which a request meets the least work.

How long a request waits grows with the share of the device that is in use, and with each neighbour that takes turns on
it; so the device with the least of its compute in use wins, then the one with the fewest runs, on the quietest node.
"""

from typing import Final

from apportion.placer.policies.base import Plain, preference_of
from apportion.placer.policies.pack import node_free
from apportion.placer.rooms import Demand, Fit, NodeRoom

_MODEL: Final = 10**13
_BUSY: Final = 10**9
_RUNS: Final = 10**5
_RUNS_MAX: Final = 9_999


class LeastResponse(Plain):
    """See the module."""

    is_blind = True
    name = "least_response"
    rules = "model,compute in use,runs,node in use"

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The quietest devices of the node."""
        ranked = sorted((-_score(self.parts(demand, room, (place,))), place) for place in fits)
        picks = tuple(sorted(place for _, place in ranked[: demand.devices]))
        return Fit(_score(self.parts(demand, room, picks)), picks)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """The busiest of the devices counts for all."""
        devices = [room.devices[place] for place in picks]
        busy = max((1000 - device.free_compute_milli * 1000 // device.compute_milli for device in devices), default=0)
        runs = max((device.runs for device in devices), default=0)
        return {
            "model": -preference_of(demand, room, picks) * _MODEL,
            "compute_in_use": -busy * _BUSY,
            "runs": -min(runs, _RUNS_MAX) * _RUNS,
            "node_in_use": node_free(room) - 2_000,
        }


def _score(parts: dict[str, int]) -> int:
    return sum(parts.values())


LEAST_RESPONSE: Final = LeastResponse()
