"""One round of placements, tried out on top of the folded state without touching it.

Waiting jobs are taken in order; each is placed whole or not at all, and one that doesn't fit lets later ones pass,
except on nodes that are kept for it. A round goes over the queue until a pass places nothing: so what it says of those
who wait holds once its placements have been folded, and a decision made again says nothing.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Final

from apportion.contracts import events as ev
from apportion.contracts.causes import StopCause
from apportion.contracts.ids import JobId, NodeId, QueueId, TenantId, run_id
from apportion.placer import fair, orders
from apportion.placer.bookings import Bookings
from apportion.placer.books import Books, charge_on
from apportion.placer.evictions import ATTEMPTS_MAX, Evictions
from apportion.placer.orders import CLASS_RANK, OrderKey, S
from apportion.placer.policies import policy_id
from apportion.placer.preempt import Planner, capacity
from apportion.placer.ranking import DeviceFits, Ranking, follow, follow_round
from apportion.placer.reservations import NEVER as NO_END
from apportion.placer.reservations import RELEASE_S, START_S, Board, Kept, Reservation, due_at, free_at, kept_of
from apportion.placer.rooms import (
    NEVER,
    Demand,
    Fit,
    NodeRoom,
    Out,
    devices_asked,
    hidden,
    slices_on,
    with_run,
)
from apportion.placer.selection import Candidate, Selection
from apportion.placer.state import Group, Shape, State, is_bidding, order_in, pool_order, shape_of
from apportion.placer.topology import DOMAINS_MAX, by_domain, domain_of, replicas_together
from apportion.placer.turns import Turns
from apportion.pool.quota import ONE_JOB, Amounts
from apportion.pool.state import JobView, grace_s_of

FACTS_MAX: Final = 900
"""Facts of one decision: they travel as one batch, which the bus bounds at 1,000."""
GANG_MAX: Final = 990
"""A gang travels in one batch: a larger one can't be placed whole."""
_PLACES: Final = 2**32
"""More than the places of one class in any order: priorities, and bids."""
_LAST: Final[OrderKey] = (2**63, 0, 0, JobId(""))
"""After every key."""
BOARDS_MAX: Final = 8
"""Demands for which it is remembered when nodes will be free."""
MEMO_MIN: Final = 256
"""Demands whose rankings are kept although nobody waits with them now."""


IsBarred = Callable[[NodeId], bool]
"""Whether a replica may not go to this node, whatever fits there."""


@dataclass(slots=True, frozen=True)
class Choice:
    """Where one replica goes, and what it was chosen from."""

    candidates: list[Candidate]
    """The chosen one first, its room as it was before."""
    excluded: dict[Out, int]
    charge: Amounts
    """What its queue is charged for it."""

    @property
    def room(self) -> NodeRoom:
        """The node, as it was before."""
        return self.candidates[0].room

    @property
    def fit(self) -> Fit:
        """Where on it."""
        return self.candidates[0].fit


@dataclass(slots=True, frozen=True)
class Block:
    """What keeps the first job of a line waiting."""

    is_frozen: bool = False
    over_quota: tuple[str, ...] = ()
    """Which limits it would exceed."""
    quota_of: QueueId | None = None
    """Whose limits those are, or which queue is cordoned: its queue, one above, or its tenant's account."""
    is_cordoned: bool = False
    reserved_for: JobId | None = None
    replicas_fit: int = 0
    apart: int = 0
    """Where replicas must be in one domain: how many fit over all domains, if that would be enough."""
    domain: str = ""
    """And which has room for most of them: for ``replicas_fit``."""
    bids_from: int = 0
    """Where it bids no more than anybody who runs in its market: the lowest of those bids."""
    awaits: tuple[JobId, ...] = ()
    """Who was told to stop for it, and has not left yet."""

    @property
    def is_for_room(self) -> bool:
        """Whether it waits for room on nodes, and for no queue or operator."""
        return not self.is_frozen and not self.is_cordoned and self.quota_of is None


_NO_ROOM: Final = Block()


