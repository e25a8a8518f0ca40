"""What the monitor states: given what it folded and heard, at this moment, then exactly these facts."""

import msgspec
import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import (
    DeviceHealth,
    KeyChange,
    Mode,
    NodeRule,
    Pricing,
    Refusal,
    RowOf,
    RunCause,
    Thaw,
    Verdict,
)
from apportion.contracts.cloudevents import NOTES, Ingress
from apportion.contracts.envelope import Entry, Stream, Undecodable
from apportion.contracts.ids import MONITOR, OPERATOR, DeviceUuid, JobId, NodeId, RunId
from apportion.contracts.testing import ACME, NOON, a_job, a_job_request, a_node, a_placement, as_fact, as_wish
from apportion.monitor import core
from apportion.monitor.core import Heard, Resumed, State, Tick
from apportion.monitor.wishes import NS_PER_S
from apportion.pool.state import NodeState

S = NS_PER_S
NODE = NodeId("node-1")


class Pool:
    """A monitor and its stream: what it decides is folded the way the bus would bring it back."""

    def __init__(self, *nodes: str, state: State | None = None) -> None:
        self.state = core.initial() if state is None else state
        self.seq, self.wishes = core.position(self.state)
        for node in nodes:
            self.fold(a_node(node), author=f"agent-{node}")
        self.said: list[ev.Fact] = []

    def fold(self, event: ev.Fact, *, author: str = "", at: int = NOON) -> None:
        self.seq += 1
        self.state = core.evolve(self.state, as_fact(event, self.seq, author=author, at=at))

    def wish(self, event: ev.Wish, **changes: object) -> None:
        self.wishes += 1
        self.state = core.evolve(self.state, as_wish(event, self.wishes, **{"tenant": OPERATOR, **changes}))  # type: ignore[arg-type]  # a builder's fields

    def tick(self, seconds: float) -> list[ev.Fact]:
        self.state = core.observe(self.state, Tick(at_ns=int(seconds * S)), NOON)
        return self.decided()

    def hear(self, seconds: float, *nodes: str, epoch: int = 0, session: str = "") -> list[ev.Fact]:
        for node in nodes:
            heard = Heard(node=NodeId(node), session=session or f"{node}-s1", epoch=epoch, at_ns=int(seconds * S))
            self.state = core.observe(self.state, heard, NOON)
        return self.decided()

    def decided(self) -> list[ev.Fact]:
        """Everything that is said until the monitor falls silent, each batch folded before the next."""
        said: list[ev.Fact] = []
        for _ in range(20):
            facts = core.decide(self.state, NOON)
            if not facts:
                self.said += said
                return said
            for fact in facts:
                self.fold(fact, author="monitor")
            said += facts
        raise AssertionError("the monitor never falls silent")


def test_a_step_looks_at_those_that_are_due_and_at_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of thousands speaks thousands of times a second: a step that looked at each node would take too long."""
    names = [f"node-{number}" for number in range(300)]
    pool = Pool(*names)
    pool.tick(0)
    pool.hear(1, *names)
    asked: list[NodeId] = []
    since_ns = core._since_ns

    def counted(state: State, node: NodeId) -> int:
        asked.append(node)
        return since_ns(state, node)

    monkeypatch.setattr(core, "_since_ns", counted)
    for number in range(100):
        pool.hear(2 + number / 100, names[number])
    assert len(asked) <= 10 * 100
    assert pool.tick(5.9) == []
    assert pool.tick(6) == [ev.ControlPlaneFrozen(silent=200, nodes=300)]


# Silence ------------------------------------------------------------------------------------------------------------


def test_a_silent_node_is_suspected_and_then_lost_and_fenced_in_one_batch() -> None:
    """Suspicion stops new placements; only the end of the lease takes anything away, and it says which runs."""
    pool = Pool("node-1")
    pool.fold(a_job())
    pool.fold(a_placement())
    assert pool.tick(0) == []
    assert pool.hear(1, "node-1") == []
    assert pool.tick(5.9) == []
    assert pool.tick(6) == [ev.NodeSuspected(node_id=NODE, epoch=0, silent_ms=5000, lease_ms=20_000)]
    assert pool.tick(20.9) == []
    assert pool.tick(21) == [
        ev.NodeLost(node_id=NODE, silent_ms=20_000, lease_ms=20_000, rule="silence"),
        ev.NodeFenced(
            node_id=NODE,
            epoch=1,
            runs=(RunId("acme/train-7/0/1"),),
            reason="silent for 20000 ms, and its lease is 20000 ms",
        ),
    ]
    assert pool.tick(500) == []
    assert pool.state.pool.nodes[NODE].epoch == 1


def test_a_loss_and_its_fencing_are_decided_together() -> None:
    """Nobody may see a node lost whose runs still count."""
    pool = Pool("node-1")
    pool.tick(0)
    pool.tick(6)
    pool.state = core.observe(pool.state, Tick(at_ns=30 * S), NOON)
    assert [type(fact) for fact in core.decide(pool.state, NOON)] == [ev.NodeLost, ev.NodeFenced]


def test_a_node_that_speaks_before_its_lease_ends_is_trusted_again() -> None:
    """With the length of the silence, so that a flapping link can be seen."""
    pool = Pool("node-1")
    pool.tick(0)
    pool.tick(7)
    assert pool.hear(9, "node-1") == [ev.NodeTrusted(node_id=NODE, epoch=0, silent_ms=9000)]
    assert pool.tick(13) == []
    assert pool.tick(14) == [ev.NodeSuspected(node_id=NODE, epoch=0, silent_ms=5000, lease_ms=20_000)]


def test_the_settings_of_the_lease_claim_are_the_thresholds() -> None:
    """They reach the core by the monitor's own claim alone."""
    pool = Pool("node-1")
    config: dict[str, int | str] = {"suspect_ms": 1000, "lease_ms": 3000}
    pool.fold(ev.LeaseClaimed(author="placer", session="s", core="c", config=config), author="placer")
    assert pool.state.lease_ms == core.LEASE_MS
    pool.fold(ev.LeaseClaimed(author=MONITOR, session="s", core="c", config=config), author="monitor")
    pool.tick(0)
    assert [type(f) for f in pool.tick(1)] == [ev.NodeSuspected]
    assert [type(f) for f in pool.tick(3)] == [ev.NodeLost, ev.NodeFenced]


