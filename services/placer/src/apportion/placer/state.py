"""What the placer knows: the pool as facts describe it, its settings, and indexes that make a round touch what changed.

Indexes are derived: a snapshot holds none of them, and ``restore`` builds them again. So is the memo, which keeps what
a policy said of nodes that have not changed since; with an empty memo every decision is the same, only slower.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, PreemptionKind, QueueOrder, RunAction, StopCause
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import PLACER, JobId, NodeId, QueueId, RunId, TenantId, attempt_of_run
from apportion.placer import fair, orders
from apportion.placer.constraints import Kind, Limits
from apportion.placer.durations import OWN_END, Durations, note
from apportion.placer.fair import Past
from apportion.placer.free import Free
from apportion.placer.market import Market
from apportion.placer.mix import Mix, count
from apportion.placer.orders import CLASS_RANK as CLASS_RANK  # noqa: PLC0414 - others have it from here
from apportion.placer.orders import OrderKey, Weights
from apportion.placer.orders import S as S  # noqa: PLC0414 - others have it from here
from apportion.placer.outlook import Outlook
from apportion.placer.policies.best_fit import BEST_FIT
from apportion.placer.policies.least_response import LEAST_RESPONSE
from apportion.placer.ranking import DeviceFits, Ranking
from apportion.placer.reservations import Board, length_of
from apportion.placer.rooms import Demand, NodeRoom, demand_of, room_after, room_of_node
from apportion.pool import quota
from apportion.pool import state as pools
from apportion.pool.quota import Amounts
from apportion.pool.state import JobState, JobView, NodeState, Pool, RunState, RunView

HolderKey = tuple[int, int, JobId]
"""Those who hold something, the likeliest to end first: end of the time limit, then oldest placement, then id."""

NO_END: Final = 2**63 - 1
_TIMED: Final = frozenset({Pending.PENDING_EVALUATION, Pending.NOT_BEFORE, Pending.BACKOFF})
ENDING: Final = frozenset({JobState.STOPPING, JobState.ENDED})
"""States of a job whose live runs must stop: it may have ended while a batch that places it was on its way."""
_LIVE: Final = frozenset({RunState.PLACED, RunState.STARTED})
_Key = TypeVar("_Key", OrderKey, HolderKey)
RATE_NS: Final = 60 * S
"""The time within which preemptions are counted."""


class Settings(Weights, frozen=True, kw_only=True):
    """What decisions depend on beside the facts: the placer's LeaseClaimed.config, and over it the pool's policy."""

    policy: str = BEST_FIT.name
    """Name of the pool's policy, or its id (``name@version#digest``)."""
    policy_by_queue: str = ""
    """Where a queue's is another: ``queue=policy``, comma-separated."""
    policy_by_kind: str = ""
    """Where a kind of work's is another, and its queue's isn't: ``kind=policy``, comma-separated."""
    policy_for_latency: str = LEAST_RESPONSE.name
    """Of jobs with a latency objective, where their queue's isn't another; empty: as for those without one."""
    mps_trust: str = "tenant"
    """Who may share an MPS device: ``pool``, everybody; ``tenant``, jobs of one tenant."""
    reserve_after_s: int = 30
    """A blocked job that has waited this long has nodes kept for it; at 0 at once; below 0 never."""
    preempt_victims_max: int = 8
    """Jobs that are stopped for one job at most; at 0 nobody is."""
    preempt_spares_s: int = 5
    """Whoever was placed less than this ago is not stopped for others; so nobody is placed only to be stopped."""
    preempt_per_minute: int = 60
    """Jobs that are stopped for others within any minute at most, over the pool."""
    between_queues: str = "fair"
    """Whose turn it is: ``fair``, by guarantees and shares; ``classes``, by the class of who is next, then so."""
    fair_half_life_s: int = 3600
    """Shares count what was held lately, half of it after this long; 0: what is held now, alone."""
    runs_per_device_max: int = 0
    """Runs that share a device, at most; 0: three for each core of its node."""
    memory_buffer_pct: int = 0
    """Percent of a shared device's memory that nobody may book; not beside oversubscription."""
    memory_oversubscribe_pct: int = 100
    """Percent of a shared device's memory that may be booked; above 100 more than there is, at the tenants' risk."""
    pinned: str = ""
    """Settings that no policy changes, comma-separated."""

    @property
    def limits(self) -> Limits:
        """How far shares of a device go."""
        return Limits(
            runs_per_device_max=self.runs_per_device_max,
            memory_buffer_pct=self.memory_buffer_pct,
            memory_oversubscribe_pct=self.memory_oversubscribe_pct,
        )


