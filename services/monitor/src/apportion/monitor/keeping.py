"""What becomes of the log's older rows, as operators ordered it in facts: the writer's housekeeping, between appends.

Orders are read from the log itself, so that whatever dies in the middle is done by the next life.
"""

import asyncio
import shutil
import time
from collections.abc import Sequence
from typing import Final

import structlog

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.causes import RowOf
from apportion.contracts.envelope import Stream
from apportion.contracts.events import type_name
from apportion.monitor import holds, segments
from apportion.monitor.holds import Holds
from apportion.monitor.log import EventLog, LogUnavailable, forgettable
from apportion.monitor.manifest import Manifest, Segment
from apportion.monitor.projections import Recorded
from apportion.monitor.signing import Signer

AGAIN_S: Final = 3_600.0
"""Days end; so often it is looked whether one can be sealed that could not."""
SOON_S: Final = 5.0
SOON_TIMES: Final = 6
"""After an order: the rows that it is about may have to be signed first."""
ROWS_MAX: Final = 100_000
"""So many rows are forgotten between two appends."""
_ORDERS: Final = frozenset(
    type_name(kind)
    for kind in (
        ev.LogSealOrdered,
        ev.LegalHoldPlaced,
        ev.LegalHoldReleased,
        ev.PayloadEraseOrdered,
        ev.PayloadsEraseOrdered,
    )
)

log = structlog.get_logger(__name__)


