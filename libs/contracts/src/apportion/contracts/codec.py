"""Bytes to event and back: CloudEvents 1.0 on NATS, in binary, structured and bare form.

Facts are written in binary mode: the attributes are headers, the body is the event. Wishes are read in any of the three
modes. Bytes that don't decode become an ``Undecodable`` that says what was expected, what was found and where; decoding
never raises for what a stranger sent.
"""

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import msgspec

from apportion.contracts import subjects
from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Basis, Entry, Stream, Undecodable
from apportion.contracts.events import FACTS, WISHES, Event, Fact, Wish, type_name
from apportion.contracts.ids import Author, PoolId, TenantId

TYPE_PREFIX: Final = "io.apportion."
EVENT_BYTES_MAX: Final = 64 * 1024
"""CloudEvents asks consumers to accept 64 KiB, and so do we; a larger wish is refused, and kept raw in the log."""
DEPTH_MAX: Final = 32

Headers: TypeAlias = Mapping[str, str]

_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    type_name(kind): msgspec.json.Decoder(kind) for kind in (*WISHES, *FACTS)
}
_LATEST: Final[dict[str, str]] = {name.partition(".")[0]: name for name in (type_name(kind) for kind in WISHES)}
_WISH_NAMES: Final = frozenset(type_name(kind) for kind in WISHES)
_FACT_NAMES: Final = frozenset(type_name(kind) for kind in FACTS)
_ENCODER: Final = msgspec.json.Encoder()


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What is given to the bus: subject, headers, body."""

    subject: str
    headers: dict[str, str]
    body: bytes


class _Structured(msgspec.Struct, kw_only=True):
    """A CloudEvent as one JSON object; its extension attributes are read from ``_Extensions``."""

    specversion: str
    id: str
    source: str
    type: str
    data: msgspec.Raw = msgspec.Raw()
    data_base64: str | None = None
    expirytime: str | None = None
    traceparent: str | None = None
    actor: str | None = None
    datacontenttype: str | None = None


_STRUCTURED: Final = msgspec.json.Decoder(_Structured)


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
        headers["ce-correlationid"] = correlation_id
    if event.caused_by:
        headers["ce-causationid"] = event.caused_by
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
        "Nats-Msg-Id": f"{source} {event_id}",
        "ce-specversion": "1.0",
        "ce-id": event_id,
        "ce-source": source,
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
        author=subjects.author_of_fact(subject),
        basis=basis,
        traceparent=given.get("traceparent", ""),
    )


def decode_wish(subject: str, headers: Headers | None, body: bytes, *, seq: int, recorded_at: int) -> Entry:
    """The wish in a message of the stream of wishes, or why it is none. Never raises."""
    tenant, subject_type = subjects.tenant_and_type_of_wish(subject)
    envelope, event = _read_wish(subject_type, headers or {}, body)
    return Entry(
        stream=Stream.WISHES,
        seq=seq,
        recorded_at=recorded_at,
        event=event,
        # Without an id of its own a wish is known by its place in the stream, and can't be told from a repeat.
        event_id=envelope.get("id") or f"wish-{seq}",
        tenant=tenant,
        source=envelope.get("source") or "",
        digest=hashlib.sha256(body).hexdigest(),
        expires_at=_instant_or_zero(envelope.get("expirytime")),
        actor=(envelope.get("actor") or "")[:128],
        subject_type=subject_type,
        traceparent=envelope.get("traceparent") or "",
    )


def _read_wish(subject_type: str, headers: Headers, body: bytes) -> tuple[dict[str, str], Event | Undecodable]:
    if len(body) > EVENT_BYTES_MAX:
        return _attributes(headers)[0], Undecodable(
            code=Refusal.TOO_LARGE,
            type=subject_type,
            expected=f"at most {EVENT_BYTES_MAX} bytes",
            found=f"{len(body)} bytes",
            size=len(body),
        )
    attributes, repeated = _attributes(headers)
    if repeated:
        return attributes, _bad_envelope(subject_type, repeated, "one spelling of each header", "two", body)
    if (
        attributes.get("content-type", "").lower().startswith("application/cloudevents")
        or "specversion" not in attributes
    ):
        structured = _structured(body)
        if structured is not None:
            return _from_structured(subject_type, structured, body)
        if attributes.get("content-type", "").lower().startswith("application/cloudevents"):
            return attributes, describe(subject_type, body, _STRUCTURED)
    elif attributes["specversion"] != "1.0":
        return attributes, _bad_envelope(subject_type, "ce-specversion", "1.0", attributes["specversion"], body)
    return attributes, _typed(subject_type, attributes.get("type", ""), body)


def _attributes(headers: Headers) -> tuple[dict[str, str], str]:
    """CloudEvents attributes from headers in any case, and the name of one that is given twice."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        if lower.startswith("ce-") or lower in {"content-type", "traceparent"}:
            key = lower.removeprefix("ce-")
            if key in found and lower.startswith("ce-"):
                return found, lower
            found[key] = _unescaped(value)
    return found, ""


def _unescaped(value: str) -> str:
    """A header value as the HTTP and NATS bindings write it: unquoted, then one round of percent-decoding."""
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    if "%" not in value:
        return value
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        return value


def _structured(body: bytes) -> _Structured | None:
    try:
        found = _STRUCTURED.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return found


