"""Messages made from the corpus by small changes, the same for the same seed; and the schema's verdict on a body."""

import json
import random
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import jsonschema

from apportion.contracts import codec, schema
from apportion.contracts import events as ev
from apportion.contracts.codec import encode_body
from tests.contract.golden import example
from tests.contract.judge import groups

SCALARS: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    1000,
    1001,
    2**31 - 1,
    2**31,
    2**63,
    1.0,
    1.5,
    "",
    "a",
    "main",
    "x" * 64,
    "A",
    "a\n",
    "a\x00",
    "\u202e",
    "é",
    "../x",
    "mps",
    "none",
    "training",
    "1g.10gb",
    "2027-01-01T00:00:00Z",
    "https://a",
    [],
    {},
    [1],
    ["a"],
    {"a": "b"},
    {"a": 1},
    [[]],
    "JobRequested.v1",
)
NAMES: Final = (
    "queue",
    "gpu",
    "gpus",
    "workload",
    "command",
    "type",
    "a",
    "",
    "a b",
    "LD_PRELOAD",
    "é",
    "\x00",
    "min",
    "size",
)
PIECES: Final = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"\x00",
    b"\xff",
    b"\xc0\x80",
    b"\n",
    b" ",
    b"-0",
    b"-",
    b"1e999",
    b"NaN",
    b"null",
    b"9" * 40,
    b'"queue":"x",',
    b"\xef\xbb\xbf",
    b"%00",
    b"\xe2\x80\xae",
    b"1.0",
)
HEADERS: Final = (
    ("Ce-Id", "x"),
    ("ce-id", ""),
    ("ce-id", "%C0%A0"),
    ("ce-id", "a%0ab"),
    ("ce-specversion", "0.3"),
    ("ce-type", "x"),
    ("content-type", "application/cloudevents+json"),
    ("content-type", "text/plain"),
    ("ce-expirytime", "soon"),
    ("ce-expirytime", "2020-01-01T00:00:00Z"),
    ("ce-dataref", "https://a"),
    ("ce-source", "\udc80"),
    ("ce-actor", "\x1b[2J"),
    ("traceparent", "x"),
    ("CE-SOURCE", "/b"),
    ("ce-\x00", "a"),
    ("", ""),
    ("ce-", "a"),
    ("ce-id", '"'),
    ("ce-id", "é" * 2000),
)


Message: TypeAlias = tuple[str, dict[str, str], bytes]


def seeds(*, admitted: bool) -> list[Message]:
    """The corpus's messages of a size that is worth changing: those that are admitted, or all others."""
    cases = [case for group in groups() for case in group.cases if (case.expected.verdict == "admitted") is admitted]
    return [(case.subject, case.headers, body) for case in cases if len(body := case.bytes()) <= 4096]


