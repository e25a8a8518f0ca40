"""What the placer decides: given a history, at this moment, exactly these facts."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import DeviceHealth, Mode, Pending, RunAction, RunCause, ServiceClass, StopCause
from apportion.contracts.ids import ADMISSION, PLACER, DeviceUuid, JobId, NodeId, RunId, TenantId, agent_author
from apportion.contracts.testing import (
    NOON,
    a_device,
    a_job,
    a_node,
    a_placement,
    a_queue,
    as_fact,
)
from apportion.placer import core
from apportion.placer.policies import BEST_FIT, policy_id
from apportion.placer.state import S, State

RUN = RunId("acme/train-7/0/1")
HALF = 40_960
WHOLE = 81_920


def told(*facts: ev.Fact, at: int = NOON) -> State:
    """The state after these facts, each by its author."""
    return also_told(core.initial(), *facts, at=at)


def also_told(state: State, *facts: ev.Fact, at: int = NOON) -> State:
    """The state after these facts as well."""
    for fact in facts:
        author = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else ""
        if isinstance(fact, ev.LeaseClaimed):
            author = fact.author
        state = core.evolve(state, as_fact(fact, state.pool.seq + 1, author=author, at=at))
    return state


def placements(facts: Iterable[ev.Fact]) -> list[tuple[str, str, str]]:
    """Run, node and device of each placement, in the order in which they were decided."""
    return [
        (fact.run_id, fact.node_id, "+".join(piece.device_uuid for piece in fact.slices))
        for fact in facts
        if isinstance(fact, ev.RunPlaced)
    ]


def reasons(facts: Iterable[ev.Fact]) -> dict[str, Pending]:
    """What is said of each job that waits."""
    return {fact.job_id: fact.code for fact in facts if isinstance(fact, ev.JobPendingReasonChanged)}


def settled(state: State, now: int = NOON) -> list[ev.Fact]:
    """What is decided, having checked that with it folded nothing more is said."""
    facts = core.decide(state, now)
    also_told(state, *facts)
    assert core.decide(state, now) == []
    return facts


def test_a_job_that_fits_is_placed_with_its_reasons() -> None:
    """The one fact that moves everything: it names the node, the slice, what else was possible, and its cause."""
    state = told(a_queue(), a_node("node-1", devices=1), a_node("node-2", devices=1), a_job())
    assert core.decide(state, NOON) == [
        a_placement(
            caused_by="fact-4",
            candidates=(
                ev.Candidate(
                    node_id=NodeId("node-1"),
                    devices=(DeviceUuid("GPU-node-1-0"),),
                    score=-75_009_500_000,
                    parts={"model": 0, "empty_devices": 0, "scarcer_left": -75_000_000_000, "other_left": -9_500_000},
                ),
                ev.Candidate(
                    node_id=NodeId("node-2"),
                    devices=(DeviceUuid("GPU-node-2-0"),),
                    score=-75_009_500_000,
                    parts={"model": 0, "empty_devices": 0, "scarcer_left": -75_000_000_000, "other_left": -9_500_000},
                ),
            ),
            policy=policy_id(BEST_FIT),
        )
    ]


def test_tightest_device_that_fits_wins() -> None:
    """Empty devices stay empty for those who need a whole one."""
    state = told(
        a_queue(),
        a_node("node-1"),
        a_node("node-2", devices=1),
        a_job("first"),
        a_placement("acme/first", node="node-2"),
        a_job("second"),
    )
    assert placements(settled(state)) == [("acme/second/0/1", "node-2", "GPU-node-2-0")]


def test_memory_and_compute_must_be_free_on_the_same_device() -> None:
    """Free memory on one device and free compute on another are no slice."""
    state = told(
        a_queue(),
        a_node("node-1"),
        a_job("compute", compute_milli=900, memory_mib=1000),
        a_placement("acme/compute", device=0, compute_milli=900, memory_mib=1000),
        a_job("memory", compute_milli=100, memory_mib=80_000),
        a_placement("acme/memory", device=1, compute_milli=100, memory_mib=80_000),
        a_job("both", compute_milli=500, memory_mib=HALF),
    )
    assert core.decide(state, NOON) == [
        ev.JobPendingReasonChanged(
            caused_by="fact-7",
            job_id=JobId("acme/both"),
            code=Pending.FRAGMENTED_DEVICES,
            requested={"devices": 1, "compute_milli": 500, "memory_mib": HALF},
            available={
                "cpu_milli": 64_000,
                "host_memory_mib": 512_000,
                "compute_milli": 900,
                "memory_mib": 80_920,
                "devices": 0,
            },
            blocking_ids=("acme/compute", "acme/memory"),
            nodes={"FragmentedDevices": 1},
            since_at=NOON,
            hint="Some device has 900 milli-GPU free, some has 80920 MiB, "
            "and none has enough of both: it starts when runs on one device end.",
        )
    ]


def test_order_is_class_then_priority_then_age() -> None:
    """Who goes first is a rule that anybody can check in the log."""
    state = told(
        a_queue(),
        a_job("old-spot", service_class=ServiceClass.SPOT, priority=1000),
        a_job("old-batch"),
        a_job("new-batch"),
        a_job("urgent-batch", priority=501),
        a_job("online", service_class=ServiceClass.ONLINE, priority=0),
        a_job("standard", service_class=ServiceClass.STANDARD),
        a_node("node-1"),
    )
    assert [run for run, _, _ in placements(settled(state))] == [
        "acme/online/0/1",
        "acme/standard/0/1",
        "acme/urgent-batch/0/1",
        "acme/old-batch/0/1",
        "acme/new-batch/0/1",
        "acme/old-spot/0/1",
    ]


def test_whole_devices_are_distinct_empty_and_of_one_node() -> None:
    """A training over two devices gets both in full, side by side."""
    state = told(
        a_queue(),
        a_node("node-1", devices=3),
        a_node("node-2", devices=2),
        a_job("small"),
        a_placement("acme/small", node="node-2"),
        a_job("pair", devices=2, compute_milli=1000, memory_mib=0),
    )
    facts = settled(state)
    assert placements(facts) == [("acme/pair/0/1", "node-1", "GPU-node-1-0+GPU-node-1-1")]
    assert isinstance(facts[0], ev.RunPlaced)
    assert {(piece.compute_milli, piece.memory_mib, piece.mode) for piece in facts[0].slices} == {
        (1000, WHOLE, Mode.EXCLUSIVE)
    }
    assert facts[0].excluded == {"DevicesBusy": 1}


def test_nothing_is_placed_beside_an_exclusive_run() -> None:
    """Exclusive means its own fault domain."""
    state = told(
        a_queue(),
        a_node("node-1", devices=1),
        a_job("alone", mode=Mode.EXCLUSIVE),
        a_job("other"),
    )
    facts = settled(state)
    assert placements(facts) == [("acme/alone/0/1", "node-1", "GPU-node-1-0")]
    assert reasons(facts) == {"acme/other": Pending.INSUFFICIENT_GPU}


def test_modes_are_never_mixed_on_one_device() -> None:
    """MPS clients and plain time slices on one device would void what both were promised."""
    state = told(
        a_queue(),
        a_node("node-1", devices=2),
        a_job("sliced", mode=Mode.TIMESLICE),
        a_job("shared", mode=Mode.MPS),
        a_job("any"),
    )
    facts = settled(state)
    placed = [fact.slices[0] for fact in facts if isinstance(fact, ev.RunPlaced)]
    assert [(piece.device_uuid, piece.mode) for piece in placed] == [
        ("GPU-node-1-0", Mode.TIMESLICE),
        ("GPU-node-1-1", Mode.MPS),
        ("GPU-node-1-0", Mode.TIMESLICE),
    ]


def test_tenants_share_an_mps_device_only_where_the_pool_trusts_them() -> None:
    """One MPS client's fault ends all of its device's clients, so who shares is a setting."""
    facts = (
        a_queue(tenants=("acme", "beta")),
        a_node("node-1", devices=1),
        a_job("first"),
        a_placement("acme/first"),
        a_job("second", tenant=TenantId("beta")),
    )
    lease = ev.LeaseClaimed(author="placer", session="s1", core=core.POLICY, config={"mps_trust": "pool"})
    assert reasons(core.decide(told(*facts), NOON)) == {"beta/second": Pending.INSUFFICIENT_GPU}
    for told_ in (told(lease, *facts), told(*facts, lease)):
        assert placements(core.decide(told_, NOON)) == [("beta/second/0/1", "node-1", "GPU-node-1-0")]


def test_models_are_taken_in_the_order_of_preference() -> None:
    """The first model that has room is the one."""
    old = msgspec.structs.replace(a_node("node-1"), devices=(a_device(0, model="a100-80"),))
    state = told(a_queue(), old, a_node("node-2", devices=1), a_job(models=("h100-80", "a100-80"), compute_milli=600))
    assert placements(settled(state)) == [("acme/train-7/0/1", "node-2", "GPU-node-2-0")]
    also_told(state, a_job("next", models=("h100-80", "a100-80"), compute_milli=600))
    assert placements(settled(state)) == [("acme/next/0/1", "node-1", "GPU-node-1-0")]


def test_a_gang_starts_whole_or_waits_whole() -> None:
    """Half a training is a waste of devices."""
    gang = a_job("gang", replicas=3, compute_milli=1000, memory_mib=0)
    state = told(a_queue(), a_node("node-1", devices=2), gang)
    facts = settled(state)
    assert placements(facts) == []
    assert reasons(facts) == {"acme/gang": Pending.GANG_INCOMPLETE}
    also_told(state, a_node("node-2", devices=1))
    assert placements(settled(state)) == [
        ("acme/gang/0/1", "node-2", "GPU-node-2-0"),
        ("acme/gang/1/1", "node-1", "GPU-node-1-0"),
        ("acme/gang/2/1", "node-1", "GPU-node-1-1"),
    ]


def test_a_queue_never_exceeds_its_limits() -> None:
    """The second job of the same round sees what the first took."""
    state = told(a_queue(limit_compute_milli=400), a_node(), a_job("first"), a_job("second"))
    facts = settled(state)
    assert placements(facts) == [("acme/first/0/1", "node-1", "GPU-node-1-0")]
    assert facts[1] == ev.JobPendingReasonChanged(
        caused_by="fact-4",
        job_id=JobId("acme/second"),
        code=Pending.WAITING_FOR_QUOTA,
        requested={"devices": 1, "compute_milli": 250, "memory_mib": 4096},
        available={"compute_milli": 150},
        limit={"compute_milli": 400},
        blocking_ids=("acme/first",),
        since_at=NOON,
        hint="Queue main is at its limit of compute_milli (250 of 400 in use): "
        "it starts when runs there end, or with a higher limit.",
    )


def test_a_queue_runs_at_most_as_many_jobs_as_its_limit() -> None:
    """A gang is one job."""
    state = told(a_queue(limit_jobs=1), a_node(), a_job("first", replicas=2), a_job("second"))
    facts = settled(state)
    assert [run for run, _, _ in placements(facts)] == ["acme/first/0/1", "acme/first/1/1"]
    assert reasons(facts) == {"acme/second": Pending.WAITING_FOR_QUOTA}


def test_one_that_does_not_fit_lets_later_ones_pass() -> None:
    """Backfill: a device that is free now should not idle for a job that can't use it."""
    state = told(a_queue(), a_node(devices=1), a_job("large", devices=2), a_job("small"))
    facts = settled(state)
    assert placements(facts) == [("acme/small/0/1", "node-1", "GPU-node-1-0")]
    assert reasons(facts) == {"acme/large": Pending.NO_MATCHING_DEVICE}


