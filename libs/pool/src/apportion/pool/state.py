"""The pool as the stream of facts describes it: queues, nodes, devices, jobs and runs, folded in place.

Shared by everyone who needs to know who holds what. It believes what the stream says and decides nothing; whatever it
doesn't know (a late fact of a job that ended long ago) it passes over.

States of a job::

    queued ──► running ──► succeeded | failed | cancelled | expired
       ▲          │
       └ stopping ┘        (requeued: the next attempt waits)

A job that is held stays queued, and isn't placed; a hold outlasts an attempt.

States of a run::

    placed ──► started ──► finished ──► released
       └───────────┴──────────┴──► lost (its node was fenced)
"""

from collections.abc import Iterator
from enum import StrEnum, unique
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import (
    CHECKPOINTED_STOPS,
    DeviceHealth,
    Pending,
    RunAction,
    RunCause,
    StopCause,
    WorkloadKind,
)
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import (
    DeviceUuid,
    JobId,
    NodeId,
    QueueId,
    RunId,
    TenantId,
    attempt_of_run,
    node_of_author,
    replica_of_run,
)
from apportion.pool import quota
from apportion.pool.quota import QueueView, TenantView


@unique
class NodeState(StrEnum):
    """Whether the placer may use a node."""

    READY = "ready"
    SUSPECTED = "suspected"
    """Silent for longer than it should: nothing new is placed, nothing is taken away."""
    CORDONED = "cordoned"
    DRAINING = "draining"
    FENCED = "fenced"
    """Lost: its older runs don't count, until its agent registers with the new epoch."""


@unique
class RunState(StrEnum):
    """Where a run is between its placement and the freeing of its slices."""

    PLACED = "placed"
    STARTED = "started"
    FINISHED = "finished"
    RELEASED = "released"
    LOST = "lost"


@unique
class JobState(StrEnum):
    """Where a job is between its admission and its end."""

    QUEUED = "queued"
    RUNNING = "running"
    """Runs of its attempt are placed or started."""
    STOPPING = "stopping"
    ENDED = "ended"


class DeviceView(Struct):
    """One device and what is held of it. ``free_*`` may be negative for a moment when a device came back smaller."""

    device: ev.Device
    used_compute_milli: int = 0
    used_memory_mib: int = 0
    runs: dict[RunId, ev.Slice] = {}

    @property
    def free_compute_milli(self) -> int:
        """Milli-GPU that no run holds."""
        return self.device.compute_milli - self.used_compute_milli

    @property
    def free_memory_mib(self) -> int:
        """MiB that no run holds."""
        return self.device.memory_mib - self.used_memory_mib


class NodeView(Struct):
    """One node: its epoch, its state, its devices by UUID, and what is held of its host."""

    node_id: NodeId
    epoch: int
    session: str = ""
    state: NodeState = NodeState.READY
    cordon: NodeState | None = None
    """CORDONED or DRAINING where an operator said so; it outlasts suspicion and fencing."""
    devices: dict[DeviceUuid, DeviceView] = {}
    cpu_milli: int = 0
    memory_mib: int = 0
    used_cpu_milli: int = 0
    used_memory_mib: int = 0
    runs: set[RunId] = set()
    """Runs that hold something here."""
    simulated: bool = False
    labels: dict[str, str] = {}
    driver_version: str = ""
    cuda_version: str = ""
    drain_deadline_at: int = 0
    changed_seq: int = 0
    """Sequence of the last fact that changed what fits here."""

    @property
    def is_usable(self) -> bool:
        """True where new runs may be placed."""
        return self.state is NodeState.READY


class RunView(Struct):
    """One attempt of one replica."""

    run_id: RunId
    job_id: JobId
    node_id: NodeId
    node_epoch: int
    slices: tuple[ev.Slice, ...]
    cpu_milli: int
    host_memory_mib: int
    state: RunState = RunState.PLACED
    placed_at: int = 0
    """Recorded instants of the facts; information for people and for durations."""
    started_at: int = 0
    finished_at: int = 0
    stop: StopCause | None = None
    """Set once it was ordered to stop."""
    cause: RunCause | None = None
    exit_code: int | None = None
    signal: int | None = None
    last_event: str = ""
    holds: bool = True
    """Whether its slices are taken from its devices still."""
    charge: quota.Amounts = {}
    """What its queues are charged for it while it holds."""
    is_still: bool = False
    """It was ordered to stand still, and not to go on since."""
    checkpoint_seq: int = 0
    """Sequence of the newest order to checkpoint."""


