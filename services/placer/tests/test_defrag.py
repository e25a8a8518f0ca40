"""Defragmentation as a plan: bounded, explained, true to what could be placed, and nothing is done."""

from typing import Any

from apportion.contracts import events as ev
from apportion.contracts.ids import PLACER, agent_author
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, a_queue, as_fact
from apportion.placer import core
from apportion.placer.defrag import defragmented
from apportion.placer.state import S, State

HOUR = NOON + 3600 * S


def scattered(**of_jobs: Any) -> State:
    """Four devices with a quarter each, in a pool that is asked for whole devices."""
    facts: list[ev.Fact] = [a_queue(), a_node("node-1"), a_node("node-2")]
    for number in range(400):
        job = a_job(f"whole-{number}", compute_milli=1000, memory_mib=0)
        facts += [job, ev.JobCancelled(job_id=job.job_id, actor="user:eva")]
    for number in range(4):
        name = f"q{number}"
        placed = a_placement(
            f"acme/{name}", node=f"node-{number // 2 + 1}", device=number % 2, compute_milli=250, memory_mib=20_000
        )
        started = ev.RunStarted(run_id=placed.run_id, node_id=placed.node_id, pid=1, started_at=NOON)
        facts += [a_job(name, compute_milli=250, memory_mib=20_000, **of_jobs), placed, started]
    state = core.initial()
    for seq, fact in enumerate(facts, 1):
        author = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else ""
        state = core.evolve(state, as_fact(fact, seq, author=PLACER if isinstance(fact, ev.RunPlaced) else author))
    return state


def test_scattered_shares_are_brought_together() -> None:
    """Three moves, and three of four devices are whole again; each move says what it gains and costs."""
    state = scattered()
    before = core.snapshot(state)
    plan = defragmented(state, HOUR)
    assert (plan.empty_devices, plan.empty_devices_after) == (0, 3)
    assert len(plan.moves) == 3
    assert plan.considered == 4
    assert all(move.frees_device and move.gain_milli > 0 and move.ran_s == 3600 for move in plan.moves)
    assert len({move.to_device for move in plan.moves}) == 1
    assert plan.gain_milli == sum(move.gain_milli for move in plan.moves)
    assert core.snapshot(state) == before, "a plan changes nothing"


def test_the_number_of_moves_is_bounded() -> None:
    """An operator says how much unrest is worth it."""
    assert len(defragmented(scattered(), HOUR, moves_max=1).moves) == 1


def test_nobody_is_moved_who_did_not_agree_or_had_not_its_time() -> None:
    """A plan that can't be carried out helps nobody."""
    assert defragmented(scattered(preemptible=False), HOUR).moves == ()
    plan = defragmented(scattered(min_runtime_s=7200), HOUR)
    assert plan.moves == ()
    assert plan.text.startswith("Nothing is worth moving")
