"""Residuals of a fleet, grouped: nodes that nobody can tell apart are one class, and are judged once.

The fleet also keeps, for whoever indexes classes, a log of those that appeared; a reader that remembers its position
sees only what changed since. Choosing among classes is left to policies.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from apportion.placer.packing.demand import WHOLE_DEVICE_MILLI, Shape

ClassKey = tuple[int, int, int, int, tuple[int, ...]]

# Classes are kept apart by what their best device can still host, so that a reader skips those it could never use.
HAS_WHOLE, HAS_PART, HAS_NONE = 0, 1, 2


class NodeSpec(NamedTuple):
    """An empty node: `devices` devices of one `model`."""

    name: str
    cpu_milli: int
    memory_mib: int
    devices: int
    model: str


class NodeClass:
    """Nodes of one model with equal residuals; `rooms` are the milli left on each device, largest first.

    `nodes` holds the ordinals of its members in ascending order; a class without members is dead, and readers drop it.
    `notes` belongs to the policy: what it worked out about the class, to be thrown away with it.
    """

    __slots__ = ("cpu_milli", "free_milli", "key", "memory_mib", "model", "nodes", "notes", "rooms", "whole")

    def __init__(self, key: ClassKey) -> None:
        self.key = key
        self.free_milli, self.cpu_milli, self.memory_mib, self.model, self.rooms = key
        self.whole = self.rooms.count(WHOLE_DEVICE_MILLI)
        self.nodes: list[int] = []
        self.notes: object = None

    @property
    def kind(self) -> int:
        """Which log tells of this class."""
        if self.whole:
            return HAS_WHOLE
        return HAS_PART if self.free_milli else HAS_NONE


class Placement(NamedTuple):
    """A shape on one node (its ordinal), holding these devices of it (their indexes)."""

    node: int
    devices: tuple[int, ...]
    shape: Shape


class AppearanceLog:
    """Classes in the order in which they came to life; trimmed from the front, positions stay valid."""

    __slots__ = ("base", "items")

    def __init__(self) -> None:
        self.base = 0
        self.items: list[NodeClass] = []

    def append(self, appeared: NodeClass, live: int) -> None:
        """Note a class; `live` bounds how much history is worth more than looking at everything again."""
        self.items.append(appeared)
        if len(self.items) > 2 * live + 4096:
            cut = len(self.items) // 2
            del self.items[:cut]
            self.base += cut


def key_after(cls: NodeClass, shape: Shape, room: int) -> ClassKey:
    """The class that a member becomes by hosting the shape; `room` is the device room that a single device takes."""
    free, cpu, memory, model, rooms = cls.key
    cpu_milli, memory_mib, devices, device_milli, _ = shape
    if device_milli == WHOLE_DEVICE_MILLI:
        # Whole devices come first in the order, and empty ones go last.
        rooms = rooms[devices:] + (0,) * devices
    elif devices:
        left = list(rooms)
        left.remove(room)
        rest = room - device_milli
        at = len(left)
        while at and left[at - 1] < rest:
            at -= 1
        left.insert(at, rest)
        rooms = tuple(left)
    return (free - devices * device_milli, cpu - cpu_milli, memory - memory_mib, model, rooms)


class Fleet:
    """The residuals of all nodes; the order of `nodes` is the order that breaks ties."""

    def __init__(self, nodes: Sequence[NodeSpec]) -> None:
        self.models: list[str] = sorted({node.model for node in nodes})
        self.specs = list(nodes)
        self.logs = (AppearanceLog(), AppearanceLog(), AppearanceLog())
        self.live: tuple[dict[ClassKey, NodeClass], ...] = ({}, {}, {})
        self.free_by_model = [0] * len(self.models)
        self.capacity_milli = 0
        self._watchers: list[Callable[[NodeClass, NodeClass], None]] = []
        self._rooms = [[WHOLE_DEVICE_MILLI] * node.devices for node in nodes]
        self._class_of: list[NodeClass] = []
        for ordinal, node in enumerate(nodes):
            model = self.models.index(node.model)
            free = node.devices * WHOLE_DEVICE_MILLI
            self.capacity_milli += free
            self.free_by_model[model] += free
            key = (free, node.cpu_milli, node.memory_mib, model, tuple(self._rooms[ordinal]))
            self._class_of.append(self._join(ordinal, key))

    @property
    def free_milli(self) -> int:
        """What all devices together have left."""
        return sum(self.free_by_model)

    def allowed(self, shape: Shape) -> int:
        """The models that the shape accepts, as a bit mask over `models`."""
        if not shape.models:
            return (1 << len(self.models)) - 1
        return sum(1 << index for index, model in enumerate(self.models) if model in shape.models)

    def class_of(self, node: int) -> NodeClass:
        """The class that the node is in now."""
        return self._class_of[node]

    def rooms_of(self, node: int) -> tuple[int, ...]:
        """The milli left on each device of the node, in the order of the devices."""
        return tuple(self._rooms[node])

    def watch(self, watcher: Callable[[NodeClass, NodeClass], None]) -> None:
        """Have the watcher called with the class that a node left and the one that it joined, at every change."""
        self._watchers.append(watcher)

    def place(self, cls: NodeClass, shape: Shape, room: int) -> Placement:
        """Put the shape on the first member of the class, and a single device where exactly `room` is left."""
        node = cls.nodes[0]
        rooms = self._rooms[node]
        devices: tuple[int, ...] = ()
        if shape.devices == 1:
            devices = (rooms.index(room),)
        elif shape.devices:
            whole = [index for index, left in enumerate(rooms) if left == WHOLE_DEVICE_MILLI]
            devices = tuple(whole[: shape.devices])
        self._shift(node, key_after(cls, shape, room), devices, -shape.device_milli)
        return Placement(node, devices, shape)

    def release(self, placement: Placement) -> None:
        """Give back what the placement holds."""
        node, devices, shape = placement
        before = self._class_of[node]
        rooms = list(self._rooms[node])
        for device in devices:
            rooms[device] += shape.device_milli
        key = (
            before.free_milli + shape.total_milli,
            before.cpu_milli + shape.cpu_milli,
            before.memory_mib + shape.memory_mib,
            before.model,
            tuple(sorted(rooms, reverse=True)),
        )
        self._shift(node, key, devices, shape.device_milli)

    def _shift(self, node: int, key: ClassKey, devices: tuple[int, ...], change_milli: int) -> None:
        before = self._class_of[node]
        rooms = self._rooms[node]
        for device in devices:
            rooms[device] += change_milli
        members = before.nodes
        del members[bisect_left(members, node)]
        if not members:
            del self.live[before.kind][before.key]
        after = self._class_of[node] = self._join(node, key)
        self.free_by_model[after.model] += after.free_milli - before.free_milli
        for watch in self._watchers:
            watch(before, after)

    def _join(self, node: int, key: ClassKey) -> NodeClass:
        # The kind follows from the largest room; looking it up by key first would need all three dictionaries.
        rooms = key[4]
        top = rooms[0] if rooms else 0
        kind = HAS_WHOLE if top == WHOLE_DEVICE_MILLI else HAS_PART if top else HAS_NONE
        live = self.live[kind]
        cls = live.get(key)
        if cls is None:
            cls = live[key] = NodeClass(key)
            self.logs[kind].append(cls, len(live))
        insort(cls.nodes, node)
        return cls


class Follower:
    """Reads the logs of appearances for one shape: the classes that can host it and are new since the last look."""

    __slots__ = ("_allowed", "_fleet", "_kinds", "_seen", "_shape")

    def __init__(self, fleet: Fleet, shape: Shape) -> None:
        self._fleet = fleet
        self._shape = shape
        self._allowed = fleet.allowed(shape)
        # Whole devices are found in the first log only, parts in the first two; a shape without devices fits anywhere.
        self._kinds = 1 if shape.device_milli == WHOLE_DEVICE_MILLI else 2 if shape.devices else 3
        self._seen = [-1, -1, -1]

    def news(self) -> list[NodeClass]:
        """Live classes that fit and have appeared since the last call; the first call tells of all."""
        found: list[NodeClass] = []
        fleet = self._fleet
        seen = self._seen
        for kind in range(self._kinds):
            log = fleet.logs[kind]
            end = log.base + len(log.items)
            if seen[kind] == end:
                continue
            start = seen[kind] - log.base
            live = fleet.live[kind]
            seen[kind] = end
            if start < 0 or len(log.items) - start > len(live):
                self._keep_fits(list(live.values()), found)
            else:
                self._keep_fits(log.items[start:], found)
        return found

    def _keep_fits(self, classes: list[NodeClass], found: list[NodeClass]) -> None:
        cpu, memory, devices, device_milli, _ = self._shape
        allowed = self._allowed
        for cls in classes:
            if cls.cpu_milli < cpu or cls.memory_mib < memory or not cls.nodes or not allowed >> cls.model & 1:
                continue
            if devices == 1:
                if cls.rooms[0] < device_milli:
                    continue
            elif devices > cls.whole:
                continue
            found.append(cls)
