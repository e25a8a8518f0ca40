"""Wishes about a job that there is: hold, release, reprioritise, preempt, resize; and wishes that are only tried."""

from typing import Any

import msgspec
import pytest

from apportion.admission import core
from apportion.admission.testing import History
from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, Refusal, RunCause, StopCause, Verdict
from apportion.contracts.ids import OPERATOR, JobId, QueueId, TenantId, run_id
from apportion.contracts.testing import ACME, NOON, a_job, a_job_request, a_node, a_placement, a_queue, a_spec

JOB = JobId("acme/train-7")
JOB_RUN = run_id(JOB, 0, 1)
S = 1_000_000_000


def a_waiting_job(**spec: Any) -> History:
    """train-7 is admitted; nothing of it is placed."""
    history = History()
    history.fact(a_queue(tenants=("acme", "other")))
    history.fact(a_node())
    history.fact(a_job(answers=0, **spec))
    return history


def a_running_job(**spec: Any) -> History:
    """train-7 with every replica started."""
    history = a_waiting_job(**spec)
    for replica in range(spec.get("replicas", 1)):
        history.start(history.place(replica=replica))
    return history


def stopped(history: History, cause: RunCause = RunCause.PREEMPTED, *, replicas: int = 1) -> None:
    """The runs end as they were told, and let go."""
    for replica in range(replicas):
        run = run_id(JOB, replica, 1)
        history.finish(run, cause)
        history.release(run)


def answer(history: History, wish: ev.Wish, *, tenant: TenantId = ACME, **changes: Any) -> Any:
    """The only fact that a wish leads to at once."""
    history.wish(wish, tenant=tenant, **changes)
    (fact,) = history.decide()
    return fact


# --------------------------------------------------------------------------------------------------------------------
# Hold and release
# --------------------------------------------------------------------------------------------------------------------


def test_a_job_is_held_and_released() -> None:
    """Who did it and why stays readable."""
    history = a_waiting_job()
    history.wish(ev.JobHoldRequested(job_id="train-7", reason="data is late"), actor="ann")
    history.wish(ev.JobReleaseRequested(job_id="train-7", reason="data is there"))
    assert history.settle() == [
        ev.JobHeld(job_id=JOB, actor="tenant:acme (ann)", reason="data is late", answers=1, caused_by="wish-1"),
        ev.JobReleased(job_id=JOB, actor="tenant:acme", reason="data is there", answers=2, caused_by="wish-2"),
    ]
    assert history.state.pool.jobs[JOB].hold is None


def test_a_job_that_nobody_holds_cannot_be_released() -> None:
    """Whoever asks believes something that isn't so."""
    refused = answer(a_waiting_job(), ev.JobReleaseRequested(job_id="train-7"))
    assert (refused.code, refused.field, refused.found) == (
        Refusal.JOB_STATE,
        "job_id",
        "acme/train-7, which nobody holds",
    )


def test_an_operators_hold_is_the_operators_to_end() -> None:
    """A tenant's own hold on top of it makes no difference."""
    history = a_waiting_job()
    history.wish(ev.JobHoldRequested(job_id="acme/train-7"), tenant=OPERATOR)
    history.wish(ev.JobHoldRequested(job_id="train-7"))
    history.wish(ev.JobReleaseRequested(job_id="train-7"))
    said = history.settle()
    assert [type(fact) for fact in said] == [ev.JobHeld, ev.JobHeld, ev.WishRejected]
    assert isinstance(said[2], ev.WishRejected)
    assert said[2].code is Refusal.NOT_PERMITTED
    assert answer(history, ev.JobReleaseRequested(job_id="train-7")).code is Refusal.NOT_PERMITTED
    history.settle()
    assert isinstance(answer(history, ev.JobReleaseRequested(job_id="acme/train-7"), tenant=OPERATOR), ev.JobReleased)