@pytest.mark.parametrize("config", [{"suspect_ms": 0}, {"lease_ms": 4000}, {"suspect_ms": "soon"}])
def test_settings_that_make_no_sense_are_passed_over(config: dict[str, int | str]) -> None:
    """A lease shorter than the suspicion would fence without warning."""
    pool = Pool("node-1")
    pool.fold(ev.LeaseClaimed(author=MONITOR, session="s", core="c", config=config), author="monitor")
    assert (pool.state.suspect_ms, pool.state.lease_ms) == (core.SUSPECT_MS, core.LEASE_MS)


def test_a_fenced_node_is_recovered_when_it_registers_with_its_new_epoch() -> None:
    """Not before: with the old epoch its agent doesn't know yet that its runs no longer count."""
    pool = Pool("node-1")
    pool.tick(0)
    pool.tick(6)
    pool.tick(30)
    assert pool.hear(31, "node-1") == []
    pool.fold(a_node(session="again"), author="agent-node-1", at=NOON + 2 * S)
    assert pool.decided() == []
    pool.fold(a_node(session="again", epoch=1), author="agent-node-1", at=NOON + 3 * S)
    registered = f"fact-{pool.seq}"
    assert pool.decided() == [ev.NodeRecovered(node_id=NODE, epoch=1, away_ms=3000, caused_by=registered)]
    assert pool.state.pool.nodes[NODE].state is NodeState.READY
    assert pool.tick(34) == []
    assert [type(f) for f in pool.tick(36)] == [ev.NodeSuspected]


def test_nobody_registers_another_node_back() -> None:
    """Identity comes from the subject."""
    pool = Pool("node-1")
    pool.tick(0)
    pool.tick(6)
    pool.tick(30)
    pool.fold(a_node(epoch=1), author="agent-node-2")
    assert pool.decided() == []


@pytest.mark.parametrize(("session", "epoch"), [("an-older-session", 0), ("node-1-s1", 7)])
def test_signs_of_another_session_or_epoch_prove_nothing(session: str, epoch: int) -> None:
    """Two copies of an agent may run; the one that registered last is the one that counts."""
    pool = Pool("node-1")
    pool.tick(0)
    assert [type(f) for f in pool.hear(6, "node-1", session=session, epoch=epoch)] == [ev.NodeSuspected]


def test_strangers_are_not_remembered() -> None:
    """Whatever publishes heartbeats of nodes that never registered takes no memory."""
    pool = Pool("node-1")
    pool.hear(1, "node-9")
    assert NodeId("node-9") not in pool.state.heard_ns


# The monitor doubts itself first ------------------------------------------------------------------------------------


def test_when_most_of_the_fleet_is_silent_at_once_nothing_is_fenced() -> None:
    """The likelier explanation is the monitor's own ears."""
    pool = Pool("node-1", "node-2", "node-3")
    pool.tick(0)
    pool.hear(4, "node-3")
    assert pool.tick(5) == [ev.ControlPlaneFrozen(silent=2, nodes=3)]
    assert pool.tick(100) == []
    # The fleet speaks again: what is silent still gets a whole lease from here.
    assert pool.hear(101, "node-1", "node-2") == [ev.ControlPlaneThawed(silent=1, nodes=3, frozen_ms=96_000)]
    assert pool.hear(105, "node-1", "node-2") == []
    assert pool.hear(106, "node-1", "node-2") == [
        ev.NodeSuspected(node_id=NodeId("node-3"), epoch=0, silent_ms=5000, lease_ms=20_000)
    ]
    assert pool.hear(120.9, "node-1", "node-2") == []
    assert [type(f) for f in pool.hear(121, "node-1", "node-2")] == [ev.NodeLost, ev.NodeFenced]


def frozen_fleet() -> Pool:
    """Three nodes, frozen at 5 s as the first two are dead; the third is heard each second."""
    pool = Pool("node-1", "node-2", "node-3")
    pool.tick(0)
    assert [type(f) for second in range(1, 6) for f in pool.hear(second, "node-3")] == [ev.ControlPlaneFrozen]
    return pool


def test_two_dead_nodes_of_three_are_fenced_once_the_third_was_heard_for_long_enough() -> None:
    """The bus brings another's voice all the while, so it isn't the bus that is silent."""
    pool = frozen_fleet()
    said = [(second, f) for second in range(6, 90) for f in pool.hear(second, "node-3")]
    assert said[0] == (
        65,
        ev.ControlPlaneThawed(
            silent=2,
            nodes=3,
            why=Thaw.WAITED,
            presumed_lost=(NodeId("node-1"), NodeId("node-2")),
            frozen_ms=60_000,
        ),
    )
    kinds = [type(f) for _, f in said[1:]]
    assert kinds == [ev.NodeSuspected, ev.NodeSuspected, ev.NodeLost, ev.NodeFenced, ev.NodeLost, ev.NodeFenced]
    assert {second for second, _ in said} == {65}
    assert not pool.state.presumed_lost


def test_where_nobody_is_heard_the_freeze_has_no_end() -> None:
    """Nothing tells a dead fleet from a monitor that is cut off with its bus; an operator can."""
    pool = frozen_fleet()
    assert pool.tick(10_000) == []
    pool.wish(ev.ControlPlaneThawRequested(reason="the room burnt down"), actor="user:alice")
    said = pool.decided()
    assert said[0] == ev.ControlPlaneThawed(
        silent=3,
        nodes=3,
        why=Thaw.ASKED,
        presumed_lost=(NodeId("node-1"), NodeId("node-2"), NodeId("node-3")),
        frozen_ms=9_995_000,
        actor="user:alice",
        reason="the room burnt down",
        answers=1,
        caused_by="wish-1",
    )
    assert sum(isinstance(f, ev.NodeFenced) for f in said) == 3


def test_a_pause_of_the_monitor_does_not_count_as_frozen_time() -> None:
    """What it could not hear proves nothing about those who were silent."""
    pool = frozen_fleet()
    pool.state = core.observe(pool.state, Resumed(at_ns=100 * S), NOON)
    assert [f for second in range(101, 160) for f in pool.hear(second, "node-3")] == []
    assert isinstance(pool.hear(160, "node-3")[0], ev.ControlPlaneThawed)


