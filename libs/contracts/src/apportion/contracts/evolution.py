"""How published events change: upgrades of old versions, and whether a schema still keeps what an older one promised.

A new optional field keeps the version. Anything else is a new version, with an upgrade here: one pure step from a
version to the next, without any rule of business in it. Steps are chained, so that each is written once and for ever.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from msgspec import Struct

Document: TypeAlias = dict[str, Any]


class Upcast(Struct, frozen=True):
    """One step: what the next version is called, and its document from this version's."""

    to: str
    step: Callable[[Document], Document]


Upcasts: TypeAlias = Mapping[str, Upcast]

UPCASTS: Final[Upcasts] = {}
"""By the name of the old version, such as ``JobRequested.v1``. Empty as long as every type is in its first version."""


def upcast(name: str, document: Document, upcasts: Upcasts = UPCASTS) -> tuple[str, Document]:
    """The newest version's name and document; the given document stays as it is."""
    while (step := upcasts.get(name)) is not None:
        document = {**step.step(dict(document)), "type": step.to}
        name = step.to
    return name, document


def newest(name: str, upcasts: Upcasts = UPCASTS) -> str:
    """The version that a version is upgraded to in the end."""
    while (step := upcasts.get(name)) is not None:
        name = step.to
    return name


# Schemas ------------------------------------------------------------------------------------------------------------

_INFORMATION: Final = frozenset({"title", "description", "$id", "$schema", "$comment", "examples"})
_LOWER: Final = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_UPPER: Final = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})


def breaking_changes(released: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What of ``current`` breaks the promise of ``released``, one line each; empty where the version may stay.

    A document that the released schema takes must still be taken and mean the same, so that limits may widen, enums
    may grow, and optional fields may be added. A limit that narrows, a field that goes, is renamed, becomes required,
    or has another type, unit, pattern or default, does break it.
    """
    return list(_breaks(_resolved(released, released), _resolved(current, current), "$"))


def _resolved(node: Any, root: Mapping[str, Any]) -> Any:
    """The schema with its references put in place; no event's type refers to itself."""
    if isinstance(node, Mapping):
        if "$ref" in node:
            target: Any = root
            for part in str(node["$ref"]).removeprefix("#/").split("/"):
                target = target[part]
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return {**_resolved(target, root), **_resolved(rest, root)}
        return {key: _resolved(value, root) for key, value in node.items() if key != "$defs"}
    if isinstance(node, list):
        return [_resolved(value, root) for value in node]
    return node


def _breaks(old: Any, new: Any, path: str) -> Iterator[str]:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        if old != new:
            yield f"{path}: {old!r} became {new!r}"
        return
    for key in sorted({*old, *new} - _INFORMATION):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        match key:
            case "properties":
                yield from _property_breaks(before or {}, after or {}, path)
            case "required":
                for name in sorted(set(after or ()) - set(before or ())):
                    yield f"{path}.{name}: it is required now"
                for name in sorted(set(before or ()) - set(after or ())):
                    yield f"{path}.{name}: it was always there, and may be missing now"
            case "enum":
                for value in sorted(set(before or ()) - set(after or ()), key=str):
                    yield f"{path}: {value!r} is no longer a value"
            case "anyOf":
                yield from _union_breaks(before or [], after or [], path)
            case _ if key in _LOWER and (after is None or (before is not None and after < before)):
                continue
            case _ if key in _UPPER and (after is None or (before is not None and after > before)):
                continue
            case _:
                yield from _breaks(before, after, f"{path}/{key}")


def _property_breaks(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, schema in before.items():
        if name not in after:
            yield f"{path}.{name}: the field is gone"
        else:
            yield from _breaks(schema, after[name], f"{path}.{name}")


def _union_breaks(before: list[Any], after: list[Any], path: str) -> Iterator[str]:
    """Each old alternative must be found again: unchanged, or as one that takes at least as much."""
    for index, schema in enumerate(before):
        if not any(not list(_breaks(schema, each, path)) for each in after):
            yield f"{path}/anyOf/{index}: the alternative is gone or takes less"