@dataclass(slots=True)
class Line:
    """Waiting jobs of one shape, those included whose instant has come; and how far this round is."""

    shape: Shape
    keys: list[OrderKey]
    """The group's own list where nothing was added: not to be changed."""
    group: Group | None
    due: list[OrderKey]
    """Those of which nothing was said since their instant passed, in order."""
    alike: int = 0
    """Equal where lines differ in whose they are, or in their place, and not in what they ask."""
    at: int = 0
    block: Block | None = None
    ranking: Ranking | None = None
    """Once it was asked for."""
    is_hopeless: bool = False
    """No node can host it, and a round only takes room away: whose turn it is makes no difference to it."""


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
        self._rooms: dict[NodeId, NodeRoom] = {}
        self._selection = Selection(state, self._rooms, is_memo_used=is_memo_used)
        self._changed: dict[NodeId, int] = {}
        self._changes = 0
        self._token = object()
        self._rankings: dict[Demand, Ranking] = {}
        self.books = Books(state.pool.queues, state.pool.tenants, state.pool.held_by)
        self._past: dict[str, Amounts] = {}
        self._turns: dict[str, tuple[int, int]] = {}
        """Whose turn it is when, until something of theirs is placed."""
        self._free: dict[tuple[str, ...], tuple[int, dict[str, int]]] = {}
        self._evictions = Evictions(state, now, self.books)
        self._bookings = Bookings(state.pool, state.rooms, now)
        self._reservation: Reservation | None = None
        self._ends: dict[NodeId, int] = {}
        """When what the round has placed on each node will have left at the latest."""
        self._went_to: dict[JobId, set[NodeId]] = {}
        """Where replicas of elastic gangs were placed."""
        self._starting: set[JobId] = set()
        """Those of the placed, to look them up."""
        self._grown: dict[JobId, tuple[int, int]] = {}
        """Of elastic gangs that the round has given more: the number of their next replica, and how many they have."""
        self._taken: dict[NodeId, list[tuple[Demand, tuple[int, ...], str]]] = {}

    def run(self) -> None:
        """Place what can be placed."""
        self.lines = _lines(self.state, self.now)
        if self.state.pool.frozen:
            for line in self.lines:
                line.block = Block(is_frozen=True)
            return
        self.facts.extend(self._bookings.facts)
        while True:
            while not self.is_full and self._pass():
                pass
            if self.is_full:
                return
            # Whom others were stopped for needs nothing else kept for it, and that may let somebody else go on. What is
            # kept for whom depends on what runs where, and so on what elastic gangs are given.
            if not self._evict() and not self._grow():
                self._outbid()
                self._state_reserved()
                return

    def room(self, node_id: NodeId) -> NodeRoom:
        """The node as it is now."""
        found = self._rooms.get(node_id)
        return self.state.rooms[node_id] if found is None else found

    def ranking(self, demand: Demand) -> Ranking:
        """All nodes as this demand sees them now. Not to be changed, and good until the next placement."""
        found = self._rankings.get(demand)
        if found is None:
            found = self._rankings[demand] = self._folded(demand)
        return self._followed(found, demand)

    def _followed(self, ranking: Ranking, demand: Demand) -> Ranking:
        if ranking.round is not self._token or ranking.round_seen != self._changes:
            choose = self._selection.policy(demand).choose
            follow_round(ranking, demand, self.state.rooms, self._rooms, self._changed, self._token, choose)
        return ranking

    def most_free(self, models: tuple[str, ...]) -> dict[str, int]:
        """The most that any one device of these models (or node, for what is the node's) has free now."""
        found = self._free.get(models)
        if found is None or found[0] != self._changes:
            found = self._free[models] = (self._changes, self.state.free.most(models, self._rooms))
        return found[1]

    def take(self, shape: Shape, tenant: TenantId) -> list[Choice] | Block:
        """Slices for all replicas of one job of this shape, taken from here on; or why not, with nothing taken."""
        demand = shape.demand
        if (block := self._out_of_quota(shape)) is not None:
            return block
        if demand.replicas > GANG_MAX or not self.ranking(demand).has_fits:
            return Block()
        is_charge_open = demand.devices > 0 and self.books.is_open(shape.queue, shape.limited, demand)
        if demand.topology:
            found = self._take_near(shape, tenant, is_charge_open=is_charge_open)
        else:
            found = self._take(shape, tenant, demand.replicas, is_charge_open=is_charge_open)
        if not isinstance(found, Block):
            self.books.charge(shape.queue, tenant, ONE_JOB)
        return found

    def _take_near(self, shape: Shape, tenant: TenantId, *, is_charge_open: bool) -> list[Choice] | Block:
        """Slices for all replicas in one domain, the one with the least free that has room for them; or why not.

        Where that is a preference only: else in as few domains as may be, beginning with the one that holds most.
        """
        demand = shape.demand
        reserved_for: JobId | None = None
        rooms: list[NodeRoom] = []
        kept: list[NodeRoom] = []
        for _, node_id in self.ranking(demand).in_order():
            room = self.room(node_id)
            owner = self._kept_from(node_id, shape, tenant)
            reserved_for = owner or reserved_for
            (rooms if owner is None else kept).append(room)
        counts = {room.node_id: capacity(demand, room) for room in rooms}
        parts = by_domain(demand, rooms)
        holds = {name: sum(counts[room.node_id] for room in part) for name, part in parts.items()}

        def elsewhere(name: str) -> IsBarred:
            return lambda node_id: domain_of(demand, self.room(node_id)) != name

        failed = Block()
        enough = [name for name, count in holds.items() if count >= demand.replicas]
        for name in sorted(enough, key=lambda name: (sum(room.free_share for room in parts[name]), name)):
            found = self._take(shape, tenant, demand.replicas, is_charge_open=is_charge_open, is_barred=elsewhere(name))
            if not isinstance(found, Block):
                return found
            failed = found
        if demand.is_together:
            if enough:
                return failed
            best = max(holds, key=lambda name: (holds[name], name), default="")
            total = sum(holds.values())
            is_kept = bool(kept) and replicas_together(demand, (*rooms, *kept)) >= demand.replicas
            return Block(
                reserved_for=reserved_for if is_kept else None,
                replicas_fit=holds.get(best, 0),
                apart=total if total >= demand.replicas else 0,
                domain=best,
            )
        choices: list[Choice] = []
        for name in [*sorted(holds, key=lambda name: (-holds[name], name)), ""]:
            missing = demand.replicas - len(choices)
            count = min(holds.get(name, missing), missing)
            if not count:
                continue
            barred = elsewhere(name) if name else None
            found = self._take_hidden(shape, tenant, count, is_charge_open=is_charge_open, is_barred=barred)
            if not isinstance(found, Block):
                choices += found
            elif not name:
                self._undo(shape, tenant, choices)
                return replace(found, replicas_fit=len(choices) + found.replicas_fit)
        self._show(demand, choices)
        return choices

    def _take(
        self, shape: Shape, tenant: TenantId, count: int, *, is_charge_open: bool, is_barred: IsBarred | None = None
    ) -> list[Choice] | Block:
        """Slices for so many replicas, or why not."""
        found = self._take_hidden(shape, tenant, count, is_charge_open=is_charge_open, is_barred=is_barred)
        if not isinstance(found, Block):
            self._show(shape.demand, found)
        return found

    def _show(self, demand: Demand, choices: list[Choice]) -> None:
        """Have devices that were taken by replicas which share none in use again."""
        for choice in choices if demand.is_distinct else ():
            self._set(hidden(self.room(choice.room.node_id), choice.fit.picks, is_back=True))

    def _take_hidden(
        self, shape: Shape, tenant: TenantId, count: int, *, is_charge_open: bool, is_barred: IsBarred | None
    ) -> list[Choice] | Block:
        """As ``_take``; where replicas share no device, those that they have stay out of use."""
        demand = shape.demand
        choices: list[Choice] = []
        for _ in range(count):
            found = self._first(shape, tenant, is_charge_open=is_charge_open, is_barred=is_barred)
            if isinstance(found, Block):
                self._undo(shape, tenant, choices)
                return replace(found, replicas_fit=len(choices))
            choices.append(found)
            after = with_run(demand, found.room, found.fit.picks, tenant)
            # For the rest of the job's replicas its devices are out of use.
            self._set(hidden(after, found.fit.picks) if demand.is_distinct else after)
            self._taken.setdefault(found.room.node_id, []).append((demand, found.fit.picks, tenant))
            self.books.charge(shape.queue, tenant, found.charge)
        return choices

    def _undo(self, shape: Shape, tenant: TenantId, choices: list[Choice]) -> None:
        for choice in reversed(choices):
            self._set(choice.room)
            self._taken[choice.room.node_id].pop()
            self.books.charge(shape.queue, tenant, choice.charge, -1)

    def would_take(self, shape: Shape, job: JobView) -> bool:
        """Whether ``take`` would find slices for the job if it were of this shape; nothing is taken."""
        reserved = self.reserved
        self.reserved = {node_id: owner for node_id, owner in reserved.items() if owner != job.job_id}
        found = self.take(shape, job.tenant)
        self.reserved = reserved
        if isinstance(found, Block):
            return False
        self.books.charge(shape.queue, job.tenant, ONE_JOB, -1)
        self._undo(shape, job.tenant, found)
        return True

    def _pass(self) -> bool:
        """Go once over those who wait, in order; True where somebody was placed."""
        pool = self.state.pool
        self.reserved = {}
        self._reservation = None
        turns = Turns(self._parent_of, self._turn_of)
        # Where claims are given up, or limits reached, it matters when a line is looked at.
        is_order_all = self._evictions.has_claims
        hopeful = 0
        for number, line in enumerate(self.lines):
            line.block = None
            self._skip_early(line)
            if line.at >= len(line.keys):
                continue
            if not is_order_all and self._is_hopeless(line):
                line.block = _NO_ROOM
                if not self._may_reserve(pool.jobs[line.keys[line.at][3]]):
                    continue
            else:
                hopeful += 1
            turns.add(line.shape.queue, line.shape.tenant, *self._head(line), number)
        turns.start()
        placed = len(self.placed)
        given_up = False
        # A round only takes room away: who doesn't fit, doesn't fit later in this pass either.
        blocks: dict[int, Block] = {}
        while (hopeful or not self.reserved) and (turn := turns.first()) is not None:
            line = self.lines[turn]
            job = pool.jobs[line.keys[line.at][3]]
            if line.block is not None:
                turns.leave()
                self._reserve(line.shape, job, line.block)
                continue
            replicas = line.shape.demand.replicas
            if replicas <= GANG_MAX and len(self.facts) + replicas > self._limit():
                self.is_full = True
                break
            found = blocks.get(line.alike) or self.take(line.shape, job.tenant)
            if isinstance(found, Block):
                hopeful -= 1
                line.block = blocks[line.alike] = found
                turns.leave()
                given_up = self._evictions.blocked(line.shape) or given_up
                self._reserve(line.shape, job, found)
                continue
            self.placed.append(job.job_id)
            self._starting.add(job.job_id)
            self._evictions.placed(job.job_id)
            self._state_placed(job, line.shape.demand, found)
            self._forget_turns(line.shape, job.tenant)
            line.at += 1
            self._skip_early(line)
            if line.at < len(line.keys):
                turns.go_on(*self._head(line))
            else:
                hopeful -= 1
                turns.leave()
        return len(self.placed) > placed or given_up

    def _is_hopeless(self, line: Line) -> bool:
        """Whether no node can host it whenever its turn comes, and nothing else is to be said of it."""
        if not line.is_hopeless:
            shape = line.shape
            line.is_hopeless = self.books.is_unlimited(shape.queue) and not self._ranking_of(line).has_fits
        return line.is_hopeless

    def _ranking_of(self, line: Line) -> Ranking:
        if line.ranking is None:
            line.ranking = self.ranking(line.shape.demand)
            return line.ranking
        return self._followed(line.ranking, line.shape.demand)

    def _evict(self) -> bool:
        """Have others stopped for those that are blocked, in order, where somebody may be; True where somebody is."""
        before = len(self.facts)
        jobs = self.state.pool.jobs
        if not self._evictions.may_be:
            return False
        # Who takes back what is guaranteed comes first; others, whose limit keeps them waiting, have nobody to stop.
        heads = [
            (not is_owed, line.keys[line.at], number, line.at)
            for number, line in enumerate(self.lines)
            if line.block is not None and not line.block.is_cordoned and line.at < len(line.keys)
            if (is_owed := self._evictions.is_owed(line.shape)) or line.block.quota_of is None or self.state.surplus
            if self._evictions.has_claims or self._evictions.may_have_victims(jobs[line.keys[line.at][3]], line.shape)
        ]
        heapify(heads)
        failed = 0
        while heads and failed < ATTEMPTS_MAX:
            is_later, key, number, at = heappop(heads)
            line, job = self.lines[number], jobs[key[3]]
            if not self._evictions.is_awaited(job) and not self._evict_for(line, job):
                failed += self._evictions.may_have_victims(job, line.shape)
                continue
            # Those behind it in the line are helped as well.
            while (at := at + 1) < len(line.keys):
                if jobs[line.keys[at][3]].not_before_at <= self.now:
                    heappush(heads, (is_later, line.keys[at], number, at))
                    break
        for line in self.lines:
            if line.block is not None and (awaited := self._evictions.awaited(line.shape)):
                line.block = replace(line.block, awaits=awaited)
        return len(self.facts) > before

    def _evict_for(self, line: Line, job: JobView) -> bool:
        shape = line.shape
        if shape.demand.replicas > GANG_MAX or not self._evictions.may_have_victims(job, shape):
            return False
        assert line.block is not None
        if line.block.quota_of is not None:
            facts_left = self._limit() - len(self.facts)
            facts = self._evictions.make_quota_of_loans(job, shape, facts_left)
            facts = facts or self._evictions.make_quota(job, shape, facts_left)
            self.facts.extend(facts)
            return bool(facts)
        facts = self._evictions.plan(
            Planner(self.state.pool, self.room, self._taken, self.state.kinds, self.state.settings.limits),
            job,
            shape,
            fits=[node_id for _, node_id in self.ranking(shape.demand).in_order()],
            usables=self._usables(job, shape),
            facts_left=self._limit() - len(self.facts),
        )
        self.facts.extend(facts)
        return bool(facts)

    def _state_reserved(self) -> None:
        """State what is kept for the job that has been blocked for longest, where that is news."""
        told, found = self.state.pool.reserved, self._reservation
        if found is None:
            if told is not None:
                self.facts.append(ev.NodesReserved(job_id=told.job_id))
            return
        nodes = tuple(sorted(found.nodes))
        if told is None or (told.job_id, told.nodes) != (found.job_id, nodes):
            start_at = found.free_at if found.free_at < NO_END else 0
            self.facts.append(ev.NodesReserved(job_id=found.job_id, nodes=nodes, start_at=start_at))

    def _kept_from(self, node_id: NodeId, shape: Shape, tenant: TenantId) -> JobId | None:
        """For whom the node is kept from jobs of this shape; None where it isn't."""
        if (owner := self._evictions.kept_for(node_id, shape)) is not None:
            return owner
        if node_id in self.reserved and not self._passes(shape):
            return self.reserved[node_id]
        return self._bookings.kept_from(node_id, tenant, shape.length_s)

    @property
    def _is_anything_kept(self) -> bool:
        """Whether any node is kept for anybody."""
        return bool(self.reserved) or self._evictions.keeps_nodes or self._bookings.keeps_nodes

    def _usables(self, job: JobView, shape: Shape) -> list[Callable[[NodeId], bool]]:
        """Where a job may go for which others would be stopped; each domain by itself, where it must be in one."""
        demand = shape.demand

        def is_usable(node_id: NodeId) -> bool:
            return (
                node_id not in demand.avoid
                and self.reserved.get(node_id, job.job_id) == job.job_id
                and self._evictions.kept_for(node_id, shape) is None
                and self._bookings.kept_from(node_id, job.tenant, shape.length_s) is None
            )

        if not demand.is_together:
            return [is_usable]
        names = sorted({domain_of(demand, room) for room in self.state.rooms.values()})[:DOMAINS_MAX]

        def is_usable_in(name: str) -> Callable[[NodeId], bool]:
            return lambda node_id: is_usable(node_id) and domain_of(demand, self.room(node_id)) == name

        return [is_usable_in(name) for name in names]

    def _grow(self) -> bool:
        """Give elastic gangs more replicas, a step each in turn, where there is room; True where some are given.

        Not where somebody waits who might have it back at once (see ``Evictions``): nothing is given only to be taken.
        """
        state = self.state
        # Of whom a replica is told to stop with this very decision, nobody knows how many will be left.
        jobs = {job_id: state.pool.jobs[job_id] for job_id in state.growable - self._evictions.gone}
        sizes = {job_id: (job.next_replica, len(job.members())) for job_id, job in jobs.items()}
        for job_id in self.placed:
            job = state.pool.jobs[job_id]
            if job.spec.replicas_min:
                jobs[job_id] = job
                sizes[job_id] = self._grown.get(job_id, (job.spec.replicas_min, job.spec.replicas_min))
        if not jobs:
            return False
        sizes |= {job_id: size for job_id, size in self._grown.items() if job_id in sizes}
        shapes = {job_id: shape_of(state, job) for job_id, job in jobs.items()}
        blocked = [
            (CLASS_RANK[state.pool.jobs[line.keys[line.at][3]].spec.service_class], line, line.block)
            for line in self.lines
            if line.block is not None and line.at < len(line.keys)
        ]
        turns = sorted(jobs.values(), key=lambda job: (CLASS_RANK[job.spec.service_class], job.admitted_seq))
        before = len(self.facts)
        while turns:
            turns = [job for job in turns if self._grow_one(job, shapes[job.job_id], sizes, blocked)]
        return len(self.facts) > before

    def _grow_one(
        self,
        job: JobView,
        shape: Shape,
        sizes: dict[JobId, tuple[int, int]],
        blocked: list[tuple[int, Line, Block]],
    ) -> bool:
        """One step more for this gang; False where it can't have that."""
        spec, step = job.spec, job.spec.replicas_step
        first, members = sizes[job.job_id]
        if members + step > spec.replicas or len(self.facts) + step >= self._room_for:
            return False
        if self.books.cordoned(spec.queue) is not None or job.job_id in self._evictions.told:
            return False
        rank = CLASS_RANK[spec.service_class]
        lineage = {view.queue_id for view in self.books.lineage(spec.queue)}
        rivals = [
            (line.shape.demand, block)
            for other, line, block in blocked
            if other <= rank or (line.shape.queue != spec.queue and self._evictions.is_owed(line.shape))
        ]
        if any(block.quota_of in lineage for _, block in rivals if not block.is_cordoned):
            return False
        wanted = [self.ranking(demand).looks for demand, block in rivals if block.is_for_room]
        here = ""
        if shape.demand.is_together:
            # Its other replicas are all in one domain.
            nodes = self._went_to.get(job.job_id) or {run.node_id for run in job.members()}
            here = domain_of(shape.demand, self.room(min(nodes)))
        own: set[NodeId] = set()
        if shape.demand.is_distinct:
            # Its replicas share no device: the new ones go where none of them is.
            own = self._went_to.get(job.job_id, set()) | {run.node_id for run in job.runs.values() if run.holds}

        def is_barred(node_id: NodeId) -> bool:
            if here and domain_of(shape.demand, self.room(node_id)) != here:
                return True
            return node_id in own or any(looks.get(node_id) not in NEVER for looks in wanted)

        found = self._take(shape, job.tenant, step, is_charge_open=True, is_barred=is_barred)
        if isinstance(found, Block):
            return False
        self._state_placed(job, shape.demand, found, first=first)
        if job.job_id not in self._starting:
            self.facts.append(
                ev.GangResized(
                    caused_by=job.last_event,
                    job_id=job.job_id,
                    before=members,
                    after=members + step,
                    replicas_min=spec.replicas_min,
                    replicas_max=spec.replicas,
                    runs=tuple(run_id(job.job_id, first + at, job.attempt) for at in range(step)),
                )
            )
        sizes[job.job_id] = self._grown[job.job_id] = (first + step, members + step)
        self._forget_turns(shape, job.tenant)
        return True

    def _forget_turns(self, shape: Shape, tenant: TenantId) -> None:
        self._turns.pop(f"{shape.queue}/{tenant}", None)
        for view in self.books.lineage(shape.queue):
            self._turns.pop(view.queue_id, None)

    def is_awaited(self, job: JobView) -> bool:
        """Whether others were told to stop for this job, and have not left yet."""
        return self._evictions.is_awaited(job)

    def _outbid(self) -> None:
        """Note who waits as everybody who runs in the market bids as much or more."""
        state = self.state
        lowest = self._lowest_bid()
        for line in self.lines if lowest else ():
            block = line.block
            if block is None or not block.is_for_room or block.awaits or line.at >= len(line.keys):
                continue
            job = state.pool.jobs[line.keys[line.at][3]]
            if is_bidding(state, job) and job.spec.bid_micro <= lowest:
                line.block = replace(block, bids_from=lowest)

    def _lowest_bid(self) -> int:
        """The lowest bid of those who run in the market, as the round has it; 0 where nobody does."""
        state = self.state
        gone = self._evictions.gone
        before = next((bid for bid, job_id in state.bidders if job_id not in gone), 0)
        jobs = (state.pool.jobs[job_id] for job_id in self.placed)
        bids = [job.spec.bid_micro for job in jobs if is_bidding(state, job)]
        return min([*bids, *([before] if before else ())], default=0)

    def _head(self, line: Line) -> tuple[OrderKey, int]:
        """Where the first of the line stands in its queue, and its class where that goes before shares."""
        state = self.state
        key = line.keys[line.at]
        job = state.pool.jobs[key[3]]
        leading = CLASS_RANK[job.spec.service_class] if state.settings.between_queues == "classes" else 0
        order = order_in(state, line.shape.queue)
        if (above := pool_order(state)) in orders.RANKED:
            # Strictly over the whole pool, whatever share its queue has.
            rank, place = orders.rank_of(job, above)
            leading = rank * _PLACES + place
        return orders.head_of(job, key, order, state.settings, self.now), leading

    def _parent_of(self, queue: QueueId) -> QueueId | None:
        view = self.state.pool.queues.get(queue)
        return None if view is None else view.parent

    def _turn_of(self, name: str) -> tuple[int, int]:
        """When it is the turn of a queue, or of ``<queue>/<tenant>``, as the round has it now."""
        found = self._turns.get(name)
        if found is None:
            found = self._turns[name] = self._share_of(name)
        return found

    def _share_of(self, name: str) -> tuple[int, int]:
        state = self.state
        queue, _, tenant = name.partition("/")
        view = state.pool.queues.get(QueueId(queue))
        if view is None:
            return fair.turn({}, {}, state.totals, {})
        past = self._past.get(name)
        if past is None:
            held = view.used_by.get(TenantId(tenant), {}) if tenant else view.used
            known = state.kept.past.get(name)
            past = self._past[name] = fair.lately(known, held, self.now, state.settings.fair_half_life_s)
        if tenant:
            used = self.books.used_by(QueueId(queue), TenantId(tenant))
            return fair.turn(used, past, state.totals, {})
        used = self.books.used(QueueId(queue))
        return fair.turn(used, past, state.totals, view.guaranteed, view.weight, weights=view.weights)

    def _limit(self) -> int:
        """Facts that the batch may hold now: a little more where it is one gang's alone, or the gang would never go."""
        is_untouched = not self.facts and self._room_for >= FACTS_MAX
        return max(self._room_for, GANG_MAX) if is_untouched else self._room_for

    def _skip_early(self, line: Line) -> None:
        # A clock that was set back makes an instant that had come lie ahead again.
        jobs = self.state.pool.jobs
        while line.at < len(line.keys) and jobs[line.keys[line.at][3]].not_before_at > self.now:
            line.at += 1

    def _out_of_quota(self, shape: Shape) -> Block | None:
        """Whether its queue, or one above it, keeps a job of this shape waiting wherever it goes."""
        if (cordoned := self.books.cordoned(shape.queue)) is not None:
            return Block(is_cordoned=True, quota_of=cordoned)
        over = self.books.over(shape.queue, shape.limited, self.books.least(shape.demand))
        return None if over is None else Block(over_quota=over[1], quota_of=over[0])

    def _first(
        self, shape: Shape, tenant: TenantId, *, is_charge_open: bool, is_barred: IsBarred | None = None
    ) -> Choice | Block:
        """The best node that may be used for one replica."""
        demand = shape.demand
        ranking = self.ranking(demand)
        over: tuple[QueueId, tuple[str, ...]] | None = None
        reserved_for: JobId | None = None

        def is_allowed(room: NodeRoom, fit: Fit) -> bool:
            nonlocal over, reserved_for
            if is_barred is not None and is_barred(room.node_id):
                return False
            if (kept_for := self._kept_from(room.node_id, shape, tenant)) is not None:
                reserved_for = kept_for
                return False
            # Where the charge depends on the device, a smaller one may fit the limits that the best doesn't.
            if (
                is_charge_open
                and (found := self.books.over(shape.queue, shape.limited, charge_on(demand, room, fit.picks)))
                is not None
            ):
                over = over or found
                return False
            return True

        is_free = is_barred is None and not is_charge_open and not self._is_anything_kept
        candidates = self._selection.best(demand, ranking, None if is_free else is_allowed)
        if candidates:
            charge = charge_on(demand, candidates[0].room, candidates[0].fit.picks)
            return Choice(candidates, ranking.counts.copy(), charge)
        if over is None:
            return Block(reserved_for=reserved_for)
        return Block(over_quota=over[1], quota_of=over[0], reserved_for=reserved_for)

    def _passes(self, shape: Shape) -> bool:
        """Whether jobs of this shape may be placed on what is kept for another, as they will have left in time."""
        return self._reservation is not None and self._reservation.admits(shape.length_s, self.now)

    def _set(self, room: NodeRoom) -> None:
        self._changes += 1
        self._selection.moved(self.room(room.node_id), room)
        self._rooms[room.node_id] = room
        self._changed.pop(room.node_id, None)
        self._changed[room.node_id] = self._changes

    def _folded(self, demand: Demand) -> Ranking:
        """All nodes as the demand sees them in the folded state, but for those that another round has changed."""
        state = self.state
        policy = self._selection.policy(demand)
        memo = state.memo if self._is_memo_used else {}
        found = memo.pop(demand, None)
        if found is None:
            found = Ranking()
            if self._is_memo_used and policy.is_blind:
                found.known = {}
                found.fits = _fits_of(state, demand)
        follow(found, demand, state.rooms, state.changed, policy.choose)
        memo[demand] = found
        if len(memo) > MEMO_MIN + 2 * len(state.groups):
            del memo[next(iter(memo))]  # the one that was asked for longest ago
        return found

    def _may_reserve(self, job: JobView) -> bool:
        """Whether the job has been blocked for so long that nodes are kept for it."""
        return self.now >= due_at(job, self.state.settings.reserve_after_s)

    def _reserve(self, shape: Shape, job: JobView, block: Block) -> None:
        """Keep nodes for the first job that has been blocked for long (see ``reservations``)."""
        if self.reserved or block.quota_of is not None:
            return
        if not self._may_reserve(job) or self._evictions.is_awaited(job):
            return
        state, demand = self.state, shape.demand
        # Nodes that are kept for somebody, or that the round has changed, are as the round has them.
        others: dict[NodeId, Kept | None] = dict.fromkeys(self._evictions.nodes_kept)
        for node_id in {*others, *self._rooms}:
            ends_at = max(self._ends.get(node_id, 0), free_at(state.pool, node_id))
            is_kept = self._evictions.kept_for(node_id, shape) is not None
            others[node_id] = None if is_kept else kept_of(demand, self.room(node_id), ends_at)
        self._reservation = self._board(demand).reserve(
            demand,
            job.job_id,
            others,
            domain_of=(lambda node_id: domain_of(demand, self.room(node_id))) if demand.is_together else None,
        )
        if self._reservation is not None:
            self.reserved = dict.fromkeys(sorted(self._reservation.nodes), job.job_id)

    def _board(self, demand: Demand) -> Board:
        state = self.state
        boards = state.boards if self._is_memo_used else {}
        found = boards.pop(demand, None) or Board()
        found.follow(demand, state.rooms, state.changed, state.ends_changed, state.pool)
        boards[demand] = found
        if len(boards) > BOARDS_MAX:
            del boards[next(iter(boards))]  # the one that was asked for longest ago
        return found

    def _state_placed(self, job: JobView, demand: Demand, choices: list[Choice], *, first: int = 0) -> None:
        policy = policy_id(self._selection.policy(demand))
        spec = job.spec
        length_s = spec.time_limit_s + grace_s_of(spec, StopCause.TIME_LIMIT) + START_S + RELEASE_S
        ends_at = self.now + length_s * S if spec.time_limit_s else NO_END
        for replica, choice in enumerate(choices, first):
            room = choice.room
            if spec.replicas_min:
                self._went_to.setdefault(job.job_id, set()).add(room.node_id)
            self._ends[room.node_id] = max(ends_at, self._ends.get(room.node_id, 0))
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
                    cpu_bind=("strict" if spec.numa == "strict" else "preferred") if spec.cpu_bind else "",
                    command=spec.command,
                    env=spec.env,
                    grace_s=spec.grace_s,
                    checkpoint=spec.checkpoint,
                    image=spec.image,
                    candidates=tuple(
                        ev.Candidate(
                            node_id=each.room.node_id,
                            devices=tuple(each.room.devices[place].uuid for place in each.fit.picks),
                            score=each.fit.score,
                            parts=self._selection.parts(demand, each),
                        )
                        for each in choice.candidates
                    ),
                    excluded={str(why): count for why, count in sorted(choice.excluded.items()) if count},
                    policy=policy,
                    topology=domain_of(demand, room) if demand.topology else "",
                    price_micro=self.state.kept.price_micro if is_bidding(self.state, job) else 0,
                )
            )


