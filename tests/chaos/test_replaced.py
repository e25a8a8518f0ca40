"""What chaos says of jobs that a fence took devices from: whether there was room is told by facts."""

from apportion.contracts import events as ev
from apportion.contracts.causes import FaultKind, RunCause
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import JobId, NodeId, RunId
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, as_fact
from bench.chaos import scenario_of
from bench.replaced import Sort, replaced, sorts

S = 1_000_000_000
JOB = JobId("acme/train-7")


def told(*facts: tuple[float, ev.Fact]) -> list[Entry]:
    """Entries of facts, each so many seconds after noon."""
    return [
        as_fact(
            fact,
            seq,
            author=f"agent-{fact.node_id}" if isinstance(fact, ev.NodeRegistered) else "",
            at=NOON + int(at * S),
        )
        for seq, (at, fact) in enumerate(facts, start=1)
    ]


def lost(*between: tuple[float, ev.Fact], others: tuple[ev.Fact, ...]) -> list[Entry]:
    """A job on node-1 that is fenced at 10 s, requeued at 10.5 s, placed on node-2 at 12 s."""
    run = a_placement().run_id
    return told(
        (0, a_node("node-1", devices=1)),
        (0, a_job()),
        (0, a_placement()),
        *((1.0, fact) for fact in others),
        (10, ev.NodeFenced(node_id=NodeId("node-1"), epoch=1, runs=(RunId(run),), reason="r")),
        *between,
        (10.5, ev.JobRequeued(job_id=JOB, attempt=2, cause=RunCause.NODE_LOST)),
        (12, a_placement(node="node-2", attempt=2)),
    )


def test_the_seconds_from_the_fence_and_their_parts_are_told() -> None:
    found = replaced(lost(others=(a_node("node-2", devices=1),)))
    assert sorts(found)[0] == Sort(
        had_room=True, is_hindered=False, jobs=1, p50_s=2.0, p95_s=2.0, max_s=2.0, requeued_s_p50=0.5
    )
    assert [sort.jobs for sort in sorts(found)] == [1, 0, 0, 0]


def test_room_that_somebody_who_waits_would_take_is_none() -> None:
    """Else a full pool's wait for its turn would count as slowness of healing."""
    whole = a_job("other", compute_milli=1000, memory_mib=81_920)
    (one,) = replaced(lost(others=(a_node("node-2", devices=1), whole)))
    assert not one.had_room
    (one,) = replaced(lost(others=(a_node("node-2", devices=2), whole)))
    assert one.had_room


def test_a_node_that_is_suspected_gives_no_room() -> None:
    suspected = ev.NodeSuspected(node_id=NodeId("node-2"), epoch=0, silent_ms=5000, lease_ms=20_000)
    (one,) = replaced(lost(others=(a_node("node-2", devices=1), suspected)))
    assert not one.had_room


def test_what_broke_deciding_between_is_told_and_a_fault_elsewhere_is_not() -> None:
    def broken(kind: FaultKind, target: str) -> ev.FaultInjected:
        return ev.FaultInjected(
            fault_id=f"f-{kind}", kind=kind, target=target, for_s=3, until_at=NOON, actor="ops", reason="r", answers=1
        )

    paused = broken(FaultKind.SERVICE_PAUSE, "placer")
    (one,) = replaced(lost((10.2, paused), others=(a_node("node-2", devices=1),)))
    assert one.hindered_by == {"service-pause"}
    (one,) = replaced(lost((10.2, broken(FaultKind.DEVICE_HEAT, "node-2/0")), others=(a_node("node-2", devices=1),)))
    assert one.hindered_by == set()


def test_the_disk_is_filled_only_where_it_is_the_pools_own() -> None:
    """A full disk of the whole machine would be everybody's."""

    def kinds(*, fills_disk: bool) -> set[FaultKind]:
        steps = scenario_of(1, 300, fills_disk=fills_disk).step
        return {step.fault.kind for step in steps if step.fault is not None}

    assert kinds(fills_disk=True) == set(FaultKind) - {FaultKind.DEVICE_HEAT}
    assert FaultKind.DISK_FULL not in kinds(fills_disk=False)
