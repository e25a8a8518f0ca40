"""What a job may demand of nodes and devices: each demand keeps it off what is otherwise, and says so in numbers."""

from typing import Any

import msgspec
import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, Pending
from apportion.contracts.ids import PLACER, JobId, NodeId, agent_author
from apportion.contracts.testing import NOON, a_board, a_device, a_job, a_node, a_placement, a_queue, as_fact
from apportion.placer import core
from apportion.placer.state import State
from apportion.placer.why import why


def told(*facts: ev.Fact) -> State:
    state = core.initial()
    for seq, fact in enumerate(facts, 1):
        author = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else ""
        if isinstance(fact, ev.LeaseClaimed):
            author = PLACER
        state = core.evolve(state, as_fact(fact, seq, author=author))
    return state


def configured(**config: int | str) -> ev.LeaseClaimed:
    return ev.LeaseClaimed(author=PLACER, session="s1", core=core.POLICY, config=dict(config))


def a_node_of(name: str, devices: int = 1, node: dict[str, Any] | None = None, **device: Any) -> ev.NodeRegistered:
    found = tuple(a_device(at, node=name, **device) for at in range(devices))
    return msgspec.structs.replace(a_node(name), devices=found, **(node or {}))


def nodes_of(state: State) -> list[str]:
    return [fact.node_id for fact in core.decide(state, NOON) if isinstance(fact, ev.RunPlaced)]


def wait_of(state: State) -> ev.JobPendingReasonChanged:
    facts = core.decide(state, NOON)
    (fact,) = [fact for fact in facts if isinstance(fact, ev.JobPendingReasonChanged)]
    for seq, each in enumerate(facts, state.pool.seq + 1):
        state = core.evolve(state, as_fact(each, seq))
    assert core.decide(state, NOON) == []
    return fact


OLD: dict[str, Any] = {"arch": "ampere", "compute_capability": "8.0", "pcie_generation": 3, "pcie_lanes": 16}
NEW: dict[str, Any] = {
    "arch": "hopper", "compute_capability": "9.0", "pcie_generation": 5, "pcie_lanes": 16, "encoders": 100,
}  # fmt: skip
OLD_NODE = {"driver_version": "535.104", "cuda_version": "12.2", "labels": {"site": "oslo", "rack": "a"}}
NEW_NODE = {"driver_version": "580.95.05", "cuda_version": "13.0", "labels": {"site": "bergen"}}


@pytest.mark.parametrize(
    ("asked", "why_out", "code", "dropped"),
    [
        ({"min_arch": "hopper"}, "ArchitectureTooOld", Pending.NO_MATCHING_DEVICE, "device.min_arch"),
        (
            {"min_compute_capability": "8.9"},
            "ArchitectureTooOld",
            Pending.NO_MATCHING_DEVICE,
            "device.min_compute_capability",
        ),
        ({"min_driver": "550"}, "VersionMismatch", Pending.VERSION_MISMATCH, "runtime.min_driver"),
        ({"min_cuda": "12.4"}, "VersionMismatch", Pending.VERSION_MISMATCH, "runtime.min_cuda"),
        ({"required": {"site": "bergen"}}, "LabelMismatch", Pending.NO_MATCHING_NODE, "placement.required.site"),
        ({"avoid_nodes": ("old",)}, "NodeAvoided", Pending.NO_MATCHING_NODE, "placement.avoid_nodes"),
        ({"encoders": 10}, "NoMatchingDevice", Pending.NO_MATCHING_DEVICE, "encoders"),
        ({"pcie_mbps": 200_000}, "NoMatchingDevice", Pending.NO_MATCHING_DEVICE, "pcie_mbps"),
    ],
)
def test_each_demand_keeps_a_job_off_nodes_that_are_otherwise(
    asked: dict[str, Any], why_out: str, code: Pending, dropped: str
) -> None:
    """With the node that has it the job goes there; without, it waits, is told why, and what to drop."""
    old = a_node_of("old", node=OLD_NODE, **OLD)
    new = a_node_of("up-to-date", node=NEW_NODE, **NEW)
    state = told(a_queue(), old, new, a_job(**asked))
    (placed,) = [fact for fact in core.decide(state, NOON) if isinstance(fact, ev.RunPlaced)]
    assert placed.node_id == "up-to-date"
    assert placed.excluded == {why_out: 1}
    alone = told(a_queue(), old, a_job(**asked))
    told_why = wait_of(alone)
    assert (told_why.code, told_why.nodes) == (code, {why_out: 1})
    answer = why(alone.pool, JobId("acme/train-7"), NOON)
    assert answer is not None
    assert (answer.code, answer.could_start) == (code, False)
    assert [each.constraint for each in answer.changes if each.starts_now] == [dropped]


