"""What may be broken on purpose, by whom, and that it ends."""

import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import FaultEnd, FaultKind, Refusal
from apportion.contracts.ids import OPERATOR, NodeId
from apportion.contracts.testing import ACME, NOON, a_node, as_fact, as_wish
from apportion.monitor import core

S = 1_000_000_000


class Monitor:
    """A monitor that may inject faults, unless it is told otherwise."""

    def __init__(self, *, faults: int = 1, simulated: bool = True) -> None:
        self.state = core.initial()
        self.seq = self.wishes = 0
        self.fold(ev.LeaseClaimed(author="monitor", session="s", core="c", config={"faults": faults}), "monitor")
        self.fold(a_node(devices=2, simulated=simulated), "agent-node-1")

    def fold(self, event: ev.Fact, author: str) -> None:
        self.seq += 1
        self.state = core.evolve(self.state, as_fact(event, self.seq, author=author))

    def decided(self, now: int = NOON) -> list[ev.Fact]:
        said = []
        while facts := core.decide(self.state, now):
            for fact in facts:
                self.fold(fact, "monitor")
            said += facts
        return said

    def wish(self, event: ev.Wish, **changes: object) -> ev.Fact:
        self.wishes += 1
        self.state = core.evolve(self.state, as_wish(event, self.wishes, **{"tenant": OPERATOR, **changes}))  # type: ignore[arg-type]  # a builder's fields
        (answer,) = self.decided()
        return answer


PAUSE = ev.FaultInjectionRequested(kind=FaultKind.SERVICE_PAUSE, target="placer", for_s=30, seed=7, reason="drill")


def test_a_fault_is_stated_with_its_actor_and_ends_by_itself() -> None:
    """Also over a restart: what is in force is a fold of facts."""
    monitor = Monitor()
    assert monitor.wish(PAUSE, actor="user:eve") == ev.FaultInjected(
        fault_id="fault-1",
        kind=FaultKind.SERVICE_PAUSE,
        target="placer",
        for_s=30,
        until_at=NOON + 30 * S,
        seed=7,
        actor="user:eve",
        reason="drill",
        answers=1,
        caused_by="wish-1",
    )
    assert core.wake_at(monitor.state, NOON) == NOON + 30 * S
    monitor.state = core.restore(core.snapshot(monitor.state))
    assert monitor.decided(NOON + 29 * S) == []
    (cleared,) = monitor.decided(NOON + 30 * S)
    assert isinstance(cleared, ev.FaultCleared)
    assert (cleared.fault_id, cleared.why) == ("fault-1", FaultEnd.EXPIRED)


def test_a_fault_is_cleared_once_by_whoever_asks_first() -> None:
    monitor = Monitor()
    monitor.wish(PAUSE)
    clear = ev.FaultClearRequested(fault_id="fault-1", reason="enough")
    answer = monitor.wish(clear)
    assert isinstance(answer, ev.FaultCleared)
    assert answer.why is FaultEnd.ASKED
    refused = monitor.wish(clear)
    assert isinstance(refused, ev.NodeWishRejected)
    assert refused.code is Refusal.FAULT_NOT_FOUND


def code_of(fact: ev.Fact) -> Refusal:
    assert isinstance(fact, ev.NodeWishRejected)
    return fact.code


def test_faults_are_off_unless_the_pool_was_started_for_them_and_for_operators_alone() -> None:
    """A setting and a permission: neither is enough."""
    assert code_of(Monitor(faults=0).wish(PAUSE)) is Refusal.FAULTS_OFF
    assert code_of(Monitor().wish(PAUSE, tenant=ACME)) is Refusal.NOT_PERMITTED


@pytest.mark.parametrize(
    ("kind", "target"),
    [(FaultKind.SERVICE_PAUSE, "placer"), (FaultKind.NODE_LOSS, "node-1"), (FaultKind.BUS_SLOW, "")],
)
def test_real_devices_are_kept_away_from_unless_that_is_allowed(kind: FaultKind, target: str) -> None:
    monitor = Monitor(simulated=False)
    wish = ev.FaultInjectionRequested(kind=kind, target=target, reason="r")
    assert code_of(monitor.wish(wish)) is Refusal.REAL_DEVICES
    allowed = ev.FaultInjectionRequested(kind=kind, target=target, reason="r", allow_real=True)
    assert isinstance(monitor.wish(allowed), ev.FaultInjected)


@pytest.mark.parametrize(
    ("kind", "target", "xid"),
    [
        (FaultKind.SERVICE_KILL, "nats", None),
        (FaultKind.NODE_LOSS, "node-9", None),
        (FaultKind.DEVICE_HEAT, "node-1", None),
        (FaultKind.DEVICE_HEAT, "node-1/2", None),
        (FaultKind.DEVICE_XID, "node-1/0", None),
        (FaultKind.BUS_RESTART, "node-1", None),
        (FaultKind.DISK_FULL, "node-1", None),
        (FaultKind.MESSAGE_DROP, "placer-standby", None),
        (FaultKind.CLOCK_JUMP, "node-9", None),
    ],
)
def test_a_target_that_is_none_is_refused_with_what_there_is(kind: FaultKind, target: str, xid: int | None) -> None:
    refused = Monitor().wish(ev.FaultInjectionRequested(kind=kind, target=target, xid=xid, reason="r"))
    assert code_of(refused) in {Refusal.FIELD_INVALID, Refusal.FIELD_MISSING}
    assert isinstance(refused, ev.NodeWishRejected)
    assert refused.expected


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_can_be_asked_for(kind: FaultKind) -> None:
    """And a dry run says what would follow."""
    prefix = kind.partition("-")[0]
    target = {
        "service": "placer",
        "node": "node-1",
        "device": "node-1/1",
        "message": "admission",
        "clock": "node-1",
    }.get(prefix, "")
    wish = ev.FaultInjectionRequested(kind=kind, target=target, xid=48, reason="r", dry_run=True)
    monitor = Monitor()
    judged = monitor.wish(wish)
    assert isinstance(judged, ev.NodeWishJudged)
    assert judged.fact == "FaultInjected"
    assert not monitor.state.faults.active
    assert NodeId("node-1") in monitor.state.pool.nodes
