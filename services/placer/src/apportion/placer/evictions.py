"""Jobs that others are stopped for, as a round has them: what is kept for them, and for whom somebody has to go now.

Nobody slips in: what a victim frees is kept for whom it was stopped for, or for one alike that stands before it in the
same line. The keeping ends when that job is placed or no longer waits, or when all victims have left and it does not
fit after all (a node was lost meanwhile). A node that is kept for several is kept until each of them has let go.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import PreemptionKind, QueueOrder, StopCause
from apportion.contracts.ids import JobId, NodeId, QueueId, replica_of_run
from apportion.placer import orders
from apportion.placer.books import Books
from apportion.placer.orders import CLASS_RANK, S
from apportion.placer.preempt import Plan, Planner, is_evictable, outranks
from apportion.placer.reclaim import Reclaim, charge_of
from apportion.placer.rooms import Demand
from apportion.placer.state import (
    Claim,
    Shape,
    State,
    is_due,
    leaving_of,
    more_preemptions_at,
    order_in,
    preemptions_left,
    shape_of,
)
from apportion.pool import quota
from apportion.pool.state import JobView, grace_s_of, run_of

ATTEMPTS_MAX: Final = 8
"""Jobs of one round that others may be stopped for: the first of those that are blocked, in order."""
ACTOR: Final = "service:placer"
_LAST: Final = JobId("\U0010ffff")
"""After every job's id."""


class Rule(NamedTuple):
    """By which right one job has another stopped."""

    kind: PreemptionKind
    may: Callable[[JobView, JobView], bool]
    """Of the job that waits, and the one that runs. Never both ways."""
    says: Callable[[JobView], str]
    order: QueueOrder | None = None
    """By which order those who come last go first; None: the newest do."""
    is_reclaim: bool = False
    """Whether it takes back what is guaranteed to the job's queue; else it leaves every queue its guarantee."""


def _ranks(job: JobView) -> str:
    return f"class {job.spec.service_class} comes before the victims'"


BY_CLASS: Final = Rule(PreemptionKind.PRIORITY, outranks, _ranks)
BY_GUARANTEE: Final = Rule(
    PreemptionKind.RECLAIM,
    lambda one, other: one.spec.queue != other.spec.queue,
    lambda job: f"queue {job.spec.queue} takes back what is guaranteed to it, and the victims' borrowed it",
    is_reclaim=True,
)
ON_LOAN: Final = Rule(
    PreemptionKind.SHRINK,
    lambda one, other: True,  # noqa: ARG005 - ``_loans`` says whose
    lambda job: f"what elastic gangs hold above their least is on loan, and {job.job_id} waits for it",
)
LOANS_MAX: Final = 64
"""Parts that leave elastic gangs for one job, at most."""
RULES: Final = (BY_GUARANTEE, BY_CLASS)
"""Tried in order; the first under which somebody may be stopped, and it is enough, is the one."""


def ranked_rules(state: State) -> tuple[Rule, ...]:
    """The rights that come with orders in which nobody's share counts; none where no queue has such an order.

    Both jobs wait by the same order and are of one class, so nobody can be stopped for whom he was stopped for.
    """

    def may(order: QueueOrder) -> Callable[[JobView, JobView], bool]:
        def is_before(waiting: JobView, running: JobView) -> bool:
            ours, theirs = orders.rank_of(waiting, order), orders.rank_of(running, order)
            return (
                ours[0] == theirs[0]
                and ours[1] < theirs[1]
                and order_in(state, waiting.spec.queue) is order
                and order_in(state, running.spec.queue) is order
            )

        return is_before

    found = {order_in(state, queue) for queue in state.queue_holders} & orders.RANKED
    rules = []
    if QueueOrder.STRICT in found:
        rules.append(Rule(PreemptionKind.PRIORITY, may(QueueOrder.STRICT), _comes_first, QueueOrder.STRICT))
    if QueueOrder.BIDS in found:
        rules.append(Rule(PreemptionKind.MARKET, may(QueueOrder.BIDS), _bids_more, QueueOrder.BIDS))
    return tuple(rules)


