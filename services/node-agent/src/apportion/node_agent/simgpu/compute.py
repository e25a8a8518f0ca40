"""Who gets how many SMs of one device, and when kernels are done: a fluid model of time sharing; pure.

Groups take turns on the whole device, as contexts of separate processes do; the streams of one group run side by side,
as the clients of one MPS server do, each within its cap. Turns are modelled as equal shares rather than slices, so
that a kernel's duration depends on its neighbours and on nothing else: the same history gives the same times.

SMs can be kept for a partition of a group, and then nobody else of the group has them. Cache and memory bandwidth
can't: kernels that are bound by them slow each other down however the SMs are split, unless they take turns.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final

_WINDOW_US: Final = 1_000_000
"""NVML's utilisation looks back over a second at most."""
_STEP_US: Final = 50_000
_BANDWIDTH: Final = {"sm": 0.0, "l2": 1.5, "dram": 2.0}
"""What a kernel on all SMs could draw, as a multiple of what there is (modelled: half of the SMs saturate memory)."""
_TICK_US: Final = 0.05
"""A kernel that would end within it has ended: after days of uptime, floats of microseconds are no finer."""


class Meter:
    """A growing total, and its growth over the last second."""

    def __init__(self) -> None:
        self.total = 0.0
        self._marks: deque[tuple[float, float]] = deque()
        """Points (microseconds, total) of the curve; straight between them, flat after the last."""

    def add(self, amount: float, since_us: float, until_us: float) -> None:
        """Let the total grow evenly within this span; spans come in order."""
        if not self._marks or self._marks[-1][0] < since_us:
            self._marks.append((since_us, self.total))
        self.total += amount
        if len(self._marks) >= 2 and until_us - self._marks[-2][0] < _STEP_US:
            self._marks[-1] = (until_us, self.total)  # Many short spans become one.
        else:
            self._marks.append((until_us, self.total))
        while len(self._marks) > 2 and self._marks[1][0] <= until_us - _WINDOW_US:
            self._marks.popleft()

    def growth_fraction(self, now_us: int, per_us: float) -> float:
        """Growth over the last second against ``per_us`` in each microsecond, 0 to 1."""
        since = max(0, now_us - _WINDOW_US)
        return min(1.0, (self.total - self._at(since)) / (max(now_us - since, 1) * per_us))

    def _at(self, when_us: float) -> float:
        later: tuple[float, float] | None = None
        for mark in reversed(self._marks):
            if mark[0] <= when_us:
                if later is None:
                    return mark[1]
                return mark[1] + (later[1] - mark[1]) * (when_us - mark[0]) / (later[0] - mark[0])
            later = mark
        return later[1] if later is not None else self.total


class _Stream:
    def __init__(self, group: Hashable, cap_sms: float, partition: str | None) -> None:
        self.group = group
        self.cap_sms = cap_sms
        self.partition = partition
        self.queue: deque[tuple[int, float, str]] = deque()
        """Kernels in order: the SMs that each can use, its remaining SM-microseconds, and what it is bound by."""
        self.rate = 0.0
        self.used = Meter()


