"""The command's side of the bus: publish a wish and hear its answer, ask the monitor, follow events."""

import asyncio
import contextlib
import getpass
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import nats.errors
from nats.js.errors import NotFoundError

from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.places import Place
from apportion.contracts import subjects
from apportion.contracts.codec import Message, decode_fact, decode_wish, encode_wish
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.events import Fact, PolicyUpserted, QueueUpserted, Wish
from apportion.contracts.ids import ADMISSION, OPERATOR, PoolId, QueueId, TenantId
from apportion.runtime.stream import Bus, RawMessage

CONNECT_S: Final = 3.0
ANSWER_S: Final = 15.0
SOURCE: Final = "/apportion/cli"

_Upserted = TypeVar("_Upserted", QueueUpserted, PolicyUpserted)


@contextlib.asynccontextmanager
async def bus_of(place: Place) -> AsyncIterator[Bus]:
    """A connection to the pool's bus. Raises BusUnreachable, BusRefused, KeyProblem."""
    bus = await Bus.connect(
        place.bus_url,
        pool=PoolId(place.pool),
        name="apportion-cli",
        wait_s=CONNECT_S,
        **{**place.settings.link(), "key": place.key_file},
    )
    try:
        yield bus
    except (CommandFailed, nats.errors.Error, TimeoutError) as err:
        if not bus.not_permitted:
            raise
        raise CommandFailed(
            f"expected a key that may ask this of {bus.url}, found one that it refuses ({bus.not_permitted})",
            code=Exit.NOT_PERMITTED,
            hint="Use the operator's key (<data-dir>/keys/operator.nk); docs/security.md says who may do what.",
        ) from err
    finally:
        await bus.close()


def fresh_id() -> str:
    """An id for one wish, given to nobody else."""
    return str(uuid.uuid4())


def actor() -> str:
    """Who sits at this terminal, as this machine knows them: information for the log, never a permission."""
    try:
        return f"user:{getpass.getuser()}"
    except (KeyError, OSError):
        return "user:unknown"


async def publish(bus: Bus, message: Message) -> int:
    """Store a wish; its sequence. Sends again under the same id where no acknowledgement came."""
    for _ in range(4):
        try:
            stored = await bus.jetstream.publish(message.subject, message.body, headers=message.headers)
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            await asyncio.sleep(0.3)
        except nats.errors.MaxPayloadError as err:
            raise CommandFailed(
                f"the request has {len(message.body)} bytes, more than the bus takes at all",
                code=Exit.USAGE,
                hint="A request has at most 64 KiB: put what is large into a file and name its place.",
            ) from err
        else:
            return int(stored.seq)
    raise CommandFailed(
        f"{message.subject} was not acknowledged by {bus.url}",
        code=Exit.BUS_UNREACHABLE,
        hint="Try again: the same request under the same --id is stored once. `apportion doctor` looks at the bus.",
    )


async def ask(
    bus: Bus, name: str, question: Mapping[str, Any], *, timeout_s: float = ANSWER_S, of: str = "monitor"
) -> dict[str, Any]:
    """The answer of the monitor, or of the service named, to a named question.

    Raises CommandFailed where there is none, or it is an error.
    """
    try:
        reply = await bus.client.request(
            subjects.query(bus.pool, name), json.dumps(question).encode(), timeout=timeout_s
        )
    except (nats.errors.NoRespondersError, nats.errors.TimeoutError) as err:
        raise CommandFailed(
            f"the {of} of pool {bus.pool} gives no answer to {name!r} at {bus.url} ({type(err).__name__})",
            code=Exit.BUS_UNREACHABLE,
            hint=f"It answers once it is ready: see `apportion doctor`, or <data-dir>/logs/{of}.log.",
        ) from err
    answer: dict[str, Any] = json.loads(reply.data)
    error = answer.get("error")
    if error:
        code = str(error.get("code", "")) if isinstance(error, dict) else ""
        message = str(error.get("message", error)) if isinstance(error, dict) else str(error)
        raise CommandFailed(message, code=Exit.NOT_FOUND if "NotFound" in code else Exit.FAILURE)
    return answer


def decoded(raw: RawMessage) -> Entry:
    """What a stored message says."""
    decode = decode_wish if raw.stream is Stream.WISHES else decode_fact
    return decode(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at)


async def newest_queue(bus: Bus, name: str) -> QueueUpserted | None:
    """The queue as it was said last; None where there is none of that name."""
    return await _newest(bus, QueueUpserted(queue=QueueId(name), tenants=(), answers=0, actor=""))


async def newest_policy(bus: Bus, tenant: str | None) -> PolicyUpserted | None:
    """The tenant's policy, or the pool's, as it was said last; None where none was."""
    return await _newest(
        bus, PolicyUpserted(for_tenant=None if tenant is None else TenantId(tenant), answers=0, actor="")
    )


async def _newest(bus: Bus, like: _Upserted) -> _Upserted | None:
    subject = subjects.fact(bus.pool, ADMISSION, like)
    try:
        last = await bus.jetstream.get_last_msg(bus.stream_name(Stream.FACTS), subject)
    except NotFoundError:
        return None
    headers = dict(last.headers or {})
    event = decode_fact(subject, headers, last.data or b"", seq=last.seq or 0, recorded_at=0).event
    return event if isinstance(event, type(like)) else None


async def answers_of(bus: Bus, wishes: Sequence[Wish], *, timeout_s: float = ANSWER_S) -> list[Fact]:
    """Publish wishes in the operator's name; the facts that answer them, in the same order.

    Raises CommandFailed where one is not stored or not answered in time.
    """
    position = (await bus.position(Stream.FACTS)).last_seq
    waiting = [await publish(bus, operators(bus.pool, wish)) for wish in wishes]
    found: dict[int, Fact] = {}
    until = time.monotonic() + timeout_s
    if waiting:
        async for _, entry in entries(bus, Stream.FACTS, after=position, until=until):
            if isinstance(entry.event, Fact) and (seq := getattr(entry.event, "answers", 0)) in waiting:
                found[seq] = entry.event
                if len(found) == len(waiting):
                    break
    if missing := [seq for seq in waiting if seq not in found]:
        raise CommandFailed(
            f"the wish is stored (number {missing[0]}), and nobody answered within {timeout_s:g} s",
            code=Exit.NOT_PLACED,
            hint="It will be answered once the service runs: `apportion doctor`.",
        )
    return [found[seq] for seq in waiting]


def operators(pool: PoolId, wish: Wish) -> Message:
    """The message with which who sits here asks, in the operator's name."""
    like = encode_wish(pool, wish, tenant=OPERATOR, event_id=fresh_id(), source=SOURCE)
    return Message(subject=like.subject, headers={**like.headers, "ce-actor": actor()}, body=like.body)


async def entries(
    bus: Bus, stream: Stream, *, after: int, filters: tuple[str, ...] = (), until: float | None = None
) -> AsyncIterator[tuple[RawMessage, Entry]]:
    """What a stream holds from there on and what comes; ends at ``until`` (by time.monotonic)."""
    reader = await bus.reader(stream, after=after, filters=filters)
    try:
        while True:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            try:
                await asyncio.wait_for(reader.ready.wait(), left)
            except TimeoutError:
                return
            for raw in reader.take():
                yield raw, decoded(raw)
    finally:
        await reader.close()