def _comes_first(job: JobView) -> str:
    return f"priority {job.spec.priority} comes before the victims', strictly"


def _bids_more(job: JobView) -> str:
    return f"it bids {job.spec.bid_micro} millionths for a GPU and hour, and each of the victims less"


@dataclass(slots=True)
class _Allowed:
    """Who may be stopped, and whether that turned out to be enough."""

    ids: set[JobId]
    is_enough: bool = False


class Evictions:
    """Of one round."""

    def __init__(self, state: State, now: int, books: Books, rules: Sequence[Rule] | None = None) -> None:
        self._state = state
        self._books = books
        self._reclaim = Reclaim(books, state.pool.jobs)
        self._is_guaranteed = any(view.guaranteed for view in state.pool.queues.values())
        self._now = now
        ranked = ranked_rules(state)
        self._is_ranked = bool(ranked)
        self._rules = (*RULES, *ranked) if rules is None else rules
        self._kept: dict[NodeId, tuple[JobId, ...]] = {}
        """Those alike share a node, and each keeps it on its own."""
        self._shapes: dict[JobId, Shape] = {}
        self._may_go: list[JobView] | None = None
        """Who might be stopped for somebody, once that was asked, in the order of their ids."""
        self._latest_rank = max(state.evictable, default=-1)
        """Of the class that goes first."""
        going = {run: state.pool.run_jobs[run] for run in sorted(state.stops)}
        self._gone: set[JobId] = set(going.values())
        """Who was told to go in this round, or by what is decided with it: as a node drains, say."""
        self._fewer: set[JobId] = set()
        """Who was told to go on with fewer replicas."""
        self._left = preemptions_left(state, now)
        self._claims = {job_id: claim for job_id, claim in state.kept.claims.items() if is_due(state, job_id, now)}
        for job_id, claim in sorted(self._claims.items()):
            self._shapes[job_id] = shape_of(state, state.pool.jobs[job_id])
            self._keep(job_id, claim)
        if self._is_guaranteed or state.surplus:
            for job_id in state.leaving:
                job = state.pool.jobs[job_id]
                self._reclaim.leave(job, leaving_of(job))
            for job_id in sorted(self._gone - state.leaving):
                job = state.pool.jobs[job_id]
                self._reclaim.leave(job, [run for run in job.runs.values() if run.run_id in going])
            for job_id in self._claims:
                shape = self._shapes[job_id]
                self._reclaim.come(job_id, shape.queue, self._books.least(shape.demand))

    @property
    def has_claims(self) -> bool:
        """Whether anything is kept for somebody."""
        return bool(self._claims)

    @property
    def may_be(self) -> bool:
        """Whether anybody may be stopped for others at all, or was."""
        state = self._state
        may_preempt = bool(state.evictable) and state.settings.preempt_victims_max > 0
        return self.has_claims or bool(state.surplus) or may_preempt

    @property
    def nodes_kept(self) -> Iterable[NodeId]:
        """Nodes that are kept for somebody."""
        return self._kept

    @property
    def keeps_nodes(self) -> bool:
        """Whether any node is kept for anybody."""
        return bool(self._kept)

    def kept_for(self, node_id: NodeId, shape: Shape | None) -> JobId | None:
        """The first for whom the node is kept and who is not of this shape."""
        if not self._kept:
            return None
        return next((owner for owner in self._kept.get(node_id, ()) if not self._is_alike(owner, shape)), None)

    def is_awaited(self, job: JobView) -> bool:
        """Whether others were told to stop for this job, and have not left yet."""
        claim = self._claims.get(job.job_id)
        return claim is not None and self._is_live(claim)

    def awaited(self, shape: Shape) -> tuple[JobId, ...]:
        """Victims that jobs of this shape wait for, and that have not left yet."""
        found: list[JobId] = []
        for job_id, claim in sorted(self._claims.items()):
            if self._is_alike(job_id, shape) and self._is_live(claim):
                found.extend(claim.victims)
        return tuple(found)

    def blocked(self, shape: Shape) -> bool:
        """Note that a job of this shape doesn't fit; True where something was kept for it in vain, and no longer is."""
        if not self._claims:
            return False
        vain = [
            job_id
            for job_id, claim in self._claims.items()
            if self._is_alike(job_id, shape) and not self._is_live(claim)
        ]
        for job_id in vain:
            self._let_go(job_id)
        return bool(vain)

    def placed(self, job_id: JobId) -> None:
        """Note that the job has its slices: nothing more is kept for it."""
        self._let_go(job_id)

    def _let_go(self, job_id: JobId) -> None:
        claim = self._claims.pop(job_id, None)
        if claim is None:
            return
        self._reclaim.came(job_id)
        for node_id in claim.nodes:
            others = tuple(owner for owner in self._kept.pop(node_id, ()) if owner != job_id)
            if others:
                self._kept[node_id] = others

    def _keep(self, job_id: JobId, claim: Claim) -> None:
        for node_id in claim.nodes:
            self._kept[node_id] = (*self._kept.get(node_id, ()), job_id)

    def may_have_victims(self, job: JobView, shape: Shape) -> bool:
        """Whether it is worth looking: somebody runs who might have to go for it."""
        if self._state.surplus:
            return True
        if self._state.settings.preempt_victims_max <= 0:
            return False
        rank = CLASS_RANK[job.spec.service_class]
        least = rank if self._is_ranked else rank + 1
        return self._latest_rank >= least or self.is_owed(shape)

    @property
    def told(self) -> AbstractSet[JobId]:
        """Who is told to go with this round, or to go on with fewer replicas."""
        return self._gone | self._fewer

    @property
    def gone(self) -> AbstractSet[JobId]:
        """Who is told to go with this round."""
        return self._gone

    def is_owed(self, shape: Shape) -> bool:
        """Whether a job of this shape may take back what is guaranteed to its queue, or to one above it."""
        return (
            self._is_guaranteed
            and bool(self._state.evictable)
            and self._reclaim.claims(shape.queue, self._books.least(shape.demand))
        )

    def _loans(self, job: JobView, shape: Shape) -> list[JobView]:
        """What elastic gangs hold above their least and the job may have: a view for each part that can leave.

        It may have that of its own class and later ones, and of whoever borrows what its queue is owed.
        """
        state = self._state
        if not state.surplus:
            return []
        rank = CLASS_RANK[job.spec.service_class]
        is_owed = self._is_guaranteed and self._reclaim.claims(shape.queue, self._books.least(shape.demand))
        parts = []
        for job_id in sorted(state.surplus - self._gone - self._fewer):
            other = state.pool.jobs[job_id]
            if CLASS_RANK[other.spec.service_class] >= rank or (is_owed and other.spec.queue != job.spec.queue):
                parts += parts_on_loan(other, self._now - state.settings.preempt_spares_s * S)
        return parts

    def make_quota_of_loans(self, job: JobView, shape: Shape, facts_left: int) -> list[ev.Fact]:
        """The facts by which elastic gangs shrink where what they hold above their least fills the job's limits."""
        charge = self._books.least(shape.demand)
        missing = self._reclaim.missing(shape.queue, charge)
        loans = self._loans(job, shape)
        if not missing or not loans:
            return []

        def gives(part: JobView) -> dict[tuple[QueueId, str], int]:
            given = charge_of(part, part.runs.values())
            return {
                (view.queue_id, name): amount
                for view in self._books.lineage(part.spec.queue)
                for name, amount in given.items()
                if (view.queue_id, name) in missing and name != quota.JOBS
            }

        chosen: list[tuple[JobView, dict[tuple[QueueId, str], int]]] = []
        left = missing.copy()
        for part in sorted(loans, key=_newest_run_first):
            given = gives(part)
            if any(left.get(what, 0) > 0 for what in given):
                chosen.append((part, given))
                for what, amount in given.items():
                    left[what] -= amount
        if any(amount > 0 for amount in left.values()):
            return []
        for each in chosen.copy():
            if all(left[what] + amount <= 0 for what, amount in each[1].items()):
                chosen.remove(each)  # the others are enough
                for what, amount in each[1].items():
                    left[what] += amount
        runs = sorted((run for part, _ in chosen for run in part.runs.values()), key=lambda run: run.run_id)
        victims = tuple(dict.fromkeys(part.job_id for part, _ in chosen))
        plan = Plan(victims, tuple(runs), (), len(loans))
        return self._shrunk_for(job, shape, plan) if 1 + len(runs) + len(victims) < facts_left else []

    def _shrunk_for(self, job: JobView, shape: Shape, plan: Plan) -> list[ev.Fact]:
        """Elastic gangs go on with fewer replicas, and nobody is preempted."""
        self._fewer.update(plan.victims)
        self._claim(job, shape, plan)
        jobs = self._state.pool.jobs
        resized = []
        for victim in plan.victims:
            other = jobs[victim]
            runs = tuple(run for run in plan.runs if run.job_id == victim)
            self._reclaim.leave(other, runs)
            before = len(other.members())
            resized.append(
                ev.GangResized(
                    caused_by=job.last_event,
                    job_id=victim,
                    before=before,
                    after=before - len(runs),
                    replicas_min=other.spec.replicas_min,
                    replicas_max=other.spec.replicas,
                    runs=tuple(run.run_id for run in runs),
                    for_job=job.job_id,
                )
            )
        self._reclaim.come(job.job_id, shape.queue, self._books.least(shape.demand))
        return [*_facts(self._state, job, shape.demand, ON_LOAN, plan), *resized]

    def make_quota(self, job: JobView, shape: Shape, facts_left: int) -> list[ev.Fact]:
        """The facts by which others are stopped where a limit that they fill keeps the job from what it is owed."""
        if not self.is_owed(shape):
            return []
        charge = self._books.least(shape.demand)
        running = [other.job_id for other in self._evictable(job, BY_GUARANTEE)]
        victims = self._reclaim.for_quota(job, charge, running)
        if not 0 < len(victims) <= min(self._state.settings.preempt_victims_max, self._left):
            return []
        runs = sorted((run for each in victims for run in each.runs.values() if run.holds), key=lambda run: run.run_id)
        plan = Plan(tuple(each.job_id for each in victims), tuple(runs), (), len(running))
        return self._decided(job, shape, BY_GUARANTEE, plan) if len(runs) < facts_left else []

    def _evictable(self, job: JobView, rule: Rule) -> list[JobView]:
        """Who might be stopped for the job by this rule, as far as the two of them matter."""
        if self._may_go is None:
            state = self._state
            jobs = (state.pool.jobs[job_id] for job_id in sorted(chain.from_iterable(state.evictable.values())))
            spares_s = state.settings.preempt_spares_s
            self._may_go = [other for other in jobs if is_evictable(other, self._now, spares_s)]
        told = self._gone | self._fewer
        return [other for other in self._may_go if other.job_id not in told and rule.may(job, other)]

    def _allowed(self, job: JobView, shape: Shape, rule: Rule) -> set[JobId]:
        """Who may be stopped for the job by this rule, all of them together."""
        found = [other.job_id for other in self._evictable(job, rule)]
        if rule.is_reclaim:
            return {other.job_id for other in self._reclaim.victims(job, self._books.least(shape.demand), found)}
        return {other.job_id for other in self._reclaim.spared(job, found)} if self._is_guaranteed else set(found)

    def _decided(self, job: JobView, shape: Shape, rule: Rule, plan: Plan) -> list[ev.Fact]:
        self._gone.update(plan.victims)
        self._left -= len(plan.victims)
        self._claim(job, shape, plan)
        for victim in plan.victims:
            self._reclaim.leave(self._state.pool.jobs[victim])
        self._reclaim.come(job.job_id, shape.queue, self._books.least(shape.demand))
        return _facts(self._state, job, shape.demand, rule, plan)

    def _claim(self, job: JobView, shape: Shape, plan: Plan) -> None:
        self._shapes[job.job_id] = shape
        self._let_go(job.job_id)
        claim = self._claims[job.job_id] = Claim(plan.nodes, tuple(run.run_id for run in plan.runs), plan.victims)
        self._keep(job.job_id, claim)

    def plan(
        self,
        planner: Planner,
        job: JobView,
        shape: Shape,
        *,
        fits: Iterable[NodeId],
        usables: Sequence[Callable[[NodeId], bool]],
        facts_left: int,
    ) -> list[ev.Fact]:
        """The facts by which others are stopped for the job; nothing where nobody may be, or it would not help.

        ``usables`` say where the replicas may go: of several, all of them by one.
        """
        fits = list(fits)

        def fewest(candidates: Iterable[JobView], most: int) -> Plan | None:
            best: Plan | None = None
            candidates = list(candidates)
            for usable in usables:
                found = planner.victims(shape.demand, candidates, usable=usable, fits=fits, victims_max=most)
                if found is not None and (best is None or _cost(found) < _cost(best)):
                    best = found
            return best

        if loans := self._loans(job, shape):
            given = fewest(loans, LOANS_MAX)
            if given is not None and 1 + len(given.runs) + len(given.victims) < facts_left:
                return self._shrunk_for(job, shape, given)
        victims_max = min(self._state.settings.preempt_victims_max, self._left)
        for rule in self._rules:
            if rule.is_reclaim and not self.is_owed(shape):
                continue
            found: Plan | None = None
            for allowed in self._ever_fewer(self._allowed(job, shape, rule), rule):
                fewer = fewest((self._state.pool.jobs[job_id] for job_id in sorted(allowed.ids)), victims_max)
                allowed.is_enough = fewer is not None
                found = fewer or found
            if found is not None and len(found.runs) < facts_left:
                return self._decided(job, shape, rule, found)
        return []

    def _ever_fewer(self, allowed: set[JobId], rule: Rule) -> Iterator["_Allowed"]:
        """All of them; and in an order those who come last in it, as few places of it as are found to be enough."""
        found = _Allowed(allowed)
        yield found
        if rule.order is None or not found.is_enough:
            return
        jobs = self._state.pool.jobs
        ranks = {job_id: orders.rank_of(jobs[job_id], rule.order) for job_id in allowed}
        places = sorted(set(ranks.values()), reverse=True)
        few, many = 0, len(places)  # so many places are not enough, and are
        while many - few > 1:
            count = (few + many) // 2
            found = _Allowed({job_id for job_id, rank in ranks.items() if rank >= places[count - 1]})
            yield found
            few, many = (few, count) if found.is_enough else (count, many)

    def _is_alike(self, job_id: JobId, shape: Shape | None) -> bool:
        mine = self._shapes[job_id]
        return shape is not None and (mine.queue, mine.demand) == (shape.queue, shape.demand)

    def _is_live(self, claim: Claim) -> bool:
        for run_id in claim.runs:
            run = run_of(self._state.pool, run_id)
            if run is not None and run.holds:
                return True
        return False


