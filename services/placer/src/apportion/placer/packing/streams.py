"""What a stream of a known workload could still fit on a node: the value of keeping that node as it is.

A few fixed streams of single-device tasks are drawn from the mix for each kind of node. A node's value is the device
share that the streams would fill on it, first come, tightest device first; full streams weigh more than poor ones, as in
a pool a task goes where it suits, and a node sees what suits it. Values are cached by a state that is rounded to what
the mix can tell apart.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from apportion.placer.packing.demand import WHOLE_DEVICE_MILLI, Shape
from apportion.placer.packing.draws import Draws

STREAMS = 16
STREAM_TASKS = 60

# Units in which streams are played. Residuals are rounded down to a few of them, so that near-equal nodes share a value.
_CPU_UNIT_MILLI = 500
_MEMORY_UNIT_MIB = 1024
_CPU_STEP_MILLI = 2000
_MEMORY_STEP_MIB = 8192

# Beyond this many per device, CPU and memory no longer matter: more than nearly all tasks could use on it.
_CPU_MILLI_PER_WHOLE = 26_000
_CPU_MILLI_PER_PART = 12_000
_MEMORY_MIB_PER_WHOLE = 81_920
_MEMORY_MIB_PER_PART = 49_152
_PART_MILLI = 320

# Share sizes rarer than this (one in so many shared tasks) don't count when rooms are rounded to what can be filled.
_SIZE_RARITY = 100

# One stream as bit masks over its positions: which tasks fit this much CPU, memory and room, and the tasks themselves.
_Stream = tuple[list[int], list[int], list[int], list[tuple[int, int, int]]]

StateKey = tuple[int, int, tuple[int, ...]]


class StreamValues:
    """Values of node states for one mix and one set of acceptable shapes."""

    def __init__(self, counts: Sequence[tuple[Shape, int]], seed: int) -> None:
        singles = [(shape, count) for shape, count in counts if shape.devices == 1]
        self._rounded_room = _reachable_rooms(singles)
        self._streams = _draw_streams(singles, seed)
        self._values: dict[StateKey, int] = {}
        self._room_facts: dict[tuple[int, ...], tuple[tuple[int, ...], int, int]] = {}

    def value(self, cpu_milli: int, memory_mib: int, rooms: tuple[int, ...]) -> int:
        """The milli that the streams would still fill on such a node, a weighted mean over the streams."""
        facts = self._room_facts.get(rooms)
        if facts is None:
            facts = self._room_facts[rooms] = self._facts_of(rooms)
        useful, cpu_max, memory_max = facts
        if not useful:
            return 0
        cpu = min(cpu_milli, cpu_max) // _CPU_STEP_MILLI
        memory = min(memory_mib, memory_max) // _MEMORY_STEP_MIB
        key = (cpu, memory, useful)
        known = self._values.get(key)
        if known is None:
            known = self._values[key] = self._play(
                cpu * _CPU_STEP_MILLI // _CPU_UNIT_MILLI, memory * _MEMORY_STEP_MIB // _MEMORY_UNIT_MIB, useful
            )
        return known

    def forget(self) -> None:
        """Drop all cached values."""
        self._values.clear()
        self._room_facts.clear()

    def _facts_of(self, rooms: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        useful = sorted(filter(None, (self._rounded_room[room] for room in rooms)))
        cpu_max = memory_max = 0
        for room in useful:
            if room == WHOLE_DEVICE_MILLI:
                cpu_max += _CPU_MILLI_PER_WHOLE
                memory_max += _MEMORY_MIB_PER_WHOLE
            else:
                parts = -(-room // _PART_MILLI)
                cpu_max += _CPU_MILLI_PER_PART * parts
                memory_max += _MEMORY_MIB_PER_PART * parts
        return tuple(useful), cpu_max, memory_max

    def _play(self, cpu: int, memory: int, rooms: tuple[int, ...]) -> int:
        filled = []
        for by_cpu, by_memory, by_room, tasks in self._streams:
            cpu_left = cpu if cpu < len(by_cpu) else len(by_cpu) - 1
            memory_left = memory if memory < len(by_memory) else len(by_memory) - 1
            left = list(rooms)
            waiting = -1
            used = 0
            while left:
                # What fits only shrinks, so a task that was passed over is never looked at again.
                waiting &= by_cpu[cpu_left] & by_memory[memory_left] & by_room[left[-1]]
                if not waiting:
                    break
                position = waiting & -waiting
                waiting ^= position
                task_cpu, task_memory, milli = tasks[position.bit_length()]
                cpu_left -= task_cpu
                memory_left -= task_memory
                used += milli
                if milli == WHOLE_DEVICE_MILLI:
                    left.pop()
                else:
                    rest = left.pop(bisect_left(left, milli)) - milli
                    if rest:
                        insort(left, rest)
            filled.append(used)
        filled.sort()
        # Weights 1, 3, 5, … from the poorest stream to the fullest; they sum to the square of the number of streams.
        return sum((2 * rank + 1) * used for rank, used in enumerate(filled)) // max(len(filled) ** 2, 1)


def _reachable_rooms(singles: list[tuple[Shape, int]]) -> list[int]:
    # A room of 520 is worth as much as one of 500 if no tasks of the mix fill 501 to 520: round down to a fillable sum.
    sizes: dict[int, int] = {}
    for shape, count in singles:
        if shape.device_milli < WHOLE_DEVICE_MILLI:
            sizes[shape.device_milli] = sizes.get(shape.device_milli, 0) + count
    shared = sum(sizes.values())
    usual = sorted(size for size, count in sizes.items() if count * _SIZE_RARITY >= shared)
    reachable = [0]
    fillable = [True] + [False] * WHOLE_DEVICE_MILLI
    for room in range(1, WHOLE_DEVICE_MILLI):
        fillable[room] = any(size <= room and fillable[room - size] for size in usual)
        reachable.append(room if fillable[room] else reachable[-1])
    return [*reachable, WHOLE_DEVICE_MILLI]


def _draw_streams(singles: list[tuple[Shape, int]], seed: int) -> list[_Stream]:
    running: list[int] = []
    total = 0
    for _, count in singles:
        total += count
        running.append(total)
    if not total:
        return []
    draws = Draws(seed)
    streams: list[_Stream] = []
    for _ in range(STREAMS):
        drawn = [singles[bisect_right(running, draws.below(total))][0] for _ in range(STREAM_TASKS)]
        tasks = [
            (
                (shape.cpu_milli + _CPU_UNIT_MILLI // 2) // _CPU_UNIT_MILLI,
                (shape.memory_mib + _MEMORY_UNIT_MIB // 2) // _MEMORY_UNIT_MIB,
                shape.device_milli,
            )
            for shape in drawn
        ]
        by_room = _masks([milli for _, _, milli in tasks])
        by_room += [by_room[-1]] * (WHOLE_DEVICE_MILLI + 1 - len(by_room))
        streams.append(
            (
                # The tables end where every task fits all the same; the last entry stands for anything above, so it
                # must lie high enough that a node's CPU and memory, cut to it, can still feed all of its devices.
                _padded(_masks([cpu for cpu, _, _ in tasks]), 512),
                _padded(_masks([memory for _, memory, _ in tasks]), 1280),
                by_room,
                [(0, 0, 0), *tasks],
            )
        )
    return streams


def _padded(masks: list[int], length: int) -> list[int]:
    return masks + [masks[-1]] * (length - len(masks))


def _masks(needs: list[int]) -> list[int]:
    """For each amount from 0 to the greatest need: the positions, as bits, whose need is no more than that."""
    masks: list[int] = []
    mask = 0
    for need, position in sorted((need, position) for position, need in enumerate(needs)):
        masks += [mask] * (need - len(masks))
        mask |= 1 << position
        if len(masks) == need:
            masks.append(mask)
        else:
            masks[need] = mask
    return masks
