"""Wishes that come as requests: stored first, like any other, and answered inline once their fact has come round.

Who asks by request needs no stream and no subscription: the answer is the reply. Nothing is decided here. A reply says
one of three things: the answer, that the wish is stored and not answered yet (``pending``), or that it isn't stored
(``error``), in which case the same id may be sent again.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from apportion.contracts import events as ev
from apportion.contracts import salvage, subjects
from apportion.contracts.causes import Refusal
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Entry, Stream
from apportion.runtime.stream import Bus, BusUnreachable, PublishRefused, Stored

WAIT_MS: Final = 5_000
WAIT_MS_MAX: Final = 60_000
WAIT_HEADER: Final = "apportion-wait-ms"
"""How long the asker waits for the answer; shorter than its own request's timeout, so that it hears of `pending`."""
AT_ONCE_MAX: Final = 4_096
ANSWERS_KEPT: Final = 200_000
"""Wishes whose answers are found again: more than come within the bus's window for repeats."""
QUEUE: Final = "admission"
_MSG_ID: Final = "Nats-Msg-Id"

log = structlog.get_logger(__name__)


class Asks:
    """The requests that wait for an answer, and where the latest answers are."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: dict[int, list[asyncio.Future[Entry]]] = {}
        self._answers: OrderedDict[int, int] = OrderedDict()
        """Sequence of a wish to that of the fact which answered it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None
        self.replied = 0
        self.is_serving = False
        """True once the bus hands requests to us."""

    def saw(self, entry: Entry) -> None:
        """Note an answer, and hand it to those who wait for it."""
        seq: int = getattr(entry.event, "answers", 0)
        if not seq or entry.stream is not Stream.FACTS:
            return
        self._answers[seq] = entry.seq
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        for waiter in self._waiting.pop(seq, ()):
            if not waiter.done():
                waiter.set_result(entry)

    async def start(self) -> None:
        """Take requests from here on."""
        self._subscription = await self._bus.client.subscribe(
            subjects.all_asks(self._bus.pool), queue=QUEUE, cb=self._asked
        )
        await self._bus.client.flush()
        self.is_serving = True

    async def close(self) -> None:
        """Take no more; who waits hears nothing, and finds the answer under the same id."""
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _asked(self, message: Msg) -> None:
        if len(self._tasks) >= AT_ONCE_MAX:
            await self._reply(
                message, _error(Refusal.BUSY, f"{AT_ONCE_MAX} requests wait already", "Ask again in a moment.")
            )
            return
        task = asyncio.get_running_loop().create_task(self._serve(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, message: Msg) -> None:
        try:
            answer = await self._answer(message)
        except PublishRefused as err:
            answer = _error("NotStored", str(err), "Nothing was stored: mend it, or tell the pool's operator.")
        except (BusUnreachable, TimeoutError, nats.errors.Error, OSError) as err:
            answer = _error(
                "OutcomeUnknown", f"{type(err).__name__}: {err}", "Send it again under the same id: it is stored once."
            )
        except Exception as err:  # one bad question must not end the service
            log.exception("ask failed", subject=message.subject)
            answer = _error("Internal", f"{type(err).__name__}: {err}", "Send it again under the same id.")
        self.replied += 1
        await self._reply(message, answer)

    async def _reply(self, asked: Msg, answer: dict[str, Any]) -> None:
        if not asked.reply:
            return  # somebody who wants no answer; the wish is stored
        with contextlib.suppress(nats.errors.Error, OSError):
            # Not `respond`, which sends the asker's own headers back: a reply without any is easier on small clients.
            await self._bus.client.publish(asked.reply, msgspec.json.encode(answer))

    async def _answer(self, asked: Msg) -> dict[str, Any]:
        headers = asked.headers or {}
        given = next((value for name, value in headers.items() if name.lower() == WAIT_HEADER), str(WAIT_MS))
        if not (given.isascii() and given.isdigit() and len(given) < 9 and int(given) <= WAIT_MS_MAX):
            return _error(
                Refusal.FIELD_INVALID,
                f"{WAIT_HEADER}: expected a whole number of milliseconds up to {WAIT_MS_MAX}, found {given[:128]!r}",
                "Nothing was stored: mend the header, or leave it out.",
            )
        try:
            subject = subjects.wish_of_ask(asked.subject)
        except subjects.SubjectInvalid:
            return _error(
                Refusal.TYPE_UNKNOWN,
                f"expected apportion.v1.<pool>.ask.<tenant>.<type>, found {asked.subject[:256]!r}",
                "Nothing was stored: mend the subject.",
            )
        message = Message(subject=subject, headers=_passed_on(headers), body=asked.data)
        stored = await self._store(message)
        entry = await self._answer_to(stored.seq, int(given) / 1000)
        if (
            stored.is_repeat
            and entry is not None
            and isinstance(entry.event, ev.JobRejected)
            and entry.event.retry_after_s
        ):
            # The first was put off, and who was told to ask again does: the bus's window must not keep them out.
            message = msgspec.structs.replace(message, headers=_without_id(message.headers))
            stored = await self._bus.store(message)
            entry = await self._answer_to(stored.seq, int(given) / 1000)
        if entry is None:
            return {"pending": True, "wish_seq": stored.seq}
        fact: dict[str, Any] = msgspec.to_builtins(entry.event)
        return {
            "answer": type(entry.event).__name__,
            **fact,
            "wish_seq": stored.seq,
            "fact_seq": entry.seq,
        }

    async def _store(self, message: Message) -> Stored:
        stored = await self._bus.store(message)
        if stored.is_repeat:
            first = await self._bus.jetstream.get_msg(self._bus.stream_name(Stream.WISHES), stored.seq)
            if first.subject != message.subject:
                # The bus knows repeats by their id alone: somebody else chose the same one, and theirs is no answer.
                return await self._bus.store(msgspec.structs.replace(message, headers=_without_id(message.headers)))
        return stored

    async def _answer_to(self, seq: int, wait_s: float) -> Entry | None:
        """The fact that answers the wish; None where it doesn't come in time."""
        if (fact_seq := self._answers.get(seq)) is not None:
            return await self._fact(fact_seq)
        waiter: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(seq, []).append(waiter)
        try:
            return await asyncio.wait_for(waiter, wait_s)
        except TimeoutError:
            return None
        finally:
            waiters = self._waiting.get(seq)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiting[seq]

    async def _fact(self, seq: int) -> Entry:
        stored = await self._bus.jetstream.get_msg(self._bus.stream_name(Stream.FACTS), seq)
        return salvage.decode(
            Stream.FACTS, stored.subject or "", stored.headers, stored.data or b"", seq=seq, recorded_at=0
        )


def _without_id(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != _MSG_ID}


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    # Our own credential publishes: of what the bus would obey, only the id by which it knows a repeat goes through.
    return {
        name: value
        for name, value in headers.items()
        if name == _MSG_ID or name.lower().startswith("ce-") or name.lower() in {"content-type", "traceparent"}
    }


def _error(code: str, message: str, next_step: str) -> dict[str, Any]:
    return {"error": {"code": str(code), "message": message, "next": next_step}}
