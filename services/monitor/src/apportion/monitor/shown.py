"""The pool as people and programs see it, live or as it was at some moment: plain objects, ready for JSON. Pure."""

from typing import Any

import msgspec

from apportion.contracts.codec import encode_body
from apportion.contracts.events import AlertSilenced
from apportion.monitor.alerts import Firing
from apportion.pool.state import JobState, JobView, NodeView, Pool, RunView


def pool_shown(pool: Pool) -> dict[str, Any]:
    """Everything: where it stands, nodes with devices and slices, jobs that have not ended in order of age, queues."""
    jobs = sorted(pool.jobs.values(), key=lambda job: job.admitted_seq)
    return {
        "as_of": {"facts_seq": pool.seq, "recorded_at": pool.at},
        "frozen": pool.frozen,
        "nodes": [node_shown(node) for _, node in sorted(pool.nodes.items())],
        "jobs": [job_shown(job) for job in jobs],
        "queues": [msgspec.to_builtins(queue) for _, queue in sorted(pool.queues.items())],
    }


def job_shown(job: JobView, *, with_spec: bool = False) -> dict[str, Any]:
    """A job: its state, its share, its runs, and why it waits."""
    reason = job.pending_fact
    shown: dict[str, Any] = {
        "job_id": job.job_id,
        "tenant": job.tenant,
        "queue": job.spec.queue,
        "state": job.state.value,
        "attempt": job.attempt,
        "requested_at": job.requested_at,
        "queued_at": job.queued_at,
        "first_started_at": job.first_started_at,
        "replicas": job.spec.replicas,
        "devices": job.spec.devices,
        "compute_milli": job.spec.compute_milli,
        "memory_mib": job.spec.memory_mib,
        "runs": [run_shown(run) for run in job.runs.values()],
        "pending": job.pending.value if job.state is JobState.QUEUED else None,
        "pending_since_at": job.pending_since_at if job.state is JobState.QUEUED else None,
        "pending_reason": None if reason is None else msgspec.Raw(encode_body(reason)),
        "stop": None if job.stop is None else job.stop.value,
    }
    return {**shown, "spec": job.spec} if with_spec else shown


def run_shown(run: RunView) -> dict[str, Any]:
    """A run and its slices."""
    return {
        "run_id": run.run_id,
        "node_id": run.node_id,
        "state": run.state.value,
        "slices": run.slices,
        "placed_at": run.placed_at,
        "started_at": run.started_at,
        "finished_at": run.finished_at,
        "cause": None if run.cause is None else run.cause.value,
        "exit_code": run.exit_code,
        "holds": run.holds,
    }


def node_shown(node: NodeView) -> dict[str, Any]:
    """A node, its devices, and what is held of them."""
    return {
        "node_id": node.node_id,
        "state": node.state.value,
        "cordon": None if node.cordon is None else node.cordon.value,
        "epoch": node.epoch,
        "session": node.session,
        "simulated": node.simulated,
        "driver_version": node.driver_version,
        "labels": node.labels,
        "cpu_milli": node.cpu_milli,
        "used_cpu_milli": node.used_cpu_milli,
        "memory_mib": node.memory_mib,
        "used_memory_mib": node.used_memory_mib,
        "runs": sorted(node.runs),
        "devices": [
            {
                "uuid": view.device.uuid,
                "index": view.device.index,
                "model": view.device.model,
                "health": view.device.health.value,
                "modes": view.device.modes,
                "compute_milli": view.device.compute_milli,
                "used_compute_milli": view.used_compute_milli,
                "memory_mib": view.device.memory_mib,
                "used_memory_mib": view.used_memory_mib,
                "runs": sorted(view.runs),
            }
            for view in sorted(node.devices.values(), key=lambda view: view.device.index)
        ],
    }


def alert_shown(firing: Firing, silence: AlertSilenced | None, now: int) -> dict[str, Any]:
    """An alert that fires: what, since when, and whether somebody looks at it or nobody is told."""
    seen = firing.acknowledged if firing.acknowledged is not None and firing.acknowledged.until_at > now else None
    return {
        "rule": firing.fact.rule,
        "about": firing.fact.about,
        "severity": firing.fact.severity.value,
        "value": firing.fact.value,
        "threshold": firing.fact.threshold,
        "unit": firing.fact.unit,
        "summary": firing.fact.summary,
        "action": firing.fact.action,
        "raised_at": firing.raised_at,
        "raised_seq": firing.raised_seq,
        "state": "silenced" if silence is not None else "firing" if seen is None else "acknowledged",
        "by": silence.actor if silence is not None else "" if seen is None else seen.actor,
        "until_at": silence.until_at if silence is not None else None if seen is None else seen.until_at,
    }
