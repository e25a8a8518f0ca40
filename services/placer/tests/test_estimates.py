"""When a waiting job may start: what time limits and earlier runs tell, and nothing that nobody can know."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, RunCause, StopCause, WorkloadKind
from apportion.contracts.ids import JobId, NodeId, RunId, TenantId, agent_author
from apportion.contracts.testing import ACME, NOON, a_job, a_node, a_placement, a_queue, as_fact
from apportion.placer import core
from apportion.placer.durations import SAMPLES_MAX, SORTS_MAX, Durations, expected, note
from apportion.placer.state import S, State
from apportion.placer.why import why_in

WHOLE: dict[str, Any] = {"compute_milli": 1000, "memory_mib": 0, "mode": Mode.EXCLUSIVE}


def told(*facts: tuple[int, ev.Fact] | ev.Fact) -> State:
    """The state after these facts, each at noon or at so many seconds after it."""
    state = core.initial()
    for seq, each in enumerate(facts, 1):
        after_s, fact = each if isinstance(each, tuple) else (0, each)
        author = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else ""
        state = core.evolve(state, as_fact(fact, seq, author=author, at=NOON + after_s * S))
    return state


def held(name: str, device: int, limit_s: int, node: str = "node-1") -> list[ev.Fact]:
    """A job with a whole device and this time limit."""
    return [
        a_job(name, time_limit_s=limit_s, **WHOLE),
        a_placement(
            f"acme/{name}", node=node, device=device, compute_milli=1000, memory_mib=81_920, mode=Mode.EXCLUSIVE
        ),
    ]


def ended(name: str, took_s: int) -> list[tuple[int, ev.Fact]]:
    """A job that ran for so long and is over."""
    placed = a_placement(f"acme/{name}")
    node, run = placed.node_id, placed.run_id
    return [
        (0, a_job(name)),
        (0, placed),
        (0, ev.RunStarted(run_id=run, node_id=node, pid=1, started_at=NOON)),
        (took_s, ev.RunFinished(run_id=run, node_id=node, cause=RunCause.SUCCESS, finished_at=NOON)),
        (took_s, ev.RunReleased(run_id=run, node_id=node, released_at=NOON)),
        (took_s, ev.JobSucceeded(job_id=placed.job_id, attempts=1, wait_ms=0, run_ms=took_s * 1000)),
    ]


def stated(state: State, job: str = "acme/train-7", after_s: int = 0) -> tuple[int, int]:
    """The range that the fact states, in seconds after noon; 0 where it states none."""
    (fact,) = [
        fact
        for fact in core.decide(state, NOON + after_s * S)
        if isinstance(fact, ev.JobPendingReasonChanged) and fact.job_id == job
    ]
    low, high = fact.start_low_at, fact.start_high_at
    return (low and (low - NOON) // S, high and (high - NOON) // S)


def test_time_limits_bound_the_wait() -> None:
    """Any moment, as nobody knows how long such runs take; and by the end of the shorter limit at the latest."""
    state = told(a_queue(), a_node(), *held("long", 0, 900), *held("short", 1, 300), a_job(**WHOLE))
    assert stated(state, after_s=10) == (10, 300)
    answer = why_in(state, JobId("acme/train-7"), NOON + 10 * S)
    assert answer is not None
    assert answer.text.endswith("It may start at any moment, and in 4 min at the latest (by time limits).")
    both = told(a_queue(), a_node(), *held("long", 0, 900), *held("short", 1, 300), a_job(**{**WHOLE, "devices": 2}))
    assert stated(both, after_s=10) == (10, 900)


def test_runs_that_ended_tell_how_long_such_runs_take() -> None:
    """The quarter that was done soonest gives the low end, the longest of them the high end."""
    history = [fact for at, took in enumerate((40, 60, 80, 100)) for fact in ended(f"old-{at}", took)]
    state = told(
        a_queue(), a_node(devices=1), *history, *[(100, each) for each in held("now", 0, 0)], (100, a_job(**WHOLE))
    )
    assert stated(state, after_s=110) == (100 + 60, 100 + 100)
    overdue = stated(state, after_s=250)
    assert overdue == (250, 0), "one that ran longer than any before it is no longer to be judged by them"


def test_without_limits_and_history_nobody_can_say() -> None:
    """No number is better than one that means nothing."""
    state = told(a_queue(), a_node(devices=1), *held("now", 0, 0), a_job(**WHOLE))
    assert stated(state) == (0, 0)


def test_a_run_that_is_being_stopped_ends_within_its_grace() -> None:
    """Its grace is the longest that it takes."""
    facts = held("now", 0, 0)
    stop = ev.RunStopOrdered(
        run_id=RunId("acme/now/0/1"), node_id=NodeId("node-1"), cause=StopCause.CANCELLED, grace_s=10, actor="user:eva"
    )
    stopping = ev.JobStopping(job_id=JobId("acme/now"), attempt=1, cause=StopCause.CANCELLED, actor="user:eva")
    state = told(a_queue(), a_node(devices=1), *facts, stopping, stop, a_job(**WHOLE))
    assert stated(state) == (0, 10)


def test_a_queue_at_its_limit_waits_for_its_own_runs() -> None:
    """Free devices elsewhere change nothing."""
    queue = a_queue(limit_jobs=1)
    state = told(queue, a_node(), *held("now", 0, 60), a_job(**WHOLE))
    assert stated(state, after_s=5) == (5, 60)


def test_those_behind_the_first_are_told_the_soonest_alone() -> None:
    """When they go depends on when the first does."""
    state = told(a_queue(), a_node(devices=1), *held("now", 0, 60), a_job("first", **WHOLE), a_job("second", **WHOLE))
    assert stated(state, "acme/first", after_s=1) == (1, 60)
    assert stated(state, "acme/second", after_s=1) == (1, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=2, max_size=6), st.integers(1, 6))
def test_the_job_fits_once_the_runs_have_ended_by_their_limits(limits: list[int], devices: int) -> None:
    """The high end is when it would be placed if everybody took all of their time; before it, it would not."""
    devices = min(devices, len(limits))
    facts: list[ev.Fact] = [a_queue(), a_node(devices=len(limits))]
    for at, limit in enumerate(limits):
        facts += held(f"job-{at}", at, limit)
    asked = {**WHOLE, "devices": devices}
    _, high = stated(told(*facts, a_job(**asked)))
    assert high == sorted(limits)[devices - 1]

    def after(second: int) -> list[ev.Fact]:
        gone = [at for at, limit in enumerate(limits) if limit <= second]
        releases = [
            ev.RunReleased(run_id=RunId(f"acme/job-{at}/0/1"), node_id=NodeId("node-1"), released_at=NOON)
            for at in gone
        ]
        return core.decide(told(*facts, a_job(**asked), *releases), NOON)

    assert any(isinstance(fact, ev.RunPlaced) for fact in after(high))
    assert not any(isinstance(fact, ev.RunPlaced) for fact in after(high - 1))


def test_what_is_remembered_of_runs_is_bounded() -> None:
    """However many tenants there are, and however long the pool runs."""
    durations = Durations()
    for at in range(SORTS_MAX + 50):
        for took in range(3):
            note(durations, TenantId(f"t-{at}"), WorkloadKind.BATCH, took)
    assert len(durations.seen) == SORTS_MAX
    assert all(len(samples.seconds) <= SAMPLES_MAX for samples in durations.seen.values())
    assert expected(durations, TenantId("t-0"), WorkloadKind.BATCH) == (0, 2), "everybody's, once its own are forgotten"
    assert expected(durations, ACME, WorkloadKind.TRAINING) is None
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(durations, order="deterministic"), type=Durations)
    for each in (durations, again):
        note(each, ACME, WorkloadKind.HPC, 1)
    assert again == durations, "a restart changes nothing of what is forgotten next"
