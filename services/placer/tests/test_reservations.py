"""What is kept for the first that is blocked, who may pass on it meanwhile, and that this never delays it."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, RunCause
from apportion.contracts.ids import PLACER, JobId, agent_author
from apportion.contracts.testing import NOON, a_job, a_node, a_queue, as_fact
from apportion.placer import core
from apportion.placer.reservations import LENGTHS_S, RELEASE_S, START_S, Reservation
from apportion.placer.state import S, State

HALF: dict[str, Any] = {"compute_milli": 500, "memory_mib": 40_000, "grace_s": 10}
WHOLE: dict[str, Any] = {"compute_milli": 1000, "memory_mib": 0}


class Pool:
    """A pool on a clock of its own, whose runs end when the test says."""

    def __init__(self, nodes: int, *, devices: int = 1) -> None:
        self.state: State = core.initial()
        self.now = NOON
        self.running: dict[str, tuple[ev.RunPlaced, int]] = {}
        config: dict[str, int | str] = {"reserve_after_s": 0, "preempt_victims_max": 0}
        self.tell(ev.LeaseClaimed(author="placer", session="s", core=core.POLICY, config=config), author=PLACER)
        self.tell(a_queue(), *(a_node(f"node-{number}", devices=devices) for number in range(nodes)))

    def tell(self, *facts: ev.Fact, author: str = "") -> None:
        for fact in facts:
            by = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else author
            self.state = core.evolve(self.state, as_fact(fact, self.state.pool.seq + 1, author=by, at=self.now))

    def decide(self, lasts_s: int = 10**9) -> list[str]:
        """Who is placed; each starts at once and runs for so long, or to its limit."""
        facts = core.decide(self.state, self.now)
        self.tell(*facts)
        assert core.decide(self.state, self.now) == []
        placed = [fact for fact in facts if isinstance(fact, ev.RunPlaced)]
        for fact in placed:
            self.tell(ev.RunStarted(run_id=fact.run_id, node_id=fact.node_id, pid=1, started_at=self.now))
            limit = self.state.pool.jobs[fact.job_id].spec.time_limit_s
            self.running[fact.run_id] = (fact, self.now + min(lasts_s, limit or lasts_s) * S)
        return [fact.job_id.removeprefix("acme/") for fact in placed]

    def end(self, fact: ev.RunPlaced) -> None:
        del self.running[fact.run_id]
        self.tell(
            ev.RunFinished(run_id=fact.run_id, node_id=fact.node_id, cause=RunCause.SUCCESS, finished_at=self.now),
            ev.RunReleased(run_id=fact.run_id, node_id=fact.node_id, released_at=self.now),
            ev.JobSucceeded(job_id=fact.job_id, attempts=1, wait_ms=0, run_ms=0),
        )

    def pending(self, job: str) -> Pending:
        return self.state.pool.jobs[JobId(f"acme/{job}")].pending


def test_short_jobs_pass_on_what_is_kept_and_long_ones_do_not() -> None:
    """Half a device is free for an hour, until the large job starts: what ends before then may use it."""
    pool = Pool(1)
    pool.tell(a_job("holder", **HALF, time_limit_s=3600))
    assert pool.decide() == ["holder"]
    pool.tell(a_job("large", **WHOLE))
    assert pool.decide() == []
    pool.tell(a_job("endless", **HALF), a_job("long", **HALF, time_limit_s=7200))
    assert pool.decide() == []
    assert pool.pending("endless") is Pending.RESERVED_FOR_OTHER
    assert pool.pending("long") is Pending.RESERVED_FOR_OTHER
    pool.tell(a_job("short", **HALF, time_limit_s=600))
    assert pool.decide() == ["short"]


def test_the_placer_wakes_when_somebody_has_been_blocked_for_long_enough() -> None:
    """What is kept is stated then, and not whenever something else has the placer look."""
    pool = Pool(1)
    config: dict[str, int | str] = {"reserve_after_s": 30, "preempt_victims_max": 0}
    pool.tell(ev.LeaseClaimed(author="placer", session="s2", core=core.POLICY, config=config), author=PLACER)
    pool.tell(a_job("holder", **HALF))
    pool.decide()
    pool.tell(a_job("large", **WHOLE))
    assert pool.decide() == []
    wakes = core.wake_at(pool.state, pool.now)
    assert wakes == NOON + 30 * S
    assert core.decide(pool.state, wakes - 1) == []
    pool.now = wakes
    assert [type(fact) for fact in core.decide(pool.state, pool.now)] == [ev.NodesReserved]
    pool.decide()
    assert core.wake_at(pool.state, pool.now) is None


def test_nobody_passes_where_nobody_knows_when_it_is_needed() -> None:
    """A run without a limit may end at any moment: then what is kept for must be there."""
    pool = Pool(1)
    pool.tell(a_job("holder", **HALF))
    pool.decide()
    pool.tell(a_job("large", **WHOLE), a_job("short", **HALF, time_limit_s=10))
    assert pool.decide() == []


def test_kept_is_what_is_free_the_soonest() -> None:
    """The other node's run has no end that anybody knows."""
    pool = Pool(2)
    pool.tell(a_job("endless", **WHOLE))
    pool.decide()
    pool.tell(a_job("limited", **HALF, time_limit_s=900))
    pool.decide()
    pool.tell(a_job("large", **WHOLE), a_job("short", **HALF, time_limit_s=120))
    assert pool.decide() == ["short"]
    assert pool.running["acme/short/0/1"][0].node_id == pool.running["acme/limited/0/1"][0].node_id


