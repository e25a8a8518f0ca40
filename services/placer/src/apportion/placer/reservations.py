"""Nodes that are kept for the first job that has been blocked for long, and who may pass on them meanwhile.

Kept are the nodes that will be free of what runs there the soonest, by the time limits of those runs; where some have
no limit, nobody knows, and the nearest to hosting the job go first. Others may be placed there only if, by their own
limit, they will have left before that instant: so the instant never moves back because of them, and the job's wait is
bounded by the runs that it waits for.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from apportion.contracts.causes import StopCause
from apportion.contracts.ids import JobId, NodeId
from apportion.placer.orders import S
from apportion.placer.rooms import Demand, NodeRoom, replicas_when_empty, shortfall
from apportion.pool.state import JobView, Pool, RunView, grace_s_of

NEVER: Final = 2**63 - 1
"""The end of a run without a time limit."""
START_S: Final = 30
"""Time that a run is given to start: its limit counts from there."""
RELEASE_S: Final = 10
"""Time that it is given to leave once its limit and its grace are over."""
LENGTHS_S: Final = (60, 300, 900, 3_600, 14_400, 43_200, 86_400, 604_800)
"""Jobs are told apart by how long they may take, in these steps, so that short ones don't wait behind long ones."""


class Reservation(NamedTuple):
    """What is kept for one job."""

    job_id: JobId
    nodes: frozenset[NodeId]
    free_at: int
    """When all that runs there will have left at the latest; NEVER where nobody knows."""

    def admits(self, length_s: int, now: int) -> bool:
        """Whether a run of at most this length, grace included, is gone in time; 0: it may take for ever."""
        return length_s > 0 and self.free_at < NEVER and now + (START_S + length_s + RELEASE_S) * S <= self.free_at


def length_of(job: JobView) -> int:
    """How long a run of the job may take, its grace included, rounded up to a step; 0: for ever, or longer than all."""
    if not job.spec.time_limit_s:
        return 0
    at = bisect_left(LENGTHS_S, job.spec.time_limit_s + grace_s_of(job.spec, StopCause.TIME_LIMIT))
    return LENGTHS_S[at] if at < len(LENGTHS_S) else 0


def ends_by(job: JobView, run: RunView) -> int:
    """When the run will have left at the latest."""
    if not job.spec.time_limit_s:
        return NEVER
    began_at = run.started_at or run.placed_at + START_S * S
    return began_at + (job.spec.time_limit_s + grace_s_of(job.spec, StopCause.TIME_LIMIT) + RELEASE_S) * S


def free_at(pool: Pool, node_id: NodeId) -> int:
    """When all that runs on the node will have left at the latest; 0 where nothing does."""
    node = pool.nodes.get(node_id)
    latest = 0
    for run_id in () if node is None else node.runs:
        job = pool.jobs[pool.run_jobs[run_id]]
        latest = max(latest, ends_by(job, job.runs[run_id]))
        if latest >= NEVER:
            break
    return latest


def reserve(demand: Demand, job_id: JobId, rooms: Iterable[tuple[NodeRoom, int]]) -> Reservation | None:
    """The nodes to keep for the job, of these and when each is free; None where all of them would not be enough."""
    missing = demand.replicas
    kept = []
    latest = 0
    for ends_at, _, node_id, count in sorted(_by_end(demand, rooms)):
        kept.append(node_id)
        latest = max(latest, ends_at)
        missing -= count
        if missing <= 0:
            return Reservation(job_id, frozenset(kept), latest)
    return None


def _by_end(demand: Demand, rooms: Iterable[tuple[NodeRoom, int]]) -> Iterator[tuple[int, int, NodeId, int]]:
    for room, ends_at in rooms:
        count = replicas_when_empty(demand, room)
        if count:
            yield ends_at, shortfall(demand, room), room.node_id, count