def ruled(claimed: Settings, rules: ev.PlacementRules) -> Settings:
    """The settings that go: what the pool's policy says, and else what the placer was started with.

    >>> ruled(Settings(), ev.PlacementRules(ageing_s=60)).ageing_s
    60
    """
    said: dict[str, int | str] = {
        **{f"class_points_{name}": points for name, points in rules.class_points.items()},
        **{f"kind_points_{name}": points for name, points in rules.kind_points.items()},
    }
    for name in ev.PlacementRules.__struct_fields__:
        found = getattr(rules, name)
        if found is not None and not isinstance(found, dict):
            said[name] = found.value if isinstance(found, StrEnum) else found
    pinned = {name.strip() for name in claimed.pinned.split(",")}
    return replace(claimed, **{name: found for name, found in said.items() if name not in pinned})


class Drain(msgspec.Struct, frozen=True):
    """Who had a node drained, and why."""

    actor: str
    reason: str
    event_id: str


class Claim(msgspec.Struct, frozen=True):
    """What others were stopped for: nodes that are kept for a job, and the runs that have to leave first."""

    nodes: tuple[NodeId, ...]
    runs: tuple[RunId, ...]
    victims: tuple[JobId, ...]


class Shape(msgspec.Struct, frozen=True):
    """What makes waiting jobs alike: if the first of them does not fit, none does, and none overtakes another."""

    queue: QueueId
    demand: Demand
    tenant: TenantId = TenantId("")
    """Whose, where tenants of the queue take turns."""
    line: int = 0
    """Which line, where the queue's order has several."""
    length_s: int = 0
    """How long a run may take, in steps; 0: for ever."""
    limited: TenantId = TenantId("")
    """Whose, where the tenant has limits of its own."""


@dataclass(slots=True)
class Group:
    """Waiting jobs of one shape, in order; and the same by the reason that was last stated of each."""

    shape: Shape
    keys: list[OrderKey] = field(default_factory=list)
    told: dict[Pending, list[OrderKey]] = field(default_factory=dict)


class Kept(msgspec.Struct, kw_only=True):
    """What a snapshot holds."""

    pool: Pool
    wishes: int = 0
    settings: Settings = Settings()
    """Those that go: ``ruled``."""
    claimed: Settings = Settings()
    """Those that the placer was started with."""
    rules: ev.PlacementRules = ev.PlacementRules()
    """What the pool's policy says."""
    drains: dict[NodeId, Drain] = {}
    mix: Mix = msgspec.field(default_factory=Mix)
    """What the pool was asked lately."""
    past: dict[str, Past] = {}
    """What was held lately: by queue, and by ``<queue>/<tenant>``."""
    durations: Durations = msgspec.field(default_factory=Durations)
    """How long its runs took lately."""
    claims: dict[JobId, Claim] = {}
    """Of jobs that wait, and that others were stopped for."""
    price_micro: int = 0
    """What the market asked when that was last stated."""
    preempted_at: list[int] = []
    """When jobs were preempted of late, one instant each: what the rate is bounded by."""


