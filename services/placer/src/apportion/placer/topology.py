"""Where the replicas of a gang are near each other: on nodes that have one value of a label, or on one node.

A domain is such a value: ``rack=r7``, ``nvlink_domain=3``, ``node=node-1``. A node without the label is in none: it is
out for a gang that requires to be together, and for one that only prefers it a domain of its own.
"""

from collections.abc import Iterable
from typing import Final

from apportion.placer.preempt import capacity
from apportion.placer.rooms import NODE_KEY, Demand, NodeRoom, Out, places_on, replicas_when_empty

DOMAINS_MAX: Final = 64
"""Domains that are looked at where others would have to be stopped."""


def domain_of(demand: Demand, room: NodeRoom) -> str:
    """The node's domain for this demand, as ``key=value``."""
    if demand.topology == NODE_KEY:
        return f"{NODE_KEY}={room.node_id}"
    value = room.kind.labels.get(demand.topology)
    return f"{NODE_KEY}={room.node_id}" if value is None else f"{demand.topology}={value}"


def by_domain(demand: Demand, rooms: Iterable[NodeRoom]) -> dict[str, list[NodeRoom]]:
    """The rooms of each domain, in the order in which they came."""
    found: dict[str, list[NodeRoom]] = {}
    for room in rooms:
        found.setdefault(domain_of(demand, room), []).append(room)
    return found


def replicas_together(demand: Demand, rooms: Iterable[NodeRoom]) -> int:
    """The most replicas that fit in one domain, as these rooms are."""
    parts = by_domain(demand, rooms).values()
    return max((sum(capacity(demand, room) for room in part) for part in parts), default=0)


def could_hold(demand: Demand, rooms: Iterable[NodeRoom]) -> bool:
    """Whether all replicas would fit on these nodes, were they empty: in one domain, where they must be in one."""
    eligible = [room for room in rooms if not isinstance(places_on(demand, room.kind), Out)]
    for part in by_domain(demand, eligible).values() if demand.is_together else [eligible]:
        count = 0
        for room in part:
            count += replicas_when_empty(demand, room)
            if count >= demand.replicas:
                return True
    return False