class JobView(Struct):
    """One job that has not ended, or whose runs still hold something."""

    job_id: JobId
    tenant: TenantId
    spec: ev.JobSpec
    state: JobState = JobState.QUEUED
    attempt: int = 1
    requested_at: int = 0
    admitted_seq: int = 0
    """Sequence of its JobAdmitted: its age in any order."""
    queued_at: int = 0
    waits_since_at: int = 0
    """What its waiting counts from: its admission, when it was preempted last, or when a hold ended."""
    not_before_at: int = 0
    retries_used: int = 0
    waits_for: tuple[JobId, ...] = ()
    """Jobs that have to end before it may be placed."""
    wait_exceeded: int = 0
    """The attempt of which it was stated that it waits longer than it should; 0: none."""
    unmet: JobId | None = None
    """One that it waited for and that ended otherwise than it asked: it never runs."""
    avoid_nodes: tuple[NodeId, ...] = ()
    """Nodes on which none of it is placed any more."""
    runs: dict[RunId, RunView] = {}
    """Runs of the present attempt, and older ones that still hold something."""
    holding: int = 0
    """How many of them hold something."""
    next_replica: int = 0
    """The number of the next replica of this attempt: none is used twice, however often the gang shrinks and grows."""
    stop: StopCause | None = None
    stop_actor: str = ""
    stop_reason: str = ""
    stop_requeue: bool = True
    """False where the job ends with the runs that are being stopped."""
    hold: ev.JobHeld | None = None
    """Set while the job may not be placed; runs that it has, run on."""
    suspend: ev.JobSuspended | None = None
    """Set while its runs are to stand still, those of later attempts too."""
    resumed: ev.JobResumed | None = None
    """Who last had it go on, and why."""
    checkpoint: ev.JobCheckpointing | None = None
    """The newest wish that its runs checkpoint."""
    checkpoint_seq: int = 0
    resize: ev.JobResized | None = None
    """Set while runs of the present attempt have another size than the job: they are to be stopped for it."""
    resized_seq: int = 0
    """Sequence of the fact that gave it the size that it has; 0 where that is the first."""
    pending: Pending = Pending.PENDING_EVALUATION
    pending_fact: ev.JobPendingReasonChanged | None = None
    pending_since_at: int = 0
    last_event: str = ""
    first_started_at: int = 0

    def members(self) -> list[RunView]:
        """Runs of the present attempt that are placed or started, and were not told to stop, in replica order."""
        runs = [run for run in self.current_runs() if run.state in _LIVE and run.stop is None]
        return sorted(runs, key=lambda run: replica_of_run(run.run_id))

    def current_runs(self) -> Iterator[RunView]:
        """Runs of the present attempt, in replica order."""
        for run in self.runs.values():
            if attempt_of_run(run.run_id) == self.attempt:
                yield run


_LIVE: Final = frozenset({RunState.PLACED, RunState.STARTED})


class ReservationView(Struct):
    """Nodes that are kept for a tenant for a while."""

    asked: ev.ReservationAdmitted
    nodes: tuple[NodeId, ...] = ()
    missing: int = 0


class Pool(Struct):
    """Everything that facts say of one pool. Change it only by ``evolve``."""

    seq: int = 0
    """Sequence of the last fact folded."""
    at: int = 0
    """When that fact was recorded."""
    queues: dict[QueueId, QueueView] = {}
    tenants: dict[TenantId, TenantView] = {}
    """Those whose policy limits what they hold."""
    held_by: dict[TenantId, quota.Amounts] = {}
    """What the runs of each tenant hold, in all queues together; without those who hold nothing."""
    nodes: dict[NodeId, NodeView] = {}
    jobs: dict[JobId, JobView] = {}
    run_jobs: dict[RunId, JobId] = {}
    """Which job each known run belongs to."""
    frozen: bool = False
    reservations: dict[str, ReservationView] = {}
    """Those that were admitted and have not ended, by name."""
    reserved: ev.NodesReserved | None = None
    """What is kept for the job that has been blocked for longest."""
    dependents: dict[JobId, list[JobId]] = {}
    """Job to those that wait, or waited, for its end."""
    leases: dict[str, int] = {}
    """Author to the sequence of its newest claim."""