def parts_on_loan(job: JobView, placed_by: int) -> list[JobView]:
    """The job as so many views, each with a part that it can do without: its last replicas, a step at a time.

    Not those that were placed after ``placed_by``.
    """
    members = job.members()
    step = job.spec.replicas_step
    parts = []
    for end in range(len(members), job.spec.replicas_least + step - 1, -step):
        runs = members[end - step : end]
        if all(run.placed_at <= placed_by for run in runs):
            parts.append(replace(job, runs={run.run_id: run for run in runs}))
    return parts


def _cost(plan: Plan) -> tuple[int, int]:
    return len(plan.victims), len(plan.runs)


def _newest_run_first(part: JobView) -> tuple[int, JobId, int]:
    run = max(part.runs.values(), key=lambda run: replica_of_run(run.run_id))
    return (-run.placed_at, part.job_id, -replica_of_run(run.run_id))


def next_chance(state: State, now: int) -> int | None:
    """When time alone may let a waiting job have others stopped: protected time ends, or the rate allows more."""
    settings = state.settings
    may_be = settings.preempt_victims_max > 0 or state.surplus
    if not may_be or not state.groups or state.pool.frozen:
        return None
    ranks = [rank for rank, jobs in state.evictable.items() if jobs]
    firsts = (state.pool.jobs[group.keys[0][3]] for group in state.groups.values())
    is_guaranteed = any(view.guaranteed for view in state.pool.queues.values())
    most = max(ranks, default=-1) + bool(ranked_rules(state))
    is_hopeless = not ranks or (not is_guaranteed and all(CLASS_RANK[job.spec.service_class] >= most for job in firsts))
    if is_hopeless and not state.surplus:
        return None
    instants = []
    at = bisect_right(state.protections, (now, _LAST))
    if at < len(state.protections):
        instants.append(state.protections[at][0])
    if (more_at := more_preemptions_at(state, now)) is not None:
        instants.append(more_at)
    return min(instants, default=None)


