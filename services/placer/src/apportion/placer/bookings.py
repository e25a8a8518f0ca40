"""Advance reservations: which nodes are kept for whom, and who may be placed there meanwhile.

A reservation gets nodes as soon as there are any that would do: first those that will be free by its beginning, by the
time limits of what runs there. It keeps them, but for those that are lost or taken out of use, which are replaced.
"""

from collections.abc import Iterable, Mapping

from apportion.contracts import events as ev
from apportion.contracts.ids import JobId, NodeId, TenantId
from apportion.placer.orders import S
from apportion.placer.reservations import NEVER, RELEASE_S, START_S, free_at
from apportion.placer.rooms import NodeRoom
from apportion.pool.state import NodeState, Pool, ReservationView

PREFIX = "reservation/"
"""Before the name, where a reservation stands among the jobs that something is kept for."""


class Bookings:
    """The reservations as a round has them: what was folded, and what it gives them now."""

    def __init__(self, pool: Pool, rooms: Mapping[NodeId, NodeRoom], now: int) -> None:
        self._now = now
        self.facts: list[ev.NodesReserved] = []
        """What changes with this round."""
        self._on: dict[NodeId, list[ev.ReservationAdmitted]] = {}
        taken: dict[NodeId, list[ev.ReservationAdmitted]] = {}
        for view in pool.reservations.values():
            for node_id in view.nodes:
                taken.setdefault(node_id, []).append(view.asked)
        for name in sorted(pool.reservations):
            view = pool.reservations[name]
            asked = view.asked
            if asked.end_at <= now:
                self.facts.append(ev.NodesReserved(reservation=name, end_at=asked.end_at, is_over=True))
                continue
            nodes = _nodes_of(view, rooms, taken, pool)
            missing = asked.nodes - len(nodes)
            for node_id in nodes:
                self._on.setdefault(node_id, []).append(asked)
            if nodes != view.nodes or missing != view.missing:
                late = tuple(node_id for node_id in nodes if free_at(pool, node_id) > asked.start_at)
                self.facts.append(
                    ev.NodesReserved(
                        reservation=name,
                        nodes=nodes,
                        start_at=asked.start_at,
                        end_at=asked.end_at,
                        late=late,
                        missing=missing,
                    )
                )

    @property
    def keeps_nodes(self) -> bool:
        """Whether any node is kept for anybody."""
        return bool(self._on)

    def kept_from(self, node_id: NodeId, tenant: TenantId, length_s: int) -> JobId | None:
        """For whom the node is kept from a run of the tenant that takes so long, its grace included; 0: for ever."""
        for asked in self._on.get(node_id, ()):
            if asked.for_tenant == tenant:
                continue
            left_by = self._now + (START_S + length_s + RELEASE_S) * S if length_s else NEVER
            if left_by > asked.start_at:
                return JobId(PREFIX + asked.reservation)
        return None


def next_end(pool: Pool, now: int) -> int | None:
    """When the next reservation ends, and others may have its nodes."""
    return min((view.asked.end_at for view in pool.reservations.values() if view.asked.end_at > now), default=None)


def _nodes_of(
    view: ReservationView,
    rooms: Mapping[NodeId, NodeRoom],
    taken: dict[NodeId, list[ev.ReservationAdmitted]],
    pool: Pool,
) -> tuple[NodeId, ...]:
    asked = view.asked
    kept = [node_id for node_id in view.nodes if node_id in rooms and _would_do(asked, rooms[node_id])]
    kept = kept[: asked.nodes]
    missing = asked.nodes - len(kept)
    if missing > 0:
        others = (
            (max(0, free - asked.start_at), free, node_id)
            for node_id, room in rooms.items()
            if node_id not in kept and _would_do(asked, room) and not _is_taken(asked, taken.get(node_id, ()))
            for free in (free_at(pool, node_id),)
        )
        for _, _, node_id in sorted(others)[:missing]:
            kept.append(node_id)
            taken.setdefault(node_id, []).append(asked)
    return tuple(sorted(kept))


def _is_taken(asked: ev.ReservationAdmitted, others: Iterable[ev.ReservationAdmitted]) -> bool:
    return any(other.start_at < asked.end_at and asked.start_at < other.end_at for other in others)


def _would_do(asked: ev.ReservationAdmitted, room: NodeRoom) -> bool:
    """Whether the node is of the sort that is asked for, and in use."""
    if room.state not in {NodeState.READY, NodeState.SUSPECTED}:
        return False
    if any(room.kind.labels.get(name) != value for name, value in asked.required.items()):
        return False
    return sum(not asked.models or device.model in asked.models for device in room.kind.devices) >= asked.devices