class Mutator:
    """An endless supply of messages, each one to four small changes away from one of the corpus."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0
        self._good, self._bad = seeds(admitted=True), seeds(admitted=False)
        self._documents = [document for _, _, body in self._good if (document := _document(body)) is not None]
        self._documents += [json.loads(encode_body(example(kind))) for kind in ev.WISHES]

    def message(self) -> Message:
        """The next message."""
        rng = self._random
        self._count += 1
        subject, headers, body = rng.choice(self._good if rng.random() < 0.7 else self._bad)
        if "ce-id" in headers and rng.random() < 0.9:
            # Most would otherwise be the same event with another body, and refused before anything else is looked at.
            headers = {**headers, "ce-id": f"e-{self._count}"}
        kind = rng.random()
        if kind < 0.45:
            body = json.dumps(self.document(), ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
        elif kind < 0.85:
            for _ in range(rng.choice((1, 1, 2, 3))):
                body = self.bytes_of(body)
        if rng.random() < 0.25:
            headers = self._headers(headers)
        if rng.random() < 0.05:
            subject = self._text(subject)
        return subject, headers, body

    def document(self) -> Any:
        """A request with one to three changes to what it says."""
        rng = self._random
        document = json.loads(json.dumps(rng.choice(self._documents)))
        for _ in range(rng.choice((1, 1, 2, 3))):
            self._change(document)
        return document

    def _change(self, document: Any) -> None:
        rng = self._random
        holder = rng.choice(list(_holders(document)))
        value = json.loads(json.dumps(rng.choice(SCALARS)))
        if isinstance(holder, list):
            if holder and rng.random() < 0.7:
                holder[rng.randrange(len(holder))] = value
            else:
                holder.insert(rng.randint(0, len(holder)), value)
            return
        keys = list(holder)
        kind = rng.random()
        if keys and kind < 0.5:
            holder[rng.choice(keys)] = value
        elif keys and kind < 0.65:
            del holder[rng.choice(keys)]
        elif keys and kind < 0.75:
            holder[rng.choice(NAMES)] = holder.pop(rng.choice(keys))
        else:
            holder[rng.choice((*NAMES, *ev.JobRequested.__struct_fields__))] = value

    def bytes_of(self, body: bytes) -> bytes:
        """The body with one change to its bytes."""
        rng = self._random
        if not body:
            return rng.choice(PIECES)
        start = rng.randrange(len(body))
        end = min(len(body), start + rng.randint(1, 12))
        match rng.randrange(6):
            case 0:
                return body[:start] + body[end:]
            case 1:
                return body[:start] + rng.choice(PIECES) + body[start:]
            case 2:
                return body[:start] + bytes([rng.randrange(256)]) + body[start + 1 :]
            case 3:
                return body[:end] + body[start:end] + body[end:]
            case 4:
                other = rng.choice(self._good)[2]
                cut = rng.randrange(len(other) + 1)
                return body[:start] + other[cut : cut + 30] + body[end:]
            case _:
                return body[:start]

    def _headers(self, headers: dict[str, str]) -> dict[str, str]:
        rng = self._random
        changed = dict(headers)
        for _ in range(rng.randint(1, 2)):
            kind = rng.random()
            if changed and kind < 0.3:
                del changed[rng.choice(list(changed))]
            elif changed and kind < 0.6:
                name = rng.choice(list(changed))
                changed[name] = self._text(changed[name])
            else:
                name, value = rng.choice(HEADERS)
                changed[name] = value
        return changed

    def _text(self, text: str) -> str:
        rng = self._random
        place = rng.randint(0, len(text))
        piece = rng.choice(
            ("\x00", "\n", ".", "*", ">", "%", "%41", '"', "é", "\ud800", "\u202e", " ", "a", "\\", "" * 1000)
        )
        return text[:place] + piece + text[place + rng.randint(0, 2) :]


def _document(body: bytes) -> Any:
    try:
        document = json.loads(body)
        json.dumps(document).encode()
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _holders(document: Any) -> Iterator[Any]:
    if isinstance(document, dict | list):
        yield document
        for item in document.values() if isinstance(document, dict) else document:
            yield from _holders(item)


# The schema's verdict -----------------------------------------------------------------------------------------------


class _Unlike(ValueError):
    """JSON outside the profile that the schemas name: readers would differ over it."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise _Unlike("a name twice")
    return dict(pairs)


def _whole(text: str) -> int:
    if text == "-0":
        raise _Unlike("-0")
    return int(text) if len(text) < 100 else 10**100 * (-1 if text.startswith("-") else 1)


def _fraction(text: str) -> Any:
    raise _Unlike(text)


def profiled(body: bytes) -> Any:
    """The document that every reader finds in the body; None where the wire profile refuses it."""
    try:
        text = body.decode()
        document = json.loads(
            text, object_pairs_hook=_pairs, parse_int=_whole, parse_float=_fraction, parse_constant=_fraction
        )
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return document


_VALIDATORS: Final = {name: jsonschema.Draft202012Validator(found) for name, found in schema.schemas().items()}


def schema_takes(name: str, body: bytes) -> bool:
    """Whether the published schema and the wire profile accept the body as this event."""
    document = profiled(body)
    return document is not None and _VALIDATORS[name].is_valid(document)


def decoder_takes(name: str, body: bytes) -> bool:
    """Whether our decoder does."""
    return isinstance(codec.decode_body(name, body), ev.Event)
