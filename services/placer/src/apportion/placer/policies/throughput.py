"""Most throughput: over mixed device models, the fastest that is free; how fast each is, is a table that a pool gives.

Written ``throughput:MODEL=SPEED+WORKLOAD/MODEL=SPEED``, speeds as whole numbers of any one unit (a training job's
samples a second, say). A row with a workload is of jobs that carry it as their label ``workload``, or that are of that
kind (``training``, ``inference``, …); others go by the rows without one. A model that has no row is as slow as the
slowest that has one. A job's own list of models goes first. Among equally fast devices the tightest that fits wins, so
that whole ones stay free for who needs them. The table is part of the policy's name, and so of every decision.
"""

from typing import Final

from apportion.placer.policies.base import Plain, preference_of
from apportion.placer.policies.pack import free_of, node_free
from apportion.placer.rooms import Demand, Fit, NodeRoom

_SPEED: Final = 10**9
_NODE: Final = 10**5
_SPEED_MAX: Final = 10**9
_MODEL: Final = 10**19
"""A step down the job's list of models: more than the fastest speed is worth."""


class Throughput(Plain):
    """See the module."""

    is_blind = True
    version = "2"
    rules = "model,speed of the workload,device free,node free"

    def __init__(self, table: str) -> None:
        """Raises ValueError where the table can't be read."""
        self.name = f"throughput:{table}"
        self._speeds: dict[str, dict[str, int]] = {}
        for part in table.split("+"):
            row, _, speed = part.partition("=")
            workload, _, model = row.rpartition("/")
            if not model or not speed.isdecimal() or not 0 < int(speed) <= _SPEED_MAX:
                raise ValueError(
                    f"{part!r} is no MODEL=SPEED and no WORKLOAD/MODEL=SPEED with a speed from 1 to {_SPEED_MAX}"
                )
            self._speeds.setdefault(workload, {})[model] = int(speed)

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The fastest devices of the node."""
        ranked = sorted(
            (
                preference_of(demand, room, (place,)),
                -self._speed(demand, room, place),
                free_of(room.devices[place]),
                place,
            )
            for place in fits
        )
        picks = tuple(sorted(place for *_, place in ranked[: demand.devices]))
        return Fit(sum(self.parts(demand, room, picks).values()), picks)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """A gang of devices is as fast as the slowest of them."""
        found = {
            "speed": min((self._speed(demand, room, place) for place in picks), default=0) * _SPEED,
            "device_free": -max((free_of(room.devices[place]) for place in picks), default=0) * _NODE,
            "node_free": -node_free(room),
        }
        if demand.models:
            found["model"] = -preference_of(demand, room, picks) * _MODEL
        return found

    def _speed(self, demand: Demand, room: NodeRoom, place: int) -> int:
        model = room.devices[place].model
        own, common = self._speeds.get(demand.workload, {}), self._speeds.get("", {})
        found = own.get(model) or common.get(model)
        return found or min((own or common or {model: 1}).values())