def test_who_thaws_what_is_not_frozen_is_told_so() -> None:
    """And a dry run says what would follow where it is."""
    pool = Pool("node-1")
    pool.wish(ev.ControlPlaneThawRequested(reason="r"))
    (refused,) = pool.decided()
    assert isinstance(refused, ev.NodeWishRejected)
    assert refused.code is Refusal.POOL_STATE
    frozen = frozen_fleet()
    frozen.wish(ev.ControlPlaneThawRequested(reason="r", dry_run=True))
    (judged,) = frozen.decided()
    assert isinstance(judged, ev.NodeWishJudged)
    assert judged.would == ("Placing goes on. Fenced once their lease has ended: node-1, node-2.",)
    assert frozen.state.pool.frozen


def test_a_small_fleet_is_never_frozen() -> None:
    """Of two nodes one is half the fleet; its loss must be seen."""
    pool = Pool("node-1", "node-2")
    pool.tick(0)
    assert [type(f) for f in pool.tick(5)] == [ev.NodeSuspected, ev.NodeSuspected]
    assert [type(f) for f in pool.tick(20)] == [ev.NodeLost, ev.NodeFenced, ev.NodeLost, ev.NodeFenced]


def test_one_silent_node_of_three_is_fenced() -> None:
    """Half or less is a loss, not a doubt."""
    pool = Pool("node-1", "node-2", "node-3")
    pool.tick(0)
    for second in range(1, 25):
        pool.hear(second, "node-1", "node-2")
    assert [type(f) for f in pool.said] == [ev.NodeSuspected, ev.NodeLost, ev.NodeFenced]


def test_nodes_already_fenced_do_not_count_as_silent() -> None:
    """Losses that came one after another must not end in a freeze for ever."""
    pool = Pool("node-1", "node-2", "node-3", "node-4")
    pool.tick(0)
    for second in range(1, 25):
        pool.hear(second, "node-2", "node-3", "node-4")
    for second in range(25, 50):
        pool.hear(second, "node-3", "node-4")
    assert not pool.state.pool.frozen
    assert [str(f.node_id) for f in pool.said if isinstance(f, ev.NodeFenced)] == ["node-1", "node-2"]


def test_a_monitor_that_just_started_grants_each_node_a_full_lease() -> None:
    """Its predecessor's silence is not the nodes'."""
    pool = Pool("node-1")
    pool.tick(0)
    pool.tick(6)
    assert pool.state.pool.nodes[NODE].state is NodeState.SUSPECTED
    again = Pool(state=core.restore(core.snapshot(pool.state)))
    assert again.tick(1000) == []
    assert again.tick(1019.9) == []
    assert [type(f) for f in again.tick(1020)] == [ev.NodeLost, ev.NodeFenced]


def test_a_suspected_node_is_not_trusted_because_the_monitor_restarted() -> None:
    """Only its own word counts."""
    pool = Pool("node-1")
    pool.tick(0)
    pool.tick(6)
    again = Pool(state=core.restore(core.snapshot(pool.state)))
    assert again.tick(1000) == []
    assert [type(f) for f in again.hear(1001, "node-1")] == [ev.NodeTrusted]


def test_time_in_which_the_monitor_could_not_hear_counts_for_nobody() -> None:
    """A frozen bus or a suspended machine must not cost a healthy node its runs."""
    pool = Pool("node-1")
    pool.tick(0)
    pool.hear(1, "node-1")
    pool.state = core.observe(pool.state, Resumed(at_ns=100 * S), NOON)
    assert pool.decided() == []
    assert pool.tick(104.9) == []
    assert [type(f) for f in pool.tick(105)] == [ev.NodeSuspected]


def test_nothing_is_judged_before_anything_was_observed() -> None:
    """While the history is read there is no silence, only the past."""
    pool = Pool("node-1", "node-2", "node-3")
    assert pool.decided() == []
    assert core.wake_at(pool.state, NOON) is None


def test_the_next_threshold_is_when_the_monitor_wants_to_be_woken() -> None:
    """Of the node that reaches its own first."""
    pool = Pool("node-1", "node-2")
    pool.tick(0)
    pool.hear(2, "node-1", "node-2")
    assert core.wake_at(pool.state, NOON) == NOON + 5 * S
    pool.hear(3, "node-2")
    assert core.wake_at(pool.state, NOON) == NOON + 4 * S
    pool.hear(7, "node-2")
    assert pool.state.pool.nodes[NODE].state is NodeState.SUSPECTED
    assert core.wake_at(pool.state, NOON) == NOON + 5 * S


# Wishes about nodes -------------------------------------------------------------------------------------------------

CORDON = ev.NodeCordonRequested(node_id="node-1", reason="fan")
DRAIN = ev.NodeDrainRequested(node_id="node-1", reason="kernel", deadline_s=60)
UNCORDON = ev.NodeUncordonRequested(node_id="node-1", reason="done")
TRY = ev.IsolationTestRequested(node_id="node-1", mode=Mode.MPS, reason="new driver")


def test_the_device_without_runs_is_tried_for_isolation() -> None:
    """In the hardest mode that it offers, where none is named."""
    pool = Pool("node-1")
    pool.fold(a_job())
    pool.fold(a_placement())
    pool.wish(msgspec.structs.replace(TRY, mode=None), actor="alice")
    assert pool.decided() == [
        ev.IsolationTestStarted(
            test_id="isolation-1",
            node_id=NODE,
            device_uuid=DeviceUuid("GPU-node-1-1"),
            mode=Mode.MPS,
            actor="alice",
            reason="new driver",
            answers=1,
            caused_by="wish-1",
        )
    ]


def test_an_operators_wishes_are_answered_in_order() -> None:
    """Each sees what the one before it did, though none has been folded."""
    pool = Pool("node-1")
    for wish in (CORDON, DRAIN, UNCORDON):
        pool.wish(wish, actor="alice")
    assert core.decide(pool.state, NOON) == [
        ev.NodeCordoned(node_id=NODE, actor="alice", reason="fan", answers=1, caused_by="wish-1"),
        ev.NodeDraining(
            node_id=NODE, actor="alice", reason="kernel", deadline_at=NOON + 60 * S, answers=2, caused_by="wish-2"
        ),
        ev.NodeUncordoned(node_id=NODE, actor="alice", reason="done", answers=3, caused_by="wish-3"),
    ]
    pool.decided()
    assert pool.state.inbox == []
    assert pool.state.pool.nodes[NODE].state is NodeState.READY


