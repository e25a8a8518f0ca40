"""How a job goes on and how it ends: from its runs and the time to the next fact about it.

::

    queued ── deadline ─────────────────────────────► JobExpired
        │ ─── a job that it follows ended otherwise ─► JobFailed(DependencyFailed)
        └ ─── longer than it said it could ──────────► JobWaitExceeded, and it waits on
    running ─ every run ended well, and released ───► JobSucceeded
        │ ─── a run ended otherwise while others live ► JobStopping(GangBroken)
        │ ─── deadline, time limit ─────────────────► JobStopping(Deadline, TimeLimit)
        │ ─── it has another size than its runs ────► JobStopping(Resized)
    running, stopping ─ every run released or lost ─► JobCancelled | JobExpired | JobRequeued | JobFailed

Looks at one job at a time, and answers no wishes: a cancellation or preemption comes in as JobStopping.
"""

from collections.abc import Mapping
from typing import Final

from apportion.contracts import events as ev
from apportion.contracts.causes import SPENDS_NO_RETRY, RunCause, StopCause
from apportion.contracts.ids import JobId, NodeId, replica_of_run
from apportion.contracts.units import ms_from_ns, ns_from_s
from apportion.pool import quota
from apportion.pool.state import JobState, JobView, NodeState, Pool, RunState, RunView

ACTOR: Final = "service:admission"
BACKOFF_S_MAX: Final = 300
"""Longest pause between attempts, save where the job itself asks for more."""

_LIVE: Final = frozenset({RunState.PLACED, RunState.STARTED})
_SETTLED: Final = frozenset({RunState.RELEASED, RunState.LOST})
_MOVES_AT_ONCE: Final = frozenset(
    {RunCause.NODE_LOST, RunCause.PREEMPTED, RunCause.DRAINED, RunCause.GANG_BROKEN, RunCause.STALE},
)
"""Free ends after which waiting helps nobody: what ended the run, the placer knows as well."""
_SAYS_NOTHING_OF_NODE: Final = frozenset(
    {RunCause.SUCCESS, RunCause.CANCELLED, RunCause.PREEMPTED, RunCause.GANG_BROKEN, RunCause.STALE},
)
"""Ends for which another node would have been no better."""
_OUT_OF_MEMORY: Final = frozenset({RunCause.OUT_OF_MEMORY, RunCause.QUOTA_EXCEEDED})
_ENDED_AS: Final[Mapping[ev.DependencyCondition, str]] = {
    ev.DependencyCondition.SUCCEEDED: "succeeded",
    ev.DependencyCondition.FAILED: "failed",
    ev.DependencyCondition.ENDED: "ended",
}
AVOIDED_MAX: Final = 64
"""Nodes that a job avoids at most: those that it met first are forgiven first."""


def is_settled(job: JobView) -> bool:
    """True where nothing of the present attempt holds anything: every replica's run is released or lost."""
    count = 0
    for run in job.current_runs():
        if run.state not in _SETTLED:
            return False
        count += 1
    return count >= job.spec.replicas_least


def has_live_runs(job: JobView) -> bool:
    """True where a run of the present attempt is placed or started."""
    return any(run.state in _LIVE for run in job.current_runs())


def holds_nothing(job: JobView) -> bool:
    """True where the job can end without anything being stopped."""
    return all(run.state in _SETTLED for run in job.current_runs())


def _failed(run: RunView) -> bool:
    # Whoever was to leave an elastic gang is none of it, however it ended.
    return run.state not in _LIVE and run.cause is not RunCause.SUCCESS and run.stop is not StopCause.SHRUNK


def is_due_now(job: JobView) -> bool:
    """True where the job's runs alone call for a fact, whatever the time."""
    match job.state:
        case JobState.RUNNING:
            is_broken = job.resize is not None or any(_failed(run) for run in job.current_runs())
            return is_settled(job) or (is_broken and has_live_runs(job))
        case JobState.STOPPING:
            return is_settled(job)
        case JobState.QUEUED:
            return job.unmet is not None
        case JobState.ENDED:
            return False


def next_instant(job: JobView) -> int:
    """When the job calls for a fact unless something happens before; 0 for never."""
    spec = job.spec
    deadline_at = spec.deadline_at
    if not deadline_at and not spec.time_limit_s and not spec.max_wait_s:
        return 0
    match job.state:
        case JobState.QUEUED:
            return min((at for at in (deadline_at, _patience_at(job)) if at), default=0)
        case JobState.RUNNING if has_live_runs(job):
            limits = (deadline_at, _limit_at(job))
            return min((at for at in limits if at), default=0)
        case _:
            return 0


def _limit_at(job: JobView) -> int:
    if not job.spec.time_limit_s or not job.first_started_at:
        return 0
    return job.first_started_at + ns_from_s(job.spec.time_limit_s)


def _waits_since(job: JobView) -> int:
    return max(job.queued_at, job.not_before_at)


def _patience_at(job: JobView) -> int:
    """When the job will have waited as long as it said it could; 0 where it said nothing, or can't be placed anyway."""
    if not job.spec.max_wait_s or job.wait_exceeded == job.attempt or job.hold is not None or job.waits_for:
        return 0
    return _waits_since(job) + ns_from_s(job.spec.max_wait_s)


