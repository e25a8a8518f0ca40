"""Which nodes are alive, what follows where one is not, answers to wishes about nodes, who asked the log. Pure.

Silence is measured by the monitor's own monotonic clock, given with each observation; the wall clock decides nothing
here. A node is judged like this::

    ready ──(silent for suspect_ms)──► suspected ──(silent for lease_ms)──► lost and fenced, its epoch one higher
      ▲                                    │                                           │
      └───────────(heard again)────────────┘     recovered ◄──(registers with it)──────┘

When more than half of a fleet of three or more is silent at once, the likelier explanation is the monitor's own
connection: the control plane freezes and nobody is fenced until the fleet speaks again, until it was frozen for
freeze_ms while others were heard over the same bus, or until an operator says that the silent nodes are gone
(docs/adr/0006-thaw.md). For the same reason a node is given a full lease whenever the monitor starts, or notices that
it had not been listening for a while.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import Thaw
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import MONITOR, NodeId, node_of_author
from apportion.monitor import alerts, due, faults, holds, misfits, moves, retention
from apportion.monitor.alerts import RULES, Alerts, Levels, Rule
from apportion.monitor.due import Due
from apportion.monitor.faults import Faults
from apportion.monitor.holds import Holds
from apportion.monitor.misfits import Misfits
from apportion.monitor.moves import Moves
from apportion.monitor.retention import Retention
from apportion.monitor.wishes import AskedWish, Situation, answered, asked_of_us
from apportion.pool.state import NodeState, NodeView, Pool
from apportion.pool.state import evolve as evolve_pool

SUSPECT_MS: Final = 5_000
LEASE_MS: Final = 20_000
FREEZE_MS: Final = 60_000
FLEET_MIN: Final = 3
"""From this many nodes on, half of them silent at once is doubted."""
FACTS_MAX: Final = 900
"""At most this many facts a decision: one atomic batch; the rest follows once these came round."""
NS_PER_MS: Final = 1_000_000

_RULES: Final = (
    "suspect after suspect_ms of silence; lost and fenced after lease_ms; frozen while silent*2 > nodes >= 3, until"
    " heard, asked, or freeze_ms with one heard; a full lease after a start, a pause and a thaw by being heard;"
    " wishes answered in order, operators only; a dry run judged by what would answer it; questions recorded;"
    " flapping nodes, nodes whose runs fail and nodes that want a reboot cordoned by misfits.RULES;"
    " moves told by moves, from the last checkpoint of all replicas;"
    " alerts by their rules, from measures;"
    " faults by operators, where they are on, until their time is up;"
    " days sealed and what jobs said forgotten by the retention in force, at midnight in UTC;"
    " settings: suspect_ms lease_ms freeze_ms self_cordon alert_rules faults"
)
POLICY: Final = f"liveness@8#{hashlib.sha256(_RULES.encode()).hexdigest()[:12]}"
RULE: Final = "silence"
"""Named in NodeLost: what made the monitor say so."""


class Heard(Struct, frozen=True, kw_only=True):
    """A node's agent gave a sign of life."""

    node: NodeId
    session: str
    epoch: int
    at_ns: int
    """When it was received, by the monitor's monotonic clock."""


class Tick(Struct, frozen=True, kw_only=True):
    """Time passed while the monitor was listening."""

    at_ns: int
    """By the monitor's monotonic clock."""


class Resumed(Struct, frozen=True, kw_only=True):
    """The monitor listens again: what was said before this instant it could not hear, so silence proves nothing."""

    at_ns: int
    """By the monitor's monotonic clock."""


Sign = Heard | Tick | Resumed
"""What has an instant by the monitor's monotonic clock."""


class Asked(Struct, frozen=True, kw_only=True):
    """Somebody asked the log something, and waits for the answer until that is recorded."""

    record: ev.AuditQueryRun


class Measured(Struct, frozen=True, kw_only=True):
    """What the shell measured of the pool, its devices and the streams."""

    at_ns: int
    """By the monitor's monotonic clock."""
    measures: dict[str, dict[str, int]]


