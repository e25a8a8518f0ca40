"""Why bytes are no valid wish, in the terms of a refusal: code, field, what was expected, and what was found.

Runs where decoding failed, and where a body decodes but reads differently elsewhere: JSON lets a name occur twice and
doesn't say which one counts, and ``-0`` is a whole number to some readers only. Nothing here raises for any bytes.
"""

import functools
import itertools
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from apportion.contracts.causes import Refusal
from apportion.contracts.events import WISHES, Event, JobRequested, type_name
from apportion.contracts.fields import GRAMMARS
from apportion.contracts.grammar import names_match
from apportion.contracts.shapes import Shape, fields_of, shape_of

DEPTH_MAX: Final = 32
SHOWN_MAX: Final = 128
"""Longest piece of a stranger's text that is repeated."""

Path: TypeAlias = tuple[str | int, ...]


class Fault(Struct, frozen=True, kw_only=True):
    """What is wrong with a message."""

    code: Refusal
    field: str = ""
    expected: str = ""
    found: str = ""


class _Number(str):
    """A number as it was written: ``1.0`` and ``-0`` are told from ``1`` and ``0``."""

    __slots__ = ()


class _Repeating(dict[str, object]):
    """An object in which a name occurs twice."""

    name = ""


class _NoNumber(ValueError):
    """NaN or Infinity, which Python's parser would let pass."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeating = _Repeating(found)
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            repeating.name = name
            break
        seen.add(name)
    return repeating


def _constant(text: str) -> object:
    raise _NoNumber(text)


class _Twice(ValueError):
    """A name occurs twice; the parser that finds where is slower."""


def _plain_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Twice
    return found


_QUICK: Final = json.JSONDecoder(
    object_pairs_hook=_plain_object, parse_int=_Number, parse_float=_Number, parse_constant=_constant
)
_PARSER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_Number, parse_float=_Number, parse_constant=_constant
)
_ANY: Final = msgspec.json.Decoder()
_AS_WRITTEN: Final = msgspec.json.Decoder(float_hook=_Number)
"""Reads a fraction or an exponent as it was written."""
_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)
_BACKSLASH, _DELETE, _MINUS = 0x5C, 0x7F, 0x2D
"""As numbers: bytes are searched for a number ten times as fast as for a text of one byte."""
_MINUS_ZERO: Final = re.compile(rb"-0\s*[,}\]]")
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG: Final = b"0" * 18
"""A number of so many digits may be more than 64 bits hold."""
_TEXTS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NO_BRACKETS: Final = bytes(sorted(set(range(256)) - set(b"[]{}")))
_UNPRINTABLE: Final = re.compile(rb"\\[bfnrtu]")
_TAG_BYTES: Final[Mapping[type[Event], int]] = {kind: len(f'"type":"{type_name(kind)}",') for kind in WISHES}
"""Of the type, which every event is written with, and few wishes are sent with."""
_QUOTED: Final = re.compile(r'["\\]')
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def fault_of_event(body: bytes, event: Event) -> Fault | None:
    """What is wrong with a body that decodes as ``event``; None where every reader finds the same good event in it.

    Names that occur twice, ``-0``, and the grammars that the decoder leaves to this.
    """
    if not _says_each_name_once(body, event) and isinstance(doubtful := parsed(body), Fault):
        return doubtful
    if (
        body.isascii()
        and _DELETE not in body
        and (_BACKSLASH not in body or not _UNPRINTABLE.search(body))
        and (type(event) is not JobRequested or names_match(event))
    ):
        return None  # JSON has no other way to write a character that would not print
    return fault_of_text(event)


def _says_each_name_once(body: bytes, event: Event) -> bool:
    """True where no name occurs twice, and no ``-0``; False asks for a closer look.

    Written anew, an event has no spaces, no repeated name, no escape that a character can do without, and nothing that
    equals a default: where it is as long as what came, what came has none of these.
    """
    written = _ENCODER.encode(event)
    tag_bytes = 0 if body[:8] == b'{"type":' else _TAG_BYTES[type(event)]
    if len(written) == len(body) + tag_bytes:
        return True
    if (_BACKSLASH in body and b"\\u" in body) or (_MINUS in body and _MINUS_ZERO.search(body)):
        return False
    # No colon is hidden in an escape, so that names and texts have as many when they are written anew, and fewer where
    # a repeated name is gone. Where a default was written out, it is plain objects that are to be compared.
    colons = body.count(b":")
    return written.count(b":") - bool(tag_bytes) == colons or _ENCODER.encode(_ANY.decode(body)).count(b":") == colons


def fault_of_text(event: Struct) -> Fault | None:
    """The first text in an event that doesn't match a grammar which the decoder leaves to us; None where all do."""
    return _bad_text(event, type(event), ())


