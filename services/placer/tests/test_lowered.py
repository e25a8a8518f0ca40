"""Limits of tenants, and what becomes of runs beyond a limit that is set below what is held."""

from typing import Any

import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import OnLowered, Pending, ServiceClass, StopCause
from apportion.contracts.ids import JobId, QueueId, RunId, TenantId
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, a_queue
from apportion.placer import core
from apportion.placer.orders import S
from apportion.placer.why import why
from services.placer.tests.test_decide import also_told, placements, reasons, settled, told
from services.placer.tests.test_elastic import elastic, members, resized
from services.placer.tests.test_preempt import ONLINE, SPOT, Pool, names

LATER = NOON + 60 * S
BY_ANN: dict[str, Any] = {"actor": "operator (user:ann)", "reason": "quarter 3"}


def a_policy(tenant: str = "acme", **fields: Any) -> ev.PolicyUpserted:
    return ev.PolicyUpserted(for_tenant=TenantId(tenant), answers=0, **BY_ANN, **fields)


def running(*jobs: str, queue: str = "main", at: int = NOON, **spec: Any) -> list[ev.Fact]:
    """Jobs that hold 500 milli-GPU and 1000 MiB each."""
    facts: list[ev.Fact] = []
    for number, name in enumerate(jobs):
        facts.append(a_job(name, queue=QueueId(queue), compute_milli=500, memory_mib=1000, **spec))
        facts.append(a_placement(f"acme/{name}", device=number % 2, compute_milli=500, memory_mib=1000))
    return facts


def stopped(facts: list[ev.Fact]) -> list[str]:
    assert all(isinstance(fact, ev.RunStopOrdered) for fact in facts)
    return [fact.run_id.split("/")[1] for fact in facts if isinstance(fact, ev.RunStopOrdered)]


@pytest.mark.parametrize(
    ("limit", "fit"),
    [
        ({"limit_compute_milli": 1000}, 2),
        ({"limit_memory_mib": 3_500}, 3),
        ({"limit_cpu_milli": 2_000}, 2),
        ({"limit_jobs": 1}, 1),
        ({"limit_model_milli": {"h100-80": 500}}, 1),
        ({}, 4),
    ],
)
def test_a_tenant_holds_no_more_than_it_may_in_all_queues_together(limit: dict[str, Any], fit: int) -> None:
    """Whichever queues it submits to; another tenant of the same queues goes on."""
    queues = [a_queue(name, tenants=("acme", "beta"), is_fair=name == "a") for name in ("a", "b")]
    spec: dict[str, Any] = {"compute_milli": 500, "memory_mib": 1000, "cpu_milli": 1000}
    jobs = [
        a_job(f"j{number}", tenant=TenantId(tenant), queue=QueueId("ab"[number % 2]), **spec)
        for number in range(4)
        for tenant in ("acme", "beta")
    ]
    state = told(a_node(devices=8, cpu_milli=64_000), *queues, a_policy(**limit), *jobs)
    facts = settled(state)
    assert sum(run.startswith("acme/") for run, _, _ in placements(facts)) == fit
    assert sum(run.startswith("beta/") for run, _, _ in placements(facts)) == 4
    assert set(reasons(facts).values()) == ({Pending.WAITING_FOR_QUOTA} if fit < 4 else set())


def test_the_reason_names_the_tenant_and_why_says_what_would_help() -> None:
    """It is no queue that is full, and whoever reads it has to ask for another limit."""
    state = told(a_queue(), a_node(), a_policy(limit_compute_milli=500), *running("first"), a_job("second"))
    (waits,) = settled(state)
    assert isinstance(waits, ev.JobPendingReasonChanged)
    assert (waits.limit, waits.blocking_ids) == ({"compute_milli": 500}, ("acme/first",))
    assert waits.hint.startswith("Tenant acme is at its limit of compute_milli (500 of 500 in use)")
    found = why(state.pool, JobId("acme/second"), NOON)
    assert found is not None
    assert (found.changes[0].constraint, found.changes[0].starts_now) == ("tenant_limit", True)
    also_told(state, a_policy(limit_compute_milli=1000))
    assert placements(settled(state)) == [("acme/second/0/1", "node-1", "GPU-node-1-0")]


def test_a_policy_without_limits_ends_them() -> None:
    """A policy says all of itself."""
    state = told(a_queue(), a_node(), a_policy(limit_jobs=1), *running("first"), a_job("second"))
    also_told(state, a_policy(rate_per_min=5))
    assert len(placements(settled(state))) == 1


def test_a_lowered_limit_stops_nobody_unless_it_says_so() -> None:
    """What runs, runs on; nothing more is placed until enough of it has ended."""
    state = told(a_queue(), a_node(), *running("a", "b"), a_queue(limit_compute_milli=500))
    assert core.decide(state, LATER) == []
    assert core.wake_at(state, NOON) is None


