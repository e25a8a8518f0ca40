"""The most that is free anywhere, kept as rooms change: what a waiting job is told is available."""

from bisect import bisect_left, insort
from collections.abc import Mapping

from apportion.contracts.ids import NodeId
from apportion.placer.rooms import NodeRoom
from apportion.pool.state import NodeState

Amounts = dict[tuple[str, str], int]
"""Model and quantity to amount; the model is empty for what is the node's."""


def amounts_of(room: NodeRoom) -> Amounts:
    """The most that one device of each model has free on this node, and what the node has; nothing where it is out."""
    if room.state is not NodeState.READY:
        return {}
    found: Amounts = {("", "cpu_milli"): room.free_cpu_milli, ("", "host_memory_mib"): room.free_memory_mib}
    for device in room.devices:
        if not device.is_healthy:
            continue
        compute, memory, devices = (
            (device.model, "compute_milli"),
            (device.model, "memory_mib"),
            (device.model, "devices"),
        )
        found[compute] = max(found.get(compute, 0), device.free_compute_milli)
        found[memory] = max(found.get(memory, 0), min(device.free_memory_mib, device.free_share_mib))
        found[devices] = found.get(devices, 0) + (not device.runs)
    return found


class Free:
    """The amounts of every node, by quantity and in order."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, Amounts] = {}
        self._sorted: dict[tuple[str, str], list[tuple[int, NodeId]]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Free) and other._nodes == self._nodes

    __hash__ = None  # type: ignore[assignment]  # it changes

    def put(self, room: NodeRoom) -> None:
        """The node has this room from here on."""
        node_id = room.node_id
        before = self._nodes.get(node_id, {})
        after = self._nodes[node_id] = amounts_of(room)
        for key, amount in before.items():
            if after.get(key) != amount:
                entries = self._sorted[key]
                del entries[bisect_left(entries, (amount, node_id))]
        for key, amount in after.items():
            if before.get(key) != amount:
                insort(self._sorted.setdefault(key, []), (amount, node_id))

    def most(self, models: tuple[str, ...], changed: Mapping[NodeId, NodeRoom]) -> dict[str, int]:
        """The most of each quantity, on devices of these models (any, where none is named).

        Nodes in ``changed`` count as they are there.
        """
        found: dict[str, int] = {}
        for (model, name), entries in self._sorted.items():
            if model and models and model not in models:
                continue
            for amount, node_id in reversed(entries):
                if node_id not in changed:
                    found[name] = max(found.get(name, 0), amount)
                    break
        for room in changed.values():
            for (model, name), amount in amounts_of(room).items():
                if not model or not models or model in models:
                    found[name] = max(found.get(name, 0), amount)
        return {name: max(0, amount) for name, amount in sorted(found.items())}
