"""Whom to stop so that a job that can't be placed can: the smallest set, the newest first, and nobody for nothing.

Pure arithmetic over rooms. Who may be stopped for whom is the caller's rule: a class before another, a queue below its
guarantee before one above its own. A job is a unit: whoever loses one replica loses all of them, and what they hold on
other nodes counts as freed, too. A set is only given where it is enough; and none of it can be left out.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Final, NamedTuple

from msgspec.structs import replace

from apportion.contracts.ids import JobId, NodeId, RunId
from apportion.placer.constraints import Kind, Limits
from apportion.placer.orders import CLASS_RANK
from apportion.placer.rooms import (
    Demand,
    Fit,
    NodeRoom,
    Out,
    hidden,
    look,
    places_on,
    room_of_node,
    with_run,
)
from apportion.placer.state import begun_at, protected_until
from apportion.pool.state import DeviceView, JobState, JobView, NodeState, NodeView, Pool, RunState, RunView

EXACT_JOBS: Final = 8
"""With at most so many jobs on a node the smallest set is found by trying them all; beyond, by adding the newest."""
NODES_MAX: Final = 256
"""Nodes that are looked at for one decision: those with the newest of the jobs that may be stopped."""
_LIVE: Final = frozenset({RunState.PLACED, RunState.STARTED})

Taken = Mapping[NodeId, list[tuple[Demand, tuple[int, ...], str]]]
"""What a round has placed on a node beyond the folded state: demand, places of the devices, tenant."""


class Plan(NamedTuple):
    """Whom to stop, and where the room is then kept."""

    victims: tuple[JobId, ...]
    """The newest first."""
    runs: tuple[RunView, ...]
    """All that they run, in the order of their ids."""
    nodes: tuple[NodeId, ...]
    """Where the replicas would go."""
    considered: int
    """Jobs that might have been stopped."""


def outranks(preemptor: JobView, victim: JobView) -> bool:
    """Whether the one is of a class before the other's. Never both ways, so nobody stops whom he was stopped for."""
    return CLASS_RANK[preemptor.spec.service_class] < CLASS_RANK[victim.spec.service_class]


def is_evictable(job: JobView, now: int, spares_s: int) -> bool:
    """Whether the job may be stopped for another at all: it agreed to it, runs, and has had its protected time."""
    if not job.spec.preemptible or job.state is not JobState.RUNNING:
        return False
    runs = [run for run in job.runs.values() if run.holds]
    if not runs or any(run.stop is not None or run.state not in _LIVE for run in runs):
        return False
    return protected_until(job, spares_s) <= now


class Planner:
    """Looks for victims on top of what a round has placed so far."""

    def __init__(
        self,
        pool: Pool,
        rooms: Callable[[NodeId], NodeRoom],
        taken: Taken,
        kinds: dict[object, Kind],
        limits: Limits,
    ) -> None:
        self._pool = pool
        self._rooms = rooms
        self._taken = taken
        self._kinds = kinds
        self._limits = limits

    def victims(
        self,
        demand: Demand,
        candidates: Iterable[JobView],
        *,
        usable: Callable[[NodeId], bool],
        fits: Iterable[NodeId],
        victims_max: int,
    ) -> Plan | None:
        """The smallest set found of the candidates; None where none within ``victims_max`` is enough.

        A candidate goes with all the runs that it has; to let a job go on with fewer, give a view of it for each part.
        ``usable`` says where the replicas may go, and ``fits`` which nodes can host one as things are.
        """
        allowed = sorted(candidates, key=_newest_first)
        if not allowed or victims_max <= 0:
            return None
        search = _Search(self, demand, usable)
        missing = demand.replicas
        for node_id in fits:
            if usable(node_id):
                missing -= search.fitting(node_id)
                if missing <= 0:
                    return None  # it fits as it is: whatever keeps it waiting, nobody has to go for it
        on: dict[NodeId, list[JobView]] = {}
        for job in allowed:
            for node_id in sorted({run.node_id for run in job.runs.values() if run.holds}):
                if (node_id in on or len(on) < NODES_MAX) and usable(node_id) and search.is_eligible(node_id):
                    on.setdefault(node_id, []).append(job)
        while missing > search.gained:
            step = search.best_step(on, victims_max)
            if step is None:
                return None
            search.evict(step)
        search.prune(missing)
        victims = sorted(search.evicted, key=_newest_first)
        runs = sorted((run for job in victims for run in job.runs.values() if run.holds), key=lambda run: run.run_id)
        return Plan(
            tuple(dict.fromkeys(job.job_id for job in victims)),
            tuple(runs),
            search.hosts(demand.replicas),
            len(allowed),
        )

    def room(self, node_id: NodeId, gone: frozenset[RunId]) -> NodeRoom:
        """The node as it would be without these runs."""
        if not gone:
            return self._rooms(node_id)
        room = room_of_node(_without(self._pool.nodes[node_id], self._pool, gone), self._kinds, self._limits)
        for demand, picks, tenant in self._taken.get(node_id, ()):
            room = with_run(demand, room, picks, tenant)  # type: ignore[arg-type]  # a tenant's id
        return room


