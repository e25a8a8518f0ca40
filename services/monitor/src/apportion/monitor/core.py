"""Which nodes are alive, what follows where one is not, answers to wishes about nodes, who asked the log. Pure.

Silence is measured by the monitor's own monotonic clock, given with each observation; the wall clock decides nothing
here. A node is judged like this::

    ready ──(silent for suspect_ms)──► suspected ──(silent for lease_ms)──► lost and fenced, its epoch one higher
      ▲                                    │                                           │
      └───────────(heard again)────────────┘     recovered ◄──(registers with it)──────┘

When more than half of a fleet of three or more is silent at once, the likelier explanation is the monitor's own
connection: the control plane freezes and nobody is fenced until the fleet speaks again. For the same reason a node is
given a full lease whenever the monitor starts, or notices that it had not been listening for a while.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal, Verdict
from apportion.contracts.envelope import Entry, Stream, Undecodable
from apportion.contracts.ids import MONITOR, NodeId, RunId, TenantId, node_of_author
from apportion.pool.state import NodeState, NodeView, Pool, RunState, run_of
from apportion.pool.state import evolve as evolve_pool

SUSPECT_MS: Final = 5_000
LEASE_MS: Final = 20_000
FLEET_MIN: Final = 3
"""From this many nodes on, half of them silent at once is doubted."""
FACTS_MAX: Final = 900
"""At most this many facts a decision: one atomic batch; the rest follows once these came round."""
RUNS_NAMED_MAX: Final = 100
"""At most this many runs are named by the answer to a dry run."""
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

_RULES: Final = (
    "suspect after suspect_ms of silence; lost and fenced after lease_ms; frozen while silent*2 > nodes >= 3;"
    " a full lease after a start, a pause and a thaw; wishes about nodes answered in order, operators only;"
    " a dry run judged by what would answer it; questions to the log recorded;"
    " settings: suspect_ms lease_ms"
)
POLICY: Final = f"liveness@3#{hashlib.sha256(_RULES.encode()).hexdigest()[:12]}"
RULE: Final = "silence"
"""Named in NodeLost: what made the monitor say so."""

_NODE_WISHES: Final = frozenset(kind.__name__ for kind in ev.NodeWish.__args__)


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


Observation = Sign | Asked


class Fence(Struct, kw_only=True):
    """A node that we fenced and that isn't back."""

    epoch: int
    fenced_at: int
    returned_at: int = 0
    """When it registered with the new epoch; 0: it has not."""
    returned_by: str = ""
    """The event that told."""


class NodeWishEntry(Struct, frozen=True, kw_only=True):
    """A wish about a node that has no answer yet."""

    seq: int
    event_id: str
    tenant: TenantId
    actor: str
    type: str
    """Such as ``NodeDrainRequested``."""
    expires_at: int
    wish: ev.NodeWish | None
    undecodable: Undecodable | None = None
    """Why it is none; set where ``wish`` is not."""


class State(Struct, kw_only=True):
    """The pool, what was heard of its nodes, and the wishes that wait for an answer."""

    pool: Pool = msgspec.field(default_factory=Pool)
    wishes_seq: int = 0
    answered: int = 0
    """Highest sequence of a wish that a fact of ours answers; answers come in order."""
    inbox: list[NodeWishEntry] = []
    """Wishes about nodes that have no answer yet, in order."""
    suspect_ms: int = SUSPECT_MS
    lease_ms: int = LEASE_MS
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
    questions: list[ev.AuditQueryRun] = []
    """Asked in this life and not recorded yet; a process that ends gives none of their answers."""


class Snapshot(Struct, kw_only=True):
    """What of a state outlives the process: all but what was heard by a clock that dies with it."""

    pool: Pool
    wishes_seq: int
    answered: int
    inbox: list[NodeWishEntry]
    suspect_ms: int
    lease_ms: int
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
            fenced=state.fenced,
        )
    )


