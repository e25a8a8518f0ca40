"""A job's story in words: every kind of fact that can be part of one has a sentence, and it holds what was said."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from apportion.cli.story import sentence, story_lines, told
from apportion.contracts import events as ev
from apportion.contracts.causes import FaultEnd, FaultKind, Pending, RunCause, StopCause
from apportion.contracts.codec import encode_body
from apportion.contracts.ids import JobId, NodeId, RunId
from apportion.contracts.testing import NOON, a_job, a_job_request, a_placement

JOB, RUN, NODE = JobId("acme/train-7"), RunId("acme/train-7/0/1"), NodeId("node-1")

ADMITTED = (
    "was admitted: 250 milli-GPU and 4096 MiB of 1 device(s), 1 replica(s), class batch, priority 500, "
    "queue main (wish 1)"
)
PLACED = (
    "replica 0 (attempt 1) was placed on node-1: 250 milli-GPU and 4096 MiB of GPU-node-1-0 (mps); "
    "the best of 1 candidates with 7 points, 2 nodes were out"
)


def row(event: ev.Event, ordinal: int = 1, **more: Any) -> dict[str, Any]:
    """As v_job_timeline has it."""
    cause = getattr(event, "cause", None) or getattr(event, "code", None)
    return {
        "ordinal": ordinal,
        "at": "2026-09-01 12:00:00.000",
        "recorded_at": NOON + ordinal * 1_500_000_000,
        "kind": type(event).__name__,
        "said_by": "somebody",
        "actor": getattr(event, "actor", None),
        "cause": None if cause is None else str(cause),
        "run_id": getattr(event, "run_id", None),
        "node_id": getattr(event, "node_id", None),
        "body": json.loads(encode_body(event)),
        **more,
    }


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (a_job_request(), "was asked for in queue main: gpu_milli 250, gpu_memory_mib 4096"),
        (
            a_job(),
            ADMITTED,
        ),
        (
            ev.JobPendingReasonChanged(
                job_id=JOB,
                code=Pending.INSUFFICIENT_COMPUTE,
                requested={"compute_milli": 250, "devices": 1},
                available={"compute_milli": 100},
                since_at=NOON,
                hint="wait",
            ),
            "waits: InsufficientCompute (compute_milli 250 wanted, 100 there; devices 1 wanted): wait",
        ),
        (
            a_placement(candidates=(ev.Candidate(node_id=NODE, devices=(), score=7),), excluded={"Cordoned": 2}),
            PLACED,
        ),
        (
            ev.RunStopOrdered(
                run_id=RUN, node_id=NODE, cause=StopCause.PREEMPTED, grace_s=5, actor="user:ann", reason="for b"
            ),
            "replica 0 (attempt 1) was told to stop by user:ann: Preempted (for b), with 5 s to end by itself",
        ),
        (
            ev.RunFinished(
                run_id=RUN,
                node_id=NODE,
                cause=RunCause.OUT_OF_MEMORY,
                exit_code=1,
                finished_at=NOON,
                peak_memory_mib=9,
                detail="cudaMalloc",
            ),
            "replica 0 (attempt 1) ended: OutOfMemory, exit code 1, at most 9 MiB used, cudaMalloc",
        ),
        (
            ev.JobStopping(job_id=JOB, attempt=1, cause=StopCause.CANCELLED, actor="user:ann", requeue=False),
            "has to stop, as user:ann wants: Cancelled; it ends with that",
        ),
        (
            ev.JobRequeued(job_id=JOB, attempt=2, cause=RunCause.NODE_LOST, retries_left=3),
            "waits again (at once) as attempt 2: NodeLost; 3 retries left",
        ),
        (
            ev.JobSucceeded(job_id=JOB, attempts=2, wait_ms=1500, run_ms=60_000),
            "SUCCEEDED after 2 attempt(s): waited 1.5s, ran 1m0s",
        ),
        (
            ev.JobFailed(job_id=JOB, attempts=1, cause=RunCause.KILLED, signal=9),
            "FAILED after 1 attempt(s): Killed, signal 9",
        ),
        (ev.JobCancelled(job_id=JOB, actor="user:ann", reason="typo"), "was CANCELLED by user:ann (typo)"),
        (ev.JobCancelRequested(job_id="train-7", reason="typo"), "JobCancelRequested by somebody (typo)"),
    ],
)
def test_a_fact_in_words(event: ev.Event, expected: str) -> None:
    assert sentence(row(event)) == expected


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            ev.FaultInjected(
                fault_id="fault-1",
                kind=FaultKind.NODE_PARTITION,
                target="node-1",
                for_s=30,
                until_at=1,
                actor="user:eve",
                reason="drill",
                answers=1,
            ),
            "meanwhile: node-partition node-1 was broken on purpose for 30 s, by user:eve (drill)",
        ),
        (
            ev.FaultCleared(fault_id="fault-1", kind=FaultKind.BUS_SLOW, why=FaultEnd.EXPIRED),
            "meanwhile: bus-slow was mended (Expired)",
        ),
        (
            ev.LeaseClaimed(author="placer", session="s", core="c", follows="r", silent_ms=2_100),
            "meanwhile: a standby took over as placer after 2.1s of silence",
        ),
        (
            ev.NodeLost(node_id=NODE, silent_ms=3_100, lease_ms=3_000, rule="silence"),
            "meanwhile: node-1 was given up after 3.1s of silence",
        ),
        (
            ev.ControlPlaneFrozen(silent=3, nodes=4),
            "meanwhile: nothing was placed or fenced any more: 3 of 4 nodes were silent",
        ),
        (
            ev.NodeDraining(node_id=NODE, actor="user:eve", reason="new fan", deadline_at=1),
            "meanwhile: node-1 was drained by user:eve (new fan)",
        ),
        (ev.NodeRecovered(node_id=NODE, epoch=1, away_ms=2), "meanwhile: node-1 is heard again"),
    ],
)
def test_what_befell_the_pool_meanwhile_in_words(event: ev.Event, expected: str) -> None:
    """Who looks back at a job sees what was broken around it, and that it was on purpose."""
    assert sentence(row(event)) == expected


def test_the_story_is_in_order_with_who_said_so_and_when() -> None:
    """A fencing names its run, an unreadable message and a type of a newer version are part of it."""
    lost = row(ev.NodeFenced(node_id=NODE, epoch=1, reason="silent"), 3, run_id=RUN)
    odd = {**row(a_job(), 4), "kind": None, "body": None, "cause": "NotJson"}
    new = {**row(a_job(), 9), "kind": "JobBlessed", "cause": None}
    story = told([row(a_job(), 1), lost, odd, new])
    assert [fact["after_ms"] for fact in story] == [0, 3000, 4500, 12_000]
    assert [line.split(maxsplit=4)[4] for line in story_lines("acme/train-7", story)[2:]] == [
        "replica 0 (attempt 1) was lost: node node-1 was fenced (silent)  [somebody]",
        "an unreadable message: NotJson  [somebody]",
        "JobBlessed  [somebody]",
    ]


def test_every_fact_about_a_job_has_a_sentence_of_its_own() -> None:
    """What is added to the contract is told in words, too: its name alone is for types of newer versions."""
    from tests.contract.golden import example

    for kind in (*ev.FACTS, *ev.WISHES):
        if {"job_id", "run_id"} & set(kind.__struct_fields__):
            said = sentence(row(example(kind)))
            assert said.partition(":")[0] != kind.__name__, kind


def test_what_was_erased_is_told_as_such() -> None:
    """Not as a job that asked for the defaults; bytes that nobody could read keep their own words."""
    assert sentence(row(a_job_request(), body=None)) == "JobRequested: what it said was erased from the log"
    assert "erased" not in sentence(row(a_job_request(), body=None, cause="NotJson"))


def test_what_earlier_runs_advise_is_part_of_the_story() -> None:
    """Whoever reads why a job holds what it holds should see that it asked for more than it needs."""
    advice = ev.MemoryAdvice(
        asked_mib=40_960,
        peak_mib_max=14_336,
        runs=3,
        suggested_mib=16_640,
        text="asked 40 GiB, never used more than 14 GiB in 3 runs",
    )
    admitted = replace(a_job(), advice=advice)
    assert sentence(row(admitted)).endswith(
        "(wish 1); advice: asked 40 GiB, never used more than 14 GiB in 3 runs, 16640 MiB would do"
    )