def _bad_text(value: object, hint: Any, path: Path) -> Fault | None:
    """The first such text in a decoded value."""
    shape = shape_of(hint)
    for kind, meta in shape.alternatives:
        fault = None
        if kind is str:
            if isinstance(value, str):
                fault = _unlike(value, meta, path, "")
        elif isinstance(kind, type) and issubclass(kind, Struct):
            if isinstance(value, kind):
                fault = _bad_text_of_struct(value, kind, path)
        elif isinstance(value, dict):
            fault = _bad_text_of_dict(value, shape, path)
        elif isinstance(value, tuple):
            faults = (_bad_text(item, shape.items, (*path, index)) for index, item in enumerate(value))
            fault = next(filter(None, faults), None)
        if fault is not None:
            return fault
    return None


def _bad_text_of_struct(value: Struct, kind: type[Struct], path: Path) -> Fault | None:
    for name, hint in _with_text(kind):
        item = getattr(value, name)
        if (
            item and (fault := _bad_text(item, hint, (*path, name))) is not None
        ):  # nothing is wrong with what isn't there
            return fault
    return None


def _bad_text_of_dict(value: Mapping[str, object], shape: Shape, path: Path) -> Fault | None:
    (_, name_meta), *_ = shape_of(shape.names).alternatives
    for name, item in value.items():
        fault = _unlike(name, name_meta, (*path, name), "as its name, ") or _bad_text(item, shape.values, (*path, name))
        if fault is not None:
            return fault
    return None


def _unlike(text: str, meta: Meta | None, path: Path, prefix: str) -> Fault | None:
    """The fault of a text that doesn't match its grammar."""
    pattern = _free_text(meta)
    if not pattern or re.search(pattern, text):
        return None
    return Fault(
        code=Refusal.FIELD_INVALID, field=_written(path), expected=prefix + GRAMMARS[pattern], found=shown(text)
    )


def _free_text(meta: Meta | None) -> str:
    """The grammar that the decoder doesn't check; empty where there is none."""
    extra = None if meta is None else meta.extra_json_schema
    return str(extra["pattern"]) if extra and "pattern" in extra else ""


@functools.cache
def _with_text(kind: type[Struct]) -> tuple[tuple[str, Any], ...]:
    """Fields of the struct that hold such text somewhere, with their types."""
    return tuple((name, hint) for name, hint in fields_of(kind).items() if _holds_text(hint))


def _holds_text(hint: Any) -> bool:
    for kind, meta in shape_of(hint).alternatives:
        if kind is str:
            holds = bool(_free_text(meta))
        elif isinstance(kind, type) and issubclass(kind, Struct):
            holds = bool(_with_text(kind))
        else:
            holds = any(_holds_text(inner) for inner in typing.get_args(kind) if inner is not ...)
        if holds:
            return True
    return False