@dataclass(slots=True)
class State:
    """The fold, and what is derived from it."""

    kept: Kept
    groups: dict[Shape, Group] = field(default_factory=dict)
    waiting: dict[JobId, tuple[Shape, OrderKey, Pending]] = field(default_factory=dict)
    """Where each job of a group is."""
    delayed: list[tuple[int, OrderKey]] = field(default_factory=list)
    """Jobs that must not start before an instant and of which nothing was said since it passed; by that instant."""
    delays: dict[JobId, tuple[int, OrderKey]] = field(default_factory=dict)
    untold: set[JobId] = field(default_factory=set)
    """Those of the delayed of which nothing was said at all."""
    held: set[JobId] = field(default_factory=set)
    """Jobs that somebody holds, or that wait for others to end, and of which that was not said yet."""
    stops: set[RunId] = field(default_factory=set)
    """Live runs that must end and were not told."""
    actions: set[RunId] = field(default_factory=set)
    """Live runs that something is to be asked of and was not: to stand still, to go on, to checkpoint."""
    evictable: dict[int, set[JobId]] = field(default_factory=dict)
    """Running jobs that agreed to be stopped for others, by the rank of their class."""
    bidders: list[tuple[int, JobId]] = field(default_factory=list)
    """Bids of those who run in the market, the lowest first, and not of those who are about to leave."""
    bids: dict[JobId, tuple[int, JobId]] = field(default_factory=dict)
    growable: set[JobId] = field(default_factory=set)
    """Elastic gangs that run whole and could do with more replicas."""
    surplus: set[JobId] = field(default_factory=set)
    """Elastic gangs that run with more than their least, and of which nothing is about to leave."""
    leaving: set[JobId] = field(default_factory=set)
    """Jobs that hold something and are about to let go of some of it."""
    protections: list[tuple[int, JobId]] = field(default_factory=list)
    """When the protected time of each of those ends, in order."""
    protected: dict[JobId, tuple[int, ...]] = field(default_factory=dict)
    holders: list[HolderKey] = field(default_factory=list)
    queue_holders: dict[QueueId, list[HolderKey]] = field(default_factory=dict)
    holds: dict[JobId, tuple[QueueId, HolderKey]] = field(default_factory=dict)
    rooms: dict[NodeId, NodeRoom] = field(default_factory=dict)
    changed: dict[NodeId, int] = field(default_factory=dict)
    """When each room changed, in that order; a count of changes, no sequence."""
    changes: int = 0
    ends_changed: dict[NodeId, int] = field(default_factory=dict)
    """When it changed last, by the same count, when runs on each node end, without a change of its room."""
    totals: Amounts = field(default_factory=dict)
    """What there is of each resource on nodes that are not fenced."""
    kinds: dict[object, Kind] = field(default_factory=dict)
    kind_policies: dict[str, str] = field(default_factory=dict)
    """What the settings say of kinds of work."""
    queue_policies: dict[str, str] = field(default_factory=dict)
    """What the settings say of queues."""
    free: Free = field(default_factory=Free)
    memo: dict[Demand, Ranking] = field(default_factory=dict)
    device_fits: dict[Demand, DeviceFits] = field(default_factory=dict)
    """What the rankings of demands that ask alike of devices know of them, together."""
    boards: dict[Demand, Board] = field(default_factory=dict)
    """When nodes will be free, for the demands for which some are kept."""
    outlook: Outlook | None = None
    """What follows from the mix; a memo, too."""
    market: Market | None = None
    """What is scarce under that outlook, kept as rooms change."""

    @property
    def pool(self) -> Pool:
        """The pool as facts describe it."""
        return self.kept.pool

    @property
    def settings(self) -> Settings:
        """What decisions depend on beside the facts."""
        return self.kept.settings

    def named_policies(self) -> list[str]:
        """The policies that the settings name for some jobs."""
        latency = self.settings.policy_for_latency
        return [*self.queue_policies.values(), *self.kind_policies.values(), *([latency] if latency else ())]


def state_of(kept: Kept) -> State:
    """The state with its indexes built anew."""
    state = State(
        kept,
        kind_policies=policies_by_name(kept.settings.policy_by_kind),
        queue_policies=policies_by_name(kept.settings.policy_by_queue),
    )
    for node_id in sorted(kept.pool.nodes):
        _refresh_room(state, node_id)
    for job_id in sorted(kept.pool.jobs):
        _refresh_job(state, job_id)
    return state


