"""Whose runs may be stopped so that a queue gets what is guaranteed to it: those that borrow, and no more of them.

A queue claims where what it holds, and what its job asks, is within its guarantee. It claims from what lies beside it:
two queues are compared where their branches of the tree part. From a branch that holds more than is guaranteed to it,
runs may be taken for as long as that branch, and each queue on the way down to the run, keeps its own guarantee. So
nobody is stopped for whom he could be stopped again: who claims is within its guarantee, and who lost keeps its own.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from apportion.contracts.ids import JobId, QueueId
from apportion.placer.books import Books
from apportion.placer.orders import CLASS_RANK
from apportion.pool import quota
from apportion.pool.quota import Amounts, QueueView
from apportion.pool.state import JobView, RunView

VERSION: Final = "reclaim@1"
"""Changes whenever another run may be taken."""


class Reclaim:
    """What may be taken back, as a round has the queues so far.

    ``leave`` says who is to go already, and ``come`` for whom room is being made.
    """

    def __init__(self, books: Books, jobs: Mapping[JobId, JobView]) -> None:
        self._books = books
        self._jobs = jobs
        self._leaving: dict[QueueId, Amounts] = {}
        self._left: set[JobId] = set()
        self._coming: dict[QueueId, Amounts] = {}
        self._expected: dict[JobId, tuple[QueueId, Amounts]] = {}
        self._charges: dict[JobId, Amounts] = {}
        """What all runs of a job are charged for, of those that were looked at. Not to be changed."""
        self._changes = 0
        self._known: dict[QueueId, tuple[int, int, Amounts]] = {}
        """What queues are promised, and when that was so: as of these changes of the books, and of whom we expect."""

    def leave(self, job: JobView, runs: Iterable[RunView] | None = None) -> None:
        """Count these runs of the job as gone, or all: what they hold comes back without anybody else."""
        if job.job_id in self._left:
            return
        self._left.add(job.job_id)
        self._changes += 1
        charge = charge_of(job, runs)
        for view in self._books.lineage(job.spec.queue):
            quota.add(self._leaving.setdefault(view.queue_id, {}), charge)

    def shrink(self, part: JobView) -> None:
        """Count these runs as gone; what else the job has may still go as well."""
        charge = charge_of(part)
        self._changes += 1
        for view in self._books.lineage(part.spec.queue):
            quota.add(self._leaving.setdefault(view.queue_id, {}), charge)

    def come(self, job_id: JobId, queue: QueueId, charge: Amounts) -> None:
        """Count what the job asks as held: others go for it, and it is placed once they have."""
        if job_id not in self._expected:
            self._expected[job_id] = (queue, charge)
            self._expect(queue, charge, 1)

    def came(self, job_id: JobId) -> None:
        """The job is placed, and so in the books, or nothing is made room for any more."""
        expected = self._expected.pop(job_id, None)
        if expected is not None:
            self._expect(*expected, -1)

    def _expect(self, queue: QueueId, charge: Amounts, sign: int) -> None:
        self._changes += 1
        for view in self._books.lineage(queue):
            quota.add(self._coming.setdefault(view.queue_id, {}), charge, sign)

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

    def victims(self, waiting: JobView, charge: Mapping[str, int], running: Collection[JobId]) -> list[JobView]:
        """Those of the running that may be stopped for the job, all of them together: lowest class first, then newest.

        ``charge`` is what the job takes from its queue's limits. Whether a job agreed to be stopped is for the caller
        to know.
        """
        if not self.claims(waiting.spec.queue, charge):
            return []
        branches: dict[QueueId, tuple[QueueView, ...]] = {}
        for queue in {self._jobs[job_id].spec.queue for job_id in running}:
            branch = self._beside(waiting.spec.queue, queue)
            if branch is not None and self._is_owed(branch[0], charge):
                branches[queue] = branch[1]
        return self._spared(branches, map(self._jobs.__getitem__, running))

    def spared(self, waiting: JobView, running: Collection[JobId]) -> list[JobView]:
        """Those of the running that may be stopped for the job by another right: no queue's guarantee is broken by it.

        Within one queue that makes no difference.
        """
        branches: dict[QueueId, tuple[QueueView, ...]] = {}
        for queue in {self._jobs[job_id].spec.queue for job_id in running}:
            branch = self._beside(waiting.spec.queue, queue)
            branches[queue] = () if branch is None else branch[1]
        return self._spared(branches, map(self._jobs.__getitem__, running))

    def spared_below(self, above: QueueId | None, running: Collection[JobView]) -> list[JobView]:
        """Those jobs, or parts, without which every queue below that one keeps its guarantee; None: every queue."""
        branches: dict[QueueId, tuple[QueueView, ...]] = {}
        for queue in {job.spec.queue for job in running}:
            lineage = self._books.lineage(queue)
            at = next((at for at, view in enumerate(lineage) if view.queue_id == above), len(lineage))
            branches[queue] = lineage[:at]
        return self._spared(branches, running)

    def _spared(self, branches: Mapping[QueueId, tuple[QueueView, ...]], running: Iterable[JobView]) -> list[JobView]:
        """Those of these queues without which each queue on their branch keeps its guarantee, all of them together."""
        jobs = (job for job in running if job.job_id not in self._left)
        taken: dict[QueueId, Amounts] = {}
        found = []
        for job in sorted(jobs, key=cheapest_first):
            branch = branches.get(job.spec.queue)
            if branch is None:
                continue
            gives = self._charge(job)
            if all(self._spares(view, gives, taken.get(view.queue_id, {})) for view in branch):
                found.append(job)
                for view in branch:
                    quota.add(taken.setdefault(view.queue_id, {}), gives)
        return found

    def for_quota(self, waiting: JobView, charge: Mapping[str, int], running: Collection[JobId]) -> list[JobView]:
        """The first of ``victims`` that make room below the limits that the job meets on its way up.

        Empty where nothing is missing once those have gone who are to go, or where all of them would not be enough.
        """
        missing = self.missing(waiting.spec.queue, charge)
        if not missing:
            return []
        chosen: list[JobView] = []
        for job in self.victims(waiting, charge, running):
            if self._is_enough(chosen, missing):
                break
            chosen.append(job)
        if not self._is_enough(chosen, missing):
            return []
        for job in chosen.copy():
            rest = [other for other in chosen if other is not job]
            if self._is_enough(rest, missing):
                chosen = rest
        return chosen

    def missing(self, queue: QueueId, charge: Mapping[str, int]) -> dict[tuple[QueueId, str], int]:
        """By how much each limit on the way up would be exceeded, once those have gone who are to go."""
        found = {}
        for view in self._books.lineage(queue):
            held = self._promised(view.queue_id)
            for name in quota.exceeded(held, charge, view.limits):
                found[view.queue_id, name] = held.get(name, 0) + charge[name] - view.limits[name]
        return found

    def _is_enough(self, jobs: Iterable[JobView], missing: Mapping[tuple[QueueId, str], int]) -> bool:
        given: dict[tuple[QueueId, str], int] = {}
        for job in jobs:
            gives = self._charge(job)
            for view in self._books.lineage(job.spec.queue):
                for name, amount in gives.items():
                    given[view.queue_id, name] = given.get((view.queue_id, name), 0) + amount
        return all(given.get(what, 0) >= over for what, over in missing.items())

    def _promised(self, queue: QueueId) -> Amounts:
        """What the queue will hold once those have gone who are to go, and those have come for whom they go.

        Not to be changed.
        """
        known = self._known.get(queue)
        if known is not None and known[0] == self._books.changes and known[1] == self._changes:
            return known[2]
        found = self.held(queue)
        if coming := self._coming.get(queue):
            found = found.copy()
            quota.add(found, coming)
        self._known[queue] = (self._books.changes, self._changes, found)
        return found

    def _is_owed(self, view: QueueView, charge: Mapping[str, int]) -> bool:
        """Whether the queue may take back what the job asks: it stays within its guarantee with it."""
        if not view.reclaim:
            return False
        asked = [name for name, amount in view.guaranteed.items() if amount and charge.get(name, 0)]
        if not asked:
            return False
        held = self._promised(view.queue_id)
        return all(held.get(name, 0) + charge[name] <= view.guaranteed[name] for name in asked)

    def _beside(self, claimant: QueueId, queue: QueueId) -> tuple[QueueView, tuple[QueueView, ...]] | None:
        """Where the branches part: the top of the claimant's, and all of the queue's; None where they don't."""
        ours, theirs = self._books.lineage(claimant), self._books.lineage(queue)
        shared = {view.queue_id for view in ours} & {view.queue_id for view in theirs}
        mine = [view for view in ours if view.queue_id not in shared]
        branch = tuple(view for view in theirs if view.queue_id not in shared)
        return (mine[-1], branch) if mine and branch else None

    def _spares(self, view: QueueView, gives: Mapping[str, int], taken: Mapping[str, int]) -> bool:
        """Whether the queue keeps its guarantee without this, and without what was taken of it before."""
        held = self.held(view.queue_id)
        return all(
            held.get(name, 0) - taken.get(name, 0) - gives.get(name, 0) >= amount
            for name, amount in view.guaranteed.items()
            if gives.get(name, 0)
        )

    def _charge(self, job: JobView) -> Amounts:
        if job is not self._jobs.get(job.job_id):
            return charge_of(job)  # a part of one
        found = self._charges.get(job.job_id)
        if found is None:
            found = self._charges[job.job_id] = charge_of(job)
        return found


def charge_of(job: JobView, runs: Iterable[RunView] | None = None) -> Amounts:
    """What these of the job's runs are charged for, or all that hold something; a job counts once they are all."""
    charge: Amounts = {}
    count = 0
    for run in job.runs.values() if runs is None else runs:
        if run.holds:
            quota.add(charge, run.charge)
            count += 1
    if count and count == job.holding:
        charge[quota.JOBS] = 1
    return charge


def cheapest_first(job: JobView) -> tuple[int, int, JobId]:
    """In which order jobs are stopped: the lowest class, then the newest."""
    placed_at = max((run.placed_at for run in job.runs.values() if run.holds), default=0)
    return (-CLASS_RANK[job.spec.service_class], -placed_at, job.job_id)
