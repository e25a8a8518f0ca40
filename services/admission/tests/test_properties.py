"""What holds for admission over any history: one answer a wish, one end a job, and the same from any snapshot."""

import re
from collections import Counter
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apportion.admission import core
from apportion.admission.testing import History
from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, Refusal, RunCause
from apportion.contracts.envelope import Entry, Stream, Undecodable
from apportion.contracts.ids import OPERATOR, JobId, NodeId, RunId, TenantId
from apportion.contracts.testing import NOON, a_job_request, a_node, a_placement, a_queue
from apportion.pool.state import JobState, RunState

S = 1_000_000_000
NODES = ("node-1", "node-2")
CAUSES = (
    RunCause.SUCCESS,
    RunCause.USER_ERROR,
    RunCause.OUT_OF_MEMORY,
    RunCause.HOST_OUT_OF_MEMORY,
    RunCause.NODE_LOST,
    RunCause.SHIM_LOST,
    RunCause.ENFORCEMENT_FAILED,
    RunCause.TIME_LIMIT,
    RunCause.CANCELLED,
    RunCause.GANG_BROKEN,
)
TERMINAL = (ev.JobSucceeded, ev.JobFailed, ev.JobCancelled, ev.JobExpired)

WEIGHTS = {
    "ask": 6,
    "repeat": 2,
    "cancel": 2,
    "wish": 5,
    "queue": 1,
    "policy": 1,
    "garbage": 1,
    "drain": 1,
    "decide": 8,
    "redeliver": 1,
    "place": 5,
    "start": 5,
    "finish": 4,
    "release": 4,
    "fence": 1,
    "register": 2,
    "wait": 2,
    "nothing": 1,
}
ANY_END = ev.DependencyCondition.ENDED
Step = tuple[str, int, int]
# Long ones by default: what is interesting needs a request, a decision, a placement and a fault, in this order.
steps = st.lists(
    st.tuples(
        st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]),
        st.integers(0, 11),
        st.integers(0, 7),
    ),
    min_size=40,
    max_size=100,
)
REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"job_id": None},
    {"job_id": "b", "gang": ev.Gang(size=3)},
    {"job_id": "c", "retry": ev.Retry(limit=2, backoff_s=0), "max_wait_s": 5},
    {"job_id": "d", "time_limit_s": 20},
    {"job_id": "e", "deadline": "2026-09-01T12:01:30Z", "retry": ev.Retry(limit=3, backoff_s=0)},
    {"job_id": None, "idempotency_key": "k"},
    {"job_id": None, "idempotency_key": "k", "priority": 1},
    {"queue": "late"},
    {"job_id": "f", "dry_run": True},
    {"tenant": "other"},
    {"job_id": "g", "gang": ev.Gang(size=3), "retry": ev.Retry(limit=1), "time_limit_s": 30},
    {"job_id": "h", "depends_on": (ev.Dependency(job_id="train-7"), ev.Dependency(job_id="b", condition=ANY_END))},
    {"job_id": "i", "depends_on": (ev.Dependency(job_id="c", condition=ev.DependencyCondition.FAILED),)},
    {"job_id": "j", "retry": ev.Retry(limit=2, backoff_s=0, memory_factor_pct=150, avoid_same_node=True)},
    {"job_id": "k", "model": ev.Model(params_millions=100), "resources": ev.Resources()},
)
POLICIES: tuple[dict[str, Any], ...] = (
    {"for_tenant": "acme", "rate_per_min": 6, "burst": 2},
    {"for_tenant": "acme", "pending_max": 1},
    {"pool_pending_max": 2, "isolation": ev.IsolationLevel.MEMORY},
    {"for_tenant": "acme"},
    {"for_tenant": "acme", "wish_rate_per_min": 30, "wish_burst": 3},
    {"for_tenant": "acme", "limit_jobs": 0, "limit_memory_mib": 10_000},
    {},
)
JOBS = ("acme/train-7", "acme/b", "acme/job-1", "acme/e", "acme/g", "acme/nobody")


