"""Which of the nodes that can host a replica it gets: the policy's choice, as a round has the pool so far."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from apportion.contracts.ids import NodeId
from apportion.placer.market import Market, market_of
from apportion.placer.outlook import Outlook
from apportion.placer.policies import Policy, resolved
from apportion.placer.policies.composed import Composed
from apportion.placer.ranking import KNOWN_MIN, Ranked, Ranking, Walk, fits_on
from apportion.placer.rooms import Demand, Fit, NodeRoom, Out, look_with, preferences
from apportion.placer.state import State

CANDIDATES_MAX = 3
"""How many candidates a decision states."""


class Candidate(NamedTuple):
    """One node that could host the replica."""

    room: NodeRoom
    fit: Fit
    """With what is bid by others taken off its score."""
    bid: int


IsAllowed = Callable[[NodeRoom, Fit], bool]
_Heavy = tuple[int, int, NodeRoom, Fit, int]
"""Negated weight, rank, where it is, and the bid in it."""


class Selection:
    """The policies of a round, and what they know. Raises PolicyUnknown where the settings name one that isn't here."""

    def __init__(self, state: State, rooms: Mapping[NodeId, NodeRoom], *, is_memo_used: bool) -> None:
        self._state = state
        self._rooms = rooms
        """Those that the round has changed."""
        self._is_memo_used = is_memo_used
        self._policies: dict[str, Policy] = {"": resolved(state.settings.policy)}
        for name in state.named_policies():
            self._policies[name] = resolved(name)
        self._outlook: Outlook | None = None
        self._market: Market | None = None

    def policy(self, demand: Demand) -> Policy:
        """By which policy the demand is placed."""
        return self._policies[demand.policy]

    def _part(self, demand: Demand) -> Policy:
        """The same, or the part of it that such a job goes by."""
        policy = self._policies[demand.policy]
        return policy.policy_for(demand) if isinstance(policy, Composed) else policy

    def moved(self, before: NodeRoom, after: NodeRoom) -> None:
        """The round has changed this room."""
        if self._market is not None:
            self._market.moved(before, after)

    def best(self, demand: Demand, ranking: Ranking, is_allowed: IsAllowed | None) -> list[Candidate]:
        """The one to take, then others; nothing where none of those that fit is allowed (None: all of them are)."""
        policy = self._part(demand)
        if policy.weighs:
            return self._weighed(policy, demand, ranking, is_allowed)
        best: list[Candidate] = []
        chosen: Candidate | None = None
        for _, node_id in ranking.in_order():
            fit = ranking.looks[node_id]
            assert isinstance(fit, Fit)
            one = Candidate(self._room(node_id), fit, 0)
            if chosen is None and (is_allowed is None or is_allowed(one.room, fit)):
                chosen = one
            elif len(best) < CANDIDATES_MAX:
                best.append(one)
            if chosen is not None and len(best) >= CANDIDATES_MAX - 1:
                break
        return [] if chosen is None else [chosen, *best[: CANDIDATES_MAX - 1]]

    def parts(self, demand: Demand, candidate: Candidate) -> dict[str, int]:
        """What the candidate's score is made of."""
        policy = self._part(demand)
        met = preferences(demand, candidate.room, candidate.fit.picks)
        if not policy.weighs:
            return policy.parts(demand, candidate.room, candidate.fit.picks) | met
        weight = candidate.fit.score + candidate.bid - sum(met.values())
        return {"weight": weight, "bids": -candidate.bid} | met

    def _room(self, node_id: NodeId) -> NodeRoom:
        return self._rooms.get(node_id) or self._state.rooms[node_id]

    def _weighed(
        self, policy: Policy, demand: Demand, ranking: Ranking, is_allowed: IsAllowed | None
    ) -> list[Candidate]:
        """Those of the best that may be used, the heaviest first; of nodes that rank alike, one."""
        outlook, market = self._prospects()
        is_quiet = market.is_quiet
        weighed, rooms, folded = ranking.weighed, self._rooms, self._state.rooms
        is_known, epoch, most = ranking.known is not None, outlook.epoch, policy.weighs
        levels: dict[int, list[list[Ranked]]] = {}
        for group, ranked in ranking.groups.items():
            if ranked:
                levels.setdefault(policy.level(market, demand, group), []).append(ranked)
        heavy: list[_Heavy] = []
        for level in sorted(levels):
            walk = Walk(levels[level])
            while len(heavy) < most and (node_id := walk.node_id) is not None:
                room = rooms.get(node_id) or folded[node_id]
                known = weighed.get(room.like) if is_known else None
                if known is not None and known[0] == epoch:
                    fit = known[1]
                else:
                    fit = _weigh(policy, outlook, demand, ranking, room)
                    if len(weighed) > KNOWN_MIN:
                        weighed.clear()
                    weighed[room.like] = (epoch, fit)
                if is_allowed is not None and not is_allowed(room, fit):
                    walk.to_next()
                    continue
                walk.past_score()
                bid = 0 if is_quiet else policy.bid(market, demand, room, fit.picks)
                heavy.append((bid - fit.score, len(heavy), room, fit, bid))
        # An equal weight stays with the one that ranks higher, which came first.
        best = sorted(heavy)[:CANDIDATES_MAX]
        return [Candidate(room, Fit(-cost, fit.picks), bid) for cost, _, room, fit, bid in best]

    def _prospects(self) -> tuple[Outlook, Market]:
        """What the pool is asked for, as the folded state has it, and what is scarce now."""
        state, is_memo_used = self._state, self._is_memo_used
        if self._outlook is None:
            found = state.outlook if is_memo_used else None
            if found is None or found.epoch != state.kept.mix.epoch:
                found = Outlook(state.kept.mix)
                if is_memo_used:
                    state.outlook, state.market = found, None
            self._outlook = found
        if self._market is None:
            market = state.market if is_memo_used else None
            if market is None:
                market = market_of(self._outlook.asked, state.rooms.values())
                if is_memo_used:
                    state.market = market
            self._market = market.copy()
            for node_id, room in self._rooms.items():
                self._market.moved(state.rooms[node_id], room)
        return self._outlook, self._market


def _weigh(policy: Policy, outlook: Outlook, demand: Demand, ranking: Ranking, room: NodeRoom) -> Fit:
    places = ranking.places[room.kind]
    assert not isinstance(places, Out)
    fits = fits_on(ranking, demand, room, places)
    if demand.where is None and demand.devices <= 1 and not demand.is_ranked and isinstance(fits, list):
        return policy.weigh(outlook, demand, room, fits)
    found = look_with(demand, room, fits, lambda asked, at, fits: policy.weigh(outlook, asked, at, fits))
    assert isinstance(found, Fit)
    return found
