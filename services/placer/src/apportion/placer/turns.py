"""Who goes next: down the tree of queues to a tenant, and to the first of that tenant's lines.

Each queue keeps those below it in a heap. A placement changes the shares of one path alone, all of whose members are
first in their heaps, so a step costs the depth of the tree and not the number of queues, lines or jobs.
"""

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

from apportion.contracts.ids import QueueId, TenantId
from apportion.placer.orders import OrderKey

Turn = tuple[int, int]
Key = tuple[int, int, int, int, str]
"""Class where that goes first, else 0; then the turn; between equals who came first; then the name."""


class _Place:
    """A queue, or one tenant's part of a queue, or the part of a queue whose tenants take no turns."""

    __slots__ = ("below", "lines", "name", "parent", "turn")

    def __init__(self, name: str, parent: "_Place | None", turn: Callable[[], Turn]) -> None:
        self.name = name
        self.parent = parent
        self.turn = turn
        self.below: list[tuple[Key, _Place]] = []
        self.lines: list[tuple[OrderKey, int, int]] = []
        """Key of the first, number of the line, and its class."""

    def key(self) -> Key:
        if self.lines:
            key, _, leading = self.lines[0]
            came = key[2]
        else:
            leading, _, _, came, _ = self.below[0][0]
        return (leading, *self.turn(), came, self.name)


class Turns:
    """Lines with somebody to place, in whose turn it is."""

    def __init__(self, parent_of: Callable[[QueueId], QueueId | None], turn_of: Callable[[str], Turn]) -> None:
        """``turn_of`` is asked by queue, or by ``<queue>/<tenant>``, again whenever its answer may have changed."""
        self._parent_of = parent_of
        self._turn_of = turn_of
        self._root = _Place("", None, lambda: (0, 0))
        self._queues: dict[QueueId, _Place] = {}
        self._leaves: dict[tuple[QueueId, TenantId], _Place] = {}

    def add(self, queue: QueueId, tenant: TenantId, key: OrderKey, leading: int, number: int) -> None:
        """Put in a line by its first; before ``start``."""
        leaf = self._leaves.get((queue, tenant))
        if leaf is None:
            name = f"{queue}/{tenant}"
            above = self._place(queue)
            turn = (lambda: self._turn_of(name)) if tenant else (lambda: (0, 0))
            leaf = self._leaves[queue, tenant] = _Place(name, above, turn)
        heappush(leaf.lines, (key, number, leading))

    def start(self) -> None:
        """Order everybody."""
        depth: list[tuple[int, _Place]] = []
        for place in (*self._leaves.values(), *self._queues.values()):
            above, levels = place.parent, 0
            while above is not None:
                above, levels = above.parent, levels + 1
            depth.append((levels, place))
        for _, place in sorted(depth, key=lambda one: (-one[0], one[1].name)):
            assert place.parent is not None
            heappush(place.parent.below, (place.key(), place))

    def first(self) -> int | None:
        """The line whose turn it is; None where none is left."""
        place = self._root
        while place.below:
            place = place.below[0][1]
        return place.lines[0][1] if place.lines else None

    def leave(self) -> None:
        """The first line has nobody to place any more."""
        leaf = self._leaf()
        heappop(leaf.lines)
        self._moved(leaf)

    def go_on(self, key: OrderKey, leading: int) -> None:
        """Somebody of the first line was placed; this one is its next."""
        leaf = self._leaf()
        heapreplace(leaf.lines, (key, leaf.lines[0][1], leading))
        self._moved(leaf)

    def _leaf(self) -> _Place:
        place = self._root
        while place.below:
            place = place.below[0][1]
        return place

    def _moved(self, place: _Place) -> None:
        """Put each of the path where it belongs now."""
        while (above := place.parent) is not None:
            if place.lines or place.below:
                heapreplace(above.below, (place.key(), place))
            else:
                heappop(above.below)
            place = above

    def _place(self, queue: QueueId) -> _Place:
        found = self._queues.get(queue)
        if found is None:
            parent = self._parent_of(queue)
            above = self._root if parent is None else self._place(parent)
            found = self._queues[queue] = _Place(queue, above, lambda: self._turn_of(queue))
        return found
