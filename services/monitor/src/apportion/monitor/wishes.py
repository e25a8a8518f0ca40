"""Answers to what operators ask of the monitor: one a wish, in the order in which they were asked. Pure."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import DeviceHealth, FaultEnd, Mode, Pricing, Refusal, Thaw, Verdict
from apportion.contracts.cloudevents import NOTES, Ingress
from apportion.contracts.codec import instant_from_timestamp
from apportion.contracts.envelope import Entry, Undecodable
from apportion.contracts.ids import JobId, NodeId, RunId, TenantId, tenant_of_job
from apportion.monitor import holds
from apportion.monitor.alerts import Alerts, Rule, key_of
from apportion.monitor.faults import Faults, refused
from apportion.monitor.holds import Holds, keeping
from apportion.pool.state import JobState, NodeState, Pool, RunState, run_of

RUNS_NAMED_MAX: Final = 100
"""At most this many runs are named by the answer to a dry run."""
NS_PER_S: Final = 1_000_000_000
NS_PER_DAY: Final = 86_400 * NS_PER_S

_OURS: Final = frozenset(kind.__name__ for kind in ev.MonitorWish.__args__)


class AskedWish(Struct, frozen=True, kw_only=True):
    """A wish that the monitor has to answer and has not yet."""

    seq: int
    event_id: str
    tenant: TenantId
    actor: str
    type: str
    """Such as ``NodeDrainRequested``."""
    expires_at: int
    wish: ev.MonitorWish | None
    undecodable: Undecodable | None = None
    """Why it is none; set where ``wish`` is not."""
    ingress: Ingress = Ingress.BINARY


class Situation(Struct, kw_only=True):
    """What wishes are answered from; changed as if each answer had been folded before the next."""

    pool: Pool
    cordons: dict[NodeId, NodeState | None]
    is_frozen: bool
    silent: tuple[NodeId, ...]
    """Nodes whose silence freezes the control plane, or would."""
    watched: int
    """How many nodes could be silent."""
    frozen_ms: int
    alerts: Alerts
    rules: tuple[Rule, ...]
    faults: Faults
    holds: Holds
    """A copy: changed by what is answered."""
    cleared: set[str]
    """Faults that are being cleared just now."""


def asked_of_us(entry: Entry) -> AskedWish | None:
    """The entry, where it is the monitor that answers it."""
    event = entry.event
    wish: ev.MonitorWish | None
    if isinstance(event, Undecodable):
        if entry.subject_type not in _OURS:
            return None
        wish, undecodable = None, event
    elif isinstance(event, ev.MonitorWish):
        wish, undecodable = event, None
    else:
        return None
    return AskedWish(
        seq=entry.seq,
        event_id=entry.event_id,
        tenant=entry.tenant or TenantId(""),
        actor=entry.actor,
        type=entry.subject_type,
        expires_at=entry.expires_at,
        wish=wish,
        undecodable=undecodable,
        ingress=entry.ingress,
    )


def answered(inbox: list[AskedWish], situation: Situation, now: int) -> list[ev.Fact]:
    """One answer a wish."""
    facts: list[ev.Fact] = []
    cordons = situation.cordons
    for wish in inbox:
        answer = _answer(wish, situation, now)
        if wish.wish is not None and wish.wish.dry_run:
            facts.append(_judgement(situation, wish, answer))
            continue
        facts.append(answer)
        match answer:  # the next wish is answered as if this one had been folded
            case ev.NodeCordoned():
                cordons[answer.node_id] = NodeState.CORDONED
            case ev.NodeDraining():
                cordons[answer.node_id] = NodeState.DRAINING
            case ev.NodeUncordoned():
                cordons[answer.node_id] = None
            case ev.ControlPlaneThawed():
                situation.is_frozen = False
            case ev.FaultCleared():
                situation.cleared.add(answer.fault_id)
            case ev.LegalHoldPlaced() | ev.LegalHoldReleased():
                holds.evolve(situation.holds, answer)
            case _:
                pass
    return facts


def _answer(asked: AskedWish, situation: Situation, now: int) -> ev.Fact:
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
    if isinstance(event, ev.ControlPlaneThawRequested):
        return _thawed(asked, event, situation)
    if isinstance(event, ev.RateCardChangeRequested):
        return _charged(asked, event, now)
    if isinstance(event, ev.LogSealRequested):
        return _sealed(asked, event, now)
    if isinstance(event, ev.LegalHoldRequested):
        return _held(asked, event)
    if isinstance(event, ev.LegalHoldReleaseRequested):
        return _hold_released(asked, event, situation.holds)
    if isinstance(event, ev.PayloadEraseRequested):
        return _erased(asked, event, situation)
    if isinstance(event, ev.LogRetentionChangeRequested):
        return ev.LogRetentionChanged(
            payload_days=event.payload_days,
            seal_daily=event.seal_daily,
            actor=asked.actor or asked.tenant,
            reason=event.reason,
            answers=asked.seq,
            caused_by=asked.event_id,
        )
    if isinstance(event, ev.KeyChangeRequested):
        return ev.KeyChanged(
            change=event.change,
            role=event.role,
            of=event.of,
            public=event.public,
            actor=asked.actor or asked.tenant,
            reason=event.reason,
            answers=asked.seq,
            caused_by=asked.event_id,
        )
    if isinstance(event, ev.IsolationTestRequested):
        return _isolation_test(asked, event, situation.pool)
    if isinstance(event, ev.FaultInjectionRequested):
        return _fault(asked, event, situation, now)
    if isinstance(event, ev.FaultClearRequested):
        return _fault_cleared(asked, event, situation)
    if isinstance(event, ev.AlertAcknowledgeRequested | ev.AlertSilenceRequested):
        return _of_alert(asked, event, situation, now)
    return _of_node(asked, event, situation.cordons, now)


def _thawed(asked: AskedWish, event: ev.ControlPlaneThawRequested, situation: Situation) -> ev.Fact:
    if not situation.is_frozen:
        return _rejected(asked, Refusal.POOL_STATE, expected="a frozen control plane", found="one that goes on")
    return ev.ControlPlaneThawed(
        silent=len(situation.silent),
        nodes=situation.watched,
        why=Thaw.ASKED,
        presumed_lost=situation.silent,
        frozen_ms=situation.frozen_ms,
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _fault(asked: AskedWish, event: ev.FaultInjectionRequested, situation: Situation, now: int) -> ev.Fact:
    no = refused(situation.faults, situation.pool, event)
    if no is not None:
        return _rejected(asked, no.code, field=no.field, expected=no.expected, found=no.found)
    return ev.FaultInjected(
        fault_id=f"fault-{asked.seq}",
        kind=event.kind,
        target=event.target,
        for_s=event.for_s,
        until_at=now + event.for_s * NS_PER_S,
        seed=event.seed,
        xid=event.xid,
        allow_real=event.allow_real,
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _fault_cleared(asked: AskedWish, event: ev.FaultClearRequested, situation: Situation) -> ev.Fact:
    fault = situation.faults.active.get(event.fault_id)
    if fault is None or event.fault_id in situation.cleared:
        return _rejected(
            asked, Refusal.FAULT_NOT_FOUND, field="fault_id", expected="a fault in force", found=event.fault_id
        )
    return ev.FaultCleared(
        fault_id=event.fault_id,
        kind=fault.kind,
        target=fault.target,
        why=FaultEnd.ASKED,
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _of_alert(
    asked: AskedWish,
    event: ev.AlertAcknowledgeRequested | ev.AlertSilenceRequested,
    situation: Situation,
    now: int,
) -> ev.Fact:
    if event.rule not in {rule.name for rule in situation.rules}:
        rules = ", ".join(rule.name for rule in situation.rules)
        return _rejected(asked, Refusal.ALERT_NOT_FOUND, field="rule", expected=f"one of {rules}", found=event.rule)
    key = key_of(event.rule, event.about)
    until_at = now + event.for_s * NS_PER_S
    actor = asked.actor or asked.tenant
    match event:
        case ev.AlertAcknowledgeRequested():
            if key not in situation.alerts.firing:
                return _rejected(
                    asked, Refusal.ALERT_NOT_FOUND, field="about", expected="an alert that is firing", found=key
                )
            return ev.AlertAcknowledged(
                rule=event.rule,
                about=event.about,
                until_at=until_at,
                actor=actor,
                reason=event.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        case ev.AlertSilenceRequested():
            return ev.AlertSilenced(
                rule=event.rule,
                about=event.about,
                until_at=until_at,
                actor=actor,
                reason=event.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )


def _sealed(asked: AskedWish, event: ev.LogSealRequested, now: int) -> ev.Fact:
    before_at = now
    if event.before is not None:
        try:
            before_at = instant_from_timestamp(event.before)
        except ValueError:
            return _no_instant(asked, "before", event.before)
    # Days begin at midnight in UTC; the one that goes on is sealed by nobody.
    return ev.LogSealOrdered(
        before_at=min(before_at, now) // NS_PER_DAY * NS_PER_DAY,
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _held(asked: AskedWish, event: ev.LegalHoldRequested) -> ev.Fact:
    if event.job_id is not None and "/" not in event.job_id:
        return _without_tenant(asked, event.job_id)
    if event.job_id is not None and event.tenant not in {None, tenant_of_job(JobId(event.job_id))}:
        return _rejected(
            asked,
            Refusal.FIELD_CONFLICT,
            field="tenant",
            expected="none beside a job, or the job's",
            found=event.tenant or "",
        )
    at = {"since": 0, "until": 0}
    for field in at:
        text = getattr(event, field)
        if text is not None:
            try:
                at[field] = instant_from_timestamp(text)
            except ValueError:
                return _no_instant(asked, field, text)
    if at["until"] and at["until"] <= at["since"]:
        return _rejected(
            asked,
            Refusal.FIELD_CONFLICT,
            field="until",
            expected="an instant after since",
            found=event.until or "",
        )
    return ev.LegalHoldPlaced(
        hold_id=f"hold-{asked.seq}",
        tenant=event.tenant,
        job_id=None if event.job_id is None else JobId(event.job_id),
        since_at=at["since"],
        until_at=at["until"],
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _hold_released(asked: AskedWish, event: ev.LegalHoldReleaseRequested, held: Holds) -> ev.Fact:
    if event.hold_id not in held.active:
        return _rejected(
            asked, Refusal.HOLD_NOT_FOUND, field="hold_id", expected="a hold in force", found=event.hold_id
        )
    return ev.LegalHoldReleased(
        hold_id=event.hold_id,
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _erased(asked: AskedWish, event: ev.PayloadEraseRequested, situation: Situation) -> ev.Fact:
    if "/" not in event.job_id:
        return _without_tenant(asked, event.job_id)
    job_id = JobId(event.job_id)
    live = situation.pool.jobs.get(job_id)
    if live is not None and live.state is not JobState.ENDED:
        return _rejected(
            asked, Refusal.JOB_STATE, field="job_id", expected="a job that has ended", found=str(live.state)
        )
    held_by = keeping(situation.holds, tenant=tenant_of_job(job_id), job_id=job_id, recorded_at=event.recorded_at)
    if held_by:
        return _rejected(
            asked, Refusal.LEGAL_HOLD, field="job_id", expected="a row that no hold keeps", found=", ".join(held_by[:8])
        )
    return ev.PayloadEraseOrdered(
        stream=event.stream,
        stream_seq=event.seq,
        job_id=job_id,
        recorded_at=event.recorded_at,
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _without_tenant(asked: AskedWish, found: str) -> ev.Fact:
    return _rejected(
        asked, Refusal.FIELD_INVALID, field="job_id", expected="<tenant>/<name>, such as acme/train-7", found=found
    )


def _no_instant(asked: AskedWish, field: str, found: str) -> ev.Fact:
    return _rejected(
        asked,
        Refusal.FIELD_INVALID,
        field=field,
        expected="an instant in RFC 3339, such as 2026-09-01T12:00:00Z",
        found=found,
    )


def _charged(asked: AskedWish, event: ev.RateCardChangeRequested, now: int) -> ev.Fact:
    effective_at = now
    if event.effective_at is not None:
        try:
            effective_at = instant_from_timestamp(event.effective_at)
        except ValueError:
            return _no_instant(asked, "effective_at", event.effective_at)
    known: set[tuple[str, str, str]] = set()
    for number, rate in enumerate(event.rates):
        field = f"rates[{number}]"
        if (rate.pricing is Pricing.RESERVED) != bool(rate.queues):
            return _rejected(
                asked,
                Refusal.FIELD_CONFLICT,
                field=f"{field}.queues",
                expected="queues with a reserved rate, and with no other",
                found=f"{len(rate.queues)} with {rate.pricing}",
            )
        for queue in rate.queues or ("",):
            kind = (rate.pricing.value, rate.model or "", queue)
            if kind in known:
                return _rejected(
                    asked,
                    Refusal.FIELD_CONFLICT,
                    field=field,
                    expected="one rate for each pricing, model and queue",
                    found=" ".join(part for part in kind if part),
                )
            known.add(kind)
    return ev.RateCardChanged(
        effective_at=effective_at,
        currency=event.currency,
        rates=event.rates,
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _isolation_test(asked: AskedWish, event: ev.IsolationTestRequested, pool: Pool) -> ev.Fact:
    node = pool.nodes.get(NodeId(event.node_id))
    if node is None:
        return _rejected(asked, Refusal.NODE_NOT_FOUND, field="node_id", expected="a known node", found=event.node_id)
    if node.state in {NodeState.SUSPECTED, NodeState.FENCED}:
        return _rejected(
            asked, Refusal.NODE_STATE, field="node_id", expected="a node that speaks", found=str(node.state)
        )
    views = [view for view in node.devices.values() if event.device_uuid in {None, view.device.uuid}]
    if not views:
        known = ", ".join(sorted(node.devices)) or "none"
        return _rejected(
            asked,
            Refusal.NO_MATCHING_DEVICE,
            field="device_uuid",
            expected=f"one of {known}",
            found=event.device_uuid or "",
        )
    fit = [view for view in views if event.mode is None or event.mode in view.device.modes]
    if not fit:
        offered = ", ".join(sorted({str(mode) for view in views for mode in view.device.modes}))
        return _rejected(
            asked, Refusal.ISOLATION_UNAVAILABLE, field="mode", expected=f"one of {offered}", found=str(event.mode)
        )
    fit = [view for view in fit if view.device.health is DeviceHealth.HEALTHY]
    if not fit:
        return _rejected(asked, Refusal.NODE_STATE, field="device_uuid", expected="a healthy device", found="none")
    view = min(fit, key=lambda one: (len(one.runs), one.device.index, one.device.uuid))
    modes = view.device.modes
    return ev.IsolationTestStarted(
        test_id=f"isolation-{asked.seq}",
        node_id=node.node_id,
        device_uuid=view.device.uuid,
        mode=event.mode or next((mode for mode in (Mode.MIG, Mode.MPS) if mode in modes), modes[-1]),
        actor=asked.actor or asked.tenant,
        reason=event.reason,
        answers=asked.seq,
        caused_by=asked.event_id,
    )


def _of_node(
    asked: AskedWish,
    event: ev.NodeDrainRequested | ev.NodeCordonRequested | ev.NodeUncordonRequested,
    cordons: dict[NodeId, NodeState | None],
    now: int,
) -> ev.Fact:
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


def _judgement(situation: Situation, asked: AskedWish, answer: ev.Fact) -> ev.NodeWishJudged:
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
            runs = tuple(sorted(_to_stop(situation.pool, node_id)))
            count = "1 run is" if len(runs) == 1 else f"{len(runs)} runs are"
            would = (
                "Nothing new is placed on it.",
                f"{count} told to stop; their jobs wait for slices elsewhere, and no retry is spent.",
            )
            return replace(judged, node_id=node_id, would=would, runs=runs[:RUNS_NAMED_MAX])
        case ev.NodeCordoned(node_id=node_id):
            said = "Nothing new is placed on it; what runs there, runs on."
            if situation.cordons[node_id] is NodeState.CORDONED:
                said = "Nothing changes: it is cordoned already."
            return replace(judged, node_id=node_id, would=(said,))
        case ev.NodeUncordoned(node_id=node_id):
            node = situation.pool.nodes[node_id]
            said = "It is used again."
            if node.state in {NodeState.SUSPECTED, NodeState.FENCED}:
                said = f"It is used again once it isn't {node.state} any more."
            return replace(judged, node_id=node_id, would=(said,))
        case ev.RateCardChanged():
            count = f"{len(answer.rates)} rates in {answer.currency} count"
            return replace(judged, would=(f"{count} from {answer.effective_at} (ns since the Unix epoch) on.",))
        case ev.IsolationTestStarted(node_id=node_id):
            busy = len(situation.pool.nodes[node_id].devices[answer.device_uuid].runs)
            said = f"{answer.device_uuid} is tried in mode {answer.mode}, and takes no new run until that is over."
            waits = f"It begins once the device's runs, {busy} now, have ended." if busy else "It begins at once."
            return replace(judged, node_id=node_id, would=(said, waits))
        case ev.FaultInjected():
            said = f"{answer.kind} {answer.target}".rstrip()
            return replace(judged, would=(f"{said} for {answer.for_s} s, and it is cleared by itself.",))
        case ev.FaultCleared():
            return replace(judged, would=(f"{answer.fault_id} ends before its time.",))
        case ev.LogSealOrdered():
            said = f"Days of the log before {answer.before_at} (ns since the Unix epoch) become sealed segments."
            return replace(judged, would=(said,))
        case ev.LegalHoldPlaced():
            return replace(judged, would=("Nothing that it covers is erased or dropped until it is released.",))
        case ev.LegalHoldReleased():
            return replace(judged, would=(f"{answer.hold_id} keeps nothing any more.",))
        case ev.PayloadEraseOrdered():
            said = f"The payload of {answer.stream} {answer.stream_seq} is gone from the log, and its digest stays."
            return replace(judged, would=(said, "Nobody can bring it back."))
        case ev.LogRetentionChanged():
            days = f"{answer.payload_days} days after its end" if answer.payload_days else "for ever"
            sealed = "by itself, each once it has ended" if answer.seal_daily else "only when somebody asks"
            would = (f"Days of the log are sealed {sealed}.", f"What a job said is kept {days}.")
            return replace(
                judged, would=(*would, "What is erased nobody can bring back.") if answer.payload_days else would
            )
        case ev.KeyChanged():
            who = f"{answer.role}-{answer.of}" if answer.of else answer.role
            return replace(judged, would=(f"It is recorded that a key of {who} is {answer.change.value.lower()}.",))
        case ev.AlertAcknowledged() | ev.AlertSilenced():
            what = "Nobody is told of it" if isinstance(answer, ev.AlertSilenced) else "It counts as seen"
            return replace(judged, would=(f"{what} until {answer.until_at} (ns since the Unix epoch).",))
        case ev.ControlPlaneThawed():
            lost = ", ".join(answer.presumed_lost) or "none"
            return replace(judged, would=(f"Placing goes on. Fenced once their lease has ended: {lost}.",))
        case _:
            raise AssertionError(f"no answer to a wish of an operator: {answer!r}")


def _to_stop(pool: Pool, node_id: NodeId) -> Iterator[RunId]:
    """Runs on the node that a drain would stop."""
    for run_id in pool.nodes[node_id].runs:
        run = run_of(pool, run_id)
        if run is not None and run.stop is None and run.state in {RunState.PLACED, RunState.STARTED}:
            yield run_id


def _rejected(asked: AskedWish, code: Refusal, *, field: str = "", expected: str = "", found: str = "") -> ev.Fact:
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
        note=NOTES.get(asked.ingress, ""),
        caused_by=asked.event_id,
    )


_MESSAGES: Final = {
    Refusal.NOT_PERMITTED: "only operators ask this",
    Refusal.EXPIRED: "the wish came too late to be done",
    Refusal.NODE_NOT_FOUND: "no node of this name has registered: `apportion nodes` lists them",
    Refusal.NO_MATCHING_DEVICE: "the node has no such device",
    Refusal.ISOLATION_UNAVAILABLE: "no device that could be tried offers the mode",
    Refusal.NODE_STATE: "the node is not in a state in which this can be done",
    Refusal.FIELD_INVALID: "the wish can't be done as it is written",
    Refusal.FIELD_CONFLICT: "the wish contradicts itself",
    Refusal.ALERT_NOT_FOUND: "no such alert: `apportion alerts ls` lists them",
    Refusal.FAULT_NOT_FOUND: "no such fault: `apportion fault ls` lists them",
    Refusal.HOLD_NOT_FOUND: "no such hold: `apportion log holds` lists them",
    Refusal.LEGAL_HOLD: "a legal hold keeps it: `apportion log holds` says whose, `apportion log release` lifts one",
    Refusal.JOB_STATE: "the job is not in a state in which this can be done",
    Refusal.FAULTS_OFF: "faults are off in this pool: start it with `up --faults`, or set `faults = true` in [common]",
    Refusal.REAL_DEVICES: "faults keep away from real devices unless `--allow-real` says otherwise",
    Refusal.POOL_STATE: "the pool is not in a state in which this can be done",
}
