"""Limits of queues, and of those above them, in every resource; and what is said of those who wait for them."""

from typing import Any

import msgspec
import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending
from apportion.contracts.ids import JobId, NodeId, QueueId, RunId
from apportion.contracts.testing import NOON, a_device, a_job, a_node, a_queue
from apportion.placer import core
from apportion.placer.why import why
from services.placer.tests.test_decide import also_told, placements, reasons, settled, told

TEAM, TRAIN = QueueId("team"), QueueId("train")


@pytest.mark.parametrize(
    ("limit", "spec", "fit"),
    [
        ({"limit_compute_milli": 600}, {"compute_milli": 250}, 2),
        ({"limit_memory_mib": 40_000}, {"memory_mib": 16_384}, 2),
        ({"limit_memory_mib": 100_000}, {"compute_milli": 100, "memory_mib": 0}, 1),
        ({"limit_cpu_milli": 5_000}, {"cpu_milli": 2_500}, 2),
        ({"limit_jobs": 1}, {}, 1),
        ({"limit_model_milli": {"h100-80": 250}}, {}, 1),
        ({"limit_model_milli": {"b200": 0}}, {}, 4),
        ({}, {}, 4),
    ],
)
@pytest.mark.parametrize("is_above", [False, True])
def test_no_queue_goes_above_its_limit(
    limit: dict[str, Any], spec: dict[str, Any], fit: int, *, is_above: bool
) -> None:
    """In any resource, at any level; the queue below may hold it all, and no more."""
    team, train = ({**limit}, {}) if is_above else ({}, {**limit})
    jobs = [a_job(f"j{number}", queue=TRAIN, **spec) for number in range(4)]
    state = told(a_queue("team", tenants=(), **team), a_queue("train", parent=TEAM, **train), a_node(), *jobs)
    facts = settled(state)
    assert len(placements(facts)) == fit
    assert set(reasons(facts).values()) == ({Pending.WAITING_FOR_QUOTA} if fit < 4 else set())


def test_two_queues_share_the_limit_above_them() -> None:
    """And the reason says whose limit it is, and who holds it."""
    state = told(
        a_queue("team", tenants=(), limit_compute_milli=500),
        a_queue("train", parent=TEAM),
        a_queue("serve", parent=TEAM, limit_compute_milli=5000),
        a_node(),
        a_job("a", queue=TRAIN, compute_milli=400),
        a_job("b", queue=QueueId("serve"), compute_milli=400),
    )
    facts = settled(state)
    (waits,) = (fact for fact in facts if isinstance(fact, ev.JobPendingReasonChanged))
    assert (waits.code, waits.limit, waits.available) == (
        Pending.WAITING_FOR_QUOTA,
        {"compute_milli": 500},
        {"compute_milli": 100},
    )
    assert waits.blocking_ids == ("acme/a",)
    assert waits.hint.startswith("Queue team, which is above serve, is at its limit of compute_milli (400 of 500")
    found = why(state.pool, JobId("acme/b"), NOON)
    assert found is not None
    assert found.changes[0].constraint == "queue_limit"
    assert found.changes[0].starts_now


def test_a_limit_on_one_model_leaves_the_others_open() -> None:
    """The best device is passed over for one that the queue may still hold."""
    state = told(
        a_queue(limit_model_milli={"l4-24": 250}),
        a_node("fast", devices=1),
        msgspec.structs.replace(a_node("slow"), devices=(a_device(0, node="slow", model="l4-24", memory_mib=24_000),)),
        *(a_job(f"j{number}", memory_mib=4_000) for number in range(3)),
    )
    nodes = sorted(node for _, node, _ in placements(settled(state)))
    assert nodes == ["fast", "fast", "slow"]


def test_a_cordoned_queue_keeps_its_jobs_and_those_below_waiting() -> None:
    """What runs, runs on; once it is open again, the jobs go."""
    state = told(a_queue("team", tenants=(), is_cordoned=True), a_queue("train", parent=TEAM), a_node())
    also_told(state, a_job("a", queue=TRAIN))
    facts = settled(state)
    assert reasons(facts) == {"acme/a": Pending.QUEUE_CORDONED}
    also_told(state, a_queue("team", tenants=()))
    assert len(placements(settled(state))) == 1


def test_what_a_queue_holds_moves_with_it() -> None:
    """So that both the old and the new queue above count what is there, also once the run has gone."""
    state = told(
        a_queue("old", tenants=()),
        a_queue("new", tenants=()),
        a_queue("train", parent=QueueId("old")),
        a_node(),
        a_job("a", queue=TRAIN, cpu_milli=500),
    )
    settled(state)
    held = {
        "compute_milli": 250,
        "compute_milli:h100-80": 250,
        "cpu_milli": 500,
        "jobs": 1,
        "memory_mib": 4096,
    }
    queues = state.pool.queues
    assert [queues[QueueId(name)].used for name in ("train", "old", "new")] == [held, held, {}]
    also_told(state, a_queue("train", parent=QueueId("new")))
    assert [queues[QueueId(name)].used for name in ("train", "old", "new")] == [held, {}, held]
    # The device's model is taken from when it was charged: a node that comes back without it changes nothing.
    also_told(state, a_node(devices=0))
    run = RunId("acme/a/0/1")
    also_told(state, ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=NOON))
    assert [queues[QueueId(name)].used for name in ("train", "old", "new")] == [{}, {}, {}]


def test_a_gang_counts_as_one_job_until_its_last_run_is_released() -> None:
    """However many runs it has."""
    state = told(a_queue(limit_jobs=1), a_node(), a_job("gang", replicas=3), a_job("next"))
    settled(state)
    used = state.pool.queues[QueueId("main")].used
    for replica in range(3):
        assert used["jobs"] == 1
        run = RunId(f"acme/gang/{replica}/1")
        also_told(state, ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=NOON))
    assert used == {}
    also_told(state, ev.JobSucceeded(job_id=JobId("acme/gang"), attempts=1, wait_ms=0, run_ms=0))
    assert [run for run, _, _ in placements(core.decide(state, NOON))] == ["acme/next/0/1"]
