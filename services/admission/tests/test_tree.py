"""Queues as a tree: what the operator may ask of it, and what is refused with the field and the numbers."""

from typing import Any

import msgspec
import pytest

from apportion.admission.testing import History
from apportion.contracts import events as ev
from apportion.contracts.causes import OnLowered, QueueOrder, Refusal
from apportion.contracts.ids import OPERATOR, NodeId, QueueId
from apportion.contracts.testing import a_job_request, a_node, a_queue


def a_tree() -> History:
    """Team has 4 devices for sure and 8 at most; of the 4, two are train's."""
    history = History()
    history.fact(a_queue("team", tenants=(), guaranteed_compute_milli=4000, limit_compute_milli=8000))
    history.fact(a_queue("train", parent=QueueId("team"), guaranteed_compute_milli=2000))
    history.fact(a_queue("serve", parent=QueueId("team"), tenants=("acme", "other")))
    return history


def answer(history: History, wish: ev.Wish) -> Any:
    history.wish(wish, tenant=OPERATOR)
    (fact,) = history.decide()
    return fact


def test_all_that_is_said_of_a_queue_becomes_the_fact() -> None:
    """Nothing is dropped on the way, so that the fold needs no other source."""
    wish = ev.QueueUpsertRequested(
        queue="serve",
        tenants=("acme",),
        parent="team",
        limit_compute_milli=3000,
        limit_memory_mib=200_000,
        limit_cpu_milli=64_000,
        limit_jobs=7,
        limit_model_milli={"h100-80": 2000},
        guaranteed_compute_milli=1000,
        weight=3,
        weights={"memory_mib": 2, "h100-80": 5},
        on_lowered=OnLowered.RECLAIM,
        order=QueueOrder.SEED,
        is_fair=False,
        reclaim=False,
        is_cordoned=True,
        reason="quarter 3",
    )
    history = a_tree()
    fact = answer(history, wish)
    assert isinstance(fact, ev.QueueUpserted)
    for name in wish.__struct_fields__:
        if name not in {"queue", "dry_run"}:
            assert getattr(fact, name) == getattr(wish, name), name
    history.settle()
    view = history.state.pool.queues[QueueId("serve")]
    assert view.limits == {
        "compute_milli": 3000,
        "memory_mib": 200_000,
        "cpu_milli": 64_000,
        "jobs": 7,
        "compute_milli:h100-80": 2000,
    }
    assert view.guaranteed == {"compute_milli": 1000}


@pytest.mark.parametrize(
    ("asked", "code", "field", "expected", "found"),
    [
        ({"parent": "nobody"}, Refusal.QUEUE_NOT_FOUND, "parent", "a queue that there is", "nobody"),
        (
            {"queue": "team", "parent": "train", "guaranteed_compute_milli": 4000},
            Refusal.FIELD_INVALID,
            "parent",
            "a queue that is not team and not below it",
            "train",
        ),
        ({"parent": "new"}, Refusal.FIELD_INVALID, "parent", "a queue that is not new and not below it", "new"),
        (
            {"parent": "team", "guaranteed_compute_milli": 2001},
            Refusal.FIELD_CONFLICT,
            "guaranteed_compute_milli",
            "at most 2000, which is left of what is guaranteed to team",
            "2001",
        ),
        (
            {"parent": "team", "guaranteed_model_milli": {"h100-80": 1}},
            Refusal.FIELD_CONFLICT,
            "guaranteed_model_milli.h100-80",
            "at most 0, which is left of what is guaranteed to team",
            "1",
        ),
        (
            {"guaranteed_memory_mib": 101, "limit_memory_mib": 100},
            Refusal.FIELD_CONFLICT,
            "guaranteed_memory_mib",
            "at most 100, which is its limit_memory_mib",
            "101",
        ),
        (
            {"queue": "team", "guaranteed_compute_milli": 1999},
            Refusal.FIELD_CONFLICT,
            "guaranteed_compute_milli",
            "at least 2000, which is guaranteed to queues below it",
            "1999",
        ),
    ],
)
def test_a_queue_that_the_tree_cannot_have_is_refused(
    asked: dict[str, Any], code: Refusal, field: str, expected: str, found: str
) -> None:
    """A promise that another promise breaks is found before anybody relies on it."""
    history = a_tree()
    refused = answer(history, ev.QueueUpsertRequested(**{"queue": "new", "tenants": ("acme",), **asked}))
    assert isinstance(refused, ev.WishRejected)
    assert (refused.code, refused.field, refused.expected, refused.found) == (code, field, expected, found)