@pytest.mark.parametrize(
    ("wish", "changes", "code", "field"),
    [
        (CORDON, {"tenant": ACME}, Refusal.NOT_PERMITTED, ""),
        (msgspec.structs.replace(CORDON, node_id="node-9"), {}, Refusal.NODE_NOT_FOUND, "node_id"),
        (DRAIN, {"expires_at": NOON}, Refusal.EXPIRED, "expirytime"),
        (UNCORDON, {}, Refusal.NODE_STATE, "node_id"),
        (msgspec.structs.replace(TRY, node_id="node-9"), {}, Refusal.NODE_NOT_FOUND, "node_id"),
        (msgspec.structs.replace(TRY, device_uuid="GPU-9"), {}, Refusal.NO_MATCHING_DEVICE, "device_uuid"),
        (msgspec.structs.replace(TRY, mode=Mode.MIG), {}, Refusal.ISOLATION_UNAVAILABLE, "mode"),
    ],
)
def test_what_cannot_be_done_is_rejected_with_its_code(
    wish: ev.Wish, changes: dict[str, object], code: Refusal, field: str
) -> None:
    """Nothing is dropped silently: one answer a wish."""
    pool = Pool("node-1")
    pool.wish(wish, **changes)
    said = pool.decided()
    assert len(said) == 1
    assert isinstance(said[0], ev.NodeWishRejected)
    assert (said[0].code, said[0].field, said[0].answers, said[0].wish_type) == (code, field, 1, type(wish).__name__)


def test_a_wish_about_a_node_that_does_not_decode_is_rejected_as_what_it_is() -> None:
    """With the field and what was found, as for any request."""
    pool = Pool("node-1")
    broken = Undecodable(
        code=Refusal.FIELD_MISSING, type="NodeDrainRequested", field="reason", expected="a value", found="", size=2
    )
    entry = Entry(
        stream=Stream.WISHES,
        seq=1,
        recorded_at=NOON,
        event=broken,
        event_id="wish-1",
        tenant=OPERATOR,
        subject_type="NodeDrainRequested",
        ingress=Ingress.REQUEST,
    )
    pool.state = core.evolve(pool.state, entry)
    said = pool.decided()
    assert len(said) == 1
    assert isinstance(said[0], ev.NodeWishRejected)
    assert (said[0].code, said[0].field, said[0].wish_id) == (Refusal.FIELD_MISSING, "reason", "wish-1")
    assert said[0].note == NOTES[Ingress.REQUEST], "and how it would be understood better"


def test_wishes_that_others_answer_are_passed_over() -> None:
    """Job requests are admission's, broken ones too."""
    pool = Pool("node-1")
    pool.wish(a_job_request(), tenant=ACME)
    pool.wish(CORDON)
    assert [getattr(f, "answers", 0) for f in pool.decided()] == [2]


def test_a_decision_fits_into_one_batch() -> None:
    """A thousand wishes are answered in two rounds, in order, each once."""
    pool = Pool("node-1")
    for _ in range(1200):
        pool.wish(CORDON)
    assert len(core.decide(pool.state, NOON)) == core.FACTS_MAX
    assert [getattr(f, "answers", 0) for f in pool.decided()] == list(range(1, 1201))


def test_a_large_fleet_is_fenced_in_several_batches_that_part_no_pair() -> None:
    """Also where hundreds of nodes are lost at once."""
    names = [f"node-{i}" for i in range(2000)]
    pool = Pool(*names)
    pool.tick(0)
    for second in (4, 8, 12, 16, 20):
        pool.hear(second, *names[1000:])
    batch = core.decide(core.observe(pool.state, Tick(at_ns=20 * S), NOON), NOON)
    assert batch == []  # everything that 20 s bring has been said by the last sign of life
    lost = [f for f in pool.said if isinstance(f, ev.NodeLost | ev.NodeFenced)]
    assert len(lost) == 2000
    pairs = zip(lost[::2], lost[1::2], strict=True)
    assert all(isinstance(a, ev.NodeLost) and isinstance(b, ev.NodeFenced) and a.node_id == b.node_id for a, b in pairs)


def test_a_snapshot_keeps_the_wishes_that_wait() -> None:
    """And everything else that decides an answer."""
    pool = Pool("node-1")
    pool.wish(CORDON)
    again = core.restore(core.snapshot(pool.state))
    assert core.decide(again, NOON) == core.decide(pool.state, NOON)
    assert core.position(again) == core.position(pool.state)


@pytest.mark.parametrize(
    ("wish", "fact", "would", "runs"),
    [
        (
            DRAIN,
            "NodeDraining",
            (
                "Nothing new is placed on it.",
                "1 run is told to stop; their jobs wait for slices elsewhere, and no retry is spent.",
            ),
            (RunId("acme/train-7/0/1"),),
        ),
        (CORDON, "NodeCordoned", ("Nothing new is placed on it; what runs there, runs on.",), ()),
        (
            TRY,
            "IsolationTestStarted",
            ("GPU-node-1-1 is tried in mode mps, and takes no new run until that is over.", "It begins at once."),
            (),
        ),
    ],
)
def test_a_wish_that_is_only_tried_is_answered_and_changes_nothing(
    wish: ev.NodeWish, fact: str, would: tuple[str, ...], runs: tuple[RunId, ...]
) -> None:
    """An operator sees whom a drain would move before it does."""
    pool = Pool("node-1")
    pool.fold(a_job())
    pool.fold(a_placement())
    pool.wish(msgspec.structs.replace(wish, dry_run=True))
    # Tried: so the next finds a node that is in use.
    pool.wish(msgspec.structs.replace(UNCORDON, dry_run=True))
    judged, refused = pool.decided()
    assert judged == ev.NodeWishJudged(
        tenant=OPERATOR,
        answers=1,
        wish_id="wish-1",
        wish_type=type(wish).__name__,
        verdict=Verdict.ACCEPTED,
        fact=fact,
        would=would,
        node_id=NODE,
        runs=runs,
        caused_by="wish-1",
    )
    assert isinstance(refused, ev.NodeWishJudged)
    assert (refused.verdict, refused.fact, refused.code) == (
        Verdict.REJECTED,
        "NodeWishRejected",
        Refusal.NODE_STATE,
    )
    assert pool.state.inbox == []
    assert pool.state.pool.nodes[NODE].state is NodeState.READY


