"""Why a job waits, as people and programs are told when they ask."""

import msgspec

from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, Pending
from apportion.contracts.ids import JobId, NodeId, agent_author
from apportion.contracts.testing import NOON, a_device, a_job, a_node, a_placement, a_queue, as_fact
from apportion.placer.state import S
from apportion.placer.why import Change, Why, why
from apportion.pool.state import JobState, Pool, evolve


def told(*facts: ev.Fact) -> Pool:
    """The pool after these facts."""
    pool = Pool()
    for seq, fact in enumerate(facts, 1):
        author = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else ""
        pool = evolve(pool, as_fact(fact, seq, author=author))
    return pool


def asked(pool: Pool, job: str = "acme/train-7") -> Why:
    """The answer, having checked that asking changed nothing."""
    before = msgspec.msgpack.encode(pool, order="deterministic")
    found = why(pool, JobId(job), NOON + 60 * S)
    assert found is not None
    assert msgspec.msgpack.encode(pool, order="deterministic") == before
    return found


def test_a_blocked_job_is_told_who_holds_what_it_needs_and_what_would_help() -> None:
    """The whole answer, word for word."""
    old = msgspec.structs.replace(a_node("node-2"), devices=(a_device(node="node-2", model="a100-80"),))
    pool = told(
        a_queue(),
        a_node("node-1", devices=1),
        old,
        a_job("first", compute_milli=800),
        a_placement("acme/first", compute_milli=800),
        a_job(compute_milli=400, models=("h100-80",)),
    )
    found = asked(pool)
    assert (found.code, found.waiting_s, found.ahead, found.could_start) == (Pending.INSUFFICIENT_COMPUTE, 60, 0, True)
    assert found.changes == (
        Change(constraint="models", asked="h100-80", instead="any model", starts_now=True, could_start=True),
        Change(constraint="compute_milli", asked="400", instead="200", starts_now=True, could_start=True),
        Change(constraint="memory_mib", asked="4096", instead="2048", starts_now=False, could_start=True),
    )
    assert found.text == (
        "acme/train-7 has waited 60 s with 0 before it, and asks for devices 1, compute_milli 400, memory_mib 4096 "
        "(InsufficientCompute). Where the memory is free, too little compute is (at most 200 milli-GPU on one device): "
        "it starts when runs end, or with a smaller share. In its way: acme/first. "
        "Nodes: 1 InsufficientCompute, 1 NoMatchingDevice. "
        "It would start now with models any model (not h100-80), or compute_milli 200 (not 400). "
        "When it may start, nobody can say: the runs in its way have no time limit, and too few like them ended."
    )


def test_a_held_job_is_told_who_holds_it() -> None:
    """Nothing that it could ask otherwise would help."""
    hold = ev.JobHeld(job_id=JobId("acme/train-7"), actor="tenant:acme (ann)", reason="data is late", answers=1)
    found = asked(told(a_queue(), a_node(), a_job(), hold))
    assert (found.code, found.changes) == (Pending.HELD, ())
    assert found.text == (
        "acme/train-7 is not placed. Held by tenant:acme (ann): data is late. It can be placed once it is released."
    )


def test_what_could_never_start_says_so() -> None:
    """Waiting is no answer then."""
    found = asked(told(a_queue(), a_node(), a_job(mode=Mode.MIG)))
    assert (found.code, found.could_start) == (Pending.ISOLATION_UNAVAILABLE, False)
    assert found.changes[0] == Change(
        constraint="mode", asked="mig", instead="any mode", starts_now=True, could_start=True
    )


def test_a_queue_at_its_limit_is_the_queues_matter() -> None:
    """Asking for less may help; a higher limit does."""
    pool = told(a_queue(limit_jobs=1), a_node(), a_job("first"), a_placement("acme/first"), a_job())
    found = asked(pool)
    assert (found.code, found.blocking_ids) == (Pending.WAITING_FOR_QUOTA, ("acme/first",))
    assert [change.constraint for change in found.changes if change.starts_now] == ["queue_limit"]


def test_jobs_before_it_are_counted() -> None:
    """By the order in which they are placed, not by age."""
    pool = told(a_queue(), a_job("last", priority=1), a_job("first"), a_job())
    assert asked(pool).ahead == 1
    assert asked(pool, "acme/last").ahead == 2


def test_one_that_fits_or_runs_or_comes_later_says_that() -> None:
    """Each in a sentence."""
    later = NOON + 90 * S
    pool = told(
        a_queue(), a_node(), a_job("runs"), a_placement("acme/runs"), a_job("fits"), a_job("later", not_before_at=later)
    )
    assert asked(pool, "acme/runs").text == "acme/runs does not wait: it has its slices on node-1."
    assert asked(pool, "acme/runs").state is JobState.RUNNING
    assert asked(pool, "acme/fits").text == "acme/fits fits and is placed next."
    assert asked(pool, "acme/later").text.startswith("acme/later waits for 30 s more.")
    assert why(pool, JobId("acme/nobody"), NOON) is None
    assert NodeId("node-1") in pool.nodes
