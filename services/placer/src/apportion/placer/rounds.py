"""One round of placements, tried out on top of the folded state without touching it.

Waiting jobs are taken in order; each is placed whole or not at all, and one that doesn't fit lets later ones pass,
except on nodes that are kept for it. A round goes over the queue until a pass places nothing: so what it says of those
who wait holds once its placements have been folded, and a decision made again says nothing.
"""

from bisect import bisect_right
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Final

from apportion.contracts import events as ev
from apportion.contracts.ids import JobId, NodeId, QueueId, TenantId, run_id
from apportion.placer.ranking import Ranking, follow
from apportion.placer.rooms import (
    NEVER,
    Demand,
    Fit,
    NodeRoom,
    Out,
    charge_on,
    replicas_when_empty,
    shortfall,
    slices_on,
    with_run,
)
from apportion.placer.state import Group, OrderKey, S, Shape, State, demand_of_job
from apportion.pool.state import JobView, NodeState, QueueView

FACTS_MAX: Final = 900
"""Facts of one decision: they travel as one batch, which the bus bounds at 1,000."""
GANG_MAX: Final = 990
"""A gang travels in one batch: a larger one can't be placed whole."""
CANDIDATES_MAX: Final = 3
_LAST: Final[OrderKey] = (2**63, 0, 0, JobId(""))
"""After every key."""
MEMO_MIN: Final = 256
"""Demands whose rankings are kept although nobody waits with them now."""


@dataclass(slots=True)
class Usage:
    """What a queue's runs hold, those of this round included."""

    compute_milli: int
    memory_mib: int
    jobs: int


@dataclass(slots=True, frozen=True)
class Choice:
    """Where one replica goes, and what it was chosen from."""

    room: NodeRoom
    """As it was before."""
    fit: Fit
    others: tuple[tuple[NodeRoom, Fit], ...]
    excluded: dict[Out, int]


@dataclass(slots=True, frozen=True)
class Block:
    """What keeps the first job of a line waiting."""

    is_frozen: bool = False
    over_quota: tuple[str, ...] = ()
    """Which of the queue's limits it would exceed."""
    reserved_for: JobId | None = None
    replicas_fit: int = 0


@dataclass(slots=True)
class Line:
    """Waiting jobs of one shape, those included whose instant has come; and how far this round is."""

    shape: Shape
    keys: list[OrderKey]
    """The group's own list where nothing was added: not to be changed."""
    group: Group | None
    due: list[OrderKey]
    """Those of which nothing was said since their instant passed, in order."""
    at: int = 0
    block: Block | None = None


