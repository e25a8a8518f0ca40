"""Decisions of admission: this history, this moment, exactly these facts."""

import hashlib
from typing import Any

import msgspec
import pytest

from apportion.admission import core
from apportion.admission.testing import NODE, History, run_of
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal, RunCause, StopCause
from apportion.contracts.cloudevents import Ingress
from apportion.contracts.envelope import Undecodable
from apportion.contracts.ids import OPERATOR, JobId, NodeId, TenantId
from apportion.contracts.testing import (
    ACME,
    MAIN_QUEUE,
    NOON,
    a_job,
    a_job_request,
    a_node,
    a_placement,
    a_queue,
    a_spec,
)

MS = 1_000_000
S = 1_000_000_000
JOB = JobId("acme/train-7")
OTHER = TenantId("other")


def a_pool(**queue: Any) -> History:
    """One queue, one node, and a wish already answered, so that sequences of the streams differ."""
    history = History()
    history.fact(a_queue(tenants=("acme", "other"), **queue))
    history.fact(a_node())
    return history


def a_running_job(**spec: Any) -> History:
    """train-7 with every replica started at NOON."""
    history = a_pool()
    history.fact(a_job(**spec))
    runs = [history.place(replica=replica) for replica in range(spec.get("replicas", 1))]
    for run in runs:
        history.start(run)
    return history


def only(facts: list[ev.Fact], kind: type[ev.Fact]) -> Any:
    assert [type(fact) for fact in facts] == [kind], facts
    return facts[0]


# --------------------------------------------------------------------------------------------------------------------
# Job requests
# --------------------------------------------------------------------------------------------------------------------


def test_a_good_request_is_admitted_with_its_defaults() -> None:
    """The normalised request is what placer and agents go by."""
    history = a_pool()
    request = a_job_request(external_uri="https://x.example/1")
    history.wish(request)
    digest = hashlib.sha256(msgspec.json.encode(request, order="deterministic")).hexdigest()
    assert history.decide() == [
        ev.JobAdmitted(
            job_id=JOB,
            tenant=ACME,
            answers=1,
            wish_id="wish-1",
            spec=a_spec(),
            request_digest=digest,
            external_uri="https://x.example/1",
            caused_by="wish-1",
        )
    ]


def test_what_the_queue_holds_is_noted_with_the_admission() -> None:
    """An auditor sees how full the queue was when the job came in."""
    history = a_running_job()
    history.wish(a_job_request(job_id="more"))
    history.wish(a_job_request(job_id="more2"))
    admitted = only(history.decide()[:1], ev.JobAdmitted)
    assert (admitted.answers, admitted.quota_used_milli, admitted.quota_used_mib) == (2, 250, 4096)


def test_a_job_without_a_name_is_named_after_its_wish() -> None:
    """Ids derive from what caused them."""
    history = a_pool()
    history.wish(a_job_request(job_id="job-3"))
    history.wish(a_job_request(job_id=None))
    history.wish(a_job_request(job_id=None, priority=1))
    ids = [fact.job_id for fact in history.decide() if isinstance(fact, ev.JobAdmitted)]
    assert ids == ["acme/job-3", "acme/job-2", "acme/job-3-2"]


def test_wishes_are_answered_in_the_order_in_which_they_came() -> None:
    """So that one number says what was answered, and nobody overtakes."""
    history = a_pool()
    history.wish(a_job_request(job_id="b"))
    history.wish(a_job_request(job_id="a", queue="nowhere"))
    history.wish(ev.JobCancelRequested(job_id="nobody"))
    history.wish(a_job_request(job_id="c"))
    answers = [(type(f).__name__, getattr(f, "answers", None)) for f in history.decide()]
    assert answers == [("JobAdmitted", 1), ("JobRejected", 2), ("WishRejected", 3), ("JobAdmitted", 4)]


def test_three_hundred_hostile_wishes_delay_no_good_one_behind_them() -> None:
    """Whoever floods a pool with what can't be read must not take anybody's place."""
    history = a_pool()
    for _ in range(300):
        history.wish(Undecodable(code=Refusal.NOT_JSON, type="JobRequested", size=1))
    history.wish(a_job_request())
    said = history.decide()
    assert [type(fact) for fact in said] == [*[ev.JobRejected] * 300, ev.JobAdmitted]
    assert [getattr(fact, "answers", 0) for fact in said] == list(range(1, 302))


def test_how_wishes_came_is_counted_on_after_a_restart() -> None:
    """A total that falls back to zero looks like a pool that nobody uses."""
    history = a_pool()
    for ingress in (Ingress.BINARY, Ingress.BARE, Ingress.BARE):
        history.wish(a_job_request(), ingress=ingress)
    restored = core.restore(core.snapshot(history.state))
    assert restored.kept.ingress == {Ingress.BINARY: 1, Ingress.BARE: 2}


def test_a_flood_that_cannot_be_read_leaves_room_for_what_jobs_need() -> None:
    """A decision is one batch: an endless flood is refused in parts, and a round's other facts fit beside it."""
    history = a_pool()
    for _ in range(2 * core.REFUSED_PER_ROUND + 1):
        history.wish(Undecodable(code=Refusal.NOT_JSON, type="JobRequested", size=1))
    assert len(history.decide()) == core.REFUSED_PER_ROUND
    assert len(history.settle()) == 2 * core.REFUSED_PER_ROUND + 1