Observation = Sign | Asked | Measured


class Fence(Struct, kw_only=True):
    """A node that we fenced and that isn't back."""

    epoch: int
    fenced_at: int
    returned_at: int = 0
    """When it registered with the new epoch; 0: it has not."""
    returned_by: str = ""
    """The event that told."""


class State(Struct, kw_only=True):
    """The pool, what was heard of its nodes, and the wishes that wait for an answer."""

    pool: Pool = msgspec.field(default_factory=Pool)
    wishes_seq: int = 0
    answered: int = 0
    """Highest sequence of a wish that a fact of ours answers; answers come in order."""
    inbox: list[AskedWish] = []
    """Wishes about nodes that have no answer yet, in order."""
    suspect_ms: int = SUSPECT_MS
    lease_ms: int = LEASE_MS
    freeze_ms: int = FREEZE_MS
    self_cordon: bool = True
    """Whether the monitor cordons nodes by rules of its own."""
    presumed_lost: set[NodeId] = set()
    """Nodes that were silent when the control plane thawed all the same: their silence freezes nothing."""
    misfits: Misfits = msgspec.field(default_factory=Misfits)
    moves: Moves = msgspec.field(default_factory=Moves)
    alerts: Alerts = msgspec.field(default_factory=Alerts)
    faults: Faults = msgspec.field(default_factory=Faults)
    holds: Holds = msgspec.field(default_factory=Holds)
    retention: Retention = msgspec.field(default_factory=Retention)
    alert_rules: str = ""
    """Rules that differ from alerts.RULES, as JSON; empty: none."""
    rules: tuple[Rule, ...] = RULES
    levels: Levels = msgspec.field(default_factory=Levels)
    """What was measured in this life."""
    fenced: dict[NodeId, Fence] = {}
    clock_ns: int | None = None
    """Latest instant of the monotonic clock; None until something was observed in this life."""
    granted_ns: int = 0
    """Silence before this instant counts for nobody."""
    since_ns: dict[NodeId, int] = {}
    """When a node became known in this life; it is granted a full lease from there."""
    heard_ns: dict[NodeId, int] = {}
    """When a node was last heard in this life."""
    gap_ms: dict[NodeId, int] = {}
    """How long the silence was that its last sign of life ended."""
    steady_ns: dict[NodeId, int] = {}
    """Since when a node was heard without a gap, in this life."""
    due: Due = msgspec.field(default_factory=Due)
    """Whose silence has lasted for suspect_ms, in this life."""
    suspected: set[NodeId] = set()
    """Nodes of the pool whose state is that."""
    frozen_ns: int | None = None
    """Since when the control plane is frozen and the monitor listened, in this life."""
    questions: list[ev.AuditQueryRun] = []
    """Asked in this life and not recorded yet; a process that ends gives none of their answers."""


class Snapshot(Struct, kw_only=True):
    """What of a state outlives the process: all but what was heard by a clock that dies with it."""

    pool: Pool
    wishes_seq: int
    answered: int
    inbox: list[AskedWish]
    suspect_ms: int
    lease_ms: int
    freeze_ms: int
    self_cordon: bool
    presumed_lost: list[NodeId]
    misfits: Misfits
    moves: Moves
    alerts: Alerts
    faults: Faults
    holds: Holds
    retention: Retention
    alert_rules: str
    fenced: dict[NodeId, Fence]


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final = msgspec.msgpack.Decoder(Snapshot)


def initial() -> State:
    """A monitor that knows nothing yet."""
    return State()


def snapshot(state: State) -> bytes:
    """What outlives the process."""
    return _ENCODER.encode(
        Snapshot(
            pool=state.pool,
            wishes_seq=state.wishes_seq,
            answered=state.answered,
            inbox=state.inbox,
            suspect_ms=state.suspect_ms,
            lease_ms=state.lease_ms,
            freeze_ms=state.freeze_ms,
            self_cordon=state.self_cordon,
            presumed_lost=sorted(state.presumed_lost),
            misfits=state.misfits,
            moves=state.moves,
            alerts=state.alerts,
            faults=state.faults,
            holds=state.holds,
            retention=state.retention,
            alert_rules=state.alert_rules,
            fenced=state.fenced,
        )
    )


