"""What a history comes to: waits, completions, use, waste and cost, from facts alone, recorded or simulated. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import StopCause
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import DeviceUuid, JobId, NodeId, RunId
from apportion.monitor import metering
from apportion.monitor.metering import Card, Segment
from apportion.pool.state import NodeState, Pool

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000


class Spread(Struct, frozen=True, kw_only=True):
    """Of so many, the middle one and the one that 95 in 100 don't exceed; None of none."""

    count: int
    p50_ms: int | None
    p95_ms: int | None


class Figures(Struct, kw_only=True):
    """One history in a period."""

    requested: int = 0
    """Jobs that were asked for in the period and admitted; waits and completions are theirs."""
    started: int = 0
    succeeded: int = 0
    ended_otherwise: int = 0
    unfinished: int = 0
    waits: dict[str, Spread] = {}
    """From the wish to the first start, by service class, and of ``all``."""
    completions: dict[str, Spread] = {}
    """From the wish to the end, by service class, and of ``all``."""
    promised: int = 0
    """Promises that came due: to start within ``max_wait_s``, and to succeed before the deadline, each by itself."""
    kept: int = 0
    preempted_runs: int = 0
    held_milli_ms: int = 0
    capacity_milli_ms: int = 0
    """Of devices whose node was not fenced."""
    stranded_milli_ms: int = 0
    """Free on devices of which somebody held a part."""
    cost_micro: dict[str, int] = {}
    facts: int = 0

    @property
    def utilisation_ppm(self) -> int:
        """Millionths of the capacity that was held."""
        return self.held_milli_ms * 1_000_000 // self.capacity_milli_ms if self.capacity_milli_ms else 0

    @property
    def kept_ppm(self) -> int | None:
        """Millionths of the promises that came due which were kept; None of none."""
        return self.kept * 1_000_000 // self.promised if self.promised else None

    @property
    def fragmentation_ppm(self) -> int:
        """Millionths of the free capacity that lay on devices of which somebody held a part."""
        free = self.capacity_milli_ms - self.held_milli_ms
        return self.stranded_milli_ms * 1_000_000 // free if free > 0 else 0


class _Held(Struct):
    """Slices of a run."""

    order: Any
    since: int
    started: int | None = None
    ended: int | None = None


class _Job(Struct):
    asked_at: int
    service_class: str
    is_of_period: bool
    started_at: int | None = None
    starts_by: int | None = None
    """Until when its first start was promised, as long as that is open."""
    ends_by: int | None = None