def test_a_question_is_stated_once_and_forgotten_when_it_came_round() -> None:
    """Who asked the log is a fact like any other; a process that ends gives no answer, so nothing outlives it."""
    record = ev.AuditQueryRun(
        query_id="q1",
        actor="user:eve",
        statement="SELECT 1",
        statement_sha256="",
        elapsed_ms=1,
        age_ms=1,
        log_ordinal=1,
    )
    state = core.observe(core.initial(), core.Asked(record=record), NOON)
    assert core.decide(state, NOON) == [record]
    assert core.decide(core.restore(core.snapshot(state)), NOON) == []
    state = core.evolve(state, as_fact(record, 1))
    assert core.decide(state, NOON) == []


# Nodes that the monitor takes out by itself ---------------------------------------------------------------------------


def flap(pool: Pool, at: float) -> list[ev.Fact]:
    """Node 1 is silent for 6 s from ``at``, then heard again; node 2 is heard all along."""
    said = pool.hear(at, "node-1", "node-2")
    said += pool.hear(at + 3, "node-2")
    said += pool.hear(at + 6, "node-2")
    return said + pool.hear(at + 6.5, "node-1", "node-2")


def test_a_node_that_flaps_is_cordoned_and_must_be_steady_for_twice_as_long_each_time() -> None:
    """Placing on it and taking away again costs its jobs more than waiting does; it needs nobody to come back."""
    pool = Pool("node-1", "node-2")
    pool.tick(0)
    assert [type(f) for number in range(2) for f in flap(pool, number * 10)] == [ev.NodeSuspected, ev.NodeTrusted] * 2
    suspected, cordoned, _ = flap(pool, 20)
    assert isinstance(suspected, ev.NodeSuspected)
    assert isinstance(cordoned, ev.NodeCordoned)
    assert (cordoned.rule, cordoned.steady_ms, len(cordoned.evidence)) == (NodeRule.FLAPPING, 20_000, 3)
    assert pool.state.pool.nodes[NODE].state is NodeState.CORDONED
    steady = [(second, f) for second in range(27, 50) for f in pool.hear(second, "node-1", "node-2")]
    assert [(second, type(f)) for second, f in steady] == [(47, ev.NodeUncordoned)]
    assert pool.decided() == []
    again = [f for f in flap(pool, 60) if isinstance(f, ev.NodeCordoned)]
    assert [f.steady_ms for f in again] == [40_000]


def test_an_operator_s_word_takes_the_place_of_the_monitor_s_cordon() -> None:
    """What an operator cordons stays so, and what an operator uses again begins anew."""
    pool = Pool("node-1", "node-2")
    pool.tick(0)
    for number in range(3):
        flap(pool, number * 10)
    pool.wish(CORDON)
    pool.decided()
    assert [f for second in range(27, 90) for f in pool.hear(second, "node-1", "node-2")] == []
    pool.wish(UNCORDON)
    pool.decided()
    assert [type(f) for f in flap(pool, 100)] == [ev.NodeSuspected, ev.NodeTrusted]


def test_the_last_usable_node_is_never_cordoned_by_a_rule() -> None:
    """A pool of one that flaps is better than none."""
    pool = Pool("node-1")
    pool.tick(0)
    for number in range(6):
        pool.hear(number * 10, "node-1")
        pool.tick(number * 10 + 6)
        pool.hear(number * 10 + 6.5, "node-1")
    assert not any(isinstance(f, ev.NodeCordoned) for f in pool.said)


def ended(pool: Pool, name: str, node: str, cause: RunCause) -> None:
    """A job's run on that node ends like this."""
    pool.fold(a_job(name))
    pool.fold(a_placement(f"acme/{name}", node=node))
    run_id = RunId(f"acme/{name}/0/1")
    pool.fold(
        ev.RunFinished(run_id=run_id, node_id=NodeId(node), cause=cause, finished_at=NOON), author=f"agent-{node}"
    )


@pytest.mark.parametrize(("elsewhere", "is_cordoned"), [(RunCause.SUCCESS, True), (RunCause.USER_ERROR, False)])
def test_a_node_on_which_jobs_fail_that_run_elsewhere_is_cordoned_with_the_evidence(
    elsewhere: RunCause, *, is_cordoned: bool
) -> None:
    """Where they fail everywhere it is the jobs."""
    pool = Pool("node-1", "node-2", "node-3")
    pool.tick(0)
    pool.hear(1, "node-1", "node-2", "node-3")
    for number in range(12):
        ended(pool, f"there-{number}", "node-2", elsewhere)
    for number in range(5):
        assert pool.decided() == []
        ended(pool, f"here-{number}", "node-1", RunCause.USER_ERROR)
    said = pool.decided()
    assert [type(f) for f in said] == [ev.NodeCordoned] * is_cordoned
    if is_cordoned:
        assert said == [
            ev.NodeCordoned(
                node_id=NODE,
                actor="service:monitor",
                reason="5 of its last 5 runs failed, of 5 jobs; elsewhere 0 of 12",
                rule=NodeRule.FAILING_RUNS,
                evidence=tuple(f"acme/here-{number}/0/1" for number in range(5)),
            )
        ]


def test_a_node_of_which_a_device_wants_a_reboot_is_cordoned_until_it_has_booted() -> None:
    """Its other devices would be lost to whoever is placed there in the meantime."""
    pool = Pool("node-1", "node-2")
    pool.tick(0)
    pool.hear(1, "node-1", "node-2")
    ill = ev.DeviceHealthChanged(
        node_id=NODE,
        device_uuid=DeviceUuid("GPU-node-1-0"),
        before=DeviceHealth.HEALTHY,
        after=DeviceHealth.FAILED,
        code="xid-95",
        detail="uncontained error",
        wants_reboot=True,
    )
    pool.fold(ill, author="agent-node-2")
    assert pool.decided() == []  # nobody speaks for another's node
    pool.fold(ill, author="agent-node-1")
    (cordoned,) = pool.decided()
    assert isinstance(cordoned, ev.NodeCordoned)
    assert (cordoned.rule, len(cordoned.evidence)) == (NodeRule.REBOOT_NEEDED, 1)
    assert "xid-95 of GPU-node-1-0, uncontained error" in cordoned.reason
    pool.fold(a_node("node-1", boot_id="boot-1", session="s2"), author="agent-node-1")
    assert pool.decided() == []  # another agent of the same boot
    pool.fold(a_node("node-1", boot_id="boot-2", session="s3"), author="agent-node-1")
    (back,) = pool.decided()
    assert isinstance(back, ev.NodeUncordoned)
    assert back.rule is NodeRule.REBOOT_NEEDED
    assert pool.decided() == []