def test_a_queue_may_change_within_what_it_has() -> None:
    """Its own old guarantee doesn't count against the new one."""
    history = a_tree()
    wish = ev.QueueUpsertRequested(queue="train", tenants=("acme",), parent="team", guaranteed_compute_milli=4000)
    assert isinstance(answer(history, wish), ev.QueueUpserted)


def test_levels_are_bounded() -> None:
    """Each level is a step of every decision."""
    history = History()
    history.fact(a_queue("q1"))
    for level in range(2, 9):
        history.fact(a_queue(f"q{level}", parent=QueueId(f"q{level - 1}")))
    refused = answer(history, ev.QueueUpsertRequested(queue="q9", tenants=("acme",), parent="q8"))
    assert (refused.code, refused.field, refused.found) == (
        Refusal.FIELD_INVALID,
        "parent",
        "9 levels below q1",
    )


def test_jobs_go_to_queues_that_no_other_is_below() -> None:
    """A queue is a sum or a line, never both."""
    history = a_tree()
    history.fact(a_queue("team", guaranteed_compute_milli=4000))
    history.wish(a_job_request(queue="team"))
    (refused,) = history.decide()
    assert isinstance(refused, ev.JobRejected)
    assert (refused.code, refused.expected) == (Refusal.QUEUE_NOT_FOUND, "one of serve, train")


def test_a_job_beyond_the_limit_of_a_queue_above_could_never_run() -> None:
    """And says whose limit that is."""
    history = a_tree()
    history.wish(a_job_request(queue="train", resources=ev.Resources(gpu=9)))
    (refused,) = history.decide()
    assert isinstance(refused, ev.JobRejected)
    assert refused.expected == "at most 8000 milli-GPU, the limit of queue team"


def test_a_dry_run_says_how_full_the_queues_above_are() -> None:
    """Those are limits of the job as well."""
    history = a_tree()
    history.wish(a_job_request(queue="train", dry_run=True))
    (judged,) = history.decide()
    assert isinstance(judged, ev.WishJudged)
    assert judged.would[1:] == ("Runs of queue team, which is above it, hold 0 of 8000 milli-GPU now.",)
    wish = ev.QueueUpsertRequested(
        queue="serve", tenants=("acme", "other"), parent="team", weight=2, guaranteed_compute_milli=500, dry_run=True
    )
    judged = answer(a_tree(), wish)
    assert judged.would == (
        "Its guaranteed_compute_milli goes from none to 500.",
        "Its weight goes from 1 to 2.",
    )


def test_a_guarantee_that_the_pool_cannot_hold_is_told_with_both_numbers() -> None:
    """And is not refused, as nodes come and go; without a node, nothing is known of those that will come."""
    history = a_tree()
    wish = ev.QueueUpsertRequested(queue="solo", tenants=("acme",), guaranteed_compute_milli=5000)
    assert answer(history, wish).note == ""
    history.settle()
    history.fact(a_node(devices=8))
    fact = answer(history, wish)
    assert isinstance(fact, ev.QueueUpserted)
    assert (
        fact.note == "More is guaranteed than there is on 1 node(s): "
        "guaranteed_compute_milli comes to 9000 and the pool has 8000."
    )
    history.settle()
    assert answer(history, msgspec.structs.replace(wish, guaranteed_compute_milli=4000)).note == ""
    history.settle()
    model = ev.QueueUpsertRequested(queue="model", tenants=("acme",), guaranteed_model_milli={"b200": 1})
    assert "guaranteed_model_milli.b200 comes to 1 and the pool has 0" in answer(history, model).note
    history.settle()
    history.fact(ev.NodeFenced(node_id=NodeId("node-1"), epoch=1, runs=()))
    history.fact(a_node("node-2", devices=2))
    below = ev.QueueUpsertRequested(
        queue="train", parent="team", tenants=("acme",), guaranteed_compute_milli=1000, dry_run=True
    )
    judged = answer(history, below)
    assert "guaranteed_compute_milli comes to 8000 and the pool has 2000" in judged.would[-1]
