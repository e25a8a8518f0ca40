"""Runs beyond a limit that was set below what is held: who is stopped, where whoever set the limit wants that.

A limit that is lowered stops nobody by itself; until enough has ended, nothing more is placed. With ``on_lowered``
``reclaim`` elastic gangs give back what they hold above their least; and where that is not enough, as many jobs are
preempted as are too many: the lowest class first, then the newest, whole, only those that agreed to be stopped and have
had their protected time, and no more in a minute than may be stopped for others. What is freed isn't kept for anybody.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import OnLowered, StopCause
from apportion.contracts.ids import JobId, QueueId, TenantId
from apportion.placer.books import Books
from apportion.placer.evictions import parts_on_loan
from apportion.placer.orders import S
from apportion.placer.preempt import is_evictable
from apportion.placer.reclaim import Reclaim, charge_of, cheapest_first
from apportion.placer.state import State, leaving_of, more_preemptions_at, preemptions_left
from apportion.pool import quota
from apportion.pool.quota import Amounts, Told
from apportion.pool.state import JobView, RunView, grace_s_of

_LAST: Final = JobId("\U0010ffff")
"""After every job's id."""


class Over(Struct, frozen=True):
    """Somebody who holds more than may be held, and who set it so."""

    name: str
    """``queue train`` or ``tenant acme``."""
    queue: QueueId | None
    tenant: TenantId | None
    limits: Amounts
    held: Amounts
    """Without what is leaving already."""
    told: Told

    def excess(self, taken: Amounts) -> Amounts:
        """What is too much of each resource once this is gone as well."""
        left = {name: self.held.get(name, 0) - taken.get(name, 0) - most for name, most in self.limits.items()}
        return {name: amount for name, amount in left.items() if amount > 0}


def stops(state: State, now: int, room_for: int) -> list[ev.Fact]:
    """The facts that bring those above their limits back below, as far as anybody may be stopped; at most so many."""
    if state.pool.frozen:
        return []
    facts: list[ev.Fact] = []
    gone: dict[JobId, Amounts] = {}
    jobs_left = preemptions_left(state, now)
    for over in _over(state):
        taking = _chosen(state, over, gone, now, jobs_left)
        jobs_left -= len(taking.whole)
        for job_id, runs in taking.by_job().items():
            job = state.pool.jobs[job_id]
            told = _orders(over, job, runs) if job_id in taking.whole else _shrunk(over, job, runs)
            if len(facts) + len(told) > room_for:
                return facts
            gone[job_id] = charge_of(job, runs)
            facts.extend(told)
    return facts


def _shrunk(over: Over, job: JobView, runs: list[RunView]) -> list[ev.Fact]:
    """An elastic gang goes on with fewer replicas, and isn't preempted."""
    before = len(job.members())
    resized = ev.GangResized(
        caused_by=over.told.event_id,
        job_id=job.job_id,
        before=before,
        after=before - len(runs),
        replicas_min=job.spec.replicas_min,
        replicas_max=job.spec.replicas,
        runs=tuple(run.run_id for run in runs),
    )
    return [*_orders(over, job, runs, StopCause.SHRUNK), resized]


def _orders(over: Over, job: JobView, runs: list[RunView], cause: StopCause = StopCause.PREEMPTED) -> list[ev.Fact]:
    return [
        ev.RunStopOrdered(
            caused_by=over.told.event_id,
            run_id=run.run_id,
            node_id=run.node_id,
            cause=cause,
            grace_s=grace_s_of(job.spec, cause),
            actor=over.told.actor,
            reason=_reason(over),
            limit_of=over.name,
        )
        for run in runs
    ]


def next_chance(state: State, now: int) -> int | None:
    """When time alone may let somebody be stopped who holds too much: protected time ends, or the rate allows more."""
    instants = []
    at = bisect_right(state.protections, (now, _LAST))
    if at < len(state.protections):
        instants.append(state.protections[at][0])
    if (more_at := more_preemptions_at(state, now)) is not None:
        instants.append(more_at)
    if not instants or next(_over(state), None) is None:
        return None
    return min(instants)


def _over(state: State) -> Iterator[Over]:
    """Those above a limit that is to be enforced, queues by name and then tenants by name."""
    pool = state.pool
    for queue_id in sorted(pool.queues):
        view = pool.queues[queue_id]
        if view.told.on_lowered is OnLowered.RECLAIM and quota.exceeded({}, view.used, view.limits):
            held = view.used.copy()
            for job in _leaving(state, queue_id, None):
                quota.add(held, charge_of(job, leaving_of(job)), -1)
            over = Over(f"queue {queue_id}", queue_id, None, view.limits, held, view.told)
            if over.excess({}):
                yield over
    for tenant in sorted(pool.tenants):
        bound = pool.tenants[tenant]
        if bound.told.on_lowered is OnLowered.RECLAIM:
            held = pool.held_by.get(tenant, {}).copy()
            for job in _leaving(state, None, tenant):
                quota.add(held, charge_of(job, leaving_of(job)), -1)
            over = Over(f"tenant {tenant}", None, tenant, bound.limits, held, bound.told)
            if over.excess({}):
                yield over


