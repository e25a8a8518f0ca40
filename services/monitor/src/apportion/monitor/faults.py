"""What is broken on purpose: whether it may be, until when, and that it ends. Pure; doing it is the supervisor's.

Off unless the pool's monitor is told otherwise, for operators alone, and never near devices that are not simulated
unless the wish says so.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import DONE_BY_ITSELF, FaultEnd, FaultKind, Refusal
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import NodeId
from apportion.pool.state import NodeView, Pool

NS_PER_S: Final = 1_000_000_000
ACTIVE_MAX: Final = 32
SERVICES: Final = ("admission", "placer", "monitor")
ACTOR: Final = "service:monitor"
_OF_SERVICES: Final = frozenset({FaultKind.SERVICE_KILL, FaultKind.SERVICE_RESTART, FaultKind.SERVICE_PAUSE})
_OF_NODES: Final = frozenset(kind for kind in FaultKind if kind.startswith("node-"))
_OF_DEVICES: Final = frozenset(kind for kind in FaultKind if kind.startswith("device-"))


class Faults(Struct, kw_only=True):
    """Faults that are in force: a fold of facts."""

    are_allowed: bool = False
    active: dict[str, ev.FaultInjected] = {}


class Refused(Struct, frozen=True, kw_only=True):
    """Why a fault isn't injected."""

    code: Refusal
    field: str
    expected: str
    found: str


def evolve(faults: Faults, entry: Entry) -> None:
    """Take in one fact."""
    event = entry.event
    if isinstance(event, ev.FaultInjected):
        faults.active[event.fault_id] = event
    elif isinstance(event, ev.FaultCleared):
        faults.active.pop(event.fault_id, None)


def expired(faults: Faults, now: int) -> list[ev.Fact]:
    """Faults whose time is up."""
    return [
        ev.FaultCleared(fault_id=fault_id, kind=fault.kind, target=fault.target, why=FaultEnd.EXPIRED, actor=ACTOR)
        for fault_id, fault in sorted(faults.active.items())
        if now >= fault.until_at
    ]


def refused(faults: Faults, pool: Pool, wish: ev.FaultInjectionRequested) -> Refused | None:
    """Why it may not be; None where it may."""
    if not faults.are_allowed:
        return Refused(
            code=Refusal.FAULTS_OFF, field="", expected="a pool that runs with faults (`up --faults`)", found="off"
        )
    if len(faults.active) >= ACTIVE_MAX:
        return Refused(code=Refusal.BUSY, field="", expected=f"at most {ACTIVE_MAX} faults at once", found="as many")
    wanted = _target_refused(pool, wish)
    if wanted is not None:
        return wanted
    real = sorted(node.node_id for node in _met(pool, wish) if not node.simulated)
    if real and not wish.allow_real:
        return Refused(
            code=Refusal.REAL_DEVICES,
            field="allow_real",
            expected="simulated devices, or allow_real",
            found=f"real devices on {', '.join(real[:5])}",
        )
    return None


def _target_refused(pool: Pool, wish: ev.FaultInjectionRequested) -> Refused | None:
    def no(expected: str) -> Refused:
        return Refused(code=Refusal.FIELD_INVALID, field="target", expected=expected, found=wish.target or "nothing")

    if wish.kind in _OF_SERVICES:
        names = (*SERVICES, *(f"{name}-standby" for name in SERVICES))
        return None if wish.target in names else no(f"one of {', '.join(names)}")
    if wish.kind in DONE_BY_ITSELF:
        is_known = wish.target in SERVICES or NodeId(wish.target) in pool.nodes
        return None if is_known else no(f"one of {', '.join(SERVICES)}, or a known node")
    node, _, index = wish.target.partition("/")
    if wish.kind in _OF_NODES:
        return None if NodeId(wish.target) in pool.nodes else no("a known node")
    if wish.kind in _OF_DEVICES:
        known = pool.nodes.get(NodeId(node))
        indexes = set() if known is None else {str(view.device.index) for view in known.devices.values()}
        if index not in indexes:
            return no("<node>/<index> of a known device")
        if wish.kind is FaultKind.DEVICE_XID and wish.xid is None:
            return Refused(code=Refusal.FIELD_MISSING, field="xid", expected="the Xid to report", found="none")
        return None
    return None if not wish.target else no("nothing: there is one of it")


def _met(pool: Pool, wish: ev.FaultInjectionRequested) -> Iterator[NodeView]:
    """Nodes whose jobs the fault may harm."""
    node = NodeId(wish.target.partition("/")[0])
    if wish.kind in _OF_NODES | _OF_DEVICES or (wish.kind in DONE_BY_ITSELF and wish.target not in SERVICES):
        yield pool.nodes[node]
    else:
        yield from pool.nodes.values()
