"""What admission believes: the pool, the wishes that wait for an answer, and what was answered to whom.

Each part follows from one stream alone, save the inbox, which is what both leave: wishes above the last answer. So the
state is the same however the two streams interleave. Decides nothing.

Who asked what under which identity, and every job's name, is kept for as long as the streams are (`remembered`).
"""

import hashlib
import heapq
from collections import Counter, deque
from collections.abc import Iterable
from operator import itemgetter
from typing import Final

import msgspec
from msgspec import Struct

from apportion.admission import remembered
from apportion.admission.learned import Learned, evolve_peak, evolve_profile
from apportion.admission.lifecycle import is_due_now, next_instant
from apportion.admission.rates import Flow, Limits, has_left, taken
from apportion.admission.refusals import Refused
from apportion.admission.remembered import Identity, Remembered, fingerprint
from apportion.admission.validate import (
    BUFFER_PCT,
    BUFFER_PCT_MAX,
    BUFFER_PCT_MIN,
    DEFAULT_MODES,
    DEFAULT_SHARES,
    LEVELS,
    Defaults,
    ShareDefaults,
)
from apportion.contracts import events as ev
from apportion.contracts.causes import PUT_OFF, Mode, Refusal, RunCause, WorkloadKind
from apportion.contracts.cloudevents import Ingress
from apportion.contracts.envelope import Entry, Stream, Undecodable
from apportion.contracts.ids import ADMISSION, JobId, NodeId, QueueId, RunId, TenantId, attempt_of_run, job_of_run
from apportion.pool import state as pool_state
from apportion.pool.state import JobState, JobView, Pool, RunState, run_of

_MONITORS: Final = frozenset(kind.__name__ for kind in ev.WISHES if kind.ANSWERED_BY != ADMISSION)
"""Types of wishes that another service answers, undecodable ones included."""

POOL: Final = TenantId("")
"""Stands for the pool where something is kept of each tenant and of all."""
STRANGERS: Final = TenantId("?")
"""Stands for tenants that no queue names: they share one bucket, as there may be any number of them."""
POOL_PENDING_MAX: Final = 100_000
TENANT_PENDING_MAX: Final = 20_000
"""Jobs that may wait at once, where neither a policy nor a setting says otherwise; each costs memory and rounds."""
_NO_POLICY: Final = ev.PolicyUpserted(answers=0, actor="")

Offer = tuple[str, tuple[Mode, ...]]
"""A device's model, and the modes in which it can be shared or given."""

Terminal = ev.JobSucceeded | ev.JobFailed | ev.JobCancelled | ev.JobExpired


class Asked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A wish that waits for its answer: one of ``wish`` and ``undecodable`` is set."""

    seq: int
    recorded_at: int
    event_id: str
    tenant: TenantId
    actor: str = ""
    subject_type: str = ""
    expires_at: int = 0
    ingress: Ingress = Ingress.BINARY
    wish: ev.JobWish | None = None
    undecodable: Undecodable | None = None
    identity: Identity | None = None
    """By what a job request is known; of one that is only tried, by what it would be."""


class Estimate(Struct, frozen=True, array_like=True):
    """What was expected of a job that names its model: what its observed peaks are compared with."""

    family: str
    memory_mib_device: int


class Late(Struct, frozen=True, array_like=True):
    """A run's fact that came when the run's outcome no longer counted."""

    run_id: RunId
    event_id: str
    why: str


class Kept(Struct, kw_only=True):
    """The state proper. Whatever else ``State`` holds, the inbox apart, can be computed from it."""

    pool: Pool = msgspec.field(default_factory=Pool)
    wishes_seq: int = 0
    answered: int = 0
    """Sequence of the last wish that admission answered."""
    remembered: Remembered = msgspec.field(default_factory=Remembered)
    """Every job request and every job that ever was."""
    late: dict[int, Late] = {}
    """Late facts by sequence, until they are stated as ignored."""
    config: dict[str, int | str] = {}
    policies: dict[TenantId, ev.PolicyUpserted] = {}
    """By whose they are; the pool's under POOL."""
    flows: dict[TenantId, Flow] = {}
    """What came in and went on, of each tenant and of the pool."""
    learned: Learned = msgspec.field(default_factory=Learned)
    """What observed peaks taught."""
    estimates: dict[JobId, Estimate] = {}
    """Of jobs that have not ended."""
    ingress: dict[Ingress, int] = {}
    """How many wishes came in which form."""