def test_a_round_answers_a_bounded_number_of_wishes_and_the_next_goes_on() -> None:
    """A batch on the bus has a limit; nothing is dropped because of it."""
    history = a_pool()
    for number in range(700):
        history.wish(a_job_request(job_id=f"j{number}"))
    assert len(history.decide()) == 300
    assert [fact.answers for fact in history.settle() if isinstance(fact, ev.JobAdmitted)] == list(range(1, 701))
    assert history.decide() == []


@pytest.mark.parametrize(
    ("tenant", "changes", "refusal"),
    [
        ("stranger", {}, (Refusal.TENANT_UNKNOWN, "", "a tenant that a queue names", "stranger")),
        ("acme", {"tenant": "other"}, (Refusal.TENANT_MISMATCH, "tenant", "acme", "other")),
        ("acme", {"queue": "nowhere"}, (Refusal.QUEUE_NOT_FOUND, "queue", "one of main, mine", "nowhere")),
        ("acme", {"queue": "theirs"}, (Refusal.QUEUE_NOT_FOUND, "queue", "one of main, mine", "theirs")),
    ],
)
def test_who_may_submit_where_is_checked_first(
    tenant: str, changes: dict[str, Any], refusal: tuple[Refusal, str, str, str]
) -> None:
    """A tenant learns about its own queues, and nothing about those of others."""
    history = a_pool()
    history.fact(a_queue("mine"))
    history.fact(a_queue("theirs", tenants=("other",)))
    history.wish(a_job_request(**changes), tenant=TenantId(tenant))
    rejected = only(history.decide(), ev.JobRejected)
    assert (rejected.code, rejected.field, rejected.expected, rejected.found) == refusal
    assert (rejected.answers, rejected.job_id, rejected.tenant) == (1, f"{tenant}/train-7", tenant)
    assert rejected.message


def test_a_wish_that_nobody_looked_at_in_time_is_refused_rather_than_done() -> None:
    """Whoever set the expiry has gone on without it."""
    history = a_pool()
    history.wish(a_job_request(), expires_at=NOON - 20 * MS)
    history.wish(a_job_request(job_id="in-time"), expires_at=NOON + 1)
    late, in_time = history.decide()
    assert isinstance(late, ev.JobRejected)
    assert (late.code, late.found) == (Refusal.EXPIRED, "20 ms later")
    assert isinstance(in_time, ev.JobAdmitted)


@pytest.mark.parametrize(
    ("limits", "field", "expected", "found"),
    [
        (
            {"limit_compute_milli": 999},
            "resources",
            "at most 999 milli-GPU, the limit of queue main",
            "1000 milli-GPU over 4 replicas",
        ),
        (
            {"limit_memory_mib": 16_383},
            "resources.gpu_memory_mib",
            "at most 16383 MiB of device memory, the limit of queue main",
            "16384 MiB of device memory over 4 replicas",
        ),
        ({"limit_jobs": 0}, "queue", "at most 0 jobs, the limit of queue main", "1 jobs over 4 replicas"),
    ],
)
def test_a_job_larger_than_its_queue_may_ever_hold_is_refused_with_the_numbers(
    limits: dict[str, int], field: str, expected: str, found: str
) -> None:
    """It would wait for ever, and nobody would know why."""
    history = a_pool(**limits)
    history.wish(a_job_request(gang=ev.Gang(size=4)))
    rejected = only(history.decide(), ev.JobRejected)
    assert rejected.code is Refusal.QUOTA_EXCEEDED
    assert (rejected.field, rejected.expected, rejected.found) == (field, expected, found)


def test_a_job_that_just_fits_its_queue_is_admitted_however_full_the_queue_is() -> None:
    """Whether there is room now is the placer's question."""
    history = a_pool(limit_compute_milli=250, limit_memory_mib=4096, limit_jobs=1)
    history.fact(a_job("first"))
    history.place("acme/first")
    history.wish(a_job_request())
    history.wish(a_job_request(job_id="second"))
    assert [fact.job_id for fact in history.settle() if isinstance(fact, ev.JobAdmitted)] == ["acme/second"]


def test_a_pools_own_default_shares_come_with_the_claim() -> None:
    """A replay has them from the stream, and from nowhere else."""
    history = a_pool()
    history.fact(
        ev.LeaseClaimed(
            author="admission", session="s", core=core.POLICY, config={"default_memory_mib_batch": 77, "other": "x"}
        )
    )
    # The builder's author is the fact's own; a claim names whose it is by its subject.
    history.entries[-1] = msgspec.structs.replace(history.entries[-1], author="admission")
    replayed = History()
    for entry in history.entries:
        replayed.add(entry)
    replayed.wish(a_job_request(resources=ev.Resources(gpu_milli=100)))
    assert only(replayed.decide(), ev.JobAdmitted).spec.memory_mib == 77


