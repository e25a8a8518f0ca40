"""The pool in Prometheus' terms: read whenever somebody scrapes, from the fold, the figures and the last readings.

Names are an interface (docs/metrics.md lists them, deploy/ builds on them). The three that sum a pool up are
``apportion_utilisation_ratio``, ``apportion_success_ratio`` and ``apportion_scheduling_latency_seconds``. What
OpenTelemetry has a word for has its name: ``hw_*``, with the device's UUID as ``hw_id``.
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from apportion.contracts.causes import DeviceHealth
from apportion.contracts.events import Device
from apportion.contracts.ids import NodeId
from apportion.monitor.alerts import Alerts
from apportion.monitor.figures import OTHER, Figures, Histogram
from apportion.monitor.measures import link_bps
from apportion.monitor.notify import Notifier
from apportion.monitor.readings import Reading, Readings, StreamFill
from apportion.pool.state import JobState, NodeState, Pool
from apportion.runtime.clock import Clock

MIB: Final = 1024 * 1024
NS: Final = 1_000_000_000
HELD_IDLE_S: Final = 60
"""A device that runs hold and that did nothing for so long is held but idle."""


class Sources(Struct, kw_only=True):
    """Where the numbers come from. Called from the thread that answers scrapes: they read, and wait for nothing."""

    pool: Callable[[], Pool]
    figures: Figures
    readings: Readings
    clock: Clock
    is_active: Callable[[], bool]
    skews: Callable[[], Mapping[NodeId, float]]
    streams: Callable[[], Mapping[str, StreamFill]]
    log_entries: Callable[[], int]
    log_path: Path
    is_connected: Callable[[], bool]
    reconnects: Callable[[], int]
    bus_errors: Callable[[], int]
    alerts: Callable[[], Alerts]
    notifier: Notifier


class PoolMetrics(Collector):
    """Everything that the monitor knows in numbers."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources

    def collect(self) -> Iterator[Metric]:
        """All families; a scrape that meets a changing pool comes again."""
        for _ in range(5):
            try:
                return iter(self._families())
            except RuntimeError:  # a dictionary grew under our eyes: the loop folds while this thread reads
                continue
        return iter(())

    def _families(self) -> list[Metric]:
        pool = self._from.pool()
        return [
            *self._utilisation(pool),
            *self._jobs(pool),
            *self._queues(pool),
            *self._nodes(pool),
            *self._hardware(pool),
            *self._streams(),
            *self._process(),
        ]

    # The pool

    def _utilisation(self, pool: Pool) -> list[Metric]:
        ratio = GaugeMetricFamily(
            "apportion_utilisation_ratio",
            "Share of the usable devices that is allocated (held by runs), or at work (as sensors say).",
            labels=["resource", "kind"],
        )
        compute = Counter[str]()
        memory = Counter[str]()
        held = set()
        for node in pool.nodes.values():
            for view in node.devices.values():
                usable = node.state is not NodeState.FENCED and view.device.health is DeviceHealth.HEALTHY
                compute["total"] += view.device.compute_milli if usable else 0
                memory["total"] += view.device.memory_mib if usable else 0
                compute["allocated"] += view.used_compute_milli
                memory["allocated"] += view.used_memory_mib
                if view.runs:
                    held.add(view.device.uuid)
        fresh = list(self._from.readings.devices())
        busy = [reading.sample.busy_pct for reading in fresh if reading.sample.busy_pct is not None]
        used = sum(reading.sample.used_mib for reading in fresh)
        found: dict[tuple[str, str], float] = {}
        if compute["total"]:
            found["compute", "allocated"] = compute["allocated"] / compute["total"]
            found["memory", "allocated"] = memory["allocated"] / memory["total"]
        if busy:
            found["compute", "busy"] = sum(busy) / len(busy) / 100
            found["memory", "used"] = used / max(1, sum(r.sample.used_mib + r.sample.free_mib for r in fresh))
        for labels, value in sorted(found.items()):
            ratio.add_metric(labels, value)
        amounts = GaugeMetricFamily("apportion_compute_milli", "Thousandths of a device.", labels=["kind"])
        amounts.add_metric(["total"], compute["total"])
        amounts.add_metric(["allocated"], compute["allocated"])
        size = GaugeMetricFamily("apportion_memory_bytes", "Device memory.", labels=["kind"])
        size.add_metric(["total"], memory["total"] * MIB)
        size.add_metric(["allocated"], memory["allocated"] * MIB)
        idle = sum(1 for r in fresh if r.sample.uuid in held and self._from.readings.idle_s(r) >= HELD_IDLE_S)
        return [
            ratio,
            amounts,
            size,
            _gauge(
                "apportion_devices_held_idle", f"Devices that runs hold and that did nothing for {HELD_IDLE_S} s.", idle
            ),
            _gauge("apportion_control_plane_frozen", "1 while nothing is placed or fenced.", int(pool.frozen)),
        ]

    def _jobs(self, pool: Pool) -> list[Metric]:
        figures = self._from.figures
        now = self._from.clock.now()
        jobs = list(pool.jobs.values())
        states = Counter(job.state.value for job in jobs)
        reasons: Counter[str] = Counter()
        oldest: dict[str, float] = {}
        for job in jobs:
            if job.state is JobState.QUEUED:
                reasons[job.pending.value] += 1
                waited = max(0, now - max(job.queued_at, job.not_before_at)) / NS
                name = job.spec.service_class.value
                oldest[name] = max(oldest.get(name, 0.0), waited)
        runs = Counter(run.state.value for job in jobs for run in list(job.runs.values()) if run.holds)
        return [
            *(
                []
                if (ratio := figures.success_ratio) is None
                else [
                    _gauge(
                        "apportion_success_ratio",
                        "Of the last 1,000 jobs that ended by themselves, those that succeeded.",
                        ratio,
                    )
                ]
            ),
            _histograms(
                "apportion_scheduling_latency_seconds",
                "From queued (or due) to placed, an attempt.",
                {(name,): one for name, one in figures.scheduling.items()},
                labels=["service_class"],
            ),
            _histograms("apportion_start_latency_seconds", "From placed to started, a run.", {(): figures.starting}),
            _histograms(
                "apportion_job_wait_seconds",
                "From admitted to the first start of a job's first attempt.",
                {(name,): one for name, one in figures.waiting.items()},
                labels=["service_class"],
            ),
            _histograms("apportion_job_run_seconds", "Run time of jobs that succeeded.", {(): figures.running}),
            _histograms(
                "apportion_migration_downtime_seconds",
                "Between losing its place and running again, a job.",
                {(): figures.downtime},
            ),
            _gauges(
                "apportion_jobs", "Jobs that have not ended.", "state", {s.value: states[s.value] for s in JobState}
            ),
            _gauges("apportion_runs", "Runs that hold slices.", "state", dict(runs)),
            _gauges("apportion_pending_jobs", "Jobs that wait, by reason.", "reason", dict(reasons)),
            _gauges(
                "apportion_pending_oldest_seconds",
                "How long the first in line has waited.",
                "service_class",
                dict(oldest),
            ),
            _counters("apportion_jobs_ended", "Jobs that ended.", ["outcome", "tenant"], figures.jobs_ended),
            _counters("apportion_runs_ended", "Runs that ended.", ["cause"], figures.runs_ended),
            _counters("apportion_wishes_refused", "Wishes that were refused.", ["code"], figures.refused),
            _counters("apportion_migrations", "Jobs that lost their place and run again.", ["cause"], figures.moved),
            _counters("apportion_device_faults", "Changes of a device's health.", ["code"], figures.device_faults),
            _counters("apportion_events", "Entries folded, by type.", ["type"], figures.events),
            _counter("apportion_preemptions", "Runs told to give their slices back.", figures.preempted),
            _counter("apportion_undecodable", "Messages that could not be read.", figures.undecodable),
        ]

    def _queues(self, pool: Pool) -> list[Metric]:
        used: defaultdict[tuple[str, ...], float] = defaultdict(float)
        limit: defaultdict[tuple[str, ...], float] = defaultdict(float)
        jobs: Counter[str] = Counter()
        for name, queue in sorted(pool.queues.items()):
            label = self._from.figures.queues(name)
            used[label, "compute_milli"] += queue.used_compute_milli
            used[label, "memory_mib"] += queue.used_memory_mib
            jobs[label] += queue.jobs
            if label != OTHER:
                for resource in ("compute_milli", "memory_mib"):
                    if (most := getattr(queue, f"limit_{resource}", None)) is not None:
                        limit[label, resource] = most
        return [
            _labelled("apportion_queue_used", "What the queue's runs hold.", ["queue", "resource"], used),
            _labelled("apportion_queue_limit", "What its runs may hold.", ["queue", "resource"], limit),
            _gauges("apportion_queue_jobs", "Jobs of the queue that have not ended.", "queue", dict(jobs)),
        ]

    def _nodes(self, pool: Pool) -> list[Metric]:
        states = Counter(node.state.value for node in pool.nodes.values())
        health = Counter(view.device.health.value for node in pool.nodes.values() for view in node.devices.values())
        return [
            _gauges("apportion_nodes", "Nodes, by state.", "state", {s.value: states[s.value] for s in NodeState}),
            _gauges(
                "apportion_devices", "Devices, by health.", "health", {h.value: health[h.value] for h in DeviceHealth}
            ),
            _gauges(
                "apportion_node_clock_skew_seconds",
                "By how much a node's wall clock is ahead of the monitor's.",
                "node",
                {str(node): skew for node, skew in self._from.skews().items()},
            ),
        ]

    def _hardware(self, pool: Pool) -> list[Metric]:
        labels = ["hw_id", "hw_parent", "hw_model"]
        models = {view.device.uuid: view.device for node in pool.nodes.values() for view in node.devices.values()}
        wanted: list[tuple[str, str, Callable[[Reading], float | None]]] = [
            ("hw_gpu_utilization", "Share of time in which any kernel ran.", _busy),
            ("hw_gpu_memory_usage_bytes", "Memory held by processes.", lambda r: r.sample.used_mib * MIB),
            (
                "hw_gpu_memory_limit_bytes",
                "Memory that there is.",
                lambda r: (r.sample.used_mib + r.sample.free_mib) * MIB,
            ),
            (
                "hw_gpu_memory_utilization",
                "Share of the memory that is held.",
                lambda r: r.sample.used_mib / max(1, r.sample.used_mib + r.sample.free_mib),
            ),
            ("hw_temperature_celsius", "Of the chip.", lambda r: r.sample.temperature_c),
            ("hw_power_watts", "Drawn.", lambda r: None if r.sample.power_mw is None else r.sample.power_mw / 1000),
            (
                "apportion_device_pcie_ratio",
                "Share of what its PCIe link carries, in the direction in which it moves more.",
                lambda r: _share_of_link(r, models[r.sample.uuid]),
            ),
            ("apportion_device_idle_seconds", "Since it last did anything.", self._from.readings.idle_s),
        ]
        readings = [r for r in self._from.readings.devices() if r.sample.uuid in models]
        families: list[Metric] = []
        for name, about, read in wanted:
            family = GaugeMetricFamily(name, about, labels=labels)
            for reading in readings:
                if (value := read(reading)) is not None:
                    family.add_metric([reading.sample.uuid, reading.node, models[reading.sample.uuid].model], value)
            families.append(family)
        energy = CounterMetricFamily("hw_energy_joules", "Since the driver was loaded.", labels=labels)
        for reading in readings:
            if reading.sample.energy_mj is not None:
                model = models[reading.sample.uuid].model
                energy.add_metric([reading.sample.uuid, reading.node, model], reading.sample.energy_mj / 1000)
        moved = CounterMetricFamily(
            "hw_gpu_io_bytes",
            "Over PCIe; the driver may begin to count anew.",
            labels=[*labels, "network_io_direction"],
        )
        errors = CounterMetricFamily(
            "hw_errors", "Memory errors since the driver was loaded.", labels=[*labels, "error_type"]
        )
        for reading in readings:
            sample = reading.sample
            device = [sample.uuid, reading.node, models[sample.uuid].model]
            for counter, kind, value in (
                (moved, "transmit", sample.pcie_sent_bytes),
                (moved, "receive", sample.pcie_received_bytes),
                (errors, "corrected", sample.ecc_corrected),
                (errors, "uncorrected", sample.ecc_uncorrected),
            ):
                if value is not None:
                    counter.add_metric([*device, kind], value)
        status = GaugeMetricFamily(
            "hw_status", "1 for the state that the device is in.", labels=["hw_id", "hw_parent", "hw_state"]
        )
        for node_id, node in sorted(pool.nodes.items()):
            for view in node.devices.values():
                status.add_metric([view.device.uuid, node_id, _HW_STATES[view.device.health]], 1)
        return [*families, energy, moved, errors, status]

    # Bus and log

    def _streams(self) -> list[Metric]:
        fills = self._from.streams()
        now = {name: float(fill.last_seq) for name, fill in fills.items()}
        lag = GaugeMetricFamily(
            "apportion_consumer_lag_seconds",
            "For how long what a consumer has not read yet has been waiting.",
            labels=["consumer", "stream"],
        )
        for (consumer, stream), seconds in self._from.readings.lags_s().items():
            lag.add_metric([consumer, stream.value], seconds)
        behind = {
            stream.value: max(0.0, now.get(stream.value, 0.0) - seq)
            for stream, seq in self._from.readings.on_log().items()
        }
        return [
            lag,
            _gauges(
                "apportion_stream_messages",
                "Messages that the bus holds.",
                "stream",
                {n: f.messages for n, f in fills.items()},
            ),
            _gauges("apportion_stream_bytes", "What they take.", "stream", {n: f.size_bytes for n, f in fills.items()}),
            _gauges("apportion_stream_last_sequence", "Of the newest message.", "stream", now),
            _gauges("apportion_log_behind_entries", "Messages that the bus has and the log has not.", "stream", behind),
            _gauge("apportion_log_entries", "Rows of the log.", self._from.log_entries()),
            _gauge("apportion_bus_connected", "1 while the monitor is connected.", int(self._from.is_connected())),
            _counter("apportion_bus_reconnects", "Of the monitor.", self._from.reconnects()),
            _counter("apportion_bus_errors", "Slow consumers, refused permissions.", self._from.bus_errors()),
        ]

    def _process(self) -> list[Metric]:
        firing: Counter[tuple[str, ...]] = Counter(
            (one.fact.rule, one.fact.severity.value) for one in list(self._from.alerts().firing.values())
        )
        path = self._from.log_path
        disk = shutil.disk_usage(path.parent)
        return [
            _gauge("apportion_log_bytes", "Of the log's file.", path.stat().st_size if path.exists() else 0),
            _gauge("apportion_disk_free_bytes", "Where the log lies.", disk.free),
            _gauge("apportion_disk_bytes", "Where the log lies.", disk.total),
            _gauge(
                "apportion_monitor_active",
                "1 for the process that decides, 0 for a standby.",
                int(self._from.is_active()),
            ),
            _labelled("apportion_alerts_firing", "Alerts that are raised, by rule.", ["rule", "severity"], firing),
            _counter("apportion_alerts_delivered", "To a webhook or Alertmanager.", self._from.notifier.delivered),
            _counter("apportion_alerts_undelivered", "Given up.", self._from.notifier.failed),
        ]


_HW_STATES: Final = {DeviceHealth.HEALTHY: "ok", DeviceHealth.DEGRADED: "degraded", DeviceHealth.FAILED: "failed"}


def _share_of_link(reading: Reading, device: Device) -> float | None:
    most = link_bps(device.pcie_generation, device.pcie_lanes)
    return reading.pcie_bps / most if reading.pcie_bps is not None and most else None


def _busy(reading: Reading) -> float | None:
    return None if reading.sample.busy_pct is None else reading.sample.busy_pct / 100


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value=value)


def _gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(name, about, [label], {(key,): value for key, value in values.items()})


def _labelled(name: str, about: str, labels: list[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(list(key), value)
    return family


def _counters(
    name: str, about: str, labels: list[str], values: Mapping[str, int] | Mapping[tuple[str, str], int]
) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    return family


def _histograms(
    name: str, about: str, values: Mapping[tuple[str, ...], Histogram], *, labels: list[str] | None = None
) -> Metric:
    family = HistogramMetricFamily(name, about, labels=labels or [])
    for key, one in sorted(values.items()):
        family.add_metric(list(key), one.buckets(), sum_value=one.total)
    return family
