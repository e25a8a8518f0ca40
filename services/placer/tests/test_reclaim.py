"""What a queue may take back, from whom, and how much: the predicate alone, apart from whoever stops the runs."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.causes import ServiceClass
from apportion.contracts.ids import JobId, QueueId
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, a_queue
from apportion.placer.books import Books, least_charge
from apportion.placer.orders import S
from apportion.placer.reclaim import Reclaim, charge_of
from apportion.placer.state import State, demand_of_job
from apportion.pool.state import JobState
from services.placer.tests.test_decide import also_told, told

TEAM = QueueId("team")


def holding(queue: str, count: int, **spec: Any) -> list[ev.Fact]:
    """Jobs of the queue that hold 1000 milli-GPU each."""
    facts: list[ev.Fact] = []
    for number in range(count):
        name = f"{queue}-{number}"
        facts.append(a_job(name, queue=QueueId(queue), compute_milli=1000, **spec))
        facts.append(a_placement(f"acme/{name}", device=number % 2, compute_milli=1000, memory_mib=1000))
    return facts


def reclaim(state: State) -> Reclaim:
    return Reclaim(Books(state.pool.queues), state.pool.jobs)


def victims(state: State, waiting: str = "acme/want", found: Reclaim | None = None) -> list[str]:
    job = state.pool.jobs[JobId(waiting)]
    running = sorted(job_id for job_id, other in state.pool.jobs.items() if other.state is JobState.RUNNING)
    charge = least_charge(demand_of_job(state, job))
    taken = (found or reclaim(state)).victims(job, charge, running)
    return [job.job_id.partition("/")[2] for job in taken]


def want(queue: str, compute_milli: int = 1000, **spec: Any) -> ev.JobAdmitted:
    return a_job("want", queue=QueueId(queue), compute_milli=compute_milli, **spec)


def test_a_borrower_gives_back_what_it_borrowed_the_newest_first() -> None:
    """And keeps what is guaranteed to itself."""
    state = told(
        a_queue("a", guaranteed_compute_milli=4000),
        a_queue("b", guaranteed_compute_milli=2000),
        a_node(),
        *holding("b", 2),
    )
    also_told(state, a_job("b-9", queue=QueueId("b"), compute_milli=1000, service_class=ServiceClass.SPOT))
    also_told(state, a_placement("acme/b-9", compute_milli=1000, memory_mib=1))
    also_told(state, a_job("b-5", queue=QueueId("b"), compute_milli=1000), at=NOON + S)
    also_told(state, a_placement("acme/b-5", compute_milli=1000, memory_mib=1), at=NOON + S)
    also_told(state, want("a"))
    assert victims(state) == ["b-9", "b-5"]
    found = reclaim(state)
    found.leave(state.pool.jobs[JobId("acme/b-9")])
    assert victims(state, found=found) == ["b-5"]


def test_nothing_is_taken_for_more_than_the_guarantee() -> None:
    """What goes beyond is borrowed itself."""
    facts = [a_queue("a", guaranteed_compute_milli=2000), a_queue("b"), a_node(), *holding("a", 1), *holding("b", 3)]
    state = told(*facts, want("a", 1000, devices=2))
    assert victims(state) == []
    assert sorted(victims(told(*facts, want("a", 1000)))) == ["b-0", "b-1", "b-2"]


def test_a_queue_that_does_not_want_it_takes_nothing_back() -> None:
    """Its setting; and one without a guarantee has nothing to take back."""
    cases: tuple[dict[str, Any], ...] = (
        {"guaranteed_compute_milli": 4000, "reclaim": False},
        {},
        {"guaranteed_memory_mib": 1},
    )
    for changes in cases:
        state = told(a_queue("a", **changes), a_queue("b"), a_node(), *holding("b", 2), want("a"))
        assert victims(state) == []


def test_what_is_not_asked_for_gives_no_right() -> None:
    """A job without a device takes no device back for a guarantee on devices."""
    state = told(
        a_queue("a", guaranteed_compute_milli=4000), a_queue("b"), a_node(), *holding("b", 2), want("a", devices=0)
    )
    assert victims(state) == []


def test_branches_are_compared_where_they_part() -> None:
    """Team as a whole is above its guarantee, so solo takes from it; and not from train, which is within its own."""
    state = told(
        a_queue("team", tenants=(), guaranteed_compute_milli=2000),
        a_queue("train", parent=TEAM, guaranteed_compute_milli=2000),
        a_queue("serve", parent=TEAM),
        a_queue("solo", guaranteed_compute_milli=4000),
        a_node(),
        *holding("train", 2),
        *holding("serve", 2),
        want("solo"),
    )
    assert sorted(victims(state)) == ["serve-0", "serve-1"]


def test_siblings_take_back_within_what_is_above_them() -> None:
    """Inside team, train is owed what serve borrowed; solo's runs are none of its business while team has its own."""
    state = told(
        a_queue("team", tenants=(), guaranteed_compute_milli=2000),
        a_queue("train", parent=TEAM, guaranteed_compute_milli=2000),
        a_queue("serve", parent=TEAM),
        a_queue("solo"),
        a_node(),
        *holding("serve", 2),
        *holding("solo", 2),
        want("train"),
    )
    assert sorted(victims(state)) == ["serve-0", "serve-1"]