def test_a_held_job_still_expires_and_can_be_cancelled() -> None:
    """A hold stops the placing, and no clock."""
    history = a_waiting_job(deadline_at=NOON + S)
    history.wish(ev.JobHoldRequested(job_id="train-7"))
    history.settle()
    assert [type(fact) for fact in history.settle(NOON + S)] == [ev.JobExpired]
    history = a_waiting_job()
    history.wish(ev.JobHoldRequested(job_id="train-7"))
    history.wish(ev.JobCancelRequested(job_id="train-7"))
    assert [type(fact) for fact in history.settle()] == [ev.JobHeld, ev.JobCancelled]
    assert history.state.pool.jobs == {}


def test_a_job_may_be_held_by_the_decision_that_admits_it() -> None:
    """A publisher may send both at once, and needn't wait in between."""
    history = History()
    history.fact(a_queue())
    history.wish(a_job_request())
    history.wish(ev.JobHoldRequested(job_id="train-7"))
    history.wish(ev.JobReleaseRequested(job_id="train-7"))
    history.wish(ev.JobReleaseRequested(job_id="train-7"))
    kinds = [type(fact) for fact in history.decide()]
    assert kinds == [ev.JobAdmitted, ev.JobHeld, ev.JobReleased, ev.WishRejected]


# --------------------------------------------------------------------------------------------------------------------
# Reprioritise
# --------------------------------------------------------------------------------------------------------------------


def test_a_job_gets_another_priority() -> None:
    """Each fact says what it was before, the second of one decision too."""
    history = a_waiting_job()
    history.wish(ev.JobReprioritizeRequested(job_id="train-7", priority=900, reason="paper deadline"))
    history.wish(ev.JobReprioritizeRequested(job_id="acme/train-7", priority=1), tenant=OPERATOR)
    assert history.settle() == [
        ev.JobReprioritized(
            job_id=JOB,
            before=500,
            priority=900,
            actor="tenant:acme",
            reason="paper deadline",
            answers=1,
            caused_by="wish-1",
        ),
        ev.JobReprioritized(job_id=JOB, before=900, priority=1, actor="operator", answers=2, caused_by="wish-2"),
    ]
    assert history.state.pool.jobs[JOB].spec == a_spec(priority=1)


# --------------------------------------------------------------------------------------------------------------------
# Preempt
# --------------------------------------------------------------------------------------------------------------------


def test_a_preempted_job_waits_again_and_spends_no_retry() -> None:
    """It isn't the job's doing."""
    history = a_running_job(retry_limit=1)
    history.wish(ev.JobPreemptRequested(job_id="acme/train-7", reason="urgent work"), tenant=OPERATOR)
    assert history.settle() == [
        ev.JobStopping(
            job_id=JOB,
            attempt=1,
            cause=StopCause.PREEMPTED,
            actor="operator",
            reason="urgent work",
            answers=1,
            caused_by="wish-1",
        )
    ]
    stopped(history)
    last = history.entries[-1].event_id
    assert history.settle() == [
        ev.JobRequeued(job_id=JOB, attempt=2, cause=RunCause.PREEMPTED, retries_left=1, caused_by=last)
    ]


def test_a_preempted_job_that_shall_not_wait_again_ends_as_cancelled() -> None:
    """Its author is told who ended it, and why."""
    history = a_running_job()
    history.wish(ev.JobPreemptRequested(job_id="train-7", reason="enough", requeue=False))
    (stopping,) = history.settle()
    assert isinstance(stopping, ev.JobStopping)
    assert not stopping.requeue
    stopped(history)
    last = history.entries[-1].event_id
    assert history.settle() == [ev.JobCancelled(job_id=JOB, actor="tenant:acme", reason="enough", caused_by=last)]


def test_a_run_that_ended_well_before_the_stop_reached_it_has_succeeded() -> None:
    """Work that is done isn't thrown away for a wish to stop it."""
    history = a_running_job()
    history.wish(ev.JobPreemptRequested(job_id="train-7", reason="r", requeue=False))
    history.settle()
    stopped(history, RunCause.SUCCESS)
    assert [type(fact) for fact in history.settle()] == [ev.JobSucceeded]


