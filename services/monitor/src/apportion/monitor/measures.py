"""The pool in the integers that alert rules compare. Pure: from the fold, the figures and what was read last."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from apportion.contracts.causes import DeviceHealth
from apportion.contracts.ids import DeviceUuid, NodeId
from apportion.contracts.samples import DeviceSample
from apportion.monitor.figures import Figures
from apportion.pool.state import JobState, NodeState, Pool

NS_PER_S = 1_000_000_000
LOOKED_AT_S = 300
"""Latency is that of so long ago at most."""
SAMPLES_MIN = 20
"""Of fewer jobs neither a share nor a percentile says much."""


class Seen(Struct, frozen=True, kw_only=True):
    """What was read of devices, streams and the machine."""

    devices: Iterable[tuple[DeviceSample, int]] = ()
    """Each with the seconds for which it has done nothing."""
    pcie_bps: Mapping[DeviceUuid, int] = {}
    """Bytes a second in the direction in which a device moves more, where that is known."""
    lags_ms: Mapping[str, int] = {}
    """By ``consumer/stream``."""
    log_behind: Mapping[str, int] = {}
    disk_pct: int | None = None
    skews_ms: Mapping[NodeId, int] = {}


def measures_of(pool: Pool, figures: Figures, seen: Seen, now: int) -> dict[str, dict[str, int]]:
    """Value by measure and by what it is of. ``now``: ns since the Unix epoch."""
    found: dict[str, dict[str, int]] = {
        "frozen": {"": int(pool.frozen)},
        "fenced": {node_id: int(node.state is NodeState.FENCED) for node_id, node in pool.nodes.items()},
        "device_failed": {
            view.device.uuid: int(view.device.health is DeviceHealth.FAILED)
            for node in pool.nodes.values()
            for view in node.devices.values()
        },
        "lag_ms": dict(seen.lags_ms),
        "log_behind": dict(seen.log_behind),
        "skew_ms": {str(node): abs(ms) for node, ms in seen.skews_ms.items()},
        "pending_s": _pending(pool, now),
        "scheduling_p95_ms": _latency(figures, now),
        "quota_pct": _quotas(pool),
    }
    if seen.disk_pct is not None:
        found["disk_pct"] = {"log": seen.disk_pct}
    if (ratio := figures.success_ratio) is not None and figures.ended_looked_at >= SAMPLES_MIN:
        found["failed_pct"] = {"": round((1 - ratio) * 100)}
    return found | _devices(pool, seen)


def _pending(pool: Pool, now: int) -> dict[str, int]:
    oldest: dict[str, int] = {}
    for job in pool.jobs.values():
        if job.state is JobState.QUEUED and job.hold is None:
            name = job.spec.service_class.value
            waited = (now - max(job.queued_at, job.not_before_at)) // NS_PER_S
            oldest[name] = max(oldest.get(name, 0), waited)
    return oldest


def _latency(figures: Figures, now: int) -> dict[str, int]:
    found = {}
    for name, recent in figures.recent.items():
        fresh = sorted(ms for at, ms in recent if now - at < LOOKED_AT_S * NS_PER_S)
        if len(fresh) >= SAMPLES_MIN:
            found[name] = fresh[len(fresh) * 95 // 100]
    return found


def _quotas(pool: Pool) -> dict[str, int]:
    found = {}
    for name, queue in pool.queues.items():
        shares = [
            used * 100 // most
            for used, most in (
                (queue.used_compute_milli, queue.limit_compute_milli),
                (queue.used_memory_mib, queue.limit_memory_mib),
                (queue.jobs, queue.limit_jobs),
            )
            if most
        ]
        if shares:
            found[str(name)] = max(shares)
    return found


def _devices(pool: Pool, seen: Seen) -> dict[str, dict[str, int]]:
    held = {view.device.uuid for node in pool.nodes.values() for view in node.devices.values() if view.runs}
    memory: dict[str, int] = {}
    heat: dict[str, int] = {}
    links = {
        view.device.uuid: link_bps(view.device.pcie_generation, view.device.pcie_lanes)
        for node in pool.nodes.values()
        for view in node.devices.values()
    }
    pcie = {str(uuid): bps * 100 // links[uuid] for uuid, bps in seen.pcie_bps.items() if links.get(uuid)}
    idle: dict[str, int] = {}
    for sample, idle_s in seen.devices:
        memory[sample.uuid] = sample.used_mib * 100 // max(1, sample.used_mib + sample.free_mib)
        if sample.temperature_c is not None:
            heat[sample.uuid] = sample.temperature_c
        if sample.busy_pct is not None:
            idle[sample.uuid] = idle_s if sample.uuid in held else 0
    return {"memory_pct": memory, "temperature_c": heat, "pcie_pct": pcie, "held_idle_s": idle}


_LANE_BPS = {1: 250, 2: 500, 3: 985, 4: 1_969, 5: 3_938, 6: 7_563}
"""Megabytes a second of one lane in one direction, after the link's own encoding, by PCIe generation."""


def link_bps(generation: int, lanes: int) -> int:
    """Bytes a second that a PCIe link carries in one direction; 0 where it isn't known.

    >>> link_bps(5, 16)
    63008000000
    """
    return _LANE_BPS.get(generation, 0) * lanes * 1_000_000
