"""Follows a pool's facts from a place on, without losing or repeating one.

The server is asked for a few messages at a time, so that a slow reader costs nobody anything. A gap, a silence or a
reconnect starts delivery again behind the last fact that was handed out.
"""

import asyncio
import contextlib
import json
import time
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Any, Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError

from apportion.client.errors import NotLetIn, PoolNotFound
from apportion.contracts import salvage
from apportion.contracts.envelope import Entry, Stream

AT_ONCE: Final = 256
ASKED_S: Final = 20.0
HEARTBEAT_S: Final = 1.0
SILENCE_S_MAX: Final = 3.0
_NS_PER_S: Final = 1_000_000_000


class Followed:
    """What ``follow`` hands out: a fact, and whether it is the newest that there was."""

    __slots__ = ("entry", "is_last")

    def __init__(self, entry: Entry | None, *, is_last: bool) -> None:
        self.entry = entry
        self.is_last = is_last


class _Again(Exception):
    """Delivery has to start again from where it was."""


async def follow(
    client: Client,
    jetstream: JetStreamContext,
    *,
    stream: str,
    filters: tuple[str, ...],
    after: int = 0,
    since: int = 0,
    until: float | None = None,
) -> AsyncGenerator[Followed, None]:
    """Facts behind sequence ``after`` (or recorded from ``since`` on, ns since the Unix epoch), and what comes.

    Where nothing was there, one item without an entry says so. Ends at ``until``, by ``time.monotonic``.
    """
    last, told = after, False
    while True:
        if until is not None and until <= time.monotonic():
            return
        try:
            delivery = _Delivery(client, jetstream, stream=stream, filters=filters)
            try:
                pending = await delivery.begin(last, since if not last else 0)
                if not pending and not told:
                    told = True
                    yield Followed(None, is_last=True)
                async for message, is_last in delivery.messages(until):
                    seq = message.metadata.sequence.stream
                    told, last = True, seq
                    yield Followed(_entry_of(message, seq), is_last=is_last)
                return
            finally:
                await delivery.end()
        except _Again:
            continue
        except NotFoundError as err:
            raise PoolNotFound(
                expected=f"a stream {stream}",
                found="none of that name",
                next_step="Check the pool's name; its services make the stream when they start.",
            ) from err
        except (TimeoutError, nats.errors.Error, OSError):
            # The bus is away: the library reconnects, we ask again.
            if client.is_closed:
                raise
            await asyncio.sleep(0.2)


async def follow_by_asking(
    client: Client,
    *,
    subject: str,
    filters: tuple[str, ...],
    after: int = 0,
    since: int = 0,
    until: float | None = None,
) -> AsyncGenerator[Followed, None]:
    """What ``follow`` hands out, for those whose key opens no stream: the monitor is asked for facts at ``subject``."""
    last, told = after, False
    while until is None or until > time.monotonic():
        wait_s = min(ASKED_S, ASKED_S if until is None else until - time.monotonic()) if told else 0.0
        question = {"filters": filters, "after": last, "since": 0 if last else since, "wait_ms": int(wait_s * 1000)}
        try:
            reply = await client.request(subject, json.dumps(question).encode(), timeout=wait_s + SILENCE_S_MAX)
        except (TimeoutError, nats.errors.Error, OSError):
            # The monitor or the bus is away, or its answer was lost: nothing is, as we ask from where we are.
            if client.is_closed:
                raise
            await asyncio.sleep(0.2)
            continue
        answer: dict[str, Any] = json.loads(reply.data)
        if (error := answer.get("error")) is not None:
            if error["code"] == "Busy":
                await asyncio.sleep(0.2)
                continue
            raise NotLetIn(
                expected=f"facts at {subject}",
                found=f"{error['code']}: {error['message']}",
                next_step="Ask for your own tenant's facts alone.",
            )
        facts = answer["facts"]
        if not facts and not told:
            yield Followed(None, is_last=True)
        told = True
        for place, fact in enumerate(facts, start=1):
            last = fact["seq"]
            entry = _entry(
                fact["subject"], fact["headers"], b64decode(fact["body"]), seq=last, recorded_at=fact["recorded_at"]
            )
            yield Followed(entry, is_last=place == len(facts) and answer["is_last"])