# --------------------------------------------------------------------------------------------------------------------
# Repeats
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_one_round", [True, False])
def test_a_repeat_is_answered_with_the_first_job(in_one_round: bool) -> None:
    """A publisher that saw no acknowledgement sends again, and must not start two jobs."""
    history = a_pool()
    request = a_job_request(job_id=None)
    history.wish(request, event_id="e-1")
    if not in_one_round:
        history.settle()
    history.wish(request, event_id="e-1")
    facts = history.decide()
    assert facts[-1] == ev.JobDuplicate(
        tenant=ACME,
        answers=2,
        wish_id="e-1",
        original_job_id=JobId("acme/job-1"),
        first_wish=1,
        caused_by="e-1",
    )
    assert len(facts) == (2 if in_one_round else 1)


def test_a_repeat_is_known_after_the_job_has_ended() -> None:
    """The broker's window of duplicates is minutes; a publisher's outage may be days."""
    history = a_pool()
    history.wish(a_job_request(), event_id="e-1")
    history.settle()
    history.run_to_end()
    history.settle()
    history.wish(a_job_request(), event_id="e-1")
    assert only(history.decide(), ev.JobDuplicate).original_job_id == JOB


def test_the_same_event_id_from_another_source_or_tenant_is_no_repeat() -> None:
    """Ids are unique per source, and nobody's table tells of another tenant's."""
    history = a_pool()
    history.wish(a_job_request(), event_id="e-1")
    history.wish(a_job_request(), event_id="e-1", tenant=OTHER)
    history.wish(a_job_request(job_id="second"), event_id="e-1", source="/elsewhere")
    assert [type(fact) for fact in history.decide()] == [ev.JobAdmitted] * 3


def test_an_idempotency_key_joins_events_of_different_ids() -> None:
    """Publishers that make a new event for each attempt say by the key that it is one request."""
    history = a_pool()
    request = a_job_request(job_id=None, idempotency_key="nightly")
    history.wish(request, event_id="e-1")
    history.wish(request, event_id="e-2")
    history.wish(request, event_id="e-2")
    history.wish(request, tenant=OTHER, event_id="e-3")
    first, second, third, other = history.decide()
    assert isinstance(first, ev.JobAdmitted)
    assert first.idempotency_key == "nightly"
    for repeat in (second, third):
        assert isinstance(repeat, ev.JobDuplicate)
        assert (repeat.original_job_id, repeat.first_wish) == ("acme/job-1", 1)
    assert isinstance(other, ev.JobAdmitted)


def test_how_a_request_is_written_makes_no_other_request_of_it() -> None:
    """Structured mode has the event's id in the body, and no two JSON writers agree on spaces or order."""
    history = a_pool()
    labels = {"a": "1", "b": "2"}
    request = a_job_request(job_id=None, idempotency_key="k", labels=labels)
    history.wish(request, event_id="e-1", digest="11")
    backwards = msgspec.structs.replace(request, labels=dict(reversed(labels.items())))
    history.wish(backwards, event_id="e-2", digest="22")
    assert isinstance(history.decide()[1], ev.JobDuplicate)


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [({}, {}, "id"), ({"idempotency_key": "k"}, {"idempotency_key": "k"}, "idempotency_key")],
)
def test_the_same_identity_with_another_body_is_a_conflict(
    first: dict[str, Any], second: dict[str, Any], field: str
) -> None:
    """Which of the two was meant can't be known."""
    history = a_pool()
    history.wish(a_job_request(**first), event_id="e-1")
    history.wish(a_job_request(priority=1, **second), event_id="e-1" if field == "id" else "e-2")
    rejected = history.decide()[1]
    assert isinstance(rejected, ev.JobRejected)
    assert (rejected.code, rejected.field, rejected.answers) == (Refusal.IDEMPOTENCY_CONFLICT, field, 2)
    assert rejected.expected == "the body of wish 1, which had the same one"


@pytest.mark.parametrize("in_one_round", [True, False])
def test_a_repeat_of_a_refused_request_gets_the_same_refusal(in_one_round: bool) -> None:
    """Sending again is always safe, even where the reason has gone since."""
    history = a_pool()
    history.wish(a_job_request(queue="later"), event_id="e-1")
    if not in_one_round:
        history.settle()
        history.fact(a_queue("later"))
    history.wish(a_job_request(queue="later"), event_id="e-1")
    second = history.decide()[-1]
    rejections = [entry.event for entry in history.entries if isinstance(entry.event, ev.JobRejected)]
    first = rejections[0] if rejections else history.decide()[0]
    assert isinstance(first, ev.JobRejected)
    assert second == msgspec.structs.replace(first, answers=2)


@pytest.mark.parametrize("ended", [True, False])
def test_a_jobs_name_is_taken_for_ever(ended: bool) -> None:
    """The log could not tell two jobs of one name apart."""
    history = a_pool()
    history.wish(a_job_request())
    history.settle()
    if ended:
        history.run_to_end()
        history.settle()
    history.wish(a_job_request())
    rejected = only(history.decide(), ev.JobRejected)
    said = "train-7, which wish 1 asked for"
    assert (rejected.code, rejected.field) == (Refusal.JOB_ID_TAKEN, "job_id")
    assert rejected.found == (f"{said} (JobSucceeded)" if ended else said)


# --------------------------------------------------------------------------------------------------------------------
# What can't be read
# --------------------------------------------------------------------------------------------------------------------


