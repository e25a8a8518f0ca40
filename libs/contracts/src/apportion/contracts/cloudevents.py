"""CloudEvents 1.0 as NATS messages carry them: which of the modes a message is in, its attributes, and its data.

Opens envelopes and closes them; what the data means is left to ``codec``. Nothing here raises for what a stranger sent.

Modes are told apart as the NATS binding has it: a content type of CloudEvents makes a message structured, ``ce-``
headers make it binary. Many publishers send the structured form with no header at all, as the binding's own example
looks; and some send the request alone. Both are read, and their entries say so.
"""

import base64
import binascii
import functools
import re
from collections.abc import Mapping
from enum import StrEnum, unique
from typing import Final, TypeAlias
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from apportion.contracts import diagnosis
from apportion.contracts.causes import Refusal
from apportion.contracts.diagnosis import Fault, shown
from apportion.contracts.fields import PLAIN

Headers: TypeAlias = Mapping[str, str]

STRUCTURED: Final = "application/cloudevents"
ATTRIBUTE_MAX: Final = 1024
"""Characters of one attribute; an id is repeated in every answer."""

_TAKEN: Final = ("specversion", "id", "source", "type", "expirytime", "actor", "traceparent", "dataref")
"""Attributes that mean something here; others may be there, as CloudEvents has it, and are left alone."""
_CANONICAL: Final = frozenset(
    {"Nats-Msg-Id", "traceparent", "ce-time", "ce-subject", *(f"ce-{name}" for name in _TAKEN)}
)
_REQUIRED: Final = 4
"""Attributes that every event has. Where all are there, and as many headers, there is nothing else to look for."""
_READY: Final = re.compile(r"[!#$&-~]*")
"""Values that unquoting and percent-decoding leave as they are, and that hold nothing which would not print."""
_matches_ready = _READY.fullmatch
_PLAIN: Final = re.compile(PLAIN)
# A surrogate can't be written as UTF-8, and a noncharacter is no text: CloudEvents excludes both from strings.
_NO_TEXT: Final = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_NAME: Final = re.compile(r"[a-z0-9]+")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@unique
class Ingress(StrEnum):
    """How a wish came."""

    BINARY = "binary"
    STRUCTURED = "structured"
    BARE = "bare"
    """A structured CloudEvent without the header that says so."""
    REQUEST = "request"
    """The request alone, with no envelope: it has no id of its own, and can't be told from a repeat."""


NOTES: Final[Mapping[Ingress, str]] = {
    Ingress.BARE: "Read as a CloudEvent that no header announced: send content-type application/cloudevents+json.",
    Ingress.REQUEST: "Read without an envelope: without an id and a source of its own, a repeat is a second job.",
}
"""What a publisher is told who was understood, and could be understood better."""


class Opened(Struct, frozen=True, kw_only=True, gc=False):
    """A message whose envelope was read, or why it can't be. Attributes hold text that is safe to repeat."""

    ingress: Ingress
    id: str = ""
    source: str = ""
    type: str = ""
    expirytime: str = ""
    actor: str = ""
    traceparent: str = ""
    data: bytes = b""
    fault: Fault | None = None


def _is_ready(value: str) -> bool:
    """True where unquoting and percent-decoding would leave the value as it is, and it is short and prints."""
    return len(value) <= ATTRIBUTE_MAX and _matches_ready(value) is not None


@functools.lru_cache(maxsize=1024)
def _are_ready(specversion: str | None, source: str, kind: str) -> bool:
    """The same, of what a publisher repeats with each event."""
    return specversion == "1.0" and _is_ready(source) and _is_ready(kind)


def escaped(value: str) -> str:
    """An attribute as a header's value: percent-encoded where it isn't printable ASCII.

    >>> escaped('a "é"')
    'a%20%22%C3%A9%22'
    """
    if _READY.fullmatch(value):
        return value
    return quote(value, safe="!#$&'()*+,-./:;<=>?@[\\]^_`{|}~", errors="replace")