def test_nodes_are_kept_for_the_first_that_has_waited_long() -> None:
    """Otherwise a stream of small jobs keeps a large one out for ever."""
    state = told(
        a_queue(),
        a_node(devices=1),
        a_job("running"),
        a_placement("acme/running"),
        a_job("whole", compute_milli=1000, memory_mib=0),
        a_job("small"),
    )
    early = core.decide(state, NOON + 29 * S)
    assert placements(early) == [("acme/small/0/1", "node-1", "GPU-node-1-0")]
    late = settled(state, NOON + 30 * S)
    assert placements(late) == []
    assert reasons(late) == {"acme/whole": Pending.INSUFFICIENT_GPU, "acme/small": Pending.RESERVED_FOR_OTHER}
    also_told(
        state,
        ev.RunReleased(run_id=RunId("acme/running/0/1"), node_id=NodeId("node-1"), released_at=NOON + 31 * S),
    )
    assert placements(settled(state, NOON + 31 * S)) == [("acme/whole/0/1", "node-1", "GPU-node-1-0")]


def test_a_job_waits_for_its_instant_and_wakes_the_placer() -> None:
    """A delay is a reason like any other, and nobody polls for its end."""
    state = told(a_queue(), a_node(), a_job(not_before_at=NOON + 60 * S))
    facts = settled(state)
    assert reasons(facts) == {"acme/train-7": Pending.NOT_BEFORE}
    assert core.wake_at(state, NOON) == NOON + 60 * S
    assert placements(settled(state, NOON + 60 * S)) == [("acme/train-7/0/1", "node-1", "GPU-node-1-0")]
    assert core.wake_at(state, NOON + 60 * S) is None


