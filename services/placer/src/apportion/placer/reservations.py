"""Nodes that are kept for the first job that has been blocked for long, and who may pass on them meanwhile.

Kept are the nodes that will be free of what runs there the soonest, by the time limits of those runs; where some have
no limit, nobody knows, and the nearest to hosting the job go first. Others may be placed there only if, by their own
limit, they will have left before that instant: so the instant never moves back because of them, and the job's wait is
bounded by the runs that it waits for.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge
from typing import Final, NamedTuple

from apportion.contracts.causes import StopCause
from apportion.contracts.ids import JobId, NodeId
from apportion.placer.orders import S
from apportion.placer.rooms import Demand, NodeRoom, Out, places_on, replicas_when_empty, shortfall
from apportion.pool.state import JobView, NodeState, Pool, RunView, grace_s_of

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


def due_at(job: JobView, after_s: int) -> int:
    """From when on nodes may be kept for the job, once it has been blocked for ``after_s``; NEVER where that is < 0."""
    if after_s < 0:
        return NEVER
    if job.spec.max_wait_s:
        # It said how long it can wait: half of that is left for what is kept for it to become free.
        after_s = min(after_s, job.spec.max_wait_s // 2)
    return max(job.queued_at, job.not_before_at) + after_s * S


def next_due(jobs: Iterable[JobView], after_s: int, now: int) -> int | None:
    """When time alone may have nodes kept for another one of these jobs."""
    return min((at for job in jobs if now < (at := due_at(job, after_s)) < NEVER), default=None)


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


Kept = tuple[int, int, NodeId, int]
"""When a node is free of what runs there, how far it is from hosting one replica, its name, and how many it hosts."""


class Board:
    """The nodes that would host one demand if they were empty, those that are free the soonest first.

    It follows the folded state by looking again at nodes that changed.
    """

    __slots__ = ("_entries", "_kept", "_seen", "_seen_ends")

    def __init__(self) -> None:
        self._kept: dict[NodeId, Kept] = {}
        self._entries: list[Kept] = []
        self._seen = self._seen_ends = 0

    def follow(
        self,
        demand: Demand,
        rooms: Mapping[NodeId, NodeRoom],
        changed: dict[NodeId, int],
        ends: dict[NodeId, int],
        pool: Pool,
    ) -> None:
        """Look again at nodes that changed, or on which a run ends at another time; both hold counts of changes."""
        is_first = not self._kept
        nodes = {*_since(changed, self._seen), *_since(ends, self._seen_ends)}
        self._seen = next(reversed(changed.values()), self._seen)
        self._seen_ends = next(reversed(ends.values()), self._seen_ends)
        for node_id in nodes:
            before = self._kept.pop(node_id, None)
            after = kept_of(demand, rooms[node_id], free_at(pool, node_id)) if node_id in rooms else None
            if after is not None:
                self._kept[node_id] = after
            if is_first or before == after:
                continue
            if before is not None:
                del self._entries[bisect_left(self._entries, before)]
            if after is not None:
                insort(self._entries, after)
        if is_first:
            self._entries = sorted(self._kept.values())

    def reserve(
        self,
        demand: Demand,
        job_id: JobId,
        others: Mapping[NodeId, Kept | None],
        *,
        domain_of: Callable[[NodeId], str] | None = None,
    ) -> Reservation | None:
        """The nodes to keep for the job, as few as it takes; None where all of them would not be enough.

        Of nodes among ``others`` holds what stands there; None: they can't be kept. With ``domain_of`` all nodes are of
        one domain: the one that is free the soonest, of those with the fewest nodes, and of these the first by name.
        """
        kept: dict[str, list[NodeId]] = {}
        missing: dict[str, int] = {}
        found: list[tuple[int, int, str]] = []
        folded = (entry for entry in self._entries if entry[2] not in others)
        for ends_at, _, node_id, count in merge(folded, sorted(entry for entry in others.values() if entry)):
            if found and (domain_of is None or ends_at > found[0][0]):
                break
            name = "" if domain_of is None else domain_of(node_id)
            left = missing.get(name, demand.replicas)
            if left <= 0:
                continue
            kept.setdefault(name, []).append(node_id)
            missing[name] = left - count
            if left <= count:
                found.append((ends_at, len(kept[name]), name))
        if not found:
            return None
        latest, _, name = min(found)
        return Reservation(job_id, frozenset(kept[name]), latest)


def kept_of(demand: Demand, room: NodeRoom, ends_at: int) -> Kept | None:
    """What a board says of the node; None where it never hosts the demand."""
    if room.state is not NodeState.READY or isinstance(places_on(demand, room.kind), Out):
        return None
    count = replicas_when_empty(demand, room)
    return (ends_at, shortfall(demand, room), room.node_id, count) if count else None


def _since(changed: dict[NodeId, int], seen: int) -> Iterator[NodeId]:
    for node_id, change in reversed(changed.items()):
        if change <= seen:
            return
        yield node_id