def _fits_of(state: State, demand: Demand) -> DeviceFits:
    """What is known of devices, for all that ask of them what this demand does."""
    asked = devices_asked(demand)
    known = state.device_fits
    found = known.get(asked)
    if found is None:
        if len(known) > MEMO_MIN + len(state.groups):
            known.clear()
        found = known[asked] = {}
    return found


def _lines(state: State, now: int) -> list[Line]:
    due: dict[Shape, list[OrderKey]] = {}
    for _, key in state.delayed[: bisect_right(state.delayed, (now, _LAST))]:
        job = state.pool.jobs[key[3]]
        due.setdefault(shape_of(state, job), []).append(key)
    lines = []
    for shape, group in state.groups.items():
        added = due.pop(shape, [])
        added.sort()
        lines.append(Line(shape, sorted(group.keys + added) if added else group.keys, group, added))
    lines.extend(Line(shape, sorted(keys), None, sorted(keys)) for shape, keys in due.items())
    numbers: dict[tuple[QueueId, Demand, int, TenantId, TenantId], int] = {}
    is_whose = bool(state.pool.reservations)
    for line in lines:
        shape = line.shape
        asks = (shape.queue, shape.demand, shape.length_s, shape.limited, shape.tenant if is_whose else TenantId(""))
        line.alike = numbers.setdefault(asks, len(numbers))
    return lines