@pytest.mark.parametrize("state", ["waits", "stopping", "ended runs"])
def test_only_what_runs_can_be_preempted(state: str) -> None:
    """There is nothing else to give back."""
    history = a_waiting_job() if state == "waits" else a_running_job()
    if state == "stopping":
        history.wish(ev.JobCancelRequested(job_id="train-7"))
        history.settle()
    if state == "ended runs":
        history.finish(JOB_RUN)
    refused = answer(history, ev.JobPreemptRequested(job_id="train-7", reason="r"))
    assert refused.code is Refusal.JOB_STATE
    assert (
        refused.found
        == {
            "waits": "acme/train-7, which waits and has nothing to give back",
            "stopping": "acme/train-7, whose runs are being stopped (Cancelled)",
            "ended runs": "acme/train-7, whose runs have ended, or are about to be stopped",
        }[state]
    )


def test_a_gang_that_broke_before_the_wish_is_no_preemption() -> None:
    """Else a preemption would make a failure one at no cost."""
    history = a_running_job(replicas=2)
    history.finish(JOB_RUN, RunCause.USER_ERROR, exit_code=3)
    history.wish(ev.JobPreemptRequested(job_id="train-7", reason="r"))
    stopping, refused = history.settle()
    assert isinstance(stopping, ev.JobStopping)
    assert (stopping.cause, stopping.answers) == (StopCause.GANG_BROKEN, 0)
    assert isinstance(refused, ev.WishRejected)
    assert refused.code is Refusal.JOB_STATE


def test_a_cancel_outdoes_a_preemption() -> None:
    """Whatever the runs were told they stop for: the job ends."""
    history = a_running_job()
    history.wish(ev.JobPreemptRequested(job_id="train-7", reason="r"))
    history.wish(ev.JobCancelRequested(job_id="train-7", reason="no more"))
    assert [fact.cause for fact in history.settle() if isinstance(fact, ev.JobStopping)] == [
        StopCause.PREEMPTED,
        StopCause.CANCELLED,
    ]
    stopped(history)
    (ended,) = history.settle()
    assert isinstance(ended, ev.JobCancelled)
    assert ended.reason == "no more"


# --------------------------------------------------------------------------------------------------------------------
# Resize
# --------------------------------------------------------------------------------------------------------------------


def resized(**changes: Any) -> ev.JobResized:
    """A job of 250 milli-GPU and 4 GiB has twice the share."""
    base = ev.JobResized(
        job_id=JOB,
        compute_milli=500,
        memory_mib=8192,
        compute_milli_before=250,
        memory_mib_before=4096,
        actor="tenant:acme",
        answers=1,
        caused_by="wish-1",
    )
    return msgspec.structs.replace(base, **changes)


def test_a_waiting_job_has_its_new_size_at_once() -> None:
    """Nothing is stopped for it."""
    history = a_waiting_job()
    history.wish(ev.JobResizeRequested(job_id="train-7", gpu_milli=500, gpu_memory_mib=8192))
    history.wish(ev.JobResizeRequested(job_id="train-7", gpu_milli=600))
    assert history.settle() == [
        resized(),
        resized(
            compute_milli=600,
            compute_milli_before=500,
            memory_mib_before=8192,
            answers=2,
            caused_by="wish-2",
        ),
    ]
    assert history.state.pool.jobs[JOB].spec == a_spec(compute_milli=600, memory_mib=8192)