JOB_WISHES: tuple[Any, ...] = (
    ev.JobHoldRequested(job_id="x"),
    ev.JobPreemptRequested(job_id="x", reason="r"),
    ev.JobResizeRequested(job_id="x", gpu_milli=100),
    ev.JobReleaseRequested(job_id="x"),
    ev.JobReprioritizeRequested(job_id="x", priority=7),
    ev.JobPreemptRequested(job_id="x", reason="r", dry_run=True),
    ev.JobPreemptRequested(job_id="x", reason="r", requeue=False),
    ev.JobHoldRequested(job_id="x"),
    ev.JobResizeRequested(job_id="x", gpu_milli=900, gpu_memory_mib=1),
    ev.JobCancelRequested(job_id="x", dry_run=True),
    ev.JobReleaseRequested(job_id="x"),
    ev.JobSuspendRequested(job_id="x"),
    ev.JobResumeRequested(job_id="x"),
    ev.JobCheckpointRequested(job_id="x"),
)


class Driven(History):
    """A history made of steps: the world does as it likes, within what placer and agents would state."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOON
        self.told: set[tuple[str, RunId]] = set()
        for node in NODES:
            self.fact(a_node(node))
        self.fact(a_queue(tenants=("acme",)))

    def take(self, step: Step) -> None:
        """One step; one that makes no sense now is none."""
        what, one, two = step
        match what:
            case "ask":
                number = (one + 8 * (two % 2)) % len(REQUESTS)
                self.ask(a_job_request(**REQUESTS[number]), f"e-{two}-{number}")
            case "repeat":
                wishes = [e for e in self.entries if isinstance(e.event, ev.JobRequested)]
                if wishes:
                    again = wishes[one % len(wishes)]
                    assert isinstance(again.event, ev.JobRequested)
                    self.ask(again.event, again.event_id)
            case "cancel":
                tenant = (OPERATOR, TenantId("acme"), TenantId("acme"), TenantId("other"))[two % 4]
                self.wish(ev.JobCancelRequested(job_id=JOBS[one % len(JOBS)]), tenant=tenant, at=self.now)
            case "wish":
                kind = JOB_WISHES[one % len(JOB_WISHES)]
                name = JOBS[two % len(JOBS)]
                tenant = OPERATOR if one > 5 else TenantId("acme")
                self.wish(msgspec.structs.replace(kind, job_id=name), tenant=tenant, at=self.now)
            case "queue":
                wish = ev.QueueUpsertRequested(queue=("main", "late")[one % 2], tenants=("acme",))
                self.wish(wish, tenant=(OPERATOR, TenantId("acme"))[two % 2], at=self.now)
            case "policy":
                policy = ev.PolicyUpsertRequested(reason="r", **POLICIES[one % len(POLICIES)])
                self.wish(policy, tenant=(OPERATOR, OPERATOR, TenantId("acme"))[two % 3], at=self.now)
            case "garbage":
                kind = ("JobRequested", "JobCancelRequested", "Nonsense", "NodeDrainRequested", "")[one % 5]
                self.wish(Undecodable(code=Refusal.NOT_JSON, type=kind, size=3))
            case "drain":
                self.wish(ev.NodeDrainRequested(node_id="node-1", reason="r"), tenant=OPERATOR)
            case "decide":
                self.round()
            case "redeliver":
                core.evolve(self.state, self.entries[(one * 8 + two) % len(self.entries)])
            case "wait":
                self.now += (one + 1) * (two + 1) * S
            case "place":
                self.place_some(one, NODES[two % 2])
            case "start" | "finish" | "release":
                self.tell(what, one, CAUSES[two])
            case "fence":
                view = self.state.pool.nodes[NodeId(NODES[one % 2])]
                runs = tuple(sorted(view.runs))
                self.fact(ev.NodeFenced(node_id=view.node_id, epoch=view.epoch + 1, runs=runs), at=self.now)
            case "register":
                view = self.state.pool.nodes[NodeId(NODES[one % 2])]
                self.fact(a_node(view.node_id, epoch=view.epoch), at=self.now)
            case "nothing":
                pass
            case _:
                raise AssertionError(step)

    def ask(self, request: ev.JobRequested, event_id: str) -> None:
        """Somebody publishes a job request."""
        self.wish(request, event_id=event_id, at=self.now, expires_at=NOON + 100 * S)

    def round(self) -> list[ev.Fact]:
        """One decision, which comes round."""
        facts = self.decide(self.now)
        for fact in facts:
            self.fact(fact, at=self.now)
        return facts

    def place_some(self, number: int, node: str) -> None:
        """The placer places every replica of a waiting job."""
        waiting = sorted(
            job for job, view in self.state.pool.jobs.items() if view.state is JobState.QUEUED and not view.waits_for
        )
        if waiting:
            job = self.state.pool.jobs[waiting[number % len(waiting)]]
            epoch = self.state.pool.nodes[NodeId(node)].epoch
            for replica in range(job.spec.replicas):
                placed = a_placement(
                    job.job_id, replica=replica, attempt=job.attempt, node=node, node_epoch=epoch, memory_mib=1
                )
                self.fact(placed, at=self.now)

    def tell(self, what: str, number: int, cause: RunCause) -> None:
        """An agent states what comes next of a run that was ever placed, late or not, and each thing once."""
        placed = [e.event for e in self.entries if isinstance(e.event, ev.RunPlaced)]
        ready = [
            run
            for run in placed
            if (what, run.run_id) not in self.told
            and (what != "start" or ("finish", run.run_id) not in self.told)
            and (what != "release" or ("finish", run.run_id) in self.told)
        ]
        if not ready:
            return
        run = ready[number % len(ready)]
        self.told.add((what, run.run_id))
        fact: ev.Fact
        if what == "start":
            fact = ev.RunStarted(run_id=run.run_id, node_id=run.node_id, pid=1, started_at=self.now)
        elif what == "finish":
            fact = ev.RunFinished(
                run_id=run.run_id, node_id=run.node_id, cause=cause, finished_at=self.now, peak_memory_mib=100 + number
            )
        else:
            fact = ev.RunReleased(run_id=run.run_id, node_id=run.node_id, released_at=self.now)
        self.fact(fact, at=self.now)

    def finish_all(self) -> None:
        """Faults stop: whatever waits runs and ends well, and admission is heard out."""
        for _ in range(200):
            progressed = bool(self.round())
            for node, name in enumerate(NODES):
                view = self.state.pool.nodes[NodeId(name)]
                if not view.is_usable:
                    self.take(("register", node, 0))
            if any(v.state is JobState.QUEUED and not v.waits_for for v in self.state.pool.jobs.values()):
                self.place_some(0, NODES[0])
                progressed = True
            for what in ("start", "finish", "release"):
                for run in [r for job in self.state.pool.jobs.values() for r in job.runs.values()]:
                    if run.state not in {RunState.RELEASED, RunState.LOST}:
                        before = len(self.entries)
                        self.tell(what, 0, RunCause.SUCCESS)
                        progressed = progressed or len(self.entries) > before
            if not progressed:
                return
        raise AssertionError("jobs that could end did not")


def driven(taken: list[Step]) -> Driven:
    history = Driven()
    for step in taken:
        history.take(step)
    return history


def answered_wishes(entries: list[Entry]) -> Counter[int]:
    own = (
        ev.JobAdmitted,
        ev.JobRejected,
        ev.JobDuplicate,
        ev.WishRejected,
        ev.WishJudged,
        ev.QueueUpserted,
        ev.PolicyUpserted,
        ev.JobHeld,
        ev.JobReleased,
        ev.JobReprioritized,
        ev.JobResized,
        ev.JobSuspended,
        ev.JobResumed,
        ev.JobCheckpointing,
        ev.JobStopping,
        ev.JobCancelled,
    )
    return Counter(e.event.answers for e in entries if isinstance(e.event, own) and e.event.answers)


def is_admissions(entry: Entry) -> bool:
    return entry.stream is Stream.WISHES and not entry.subject_type.startswith(
        ("Node", "ControlPlane", "RateCard", "Alert", "Fault", "Log", "LegalHold", "Payload", "Key")
    )


many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(steps)
def test_every_wish_has_exactly_one_answer_and_every_job_exactly_one_end(taken: list[Step]) -> None:
    """The two promises that a publisher builds on."""
    history = driven(taken)
    history.finish_all()
    expected = Counter(entry.seq for entry in history.entries if is_admissions(entry))
    assert answered_wishes(history.entries) == expected
    admitted = Counter(e.event.job_id for e in history.entries if isinstance(e.event, ev.JobAdmitted))
    ended = Counter(e.event.job_id for e in history.entries if isinstance(e.event, TERMINAL))
    assert ended == admitted
    assert set(admitted.values()) <= {1}
    assert history.state.pool.jobs == {}


@many
@given(steps)
def test_once_its_answer_was_folded_admission_is_silent(taken: list[Step]) -> None:
    """Otherwise it would go round in circles, or say a thing twice after a crash."""
    history = driven(taken)
    history.settle(history.now)
    assert history.decide(history.now) == []
    wake = core.wake_at(history.state, history.now)
    assert wake is None or wake > history.now
    if wake is not None:
        assert history.decide(wake - 1) == []
        assert history.decide(wake) != []


@many
@given(steps, st.randoms(use_true_random=False))
def test_the_state_does_not_depend_on_how_the_two_streams_interleave(taken: list[Step], random: Any) -> None:
    """They are two streams: nothing orders an entry of one against an entry of the other."""
    history = driven(taken)
    streams = {
        stream: [entry for entry in history.entries if entry.stream is stream]
        for stream in (Stream.WISHES, Stream.FACTS)
    }
    state = core.initial()
    while any(streams.values()):
        stream = random.choice([stream for stream, entries in streams.items() if entries])
        core.evolve(state, streams[stream].pop(0))
    assert core.snapshot(state) == core.snapshot(history.state)
    assert core.decide(state, history.now) == history.decide(history.now)
    assert core.wake_at(state, history.now) == core.wake_at(history.state, history.now)


@many
@given(steps, st.integers(0, 200))
def test_a_replay_from_any_snapshot_is_the_same(taken: list[Step], cut: int) -> None:
    """A restart is a replay; indexes that are computed anew must say what those kept up to date said."""
    history = driven(taken)
    at = cut % (len(history.entries) + 1)
    state = core.initial()
    for entry in history.entries[:at]:
        core.evolve(state, entry)
    written = core.snapshot(state)
    state = core.restore(written)
    assert core.snapshot(state) == written
    for entry in history.entries:  # the reader may start too early
        core.evolve(state, entry)
    assert core.snapshot(state) == core.snapshot(history.state)
    assert core.decide(state, history.now) == history.decide(history.now)
    assert core.wake_at(state, history.now) == core.wake_at(history.state, history.now)
    assert core.position(state) == core.position(history.state)


@many
@given(steps)
def test_deciding_changes_nothing(taken: list[Step]) -> None:
    """A decision whose publishing failed is made again."""
    history = driven(taken)
    before = core.snapshot(history.state)
    assert history.decide(history.now) == history.decide(history.now)
    assert core.snapshot(history.state) == before


@many
@given(steps)
def test_what_is_stated_of_a_job_is_stated_once(taken: list[Step]) -> None:
    """A late word of a run is named once, an attempt is followed by one, a stop that nobody asked for is said once."""
    history = driven(taken)
    history.finish_all()
    late = Counter(e.event.fact_seq for e in history.entries if isinstance(e.event, ev.LateFactIgnored))
    attempts = Counter(
        (e.event.job_id, e.event.attempt) for e in history.entries if isinstance(e.event, ev.JobRequeued)
    )
    # Each wish that stops a job has such a fact for its answer, however many there are.
    stops = Counter(
        (e.event.job_id, e.event.attempt, e.event.cause)
        for e in history.entries
        if isinstance(e.event, ev.JobStopping) and not e.event.answers
    )
    assert {count for counter in (late, attempts, stops) for count in counter.values()} <= {1}
    by_seq = {entry.seq: entry for entry in history.entries if entry.stream is Stream.FACTS}
    for seq in late:
        assert isinstance(by_seq[seq].event, ev.RunStarted | ev.RunFinished | ev.RunReleased)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.randoms(use_true_random=False))
def test_the_order_in_which_unrelated_things_are_told_changes_no_decision(taken: list[Step], random: Any) -> None:
    """Equal inputs, equal decisions: of each job and each node in its order, and between them in any."""
    history = driven(taken)
    history.settle(history.now)
    before = core.snapshot(history.state)
    chains = [*_what_jobs_do_next(history), *_what_others_tell()]
    asks = [a_job_request(job_id=f"late-{priority}", priority=priority) for priority in (1, 2)]

    def decisions(turns: list[int]) -> list[bytes]:
        there = History()
        there.state = core.restore(before)
        there._facts, there._wishes = core.position(there.state)
        left = [iter(chain) for chain in chains]
        for turn in turns:
            there.fact(next(left[turn]), at=history.now)
        for number, ask in enumerate(asks):
            there.wish(ask, event_id=f"late-{number}", at=history.now)
        return [*map(_alone, there.decide(history.now)), *map(_alone, there.decide(history.now + 100 * S))]

    turns = [number for number, chain in enumerate(chains) for _ in chain]
    expected = sorted(decisions(turns))
    for _ in range(2):
        random.shuffle(turns)
        assert sorted(decisions(turns)) == expected


def _what_jobs_do_next(history: Driven) -> list[list[ev.Fact]]:
    """Of each job with live runs: they start, end in one way or another, and let go."""
    chains: list[list[ev.Fact]] = []
    for number, job_id in enumerate(sorted(history.state.pool.jobs)):
        chain: list[ev.Fact] = []
        for run in history.state.pool.jobs[job_id].runs.values():
            of: dict[str, Any] = {"run_id": run.run_id, "node_id": run.node_id}
            if run.state is RunState.PLACED:
                chain.append(ev.RunStarted(**of, pid=1, started_at=history.now))
            if run.state in {RunState.PLACED, RunState.STARTED}:
                cause = CAUSES[number % len(CAUSES)]
                chain.append(ev.RunFinished(**of, cause=cause, finished_at=history.now, peak_memory_mib=7 + number))
            if run.state is not RunState.RELEASED:
                chain.append(ev.RunReleased(**of, released_at=history.now))
        chains.append(chain)
    return chains


def _what_others_tell() -> list[list[ev.Fact]]:
    """A node that hosts none of it, a queue and a tenant that have none of it, and a job that nobody knows."""
    far = NodeId("node-9")
    return [
        [
            a_node(far),
            ev.NodeSuspected(node_id=far, epoch=0, silent_ms=1, lease_ms=2),
            ev.NodeFenced(node_id=far, epoch=1, runs=()),
            a_node(far, epoch=1),
        ],
        [a_queue("theirs", tenants=("other",)), a_queue("theirs", tenants=("other",), limit_jobs=1)],
        [ev.PolicyUpserted(for_tenant=TenantId("other"), rate_per_min=1, answers=0, actor="operator")],
        [
            ev.JobPendingReasonChanged(job_id=JobId("other/x"), code=Pending.PRIORITY, since_at=NOON),
            ev.RunStarted(run_id=RunId("other/x/0/1"), node_id=far, pid=1, started_at=NOON),
        ],
    ]


TENANTS = (TenantId("acme"), TenantId("beta"), TenantId("gone"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 15), st.integers(0, 3)), min_size=4, max_size=24),
    random=st.randoms(use_true_random=False),
    policy=st.sampled_from(
        [{}, {"rate_per_min": 3, "burst": 2}, {"pending_max": 2}, {"wish_rate_per_min": 9, "wish_burst": 3}]
    ),
    is_own=st.booleans(),
)
def test_what_a_tenant_is_answered_does_not_depend_on_how_others_wishes_fall_between(
    asked: list[tuple[TenantId, int, int]], random: Any, policy: dict[str, Any], *, is_own: bool
) -> None:
    """Each tenant's wishes in their order, and between tenants in any: one can't talk another out of an answer."""

    def answers(turns: list[tuple[TenantId, int, int]]) -> dict[TenantId, list[bytes]]:
        there = History()
        there.fact(a_node())
        there.fact(a_queue(tenants=("acme", "beta")))
        for tenant in TENANTS[:2] if is_own else (None,):
            there.fact(ev.PolicyUpserted(for_tenant=tenant, answers=0, actor="operator", **policy))
        for tenant, number, again in turns:
            request = REQUESTS[number]
            if not request.get("job_id", "x"):
                request = request | {"job_id": f"n-{number}"}  # a generated name has the wish's number in it
            there.wish(a_job_request(**request), tenant=tenant, event_id=f"e-{number}-{again}")
        found: dict[TenantId, list[bytes]] = {tenant: [] for tenant in TENANTS}
        for fact in there.settle():
            found[getattr(fact, "tenant")].append(_alone(fact))  # noqa: B009 - all answers to requests have it
        return found

    expected = answers(asked)
    for _ in range(3):
        own = {tenant: iter([each for each in asked if each[0] == tenant]) for tenant in TENANTS}
        order = [each[0] for each in asked]
        random.shuffle(order)
        assert answers([next(own[tenant]) for tenant in order]) == expected


def _alone(fact: ev.Fact) -> bytes:
    """The fact without the numbers of other entries, which differ where entries come in another order."""
    plain = {name: 0 for name in ("answers", "first_wish", "fact_seq") if hasattr(fact, name)}
    said = msgspec.json.encode(msgspec.structs.replace(fact, caused_by="", **plain))
    return re.sub(rb"[Ww]ish \d+", b"wish", said)
