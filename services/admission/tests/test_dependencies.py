"""Jobs that follow others: they wait until those ended as demanded, and fail with the reason where that can't come."""

from typing import Any

import pytest

from apportion.admission.testing import History
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal, RunCause
from apportion.contracts.events import Dependency, DependencyCondition
from apportion.contracts.ids import JobId
from apportion.contracts.testing import a_job_request, a_node, a_queue

FIRST, SECOND = JobId("acme/first"), JobId("acme/second")
SUCCEEDED, FAILED, ENDED = DependencyCondition


def a_pool() -> History:
    history = History()
    history.fact(a_queue())
    history.fact(a_node())
    return history


def ask(history: History, name: str, *after: Dependency) -> list[ev.Fact]:
    history.wish(a_job_request(job_id=name, depends_on=after))
    return history.settle()


def end(history: History, cause: RunCause = RunCause.SUCCESS) -> list[ev.Fact]:
    """The first job runs, and ends so."""
    history.run_to_end(FIRST, cause)
    return history.settle()


def only_rejected(facts: list[ev.Fact]) -> ev.JobRejected:
    (fact,) = facts
    assert isinstance(fact, ev.JobRejected)
    return fact


def test_a_job_waits_for_those_that_have_not_ended() -> None:
    """Whom it follows stands in its specification; whom it waits for, in the fact that let it in."""
    history = a_pool()
    ask(history, "first")
    (admitted,) = ask(history, "second", Dependency(job_id="first"))
    assert isinstance(admitted, ev.JobAdmitted)
    assert admitted.waits_for == (FIRST,)
    assert admitted.spec.depends_on == (ev.DependsOn(job_id=FIRST),)
    assert [type(fact) for fact in end(history)] == [ev.JobSucceeded]
    assert history.state.pool.jobs[SECOND].waits_for == ()


@pytest.mark.parametrize(
    ("condition", "cause", "is_met"),
    [
        (SUCCEEDED, RunCause.SUCCESS, True),
        (SUCCEEDED, RunCause.USER_ERROR, False),
        (FAILED, RunCause.USER_ERROR, True),
        (FAILED, RunCause.SUCCESS, False),
        (ENDED, RunCause.SUCCESS, True),
        (ENDED, RunCause.USER_ERROR, True),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_how_the_other_must_have_ended(
    condition: DependencyCondition, cause: RunCause, is_met: bool, is_late: bool
) -> None:
    """A job that can never run ends with the reason; where that is known at once, it isn't let in."""
    history = a_pool()
    ask(history, "first")
    dependency = Dependency(job_id="first", condition=condition)
    if is_late:
        end(history, cause)
        (answer,) = ask(history, "second", dependency)
        if is_met:
            assert isinstance(answer, ev.JobAdmitted)
            assert answer.waits_for == ()
        else:
            assert isinstance(answer, ev.JobRejected)
            assert (answer.code, answer.field) == (Refusal.DEPENDENCY_FAILED, "depends_on[0]")
            assert "acme/first, which ended by" in answer.found
        return
    ask(history, "second", dependency)
    ends = [fact for fact in end(history, cause) if isinstance(fact, ev.TERMINAL) and fact.job_id == SECOND]
    if is_met:
        assert ends == []
        assert history.state.pool.jobs[SECOND].waits_for == ()
    else:
        (failed,) = ends
        assert isinstance(failed, ev.JobFailed)
        assert (failed.cause, failed.attempts, failed.run_id) == (RunCause.DEPENDENCY_FAILED, 0, None)
        assert str(FIRST) in failed.reason


def test_a_chain_falls_link_by_link() -> None:
    """Each link names the one before it, so that who looks at the last finds the first."""
    history = a_pool()
    ask(history, "first")
    ask(history, "second", Dependency(job_id="first"))
    ask(history, "third", Dependency(job_id="second"))
    history.wish(ev.JobCancelRequested(job_id="first"))
    said = history.settle()
    assert [(type(fact).__name__, getattr(fact, "job_id", "")) for fact in said] == [
        ("JobCancelled", FIRST),
        ("JobFailed", SECOND),
        ("JobFailed", JobId("acme/third")),
    ]


def test_all_of_several_have_to_end() -> None:
    """One of two leaves it waiting for the other."""
    history = a_pool()
    ask(history, "first")
    ask(history, "other")
    ask(history, "second", Dependency(job_id="first"), Dependency(job_id="other", condition=ENDED))
    end(history)
    assert history.state.pool.jobs[SECOND].waits_for == ("acme/other",)
    history.wish(ev.JobCancelRequested(job_id="other"))
    history.settle()
    assert history.state.pool.jobs[SECOND].waits_for == ()


@pytest.mark.parametrize(
    ("name", "after", "code"),
    [
        ("second", ("nobody",), Refusal.JOB_NOT_FOUND),
        ("second", ("second",), Refusal.FIELD_CONFLICT),
        ("second", ("first", "first"), Refusal.FIELD_CONFLICT),
    ],
)
def test_only_other_jobs_that_were_asked_for_before_can_be_followed(
    name: str, after: tuple[str, ...], code: Refusal
) -> None:
    """So no job waits for itself, however long the circle: the first of it would have to come after the last."""
    history = a_pool()
    ask(history, "first")
    rejected = only_rejected(ask(history, name, *(Dependency(job_id=each) for each in after)))
    assert (rejected.code, rejected.field) == (code, f"depends_on[{len(after) - 1}].job_id")


def test_jobs_of_one_round_can_follow_each_other() -> None:
    """A publisher sends its chain at once; nobody makes it wait between the links."""
    history = a_pool()
    history.wish(a_job_request(job_id="first"))
    history.wish(a_job_request(job_id="second", depends_on=(Dependency(job_id="first"),)))
    history.wish(ev.JobCancelRequested(job_id="first"))
    history.wish(a_job_request(job_id="third", depends_on=(Dependency(job_id="first"),)))
    assert [type(fact).__name__ for fact in history.settle()] == [
        "JobAdmitted",
        "JobAdmitted",
        "JobCancelled",
        "JobRejected",
        "JobFailed",
    ]


def test_another_tenants_job_is_not_found() -> None:
    """Who asks can't learn whether it is there."""
    history = History()
    history.fact(a_queue(tenants=("acme", "other")))
    ask(history, "first")
    changes: dict[str, Any] = {"tenant": "other"}
    history.wish(a_job_request(job_id="second", depends_on=(Dependency(job_id="first"),)), **changes)
    assert only_rejected(history.settle()).code is Refusal.JOB_NOT_FOUND


def test_a_deadline_ends_a_job_that_still_waits_for_another() -> None:
    """Waiting for a job that never ends is no way around one's own deadline."""
    history = a_pool()
    ask(history, "first")
    history.wish(
        a_job_request(job_id="second", depends_on=(Dependency(job_id="first"),), deadline="2026-09-01T13:00:00Z")
    )
    history.settle()
    (expired,) = history.settle(history.state.pool.jobs[SECOND].spec.deadline_at)
    assert isinstance(expired, ev.JobExpired)