def demand_of_job(state: State, job: JobView) -> Demand:
    """What each replica of the job needs of a node, under the present settings."""
    spec, settings = job.spec, state.settings
    policy = state.queue_policies.get(spec.queue, "")
    if not policy and spec.latency_ms:
        policy = settings.policy_for_latency
    policy = policy or state.kind_policies.get(spec.kind, "")
    is_by_workload = "throughput:" in (policy or settings.policy)
    return demand_of(
        spec,
        job.tenant,
        is_pool_trusted=settings.mps_trust != "tenant",
        avoid=job.avoid_nodes,
        policy=policy,
        workload=(spec.labels.get("workload") or str(spec.kind)) if is_by_workload else "",
    )


def policies_by_name(text: str) -> dict[str, str]:
    """``name=policy``, comma-separated, as a mapping; parts that have no name or no policy are passed over."""
    pairs = (part.strip().partition("=") for part in text.split(","))
    return {name.strip(): policy.strip() for name, _, policy in pairs if name.strip() and policy.strip()}


def order_in(state: State, queue: QueueId) -> QueueOrder:
    """How jobs of the queue are ordered."""
    view = state.pool.queues.get(queue)
    if view is not None and view.order is not None:
        return view.order
    named = orders.order_of_policy(state.queue_policies.get(queue) or state.settings.policy)
    return named or pool_order(state)


def pool_order(state: State) -> QueueOrder:
    """The order of queues that neither say theirs nor have a policy that brings one."""
    return _pool_order(state.settings.policy, state.settings.order)


@lru_cache(maxsize=64)
def _pool_order(policy: str, order: str) -> QueueOrder:
    named = orders.order_of_policy(policy)
    return named or (QueueOrder(order) if order in set(QueueOrder) else QueueOrder.CLASSES)


def has_market(state: State) -> bool:
    """Whether jobs of any queue bid."""
    if pool_order(state) is QueueOrder.BIDS:
        return True
    return any(order_in(state, queue) is QueueOrder.BIDS for queue in state.pool.queues)


def is_bidding(state: State, job: JobView) -> bool:
    """Whether the job takes part in the market."""
    return job.spec.bid_micro > 0 and order_in(state, job.spec.queue) is QueueOrder.BIDS


def shape_of(state: State, job: JobView) -> Shape:
    """Where the job waits."""
    queue = state.pool.queues.get(job.spec.queue)
    order = order_in(state, job.spec.queue)
    is_in_turns = queue is not None and queue.is_fair and len(queue.tenants) > 1 and order not in orders.RANKED
    reservations = state.pool.reservations
    if reservations and not is_in_turns:
        # What is kept for its tenant is of use to it alone.
        is_in_turns = any(view.asked.for_tenant == job.tenant for view in reservations.values())
    return Shape(
        job.spec.queue,
        demand_of_job(state, job),
        job.tenant if is_in_turns else TenantId(""),
        orders.line_of(job, order),
        length_of(job) if state.settings.reserve_after_s >= 0 or reservations else 0,
        limited=job.tenant if job.tenant in state.pool.tenants else TenantId(""),
    )


def order_of(state: State, job: JobView) -> OrderKey:
    """Where the job stands in its line."""
    return orders.key_of(job, order_in(state, job.spec.queue), state.settings)