def test_kinds_and_vendors_are_data() -> None:
    """A pool may have devices that nobody here has heard of; who doesn't ask for them never gets them."""
    qpu = a_node_of("cryo", kind="qpu", vendor="acme-quantum", model="q-7", modes=(Mode.EXCLUSIVE,))
    whole: dict[str, Any] = {"compute_milli": 1000, "memory_mib": 0, "mode": Mode.EXCLUSIVE}
    assert nodes_of(told(a_queue(), qpu, a_node("gpus"), a_job(device_kind="qpu", **whole))) == ["cryo"]
    assert nodes_of(told(a_queue(), qpu, a_job(device_kind="qpu", vendor="other", **whole))) == []
    assert nodes_of(told(a_queue(), qpu, a_job(**whole))) == []


def test_preferences_add_to_the_score_and_exclude_nobody() -> None:
    """A label that is preferred outweighs how tight a node is, and is a part of the score that anybody can read."""
    full = a_placement("acme/first", node="tight")
    near = a_node("roomy", labels={"rack": "r1"})
    facts = (a_queue(), a_node("tight"), near, a_job("first"), full)
    (placed,) = [
        fact
        for fact in core.decide(told(*facts, a_job(preferred={"rack": "r1"})), NOON)
        if isinstance(fact, ev.RunPlaced)
    ]
    assert placed.node_id == "roomy"
    assert [(each.node_id, each.parts["preferred_labels"] > 0) for each in placed.candidates] == [
        ("roomy", True),
        ("tight", False),
    ]
    assert nodes_of(told(*facts, a_job(preferred={"rack": "elsewhere"}))) == ["tight"]


def devices_of(state: State) -> list[str]:
    return [
        piece.device_uuid.rpartition("-")[2]
        for fact in core.decide(state, NOON)
        if isinstance(fact, ev.RunPlaced)
        for piece in fact.slices
    ]


def test_several_devices_are_on_one_numa_node_or_joined_by_links_where_that_is_asked() -> None:
    """Strictly or not at all; and without being asked where it costs nothing."""
    pair: dict[str, Any] = {"devices": 2, "compute_milli": 1000, "memory_mib": 0}
    spread = msgspec.structs.replace(
        a_node(),
        devices=tuple(
            a_device(at, numa_node=numa, link_group=group)
            for at, (numa, group) in enumerate(((0, "x"), (1, "y"), (1, "x"), (0, "")))
        ),
    )
    assert devices_of(told(a_queue(), spread, a_job(numa="strict", **pair))) == ["0", "3"]
    assert devices_of(told(a_queue(), spread, a_job(linked=True, **pair))) == ["0", "2"]
    assert devices_of(told(a_queue(), spread, a_job(**pair))) == ["0", "2"], "joined, as it can be had"
    both = told(a_queue(), spread, a_job(numa="strict", linked=True, **pair))
    fact = wait_of(both)
    assert (fact.code, fact.nodes) == (Pending.TOPOLOGY_MISMATCH, {"TopologyMismatch": 1})
    answer = why(both.pool, JobId("acme/train-7"), NOON)
    assert answer is not None
    assert {each.constraint for each in answer.changes if each.starts_now} == {"numa", "device.linked", "devices"}
    busy = told(
        a_queue(),
        spread,
        a_job("first"),
        a_placement("acme/first", device=0),
        a_job(numa="strict", linked=False, **pair),
    )
    assert devices_of(busy) == ["1", "2"]


@pytest.mark.parametrize(
    ("asked", "ordered"),
    [
        ({}, ""),
        ({"numa": "strict"}, ""),
        ({"cpu_bind": True}, "preferred"),
        ({"cpu_bind": True, "numa": "strict"}, "strict"),
    ],
)
def test_a_run_is_bound_to_near_cpus_as_firmly_as_its_job_asks(asked: dict[str, Any], ordered: str) -> None:
    """The agent alone knows which CPUs it may use; the order says what to do where there are none."""
    state = told(a_queue(), a_node(), a_job(**asked))
    (placed,) = (fact for fact in core.decide(state, NOON) if isinstance(fact, ev.RunPlaced))
    assert placed.cpu_bind == ordered


