"""Why bytes are no valid wish, in the terms of a refusal: code, field, what was expected, and what was found.

Runs where decoding failed, and where a body decodes but reads differently elsewhere: JSON lets a name occur twice and
doesn't say which one counts, and ``-0`` is a whole number to some readers only. Nothing here raises for any bytes.
"""

import functools
import itertools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from apportion.contracts.causes import Refusal
from apportion.contracts.fields import GRAMMARS

DEPTH_MAX: Final = 32
LARGE_BYTES: Final = 4096
MANY_NAMES: Final = 256
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
_ENCODER: Final = msgspec.json.Encoder()
_MINUS_ZERO: Final = re.compile(rb"-0\s*[,}\]]")
_DIGITS: Final = bytes.maketrans(b"123456789eE", b"000000000..")
"""Makes a fraction or an exponent read ``0.``; text may look the same, and is then read with care."""
_LONG: Final = b"0" * 18
"""A number of so many digits may be more than 64 bits hold."""
_TEXTS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NO_BRACKETS: Final = bytes(sorted(set(range(256)) - set(b"[]{}")))
_UNPRINTABLE: Final = re.compile(rb"\\[bfnrtu]")
_TAG_QUOTES: Final = 4
"""Of ``"type":"JobRequested.v1"``, which every event is written with."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def fault_of_event(body: bytes, event: Struct) -> Fault | None:
    """What is wrong with a body that decodes as ``event``; None where every reader finds the same good event in it.

    Names that occur twice, ``-0``, and the grammar of free text, which the decoder leaves to this.
    """
    quotes = body.count(b'"')
    is_plain = False
    if b"\\u" not in body and (b"-0" not in body or not _MINUS_ZERO.search(body)):
        # No quote is hidden in an escape, so that names and texts have as many when they are written anew, and fewer
        # where a repeated name is gone. An event is written without what equals a default: then as plain objects.
        written = _ENCODER.encode(event).count(b'"')
        if not body.startswith(b'{"type":'):
            written -= _TAG_QUOTES
        is_plain = written == quotes or _ENCODER.encode(_ANY.decode(body)).count(b'"') == quotes
    if not is_plain and isinstance(doubtful := parsed(body), Fault):
        return doubtful
    if body.isascii() and b"\x7f" not in body and (b"\\" not in body or not _UNPRINTABLE.search(body)):
        return None  # JSON has no other way to write a character that would not print
    return fault_of_text(event)


def fault_of_text(event: Struct) -> Fault | None:
    """The first free text in an event that doesn't match its grammar; None where all do."""
    return next(_bad_texts(event, type(event), ()), None)


def _bad_texts(value: object, hint: Any, path: Path) -> Iterator[Fault]:
    """Free text in a decoded value that doesn't match its grammar."""
    for kind, meta in _alternatives(hint):
        if kind is str:
            pattern = _free_text(meta)
            if pattern and isinstance(value, str) and not re.search(pattern, value):
                yield Fault(
                    code=Refusal.FIELD_INVALID, field=_written(path), expected=GRAMMARS[pattern], found=shown(value)
                )
        elif isinstance(kind, type) and issubclass(kind, Struct):
            if isinstance(value, kind):
                for name in _with_text(kind):
                    yield from _bad_texts(getattr(value, name), _hints(kind)[name], (*path, name))
        elif isinstance(value, dict):
            for name, item in value.items():
                yield from _bad_texts(item, _dict_hints(hint)[1], (*path, name))
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from _bad_texts(item, _item_hint(hint), (*path, index))


def _free_text(meta: Meta | None) -> str:
    """The grammar that the decoder doesn't check; empty where there is none."""
    extra = None if meta is None else meta.extra_json_schema
    return str(extra["pattern"]) if extra and "pattern" in extra else ""


@functools.cache
def _with_text(kind: type[Struct]) -> tuple[str, ...]:
    """Fields of the struct that hold free text somewhere."""
    return tuple(name for name, hint in _hints(kind).items() if _holds_text(hint))