def test_a_running_job_is_stopped_for_its_new_size_and_spends_no_retry() -> None:
    """One wish, one answer; the stop follows from it."""
    history = a_running_job()
    history.wish(ev.JobResizeRequested(job_id="train-7", gpu_milli=500, gpu_memory_mib=8192, reason="it grew"))
    answered, stopping = history.settle()
    assert answered == resized(reason="it grew")
    event = history.entries[-2].event_id
    assert stopping == ev.JobStopping(
        job_id=JOB, attempt=1, cause=StopCause.RESIZED, actor="tenant:acme", reason="it grew", caused_by=event
    )
    stopped(history)
    assert [type(fact) for fact in history.settle()] == [ev.JobRequeued]
    job = history.state.pool.jobs[JOB]
    assert (job.spec, job.resize, job.attempt) == (a_spec(compute_milli=500, memory_mib=8192), None, 2)


def test_a_size_that_a_job_has_already_stops_nothing() -> None:
    """Asking twice must be safe."""
    history = a_running_job()
    history.wish(ev.JobResizeRequested(job_id="train-7", gpu_milli=250))
    assert [type(fact) for fact in history.settle()] == [ev.JobResized]
    history.wish(ev.JobResizeRequested(job_id="train-7", gpu_milli=300))
    history.wish(ev.JobResizeRequested(job_id="train-7", gpu_milli=250))
    assert [type(fact) for fact in history.settle()] == [ev.JobResized, ev.JobResized]


def test_what_was_placed_before_its_new_size_was_known_is_stopped_too() -> None:
    """The placer's batch was on its way when the job was resized: else it would keep the old size for good."""
    history = a_waiting_job()
    known = len([entry for entry in history.entries if entry.author is not None])
    history.wish(ev.JobResizeRequested(job_id="train-7", gpu_milli=500, gpu_memory_mib=8192))
    history.settle()
    history.fact(a_placement(), basis=known)
    (stopping,) = history.settle()
    assert isinstance(stopping, ev.JobStopping)
    assert (stopping.cause, stopping.actor) == (StopCause.RESIZED, "service:admission")


def test_what_was_placed_with_its_new_size_runs_on() -> None:
    """Told from the other by what the placer knew."""
    history = a_waiting_job()
    history.wish(ev.JobResizeRequested(job_id="train-7", gpu_milli=500, gpu_memory_mib=8192))
    history.settle()
    history.fact(a_placement(compute_milli=500, memory_mib=8192), basis=history.state.pool.seq)
    assert history.settle() == []


@pytest.mark.parametrize(
    ("spec", "wish", "code", "field"),
    [
        ({}, {}, Refusal.FIELD_MISSING, "gpu_milli"),
        ({"devices": 0, "cpu_milli": 1}, {"gpu_milli": 5}, Refusal.FIELD_CONFLICT, "gpu_milli"),
        ({"devices": 0, "cpu_milli": 1}, {"gpu_memory_mib": 5}, Refusal.FIELD_CONFLICT, "gpu_memory_mib"),
        (
            {"mode": Mode.EXCLUSIVE, "compute_milli": 1000, "memory_mib": 0},
            {"gpu_milli": 999, "gpu_memory_mib": 5},
            Refusal.FIELD_CONFLICT,
            "gpu_milli",
        ),
        (
            {"mode": Mode.MPS, "compute_milli": 1000, "memory_mib": 0},
            {"gpu_milli": 999},
            Refusal.FIELD_MISSING,
            "gpu_memory_mib",
        ),
        ({"queue": QueueId("small")}, {"gpu_milli": 501}, Refusal.QUOTA_EXCEEDED, "resources"),
        ({"queue": QueueId("small")}, {"gpu_memory_mib": 9000}, Refusal.QUOTA_EXCEEDED, "resources.gpu_memory_mib"),
    ],
)
def test_a_size_that_the_job_cannot_have_is_refused(
    spec: dict[str, Any], wish: dict[str, Any], code: Refusal, field: str
) -> None:
    """What could never run would wait for ever."""
    history = a_waiting_job(**spec)
    history.fact(a_queue("small", limit_compute_milli=500, limit_memory_mib=8999))
    before = history.state.pool.jobs[JOB].spec
    refused = answer(history, ev.JobResizeRequested(job_id="train-7", **wish))
    assert isinstance(refused, ev.WishRejected)
    assert (refused.code, refused.field) == (code, field)
    assert history.state.pool.jobs[JOB].spec == before