def _facts(state: State, job: JobView, demand: Demand, rule: Rule, plan: Plan) -> list[ev.Fact]:
    frees = {
        "compute_milli": sum(piece.compute_milli for run in plan.runs for piece in run.slices),
        "memory_mib": sum(piece.memory_mib for run in plan.runs for piece in run.slices),
        "cpu_milli": sum(run.cpu_milli for run in plan.runs),
        "host_memory_mib": sum(run.host_memory_mib for run in plan.runs),
    }
    needs = {
        "replicas": demand.replicas,
        "devices": demand.devices,
        "compute_milli": demand.compute_milli,
        "memory_mib": demand.memory_mib,
        "cpu_milli": demand.cpu_milli,
        "host_memory_mib": demand.host_memory_mib,
    }
    needs = {name: amount for name, amount in needs.items() if amount}
    asked = ", ".join(f"{name} {amount}" for name, amount in needs.items())
    cause = StopCause.SHRUNK if rule is ON_LOAN else StopCause.PREEMPTED
    count = len(plan.runs) if rule is ON_LOAN else len(plan.victims)
    what = "runs that may leave elastic gangs" if rule is ON_LOAN else "jobs that may be stopped"
    reason = (
        f"for {job.job_id} (attempt {job.attempt}), which needs {asked}: {rule.says(job)}; "
        f"the smallest set that is enough, {count} of {plan.considered} {what}"
    )
    facts: list[ev.Fact] = [
        ev.PreemptionDecided(
            caused_by=job.last_event,
            job_id=job.job_id,
            kind=rule.kind,
            victims=plan.victims,
            runs=tuple(run.run_id for run in plan.runs),
            nodes=plan.nodes,
            needs=needs,
            frees={name: amount for name, amount in frees.items() if amount},
            considered=plan.considered,
            rule=rule.says(job),
        )
    ]
    facts.extend(
        ev.RunStopOrdered(
            caused_by=job.last_event,
            run_id=run.run_id,
            node_id=run.node_id,
            cause=cause,
            grace_s=grace_s_of(state.pool.jobs[run.job_id].spec, cause),
            actor=ACTOR,
            reason=reason,
        )
        for run in plan.runs
    )
    return facts