def parsed(body: bytes) -> dict[str, object] | Fault:
    """The body as one JSON object that every reader understands in the same way, numbers as they were written."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as err:
        return Fault(
            code=Refusal.NOT_UTF8, expected="UTF-8", found=f"byte 0x{body[err.start]:02x} at offset {err.start}"
        )
    if text.startswith("\ufeff"):
        return Fault(code=Refusal.NOT_JSON, expected="one JSON object", found="a byte order mark before it")
    if _is_too_deep(body):
        return Fault(code=Refusal.TOO_DEEP, expected=f"at most {DEPTH_MAX} levels", found="more")
    is_odd = b"\\u" in body or _MINUS_ZERO.search(body) is not None
    try:
        try:
            doc = _QUICK.decode(text)
        except _Twice:
            doc, is_odd = _PARSER.decode(text), True
    except _NoNumber as err:
        return Fault(code=Refusal.NOT_JSON, expected="one JSON object", found=f"{err}, which is no JSON")
    except json.JSONDecodeError as err:
        where = f"{err.msg} at character {err.pos}" if text.strip() else "nothing"
        return Fault(code=Refusal.NOT_JSON, expected="one JSON object", found=where)
    if not isinstance(doc, dict):
        return Fault(code=Refusal.NOT_JSON, expected="one JSON object", found=shown(doc))
    return (next(_oddities(doc, ()), None) if is_odd else None) or doc


def _plainly_parsed(body: bytes) -> dict[str, object] | None:
    """What ``parsed`` finds, where the text is so plain that a fast parser can't read it otherwise; else None.

    Most refused requests are plain, and a refusal should cost no more than an admission. Whole numbers come as numbers:
    here they are short, so that each is written in one way.
    """
    if _is_too_deep(body) or (_BACKSLASH in body and b"\\u" in body) or _LONG in body.translate(_DIGITS):
        return None
    if _MINUS in body and _MINUS_ZERO.search(body):
        return None
    try:
        if not body.isascii():
            body.decode()
        doc = _AS_WRITTEN.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    # A name that occurs twice leaves fewer colons.
    if not isinstance(doc, dict) or _ENCODER.encode(doc).count(b":") != body.count(b":"):
        return None
    return doc


def _is_too_deep(body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= DEPTH_MAX:
        return False
    # What is too deep is so early, as a rule: then the rest of it, which may be long, need not be read.
    return _goes_too_deep(body[:1024]) or (len(body) > 1024 and _goes_too_deep(body))


def _goes_too_deep(body: bytes) -> bool:
    """True where the text, or a beginning of one, opens more levels than are allowed."""
    depth = 0
    if b'"' in body:
        body = _TEXTS.sub(b"", body)
    for bracket in body.translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEPTH_MAX:
            return True
    return False


def _oddities(value: object, path: Path) -> Iterator[Fault]:
    """What readers differ over, first things first; the value is at most ``DEPTH_MAX`` deep."""
    match value:
        case _Number():
            if value == "-0":
                yield Fault(code=Refusal.FIELD_INVALID, field=_written(path), expected="a whole number", found="-0")
        case str():
            yield from _surrogate(value, path)
        case dict():
            if isinstance(value, _Repeating):
                yield Fault(
                    code=Refusal.FIELD_CONFLICT,
                    field=_written((*path, value.name)),
                    expected="the field once",
                    found="the field twice",
                )
            for name, item in value.items():
                yield from _surrogate(name, path)
                yield from _oddities(item, (*path, name))
        case list():
            for index, item in enumerate(value):
                yield from _oddities(item, (*path, index))


def _surrogate(text: str, path: Path) -> Iterator[Fault]:
    if not text.isascii() and _SURROGATE.search(text):
        yield Fault(code=Refusal.NOT_JSON, field=_written(path), expected="text that UTF-8 can hold", found=shown(text))


def shown(value: object) -> str:
    r"""A stranger's value, safe to print and to store: cut, and everything outside printable ASCII escaped.

    >>> shown("a\x1b[1m"), shown(True), shown([1, 2])
    ('"a\\u001b[1m"', 'true', 'an array of 2')
    """
    match value:
        case _Number():
            # A plain str again: no encoder knows the type with which the parser marks numbers.
            return str(value) if len(value) <= SHOWN_MAX else f"{value[:32]}… ({len(value)} digits)"
        case str():
            if len(value) <= SHOWN_MAX and value.isascii() and value.isprintable() and not _QUOTED.search(value):
                return f'"{value}"'
            cut = value if len(value) <= SHOWN_MAX else value[:SHOWN_MAX] + "…"
            text = json.dumps(cut).replace("\\u2026", "…").replace("\x7f", "\\u007f")
            return text if len(text) <= 2 * SHOWN_MAX else text[: 2 * SHOWN_MAX - 1] + "…"
        case dict():
            return f"an object with {len(value)} fields"
        case list():
            return f"an array of {len(value)}"
        case _:
            return json.dumps(value, default=repr)[:SHOWN_MAX]


def _written(path: Sequence[str | int]) -> str:
    """A path as refusals name it: ``workload.command[1]``; what a stranger chose of it is escaped and cut."""
    parts: list[str] = []
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            name = step if step.isascii() and step.isprintable() and len(step) <= SHOWN_MAX else shown(step)[1:-1]
            parts.append(f".{name}" if parts else name)
    return "".join(parts)


# What a decoder said ------------------------------------------------------------------------------------------------


def fault_of(body: bytes, kind: type[Struct], err: Exception) -> Fault:
    """Why ``body`` is no ``kind``, where decoding it ended in ``err``."""
    is_invalid = isinstance(err, msgspec.ValidationError)
    doc = (_plainly_parsed(body) if is_invalid else None) or parsed(body)
    if isinstance(doc, Fault):
        return doc
    if is_invalid:
        return _explained(doc, kind, str(err))
    return Fault(code=Refusal.NOT_JSON, expected="one JSON object", found=shown(str(err)))


def fault_of_value(doc: dict[str, object], kind: type[Struct], text: str) -> Fault:
    """The fault that ``msgspec.convert`` found in plain data, from its message."""
    return _explained(doc, kind, text)


_WHERE: Final = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[A-Za-z0-9_.\[\]]*)`$")
_STEP: Final = re.compile(r"\.?([A-Za-z0-9_]+)|\[(\d+|\.\.\.)\]")


def _said_where(text: str) -> tuple[str, tuple[str, ...], bool]:
    """A decoder's message without its place, the steps to it, and whether it is about a name there."""
    where = _WHERE.search(text)
    if where is None:
        return text, (), False
    steps = tuple(match[1] or match[2] for match in _STEP.finditer(where["path"]))
    return text[: where.start()], steps, where["key"] is not None


