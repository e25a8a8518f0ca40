"""Bytes to event and back, old versions upgraded.

Facts are written in binary mode: the attributes are headers, the body is the event. Wishes are read in any of the
modes that ``cloudevents`` tells apart. Bytes that don't decode become an ``Undecodable`` that says what was expected,
what was found and where (``diagnosis``); decoding a wish never raises for what a stranger sent.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from apportion.contracts import diagnosis, evolution, subjects
from apportion.contracts.causes import Refusal
from apportion.contracts.cloudevents import Headers, escaped, opened
from apportion.contracts.diagnosis import DEPTH_MAX, Fault, shown
from apportion.contracts.envelope import Basis, Entry, Stream, Undecodable
from apportion.contracts.events import AGENT, FACTS, WISHES, Event, Fact, LeaseClaimed, Wish, type_name
from apportion.contracts.fields import TIMESTAMP
from apportion.contracts.ids import Author, PoolId, TenantId, is_name, node_of_author

__all__ = [
    "DEPTH_MAX",
    "EVENT_BYTES_MAX",
    "SUBJECT_PART_MAX",
    "TYPE_PREFIX",
    "Headers",
    "Message",
    "decode_body",
    "decode_fact",
    "decode_wish",
    "encode_body",
    "encode_fact",
    "encode_wish",
    "instant_from_timestamp",
]

TYPE_PREFIX: Final = "io.apportion."
EVENT_BYTES_MAX: Final = 64 * 1024
"""CloudEvents asks consumers to accept 64 KiB, and so do we; a larger wish is refused, and kept raw in the log."""
SUBJECT_PART_MAX: Final = 128
"""Characters of a subject's parts that are repeated in an answer: a name of ours is shorter."""


class _Reader(Struct, frozen=True):
    """How one version of one type is read."""

    kind: type[Event]
    decode: Callable[[bytes], Event]
    is_wish: bool


_READERS: Final[Mapping[str, _Reader]] = {
    type_name(kind): _Reader(kind, msgspec.json.Decoder(kind).decode, issubclass(kind, Wish))
    for kind in (*WISHES, *FACTS)
}
_LATEST: Final[Mapping[str, str]] = {name.partition(".")[0]: name for name in (type_name(kind) for kind in WISHES)}
_WISH_NAMES: Final = frozenset(type_name(kind) for kind in WISHES)
_FACT_NAMES: Final = frozenset(type_name(kind) for kind in FACTS)
_ENCODER: Final = msgspec.json.Encoder()


class Message(Struct, frozen=True, kw_only=True):
    """What is given to the bus: subject, headers, body."""

    subject: str
    headers: dict[str, str]
    body: bytes


def encode_fact(
    pool: PoolId,
    author: Author,
    event: Fact,
    *,
    event_id: str,
    correlation_id: str = "",
    basis: Basis | None = None,
    traceparent: str | None = None,
) -> Message:
    """The message that states ``event``; its id is also the broker's deduplication id."""
    headers = {
        "Nats-Msg-Id": event_id,
        "ce-specversion": "1.0",
        "ce-id": event_id,
        "ce-source": f"/apportion/{pool}/{author}",
        "ce-type": TYPE_PREFIX + type_name(type(event)),
    }
    if correlation_id:
        headers["ce-correlationid"] = escaped(correlation_id)
    if event.caused_by:
        headers["ce-causationid"] = escaped(event.caused_by)
    if basis is not None:
        headers["ce-basisfacts"] = str(basis.facts)
        headers["ce-basiswishes"] = str(basis.wishes)
        headers["ce-decidedat"] = str(basis.decided_at)
        headers["ce-policy"] = basis.policy
    if traceparent is not None:
        headers["traceparent"] = traceparent
    return Message(subject=subjects.fact(pool, author, event), headers=headers, body=_ENCODER.encode(event))


def encode_wish(
    pool: PoolId,
    event: Wish,
    *,
    tenant: str,
    event_id: str,
    source: str,
    traceparent: str | None = None,
) -> Message:
    """The message with which ``tenant`` asks for ``event``, in binary mode."""
    headers = {
        # The bus tells repeats by this alone, whatever their subject: without the tenant, the wish of one would swallow
        # another's with the same source and id.
        "Nats-Msg-Id": f"{escaped(tenant)} {escaped(source)} {escaped(event_id)}",
        "ce-specversion": "1.0",
        "ce-id": escaped(event_id),
        "ce-source": escaped(source),
        "ce-type": TYPE_PREFIX + type_name(type(event)),
    }
    if traceparent is not None:
        headers["traceparent"] = traceparent
    return Message(
        subject=subjects.wish(pool, TenantId(tenant), type(event)),
        headers=headers,
        body=_ENCODER.encode(event),
    )


def encode_body(event: Event) -> bytes:
    """The JSON body of an event."""
    return _ENCODER.encode(event)