MOVE_NOTHING: Final = frozenset({ev.JobRejected, ev.WishRejected, ev.JobDuplicate, ev.WishJudged})
"""Answers that change nothing in the pool. They are known at once, as there may be very many: the branches below are
tried one after the other, which takes longer than all else that is done for a refusal."""


def evolve(pool: Pool, entry: Entry) -> Pool:
    """The pool after this fact, changed in place. What it doesn't know changes only ``seq``."""
    if entry.stream is not Stream.FACTS:
        return pool
    if entry.seq <= pool.seq:
        return pool  # delivered twice
    pool.seq = entry.seq
    pool.at = entry.recorded_at
    event = entry.event
    if type(event) in MOVE_NOTHING:
        return pool
    match event:
        case ev.LeaseClaimed():
            pool.leases[str(entry.author)] = entry.seq
        case ev.JobAdmitted():
            _admitted(pool, entry, event)
        case ev.JobPendingReasonChanged():
            if (job := pool.jobs.get(event.job_id)) is not None:
                job.pending = event.code
                job.pending_fact = event
                job.pending_since_at = event.since_at
        case ev.RunPlaced():
            _placed(pool, entry, event)
        case ev.RunStopOrdered():
            if (run := run_of(pool, event.run_id)) is not None:
                run.stop = event.cause
                run.last_event = entry.event_id
        case ev.RunActionOrdered():
            _acted(pool, entry, event)
        case ev.RunStarted():
            _started(pool, entry, event)
        case ev.RunFinished():
            _finished(pool, entry, event)
        case ev.RunReleased():
            _released(pool, entry, event)
        case ev.JobStopping():
            if (job := pool.jobs.get(event.job_id)) is not None and job.state is not JobState.ENDED:
                job.state = JobState.STOPPING
                job.stop = event.cause
                job.stop_actor = event.actor
                job.stop_reason = event.reason
                job.stop_requeue = event.requeue
                job.last_event = entry.event_id
        case ev.JobRequeued():
            _requeued(pool, entry, event)
        case ev.JobWaitExceeded():
            if (job := pool.jobs.get(event.job_id)) is not None:
                job.wait_exceeded = event.attempt
        case ev.JobHeld():
            _held(pool, event)
        case ev.JobReleased():
            if (job := pool.jobs.get(event.job_id)) is not None:
                job.hold = None
                job.waits_since_at = entry.recorded_at
                job.last_event = entry.event_id if job.state is JobState.QUEUED else job.last_event
                _look_anew(job)
        case ev.JobSuspended():
            if (job := pool.jobs.get(event.job_id)) is not None and job.state is not JobState.ENDED:
                job.suspend = event
                job.last_event = entry.event_id if job.state is JobState.RUNNING else job.last_event
        case ev.JobResumed():
            if (job := pool.jobs.get(event.job_id)) is not None:
                job.suspend = None
                job.resumed = event
                job.last_event = entry.event_id if job.state is JobState.RUNNING else job.last_event
        case ev.JobCheckpointing():
            if (job := pool.jobs.get(event.job_id)) is not None and job.attempt == event.attempt:
                job.checkpoint = event
                job.checkpoint_seq = entry.seq
                job.last_event = entry.event_id if job.state is JobState.RUNNING else job.last_event
        case ev.JobReprioritized():
            if (job := pool.jobs.get(event.job_id)) is not None:
                job.spec = replace(job.spec, priority=event.priority)
        case ev.JobResized():
            _resized(pool, entry, event)
        case ev.JobSucceeded() | ev.JobFailed() | ev.JobCancelled() | ev.JobExpired():
            _ended(pool, event.job_id)
            _followed(pool, entry, event)
        case ev.ReservationAdmitted():
            pool.reservations[event.reservation] = ReservationView(event)
        case ev.ReservationCancelled():
            pool.reservations.pop(event.reservation, None)
        case ev.NodesReserved():
            _reserved(pool, event)
        case ev.QueueUpserted():
            quota.upsert(pool.queues, event, entry.event_id)
        case ev.PolicyUpserted():
            quota.bound(pool.tenants, event, entry.event_id)
        case ev.NodeRegistered():
            _registered(pool, entry, event)
        case ev.DeviceHealthChanged():
            _health(pool, entry, event)
        case ev.NodeSuspected():
            _node_state(pool, entry, event.node_id, NodeState.SUSPECTED)
        case ev.NodeTrusted():
            _node_state(pool, entry, event.node_id, NodeState.READY)
        case ev.NodeFenced():
            _fenced(pool, entry, event)
        case ev.NodeCordoned():
            _cordon(pool, entry, event.node_id, NodeState.CORDONED)
        case ev.NodeDraining():
            _cordon(pool, entry, event.node_id, NodeState.DRAINING)
            if (node := pool.nodes.get(event.node_id)) is not None:
                node.drain_deadline_at = event.deadline_at
        case ev.NodeUncordoned():
            _cordon(pool, entry, event.node_id, None)
        case ev.ControlPlaneFrozen():
            pool.frozen = True
        case ev.ControlPlaneThawed():
            pool.frozen = False
        case _:
            pass  # rejections, duplicates, judgements without effect on who holds what, and types of newer versions
    return pool