def next_fact(job: JobView, now: int, requested_at: int, pool: Pool) -> ev.Fact | None:
    """What follows for the job; None where it goes on as it does.

    ``requested_at`` is when its wish was recorded; ``pool`` says what nodes and devices there are for another attempt.
    """
    deadline_at = job.spec.deadline_at
    is_past_deadline = bool(deadline_at) and deadline_at <= now
    match job.state:
        case JobState.ENDED:
            return None
        case JobState.QUEUED:
            if job.unmet is not None:
                return _unmet(job, job.unmet)
            if is_past_deadline:
                return _expired(job)
            patience_at = _patience_at(job)
            return _waited_too_long(job) if patience_at and patience_at <= now else None
        case JobState.RUNNING:
            if is_settled(job):
                return _settled(job, now, requested_at, pool)
            if not has_live_runs(job):
                return None  # all have ended: what is left is to release them
            broken = _deciding(job)
            if broken is not None:
                return _stopping(job, StopCause.GANG_BROKEN, _said_of(broken), broken.last_event)
            if is_past_deadline:
                return _stopping(job, StopCause.DEADLINE, f"its deadline {deadline_at} passed", job.last_event)
            limit_at = _limit_at(job)
            if limit_at and limit_at <= now:
                ran_s = (now - job.first_started_at) // 1_000_000_000
                reason = f"ran for {ran_s} s, its limit is {job.spec.time_limit_s} s"
                return _stopping(job, StopCause.TIME_LIMIT, reason, job.last_event)
            if (resize := job.resize) is not None:
                return ev.JobStopping(
                    job_id=job.job_id,
                    attempt=job.attempt,
                    cause=StopCause.RESIZED,
                    actor=resize.actor,
                    reason=resize.reason,
                    caused_by=job.last_event,
                )
            return None
        case JobState.STOPPING:
            return _settled(job, now, requested_at, pool) if is_settled(job) else None


def _expired(job: JobView) -> ev.JobExpired:
    return ev.JobExpired(job_id=job.job_id, deadline_at=job.spec.deadline_at, caused_by=job.last_event)


def _waited_too_long(job: JobView) -> ev.JobWaitExceeded:
    return ev.JobWaitExceeded(
        job_id=job.job_id,
        attempt=job.attempt,
        max_wait_s=job.spec.max_wait_s,
        since_at=_waits_since(job),
        caused_by=job.last_event,
    )


def _unmet(job: JobView, other: JobId) -> ev.JobFailed:
    wanted = next(each.condition for each in job.spec.depends_on if each.job_id == other)
    return ev.JobFailed(
        job_id=job.job_id,
        attempts=0,
        cause=RunCause.DEPENDENCY_FAILED,
        reason=f"it was to run once {other} has {_ENDED_AS[wanted]}, which ended otherwise",
        caused_by=job.last_event,
    )


def _stopping(job: JobView, cause: StopCause, reason: str, caused_by: str) -> ev.JobStopping:
    return ev.JobStopping(
        job_id=job.job_id, attempt=job.attempt, cause=cause, actor=ACTOR, reason=reason, caused_by=caused_by
    )


def _said_of(run: RunView) -> str:
    how = ""
    if run.exit_code is not None:
        how = f" (exit code {run.exit_code})"
    elif run.signal is not None:
        how = f" (signal {run.signal})"
    return f"replica {replica_of_run(run.run_id)} ended on {run.node_id}: {run.cause or RunCause.UNKNOWN}{how}"


def _settled(job: JobView, now: int, requested_at: int, pool: Pool) -> ev.Fact:
    """What follows once nothing of the attempt is left."""
    decider = _deciding(job)
    if job.stop is StopCause.DEADLINE:
        return _expired(job)  # whatever it did after its deadline came too late
    if decider is None:
        return _succeeded(job, requested_at)
    if job.stop is StopCause.CANCELLED or not job.stop_requeue:
        return ev.JobCancelled(
            job_id=job.job_id, actor=job.stop_actor, reason=job.stop_reason, caused_by=decider.last_event
        )
    cause = decider.cause or RunCause.UNKNOWN
    if job.stop is StopCause.TIME_LIMIT and cause not in SPENDS_NO_RETRY:
        cause = RunCause.TIME_LIMIT
    left = max(0, job.spec.retry_limit - job.retries_used)
    is_free = cause in SPENDS_NO_RETRY
    if not is_free and not (left and _may_retry(job, cause)):
        return ev.JobFailed(
            job_id=job.job_id,
            attempts=job.attempt,
            cause=cause,
            exit_code=decider.exit_code,
            signal=decider.signal,
            run_id=decider.run_id,
            caused_by=decider.last_event,
        )
    if job.spec.deadline_at and job.spec.deadline_at <= now:
        return _expired(job)
    pause_s = _pause_s(job, cause)
    memory_mib = _more_memory(job, cause, pool)
    return ev.JobRequeued(
        job_id=job.job_id,
        attempt=job.attempt + 1,
        cause=cause,
        not_before_at=now + ns_from_s(pause_s) if pause_s else 0,
        retries_left=left if is_free else left - 1,
        avoid_nodes=_avoided(job, pool),
        memory_mib=memory_mib,
        memory_mib_before=job.spec.memory_mib if memory_mib else 0,
        caused_by=decider.last_event,
    )