def test_a_job_whose_instant_came_without_room_is_told_so_once() -> None:
    """It moves on to the others of its shape."""
    state = told(a_queue(), a_job(not_before_at=NOON + 60 * S))
    assert reasons(settled(state)) == {"acme/train-7": Pending.NOT_BEFORE}
    assert reasons(settled(state, NOON + 61 * S)) == {"acme/train-7": Pending.NO_NODES_IN_POOL}
    also_told(state, a_node())
    assert placements(settled(state, NOON + 62 * S)) == [("acme/train-7/0/1", "node-1", "GPU-node-1-0")]


def test_a_requeued_job_backs_off_and_then_runs_as_its_next_attempt() -> None:
    """The run's id tells the attempts apart."""
    run = RunId("acme/train-7/0/1")
    state = told(a_queue(), a_node(), a_job(retry_limit=2), a_placement())
    also_told(
        state,
        ev.RunFinished(run_id=run, node_id=NodeId("node-1"), cause=RunCause.USER_ERROR, finished_at=NOON),
        ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=NOON),
        ev.JobRequeued(
            job_id=JobId("acme/train-7"),
            attempt=2,
            cause=RunCause.USER_ERROR,
            not_before_at=NOON + 10 * S,
            retries_left=1,
        ),
    )
    assert reasons(settled(state)) == {"acme/train-7": Pending.BACKOFF}
    assert placements(settled(state, NOON + 10 * S)) == [("acme/train-7/0/2", "node-1", "GPU-node-1-0")]


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        (ev.NodeCordoned(node_id=NodeId("node-1"), actor="op", reason="r"), Pending.NODES_CORDONED),
        (ev.NodeDraining(node_id=NodeId("node-1"), actor="op", reason="r", deadline_at=0), Pending.NODES_CORDONED),
        (ev.NodeSuspected(node_id=NodeId("node-1"), epoch=0, silent_ms=1, lease_ms=2), Pending.NO_NODES_IN_POOL),
        (ev.NodeFenced(node_id=NodeId("node-1"), epoch=1), Pending.NO_NODES_IN_POOL),
        (ev.ControlPlaneFrozen(silent=1, nodes=1), Pending.CONTROL_PLANE_FROZEN),
    ],
)
def test_nothing_is_placed_on_a_node_that_may_not_be_used(fact: ev.Fact, reason: Pending) -> None:
    """Each of these is somebody's word that the node can't be relied on."""
    assert reasons(settled(told(a_queue(), a_node(), fact, a_job()))) == {"acme/train-7": reason}