def restore(data: bytes) -> State:
    """The state from a snapshot; every node gets a full lease from the first observation on."""
    kept = _DECODER.decode(data)
    misfits.restored(kept.misfits)
    return State(
        pool=kept.pool,
        wishes_seq=kept.wishes_seq,
        answered=kept.answered,
        inbox=kept.inbox,
        suspect_ms=kept.suspect_ms,
        lease_ms=kept.lease_ms,
        freeze_ms=kept.freeze_ms,
        self_cordon=kept.self_cordon,
        presumed_lost=set(kept.presumed_lost),
        misfits=kept.misfits,
        moves=kept.moves,
        alerts=kept.alerts,
        faults=kept.faults,
        holds=kept.holds,
        retention=kept.retention,
        alert_rules=kept.alert_rules,
        rules=alerts.with_changes(kept.alert_rules),
        fenced=kept.fenced,
        suspected={node_id for node_id, node in kept.pool.nodes.items() if node.state is NodeState.SUSPECTED},
    )


def position(state: State) -> tuple[int, int]:
    """Sequences of the last fact and the last wish folded."""
    return state.pool.seq, state.wishes_seq


# Folding --------------------------------------------------------------------------------------------------------------


def evolve(state: State, entry: Entry) -> State:
    """The state after a wish or a fact, changed in place. Wishes and facts commute."""
    if entry.stream is Stream.WISHES:
        if entry.seq > state.wishes_seq:
            state.wishes_seq = entry.seq
            wish = None if entry.seq <= state.answered else asked_of_us(entry)
            if wish is not None:
                state.inbox.append(wish)
        return state
    if entry.seq <= state.pool.seq:
        return state  # delivered twice
    moves.evolve(state.moves, state.pool, entry)
    evolve_pool(state.pool, entry)
    misfits.evolve(state.misfits, entry)
    alerts.evolve(state.alerts, entry)
    faults.evolve(state.faults, entry)
    holds.evolve(state.holds, entry.event)
    retention.evolve(state.retention, entry)
    event = entry.event
    match event:
        case ev.LeaseClaimed() if entry.author == MONITOR:
            _configure(state, event)
        case ev.NodeRegistered() if event.node_id in state.pool.nodes:
            _registered(state, entry, event)
        case ev.NodeFenced():
            state.fenced[event.node_id] = Fence(epoch=event.epoch, fenced_at=entry.recorded_at)
            state.heard_ns.pop(event.node_id, None)
            state.presumed_lost.discard(event.node_id)
        case ev.NodeTrusted():
            state.presumed_lost.discard(event.node_id)
        case ev.NodeRecovered():
            state.fenced.pop(event.node_id, None)
        case ev.ControlPlaneFrozen():
            state.frozen_ns = state.clock_ns
        case ev.ControlPlaneThawed():
            state.frozen_ns = None
            state.presumed_lost = set(event.presumed_lost)
            if event.why is Thaw.HEARD:
                state.granted_ns = state.clock_ns or 0
            _note_answer(state, event.answers)
        case (
            ev.NodeWishRejected()
            | ev.NodeWishJudged()
            | ev.NodeCordoned()
            | ev.NodeDraining()
            | ev.NodeUncordoned()
            | ev.RateCardChanged()
            | ev.IsolationTestStarted()
            | ev.AlertAcknowledged()
            | ev.AlertSilenced()
            | ev.FaultInjected()
            | ev.FaultCleared()
            | ev.LogSealOrdered()
            | ev.LegalHoldPlaced()
            | ev.LegalHoldReleased()
            | ev.PayloadEraseOrdered()
            | ev.LogRetentionChanged()
            | ev.KeyChanged()
        ):
            _note_answer(state, event.answers)
        case ev.AuditQueryRun():
            state.questions = [asked for asked in state.questions if asked.query_id != event.query_id]
        case _:
            pass  # who holds what is the pool's business
    _watch(state, event)
    return state


