"""A queue gets what is guaranteed to it within bounded time, from whoever borrows it: over whole histories, in time."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.causes import RunCause, ServiceClass, StopCause
from apportion.contracts.ids import JobId, NodeId, QueueId, RunId, attempt_of_run
from apportion.contracts.testing import NOON, a_job, a_node, a_queue
from apportion.placer import core
from apportion.placer.orders import S
from apportion.placer.state import State
from services.placer.tests.test_decide import also_told, told

GRACE_S = 2
SPARED_S = 5
"""A run is left alone for this long, whoever wants its room."""
BOUND_S = SPARED_S + GRACE_S + 2
TEAM = QueueId("team")
WHOLE: dict[str, Any] = {"compute_milli": 1000, "memory_mib": 0, "service_class": ServiceClass.BATCH}


class Time:
    """A pool in time: runs go on until they are told to stop, then take their grace, and their jobs wait again."""

    def __init__(self, *facts: ev.Fact) -> None:
        self.state: State = told(*facts)
        self.second = 0
        self.leaving: dict[RunId, tuple[int, NodeId]] = {}
        self.stopped: Counter[str] = Counter()
        self.used_before: dict[QueueId, int] = {}

    @property
    def now(self) -> int:
        """The instant."""
        return NOON + self.second * S

    def tell(self, *facts: ev.Fact) -> None:
        """Something happens now."""
        also_told(self.state, *facts, at=self.now)

    def tick(self) -> None:
        """A second passes: who has had its grace leaves, and the placer decides."""
        self.second += 1
        for run_id, (end, node_id) in sorted(self.leaving.items()):
            if end > self.second:
                continue
            del self.leaving[run_id]
            job_id = self.state.pool.run_jobs[run_id]
            self.tell(
                ev.RunFinished(run_id=run_id, node_id=node_id, cause=RunCause.PREEMPTED, finished_at=self.now),
                ev.RunReleased(run_id=run_id, node_id=node_id, released_at=self.now),
            )
            if not self.state.pool.jobs[job_id].holding:
                attempt = attempt_of_run(run_id) + 1
                self.tell(ev.JobRequeued(job_id=job_id, attempt=attempt, cause=RunCause.PREEMPTED))
        facts = core.decide(self.state, self.now)
        self.tell(*facts)
        for fact in facts:
            if isinstance(fact, ev.RunStopOrdered):
                assert fact.cause is StopCause.PREEMPTED
                self.leaving[fact.run_id] = (self.second + GRACE_S, fact.node_id)
                self.stopped[self.state.pool.jobs[self.state.pool.run_jobs[fact.run_id]].spec.queue] += 1
        assert not [fact for fact in core.decide(self.state, self.now) if isinstance(fact, ev.RunStopOrdered)]

    def held(self, queue: str) -> int:
        """Milli-GPU that the queue holds."""
        return self.state.pool.queues[QueueId(queue)].used.get("compute_milli", 0)


def wanting(queue: str, count: int, **spec: Any) -> list[ev.Fact]:
    """Whole-device jobs of the queue."""
    return [a_job(f"{queue}-{n:02}", queue=QueueId(queue), grace_s=GRACE_S, **(WHOLE | spec)) for n in range(count)]


def test_a_guarantee_that_others_borrowed_is_there_after_their_grace() -> None:
    """And not more than it; who lost the runs has the rest."""
    time = Time(a_queue("a", guaranteed_compute_milli=3000), a_queue("b"), a_node(devices=4), *wanting("b", 6))
    time.tick()
    assert time.held("b") == 4000
    time.tell(*wanting("a", 6))
    for _ in range(BOUND_S):
        time.tick()
    assert (time.held("a"), time.held("b")) == (3000, 1000)
    for _ in range(20):
        time.tick()
    assert (time.held("a"), time.held("b")) == (3000, 1000)
    assert time.stopped == {"b": 3}


def test_a_sibling_gives_back_what_fills_the_limit_above_both() -> None:
    """There are devices enough, and what keeps the job waiting is the limit that its sibling uses up."""
    time = Time(
        a_queue("team", tenants=(), guaranteed_compute_milli=2000, limit_compute_milli=4000),
        a_queue("a", parent=TEAM, guaranteed_compute_milli=2000),
        a_queue("b", parent=TEAM),
        a_node(devices=8),
        *wanting("b", 6),
    )
    time.tick()
    assert time.held("b") == 4000
    time.tell(*wanting("a", 6))
    for _ in range(BOUND_S):
        time.tick()
    assert (time.held("a"), time.held("b")) == (2000, 2000)
    for _ in range(10):
        time.tick()
    assert time.stopped == {"b": 2}


def test_nobody_who_did_not_agree_is_stopped_and_nobody_for_what_is_not_guaranteed() -> None:
    """Then the guarantee waits for runs to end; and a queue that doesn't take back waits, too."""
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (({"preemptible": False}, {}), ({}, {"reclaim": False}))
    for borrower, lender in cases:
        time = Time(
            a_queue("a", guaranteed_compute_milli=3000, **lender),
            a_queue("b"),
            a_node(devices=4),
            *wanting("b", 6, **borrower),
        )
        time.tick()
        time.tell(*wanting("a", 2))
        for _ in range(BOUND_S):
            time.tick()
        assert not time.stopped
        assert time.held("a") == 0