def test_what_jobs_are_told_or_use_too_much_of_is_not_held_against_a_node() -> None:
    """A tenant that asks for too little memory must not empty the pool."""
    pool = Pool("node-1", "node-2")
    pool.tick(0)
    for number in range(12):
        ended(pool, f"there-{number}", "node-2", RunCause.SUCCESS)
        ended(pool, f"here-{number}", "node-1", (RunCause.OUT_OF_MEMORY, RunCause.CANCELLED)[number % 2])
    assert pool.decided() == []


# Moves ----------------------------------------------------------------------------------------------------------------


def test_a_job_of_a_lost_node_is_said_to_have_moved_once_all_of_it_runs_again() -> None:
    """Down since the node was last heard, not since it was fenced; what it had done is to be done again."""
    pool = Pool("node-1", "node-2")
    pool.tick(0)
    pool.fold(a_job(replicas=2))
    for replica in range(2):
        pool.fold(a_placement(node=f"node-{replica + 1}", replica=replica))
        pool.fold(
            ev.RunStarted(
                run_id=RunId(f"acme/train-7/{replica}/1"), node_id=NodeId(f"node-{replica + 1}"), pid=1, started_at=NOON
            ),
            at=NOON + replica * S,
        )
    pool.fold(ev.NodeLost(node_id=NODE, silent_ms=20_000, lease_ms=20_000, rule="silence"), at=NOON + 100 * S)
    pool.fold(ev.NodeFenced(node_id=NODE, epoch=1), at=NOON + 100 * S)
    other = RunId("acme/train-7/1/1")
    pool.fold(
        ev.RunFinished(run_id=other, node_id=NodeId("node-2"), cause=RunCause.GANG_BROKEN, finished_at=NOON),
        author="agent-node-2",
        at=NOON + 101 * S,
    )
    pool.fold(ev.RunReleased(run_id=other, node_id=NodeId("node-2"), released_at=NOON), at=NOON + 101 * S)
    pool.fold(ev.JobRequeued(job_id=a_job().job_id, attempt=2, cause=RunCause.NODE_LOST), at=NOON + 102 * S)
    assert pool.decided() == []
    for replica in range(2):
        pool.fold(a_placement(node="node-2", replica=replica, attempt=2))
    for replica in range(2):
        assert pool.decided() == []
        run = RunId(f"acme/train-7/{replica}/2")
        pool.fold(
            ev.RunStarted(run_id=run, node_id=NodeId("node-2"), pid=1, started_at=NOON), at=NOON + (103 + replica) * S
        )
    assert pool.decided() == [
        ev.MigrationCompleted(
            job_id=a_job().job_id,
            attempt=2,
            cause=RunCause.NODE_LOST,
            from_nodes=(NODE, NodeId("node-2")),
            to_nodes=(NodeId("node-2"),),
            downtime_ms=24_000,
            lost_work_s=79,
            caused_by=f"fact-{pool.seq - 1}",
        )
    ]


@pytest.mark.parametrize(
    ("checkpointed", "lost_s", "kept_s"),
    [
        ({0: 40, 1: 50}, 60, 39),
        ({0: 40, 1: 99}, 60, 39),
        ({0: 40}, 99, 0),
        ({}, 99, 0),
    ],
)
def test_work_is_lost_since_the_last_checkpoint_that_all_replicas_made(
    checkpointed: dict[int, int], lost_s: int, kept_s: int
) -> None:
    """Seconds at which each replica's checkpoint was recorded, made within one; all runs from 0 to 100 s, then drained.

    One that a replica did not finish keeps nothing for a gang, and what is told after the drain counts, too.
    """
    pool = Pool("node-1")
    pool.tick(0)
    pool.fold(a_job(replicas=2))
    runs = [RunId(f"acme/train-7/{replica}/1") for replica in range(2)]
    for replica, run in enumerate(runs):
        pool.fold(a_placement(replica=replica))
        pool.fold(ev.RunStarted(run_id=run, node_id=NODE, pid=1, started_at=NOON), at=NOON)
    for replica, run in enumerate(runs):
        second = checkpointed.get(replica, 20)
        said = ev.RunCheckpointed(
            run_id=run,
            node_id=NODE,
            is_done=replica in checkpointed,
            finished_at=NOON,
            duration_ms=1_000 if second < 99 else 0,
        )
        pool.fold(said, at=NOON + second * S)
    for second, run in zip((99, 100), runs, strict=True):
        ended = ev.RunFinished(run_id=run, node_id=NODE, cause=RunCause.DRAINED, finished_at=NOON)
        pool.fold(ended, author="agent-node-1", at=NOON + second * S)
        pool.fold(ev.RunReleased(run_id=run, node_id=NODE, released_at=NOON), at=NOON + second * S)
    pool.fold(ev.JobRequeued(job_id=a_job().job_id, attempt=2, cause=RunCause.DRAINED), at=NOON + 101 * S)
    for replica in range(2):
        pool.fold(a_placement(replica=replica, attempt=2))
        again = RunId(f"acme/train-7/{replica}/2")
        pool.fold(ev.RunStarted(run_id=again, node_id=NODE, pid=1, started_at=NOON), at=NOON + 110 * S)
    (moved,) = pool.decided()
    assert isinstance(moved, ev.MigrationCompleted)
    assert (moved.downtime_ms, moved.lost_work_s, moved.kept_work_s) == (11_000, lost_s, kept_s)


