"""Gangs whose replicas are near each other: in one domain where they must be, in as few as may be where they like."""

from typing import Any

import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, PreemptionKind, ServiceClass
from apportion.contracts.ids import JobId
from apportion.contracts.testing import a_job, a_node
from apportion.placer.why import why_in

from .test_preempt import ONLINE, WHOLE, Pool, names, placed, preemption

RACK: dict[str, Any] = WHOLE | {"topology_key": "rack", "topology_required": True}


def a_pool(*sizes: tuple[str, int], **config: Any) -> Pool:
    """Nodes with so many devices, each in its rack."""
    nodes = (a_node(f"node-{at}", devices=many, labels={"rack": rack}) for at, (rack, many) in enumerate(sizes, 1))
    return Pool(*nodes, **config)


def domains(facts: list[ev.Fact]) -> list[str]:
    return [fact.topology for fact in facts if isinstance(fact, ev.RunPlaced)]


def test_all_are_in_one_rack_and_in_the_one_with_the_least_left() -> None:
    """The larger rack stays whole for whom only that will do."""
    pool = a_pool(("a", 2), ("b", 1), ("b", 2), ("a", 4))
    pool.tell(a_job("g", **RACK, replicas=3))
    assert domains(pool.decide()) == ["rack=b"] * 3


def test_what_fits_over_racks_and_in_none_waits_with_the_numbers() -> None:
    """Four would fit and no rack has room for three: it says so, and what would help."""
    pool = a_pool(("a", 2), ("b", 2))
    pool.runs("x", **WHOLE)
    pool.runs_end("acme/x")
    pool.tell(a_job("g", **RACK, replicas=3))
    [wait] = [fact for fact in pool.decide() if isinstance(fact, ev.JobPendingReasonChanged)]
    assert (wait.code, wait.requested["replicas"], wait.available["replicas"]) == (Pending.TOPOLOGY_MISMATCH, 3, 2)
    assert "4 replicas would fit, and at most 2 of them with one rack" in wait.hint
    found = why_in(pool.state, JobId("acme/g"), pool.now)
    assert found is not None
    assert not found.could_start, "no rack has three devices"
    assert ("gang.required", True) in [(change.constraint, change.starts_now) for change in found.changes]


def test_as_few_racks_as_may_be_where_it_is_a_preference() -> None:
    """It starts in two racks rather than wait, and not in three."""
    pool = a_pool(("a", 1), ("b", 2), ("c", 3))
    pool.tell(a_job("g", **(RACK | {"topology_required": False}), replicas=5))
    assert sorted(domains(pool.decide())) == ["rack=b"] * 2 + ["rack=c"] * 3


def test_replicas_that_share_no_device_share_none_over_racks_either() -> None:
    """What the first rack gave is taken, wherever the rest goes."""
    share: dict[str, Any] = {"compute_milli": 250, "memory_mib": 1024, "topology_key": "rack", "distinct": True}
    pool = a_pool(("a", 1), ("b", 1))
    pool.tell(a_job("g", **share, replicas=3))
    assert placed(pool.decide()) == []
    pool.tell(a_job("h", **share, replicas=2))
    devices = [run.slices[0].device_uuid for run in pool.decide() if isinstance(run, ev.RunPlaced)]
    assert len(set(devices)) == len(devices) == 2


@pytest.mark.parametrize(("key", "expected"), [("node", ["node=node-3"] * 2), ("nvlink_domain", [])])
def test_a_node_is_a_domain_and_who_lacks_the_label_is_in_none(key: str, expected: list[str]) -> None:
    """Nobody is near anybody by a label that no node has."""
    pool = a_pool(("a", 1), ("a", 1), ("a", 2))
    pool.tell(a_job("g", **(RACK | {"topology_key": key}), replicas=2))
    facts = pool.decide()
    assert domains(facts) == expected
    waits = [fact.code for fact in facts if isinstance(fact, ev.JobPendingReasonChanged)]
    assert waits == ([] if expected else [Pending.NO_MATCHING_NODE])


def test_others_are_stopped_in_one_rack_and_not_a_few_in_each() -> None:
    """One victim in each rack would be two; two in one rack is what helps, and of racks the one with fewer jobs."""
    pool = a_pool(("a", 3), ("b", 3))
    spot = WHOLE | {"service_class": ServiceClass.SPOT}
    for name in ("a1", "a2", "a3", "b1"):
        pool.runs(name, **spot)
    pool.runs("b-both", **spot, devices=2)
    pool.tell(a_job("urgent", **(ONLINE | RACK | {"service_class": ServiceClass.ONLINE, "replicas": 2})))
    decided = preemption(pool.decide())
    assert decided.kind is PreemptionKind.PRIORITY
    assert names(decided.victims) == ["b-both"]
    pool.leaves(decided.runs)
    assert placed(pool.decide()) == ["acme/urgent"] * 2


def test_nodes_are_kept_for_it_in_one_rack_the_soonest_that_is_free() -> None:
    """Rack b is free sooner as a whole, though the soonest node of all is in a."""
    pool = a_pool(("a", 1), ("a", 1), ("b", 1), ("b", 1), reserve_after_s=0)
    for at, limit in enumerate((10, 1_000, 100, 200), 1):
        pool.runs(f"x{at}", **WHOLE, time_limit_s=limit, required={}, avoid_nodes=_others(at))
    pool.tell(a_job("g", **RACK, replicas=2))
    pool.decide()
    pool.runs_end("acme/x1")
    pool.tell(a_job("long", **WHOLE))
    assert placed(pool.decide()) == ["acme/long"], "rack a is nobody's"
    pool.runs_end("acme/x3")
    pool.tell(a_job("next", **WHOLE))
    assert placed(pool.decide()) == [], "rack b is kept"
    pool.runs_end("acme/x4")
    assert placed(pool.decide()) == ["acme/g", "acme/g"]


def _others(at: int) -> tuple[str, ...]:
    return tuple(f"node-{other}" for other in range(1, 5) if other != at)


def test_an_elastic_gang_grows_in_its_rack_alone() -> None:
    """What is free elsewhere is not near."""
    pool = a_pool(("a", 2), ("b", 3))
    pool.tell(a_job("g", **(RACK | {"replicas": 4, "replicas_min": 2})))
    assert domains(pool.decide()) == ["rack=a"] * 2