class Keeper:
    """Seals and erases what is ordered. Use it from one event loop, between two appends."""

    def __init__(self, event_log: EventLog, signer: Signer) -> None:
        self._log = event_log
        self._signer = signer
        self._holds = Holds()
        self._erasures: list[ev.PayloadEraseOrdered] = []
        """Orders that may not have been carried out."""
        self._erase_at = float("inf")
        self._forget_before_at = 0
        """What jobs said that had ended by then is to be forgotten."""
        self._forgotten = 0
        """Rows up to this one were gone through for it."""
        self._forget_at = float("inf")
        self._before_at = 0
        self._seal_at = float("inf")
        """All three by time.monotonic."""
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
        due_at = min(self._seal_at, self._erase_at, self._forget_at)
        return None if due_at == float("inf") else max(0.0, due_at - time.monotonic())

    async def work(self) -> tuple[Segment, ...]:
        """Do what is due, as far as it can be done now; what was sealed by it. Raises LogWriteFailed."""
        made = await self._sealed()
        # Not while segments are being written: they would bring a payload back.
        if self._preparing is None and time.monotonic() >= self._erase_at:
            self._erase_at = float("inf")
            await asyncio.to_thread(self._erase)
        if self._preparing is None and time.monotonic() >= self._forget_at:
            self._forget_at = float("inf")
            await asyncio.to_thread(self._forget)
        return made

    async def finish(self) -> None:
        """Let what goes on in the background end; what it wrote is written over by the next life."""
        if self._preparing is not None:
            await asyncio.wait({self._preparing})
            self._preparing = None

    async def _sealed(self) -> tuple[Segment, ...]:
        if self._preparing is None:
            if time.monotonic() < self._seal_at:
                return ()
            self._preparing = asyncio.create_task(
                asyncio.to_thread(segments.prepare, self._log, self._before_at, self._signer.sign),
                name="seal",
            )
        # Rows are copied beside the appends, which go on meanwhile.
        await asyncio.wait({self._preparing}, timeout=0)
        if not self._preparing.done():
            return ()
        preparing, self._preparing = self._preparing, None
        self._soon = max(0, self._soon - 1)
        self._seal_at = time.monotonic() + (SOON_S if self._soon else AGAIN_S)
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

    def _erase(self) -> None:
        """Carry out every order that nothing keeps from it. Raises LogWriteFailed."""
        waiting = []
        for order in self._erasures:
            found = self._log.ask(
                "SELECT ordinal, job_id, tenant, recorded_at, type, payload IS NULL FROM events "
                "WHERE stream = ? AND stream_seq = ?",
                [order.stream, order.stream_seq],
            ).rows
            if not found:
                log.warning("not_erased", seq=order.stream_seq, stream=order.stream, error="there is no such row")
                continue
            ordinal, job_id, tenant, recorded_at, type_, is_erased = found[0]
            if is_erased:
                continue
            if job_id is None and order.stream is RowOf.WISHES:
                job_id = self._admitted_as(order.stream_seq)
            if (job_id, recorded_at) != (order.job_id, order.recorded_at) or type_ in _ORDERS:
                # What the order says of the row is what was held against the holds.
                log.warning("not_erased", ordinal=ordinal, error="the row is another than the order says")
                continue
            held_by = holds.keeping(self._holds, tenant=tenant, job_id=job_id, recorded_at=recorded_at)
            if held_by or ordinal in {position.last_ordinal for position in self._log.positions.values()}:
                waiting.append(order)
                continue
            try:
                self._erased([ordinal])
            except (LogUnavailable, OSError) as err:
                log.warning("not_erased", ordinal=ordinal, error=str(err))
                waiting.append(order)
                continue
            log.info("erased", ordinal=ordinal, stream=order.stream, seq=order.stream_seq)
        self._erasures = waiting
        if waiting:
            self._erase_at = time.monotonic() + SOON_S

    def _admitted_as(self, wish_seq: int) -> str | None:
        """The job that a wish asked for without a name; None where none was admitted by it."""
        found = self._log.ask(
            "SELECT job_id FROM events WHERE stream = 'facts' AND answers = ? "
            "AND split_part(type, '.', 1) = 'JobAdmitted'",
            [wish_seq],
        ).rows
        return found[0][0] if found else None

    def _forget(self) -> None:
        """Forget the next of what is older than the retention in force keeps it. Raises LogWriteFailed."""
        newest = {position.last_ordinal for position in self._log.positions.values()}
        question = forgettable(
            self._forget_before_at,
            f"payload IS NOT NULL AND ordinal > {self._forgotten}",
            "ordinal, tenant, job_id, recorded_at",
        )
        found = self._log.ask(f"{question} LIMIT {ROWS_MAX}").rows
        ordinals = [
            ordinal
            for ordinal, tenant, job_id, at in found
            if ordinal not in newest and not holds.keeping(self._holds, tenant=tenant, job_id=job_id, recorded_at=at)
        ]
        try:
            if ordinals:
                self._erased(ordinals)
        except (LogUnavailable, OSError) as err:
            log.warning("not_erased", rows=len(ordinals), error=str(err))
            self._forget_at = time.monotonic() + AGAIN_S
            return
        if ordinals:
            log.info("forgotten", rows=len(ordinals), before_at=self._forget_before_at)
        if len(found) == ROWS_MAX:
            self._forgotten, self._forget_at = found[-1][0], time.monotonic()

    def _erased(self, ordinals: list[int]) -> None:
        segments.erase(self._log, ordinals, self._signer.sign)
        # Folds repeat what jobs said; they are a cache.
        shutil.rmtree(self._log.path.with_suffix(".folds"), ignore_errors=True)

    def _heard(self, type_: str, body: bytes) -> None:
        match codec.decode_body(type_, body):
            case ev.LogSealOrdered() as order:
                if order.before_at > self._before_at:
                    self._before_at = order.before_at
                    self._soon, self._seal_at = SOON_TIMES, time.monotonic()
            case ev.PayloadEraseOrdered() as order:
                self._erasures.append(order)
                self._erase_at = time.monotonic()
            case ev.PayloadsEraseOrdered() as order:
                self._forget_before_at = max(self._forget_before_at, order.before_at)
                self._forgotten, self._forget_at = 0, time.monotonic()
            case event:
                holds.evolve(self._holds, event)
                if isinstance(event, ev.LegalHoldReleased) and self._forget_before_at:
                    self._forgotten, self._forget_at = 0, time.monotonic()
