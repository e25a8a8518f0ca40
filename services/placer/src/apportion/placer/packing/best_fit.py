"""Best fit: the node with the least left over, CPU and devices weighing the same."""

from apportion.placer.packing.demand import Shape
from apportion.placer.packing.fleet import Fleet, NodeClass
from apportion.placer.packing.policy import Choice
from apportion.placer.packing.scored import SCORE_MAX, Rating, ScoredSearch, tightest_room

# What counts as a full node when CPU and devices are compared; the values of the published runs.
_CPU_MILLI_SCALE = 128_000
_DEVICE_MILLI_SCALE = 8_000


def _rate(cls: NodeClass, shape: Shape) -> Rating:
    cpu_left = cls.cpu_milli - shape.cpu_milli
    devices_left = cls.free_milli - shape.total_milli
    scale = 2 * _CPU_MILLI_SCALE * _DEVICE_MILLI_SCALE
    left = cpu_left * _DEVICE_MILLI_SCALE + devices_left * _CPU_MILLI_SCALE
    score = (scale - left) * SCORE_MAX // scale
    return min(max(score, 0), SCORE_MAX), tightest_room(cls, shape)


class BestFit:
    """The published best fit."""

    def __init__(self, fleet: Fleet) -> None:
        self._search = ScoredSearch(fleet, _rate)

    def choose(self, shape: Shape) -> Choice | None:
        """The class with the least left over."""
        return self._search.best(shape)

    def arrived(self, shape: Shape) -> None:
        """Learn nothing."""

    def forget(self) -> None:
        """Drop all indexes."""
        self._search.forget()
