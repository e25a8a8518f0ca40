"""When a waiting job may start: from the time limits of the runs that hold what it needs, and from how long runs took.

The runs in its way are taken away in the order in which they may end, until the job would fit. Done with the soonest
ends this gives the low end of the range, done with the latest the high end. What has no basis isn't said. Neither end
is a promise: jobs that come later and go first, and nodes that fail, are in nobody's estimate.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from apportion.contracts.causes import StopCause, WorkloadKind
from apportion.contracts.ids import JobId, NodeId, QueueId, TenantId
from apportion.placer.books import least_charge, tenant_of
from apportion.placer.durations import expected
from apportion.placer.rooms import Demand, Fit, NodeRoom, Out, hidden, look, places_on, with_run, without_run
from apportion.placer.rounds import Block, Round
from apportion.placer.state import S, Shape
from apportion.placer.topology import by_domain
from apportion.pool import quota
from apportion.pool.state import JobView, NodeState, RunView, grace_s_of

HOLDERS_MAX: Final = 16
"""Holders whose nodes are looked at when a reason is stated; who asks `why` has all nodes looked at."""
_NOBODY: Final = TenantId("*")


class Estimate(Struct, frozen=True, kw_only=True):
    """When a job may start, in ns since the Unix epoch; 0 where nobody can say."""

    low_at: int = 0
    high_at: int = 0
    basis: str = ""
    """What it rests on, in words; empty where it is empty."""


class _Ends(Struct, frozen=True):
    """When a run may end; None: nobody can say."""

    low_at: int | None
    high_at: int | None
    basis: str


def estimate(
    round_: Round, shape: Shape, block: Block, *, nodes: Iterable[NodeId] | None = None, is_first: bool = True
) -> Estimate:
    """When a job of this shape may start as the round leaves the pool; ``nodes`` are looked at, else a few likely ones.

    The high end is for the first in its line alone: others depend on when that one goes.
    """
    if block.is_frozen or block.is_cordoned:
        return Estimate()
    if block.quota_of is not None:
        found = _quota(round_, shape, block.quota_of)
    elif block.reserved_for is not None:
        return Estimate()
    else:
        found = _rooms(round_, shape.demand, sorted(set(_likely(round_) if nodes is None else nodes)))
    return found if is_first else Estimate(low_at=found.low_at, basis=found.basis)


def _likely(round_: Round) -> list[NodeId]:
    """Nodes of those who hold something and are the likeliest to end first."""
    state = round_.state
    jobs = state.pool.jobs
    return [run.node_id for key in state.holders[:HOLDERS_MAX] for run in jobs[key[2]].runs.values() if run.holds]


_Took = dict[tuple[TenantId, WorkloadKind], tuple[int, int] | None]
"""How long runs took, as far as it was looked up for this estimate."""


def _ends(round_: Round, job: JobView, run: RunView, known: _Took) -> _Ends:
    """When the run may end: at its time limit at the latest, or after as long as such runs took."""
    now = round_.now
    if run.stop is not None:
        return _Ends(
            now, now + grace_s_of(job.spec, job.stop or StopCause.CANCELLED) * S, "runs that are being stopped"
        )
    began_at = run.started_at or run.placed_at
    limit_at = began_at + job.spec.time_limit_s * S if job.spec.time_limit_s else None
    sort = (job.tenant, job.spec.kind)
    if sort not in known:
        known[sort] = expected(round_.state.kept.durations, *sort)
    took = known[sort]
    if took is None:
        return _Ends(None, None, "") if limit_at is None else _Ends(now, max(now, limit_at), "time limits")
    low_at, high_at = began_at + took[0] * S, began_at + took[1] * S
    if limit_at is not None:
        return _Ends(max(now, min(low_at, limit_at)), max(now, limit_at), "time limits and how long such runs took")
    # One that has run for longer than any before it says that those are no measure for it.
    return _Ends(max(now, low_at), high_at if high_at > now else None, "how long such runs took")


def _rooms(round_: Round, demand: Demand, nodes: list[NodeId]) -> Estimate:
    """On these nodes; where all replicas must be in one domain, in the one that has room the soonest."""
    if not demand.is_together:
        return _room(round_, demand, nodes)
    parts = by_domain(demand, map(round_.room, nodes))
    found = [_room(round_, demand, [room.node_id for room in part]) for part in parts.values()]
    low_at = min((each.low_at for each in found if each.low_at), default=0)
    high_at = min((each.high_at for each in found if each.high_at), default=0)
    bases = {each.basis for each in found if each.low_at or each.high_at}
    return Estimate(low_at=low_at, high_at=high_at, basis=_longest(bases))


def _room(round_: Round, demand: Demand, nodes: list[NodeId]) -> Estimate:
    low: list[tuple[int, int]] = []
    high: list[tuple[int, int]] = []
    bases: set[str] = set()
    known: _Took = {}
    for node_id in nodes:
        room = round_.room(node_id)
        if room.state is not NodeState.READY:
            continue
        places = places_on(demand, room.kind)
        if isinstance(places, Out):
            continue
        ends: list[tuple[_Ends, RunView]] = []
        for run_id in round_.state.pool.nodes[node_id].runs:
            job = round_.state.pool.jobs[round_.state.pool.run_jobs[run_id]]
            run = job.runs[run_id]
            found = _ends(round_, job, run, known)
            if found.low_at is not None:
                ends.append((found, run))
                bases.add(found.basis)
        if not ends and demand.replicas == 1:
            continue  # it doesn't fit there now, and when that changes nobody can say
        low += _steps(demand, room, places, [(each.low_at, run) for each, run in ends if each.low_at is not None])
        high += _steps(demand, room, places, [(each.high_at, run) for each, run in ends if each.high_at is not None])
    low_at, high_at = _reached(low, demand.replicas), _reached(high, demand.replicas)
    # A start at once is what the round would have found: now stands for "any moment".
    return Estimate(low_at=low_at, high_at=high_at, basis=_longest(bases) if low_at or high_at else "")


def _longest(bases: set[str]) -> str:
    return max(sorted(bases), key=len, default="")


def _steps(
    demand: Demand, room: NodeRoom, places: tuple[int, ...], ends: list[tuple[int, RunView]]
) -> list[tuple[int, int]]:
    """When how many more replicas fit on the node, as runs end in this order."""
    steps = []
    fitting = _fitting(demand, room, places)
    if fitting:
        steps.append((0, fitting))
    for at, run in sorted(ends, key=lambda each: (each[0], each[1].run_id)):
        room = without_run(room, run.slices, run.cpu_milli, run.host_memory_mib)
        more = _fitting(demand, room, places) - fitting
        if more > 0:
            steps.append((at, more))
            fitting += more
            if fitting >= demand.replicas:
                break
    return steps


def _fitting(demand: Demand, room: NodeRoom, places: tuple[int, ...]) -> int:
    """How many replicas the node hosts, up to as many as there are."""
    count = 0
    while count < demand.replicas:
        found = look(demand, room, places, _any_choice)
        if not isinstance(found, Fit):
            break
        count += 1
        if count < demand.replicas:
            room = with_run(demand, room, found.picks, demand.trust or _NOBODY)
            room = hidden(room, found.picks) if demand.is_distinct else room
    return count


def _any_choice(demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
    del room
    return Fit(0, tuple(fits[: demand.devices]))


def _reached(steps: list[tuple[int, int]], replicas: int) -> int:
    """When so many replicas fit; 0 where they never do by these steps."""
    count = 0
    for at, more in sorted(steps):
        count += more
        if count >= replicas:
            return at
    return 0


def _quota(round_: Round, shape: Shape, queue: QueueId) -> Estimate:
    """When the queue's runs, or the tenant's, have ended so far that the job fits the limits."""
    limits = round_.books.limits(queue)
    if not limits:
        return Estimate()
    more = least_charge(shape.demand)
    holders = []
    bases: set[str] = set()
    known: _Took = {}
    for job_id in _holders_below(round_, queue):
        job = round_.state.pool.jobs[job_id]
        runs = [run for run in job.runs.values() if run.holds]
        ends = [_ends(round_, job, run, known) for run in runs]
        held: quota.Amounts = dict(quota.ONE_JOB)
        for run in runs:
            node = round_.state.pool.nodes.get(run.node_id)
            for piece in run.slices:
                device = None if node is None else node.devices.get(piece.device_uuid)
                model = "" if device is None else device.device.model
                quota.charge(held, model, piece.compute_milli, piece.memory_mib)
            quota.add(held, {quota.CPU: run.cpu_milli})
        holders.append((_last([each.low_at for each in ends]), _last([each.high_at for each in ends]), job_id, held))
        bases |= {each.basis for each in ends}

    def reached(ends: list[tuple[int, JobId, quota.Amounts]]) -> int:
        used = round_.books.used(queue).copy()
        for at, _, held in sorted(ends, key=lambda each: each[:2]):
            quota.add(used, held, -1)
            if not quota.exceeded(used, more, limits):
                return at
        return 0

    low_at = reached([(low, job_id, held) for low, _, job_id, held in holders if low is not None])
    high_at = reached([(high, job_id, held) for _, high, job_id, held in holders if high is not None])
    return Estimate(low_at=low_at, high_at=high_at, basis=_longest(bases) if low_at or high_at else "")


def _last(ends: list[int | None]) -> int | None:
    """The latest, where all of them are known."""
    known = [at for at in ends if at is not None]
    return max(known) if len(known) == len(ends) else None


def _holders_below(round_: Round, queue: QueueId) -> list[JobId]:
    """Jobs that hold something in the queue or below it, or of the tenant."""
    state = round_.state
    if (tenant := tenant_of(queue)) is not None:
        return sorted(key[2] for key in state.holders if state.pool.jobs[key[2]].tenant == tenant)
    return sorted(
        key[2]
        for name, keys in state.queue_holders.items()
        if any(view.queue_id == queue for view in round_.books.lineage(name))
        for key in keys
    )