def test_a_request_that_cannot_be_read_is_rejected_where_it_is_wrong() -> None:
    """Bad input gets one clear answer, and the pool goes on."""
    history = a_pool()
    bad = Undecodable(
        code=Refusal.FIELD_INVALID,
        type="JobRequested",
        field="resources.gpu",
        expected="`int` >= 1",
        found="-1",
        size=9,
        job_id="bad-1",
    )
    history.wish(bad)
    history.wish(a_job_request())
    rejected, admitted = history.decide()
    assert rejected == ev.JobRejected(
        tenant=ACME,
        answers=1,
        wish_id="wish-1",
        code=Refusal.FIELD_INVALID,
        field="resources.gpu",
        expected="`int` >= 1",
        found="-1",
        message=(
            "resources.gpu: expected `int` >= 1, found -1. Correct the field and send the request as a new event."
        ),
        job_id=JobId("acme/bad-1"),
        caused_by="wish-1",
    )
    assert isinstance(admitted, ev.JobAdmitted)


def test_a_strangers_text_never_becomes_an_id() -> None:
    """Ids are subject tokens: what has another grammar stays out of them."""
    history = a_pool()
    history.wish(Undecodable(code=Refusal.FIELD_INVALID, type="JobRequested", size=1, job_id="a.b > *"))
    history.wish(
        Undecodable(code=Refusal.FIELD_INVALID, type="JobRequested", size=1, job_id="fine"), tenant=TenantId("No One")
    )
    assert [fact.job_id for fact in history.decide() if isinstance(fact, ev.JobRejected)] == [None, None]


@pytest.mark.parametrize("subject_type", ["JobCancelRequested", "QueueUpsertRequested", "Nonsense", "", "a" * 1000])
def test_any_other_unreadable_wish_is_refused_too(subject_type: str) -> None:
    """Every wish has one answer, and a type that nobody knows is nobody else's to answer."""
    history = a_pool()
    bad = Undecodable(code=Refusal.NOT_JSON, type=subject_type, expected="one JSON object", found="x" * 999, size=9)
    history.wish(bad)
    refused = only(history.decide(), ev.WishRejected)
    assert (refused.code, refused.answers) == (Refusal.NOT_JSON, 1)
    assert refused.wish_type == subject_type[:255] + ("…" if len(subject_type) > 256 else "")
    assert len(refused.found) == 256


def test_wishes_about_nodes_are_left_to_the_monitor() -> None:
    """Two answers to one wish would be worse than none."""
    history = a_pool()
    history.wish(ev.NodeDrainRequested(node_id="node-1", reason="broken fan"), tenant=OPERATOR)
    history.wish(Undecodable(code=Refusal.NOT_JSON, type="NodeCordonRequested", size=1), tenant=OPERATOR)
    assert history.decide() == []
    history.wish(a_job_request())
    assert only(history.decide(), ev.JobAdmitted).answers == 3


# --------------------------------------------------------------------------------------------------------------------
# Queues
# --------------------------------------------------------------------------------------------------------------------


def test_the_operator_sets_queues_and_jobs_behind_that_find_them() -> None:
    """Queues come by wish, so that each change has an actor and a reason."""
    history = History()
    history.wish(
        ev.QueueUpsertRequested(queue="main", tenants=("acme", "acme"), limit_jobs=5, reason="new team"),
        tenant=OPERATOR,
        actor="user:ann",
    )
    history.wish(a_job_request())
    assert history.decide() == [
        ev.QueueUpserted(
            queue=MAIN_QUEUE,
            tenants=(ACME,),
            limit_jobs=5,
            answers=1,
            actor="operator (user:ann)",
            reason="new team",
            caused_by="wish-1",
        )
    ]
    assert [type(fact) for fact in history.settle()] == [ev.QueueUpserted, ev.JobAdmitted]


@pytest.mark.parametrize(("dry_run", "kind"), [(False, ev.WishRejected), (True, ev.WishJudged)])
def test_nobody_else_sets_queues(dry_run: bool, kind: type[ev.Fact]) -> None:
    """Nothing in a payload grants anything: the subject says who asks."""
    history = a_pool()
    history.wish(ev.QueueUpsertRequested(queue="mine", tenants=("acme",), dry_run=dry_run))
    history.wish(a_job_request())
    refused, admitted = history.decide()
    assert isinstance(refused, ev.WishRejected | ev.WishJudged)
    assert isinstance(refused, kind)
    assert (refused.code, refused.wish_type) == (Refusal.NOT_PERMITTED, "QueueUpsertRequested")
    assert isinstance(admitted, ev.JobAdmitted)


def test_a_tenant_that_is_taken_off_its_queue_can_still_cancel() -> None:
    """Losing the right to submit must not leave jobs that nobody can stop."""
    history = a_pool()
    history.fact(a_job())
    history.fact(a_queue(tenants=("other",)))
    history.wish(a_job_request(job_id="more"))
    history.wish(a_job_request(job_id="more"))
    history.wish(ev.JobCancelRequested(job_id="train-7"))
    rejected, cancelled = history.decide()
    assert isinstance(rejected, ev.JobRejected)
    assert rejected.code is Refusal.TENANT_UNKNOWN
    assert isinstance(cancelled, ev.JobCancelled)


# --------------------------------------------------------------------------------------------------------------------
# Cancelling
# --------------------------------------------------------------------------------------------------------------------


