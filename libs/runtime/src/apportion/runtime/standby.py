"""Several processes of one author: how the active one is heard, and when another takes its place.

The active process says over plain NATS, every RENEW_S, that it lives. A standby folds as the active does, and counts
its silence by its own monotonic clock from receipt. Time passes for it only while its own voice comes back from the
bus: a bus that is away, or a standby that was paused itself, makes nobody look dead.

A silence that is misread costs a handover and nothing else: who may write is decided by the bus, which stores one claim
after the other and refuses what an older session still sends (docs/adr/0004-standby.md).
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import structlog
from msgspec import Meta, Struct
from nats.aio.msg import Msg

from apportion.contracts import subjects
from apportion.contracts.ids import Author
from apportion.runtime.settings import Common
from apportion.runtime.stream import Bus

RENEW_S: Final = 0.3
"""Between two signs of life. Plain NATS, not stored: three authors cost ten small messages a second."""
TAKEOVER_MS: Final = 2_000
_PAUSE_RENEWALS: Final = 3
"""Our own voice may be late by this many intervals before we doubt that we can hear."""
NS_PER_MS: Final = 1_000_000

log = structlog.get_logger(__name__)


class AuthorSettings(Common, frozen=True, kw_only=True):
    """What an author of which there may be several processes can be told. No decision depends on it."""

    standby: bool = False
    """Follow, and take over once the active process falls silent. Without it a process takes over as it starts."""
    takeover_ms: Annotated[int, Meta(ge=1_000, le=600_000)] = TAKEOVER_MS
    """The silence of the active process after which a standby takes over."""


class Alive(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the active process says."""

    session: str
    leaving: bool = False
    """It ends by itself and writes nothing more: whoever stands by need not wait."""
    facts_seq: int = 0
    """How far it has folded the facts."""
    wishes_seq: int | None = None
    """How far it has folded the wishes; None where it reads none."""


_ALIVE: Final = msgspec.json.Decoder(Alive)


class Vigil:
    """One process's ear for its author's active session, and its own voice once it is the active one."""

    def __init__(
        self,
        bus: Bus,
        author: Author,
        *,
        is_standby: bool,
        takeover_ms: int = TAKEOVER_MS,
        renew_s: float = RENEW_S,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.is_standby = is_standby
        self.takeover_ms = takeover_ms
        self.on_change: Callable[[], None] = lambda: None
        """Called when somebody has to look: the active session said that it leaves, or was silent for long enough."""
        self._bus = bus
        self._author = author
        self._monotonic = monotonic
        self._renew_s = renew_s
        self._pause_ns = int(_PAUSE_RENEWALS * renew_s * 1e9)
        self._heard_ns: int | None = None
        """Silence counts from here: the last sign of life, or when we began, or could, hear."""
        self._now_ns = 0
        """When our own voice last came back: time stands still in between."""
        self._has_left = False
        self._session = ""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def silent_ms(self) -> int:
        """How long the active session has been silent while we could hear; 0 until we can."""
        return 0 if self._heard_ns is None else max(0, self._now_ns - self._heard_ns) // NS_PER_MS

    @property
    def is_vacant(self) -> bool:
        """True where nobody seems to be active, so that a standby may claim the lease."""
        return self._heard_ns is not None and (self._has_left or self.silent_ms >= self.takeover_ms)

    def follow(self, session: str) -> None:
        """``session`` is the active one from here on: the newest that claimed. Silence counts from anew."""
        self._session = session
        self._heard()

    def _heard(self) -> None:
        self._heard_ns = self._monotonic()
        self._now_ns = max(self._now_ns, self._heard_ns)
        self._has_left = False

    async def start(self) -> None:
        """Listen, and hear ourselves."""
        await self._bus.client.subscribe(subjects.alive(self._bus.pool, self._author), cb=self._on_alive)
        # What comes back by the server's hands is proof that signs of life could have come too.
        echo = subjects.own_voice(self._bus.pool, self._author, uuid.uuid4().hex[:12])
        await self._bus.client.subscribe(echo, cb=self._on_echo)

        async def speak() -> None:
            while True:
                if self._bus.client.is_connected:
                    self._bus.send_soon(echo, str(self._monotonic()).encode())
                await asyncio.sleep(self._renew_s)

        self._tasks.append(asyncio.create_task(speak(), name=f"vigil-{self._author}"))

    def renew(self, alive: Callable[[], Alive]) -> None:
        """Say ``alive`` from now on. In the reactor's own loop: a loop that hangs says nothing."""
        self._end_tasks()

        async def renew() -> None:
            while True:
                self._say(alive())
                await asyncio.sleep(self._renew_s)

        self._tasks.append(asyncio.create_task(renew(), name=f"alive-{self._author}"))

    async def leave(self, session: str) -> None:
        """Say that ``session`` writes nothing more, and fall silent."""
        self._end_tasks()
        self._say(Alive(session=session, leaving=True))
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop listening and speaking."""
        self._end_tasks()

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _say(self, alive: Alive) -> None:
        # Not while the connection is down: what the client kept would come late, all at once, as if we lived.
        if self._bus.client.is_connected:
            self._bus.send_soon(subjects.alive(self._bus.pool, self._author), msgspec.json.encode(alive))

    async def _on_alive(self, message: Msg) -> None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            alive = _ALIVE.decode(message.data)
            if alive.session != self._session:
                return  # one that was fenced and doesn't know it yet
            self._heard()
            if alive.leaving:
                self._has_left = True
                self.on_change()

    async def _on_echo(self, message: Msg) -> None:
        now = self._monotonic()
        with contextlib.suppress(ValueError):
            said = int(message.data)
            if not 0 <= now - said < self._pause_ns:
                return  # held back somewhere: while it was, we could not have heard anybody
            if self._heard_ns is None or now - self._now_ns > self._pause_ns:
                self._heard_ns = now
            self._now_ns = max(self._now_ns, now)
            if self.is_vacant:
                self.on_change()


__all__ = ["RENEW_S", "TAKEOVER_MS", "Alive", "AuthorSettings", "Vigil"]