def decode_fact(subject: str, headers: Headers | None, body: bytes, *, seq: int, recorded_at: int) -> Entry:
    """The fact in a message of the stream of facts.

    A type that this version doesn't know comes back as ``Undecodable``: kept, counted and shown, never dropped.
    """
    given = headers or {}
    name = given.get("ce-type", "").removeprefix(TYPE_PREFIX)
    event: Event | Undecodable
    if name not in _FACT_NAMES:
        event = Undecodable(
            code=Refusal.TYPE_UNKNOWN, type=name, field="ce-type", expected="a fact", found=name, size=len(body)
        )
    else:
        event = decode_body(name, body)
    author = subjects.author_of_fact(subject)
    if isinstance(event, Fact) and not may_state(author, event):
        # Identity comes from the subject, which the broker checked; nothing in a payload grants anything.
        event = Undecodable(
            code=Refusal.NOT_PERMITTED,
            type=name,
            field="subject",
            expected=f"stated by {getattr(type(event), 'AUTHOR', 'the author itself')}",
            found=f"stated by {author}",
            size=len(body),
        )
    basis = None
    if (decided := given.get("ce-decidedat")) is not None:
        basis = Basis(
            facts=int(given["ce-basisfacts"]),
            wishes=int(given["ce-basiswishes"]),
            decided_at=int(decided),
            policy=given.get("ce-policy", ""),
        )
    return Entry(
        stream=Stream.FACTS,
        seq=seq,
        recorded_at=recorded_at,
        event=event,
        event_id=given.get("ce-id", ""),
        author=author,
        basis=basis,
        traceparent=given.get("traceparent", ""),
    )


def may_state(author: Author, event: Fact) -> bool:
    """True where this author is the one publisher of such a fact: an agent only of its own node's."""
    if isinstance(event, LeaseClaimed):
        return event.author == author
    if (node := node_of_author(author)) is not None:
        return type(event).AUTHOR == AGENT and getattr(event, "node_id", None) == node
    return author == type(event).AUTHOR


def decode_wish(subject: str, headers: Headers | None, body: bytes, *, seq: int, recorded_at: int) -> Entry:
    """The wish in a message of the stream of wishes, or why it is none. Never raises."""
    addressed = _addressed(subject)
    fault = addressed.fault
    if len(body) > EVENT_BYTES_MAX:
        fault = fault or Fault(
            code=Refusal.TOO_LARGE, expected=f"at most {EVENT_BYTES_MAX} bytes", found=f"{len(body)} bytes"
        )
        envelope = opened(headers or {}, b"")
    else:
        envelope = opened(headers or {}, body)
        fault = fault or envelope.fault
    expires_at = 0
    if envelope.expirytime:
        expires_at = _expiry(envelope.expirytime)
        if expires_at < 0:
            expires_at = 0
            fault = fault or Fault(
                code=Refusal.ENVELOPE_INVALID,
                field="expirytime",
                expected="an instant in RFC 3339, such as 2026-09-01T12:00:00Z",
                found=shown(envelope.expirytime),
            )
    event: Event | Undecodable
    if fault is not None:
        event = _undecodable(addressed.type, body, fault)
    elif addressed.reader is not None and envelope.type == addressed.claim:
        event = _read(addressed.reader, envelope.data)
    else:
        event = _typed_with_care(addressed.type, envelope.type, envelope.data)
    return Entry(
        stream=Stream.WISHES,
        seq=seq,
        recorded_at=recorded_at,
        event=event,
        # Without an id of its own a wish is known by its place in the stream, and can't be told from a repeat.
        event_id=envelope.id or f"wish-{seq}",
        tenant=addressed.tenant,
        source=envelope.source,
        digest=hashlib.sha256(body).hexdigest(),
        expires_at=expires_at,
        actor=envelope.actor[:128],
        subject_type=addressed.type,
        traceparent=envelope.traceparent,
        ingress=envelope.ingress,
    )


class _Addressed(Struct, frozen=True):
    """What a subject says: whose wish, of which type, or why it is none of ours."""

    tenant: TenantId
    type: str
    claim: str = ""
    """The event's type, where it names the newest version in full."""
    reader: _Reader | None = None
    """That reads the newest version; None where there is no such type."""
    fault: Fault | None = None


@functools.lru_cache(maxsize=1024)
def _addressed(subject: str) -> _Addressed:
    """What the subject says, in parts that are fit to be repeated. Few publish a lot."""
    try:
        tenant, subject_type = subjects.tenant_and_type_of_wish(subject)
    except subjects.SubjectInvalid:
        fault = Fault(
            code=Refusal.TYPE_UNKNOWN,
            field="subject",
            expected="apportion.v1.<pool>.wish.<tenant>.<type>",
            found=shown(subject),
        )
        return _Addressed(TenantId(""), "", fault=fault)
    newest = _LATEST.get(subject_type, "")
    return _Addressed(TenantId(_storable(tenant)), _storable(subject_type), TYPE_PREFIX + newest, _READERS.get(newest))