class _Place(Struct, frozen=True):
    """A place in every body of a type, and what should stand there."""

    path: Path
    written: str
    expected: str


@functools.lru_cache(maxsize=1024)
def _place(kind: type[Struct], text: str) -> _Place | None:
    """The place that a decoder's message is about; None where it takes the body to know. Most messages are alike."""
    said, steps, is_about_name = _said_where(text)
    if is_about_name or steps == ("type",) or said.startswith("Object "):
        return None
    path: list[str | int] = []
    hint: Any = kind
    for step in steps:
        shape = shape_of(hint)
        if shape.kind is not None and step in fields_of(shape.kind):
            path.append(step)
            hint = fields_of(shape.kind)[step]
        elif shape.items is not object and step.isdigit():
            path.append(int(step))
            hint = shape.items
        else:
            return None
    return _Place(tuple(path), _written(path), _expected(said, hint))


def _explained(doc: dict[str, object], kind: type[Struct], text: str) -> Fault:
    if text.startswith("Object contains unknown field"):
        unknown = _unknown(doc, kind, ())
        if unknown is not None:
            return unknown
    # A long message repeats a stranger's text, which is not worth keeping.
    if len(text) <= 2 * SHOWN_MAX and (place := _place(kind, text)) is not None:
        there: Any = doc
        for step in place.path:
            there = there[step]
        return Fault(code=Refusal.FIELD_INVALID, field=place.written, expected=place.expected, found=shown(there))
    said, steps, is_about_name = _said_where(text)
    path, value, hint = _walked(doc, kind, steps)
    if said.startswith("Object missing required field"):
        name = said.partition("`")[2].rstrip("`")
        return Fault(code=Refusal.FIELD_MISSING, field=_written((*path, name)), expected="a value", found="nothing")
    if path == ("type",):
        return _wrong_type(kind, value)
    if is_about_name and isinstance(value, dict):
        key_hint = shape_of(hint).names
        for key in value:
            if not _fits(key, key_hint):
                return Fault(
                    code=Refusal.FIELD_INVALID,
                    field=_written((*path, key)),
                    expected=f"as its name, {_expected(said, key_hint)}",
                    found=shown(key),
                )
    return Fault(code=Refusal.FIELD_INVALID, field=_written(path), expected=_expected(said, hint), found=shown(value))


def _wrong_type(kind: type[Struct], value: object) -> Fault:
    tag = str(kind.__struct_config__.tag)
    is_other_version = isinstance(value, str) and value.partition(".")[0] == tag.partition(".")[0]
    return Fault(
        code=Refusal.TYPE_UNKNOWN if is_other_version else Refusal.TYPE_MISMATCH,
        field="type",
        expected=tag,
        found=shown(value),
    )


def _walked(doc: object, hint: Any, steps: Sequence[str]) -> tuple[Path, object, Any]:
    """The path, value and type at ``steps``; ``...`` is the first entry of an object that doesn't fit its type."""
    path: list[str | int] = []
    value = doc
    for step in steps:
        shape = shape_of(hint)
        if isinstance(value, dict):
            if step != "..." and shape.kind is not None:
                key, hint = step, fields_of(shape.kind).get(step, object)
            else:
                key = next((name for name, item in value.items() if not _fits(item, shape.values)), "")
                hint = shape.values
            path.append(key)
            value = value.get(key)
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            path.append(int(step))
            hint, value = shape.items, value[int(step)]
        else:
            break
    return tuple(path), value, hint


