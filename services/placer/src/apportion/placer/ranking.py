"""All nodes as one demand sees them: those that can host it, the best first, and why the others can't.

A ranking follows a set of rooms by looking again at those that changed. Looked at from scratch or followed through any
number of changes, it says the same.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace, merge
from typing import Final

from apportion.contracts.ids import NodeId
from apportion.placer.constraints import Kind, Like
from apportion.placer.rooms import Choose, Demand, Fit, NodeRoom, Out, device_fits, look_with, places_on

Ranked = tuple[int, NodeId]
"""Negated score and node of a fit: lower is better, and equal scores go by the lower node id."""
DeviceFits = dict[Like, list[int] | Out]
KNOWN_MIN: Final = 1_024
"""States of nodes of which a ranking remembers what it found, beside two for each node."""


@dataclass(slots=True)
class Ranking:
    """Changed only by ``follow`` and ``revisit``."""

    groups: dict[str, list[Ranked]] = field(default_factory=dict)
    """The fits, by the device models of their nodes."""
    looks: dict[NodeId, Fit | Out] = field(default_factory=dict)
    counts: dict[Out, int] = field(default_factory=dict)
    places: dict[Kind, tuple[int, ...] | Out] = field(default_factory=dict)
    """Which devices of each kind of node are eligible at all."""
    known: dict[Like, Fit | Out] | None = None
    """What was found of nodes that are alike; None where every node is looked at for itself."""
    fits: DeviceFits = field(default_factory=dict)
    """Which devices of them would do: the same dict for demands that ask alike of devices."""
    weighed: dict[Like, tuple[int, Fit]] = field(default_factory=dict)
    """What a second look said of them, and under which mix."""
    fitting: int = 0
    """How many nodes can host it."""
    version: int = 0
    """Grows whenever a node is counted under another reason, or as a fit."""
    notes: dict[str, tuple[int, object]] = field(default_factory=dict)
    """What others worked out of the counts, and of which version of them."""
    seen: int = 0
    """The last change of the folded rooms that was looked at."""
    ahead: set[NodeId] = field(default_factory=set)
    """Nodes that were last looked at as a round has them, and not as they were folded."""
    round: object = None
    """Which round that is; and the last of its changes that was looked at."""
    round_seen: int = 0

    @property
    def has_fits(self) -> bool:
        """Whether any node can host it."""
        return self.fitting > 0

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
        to = at + 1
        if to < len(ranked) and ranked[to][0] == entry[0]:
            to = bisect_right(ranked, (entry[0], _LAST), to)
        self._go(to)

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
    news = []
    for node_id, change in reversed(changed.items()):
        if change <= seen:
            break
        news.append(rooms[node_id])
    if news:
        ranking.seen = next(reversed(changed.values()))
        _look_at(ranking, demand, news, choose)


def follow_round(  # noqa: PLR0917 - a round as it stands
    ranking: Ranking,
    demand: Demand,
    folded: Mapping[NodeId, NodeRoom],
    rooms: Mapping[NodeId, NodeRoom],
    changed: dict[NodeId, int],
    round_: object,
    choose: Choose,
) -> None:
    """Look at nodes as this round has them: the rest of ``folded`` was followed, and ``rooms`` are what it changed.

    What a round leaves behind is looked at again by the next, or is what was folded since.
    """
    news = []
    if ranking.round is not round_:
        news = [folded[node_id] for node_id in ranking.ahead if node_id not in rooms]
        ranking.ahead.clear()
        ranking.round, ranking.round_seen = round_, 0
    seen = ranking.round_seen
    for node_id, change in reversed(changed.items()):
        if change <= seen:
            break
        ranking.ahead.add(node_id)
        news.append(rooms[node_id])
    ranking.round_seen = next(reversed(changed.values()), seen)
    if news:
        _look_at(ranking, demand, news, choose)


def _look_at(ranking: Ranking, demand: Demand, rooms: Sequence[NodeRoom], choose: Choose) -> None:
    """Look at these rooms, each of them another node's."""
    looks, known = ranking.looks, ranking.known
    if not looks:
        _look_first(ranking, demand, rooms, choose)
        return
    if known is not None and len(known) > KNOWN_MIN + 2 * len(looks):
        known.clear()
    avoid = demand.avoid
    for room in rooms:
        node_id = room.node_id
        is_alone = known is None or (avoid and node_id in avoid)
        found = None if known is None or is_alone else known.get(room.like)
        if found is None:
            found = _look(ranking, demand, room, choose)
            if known is not None and not is_alone:
                known[room.like] = found
        before = looks.get(node_id)
        if found is not before and found != before:
            _put(ranking, room, before, found)