def test_nothing_is_placed_on_an_unhealthy_device() -> None:
    """Its neighbour on the same node is still good."""
    sick = ev.DeviceHealthChanged(
        node_id=NodeId("node-1"),
        device_uuid=DeviceUuid("GPU-node-1-0"),
        before=DeviceHealth.HEALTHY,
        after=DeviceHealth.DEGRADED,
        code="xid-63",
    )
    state = told(a_queue(), a_node(), sick, a_job("small"), a_job("pair", devices=2))
    facts = settled(state)
    assert placements(facts) == [("acme/small/0/1", "node-1", "GPU-node-1-1")]
    assert reasons(facts) == {"acme/pair": Pending.INSUFFICIENT_GPU}


def test_a_node_that_came_back_with_its_new_epoch_is_used_again() -> None:
    """And the placement names that epoch, so that an agent of the old one refuses it."""
    state = told(a_queue(), a_node(), ev.NodeFenced(node_id=NodeId("node-1"), epoch=1), a_node(epoch=1), a_job())
    facts = core.decide(state, NOON)
    assert isinstance(facts[0], ev.RunPlaced)
    assert facts[0].node_epoch == 1


def test_live_runs_of_a_stopping_job_are_told_to_stop() -> None:
    """Each once: those that finished need no telling."""
    job = JobId("acme/train-7")
    state = told(
        a_queue(),
        a_node(),
        a_job(replicas=2, grace_s=7),
        a_placement(),
        a_placement(replica=1),
        ev.RunFinished(
            run_id=RunId("acme/train-7/0/1"), node_id=NodeId("node-1"), cause=RunCause.SUCCESS, finished_at=NOON
        ),
        ev.JobStopping(job_id=job, attempt=1, cause=StopCause.CANCELLED, actor="user:eva", reason="typo"),
    )
    assert settled(state) == [
        ev.RunStopOrdered(
            caused_by="fact-7",
            run_id=RunId("acme/train-7/1/1"),
            node_id=NodeId("node-1"),
            cause=StopCause.CANCELLED,
            grace_s=7,
            actor="user:eva",
            reason="typo",
        )
    ]


