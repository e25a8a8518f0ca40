"""Advance reservations: nodes are kept for whom they were reserved, and others leave in time or don't come."""

from typing import Any

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending
from apportion.contracts.ids import NodeId, TenantId
from apportion.contracts.testing import a_job, a_node, a_queue
from apportion.placer import core
from apportion.placer.state import S

from .test_preempt import WHOLE, Pool, placed

GLOBEX = TenantId("globex")


def reserved(pool: Pool, after_s: int, for_s: int, **changes: Any) -> ev.ReservationAdmitted:
    start_at = pool.now + after_s * S
    return ev.ReservationAdmitted(
        reservation="demo",
        for_tenant=GLOBEX,
        start_at=start_at,
        end_at=start_at + for_s * S,
        answers=1,
        actor="op",
        **({"nodes": 1} | changes),
    )


def told(facts: list[ev.Fact]) -> list[ev.NodesReserved]:
    return [fact for fact in facts if isinstance(fact, ev.NodesReserved)]


def a_pool(*sizes: int) -> Pool:
    nodes = [a_node(f"node-{at}", devices=many) for at, many in enumerate(sizes, 1)]
    return Pool(*nodes, a_queue(tenants=("acme", "globex")), reserve_after_s=-1)


def test_others_are_placed_there_only_if_they_will_have_left() -> None:
    """In ten minutes it begins: five minutes are short enough, eleven and for ever are not; its owner's always are."""
    pool = a_pool(1)
    pool.tell(reserved(pool, 600, 3600))
    [kept] = told(pool.decide())
    assert (kept.reservation, kept.nodes, kept.late, kept.missing) == ("demo", (NodeId("node-1"),), (), 0)
    pool.tell(a_job("long", **WHOLE, time_limit_s=660), a_job("ever", **WHOLE))
    facts = pool.decide()
    assert placed(facts) == []
    waits = {fact.job_id: fact for fact in facts if isinstance(fact, ev.JobPendingReasonChanged)}
    wait = waits["acme/long"]  # type: ignore[index]  # an id is a text
    assert (wait.code, wait.blocking_ids) == (Pending.RESERVED_FOR_OTHER, ("reservation/demo",))
    assert "beyond whose beginning" in wait.hint
    pool.tell(a_job("short", **WHOLE, time_limit_s=240))
    assert placed(pool.decide()) == ["acme/short"]
    pool.runs_end("acme/short")
    pool.tell(a_job("own", tenant=GLOBEX, **WHOLE))
    assert placed(pool.decide()) == ["globex/own"]


def test_it_ends_by_itself_and_the_placer_wakes_for_it() -> None:
    """Who waited for it goes on then."""
    pool = a_pool(1)
    ends_at = pool.now + 100 * S
    pool.tell(reserved(pool, 0, 100), a_job("x", **WHOLE))
    assert placed(pool.decide()) == []
    assert core.wake_at(pool.state, pool.now) == ends_at
    facts = pool.after(100).decide()
    assert [fact.is_over for fact in told(facts)] == [True]
    assert placed(facts) == ["acme/x"]
    assert not pool.state.pool.reservations


def test_a_cancelled_one_keeps_nothing() -> None:
    """At once."""
    pool = a_pool(1)
    pool.tell(reserved(pool, 0, 100), a_job("x", **WHOLE))
    pool.decide()
    pool.tell(ev.ReservationCancelled(reservation="demo", answers=2, actor="op"))
    assert placed(pool.decide()) == ["acme/x"]


def test_it_gets_the_nodes_that_are_free_in_time_and_of_its_sort() -> None:
    """The busy one only where there is no other; what may run on beyond its beginning is said."""
    pool = a_pool(2, 1, 2)
    pool.runs("ever", **WHOLE, avoid_nodes=("node-2", "node-3"))
    pool.tell(reserved(pool, 60, 60, nodes=2, devices=2))
    [kept] = told(pool.decide())
    assert (kept.nodes, kept.late) == ((NodeId("node-1"), NodeId("node-3")), (NodeId("node-1"),))
    pool.tell(ev.ReservationCancelled(reservation="demo", answers=2, actor="op"), reserved(pool, 60, 60, devices=2))
    assert [fact.nodes for fact in told(pool.decide())] == [(NodeId("node-3"),)]


def test_a_node_that_is_lost_is_replaced() -> None:
    """As soon as another would do; until then it is said that one is missing."""
    pool = a_pool(1)
    pool.tell(reserved(pool, 60, 60))
    pool.decide()
    pool.tell(ev.NodeCordoned(node_id=NodeId("node-1"), actor="op", reason="broken"))
    assert [(fact.nodes, fact.missing) for fact in told(pool.decide())] == [((), 1)]
    pool.tell(a_node("node-2"))
    assert [(fact.nodes, fact.missing) for fact in told(pool.decide())] == [((NodeId("node-2"),), 0)]


def test_two_that_overlap_have_nodes_of_their_own() -> None:
    """And two that don't may have the same."""
    pool = a_pool(1, 1)
    first = reserved(pool, 0, 60)
    pool.tell(first)
    pool.tell(ev.ReservationAdmitted(**{**_fields(first), "reservation": "same"}))
    later = {"reservation": "later", "start_at": first.end_at, "end_at": first.end_at + S}
    pool.tell(ev.ReservationAdmitted(**{**_fields(first), **later}))
    found = {fact.reservation: fact.nodes for fact in told(pool.decide())}
    assert found["demo"] != found["same"]
    assert len(found["later"]) == 1


def _fields(fact: ev.ReservationAdmitted) -> dict[str, Any]:
    return {name: getattr(fact, name) for name in fact.__struct_fields__}


def test_what_is_kept_for_the_oldest_blocked_is_stated_when_it_changes() -> None:
    """Once, with its nodes and by when they are free; and once more when nothing is kept any more."""
    pool = Pool(a_node("node-1", devices=2), reserve_after_s=10)
    pool.runs("x", **WHOLE, time_limit_s=1_000)
    pool.tell(a_job("big", **WHOLE, devices=2))
    assert told(pool.decide()) == []
    [kept] = told(pool.after(10).decide())
    assert (kept.job_id, kept.nodes) == ("acme/big", (NodeId("node-1"),))
    assert kept.start_at > pool.now
    assert told(pool.after(10).decide()) == []
    pool.runs_end("acme/x")
    facts = pool.decide()
    assert placed(facts) == ["acme/big"]
    assert [(fact.job_id, fact.nodes) for fact in told(facts)] == [("acme/big", ())]
