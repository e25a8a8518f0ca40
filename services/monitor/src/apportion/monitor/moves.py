"""How long a job was down that lost its place, and what it has to do again. Pure.

A move begins when the first run of an attempt ends for a reason that is no doing of the job's (a lost node, a device's
fault, a drain), and is over once every replica of a later attempt runs. Instants are the bus's own, as facts recorded
them; a lost node's silence is taken off, since its runs were last heard of before it. What an attempt did before the
last checkpoint that all of its replicas have made is not lost; a job that checkpoints without telling isn't known to.
"""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import RunCause
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import JobId, NodeId, RunId, attempt_of_run
from apportion.pool.state import JobView, Pool, RunState, RunView, run_of

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
MOVING: Final = frozenset(
    {RunCause.NODE_LOST, RunCause.DEVICE_FAULT, RunCause.FAULT_DOMAIN_FAILED, RunCause.DRAINED},
)
"""Why an attempt may end so that its job is said to move, rather than to be tried again."""


class Stop(Struct, frozen=True, kw_only=True):
    """The first end in an attempt all of which had run."""

    attempt: int
    started_at: int
    """When its last replica had started."""
    stopped_at: int
    nodes: tuple[NodeId, ...]
    replicas: int = 1
    kept_at: int = 0
    """Up to when a checkpoint keeps what it did; 0 for none."""


class Move(Struct, kw_only=True):
    """A job that looks for another place."""

    cause: RunCause
    stop: Stop
    started: list[RunId] = []
    """Replicas of the attempt that follows which run already."""
    done_at: int = 0
    done_by: str = ""
    """The start of the last replica, and its event; 0 until then."""
    attempt: int = 0
    nodes: list[NodeId] = []


class Moves(Struct, kw_only=True):
    """Every job that was stopped, or is on its way."""

    stops: dict[JobId, Stop] = {}
    moving: dict[JobId, Move] = {}
    kept: dict[JobId, dict[RunId, int]] = {}
    """When each run of a job's present attempt was told to make its newest checkpoint that it did make."""
    silent_ms: dict[NodeId, int] = {}
    """How long a node had been silent that is just being fenced."""


def evolve(moves: Moves, pool: Pool, entry: Entry) -> None:
    """Take in one fact; ``pool`` is as it was before it."""
    event = entry.event
    match event:
        case ev.NodeLost():
            moves.silent_ms[event.node_id] = event.silent_ms
        case ev.NodeFenced():
            heard_at = entry.recorded_at - moves.silent_ms.pop(event.node_id, 0) * NS_PER_MS
            node = pool.nodes.get(event.node_id)
            for run_id in sorted(node.runs) if node is not None else ():
                run = run_of(pool, run_id)
                if run is not None and run.state is RunState.STARTED:
                    _stopped(moves, pool.jobs[run.job_id], run, max(heard_at, run.started_at))
        case ev.RunFinished():
            run = run_of(pool, event.run_id)
            if run is not None and run.state is RunState.STARTED and event.cause is not RunCause.SUCCESS:
                _stopped(moves, pool.jobs[run.job_id], run, entry.recorded_at)
        case ev.RunCheckpointed() if event.is_done:
            run = run_of(pool, event.run_id)
            if run is not None and attempt_of_run(run.run_id) == pool.jobs[run.job_id].attempt:
                # Told then, it had done at least so much: what it did while it wrote may be in it or not.
                told_at = entry.recorded_at - event.duration_ms * NS_PER_MS
                moves.kept.setdefault(run.job_id, {})[run.run_id] = max(told_at, run.started_at)
        case ev.JobRequeued():
            stop = moves.stops.pop(event.job_id, None)
            kept = moves.kept.pop(event.job_id, {})
            if stop is not None and len(kept) >= stop.replicas:
                stop = replace(stop, kept_at=min(kept.values()))
            move = moves.moving.get(event.job_id)
            if move is not None:
                move.started, move.nodes = [], []  # stopped again before all of it ran: it is down since the first time
            elif stop is not None and event.cause in MOVING:
                moves.moving[event.job_id] = Move(cause=event.cause, stop=stop)
        case ev.RunStarted():
            _started(moves, pool, entry, event)
        case ev.MigrationCompleted():
            moves.moving.pop(event.job_id, None)
        case ev.JobSucceeded() | ev.JobFailed() | ev.JobCancelled() | ev.JobExpired():
            moves.stops.pop(event.job_id, None)
            moves.moving.pop(event.job_id, None)
            moves.kept.pop(event.job_id, None)
        case _:
            pass


def _stopped(moves: Moves, job: JobView, run: RunView, at: int) -> None:
    attempt = attempt_of_run(run.run_id)
    known = moves.stops.get(job.job_id)
    if attempt != job.attempt or (known is not None and known.stopped_at <= at):
        return
    runs = list(job.current_runs())
    if len(runs) < job.spec.replicas_least or not all(each.started_at for each in runs):
        return  # it had not done anything as a whole yet
    moves.stops[job.job_id] = Stop(
        attempt=attempt,
        started_at=max(each.started_at for each in runs),
        stopped_at=at,
        nodes=tuple(sorted({each.node_id for each in runs})),
        replicas=len(runs),
    )


def _started(moves: Moves, pool: Pool, entry: Entry, event: ev.RunStarted) -> None:
    run = run_of(pool, event.run_id)
    move = None if run is None else moves.moving.get(run.job_id)
    if run is None or move is None or run.state is not RunState.PLACED:
        return
    job = pool.jobs[run.job_id]
    if attempt_of_run(run.run_id) != job.attempt or run.run_id in move.started:
        return
    move.started.append(run.run_id)
    move.nodes = sorted({*move.nodes, run.node_id})
    if len(move.started) == job.spec.replicas_least:
        move.done_at, move.done_by, move.attempt = entry.recorded_at, entry.event_id, job.attempt


def completed(moves: Moves) -> list[ev.Fact]:
    """What is to be said of moves that are over."""
    return [
        ev.MigrationCompleted(
            job_id=job_id,
            attempt=move.attempt,
            cause=move.cause,
            from_nodes=move.stop.nodes,
            to_nodes=tuple(move.nodes),
            downtime_ms=max(0, move.done_at - move.stop.stopped_at) // NS_PER_MS,
            lost_work_s=max(0, move.stop.stopped_at - max(move.stop.started_at, move.stop.kept_at)) // NS_PER_S,
            kept_work_s=max(0, min(move.stop.kept_at, move.stop.stopped_at) - move.stop.started_at) // NS_PER_S,
            caused_by=move.done_by,
        )
        for job_id, move in sorted(moves.moving.items())
        if move.done_at
    ]