def test_runs_of_a_suspended_job_are_told_to_stand_still_and_then_to_go_on() -> None:
    """Those that start later too: what was suspended doesn't go on elsewhere by itself."""
    state = told(a_queue(), a_node(), a_job(), a_placement())
    suspended = ev.JobSuspended(job_id=JobId("acme/train-7"), actor="tenant:acme", reason="a demo", answers=2)
    also_told(state, suspended)
    assert core.decide(state, NOON) == []
    also_told(state, ev.RunStarted(run_id=RUN, node_id=NodeId("node-1"), pid=7, started_at=NOON))
    (order,) = settled(state)
    assert isinstance(order, ev.RunActionOrdered)
    assert (order.action, order.actor, order.reason) == (RunAction.SUSPEND, "tenant:acme", "a demo")
    also_told(state, ev.JobResumed(job_id=JobId("acme/train-7"), actor="operator", reason="over", answers=3))
    (order,) = settled(state)
    assert isinstance(order, ev.RunActionOrdered)
    assert (order.action, order.actor, order.reason) == (RunAction.RESUME, "operator", "over")


def test_runs_are_told_to_checkpoint_once_and_before_they_are_stopped() -> None:
    """A run that may go on elsewhere has the time for it, beside its grace."""
    job = JobId("acme/train-7")
    plan = ev.CheckpointPlan(signal="SIGUSR1", grace_s=20)
    state = told(a_queue(), a_node(), a_job(checkpoint=plan))
    (placed,) = (fact for fact in settled(state) if isinstance(fact, ev.RunPlaced))
    assert placed.checkpoint == plan
    also_told(state, ev.RunStarted(run_id=RUN, node_id=NodeId("node-1"), pid=7, started_at=NOON))
    also_told(state, ev.JobCheckpointing(job_id=job, attempt=1, actor="tenant:acme", answers=2))
    (order,) = settled(state)
    assert isinstance(order, ev.RunActionOrdered)
    assert order.action is RunAction.CHECKPOINT
    also_told(state, ev.JobStopping(job_id=job, attempt=1, cause=StopCause.PREEMPTED, actor="operator", answers=3))
    (stop,) = settled(state)
    assert isinstance(stop, ev.RunStopOrdered)
    assert stop.grace_s == 10 + 20


def test_a_run_that_was_placed_as_its_job_ended_is_told_to_stop() -> None:
    """Admission and the placer decide at the same time, and the node would start what was placed."""
    placed, cancelled = a_placement(), ev.JobCancelled(job_id=JobId("acme/train-7"), actor="user:eva")
    for history in ((placed, cancelled), (cancelled, placed)):
        facts = settled(told(a_queue(), a_node(), a_job(), *history))
        assert [msgspec.structs.replace(fact, caused_by="") for fact in facts] == [
            ev.RunStopOrdered(
                run_id=RunId("acme/train-7/0/1"),
                node_id=NodeId("node-1"),
                cause=StopCause.CANCELLED,
                grace_s=10,
                actor="service:placer",
                reason="the job had ended when this was placed",
            )
        ]


def test_runs_of_a_draining_node_are_told_to_stop_within_the_drain() -> None:
    """Their own grace, or what is left of the drain's where that is less."""
    state = told(a_queue(), a_node(), a_job(grace_s=60), a_placement())
    also_told(
        state,
        ev.NodeDraining(node_id=NodeId("node-1"), actor="op:max", reason="new driver", deadline_at=NOON + 30 * S),
    )
    assert settled(state, NOON + 10 * S) == [
        ev.RunStopOrdered(
            caused_by="fact-5",
            run_id=RunId("acme/train-7/0/1"),
            node_id=NodeId("node-1"),
            cause=StopCause.DRAINED,
            grace_s=20,
            actor="op:max",
            reason="new driver",
        )
    ]


def test_only_the_release_of_a_run_frees_its_slices() -> None:
    """A process that is gone may have left memory behind; the agent says when it has not."""
    run = RunId("acme/first/0/1")
    state = told(
        a_queue(),
        a_node(devices=1),
        a_job("first", compute_milli=1000),
        a_placement("acme/first", compute_milli=1000),
        a_job("second", compute_milli=1000),
        ev.RunFinished(run_id=run, node_id=NodeId("node-1"), cause=RunCause.SUCCESS, finished_at=NOON),
    )
    assert reasons(settled(state)) == {"acme/second": Pending.INSUFFICIENT_COMPUTE}
    also_told(state, ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=NOON))
    assert placements(settled(state)) == [("acme/second/0/1", "node-1", "GPU-node-1-0")]


def test_host_memory_and_cpus_count_as_well() -> None:
    """A device without CPUs to feed it is no place."""
    state = told(a_queue(), a_node(cpu_milli=8000), a_job("first", cpu_milli=6000), a_job("second", cpu_milli=6000))
    facts = settled(state)
    assert placements(facts) == [("acme/first/0/1", "node-1", "GPU-node-1-0")]
    assert reasons(facts) == {"acme/second": Pending.INSUFFICIENT_HOST}


