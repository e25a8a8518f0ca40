"""All nodes as one demand sees them: those that can host it, the best first, and why the others can't.

A ranking follows a set of rooms by looking again at those that changed. Looked at from scratch or followed through any
number of changes, it says the same.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from apportion.contracts.ids import NodeId
from apportion.placer.rooms import Choose, Demand, Fit, Kind, NodeRoom, Out, look, places_on


@dataclass(slots=True)
class Ranking:
    """Changed only by ``follow``."""

    best: list[tuple[int, NodeId]] = field(default_factory=list)
    """Negated score and node of each fit: lower is better, and equal scores go by the lower node id."""
    looks: dict[NodeId, Fit | Out] = field(default_factory=dict)
    counts: dict[Out, int] = field(default_factory=dict)
    places: dict[Kind, tuple[int, ...] | Out] = field(default_factory=dict)
    """Which devices of each kind of node are eligible at all; the same dict in every copy, as it never turns false."""
    seen: int = 0
    """The last change that was looked at."""

    def copy(self) -> "Ranking":
        """One that can follow other changes from here on."""
        return Ranking(self.best.copy(), self.looks.copy(), self.counts.copy(), self.places)


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
        _put(ranking, node_id, places if isinstance(places, Out) else look(demand, room, places, choose))


def _put(ranking: Ranking, node_id: NodeId, found: Fit | Out) -> None:
    before = ranking.looks.get(node_id)
    if before == found:
        return
    if isinstance(before, Fit):
        del ranking.best[bisect_left(ranking.best, (-before.score, node_id))]
    elif before is not None:
        ranking.counts[before] -= 1
    ranking.looks[node_id] = found
    if isinstance(found, Fit):
        insort(ranking.best, (-found.score, node_id))
    else:
        ranking.counts[found] = ranking.counts.get(found, 0) + 1
