"""Nodes that the monitor itself takes out of use for a while. Pure.

Those that flap, those on which runs fail, and those of which a device wants a reboot. The rules are data, and each
cordon names the rule and what it went by. Each has a way back that doesn't swing: a flapping node must be steady for
twice as long each time, a node whose runs failed waits for an operator, since nothing runs on it that could speak for
it, and one that wants a reboot is used again once it has booted. At most a quarter of the pool is taken out like this,
and never the last node that is left: where much of the fleet looks ill, the fleet is not what is ill.
"""

from typing import Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import NodeRule, RunCause
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import DeviceUuid, JobId, NodeId, RunId, job_of_run, node_of_author
from apportion.pool.state import NodeState, NodeView, Pool

NS_PER_S: Final = 1_000_000_000
ACTOR: Final = "service:monitor"
FAILED: Final = frozenset(
    {
        RunCause.USER_ERROR,
        RunCause.KILLED,
        RunCause.START_FAILED,
        RunCause.ENFORCEMENT_FAILED,
        RunCause.DEVICE_FAULT,
        RunCause.FAULT_DOMAIN_FAILED,
        RunCause.SHIM_LOST,
        RunCause.UNKNOWN,
    }
)
"""Ends that may be the node's doing. What a job used too much of, or was told, is left out."""


class Rules(Struct, frozen=True, kw_only=True):
    """When a node is taken out of use."""

    flaps: int = 3
    """So many suspicions within the window, and it flaps."""
    flap_window_s: int = 600
    steady_leases_max: int = 16
    """It has to be steady for one lease, then two, four, … at most so many."""
    runs: int = 20
    """So many of a node's last runs are looked at."""
    failed_jobs: int = 5
    """At least so many different jobs among them failed,"""
    failed_pct: int = 50
    """and at least so much of the runs,"""
    elsewhere_pct: int = 25
    """while on all other nodes together at most so much did."""
    nodes_pct: int = 25
    """So much of the pool is cordoned by these rules at most (one node is always allowed)."""


RULES: Final = Rules()


class Suspicion(Struct, frozen=True, kw_only=True):
    """One NodeSuspected: where it stands, when the bus recorded it, and its id."""

    seq: int
    at: int
    event_id: str


class Outcome(Struct, frozen=True, kw_only=True):
    """How a run ended."""

    run_id: RunId
    failed: bool


class Cordon(Struct, frozen=True, kw_only=True):
    """A cordon of ours that is in force."""

    rule: NodeRule
    steady_ms: int


class Reboot(Struct, frozen=True, kw_only=True):
    """A device that only a reboot of its node mends, and what said so."""

    event_id: str
    says: str


class Misfits(Struct, kw_only=True):
    """What is known of each node, and whom we cordoned."""

    suspicions: dict[NodeId, list[Suspicion]] = {}
    forgiven: dict[NodeId, int] = {}
    """Suspicions up to this sequence led to a cordon that is over."""
    outcomes: dict[NodeId, list[Outcome]] = {}
    cordons: dict[NodeId, Cordon] = {}
    boots: dict[NodeId, str] = {}
    """Which boot of each node speaks."""
    reboots: dict[NodeId, dict[DeviceUuid, Reboot]] = {}
    doubted: set[NodeId] = set()
    """Nodes of which a rule may have something to say: of all others none has."""


def restored(misfits: Misfits) -> None:
    """Work out who is doubted: a snapshot of an older release doesn't say."""
    misfits.doubted = set()
    for node_id in {*misfits.suspicions, *misfits.outcomes, *misfits.reboots}:
        _doubt(misfits, node_id)


def _doubt(misfits: Misfits, node_id: NodeId) -> None:
    is_doubted = (
        node_id in misfits.reboots
        or len(misfits.suspicions.get(node_id, ())) >= RULES.flaps
        or sum(one.failed for one in misfits.outcomes.get(node_id, ())) >= RULES.failed_jobs
    )
    (misfits.doubted.add if is_doubted else misfits.doubted.discard)(node_id)


def evolve(misfits: Misfits, entry: Entry) -> None:
    """Take in one fact."""
    _fold(misfits, entry)
    event = entry.event
    if isinstance(
        event, ev.NodeSuspected | ev.RunFinished | ev.NodeRegistered | ev.DeviceHealthChanged | ev.NodeUncordoned
    ):
        _doubt(misfits, event.node_id)


def _fold(misfits: Misfits, entry: Entry) -> None:
    event = entry.event
    match event:
        case ev.NodeSuspected():
            found = [
                *misfits.suspicions.get(event.node_id, ()),
                Suspicion(seq=entry.seq, at=entry.recorded_at, event_id=entry.event_id),
            ]
            oldest = entry.recorded_at - RULES.flap_window_s * NS_PER_S
            misfits.suspicions[event.node_id] = [one for one in found if one.at > oldest][-16:]
        case ev.RunFinished() if entry.author is not None and node_of_author(entry.author) == event.node_id:
            if event.cause is RunCause.SUCCESS or event.cause in FAILED:
                outcome = Outcome(run_id=event.run_id, failed=event.cause in FAILED)
                misfits.outcomes[event.node_id] = [*misfits.outcomes.get(event.node_id, ()), outcome][-RULES.runs :]
        case ev.NodeRegistered() if entry.author is not None and node_of_author(entry.author) == event.node_id:
            if misfits.boots.get(event.node_id) != event.boot_id:
                misfits.reboots.pop(event.node_id, None)
            misfits.boots[event.node_id] = event.boot_id
        case ev.DeviceHealthChanged() if entry.author is not None and node_of_author(entry.author) == event.node_id:
            wanting = misfits.reboots.setdefault(event.node_id, {})
            wanting.pop(event.device_uuid, None)
            if event.wants_reboot:
                says = f"{event.code} of {event.device_uuid}, {event.detail}"
                wanting[event.device_uuid] = Reboot(event_id=entry.event_id, says=says)
            if not wanting:
                del misfits.reboots[event.node_id]
        case ev.NodeCordoned(rule=NodeRule() as rule):
            misfits.cordons[event.node_id] = Cordon(rule=rule, steady_ms=event.steady_ms)
        case ev.NodeCordoned() | ev.NodeDraining():
            misfits.cordons.pop(event.node_id, None)  # an operator's word takes the place of ours
        case ev.NodeUncordoned():
            misfits.cordons.pop(event.node_id, None)
            misfits.forgiven[event.node_id] = entry.seq
            if event.rule is None:
                misfits.suspicions.pop(event.node_id, None)
                misfits.outcomes.pop(event.node_id, None)
        case _:
            pass


