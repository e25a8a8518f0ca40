"""Whose runs may be stopped so that a queue gets what is guaranteed to it: those that borrow, and no more of them.

A queue claims where what it holds, and what its job asks, is within its guarantee. It claims from what lies beside it:
two queues are compared where their branches of the tree part. From a branch that holds more than is guaranteed to it,
runs may be taken for as long as that branch, and each queue on the way down to the run, keeps its own guarantee. So
nobody is stopped for whom he could be stopped again: who claims is within its guarantee, and who lost keeps its own.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from apportion.contracts.ids import JobId, QueueId
from apportion.placer.books import Books
from apportion.placer.orders import CLASS_RANK
from apportion.pool import quota
from apportion.pool.quota import Amounts, QueueView
from apportion.pool.state import JobView

VERSION: Final = "reclaim@1"
"""Changes whenever another run may be taken."""


class Reclaim:
    """What may be taken back, as a round has the queues so far; ``leave`` says who is to go already."""

    def __init__(self, books: Books, jobs: Mapping[JobId, JobView]) -> None:
        self._books = books
        self._jobs = jobs
        self._leaving: dict[QueueId, Amounts] = {}
        self._left: set[JobId] = set()

    def leave(self, job: JobView) -> None:
        """Count the job as gone: it was told to stop, and what it holds comes back without anybody else."""
        if job.job_id in self._left:
            return
        self._left.add(job.job_id)
        charge = charge_of(job)
        for view in self._books.lineage(job.spec.queue):
            quota.add(self._leaving.setdefault(view.queue_id, {}), charge)

    def held(self, queue: QueueId) -> Amounts:
        """What the queue will hold once those have gone who are to go."""
        used = self._books.used(queue)
        leaving = self._leaving.get(queue)
        if not leaving:
            return used
        rest = used.copy()
        quota.add(rest, leaving, -1)
        return rest

    def claims(self, queue: QueueId, charge: Mapping[str, int]) -> bool:
        """Whether some queue on the way up is owed this much: without, nothing can be taken for it."""
        return any(self._is_owed(view, charge) for view in self._books.lineage(queue))

    def victims(self, waiting: JobView, charge: Mapping[str, int], running: Iterable[JobId]) -> list[JobView]:
        """Those of the running that may be stopped for the job, all of them together: lowest class first, then newest.

        ``charge`` is what the job takes from its queue's limits. Whether a job agreed to be stopped is for the caller
        to know.
        """
        if not self.claims(waiting.spec.queue, charge):
            return []
        jobs = (self._jobs[job_id] for job_id in running if job_id not in self._left)
        taken: dict[QueueId, Amounts] = {}
        owed: dict[QueueId, tuple[QueueView, ...] | None] = {}
        found = []
        for job in sorted(jobs, key=_cheapest_first):
            queue = job.spec.queue
            if queue not in owed:
                owed[queue] = self._borrowers(waiting.spec.queue, queue, charge)
            branch = owed[queue]
            if branch is None:
                continue
            gives = charge_of(job)
            if all(self._spares(view, gives, taken.get(view.queue_id, {})) for view in branch):
                found.append(job)
                for view in branch:
                    quota.add(taken.setdefault(view.queue_id, {}), gives)
        return found

    def for_quota(self, waiting: JobView, charge: Mapping[str, int], running: Iterable[JobId]) -> list[JobView]:
        """The first of ``victims`` that make room below the limits that the job meets on its way up.

        Empty where nothing is missing once those have gone who are to go, or where all of them would not be enough.
        """
        missing: dict[QueueId, Amounts] = {}
        for view in self._books.lineage(waiting.spec.queue):
            held = self.held(view.queue_id)
            for name in quota.exceeded(held, charge, view.limits):
                over = held.get(name, 0) + charge[name] - view.limits[name]
                missing.setdefault(view.queue_id, {})[name] = over
        if not missing:
            return []
        chosen = []
        for job in self.victims(waiting, charge, running):
            gives = charge_of(job)
            above = [view.queue_id for view in self._books.lineage(job.spec.queue) if view.queue_id in missing]
            if not any(gives.get(name, 0) for queue in above for name in missing[queue]):
                continue
            chosen.append(job)
            for queue in above:
                left = {name: over - gives.get(name, 0) for name, over in missing[queue].items()}
                missing[queue] = {name: over for name, over in left.items() if over > 0}
            missing = {queue: left for queue, left in missing.items() if left}
            if not missing:
                return chosen
        return []

    def _is_owed(self, view: QueueView, charge: Mapping[str, int]) -> bool:
        """Whether the queue may take back what the job asks: it stays within its guarantee with it."""
        asked = [name for name, amount in view.guaranteed.items() if amount and charge.get(name, 0)]
        held = self.held(view.queue_id)
        return (
            view.reclaim
            and bool(asked)
            and all(held.get(name, 0) + charge[name] <= view.guaranteed[name] for name in asked)
        )

    def _borrowers(self, claimant: QueueId, queue: QueueId, charge: Mapping[str, int]) -> tuple[QueueView, ...] | None:
        """The branch that the queue is on, beside the claimant's; None where the claimant is owed nothing of it."""
        ours, theirs = self._books.lineage(claimant), self._books.lineage(queue)
        shared = {view.queue_id for view in ours} & {view.queue_id for view in theirs}
        mine = [view for view in ours if view.queue_id not in shared]
        branch = tuple(view for view in theirs if view.queue_id not in shared)
        if not mine or not branch or not self._is_owed(mine[-1], charge):
            return None
        return branch

    def _spares(self, view: QueueView, gives: Mapping[str, int], taken: Mapping[str, int]) -> bool:
        """Whether the queue keeps its guarantee without this, and without what was taken of it before."""
        held = self.held(view.queue_id)
        return all(
            held.get(name, 0) - taken.get(name, 0) - gives.get(name, 0) >= amount
            for name, amount in view.guaranteed.items()
            if gives.get(name, 0)
        )


def charge_of(job: JobView) -> Amounts:
    """What the job's runs are charged for, all of them."""
    charge: Amounts = {}
    for run in job.runs.values():
        if run.holds:
            quota.add(charge, run.charge)
    if charge or job.holding:
        charge[quota.JOBS] = 1
    return charge


def _cheapest_first(job: JobView) -> tuple[int, int, JobId]:
    placed_at = max((run.placed_at for run in job.runs.values() if run.holds), default=0)
    return (-CLASS_RANK[job.spec.service_class], -placed_at, job.job_id)