_OF_NODES: Final = (
    ev.NodeRegistered
    | ev.NodeSuspected
    | ev.NodeTrusted
    | ev.NodeFenced
    | ev.NodeRecovered
    | ev.NodeCordoned
    | ev.NodeDraining
    | ev.NodeUncordoned
)


def _watch(state: State, event: object) -> None:
    """Keep what is known of who is due in step with a fact that was just folded."""
    if isinstance(event, ev.LeaseClaimed | ev.ControlPlaneThawed):
        _watch_all(state)  # deadlines of all of them may have moved
    elif isinstance(event, _OF_NODES) and (node := state.pool.nodes.get(event.node_id)) is not None:
        (state.suspected.add if node.state is NodeState.SUSPECTED else state.suspected.discard)(event.node_id)
        if state.clock_ns is not None:
            due.touch(state.due, event.node_id, lambda node_id: _deadline(state, node_id), state.clock_ns)


def _watch_all(state: State) -> None:
    if state.clock_ns is not None:
        due.restart(state.due, state.pool.nodes, lambda node_id: _deadline(state, node_id), state.clock_ns)


def _deadline(state: State, node_id: NodeId) -> int | None:
    """When the node has been silent for suspect_ms, if it stays silent; None where nobody listens for it."""
    node = state.pool.nodes.get(node_id)
    if node is None or node.state is NodeState.FENCED:
        return None
    return _since_ns(state, node_id) + state.suspect_ms * NS_PER_MS


def _note_answer(state: State, answers: int) -> None:
    if answers > state.answered:
        state.answered = answers
        state.inbox = [wish for wish in state.inbox if wish.seq > answers]


def _configure(state: State, event: ev.LeaseClaimed) -> None:
    suspect, lease = event.config.get("suspect_ms", SUSPECT_MS), event.config.get("lease_ms", LEASE_MS)
    # Settings are checked where they are read; a fact with others was written by something else, and is passed over.
    if isinstance(suspect, int) and isinstance(lease, int) and 0 < suspect < lease:
        state.suspect_ms, state.lease_ms = suspect, lease
    freeze = event.config.get("freeze_ms", FREEZE_MS)
    if isinstance(freeze, int) and freeze > 0:
        state.freeze_ms = freeze
    state.self_cordon = event.config.get("self_cordon", 1) == 1
    state.faults.are_allowed = event.config.get("faults", 0) == 1
    changed = event.config.get("alert_rules", "")
    if isinstance(changed, str):
        with contextlib.suppress(msgspec.MsgspecError):
            state.rules = alerts.with_changes(changed)
            state.alert_rules = changed


def _registered(state: State, entry: Entry, event: ev.NodeRegistered) -> None:
    if entry.author is None or node_of_author(entry.author) != event.node_id:
        return  # identity comes from the subject: nobody registers another's node
    # Agents register when they begin, so that this is a sign of life as good as a heartbeat.
    if state.clock_ns is not None:
        state.since_ns[event.node_id] = state.clock_ns
    state.presumed_lost.discard(event.node_id)
    fence = state.fenced.get(event.node_id)
    if fence is not None and not fence.returned_at and event.epoch == fence.epoch:
        fence.returned_at = entry.recorded_at
        fence.returned_by = entry.event_id


def observe(state: State, observation: Observation, now: int) -> State:
    """The state after something was heard, or time passed. ``now`` is the wall clock, and not looked at."""
    del now
    if isinstance(observation, Asked):
        state.questions.append(observation.record)
        return state
    if isinstance(observation, Measured):
        alerts.measured(state.levels, state.alerts, state.rules, observation.measures, observation.at_ns)
        return state
    at = observation.at_ns
    is_first = state.clock_ns is None
    if is_first:
        # The first observation of this life: whatever was said before, nobody was there to hear it.
        state.granted_ns = at
    state.clock_ns = at if state.clock_ns is None else max(state.clock_ns, at)
    if state.pool.frozen and state.frozen_ns is None:
        state.frozen_ns = state.clock_ns  # frozen in an earlier life, or before anything was heard in this one
    match observation:
        case Heard():
            _heard(state, observation)
        case Resumed():
            state.granted_ns = state.clock_ns
            state.frozen_ns = state.clock_ns if state.pool.frozen else None
        case Tick():
            pass
    if is_first or isinstance(observation, Resumed):
        _watch_all(state)
    elif isinstance(observation, Heard):
        due.touch(state.due, observation.node, lambda node_id: _deadline(state, node_id), state.clock_ns)
    else:
        due.settle(state.due, lambda node_id: _deadline(state, node_id), state.clock_ns)
    return state