class Reckoning:
    """Figures of one history, fact by fact."""

    def __init__(self, pool: Pool, begin: int, cards: Sequence[Card]) -> None:
        self._figures = Figures()
        self._begin = self._now = begin
        self._cards = cards
        self._capacity: dict[NodeId, dict[DeviceUuid, int]] = {}
        self._models: dict[DeviceUuid, str] = {}
        self._fenced: set[NodeId] = set()
        self._used: Counter[DeviceUuid] = Counter()
        self._held: dict[RunId, _Held] = {}
        self._jobs: dict[JobId, _Job] = {}
        self._specs: dict[JobId, ev.JobSpec] = {}
        self._total = self._used_total = self._stranded = 0
        self._waits: defaultdict[str, list[int]] = defaultdict(list)
        self._completions: defaultdict[str, list[int]] = defaultdict(list)
        self._segments: list[Segment] = []
        for node in pool.nodes.values():
            self._capacity[node.node_id] = {v.device.uuid: v.device.compute_milli for v in node.devices.values()}
            self._models |= {v.device.uuid: v.device.model for v in node.devices.values()}
            if node.state is NodeState.FENCED:
                self._fenced.add(node.node_id)
        for job in pool.jobs.values():
            self._jobs[job.job_id] = _Job(job.requested_at, job.spec.service_class, is_of_period=False)
            self._specs[job.job_id] = job.spec
            for run in job.runs.values():
                if run.holds:
                    self._held[run.run_id] = _Held(run, begin, started=begin if run.started_at else None)
                    self._used.update({piece.device_uuid: piece.compute_milli for piece in run.slices})
        self._measure()

    def reckon(self, entries: Iterable[Entry], asked_at: Mapping[int, int], end: int) -> Figures:
        """The figures up to ``end``; ``asked_at`` says when each wish was recorded."""
        for entry in entries:
            if entry.recorded_at >= end:
                break
            self._pass(entry.recorded_at)
            self._count(entry, asked_at)
        self._pass(end)
        for run_id in list(self._held):
            self._give_back(run_id, None)
        return self._closed(end)

    def _pass(self, now: int) -> None:
        ms = max(0, now // NS_PER_MS - self._now // NS_PER_MS)
        figures = self._figures
        figures.capacity_milli_ms += ms * self._total
        figures.held_milli_ms += ms * self._used_total
        figures.stranded_milli_ms += ms * self._stranded
        self._now = max(self._now, now)

    def _measure(self) -> None:
        """Sums over all devices, after something about nodes changed."""
        self._total = self._used_total = self._stranded = 0
        for node, devices in self._capacity.items():
            if node not in self._fenced:
                for uuid, compute_milli in devices.items():
                    used = self._used[uuid]
                    self._total += compute_milli
                    self._used_total += used
                    self._stranded += compute_milli - used if used else 0

    def _change(self, node: NodeId, uuid: DeviceUuid, by: int) -> None:
        has = self._capacity.get(node, {}).get(uuid, 0)
        before, after = self._used[uuid], self._used[uuid] + by
        self._used[uuid] = after
        if node not in self._fenced and has:
            self._used_total += by
            self._stranded += (has - after if after else 0) - (has - before if before else 0)

    def _count(self, entry: Entry, asked_at: Mapping[int, int]) -> None:
        self._figures.facts += 1
        event = entry.event
        match event:
            case ev.NodeRegistered():
                self._capacity[event.node_id] = {device.uuid: device.compute_milli for device in event.devices}
                self._models |= {device.uuid: device.model for device in event.devices}
                self._fenced.discard(event.node_id)
                self._measure()
            case ev.NodeFenced():
                for run_id in event.runs:
                    self._give_back(run_id, entry.recorded_at)
                self._fenced.add(event.node_id)
                self._measure()
            case ev.JobAdmitted():
                at = asked_at.get(event.answers, entry.recorded_at)
                spec = event.spec
                self._jobs[event.job_id] = _Job(
                    at,
                    spec.service_class,
                    is_of_period=at >= self._begin,
                    starts_by=at + spec.max_wait_s * NS_PER_S if spec.max_wait_s else None,
                    ends_by=spec.deadline_at or None,
                )
                self._specs[event.job_id] = event.spec
                self._figures.requested += at >= self._begin
            case ev.RunPlaced():
                self._held[event.run_id] = _Held(event, entry.recorded_at)
                for piece in event.slices:
                    self._change(event.node_id, piece.device_uuid, piece.compute_milli)
            case ev.RunStarted():
                self._started(event, entry.recorded_at)
            case ev.RunFinished():
                if (held := self._held.get(event.run_id)) is not None:
                    held.ended = entry.recorded_at
            case ev.RunReleased():
                self._give_back(event.run_id, entry.recorded_at)
            case ev.RunStopOrdered(cause=StopCause.PREEMPTED):
                self._figures.preempted_runs += 1
            case ev.JobSucceeded() | ev.JobFailed() | ev.JobCancelled() | ev.JobExpired():
                self._ended(event, entry.recorded_at)
            case _:
                pass

    def _started(self, event: ev.RunStarted, at: int) -> None:
        held = self._held.get(event.run_id)
        if held is None:
            return
        held.started = at
        job = self._jobs.get(held.order.job_id)
        if job is not None and job.started_at is None:
            job.started_at = at
            if job.starts_by is not None:
                self._due(job, is_kept=at <= job.starts_by)
                job.starts_by = None
            if job.is_of_period:
                self._figures.started += 1
                wait = max(0, at - job.asked_at) // NS_PER_MS
                for group in ("all", job.service_class):
                    self._waits[group].append(wait)

    def _ended(self, event: ev.JobSucceeded | ev.JobFailed | ev.JobCancelled | ev.JobExpired, at: int) -> None:
        job = self._jobs.pop(event.job_id, None)
        if job is None or not job.is_of_period:
            return
        if not isinstance(event, ev.JobCancelled):  # who asked for it took it back
            for promised in (job.starts_by, job.ends_by):
                if promised is not None:
                    self._due(job, is_kept=isinstance(event, ev.JobSucceeded) and at <= promised)
        if isinstance(event, ev.JobSucceeded):
            self._figures.succeeded += 1
        else:
            self._figures.ended_otherwise += 1
        took = max(0, at - job.asked_at) // NS_PER_MS
        for group in ("all", job.service_class):
            self._completions[group].append(took)

    def _due(self, job: _Job, *, is_kept: bool) -> None:
        self._figures.promised += job.is_of_period
        self._figures.kept += job.is_of_period and is_kept

    def _give_back(self, run_id: RunId, at: int | None) -> None:
        held = self._held.pop(run_id, None)
        if held is None:
            return
        spec = self._specs.get(held.order.job_id)
        for piece in held.order.slices:
            self._change(held.order.node_id, piece.device_uuid, -piece.compute_milli)
            self._segments.append(
                Segment(
                    run_id, held.order.job_id, held.order.job_id.partition("/")[0], "" if spec is None else spec.queue,
                    "batch" if spec is None else spec.service_class, "", piece.mode,
                    self._models.get(piece.device_uuid, ""), held.order.node_id, piece.device_uuid, piece.compute_milli,
                    piece.memory_mib, piece.compute_milli, piece.memory_mib, None, held.since, at, held.started,
                    held.ended,
                )
            )  # fmt: skip

    def _closed(self, end: int) -> Figures:
        figures = self._figures
        for job in self._jobs.values():
            for promised in (job.starts_by, job.ends_by):
                if promised is not None and promised < end:
                    self._due(job, is_kept=False)
        figures.unfinished = sum(1 for job in self._jobs.values() if job.is_of_period)
        figures.waits = {group: spread(values) for group, values in sorted(self._waits.items())}
        figures.completions = {group: spread(values) for group, values in sorted(self._completions.items())}
        total = metering.total_of(metering.summed(self._segments, (), self._begin, end, self._cards))
        figures.cost_micro = dict(total.cost_micro)
        return figures


def spread(values: Sequence[int]) -> Spread:
    """Count, median and 95th percentile, each one of the values.

    >>> spread([5, 1, 3])
    Spread(count=3, p50_ms=3, p95_ms=5)
    """
    ordered = sorted(values)

    def at(percent: int) -> int | None:
        return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else None

    return Spread(count=len(ordered), p50_ms=at(50), p95_ms=at(95))
