"""Most throughput: over mixed device models, the fastest that is free; how fast each is, is a table that a pool gives.

Written ``throughput:MODEL=SPEED+MODEL=SPEED``, speeds as whole numbers of any one unit (a training job's samples a
second, say); a model that isn't named is as slow as the slowest. Among equally fast devices the tightest that fits
wins, so that whole ones stay free for who needs them. The table is part of the policy's name, and so of every decision.
"""

from typing import Final

from apportion.placer.policies.base import Plain
from apportion.placer.policies.pack import free_of, node_free
from apportion.placer.rooms import Demand, Fit, NodeRoom

_SPEED: Final = 10**9
_NODE: Final = 10**5
_SPEED_MAX: Final = 10**9


class Throughput(Plain):
    """See the module."""

    is_blind = True
    rules = "speed,device free,node free"

    def __init__(self, table: str) -> None:
        """Raises ValueError where the table can't be read."""
        self.name = f"throughput:{table}"
        self._speeds: dict[str, int] = {}
        for part in table.split("+"):
            model, _, speed = part.partition("=")
            if not model or not speed.isdecimal() or not 0 < int(speed) <= _SPEED_MAX:
                raise ValueError(f"{part!r} is no MODEL=SPEED with a speed from 1 to {_SPEED_MAX}")
            self._speeds[model] = int(speed)
        self._slowest = min(self._speeds.values())

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The fastest devices of the node."""
        ranked = sorted((-self._speed(room, place), free_of(room.devices[place]), place) for place in fits)
        picks = tuple(sorted(place for *_, place in ranked[: demand.devices]))
        return Fit(sum(self.parts(demand, room, picks).values()), picks)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """A gang of devices is as fast as the slowest of them."""
        del demand
        return {
            "speed": min((self._speed(room, place) for place in picks), default=0) * _SPEED,
            "device_free": -max((free_of(room.devices[place]) for place in picks), default=0) * _NODE,
            "node_free": -node_free(room),
        }

    def _speed(self, room: NodeRoom, place: int) -> int:
        return self._speeds.get(room.devices[place].model, self._slowest)
