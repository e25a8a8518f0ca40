"""What facts add up to: counters and histograms of the pool, from the fold and nothing else. Pure.

The number of series is bounded whatever happens in the pool: no job, run or text of a user is a label, and of tenants
and queues the first so many have a name, the rest is ``other``.
"""

from bisect import bisect_left
from collections import Counter, deque
from itertools import accumulate
from typing import Final

from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry, Undecodable
from apportion.contracts.ids import attempt_of_run, replica_of_run
from apportion.pool.state import Pool, run_of

TENANTS_NAMED: Final = 20
QUEUES_NAMED: Final = 50
CODES_NAMED: Final = 40
OTHER: Final = "other"
ENDED_LOOKED_AT: Final = 1_000
"""The success ratio is that of so many jobs, the last that ended by themselves."""
LATENCY_BOUNDS: Final = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1800.0,
    7200.0,
    43200.0,
)
"""Seconds: from a round of the placer to half a day in the queue."""
DURATION_BOUNDS: Final = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
RECENT: Final = 200
NS: Final = 1_000_000_000


class Histogram:
    """Durations in explicit buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), as Prometheus has them."""
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))


class Named:
    """The first so many names as they are, every later one as ``other``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def __call__(self, name: str) -> str:
        """The label that stands for ``name``."""
        if name not in self._names:
            if len(self._names) >= self._most:
                return OTHER
            self._names.add(name)
        return name


class Figures:
    """Counts since this process began to fold; a snapshot holds none of them, as Prometheus expects of a counter."""

    def __init__(self) -> None:
        self.tenants = Named(TENANTS_NAMED)
        self.queues = Named(QUEUES_NAMED)
        self._codes = Named(CODES_NAMED)
        self.events: Counter[str] = Counter()
        """By type."""
        self.undecodable = 0
        self.jobs_ended: Counter[tuple[str, str]] = Counter()
        """By outcome and tenant."""
        self.runs_ended: Counter[str] = Counter()
        """By cause."""
        self.refused: Counter[str] = Counter()
        """Wishes, by code."""
        self.moved: Counter[str] = Counter()
        """Jobs that lost their place and run again, by cause."""
        self.preempted = 0
        self.device_faults: Counter[str] = Counter()
        """By code, such as ``xid-79``."""
        self.scheduling: dict[str, Histogram] = {}
        """From queued to placed, by service class."""
        self.starting = Histogram(LATENCY_BOUNDS)
        """From placed to started."""
        self.waiting: dict[str, Histogram] = {}
        """From the wish's admission to the first start, by service class."""
        self.running = Histogram(DURATION_BOUNDS)
        self.downtime = Histogram(DURATION_BOUNDS)
        self.recent: dict[str, deque[tuple[int, int]]] = {}
        """The last latencies from queued to placed, by service class: (when, ms)."""
        self._ended: deque[bool] = deque(maxlen=ENDED_LOOKED_AT)

    @property
    def ended_looked_at(self) -> int:
        """How many jobs the success ratio is of."""
        return len(self._ended)

    @property
    def success_ratio(self) -> float | None:
        """Of the last jobs that ended by themselves, how many succeeded; None before the first."""
        return sum(self._ended) / len(self._ended) if self._ended else None

    def saw(self, entry: Entry, pool: Pool) -> None:
        """Take in one entry; ``pool`` has folded it already."""
        event = entry.event
        if isinstance(event, Undecodable):
            self.undecodable += 1
            return
        self.events[type(event).__name__] += 1
        match event:
            case ev.RunPlaced() if replica_of_run(event.run_id) == 0:
                job = pool.jobs.get(event.job_id)
                if job is not None and attempt_of_run(event.run_id) == job.attempt:
                    since = max(job.queued_at, job.not_before_at)
                    waited_ns = max(0, entry.recorded_at - since)
                    self._class(self.scheduling, job.spec).add(waited_ns / NS)
                    recent = self.recent.setdefault(job.spec.service_class.value, deque(maxlen=RECENT))
                    recent.append((entry.recorded_at, waited_ns // 1_000_000))
            case ev.RunStarted():
                run = run_of(pool, event.run_id)
                if run is not None and run.started_at == entry.recorded_at:
                    self.starting.add(max(0, entry.recorded_at - run.placed_at) / NS)
                    job = pool.jobs[run.job_id]
                    if job.first_started_at == entry.recorded_at and job.attempt == 1:
                        self._class(self.waiting, job.spec).add(max(0, entry.recorded_at - job.requested_at) / NS)
            case ev.RunFinished():
                self.runs_ended[event.cause.value] += 1
            case ev.RunStopOrdered():
                self.preempted += event.cause.value == "Preempted"
            case ev.JobSucceeded():
                self._end("succeeded", event.job_id, is_success=True)
                self.running.add(event.run_ms / 1000)
            case ev.JobFailed():
                self._end("failed", event.job_id, is_success=False)
            case ev.JobExpired():
                self._end("expired", event.job_id, is_success=False)
            case ev.JobCancelled():
                self._end("cancelled", event.job_id, is_success=None)
            case ev.JobRejected() | ev.WishRejected() | ev.NodeWishRejected():
                self.refused[event.code.value] += 1
            case ev.MigrationCompleted():
                self.moved[event.cause.value] += 1
                self.downtime.add(event.downtime_ms / 1000)
            case ev.DeviceHealthChanged():
                self.device_faults[self._codes(event.code)] += 1
            case _:
                pass

    def _end(self, outcome: str, job_id: str, *, is_success: bool | None) -> None:
        self.jobs_ended[outcome, self.tenants(job_id.partition("/")[0])] += 1
        if is_success is not None:
            self._ended.append(is_success)

    @staticmethod
    def _class(histograms: dict[str, Histogram], spec: ev.JobSpec) -> Histogram:
        name = spec.service_class.value
        if name not in histograms:
            histograms[name] = Histogram(LATENCY_BOUNDS)
        return histograms[name]