def test_a_job_without_devices_needs_only_the_host() -> None:
    """It goes where devices are fewest."""
    state = told(a_queue(), a_node("node-1"), a_node("node-2", devices=1), a_job(devices=0, cpu_milli=1000))
    facts = settled(state)
    assert placements(facts) == [("acme/train-7/0/1", "node-2", "")]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"models": ("b200",)}, Pending.NO_MATCHING_DEVICE),
        ({"memory_mib": 90_000}, Pending.NO_MATCHING_DEVICE),
        ({"mode": Mode.MIG}, Pending.ISOLATION_UNAVAILABLE),
        ({"cpu_milli": 65_000}, Pending.INSUFFICIENT_HOST),
    ],
)
def test_what_no_node_could_ever_host_is_named(spec: dict[str, Any], reason: Pending) -> None:
    """Waiting won't help; the hint says what would."""
    assert reasons(settled(told(a_queue(), a_node(), a_job(**spec)))) == {"acme/train-7": reason}


def test_those_behind_the_first_are_told_once() -> None:
    """One release among many waiting jobs is a fact or two, not one for each."""
    state = told(
        a_queue(),
        a_node(devices=1),
        *(a_job(f"job-{i}", compute_milli=500, memory_mib=50_000) for i in range(6)),
    )
    facts = settled(state)
    assert len(placements(facts)) == 1
    assert list(reasons(facts)) == [f"acme/job-{i}" for i in range(1, 6)]
    also_told(state, ev.RunReleased(run_id=RunId("acme/job-0/0/1"), node_id=NodeId("node-1"), released_at=NOON))
    after = settled(state)
    assert placements(after) == [("acme/job-1/0/1", "node-1", "GPU-node-1-0")]
    assert list(reasons(after)) == ["acme/job-2"]


def test_a_round_is_bounded_and_the_next_goes_on() -> None:
    """One decision is one batch, and the bus bounds batches."""
    state = told(
        a_queue(),
        *(a_node(f"node-{i}", devices=8, cpu_milli=0, memory_mib=0) for i in range(130)),
        *(a_job(f"job-{i}", compute_milli=1000, memory_mib=0) for i in range(1000)),
    )
    first = core.decide(state, NOON)
    assert len(first) == len(placements(first)) == 900
    also_told(state, *first)
    assert len(placements(settled(state))) == 100


@pytest.mark.parametrize(("replicas", "placed"), [(900, 900), (950, 950), (990, 990), (991, 0)])
def test_a_gang_travels_in_one_batch(replicas: int, placed: int) -> None:
    """However little room the stops before it left; one that no batch can hold is told so."""
    draining = ev.NodeDraining(node_id=NodeId("node-2"), actor="op", reason="r", deadline_at=NOON)
    state = told(
        a_queue(),
        a_node("node-1", cpu_milli=1000),
        a_node("node-2"),
        a_job("old"),
        a_placement("acme/old", node="node-2"),
        draining,
        a_job("gang", devices=0, cpu_milli=1, replicas=replicas),
    )
    facts = core.decide(state, NOON)
    also_told(state, *facts)
    later = core.decide(state, NOON)
    assert len(facts) <= 1000
    assert len(later) <= 1000
    assert len(placements(facts + later)) == placed
    assert reasons(facts) == ({} if placed else {"acme/gang": Pending.GANG_INCOMPLETE})
    assert core.decide(also_told(state, *later), NOON) == []


def test_what_another_author_configures_is_not_believed() -> None:
    """Settings come from the placer's own claim alone."""
    lease = ev.LeaseClaimed(author="placer", session="s1", core="x", config={"reserve_after_s": 1})
    state = core.evolve(core.initial(), as_fact(lease, 1, author=ADMISSION))
    assert state.settings.reserve_after_s == 30
    assert core.evolve(state, as_fact(lease, 2, author=PLACER)).settings.reserve_after_s == 1


def _hold(name: str = "train-7", **changes: Any) -> ev.JobHeld:
    base = ev.JobHeld(job_id=JobId(f"acme/{name}"), actor="tenant:acme", reason="data is late", answers=1)
    return msgspec.structs.replace(base, **changes)


def test_a_held_job_is_not_placed_and_says_so_once() -> None:
    """The reason is a fact with who and why in it, and jobs behind it pass."""
    state = told(a_queue(), a_node(), a_job(), _hold(), a_job("next"))
    assert settled(state) == [
        a_placement(
            "acme/next",
            caused_by="fact-5",
            candidates=core.decide(told(a_queue(), a_node(), a_job("next")), NOON)[0].candidates,  # type: ignore[attr-defined]
            policy=policy_id(BEST_FIT),
        ),
        ev.JobPendingReasonChanged(
            caused_by="fact-3",
            job_id=JobId("acme/train-7"),
            code=Pending.HELD,
            since_at=NOON,
            hint="Held by tenant:acme: data is late. It can be placed once it is released.",
        ),
    ]