def grace_s_of(spec: ev.JobSpec, cause: StopCause) -> int:
    """How long a run of the job may take to stop for this cause: to checkpoint, where it is told to, and to end."""
    checkpoint_s = spec.checkpoint.grace_s if spec.checkpoint is not None and cause in CHECKPOINTED_STOPS else 0
    return spec.grace_s + checkpoint_s


def run_of(pool: Pool, run: RunId) -> RunView | None:
    """The run, where its job is known still."""
    job_id = pool.run_jobs.get(run)
    if job_id is None:
        return None
    job = pool.jobs.get(job_id)
    return None if job is None else job.runs.get(run)


def _admitted(pool: Pool, entry: Entry, event: ev.JobAdmitted) -> None:
    spec = event.spec
    pool.jobs[event.job_id] = JobView(
        job_id=event.job_id,
        tenant=event.tenant,
        spec=spec,
        requested_at=entry.recorded_at,
        admitted_seq=entry.seq,
        queued_at=entry.recorded_at,
        waits_since_at=entry.recorded_at,
        not_before_at=spec.not_before_at,
        pending_since_at=entry.recorded_at,
        last_event=entry.event_id,
        waits_for=event.waits_for,
    )
    for other in event.waits_for:
        pool.dependents.setdefault(other, []).append(event.job_id)
    if (queue := pool.queues.get(spec.queue)) is not None:
        queue.jobs += 1


def _placed(pool: Pool, entry: Entry, event: ev.RunPlaced) -> None:
    job = pool.jobs.get(event.job_id)
    if job is None:
        job = pool.jobs[event.job_id] = _overtaken(entry, event)
    run = RunView(
        run_id=event.run_id,
        job_id=event.job_id,
        node_id=event.node_id,
        node_epoch=event.node_epoch,
        slices=event.slices,
        cpu_milli=event.cpu_milli,
        host_memory_mib=event.host_memory_mib,
        placed_at=entry.recorded_at,
        last_event=entry.event_id,
    )
    job.runs[event.run_id] = run
    # A replica that was added to an attempt which had ended meanwhile is nothing to the next one.
    if attempt_of_run(event.run_id) == job.attempt:
        if job.state is JobState.QUEUED:
            job.state = JobState.RUNNING
        job.pending_fact = None
        job.next_replica = max(job.next_replica, replica_of_run(event.run_id) + 1)
    if entry.basis is not None and entry.basis.facts < job.resized_seq and job.resize is None:
        # Decided before the new size was known, stored after it.
        job.resize = ev.JobResized(
            job_id=job.job_id,
            compute_milli=job.spec.compute_milli,
            memory_mib=job.spec.memory_mib,
            compute_milli_before=max((piece.compute_milli for piece in event.slices), default=0),
            memory_mib_before=max((piece.memory_mib for piece in event.slices), default=0),
            actor="service:admission",
            reason="placed before its new size was known",
            answers=0,
        )
    pool.run_jobs[event.run_id] = event.job_id
    node = pool.nodes.get(event.node_id)
    if node is None or node.epoch != event.node_epoch:
        # Decided before the fencing was known, stored after it: no agent will start it, and it holds nothing.
        run.state = RunState.LOST
        run.cause = RunCause.STALE
        run.holds = False
        _forget_if_done(pool, run.job_id)
        return
    _take(pool, run, entry.seq)