# --------------------------------------------------------------------------------------------------------------------
# Suspend, resume, checkpoint
# --------------------------------------------------------------------------------------------------------------------

PLAN = ev.CheckpointPlan(signal="SIGUSR1", grace_s=20)


def test_a_running_job_is_suspended_and_resumed() -> None:
    """It keeps its slices, and nothing else follows: the placer tells its runs."""
    history = a_running_job()
    history.wish(ev.JobSuspendRequested(job_id="train-7", reason="a demo"), actor="ann")
    assert history.settle() == [
        ev.JobSuspended(job_id=JOB, actor="tenant:acme (ann)", reason="a demo", answers=1, caused_by="wish-1")
    ]
    history.wish(ev.JobResumeRequested(job_id="train-7"))
    assert history.settle() == [ev.JobResumed(job_id=JOB, actor="tenant:acme", answers=2, caused_by="wish-2")]
    assert answer(history, ev.JobResumeRequested(job_id="train-7")).found == "acme/train-7, which nobody suspended"


def test_what_the_operator_suspended_its_tenant_can_neither_resume_nor_take_over() -> None:
    history = a_running_job()
    history.wish(ev.JobSuspendRequested(job_id="acme/train-7"), tenant=OPERATOR)
    history.settle()
    assert answer(history, ev.JobResumeRequested(job_id="train-7")).code is Refusal.NOT_PERMITTED
    history.settle()
    assert answer(history, ev.JobSuspendRequested(job_id="train-7")).code is Refusal.JOB_STATE
    history.settle()
    assert isinstance(answer(history, ev.JobResumeRequested(job_id="acme/train-7"), tenant=OPERATOR), ev.JobResumed)


def test_only_what_runs_is_suspended_or_checkpoints() -> None:
    """Who waits is told what to ask instead."""
    history = a_waiting_job(checkpoint=PLAN)
    refused = answer(history, ev.JobSuspendRequested(job_id="train-7"))
    assert refused.code is Refusal.JOB_STATE
    assert refused.message.endswith("A job that waits is held instead.")
    history.settle()
    assert answer(history, ev.JobCheckpointRequested(job_id="train-7")).code is Refusal.JOB_STATE


def test_a_job_that_says_how_is_told_to_checkpoint() -> None:
    history = a_running_job(checkpoint=PLAN)
    assert answer(history, ev.JobCheckpointRequested(job_id="train-7", reason="before lunch")) == ev.JobCheckpointing(
        job_id=JOB, attempt=1, actor="tenant:acme", reason="before lunch", answers=1, caused_by="wish-1"
    )
    history.settle()
    history.wish(ev.JobSuspendRequested(job_id="train-7"))
    history.settle()
    assert answer(history, ev.JobCheckpointRequested(job_id="train-7")).found == "acme/train-7, which is suspended"
    silent = a_running_job()
    refused = answer(silent, ev.JobCheckpointRequested(job_id="train-7"))
    assert (refused.code, refused.found) == (Refusal.JOB_STATE, "acme/train-7, without checkpoint")


# --------------------------------------------------------------------------------------------------------------------
# All of them
# --------------------------------------------------------------------------------------------------------------------

OF_A_JOB: tuple[Any, ...] = (
    ev.JobCancelRequested(job_id="train-7"),
    ev.JobHoldRequested(job_id="train-7"),
    ev.JobReleaseRequested(job_id="train-7"),
    ev.JobReprioritizeRequested(job_id="train-7", priority=1),
    ev.JobPreemptRequested(job_id="train-7", reason="r"),
    ev.JobResizeRequested(job_id="train-7", gpu_milli=1),
    ev.JobSuspendRequested(job_id="train-7"),
    ev.JobResumeRequested(job_id="train-7"),
    ev.JobCheckpointRequested(job_id="train-7"),
)