def _heard(state: State, heard: Heard) -> None:
    node = state.pool.nodes.get(heard.node)
    if node is None or (heard.session, heard.epoch) != (node.session, node.epoch):
        return  # unknown, superseded by a newer session, or fenced and not aware of it yet
    gap_ms = state.gap_ms[heard.node] = _silent_ms(state, node, heard.at_ns)
    if gap_ms >= state.suspect_ms or heard.node not in state.heard_ns:
        state.steady_ns[heard.node] = heard.at_ns
    state.heard_ns[heard.node] = max(state.heard_ns.get(heard.node, 0), heard.at_ns)


def _silent_ms(state: State, node: NodeView, at_ns: int) -> int:
    """How long the node was silent while somebody listened."""
    return max(0, at_ns - _since_ns(state, node.node_id)) // NS_PER_MS


def _since_ns(state: State, node_id: NodeId) -> int:
    return max(state.granted_ns, state.since_ns.get(node_id, 0), state.heard_ns.get(node_id, state.granted_ns))


# Deciding -------------------------------------------------------------------------------------------------------------


def decide(state: State, now: int) -> list[ev.Fact]:
    """What follows from silence, returns, moves, wishes and questions; at most FACTS_MAX facts."""
    back = _recovered(state)[:FACTS_MAX]
    silence = _judged(state, FACTS_MAX - len(back))
    return decided(
        state,
        now,
        Observed(
            silence=silence,
            # By what was said of nodes, once that has come round: who is suspected just now is in no doubt.
            cordons=[] if back or silence else _misfits(state)[:FACTS_MAX],
            alerts=alerts.due(state.levels, state.alerts, state.rules),
            questions=state.questions,
            silent=_silent(state, sorted(watched(state.pool))) if state.inbox else (),
            frozen_ms=_frozen_ms(state),
        ),
    )


class Observed(Struct, frozen=True, kw_only=True):
    """What follows from that which only this process could know, by its own clock and measures, and who asked it."""

    silence: list[ev.Fact]
    """Of nodes, and what it says of the control plane."""
    cordons: list[ev.Fact]
    """By the monitor's own rules."""
    alerts: list[ev.Fact]
    questions: Sequence[ev.AuditQueryRun]
    silent: tuple[NodeId, ...]
    """Nodes whose silence freezes the control plane, or would; looked for where wishes wait, as answers say it."""
    frozen_ms: int


def decided(state: State, now: int, observed: Observed) -> list[ev.Fact]:
    """What follows from what was folded, given what was observed; at most FACTS_MAX facts."""
    facts = _recovered(state)[:FACTS_MAX] + observed.silence + observed.cordons
    facts += observed.alerts[: FACTS_MAX - len(facts)]
    facts += faults.expired(state.faults, now)[: FACTS_MAX - len(facts)]
    facts += moves.completed(state.moves)[: FACTS_MAX - len(facts)]
    facts += retention.due(state.retention, now)[: FACTS_MAX - len(facts)]
    if state.inbox:
        facts += answered(state.inbox[: FACTS_MAX - len(facts)], _situation(state, facts, observed), now)
    return [*facts, *observed.questions[: FACTS_MAX - len(facts)]]


def watched(pool: Pool) -> list[NodeId]:
    """Nodes whose silence counts."""
    return [node_id for node_id, node in pool.nodes.items() if node.state is not NodeState.FENCED]