def _overtaken(entry: Entry, event: ev.RunPlaced) -> JobView:
    """A job that ended while the placer's batch was on its way: known again until what was placed is released.

    Nobody can take the placement back, and the node will start it, so it holds what it holds; the placer stops it.
    """
    return JobView(
        job_id=event.job_id,
        tenant=event.tenant,
        spec=ev.JobSpec(
            queue=event.queue,
            kind=WorkloadKind.BATCH,
            command=event.command,
            devices=len(event.slices),
            grace_s=event.grace_s,
        ),
        state=JobState.ENDED,
        attempt=attempt_of_run(event.run_id),
        stop=StopCause.CANCELLED,
        stop_actor="service:placer",
        stop_reason="the job had ended when this was placed",
        requested_at=entry.recorded_at,
        queued_at=entry.recorded_at,
        last_event=entry.event_id,
    )


def _acted(pool: Pool, entry: Entry, event: ev.RunActionOrdered) -> None:
    run = run_of(pool, event.run_id)
    if run is None:
        return
    run.last_event = entry.event_id
    match event.action:
        case RunAction.SUSPEND:
            run.is_still = True
        case RunAction.RESUME:
            run.is_still = False
        case RunAction.CHECKPOINT:
            run.checkpoint_seq = entry.seq


def _started(pool: Pool, entry: Entry, event: ev.RunStarted) -> None:
    run = run_of(pool, event.run_id)
    if run is None or run.state is not RunState.PLACED:
        return
    run.state = RunState.STARTED
    run.started_at = entry.recorded_at
    run.last_event = entry.event_id
    job = pool.jobs[run.job_id]
    if not job.first_started_at:
        job.first_started_at = entry.recorded_at


def _finished(pool: Pool, entry: Entry, event: ev.RunFinished) -> None:
    run = run_of(pool, event.run_id)
    if run is None or run.state not in {RunState.PLACED, RunState.STARTED}:
        return
    run.state = RunState.FINISHED
    run.finished_at = entry.recorded_at
    run.cause = event.cause
    run.exit_code = event.exit_code
    run.signal = event.signal
    run.last_event = entry.event_id


def _released(pool: Pool, entry: Entry, event: ev.RunReleased) -> None:
    run = run_of(pool, event.run_id)
    if run is None:
        return
    if run.state is not RunState.LOST:
        run.state = RunState.RELEASED
    run.last_event = entry.event_id
    _give_back(pool, run, entry.seq)
    if run.stop is StopCause.SHRUNK:
        # A gang that breathes for months has thousands of these, and nothing depends on them any more.
        del pool.jobs[run.job_id].runs[run.run_id]
        del pool.run_jobs[run.run_id]
    _forget_if_done(pool, run.job_id)


def _fenced(pool: Pool, entry: Entry, event: ev.NodeFenced) -> None:
    node = pool.nodes.get(event.node_id)
    if node is None:
        return
    node.epoch = event.epoch
    node.state = NodeState.FENCED
    for run_id in sorted(node.runs):
        run = run_of(pool, run_id)
        if run is None:
            continue
        if run.state is not RunState.RELEASED:
            # One that had finished keeps its outcome; only its slices are taken back without the agent's word.
            if run.state is not RunState.FINISHED:
                run.cause = RunCause.NODE_LOST
            run.state = RunState.LOST
        run.last_event = entry.event_id
        _give_back(pool, run, entry.seq)
        _forget_if_done(pool, run.job_id)
    node.changed_seq = entry.seq


def _requeued(pool: Pool, entry: Entry, event: ev.JobRequeued) -> None:
    job = pool.jobs.get(event.job_id)
    if job is None or job.state is JobState.ENDED:
        return
    job.retries_used = max(job.retries_used, job.spec.retry_limit - event.retries_left)
    job.state = JobState.QUEUED
    job.attempt = event.attempt
    job.next_replica = 0
    job.avoid_nodes = event.avoid_nodes
    if event.memory_mib:
        job.spec = replace(job.spec, memory_mib=event.memory_mib)
    job.stop = None
    job.stop_actor = job.stop_reason = ""
    job.stop_requeue = True
    job.resize = None
    job.not_before_at = max(job.spec.not_before_at, event.not_before_at)
    job.queued_at = entry.recorded_at
    if event.cause is RunCause.PREEMPTED:
        # Who made room for others doesn't stand before them again for the time in which it ran.
        job.waits_since_at = entry.recorded_at
    job.pending = Pending.PENDING_EVALUATION
    job.pending_fact = None
    job.pending_since_at = entry.recorded_at
    job.first_started_at = 0
    job.last_event = entry.event_id
    for run_id in [r.run_id for r in job.runs.values() if not r.holds]:
        del job.runs[run_id]
        pool.run_jobs.pop(run_id, None)


