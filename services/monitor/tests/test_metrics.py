"""What Prometheus reads: the right numbers, under names that stay, in a number of series that jobs can't grow."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from apportion.contracts import events as ev
from apportion.contracts.causes import DeviceHealth, Pending, RunCause, ServiceClass
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import DeviceUuid, JobId, NodeId, PoolId, TenantId, run_id
from apportion.contracts.samples import DeviceSample
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, a_queue, as_fact
from apportion.monitor import core
from apportion.monitor.figures import Figures
from apportion.monitor.measures import link_bps
from apportion.monitor.notify import Notifier
from apportion.monitor.readings import Marks, Reading, Readings, StreamFill
from apportion.monitor.scrape import PoolMetrics, Sources
from apportion.runtime.clock import ManualClock

S = 1_000_000_000


class Quiet:
    """Readings without a bus."""

    def __init__(self) -> None:
        self.found: list[Reading] = []

    def devices(self) -> list[Reading]:
        return self.found

    def idle_s(self, reading: Reading) -> int:
        return (reading.received_ns - reading.busy_ns) // S

    def lags_s(self) -> Mapping[tuple[str, Stream], float]:
        return {("placer", Stream.FACTS): 1.5, ("log", Stream.WISHES): 0.0}

    def on_log(self) -> dict[Stream, int]:
        return {Stream.FACTS: 40, Stream.WISHES: 2}


class Noon:
    def now(self) -> int:
        return NOON + 100 * S

    def monotonic(self) -> int:
        return 0


class Monitor:
    """The monitor's fold, and what is scraped of it."""

    def __init__(self, folder: Path) -> None:
        self.state = core.initial()
        self.figures = Figures()
        self.readings = Quiet()
        self.seq = 0
        self.registry = CollectorRegistry()
        self.registry.register(
            PoolMetrics(
                Sources(
                    pool=lambda: self.state.pool,
                    figures=self.figures,
                    readings=self.readings,  # type: ignore[arg-type]  # the same questions, answered without a bus
                    clock=Noon(),
                    is_active=lambda: True,
                    skews=lambda: {NodeId("node-1"): 0.25},
                    streams=lambda: {"facts": StreamFill(messages=42, size_bytes=9000, last_seq=42)},
                    log_entries=lambda: 42,
                    log_path=folder / "log.duckdb",
                    is_connected=lambda: True,
                    reconnects=lambda: 3,
                    bus_errors=lambda: 0,
                    alerts=lambda: self.state.alerts,
                    notifier=Notifier(
                        pool=PoolId("main"),
                        webhook_url="",
                        alertmanager_url="",
                        token=None,
                        alerts=lambda: self.state.alerts,
                        clock=Noon(),
                    ),
                )
            )
        )

    def fold(self, event: ev.Fact, *, at: int = NOON, author: str = "") -> None:
        self.seq += 1
        entry = as_fact(event, self.seq, author=author, at=at)
        self.state = core.evolve(self.state, entry)
        self.figures.saw(entry, self.state.pool)

    def scraped(self) -> str:
        return generate_latest(self.registry).decode()

    def values(self) -> dict[str, float]:
        found = {}
        for family in text_string_to_metric_families(self.scraped()):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


@pytest.fixture
def monitor(tmp_path: Path) -> Monitor:
    return Monitor(tmp_path)