def opened(headers: Headers, body: bytes) -> Opened:
    """The message's attributes and data, in whichever mode it is."""
    get = headers.get
    is_least = len(headers) == _REQUIRED + ("Nats-Msg-Id" in headers)
    if is_least or headers.keys() <= _CANONICAL:
        # What our own publishers and most others send: no other spelling to look for, and nothing to decode.
        event_id, source, kind = get("ce-id"), get("ce-source"), get("ce-type")
        if (
            event_id
            and source
            and kind
            and len(source) <= ATTRIBUTE_MAX >= len(kind)
            and _is_ready(event_id)
            and _are_ready(get("ce-specversion"), source, kind)
        ):
            if is_least:
                return Opened(ingress=Ingress.BINARY, id=event_id, source=source, type=kind, data=body)
            expirytime, actor = get("ce-expirytime", ""), get("ce-actor", "")
            traceparent = get("ce-traceparent") or get("traceparent", "")
            if not get("ce-dataref") and _is_ready(expirytime) and _is_ready(actor) and _is_ready(traceparent):
                return Opened(
                    ingress=Ingress.BINARY,
                    id=event_id,
                    source=source,
                    type=kind,
                    expirytime=expirytime,
                    actor=actor,
                    traceparent=_trace(traceparent),
                    data=body,
                )
    return _opened_with_care(headers, body)


def _opened_with_care(headers: Headers, body: bytes) -> Opened:
    attributes, fault = _from_headers(headers)
    content_type = attributes.pop("content-type", "").lower()
    is_structured = content_type.startswith(STRUCTURED)
    if is_structured or (not attributes and fault is None):
        if not is_structured and b'"specversion"' not in body:
            if not _is_json(content_type):
                fault = _content_type("content-type", content_type)
            return Opened(ingress=Ingress.REQUEST, data=body, fault=fault)
        if fault is None and is_structured and content_type.partition(";")[0].strip() != f"{STRUCTURED}+json":
            fault = Fault(
                code=Refusal.ENVELOPE_INVALID,
                field="content-type",
                expected="application/cloudevents+json",
                found=shown(content_type),
            )
        if fault is not None:
            return _opened(Ingress.STRUCTURED, {}, b"", fault)
        return _structured(Ingress.STRUCTURED if is_structured else Ingress.BARE, attributes, body)
    fault = fault or _incomplete(attributes, "ce-")
    if fault is None and not _is_json(content_type):
        fault = _content_type("content-type", content_type)
    return _opened(Ingress.BINARY, attributes, body, fault)


def _opened(ingress: Ingress, attributes: Mapping[str, str], data: bytes, fault: Fault | None) -> Opened:
    get = attributes.get
    return Opened(
        ingress=ingress,
        id=get("id", ""),
        source=get("source", ""),
        type=get("type", ""),
        expirytime=get("expirytime", ""),
        actor=get("actor", ""),
        traceparent=_trace(get("traceparent", "")),
        data=data,
        fault=fault,
    )


def _from_headers(headers: Headers) -> tuple[dict[str, str], Fault | None]:
    """Attributes by their CloudEvents names, as far as they are fit to be used, and what is wrong with another."""
    found: dict[str, str] = {}
    spelled: set[str] = set()
    fault: Fault | None = None
    for header, value in headers.items():
        name = header.lower()
        if not name.startswith("ce-") and name not in {"content-type", "traceparent"}:
            continue
        if name in spelled:
            fault = fault or Fault(
                code=Refusal.ENVELOPE_INVALID,
                field=shown(name)[1:-1],
                expected="one spelling of the header",
                found="two",
            )
            continue
        spelled.add(name)
        attribute = name.removeprefix("ce-")
        if name.startswith("ce-") and attribute in {"content-type", "traceparent"} and attribute in found:
            found.pop(attribute)
        text = _decoded(value)
        wrong = _wrong_text(name, value if text is None else text, is_utf8=text is not None)
        if wrong is None and text is not None:
            found.setdefault(attribute, text)
        elif attribute in _TAKEN:
            fault = fault or wrong
    return found, fault


def _decoded(value: str) -> str | None:
    """A header's value unquoted, then percent-decoded once, as the bindings have it; None where it is no UTF-8."""
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL)
    if "%" not in value:
        return value
    try:
        return unquote(value, errors="strict")
    except UnicodeError:
        return None


def _wrong_text(field: str, text: str, *, is_utf8: bool = True) -> Fault | None:
    """Why the text is no attribute's; None where it may be one."""
    if not is_utf8:
        expected = "percent-encoded UTF-8"
    elif len(text) > ATTRIBUTE_MAX:
        expected = f"at most {ATTRIBUTE_MAX} characters"
    elif not _PLAIN.match(text) or _NO_TEXT.search(text):
        expected = "text without control characters"
    else:
        return None
    return Fault(code=Refusal.ENVELOPE_INVALID, field=field, expected=expected, found=shown(text))


