"""What a node is worth to the work that this pool is asked for: how much of it that work could still fill.

A few fixed streams of single-device replicas are drawn from the mix for each sort of device. A node's value is the
share that the streams would fill on it, first come, tightest device first, compute and memory of the same device
together. Full streams weigh more than poor ones: in a pool a job goes where it suits, so that a node sees what suits
it. Values are cached by a state that is rounded to what the mix can tell apart.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Final

from apportion.placer.mix import Asked
from apportion.placer.packing.samples import masks, samples
from apportion.placer.rooms import DeviceRoom

WHOLE: Final = 1000
"""Thousandths of a device in either dimension."""

_SEED: Final = 1
_CPU_UNIT_MILLI: Final = 500
_HOST_UNIT_MIB: Final = 1_024
_MEMORY_UNIT_MIB: Final = 128
"""Units in which streams are played."""
_CPU_STEP: Final = 4
_HOST_STEP: Final = 8
"""What a node has free is rounded down to so many units, so that near-equal nodes share a value."""
_CPU_UNITS_MAX: Final = 512
_HOST_UNITS_MAX: Final = 1_280
"""What a node has beyond is left out of account."""
_PART_MILLI: Final = 320
"""Shares of a device are mostly larger than this: so many replicas to expect on what is left of one."""
_SIZE_RARITY: Final = 100
"""Sizes rarer than one in so many shares don't count when what is left is rounded to what can be filled."""
_SIZES_MAX: Final = 24
_VALUES_MAX: Final = 1 << 17
_LEFTS_MAX: Final = 1 << 15
_KEY_BITS: Final = 32
"""More than any node has steps of host memory."""

Left = tuple[int, int]
"""What is left of a device: milli-GPU and units of memory; (WHOLE, …) with all its memory where it is empty."""
_Task = tuple[int, int, int, int, int]
"""CPU, host memory, milli-GPU, units of memory, and what it fills in thousandths of both dimensions."""


class Lefts:
    """What is left of a node's devices, as a mix tells it apart; and what it is worth beside so much CPU and memory."""

    __slots__ = ("cpu_most", "host_most", "lefts", "worth")

    def __init__(self, lefts: tuple[Left, ...], cpu_most: int, host_most: int) -> None:
        self.lefts = lefts
        self.cpu_most = cpu_most
        self.host_most = host_most
        self.worth: dict[int, int] = {}
        """By steps of CPU, and of host memory in the lower digits."""


class _Stream:
    """One stream: its tasks by position, and as bit masks which of them fit so much of each resource."""

    __slots__ = ("by_compute", "by_cpu", "by_host", "by_memory", "smallest", "tasks")

    def __init__(self, tasks: list[_Task], units_most: int) -> None:
        self.by_cpu = masks([task[0] for task in tasks], _CPU_UNITS_MAX)
        self.by_host = masks([task[1] for task in tasks], _HOST_UNITS_MAX)
        self.by_compute = masks([task[2] for task in tasks], WHOLE)
        self.by_memory = masks([task[3] for task in tasks], units_most)
        self.tasks = {1 << position: task for position, task in enumerate(tasks)}
        self.smallest = max(1, min(task[2] for task in tasks))
        """Less compute than that of a device is of no use to any of them."""


