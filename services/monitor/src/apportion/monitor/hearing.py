"""What the monitor hears: heartbeats of agents, and its own voice as proof that it could have heard them.

Time passes for the core only by ticks that went out to the bus and came back. While the bus is away or frozen none
comes, so no silence grows; when they come again after a pause, the core is told that it could not hear meanwhile.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Final

import msgspec
import nats.errors
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


class Beat(Struct, frozen=True, kw_only=True):
    """A heartbeat's body; agents may say more."""

    session: str
    epoch: int


_BEAT: Final = msgspec.json.Decoder(Beat)


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
        self._heard[node] = Heard(node=node, session=beat.session, epoch=beat.epoch, at_ns=now)

    def _passed(self, now: int) -> None:
        """Note that the monitor hears at this instant, and tell the core where it had not for a while."""
        last, self._last_ns = self._last_ns, now
        if last is not None and now - last > self._pause_ns:
            self._feed(Resumed(at_ns=now))
