"""What would become of a job: the placer's own next decision, on a copy."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, Pending, ServiceClass
from apportion.contracts.ids import JobId, NodeId, RunId, agent_author
from apportion.contracts.testing import ACME, NOON, a_job, a_node, a_placement, a_queue, a_spec, as_fact
from apportion.placer import core
from apportion.placer.plan import Plan, Starts, planned
from apportion.placer.state import S, State
from apportion.placer.words import score_words

JOB = JobId("acme/next")


def told(*facts: ev.Fact) -> State:
    state = core.initial()
    for seq, fact in enumerate(facts, 1):
        author = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else ""
        state = core.evolve(state, as_fact(fact, seq, author=author))
    return state


def plan_of(state: State, **spec: object) -> Plan:
    """The plan, having checked that asking changed nothing."""
    before = core.snapshot(state)
    found = planned(core.restore(before), JOB, ACME, a_spec(**spec), NOON)
    assert core.snapshot(state) == before
    return found


def test_what_fits_is_told_where_and_why_there() -> None:
    """With candidates and their parts, as the decision itself would state them."""
    found = plan_of(told(a_queue(), a_node("node-1"), a_node("node-2", devices=1), a_job("waits")))
    assert (found.starts, found.before, found.why) == (Starts.NOW, 1, None)
    (place,) = found.places
    assert len(place.candidates) == 2
    assert found.text == f"1 job(s) that wait go first. It would start now on {place.node_id}."
    assert found.policy


def test_what_does_not_fit_is_told_for_what_it_would_wait() -> None:
    """And what could never start is told so."""
    state = told(a_queue(), a_node(devices=1), a_job("first"), a_placement("acme/first", compute_milli=900))
    found = plan_of(state, compute_milli=200)
    assert (found.starts, found.places) == (Starts.LATER, ())
    assert found.why is not None
    assert found.why.code is Pending.INSUFFICIENT_COMPUTE
    assert found.text.startswith("It would wait. acme/next has waited 0 s")
    never = plan_of(state, mode=Mode.MIG)
    assert never.starts is Starts.NEVER


def test_who_would_have_to_make_room_is_named() -> None:
    """With the run, how long it has to end, and by which right it is stopped."""
    whole: dict[str, Any] = {"compute_milli": 1000, "memory_mib": 0}
    state = told(
        a_queue(),
        a_node(devices=1),
        a_job("spot", service_class=ServiceClass.SPOT, **whole),
        a_placement("acme/spot", compute_milli=1000, memory_mib=81_920, mode=Mode.EXCLUSIVE),
        ev.RunStarted(run_id=RunId("acme/spot/0/1"), node_id=NodeId("node-1"), pid=1, started_at=NOON),
    )
    found = planned(
        core.restore(core.snapshot(state)),
        JOB,
        ACME,
        a_spec(service_class=ServiceClass.ONLINE, preemptible=False, **whole),
        NOON + 3600 * S,
    )
    assert (found.starts, [each.run_id for each in found.preempts]) == (Starts.LATER, ["acme/spot/0/1"])
    assert found.rule
    assert found.why is not None
    assert found.why.code is Pending.WAITING_FOR_PREEMPTION
    assert found.text == "It would start once acme/spot has made room, which is told to stop and has 10 s for it."


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(100, 1000), st.integers(1, 80)), max_size=8), st.integers(100, 1000))
def test_the_plan_is_what_happens(jobs: list[tuple[int, int]], compute: int) -> None:
    """Asked for right after, the job goes exactly where the plan said, or waits as it said."""
    waiting = [a_job(f"job-{at}", compute_milli=milli, memory_mib=gib * 1024) for at, (milli, gib) in enumerate(jobs)]
    state = told(a_queue(), a_node("node-1"), a_node("node-2", devices=1), *waiting)
    plan = plan_of(state, compute_milli=compute)
    state = core.evolve(state, as_fact(a_job("next", compute_milli=compute), state.pool.seq + 1))
    placed: list[ev.RunPlaced] = []
    while facts := core.decide(state, NOON):
        for fact in facts:
            state = core.evolve(state, as_fact(fact, state.pool.seq + 1))
        placed += [fact for fact in facts if isinstance(fact, ev.RunPlaced) and fact.job_id == JOB]
    assert [(each.node_id, each.slices) for each in plan.places] == [(each.node_id, each.slices) for each in placed]
    assert (plan.starts is Starts.NOW) == bool(placed)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_scores_read_as_words_with_units() -> None:
    """A number alone tells nobody anything."""
    parts = {"model": -(10**12), "empty_devices": -2, "scarcer_left": -755 * 10**8, "other_left": -900 * 10**4}
    assert score_words("best_fit@1#abc", parts) == (
        "1 step(s) down its list of models, 2 empty device(s) left on the node, "
        "75.5 % of the scarcer of compute and memory left on the device, 90.0 % of the other left"
    )
    assert score_words("headroom", {"weight": -1500, "bids": 0, "preferred_labels": 10**15}) == (
        "room for 0.750 devices of the usual demand lost, 1 of the preferred labels"
    )
    assert score_words("somebodys", {"own": 3}) == "own 3"