class Round:
    """The state as this round has it so far."""

    def __init__(self, state: State, now: int, room_for: int = FACTS_MAX, *, is_memo_used: bool = True) -> None:
        self.state = state
        self.now = now
        self.facts: list[ev.Fact] = []
        self.placed: list[JobId] = []
        self.lines: list[Line] = []
        self.is_full = False
        """The batch is full: of those not looked at, nothing is known."""
        self.reserved: dict[NodeId, JobId] = {}
        self._room_for = room_for
        self._is_memo_used = is_memo_used
        self._choose = state.policy.choose
        self._rooms: dict[NodeId, NodeRoom] = {}
        self._changed: dict[NodeId, int] = {}
        self._changes = 0
        self._bases: dict[Demand, Ranking] = {}
        self._rankings: dict[Demand, Ranking] = {}
        self._usage: dict[QueueId, Usage] = {}
        self._free: dict[tuple[str, ...], tuple[int, dict[str, int]]] = {}

    def run(self) -> None:
        """Place what can be placed."""
        self.lines = _lines(self.state, self.now)
        if self.state.pool.frozen:
            for line in self.lines:
                line.block = Block(is_frozen=True)
            return
        while not self.is_full and self._pass():
            pass

    def room(self, node_id: NodeId) -> NodeRoom:
        """The node as it is now."""
        found = self._rooms.get(node_id)
        return self.state.rooms[node_id] if found is None else found

    def usage(self, queue: QueueId) -> Usage:
        """What the queue's runs hold now."""
        found = self._usage.get(queue)
        if found is None:
            view = self.state.pool.queues.get(queue)
            jobs = len(self.state.queue_holders.get(queue, ()))
            found = Usage(0, 0, jobs) if view is None else Usage(view.used_compute_milli, view.used_memory_mib, jobs)
            self._usage[queue] = found
        return found

    def ranking(self, demand: Demand) -> Ranking:
        """All nodes as this demand sees them now. Not to be changed, and good until the next placement."""
        found = self._rankings.get(demand)
        if found is None:
            base = self._base(demand)
            if not self._changed:
                return base
            found = self._rankings[demand] = base.copy()
        follow(found, demand, self._rooms, self._changed, self._choose)
        return found

    def most_free(self, models: tuple[str, ...]) -> dict[str, int]:
        """The most that any one device of these models (or node, for what is the node's) has free now."""
        found = self._free.get(models)
        if found is None or found[0] != self._changes:
            found = self._free[models] = (self._changes, self.state.free.most(models, self._rooms))
        return found[1]

    def take(self, shape: Shape, tenant: TenantId) -> list[Choice] | Block:
        """Slices for all replicas of one job of this shape, taken from here on; or why not, with nothing taken."""
        demand = shape.demand
        if over := self._over_quota(shape):
            return Block(over_quota=over)
        if demand.replicas > GANG_MAX or not self._base(demand).best:
            return Block()  # a round only takes room away, so what did not fit at its start does not now
        usage = self.usage(shape.queue)
        choices: list[Choice] = []
        charged_compute = charged_memory = 0
        for _ in range(demand.replicas):
            found = self._first(demand, self.state.pool.queues.get(shape.queue), usage)
            if isinstance(found, Block):
                for choice in reversed(choices):
                    self._set(choice.room)
                usage.compute_milli -= charged_compute
                usage.memory_mib -= charged_memory
                return Block(over_quota=found.over_quota, reserved_for=found.reserved_for, replicas_fit=len(choices))
            choices.append(found)
            self._set(with_run(demand, found.room, found.fit.picks, tenant))
            compute, memory = charge_on(demand, found.room, found.fit.picks)
            usage.compute_milli += compute
            usage.memory_mib += memory
            charged_compute += compute
            charged_memory += memory
        usage.jobs += 1
        return choices

    def would_take(self, shape: Shape, job: JobView) -> bool:
        """Whether ``take`` would find slices for the job if it were of this shape; nothing is taken."""
        reserved = self.reserved
        self.reserved = {node_id: owner for node_id, owner in reserved.items() if owner != job.job_id}
        found = self.take(shape, job.tenant)
        self.reserved = reserved
        if isinstance(found, Block):
            return False
        usage = self.usage(shape.queue)
        usage.jobs -= 1
        for choice in reversed(found):
            compute, memory = charge_on(shape.demand, choice.room, choice.fit.picks)
            usage.compute_milli -= compute
            usage.memory_mib -= memory
            self._set(choice.room)
        return True

    def _pass(self) -> bool:
        """Go once over those who wait, in order; True where somebody was placed."""
        pool = self.state.pool
        self.reserved = {}
        heads: list[tuple[OrderKey, int]] = []
        for number, line in enumerate(self.lines):
            line.block = None
            self._skip_early(line)
            if line.at < len(line.keys):
                heads.append((line.keys[line.at], number))
        heapify(heads)
        placed = len(self.placed)
        while heads:
            key, number = heads[0]
            line = self.lines[number]
            job = pool.jobs[key[3]]
            replicas = line.shape.demand.replicas
            if replicas <= GANG_MAX and len(self.facts) + replicas > self._limit():
                self.is_full = True
                break
            found = self.take(line.shape, job.tenant)
            if isinstance(found, Block):
                line.block = found
                heappop(heads)
                self._reserve(line.shape.demand, job, found)
                continue
            self._state_placed(job, line.shape.demand, found)
            line.at += 1
            self._skip_early(line)
            if line.at < len(line.keys):
                heapreplace(heads, (line.keys[line.at], number))
            else:
                heappop(heads)
        return len(self.placed) > placed

    def _limit(self) -> int:
        """Facts that the batch may hold now: a little more where it is one gang's alone, or the gang would never go."""
        is_untouched = not self.facts and self._room_for >= FACTS_MAX
        return max(self._room_for, GANG_MAX) if is_untouched else self._room_for

    def _skip_early(self, line: Line) -> None:
        # A clock that was set back makes an instant that had come lie ahead again.
        jobs = self.state.pool.jobs
        while line.at < len(line.keys) and jobs[line.keys[line.at][3]].not_before_at > self.now:
            line.at += 1

    def _over_quota(self, shape: Shape) -> tuple[str, ...]:
        """The limits that one job of this shape exceeds wherever it goes."""
        queue = self.state.pool.queues.get(shape.queue)
        if queue is None:
            return ()
        usage = self.usage(shape.queue)
        demand = shape.demand
        slices = demand.devices * demand.replicas
        over = []
        if _exceeds(usage.compute_milli + demand.compute_milli * slices, queue.limit_compute_milli) and slices:
            over.append("compute_milli")
        if _exceeds(usage.memory_mib + demand.memory_mib * slices, queue.limit_memory_mib) and slices:
            over.append("memory_mib")
        if _exceeds(usage.jobs + 1, queue.limit_jobs):
            over.append("jobs")
        return tuple(over)

    def _first(self, demand: Demand, queue: QueueView | None, usage: Usage) -> Choice | Block:
        """The best node that may be used for one replica."""
        ranking = self.ranking(demand)
        over: set[str] = set()
        reserved_for: JobId | None = None
        # Where the charge depends on the device, a smaller one may fit the limits that the best doesn't.
        is_charge_open = queue is not None and demand.devices > 0 and (demand.is_whole or not demand.memory_mib)
        for _, node_id in ranking.best:
            if node_id in self.reserved:
                reserved_for = self.reserved[node_id]
                continue
            room = self.room(node_id)
            fit = ranking.looks[node_id]
            assert isinstance(fit, Fit)
            if is_charge_open and queue is not None:
                compute, memory = charge_on(demand, room, fit.picks)
                if _exceeds(usage.compute_milli + compute, queue.limit_compute_milli):
                    over.add("compute_milli")
                    continue
                if _exceeds(usage.memory_mib + memory, queue.limit_memory_mib):
                    over.add("memory_mib")
                    continue
            others = []
            for _, other in ranking.best[:CANDIDATES_MAX]:
                other_fit = ranking.looks[other]
                if other != node_id and isinstance(other_fit, Fit):
                    others.append((self.room(other), other_fit))
            return Choice(room, fit, tuple(others[: CANDIDATES_MAX - 1]), ranking.counts.copy())
        return Block(over_quota=tuple(sorted(over)), reserved_for=reserved_for)

    def _set(self, room: NodeRoom) -> None:
        self._changes += 1
        self._rooms[room.node_id] = room
        self._changed.pop(room.node_id, None)
        self._changed[room.node_id] = self._changes

    def _base(self, demand: Demand) -> Ranking:
        """All nodes as the demand sees them in the folded state."""
        found = self._bases.get(demand)
        if found is not None:
            return found
        state = self.state
        memo = state.memo if self._is_memo_used else {}
        found = memo.pop(demand, None) or Ranking()
        follow(found, demand, state.rooms, state.changed, self._choose)
        memo[demand] = found
        if len(memo) > MEMO_MIN + 2 * len(state.groups):
            del memo[next(iter(memo))]  # the one that was asked for longest ago
        self._bases[demand] = found
        return found

    def _reserve(self, demand: Demand, job: JobView, block: Block) -> None:
        """Keep nodes for the first job that has been blocked for long: those nearest to hosting it.

        Nothing new goes where it waits, so the nearest only get nearer as runs end, and its wait is bounded by theirs.
        """
        after = self.state.settings.reserve_after_s
        waiting_since = max(job.queued_at, job.not_before_at)
        if self.reserved or block.over_quota or after < 0 or self.now - waiting_since < after * S:
            return
        ranking = self.ranking(demand)
        nearest = []
        for node_id, found in ranking.looks.items():
            room = self.room(node_id)
            if found not in NEVER and room.state is NodeState.READY:
                nearest.append((shortfall(demand, room), node_id))
        missing = demand.replicas
        kept = []
        for _, node_id in sorted(nearest):
            count = replicas_when_empty(demand, self.room(node_id))
            if count:
                kept.append(node_id)
                missing -= count
            if missing <= 0:
                self.reserved = dict.fromkeys(kept, job.job_id)
                return

    def _state_placed(self, job: JobView, demand: Demand, choices: list[Choice]) -> None:
        self.placed.append(job.job_id)
        parts = self.state.policy.parts
        spec = job.spec
        for replica, choice in enumerate(choices):
            room = choice.room
            self.facts.append(
                ev.RunPlaced(
                    caused_by=job.last_event,
                    run_id=run_id(job.job_id, replica, job.attempt),
                    job_id=job.job_id,
                    tenant=job.tenant,
                    node_id=room.node_id,
                    node_epoch=room.epoch,
                    queue=spec.queue,
                    slices=slices_on(demand, room, choice.fit.picks),
                    cpu_milli=demand.cpu_milli,
                    host_memory_mib=demand.host_memory_mib,
                    command=spec.command,
                    env=spec.env,
                    grace_s=spec.grace_s,
                    candidates=tuple(
                        ev.Candidate(
                            node_id=other.node_id,
                            devices=tuple(other.devices[place].uuid for place in fit.picks),
                            score=fit.score,
                            parts=parts(demand, other, fit.picks),
                        )
                        for other, fit in ((room, choice.fit), *choice.others)
                    ),
                    excluded={str(why): count for why, count in sorted(choice.excluded.items()) if count},
                )
            )


def _exceeds(amount: int, limit: int | None) -> bool:
    return limit is not None and amount > limit


def _lines(state: State, now: int) -> list[Line]:
    due: dict[Shape, list[OrderKey]] = {}
    for _, key in state.delayed[: bisect_right(state.delayed, (now, _LAST))]:
        job = state.pool.jobs[key[3]]
        due.setdefault(Shape(job.spec.queue, demand_of_job(state, job)), []).append(key)
    lines = []
    for shape, group in state.groups.items():
        added = due.pop(shape, [])
        added.sort()
        lines.append(Line(shape, sorted(group.keys + added) if added else group.keys, group, added))
    lines.extend(Line(shape, sorted(keys), None, sorted(keys)) for shape, keys in due.items())
    return lines