def test_a_job_that_failed_by_itself_did_not_move() -> None:
    """It is tried again, which is another thing."""
    pool = Pool("node-1")
    pool.fold(a_job())
    run = RunId("acme/train-7/0/1")
    pool.fold(a_placement())
    pool.fold(ev.RunStarted(run_id=run, node_id=NODE, pid=1, started_at=NOON))
    pool.fold(
        ev.RunFinished(run_id=run, node_id=NODE, cause=RunCause.USER_ERROR, finished_at=NOON), author="agent-node-1"
    )
    pool.fold(ev.JobRequeued(job_id=a_job().job_id, attempt=2, cause=RunCause.USER_ERROR))
    pool.fold(a_placement(attempt=2))
    pool.fold(ev.RunStarted(run_id=RunId("acme/train-7/0/2"), node_id=NODE, pid=1, started_at=NOON))
    assert pool.decided() == []


def a_card(*rates: ev.Rate, **changes: object) -> ev.RateCardChangeRequested:
    """Two units of currency for a device-hour on demand."""
    given = rates or (ev.Rate(pricing=Pricing.ON_DEMAND, micro_per_gpu_hour=2_000_000),)
    return msgspec.structs.replace(ev.RateCardChangeRequested(currency="EUR", rates=given, reason="2027"), **changes)


def test_a_rate_card_counts_from_the_answer_on_or_from_its_own_instant() -> None:
    """With who set it and why; the same wish tried changes nothing."""
    pool = Pool()
    pool.wish(a_card(), actor="user:ann")
    pool.wish(a_card(effective_at="2026-09-01T14:00:01+02:00"))
    pool.wish(a_card(dry_run=True))
    first, second, judged = pool.decided()
    assert first == ev.RateCardChanged(
        effective_at=NOON,
        currency="EUR",
        rates=a_card().rates,
        actor="user:ann",
        reason="2027",
        answers=1,
        caused_by="wish-1",
    )
    assert isinstance(second, ev.RateCardChanged)
    assert second.effective_at == NOON + 1_000_000_000
    assert isinstance(judged, ev.NodeWishJudged)
    assert judged.would == (f"1 rates in EUR count from {NOON} (ns since the Unix epoch) on.",)


@pytest.mark.parametrize(
    ("card", "field", "code"),
    [
        (a_card(effective_at="2026-02-31T00:00:00Z"), "effective_at", Refusal.FIELD_INVALID),
        (a_card(ev.Rate(pricing=Pricing.RESERVED, micro_per_gpu_hour=1)), "rates[0].queues", Refusal.FIELD_CONFLICT),
        (
            a_card(ev.Rate(pricing=Pricing.SPOT, queues=("prod",), micro_per_gpu_hour=1)),
            "rates[0].queues",
            Refusal.FIELD_CONFLICT,
        ),
        (a_card(*a_card().rates, *a_card().rates), "rates[1]", Refusal.FIELD_CONFLICT),
    ],
)
def test_a_rate_card_that_says_two_things_is_refused(
    card: ev.RateCardChangeRequested, field: str, code: Refusal
) -> None:
    """Field, code, expected and found; and tenants set no prices."""
    pool = Pool()
    pool.wish(card)
    pool.wish(a_card(), tenant=ACME)
    refused, not_permitted = pool.decided()
    assert isinstance(refused, ev.NodeWishRejected)
    assert isinstance(not_permitted, ev.NodeWishRejected)
    assert (refused.field, refused.code, bool(refused.expected), bool(refused.found)) == (field, code, True, True)
    assert not_permitted.code is Refusal.NOT_PERMITTED


def test_days_of_the_log_are_sealed_up_to_the_last_midnight() -> None:
    """The day that goes on is nobody's to seal, whatever was asked for; and tenants seal nothing."""
    pool = Pool()
    midnight = NOON - 12 * 3_600_000_000_000
    pool.wish(ev.LogSealRequested(reason="space"), actor="user:ann")
    pool.wish(ev.LogSealRequested(before="2026-08-31T13:00:00Z", reason="space"))
    pool.wish(ev.LogSealRequested(before="2027-01-01T00:00:00Z", reason="space", dry_run=True))
    pool.wish(ev.LogSealRequested(before="2026-02-31T00:00:00Z", reason="space"))
    pool.wish(ev.LogSealRequested(reason="space"), tenant=ACME)
    whole, earlier, judged, no_instant, not_permitted = pool.decided()
    assert whole == ev.LogSealOrdered(
        before_at=midnight, actor="user:ann", reason="space", answers=1, caused_by="wish-1"
    )
    assert isinstance(earlier, ev.LogSealOrdered)
    assert earlier.before_at == midnight - 86_400_000_000_000
    assert isinstance(judged, ev.NodeWishJudged)
    assert str(midnight) in judged.would[0]
    assert isinstance(no_instant, ev.NodeWishRejected)
    assert (no_instant.field, no_instant.code) == ("before", Refusal.FIELD_INVALID)
    assert isinstance(not_permitted, ev.NodeWishRejected)
    assert not_permitted.code is Refusal.NOT_PERMITTED


def an_erasure(job_id: str = "acme/gone", at: int = NOON, **changes: object) -> ev.PayloadEraseRequested:
    """Of a job that the pool knows no more."""
    base = ev.PayloadEraseRequested(stream=RowOf.WISHES, seq=3, job_id=job_id, recorded_at=at, reason="art. 17")
    return msgspec.structs.replace(base, **changes)


def test_a_payload_is_erased_unless_a_hold_keeps_it() -> None:
    """By tenant, by job and by time; a hold that is placed in the same round keeps already, a released one no more."""
    pool = Pool()
    pool.wish(an_erasure(), actor="user:ann")
    pool.wish(ev.LegalHoldRequested(tenant="globex", reason="r"))
    pool.wish(an_erasure())
    pool.wish(an_erasure("globex/x"))
    pool.wish(ev.LegalHoldReleaseRequested(hold_id="hold-2", reason="r"))
    pool.wish(an_erasure("globex/x"))
    since, until = "2026-09-01T12:00:00Z", "2026-09-01T13:00:00Z"
    pool.wish(ev.LegalHoldRequested(job_id="acme/gone", since=since, until=until, reason="r"))
    pool.wish(an_erasure(at=NOON - 1))
    pool.wish(an_erasure())
    pool.wish(an_erasure(at=NOON + 3_600_000_000_000))
    answers = pool.decided()
    assert answers[0] == ev.PayloadEraseOrdered(
        stream=RowOf.WISHES, stream_seq=3, job_id=JobId("acme/gone"), recorded_at=NOON, actor="user:ann",
        reason="art. 17", answers=1, caused_by="wish-1",
    )  # fmt: skip
    told = [getattr(answer, "code", type(answer).__name__) for answer in answers]
    assert told == [
        "PayloadEraseOrdered", "LegalHoldPlaced", "PayloadEraseOrdered", Refusal.LEGAL_HOLD, "LegalHoldReleased",
        "PayloadEraseOrdered", "LegalHoldPlaced", "PayloadEraseOrdered", Refusal.LEGAL_HOLD, "PayloadEraseOrdered",
    ]  # fmt: skip
    assert isinstance(answers[3], ev.NodeWishRejected)
    assert answers[3].found == "hold-2"
    pool = Pool(state=core.restore(core.snapshot(pool.state)))
    assert pool.decided() == [], "asked again, it falls silent"
    pool.wish(an_erasure())
    pool.wish(ev.LegalHoldReleaseRequested(hold_id="hold-2", reason="r"))
    assert [answer.code for answer in pool.decided() if isinstance(answer, ev.NodeWishRejected)] == [
        Refusal.LEGAL_HOLD, Refusal.HOLD_NOT_FOUND,
    ]  # fmt: skip


