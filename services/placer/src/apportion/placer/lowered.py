"""Runs beyond a limit that was set below what is held: who is stopped, where whoever set the limit wants that.

A limit that is lowered stops nobody by itself; until enough has ended, nothing more is placed. With ``on_lowered``
``reclaim`` as many jobs are preempted as are too many: the lowest class first, then the newest, gangs whole, and only
those that agreed to be stopped and have had their protected time. What they free isn't kept for anybody.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import OnLowered, StopCause
from apportion.contracts.ids import JobId, QueueId, TenantId
from apportion.placer.books import Books
from apportion.placer.preempt import is_evictable
from apportion.placer.reclaim import Reclaim, charge_of, cheapest_first
from apportion.placer.state import State, leaving_of
from apportion.pool import quota
from apportion.pool.quota import Amounts, Told
from apportion.pool.state import JobView

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


def stops(state: State, now: int, room_for: int) -> list[ev.RunStopOrdered]:
    """The orders that bring those above their limits back below, as far as anybody may be stopped; at most so many."""
    if state.pool.frozen:
        return []
    facts: list[ev.RunStopOrdered] = []
    gone: dict[JobId, Amounts] = {}
    for over in _over(state):
        for job in _chosen(state, over, gone, now):
            runs = [run for run in job.runs.values() if run.holds]
            if len(facts) + len(runs) > room_for:
                return facts
            gone[job.job_id] = charge_of(job)
            facts.extend(
                ev.RunStopOrdered(
                    caused_by=over.told.event_id,
                    run_id=run.run_id,
                    node_id=run.node_id,
                    cause=StopCause.PREEMPTED,
                    grace_s=job.spec.grace_s,
                    actor=over.told.actor,
                    reason=_reason(over),
                )
                for run in sorted(runs, key=lambda run: run.run_id)
            )
    return facts


def next_chance(state: State, now: int) -> int | None:
    """When time alone may let somebody be stopped who holds too much: protected time ends."""
    at = bisect_right(state.protections, (now, _LAST))
    if at == len(state.protections) or next(_over(state), None) is None:
        return None
    return state.protections[at][0]


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


def _chosen(state: State, over: Over, gone: dict[JobId, Amounts], now: int) -> list[JobView]:
    """Whom to stop for this one, beside those who go already; no more than is too much."""
    taken: Amounts = {}
    for job_id, charge in gone.items():
        if _is_of(state, state.pool.jobs[job_id], over.queue, over.tenant):
            quota.add(taken, charge)
    jobs = (state.pool.jobs[job_id] for job_id in chain.from_iterable(state.evictable.values()) if job_id not in gone)
    mine = [
        job
        for job in jobs
        if _is_of(state, job, over.queue, over.tenant) and is_evictable(job, now, state.settings.preempt_spares_s)
    ]
    # Who borrows goes before those whom a guarantee would bring back at once.
    reclaim = Reclaim(Books(state.pool.queues), state.pool.jobs)
    for job_id in state.leaving:
        reclaim.leave(state.pool.jobs[job_id], leaving_of(state.pool.jobs[job_id]))
    for job_id in gone:
        reclaim.leave(state.pool.jobs[job_id])
    spared = reclaim.spared_below(over.queue, [job.job_id for job in mine])
    names = {job.job_id for job in spared}
    ordered = [*spared, *sorted((job for job in mine if job.job_id not in names), key=cheapest_first)]
    chosen: list[JobView] = []
    for job in ordered:
        excess = over.excess(taken)
        if not excess:
            break
        charge = charge_of(job)
        if any(charge.get(name, 0) for name in excess):
            chosen.append(job)
            quota.add(taken, charge)
    # Whoever came last is dearest: he stays where the others are enough.
    for job in reversed(chosen.copy()):
        rest = taken.copy()
        quota.add(rest, charge_of(job), -1)
        if over.excess(rest) == over.excess(taken):
            chosen.remove(job)
            taken = rest
    return chosen


def _reason(over: Over) -> str:
    amounts = ", ".join(
        f"{over.held.get(name, 0)} of {name} and may hold {over.limits[name]}" for name in sorted(over.excess({}))
    )
    why = f": {over.told.reason}" if over.told.reason else ""
    return f"{over.name} holds {amounts}, by a limit that takes back what is beyond{why}"
