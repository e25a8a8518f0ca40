"""The monitor's decisions made again: what it observed is believed as far as rules allow, the rest recomputed."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import NodeRule, Severity
from apportion.contracts.ids import MONITOR, NodeId, RunId
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, as_fact
from apportion.monitor import core, redeciding
from apportion.monitor.core import State

NODE = NodeId("node-1")
SUSPECTED = ev.NodeSuspected(node_id=NODE, epoch=0, silent_ms=5_200, lease_ms=20_000)
LOST = ev.NodeLost(node_id=NODE, silent_ms=20_100, lease_ms=20_000, rule="silence")
FENCED = ev.NodeFenced(
    node_id=NODE,
    epoch=1,
    runs=(RunId("acme/train-7/0/1"),),
    reason="silent for 20100 ms, and its lease is 20000 ms",
)
TRUSTED = ev.NodeTrusted(node_id=NODE, epoch=0, silent_ms=7_000)


def folded(*facts: ev.Fact) -> State:
    """A pool of four nodes with a run on the first, and these facts of the monitor."""
    state = core.initial()
    nodes = [a_node(f"node-{n}") for n in (1, 2, 3, 4)]
    for seq, fact in enumerate([*nodes, a_job(), a_placement(), *facts], 1):
        author = f"agent-{fact.node_id}" if isinstance(fact, ev.NodeRegistered) else getattr(type(fact), "AUTHOR", "")
        state = core.evolve(state, as_fact(fact, seq, author=author or MONITOR))
    return state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (folded, (SUSPECTED,)),
        (lambda: folded(SUSPECTED), (LOST, FENCED)),
        (lambda: folded(SUSPECTED), (TRUSTED,)),
        (folded, (ev.ControlPlaneFrozen(silent=3, nodes=4),)),
        (
            lambda: folded(ev.LogRetentionChanged(seal_daily=True, actor="a", reason="r", answers=1)),
            (
                ev.LogSealOrdered(
                    before_at=NOON // 86_400_000_000_000 * 86_400_000_000_000,
                    actor="a", reason="retention: r", answers=0, caused_by="fact-7",
                ),
            ),
        ),
    ],
)  # fmt: skip
def test_what_the_rules_let_be_said_comes_out_the_same(state: Callable[[], State], said: tuple[ev.Fact, ...]) -> None:
    assert redeciding.redecide(state(), NOON, said) == list(said)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (folded, (replace(SUSPECTED, silent_ms=4_900),)),
        (folded, (replace(SUSPECTED, lease_ms=1),)),
        (folded, (LOST, FENCED)),
        (folded, (TRUSTED,)),
        (lambda: folded(SUSPECTED), (SUSPECTED,)),
        (lambda: folded(SUSPECTED), (replace(LOST, silent_ms=19_000), FENCED)),
        (lambda: folded(SUSPECTED), (LOST, replace(FENCED, runs=()))),
        (lambda: folded(SUSPECTED), (LOST, replace(FENCED, epoch=3))),
        (lambda: folded(SUSPECTED), (FENCED,)),
        (folded, (ev.ControlPlaneFrozen(silent=2, nodes=4),)),
        (folded, (ev.ControlPlaneThawed(silent=0, nodes=4, frozen_ms=1),)),
        (folded, (ev.NodeCordoned(node_id=NODE, actor="monitor", reason="so", rule=NodeRule.FLAPPING),)),
        (folded, (ev.NodeCordoned(node_id=NODE, actor="ann", reason="nobody asked", answers=3),)),
        (
            folded,
            (
                ev.AlertRaised(
                    rule="no-such-rule", severity=Severity.WARNING, value=1, threshold=1, unit="", for_s=0,
                    summary="", action="",
                ),
            ),
        ),
        (folded, (ev.AlertCleared(rule="disk-full", about="x", value=0, threshold=1, raised_seq=3),)),
        (folded, (ev.LogSealOrdered(before_at=NOON, actor="a", reason="nobody asked", answers=0),)),
        (folded, (ev.PayloadsEraseOrdered(before_at=NOON, actor="a", reason="nobody asked"),)),
    ],
)  # fmt: skip
def test_what_they_do_not_is_a_difference(state: Callable[[], State], said: tuple[ev.Fact, ...]) -> None:
    """A silence too short, a fencing that spares runs, an alert by no rule, an order that nobody gave."""
    assert redeciding.redecide(state(), NOON, said) != list(said)
