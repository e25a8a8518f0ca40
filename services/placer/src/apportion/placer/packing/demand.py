"""What a task asks of one node, and how often each such demand is seen."""

from typing import NamedTuple

WHOLE_DEVICE_MILLI = 1000


class Shape(NamedTuple):
    """A demand on one node; tasks with equal shapes are interchangeable to the kernel.

    `device_milli` is asked of each of `devices` devices; it is below 1000 only where `devices` is 1. `models` holds the
    acceptable device models in sorted order; empty means any.
    """

    cpu_milli: int
    memory_mib: int
    devices: int
    device_milli: int
    models: tuple[str, ...] = ()

    @property
    def total_milli(self) -> int:
        """What the task takes from all its devices together."""
        return self.devices * self.device_milli


class Mix:
    """How often each shape is asked for; either given, or counted from arrivals.

    With a `memory`, all counts are halved whenever that many arrivals are remembered, so that old habits fade.
    """

    def __init__(self, counts: dict[Shape, int] | None = None, *, memory: int = 0) -> None:
        self.counts: dict[Shape, int] = dict(counts or {})
        self.total = sum(self.counts.values())
        self._memory = memory

    def add(self, shape: Shape) -> None:
        """Count one arrival."""
        self.counts[shape] = self.counts.get(shape, 0) + 1
        self.total += 1
        if self._memory and self.total >= self._memory:
            self.counts = {known: count // 2 for known, count in self.counts.items() if count > 1}
            self.total = sum(self.counts.values())

    def ranked(self) -> list[tuple[Shape, int]]:
        """Shapes with their counts, most frequent first, ties by the shape itself."""
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
