"""The monitor's decisions made again from the log: a core for replays. Pure.

What follows from wishes, facts and the instant is decided anew. What only the monitor's process could know (how long a
node was silent by its clock, what it measured, who asked the log) is no part of the streams but for what was said of
it: that is taken as recorded, held against the rules and the state, and everything that follows from it decided anew.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import NodeRule
from apportion.contracts.ids import NodeId
from apportion.monitor import misfits
from apportion.monitor.alerts import key_of
from apportion.monitor.core import FLEET_MIN, POLICY, Observed, State, decide, decided, evolve, initial, lost, watched
from apportion.pool.state import NodeState

__all__ = ["POLICY", "decide", "evolve", "initial", "redecide"]

_LONG_MS: Final = 2**62


def redecide(state: State, now: int, recorded: Sequence[ev.Fact]) -> list[ev.Fact]:
    """What had to be said at an instant, where this was."""
    thaws = [one for one in recorded if isinstance(one, ev.ControlPlaneThawed) and one.answers]
    observed = Observed(
        silence=list(_silence(state, recorded)),
        cordons=_cordons(state, recorded),
        alerts=list(_alerts(state, recorded)),
        questions=[one for one in recorded if isinstance(one, ev.AuditQueryRun)],
        silent=thaws[0].presumed_lost if thaws else (),
        frozen_ms=thaws[0].frozen_ms if thaws else 0,
    )
    tried = {one.answers: one for one in recorded if isinstance(one, ev.NodeWishJudged)}
    return [_as_tried(fact, tried) for fact in decided(state, now, observed)]


def _silence(state: State, recorded: Sequence[ev.Fact]) -> Iterator[ev.Fact]:
    """What was said of silence, as far as the rules let it be said in this state."""
    nodes = state.pool.nodes
    fleet = len([node_id for node_id in watched(state.pool) if node_id not in state.presumed_lost])
    for fact in recorded:
        match fact:
            case ev.NodeSuspected(node_id=node_id, silent_ms=silent_ms) if node_id in nodes:
                node = nodes[node_id]
                may_be = node.state not in {NodeState.SUSPECTED, NodeState.FENCED} and not state.pool.frozen
                if may_be and silent_ms >= state.suspect_ms:
                    yield replace(fact, epoch=node.epoch, lease_ms=state.lease_ms)
            case ev.NodeTrusted(node_id=node_id) if node_id in nodes:
                if nodes[node_id].state is NodeState.SUSPECTED:
                    yield replace(fact, epoch=nodes[node_id].epoch)
            case ev.NodeLost(node_id=node_id, silent_ms=silent_ms) if node_id in nodes:
                node = nodes[node_id]
                may_be = node.state is NodeState.SUSPECTED and not state.pool.frozen
                if may_be and silent_ms >= state.lease_ms:
                    yield from lost(state, node, silent_ms)
            case ev.ControlPlaneFrozen(silent=silent):
                if not state.pool.frozen and fleet >= FLEET_MIN and silent * 2 > fleet:
                    yield replace(fact, nodes=fleet)
            case ev.ControlPlaneThawed(answers=0):
                if state.pool.frozen:
                    yield replace(fact, nodes=fleet)
            case _:
                pass


def _cordons(state: State, recorded: Sequence[ev.Fact]) -> list[ev.Fact]:
    """What the monitor's own rules said of nodes, given which of them it had heard without a gap."""
    said = [one for one in recorded if isinstance(one, ev.NodeCordoned | ev.NodeUncordoned) and one.rule is not None]
    if not said or not state.self_cordon or state.pool.frozen:
        return []
    steady: dict[NodeId, int] = {
        one.node_id: _LONG_MS for one in said if isinstance(one, ev.NodeUncordoned) and one.rule is NodeRule.FLAPPING
    }
    return misfits.judged(state.misfits, state.pool, steady, state.lease_ms)


def _alerts(state: State, recorded: Sequence[ev.Fact]) -> Iterator[ev.Fact]:
    """Alerts by the rules in force, given what was measured."""
    rules = {rule.name: rule for rule in state.rules}
    for fact in recorded:
        if not isinstance(fact, ev.AlertRaised | ev.AlertCleared):
            continue
        firing = state.alerts.firing.get(key_of(fact.rule, fact.about))
        match fact:
            case ev.AlertRaised() if fact.rule in rules:
                rule = rules[fact.rule]
                if firing is None and fact.value >= rule.raise_at and fact.for_s >= rule.for_s:
                    yield replace(
                        fact,
                        severity=rule.severity,
                        threshold=rule.raise_at,
                        unit=rule.unit,
                        summary=rule.summary,
                        action=rule.action,
                    )
            case ev.AlertCleared():
                if firing is not None:
                    known = rules.get(fact.rule)
                    threshold = known.clear_at if known else firing.fact.threshold
                    yield replace(fact, threshold=threshold, raised_seq=firing.raised_seq)
            case _:
                pass


def _as_tried(fact: ev.Fact, tried: dict[int, ev.NodeWishJudged]) -> ev.Fact:
    """A dry run of a thaw names the nodes that were silent just then, which nobody else knows."""
    if isinstance(fact, ev.NodeWishJudged) and fact.fact.startswith(ev.ControlPlaneThawed.__name__):
        said = tried.get(fact.answers)
        return fact if said is None else replace(fact, would=said.would)
    return fact