def _look_first(ranking: Ranking, demand: Demand, rooms: Sequence[NodeRoom], choose: Choose) -> None:
    """As ``_look_at``, where no room was looked at before: by what is alike, and sorted once."""
    known, avoid = ranking.known, demand.avoid
    alike: dict[object, list[NodeRoom]] = {}
    for room in rooms:
        is_alone = known is None or room.node_id in avoid
        alike.setdefault(room.node_id if is_alone else room.like, []).append(room)
    for key, group in alike.items():
        found = _look(ranking, demand, group[0], choose)
        if known is not None and isinstance(key, Like):
            known[key] = found
        ranking.looks.update(dict.fromkeys([room.node_id for room in group], found))
        if isinstance(found, Fit):
            ranking.fitting += len(group)
            cost = -found.score
            ranking.groups.setdefault(group[0].kind.group, []).extend([(cost, room.node_id) for room in group])
        else:
            ranking.counts[found] = ranking.counts.get(found, 0) + len(group)
    ranking.version += 1
    for ranked in ranking.groups.values():
        ranked.sort()


def _look(ranking: Ranking, demand: Demand, room: NodeRoom, choose: Choose) -> Fit | Out:
    places = ranking.places.get(room.kind)
    if places is None:
        places = ranking.places[room.kind] = places_on(demand, room.kind)
    return (
        places if isinstance(places, Out) else look_with(demand, room, fits_on(ranking, demand, room, places), choose)
    )


def fits_on(ranking: Ranking, demand: Demand, room: NodeRoom, places: tuple[int, ...]) -> list[int] | Out:
    """As ``device_fits``, looked up where it is known."""
    if ranking.known is None:
        return device_fits(demand, room, places)
    fits = ranking.fits.get(room.devices_like)
    if fits is None:
        if len(ranking.fits) > KNOWN_MIN + 2 * len(ranking.looks):
            ranking.fits.clear()
        fits = ranking.fits[room.devices_like] = device_fits(demand, room, places)
    return fits


def _put(ranking: Ranking, room: NodeRoom, before: Fit | Out | None, found: Fit | Out) -> None:
    node_id = room.node_id
    ranking.version += 1
    ranked = ranking.groups.get(room.kind.group)
    if isinstance(before, Fit):
        ranking.fitting -= 1
        entry = (-before.score, node_id)
        if not _take_out(ranked or [], entry):
            # The node came back with other devices, and is in another group than it was.
            assert any(_take_out(each, entry) for each in ranking.groups.values())
    elif before is not None:
        ranking.counts[before] -= 1
    ranking.looks[node_id] = found
    if isinstance(found, Fit):
        ranking.fitting += 1
        if ranked is None:
            ranked = ranking.groups[room.kind.group] = []
        insort(ranked, (-found.score, node_id))
    else:
        ranking.counts[found] = ranking.counts.get(found, 0) + 1


def _take_out(ranked: list[Ranked], entry: Ranked) -> bool:
    at = bisect_left(ranked, entry)
    if at == len(ranked) or ranked[at] != entry:
        return False
    del ranked[at]
    return True