def wake_at(state: State, now: int) -> int | None:
    """When the next node's silence reaches a threshold, if no more is heard; a Tick has to tell that it did."""
    ends = [fault.until_at for fault in state.faults.active.values()]
    if (midnight := retention.wake_at(state.retention, now)) is not None:
        ends.append(midnight)
    if state.clock_ns is None:
        return min(ends, default=None)
    waits = []
    for _, node_id in state.due.heap[:1]:  # of all that are not overdue it is the first
        waits.append(state.suspect_ms - _silent_ms(state, state.pool.nodes[node_id], state.clock_ns))
    for node_id in state.suspected:
        silent = _silent_ms(state, state.pool.nodes[node_id], state.clock_ns)
        if silent < state.lease_ms:
            waits.append(state.lease_ms - silent)
    return min([*ends, *(now + wait * NS_PER_MS for wait in waits)], default=None)


def instruct(state: State, now: int) -> list[None]:
    """Nothing: the monitor acts by facts alone."""
    del state, now
    return []


def issued(state: State, instruction: None) -> State:
    """The state as it was."""
    del instruction
    return state


def _recovered(state: State) -> list[ev.Fact]:
    return [
        ev.NodeRecovered(
            node_id=node_id,
            epoch=fence.epoch,
            away_ms=max(0, fence.returned_at - fence.fenced_at) // NS_PER_MS,
            caused_by=fence.returned_by,
        )
        for node_id, fence in sorted(state.fenced.items())
        if fence.returned_at
    ]


def _judged(state: State, most: int) -> list[ev.Fact]:
    """What the silence of nodes means, in at most ``most`` facts."""
    if state.clock_ns is None or most < 2:
        return []
    pool = state.pool
    if pool.frozen:
        return _judged_frozen(state, most)
    # What is neither overdue nor suspected was heard lately, and nothing follows from that.
    seen = [
        node
        for node_id in sorted(state.due.overdue | state.suspected)
        if (node := pool.nodes[node_id]).state is not NodeState.FENCED
    ]
    if not seen:
        return []
    silent = _silent(state, [node.node_id for node in seen if node.node_id not in state.presumed_lost])
    nodes = _fleet_size(state)
    if nodes >= FLEET_MIN and len(silent) * 2 > nodes:
        return [ev.ControlPlaneFrozen(silent=len(silent), nodes=nodes)]
    facts: list[ev.Fact] = _trusted(state, seen)[:most]
    for node in seen:
        if len(facts) + 2 > most:
            break  # a loss and its fencing are never parted; the rest follows in the next round
        silent_ms = _silent_ms(state, node, state.clock_ns)
        if node.state is not NodeState.SUSPECTED:
            if silent_ms >= state.suspect_ms:
                facts.append(
                    ev.NodeSuspected(
                        node_id=node.node_id, epoch=node.epoch, silent_ms=silent_ms, lease_ms=state.lease_ms
                    )
                )
        elif silent_ms >= state.lease_ms:
            facts += lost(state, node, silent_ms)
    return facts


def _fleet_size(state: State) -> int:
    """How many nodes are listened for, save those that are presumed lost."""
    return sum(node_id not in state.presumed_lost for node_id in watched(state.pool))


def _judged_frozen(state: State, most: int) -> list[ev.Fact]:
    """A node that speaks again under the freeze is trusted at once; silent ones are judged after it."""
    seen = [state.pool.nodes[node_id] for node_id in sorted(watched(state.pool))]
    fleet = [node.node_id for node in seen if node.node_id not in state.presumed_lost]
    silent = _silent(state, fleet)
    is_fleet_silent = len(fleet) >= FLEET_MIN and len(silent) * 2 > len(fleet)
    return [*_trusted(state, seen)[: most - 1], *_thawed(state, fleet, silent, is_fleet_silent=is_fleet_silent)]