class Values:
    """Values of what is left of nodes whose devices are of one model and size."""

    def __init__(self, asked: Sequence[tuple[Asked, int]], memory_mib: int) -> None:
        self._whole_units = _units(memory_mib)
        self._memory_mib = max(1, memory_mib)
        singles = [(one, many) for one, many in asked if one.devices == 1 and one.memory_mib <= memory_mib]
        shares = [(one, many) for one, many in singles if not one.is_whole]
        sizes = _usual([((one.compute_milli, _units(one.memory_mib)), many) for one, many in shares])
        self._compute_rest = _fillable(sizes, WHOLE)
        self._memory_rest = _fillable([(memory, compute) for compute, memory in sizes], self._whole_units)
        # What nearly all of them ask at most: more than that beside each replica makes no difference.
        wholes = [(one, many) for one, many in singles if one.is_whole]
        self._cpu_most = (
            _most([(one.cpu_milli, n) for one, n in wholes]),
            _most([(one.cpu_milli, n) for one, n in shares]),
        )
        self._host_most = (
            _most([(one.host_memory_mib, n) for one, n in wholes]),
            _most([(one.host_memory_mib, n) for one, n in shares]),
        )
        self._singles = singles
        self._streams: list[_Stream] | None = None
        self._known: dict[tuple[Left, ...], Lefts] = {}
        self._worths = 0

    def left_of(self, compute_milli: int, memory_mib: int, *, is_empty: bool) -> Left | None:
        """What is left of a device, rounded to what the mix could fill; None where that is nothing."""
        if is_empty:
            return (WHOLE, self._whole_units)
        if compute_milli <= 0 or memory_mib <= 0:
            return None
        compute, memory_used = self._compute_rest[min(compute_milli, WHOLE - 1)]
        # Rounded up, as the tasks' units are rounded to the nearest: what exactly fits must not be lost.
        memory, compute_used = self._memory_rest[min(-(-memory_mib // _MEMORY_UNIT_MIB), self._whole_units)]
        compute, memory = min(compute, compute_used), min(memory, memory_used)
        return (compute, memory) if compute and memory else None

    def value(self, cpu_milli: int, host_mib: int, lefts: Iterable[Left]) -> int:
        """Thousandths of a device, of both dimensions together, that the streams would fill: a weighted mean."""
        return self.worth(self.lefts_of(lefts), cpu_milli, host_mib)

    def lefts_of(self, lefts: Iterable[Left]) -> Lefts:
        """What is left of devices, in any order: the same object for what is alike."""
        key = tuple(sorted(lefts))
        known = self._known.get(key)
        if known is None:
            cpu_most = host_most = 0
            for compute, _ in key:
                if compute == WHOLE:
                    cpu_most += max(self._cpu_most)
                    host_most += max(self._host_most)
                else:
                    parts = -(-compute // _PART_MILLI)
                    cpu_most += self._cpu_most[1] * parts
                    host_most += self._host_most[1] * parts
            if len(self._known) >= _LEFTS_MAX:
                self._known.clear()
            known = self._known[key] = Lefts(key, cpu_most, host_most)
        return known

    def worth(self, left: Lefts, cpu_milli: int, host_mib: int) -> int:
        """As ``value``, of what these values have said is left."""
        if not left.lefts or not self._singles:
            return 0
        cpu = max(0, min(cpu_milli, left.cpu_most)) // (_CPU_UNIT_MILLI * _CPU_STEP)
        host = max(0, min(host_mib, left.host_most)) // (_HOST_UNIT_MIB * _HOST_STEP)
        key = cpu << _KEY_BITS | host
        known = left.worth.get(key)
        if known is None:
            self._worths += 1
            if self._worths > _VALUES_MAX:
                self._worths = 0
                for each in self._known.values():
                    each.worth.clear()
            known = left.worth[key] = self._play(cpu * _CPU_STEP, host * _HOST_STEP, left.lefts)
        return known

    def _task(self, one: Asked) -> _Task:
        cpu = (one.cpu_milli + _CPU_UNIT_MILLI // 2) // _CPU_UNIT_MILLI
        host = (one.host_memory_mib + _HOST_UNIT_MIB // 2) // _HOST_UNIT_MIB
        if one.is_whole:
            return (cpu, host, WHOLE, self._whole_units, 2 * WHOLE)
        units = _units(one.memory_mib)
        return (cpu, host, one.compute_milli, units, one.compute_milli + one.memory_mib * WHOLE // self._memory_mib)

    def _play(self, cpu: int, host: int, lefts: tuple[Left, ...]) -> int:
        cpu, host = min(cpu, _CPU_UNITS_MAX), min(host, _HOST_UNITS_MAX)
        filled = []
        top, top_memory = lefts[-1][0], max([memory for _, memory in lefts])
        if self._streams is None:
            # Drawn when first needed: a young mix is renewed often, and mostly values few sorts of device.
            self._streams = [
                _Stream([self._task(one) for one in drawn], self._whole_units)
                for drawn in samples(self._singles, _SEED)
            ]
        for stream in self._streams:
            by_cpu, by_host, by_compute, by_memory = stream.by_cpu, stream.by_host, stream.by_compute, stream.by_memory
            # What fits only shrinks, so a task that was passed over is never looked at again.
            waiting = by_cpu[cpu] & by_host[host] & by_compute[top] & by_memory[top_memory]
            used = 0
            if waiting:
                tasks, smallest = stream.tasks, stream.smallest
                left = list(lefts)
                cpu_left, host_left = cpu, host
                while waiting:
                    position = waiting & -waiting
                    task_cpu, task_host, compute, memory, fills = tasks[position]
                    if compute == WHOLE:
                        had = left.pop()
                    else:
                        at = bisect_left(left, (compute, memory))
                        while at < len(left) and left[at][1] < memory:
                            at += 1
                        if at == len(left):
                            waiting ^= position
                            continue  # enough of each somewhere, and of both nowhere
                        had = left.pop(at)
                        rest = (had[0] - compute, had[1] - memory)
                        if rest[0] >= smallest and rest[1] > 0:
                            insort(left, rest)
                    used += fills
                    if not left:
                        break
                    cpu_left -= task_cpu
                    host_left -= task_host
                    waiting = (waiting ^ position) & by_cpu[cpu_left] & by_host[host_left] & by_compute[left[-1][0]]
            filled.append(used)
        filled.sort()
        # Weights 1, 3, 5, … from the poorest stream to the fullest; they sum to the square of the number of streams.
        return sum((2 * rank + 1) * used for rank, used in enumerate(filled)) // len(filled) ** 2


def is_untouched(device: DeviceRoom) -> bool:
    """Whether a whole device can be had there."""
    return not device.runs and device.free_compute_milli >= device.compute_milli


def _units(memory_mib: int) -> int:
    return (memory_mib + _MEMORY_UNIT_MIB // 2) // _MEMORY_UNIT_MIB


def _usual(shares: list[tuple[Left, int]]) -> list[Left]:
    """The sizes that are asked often."""
    counts: dict[Left, int] = {}
    for size, many in shares:
        counts[size] = counts.get(size, 0) + many
    total = sum(counts.values())
    often = sorted(counts, key=lambda size: (-counts[size], size))[:_SIZES_MAX]
    return sorted(size for size in often if counts[size] * _SIZE_RARITY >= total and min(size) > 0)


def _fillable(sizes: list[Left], most: int) -> list[Left]:
    """For each amount of the first dimension: the most of it that sizes fill, and the most that they take of the other.

    What is left beyond that in either dimension makes no difference to anybody.
    """
    fills = [0] * (most + 1)
    takes = [0] * (most + 1)
    for amount in range(1, most + 1):
        fill, take = fills[amount - 1], takes[amount - 1]
        for one, other in sizes:
            if one <= amount:
                fill = max(fill, fills[amount - one] + one)
                take = max(take, takes[amount - one] + other)
        fills[amount], takes[amount] = fill, take
    return list(zip(fills, takes, strict=True))


def _most(amounts: list[tuple[int, int]]) -> int:
    """The least amount that is enough for 19 in 20."""
    total = sum(many for _, many in amounts)
    seen = 0
    for amount, many in sorted(amounts):
        seen += many
        if seen * 20 >= total * 19:
            return amount
    return 0