def _leaving(state: State, queue: QueueId | None, tenant: TenantId | None) -> Iterator[JobView]:
    for job_id in sorted(state.leaving):
        job = state.pool.jobs[job_id]
        if _is_of(state, job, queue, tenant):
            yield job


def _is_of(state: State, job: JobView, queue: QueueId | None, tenant: TenantId | None) -> bool:
    if tenant is not None:
        return job.tenant == tenant
    return any(view.queue_id == queue for view in quota.lineage(state.pool.queues, job.spec.queue))


class _Taking:
    """What is taken back from one that holds too much: parts of elastic gangs, and whole jobs, in the order given."""

    def __init__(self, over: Over, taken: Amounts, jobs_left: int) -> None:
        self._over = over
        self._taken = taken
        self._jobs_left = jobs_left
        self._chosen: list[tuple[JobView, Amounts]] = []
        self.whole: set[JobId] = set()
        """Jobs that are stopped with all that they run."""

    @property
    def excess(self) -> Amounts:
        """What is still too much."""
        return self._over.excess(self._taken)

    def take_parts(self, parts: Iterable[JobView]) -> list[JobView]:
        """Those of the parts that are of use."""
        return [part for part in parts if self._take(part, charge_of(part))]

    def take_jobs(self, jobs: Iterable[JobView]) -> None:
        """As many of the jobs as are of use and may be stopped now; with what such a one has shrunk by already."""
        for job in jobs:
            if len(self.whole) >= self._jobs_left:
                return
            rest = charge_of(job)
            for part, charge in self._chosen:
                if part.job_id == job.job_id:
                    quota.add(rest, charge, -1)
            if self._take(job, rest):
                self.whole.add(job.job_id)

    def _take(self, view: JobView, charge: Amounts) -> bool:
        excess = self.excess
        if not any(charge.get(name, 0) for name in excess):
            return False
        self._chosen.append((view, charge))
        quota.add(self._taken, charge)
        return True

    def spare(self) -> None:
        """Leave out who is not needed: whoever came last is dearest, and stays where the others are enough."""
        for each in reversed(self._chosen.copy()):
            view, charge = each
            is_part_of_whole = view.job_id in self.whole and len(view.runs) < len(self.by_job()[view.job_id])
            rest = self._taken.copy()
            quota.add(rest, charge, -1)
            if not is_part_of_whole and self._over.excess(rest) == self.excess:
                self._chosen.remove(each)
                self.whole.discard(view.job_id)
                self._taken = rest

    def by_job(self) -> dict[JobId, list[RunView]]:
        """The runs that are to stop, in the order of their ids."""
        runs: dict[JobId, dict[str, RunView]] = {}
        for view, _ in self._chosen:
            runs.setdefault(view.job_id, {}).update({run.run_id: run for run in view.runs.values() if run.holds})
        return {job_id: [each[run_id] for run_id in sorted(each)] for job_id, each in runs.items()}


def _chosen(state: State, over: Over, gone: dict[JobId, Amounts], now: int, jobs_left: int) -> _Taking:
    """Whom to stop or shrink for this one, beside those who go already; no more than is too much."""
    jobs = state.pool.jobs
    taken: Amounts = {}
    for job_id, charge in gone.items():
        if _is_of(state, jobs[job_id], over.queue, over.tenant):
            quota.add(taken, charge)
    reclaim = Reclaim(Books(state.pool.queues), jobs)
    for job_id in state.leaving:
        reclaim.leave(jobs[job_id], leaving_of(jobs[job_id]))
    for job_id in gone:
        reclaim.leave(jobs[job_id])
    mine = [
        job
        for job in map(jobs.__getitem__, sorted({*state.surplus, *chain.from_iterable(state.evictable.values())}))
        if job.job_id not in gone and _is_of(state, job, over.queue, over.tenant)
    ]
    spares_s = state.settings.preempt_spares_s
    placed_by = now - spares_s * S
    parts = [part for job in mine if job.job_id in state.surplus for part in parts_on_loan(job, placed_by)]
    whole = [job for job in mine if is_evictable(job, now, spares_s)]
    taking = _Taking(over, taken, jobs_left)
    # Who borrows goes before those whom a guarantee would bring back at once.
    spared_parts = reclaim.spared_below(over.queue, parts)
    for part in taking.take_parts(spared_parts):
        reclaim.shrink(part)
    spared_jobs = reclaim.spared_below(over.queue, whole)
    taking.take_jobs(spared_jobs)
    taking.take_parts(_others(parts, spared_parts, taking.whole))
    taking.take_jobs(_others(whole, spared_jobs, taking.whole))
    taking.spare()
    return taking


def _others(views: list[JobView], spared: list[JobView], whole: set[JobId]) -> list[JobView]:
    """Those of the views that aren't spared, in the order in which they go; not of jobs that go whole."""
    known = {id(view) for view in spared}
    return sorted((view for view in views if id(view) not in known and view.job_id not in whole), key=cheapest_first)


def _reason(over: Over) -> str:
    amounts = ", ".join(
        f"{over.held.get(name, 0)} of {name} and may hold {over.limits[name]}" for name in sorted(over.excess({}))
    )
    why = f": {over.told.reason}" if over.told.reason else ""
    return f"{over.name} holds {amounts}, by a limit that takes back what is beyond{why}"
