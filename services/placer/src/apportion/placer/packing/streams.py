"""What a stream of a known workload could still fit on a node: the value of keeping that node as it is.

A few fixed streams of single-device tasks are drawn from the mix for each kind of node. A node's value is the device
share that the streams would fill on it, first come, tightest device first. Full streams weigh more than poor ones: in a
pool a task goes where it suits, so that a node sees what suits it. Values are cached by a state that is rounded to what
the mix can tell apart.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from apportion.placer.packing.demand import WHOLE_DEVICE_MILLI, Shape
from apportion.placer.packing.samples import masks, samples

# More than the steps of memory that any node has.
_KEY_BITS = 16

# Units in which streams are played. Residuals are rounded down to a few of them: near-equal nodes share a value.
_CPU_UNIT_MILLI = 500
_MEMORY_UNIT_MIB = 1024
_CPU_STEP_MILLI = 2000
_MEMORY_STEP_MIB = 8192

# Where the tables of a stream end; what a node has beyond is left out of account.
_CPU_UNITS_MAX = 512
_MEMORY_UNITS_MAX = 1280

_SEED = 1

# Beyond this many per device, CPU and memory no longer matter: more than nearly all tasks could use on it.
_CPU_MILLI_PER_WHOLE = 26_000
_CPU_MILLI_PER_PART = 12_000
_MEMORY_MIB_PER_WHOLE = 81_920
_MEMORY_MIB_PER_PART = 49_152
_PART_MILLI = 320

# Share sizes rarer than this (one in so many shared tasks) don't count when rooms are rounded to what can be filled.
_SIZE_RARITY = 100

# One stream as bit masks over its positions: which tasks fit this much CPU, memory and room; the tasks themselves; and
# the smallest room that any of them can use.
_Stream = tuple[list[int], list[int], list[int], dict[int, tuple[int, int, int]], int]


class RoomState:
    """Rooms of a node as a mix tells them apart, and what a node with these is worth by the CPU and memory it has."""

    __slots__ = ("cpu_max", "memory_max", "rooms", "worth")

    def __init__(self, rooms: tuple[int, ...]) -> None:
        self.rooms = rooms
        # By steps of CPU, and of memory in the lower digits.
        self.worth: dict[int, int] = {}
        self.cpu_max = self.memory_max = 0
        for room in rooms:
            if room == WHOLE_DEVICE_MILLI:
                self.cpu_max += _CPU_MILLI_PER_WHOLE
                self.memory_max += _MEMORY_MIB_PER_WHOLE
            else:
                parts = -(-room // _PART_MILLI)
                self.cpu_max += _CPU_MILLI_PER_PART * parts
                self.memory_max += _MEMORY_MIB_PER_PART * parts


class StreamValues:
    """Values of node states for one mix and one set of acceptable shapes.

    Streams are drawn when the first value is asked for: a mix that is soon renewed mostly values few models.
    """

    def __init__(self, counts: Sequence[tuple[Shape, int]], seed: int) -> None:
        self._singles = [(shape, count) for shape, count in counts if shape.devices == 1]
        self._seed = seed
        self._rounded_room: list[int] = []
        self._streams: list[_Stream] | None = None
        self._states: dict[tuple[int, ...], RoomState] = {}
        self._by_rooms: dict[tuple[int, ...], RoomState] = {}
        self._ways: dict[tuple[tuple[int, ...], int, int], list[tuple[int, RoomState]]] = {}

    def value(self, cpu_milli: int, memory_mib: int, rooms: tuple[int, ...]) -> int:
        """The milli that the streams would still fill on such a node, a weighted mean over the streams."""
        return self.worth(self._by_rooms.get(rooms) or self._state_of(rooms), cpu_milli, memory_mib)

    def worth(self, state: RoomState, cpu_milli: int, memory_mib: int) -> int:
        """As ``value``, of a state of this mix."""
        if not state.rooms:
            return 0
        cpu = min(state.cpu_max, cpu_milli) // _CPU_STEP_MILLI
        memory = min(state.memory_max, memory_mib) // _MEMORY_STEP_MIB
        key = cpu << _KEY_BITS | memory
        known = state.worth.get(key)
        if known is None:
            known = state.worth[key] = self._play(
                cpu * _CPU_STEP_MILLI // _CPU_UNIT_MILLI, memory * _MEMORY_STEP_MIB // _MEMORY_UNIT_MIB, state.rooms
            )
        return known

    def ways(self, rooms: tuple[int, ...], devices: int, device_milli: int) -> list[tuple[int, RoomState]]:
        """Each way in which a node with these rooms can host so many devices' shares: the room taken, and what remains.

        The smallest room first; a room whose taking leaves what another leaves is left out. Whole devices, and none,
        are taken in one way.
        """
        key = (rooms, devices, device_milli)
        known = self._ways.get(key)
        if known is None:
            known = self._ways[key] = self._ways_of(rooms, devices, device_milli)
        return known

    def forget(self) -> None:
        """Drop all cached values."""
        self._states.clear()
        self._by_rooms.clear()
        self._ways.clear()

    def _ways_of(self, rooms: tuple[int, ...], devices: int, device_milli: int) -> list[tuple[int, RoomState]]:
        top = rooms[0] if rooms else 0
        if device_milli == WHOLE_DEVICE_MILLI or not devices:
            return [(top, self._state_of(rooms[devices:]))]
        found: list[tuple[int, RoomState]] = []
        for room in sorted({room for room in rooms if room >= device_milli}):
            at = rooms.index(room)
            state = self._state_of((*rooms[:at], room - device_milli, *rooms[at + 1 :]))
            if all(state is not other for _, other in found):
                found.append((room, state))
        return found

    def _state_of(self, rooms: tuple[int, ...]) -> RoomState:
        if not self._rounded_room:
            self._rounded_room = _reachable_rooms(self._singles)
        useful = tuple(sorted(filter(None, [self._rounded_room[room] for room in rooms])))
        state = self._states.get(useful)
        if state is None:
            state = self._states[useful] = RoomState(useful)
        self._by_rooms[rooms] = state
        return state

    def _play(self, cpu: int, memory: int, rooms: tuple[int, ...]) -> int:
        cpu = min(cpu, _CPU_UNITS_MAX)
        memory = min(memory, _MEMORY_UNITS_MAX)
        top = rooms[-1]
        filled = []
        if self._streams is None:
            self._streams = _draw_streams(self._singles, self._seed)
        for by_cpu, by_memory, by_room, tasks, smallest in self._streams:
            # What fits only shrinks, so a task that was passed over is never looked at again.
            waiting = by_cpu[cpu] & by_memory[memory] & by_room[top]
            used = 0
            if waiting:
                cpu_left = cpu
                memory_left = memory
                left = list(rooms)
                while waiting:
                    position = waiting & -waiting
                    task_cpu, task_memory, milli = tasks[position]
                    used += milli
                    if milli == WHOLE_DEVICE_MILLI:
                        left.pop()
                    else:
                        rest = left.pop(bisect_left(left, milli)) - milli
                        if rest >= smallest:
                            insort(left, rest)
                    if not left:
                        break
                    cpu_left -= task_cpu
                    memory_left -= task_memory
                    waiting = (waiting ^ position) & by_cpu[cpu_left] & by_memory[memory_left] & by_room[left[-1]]
            filled.append(used)
        filled.sort()
        # Weights 1, 3, 5, … from the poorest stream to the fullest; they sum to the square of the number of streams.
        return sum((2 * rank + 1) * used for rank, used in enumerate(filled)) // max(len(filled) ** 2, 1)


class StreamLibrary:
    """Values by mix, so that fleets that serve the same workload, or one fleet run again, share what was worked out."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._values: dict[tuple[tuple[Shape, int], ...], StreamValues] = {}

    def values(self, counts: Sequence[tuple[Shape, int]]) -> StreamValues:
        """The values under that mix; equal mixes get the same object."""
        key = tuple(counts)
        known = self._values.get(key)
        if known is None:
            if len(self._values) >= self._limit:
                del self._values[next(iter(self._values))]
            known = self._values[key] = StreamValues(key, _SEED)
        return known