def _unknown(value: object, hint: Any, path: Path) -> Fault | None:
    """The first field, in the order of the text, that the contract doesn't have."""
    if not isinstance(value, dict | list):
        return None
    shape = shape_of(hint)
    if isinstance(value, list):
        faults = (_unknown(item, shape.items, (*path, index)) for index, item in enumerate(value))
        return next(filter(None, faults), None)
    fields = {} if shape.kind is None else fields_of(shape.kind)
    for name, item in value.items():
        if shape.kind is None:
            fault = _unknown(item, shape.values, (*path, name))
        elif name in fields:
            fault = _unknown(item, fields[name], (*path, name))
        elif name != "type" or path:
            return _unknown_field(name, path, shape.kind)
        else:
            fault = None
        if fault is not None:
            return fault
    return None


def _unknown_field(name: str, path: Path, kind: type[Struct]) -> Fault:
    near = _nearest(name[:64].lower().replace("-", "_"), kind)
    return Fault(
        code=Refusal.FIELD_UNKNOWN,
        field=_written((*path, name)),
        expected=f"a field of the contract, perhaps {_written((*path, *near))}"
        if near
        else "one of " + ", ".join(sorted(fields_of(kind))),
        found=shown(name),
    )


@functools.lru_cache(maxsize=1024)
def _nearest(name: str, kind: type[Struct]) -> Path:
    """The way to the field of a struct that was likely meant, in it or further in; empty where there is none."""
    near = _closest(name, tuple(fields_of(kind)), 50)
    if near is not None:
        return (near,)
    further = _further_in(kind)
    near = _closest(name, tuple(further), 70)
    return () if near is None else further[near]


def _closest(name: str, known: tuple[str, ...], least_pct: int) -> str | None:
    """The known name that shares most pairs of letters with this one; None where none shares enough.

    Far cheaper than `difflib`, which counts where somebody sends nothing but misspelled requests.
    """
    pairs = _pairs(name)
    counts: dict[str, int] = {}
    by_pair, sizes = _index(known)
    for pair in pairs:
        for other in by_pair.get(pair, ()):
            counts[other] = counts.get(other, 0) + 1
    best_pct, near = max(
        ((200 * shared // (len(pairs) + sizes[other]), other) for other, shared in counts.items()), default=(0, "")
    )
    return near if best_pct >= least_pct else None


def _pairs(name: str) -> frozenset[str]:
    framed = f"^{name}$"
    return frozenset(map("".join, itertools.pairwise(framed)))


@functools.cache
def _index(known: tuple[str, ...]) -> tuple[Mapping[str, Sequence[str]], Mapping[str, int]]:
    """Which names hold a pair of letters, and how many pairs each name has."""
    by_pair: dict[str, list[str]] = {}
    for name in known:
        for pair in sorted(_pairs(name)):
            by_pair.setdefault(pair, []).append(name)
    return by_pair, {name: len(_pairs(name)) for name in known}


@functools.cache
def _further_in(kind: type[Struct]) -> Mapping[str, Path]:
    """Fields of the fields, each with its path; of two with the same name the first."""
    found: dict[str, Path] = {}
    for outer, hint in fields_of(kind).items():
        inside = shape_of(hint).kind
        for inner in () if inside is None else fields_of(inside):
            found.setdefault(inner, (outer, inner))
    return found


def _fits(value: object, hint: Any) -> bool:
    if isinstance(value, _Number):
        if len(value) > 20 or not value.lstrip("-").isdigit():
            return False
        value = int(value)
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


_TYPES: Final = {
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}


def _expected(said: str, hint: Any) -> str:
    """What should have been there, in words."""
    kinds = shape_of(hint).alternatives
    for kind, meta in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return "one of " + ", ".join(str(member.value) for member in kind)
        if meta is not None and meta.pattern is not None and "matching regex" in said:
            return GRAMMARS.get(meta.pattern, f"text that matches {meta.pattern}")
    if said.startswith(("Expected `array` of length", "Expected `object` of length")):
        least_or_most = "at least" if ">=" in said else "at most"
        return f"{least_or_most} {said.rpartition(' ')[2]} entries"
    if said.startswith("Expected `str` of length"):
        least_or_most = "at least" if ">=" in said else "at most"
        return f"text of {least_or_most} {said.rpartition(' ')[2]} characters"
    for kind, meta in kinds:
        if kind is int:
            return "a whole number" + ("" if meta is None else _range(meta))
    words = said.partition("`")[2].partition("`")[0].split(" | ")
    return " or ".join(_TYPES[word] for word in words if word in _TYPES) or "another value"


def _range(meta: Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f" from {meta.ge} to {meta.le}"
    return "" if meta.ge is None else f" of at least {meta.ge}"
