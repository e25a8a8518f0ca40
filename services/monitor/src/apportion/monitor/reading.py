"""Facts for tenants, by request and reply: about their own jobs and wishes, and nobody else's.

Whoever may create a consumer chooses where it delivers, and the bus doesn't look whether that place is theirs. So a
tenant's key opens no stream: it asks here from where on it wants facts, and waits for the answer.
"""

import asyncio
import contextlib
from base64 import b64encode
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
import nats.errors
from msgspec import Meta, Struct
from nats.aio.msg import Msg
from nats.js import api
from nats.js.errors import APIError, Error

from apportion.contracts import subjects
from apportion.contracts.ids import TenantId
from apportion.runtime.stream import Bus

WAIT_MS_MAX: Final = 20_000
FACTS_MAX: Final = 256
FETCH_S: Final = 2.0
AT_ONCE_MAX: Final = 200
"""Requests that wait at once: each holds one consumer of the server's."""
_NS_PER_S: Final = 1_000_000_000


class FactsAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From where on, and of what."""

    filters: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)]
    """Patterns of subjects, each about the tenant alone."""
    after: Annotated[int, Meta(ge=0)] = 0
    """Facts behind this sequence."""
    since: Annotated[int, Meta(ge=0)] = 0
    """Facts recorded from this instant on, where ``after`` is 0: ns since the Unix epoch."""
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    """How long to wait for the first one, where there is none yet."""


class Reading:
    """Answers tenants' requests for facts until the connection closes."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._asking: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        await self._bus.client.subscribe(subjects.all_reads(self._bus.pool), cb=self._on_asked)

    def close(self) -> None:
        """End what waits: who asked asks again, maybe somebody else."""
        for task in self._asking:
            task.cancel()

    async def _on_asked(self, message: Msg) -> None:
        if len(self._asking) >= AT_ONCE_MAX:
            await self._answer(message, _error("Busy", f"{len(self._asking)} requests wait; ask again in a moment"))
            return
        task = asyncio.get_running_loop().create_task(self._respond(message))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _respond(self, message: Msg) -> None:
        try:
            asked = msgspec.json.decode(message.data or b"{}", type=FactsAsked)
            answer = await self.facts(subjects.tenant_of_read(message.subject), asked)
        except (msgspec.MsgspecError, UnicodeError, subjects.SubjectInvalid) as err:
            answer = _error("FieldInvalid", str(err))
        except (nats.errors.Error, TimeoutError, Error, APIError, OSError) as err:
            answer = _error("Busy", f"the bus does not answer ({type(err).__name__}); ask again in a moment")
        await self._answer(message, answer)

    async def _answer(self, message: Msg, answer: dict[str, Any]) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await message.respond(msgspec.json.encode(answer))

    async def facts(self, tenant: TenantId, asked: FactsAsked) -> dict[str, Any]:
        """``facts`` in order, each as it is stored, and ``is_last``: that there was no more of them."""
        for pattern in asked.filters:
            if not subjects.is_of_tenant(self._bus.pool, tenant, pattern):
                return _error("NotPermitted", f"expected a pattern about tenant {tenant} alone, found {pattern!r}")
        stream = subjects.facts_stream(self._bus.pool)
        start: dict[str, Any] = {
            "deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE,
            "opt_start_seq": asked.after + 1,
        }
        if asked.since and not asked.after:
            start = {
                "deliver_policy": api.DeliverPolicy.BY_START_TIME,
                "opt_start_time": datetime.fromtimestamp(asked.since / _NS_PER_S, UTC),
            }
        info = await self._bus.jetstream.add_consumer(
            stream,
            api.ConsumerConfig(
                ack_policy=api.AckPolicy.NONE,
                inactive_threshold=30.0,
                mem_storage=True,
                num_replicas=1,
                filter_subjects=list(asked.filters),
                **start,
            ),
        )
        try:
            messages = await self._fetched(info.name, stream, pending=info.num_pending or 0, wait_ms=asked.wait_ms)
        finally:
            # Not waited for: the server drops it by itself where this is lost.
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._bus.client.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{info.name}")
        return {
            "facts": [_told(message) for message in messages],
            "is_last": not messages or messages[-1].metadata.num_pending == 0,
        }

    async def _fetched(self, consumer: str, stream: str, *, pending: int, wait_ms: int) -> list[Msg]:
        if not pending and not wait_ms:
            return []
        subscription = await self._bus.jetstream.pull_subscribe_bind(consumer, stream)
        try:
            if pending:
                return list(await subscription.fetch(min(pending, FACTS_MAX), timeout=FETCH_S))
            return list(await subscription.fetch(1, timeout=wait_ms / 1000))
        except nats.errors.TimeoutError:
            return []
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()


def _told(message: Msg) -> dict[str, Any]:
    parts = message.reply.split(".")
    return {
        "seq": message.metadata.sequence.stream,
        # The newer form of the reply subject has the domain and the account's hash in front.
        "recorded_at": int(parts[7] if len(parts) == 9 else parts[9]),
        "subject": message.subject,
        "headers": message.headers or {},
        "body": b64encode(message.data).decode(),
    }


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}