@settings(max_examples=20, deadline=None)
@given(
    parts=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    comes=st.permutations(["a", "b", "c"]),
    wants=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    is_deep=st.booleans(),
    sizes=st.sampled_from([1000, 500]),
)
def test_guarantees_are_reached_in_bounded_time(
    parts: list[int], comes: list[str], wants: list[int], is_deep: bool, sizes: int
) -> None:
    """Whoever comes when: soon after the last came, each holds its guarantee, or all that it wants.

    Soon is the time that runs are spared, a grace, and a few rounds. And then nothing moves any more.
    """
    guaranteed = {name: 1000 * part for name, part in zip("abc", parts, strict=True)}
    devices = max(1, sum(parts))
    facts: list[ev.Fact] = [a_node(devices=devices)]
    if is_deep:
        facts.append(a_queue("team", tenants=(), guaranteed_compute_milli=guaranteed["a"] + guaranteed["b"]))
    facts += [
        a_queue(name, guaranteed_compute_milli=amount, parent=TEAM if is_deep and name in "ab" else None)
        for name, amount in guaranteed.items()
    ]
    time = Time(*facts)
    wanted = {}
    for name, count in zip(comes, wants, strict=True):
        jobs = wanting(name, count, compute_milli=sizes, memory_mib=0 if sizes == 1000 else 40_960)
        wanted[name] = count * sizes
        time.tell(*jobs)
        time.tick()
        time.tick()
    for _ in range(BOUND_S + 2):
        time.tick()
    for name, amount in guaranteed.items():
        assert time.held(name) >= min(amount, wanted[name]), (name, {each: time.held(each) for each in guaranteed})
    stopped = time.stopped.total()
    for _ in range(5):
        time.tick()
    assert time.stopped.total() == stopped
    again = core.restore(core.snapshot(time.state))
    assert core.decide(again, time.now) == core.decide(time.state, time.now)


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_is_taken_back_is_the_newest_that_is_enough(name: str) -> None:
    """Of two borrowers alike, who came last goes."""
    time = Time(
        a_queue("g", guaranteed_compute_milli=1000),
        a_queue("a"),
        a_queue("b"),
        a_node(devices=2),
    )
    first, last = ("b", "a") if name == "a" else ("a", "b")
    time.tell(*wanting(first, 1))
    time.tick()
    time.tell(*wanting(last, 1))
    for _ in range(SPARED_S + 1):
        time.tick()
    time.tell(*wanting("g", 1))
    for _ in range(BOUND_S):
        time.tick()
    assert time.stopped == {name: 1}
    assert time.state.pool.jobs[JobId(f"acme/{name}-00")].holding == 0
