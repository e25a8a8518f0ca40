"""Lays messages aside that could not be read: one copy of each in the pool's stream of dead letters.

A copy waits while admission has something better to do, so that a flood of bad messages delays no good one. What was
not copied when the process ends is copied by the next: until then no snapshot is written (``is_settled``).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec
import nats.errors
import structlog
from nats.js.errors import APIError

from apportion.contracts.envelope import Entry, Undecodable
from apportion.runtime.clock import Clock
from apportion.runtime.letters import is_dead, letter_of
from apportion.runtime.stream import DEAD_LETTER_DAYS, Bus, RawMessage

AT_ONCE: Final = 32
"""Copies on their way at the same time."""
BYTES_WAITING_MAX: Final = 16 * 1024 * 1024
"""Bodies held in memory; those behind are fetched from their stream when their turn comes."""
PATIENCE_S: Final = 1.0
"""So long a few copies wait for a quiet moment; in a flood they trickle, and the good messages go first."""
WAITING_MAX: Final = 50_000
"""Beyond this the oldest are left out, which their stream would push out first as well."""
_NS_PER_DAY: Final = 86_400 * 1_000_000_000
_THERE_ALREADY: Final = frozenset({10071, 10164})

log = structlog.get_logger(__name__)


class DeadLetters:
    """The letters that are still to be laid aside."""

    def __init__(self, bus: Bus, *, service: str, clock: Clock, is_busy: Callable[[], bool]) -> None:
        self._bus = bus
        self._service = service
        self._clock = clock
        self._is_busy = is_busy
        self._waiting: deque[tuple[RawMessage, Undecodable, str]] = deque()
        self._bytes = 0
        self._on_its_way = 0
        self._news = asyncio.Event()
        self.copied = 0
        """Copies that the server holds."""
        self.failed = 0
        """Copies that the server won't have; the message is in its own stream all the same."""
        self.left_out = 0
        """Copies never made, as too many waited."""

    def saw(self, raw: RawMessage, entry: Entry) -> None:
        """Note a message that could not be read."""
        found = entry.event
        if not isinstance(found, Undecodable) or not is_dead(entry):
            return
        if self._clock.now() - raw.recorded_at > DEAD_LETTER_DAYS * _NS_PER_DAY:
            return  # a copy would have aged out: this is an old stream, read again
        if self._bytes + len(raw.body) > BYTES_WAITING_MAX:
            raw = msgspec.structs.replace(raw, body=b"", headers=None)
        self._bytes += len(raw.body)
        self._waiting.append((raw, found, entry.digest))
        if len(self._waiting) > WAITING_MAX:
            oldest, _, _ = self._waiting.popleft()
            self._bytes -= len(oldest.body)
            self.left_out += 1
        self._news.set()

    def is_settled(self) -> bool:
        """True where every message that was seen has its copy."""
        return not self._waiting and not self._on_its_way

    async def run(self) -> None:
        """Copy what comes, for ever."""
        while True:
            await self._news.wait()
            patience = PATIENCE_S
            while patience > 0 and self._is_busy():
                await asyncio.sleep(0.05)
                patience -= 0.05
            some = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
            if not self._waiting:
                self._news.clear()
            self._bytes -= sum(len(raw.body) for raw, _, _ in some)
            self._on_its_way = len(some)
            await asyncio.gather(*(self._copy(*each) for each in some))
            self._on_its_way = 0

    async def _copy(self, raw: RawMessage, found: Undecodable, digest: str) -> None:
        while True:
            try:
                whole = raw if raw.body or not found.size else await self._fetched(raw)
                letter = letter_of(self._bus.pool, self._service, whole, found, digest)
                await self._bus.jetstream.publish(letter.subject, letter.body, headers=letter.headers)
            except APIError as err:
                if err.err_code not in _THERE_ALREADY and (err.code or 0) >= 500:
                    await asyncio.sleep(0.5)  # no leader: not for ever
                    continue
                if err.err_code not in _THERE_ALREADY:
                    self.failed += 1
                    log.warning("dead letter refused", stream=raw.stream, seq=raw.seq, error=str(err))
                return
            except (TimeoutError, nats.errors.Error, OSError) as err:
                log.info("dead letter delayed", stream=raw.stream, seq=raw.seq, error=type(err).__name__)
                await asyncio.sleep(0.5)
                continue
            except Exception as err:  # noqa: BLE001 - one odd message must not keep the others from their copies
                self.failed += 1
                log.warning("dead letter not written", stream=raw.stream, seq=raw.seq, error=str(err))
                return
            self.copied += 1
            return

    async def _fetched(self, raw: RawMessage) -> RawMessage:
        stored = await self._bus.jetstream.get_msg(self._bus.stream_name(raw.stream), raw.seq)
        return msgspec.structs.replace(raw, body=stored.data or b"", headers=stored.headers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Copies while inside."""
        task = asyncio.create_task(self.run(), name="dead-letters")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
