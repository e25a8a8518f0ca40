"""Whom to stop for whom: the smallest set, the newest first, gangs whole, and what they free is kept."""

from collections.abc import Iterable
from typing import Any

import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import DeviceHealth, Pending, PreemptionKind, RunCause, ServiceClass, StopCause
from apportion.contracts.ids import PLACER, JobId, NodeId, RunId, agent_author
from apportion.contracts.testing import NOON, a_job, a_node, a_queue, as_fact
from apportion.placer import core
from apportion.placer.state import S, State

WHOLE: dict[str, Any] = {"compute_milli": 1000, "memory_mib": 0}
SPOT: dict[str, Any] = WHOLE | {"service_class": ServiceClass.SPOT}
ONLINE: dict[str, Any] = WHOLE | {"service_class": ServiceClass.ONLINE, "preemptible": False}


class Pool:
    """A pool that goes on from decision to decision."""

    def __init__(self, *facts: ev.Fact, **config: int | str) -> None:
        self.state: State = core.initial()
        self.now = NOON
        self.tell(ev.LeaseClaimed(author="placer", session="s", core=core.POLICY, config=config), author=PLACER)
        self.tell(a_queue(), *facts)

    def tell(self, *facts: ev.Fact, author: str = "") -> None:
        for fact in facts:
            by = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else author
            self.state = core.evolve(self.state, as_fact(fact, self.state.pool.seq + 1, author=by, at=self.now))

    def decide(self) -> list[ev.Fact]:
        """What is decided and folded; decided again, nothing more is said."""
        facts = core.decide(self.state, self.now)
        self.tell(*facts)
        assert core.decide(self.state, self.now) == []
        return facts

    def after(self, seconds: int) -> "Pool":
        self.now += seconds * S
        return self

    def runs(self, job: str, **spec: Any) -> None:
        """A job that is admitted, placed and started, and was for as long as everybody is spared."""
        self.tell(a_job(job, **spec))
        placed = [fact for fact in self.decide() if isinstance(fact, ev.RunPlaced) and fact.job_id == f"acme/{job}"]
        assert placed
        for fact in placed:
            self.tell(ev.RunStarted(run_id=fact.run_id, node_id=fact.node_id, pid=1, started_at=self.now))
        self.after(5)

    def runs_end(self, job_id: str) -> None:
        """The job's runs end by themselves, and it succeeds."""
        self.leaves([run.run_id for run in self.state.pool.jobs[JobId(job_id)].runs.values() if run.holds])
        self.tell(ev.JobSucceeded(job_id=JobId(job_id), attempts=1, wait_ms=0, run_ms=0))

    def leaves(self, run_ids: Iterable[RunId]) -> None:
        """The runs end and give back their slices."""
        for run_id in run_ids:
            node_id = next(
                run.node_id
                for job in self.state.pool.jobs.values()
                for run in job.runs.values()
                if run.run_id == run_id
            )
            self.tell(ev.RunFinished(run_id=run_id, node_id=node_id, cause=RunCause.PREEMPTED, finished_at=self.now))
            self.tell(ev.RunReleased(run_id=run_id, node_id=node_id, released_at=self.now))


def preemption(facts: Iterable[ev.Fact]) -> ev.PreemptionDecided:
    [found] = [fact for fact in facts if isinstance(fact, ev.PreemptionDecided)]
    return found


def placed(facts: Iterable[ev.Fact]) -> list[str]:
    return [fact.job_id for fact in facts if isinstance(fact, ev.RunPlaced)]


def names(ids: Iterable[str]) -> list[str]:
    return [each.removeprefix("acme/") for each in ids]


def test_a_class_that_comes_first_has_the_newest_stopped() -> None:
    """One is enough, so one goes: the one with the least to lose. All of it is said with its numbers."""
    pool = Pool(a_node("node-1", devices=2))
    pool.runs("old", **SPOT)
    pool.after(60).runs("new", **SPOT)
    pool.tell(a_job("urgent", **ONLINE))
    facts = pool.decide()
    decided = preemption(facts)
    assert decided.job_id == "acme/urgent"
    assert names(decided.victims) == ["new"]
    assert decided.kind is PreemptionKind.PRIORITY
    assert decided.nodes == (NodeId("node-1"),)
    assert decided.needs == {"replicas": 1, "devices": 1, "compute_milli": 1000}
    assert decided.frees == {"compute_milli": 1000, "memory_mib": 81_920}
    assert decided.considered == 2
    [stop] = [fact for fact in facts if isinstance(fact, ev.RunStopOrdered)]
    assert (stop.run_id, stop.cause, stop.actor, stop.grace_s) == (
        "acme/new/0/1",
        StopCause.PREEMPTED,
        "service:placer",
        10,
    )
    assert "acme/urgent (attempt 1)" in stop.reason
    assert "1 of 2 jobs" in stop.reason
    [wait] = [fact for fact in facts if isinstance(fact, ev.JobPendingReasonChanged)]
    assert (wait.code, wait.blocking_ids) == (Pending.WAITING_FOR_PREEMPTION, ("acme/new",))