def restore(data: bytes) -> State:
    """The state from a snapshot; every node gets a full lease from the first observation on."""
    kept = _DECODER.decode(data)
    return State(
        pool=kept.pool,
        wishes_seq=kept.wishes_seq,
        answered=kept.answered,
        inbox=kept.inbox,
        suspect_ms=kept.suspect_ms,
        lease_ms=kept.lease_ms,
        fenced=kept.fenced,
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
            wish = None if entry.seq <= state.answered else _wish_about_a_node(entry)
            if wish is not None:
                state.inbox.append(wish)
        return state
    if entry.seq <= state.pool.seq:
        return state  # delivered twice
    evolve_pool(state.pool, entry)
    event = entry.event
    match event:
        case ev.LeaseClaimed() if entry.author == MONITOR:
            _configure(state, event)
        case ev.NodeRegistered() if event.node_id in state.pool.nodes:
            _registered(state, entry, event)
        case ev.NodeFenced():
            state.fenced[event.node_id] = Fence(epoch=event.epoch, fenced_at=entry.recorded_at)
            state.heard_ns.pop(event.node_id, None)
        case ev.NodeRecovered():
            state.fenced.pop(event.node_id, None)
        case ev.ControlPlaneThawed():
            state.granted_ns = state.clock_ns or 0
        case ev.NodeWishRejected() | ev.NodeWishJudged() | ev.NodeCordoned() | ev.NodeDraining() | ev.NodeUncordoned():
            if event.answers > state.answered:
                state.answered = event.answers
                state.inbox = [wish for wish in state.inbox if wish.seq > event.answers]
        case ev.AuditQueryRun():
            state.questions = [asked for asked in state.questions if asked.query_id != event.query_id]
        case _:
            pass  # who holds what is the pool's business
    return state


def _wish_about_a_node(entry: Entry) -> NodeWishEntry | None:
    """The entry, where it is the monitor that answers it."""
    event = entry.event
    if isinstance(event, Undecodable):
        if entry.subject_type not in _NODE_WISHES:
            return None
        wish, undecodable = None, event
    elif isinstance(event, ev.NodeDrainRequested | ev.NodeCordonRequested | ev.NodeUncordonRequested):
        wish, undecodable = event, None
    else:
        return None
    return NodeWishEntry(
        seq=entry.seq,
        event_id=entry.event_id,
        tenant=entry.tenant or TenantId(""),
        actor=entry.actor,
        type=entry.subject_type,
        expires_at=entry.expires_at,
        wish=wish,
        undecodable=undecodable,
    )


def _configure(state: State, event: ev.LeaseClaimed) -> None:
    suspect, lease = event.config.get("suspect_ms", SUSPECT_MS), event.config.get("lease_ms", LEASE_MS)
    # Settings are checked where they are read; a fact with others was written by something else, and is passed over.
    if isinstance(suspect, int) and isinstance(lease, int) and 0 < suspect < lease:
        state.suspect_ms, state.lease_ms = suspect, lease


def _registered(state: State, entry: Entry, event: ev.NodeRegistered) -> None:
    if entry.author is None or node_of_author(entry.author) != event.node_id:
        return  # identity comes from the subject: nobody registers another's node
    # Agents register when they begin, so that this is a sign of life as good as a heartbeat.
    if state.clock_ns is not None:
        state.since_ns[event.node_id] = state.clock_ns
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
    at = observation.at_ns
    if state.clock_ns is None:
        # The first observation of this life: whatever was said before, nobody was there to hear it.
        state.granted_ns = at
    state.clock_ns = at if state.clock_ns is None else max(state.clock_ns, at)
    match observation:
        case Heard():
            _heard(state, observation)
        case Resumed():
            state.granted_ns = state.clock_ns
        case Tick():
            pass
    return state


def _heard(state: State, heard: Heard) -> None:
    node = state.pool.nodes.get(heard.node)
    if node is None or (heard.session, heard.epoch) != (node.session, node.epoch):
        return  # unknown, superseded by a newer session, or fenced and not aware of it yet
    state.gap_ms[heard.node] = _silent_ms(state, node, heard.at_ns)
    state.heard_ns[heard.node] = max(state.heard_ns.get(heard.node, 0), heard.at_ns)


def _silent_ms(state: State, node: NodeView, at_ns: int) -> int:
    """How long the node was silent while somebody listened."""
    since = max(
        state.granted_ns, state.since_ns.get(node.node_id, 0), state.heard_ns.get(node.node_id, state.granted_ns)
    )
    return max(0, at_ns - since) // NS_PER_MS


# Deciding -------------------------------------------------------------------------------------------------------------


def decide(state: State, now: int) -> list[ev.Fact]:
    """What follows from silence, returns, wishes and questions; at most FACTS_MAX facts."""
    facts = _recovered(state)[:FACTS_MAX]
    facts += _judged(state, FACTS_MAX - len(facts))
    facts += _answered(state, now)[: FACTS_MAX - len(facts)]
    return facts + state.questions[: FACTS_MAX - len(facts)]


def wake_at(state: State, now: int) -> int | None:
    """When the next node's silence reaches a threshold, if no more is heard; a Tick has to tell that it did."""
    if state.clock_ns is None:
        return None
    waits = []
    for node in state.pool.nodes.values():
        if node.state is NodeState.FENCED:
            continue
        silent = _silent_ms(state, node, state.clock_ns)
        threshold = state.lease_ms if node.state is NodeState.SUSPECTED else state.suspect_ms
        if silent < threshold:
            waits.append(threshold - silent)
    return now + min(waits) * NS_PER_MS if waits else None


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
    watched = sorted(
        (node for node in pool.nodes.values() if node.state is not NodeState.FENCED), key=lambda node: node.node_id
    )
    silence = {node.node_id: _silent_ms(state, node, state.clock_ns) for node in watched}
    silent = sum(1 for ms in silence.values() if ms >= state.suspect_ms)
    is_fleet_silent = len(watched) >= FLEET_MIN and silent * 2 > len(watched)
    if is_fleet_silent and not pool.frozen:
        return [ev.ControlPlaneFrozen(silent=silent, nodes=len(watched))]
    if pool.frozen:
        # A node that speaks again under the freeze is trusted at once; silent ones are judged after it, from anew.
        thawed: list[ev.Fact] = [] if is_fleet_silent else [ev.ControlPlaneThawed(silent=silent, nodes=len(watched))]
        return [*_trusted(state, watched)[: most - 1], *thawed]
    facts: list[ev.Fact] = _trusted(state, watched)[:most]
    for node in watched:
        if len(facts) + 2 > most:
            break  # a loss and its fencing are never parted; the rest follows in the next round
        silent_ms = silence[node.node_id]
        if node.state is not NodeState.SUSPECTED:
            if silent_ms >= state.suspect_ms:
                facts.append(
                    ev.NodeSuspected(
                        node_id=node.node_id, epoch=node.epoch, silent_ms=silent_ms, lease_ms=state.lease_ms
                    )
                )
        elif silent_ms >= state.lease_ms:
            facts += _lost(state, node, silent_ms)
    return facts


def _trusted(state: State, watched: list[NodeView]) -> list[ev.Fact]:
    assert state.clock_ns is not None, "silence is judged only once something was observed"
    facts: list[ev.Fact] = []
    for node in watched:
        heard = state.heard_ns.get(node.node_id)
        if node.state is not NodeState.SUSPECTED or heard is None:
            continue  # one that was merely granted a lease has not spoken
        if state.clock_ns - heard < state.suspect_ms * NS_PER_MS:
            facts.append(
                ev.NodeTrusted(node_id=node.node_id, epoch=node.epoch, silent_ms=state.gap_ms.get(node.node_id, 0))
            )
    return facts


def _lost(state: State, node: NodeView, silent_ms: int) -> list[ev.Fact]:
    return [
        ev.NodeLost(node_id=node.node_id, silent_ms=silent_ms, lease_ms=state.lease_ms, rule=RULE),
        ev.NodeFenced(
            node_id=node.node_id,
            epoch=node.epoch + 1,
            runs=tuple(sorted(node.runs)),
            reason=f"silent for {silent_ms} ms, and its lease is {state.lease_ms} ms",
        ),
    ]


def _answered(state: State, now: int) -> list[ev.Fact]:
    """One answer a wish, in the order in which they were asked."""
    facts: list[ev.Fact] = []
    cordons = {node_id: node.cordon for node_id, node in state.pool.nodes.items()}
    for wish in state.inbox[:FACTS_MAX]:
        answer = _answer(wish, cordons, now)
        if wish.wish is not None and wish.wish.dry_run:
            facts.append(_judgement(state, wish, answer, cordons))
            continue
        facts.append(answer)
        match answer:  # the next wish is answered as if this one had been folded
            case ev.NodeCordoned():
                cordons[answer.node_id] = NodeState.CORDONED
            case ev.NodeDraining():
                cordons[answer.node_id] = NodeState.DRAINING
            case ev.NodeUncordoned():
                cordons[answer.node_id] = None
            case _:
                pass
    return facts


def _answer(asked: NodeWishEntry, cordons: dict[NodeId, NodeState | None], now: int) -> ev.Fact:
    if not ev.is_operator(asked.tenant):
        return _rejected(asked, Refusal.NOT_PERMITTED, expected="an operator", found=asked.tenant)
    event, broken = asked.wish, asked.undecodable
    if event is None:
        assert broken is not None, "what is no wish says why"
        return _rejected(asked, broken.code, field=broken.field, expected=broken.expected, found=broken.found)
    if asked.expires_at and now >= asked.expires_at:
        return _rejected(
            asked, Refusal.EXPIRED, field="expirytime", expected=f"before {asked.expires_at}", found=str(now)
        )
    node_id = NodeId(event.node_id)
    if node_id not in cordons:
        return _rejected(asked, Refusal.NODE_NOT_FOUND, field="node_id", expected="a known node", found=event.node_id)
    actor = asked.actor or asked.tenant
    match event:
        case ev.NodeDrainRequested():
            return ev.NodeDraining(
                node_id=node_id,
                actor=actor,
                reason=event.reason,
                deadline_at=now + event.deadline_s * NS_PER_S,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        case ev.NodeCordonRequested():
            if cordons[node_id] is NodeState.DRAINING:
                return _rejected(
                    asked, Refusal.NODE_STATE, field="node_id", expected="a node that isn't draining", found="draining"
                )
            return ev.NodeCordoned(
                node_id=node_id, actor=actor, reason=event.reason, answers=asked.seq, caused_by=asked.event_id
            )
        case ev.NodeUncordonRequested():
            if cordons[node_id] is None:
                return _rejected(
                    asked, Refusal.NODE_STATE, field="node_id", expected="a cordoned or draining node", found="in use"
                )
            return ev.NodeUncordoned(
                node_id=node_id, actor=actor, reason=event.reason, answers=asked.seq, caused_by=asked.event_id
            )


def _judgement(
    state: State, asked: NodeWishEntry, answer: ev.Fact, cordons: dict[NodeId, NodeState | None]
) -> ev.NodeWishJudged:
    """The answer to a dry run, from what would have answered the wish."""
    judged = ev.NodeWishJudged(
        tenant=asked.tenant,
        answers=asked.seq,
        wish_id=asked.event_id,
        wish_type=asked.type,
        verdict=Verdict.ACCEPTED,
        fact=type(answer).__name__,
        caused_by=asked.event_id,
    )
    match answer:
        case ev.NodeWishRejected():
            return replace(
                judged,
                verdict=Verdict.REJECTED,
                code=answer.code,
                field=answer.field,
                expected=answer.expected,
                found=answer.found,
                message=answer.message,
            )
        case ev.NodeDraining(node_id=node_id):
            runs = tuple(sorted(_to_stop(state, node_id)))
            count = "1 run is" if len(runs) == 1 else f"{len(runs)} runs are"
            would = (
                "Nothing new is placed on it.",
                f"{count} told to stop; their jobs wait for slices elsewhere, and no retry is spent.",
            )
            return replace(judged, node_id=node_id, would=would, runs=runs[:RUNS_NAMED_MAX])
        case ev.NodeCordoned(node_id=node_id):
            said = "Nothing new is placed on it; what runs there, runs on."
            if cordons[node_id] is NodeState.CORDONED:
                said = "Nothing changes: it is cordoned already."
            return replace(judged, node_id=node_id, would=(said,))
        case ev.NodeUncordoned(node_id=node_id):
            node = state.pool.nodes[node_id]
            said = "It is used again."
            if node.state in {NodeState.SUSPECTED, NodeState.FENCED}:
                said = f"It is used again once it isn't {node.state} any more."
            return replace(judged, node_id=node_id, would=(said,))
        case _:
            raise AssertionError(f"no answer to a wish about a node: {answer!r}")


def _to_stop(state: State, node_id: NodeId) -> Iterator[RunId]:
    """Runs on the node that a drain would stop."""
    for run_id in state.pool.nodes[node_id].runs:
        run = run_of(state.pool, run_id)
        if run is not None and run.stop is None and run.state in {RunState.PLACED, RunState.STARTED}:
            yield run_id


def _rejected(asked: NodeWishEntry, code: Refusal, *, field: str = "", expected: str = "", found: str = "") -> ev.Fact:
    return ev.NodeWishRejected(
        tenant=asked.tenant,
        answers=asked.seq,
        wish_id=asked.event_id,
        wish_type=asked.type,
        code=code,
        field=field,
        expected=expected,
        found=found,
        message=_MESSAGES.get(code, ""),
        caused_by=asked.event_id,
    )


_MESSAGES: Final = {
    Refusal.NOT_PERMITTED: "only operators change nodes",
    Refusal.EXPIRED: "the wish came too late to be done",
    Refusal.NODE_NOT_FOUND: "no node of this name has registered",
    Refusal.NODE_STATE: "the node is not in a state in which this can be done",
}