def test_a_waiting_job_is_cancelled_at_once() -> None:
    """Nothing runs, so nothing has to stop first."""
    history = a_pool()
    history.fact(a_job(answers=0))
    history.wish(ev.JobCancelRequested(job_id="train-7", reason="typo"), actor="user:ann\u202e\n")
    assert history.decide() == [
        ev.JobCancelled(job_id=JOB, actor="tenant:acme (user:ann)", reason="typo", answers=1, caused_by="wish-1")
    ]


def test_a_job_can_be_cancelled_in_the_round_that_admits_it() -> None:
    """A wish finds the world as the wishes before it left it."""
    history = a_pool()
    history.wish(a_job_request())
    history.wish(ev.JobCancelRequested(job_id="train-7"))
    history.wish(ev.JobCancelRequested(job_id="train-7"))
    admitted, cancelled, refused = history.decide()
    assert isinstance(admitted, ev.JobAdmitted)
    assert isinstance(cancelled, ev.JobCancelled)
    assert isinstance(refused, ev.WishRejected)
    assert (refused.code, refused.found) == (Refusal.JOB_TERMINAL, "acme/train-7: JobCancelled")


@pytest.mark.parametrize(
    ("tenant", "name"),
    [(ACME, "train-7"), (ACME, "acme/train-7"), (OPERATOR, "acme/train-7")],
)
def test_a_running_job_is_stopped_first_and_cancelled_once_nothing_is_left(tenant: TenantId, name: str) -> None:
    """A job that has ended must not hold a device."""
    history = a_running_job(answers=0)
    history.wish(ev.JobCancelRequested(job_id=name, reason="enough"), tenant=tenant)
    actor = "operator" if tenant == OPERATOR else "tenant:acme"
    assert history.settle() == [
        ev.JobStopping(
            job_id=JOB,
            attempt=1,
            cause=StopCause.CANCELLED,
            actor=actor,
            reason="enough",
            answers=1,
            caused_by="wish-1",
        )
    ]
    history.finish(run_of(), RunCause.CANCELLED)
    assert history.decide() == []
    history.release(run_of())
    assert history.settle() == [
        ev.JobCancelled(job_id=JOB, actor=actor, reason="enough", caused_by=history.entries[-2].event_id)
    ]


def test_a_job_that_ended_well_before_the_stop_arrived_has_succeeded() -> None:
    """The work is done, and saying otherwise would have it done again."""
    history = a_running_job(answers=0)
    history.wish(ev.JobCancelRequested(job_id="train-7"))
    history.settle()
    history.finish(run_of())
    history.release(run_of())
    only(history.settle(), ev.JobSucceeded)


def test_a_job_that_has_just_ended_is_not_cancelled() -> None:
    """Its end was on the stream before the wish was looked at."""
    history = a_pool()
    history.fact(a_job(answers=0))
    history.run_to_end()
    history.wish(ev.JobCancelRequested(job_id="train-7"))
    succeeded, refused = history.decide()
    assert isinstance(succeeded, ev.JobSucceeded)
    assert isinstance(refused, ev.WishRejected)
    assert refused.code is Refusal.JOB_TERMINAL


def test_cancelling_wins_over_another_attempt() -> None:
    """Between two attempts nothing is live."""
    history = a_pool()
    history.fact(a_job(answers=0, retry_limit=3))
    history.run_to_end(cause=RunCause.USER_ERROR)
    history.wish(ev.JobCancelRequested(job_id="train-7"))
    only(history.settle(), ev.JobCancelled)


@pytest.mark.parametrize(
    ("tenant", "name", "code"),
    [
        (ACME, "nobody", Refusal.JOB_NOT_FOUND),
        (OTHER, "train-7", Refusal.JOB_NOT_FOUND),
        (OTHER, "acme/train-7", Refusal.JOB_NOT_FOUND),
        (OPERATOR, "train-7", Refusal.FIELD_INVALID),
        (OPERATOR, "acme/nobody", Refusal.JOB_NOT_FOUND),
    ],
)
def test_only_jobs_of_ones_own_are_found(tenant: TenantId, name: str, code: Refusal) -> None:
    """What another tenant runs is none of one's business."""
    history = a_pool()
    history.fact(a_job(answers=0))
    history.wish(ev.JobCancelRequested(job_id=name), tenant=tenant)
    assert only(history.decide(), ev.WishRejected).code is code


def test_a_cancel_that_expired_changes_nothing() -> None:
    """Nobody is stopped by a wish that its author gave up."""
    history = a_pool()
    history.fact(a_job(answers=0))
    history.wish(ev.JobCancelRequested(job_id="train-7"), expires_at=NOON)
    assert only(history.settle(), ev.WishRejected).code is Refusal.EXPIRED


# --------------------------------------------------------------------------------------------------------------------
# How jobs go on
# --------------------------------------------------------------------------------------------------------------------


def test_a_job_succeeds_once_every_replica_ended_well_and_let_go() -> None:
    """Waiting is counted from the wish, running from the first start to the last end."""
    history = a_pool()
    history.wish(a_job_request(gang=ev.Gang(size=2)), at=NOON)
    history.settle(NOON + 5 * MS)
    runs = [history.place(replica=replica, at=NOON + 6 * MS) for replica in range(2)]
    history.start(runs[1], at=NOON + 7 * MS)
    history.start(runs[0], at=NOON + 9 * MS)
    history.finish(runs[0], at=NOON + 20 * MS)
    history.release(runs[0], at=NOON + 21 * MS)
    history.finish(runs[1], at=NOON + 40 * MS)
    assert history.decide() == []
    history.release(runs[1], at=NOON + 50 * MS)
    assert history.settle() == [
        ev.JobSucceeded(job_id=JOB, attempts=1, wait_ms=7, run_ms=33, caused_by=history.entries[-2].event_id)
    ]
    assert JOB not in history.state.pool.jobs