def test_the_three_that_sum_a_pool_up(monitor: Monitor) -> None:
    """Utilisation, success rate, scheduling latency: by name, and as the facts say."""
    monitor.fold(a_node(devices=2), author="agent-node-1")
    monitor.fold(a_queue())
    for number, end_at in enumerate((10, 20, 30, 40)):
        name = f"job-{number}"
        monitor.fold(a_job(name), at=NOON)
        monitor.fold(a_placement(f"acme/{name}", compute_milli=500, memory_mib=40_960), at=NOON + end_at * S // 100)
        if number < 3:
            run = run_id(JobId(f"acme/{name}"), 0, 1)
            monitor.fold(ev.RunStarted(run_id=run, node_id=NodeId("node-1"), pid=1, started_at=NOON), at=NOON + 2 * S)
            monitor.fold(ev.RunFinished(run_id=run, node_id=NodeId("node-1"), cause=RunCause.SUCCESS, finished_at=NOON))
            monitor.fold(ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=NOON))
        if number < 2:
            monitor.fold(ev.JobSucceeded(job_id=JobId(f"acme/{name}"), attempts=1, wait_ms=1, run_ms=4_000))
        elif number == 2:
            monitor.fold(ev.JobFailed(job_id=JobId(f"acme/{name}"), attempts=1, cause=RunCause.USER_ERROR))
    monitor.readings.found = [
        Reading(
            node=NodeId("node-1"),
            sample=DeviceSample(
                uuid=DeviceUuid(f"GPU-node-1-{number}"), used_mib=1024, free_mib=3072, busy_pct=busy, power_mw=350_500
            ),
            received_ns=100 * S,
            busy_ns=busy_at * S,
        )
        for number, (busy, busy_at) in enumerate(((0, 30), (80, 100)))
    ]
    said = monitor.values()
    assert said["apportion_utilisation_ratio{kind=allocated,resource=compute}"] == 0.25
    assert said["apportion_utilisation_ratio{kind=allocated,resource=memory}"] == 0.25
    assert said["apportion_utilisation_ratio{kind=busy,resource=compute}"] == 0.4
    assert said["apportion_utilisation_ratio{kind=used,resource=memory}"] == 0.25
    assert said["apportion_success_ratio"] == pytest.approx(2 / 3)
    latency = "apportion_scheduling_latency_seconds"
    assert said[f"{latency}_count{{service_class=batch}}"] == 4
    assert said[f"{latency}_bucket{{le=0.25,service_class=batch}}"] == 2
    assert said[f"{latency}_sum{{service_class=batch}}"] == pytest.approx(1.0)
    assert said["apportion_jobs_ended_total{outcome=succeeded,tenant=acme}"] == 2
    assert said["apportion_devices_held_idle"] == 1
    assert said["hw_power_watts{hw_id=GPU-node-1-0,hw_model=h100-80,hw_parent=node-1}"] == 350.5
    assert said["hw_gpu_utilization{hw_id=GPU-node-1-1,hw_model=h100-80,hw_parent=node-1}"] == 0.8
    assert said["hw_status{hw_id=GPU-node-1-1,hw_parent=node-1,hw_state=ok}"] == 1
    assert said["apportion_consumer_lag_seconds{consumer=placer,stream=facts}"] == 1.5
    assert said["apportion_log_behind_entries{stream=facts}"] == 2


def test_what_waits_is_counted_by_reason_and_the_oldest_by_class(monitor: Monitor) -> None:
    """The queue and why, in two lines."""
    monitor.fold(a_queue())
    monitor.fold(a_job("early"), at=NOON)
    monitor.fold(a_job("late", service_class=ServiceClass.ONLINE), at=NOON + 90 * S)
    monitor.fold(
        ev.JobPendingReasonChanged(job_id=JobId("acme/early"), code=Pending.INSUFFICIENT_GPU, since_at=NOON),
        author="placer",
    )
    said = monitor.values()
    assert said["apportion_pending_jobs{reason=InsufficientGpu}"] == 1
    assert said["apportion_pending_jobs{reason=PendingEvaluation}"] == 1
    assert said["apportion_pending_oldest_seconds{service_class=batch}"] == 100
    assert said["apportion_pending_oldest_seconds{service_class=online}"] == 10
    assert said["apportion_queue_jobs{queue=main}"] == 2