def test_room_below_a_limit_is_made_by_who_borrows_there() -> None:
    """As few as are enough; none once they are on their way."""
    state = told(
        a_queue("team", tenants=(), guaranteed_compute_milli=2000, limit_compute_milli=4000),
        a_queue("train", parent=TEAM, guaranteed_compute_milli=2000),
        a_queue("serve", parent=TEAM),
        a_node(),
        *holding("serve", 4),
        want("train", 1000),
    )
    job = state.pool.jobs[JobId("acme/want")]
    charge = least_charge(demand_of_job(state, job))
    running = [JobId(f"acme/serve-{number}") for number in range(4)]
    found = reclaim(state)
    (gone,) = found.for_quota(job, charge, running)
    assert gone.job_id == "acme/serve-0"
    found.leave(gone)
    assert found.for_quota(job, charge, running) == []
    assert found.for_quota(job, {"compute_milli": 2000}, running[1:2]) != []


AMOUNTS = st.lists(st.integers(0, 4), min_size=4, max_size=4)


@settings(max_examples=80, deadline=None)
@given(guaranteed=AMOUNTS, held=AMOUNTS, is_deep=st.booleans())
def test_whoever_loses_runs_keeps_its_guarantee_and_can_take_none_back(
    guaranteed: list[int], held: list[int], is_deep: bool
) -> None:
    """So two queues never stop one another's runs in turn."""
    names = ["a", "b", "c", "d"]
    facts: list[ev.Fact] = [a_node()]
    if is_deep:
        facts.append(a_queue("team", tenants=(), guaranteed_compute_milli=1000 * sum(guaranteed[2:])))
    for name, amount in zip(names, guaranteed, strict=True):
        parent = TEAM if is_deep and name in "cd" else None
        facts.append(a_queue(name, parent=parent, guaranteed_compute_milli=1000 * amount))
    for name, count in zip(names, held, strict=True):
        facts += holding(name, count)
    state = told(*facts, *(a_job(f"want-{name}", queue=QueueId(name), compute_milli=1000) for name in names))
    before = dict(zip(names, held, strict=True))
    for name in names:
        taken = victims(state, f"acme/want-{name}")
        lost = {other: sum(job.startswith(other) for job in taken) for other in names}
        assert not lost[name]
        for other, amount in zip(names, guaranteed, strict=True):
            assert not lost[other] or before[other] - lost[other] >= amount
            if lost[other]:
                after = reclaim(state)
                for job_id in taken:
                    after.leave(state.pool.jobs[JobId(f"acme/{job_id}")])
                assert not [job for job in victims(state, f"acme/want-{other}", after) if job.startswith(f"{name}-")]
        if taken:
            assert before[name] < guaranteed[names.index(name)] or is_deep
    for job in state.pool.jobs.values():
        assert charge_of(job).get("jobs", 0) == (job.state is JobState.RUNNING)