def _reachable_rooms(singles: list[tuple[Shape, int]]) -> list[int]:
    # A room of 520 is worth as much as one of 500 if no tasks of the mix fill 501 to 520: round down to a fillable sum.
    sizes: dict[int, int] = {}
    for shape, count in singles:
        if shape.device_milli < WHOLE_DEVICE_MILLI:
            sizes[shape.device_milli] = sizes.get(shape.device_milli, 0) + count
    shared = sum(sizes.values())
    usual = sorted(size for size, count in sizes.items() if count * _SIZE_RARITY >= shared)
    # Bit n is set where tasks of these sizes can fill n, as many of each as one likes.
    fillable = 1
    for size in usual:
        step = size
        while step < WHOLE_DEVICE_MILLI:
            fillable |= fillable << step
            step *= 2
    reachable = [0]
    for room in range(1, WHOLE_DEVICE_MILLI):
        reachable.append(room if fillable >> room & 1 else reachable[-1])
    return [*reachable, WHOLE_DEVICE_MILLI]


def _draw_streams(singles: list[tuple[Shape, int]], seed: int) -> list[_Stream]:
    streams: list[_Stream] = []
    for drawn in samples(singles, seed):
        tasks = [
            (
                (shape.cpu_milli + _CPU_UNIT_MILLI // 2) // _CPU_UNIT_MILLI,
                (shape.memory_mib + _MEMORY_UNIT_MIB // 2) // _MEMORY_UNIT_MIB,
                shape.device_milli,
            )
            for shape in drawn
        ]
        streams.append(
            (
                masks([cpu for cpu, _, _ in tasks], _CPU_UNITS_MAX),
                masks([memory for _, memory, _ in tasks], _MEMORY_UNITS_MAX),
                masks([milli for _, _, milli in tasks], WHOLE_DEVICE_MILLI),
                {1 << position: task for position, task in enumerate(tasks)},
                max(min(milli for *_, milli in tasks), 1),
            )
        )
    return streams