def test_a_failure_without_a_retry_left_is_the_jobs() -> None:
    """Which run decided it, and how it ended, is part of the fact."""
    history = a_running_job()
    history.finish(run_of(), RunCause.USER_ERROR, exit_code=3)
    history.release(run_of())
    assert history.settle() == [
        ev.JobFailed(
            job_id=JOB,
            attempts=1,
            cause=RunCause.USER_ERROR,
            exit_code=3,
            run_id=run_of(),
            caused_by=history.entries[-2].event_id,
        )
    ]


def test_a_failure_is_tried_again_with_growing_pauses_until_the_budget_is_spent() -> None:
    """A program that fails at once must not keep the pool busy."""
    history = a_pool()
    history.fact(a_job(retry_limit=2, backoff_s=200))
    said = []
    for attempt in (1, 2, 3):
        history.run_to_end(cause=RunCause.USER_ERROR, attempt=attempt)
        said += history.settle(NOON + attempt)
    requeues = [fact for fact in said if isinstance(fact, ev.JobRequeued)]
    assert [(f.attempt, f.not_before_at, f.retries_left) for f in requeues] == [
        (2, NOON + 1 + 200 * S, 1),
        (3, NOON + 2 + 300 * S, 0),
    ]
    assert isinstance(said[-1], ev.JobFailed)
    assert said[-1].attempts == 3


def test_only_the_causes_that_the_job_named_are_tried_again() -> None:
    """A wrong argument stays wrong."""
    history = a_pool()
    history.fact(a_job(retry_limit=2, retry_on=(RunCause.OUT_OF_MEMORY,)))
    history.run_to_end(cause=RunCause.OUT_OF_MEMORY)
    only(history.settle(), ev.JobRequeued)
    history.run_to_end(cause=RunCause.USER_ERROR, attempt=2)
    only(history.settle(), ev.JobFailed)


@pytest.mark.parametrize("cause", [RunCause.NODE_LOST, RunCause.PREEMPTED, RunCause.DRAINED, RunCause.STALE])
def test_what_was_done_to_a_job_costs_it_nothing(cause: RunCause) -> None:
    """It moves at once, and its budget is whole."""
    history = a_running_job(retry_limit=0)
    history.finish(run_of(), cause)
    history.release(run_of())
    requeued = only(history.settle(), ev.JobRequeued)
    assert (requeued.attempt, requeued.not_before_at, requeued.retries_left) == (2, 0, 0)
    assert history.state.pool.jobs[JOB].retries_used == 0


def test_a_killed_shim_costs_no_retry_and_yet_a_pause() -> None:
    """A job that kills its own guardian must not start as fast as events travel."""
    history = a_running_job(retry_limit=0)
    pauses = []
    for attempt in (1, 2, 3):
        run = run_of(attempt=attempt) if attempt == 1 else history.place(attempt=attempt)
        history.finish(run, RunCause.SHIM_LOST)
        history.release(run)
        requeued = only(history.settle(), ev.JobRequeued)
        assert requeued.retries_left == 0
        pauses.append(requeued.not_before_at > 0)
    assert pauses == [True, True, True]


def test_a_job_that_ran_out_of_memory_asks_for_more_up_to_what_a_device_has() -> None:
    """The same share would end the same way; more than any device has would wait for ever."""
    history = a_running_job(retry_limit=5, backoff_s=0, memory_mib=30_000, memory_factor_pct=200)
    had = []
    for attempt in (1, 2, 3):
        run = run_of(attempt=attempt) if attempt == 1 else history.place(attempt=attempt)
        history.finish(run, RunCause.OUT_OF_MEMORY)
        history.release(run)
        requeued = only(history.settle(), ev.JobRequeued)
        had.append((requeued.memory_mib_before, requeued.memory_mib))
    assert had == [(30_000, 60_000), (60_000, 81_920), (0, 0)]
    assert history.state.pool.jobs[JOB].spec.memory_mib == 81_920


def test_a_lack_of_host_memory_asks_for_no_more_of_a_device() -> None:
    """It costs a retry like any failure of its own, and the device had nothing to do with it."""
    history = a_running_job(retry_limit=1, memory_mib=30_000, memory_factor_pct=200)
    history.finish(run_of(), RunCause.HOST_OUT_OF_MEMORY, peak_memory_mib=29_000)
    history.release(run_of())
    requeued = only(history.settle(), ev.JobRequeued)
    assert (requeued.memory_mib_before, requeued.memory_mib, requeued.retries_left) == (0, 0, 0)
    assert history.state.pool.jobs[JOB].spec.memory_mib == 30_000


