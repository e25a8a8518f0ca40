"""Elastic gangs: they start with what there is, grow where nobody waits, and shrink instead of being preempted."""

from typing import Any

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, PreemptionKind, RunCause, ServiceClass, StopCause
from apportion.contracts.ids import JobId, NodeId, QueueId, RunId
from apportion.contracts.testing import a_job, a_node, a_queue
from apportion.placer import core

from .test_preempt import ONLINE, WHOLE, Pool, names, placed, preemption

BATCH: dict[str, Any] = WHOLE | {"service_class": ServiceClass.BATCH}


def elastic(least: int, most: int, step: int = 1, **spec: Any) -> dict[str, Any]:
    return BATCH | {"replicas_min": least, "replicas": most, "replicas_step": step} | spec


def resized(facts: list[ev.Fact]) -> list[tuple[str, int, int]]:
    return [(fact.job_id, fact.before, fact.after) for fact in facts if isinstance(fact, ev.GangResized)]


def stopped(facts: list[ev.Fact]) -> list[str]:
    return [fact.run_id for fact in facts if isinstance(fact, ev.RunStopOrdered)]


def members(pool: Pool, job: str) -> list[str]:
    return [run.run_id for run in pool.state.pool.jobs[JobId(f"acme/{job}")].members()]


def test_it_starts_with_what_there_is_and_at_least_with_its_least() -> None:
    """Three devices: three of two to four replicas; with one device it waits, and says for two."""
    pool = Pool(a_node("node-1", devices=3))
    pool.runs("e", **elastic(2, 4))
    assert members(pool, "e") == ["acme/e/0/1", "acme/e/1/1", "acme/e/2/1"]
    pool = Pool(a_node("node-1", devices=1))
    pool.tell(a_job("e", **elastic(2, 4)))
    [wait] = [fact for fact in pool.decide() if isinstance(fact, ev.JobPendingReasonChanged)]
    assert wait.code is Pending.GANG_INCOMPLETE
    assert wait.requested["replicas"] == 2


def test_others_start_before_it_grows() -> None:
    """Who waits goes first, though the gang came before: it gets the rest."""
    pool = Pool(a_node("node-1", devices=4))
    pool.tell(a_job("e", **elastic(1, 4)), a_job("x", **BATCH))
    assert sorted(placed(pool.decide())) == ["acme/e", "acme/e", "acme/e", "acme/x"]


def test_it_grows_by_its_step_when_room_comes_and_says_so() -> None:
    """What ended made room for one, which is no step of two; then for two."""
    pool = Pool(a_node("node-1", devices=5))
    for name in ("a", "b"):
        pool.runs(name, **BATCH)
    pool.runs("e", **elastic(2, 6, step=2))
    assert len(members(pool, "e")) == 2
    pool.runs_end("acme/a")
    facts = pool.decide()
    assert resized(facts) == [("acme/e", 2, 4)]
    assert placed(facts) == ["acme/e", "acme/e"]
    [fact] = [fact for fact in facts if isinstance(fact, ev.GangResized)]
    assert fact.runs == ("acme/e/2/1", "acme/e/3/1")
    pool.runs_end("acme/b")
    assert pool.decide() == [], "one device is no step"


def test_it_shrinks_instead_of_being_preempted() -> None:
    """A job of its own class, which could stop nobody, has back what is on loan; the last replica leaves first."""
    pool = Pool(a_node("node-1", devices=4))
    pool.runs("e", **elastic(2, 4, preemptible=False))
    pool.tell(a_job("x", **BATCH))
    facts = pool.decide()
    decided = preemption(facts)
    assert (decided.kind, names(decided.victims)) == (PreemptionKind.SHRINK, ["e"])
    assert stopped(facts) == ["acme/e/3/1"]
    assert [fact.cause for fact in facts if isinstance(fact, ev.RunStopOrdered)] == [StopCause.SHRUNK]
    assert resized(facts) == [("acme/e", 4, 3)]
    [fact] = [fact for fact in facts if isinstance(fact, ev.GangResized)]
    assert fact.for_job == "acme/x"
    node = NodeId("node-1")
    run = RunId("acme/e/3/1")
    pool.tell(ev.RunFinished(run_id=run, node_id=node, cause=RunCause.SHRUNK, finished_at=pool.now))
    assert pool.decide() == [], "what has not left yet is nobody's"
    pool.tell(ev.RunReleased(run_id=run, node_id=node, released_at=pool.now))
    assert placed(pool.decide()) == ["acme/x"]
    pool.runs_end("acme/x")
    facts = pool.decide()
    assert resized(facts) == [("acme/e", 3, 4)]
    assert members(pool, "e")[-1] == "acme/e/4/1", "no number is used twice"