def is_met(condition: ev.DependencyCondition, end: str) -> bool:
    """True where a job that ended by that fact ended as the condition asks.

    >>> is_met(ev.DependencyCondition.FAILED, "JobExpired")
    False
    """
    match condition:
        case ev.DependencyCondition.SUCCEEDED:
            return end == ev.JobSucceeded.__name__
        case ev.DependencyCondition.FAILED:
            return end == ev.JobFailed.__name__
        case ev.DependencyCondition.ENDED:
            return True


def _followed(
    pool: Pool, entry: Entry, event: ev.JobSucceeded | ev.JobFailed | ev.JobCancelled | ev.JobExpired
) -> None:
    """What the end of a job means for those that wait for it."""
    for job_id in pool.dependents.pop(event.job_id, ()):
        job = pool.jobs.get(job_id)
        if job is None or event.job_id not in job.waits_for:
            continue
        wanted = next(each.condition for each in job.spec.depends_on if each.job_id == event.job_id)
        if not is_met(wanted, type(event).__name__):
            job.unmet = job.unmet or event.job_id
            job.last_event = entry.event_id
            continue
        job.waits_for = tuple(other for other in job.waits_for if other != event.job_id)
        if not job.waits_for:
            job.queued_at = entry.recorded_at
            job.last_event = entry.event_id
            if job.hold is None:
                _look_anew(job)


def _held(pool: Pool, event: ev.JobHeld) -> None:
    job = pool.jobs.get(event.job_id)
    if job is None or job.state is JobState.ENDED:
        return
    if job.hold is not None and job.hold.by_operator and not event.by_operator:
        return  # a tenant's word doesn't make an operator's hold its own
    job.hold = event
    _look_anew(job)


def _look_anew(job: JobView) -> None:
    """What was said of why it waits no longer holds."""
    if job.state is JobState.QUEUED:
        job.pending = Pending.PENDING_EVALUATION
        job.pending_fact = None


def _resized(pool: Pool, entry: Entry, event: ev.JobResized) -> None:
    job = pool.jobs.get(event.job_id)
    if job is None or job.state is JobState.ENDED:
        return
    if (event.compute_milli, event.memory_mib) == (job.spec.compute_milli, job.spec.memory_mib):
        return  # asked again: what has that size already isn't stopped for it
    job.spec = replace(job.spec, compute_milli=event.compute_milli, memory_mib=event.memory_mib)
    job.resized_seq = entry.seq
    if job.state is not JobState.STOPPING:
        job.last_event = entry.event_id
    if job.state is not JobState.QUEUED:
        # Before: as its runs are, however often it was resized since they were placed.
        first = job.resize or event
        had = (first.compute_milli_before, first.memory_mib_before)
        job.resize = replace(event, compute_milli_before=had[0], memory_mib_before=had[1])
        if (event.compute_milli, event.memory_mib) == had:
            job.resize = None
    if job.hold is None:
        _look_anew(job)


def _reserved(pool: Pool, event: ev.NodesReserved) -> None:
    if not event.reservation:
        pool.reserved = event if event.nodes else None
    elif event.is_over:
        pool.reservations.pop(event.reservation, None)
    elif (view := pool.reservations.get(event.reservation)) is not None:
        view.nodes, view.missing = event.nodes, event.missing


def _ended(pool: Pool, job_id: JobId) -> None:
    job = pool.jobs.get(job_id)
    if job is None or job.state is JobState.ENDED:
        return
    job.state = JobState.ENDED
    if (queue := pool.queues.get(job.spec.queue)) is not None:
        queue.jobs -= 1
    _forget_if_done(pool, job_id)


def _forget_if_done(pool: Pool, job_id: JobId) -> None:
    # What has ended and holds nothing can't matter to any decision; the log remembers it.
    job = pool.jobs.get(job_id)
    if job is None or job.state is not JobState.ENDED or any(run.holds for run in job.runs.values()):
        return
    for run_id in job.runs:
        pool.run_jobs.pop(run_id, None)
    del pool.jobs[job_id]


