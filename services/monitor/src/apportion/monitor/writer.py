"""From the bus into the log: both streams, in batches, and the two held against each other.

Wishes and facts come by two readers; here they become one order, that of the log. What the log has committed is never
asked of the bus again, and a bus that does not go on where the log stands stops the monitor rather than the log.
"""

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Final, Literal

import nats.errors
import structlog
from msgspec import Struct
from nats.js.errors import NotFoundError

from apportion.contracts.codec import TYPE_PREFIX
from apportion.contracts.envelope import Stream
from apportion.monitor.checkpoints import Checkpoints
from apportion.monitor.keeping import Keeper
from apportion.monitor.log import EventLog, check_bus
from apportion.runtime.stream import Bus, RawMessage, StreamReader

ROWS_MAX: Final = 1_000
SURE_S: Final = 2.0
FLUSH_S_MAX: Final = 4.0
"""What the last rows may take once the monitor was told to stop."""

log = structlog.get_logger(__name__)


class Lag(Struct, frozen=True, kw_only=True):
    """How far the log stands behind the bus."""

    log_seq: int
    bus_seq: int


class LogWriter:
    """The one that fills the log while the monitor lives."""

    def __init__(
        self,
        event_log: EventLog,
        bus: Bus,
        *,
        batch_s: float,
        checkpoints: Checkpoints | None = None,
        keeper: Keeper | None = None,
        on_committed: Callable[[int, float], None] | None = None,
        on_logged: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._log = event_log
        self._bus = bus
        self._batch_s = batch_s
        self._checkpoints = checkpoints
        self._keeper = keeper
        self._on_committed = on_committed
        self._on_logged = on_logged
        """Told of each event that carried a trace context: its type, its job, the context."""
        self._readers: dict[Stream, StreamReader] = {}
        self._checked_restarts = 0

    async def start(self) -> None:
        """Hold the log against the bus and begin to follow. Raises LogAhead or LogBehind."""
        await self._check()
        if self._keeper is not None:
            await self._keeper.start()
        for stream, position in self._log.positions.items():
            self._readers[stream] = await self._bus.reader(stream, after=position.last_seq)
        self._checked_restarts = self._restarts()

    async def run(self, stop: asyncio.Event) -> None:
        """Write what comes until ``stop``, and then what had come until then. Raises LogError where it can't go on."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                await self._news(stopping)
                if not stop.is_set() and self._waiting() < ROWS_MAX:
                    # A commit costs as much as a hundred rows: what comes in the next moments shares it.
                    await asyncio.wait({stopping}, timeout=self._batch_s)
                await self._write()
                if self._checkpoints is not None:
                    await self._checkpoints.write_if_due()
                if self._keeper is not None:
                    await self._keeper.work()
            await self._flush()
            if self._checkpoints is not None:
                await self._checkpoints.finish()
        finally:
            stopping.cancel()
            if self._keeper is not None:
                await self._keeper.finish()

    async def lag(self) -> dict[Stream, Lag]:
        """How far the log is behind, per stream. Raises what the bus raises."""
        return {
            stream: Lag(log_seq=position.last_seq, bus_seq=(await self._bus.position(stream)).last_seq)
            for stream, position in self._log.positions.items()
        }

    def _restarts(self) -> int:
        return sum(reader.restarts for reader in self._readers.values())

    def _waiting(self) -> int:
        return sum(reader.waiting for reader in self._readers.values())

    async def _news(self, stopping: "asyncio.Task[Literal[True]]") -> None:
        if self._waiting():
            return
        waits = {asyncio.create_task(reader.ready.wait()) for reader in self._readers.values()}
        try:
            due = [one.due_in_s() for one in (self._checkpoints, self._keeper) if one is not None]
            due_in_s = min((one for one in due if one is not None), default=None)
            await asyncio.wait({*waits, stopping}, timeout=due_in_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _write(self) -> int:
        if (restarts := self._restarts()) != self._checked_restarts:
            # Delivery began anew: the bus may have come back with less than it had.
            await self._check()
            self._checked_restarts = restarts
        # In the order in which the streams stored them, so that a wish stands before its answer.
        batches = [reader.take(ROWS_MAX) for reader in self._readers.values()]
        messages = list(heapq.merge(*batches, key=lambda message: message.recorded_at))
        if not messages:
            return 0
        began = time.perf_counter()
        rows = await asyncio.to_thread(self._log.append, messages)
        if self._keeper is not None:
            self._keeper.saw(messages)
        if self._on_committed is not None:
            self._on_committed(rows, time.perf_counter() - began)
        if self._on_logged is not None:
            for message in messages:
                headers = message.headers or {}
                if (trace := headers.get("traceparent")) is not None:
                    kind = headers.get("ce-type", "").removeprefix(TYPE_PREFIX)
                    self._on_logged(kind, headers.get("ce-correlationid", ""), trace)
        return rows

    async def _flush(self) -> None:
        """Write what the bus had when the end was announced, as far as it comes in time."""
        deadline = time.monotonic() + FLUSH_S_MAX
        try:
            async with asyncio.timeout(FLUSH_S_MAX):
                wanted = {stream: (await self._bus.position(stream)).last_seq for stream in self._readers}
                while any(self._log.positions[stream].last_seq < seq for stream, seq in wanted.items()):
                    if not await self._write():
                        await asyncio.sleep(0.01)
        except (TimeoutError, nats.errors.Error) as err:
            # Nothing is lost: the next life goes on from the log's own position.
            log.warning("log_not_flushed", error=f"{type(err).__name__}: {err}", over_s=time.monotonic() - deadline)
            await self._write()

    async def _check(self) -> None:
        """Hold the log against the bus; a server that has just begun to lead may not know its stream's end at once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SURE_S
        for stream, position in self._log.positions.items():
            while True:
                try:
                    bus = await self._bus.position(stream)
                    at_last = await self._message(stream, position.last_seq)
                except (TimeoutError, nats.errors.Error, OSError) as err:
                    log.warning("bus_not_ready", stream=stream.value, error=f"{type(err).__name__}: {err}")
                    await asyncio.sleep(0.2)
                    continue
                if bus.last_seq < position.last_seq and loop.time() < deadline:
                    await asyncio.sleep(0.2)
                    continue
                check_bus(position, first_seq=bus.first_seq, last_seq=bus.last_seq, at_last=at_last)
                break

    async def _message(self, stream: Stream, seq: int) -> RawMessage | None:
        if not seq:
            return None
        try:
            found = await self._bus.jetstream.get_msg(self._bus.stream_name(stream), seq)
        except NotFoundError:
            return None
        return RawMessage(
            stream=stream,
            seq=seq,
            recorded_at=0,
            subject=found.subject or "",
            headers=found.headers,
            body=found.data or b"",
        )