class Written(Struct, kw_only=True, array_like=True):
    """A snapshot: what is kept, in an order of its own, since only text keys are written in order."""

    pool: Pool
    wishes_seq: int
    answered: int
    inbox: list[Asked]
    remembered: remembered.Written
    late: list[tuple[int, Late]]
    config: dict[str, int | str]
    policies: dict[TenantId, ev.PolicyUpserted]
    flows: dict[TenantId, Flow]
    ratios_bp: list[tuple[str, list[int]]]
    """In an order of its own, too: the first is forgotten first."""
    peaks_mib: list[tuple[bytes, list[int]]]
    estimates: dict[JobId, Estimate]
    ingress: list[tuple[Ingress, int]] = []


class Rules(Struct, frozen=True, kw_only=True):
    """What goes for a tenant's requests."""

    defaults: Defaults
    limits: Limits
    """Of jobs that are admitted."""
    wishes: Limits = Limits()
    """Of wishes that are looked at."""


class State:
    """Admission's state: what is kept, and indexes over it. Change it only by ``evolve``."""

    __slots__ = (
        "_pool_rules",
        "_rules",
        "_timers",
        "_waiting",
        "bounds_wishes",
        "buffer_pct",
        "due",
        "inbox",
        "kept",
        "offers",
        "pending",
        "pool_pending_max",
        "queues_of",
        "timer_of",
        "wishes_per_round",
    )

    def __init__(self, kept: Kept, inbox: Iterable[Asked] = ()) -> None:
        self.kept = kept
        self.inbox: deque[Asked] = deque(inbox)
        self.queues_of: dict[TenantId, tuple[QueueId, ...]] = {}
        self.due: set[JobId] = set()
        """Jobs whose runs call for a fact, whatever the time."""
        self.timer_of: dict[JobId, int] = {}
        self._timers: list[tuple[int, JobId]] = []
        """A heap over ``timer_of``; entries that the dict doesn't confirm are out of date."""
        self.offers: Counter[Offer] = Counter()
        """Devices of the pool's nodes by what they offer, whatever state they are in."""
        for node_id in kept.pool.nodes:
            self._count_devices(node_id, 1)
        self._waiting: dict[JobId, TenantId] = {}
        self.pending: Counter[TenantId] = Counter()
        """Jobs that wait, of each tenant, and of the pool under POOL."""
        self._rules: dict[TenantId, Rules] = {}
        self.configure()
        self.index_queues()
        for job in kept.pool.jobs.values():
            self.reconsider(job.job_id)

    @property
    def pool(self) -> Pool:
        """The pool as facts describe it."""
        return self.kept.pool

    # ------------------------------------------------------------------------------------------- indexes

    def index_queues(self) -> None:
        """Recompute whose queues are which: jobs go to those that no other is below."""
        queues: dict[TenantId, list[QueueId]] = {}
        inner = {queue.parent for queue in self.pool.queues.values()}
        for queue_id in sorted(self.pool.queues):
            for tenant in self.pool.queues[queue_id].tenants:
                mine = queues.setdefault(tenant, [])
                if queue_id not in inner:
                    mine.append(queue_id)
        self.queues_of = {tenant: tuple(mine) for tenant, mine in queues.items()}

    def _count_devices(self, node_id: NodeId, by: int) -> None:
        node = self.pool.nodes.get(node_id)
        if node is None:
            return
        for view in node.devices.values():
            offer = (view.device.model, view.device.modes)
            self.offers[offer] += by
            if not self.offers[offer]:
                del self.offers[offer]

    def configure(self) -> None:
        """Take over the settings of the newest claim; what it doesn't name has its default."""
        config = self.kept.config
        policy = self.kept.policies.get(POOL) or _NO_POLICY
        self._rules.clear()
        self.buffer_pct = policy.buffer_pct or _setting(
            config, "buffer_pct", BUFFER_PCT, BUFFER_PCT_MIN, BUFFER_PCT_MAX
        )
        self.pool_pending_max = policy.pool_pending_max or _setting(
            config, "pool_pending_max", POOL_PENDING_MAX, 0, 2_147_483_647
        )
        self.wishes_per_round = _setting(config, "wishes_per_round", WISHES_PER_ROUND, 1, WISHES_PER_ROUND_MAX)
        shares, modes = {}, {}
        for kind, share in DEFAULT_SHARES.items():
            said = policy.defaults.get(kind) or ev.KindDefaults()
            shares[kind] = ShareDefaults(
                compute_milli=said.compute_milli
                or _setting(config, f"default_compute_milli_{kind}", share.compute_milli, 1, 1000),
                memory_mib=said.memory_mib
                or _setting(config, f"default_memory_mib_{kind}", share.memory_mib, 1, 2_147_483_647),
            )
            mine = _modes(config.get(f"modes_{kind}"), DEFAULT_MODES[kind])
            modes[kind] = mine if said.modes is None else said.modes
        self._pool_rules = Rules(
            defaults=Defaults(shares=shares, modes=modes, isolation=policy.isolation or ev.IsolationLevel.NONE),
            limits=Limits(
                rate_per_min=policy.rate_per_min or _setting(config, "tenant_rate_per_min", 0, 0, 2_147_483_647),
                burst=policy.burst or _setting(config, "tenant_burst", 0, 0, 2_147_483_647),
                pending_max=policy.pending_max
                or _setting(config, "tenant_pending_max", TENANT_PENDING_MAX, 0, 2_147_483_647),
            ),
            wishes=Limits(
                rate_per_min=policy.wish_rate_per_min
                or _setting(config, "tenant_wish_rate_per_min", 0, 0, 2_147_483_647),
                burst=policy.wish_burst or _setting(config, "tenant_wish_burst", 0, 0, 2_147_483_647),
            ),
        )
        self.bounds_wishes = bool(self._pool_rules.wishes.rate_per_min) or any(
            own.wish_rate_per_min for own in self.kept.policies.values()
        )

    def rules_of(self, tenant: TenantId) -> "Rules":
        """What goes for a tenant's requests."""
        found = self._rules.get(tenant)
        if found is None:
            pool, own = self._pool_rules, self.kept.policies.get(tenant)
            found = self._rules[tenant] = pool if own is None else _own_rules(pool, own)
        return found

    def reconsider(self, job_id: JobId) -> None:
        """Renew what the indexes say of a job."""
        job = self.pool.jobs.get(job_id)
        if job is not None and is_due_now(job):
            self.due.add(job_id)
        else:
            self.due.discard(job_id)
        is_waiting = job is not None and job.state is JobState.QUEUED
        if is_waiting is not (job_id in self._waiting):
            self._recount(job_id, None if job is None or not is_waiting else job.tenant)
        at = 0 if job is None else next_instant(job)
        if at == self.timer_of.get(job_id, 0):
            return
        if at:
            self.timer_of[job_id] = at
            heapq.heappush(self._timers, (at, job_id))
        else:
            del self.timer_of[job_id]
        self._tidy_timers()

    def _recount(self, job_id: JobId, tenant: TenantId | None) -> None:
        """The job waits now, as that tenant's; or it waits no more."""
        if tenant is not None:
            self._waiting[job_id] = tenant
            self.pending[tenant] += 1
            self.pending[POOL] += 1
            return
        tenant = self._waiting.pop(job_id)
        for whose in (tenant, POOL):
            self.pending[whose] -= 1
            has_left(self.kept.flows.setdefault(whose, Flow()), self.pool.at)
        if not self.pending[tenant]:
            del self.pending[tenant]

    def _let_in(self, tenant: TenantId, at: int) -> None:
        """An admission takes a token of its tenant's."""
        limits = self.rules_of(tenant).limits
        if limits.rate_per_min:
            flow = self.kept.flows.setdefault(tenant, Flow())
            flow.full_at = taken(flow.full_at, limits, at)

    def pays(self, tenant: TenantId) -> TenantId:
        """Whose bucket a wish of this tenant takes from."""
        return tenant if tenant in self.queues_of else STRANGERS

    def _looked_at(self, answer: ev.Event | Undecodable, at: int) -> None:
        """An answer for which a wish was looked at takes a token of its tenant's."""
        tenant = looked_at(answer)
        if tenant is None:
            return
        whose = self.pays(tenant)
        limits = self.rules_of(whose).wishes
        if limits.rate_per_min:
            flow = self.kept.flows.setdefault(whose, Flow())
            flow.wishes_full_at = taken(flow.wishes_full_at, limits, at)

    def _tidy_timers(self) -> None:
        timers = self._timers
        if len(timers) > 2 * len(self.timer_of) + 1000:
            # Most limits are never reached: without this, entries of jobs long gone would stay until their hour.
            self._timers = [(at, job_id) for job_id, at in self.timer_of.items()]
            heapq.heapify(self._timers)
            return
        while timers and self.timer_of.get(timers[0][1]) != timers[0][0]:
            heapq.heappop(timers)

    def next_timer(self) -> int | None:
        """The earliest instant at which a job calls for a fact; None where there is none."""
        return self._timers[0][0] if self._timers else None

    def timed_out(self, now: int) -> set[JobId]:
        """Jobs whose instant has come. Costs what it returns, not what waits."""
        found: set[JobId] = set()
        timers = self._timers
        open_ = [0] if timers else []
        while open_:
            index = open_.pop()
            at, job_id = timers[index]
            if at > now:
                continue  # a heap: what is below comes later still
            if self.timer_of.get(job_id) == at:
                found.add(job_id)
            open_.extend(child for child in (2 * index + 1, 2 * index + 2) if child < len(timers))
        return found

    # ------------------------------------------------------------------------------------------- folding

    def fold_wish(self, entry: Entry) -> None:
        """Keep a wish that is admission's to answer, and the identity of a job request."""
        kept = self.kept
        if entry.seq <= kept.wishes_seq:
            return  # delivered twice
        kept.wishes_seq = entry.seq
        kept.ingress[entry.ingress] = kept.ingress.get(entry.ingress, 0) + 1
        event = entry.event
        tenant = entry.tenant or TenantId("")
        identity: Identity | None = None
        if isinstance(event, ev.JobRequested) and not event.dry_run:
            identity = identity_of(entry, tenant, event)
            kept.remembered.note_request(entry.seq, identity)
        if entry.seq <= kept.answered:
            return
        asked = _asked(entry, tenant, identity)
        if asked is not None:
            self.inbox.append(asked)

    def fold_fact(self, entry: Entry) -> None:
        """Believe a fact: the pool's state, what was answered, and which jobs call for a fact now."""
        pool = self.pool
        if entry.seq <= pool.seq:
            return  # delivered twice
        event = entry.event
        if type(event) in pool_state.MOVE_NOTHING:
            pool_state.evolve(pool, entry)
            self._fold_own(entry, event)
            return
        match event:
            case ev.RunStarted() | ev.RunFinished() | ev.RunReleased():
                why = why_late(self.kept, event)
                if why:
                    self.kept.late[entry.seq] = Late(event.run_id, entry.event_id, why)
                    pool_state.evolve(pool, entry)
                    return
                job_id = pool.run_jobs[event.run_id]
                if isinstance(event, ev.RunFinished) and event.peak_memory_mib:
                    self._learn(pool.jobs[job_id], event, event.peak_memory_mib)
                is_news = self._is_news(pool.jobs[job_id], event)
                pool_state.evolve(pool, entry)
                if is_news:
                    self.reconsider(job_id)
                return
            case ev.RunPlaced():
                job = pool.jobs.get(event.job_id)
                was_running = job is not None and job.state is JobState.RUNNING
                pool_state.evolve(pool, entry)
                run = run_of(pool, event.run_id)
                if not (was_running and run is not None and run.state is RunState.PLACED):
                    self.reconsider(event.job_id)
                return
            case ev.NodeRegistered():
                self._count_devices(event.node_id, -1)
                pool_state.evolve(pool, entry)
                self._count_devices(event.node_id, 1)
                return
            case ev.NodeFenced():
                node = pool.nodes.get(event.node_id)
                jobs = set() if node is None else {job_of_run(run) for run in node.runs}
                pool_state.evolve(pool, entry)
                for job_id in sorted(jobs):
                    self.reconsider(job_id)
                return
        followers = tuple(pool.dependents.get(event.job_id, ())) if isinstance(event, ev.TERMINAL) else ()
        pool_state.evolve(pool, entry)
        self._fold_own(entry, event)
        for job_id in followers:
            self.reconsider(job_id)

    def _learn(self, job: JobView, event: ev.RunFinished, peak_mib: int) -> None:
        """From a run that did its work, what it used; from one that ran out of memory, that it needed what it had.

        Of any other end nobody knows how far the run came.
        """
        slices = job.runs[event.run_id].slices
        if not slices:
            return
        # Told as a sum over the run's devices, which are alike.
        peak_mib = -(-peak_mib // len(slices))
        learned = self.kept.learned
        if event.cause is RunCause.SUCCESS:
            evolve_profile(learned, profile_of(job.tenant, job.spec.command), peak_mib)
        elif event.cause in {RunCause.OUT_OF_MEMORY, RunCause.QUOTA_EXCEEDED}:
            peak_mib = max(peak_mib, *(piece.memory_mib for piece in slices))
        else:
            return
        estimate = self.kept.estimates.get(job.job_id)
        if estimate is not None:
            evolve_peak(learned, estimate.family, estimate.memory_mib_device, peak_mib)

    def _is_news(self, job: JobView, event: ev.RunStarted | ev.RunFinished | ev.RunReleased) -> bool:
        """Whether the fact can change when the job goes on: most facts of a large gang can't, and looking costs."""
        match event:
            case ev.RunStarted():
                return not job.first_started_at
            case ev.RunFinished(cause=RunCause.SUCCESS):
                return job.job_id in self.timer_of
            case _:
                return True

    def _fold_own(self, entry: Entry, event: ev.Event | Undecodable) -> None:
        kept = self.kept
        if self.bounds_wishes:
            self._looked_at(event, entry.recorded_at)
        match event:
            case ev.JobAdmitted():
                kept.remembered.note_admitted(event.job_id, event.answers)
                if event.first_wish:
                    kept.remembered.note_settled(event.first_wish, event.answers)
                self._let_in(event.tenant, entry.recorded_at)
                if event.sized is not None and event.sized.family:
                    kept.estimates[event.job_id] = Estimate(event.sized.family, event.sized.memory_mib_device)
                self._answered(event.answers)
                self.reconsider(event.job_id)
            case ev.JobRejected():
                refused = Refused(
                    code=event.code,
                    field=event.field,
                    expected=event.expected,
                    found=event.found,
                    hint=event.message,
                )
                kept.remembered.note_refused(event.answers, refused)
                if event.first_wish and event.code not in PUT_OFF:
                    kept.remembered.note_settled(event.first_wish, event.answers)
                self._answered(event.answers)
            case ev.JobDuplicate():
                kept.remembered.note_repeated(event.answers, event.first_wish)
                self._answered(event.answers)
            case (
                ev.WishRejected()
                | ev.WishJudged()
                | ev.JobReprioritized()
                | ev.ReservationAdmitted()
                | ev.ReservationCancelled()
            ):
                self._answered(event.answers)
            case ev.JobHeld() | ev.JobReleased() | ev.JobSuspended() | ev.JobResumed() | ev.JobCheckpointing():
                self.reconsider(event.job_id)
                self._answered(event.answers)
            case ev.QueueUpserted():
                self.index_queues()
                self._answered(event.answers)
            case ev.PolicyUpserted():
                kept.policies[event.for_tenant or POOL] = event
                self.configure()
                self._answered(event.answers)
            case ev.JobCancelled() | ev.JobSucceeded() | ev.JobFailed() | ev.JobExpired():
                kept.remembered.note_ended(event.job_id, type(event).__name__)
                kept.estimates.pop(event.job_id, None)
                self.reconsider(event.job_id)
                if isinstance(event, ev.JobCancelled):
                    self._answered(event.answers)
            case ev.JobStopping() | ev.JobResized():
                self.reconsider(event.job_id)
                self._answered(event.answers)
            case ev.JobRequeued() | ev.JobWaitExceeded():
                self.reconsider(event.job_id)
            case ev.LateFactIgnored():
                kept.late.pop(event.fact_seq, None)
            case ev.LeaseClaimed() if entry.author == ADMISSION:
                kept.config = event.config
                self.configure()
            case _:
                pass  # says nothing about answers or the ends of jobs

    def _answered(self, seq: int) -> None:
        if seq <= self.kept.answered:
            return
        self.kept.answered = seq
        while self.inbox and self.inbox[0].seq <= seq:
            self.inbox.popleft()


WISHES_PER_ROUND: Final = 300
"""Wishes answered by one decision; more would make the first of them wait for the last."""
WISHES_PER_ROUND_MAX: Final = 400
"""Each wish takes two facts at most, and a batch holds a thousand."""
CONFIG_NAMES: Final = (
    "wishes_per_round",
    "buffer_pct",
    "pool_pending_max",
    "tenant_rate_per_min",
    "tenant_burst",
    "tenant_pending_max",
    "tenant_wish_rate_per_min",
    "tenant_wish_burst",
    *(f"default_compute_milli_{kind}" for kind in WorkloadKind),
    *(f"default_memory_mib_{kind}" for kind in WorkloadKind),
    *(f"modes_{kind}" for kind in WorkloadKind),
)
"""Settings that decisions depend on; they come with the lease's claim."""


def _own_rules(pool: Rules, own: ev.PolicyUpserted) -> Rules:
    """A tenant's rules: its own where it has one, else the pool's; never less isolated than the pool's."""
    isolation = max(own.isolation or ev.IsolationLevel.NONE, pool.defaults.isolation, key=LEVELS.index)
    return Rules(
        defaults=msgspec.structs.replace(pool.defaults, isolation=isolation),
        limits=Limits(
            rate_per_min=own.rate_per_min or pool.limits.rate_per_min,
            burst=own.burst or (0 if own.rate_per_min else pool.limits.burst),
            pending_max=own.pending_max or pool.limits.pending_max,
        ),
        wishes=Limits(
            rate_per_min=own.wish_rate_per_min or pool.wishes.rate_per_min,
            burst=own.wish_burst or (0 if own.wish_rate_per_min else pool.wishes.burst),
        ),
    )


def looked_at(answer: ev.Event | Undecodable) -> TenantId | None:
    """Whose wish was looked at to give this answer; None where it was put off, or is about a job that there was.

    What a tenant can do to its own jobs is bounded by those.
    """
    match answer:
        case ev.JobRejected() | ev.WishRejected() | ev.WishJudged():
            is_free = answer.code is Refusal.RATE_LIMITED or ev.is_operator(answer.tenant)
            return None if is_free else answer.tenant
        case ev.JobAdmitted() | ev.JobDuplicate():
            return answer.tenant
        case _:
            return None


def _setting(config: dict[str, int | str], name: str, default: int, least: int, most: int) -> int:
    value = config.get(name, default)
    return min(max(value, least), most) if isinstance(value, int) else default


def _modes(value: int | str | None, default: tuple[Mode, ...]) -> tuple[Mode, ...]:
    """Modes from their names in one line; those that this version doesn't know are passed over."""
    if not isinstance(value, str):
        return default
    named = dict.fromkeys(word.strip() for word in value.split(","))
    return tuple(Mode(word) for word in named if word in set(Mode))


def _asked(entry: Entry, tenant: TenantId, identity: Identity | None) -> Asked | None:
    """The wish as it waits; None where it isn't admission's to answer."""
    event = entry.event
    wish: ev.JobWish | None = None
    undecodable: Undecodable | None = None
    match event:
        case Undecodable():  # first, as there may be very many
            if entry.subject_type in _MONITORS:
                return None
            undecodable = event
        case ev.JobRequested(dry_run=True):
            wish = event
            # As it would be without: a dry run isn't taken for another request than the one that it tries.
            identity = identity_of(entry, tenant, msgspec.structs.replace(event, dry_run=False))
        case (
            ev.JobRequested()
            | ev.JobCancelRequested()
            | ev.JobHoldRequested()
            | ev.JobReleaseRequested()
            | ev.JobReprioritizeRequested()
            | ev.JobPreemptRequested()
            | ev.JobResizeRequested()
            | ev.JobSuspendRequested()
            | ev.JobResumeRequested()
            | ev.JobCheckpointRequested()
            | ev.QueueUpsertRequested()
            | ev.ReservationRequested()
            | ev.ReservationCancelRequested()
            | ev.PolicyUpsertRequested()
        ):
            wish = event
        case _:
            return None
    return Asked(
        seq=entry.seq,
        recorded_at=entry.recorded_at,
        event_id=entry.event_id,
        tenant=tenant,
        actor=entry.actor,
        subject_type=entry.subject_type,
        expires_at=entry.expires_at,
        ingress=entry.ingress,
        wish=wish,
        undecodable=undecodable,
        identity=identity,
    )


def identity_of(entry: Entry, tenant: TenantId, request: ev.JobRequested) -> Identity:
    """By what a repeat of the request would be known."""
    key = request.idempotency_key
    return Identity(
        entry.recorded_at,
        _request_digest(request),
        fingerprint("event", tenant, entry.source, entry.event_id),
        b"" if key is None else fingerprint("key", tenant, key),
    )


def _request_digest(request: ev.JobRequested) -> str:
    # Of what is asked, not of the bytes: in structured mode these hold the event's id, so that a request which is sent
    # again as a new event with the same idempotency key would look like another one.
    return hashlib.sha256(_REQUESTS.encode(request)).hexdigest()


def why_late(kept: Kept, event: ev.RunStarted | ev.RunFinished | ev.RunReleased) -> str:
    """Why a run's fact doesn't count; empty where it does. Asked before the fact is folded."""
    run = run_of(kept.pool, event.run_id)
    job_id = job_of_run(event.run_id)
    job = kept.pool.jobs.get(job_id)
    if run is None or job is None or job.state is JobState.ENDED:
        end = kept.remembered.end_of(job_id)
        if end:
            return f"job {job_id} had ended: {end}"
        if job is None:
            return f"job {job_id} is not known"
        attempt = attempt_of_run(event.run_id)
        if attempt == job.attempt:
            return f"the run was not placed: attempt {attempt} of job {job_id} waits"
        return f"attempt {attempt} of job {job_id} is over, attempt {job.attempt} counts"
    if run.state is RunState.LOST:
        return f"node {run.node_id} was fenced, and the run with it"
    if run.state is RunState.RELEASED:
        return "the run was released before"
    if isinstance(event, ev.RunFinished) and run.state is RunState.FINISHED:
        return f"the run had finished before: {run.cause}"
    if isinstance(event, ev.RunStarted) and run.state is not RunState.PLACED:
        return f"the run was {run.state} before"
    return ""


def profile_of(tenant: TenantId, command: tuple[str, ...]) -> bytes:
    """Under what a tenant's runs of one command are known."""
    return fingerprint("profile", tenant, *command)


def initial() -> State:
    """The state before the first entry."""
    return State(Kept())


def evolve(state: State, entry: Entry) -> State:
    """The state after an entry of either stream, changed in place. Folding one twice changes nothing."""
    if entry.stream is Stream.WISHES:
        state.fold_wish(entry)
    else:
        state.fold_fact(entry)
    return state


_REQUESTS: Final = msgspec.json.Encoder(order="deterministic")
_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final = msgspec.msgpack.Decoder(Written)


def snapshot(state: State) -> bytes:
    """The state as bytes: equal states, equal bytes."""
    kept = state.kept
    return _ENCODER.encode(
        Written(
            pool=kept.pool,
            wishes_seq=kept.wishes_seq,
            answered=kept.answered,
            inbox=list(state.inbox),
            remembered=kept.remembered.written(),
            late=sorted(kept.late.items(), key=itemgetter(0)),
            config=kept.config,
            policies=kept.policies,
            flows=kept.flows,
            ratios_bp=list(kept.learned.ratios_bp.items()),
            peaks_mib=list(kept.learned.peaks_mib.items()),
            estimates=kept.estimates,
            ingress=sorted(kept.ingress.items()),
        )
    )


def restore(data: bytes) -> State:
    """The state from ``snapshot``'s bytes, its indexes computed anew."""
    written = _DECODER.decode(data)
    kept = Kept(
        pool=written.pool,
        wishes_seq=written.wishes_seq,
        answered=written.answered,
        remembered=Remembered(written.remembered),
        late=dict(written.late),
        config=written.config,
        policies=written.policies,
        flows=written.flows,
        learned=Learned(ratios_bp=dict(written.ratios_bp), peaks_mib=dict(written.peaks_mib)),
        estimates=written.estimates,
        ingress=dict(written.ingress),
    )
    return State(kept, written.inbox)


def position(state: State) -> tuple[int, int]:
    """Sequences of the last fact and the last wish folded."""
    return state.pool.seq, state.kept.wishes_seq


def job_of(state: State, job_id: JobId) -> JobView | None:
    """The job, where it has not ended."""
    job = state.pool.jobs.get(job_id)
    return None if job is None or job.state is JobState.ENDED else job