def test_the_smallest_set_is_found_where_the_newest_would_not_do() -> None:
    """Eight small ones are newer than the one large: stopping one job is better than stopping four."""
    pool = Pool(a_node("node-1", devices=1), a_node("node-2", devices=1))
    half = {"compute_milli": 500, "memory_mib": 40_960, "service_class": ServiceClass.SPOT}
    pool.runs("large", **SPOT)
    pool.after(1).runs("small-1", **half)
    pool.after(1).runs("small-2", **half)
    pool.tell(a_job("urgent", **ONLINE))
    assert names(preemption(pool.decide()).victims) == ["large"]


def test_two_that_together_are_enough_go_and_no_third() -> None:
    """None of the set can be left out, and the newest pair is taken."""
    pool = Pool(a_node("node-1", devices=1))
    quarter = {"compute_milli": 250, "memory_mib": 20_000, "service_class": ServiceClass.BATCH}
    for number in range(4):
        pool.after(1).runs(f"q{number}", **quarter)
    pool.tell(a_job("urgent", compute_milli=500, memory_mib=40_000, service_class=ServiceClass.STANDARD))
    assert names(preemption(pool.decide()).victims) == ["q3", "q2"]


def test_nobody_goes_where_it_would_not_be_enough() -> None:
    """A job that can't be helped costs nobody anything; nor does one whose own class is not before the others'."""
    pool = Pool(a_node("node-1", devices=1), a_node("node-2", devices=1))
    pool.runs("kept", **(SPOT | {"preemptible": False}))
    pool.runs("other", **SPOT)
    pool.tell(a_job("large", **(ONLINE | {"replicas": 2})))
    assert not [fact for fact in pool.decide() if isinstance(fact, ev.RunStopOrdered)]
    pool.tell(a_job("equal", **(SPOT | {"priority": 1000})))
    assert not [fact for fact in pool.decide() if isinstance(fact, ev.RunStopOrdered)]


def test_a_gang_is_stopped_whole() -> None:
    """Who loses one replica loses all of them; so a single job goes rather than a gang, though the gang is newer."""
    pool = Pool(a_node("node-1", devices=1), a_node("node-2", devices=1), a_node("node-3", devices=1))
    pool.runs("single", **SPOT)
    pool.after(9).runs("gang", **(SPOT | {"replicas": 2}))
    pool.tell(a_job("one", **ONLINE))
    assert names(preemption(pool.decide()).victims) == ["single"]
    pool.tell(a_job("two", **(ONLINE | {"priority": 400})))
    decided = preemption(pool.decide())
    assert decided.runs == ("acme/gang/0/1", "acme/gang/1/1")


def test_a_gang_that_comes_first_gets_room_on_several_nodes() -> None:
    """As many jobs as it takes, and not those whose room doesn't help."""
    pool = Pool(*(a_node(f"node-{number}", devices=1) for number in range(4)))
    for number in range(3):
        pool.after(1).runs(f"s{number}", **SPOT)
    pool.tell(a_job("gang", **(ONLINE | {"replicas": 3})))
    decided = preemption(pool.decide())
    assert names(decided.victims) == ["s2", "s1"]
    assert len(decided.nodes) == 3
    pool.leaves(decided.runs)
    assert placed(pool.decide()) == ["acme/gang"] * 3


def test_protected_time_is_kept_and_then_ends_by_itself() -> None:
    """Whoever asked for a minimum has it; the placer wakes when it is over."""
    pool = Pool(a_node("node-1", devices=1), reserve_after_s=-1)
    pool.runs("busy", **(SPOT | {"min_runtime_s": 100}))
    pool.tell(a_job("urgent", **ONLINE))
    assert not [fact for fact in pool.decide() if isinstance(fact, ev.PreemptionDecided)]
    assert core.wake_at(pool.state, pool.now) == NOON + 100 * S
    assert names(preemption(pool.after(95).decide()).victims) == ["busy"]


@pytest.mark.parametrize("is_leaving", [True, False])
def test_nobody_slips_into_what_was_freed(is_leaving: bool) -> None:
    """Small jobs come all the time, one even of the same class and before it in the queue: the room is kept."""
    pool = Pool(a_node("node-1", devices=1))
    for number in range(4):
        pool.runs(f"q{number}", compute_milli=250, memory_mib=20_000, service_class=ServiceClass.SPOT)
    pool.tell(a_job("urgent", **ONLINE))
    decided = preemption(pool.decide())
    assert len(decided.victims) == 4
    pool.leaves(decided.runs[: None if is_leaving else 2])
    pool.tell(a_job("first", compute_milli=100, memory_mib=100, service_class=ServiceClass.ONLINE, priority=900))
    assert placed(pool.decide()) == (["acme/urgent"] if is_leaving else [])
    if not is_leaving:
        assert pool.state.pool.jobs[JobId("acme/first")].pending is Pending.RESERVED_FOR_OTHER
        pool.leaves(decided.runs[2:])
        assert placed(pool.decide()) == ["acme/urgent"]