def _entry_of(message: Msg, seq: int) -> Entry:
    parts = message.reply.split(".")
    recorded_at = int(parts[7] if len(parts) == 9 else parts[9])  # the newer form has domain and account before it
    return _entry(message.subject, message.headers, message.data, seq=seq, recorded_at=recorded_at)


def _entry(subject: str, headers: dict[str, str] | None, body: bytes, *, seq: int, recorded_at: int) -> Entry:
    try:
        return salvage.decode(Stream.FACTS, subject, headers, body, seq=seq, recorded_at=recorded_at)
    except Exception as err:  # noqa: BLE001 - one fact that can't be read hides none behind it
        return salvage.undecoded(Stream.FACTS, subject, body, seq=seq, recorded_at=recorded_at, error=err)


class _Delivery:
    """One consumer, and the inbox that it delivers to."""

    def __init__(self, client: Client, jetstream: JetStreamContext, *, stream: str, filters: tuple[str, ...]) -> None:
        self._client = client
        self._jetstream = jetstream
        self._stream = stream
        self._filters = filters
        self._consumer = ""
        self._delivered = 0

    async def begin(self, after: int, since: int) -> int:
        """Arrange delivery; how many messages are there to come."""
        start: dict[str, Any] = {"deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": after + 1}
        if since:
            start = {
                "deliver_policy": api.DeliverPolicy.BY_START_TIME,
                "opt_start_time": datetime.fromtimestamp(since / _NS_PER_S, UTC),
            }
        config = api.ConsumerConfig(
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=60.0,
            mem_storage=True,
            num_replicas=1,
            filter_subjects=list(self._filters),
            **start,
        )
        info = await self._jetstream.add_consumer(self._stream, config)
        self._consumer = info.name
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe(self._inbox)
        return int(info.num_pending or 0)

    async def end(self) -> None:
        """Leave nothing behind."""
        if not self._consumer:
            return
        with contextlib.suppress(nats.errors.Error, OSError, AttributeError):
            await self._subscription.unsubscribe()
        if self._client.is_connected:
            # Not waited for: the server drops it by itself where this is lost.
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._client.publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}")

    async def messages(self, until: float | None) -> AsyncIterator[tuple[Msg, bool]]:
        """What is delivered, and of each whether it is the newest; ends at ``until``. Raises _Again."""
        next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        request = {
            "batch": AT_ONCE,
            "expires": int(ASKED_S * _NS_PER_S),
            "idle_heartbeat": int(HEARTBEAT_S * _NS_PER_S),
        }
        reconnects = self._client.stats["reconnects"]
        owed = 0
        while True:
            if self._client.stats["reconnects"] != reconnects:
                raise _Again  # what was under way is lost
            if owed <= 0:
                await self._client.publish(next_subject, json.dumps(request).encode(), reply=self._inbox)
                owed = AT_ONCE
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            try:
                message = await self._subscription.next_msg(SILENCE_S_MAX if left is None else min(left, SILENCE_S_MAX))
            except nats.errors.TimeoutError:
                if left is not None and left < SILENCE_S_MAX:
                    return
                raise _Again from None
            status = (message.headers or {}).get("Status") if not message.reply.startswith("$JS.ACK") else None
            if status == "100":
                continue
            if status is not None:
                if status not in {"404", "408"} and "Batch Completed" not in str(message.headers):
                    raise _Again
                owed = 0
                continue
            owed -= 1
            counts = message.metadata
            self._delivered += 1
            if counts.sequence.consumer != self._delivered:
                raise _Again
            yield message, counts.num_pending == 0