def judged(misfits: Misfits, pool: Pool, steady_ms: dict[NodeId, int], lease_ms: int) -> list[ev.Fact]:
    """Who is cordoned, and who is used again. ``steady_ms``: for how long each node was heard without a gap."""
    facts: list[ev.Fact] = [
        ev.NodeUncordoned(
            node_id=node_id,
            actor=ACTOR,
            reason=f"steady for {cordon.steady_ms} ms",
            rule=cordon.rule,
        )
        for node_id, cordon in sorted(misfits.cordons.items())
        if cordon.rule is NodeRule.FLAPPING
        and (node := pool.nodes.get(node_id)) is not None
        and node.state is NodeState.CORDONED
        and steady_ms.get(node_id, 0) >= cordon.steady_ms
    ]
    facts += [
        ev.NodeUncordoned(
            node_id=node_id,
            actor=ACTOR,
            reason="it has booted, or none of its devices wants it to any more",
            rule=cordon.rule,
        )
        for node_id, cordon in sorted(misfits.cordons.items())
        if cordon.rule is NodeRule.REBOOT_NEEDED
        and node_id not in misfits.reboots
        and (node := pool.nodes.get(node_id)) is not None
        and node.state is NodeState.CORDONED
    ]
    doubted = [node for node_id in sorted(misfits.doubted) if (node := pool.nodes.get(node_id)) is not None]
    if not doubted:
        return facts
    room = max(1, len(pool.nodes) * RULES.nodes_pct // 100) - len(misfits.cordons)
    usable = {node_id for node_id, node in pool.nodes.items() if node.is_usable}
    for node in doubted:
        node_id = node.node_id
        if room <= 0:
            break
        if node.cordon is not None or node_id in misfits.cordons or len(usable) <= (node_id in usable):
            continue
        fact = _unbooted(misfits, node) or _flapping(misfits, node, lease_ms) or _failing(misfits, node)
        if fact is not None:
            facts.append(fact)
            usable.discard(node_id)
            room -= 1
    return facts


def _unbooted(misfits: Misfits, node: NodeView) -> ev.Fact | None:
    wanting = misfits.reboots.get(node.node_id, {})
    if not wanting:
        return None
    first = next(iter(wanting.values()))
    return ev.NodeCordoned(
        node_id=node.node_id,
        actor=ACTOR,
        reason=f"it has to be rebooted: {first.says}; drain it, and reboot it",
        rule=NodeRule.REBOOT_NEEDED,
        evidence=tuple(one.event_id for one in wanting.values()),
        caused_by=first.event_id,
    )


def _flapping(misfits: Misfits, node: NodeView, lease_ms: int) -> ev.Fact | None:
    found = misfits.suspicions.get(node.node_id, [])
    if len(found) < RULES.flaps or found[-1].seq <= misfits.forgiven.get(node.node_id, 0):
        return None
    steady_ms = lease_ms * min(2 ** (len(found) - RULES.flaps), RULES.steady_leases_max)
    return ev.NodeCordoned(
        node_id=node.node_id,
        actor=ACTOR,
        reason=(
            f"suspected {len(found)} times within {RULES.flap_window_s} s;"
            f" used again once it is heard for {steady_ms} ms without a gap"
        ),
        rule=NodeRule.FLAPPING,
        evidence=tuple(one.event_id for one in found),
        steady_ms=steady_ms,
        caused_by=found[-1].event_id,
    )


def _failing(misfits: Misfits, node: NodeView) -> ev.Fact | None:
    here = misfits.outcomes.get(node.node_id, [])
    failed = [one for one in here if one.failed]
    jobs: set[JobId] = {job_of_run(one.run_id) for one in failed}
    if len(jobs) < RULES.failed_jobs or len(failed) * 100 < len(here) * RULES.failed_pct:
        return None
    elsewhere = [one for node_id, runs in misfits.outcomes.items() if node_id != node.node_id for one in runs]
    failed_elsewhere = sum(one.failed for one in elsewhere)
    if len(elsewhere) * 2 < RULES.runs or failed_elsewhere * 100 > len(elsewhere) * RULES.elsewhere_pct:
        return None  # nothing to compare with, or jobs fail wherever they run
    return ev.NodeCordoned(
        node_id=node.node_id,
        actor=ACTOR,
        reason=(
            f"{len(failed)} of its last {len(here)} runs failed, of {len(jobs)} jobs;"
            f" elsewhere {failed_elsewhere} of {len(elsewhere)}"
        ),
        rule=NodeRule.FAILING_RUNS,
        evidence=tuple(one.run_id for one in failed),
    )