def _holds_text(hint: Any) -> bool:
    for kind, meta in _alternatives(hint):
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

    Most refused requests are plain, and a refusal should cost no more than an admission. Numbers come as numbers: here
    they are whole and short, so that each is written in one way.
    """
    if _is_too_deep(body) or b"\\" in body or b"-0" in body:
        return None
    if not body.isascii() or not body.decode("ascii").isprintable():
        return None
    digits = body.translate(_DIGITS)
    if b"0." in digits or _LONG in digits:
        return None
    try:
        doc = _ANY.decode(body)
    except msgspec.MsgspecError:
        return None
    # A name that occurs twice leaves fewer quotes.
    if not isinstance(doc, dict) or _ENCODER.encode(doc).count(b'"') != body.count(b'"'):
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
            cut = value if len(value) <= SHOWN_MAX else value[:SHOWN_MAX] + "…"
            text = json.dumps(cut).replace("\\u2026", "…").replace("\x7f", "\\u007f")
            return text if len(text) <= 2 * SHOWN_MAX else text[: 2 * SHOWN_MAX - 1] + "…"
        case dict():
            return f"an object with {len(value)} fields"
        case list():
            return f"an array of {len(value)}"
        case _:
            return json.dumps(value, default=repr)[:SHOWN_MAX]


def _written(path: Path) -> str:
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


def fault_of_many(body: bytes, kind: type[Struct]) -> Fault | None:
    """Why a large body with very many names is no ``kind``, where it holds more of something than is allowed.

    The decoder checks each name before it counts them, which takes it 100 times as long.
    """
    if body.count(b'":') <= MANY_NAMES or (doc := _plainly_parsed(body)) is None:
        return None
    try:
        msgspec.convert(doc, kind)
    except msgspec.ValidationError as err:
        return _explained(doc, kind, str(err)) if "of length" in str(err) else None
    return None


def fault_of_value(doc: dict[str, object], kind: type[Struct], text: str) -> Fault:
    """The fault that ``msgspec.convert`` found in plain data, from its message."""
    return _explained(doc, kind, text)


_WHERE: Final = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[A-Za-z0-9_.\[\]]*)`$")
_STEP: Final = re.compile(r"\.?([A-Za-z0-9_]+)|\[(\d+|\.\.\.)\]")


@functools.lru_cache(maxsize=1024)
def _said_where(text: str) -> tuple[str, tuple[str, ...], bool]:
    """A decoder's message without its place, the steps to it, and whether it is about a name there. Most are alike."""
    where = _WHERE.search(text)
    if where is None:
        return text, (), False
    steps = tuple(match[1] or match[2] for match in _STEP.finditer(where["path"]))
    return text[: where.start()], steps, where["key"] is not None


def _explained(doc: dict[str, object], kind: type[Struct], text: str) -> Fault:
    if text.startswith("Object contains unknown field"):
        unknown = next(_unknown(doc, kind, ()), None)
        if unknown is not None:
            return unknown
    # A long message repeats a stranger's text, which is not worth keeping.
    said, steps, is_about_name = _said_where(text) if len(text) <= 2 * SHOWN_MAX else _said_where.__wrapped__(text)
    path, value, hint = _walked(doc, kind, steps)
    if said.startswith("Object missing required field"):
        name = said.partition("`")[2].rstrip("`")
        return Fault(code=Refusal.FIELD_MISSING, field=_written((*path, name)), expected="a value", found="nothing")
    if path == ("type",):
        return _wrong_type(kind, value)
    if is_about_name and isinstance(value, dict):
        key_hint = _dict_hints(hint)[0]
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
        if step != "..." and isinstance(value, dict) and (fields := _fields_of(hint, value)) is not None:
            path.append(step)
            hint, value = fields.get(step, object), value.get(step)
        elif isinstance(value, dict):
            inner = _dict_hints(hint)[1]
            key = next((name for name, item in value.items() if not _fits(item, inner)), "")
            path.append(key)
            hint, value = inner, value.get(key)
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            path.append(int(step))
            hint, value = _item_hint(hint), value[int(step)]
        else:
            break
    return tuple(path), value, hint