class _Search:
    """One search: who is to go so far, and what that gives on each node."""

    def __init__(self, planner: Planner, demand: Demand, usable: Callable[[NodeId], bool]) -> None:
        self._planner = planner
        self._demand = demand
        self._usable = usable
        self.evicted: list[JobView] = []
        self._before: dict[NodeId, int] = {}
        self._after: dict[NodeId, int] = {}

    @property
    def gained(self) -> int:
        """Replicas that fit beyond those that fit as it is."""
        return sum(count - self.fitting(node_id) for node_id, count in self._after.items())

    def is_eligible(self, node_id: NodeId) -> bool:
        """Whether the node could host the demand at all."""
        room = self._planner.room(node_id, frozenset())
        return room.state is NodeState.READY and not isinstance(places_on(self._demand, room.kind), Out)

    def fitting(self, node_id: NodeId) -> int:
        """Replicas that fit on the node as it is."""
        found = self._before.get(node_id)
        if found is None:
            found = self._before[node_id] = capacity(self._demand, self._planner.room(node_id, frozenset()))
        return found

    def hosts(self, replicas: int) -> tuple[NodeId, ...]:
        """Nodes that the replicas need once the victims are gone: theirs first, and as many others as it takes."""
        found: list[NodeId] = []
        for counts in (self._after, self._before):
            for node_id in sorted(counts, key=lambda node_id: (-counts[node_id], node_id)):
                if replicas > 0 and counts[node_id] and node_id not in found:
                    found.append(node_id)
                    replicas -= counts[node_id]
        return tuple(sorted(found))

    def evict(self, jobs: Iterable[JobView]) -> None:
        """Let these go as well."""
        self.evicted.extend(jobs)
        self._after = self._counts(self.evicted)

    def prune(self, missing: int) -> None:
        """Keep whoever isn't needed after all, the oldest first."""
        for job in sorted(self.evicted, key=_newest_first, reverse=True):
            rest = [other for other in self.evicted if other is not job]
            counts = self._counts(rest)
            if sum(count - self.fitting(node_id) for node_id, count in counts.items()) >= missing:
                self.evicted, self._after = rest, counts

    def best_step(self, on: Mapping[NodeId, list[JobView]], victims_max: int) -> tuple[JobView, ...] | None:
        """The fewest further jobs, then the least work, then the newest, that let one more replica fit on some node."""
        most = victims_max - len(self.evicted)
        best: tuple[tuple[int, int, int, str], tuple[JobView, ...]] | None = None
        for node_id, jobs in on.items():
            left = [job for job in jobs if job not in self.evicted]
            found = self._smallest(node_id, left, min(most, best[0][0]) if best else most)
            if found is not None:
                cost = (len(found), sum(map(_held, found)), -min(map(begun_at, found)), node_id)
                if best is None or cost < best[0]:
                    best = (cost, found)
        return None if best is None else best[1]

    def _smallest(self, node_id: NodeId, jobs: list[JobView], most: int) -> tuple[JobView, ...] | None:
        have = self._after.get(node_id, self.fitting(node_id))
        if not jobs or most <= 0 or self._with(node_id, jobs) <= have:
            return None
        if len(jobs) <= EXACT_JOBS:
            for size in range(1, min(most, len(jobs)) + 1):
                sets = [each for each in combinations(jobs, size) if self._with(node_id, each) > have]
                if sets:
                    # Combinations of a sorted list come in its order: the first of the lightest has the newest.
                    return min(sets, key=lambda each: sum(map(_held, each)))
            return None
        chosen: list[JobView] = []
        for job in jobs:
            chosen.append(job)
            if self._with(node_id, chosen) > have:
                break
        for job in reversed(chosen[:-1]):
            rest = [other for other in chosen if other is not job]
            if self._with(node_id, rest) > have:
                chosen = rest
        return tuple(chosen) if len(chosen) <= most else None

    def _with(self, node_id: NodeId, jobs: Iterable[JobView]) -> int:
        return capacity(self._demand, self._planner.room(node_id, _runs_on(node_id, (*self.evicted, *jobs))))

    def _counts(self, jobs: list[JobView]) -> dict[NodeId, int]:
        nodes = {run.node_id for job in jobs for run in job.runs.values() if run.holds}
        return {
            node_id: capacity(self._demand, self._planner.room(node_id, _runs_on(node_id, jobs)))
            for node_id in sorted(nodes)
            if self._usable(node_id) and self.is_eligible(node_id)
        }