def delays(seed: int) -> int:
    """By how many seconds the large job starts after the instant that was known when it came; below 1 it does not.

    Small jobs of all lengths come all the time and end when they like, at their limits at the latest.
    """
    draws = random.Random(seed)
    nodes, devices = draws.randint(1, 3), draws.randint(1, 2)
    pool = Pool(nodes, devices=devices)

    def small(name: str, shortest: int = 1) -> ev.JobAdmitted:
        limit = draws.choice([at for at in (20, 200, 700, 3000) if at >= shortest])
        return a_job(name, **HALF, time_limit_s=limit)

    pool.tell(*(small(f"first-{number}", 200) for number in range(2 * nodes * devices)))
    pool.decide(draws.randint(1, 3000))
    replicas = draws.randint(1, 2) if len(pool.state.rooms) > 1 else 1
    pool.tell(a_job("large", **WHOLE, replicas=replicas))
    latest = max(ends_at for _, ends_at in ((fact, _limit_of(pool, fact)) for fact, _ in pool.running.values()))
    if "large" in pool.decide():
        return 0
    for tick in range(400):
        pool.now += 10 * S
        for fact, ends_at in sorted(pool.running.values(), key=lambda each: each[0].run_id):
            if ends_at <= pool.now:
                pool.end(fact)
        pool.tell(*(small(f"s-{tick}-{number}") for number in range(draws.randint(0, 2))))
        if "large" in pool.decide(draws.randint(1, 3000)):
            return (pool.now - latest) // S
    return 10**6


def _limit_of(pool: Pool, fact: ev.RunPlaced) -> int:
    spec = pool.state.pool.jobs[fact.job_id].spec
    return pool.now + (START_S + spec.time_limit_s + spec.grace_s + RELEASE_S) * S


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_passing_never_delays_the_one_it_is_kept_for(seed: int) -> None:
    """It starts when the runs that it waits for have ended at the latest, however many pass meanwhile."""
    assert delays(seed) <= 10


def test_a_planted_bug_of_passing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If anybody may pass, the large job waits for ever: a property that can't fail proves nothing."""
    monkeypatch.setattr(Reservation, "admits", lambda self, length_s, now: True)
    assert any(delays(seed) > 10 for seed in range(6))


def test_lengths_are_told_apart_in_few_steps() -> None:
    """A line for each length would cost every round; so there are a handful."""
    assert sorted(LENGTHS_S) == list(LENGTHS_S)
    assert len(LENGTHS_S) <= 8
