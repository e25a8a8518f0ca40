"""What a policy may know beside one node and one demand: the work that this pool is asked for, and what it is worth."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from apportion.placer.constraints import Like
from apportion.placer.mix import Asked, Mix, basis_of
from apportion.placer.rooms import NodeRoom
from apportion.placer.values import Left, Lefts, Values, is_untouched

_SEEN_MAX: Final = 1 << 13
"""States of nodes' devices of which it is remembered what is left."""


class Outlook:
    """One renewal of the mix, and what follows from it: all of it a function of that mix, caches alone change."""

    def __init__(self, mix: Mix) -> None:
        self.epoch = mix.epoch
        self.asked: Sequence[tuple[Asked, int]] = basis_of(mix)
        self.notes: dict[str, object] = {}
        """What policies worked out of it, by their names."""
        self._values: dict[tuple[str, int], Values] = {}
        self._seen: dict[Like, _Seen] = {}
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
        if not room.devices:
            return 0
        seen = self._seen_as(room)
        return seen.values.worth(seen.left, room.free_cpu_milli, room.free_memory_mib)

    def best_after(  # noqa: PLR0917 - what is taken, of what
        self, room: NodeRoom, fits: Sequence[int], cpu_milli: int, host_mib: int, compute_milli: int, memory_mib: int
    ) -> tuple[int, int]:
        """Which of these devices to take such a share of, and what the node would be worth then."""
        seen = self._seen_as(room)
        key = (compute_milli, memory_mib, *fits)
        ways = seen.shared.get(key)
        if ways is None:
            ways = seen.shared[key] = _ways_of(seen, room, fits, compute_milli, memory_mib)
        values = seen.values
        cpu, host = room.free_cpu_milli - cpu_milli, room.free_memory_mib - host_mib
        best = (-1, -1)
        for place, left in ways:
            worth = values.worth(left, cpu, host)
            if worth > best[1]:
                best = (place, worth)
        return best

    def worth_without(self, room: NodeRoom, picks: Sequence[int], cpu_milli: int, host_mib: int) -> int:
        """What the node would be worth without these devices."""
        if not room.devices:
            return 0
        seen = self._seen_as(room)
        key = tuple(picks)
        left = seen.without.get(key)
        if left is None:
            left = seen.without[key] = seen.values.lefts_of(
                left for at, left in enumerate(seen.lefts) if left is not None and at not in picks
            )
        return seen.values.worth(left, room.free_cpu_milli - cpu_milli, room.free_memory_mib - host_mib)

    def _seen_as(self, room: NodeRoom) -> "_Seen":
        known = self._seen.get(room.devices_like)
        if known is None:
            # Nodes of several models are rare: they go by their first device.
            first = room.devices[0]
            values = self.values_for(first.model, first.memory_mib)
            lefts = [
                values.left_of(device.free_compute_milli, device.free_memory_mib, is_empty=is_untouched(device))
                if device.is_healthy
                else None
                for device in room.devices
            ]
            if len(self._seen) >= _SEEN_MAX:
                self._seen.clear()
            known = self._seen[room.devices_like] = _Seen(
                values, lefts, values.lefts_of(left for left in lefts if left is not None), {}, {}
            )
        return known


def _ways_of(
    seen: "_Seen", room: NodeRoom, fits: Sequence[int], compute_milli: int, memory_mib: int
) -> list[tuple[int, Lefts]]:
    """What taking such a share of each device leaves, but for devices of which it leaves what an earlier one does."""
    found: list[tuple[int, Lefts]] = []
    for place in fits:
        device = room.devices[place]
        rest = seen.values.left_of(
            device.free_compute_milli - compute_milli, device.free_memory_mib - memory_mib, is_empty=False
        )
        after = [left for at, left in enumerate(seen.lefts) if left is not None and at != place]
        left = seen.values.lefts_of(after if rest is None else [*after, rest])
        if all(left is not other for _, other in found):
            found.append((place, left))
    return found


class _Seen(NamedTuple):
    """Devices as a mix sees them, and what is left where some are taken: shares of one, or several whole ones."""

    values: Values
    lefts: list[Left | None]
    left: Lefts
    shared: dict[tuple[int, ...], list[tuple[int, Lefts]]]
    without: dict[tuple[int, ...], Lefts]
