"""Which slices, on which devices? The placer's rules: pure, so that the log alone reaches the same decision.

It states three facts: where a run goes, that a run shall stop, and why a job waits. What may be asked at all, and when
a job is over, is admission's; what happens on a node is its agent's.
"""

import hashlib
from itertools import islice
from typing import Final

import msgspec

from apportion.contracts import events as ev
from apportion.contracts.causes import RunAction, StopCause
from apportion.contracts.envelope import Entry
from apportion.placer import fair, lowered, orders, reclaim
from apportion.placer import state as states
from apportion.placer.bookings import next_end
from apportion.placer.evictions import next_chance
from apportion.placer.orders import S
from apportion.placer.policies import BUILT_IN, PolicyUnknown, policy_id, resolved
from apportion.placer.prices import price_set
from apportion.placer.reasons import Reason, changes
from apportion.placer.reservations import next_due
from apportion.placer.rounds import FACTS_MAX, Round
from apportion.placer.state import (
    ENDING,
    Kept,
    Settings,
    State,
    action_due,
    is_draining,
    is_late,
    must_stop,
    state_of,
)
from apportion.pool.state import JobView, Pool, grace_s_of, run_of

RULES: Final = "placer@10"
"""Changes whenever a decision may come out another way for the same facts."""


ORDERS: Final = (orders.VERSION, fair.VERSION, reclaim.VERSION)
"""The orders that a pool or a queue can be set to, how turns are taken between queues, and what they take back."""


def rules_id() -> str:
    """Name, version and digest of everything built in that decides: rules, their settings, orders, and all policies."""
    names = ",".join(Settings.__struct_fields__)
    said = f"{RULES};{names};{','.join((*ORDERS, *map(policy_id, BUILT_IN)))}"
    return f"{RULES}#{hashlib.sha256(said.encode()).hexdigest()[:12]}"


POLICY: Final = rules_id()
"""What a session states in its LeaseClaimed and in each basis. Which policy placed a run, RunPlaced says itself."""


def initial() -> State:
    """Nothing is known yet."""
    return State(Kept(pool=Pool()))


def evolve(state: State, entry: Entry) -> State:
    """The state after this entry, changed in place."""
    return states.evolve(state, entry)


def position(state: State) -> tuple[int, int]:
    """Sequences of the last fact and the last wish folded."""
    return state.pool.seq, state.kept.wishes


def decide(state: State, now: int) -> list[ev.Fact]:
    """Which runs stop, which jobs go where, and why the others wait: one batch, the most urgent first."""
    return decided(state, now)


def decided(state: State, now: int, *, is_memo_used: bool = True) -> list[ev.Fact]:
    """As ``decide``; without the memo it looks at every node anew, and says the same."""
    facts = [*_stops(state, now), *_actions(state)][:FACTS_MAX]
    if len(facts) >= FACTS_MAX:
        return facts
    if not facts and (too_many := lowered.stops(state, now, FACTS_MAX)):
        # Nobody else is told to stop in one batch with them: who it may be depends on who goes already.
        return [*too_many]
    round_ = Round(state, now, FACTS_MAX - len(facts), is_memo_used=is_memo_used)
    round_.run()
    facts.extend(round_.facts)
    if len(facts) < FACTS_MAX and (price := price_set(round_, facts)) is not None:
        facts.append(price)
    facts.extend(_waits(round_, FACTS_MAX - len(facts)))
    return facts


def cannot_decide(state: State) -> str | None:
    """Why this installation can't make the state's decisions: a policy that it was set to isn't here. None: it can."""
    try:
        for wanted in (state.settings.policy, *state.named_policies()):
            resolved(wanted)
    except PolicyUnknown as err:
        return str(err)
    return None


def wake_at(state: State, now: int) -> int | None:
    """When time alone may change what is decided.

    A job may start that asked not to start before, one may be stopped for others, nodes may be kept for another one.
    """
    instants = []
    for at, _ in state.delayed:
        if at > now:
            instants.append(at)
            break
    # The first of each line is the one that nodes may be kept for.
    firsts = (state.pool.jobs[group.keys[0][3]] for group in state.groups.values())
    chances = (
        next_end(state.pool, now),
        next_chance(state, now),
        lowered.next_chance(state, now),
        next_due(firsts, state.settings.reserve_after_s, now),
    )
    instants += [chance for chance in chances if chance is not None]
    return min(instants, default=None)


