"""What becomes of the log's older rows, as operators ordered it in facts: the writer's housekeeping, between appends.

Orders are read from the log itself, so that whatever dies in the middle is done by the next life.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import structlog

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.events import type_name
from apportion.monitor import segments
from apportion.monitor.log import EventLog, LogUnavailable
from apportion.monitor.manifest import Manifest, Segment
from apportion.monitor.projections import Recorded
from apportion.monitor.signing import Signer

AGAIN_S: Final = 3_600.0
"""Days end; so often it is looked whether one can be sealed that could not."""
SOON_S: Final = 5.0
SOON_TIMES: Final = 6
"""After an order: the rows that it is about may have to be signed first."""
_ORDERS: Final = frozenset({type_name(ev.LogSealOrdered)})

log = structlog.get_logger(__name__)


class Keeper:
    """Seals what is ordered to be sealed. Use it from one event loop, between two appends."""

    def __init__(self, event_log: EventLog, signer: Signer) -> None:
        self._log = event_log
        self._signer = signer
        self._before_at = 0
        self._due_at = float("inf")
        """By time.monotonic."""
        self._soon = 0
        self._preparing: asyncio.Task[Manifest | None] | None = None

    async def start(self) -> None:
        """Read what was ordered in earlier lives."""
        question = "SELECT type, payload FROM events WHERE list_contains(?, type) ORDER BY ordinal"
        found = await asyncio.to_thread(self._log.ask, question, [sorted(_ORDERS)])
        for type_, payload in found.rows:
            self._heard(type_, payload)

    def saw(self, messages: Sequence[Recorded]) -> None:
        """Look for orders in what was just appended."""
        for message in messages:
            if message.stream is Stream.FACTS and message.headers is not None:
                type_ = message.headers.get("ce-type", "").removeprefix(codec.TYPE_PREFIX)
                if type_ in _ORDERS:
                    self._heard(type_, message.body)

    def due_in_s(self) -> float | None:
        """How long until there is something to do; None where there isn't."""
        if self._preparing is not None:
            return 0.5
        return None if self._due_at == float("inf") else max(0.0, self._due_at - time.monotonic())

    async def work(self) -> tuple[Segment, ...]:
        """Do what is due, as far as it can be done now; what was sealed by it. Raises LogWriteFailed."""
        if self._preparing is None:
            if time.monotonic() < self._due_at:
                return ()
            self._preparing = asyncio.create_task(
                asyncio.to_thread(segments.prepare, self._log, self._before_at, self._signer.sign_manifest),
                name="seal",
            )
        # Rows are copied beside the appends, which go on meanwhile.
        await asyncio.wait({self._preparing}, timeout=0)
        if not self._preparing.done():
            return ()
        preparing, self._preparing = self._preparing, None
        self._soon = max(0, self._soon - 1)
        self._due_at = time.monotonic() + (SOON_S if self._soon else AGAIN_S)
        try:
            whole = preparing.result()
        except (LogUnavailable, OSError) as err:
            log.warning("not_sealed", error=str(err))  # the rows are where they were
            return ()
        if whole is None:
            return ()
        before = self._log.sealed_ordinal
        await asyncio.to_thread(self._log.let_go, whole.rows)
        new = tuple(one for one in whole.segments if one.first_ordinal > before)
        log.info("sealed", days=[one.day for one in new], up_to=whole.rows)
        return new

    async def finish(self) -> None:
        """Let what goes on in the background end; what it wrote is written over by the next life."""
        if self._preparing is not None:
            await asyncio.wait({self._preparing})
            self._preparing = None

    def _heard(self, type_: str, body: bytes) -> None:
        event = codec.decode_body(type_, body)
        assert isinstance(event, ev.LogSealOrdered), type_
        if event.before_at > self._before_at:
            self._before_at = event.before_at
            self._soon, self._due_at = SOON_TIMES, time.monotonic()