def _thawed(state: State, fleet: list[NodeId], silent: tuple[NodeId, ...], *, is_fleet_silent: bool) -> list[ev.Fact]:
    frozen_ms = _frozen_ms(state)
    thawed = ev.ControlPlaneThawed(silent=len(silent), nodes=len(fleet), frozen_ms=frozen_ms)
    if not is_fleet_silent:
        return [thawed]
    # The monitor hears itself, or no time would pass for it. That it hears another, too, all this time, tells that the
    # bus works for more than the two of them: what is still silent isn't silent for its sake.
    if frozen_ms < state.freeze_ms or len(silent) == len(fleet):
        return []
    return [replace(thawed, why=Thaw.WAITED, presumed_lost=silent)]


def _silent(state: State, nodes: list[NodeId]) -> tuple[NodeId, ...]:
    """Who of them is silent. To thaw by being granted a lease would say that somebody spoke, so then it isn't asked."""
    if state.clock_ns is None:
        return ()
    if state.pool.frozen:
        since = state.clock_ns - state.suspect_ms * NS_PER_MS
        return tuple(node_id for node_id in nodes if state.heard_ns.get(node_id, since) <= since)
    views = state.pool.nodes
    return tuple(node_id for node_id in nodes if _silent_ms(state, views[node_id], state.clock_ns) >= state.suspect_ms)


def _frozen_ms(state: State) -> int:
    """For how long the control plane has been frozen while the monitor listened."""
    if state.frozen_ns is None or state.clock_ns is None:
        return 0
    return max(0, state.clock_ns - state.frozen_ns) // NS_PER_MS


def _misfits(state: State) -> list[ev.Fact]:
    if not state.self_cordon or state.pool.frozen or state.clock_ns is None:
        return []
    steady = {
        node_id: (state.clock_ns - since) // NS_PER_MS
        for node_id in state.misfits.cordons
        if (since := state.steady_ns.get(node_id)) is not None
        and state.clock_ns - state.heard_ns.get(node_id, 0) < state.suspect_ms * NS_PER_MS
    }
    return misfits.judged(state.misfits, state.pool, steady, state.lease_ms)


def _situation(state: State, facts: list[ev.Fact], observed: Observed) -> Situation:
    """What wishes are answered from, as if ``facts`` had been folded already."""
    cordons = {node_id: node.cordon for node_id, node in state.pool.nodes.items()}
    for fact in facts:
        match fact:
            case ev.NodeCordoned():
                cordons[fact.node_id] = NodeState.CORDONED
            case ev.NodeUncordoned():
                cordons[fact.node_id] = None
            case _:
                pass
    return Situation(
        pool=state.pool,
        cordons=cordons,
        is_frozen=state.pool.frozen and not any(isinstance(fact, ev.ControlPlaneThawed) for fact in facts),
        silent=observed.silent,
        watched=len(watched(state.pool)),
        frozen_ms=observed.frozen_ms,
        alerts=state.alerts,
        rules=state.rules,
        faults=state.faults,
        holds=holds.copy(state.holds),
        cleared={fact.fault_id for fact in facts if isinstance(fact, ev.FaultCleared)},
    )


def _trusted(state: State, nodes: list[NodeView]) -> list[ev.Fact]:
    assert state.clock_ns is not None, "silence is judged only once something was observed"
    facts: list[ev.Fact] = []
    for node in nodes:
        heard = state.heard_ns.get(node.node_id)
        if node.state is not NodeState.SUSPECTED or heard is None:
            continue  # one that was merely granted a lease has not spoken
        if state.clock_ns - heard < state.suspect_ms * NS_PER_MS:
            facts.append(
                ev.NodeTrusted(node_id=node.node_id, epoch=node.epoch, silent_ms=state.gap_ms.get(node.node_id, 0))
            )
    return facts


def lost(state: State, node: NodeView, silent_ms: int) -> list[ev.Fact]:
    """What is said of a node whose silence has lasted as long as its lease."""
    return [
        ev.NodeLost(node_id=node.node_id, silent_ms=silent_ms, lease_ms=state.lease_ms, rule=RULE),
        ev.NodeFenced(
            node_id=node.node_id,
            epoch=node.epoch + 1,
            runs=tuple(sorted(node.runs)),
            reason=f"silent for {silent_ms} ms, and its lease is {state.lease_ms} ms",
        ),
    ]