def test_replicas_share_no_device_where_that_is_asked() -> None:
    """They fit together on one, and are to fail apart."""
    asked: dict[str, Any] = {"replicas": 2, "compute_milli": 250}
    assert devices_of(told(a_queue(), a_node(), a_job(**asked))) == ["0", "0"]
    assert devices_of(told(a_queue(), a_node(), a_job(distinct=True, **asked))) == ["0", "1"]
    beside = told(a_queue(), a_node(), a_job(distinct=True, **asked), a_job("next", compute_milli=750))
    assert devices_of(beside) == ["0", "1", "0"], "its devices are in use for others still"
    state = told(a_queue(), a_node(devices=1), a_job(distinct=True, **asked))
    fact = wait_of(state)
    assert fact.code is Pending.GANG_INCOMPLETE
    answer = why(state.pool, JobId("acme/train-7"), NOON)
    assert answer is not None
    assert (answer.could_start, [each.constraint for each in answer.changes if each.starts_now]) == (
        False,
        ["device.distinct", "replicas"],
    )


def test_an_encoder_and_a_link_are_shared_as_far_as_they_go() -> None:
    """They are booked beside compute and memory, and given back with the run."""
    node = a_node_of("node-1", **NEW)
    asked: dict[str, Any] = {"encoders": 60, "pcie_mbps": 100}
    first = a_placement("acme/first")
    piece = msgspec.structs.replace(first.slices[0], encoders=60, pcie_mbps=100)
    held = msgspec.structs.replace(first, slices=(piece,))
    state = told(a_queue(), node, a_job("first", **asked), held, a_job(**asked))
    fact = wait_of(state)
    assert (fact.code, fact.nodes) == (Pending.INSUFFICIENT_GPU, {"InsufficientEncoders": 1})
    again = told(
        a_queue(), node, a_job("first", **asked), held, a_job(**asked),
        ev.RunReleased(run_id=held.run_id, node_id=NodeId("node-1"), released_at=NOON),
    )  # fmt: skip
    (placed,) = [each for each in core.decide(again, NOON) if isinstance(each, ev.RunPlaced)]
    assert [(each.encoders, each.pcie_mbps) for each in placed.slices] == [(60, 100)]


def test_a_device_takes_as_many_runs_as_its_pool_allows() -> None:
    """The host has to feed them all."""
    facts = (a_queue(), a_node(devices=1), a_job("first"), a_placement("acme/first"), a_job())
    assert nodes_of(told(configured(runs_per_device_max=2), *facts)) == ["node-1"]
    fact = wait_of(told(configured(runs_per_device_max=1), *facts))
    assert (fact.code, fact.nodes) == (Pending.CONCURRENCY_CAP_REACHED, {"RunsCapped": 1})
    few_cores = msgspec.structs.replace(a_node(devices=1), cpu_milli=300)
    assert nodes_of(told(a_queue(), few_cores, a_job("first"), a_placement("acme/first"), a_job())) == []


def test_a_pool_keeps_memory_back_or_books_more_than_it_has() -> None:
    """Both concern shared devices alone: who has a device to itself has all of it."""
    most = a_job(memory_mib=73_728)
    more = a_job(memory_mib=73_729)
    facts = (a_queue(), a_node(devices=1))
    assert nodes_of(told(configured(memory_buffer_pct=10), *facts, most)) == ["node-1"]
    assert nodes_of(told(configured(memory_buffer_pct=10), *facts, more)) == []
    whole = a_job(compute_milli=1000, memory_mib=0, mode=Mode.EXCLUSIVE)
    assert nodes_of(told(configured(memory_buffer_pct=10), *facts, whole)) == ["node-1"]
    beside = (*facts, a_job("first"), a_placement("acme/first", memory_mib=60_000), a_job(memory_mib=60_000))
    assert nodes_of(told(*beside)) == []
    assert nodes_of(told(configured(memory_oversubscribe_pct=150), *beside)) == ["node-1"]
    assert nodes_of(told(configured(memory_oversubscribe_pct=150), *facts, a_job(memory_mib=81_921))) == []


def test_a_share_becomes_the_smallest_instance_and_keeps_large_blocks_whole() -> None:
    """The fact says which profile and where: the agent makes it exactly there."""
    cut = a_node_of("node-1", devices=2, modes=(Mode.MIG,), memory_mib=80_984, mig=a_board())
    state = told(a_queue(), cut, *(a_job(f"job-{at}", mode=Mode.MIG, memory_mib=9_000) for at in range(3)))
    placed = [each for each in core.decide(state, NOON) if isinstance(each, ev.RunPlaced)]
    assert [(each.slices[0].device_uuid[-1], each.slices[0].mig) for each in placed] == [
        ("0", ev.MigPlacement(profile="2g.20gb", start=4, size=2)),
        ("0", ev.MigPlacement(profile="2g.20gb", start=2, size=2)),
        ("0", ev.MigPlacement(profile="2g.20gb", start=0, size=2)),
    ]
    assert {(each.slices[0].compute_milli, each.slices[0].memory_mib) for each in placed} == {(285, 20_096)}