@pytest.mark.parametrize("is_in_vain", [False, True])
def test_what_is_kept_for_two_alike_is_kept_until_both_let_go(is_in_vain: bool) -> None:
    """On the node of both, one has what was freed for it, or never will: the other's victims are still there."""
    quarter: dict[str, Any] = {"compute_milli": 250, "memory_mib": 20_000}
    pool = Pool(a_node("node-1", devices=2))
    pool.runs("whole", **SPOT)
    pool.runs("q0", **quarter, service_class=ServiceClass.SPOT)
    pool.runs("q1", **quarter, service_class=ServiceClass.SPOT)
    for name in ("first", "second"):
        pool.tell(a_job(name, **ONLINE))
    decided = [fact for fact in pool.decide() if isinstance(fact, ev.PreemptionDecided)]
    assert [(fact.job_id, fact.victims, fact.nodes) for fact in decided] == [
        ("acme/first", ("acme/whole",), ("node-1",)),
        ("acme/second", ("acme/q1", "acme/q0"), ("node-1",)),
    ]
    if is_in_vain:
        [sick] = [
            piece.device_uuid for run in pool.state.pool.jobs[JobId("acme/whole")].runs.values() for piece in run.slices
        ]
        pool.tell(
            ev.DeviceHealthChanged(
                node_id=NodeId("node-1"),
                device_uuid=sick,
                before=DeviceHealth.HEALTHY,
                after=DeviceHealth.DEGRADED,
                code="xid-63",
            )
        )
    pool.leaves([RunId("acme/whole/0/1"), RunId("acme/q0/0/1")])
    pool.tell(a_job("small", **quarter))
    assert placed(pool.decide()) == ([] if is_in_vain else ["acme/first"])
    assert pool.state.pool.jobs[JobId("acme/small")].pending is Pending.RESERVED_FOR_OTHER
    pool.leaves([RunId("acme/q1/0/1")])
    assert placed(pool.decide()) == (["acme/first"] if is_in_vain else ["acme/second"])


def test_what_was_kept_in_vain_is_given_up() -> None:
    """The node was drained meanwhile, or the job cancelled: then others may have the room again."""
    pool = Pool(a_node("node-1", devices=1))
    pool.runs("spot", **SPOT)
    pool.tell(a_job("urgent", **ONLINE))
    decided = preemption(pool.decide())
    pool.tell(ev.JobCancelled(job_id=JobId("acme/urgent"), actor="user:eva"))
    pool.leaves(decided.runs)
    pool.tell(a_job("next", **SPOT))
    assert placed(pool.decide()) == ["acme/next"]
    assert not pool.state.kept.claims


def test_the_rate_is_bounded_and_time_lifts_it() -> None:
    """However many are urgent, only so many are stopped within a minute."""
    nodes = (a_node(f"node-{number}", devices=1) for number in range(3))
    pool = Pool(*nodes, preempt_per_minute=2, reserve_after_s=-1)
    for number in range(3):
        pool.runs(f"s{number}", **SPOT)
    for number in range(3):
        pool.tell(a_job(f"u{number}", **ONLINE, cpu_milli=number))
    count = [fact for fact in pool.decide() if isinstance(fact, ev.PreemptionDecided)]
    assert len(count) == 2
    assert core.wake_at(pool.state, pool.now) == pool.now + 60 * S
    assert names(preemption(pool.after(60).decide()).victims)


def test_what_is_kept_for_a_job_is_kept_when_it_is_looked_at_anew() -> None:
    """Its instant had come, and it is told anew why it waits: that is no reason to forget whom it waits for."""
    pool = Pool(a_node("node-1", devices=1))
    pool.runs("spot", **SPOT)
    pool.tell(a_job("urgent", **(ONLINE | {"not_before_at": NOON + 20 * S})))
    pool.decide()
    assert names(preemption(pool.after(30).decide()).victims) == ["spot"]
    pool.tell(ev.JobReleased(job_id=JobId("acme/urgent"), actor="user:eva", answers=9))
    pool.decide()
    assert pool.state.pool.jobs[JobId("acme/urgent")].pending is Pending.WAITING_FOR_PREEMPTION


def test_a_set_above_the_budget_is_not_stopped() -> None:
    """One job's urgency is worth only so many others' work."""
    pool = Pool(a_node("node-1", devices=1), preempt_victims_max=3)
    for number in range(4):
        pool.runs(f"q{number}", compute_milli=250, memory_mib=20_000, service_class=ServiceClass.SPOT)
    pool.tell(a_job("urgent", **ONLINE))
    assert not [fact for fact in pool.decide() if isinstance(fact, ev.PreemptionDecided)]


def test_claims_survive_a_restart() -> None:
    """What is kept is part of the fold."""
    pool = Pool(a_node("node-1", devices=1))
    pool.runs("spot", **SPOT)
    pool.tell(a_job("urgent", **ONLINE))
    decided = preemption(pool.decide())
    pool.state = core.restore(core.snapshot(pool.state))
    pool.leaves(decided.runs)
    pool.tell(a_job("first", **(ONLINE | {"priority": 900, "memory_mib": 1000})))
    assert placed(pool.decide()) == ["acme/urgent"]