def _newest_first(job: JobView) -> tuple[int, JobId]:
    return (-begun_at(job), job.job_id)


def _held(job: JobView) -> int:
    """What the job holds of devices, in milli-GPU over all its replicas."""
    return sum(piece.compute_milli for run in job.runs.values() if run.holds for piece in run.slices)


def _runs_on(node_id: NodeId, jobs: Iterable[JobView]) -> frozenset[RunId]:
    return frozenset(run.run_id for job in jobs for run in job.runs.values() if run.holds and run.node_id == node_id)


def capacity(demand: Demand, room: NodeRoom) -> int:
    """How many replicas fit on the node, at most as many as are asked."""
    places = places_on(demand, room.kind)
    if isinstance(places, Out):
        return 0
    count = 0
    while count < demand.replicas:
        found = look(demand, room, places, _tightest)
        if not isinstance(found, Fit):
            break
        count += 1
        if count < demand.replicas:
            room = with_run(demand, room, found.picks, demand.trust)
            if demand.is_distinct:
                room = hidden(room, found.picks)
    return count


def _tightest(demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
    ranked = sorted(fits, key=lambda place: (room.devices[place].free_memory_mib, place))
    return Fit(0, tuple(sorted(ranked[: demand.devices])))


def _without(node: NodeView, pool: Pool, gone: frozenset[RunId]) -> NodeView:
    """A copy of the node that lacks these runs."""
    cpu, memory = node.used_cpu_milli, node.used_memory_mib
    devices = dict(node.devices)
    for run_id in sorted(gone & node.runs):
        run = pool.jobs[pool.run_jobs[run_id]].runs[run_id]
        cpu -= run.cpu_milli
        memory -= run.host_memory_mib
        for piece in run.slices:
            view = devices.get(piece.device_uuid)
            if view is not None and run_id in view.runs:
                devices[piece.device_uuid] = DeviceView(
                    device=view.device,
                    used_compute_milli=view.used_compute_milli - piece.compute_milli,
                    used_memory_mib=view.used_memory_mib - piece.memory_mib,
                    runs={other: held for other, held in view.runs.items() if other != run_id},
                )
    return replace(node, devices=devices, used_cpu_milli=cpu, used_memory_mib=memory, runs=node.runs - gone)
