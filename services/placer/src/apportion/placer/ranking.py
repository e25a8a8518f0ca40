"""All nodes as one demand sees them: those that can host it, the best first, and why the others can't.

A ranking follows a set of rooms by looking again at those that changed. Looked at from scratch or followed through any
number of changes, it says the same.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace, merge

from apportion.contracts.ids import NodeId
from apportion.placer.constraints import Kind
from apportion.placer.rooms import Choose, Demand, Fit, NodeRoom, Out, look, places_on

Ranked = tuple[int, NodeId]
"""Negated score and node of a fit: lower is better, and equal scores go by the lower node id."""


@dataclass(slots=True)
class Ranking:
    """Changed only by ``follow``."""

    groups: dict[str, list[Ranked]] = field(default_factory=dict)
    """The fits, by the device models of their nodes."""
    looks: dict[NodeId, Fit | Out] = field(default_factory=dict)
    counts: dict[Out, int] = field(default_factory=dict)
    places: dict[Kind, tuple[int, ...] | Out] = field(default_factory=dict)
    """Which devices of each kind of node are eligible at all; the same dict in every copy, as it never turns false."""
    weighed: dict[NodeId, tuple[NodeRoom, int, Fit]] = field(default_factory=dict)
    """What a second look said of a room, under which mix; the same dict in every copy, as each entry names its room."""
    seen: int = 0
    """The last change that was looked at."""

    def copy(self) -> "Ranking":
        """One that can follow other changes from here on."""
        groups = {group: ranked.copy() for group, ranked in self.groups.items()}
        return Ranking(groups, self.looks.copy(), self.counts.copy(), self.places, self.weighed)

    @property
    def has_fits(self) -> bool:
        """Whether any node can host it."""
        return any(self.groups.values())

    def in_order(self) -> Iterator[Ranked]:
        """All fits, the best first."""
        ranked = [one for one in self.groups.values() if one]
        return iter(ranked[0]) if len(ranked) == 1 else merge(*ranked)


_LAST = NodeId("\U0010ffff")
"""After every node id."""


class Walk:
    """Goes over several lists in order, and can leave out what scores as the last one did."""

    __slots__ = ("_heads",)

    def __init__(self, lists: Sequence[list[Ranked]]) -> None:
        self._heads = [(ranked[0], at, 0, ranked) for at, ranked in enumerate(lists) if ranked]
        heapify(self._heads)

    @property
    def node_id(self) -> NodeId | None:
        """Where it stands; None at the end."""
        return self._heads[0][0][1] if self._heads else None

    def to_next(self) -> None:
        """Go one on."""
        self._go(self._heads[0][2] + 1)

    def past_score(self) -> None:
        """Go on to what scores otherwise, in the list in which this one stands."""
        entry, _, at, ranked = self._heads[0]
        self._go(bisect_right(ranked, (entry[0], _LAST), at))

    def _go(self, to: int) -> None:
        _, number, _, ranked = self._heads[0]
        if to < len(ranked):
            heapreplace(self._heads, (ranked[to], number, to, ranked))
        else:
            heappop(self._heads)


def follow(
    ranking: Ranking,
    demand: Demand,
    rooms: Mapping[NodeId, NodeRoom],
    changed: dict[NodeId, int],
    choose: Choose,
) -> None:
    """Look again at the rooms that changed; ``changed`` holds the count at each one's last change, in that order."""
    seen = ranking.seen
    for node_id, change in reversed(changed.items()):
        if change <= seen:
            break
        ranking.seen = max(ranking.seen, change)
        room = rooms[node_id]
        places = ranking.places.get(room.kind)
        if places is None:
            places = ranking.places[room.kind] = places_on(demand, room.kind)
        found = places if isinstance(places, Out) else look(demand, room, places, choose)
        if ranking.looks.get(node_id) != found:
            _put(ranking, room, found)


def _put(ranking: Ranking, room: NodeRoom, found: Fit | Out) -> None:
    node_id = room.node_id
    before = ranking.looks.get(node_id)
    if isinstance(before, Fit):
        entry = (-before.score, node_id)
        if not _take_out(ranking.groups.get(room.kind.group, []), entry):
            # The node came back with other devices, and is in another group than it was.
            assert any(_take_out(ranked, entry) for ranked in ranking.groups.values())
    elif before is not None:
        ranking.counts[before] -= 1
    ranking.looks[node_id] = found
    if isinstance(found, Fit):
        insort(ranking.groups.setdefault(room.kind.group, []), (-found.score, node_id))
    else:
        ranking.counts[found] = ranking.counts.get(found, 0) + 1


def _take_out(ranked: list[Ranked], entry: Ranked) -> bool:
    at = bisect_left(ranked, entry)
    if at == len(ranked) or ranked[at] != entry:
        return False
    del ranked[at]
    return True