def _unknown(value: object, hint: Any, path: Path) -> Iterator[Fault]:
    """Fields that the contract doesn't have, in the order of the text."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, _item_hint(hint), (*path, index))
    if not isinstance(value, dict):
        return
    fields = _fields_of(hint, value)
    if fields is None:
        for name, item in value.items():
            yield from _unknown(item, _dict_hints(hint)[1], (*path, name))
        return
    for name, item in value.items():
        if name in fields:
            yield from _unknown(item, fields[name], (*path, name))
        elif name != "type" or path:
            yield Fault(
                code=Refusal.FIELD_UNKNOWN,
                field=_written((*path, name)),
                expected=_nearest(name, path, hint, tuple(fields)),
                found=shown(name),
            )


def _nearest(name: str, path: Path, hint: Any, fields: tuple[str, ...]) -> str:
    """The name that was likely meant, here or further in; else all that could be."""
    cut = name[:64].lower().replace("-", "_")
    near = _closest(cut, fields, 50)
    if near is not None:
        return f"a field of the contract, perhaps {_written((*path, near))}"
    for kind, _ in _alternatives(hint):
        if isinstance(kind, type) and issubclass(kind, Struct):
            further = _further_in(kind)
            near = _closest(cut, tuple(further), 70)
            if near is not None:
                return f"a field of the contract, perhaps {_written((*path, *further[near]))}"
    return "one of " + ", ".join(sorted(fields))


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
    for outer, hint in _hints(kind).items():
        for each, _ in _alternatives(hint):
            if isinstance(each, type) and issubclass(each, Struct):
                for inner in _hints(each):
                    found.setdefault(inner, (outer, inner))
    return found


# Types at a path ----------------------------------------------------------------------------------------------------


@functools.cache
def _hints(kind: type[Struct]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def _alternatives(hint: Any) -> tuple[tuple[Any, Meta | None], ...]:
    """The types of a union, null left out, each with its constraints."""
    known = _KNOWN.get(id(hint))
    if known is None:
        known = _KNOWN[id(hint)] = (hint, tuple(_each_alternative(hint)))
    return known[1]


_KNOWN: Final[dict[int, tuple[Any, tuple[tuple[Any, Meta | None], ...]]]] = {}
"""By identity: hashing a type of `typing` takes longer than all else here. The hint is held, so that its id stays."""


def _each_alternative(hint: Any) -> Iterator[tuple[Any, Meta | None]]:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *metas = typing.get_args(hint)
        meta = next((each for each in metas if isinstance(each, Meta)), None)
        for inner, own in _alternatives(base):
            yield inner, own or meta
    elif origin in {types.UnionType, typing.Union}:
        for each in typing.get_args(hint):
            if each is not type(None):
                yield from _alternatives(each)
    else:
        yield hint, None


def _fields_of(hint: Any, value: object) -> Mapping[str, Any] | None:
    """Fields and their types where the hint holds a struct and the value is an object."""
    if isinstance(value, dict):
        for kind, _ in _alternatives(hint):
            if isinstance(kind, type) and issubclass(kind, Struct):
                return _hints(kind)
    return None


def _dict_hints(hint: Any) -> tuple[Any, Any]:
    for kind, _ in _alternatives(hint):
        if typing.get_origin(kind) is dict:
            key, value = typing.get_args(kind)
            return key, value
    return object, object


def _item_hint(hint: Any) -> Any:
    for kind, _ in _alternatives(hint):
        if typing.get_origin(kind) is tuple:
            return typing.get_args(kind)[0]
    return object


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
    kinds = _alternatives(hint)
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