class DeviceClock:
    """The kernels of one device, by stream."""

    def __init__(self, sms: int) -> None:
        self.sms = sms
        self.active = Meter()
        """Microseconds in which any kernel ran: NVML's utilisation."""
        self.used = Meter()
        """SM-microseconds used: what energy follows."""
        self._streams: dict[int, _Stream] = {}
        self._kept: dict[Hashable, dict[str, int]] = {}
        self._done: list[tuple[int, float]] = []
        self._now = 0.0

    def open(self, stream: int, group: Hashable, cap_sms: float, now_us: int, *, partition: str | None = None) -> None:
        """Add a stream that uses at most ``cap_sms`` at a time; with a partition, of those that are kept for it."""
        self.advance(now_us)
        self._streams[stream] = _Stream(group, max(1.0, min(cap_sms, self.sms)), partition)

    def keep(self, group: Hashable, partitions: Mapping[str, int], now_us: int) -> None:
        """Keep SMs of a group for its partitions, by partition; replaces what was kept before."""
        self.advance(now_us)
        self._kept[group] = dict(partitions)
        self._share()

    def close(self, stream: int, now_us: int) -> None:
        """Drop a stream, its unfinished kernels with it."""
        self.advance(now_us)
        self._streams.pop(stream, None)
        self._share()

    def cancel(self, stream: int, now_us: int) -> None:
        """Drop a stream's unfinished kernels; what it used stays counted."""
        self.advance(now_us)
        self._streams[stream].queue.clear()
        self._share()

    def submit(self, stream: int, sms: int, us: int, now_us: int, *, bound: str = "sm") -> None:
        """Queue a kernel that takes ``us`` where it gets ``sms`` SMs, and longer where it gets fewer.

        ``bound`` says what it needs most: ``sm``, ``l2`` or ``dram``.
        """
        self.advance(now_us)
        wanted = max(1, min(sms, self.sms))
        self._streams[stream].queue.append((wanted, float(wanted * us), bound))
        self._share()

    def pending(self, stream: int) -> int:
        """How many kernels of the stream are not finished."""
        return len(self._streams[stream].queue)

    def sm_use_fraction(self, stream: int, now_us: int) -> float:
        """The stream's SM use over the last second, as a fraction of the device."""
        return self._streams[stream].used.growth_fraction(now_us, self.sms)

    def sm_us(self, stream: int) -> float:
        """SM-microseconds that the stream has used."""
        return self._streams[stream].used.total

    def next_completion_us(self) -> float | None:
        """When the next kernel ends if nothing changes; None if none runs."""
        ends = [self._now + stream.queue[0][1] / stream.rate for stream in self._streams.values() if stream.queue]
        return min(ends, default=None)

    def take_done(self) -> list[tuple[int, float]]:
        """(stream, end in microseconds) of every kernel that has ended since the last call, in order."""
        done, self._done = self._done, []
        return done

    def advance(self, now_us: int) -> None:
        """Run up to ``now_us``."""
        while (end := self.next_completion_us()) is not None and end <= now_us:
            self._run(end)
            for number, stream in self._streams.items():
                if stream.queue and stream.queue[0][1] <= stream.rate * _TICK_US:
                    _, left, _ = stream.queue.popleft()
                    stream.used.add(left, end, end)
                    self.used.add(left, end, end)
                    self._done.append((number, end))
            self._share()
        self._run(now_us)

    def _run(self, until_us: float) -> None:
        span = until_us - self._now
        if span <= 0:
            return
        used = 0.0
        for stream in self._streams.values():
            if stream.queue:
                sms, left, bound = stream.queue[0]
                part = min(left, stream.rate * span)
                stream.queue[0] = (sms, left - part, bound)
                stream.used.add(part, self._now, until_us)
                used += part
        if used:
            self.active.add(span, self._now, until_us)
            self.used.add(used, self._now, until_us)
        self._now = until_us

    def _share(self) -> None:
        """Equal turns for groups; in a turn SMs by what each wants, and bandwidth by what each draws."""
        groups: dict[Hashable, list[_Stream]] = {}
        for stream in self._streams.values():
            if stream.queue:
                groups.setdefault(stream.group, []).append(stream)
        for group, members in groups.items():
            kept = self._kept.get(group, {})
            rest = max(1, self.sms - sum(kept.values()))
            parts: dict[str | None, list[_Stream]] = {}
            for stream in members:
                parts.setdefault(stream.partition, []).append(stream)
            for partition, inside in parts.items():
                room = float(kept.get(partition, rest)) if partition is not None else float(rest)
                wanted = sum(min(stream.queue[0][0], stream.cap_sms, room) for stream in inside)
                # Who has more blocks waiting gets more SMs: the scheduler of the hardware knows no fairness.
                scale = min(1.0, room / wanted)
                for stream in inside:
                    stream.rate = scale * min(stream.queue[0][0], stream.cap_sms, room)
            for bound, draw in _BANDWIDTH.items():
                alike = [stream for stream in members if stream.queue[0][2] == bound]
                drawn = sum(min(1.0, draw * stream.rate / self.sms) for stream in alike)
                if drawn > 1:
                    for stream in alike:
                        stream.rate /= drawn
            for stream in members:
                stream.rate /= len(groups)