def test_a_released_job_is_placed_where_it_stood() -> None:
    """It keeps its age: a hold is no penalty."""
    state = told(a_queue(), a_node(devices=1), a_job("first", compute_milli=1000, memory_mib=WHOLE), _hold("first"))
    settled(state)
    also_told(state, a_job("second", compute_milli=1000, memory_mib=WHOLE))
    also_told(state, ev.JobReleased(job_id=JobId("acme/first"), actor="tenant:acme", answers=2))
    assert placements(settled(state)) == [("acme/first/0/1", "node-1", "GPU-node-1-0")]


def test_nothing_is_kept_for_a_held_job() -> None:
    """Else a hold would idle what others wait for."""
    big = a_job("big", compute_milli=1000, memory_mib=WHOLE)
    state = told(a_queue(), a_node(devices=1), a_job("x"), a_placement("acme/x", compute_milli=500), big, _hold("big"))
    also_told(state, a_job("small", compute_milli=100, memory_mib=1))
    assert placements(settled(state, NOON + 3600 * S)) == [("acme/small/0/1", "node-1", "GPU-node-1-0")]


def test_what_runs_of_a_held_job_runs_on_and_waits_once_it_was_requeued() -> None:
    """A hold outlasts an attempt; with a preemption it suspends a job."""
    state = told(a_queue(), a_node(), a_job(), a_placement(), _hold(by_operator=True, reason=""))
    assert settled(state) == []
    run = RunId("acme/train-7/0/1")
    also_told(
        state,
        ev.JobStopping(
            job_id=JobId("acme/train-7"), attempt=1, cause=StopCause.PREEMPTED, actor="operator", reason="urgent"
        ),
    )
    assert settled(state) == [
        ev.RunStopOrdered(
            caused_by="fact-6",
            run_id=run,
            node_id=NodeId("node-1"),
            cause=StopCause.PREEMPTED,
            grace_s=10,
            actor="operator",
            reason="urgent",
        )
    ]
    also_told(
        state,
        ev.RunFinished(run_id=run, node_id=NodeId("node-1"), cause=RunCause.PREEMPTED, finished_at=NOON),
        ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=NOON),
        ev.JobRequeued(job_id=JobId("acme/train-7"), attempt=2, cause=RunCause.PREEMPTED),
    )
    assert reasons(settled(state)) == {"acme/train-7": Pending.HELD}


def test_another_priority_moves_a_job_to_another_place_in_the_order() -> None:
    """Whether it was told why it waits or not."""
    whole: dict[str, Any] = {"compute_milli": 1000, "memory_mib": WHOLE}
    state = told(a_queue(), a_node(devices=1), a_job("x"), a_placement("acme/x", **whole))
    also_told(state, a_job("a", **whole), a_job("b", **whole))
    settled(state)
    also_told(
        state,
        ev.JobReprioritized(job_id=JobId("acme/b"), before=500, priority=501, actor="operator", answers=1),
        ev.RunReleased(run_id=RunId("acme/x/0/1"), node_id=NodeId("node-1"), released_at=NOON),
    )
    assert placements(settled(state)) == [("acme/b/0/1", "node-1", "GPU-node-1-0")]


def test_a_resized_job_is_placed_with_its_new_size() -> None:
    """What did not fit may fit, and what was said of its wait was about another size."""
    whole: dict[str, Any] = {"compute_milli": 1000, "memory_mib": WHOLE}
    state = told(a_queue(), a_node(devices=1), a_job("x"), a_placement("acme/x"), a_job("a", **whole))
    (waits,) = settled(state)
    assert isinstance(waits, ev.JobPendingReasonChanged)
    assert waits.requested == {"devices": 1, "compute_milli": 1000, "memory_mib": WHOLE}
    resize = ev.JobResized(
        job_id=JobId("acme/a"),
        compute_milli=800,
        memory_mib=WHOLE,
        compute_milli_before=1000,
        memory_mib_before=WHOLE,
        actor="tenant:acme",
        answers=1,
    )
    also_told(state, resize)
    (waits,) = settled(state)
    assert isinstance(waits, ev.JobPendingReasonChanged)
    assert waits.requested == {"devices": 1, "compute_milli": 800, "memory_mib": WHOLE}
    also_told(state, msgspec.structs.replace(resize, compute_milli=700, memory_mib=HALF, answers=2))
    (placed,) = settled(state)
    assert isinstance(placed, ev.RunPlaced)
    assert [(piece.compute_milli, piece.memory_mib) for piece in placed.slices] == [(700, HALF)]
    assert placed.caused_by == "fact-9"


