"""Dead letters: copies of messages that could not be read, and what became of each.

A wish that was read, and is refused for one of its fields, is none: its publisher has the answer, and nobody here could
mend it.

The message itself stays in its stream for ever. Its copy lies on a subject of its own, so that a second copy is refused
by the server, and what is done about it (retried, dropped) is said on the same subject, behind it. Formats alone; who
publishes and who asks are the services' and the command's business.
"""

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum, unique
from typing import Final
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from apportion.contracts import subjects
from apportion.contracts.causes import Refusal
from apportion.contracts.cloudevents import escaped
from apportion.contracts.codec import EVENT_BYTES_MAX, Message
from apportion.contracts.envelope import Entry, Stream, Undecodable
from apportion.contracts.ids import PoolId
from apportion.runtime.stream import RawMessage

BODY_MAX: Final = EVENT_BYTES_MAX
"""Bytes of a body that are copied: one stranger's large ones must not push everybody else's letters out."""
KEPT_HEADERS_MAX: Final = 32
VALUE_MAX: Final = 1024

STREAM: Final = "Apportion-Stream"
SEQ: Final = "Apportion-Seq"
SUBJECT: Final = "Apportion-Subject"
CODE: Final = "Apportion-Code"
FIELD: Final = "Apportion-Field"
EXPECTED: Final = "Apportion-Expected"
FOUND: Final = "Apportion-Found"
SHA256: Final = "Apportion-Sha256"
SIZE: Final = "Apportion-Size"
MARK: Final = "Apportion-Mark"
_ONLY_FIRST: Final = "Nats-Expected-Last-Subject-Sequence"


_FOR_A_FIELD: Final = frozenset(
    {
        Refusal.FIELD_UNKNOWN,
        Refusal.FIELD_MISSING,
        Refusal.FIELD_INVALID,
        Refusal.FIELD_CONFLICT,
        Refusal.NOT_SUPPORTED,
    }
)


def is_dead(entry: Entry) -> bool:
    """True where the entry's message could not be read: a copy of it belongs among the dead letters."""
    found = entry.event
    return isinstance(found, Undecodable) and not (entry.stream is Stream.WISHES and found.code in _FOR_A_FIELD)


@unique
class Fate(StrEnum):
    """What became of a letter."""

    OPEN = "open"
    RETRIED = "retried"
    DROPPED = "dropped"


class Mark(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What somebody did about a letter."""

    fate: Fate
    actor: str
    reason: str = ""
    event_id: str = ""
    """Id of the wish that was published in its place."""
    wish_seq: int = 0
    answer: str = ""
    """How that wish was answered, such as ``JobAdmitted``; empty where nobody had answered yet."""
    at: int = 0
    """When it was said; ns since the Unix epoch, by the server's clock."""


class Letter(Struct, frozen=True, kw_only=True):
    """A message that could not be read."""

    seq: int
    """Its sequence in the stream of dead letters: what ``apportion dlq`` calls it by."""
    stream: str
    """Name of the stream that holds the message."""
    origin_seq: int
    subject: str
    code: str
    field: str
    expected: str
    found: str
    sha256: str
    """Of the whole body."""
    size: int
    """Bytes of the whole body."""
    at: int
    """When it became a letter; ns since the Unix epoch."""
    headers: dict[str, str]
    """The publisher's own: CloudEvents attributes, content type, trace."""
    body: bytes
    """The body, or its first ``BODY_MAX`` bytes."""
    lies_on: str
    """The letter's own subject."""
    marks: tuple[Mark, ...] = ()
    last_seq: int = 0
    """Sequence of the newest message on its subject."""

    @property
    def fate(self) -> Fate:
        """What became of it so far."""
        return self.marks[-1].fate if self.marks else Fate.OPEN

    @property
    def is_cut(self) -> bool:
        """True where the copy is shorter than the message."""
        return len(self.body) < self.size

    @property
    def is_wish(self) -> bool:
        """True for a wish, which can be asked again; a fact can only be looked at."""
        return ".wish." in self.subject


def letter_of(pool: PoolId, service: str, raw: RawMessage, found: Undecodable, digest: str = "") -> Message:
    """The message that lays a copy of ``raw`` aside; refused by the server where there is one already."""
    stream = subjects.wishes_stream(pool) if raw.stream is Stream.WISHES else subjects.facts_stream(pool)
    kept = dict(_kept(raw.headers or {}))
    ours = {
        STREAM: stream,
        SEQ: str(raw.seq),
        SUBJECT: escaped(raw.subject[:VALUE_MAX]),
        CODE: str(found.code),
        FIELD: escaped(found.field),
        EXPECTED: escaped(found.expected),
        FOUND: escaped(found.found),
        SHA256: digest or hashlib.sha256(raw.body).hexdigest(),
        SIZE: str(len(raw.body)),
        _ONLY_FIRST: "0",
    }
    return Message(
        subject=subjects.dead_letter(pool, service, str(raw.stream), raw.seq),
        headers={**kept, **ours},
        body=raw.body[:BODY_MAX],
    )


def _kept(headers: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    # What a retry needs to read the message as its publisher meant it; what the bus itself would obey is left out.
    count = 0
    for name, value in headers.items():
        is_ours = name.lower().startswith("ce-") or name.lower() in {"content-type", "traceparent"}
        if is_ours and len(name) <= VALUE_MAX and len(value) <= VALUE_MAX and count < KEPT_HEADERS_MAX:
            count += 1
            yield name, value


def mark_of(letter: Letter, mark: Mark) -> Message:
    """The message that says what was done; refused by the server where somebody else did something first."""
    return Message(
        subject=letter.lies_on,
        headers={MARK: str(mark.fate), _ONLY_FIRST: str(letter.last_seq)},
        body=msgspec.json.encode(mark),
    )


class Box:
    """The letters of a pool, as their stream tells of them."""

    def __init__(self) -> None:
        self._by_subject: dict[str, Letter] = {}

    def fold(self, *, seq: int, at: int, subject: str, headers: Mapping[str, str], body: bytes) -> None:
        """Take the stream's next message: a letter, or what was done about one."""
        if MARK in headers:
            letter = self._by_subject.get(subject)
            if letter is None:
                return  # the letter itself has aged out
            mark = msgspec.structs.replace(msgspec.json.decode(body, type=Mark), at=at)
            self._by_subject[subject] = msgspec.structs.replace(letter, marks=(*letter.marks, mark), last_seq=seq)
            return
        text = {name: unquote(headers.get(name, "")) for name in (SUBJECT, FIELD, EXPECTED, FOUND)}
        self._by_subject[subject] = Letter(
            seq=seq,
            stream=headers.get(STREAM, ""),
            origin_seq=int(headers.get(SEQ, "0")),
            subject=text[SUBJECT],
            code=headers.get(CODE, ""),
            field=text[FIELD],
            expected=text[EXPECTED],
            found=text[FOUND],
            sha256=headers.get(SHA256, ""),
            size=int(headers.get(SIZE, str(len(body)))),
            at=at,
            headers=dict(_kept(headers)),
            body=body,
            lies_on=subject,
            last_seq=seq,
        )

    def letters(self) -> list[Letter]:
        """All of them, oldest first."""
        return sorted(self._by_subject.values(), key=lambda letter: letter.seq)

    def letter(self, seq: int) -> Letter | None:
        """The letter with this sequence; None where there is none."""
        return next((letter for letter in self._by_subject.values() if letter.seq == seq), None)