def test_no_instance_where_its_memory_slices_are_not_free_together() -> None:
    """Enough is free in sum, and the sum is no instance."""
    cut = a_node_of("node-1", modes=(Mode.MIG,), memory_mib=80_984, mig=a_board())
    small = [
        a_placement(
            f"acme/s{start}", mode=Mode.MIG, compute_milli=142, memory_mib=9_984,
            slices=(
                ev.Slice(
                    device_uuid=cut.devices[0].uuid, compute_milli=142, memory_mib=9_984, mode=Mode.MIG,
                    mig=ev.MigPlacement(profile="1g.10gb", start=start, size=1),
                ),
            ),
        )
        for start in (1, 4)
    ]  # fmt: skip
    jobs = [a_job(f"s{start}", mode=Mode.MIG, mig_profile="1g.10gb") for start in (1, 4)]
    state = told(a_queue(), cut, *jobs, *small, a_job(mode=Mode.MIG, mig_profile="3g.40gb"))
    fact = wait_of(state)
    assert (fact.code, fact.nodes) == (Pending.MIG_PLACEMENT, {"MigPlacement": 1})
    assert fact.blocking_ids == ("acme/s1", "acme/s4")
    answer = why(state.pool, JobId("acme/train-7"), NOON)
    assert answer is not None
    assert [each.constraint for each in answer.changes if each.starts_now] == ["mig_profile"]


def test_a_board_that_is_cut_serves_nothing_else_and_one_that_is_not_is_never_cut() -> None:
    """MIG mode is an operator's doing: no placement asks for another mode of a device."""
    cut = a_node_of("cut", modes=(Mode.MIG,), memory_mib=80_984, mig=a_board())
    whole = a_node_of("whole", mig=a_board(enabled=False))
    exclusive = a_job(compute_milli=1000, memory_mib=0, mode=Mode.EXCLUSIVE)
    assert nodes_of(told(a_queue(), cut, exclusive)) == []
    assert nodes_of(told(a_queue(), whole, a_job(mode=Mode.MIG))) == []
    assert nodes_of(told(a_queue(), cut, whole, a_job(mode=Mode.MIG))) == ["cut"]
    assert nodes_of(told(a_queue(), cut, whole, a_job(mode=Mode.MPS))) == ["whole"]


def test_accepted_modes_are_taken_in_their_order_and_a_whole_device_only_where_it_must_be() -> None:
    """A job that wants its faults contained gets an instance, and a device of its own where no board is cut."""
    cut = a_node_of("cut", modes=(Mode.MIG,), memory_mib=80_984, mig=a_board())
    isolated = a_job(modes=(Mode.MIG, Mode.EXCLUSIVE))
    assert nodes_of(told(a_queue(), a_node("bare"), cut, isolated)) == ["cut"]
    state = told(a_queue(), a_node("bare", devices=1), isolated)
    (placed,) = [each for each in core.decide(state, NOON) if isinstance(each, ev.RunPlaced)]
    assert [(each.mode, each.compute_milli, each.memory_mib) for each in placed.slices] == [
        (Mode.EXCLUSIVE, 1000, 81_920)
    ]
    beside = told(
        a_queue(), a_node("bare", devices=1), a_job("first"), a_placement("acme/first", node="bare"), isolated
    )
    assert nodes_of(beside) == []


@pytest.mark.parametrize(
    ("gone", "code", "why"),
    [
        (ev.NodeFenced(node_id=NodeId("cut"), epoch=1, runs=()), Pending.NO_NODES_IN_POOL, "NodeFenced"),
        (
            ev.NodeDraining(node_id=NodeId("cut"), actor="a", reason="r", deadline_at=0),
            Pending.NODES_CORDONED,
            "NodeDraining",
        ),
    ],
)
def test_a_wait_for_the_only_node_that_offers_it_says_that_it_is_away(gone: ev.Fact, code: Pending, why: str) -> None:
    """It is no refusal, as the node may come back; and not to be read as if the pool had no node at all."""
    cut = msgspec.structs.replace(a_node("cut"), devices=(a_device(node="cut", modes=(Mode.MIG,), mig=a_board()),))
    job = a_job("j", compute_milli=125, memory_mib=5000, modes=(Mode.MIG,))
    (waits,) = core.decide(told(a_queue(), a_node("plain"), cut, gone, job), NOON)
    assert isinstance(waits, ev.JobPendingReasonChanged)
    assert waits.code is code
    assert f"(1 IsolationUnavailable); others may, and can't be used now (1 {why})" in waits.hint