def _may_retry(job: JobView, cause: RunCause) -> bool:
    # Without a list, whatever went wrong is tried again, save the limit that the job set itself: it would only reach
    # it once more.
    return cause in job.spec.retry_on if job.spec.retry_on else cause is not RunCause.TIME_LIMIT


def _avoided(job: JobView, pool: Pool) -> tuple[NodeId, ...]:
    """Nodes on which nothing of the job is placed any more, in the order in which it failed there."""
    if not job.spec.avoid_same_node:
        return ()
    failed = sorted(
        {run.node_id for run in job.current_runs() if run.cause not in _SAYS_NOTHING_OF_NODE and not run.stop}
        - set(job.avoid_nodes)
    )
    avoided = (*job.avoid_nodes, *failed)[-AVOIDED_MAX:]
    # Where the others could never host it, meeting one again is better than never running.
    return avoided if _could_host(job.spec, pool, set(avoided)) else ()


def _could_host(spec: ev.JobSpec, pool: Pool, avoided: set[NodeId]) -> bool:
    """True where the other nodes have room for the whole job when empty, each replica with devices of its own."""
    room = 0
    for node_id, node in pool.nodes.items():
        if node_id in avoided or node.state is NodeState.FENCED:
            continue
        counts = [spec.replicas_least]
        if spec.devices:
            matching = sum(
                1
                for view in node.devices.values()
                if view.device.memory_mib >= spec.memory_mib and (not spec.models or view.device.model in spec.models)
            )
            counts.append(matching // spec.devices)
        if spec.cpu_milli:
            counts.append(node.cpu_milli // spec.cpu_milli)
        if spec.host_memory_mib:
            counts.append(node.memory_mib // spec.host_memory_mib)
        room += min(counts)
    return room >= spec.replicas_least


def _more_memory(job: JobView, cause: RunCause, pool: Pool) -> int:
    """MiB of each device for the next attempt, where the last ran out of them; 0 where they stay as they are.

    At most what any device of an accepted model has, and what its queues and its tenant may ever hold: more could never
    be placed.
    """
    spec = job.spec
    if cause not in _OUT_OF_MEMORY or not spec.memory_mib or spec.memory_factor_pct <= 100:
        return 0
    wanted = -(-spec.memory_mib * spec.memory_factor_pct // 100)
    there_is = max(
        (
            view.device.memory_mib
            for node in pool.nodes.values()
            for view in node.devices.values()
            if not spec.models or view.device.model in spec.models
        ),
        default=spec.memory_mib,
    )
    bounds = [queue.limits for queue in quota.lineage(pool.queues, spec.queue)]
    if (tenant := pool.tenants.get(job.tenant)) is not None:
        bounds.append(tenant.limits)
    for limits in bounds:
        if quota.MEMORY in limits:
            there_is = min(there_is, limits[quota.MEMORY] // (spec.devices * spec.replicas_least))
    raised = min(wanted, there_is)
    return raised if raised > spec.memory_mib else 0


def _pause_s(job: JobView, cause: RunCause) -> int:
    """Seconds until the next attempt may be placed: doubled with each one of its sort."""
    if cause in _MOVES_AT_ONCE:
        return 0
    base_s, times = job.spec.backoff_s, job.retries_used
    if cause in SPENDS_NO_RETRY:
        # Nothing bounds how often these happen, so even a job that asked for no pause gets one: a device whose slices
        # can't be set would otherwise start and refuse it as fast as events travel.
        base_s, times = max(1, base_s), job.attempt - 1 - job.retries_used
    return min(max(BACKOFF_S_MAX, base_s), base_s << min(times, 20))


def _deciding(job: JobView) -> RunView | None:
    """The run whose end decides what the attempt came to; None where all that ended did so well.

    What was nobody's fault goes first, since a lost node makes its neighbours' processes fail as well. A replica
    that was stopped because its gang broke says nothing by itself, and comes last.
    """
    return min((run for run in job.current_runs() if _failed(run)), key=_weight, default=None)


def _weight(run: RunView) -> tuple[int, int, int]:
    cause = run.cause or RunCause.UNKNOWN
    rank = 2 if cause is RunCause.GANG_BROKEN else int(cause not in SPENDS_NO_RETRY)
    return rank, run.finished_at, replica_of_run(run.run_id)


def _succeeded(job: JobView, requested_at: int) -> ev.JobSucceeded:
    runs = sorted(job.current_runs(), key=lambda run: (run.finished_at, replica_of_run(run.run_id)))
    last = runs[-1]
    started_at = job.first_started_at or last.finished_at
    return ev.JobSucceeded(
        job_id=job.job_id,
        attempts=job.attempt,
        wait_ms=max(0, ms_from_ns(started_at - requested_at)),
        run_ms=max(0, ms_from_ns(last.finished_at - started_at)),
        caused_by=last.last_event,
    )
