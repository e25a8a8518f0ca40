"""What the monitor hears: heartbeats of agents, and its own voice as proof that it could have heard them.

Time passes for the core only by ticks that went out to the bus and came back. While the bus is away or frozen none
comes, so no silence grows; when they come again after a pause, the core is told that it could not hear meanwhile.
"""

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import nats.errors
import structlog
from msgspec import Struct
from nats.aio.msg import Msg

from apportion.contracts import subjects
from apportion.contracts.ids import MONITOR, NodeId
from apportion.monitor.core import Heard, Resumed, Sign, Tick
from apportion.runtime.clock import Clock
from apportion.runtime.stream import Bus

HEARTBEAT: Final = "heartbeat"
TICK: Final = "tick"
NS_PER_MS: Final = 1_000_000
SKEW_BEATS: Final = 30
SKEW_MS_MAX: Final = 500
"""From here on a clock is called wrong."""

log = structlog.get_logger(__name__)


class Beat(Struct, frozen=True, kw_only=True):
    """A heartbeat's body; agents may say more."""

    session: str
    epoch: int
    at: int = 0
    """When it was said, by the node's wall clock; ns since the Unix epoch."""


_BEAT: Final = msgspec.json.Decoder(Beat)


class Skews:
    """By how much the nodes' wall clocks differ from ours; for people alone, as no decision looks at either.

    A heartbeat that was said at s and received at r tells s - r = skew - travel time, so each tells that the skew is at
    least that. The best of the last SKEW_BEATS is off by the shortest of their travel times, which on a network worth
    the name is far below SKEW_MS_MAX.
    """

    def __init__(self) -> None:
        self._differences: dict[NodeId, deque[int]] = {}
        self._told: set[NodeId] = set()

    def heard(self, node: NodeId, *, said_at: int, received_at: int) -> None:
        """Take in one heartbeat's instants; ns."""
        found = self._differences.setdefault(node, deque(maxlen=SKEW_BEATS))
        found.append(said_at - received_at)
        skew_ms = max(found) // NS_PER_MS
        if abs(skew_ms) < SKEW_MS_MAX:
            self._told.discard(node)
        elif node not in self._told and len(found) == SKEW_BEATS:
            self._told.add(node)
            log.warning("clock_skewed", node=node, skew_ms=skew_ms, limit_ms=SKEW_MS_MAX)

    def seconds(self, nodes: Iterable[NodeId]) -> dict[NodeId, float]:
        """The skew of each of these nodes that was heard; positive where the node's clock is ahead."""
        return {node: max(found) / 1e9 for node in nodes if (found := self._differences.get(node))}


class Hearing:
    """Feeds a core with what is heard. ``suspect_ms`` sets how fine time has to be."""

    def __init__(self, bus: Bus, clock: Clock, feed: Callable[[Sign], None], *, suspect_ms: int) -> None:
        self._bus = bus
        self._clock = clock
        self._feed = feed
        self._tick_ns = max(20, suspect_ms // 10) * NS_PER_MS
        # A tick may be late by itself; half of what makes a node suspect is a pause.
        self._pause_ns = suspect_ms * NS_PER_MS // 2
        self._last_ns: int | None = None
        self._heard: dict[NodeId, Heard] = {}
        """The newest sign of each node since the last tick."""
        # One's own: of two monitors neither takes the other's voice for proof that it hears.
        self._subject = subjects.own_voice(bus.pool, MONITOR, f"{TICK}-{uuid.uuid4().hex[:12]}")
        self.skews = Skews()
        self.malformed = 0
        """Heartbeats that could not be read."""

    async def start(self) -> None:
        """Listen."""
        await self._bus.client.subscribe(subjects.all_samples(self._bus.pool, HEARTBEAT), cb=self._on_heartbeat)
        await self._bus.client.subscribe(self._subject, cb=self._on_tick)

    async def run(self, stop: asyncio.Event) -> None:
        """Send a tick every so often until ``stop``."""
        while not stop.is_set():
            # Not while the connection is down: the client would send what it kept when it is back, all at once.
            if self._bus.client.is_connected:
                # The instant travels with it: one that a frozen bus held back does not pass for a fresh one.
                self._bus.send_soon(self._subject, str(self._clock.monotonic()).encode())
            with contextlib.suppress(asyncio.TimeoutError, nats.errors.Error):
                await asyncio.wait_for(stop.wait(), self._tick_ns / 1e9)

    async def _on_tick(self, message: Msg) -> None:
        now = self._clock.monotonic()
        with contextlib.suppress(ValueError):
            if 0 <= now - int(message.data) < self._pause_ns:
                self._passed(now)
                # Together, so that a large fleet is judged once a tick and not once a heartbeat.
                for heard in self._heard.values():
                    self._feed(heard)
                self._heard.clear()
                self._feed(Tick(at_ns=now))

    async def _on_heartbeat(self, message: Msg) -> None:
        now = self._clock.monotonic()
        self._passed(now)
        try:
            beat = _BEAT.decode(message.data)
        except (msgspec.MsgspecError, UnicodeError):
            self.malformed += 1
            return
        node = subjects.node_of_sample(message.subject)
        if beat.at:
            self.skews.heard(node, said_at=beat.at, received_at=self._clock.now())
        self._heard[node] = Heard(node=node, session=beat.session, epoch=beat.epoch, at_ns=now)

    def _passed(self, now: int) -> None:
        """Note that the monitor hears at this instant, and tell the core where it had not for a while."""
        last, self._last_ns = self._last_ns, now
        if last is not None and now - last > self._pause_ns:
            self._feed(Resumed(at_ns=now))