def _storable(part: str) -> str:
    """A part of a subject, fit to be repeated: what isn't a name of ours comes back cut, and as valid UTF-8."""
    if part.isascii() and len(part) <= SUBJECT_PART_MAX:
        return part
    return part[:SUBJECT_PART_MAX].encode("utf-8", "replace").decode()


def _expiry(text: str) -> int:
    """The instant after which a wish is refused, at least 1; -1 where the text is no instant."""
    if not _TIMESTAMP.match(text):
        return -1
    try:
        return max(1, instant_from_timestamp(text))
    except (ValueError, OverflowError):
        return -1


_TIMESTAMP: Final = re.compile(TIMESTAMP)


def _undecodable(kind: str, body: bytes, fault: Fault) -> Undecodable:
    return Undecodable(
        code=fault.code,
        type=kind,
        field=fault.field,
        expected=fault.expected,
        found=fault.found,
        size=len(body),
        job_id=_readable_job_id(body),
    )


def _typed_with_care(subject_type: str, claimed: str, body: bytes) -> Event | Undecodable:
    expected = _LATEST.get(subject_type)
    if expected is None:
        fault = Fault(
            code=Refusal.TYPE_UNKNOWN,
            field="subject",
            expected="one of " + ", ".join(sorted(_LATEST)),
            found=shown(subject_type),
        )
        return _undecodable(subject_type, body, fault)
    name = claimed.removeprefix(TYPE_PREFIX) or expected
    is_other = name.partition(".")[0] != subject_type
    if is_other or (name not in _WISH_NAMES and name not in evolution.UPCASTS):
        fault = Fault(
            code=Refusal.TYPE_MISMATCH if is_other else Refusal.TYPE_UNKNOWN,
            field="type",
            expected=TYPE_PREFIX + expected,
            found=shown(claimed),
        )
        return _undecodable(subject_type, body, fault)
    return decode_body(name, body)


def decode_body(name: str, body: bytes, upcasts: evolution.Upcasts = evolution.UPCASTS) -> Event | Undecodable:
    """The event of type ``name`` (such as ``JobRequested.v1``) in ``body``, or why it is none.

    An older version is upgraded step by step, and comes back as the newest.
    """
    return _upgraded(name, body, upcasts) if name in upcasts else _read(_READERS[name], body)


def _read(reader: _Reader, body: bytes) -> Event | Undecodable:
    try:
        event = reader.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, MemoryError, OverflowError) as err:
        fault = diagnosis.fault_of(body, reader.kind, err)
    else:
        if not reader.is_wish:
            return event
        possible = diagnosis.fault_of_event(body, event)
        if possible is None:
            return event
        fault = possible
    return _undecodable(type_name(reader.kind).partition(".")[0], body, fault)


def _upgraded(name: str, body: bytes, upcasts: evolution.Upcasts) -> Event | Undecodable:
    kind = name.partition(".")[0]
    if isinstance(doubtful := diagnosis.parsed(body), Fault):
        return _undecodable(kind, body, doubtful)
    newest = _READERS[evolution.newest(name, upcasts)].kind
    try:
        doc = _PLAIN_DATA.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, MemoryError, OverflowError) as err:
        return _undecodable(kind, body, diagnosis.fault_of(body, newest, err))
    _, doc = evolution.upcast(name, doc, upcasts)
    try:
        event: Event = msgspec.convert(doc, newest)
    except msgspec.ValidationError as err:
        return _undecodable(kind, body, diagnosis.fault_of_value(doc, newest, str(err)))
    fault = diagnosis.fault_of_text(event)
    return event if fault is None else _undecodable(kind, body, fault)


_PLAIN_DATA: Final = msgspec.json.Decoder(dict[str, Any])


class _JobIdOnly(Struct):
    job_id: str | None = None


_JOB_ID_ONLY: Final = msgspec.json.Decoder(_JobIdOnly)


def _readable_job_id(body: bytes) -> str | None:
    """The job's name, where the body names one that may be repeated in an answer."""
    if b'"job_id"' not in body:
        return None
    try:
        name = _JOB_ID_ONLY.decode(body).job_id
    except (msgspec.MsgspecError, RecursionError, UnicodeError, MemoryError):
        return None
    return name if name is not None and is_name(name) else None


def instant_from_timestamp(text: str) -> int:
    """An RFC 3339 timestamp as ns since the Unix epoch; ValueError where it is no instant (31 February).

    >>> instant_from_timestamp("1970-01-01T00:00:01.5Z")
    1500000000
    """
    whole, _, rest = text.partition(".")
    fraction, zone = "", ""
    if rest:
        digits = re.match(r"[0-9]+", rest)
        if digits is None:
            raise ValueError(f"not an RFC 3339 timestamp: {text!r}")
        fraction, zone = digits[0], rest[digits.end() :]
    moment = datetime.fromisoformat(whole + zone)
    if moment.tzinfo is None:
        raise ValueError(f"an RFC 3339 timestamp names its zone: {text!r}")
    epoch = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    since = moment - epoch
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or "0")