def _from_structured(subject_type: str, found: _Structured, body: bytes) -> tuple[dict[str, str], Event | Undecodable]:
    envelope = {
        "id": found.id,
        "source": found.source,
        "expirytime": found.expirytime or "",
        "actor": found.actor or "",
        "traceparent": found.traceparent or "",
    }
    if found.specversion != "1.0":
        return envelope, _bad_envelope(subject_type, "specversion", "1.0", found.specversion, body)
    if not bytes(found.data):
        return envelope, _bad_envelope(subject_type, "data", "the request as a JSON object", "nothing", body)
    return envelope, _typed(subject_type, found.type, bytes(found.data))


def _bad_envelope(subject_type: str, field: str, expected: str, found: str, body: bytes) -> Undecodable:
    return Undecodable(
        code=Refusal.ENVELOPE_INVALID,
        type=subject_type,
        field=field,
        expected=expected,
        found=found[:128],
        size=len(body),
    )


def _typed(subject_type: str, claimed: str, body: bytes) -> Event | Undecodable:
    expected = _LATEST.get(subject_type)
    if expected is None:
        return Undecodable(
            code=Refusal.TYPE_UNKNOWN,
            type=subject_type[:128],
            field="subject",
            expected=", ".join(sorted(_LATEST)),
            found=subject_type[:128],
            size=len(body),
        )
    name = claimed.removeprefix(TYPE_PREFIX) or expected
    if name.partition(".")[0] != subject_type:
        return Undecodable(
            code=Refusal.TYPE_MISMATCH,
            type=subject_type,
            field="type",
            expected=TYPE_PREFIX + expected,
            found=claimed[:128],
            size=len(body),
        )
    if name not in _WISH_NAMES:
        return Undecodable(
            code=Refusal.TYPE_UNKNOWN,
            type=subject_type,
            field="type",
            expected=TYPE_PREFIX + expected,
            found=claimed[:128],
            size=len(body),
        )
    return decode_body(name, body)


def decode_body(name: str, body: bytes) -> Event | Undecodable:
    """The event of type ``name`` (such as ``JobRequested.v1``) in ``body``, or why it is none."""
    decoder = _DECODERS[name]
    try:
        event: Event = decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, MemoryError, OverflowError):
        return describe(name.partition(".")[0], body, decoder)
    return event


_AT: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"missing required field `(?P<name>[^`]*)`")
_GOT: Final = re.compile(r"^Expected (?P<expected>.*?), got (?P<found>.*)$")


def describe(kind: str, body: bytes, decoder: msgspec.json.Decoder[Any]) -> Undecodable:
    """Why ``decoder`` refuses ``body``, in the terms of a rejection: code, field path, expected, found."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as err:
        return Undecodable(
            code=Refusal.NOT_UTF8,
            type=kind,
            expected="UTF-8",
            found=f"byte 0x{body[err.start]:02x} at offset {err.start}",
            size=len(body),
        )
    try:
        decoder.decode(body)
    except msgspec.ValidationError as err:
        job = _readable_job_id(body)
        return _described(kind, str(err), len(body), job)
    except RecursionError:
        return Undecodable(
            code=Refusal.TOO_DEEP, type=kind, expected=f"at most {DEPTH_MAX} levels", found="more", size=len(body)
        )
    except (msgspec.MsgspecError, UnicodeError, MemoryError, OverflowError) as err:
        return Undecodable(
            code=Refusal.NOT_JSON,
            type=kind,
            expected="one JSON object",
            found=f"{str(err)[:200]}" if text.strip() else "nothing",
            size=len(body),
        )
    raise AssertionError("describe() was asked about a body that decodes")


def _described(kind: str, text: str, size: int, job: str | None) -> Undecodable:
    path = ""
    if (at := _AT.search(text)) is not None:
        path = at["path"]
        text = text[: at.start()]
    if (unknown := _UNKNOWN.search(text)) is not None:
        name = unknown["name"]
        return Undecodable(
            code=Refusal.FIELD_UNKNOWN,
            type=kind,
            field=_joined(path, name)[:256],
            expected="a field of the contract",
            found=name[:128],
            size=size,
            job_id=job,
        )
    if (missing := _MISSING.search(text)) is not None:
        return Undecodable(
            code=Refusal.FIELD_MISSING,
            type=kind,
            field=_joined(path, missing["name"]),
            expected="a value",
            found="nothing",
            size=size,
            job_id=job,
        )
    got = _GOT.match(text)
    return Undecodable(
        code=Refusal.FIELD_INVALID,
        type=kind,
        field=path,
        expected=got["expected"] if got else text.removeprefix("Expected ")[:256],
        found=got["found"][:128] if got else "another value",
        size=size,
        job_id=job,
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class _JobIdOnly(msgspec.Struct):
    job_id: str | None = None


_JOB_ID_ONLY: Final = msgspec.json.Decoder(_JobIdOnly)


def _readable_job_id(body: bytes) -> str | None:
    try:
        return _JOB_ID_ONLY.decode(body).job_id
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None  # what is nested deeper than can be read may stand before the name


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


def _instant_or_zero(text: str | None) -> int:
    if not text:
        return 0
    try:
        return instant_from_timestamp(text)
    except ValueError:
        return 0
