"""Strict priority and bidding: who comes first has it, who is outbid makes room, and one price for all who run."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, PreemptionKind, RunCause, ServiceClass
from apportion.contracts.ids import QueueId
from apportion.contracts.testing import a_job, a_node, a_queue

from .test_preempt import ONLINE, Pool, names, placed, preemption

BID: dict[str, Any] = {"compute_milli": 1000, "memory_mib": 0, "service_class": ServiceClass.SPOT}
BATCH: dict[str, Any] = BID | {"service_class": ServiceClass.BATCH}


def prices(facts: list[ev.Fact]) -> list[int]:
    return [fact.price_micro for fact in facts if isinstance(fact, ev.PriceSet)]


def waits(facts: list[ev.Fact]) -> dict[str, ev.JobPendingReasonChanged]:
    return {fact.job_id: fact for fact in facts if isinstance(fact, ev.JobPendingReasonChanged)}


def test_who_bids_most_has_it_and_the_first_left_out_makes_the_price() -> None:
    """Three want two devices: both winners pay what the third offered, which is told that it bids too little."""
    pool = Pool(a_node("node-1", devices=2), policy="bidding")
    pool.tell(*(a_job(f"b{bid}", **BID, bid_micro=bid) for bid in (10, 30, 20)))
    facts = pool.decide()
    assert placed(facts) == ["acme/b30", "acme/b20"]
    assert prices(facts) == [10]
    [price] = [fact for fact in facts if isinstance(fact, ev.PriceSet)]
    assert (price.bids_in, price.lowest_in_micro, price.highest_out_micro, price.before_micro) == (2, 20, 10, 0)
    wait = waits(facts)["acme/b10"]
    assert (wait.code, wait.limit) == (Pending.BID_TOO_LOW, {"bid_micro": 20})
    pool.tell(ev.JobCancelled(job_id=wait.job_id, actor="user:eva"))
    assert prices(pool.decide()) == [0], "nobody is left out any more"


def test_who_is_outbid_is_stopped_with_its_grace_and_the_next_one_reads_the_price() -> None:
    """The lowest bid goes, with notice; what is placed afterwards says at which price it was decided."""
    pool = Pool(a_node("node-1", devices=2), policy="bidding")
    pool.runs("low", **BID, bid_micro=10, grace_s=120)
    pool.runs("mid", **BID, bid_micro=20)
    pool.tell(a_job("high", **BID, bid_micro=50))
    facts = pool.decide()
    decided = preemption(facts)
    assert (names(decided.victims), decided.kind) == (["low"], PreemptionKind.MARKET)
    assert "bids 50" in decided.rule
    assert [fact.grace_s for fact in facts if isinstance(fact, ev.RunStopOrdered)] == [120]
    assert prices(facts) == [], "the one that others make room for is not left out"
    pool.leaves(decided.runs)
    pool.tell(ev.JobRequeued(job_id=decided.victims[0], attempt=2, cause=RunCause.PREEMPTED, retries_left=0))
    facts = pool.decide()
    assert placed(facts) == ["acme/high"]
    assert prices(facts) == [10], "what the one that had to go would pay"
    pool.runs_end("acme/mid")
    facts = pool.decide()
    assert placed(facts) == ["acme/low"]
    assert [fact.price_micro for fact in facts if isinstance(fact, ev.RunPlaced)] == [10]
    assert prices(facts) == [0]


def test_nobody_pays_more_than_it_bid() -> None:
    """The one left out wants what no low bidder has: it makes no price above the lowest bid that runs."""
    pool = Pool(a_node("node-1", devices=1), a_node("node-2", devices=1), policy="bidding")
    pool.runs("small", **BID, bid_micro=10)
    pool.tell(a_job("pinned", **(ONLINE | {"preemptible": False})))
    pool.decide()
    pool.tell(a_job("gang", **BID, bid_micro=90, replicas=2))
    assert prices(pool.decide()) == [10]


def test_a_market_is_for_those_who_bid_and_only_where_the_pool_has_one() -> None:
    """Class goes before money; without the policy a bid changes nothing."""
    pool = Pool(a_node("node-1", devices=1), policy="bidding")
    pool.tell(a_job("rich", **BID, bid_micro=1_000), a_job("steady", **BATCH))
    assert placed(pool.decide()) == ["acme/steady"]
    pool = Pool(a_node("node-1", devices=1))
    pool.tell(a_job("a", **BID, bid_micro=1), a_job("b", **BID, bid_micro=9))
    facts = pool.decide()
    assert placed(facts) == ["acme/a"]
    assert prices(facts) == []


def test_highest_bids_go_first_over_all_queues_and_tenants() -> None:
    """Shares don't count in a market: one price for the pool."""
    pool = Pool(a_node("node-1", devices=3), policy="bidding")
    pool.tell(a_queue("side", weight=100))
    bids = [("main", 5), ("main", 9), ("side", 7), ("side", 1)]
    pool.tell(*(a_job(f"{queue}-{bid}", **BID, queue=QueueId(queue), bid_micro=bid) for queue, bid in bids))
    facts = pool.decide()
    assert placed(facts) == ["acme/main-9", "acme/side-7", "acme/main-5"]
    assert prices(facts) == [1]


