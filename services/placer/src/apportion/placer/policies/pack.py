"""Pack: the fullest node that has room, and on it the fullest device, so that whole nodes stay empty."""

from typing import Final

from apportion.placer.policies.base import Plain, preference_of
from apportion.placer.rooms import Demand, DeviceRoom, Fit, NodeRoom

MODEL: Final = 10**10
NODE: Final = 10**5


class Pack(Plain):
    """See the module."""

    is_blind = True
    name = "pack"
    rules = "model,node free,device free"

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The fullest devices of the node."""
        ranked = sorted((preference_of(demand, room, (place,)), free_of(room.devices[place]), place) for place in fits)
        picks = tuple(sorted(place for *_, place in ranked[: demand.devices]))
        return Fit(sum(self.parts(demand, room, picks).values()), picks)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """What is free counts in thousandths of both dimensions; CPU where the node has no device."""
        return {
            "model": -preference_of(demand, room, picks) * MODEL,
            "node_free": -node_free(room) * NODE,
            "device_free": -sum(free_of(room.devices[place]) for place in picks),
        }


def free_of(device: DeviceRoom) -> int:
    """What is free of a device, in thousandths of both dimensions together."""
    return device.free_compute_milli * 1000 // device.compute_milli + device.free_memory_mib * 1000 // device.memory_mib


def node_free(room: NodeRoom) -> int:
    """What is free of a node: of its devices on average, or of its CPU where it has none; thousandths."""
    if room.devices:
        return sum(map(free_of, room.devices)) // len(room.devices)
    return room.free_cpu_milli * 1000 // max(1, room.cpu_milli)


PACK: Final = Pack()