def test_a_state_with_held_and_changed_jobs_outlives_a_restart() -> None:
    """Indexes built anew say what those kept up to date said."""
    state = told(a_queue(), a_node(), a_job("a"), a_job("b"), _hold("a"))
    also_told(state, ev.JobReprioritized(job_id=JobId("acme/b"), before=500, priority=1, actor="operator", answers=1))
    restored = core.restore(core.snapshot(state))
    assert core.decide(restored, NOON) == core.decide(state, NOON)
    assert core.snapshot(restored) == core.snapshot(state)


def test_a_job_shares_a_device_only_in_the_modes_that_were_allowed_it() -> None:
    """Admission found which modes isolate it as it asked; the first of them that a device offers is taken."""
    order = (Mode.TIMESLICE, Mode.MPS)
    facts = settled(told(a_queue(), a_node(devices=1), a_job(modes=order)))
    assert [s.mode for f in facts if isinstance(f, ev.RunPlaced) for s in f.slices] == [Mode.TIMESLICE]
    busy = told(a_queue(), a_node(devices=1), a_job("a", modes=(Mode.MPS,)), a_job("b", modes=(Mode.TIMESLICE,)))
    assert [run for run, _, _ in placements(settled(busy))] == ["acme/a/0/1"]


def test_a_job_that_follows_others_is_placed_once_they_have_ended_as_it_asked() -> None:
    """Until then it waits and says for whom; nobody waits behind it, and nothing is kept for it."""
    first = JobId("acme/first")
    follows = msgspec.structs.replace(
        a_job("second", depends_on=(ev.DependsOn(job_id=first),)), waits_for=(first,), answers=2
    )
    state = told(a_queue(), a_node(devices=1), follows, a_job("third", answers=3))
    facts = settled(state)
    assert placements(facts) == [("acme/third/0/1", "node-1", "GPU-node-1-0")]
    (waits,) = (fact for fact in facts if isinstance(fact, ev.JobPendingReasonChanged))
    assert (waits.job_id, waits.code, waits.blocking_ids) == ("acme/second", Pending.DEPENDENCY, (first,))
    also_told(state, *facts, ev.JobFailed(job_id=first, attempts=1, cause=RunCause.USER_ERROR))
    assert placements(settled(state)) == []
    state = told(a_queue(), a_node(devices=1), a_job("first"), follows)
    also_told(state, ev.JobSucceeded(job_id=first, attempts=1, wait_ms=0, run_ms=0))
    assert placements(settled(state)) == [("acme/second/0/1", "node-1", "GPU-node-1-0")]


@pytest.mark.parametrize("spec", [{"modes": (Mode.EXCLUSIVE,)}, {"dedicated": True}])
def test_a_job_that_may_share_with_nobody_gets_a_device_of_its_own(spec: dict[str, Any]) -> None:
    """The rest of the device isn't given away, and it counts as held."""
    facts = settled(told(a_queue(), a_node(devices=1), a_job("a", **spec), a_job("b")))
    (placed,) = (fact for fact in facts if isinstance(fact, ev.RunPlaced))
    assert placed.job_id == "acme/a"
    assert [(s.mode, s.compute_milli, s.memory_mib) for s in placed.slices] == [(Mode.EXCLUSIVE, 1000, WHOLE)]


def test_a_node_on_which_a_job_failed_gets_none_of_it_again() -> None:
    """It asked so; the other node is taken, and without one the job waits and says for which node."""
    again = ev.JobRequeued(
        job_id=JobId("acme/train-7"), attempt=2, cause=RunCause.USER_ERROR, avoid_nodes=(NodeId("node-1"),)
    )
    failed = (
        a_placement(),
        ev.RunFinished(run_id=RUN, node_id=NodeId("node-1"), cause=RunCause.USER_ERROR, finished_at=NOON),
        ev.RunReleased(run_id=RUN, node_id=NodeId("node-1"), released_at=NOON),
        again,
    )
    both = told(a_queue(), a_node("node-1"), a_node("node-2"), a_job(), *failed)
    assert [node for _, node, _ in placements(settled(both))] == ["node-2"]
    (waits,) = settled(told(a_queue(), a_node("node-1"), a_job(), *failed))
    assert isinstance(waits, ev.JobPendingReasonChanged)
    assert waits.nodes == {"NodeAvoided": 1}