def _incomplete(attributes: Mapping[str, str], prefix: str) -> Fault | None:
    """What every CloudEvent of version 1.0 has and this one lacks."""
    version = attributes.get("specversion", "")
    if version != "1.0":
        return Fault(
            code=Refusal.ENVELOPE_INVALID,
            field=f"{prefix}specversion",
            expected="1.0",
            found=shown(version) if version else "nothing",
        )
    for name in ("id", "source", "type"):
        if not attributes.get(name):
            return Fault(code=Refusal.ENVELOPE_INVALID, field=f"{prefix}{name}", expected="a value", found="nothing")
    if attributes.get("dataref"):
        return Fault(
            code=Refusal.NOT_SUPPORTED,
            field=f"{prefix}dataref",
            expected="the request itself",
            found=shown(attributes["dataref"]),
        )
    return None


def _is_json(content_type: str) -> bool:
    media = content_type.partition(";")[0].strip()
    return not media or media in {"application/json", "text/json"} or media.endswith("+json")


def _content_type(field: str, found: str) -> Fault:
    return Fault(code=Refusal.ENVELOPE_INVALID, field=field, expected="application/json", found=shown(found))


def _trace(text: str) -> str:
    # W3C: a trace context that can't be read is as good as none.
    return text if text and _TRACEPARENT.fullmatch(text) else ""


class _Data(Struct):
    """The one member of a structured event that is kept as it was written."""

    data: msgspec.Raw = msgspec.Raw()


_DATA: Final = msgspec.json.Decoder(_Data)


def _structured(ingress: Ingress, headers: Mapping[str, str], body: bytes) -> Opened:
    """A CloudEvent as one JSON object. Attributes that headers repeat have to agree: one of two would be ignored."""
    doc = diagnosis.parsed(body)
    if isinstance(doc, Fault):
        return Opened(ingress=ingress, fault=doc)
    attributes: dict[str, str] = {}
    fault: Fault | None = None
    for name, value in doc.items():
        if name in {"data", "data_base64"} or value is None:
            continue
        wrong = _wrong_member(name, value)
        if wrong is None and type(value) is str:
            attributes[name] = value
        fault = fault or wrong
    fault = fault or _incomplete(attributes, "")
    for name, value in headers.items():
        if fault is None and name in _TAKEN and value != attributes.get(name, value if name == "traceparent" else ""):
            fault = Fault(
                code=Refusal.ENVELOPE_INVALID,
                field=f"ce-{name}",
                expected=f"the {name} of the event in the body, or none",
                found=shown(value),
            )
    data, wrong = _data_of(doc, body)
    fault = fault or wrong
    if fault is None and not _is_json(attributes.get("datacontenttype", "").lower()):
        fault = _content_type("datacontenttype", attributes["datacontenttype"])
    return _opened(ingress, attributes, data, fault)


def _wrong_member(name: str, value: object) -> Fault | None:
    """What is wrong with an attribute of a structured event."""
    if not _NAME.fullmatch(name):
        # `expiryTime` would be an extension that nobody reads, and the request would never expire.
        return Fault(
            code=Refusal.ENVELOPE_INVALID,
            field=shown(name)[1:-1],
            expected="an attribute's name, of lower-case letters and digits",
            found=shown(name),
        )
    if type(value) is str:
        return _wrong_text(name, value)
    if name in _TAKEN:
        return Fault(code=Refusal.ENVELOPE_INVALID, field=name, expected="text", found=shown(value))
    if isinstance(value, dict | list):
        return Fault(
            code=Refusal.ENVELOPE_INVALID,
            field=name[:128],
            expected="text, a whole number or a boolean",
            found=shown(value),
        )
    return None


def _data_of(doc: Mapping[str, object], body: bytes) -> tuple[bytes, Fault | None]:
    """The request within a structured event, byte for byte."""
    encoded = doc.get("data_base64")
    if encoded is None:
        if doc.get("data") is None:
            return b"", Fault(
                code=Refusal.ENVELOPE_INVALID, field="data", expected="the request as a JSON object", found="nothing"
            )
        return bytes(_DATA.decode(body).data), None
    if doc.get("data") is not None:
        return b"", Fault(
            code=Refusal.ENVELOPE_INVALID, field="data_base64", expected="nothing beside data", found="both"
        )
    try:
        return base64.b64decode(encoded if type(encoded) is str else "*", validate=True), None
    except (binascii.Error, ValueError):
        return b"", Fault(code=Refusal.ENVELOPE_INVALID, field="data_base64", expected="base64", found=shown(encoded))