@pytest.mark.parametrize(
    "lowered",
    [
        a_queue(
            limit_compute_milli=1000, on_lowered=OnLowered.RECLAIM, actor="operator (user:ann)", reason="quarter 3"
        ),
        a_queue(limit_jobs=2, on_lowered=OnLowered.RECLAIM, actor="operator (user:ann)", reason="quarter 3"),
        a_policy(limit_memory_mib=2_500, on_lowered=OnLowered.RECLAIM),
        a_policy(limit_model_milli={"h100-80": 1100}, on_lowered=OnLowered.RECLAIM),
    ],
)
def test_as_many_are_stopped_as_are_too_many(lowered: ev.QueueUpserted | ev.PolicyUpserted) -> None:
    """The lowest class, then the newest; with the actor and the reason of whoever lowered it; and then silence."""
    state = told(a_queue(), a_node(), *running("old"), *running("spot", service_class=ServiceClass.SPOT))
    also_told(state, *running("new"), at=NOON + S)
    also_told(state, *running("online", service_class=ServiceClass.ONLINE, preemptible=False), at=NOON + 2 * S)
    also_told(state, lowered)
    facts = settled(state, LATER)
    assert stopped(facts) == ["spot", "new"]
    for fact in facts:
        assert isinstance(fact, ev.RunStopOrdered)
        assert (fact.cause, fact.actor) == (StopCause.PREEMPTED, "operator (user:ann)")
        assert "holds" in fact.reason
        assert fact.reason.endswith("takes back what is beyond: quarter 3")


def test_whoever_did_not_agree_to_be_stopped_stays() -> None:
    """Even where that leaves the queue above its limit."""
    state = told(a_queue(), a_node(), *running("a", "b", preemptible=False))
    also_told(state, a_queue(limit_jobs=0, on_lowered=OnLowered.RECLAIM))
    assert core.decide(state, LATER) == []


def test_protected_time_is_waited_for() -> None:
    """And the service wakes up for its end."""
    state = told(a_queue(), a_node(), *running("a", "b"), a_queue(limit_jobs=1, on_lowered=OnLowered.RECLAIM))
    assert core.decide(state, NOON) == []
    at = core.wake_at(state, NOON)
    assert at == NOON + 5 * S
    assert stopped(settled(state, at)) == ["a"]


def test_what_is_leaving_already_counts_as_gone() -> None:
    """Nobody is stopped for what somebody else gives back anyway."""
    state = told(a_queue(), a_node(), *running("a", "b"))
    also_told(state, ev.JobStopping(job_id=JobId("acme/a"), attempt=1, cause=StopCause.CANCELLED, actor="tenant:acme"))
    also_told(state, a_queue(limit_jobs=1, on_lowered=OnLowered.RECLAIM))
    assert stopped(settled(state, LATER)) == ["a"]
    assert core.decide(state, LATER) == []


def test_queues_below_keep_what_is_guaranteed_to_them() -> None:
    """Whoever borrows goes first: a guarantee would bring the others back at once."""
    above = QueueId("team")
    state = told(
        a_queue("team", tenants=(), guaranteed_compute_milli=1000),
        a_queue("sure", parent=above, guaranteed_compute_milli=1000),
        a_queue("extra", parent=above),
        a_node(),
        *running("x1", queue="extra"),
    )
    also_told(state, *running("s1", "s2", queue="sure"), at=NOON + S)
    also_told(
        state,
        a_queue(
            "team",
            tenants=(),
            guaranteed_compute_milli=1000,
            limit_compute_milli=1000,
            on_lowered=OnLowered.RECLAIM,
        ),
    )
    assert stopped(settled(state, LATER)) == ["x1"]


def test_nobody_is_stopped_for_more_than_is_too_much() -> None:
    """The newest goes where he is enough; whoever would not be missed stays."""
    state = told(a_queue(), a_node(), *running("small"))
    also_told(
        state,
        a_job("large", compute_milli=1000, memory_mib=1000),
        a_placement("acme/large", device=1, compute_milli=1000, memory_mib=1000),
        at=NOON + S,
    )
    also_told(state, a_queue(limit_compute_milli=1000, on_lowered=OnLowered.RECLAIM))
    assert stopped(settled(state, LATER)) == ["large"]
    state = told(a_queue(), a_node(), *running("a", "b", "c"))
    also_told(state, a_queue(limit_compute_milli=1499, on_lowered=OnLowered.RECLAIM))
    assert stopped(settled(state, LATER)) == ["a"]


def lowered(pool: Pool, limit: int) -> list[ev.Fact]:
    """What is decided once the queue may hold no more than this."""
    pool.tell(a_queue(limit_compute_milli=limit, on_lowered=OnLowered.RECLAIM, **BY_ANN))
    return pool.decide()


def causes(facts: list[ev.Fact]) -> list[tuple[RunId, StopCause]]:
    return [(fact.run_id, fact.cause) for fact in facts if isinstance(fact, ev.RunStopOrdered)]


