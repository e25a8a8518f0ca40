"""How soon what a fenced node held is placed again: by whether there was room, and whether deciding itself was broken.

Pure: a fold of a pool's facts. *Room* is judged at the fence: after everything that waits then, and everything else
that the node held, has been given a device of the ready nodes, one is left for each replica. Host memory and processors
are not looked at, so use it on pools where devices are what is short. *Hindered* is what happened while something
between the facts and the decision was broken on purpose: a service, the bus, messages, a clock, the disk.
"""

from collections.abc import Iterable
from statistics import median, quantiles

from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import DeviceHealth
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import JobId, job_of_run
from apportion.pool.state import JobState, Pool, evolve

NS_PER_S = 1_000_000_000
HINDERING = ("service-", "placer-", "bus-", "message-", "clock-", "disk-")


class Replaced(Struct, kw_only=True):
    """One job that lost runs to a fence. Instants in ns since the Unix epoch, by the bus; 0: not yet."""

    job_id: JobId
    fenced_at: int
    had_room: bool
    requeued_at: int = 0
    placed_at: int = 0
    hindered_by: set[str] = set()
    """Kinds of fault in force at some time between the fence and the placement."""


def replaced(entries: Iterable[Entry]) -> list[Replaced]:
    """Every job that lost runs to a fence, was requeued and placed again, in the order of the placements."""
    pool = Pool()
    waiting: dict[JobId, Replaced] = {}
    active: dict[str, str] = {}
    done = []
    for entry in entries:
        event = entry.event
        lost = _jobs_on(pool, event) if isinstance(event, ev.NodeFenced) else ()
        pool = evolve(pool, entry)
        match event:
            case ev.FaultInjected() if event.kind.startswith(HINDERING):
                active[event.fault_id] = event.kind.value
                for one in waiting.values():
                    one.hindered_by.add(event.kind.value)
            case ev.FaultCleared():
                active.pop(event.fault_id, None)
            case ev.NodeFenced():
                for job_id in lost:
                    waiting[job_id] = Replaced(
                        job_id=job_id,
                        fenced_at=entry.recorded_at,
                        had_room=has_room(pool, lost, job_id, entry.recorded_at),
                        hindered_by=set(active.values()),
                    )
            case ev.JobRequeued() if event.job_id in waiting:
                waiting[event.job_id].requeued_at = entry.recorded_at
            case ev.RunPlaced() if (job_id := job_of_run(event.run_id)) in waiting and waiting[job_id].requeued_at:
                one = waiting.pop(job_id)
                one.placed_at = entry.recorded_at
                done.append(one)
            case ev.JobSucceeded() | ev.JobFailed() | ev.JobCancelled() | ev.JobExpired():
                waiting.pop(event.job_id, None)
            case _:
                pass
    return done


def _jobs_on(pool: Pool, event: ev.NodeFenced) -> tuple[JobId, ...]:
    return tuple(sorted({job_of_run(run_id) for run_id in event.runs} & pool.jobs.keys()))


def has_room(pool: Pool, lost: Iterable[JobId], asked: JobId, now: int) -> bool:
    """True where the job fits on ready nodes once all that waits, and all else that was lost, was given devices."""
    free = [
        [view.free_compute_milli, view.free_memory_mib]
        for node in pool.nodes.values()
        if node.is_usable
        for view in node.devices.values()
        if view.device.health is DeviceHealth.HEALTHY
    ]
    others = {
        job_id
        for job_id, job in pool.jobs.items()
        if job.state is JobState.QUEUED and job.not_before_at <= now and job.hold is None
    } | set(lost)
    for job_id in (*sorted(others - {asked}), asked):
        fits = job_id in pool.jobs and _take(free, pool.jobs[job_id].spec)
    return fits


def _take(free: list[list[int]], spec: ev.JobSpec) -> bool:
    """Whether all replicas found devices, the fullest that have room first; they are taken only then."""
    taken = []
    for _ in range(max(1, spec.replicas_least) * spec.devices):
        fitting = [one for one in free if one[0] >= spec.compute_milli and one[1] >= spec.memory_mib]
        if not fitting:
            break
        device = min(fitting)
        device[0] -= spec.compute_milli
        device[1] -= spec.memory_mib
        taken.append(device)
    else:
        return True
    for device in taken:
        device[0] += spec.compute_milli
        device[1] += spec.memory_mib
    return False


class Sort(Struct, frozen=True, kw_only=True):
    """Jobs that met the same conditions, and the seconds from the fence to their being placed again."""

    had_room: bool
    is_hindered: bool
    jobs: int
    p50_s: float = 0.0
    p95_s: float = 0.0
    max_s: float = 0.0
    requeued_s_p50: float = 0.0
    """From the fence until admission let the next attempt begin: the first part of it."""


def sorts(found: list[Replaced]) -> list[Sort]:
    """All four of them, those with room and unhindered first."""
    result = []
    for had_room in (True, False):
        for is_hindered in (False, True):
            some = [one for one in found if one.had_room is had_room and bool(one.hindered_by) is is_hindered]
            whole = [(one.placed_at - one.fenced_at) / NS_PER_S for one in some]
            sort = Sort(had_room=had_room, is_hindered=is_hindered, jobs=len(some))
            if some:
                sort = replace(
                    sort,
                    p50_s=median(whole),
                    p95_s=percentile_95(whole),
                    max_s=max(whole),
                    requeued_s_p50=median((one.requeued_at - one.fenced_at) / NS_PER_S for one in some),
                )
            result.append(sort)
    return result


def percentile_95(values: list[float]) -> float:
    """95 of 100 are at most this, between neighbours in proportion."""
    return values[0] if len(values) == 1 else quantiles(values, n=20, method="inclusive")[-1]