def test_what_a_live_job_said_is_not_erased_and_a_hold_names_what_it_is_of() -> None:
    """A job that runs is known by what it said. Each refusal names its field."""
    pool = Pool("node-1")
    pool.fold(a_job())
    for wish in (
        an_erasure("acme/train-7"),
        an_erasure("train-7"),
        ev.LegalHoldRequested(job_id="train-7", reason="r"),
        ev.LegalHoldRequested(job_id="acme/train-7", tenant="globex", reason="r"),
        ev.LegalHoldRequested(since="2026-02-31T00:00:00Z", reason="r"),
        ev.LegalHoldRequested(since="2026-09-02T00:00:00Z", until="2026-09-01T00:00:00Z", reason="r"),
    ):
        pool.wish(wish)
    pool.wish(an_erasure(), tenant=ACME)
    refused = [(one.field, one.code) for one in pool.decided() if isinstance(one, ev.NodeWishRejected)]
    assert refused == [
        ("job_id", Refusal.JOB_STATE), ("job_id", Refusal.FIELD_INVALID), ("job_id", Refusal.FIELD_INVALID),
        ("tenant", Refusal.FIELD_CONFLICT), ("since", Refusal.FIELD_INVALID), ("until", Refusal.FIELD_CONFLICT),
        ("", Refusal.NOT_PERMITTED),
    ]  # fmt: skip


def test_what_changes_about_who_is_let_in_is_a_fact_with_actor_and_reason() -> None:
    """Auditors ask who was given which role, by whom and why, and when it ended."""
    pool = Pool()
    public = "U" + "A" * 55
    made = ev.KeyChangeRequested(
        change=KeyChange.MADE, role="viewer", of="jane", public=public, reason="she joined the team"
    )
    pool.wish(made, actor="user:ann")
    pool.wish(msgspec.structs.replace(made, change=KeyChange.REVOKED, reason="she left"), actor="user:bob")
    pool.wish(msgspec.structs.replace(made, dry_run=True))
    pool.wish(made, tenant=ACME)
    given, taken, judged, refused = pool.decided()
    assert given == ev.KeyChanged(
        change=KeyChange.MADE,
        role="viewer",
        of="jane",
        public=public,
        actor="user:ann",
        reason="she joined the team",
        answers=1,
        caused_by="wish-1",
    )
    assert isinstance(taken, ev.KeyChanged)
    assert (taken.change, taken.actor, taken.reason) == (KeyChange.REVOKED, "user:bob", "she left")
    assert isinstance(judged, ev.NodeWishJudged)
    assert judged.would == ("It is recorded that a key of viewer-jane is made.",)
    assert isinstance(refused, ev.NodeWishRejected)
    assert refused.code is Refusal.NOT_PERMITTED


def test_retention_is_ordered_each_midnight_by_who_set_it() -> None:
    """Sealing and forgetting, each a fact with actor, reason and cause; nothing twice, and what is set replaces."""
    day = 86_400_000_000_000
    midnight = NOON // day * day
    pool = Pool()
    pool.wish(ev.LogRetentionChangeRequested(payload_days=2, seal_daily=True, reason="policy 7"), actor="user:ann")
    pool.wish(ev.LogRetentionChangeRequested(payload_days=3, reason="policy 7", dry_run=True))
    pool.wish(ev.LogRetentionChangeRequested(payload_days=1, reason="mine"), tenant=ACME)
    said, judged, refused, seal, forget = pool.decided()
    assert said == ev.LogRetentionChanged(
        payload_days=2, seal_daily=True, actor="user:ann", reason="policy 7", answers=1, caused_by="wish-1"
    )
    assert isinstance(judged, ev.NodeWishJudged)
    assert any("3 days" in word for word in judged.would)
    assert isinstance(refused, ev.NodeWishRejected)
    assert refused.code is Refusal.NOT_PERMITTED
    assert isinstance(seal, ev.LogSealOrdered)
    assert isinstance(forget, ev.PayloadsEraseOrdered)
    assert (seal.before_at, seal.actor, seal.reason, seal.answers) == (midnight, "user:ann", "retention: policy 7", 0)
    assert (forget.before_at, forget.actor, forget.reason) == (midnight - 2 * day, "user:ann", "retention: policy 7")
    assert seal.caused_by == forget.caused_by
    assert pool.decided() == [], "once a day"

    pool = Pool(state=core.restore(core.snapshot(pool.state)))
    assert core.wake_at(pool.state, NOON) == midnight + day
    assert core.decide(pool.state, NOON + 300 * day) == [], "a clock that jumped ahead: nobody else says so"
    pool.state.retention.last_at = NOON + day
    assert [type(fact).__name__ for fact in core.decide(pool.state, NOON + day)] == [
        "LogSealOrdered", "PayloadsEraseOrdered",
    ]  # fmt: skip
    pool.wish(ev.LogRetentionChangeRequested(reason="for ever again"))
    assert [type(fact).__name__ for fact in pool.decided()][-1] == "LogRetentionChanged"
    pool.state.retention.last_at = NOON + 9 * day
    assert core.decide(pool.state, NOON + 9 * day) == []
    assert core.wake_at(pool.state, NOON) is None
