"""The search that policies with a score from 0 to 100 share: best score first, then the first node in order."""

from collections.abc import Callable

from apportion.placer.packing.demand import Shape
from apportion.placer.packing.fleet import ClassKey, Fleet, Follower, NodeClass
from apportion.placer.packing.policy import Choice

SCORE_MAX = 100

# An index costs memory for as long as its shape might come back; beyond this many, the one longest unused goes.
_INDEXES_MAX = 512

Rating = tuple[int, int]


class _ShapeIndex:
    """The classes that can host one shape, by score."""

    __slots__ = ("buckets", "follower")

    def __init__(self, fleet: Fleet, shape: Shape) -> None:
        self.follower = Follower(fleet, shape)
        self.buckets: list[dict[ClassKey, tuple[NodeClass, int]]] = [{} for _ in range(SCORE_MAX + 1)]


class ScoredSearch:
    """Finds the highest rated class for a shape and looks again only at classes that changed.

    `rate` gives a class's score, 0 to 100, and the room of the device to take; it must depend on nothing else.
    """

    def __init__(self, fleet: Fleet, rate: Callable[[NodeClass, Shape], Rating]) -> None:
        self._fleet = fleet
        self._rate = rate
        self._indexes: dict[Shape, _ShapeIndex] = {}

    def best(self, shape: Shape) -> Choice | None:
        """The choice with the highest score; equal scores go to the first node."""
        index = self._indexes.pop(shape, None)
        if index is None:
            index = _ShapeIndex(self._fleet, shape)
            if len(self._indexes) >= _INDEXES_MAX:
                del self._indexes[next(iter(self._indexes))]
        self._indexes[shape] = index
        for cls in index.follower.news():
            score, room = self._rate(cls, shape)
            index.buckets[score][cls.key] = (cls, room)
        for bucket in reversed(index.buckets):
            if not bucket:
                continue
            best: Choice | None = None
            dead: list[ClassKey] = []
            for key, (cls, room) in bucket.items():
                if not cls.nodes:
                    dead.append(key)
                elif best is None or cls.nodes[0] < best.cls.nodes[0]:
                    best = Choice(cls, room)
            for key in dead:
                del bucket[key]
            if best is not None:
                return best
        return None

    def forget(self) -> None:
        """Drop all indexes."""
        self._indexes.clear()


def tightest_room(cls: NodeClass, shape: Shape) -> int:
    """The smallest room of the class that hosts a single device of the shape; 0 where it takes none or several."""
    if shape.devices != 1:
        return 0
    return min(room for room in cls.rooms if room >= shape.device_milli)