def test_strict_priority_lets_nothing_else_count() -> None:
    """Neither waiting nor shares; within a class the higher priority has the lower stopped, and none of its own."""
    pool = Pool(a_node("node-1", devices=1), a_node("node-2", devices=1), policy="strict_priority", ageing_s=1)
    pool.tell(a_queue("side"))
    pool.runs("equal", **BATCH, priority=200)
    pool.runs("low", **BATCH, priority=100)
    pool.runs_end("acme/equal")
    pool.runs("newer", **BATCH, priority=200)
    pool.tell(a_job("old", **BATCH, priority=100))
    pool.decide()
    pool.after(3_600).tell(a_job("new", **BATCH, priority=200, queue=QueueId("side")))
    decided = preemption(pool.decide())
    assert (decided.job_id, decided.kind) == ("acme/new", PreemptionKind.PRIORITY)
    assert names(decided.victims) == ["low"]
    pool.leaves(decided.runs)
    assert placed(pool.decide()) == ["acme/new"]


def test_a_queue_may_be_strict_where_the_pool_is_not() -> None:
    """By its policy or by its own order."""
    for config, order in (({"policy_by_queue": "main=strict_priority:pack"}, None), ({}, "strict")):
        pool = Pool(a_node("node-1", devices=1), ageing_s=1, **config)
        pool.tell(a_queue("main", order=order))
        pool.tell(a_job("first", **BATCH, priority=100))
        pool.after(7_200).tell(a_job("second", **BATCH, priority=101))
        assert placed(pool.decide()) == ["acme/second"], (config, order)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 2), st.booleans()), min_size=1, max_size=10))
@pytest.mark.parametrize("policy", ["bidding", "strict_priority:spread"])
def test_money_never_goes_round_in_circles(policy: str, steps: list[tuple[int, int, bool]]) -> None:
    """Whatever comes and goes: nobody is stopped for whom he had stopped, and the price is below each bid that runs."""
    pool = Pool(a_node("node-1", devices=2), a_node("node-2", devices=1), policy=policy)
    stopped: set[tuple[str, str]] = set()
    for number, (bid, replicas, is_slow) in enumerate(steps):
        pool.tell(a_job(f"j{number}", **BID, bid_micro=bid, priority=bid, replicas=replicas))
        for _ in range(8):
            facts = pool.decide()
            runs = [fact.run_id for fact in facts if isinstance(fact, ev.RunStopOrdered)]
            for fact in facts:
                if isinstance(fact, ev.RunPlaced):
                    pool.tell(ev.RunStarted(run_id=fact.run_id, node_id=fact.node_id, pid=1, started_at=pool.now))
                if isinstance(fact, ev.PreemptionDecided):
                    stopped |= {(fact.job_id, victim) for victim in fact.victims}
                    assert not {(victim, fact.job_id) for victim in fact.victims} & stopped
            if policy == "bidding":
                running = [bid for bid, _ in pool.state.bidders]
                assert pool.state.kept.price_micro <= min(running, default=2**40)
                assert not running or len(running) <= 3
            if is_slow or not runs:
                break
            victims = {run.rsplit("/", 2)[0] for run in runs}
            pool.leaves(runs)
            for victim in sorted(victims):
                job = pool.state.pool.jobs[victim]  # type: ignore[index]  # an id is a text
                again = ev.JobRequeued(
                    job_id=job.job_id,
                    attempt=job.attempt + 1,
                    cause=RunCause.PREEMPTED,
                    retries_left=0,
                )
                pool.tell(again)
        pool.after(7)