def snapshot(state: State) -> bytes:
    """What ``restore`` needs; equal for equal states."""
    return msgspec.msgpack.encode(state.kept, order="deterministic")


def restore(data: bytes) -> State:
    """The state of a snapshot, its indexes built anew."""
    return state_of(msgspec.msgpack.decode(data, type=Kept))


def _stops(state: State, now: int) -> list[ev.Fact]:
    pool = state.pool
    stops: list[ev.Fact] = []
    for run_id in sorted(state.stops):
        run = run_of(pool, run_id)
        if run is None:
            continue
        job = pool.jobs[run.job_id]
        assert must_stop(pool, job, run)
        if job.state in ENDING:
            stops.append(
                ev.RunStopOrdered(
                    caused_by=job.last_event,
                    run_id=run_id,
                    node_id=run.node_id,
                    cause=job.stop or StopCause.CANCELLED,
                    grace_s=grace_s_of(job.spec, job.stop or StopCause.CANCELLED),
                    actor=job.stop_actor or "service:placer",
                    reason=job.stop_reason or ("" if job.stop else "the job had ended when this was placed"),
                )
            )
        elif is_late(job, run):
            stops.append(
                ev.RunStopOrdered(
                    caused_by=job.last_event,
                    run_id=run_id,
                    node_id=run.node_id,
                    cause=StopCause.SHRUNK,
                    grace_s=job.spec.grace_s,
                    actor="service:placer",
                    reason="the attempt had ended when this was added to it",
                )
            )
        elif is_draining(pool, run.node_id):
            drain = state.kept.drains[run.node_id]
            left = max(0, pool.nodes[run.node_id].drain_deadline_at - now) // S
            stops.append(
                ev.RunStopOrdered(
                    caused_by=drain.event_id,
                    run_id=run_id,
                    node_id=run.node_id,
                    cause=StopCause.DRAINED,
                    grace_s=min(grace_s_of(job.spec, StopCause.DRAINED), left),
                    actor=drain.actor,
                    reason=drain.reason,
                )
            )
    return stops


def _actions(state: State) -> list[ev.Fact]:
    """What is asked of runs that go on, one thing at a time."""
    pool = state.pool
    asked: list[ev.Fact] = []
    for run_id in sorted(state.actions):
        run = run_of(pool, run_id)
        if run is None:
            continue
        job = pool.jobs[run.job_id]
        action = action_due(job, run)
        assert action is not None
        match action:
            case RunAction.SUSPEND:
                why: ev.JobSuspended | ev.JobResumed | ev.JobCheckpointing | None = job.suspend
            case RunAction.RESUME:
                why = job.resumed
            case RunAction.CHECKPOINT:
                why = job.checkpoint
        asked.append(
            ev.RunActionOrdered(
                caused_by=job.last_event,
                run_id=run_id,
                node_id=run.node_id,
                action=action,
                actor="service:placer" if why is None else why.actor,
                reason="" if why is None else why.reason,
            )
        )
    return asked


def _waits(round_: Round, room_for: int) -> list[ev.JobPendingReasonChanged]:
    """What is new of those who wait, as far as the batch has room."""
    if round_.is_full or room_for <= 0:
        return []
    return [_wait(job, reason, round_.now) for job, reason in islice(changes(round_), room_for)]


def _wait(job: JobView, reason: Reason, now: int) -> ev.JobPendingReasonChanged:
    told = job.pending_fact
    return ev.JobPendingReasonChanged(
        caused_by=job.last_event,
        job_id=job.job_id,
        code=reason.code,
        requested=reason.requested,
        available=reason.available,
        limit=reason.limit,
        blocking_ids=reason.blocking_ids,
        nodes=reason.nodes,
        since_at=now if told is None or told.code is not reason.code else told.since_at,
        hint=reason.hint,
        start_low_at=reason.start_low_at,
        start_high_at=reason.start_high_at,
    )