def test_more_memory_never_exceeds_what_the_queue_may_hold() -> None:
    """A raised request that no longer fits its queue would never run again."""
    history = a_pool(limit_memory_mib=50_000)
    history.fact(a_job(retry_limit=1, memory_mib=20_000, memory_factor_pct=150, replicas=2))
    for replica in (0, 1):
        run = history.place(replica=replica)
        history.finish(run, RunCause.QUOTA_EXCEEDED)
        history.release(run)
    assert only(history.settle(), ev.JobRequeued).memory_mib == 25_000


@pytest.mark.parametrize("cause", [RunCause.USER_ERROR, RunCause.NODE_LOST, RunCause.PREEMPTED])
def test_only_running_out_of_memory_raises_it(cause: RunCause) -> None:
    """A larger share is dearer and waits longer: nothing else is mended by it."""
    history = a_running_job(retry_limit=1, memory_factor_pct=200)
    history.finish(run_of(), cause)
    history.release(run_of())
    assert only(history.settle(), ev.JobRequeued).memory_mib == 0


def test_a_job_that_asked_avoids_the_nodes_on_which_it_failed() -> None:
    """A fault of the machine that looks like the program's own is met once."""
    history = a_running_job(retry_limit=3, backoff_s=0, avoid_same_node=True)
    history.fact(a_node("node-2"))
    history.finish(run_of(), RunCause.USER_ERROR)
    history.release(run_of())
    requeued = only(history.settle(), ev.JobRequeued)
    assert requeued.avoid_nodes == (NODE,)
    assert history.state.pool.jobs[JOB].avoid_nodes == (NODE,)
    history.fact(a_placement(attempt=2, node="node-2"))
    run = run_of(attempt=2)
    history.fact(ev.RunFinished(run_id=run, node_id=NodeId("node-2"), cause=RunCause.UNKNOWN, finished_at=NOON))
    history.fact(ev.RunReleased(run_id=run, node_id=NodeId("node-2"), released_at=NOON))
    # There is no third node: meeting one again is better than never running.
    assert only(history.settle(), ev.JobRequeued).avoid_nodes == ()


def test_what_was_no_fault_of_the_node_makes_nobody_avoid_it() -> None:
    """A preempted job comes back to where its data is."""
    history = a_running_job(avoid_same_node=True)
    history.fact(a_node("node-2"))
    history.finish(run_of(), RunCause.PREEMPTED)
    history.release(run_of())
    assert only(history.settle(), ev.JobRequeued).avoid_nodes == ()