def evolve(state: State, entry: Entry) -> State:
    """The state after this entry, changed in place."""
    if entry.stream is Stream.WISHES:
        state.kept.wishes = max(state.kept.wishes, entry.seq)
        return state
    pool = state.pool
    if entry.seq <= pool.seq:
        return state  # delivered twice
    event = entry.event
    jobs: set[JobId] = set()
    node: NodeId | None = None
    slices: tuple[ev.Slice, ...] | None = None
    """Where only a run came or went: what it holds."""
    match event:
        case ev.LeaseClaimed():
            pools.evolve(pool, entry)
            if entry.author == PLACER:
                state.kept.claimed = _claimed(event)
            return _configured(state)
        case ev.JobAdmitted():
            jobs.add(event.job_id)
            count(state.kept.mix, event.spec)
        case (
            ev.JobHeld()
            | ev.JobReleased()
            | ev.JobSuspended()
            | ev.JobResumed()
            | ev.JobCheckpointing()
            | ev.JobReprioritized()
            | ev.JobResized()
            | ev.JobStopping()
            | ev.JobRequeued()
            | ev.JobSucceeded()
            | ev.JobFailed()
            | ev.JobCancelled()
            | ev.JobExpired()
            | ev.JobPendingReasonChanged()
        ):
            jobs.add(event.job_id)
            if isinstance(event, ev.TERMINAL):
                jobs.update(pool.dependents.get(event.job_id, ()))
        case ev.RunPlaced():
            jobs.add(event.job_id)
            node, slices = event.node_id, event.slices
        case ev.RunStopOrdered() | ev.RunActionOrdered() | ev.RunStarted() | ev.RunFinished() | ev.RunReleased():
            run = pools.run_of(pool, event.run_id)
            if run is not None:
                jobs.add(run.job_id)
                if isinstance(event, ev.RunStopOrdered):
                    if _begins_preemption(pool.jobs[run.job_id], event):
                        _note_preempted(state, entry.recorded_at, 1)
                elif isinstance(event, ev.RunReleased):
                    node, slices = run.node_id, run.slices
                elif isinstance(event, ev.RunFinished) and event.cause in OWN_END and run.state is RunState.STARTED:
                    job = pool.jobs[run.job_id]
                    note(state.kept.durations, job.tenant, job.spec.kind, (entry.recorded_at - run.started_at) // S)
        case ev.NodeFenced() | ev.NodeDraining() | ev.NodeCordoned() | ev.NodeUncordoned():
            node = event.node_id
            jobs.update(_jobs_on(pool, node))
            if isinstance(event, ev.NodeDraining):
                state.kept.drains[node] = Drain(event.actor, event.reason, entry.event_id)
            elif not isinstance(event, ev.NodeFenced):
                state.kept.drains.pop(node, None)
        case ev.NodeRegistered() | ev.NodeSuspected() | ev.NodeTrusted():
            node = event.node_id
            # A draining node that is trusted again is still draining: its runs must be told.
            jobs.update(_jobs_on(pool, node))
        case ev.DeviceHealthChanged():
            node = event.node_id
        case ev.QueueUpserted():
            settle(state, event.queue, entry.recorded_at)
            if event.parent is not None:
                settle(state, event.parent, entry.recorded_at)
            # Lines and their order may be others now.
            jobs.update(job_id for job_id, job in pool.jobs.items() if job.spec.queue == event.queue)
        case ev.ReservationAdmitted() | ev.ReservationCancelled() | ev.NodesReserved():
            if not isinstance(event, ev.NodesReserved) or event.is_over:
                # Jobs are told apart by whose they are and how long they take while something is reserved.
                jobs.update(state.waiting)
        case ev.PriceSet():
            state.kept.price_micro = event.price_micro
        case ev.PolicyUpserted(for_tenant=None):
            pools.evolve(pool, entry)
            state.kept.rules = event.placement or ev.PlacementRules()
            return _configured(state)
        case ev.PolicyUpserted():
            jobs.update(job_id for job_id, job in pool.jobs.items() if job.tenant == event.for_tenant)
        case ev.PreemptionDecided():
            state.kept.claims[event.job_id] = Claim(event.nodes, event.runs, event.victims)
            # Who goes on with fewer replicas isn't preempted.
            stopped = 0 if event.kind is PreemptionKind.SHRINK else len(event.victims)
            _note_preempted(state, entry.recorded_at, stopped)
        case _:
            pass
    _settle_jobs(state, event, jobs, entry.recorded_at)
    pools.evolve(pool, entry)
    if node is not None:
        _refresh_room(state, node, slices)
    for job_id in sorted(jobs):
        _refresh_job(state, job_id)
    return state


def _settle_jobs(state: State, event: object, jobs: set[JobId], now: int) -> None:
    """Before what is held changes: what was held until now."""
    if state.settings.fair_half_life_s <= 0 or not isinstance(event, ev.RunPlaced | ev.RunReleased | ev.NodeFenced):
        return
    holders = {(job.spec.queue, job.tenant) for job_id in jobs if (job := state.pool.jobs.get(job_id)) is not None}
    for queue, tenant in sorted(holders):
        settle(state, queue, now, tenant)


def settle(state: State, queue: QueueId, now: int, tenant: TenantId | None = None) -> None:
    """Take what is held now into what was held lately, up to now: of the queue, those above it, and a tenant."""
    half_life = state.settings.fair_half_life_s
    if half_life <= 0:
        return
    past = state.kept.past
    held = [(str(view.queue_id), view.used) for view in quota.lineage(state.pool.queues, queue)]
    if tenant is not None and held:
        held.append((f"{queue}/{tenant}", state.pool.queues[queue].used_by.get(tenant, {})))
    for name, used in held:
        past[name] = fair.settled(past.get(name), used, now, half_life)


def _claimed(event: ev.LeaseClaimed) -> Settings:
    config, default = event.config, Settings()
    # Of another kind than it should be is as if it were not there.
    known = {name: config.get(name) for name in Settings.__struct_fields__}
    return msgspec.convert(
        {name: found for name, found in known.items() if type(found) is type(getattr(default, name))}, Settings
    )


def _configured(state: State) -> State:
    settings = ruled(state.kept.claimed, state.kept.rules)
    if settings == state.settings:
        return state
    state.kept.settings = settings
    # Shapes and scores depend on the settings. In place, as a core's state is one object to whoever holds it.
    fresh = state_of(state.kept)
    for name in State.__slots__:
        setattr(state, name, getattr(fresh, name))
    return state


def _jobs_on(pool: Pool, node_id: NodeId) -> set[JobId]:
    node = pool.nodes.get(node_id)
    return set() if node is None else {pool.run_jobs[run] for run in node.runs if run in pool.run_jobs}


def _refresh_room(state: State, node_id: NodeId, slices: tuple[ev.Slice, ...] | None = None) -> None:
    node = state.pool.nodes.get(node_id)
    if node is None:
        return
    before = state.rooms.get(node_id)
    if before is not None:
        _count(state, before, -1)
    limits = state.settings.limits
    room = (
        room_of_node(node, state.kinds, limits)
        if before is None or slices is None
        else room_after(before, node, slices)
    )
    if state.market is not None:
        state.market.moved(before, room)
    state.rooms[node_id] = room
    _count(state, room, 1)
    state.free.put(room)
    state.changes += 1
    state.changed.pop(node_id, None)
    state.changed[node_id] = state.changes


def _count(state: State, room: NodeRoom, sign: int) -> None:
    if room.state is NodeState.FENCED:
        return
    quota.add(state.totals, {quota.CPU: room.cpu_milli}, sign)
    for device in room.devices:
        quota.charge(state.totals, device.model, sign * device.compute_milli, sign * device.memory_mib)


def _refresh_job(state: State, job_id: JobId) -> None:
    job = state.pool.jobs.get(job_id)
    if job is None or job.state is not JobState.QUEUED or job.hold is not None:
        state.kept.claims.pop(job_id, None)
    _refresh_waiting(state, job_id, job)
    _refresh_holding(state, job_id, job)
    if job is None:
        return
    for run in job.runs.values():
        if must_stop(state.pool, job, run):
            state.stops.add(run.run_id)
        else:
            state.stops.discard(run.run_id)
        if action_due(job, run) is None:
            state.actions.discard(run.run_id)
        else:
            state.actions.add(run.run_id)


def action_due(job: JobView, run: RunView) -> RunAction | None:
    """What the run is to be asked next; None where nothing is due, or it is about to end."""
    if run.state is not RunState.STARTED or run.stop is not None or not run.holds or job.state is not JobState.RUNNING:
        return None
    if run.is_still is not (job.suspend is not None):
        return RunAction.RESUME if run.is_still else RunAction.SUSPEND
    return RunAction.CHECKPOINT if job.checkpoint_seq > run.checkpoint_seq and _is_meant(job, run) else None


def _is_meant(job: JobView, run: RunView) -> bool:
    """Whether the job's newest wish to checkpoint is about this run: one of the attempt that it named."""
    return job.checkpoint is not None and attempt_of_run(run.run_id) == job.checkpoint.attempt


def must_stop(pool: Pool, job: JobView, run: RunView) -> bool:
    """True for a live run that nobody told to stop, of a job or an attempt that is over, or on a node that is drained.

    Or of a job that is stopping.
    """
    if run.state not in _LIVE or run.stop is not None or not run.holds:
        return False
    return job.state in ENDING or is_draining(pool, run.node_id) or is_late(job, run)


def is_late(job: JobView, run: RunView) -> bool:
    """True where the run was added to an attempt that had ended meanwhile."""
    return attempt_of_run(run.run_id) != job.attempt


def is_draining(pool: Pool, node_id: NodeId) -> bool:
    """True where an operator wants the node emptied, whether or not it is suspected as well."""
    node = pool.nodes.get(node_id)
    return node is not None and node.cordon is NodeState.DRAINING


def _refresh_waiting(state: State, job_id: JobId, job: JobView | None) -> None:
    if (place := state.waiting.pop(job_id, None)) is not None:
        shape, key, code = place
        group = state.groups[shape]
        _remove(group.keys, key)
        _remove(group.told[code], key)
        if not group.told[code]:
            del group.told[code]
        if not group.keys:
            del state.groups[shape]
    if (delay := state.delays.pop(job_id, None)) is not None:
        del state.delayed[bisect_left(state.delayed, delay)]
        state.untold.discard(job_id)
    state.held.discard(job_id)
    if job is None or job.state is not JobState.QUEUED:
        return
    if job.hold is not None or job.waits_for:
        # It is in no group: it isn't placed, nothing is kept for it, and nobody waits behind it.
        if job.pending is not (Pending.DEPENDENCY if job.hold is None else Pending.HELD):
            state.held.add(job_id)
        return
    key = order_of(state, job)
    if job.not_before_at > 0 and job.pending in _TIMED:
        # Whether the instant has passed is for decide to say, which knows the time; what it says moves the job on.
        delay = (job.not_before_at, key)
        state.delays[job_id] = delay
        insort(state.delayed, delay)
        if job.pending is Pending.PENDING_EVALUATION:
            state.untold.add(job_id)
        return
    shape = shape_of(state, job)
    found = state.groups.get(shape)
    if found is None:
        found = state.groups[shape] = Group(shape)
    insort(found.keys, key)
    insort(found.told.setdefault(job.pending, []), key)
    state.waiting[job_id] = (shape, key, job.pending)


def is_due(state: State, job_id: JobId, now: int) -> bool:
    """True for a job that waits for room: in a line, or about to be in one, since its instant has come."""
    return job_id in state.waiting or ((delay := state.delays.get(job_id)) is not None and delay[0] <= now)


def _refresh_holding(state: State, job_id: JobId, job: JobView | None) -> None:
    if (before := state.holds.pop(job_id, None)) is not None:
        queue, key = before
        _remove(state.holders, key)
        _remove(state.queue_holders[queue], key)
    for rank, jobs in state.evictable.items():
        if job_id in jobs:
            jobs.discard(job_id)
            if not jobs:
                del state.evictable[rank]
            break
    for jobs in (state.leaving, state.growable, state.surplus):
        jobs.discard(job_id)
    if (bid := state.bids.pop(job_id, None)) is not None:
        del state.bidders[bisect_left(state.bidders, bid)]
    for until in state.protected.pop(job_id, ()):
        del state.protections[bisect_left(state.protections, (until, job_id))]
    if job is None:
        return
    runs = [run for run in job.runs.values() if run.holds]
    if not runs:
        return
    state.changes += 1
    for run in runs:
        state.ends_changed.pop(run.node_id, None)
        state.ends_changed[run.node_id] = state.changes
    limit = job.spec.time_limit_s * S
    ends = max((run.started_at or run.placed_at) + limit for run in runs) if limit else NO_END
    key = (ends, min(run.placed_at for run in runs), job_id)
    state.holds[job_id] = (job.spec.queue, key)
    insort(state.holders, key)
    insort(state.queue_holders.setdefault(job.spec.queue, []), key)
    leaving = leaving_of(job)
    if leaving:
        state.leaving.add(job_id)
    if len(leaving) < len(runs) and is_bidding(state, job):
        bid = state.bids[job_id] = (job.spec.bid_micro, job_id)
        insort(state.bidders, bid)
    untils = []
    if job.spec.preemptible and job.state is JobState.RUNNING:
        state.evictable.setdefault(CLASS_RANK[job.spec.service_class], set()).add(job_id)
        untils.append(protected_until(job, state.settings.preempt_spares_s))
    if job.spec.replicas_min and job.state is JobState.RUNNING and not leaving:
        members = len(job.members())
        if is_whole(job) and members < job.spec.replicas:
            state.growable.add(job_id)
        if members >= job.spec.replicas_min + job.spec.replicas_step:
            state.surplus.add(job_id)
            untils.append(begun_at(job) + state.settings.preempt_spares_s * S)
    if untils:
        state.protected[job_id] = tuple(untils)
        for until in untils:
            insort(state.protections, (until, job_id))


def is_whole(job: JobView) -> bool:
    """Whether all replicas of the attempt run, and nobody wants the job held or otherwise: it may be given more."""
    if job.hold is not None or job.resize is not None or job.suspend is not None:
        return False
    return all(run.state in _LIVE for run in job.current_runs() if run.stop is not StopCause.SHRUNK)


def leaving_of(job: JobView) -> list[RunView]:
    """Runs of the job that hold something and are about to let go of it: told to stop, ended, or of a job that is."""
    is_leaving = job.state is not JobState.RUNNING
    return [
        run for run in job.runs.values() if run.holds and (is_leaving or run.stop is not None or run.state not in _LIVE)
    ]


def preemptions_left(state: State, now: int) -> int:
    """Jobs that may still be stopped within this minute, for others or for a limit."""
    return state.settings.preempt_per_minute - sum(1 for at in state.kept.preempted_at if at > now - RATE_NS)


def more_preemptions_at(state: State, now: int) -> int | None:
    """When the rate allows another job to be stopped; None where it does now, or never will."""
    recent = sorted(at for at in state.kept.preempted_at if at > now - RATE_NS)
    return recent[0] + RATE_NS if len(recent) >= state.settings.preempt_per_minute > 0 else None


def _note_preempted(state: State, at: int, jobs: int) -> None:
    recent = [each for each in state.kept.preempted_at if each > at - RATE_NS]
    state.kept.preempted_at = recent + [at] * jobs


def _begins_preemption(job: JobView, event: ev.RunStopOrdered) -> bool:
    """Whether this is the first of the orders by which a limit has the whole job stopped."""
    if event.cause is not StopCause.PREEMPTED or not event.limit_of:
        return False
    return all(run.stop is not StopCause.PREEMPTED for run in job.runs.values() if run.holds)


def begun_at(job: JobView) -> int:
    """When the job's attempt was placed: the newest has the least to lose."""
    return max((run.placed_at for run in job.runs.values() if run.holds), default=0)


def protected_until(job: JobView, spares_s: int) -> int:
    """When the job may be stopped for another: it has had the time that it asked for, and a moment at least."""
    asked = job.first_started_at + job.spec.min_runtime_s * S if job.first_started_at else 0
    return max(asked, begun_at(job) + spares_s * S)


def _remove(keys: list[_Key], key: _Key) -> None:
    del keys[bisect_left(keys, key)]