def test_ten_thousand_jobs_of_five_hundred_tenants_make_no_more_series(monitor: Monitor) -> None:
    """A label that grows with the jobs would fill the store of whoever scrapes us."""
    for number in range(4):
        monitor.fold(a_node(f"node-{number}", devices=8), author=f"agent-node-{number}")
    for number in range(200):
        monitor.fold(a_queue(f"queue-{number}", limit_compute_milli=1000))
    causes = list(RunCause)
    for number in range(10_000):
        tenant = TenantId(f"tenant-{number % 500}")
        name = JobId(f"{tenant}/job-{number}")
        node = f"node-{number % 4}"
        monitor.fold(a_job(f"job-{number}", tenant=tenant, service_class=list(ServiceClass)[number % 4]))
        monitor.fold(a_placement(name, node=node, device=number % 8), at=NOON + number)
        run = run_id(name, 0, 1)
        monitor.fold(
            ev.RunFinished(run_id=run, node_id=NodeId(node), cause=causes[number % len(causes)], finished_at=NOON)
        )
        monitor.fold(ev.RunReleased(run_id=run, node_id=NodeId(node), released_at=NOON))
        if number % 10 == 0:
            monitor.fold(
                ev.DeviceHealthChanged(
                    node_id=NodeId(node),
                    device_uuid=DeviceUuid(f"GPU-{node}-0"),
                    before=DeviceHealth.HEALTHY,
                    after=DeviceHealth.HEALTHY,
                    code=f"xid-{number % 900}",
                )
            )
        ended: ev.Fact = ev.JobSucceeded(job_id=name, attempts=1, wait_ms=1, run_ms=1)
        if number % 3 == 0:
            ended = ev.JobFailed(job_id=name, attempts=1, cause=RunCause.USER_ERROR)
        monitor.fold(ended)
    monitor.readings.found = [
        Reading(
            node=NodeId(f"node-{number // 8}"),
            sample=DeviceSample(
                uuid=DeviceUuid(f"GPU-node-{number // 8}-{number % 8}"),
                used_mib=1,
                free_mib=1,
                busy_pct=1,
                temperature_c=1,
                power_mw=1,
                energy_mj=1,
                pcie_sent_bytes=1,
                pcie_received_bytes=1,
                ecc_corrected=1,
                ecc_uncorrected=1,
            ),
            pcie_bps=1,
            received_ns=0,
            busy_ns=0,
        )
        for number in range(32)
    ]
    series = [line for line in monitor.scraped().splitlines() if line and not line.startswith("#")]
    assert len(series) < 2_000, len(series)
    ended_by = Counter(line.partition("{")[0] for line in series)
    assert ended_by["apportion_jobs_ended_total"] <= 2 * 21
    assert 'tenant="other"' in monitor.scraped()
    assert monitor.figures.events["JobAdmitted"] == 10_000


def test_what_a_device_moves_is_told_by_what_its_driver_counted_since_the_sample_before() -> None:
    """The fuller direction counts; a count that begins anew says nothing for once, and neither does half of one."""

    def moved_bps(*samples: tuple[int | None, int | None]) -> int | None:
        readings = Readings(None, ManualClock())  # type: ignore[arg-type]  # it hears nothing here
        for number, (sent, received) in enumerate(samples):
            readings.hear(
                NodeId("node-1"),
                DeviceSample(
                    uuid=DeviceUuid("GPU-1"), used_mib=1, free_mib=1, pcie_sent_bytes=sent, pcie_received_bytes=received
                ),
                number * S,
            )
        (reading,) = readings.devices()
        return reading.pcie_bps

    assert moved_bps((5_000, 100)) is None
    assert moved_bps((5_000, 100), (6_000, 9_100)) == 9_000
    assert moved_bps((5_000, 100), (6_000, 50)) is None
    assert moved_bps((5_000, 100), (6_000, None)) is None
    assert link_bps(4, 16) == 31_504_000_000
    assert link_bps(0, 16) == 0


def test_how_long_what_is_not_read_yet_has_waited() -> None:
    """In seconds, as numbers of messages say nothing to somebody who waits."""
    marks = Marks()
    for seq in range(1, 101):
        marks.saw(seq, NOON + seq * S // 10)
    now = NOON + 12 * S
    assert marks.behind_s(100, now) == 0
    assert marks.behind_s(40, now) == pytest.approx(7.9)
    assert Marks().behind_s(0, now) == 0