def test_a_device_that_refuses_every_start_is_not_asked_without_a_pause() -> None:
    """It costs the job nothing, so no budget would ever end it."""
    history = a_pool()
    history.fact(a_job(backoff_s=0))
    pauses = []
    for attempt in range(1, 12):
        history.run_to_end(cause=RunCause.ENFORCEMENT_FAILED, attempt=attempt)
        requeued = only(history.settle(), ev.JobRequeued)
        pauses.append((requeued.not_before_at - NOON) // S)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_when_a_node_is_lost_its_jobs_move() -> None:
    """The fencing is all that has to be waited for."""
    history = a_running_job(answers=0)
    history.fact(ev.NodeFenced(node_id=NODE, epoch=1, runs=(run_of(),)))
    fenced = history.entries[-1].event_id
    assert history.settle() == [
        ev.JobRequeued(job_id=JOB, attempt=2, cause=RunCause.NODE_LOST, retries_left=0, caused_by=fenced)
    ]


def test_what_a_lost_run_says_later_is_kept_and_ignored_once() -> None:
    """Its agent comes back and reports; the job has gone on."""
    history = a_running_job(answers=0)
    history.fact(ev.NodeFenced(node_id=NODE, epoch=1, runs=(run_of(),)))
    history.settle()
    history.finish(run_of(), RunCause.NODE_LOST)
    history.release(run_of())
    finished, released = history.entries[-2:]
    why = "attempt 1 of job acme/train-7 is over, attempt 2 counts"
    assert history.settle() == [
        ev.LateFactIgnored(run_id=run_of(), fact_seq=entry.seq, why=why, caused_by=entry.event_id)
        for entry in (finished, released)
    ]
    assert history.state.pool.jobs[JOB].attempt == 2


def test_facts_about_a_job_that_has_ended_are_ignored_with_the_reason() -> None:
    """Nobody shall wonder why a run's success did not count."""
    history = a_pool()
    history.fact(a_job(answers=0))
    history.wish(ev.JobCancelRequested(job_id="train-7"))
    history.settle()
    history.start(run_of())
    late = only(history.settle(), ev.LateFactIgnored)
    assert late.why == "job acme/train-7 had ended: JobCancelled"


def test_when_one_replica_fails_the_others_are_stopped_and_it_decides() -> None:
    """A gang is one thing: it starts together and ends together."""
    history = a_running_job(replicas=3)
    history.finish(run_of(replica=1), RunCause.USER_ERROR, exit_code=9)
    finished = history.entries[-1].event_id
    assert history.settle() == [
        ev.JobStopping(
            job_id=JOB,
            attempt=1,
            cause=StopCause.GANG_BROKEN,
            actor="service:admission",
            reason="replica 1 ended on node-1: UserError (exit code 9)",
            caused_by=finished,
        )
    ]
    for replica in (0, 2):
        history.finish(run_of(replica=replica), RunCause.GANG_BROKEN)
    for replica in (0, 1):
        history.release(run_of(replica=replica))
    assert history.decide() == []
    history.release(run_of(replica=2))
    failed = only(history.settle(), ev.JobFailed)
    assert (failed.cause, failed.run_id, failed.exit_code) == (RunCause.USER_ERROR, run_of(replica=1), 9)


def test_a_lost_node_explains_the_failures_of_its_neighbours() -> None:
    """A process that loses its peer fails by itself; that isn't the program's fault."""
    history = a_running_job(replicas=2)
    history.finish(run_of(replica=0), RunCause.USER_ERROR, at=NOON + 1)
    history.release(run_of(replica=0), at=NOON + 2)
    history.settle()
    history.fact(ev.NodeFenced(node_id=NODE, epoch=1, runs=(run_of(replica=1),)))
    assert only(history.settle(), ev.JobRequeued).cause is RunCause.NODE_LOST


def test_a_run_that_reaches_its_time_limit_is_stopped_then_and_not_before() -> None:
    """The limit counts from the first start, and the numbers are in the reason."""
    history = a_running_job(time_limit_s=60, retry_limit=5)
    assert core.wake_at(history.state, NOON) == NOON + 60 * S
    assert history.decide(NOON + 60 * S - 1) == []
    stopping = only(history.settle(NOON + 61 * S), ev.JobStopping)
    assert (stopping.cause, stopping.reason) == (StopCause.TIME_LIMIT, "ran for 61 s, its limit is 60 s")
    assert core.wake_at(history.state, NOON) is None
    history.finish(run_of(), RunCause.TIME_LIMIT)
    history.release(run_of())
    assert only(history.settle(), ev.JobFailed).cause is RunCause.TIME_LIMIT


def test_a_job_that_names_the_time_limit_is_tried_again_after_it() -> None:
    """Some programs go on from their last checkpoint."""
    history = a_running_job(time_limit_s=60, retry_limit=1, retry_on=(RunCause.TIME_LIMIT,))
    history.settle(NOON + 60 * S)
    history.finish(run_of(), RunCause.TIME_LIMIT)
    history.release(run_of())
    only(history.settle(), ev.JobRequeued)


def test_a_job_that_waits_past_its_deadline_expires() -> None:
    """Its result is of no use any more."""
    history = a_pool()
    history.fact(a_job(deadline_at=NOON + 5))
    assert core.wake_at(history.state, NOON) == NOON + 5
    assert history.decide(NOON + 4) == []
    assert history.settle(NOON + 5) == [
        ev.JobExpired(job_id=JOB, deadline_at=NOON + 5, caused_by=history.entries[2].event_id)
    ]
    assert core.wake_at(history.state, NOON) is None


def test_a_job_that_runs_past_its_deadline_is_stopped_and_expires() -> None:
    """Even if its last process ended well after being told to stop."""
    history = a_running_job(deadline_at=NOON + 5, time_limit_s=1)
    stopping = only(history.settle(NOON + 5), ev.JobStopping)
    assert stopping.cause is StopCause.DEADLINE
    history.finish(run_of())
    history.release(run_of())
    only(history.settle(NOON + 6), ev.JobExpired)


def test_the_deadline_ends_a_job_between_two_attempts() -> None:
    """Another attempt would come too late."""
    history = a_running_job(deadline_at=NOON + 5, retry_limit=3)
    history.finish(run_of(), RunCause.USER_ERROR)
    history.release(run_of())
    only(history.settle(NOON + 6), ev.JobExpired)


def test_a_job_that_waits_longer_than_it_said_is_named_once_and_waits_on() -> None:
    """Whoever was promised a bound hears that it was broken, with the numbers; a hold is nobody's delay."""
    history = a_pool()
    history.fact(a_job(answers=0, max_wait_s=60))
    assert history.settle(NOON + 60 * S - 1) == []
    assert core.wake_at(history.state, NOON) == NOON + 60 * S
    exceeded = only(history.settle(NOON + 60 * S), ev.JobWaitExceeded)
    assert (exceeded.attempt, exceeded.max_wait_s, exceeded.since_at) == (1, 60, NOON)
    assert core.wake_at(history.state, NOON) is None
    run = history.place()
    history.finish(run, RunCause.PREEMPTED)
    history.release(run, at=NOON + 70 * S)
    only(history.settle(NOON + 70 * S), ev.JobRequeued)
    history.wish(ev.JobHoldRequested(job_id="train-7"))
    history.settle(NOON + 71 * S)
    assert history.settle(NOON + 500 * S) == []
    history.wish(ev.JobReleaseRequested(job_id="train-7"))
    _, exceeded = history.settle(NOON + 501 * S)
    assert isinstance(exceeded, ev.JobWaitExceeded)
    assert (exceeded.attempt, exceeded.since_at) == (2, NOON + 70 * S)


def test_a_round_of_ends_is_bounded_and_the_next_goes_on() -> None:
    """A lost fleet of a thousand jobs fits into no single batch."""
    history = a_pool()
    for number in range(1000):
        history.fact(a_job(f"j{number:04}", deadline_at=NOON + 1))
    assert len(history.decide(NOON + 1)) == 900
    assert len(history.settle(NOON + 1)) == 1000


def test_the_policy_names_its_rules() -> None:
    """A replay has to know which rules decided."""
    name, _, digest = core.POLICY.partition("#")
    assert name == "admission@6"
    assert len(digest) == 12
