"""Random fit: any node that can host the shape, any of its devices; the floor that other policies are measured from."""

from bisect import bisect_left, insort

from apportion.placer.packing.demand import Shape
from apportion.placer.packing.draws import Draws
from apportion.placer.packing.fleet import ClassKey, Fleet, Follower, NodeClass
from apportion.placer.packing.policy import Choice


class RandomFit:
    """Every node that fits is equally likely."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._draws = Draws(seed)
        self._fits: dict[Shape, tuple[Follower, dict[ClassKey, NodeClass], list[ClassKey]]] = {}

    def choose(self, shape: Shape) -> Choice | None:
        """A class drawn with the weight of its members."""
        if shape not in self._fits:
            self._fits[shape] = (Follower(self._fleet, shape), {}, [])
        follower, classes, order = self._fits[shape]
        for cls in follower.news():
            if cls.key not in classes:
                # Sorted, so that the draw means the same whatever order the classes came in.
                insort(order, cls.key)
            classes[cls.key] = cls
        dead = [key for key in order if not classes[key].nodes]
        for key in dead:
            del order[bisect_left(order, key)]
            del classes[key]
        ordered = [classes[key] for key in order]
        members = sum(len(cls.nodes) for cls in ordered)
        if not members:
            return None
        ticket = self._draws.below(members)
        for cls in ordered:
            ticket -= len(cls.nodes)
            if ticket < 0:
                return Choice(cls, self._room(cls, shape))
        raise AssertionError("the ticket is below the number of members")

    def arrived(self, shape: Shape) -> None:
        """Learn nothing."""

    def forget(self) -> None:
        """Drop what was found to fit."""
        self._fits.clear()

    def _room(self, cls: NodeClass, shape: Shape) -> int:
        if shape.devices != 1:
            return 0
        rooms = [room for room in cls.rooms if room >= shape.device_milli]
        return rooms[self._draws.below(len(rooms))]