@pytest.mark.parametrize("wish", OF_A_JOB, ids=lambda wish: type(wish).__name__)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_job_that_is_not_there_or_has_ended_takes_no_wish(wish: Any, dry_run: bool) -> None:
    """The same two codes whatever was wished, in earnest or not; and no tenant learns of another's jobs."""
    history = a_waiting_job()
    wish = msgspec.structs.replace(wish, dry_run=dry_run)
    assert answer(history, wish, tenant=TenantId("other")).code is Refusal.JOB_NOT_FOUND
    history.settle()
    operators = answer(history, wish, tenant=OPERATOR)
    assert (operators.code, operators.expected) == (Refusal.FIELD_INVALID, "<tenant>/<name>")
    history.settle()
    assert answer(history, wish, expires_at=NOON).code is Refusal.EXPIRED
    history.settle()
    history.run_to_end()
    # Its end is due and not stated yet: it is stated, and the wish finds a job that has ended.
    history.wish(wish)
    facts = history.settle()
    assert {type(fact) for fact in facts} == {ev.JobSucceeded, ev.WishJudged if dry_run else ev.WishRejected}
    assert answer(history, wish).code is Refusal.JOB_TERMINAL


@pytest.mark.parametrize(
    ("wish", "fact", "would"),
    [
        (
            OF_A_JOB[0],
            "JobStopping",
            ("1 run is told to stop, within a grace of 10 s.", "Then the job ends as cancelled."),
        ),
        (OF_A_JOB[1], "JobHeld", ("Its runs go on; once it waits again, it isn't placed until it is released.",)),
        (
            OF_A_JOB[3],
            "JobReprioritized",
            ("Its priority goes from 500 to 1.", "Its runs go on; it waits with the new one once it waits again."),
        ),
        (
            OF_A_JOB[4],
            "JobStopping",
            (
                "1 run is told to stop, within a grace of 10 s.",
                "Then the job waits for slices again; no retry is spent.",
            ),
        ),
        (
            OF_A_JOB[6],
            "JobSuspended",
            ("1 run is told to stand still, and keeps its slices; its time limit goes on.",),
        ),
        (
            OF_A_JOB[5],
            "JobResized",
            (
                "Its share of each device goes from 250 milli-GPU and 4096 MiB to 1 milli-GPU and 4096 MiB.",
                "1 run is told to stop, within a grace of 10 s.",
                "Then the job waits for slices of the new size; no retry is spent.",
            ),
        ),
    ],
)
def test_a_dry_run_says_what_would_follow_and_changes_nothing(wish: Any, fact: str, would: tuple[str, ...]) -> None:
    """Nobody has to find out by doing it."""
    history = a_running_job()
    before = msgspec.msgpack.encode(history.state.pool.jobs, order="deterministic")
    history.wish(msgspec.structs.replace(wish, dry_run=True))
    assert history.settle() == [
        ev.WishJudged(
            tenant=ACME,
            answers=1,
            wish_id="wish-1",
            wish_type=type(wish).__name__,
            verdict=Verdict.ACCEPTED,
            fact=fact,
            would=would,
            job_id=JOB,
            caused_by="wish-1",
        )
    ]
    assert msgspec.msgpack.encode(history.state.pool.jobs, order="deterministic") == before


@pytest.mark.parametrize("wish", OF_A_JOB, ids=lambda wish: type(wish).__name__)
def test_a_dry_run_meets_what_the_wishes_before_it_leave(wish: Any) -> None:
    """All of one decision: it sees the hold that was answered just before, and a later wish doesn't see it."""
    history = a_running_job(checkpoint=PLAN)
    if isinstance(wish, ev.JobResumeRequested):
        history.wish(ev.JobSuspendRequested(job_id="train-7"))
        history.settle()
    history.wish(ev.JobHoldRequested(job_id="train-7"))
    history.wish(msgspec.structs.replace(wish, dry_run=True))
    history.wish(wish)
    held, judged, done = history.decide()[:3]
    assert isinstance(held, ev.JobHeld)
    assert isinstance(judged, ev.WishJudged)
    assert (judged.verdict, judged.fact) == (Verdict.ACCEPTED, type(done).__name__)


