"""What a policy may know beside one node and one demand: the work that this pool is asked for, and what it is worth."""

from collections.abc import Sequence
from typing import NamedTuple

from apportion.contracts.ids import NodeId
from apportion.placer.mix import Asked, Mix, basis_of
from apportion.placer.rooms import NodeRoom
from apportion.placer.values import Left, Values, is_untouched


class Outlook:
    """One renewal of the mix, and what follows from it: all of it a function of that mix, caches alone change."""

    def __init__(self, mix: Mix) -> None:
        self.epoch = mix.epoch
        self.asked: Sequence[tuple[Asked, int]] = basis_of(mix)
        self.notes: dict[str, object] = {}
        """What policies worked out of it, by their names."""
        self._values: dict[tuple[str, int], Values] = {}
        self._nodes: dict[NodeId, _Seen] = {}
        self._shared: dict[tuple[tuple[tuple[Asked, int], ...], int], Values] = {}

    def values_for(self, model: str, memory_mib: int) -> Values:
        """What is left of devices of this model and size is worth to the work that may use them."""
        key = (model, memory_mib)
        known = self._values.get(key)
        if known is None:
            fit = tuple(
                each for each in self.asked if each[0].devices and (not each[0].models or model in each[0].models)
            )
            # Models that the mix doesn't tell apart share what is worked out.
            shared = self._shared.get((fit, memory_mib))
            if shared is None:
                shared = self._shared[fit, memory_mib] = Values(fit, memory_mib)
            known = self._values[key] = shared
        return known

    def worth(self, room: NodeRoom) -> int:
        """The node's value as it is, in thousandths of a device in both dimensions together."""
        return self._seen_as(room).worth if room.devices else 0

    def best_after(  # noqa: PLR0917 - what is taken, of what
        self, room: NodeRoom, fits: Sequence[int], cpu_milli: int, host_mib: int, compute_milli: int, memory_mib: int
    ) -> tuple[int, int]:
        """Which of these devices to take such a share of, and what the node would be worth then."""
        seen = self._seen_as(room)
        values, lefts = seen.values, seen.lefts
        cpu, host = room.free_cpu_milli - cpu_milli, room.free_memory_mib - host_mib
        best = (-1, -1)
        tried = set()
        for place in fits:
            device = room.devices[place]
            like = (device.free_compute_milli, device.free_memory_mib, device.runs > 0)
            if like in tried:
                continue
            tried.add(like)
            rest = values.left_of(
                device.free_compute_milli - compute_milli, device.free_memory_mib - memory_mib, is_empty=False
            )
            after = [left for at, left in enumerate(lefts) if left is not None and at != place]
            if rest is not None:
                after.append(rest)
            worth = values.value(cpu, host, after)
            if worth > best[1]:
                best = (place, worth)
        return best

    def worth_without(self, room: NodeRoom, picks: Sequence[int], cpu_milli: int, host_mib: int) -> int:
        """What the node would be worth without these devices."""
        if not room.devices:
            return 0
        seen = self._seen_as(room)
        after = [left for at, left in enumerate(seen.lefts) if left is not None and at not in picks]
        return seen.values.value(room.free_cpu_milli - cpu_milli, room.free_memory_mib - host_mib, after)

    def _seen_as(self, room: NodeRoom) -> "_Seen":
        known = self._nodes.get(room.node_id)
        if known is not None and known.room is room:
            return known
        # Nodes of several models are rare: they go by their first device.
        first = room.devices[0]
        values = self.values_for(first.model, first.memory_mib)
        lefts = [
            values.left_of(device.free_compute_milli, device.free_memory_mib, is_empty=is_untouched(device))
            if device.is_healthy
            else None
            for device in room.devices
        ]
        worth = values.value(room.free_cpu_milli, room.free_memory_mib, [left for left in lefts if left is not None])
        seen = self._nodes[room.node_id] = _Seen(room, values, lefts, worth)
        return seen


class _Seen(NamedTuple):
    """A room as a mix sees it."""

    room: NodeRoom
    values: Values
    lefts: list[Left | None]
    worth: int
