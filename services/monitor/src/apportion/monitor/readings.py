"""What agents last said of their devices, and how far each consumer of the streams has come. For people and alerts.

Nothing here is part of the pool's state, and no placement depends on it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import nats.errors
from msgspec import Struct
from nats.aio.msg import Msg

from apportion.contracts import samples, subjects
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import Author, DeviceUuid, NodeId
from apportion.contracts.samples import DeviceSample
from apportion.runtime.clock import Clock
from apportion.runtime.standby import Alive
from apportion.runtime.stream import Bus, RawMessage

FILLS_S: Final = 5.0
STALE_S: Final = 10
"""An older reading is shown no more: a device that says nothing isn't idle."""
MARK_NS: Final = 100_000_000
MARKS: Final = 36_000
"""An hour of marks at ten a second: a longer lag is told as an hour."""
NS: Final = 1_000_000_000

_ALIVE: Final = msgspec.json.Decoder(Alive)


class Reading(Struct, frozen=True, kw_only=True):
    """A device's last sample."""

    node: NodeId
    sample: DeviceSample
    received_ns: int
    """By our own monotonic clock."""
    busy_ns: int
    """When it was last seen at work, or first seen."""
    pcie_bps: int | None = None
    """Bytes a second since the sample before, in the direction in which there were more; None where it isn't known."""


class StreamFill(Struct, frozen=True, kw_only=True):
    """What the bus says of one stream."""

    messages: int
    size_bytes: int
    last_seq: int


class StreamFills:
    """Asks the bus every few seconds what its streams hold."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.found: dict[str, StreamFill] = {}

    async def run(self) -> None:
        """Ask, for ever."""
        while True:
            for stream in Stream:
                with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
                    info = await self._bus.jetstream.stream_info(self._bus.stream_name(stream))
                    self.found[stream.value] = StreamFill(
                        messages=info.state.messages, size_bytes=info.state.bytes, last_seq=info.state.last_seq
                    )
            await asyncio.sleep(FILLS_S)


class Marks:
    """When each part of a stream was stored, coarsely: tells how old a position is."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS)
        self.last = 0

    def saw(self, seq: int, recorded_at: int) -> None:
        """A message of the stream went by."""
        if seq <= self.last:
            return
        self.last = seq
        if not self._marks or recorded_at - self._marks[-1][1] >= MARK_NS:
            self._marks.append((seq, recorded_at))

    def behind_s(self, position: int, now: int) -> float:
        """For how long what follows ``position`` has been waiting; 0 where nothing does."""
        if position >= self.last:
            return 0.0
        first = next((at for seq, at in self._marks if seq > position), None)
        if first is None:  # stored since the last mark
            first = self._marks[-1][1] if self._marks else now
        return max(0, now - first) / NS


class Readings:
    """Hears samples and signs of life. Use it from the event loop; reading from another thread is harmless."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._devices: dict[DeviceUuid, Reading] = {}
        self._marks = {stream: Marks() for stream in Stream}
        self._positions: dict[Author, dict[Stream, int]] = {}
        self.malformed = 0
        self.on_log: Callable[[], dict[Stream, int]] = dict
        """How far the log has come, by stream."""

    async def start(self) -> None:
        """Listen."""
        pool = self._bus.pool
        await self._bus.client.subscribe(subjects.all_samples(pool, samples.DEVICES), cb=self._on_devices)
        await self._bus.client.subscribe(subjects.alive(pool, Author("*")), cb=self._on_alive)

    def saw(self, raw: RawMessage) -> None:
        """A message of a stream was folded."""
        self._marks[raw.stream].saw(raw.seq, raw.recorded_at)

    def devices(self) -> Iterator[Reading]:
        """The readings that are fresh, by UUID."""
        oldest = self._clock.monotonic() - STALE_S * NS
        for _, reading in sorted(self._devices.copy().items()):
            if reading.received_ns >= oldest:
                yield reading

    def idle_s(self, reading: Reading) -> int:
        """For how long the device has done nothing; 0 where it doesn't say."""
        if reading.sample.busy_pct is None:
            return 0
        return (reading.received_ns - reading.busy_ns) // NS

    def lags_s(self) -> dict[tuple[str, Stream], float]:
        """For how long what each consumer has not read yet has been waiting, by consumer and stream."""
        now = self._clock.now()
        positions = [*sorted(self._positions.copy().items()), ("log", self.on_log())]
        return {
            (str(consumer), stream): self._marks[stream].behind_s(seq, now)
            for consumer, streams in positions
            for stream, seq in streams.items()
        }

    async def _on_devices(self, message: Msg) -> None:
        try:
            body = samples.DECODER.decode(message.data)
        except (msgspec.MsgspecError, UnicodeError):
            self.malformed += 1
            return
        node = subjects.node_of_sample(message.subject)
        now = self._clock.monotonic()
        for sample in body.devices:
            self.hear(node, sample, now)

    def hear(self, node: NodeId, sample: DeviceSample, now: int) -> None:
        """A device's sample came at that instant of our monotonic clock."""
        before = self._devices.get(sample.uuid)
        # Another node can't speak of a device for as long as its own does: nobody's idle card hides behind a name.
        if before is not None and before.node != node and now - before.received_ns < STALE_S * NS:
            return
        idle = before is not None and sample.busy_pct == 0
        self._devices[sample.uuid] = Reading(
            node=node,
            sample=sample,
            received_ns=now,
            busy_ns=before.busy_ns if idle and before is not None else now,
            pcie_bps=_pcie_bps(before, sample, now),
        )

    async def _on_alive(self, message: Msg) -> None:
        try:
            alive = _ALIVE.decode(message.data)
        except (msgspec.MsgspecError, UnicodeError):
            self.malformed += 1
            return
        author = Author(message.subject.rpartition(".")[2])
        self._positions[author] = {
            Stream.FACTS: alive.facts_seq,
            **({Stream.WISHES: alive.wishes_seq} if alive.wishes_seq is not None else {}),
        }


def _pcie_bps(before: Reading | None, sample: DeviceSample, now: int) -> int | None:
    if before is None or now <= before.received_ns:
        return None
    found = []
    for was, is_now in (
        (before.sample.pcie_sent_bytes, sample.pcie_sent_bytes),
        (before.sample.pcie_received_bytes, sample.pcie_received_bytes),
    ):
        if was is None or is_now is None or is_now < was:
            return None  # the driver began to count anew
        found.append((is_now - was) * NS // (now - before.received_ns))
    return max(found)