def test_a_job_request_is_tried_with_the_very_rules_of_admission() -> None:
    """The specification as it would be, with its defaults."""
    history = History()
    history.fact(a_queue(limit_compute_milli=1000))
    history.wish(a_job_request(dry_run=True))
    assert history.settle() == [
        ev.WishJudged(
            tenant=ACME,
            answers=1,
            wish_id="wish-1",
            wish_type="JobRequested",
            verdict=Verdict.ACCEPTED,
            fact="JobAdmitted",
            would=(
                "It is admitted to queue main, and waits for 250 milli-GPU and 4096 MiB of a device.",
                "Runs of the queue hold 0 of 1000 milli-GPU now.",
            ),
            job_id=JOB,
            spec=a_spec(),
            caused_by="wish-1",
        )
    ]
    assert history.state.pool.jobs == {}
    history.wish(a_job_request(queue="nowhere", dry_run=True))
    (judged,) = history.settle()
    assert isinstance(judged, ev.WishJudged)
    assert (judged.verdict, judged.code, judged.field) == (Verdict.REJECTED, Refusal.QUEUE_NOT_FOUND, "queue")
    assert judged.message


def test_a_dry_run_takes_no_identity_from_the_request_that_follows_it() -> None:
    """Trying and then asking with the same key is what a careful publisher does."""
    history = History()
    history.fact(a_queue())
    request = a_job_request(idempotency_key="k")
    history.wish(msgspec.structs.replace(request, dry_run=True), event_id="e")
    history.wish(request, event_id="e")
    assert [type(fact) for fact in history.settle()] == [ev.WishJudged, ev.JobAdmitted]
    history.wish(msgspec.structs.replace(request, dry_run=True), event_id="e")
    history.wish(msgspec.structs.replace(request, dry_run=True, priority=1), event_id="f")
    repeat, other = history.settle()
    assert isinstance(repeat, ev.WishJudged)
    assert isinstance(other, ev.WishJudged)
    assert (repeat.fact, repeat.job_id) == ("JobDuplicate", JOB)
    assert (other.code, other.field) == (Refusal.IDEMPOTENCY_CONFLICT, "idempotency_key")
    restored = core.restore(core.snapshot(history.state))
    assert core.snapshot(restored) == core.snapshot(history.state)


def test_a_dry_run_of_a_queue_says_what_would_be_another() -> None:
    """Limits are changed in the morning, and regretted in the afternoon."""
    history = a_waiting_job()
    wish = ev.QueueUpsertRequested(queue="main", tenants=("acme",), limit_jobs=5, dry_run=True)
    judged = answer(history, wish, tenant=OPERATOR)
    assert judged.would == ("Its tenants go from acme, other to acme.", "Its limit_jobs goes from none to 5.")
    assert (judged.verdict, judged.fact) == (Verdict.ACCEPTED, "QueueUpserted")


def test_a_gang_that_no_batch_could_place_is_refused() -> None:
    """All replicas are placed by one batch of facts, which the bus bounds."""
    history = History()
    history.fact(a_queue())
    history.wish(a_job_request(gang=ev.Gang(size=901)))
    history.wish(a_job_request(job_id="fits", gang=ev.Gang(size=900)))
    refused, admitted = history.decide()
    assert isinstance(refused, ev.JobRejected)
    assert (refused.code, refused.field, refused.found) == (Refusal.FIELD_INVALID, "gang.size", "901")
    assert isinstance(admitted, ev.JobAdmitted)