def test_elastic_gangs_shrink_before_whole_jobs_are_stopped() -> None:
    """Though the spot job is of a lower class, and the gang never agreed to be preempted; the last replicas leave."""
    pool = Pool(a_node(devices=5))
    pool.runs("spot", **SPOT)
    pool.runs("e", **elastic(2, 4, preemptible=False))
    facts = lowered(pool, 3000)
    assert causes(facts) == [("acme/e/2/1", StopCause.SHRUNK), ("acme/e/3/1", StopCause.SHRUNK)]
    assert resized(facts) == [("acme/e", 4, 2)]
    [fact] = [fact for fact in facts if isinstance(fact, ev.GangResized)]
    assert (fact.for_job, fact.runs) == ("", ("acme/e/2/1", "acme/e/3/1"))
    orders = [fact for fact in facts if isinstance(fact, ev.RunStopOrdered)]
    assert {(order.limit_of, order.actor) for order in orders} == {("queue main", "operator (user:ann)")}
    pool.leaves([order.run_id for order in orders])
    assert pool.decide() == [], "it is at its limit: nothing grows"
    assert members(pool, "e") == ["acme/e/0/1", "acme/e/1/1"]


def test_a_gang_gives_no_more_than_is_too_much() -> None:
    """In steps; who is not needed for it stays."""
    pool = Pool(a_node(devices=6))
    pool.runs("e", **elastic(2, 6, step=2))
    assert resized(lowered(pool, 5000)) == [("acme/e", 6, 4)]


def test_where_shrinking_is_not_enough_jobs_go_whole_as_well() -> None:
    """The gang gives what is on loan, and the spot job goes; nobody else."""
    pool = Pool(a_node(devices=6))
    pool.runs("spot", **SPOT)
    pool.runs("sure", **(SPOT | {"preemptible": False}))
    pool.runs("e", **elastic(2, 4))
    facts = lowered(pool, 3000)
    assert sorted(causes(facts)) == [
        ("acme/e/2/1", StopCause.SHRUNK),
        ("acme/e/3/1", StopCause.SHRUNK),
        ("acme/spot/0/1", StopCause.PREEMPTED),
    ]


def test_a_gang_whose_least_is_too_much_as_well_goes_whole_at_once() -> None:
    """It isn't made smaller only to be stopped then."""
    pool = Pool(a_node(devices=4))
    pool.runs("e", **elastic(2, 4))
    facts = lowered(pool, 1000)
    assert resized(facts) == []
    assert causes(facts) == [(f"acme/e/{replica}/1", StopCause.PREEMPTED) for replica in range(4)]


def test_a_limit_on_jobs_is_not_met_by_shrinking() -> None:
    """A gang counts as one, whatever its size."""
    pool = Pool(a_node(devices=5))
    pool.runs("spot", **SPOT)
    pool.runs("e", **elastic(2, 4))
    pool.tell(a_queue(limit_jobs=1, on_lowered=OnLowered.RECLAIM))
    assert causes(pool.decide()) == [("acme/spot/0/1", StopCause.PREEMPTED)]


def test_no_more_are_stopped_in_a_minute_than_may_be() -> None:
    """Those stopped for others count as well; the service wakes up when the rate allows more, and a gang isn't many."""
    pool = Pool(a_node(devices=8), preempt_per_minute=2)
    for name in ("a", "b", "c"):
        pool.runs(name, **SPOT)
    pool.runs("gang", **(SPOT | {"replicas": 3}))
    facts = lowered(pool, 0)
    assert sorted(names({run.rsplit("/", 2)[0] for run, _ in causes(facts)})) == ["c", "gang"]
    pool.leaves([run for run, _ in causes(facts)])
    assert causes(pool.decide()) == []
    at = core.wake_at(pool.state, pool.now)
    assert at == pool.now + 60 * S
    assert core.restore(core.snapshot(pool.state)).kept == pool.state.kept
    pool.now = at
    assert sorted(run for run, _ in causes(pool.decide())) == ["acme/a/0/1", "acme/b/0/1"]


@pytest.mark.parametrize(("most", "stopped_for_others"), [(1, []), (2, [(RunId("acme/a/0/1"), StopCause.PREEMPTED)])])
def test_who_is_stopped_for_a_limit_counts_when_others_would_be(
    most: int, stopped_for_others: list[tuple[RunId, StopCause]]
) -> None:
    """One rate over the pool."""
    pool = Pool(a_node(devices=2), preempt_per_minute=most)
    for name in ("a", "b"):
        pool.runs(name, **SPOT)
    facts = lowered(pool, 1000)
    assert causes(facts) == [("acme/b/0/1", StopCause.PREEMPTED)]
    pool.leaves([run for run, _ in causes(facts)])
    pool.tell(a_queue(), a_job("o", **(ONLINE | {"devices": 2})))
    assert causes(pool.decide()) == stopped_for_others