def _registered(pool: Pool, entry: Entry, event: ev.NodeRegistered) -> None:
    if entry.author is None or node_of_author(entry.author) != event.node_id:
        return  # identity comes from the subject: nobody registers another's node
    node = pool.nodes.get(event.node_id)
    if node is None:
        node = pool.nodes[event.node_id] = NodeView(node_id=event.node_id, epoch=event.epoch)
    node.session = event.session
    node.cpu_milli = event.cpu_milli
    node.memory_mib = event.memory_mib
    node.simulated = event.simulated
    node.labels = event.labels
    node.driver_version = event.driver_version
    node.cuda_version = event.cuda_version
    devices: dict[DeviceUuid, DeviceView] = {}
    for device in event.devices:
        view = node.devices.get(device.uuid)
        if view is None:
            view = DeviceView(device=device)
        view.device = device
        devices[device.uuid] = view
    node.devices = devices
    if event.epoch == node.epoch:
        node.state = node.cordon or NodeState.READY
    node.changed_seq = entry.seq


def _health(pool: Pool, entry: Entry, event: ev.DeviceHealthChanged) -> None:
    node = pool.nodes.get(event.node_id)
    view = None if node is None else node.devices.get(event.device_uuid)
    if node is None or view is None:
        return
    view.device = _with_health(view.device, event.after)
    node.changed_seq = entry.seq


def _with_health(device: ev.Device, health: DeviceHealth) -> ev.Device:
    return replace(device, health=health)


def _node_state(pool: Pool, entry: Entry, node_id: NodeId, state: NodeState) -> None:
    node = pool.nodes.get(node_id)
    if node is None or node.state is NodeState.FENCED:
        return
    node.state = (node.cordon or state) if state is NodeState.READY else state
    node.changed_seq = entry.seq


def _cordon(pool: Pool, entry: Entry, node_id: NodeId, cordon: NodeState | None) -> None:
    node = pool.nodes.get(node_id)
    if node is None:
        return
    node.cordon = cordon
    if node.state in {NodeState.READY, NodeState.CORDONED, NodeState.DRAINING}:
        node.state = cordon or NodeState.READY
    if cordon is not NodeState.DRAINING:
        node.drain_deadline_at = 0
    node.changed_seq = entry.seq


def _take(pool: Pool, run: RunView, seq: int) -> None:
    node = pool.nodes.get(run.node_id)
    if node is not None:
        node.runs.add(run.run_id)
        node.used_cpu_milli += run.cpu_milli
        node.used_memory_mib += run.host_memory_mib
        node.changed_seq = seq
        for piece in run.slices:
            view = node.devices.get(piece.device_uuid)
            if view is not None:
                view.used_compute_milli += piece.compute_milli
                view.used_memory_mib += piece.memory_mib
                view.runs[run.run_id] = piece
    _charge(pool, run, 1)


def _give_back(pool: Pool, run: RunView, seq: int) -> None:
    if not run.holds:
        return
    run.holds = False
    node = pool.nodes.get(run.node_id)
    if node is not None:
        node.runs.discard(run.run_id)
        node.used_cpu_milli -= run.cpu_milli
        node.used_memory_mib -= run.host_memory_mib
        node.changed_seq = seq
        for piece in run.slices:
            view = node.devices.get(piece.device_uuid)
            if view is not None and view.runs.pop(run.run_id, None) is not None:
                view.used_compute_milli -= piece.compute_milli
                view.used_memory_mib -= piece.memory_mib
    _charge(pool, run, -1)


def _charge(pool: Pool, run: RunView, sign: int) -> None:
    job = pool.jobs.get(run.job_id)
    if job is None:
        return
    if sign > 0:
        run.charge = _charge_of(pool, run)
    job.holding += sign
    # A job counts once, however many runs it has: with the first that holds something, until the last.
    is_edge = job.holding == (1 if sign > 0 else 0)
    charge = run.charge | quota.ONE_JOB if is_edge else run.charge
    for queue in quota.lineage(pool.queues, job.spec.queue):
        quota.add(queue.used, charge, sign)
    own = pool.queues.get(job.spec.queue)
    for holders in (pool.held_by, *(() if own is None else (own.used_by,))):
        held = holders.setdefault(job.tenant, {})
        quota.add(held, charge, sign)
        if not held:
            del holders[job.tenant]


def _charge_of(pool: Pool, run: RunView) -> quota.Amounts:
    node = pool.nodes.get(run.node_id)
    devices = {} if node is None else node.devices
    charge: quota.Amounts = {}
    for piece in run.slices:
        view = devices.get(piece.device_uuid)
        quota.charge(charge, "" if view is None else view.device.model, piece.compute_milli, piece.memory_mib)
    if run.cpu_milli:
        charge[quota.CPU] = run.cpu_milli
    return charge
