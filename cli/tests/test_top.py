"""One screen: what is on it, and that it fits."""

from typing import Any

import click

from apportion.cli.top import Seen, frame

NOON = 1_788_264_000_000_000_000
S = 1_000_000_000


def a_node(name: str, state: str = "ready", *, health: str = "healthy") -> dict[str, Any]:
    device = {
        "health": health,
        "compute_milli": 1000,
        "used_compute_milli": 250,
        "memory_mib": 80_000,
        "used_memory_mib": 40_000,
    }
    return {"node_id": name, "state": state, "devices": [device, {**device, "health": "healthy"}], "runs": ["r"]}


def seen(**changes: Any) -> Seen:
    given: dict[str, Any] = {
        "pool": "main",
        "nodes": [a_node("node-1"), a_node("node-2", "fenced", health="failed")],
        "frozen": False,
        "jobs": [
            {"job_id": "acme/a\x1b[31m", "state": "queued", "pending": "Priority", "queued_at": NOON - 90 * S},
            {"job_id": "acme/b", "state": "queued", "pending": "Priority", "queued_at": NOON - 5 * S},
            {"job_id": "acme/c", "state": "running", "pending": None, "queued_at": NOON},
        ],
        "jobs_total": 3,
        "alerts": [
            {
                "rule": "device-hot",
                "about": "GPU-1",
                "severity": "warning",
                "value": 90,
                "unit": "C",
                "raised_at": NOON - 60 * S,
                "state": "firing",
            }
        ],
        "faults": [],
        "behind": 3,
    }
    return Seen(**{**given, **changes})


def shown(what: Seen, *, width: int = 100, height: int = 40) -> list[str]:
    return [click.unstyle(line) for line in frame(what, width=width, height=height, now=NOON)]


def test_the_three_questions_are_answered_on_one_screen() -> None:
    """How full, who waits and why, what is wrong."""
    text = "\n".join(shown(seen()))
    assert "2 nodes, 4 devices   log 3 behind   12:00:00 UTC" in text
    assert "compute ████············  25%" in text
    assert "memory ████████········  50%" in text
    assert "node-2           fenced " in text
    assert "1 failed" in text
    assert "WAITING 2 of 3 jobs   Priority 2" in text
    assert "device-hot:GPU-1  90 C" in text


def test_what_a_tenant_named_a_job_cannot_move_the_cursor() -> None:
    """A name is text, whatever is in it."""
    assert not any("\x1b[31m" in line for line in frame(seen(), width=100, height=40, now=NOON) if "acme/a" in line)


def test_a_frozen_pool_and_a_fault_are_said_first() -> None:
    fault = {"kind": "bus-slow", "target": "", "actor": "user:eve"}
    lines = shown(seen(frozen=True, faults=[fault]))
    assert lines[1].startswith("FROZEN")
    assert lines[2].startswith("FAULT bus-slow")


def test_a_frame_fits_whatever_the_pool() -> None:
    """Waiting and alerts stay on the screen when there are many nodes."""
    nodes = [a_node(f"node-{number}") for number in range(200)]
    lines = shown(seen(nodes=nodes), width=60, height=20)
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 60
    assert any("more" in line for line in lines)
    assert any(line.startswith("ALERTS 1") for line in lines)
