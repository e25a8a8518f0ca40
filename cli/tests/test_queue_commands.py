"""Queues as the command shows and changes them: the tree, one queue in words, and wishes that leave the rest alone."""

from typing import Any

import msgspec
import pytest

from apportion.cli.declared import as_wish, is_alike
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.queue_commands import as_tree, changed, show_text
from apportion.contracts.causes import QueueOrder
from apportion.contracts.events import QueueUpsertRequested
from apportion.contracts.ids import QueueId
from apportion.contracts.testing import a_queue

NOTHING: dict[str, Any] = {
    "tenants": (),
    "parent": None,
    "limits": (),
    "guarantees": (),
    "weight": None,
    "weights": (),
    "on_lowered": None,
    "order": None,
    "is_fair": None,
    "reclaim": None,
    "is_cordoned": None,
    "reason": "",
    "dry_run": False,
}
TRAIN = a_queue(
    "train",
    parent=QueueId("team"),
    limit_compute_milli=4000,
    limit_model_milli={"h100-80": 2000, "l4-24": 500},
    guaranteed_compute_milli=1000,
    weight=3,
    order=QueueOrder.SEED,
    is_fair=False,
)


def test_queues_are_shown_below_the_one_above_them() -> None:
    """By name on each level; one whose parent nobody announced isn't lost."""
    rows = [{"queue": name, "parent": parent} for name, parent in (
        ("a", "z"), ("b", None), ("c", "z"), ("d", "a"), ("lost", "gone"), ("z", None)
    )]  # fmt: skip
    assert [(row["queue"], row["level"]) for row in as_tree(rows)] == [
        ("b", 0),
        ("z", 0),
        ("a", 1),
        ("d", 2),
        ("c", 1),
        ("lost", 0),
    ]


def test_a_change_keeps_what_it_does_not_name() -> None:
    """As the wish says the whole queue, it starts from the queue as it was said last."""
    options = NOTHING | {
        "limits": ("jobs=5", "compute_milli=none", "l4-24=none", "b200=1000"),
        "guarantees": ("memory_mib=7", "h100-80=1"),
        "is_cordoned": True,
        "parent": "none",
        "order": "pool",
        "reason": "why",
    }
    given = changed(TRAIN, "train", options)
    assert msgspec.convert(given, QueueUpsertRequested) == QueueUpsertRequested(
        queue="train",
        tenants=("acme",),
        limit_jobs=5,
        limit_model_milli={"h100-80": 2000, "b200": 1000},
        guaranteed_compute_milli=1000,
        guaranteed_memory_mib=7,
        guaranteed_model_milli={"h100-80": 1},
        weight=3,
        is_fair=False,
        is_cordoned=True,
        reason="why",
    )
    assert changed(None, "new", NOTHING | {"tenants": ("acme",)})["tenants"] == ["acme"]


@pytest.mark.parametrize("pair", ["jobs", "jobs=", "jobs=-1", "jobs=many", "=3"])
def test_an_amount_that_cannot_be_read_is_told(pair: str) -> None:
    """With what was found, before anything is published."""
    with pytest.raises(CommandFailed) as failed:
        changed(TRAIN, "train", NOTHING | {"limits": (pair,)})
    assert failed.value.exit_code == Exit.USAGE
    assert repr(pair) in failed.value.message


def test_a_queue_that_is_as_the_file_has_it_is_left_alone() -> None:
    """So that applying a file again is no event; the reason alone makes no difference."""
    wish = msgspec.convert({**as_wish(TRAIN), "reason": "new words"}, QueueUpsertRequested)
    assert is_alike(TRAIN, wish)
    assert not is_alike(a_queue("train", parent=QueueId("team")), wish)


def test_one_queue_in_words() -> None:
    """What it holds, with what is guaranteed and what is the limit beside it; and why its jobs wait."""
    content = {
        "queue": "train",
        "parent": "team",
        "tenants": ["acme", "beta"],
        "weight": 3,
        "held_compute_milli": 1500,
        "held_memory_mib": 9000,
        "held_cpu_milli": 0,
        "held_jobs": 2,
        "borrowed_compute_milli": 500,
        "dominant_ppm": 123_400,
        "waiting": 4,
        "is_cordoned": True,
        "waits": {"WaitingForQuota": 3, "Held": 1},
        "policy": {
            "guaranteed_compute_milli": 1000,
            "limit_compute_milli": 4000,
            "limit_model_milli": {"h100-80": 2000},
            "order": "seed",
            "is_fair": True,
            "reclaim": False,
            "actor": "operator (user:ann)",
            "reason": "quarter 3",
        },
    }
    assert show_text(content).splitlines() == [
        "queue train below team, cordoned",
        "  tenants acme, beta; weight 3",
        "  holds 1500 milli-GPU, 1000 guaranteed, 4000 at most",
        "  holds 9000 MiB",
        "  holds 0 milli-CPU",
        "  holds 2 jobs",
        "  of h100-80: 2000 milli-GPU at most",
        "  borrows 500 milli-GPU; dominant share 12.34 % of the pool",
        "  order seed, tenants take turns, does not take back what is guaranteed to it",
        "  4 jobs wait here and below; its own: 3 WaitingForQuota, 1 Held",
        "  set by operator (user:ann): quarter 3",
    ]