def test_its_least_is_not_on_loan_and_a_later_class_has_none_of_it() -> None:
    """Two at least: one of three may go and no second; nobody shrinks for a class that comes later."""
    pool = Pool(a_node("node-1", devices=3))
    pool.runs("e", **elastic(2, 3, service_class=ServiceClass.STANDARD, preemptible=False))
    pool.tell(a_job("big", **(WHOLE | {"replicas": 2, "service_class": ServiceClass.STANDARD})))
    assert stopped(pool.decide()) == []
    pool.tell(a_job("later", **BATCH))
    assert stopped(pool.decide()) == []
    pool.tell(a_job("equal", **(WHOLE | {"service_class": ServiceClass.STANDARD})))
    assert stopped(pool.decide()) == ["acme/e/2/1"]


def test_whole_gangs_are_stopped_only_where_shrinking_is_not_enough() -> None:
    """An online job that needs three of three has the gang of two to three stopped whole."""
    pool = Pool(a_node("node-1", devices=3))
    pool.runs("e", **elastic(2, 3))
    pool.tell(a_job("small", **ONLINE))
    decided = preemption(pool.decide())
    assert decided.kind is PreemptionKind.SHRINK
    pool = Pool(a_node("node-1", devices=3))
    pool.runs("e", **elastic(2, 3))
    pool.tell(a_job("large", **(ONLINE | {"devices": 3})))
    decided = preemption(pool.decide())
    assert (decided.kind, len(decided.runs)) == (PreemptionKind.PRIORITY, 3)


def test_quota_follows_and_is_given_back_as_well() -> None:
    """A queue's limit bounds growth, and who waits for the quota has it back."""
    pool = Pool(a_node("node-1", devices=6))
    pool.tell(a_queue(limit_compute_milli=4_000))
    pool.runs("e", **elastic(1, 6))
    assert len(members(pool, "e")) == 4
    pool.tell(a_job("x", **(BATCH | {"replicas": 2})))
    facts = pool.decide()
    assert resized(facts) == [("acme/e", 4, 2)]
    [wait] = [fact for fact in facts if isinstance(fact, ev.JobPendingReasonChanged)]
    assert wait.code is Pending.WAITING_FOR_QUOTA
    pool.leaves(preemption(facts).runs)
    facts = pool.decide()
    assert placed(facts) == ["acme/x", "acme/x"]
    assert pool.state.pool.queues[QueueId("main")].used["compute_milli"] == 4_000


def test_a_gang_that_is_about_to_end_does_not_grow() -> None:
    """One replica has done its part: whatever becomes free is of no use to the others."""
    pool = Pool(a_node("node-1", devices=4))
    pool.runs("a", **BATCH)
    pool.runs("e", **elastic(2, 4))
    run = RunId("acme/e/0/1")
    done = ev.RunFinished(run_id=run, node_id=NodeId("node-1"), cause=RunCause.SUCCESS, finished_at=pool.now)
    pool.tell(done, ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=pool.now))
    pool.runs_end("acme/a")
    assert pool.decide() == []


def test_what_was_added_to_an_attempt_that_had_ended_is_stopped() -> None:
    """Growth was on its way as the attempt ended: the next attempt waits, and the stray is told to leave."""
    pool = Pool(a_node("node-1", devices=4))
    pool.runs("e", **elastic(2, 2))
    job = pool.state.pool.jobs[JobId("acme/e")]
    pool.leaves([run.run_id for run in job.runs.values()])
    pool.tell(ev.JobRequeued(job_id=job.job_id, attempt=2, cause=RunCause.PREEMPTED, retries_left=0))
    pool.tell(ev.JobHeld(job_id=job.job_id, actor="user:eva", answers=1))
    device = a_node("node-1").devices[0].uuid
    piece = ev.Slice(device_uuid=device, compute_milli=1000, memory_mib=81_920, mode="exclusive")  # type: ignore[arg-type]
    pool.tell(
        ev.RunPlaced(
            run_id=RunId("acme/e/2/1"),
            job_id=job.job_id,
            tenant=job.tenant,
            node_id=NodeId("node-1"),
            node_epoch=pool.state.pool.nodes[NodeId("node-1")].epoch,
            queue=job.spec.queue,
            slices=(piece,),
            command=("x",),
        )
    )
    assert pool.state.pool.jobs[job.job_id].state == "queued"
    assert stopped(pool.decide()) == ["acme/e/2/1"]
    assert core.restore(core.snapshot(pool.state)).kept == pool.state.kept
