"""A tenant's jobs as their facts have them: small enough for a list, and no more than that."""

from enum import StrEnum, unique

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import JobId, NodeId, QueueId, RunId, job_of_run


@unique
class JobStage(StrEnum):
    """How far a job is."""

    WAITING = "waiting"
    PLACED = "placed"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_over(self) -> bool:
        """True for a job that has ended."""
        return self not in {JobStage.WAITING, JobStage.PLACED, JobStage.RUNNING}


class JobStatus(Struct, frozen=True, kw_only=True):
    """One job, now."""

    job_id: JobId
    queue: QueueId
    stage: JobStage
    attempt: int
    nodes: tuple[NodeId, ...]
    """Where runs of it are placed or running."""
    reason: Pending | None
    """Why it waits, where the placer said so."""
    is_stopping: bool
    exit_code: int | None
    admitted_at: int
    """Ns since the Unix epoch, by the server's clock."""


_ENDS = {
    ev.JobSucceeded: JobStage.SUCCEEDED,
    ev.JobFailed: JobStage.FAILED,
    ev.JobCancelled: JobStage.CANCELLED,
    ev.JobExpired: JobStage.EXPIRED,
}


class _Job:
    def __init__(self, entry: Entry, fact: ev.JobAdmitted) -> None:
        self.fact = fact
        self.admitted_at = entry.recorded_at
        self.runs: dict[RunId, tuple[NodeId, bool]] = {}
        self.end: JobStage | None = None
        self.attempt = 1
        self.reason: Pending | None = None
        self.is_stopping = False
        self.exit_code: int | None = None

    def status(self) -> JobStatus:
        started = any(is_started for _, is_started in self.runs.values())
        return JobStatus(
            job_id=self.fact.job_id,
            queue=self.fact.spec.queue,
            stage=self.end or (JobStage.RUNNING if started else JobStage.PLACED if self.runs else JobStage.WAITING),
            attempt=self.attempt,
            nodes=tuple(sorted({node for node, _ in self.runs.values()})),
            reason=None if self.end or self.runs else self.reason,
            is_stopping=self.is_stopping and self.end is None,
            exit_code=self.exit_code,
            admitted_at=self.admitted_at,
        )


class Jobs:
    """The fold of a tenant's facts."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _Job] = {}

    def fold(self, entry: Entry) -> None:
        """Believe a fact."""
        event = entry.event
        if isinstance(event, ev.JobAdmitted):
            self._jobs.setdefault(event.job_id, _Job(entry, event))
            return
        run_id: RunId | None = getattr(event, "run_id", None)
        job_id = getattr(event, "job_id", None) or (None if run_id is None else job_of_run(run_id))
        job = None if job_id is None else self._jobs.get(job_id)
        if job is None or job.end is not None:
            return
        match event:
            case ev.RunPlaced():
                job.runs[event.run_id] = (event.node_id, False)
            case ev.RunStarted():
                job.runs[event.run_id] = (event.node_id, True)
            case ev.RunReleased() | ev.RunFinished():
                job.runs.pop(event.run_id, None)
            case ev.JobPendingReasonChanged():
                job.reason = event.code
            case ev.JobStopping():
                job.is_stopping = True
            case ev.JobRequeued():
                job.attempt, job.is_stopping = event.attempt, False
                job.runs.clear()
            case ev.JobSucceeded() | ev.JobFailed() | ev.JobCancelled() | ev.JobExpired():
                job.end = _ENDS[type(event)]
                job.exit_code = 0 if isinstance(event, ev.JobSucceeded) else getattr(event, "exit_code", None)
                job.runs.clear()
            case _:
                pass

    def list(self) -> list[JobStatus]:
        """All of them, by when they were admitted."""
        return [job.status() for job in self._jobs.values()]
