"""What may stand at a place of an event: the types of a hint taken apart once, for those who walk along values."""

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct


@functools.cache
def fields_of(kind: type[Struct]) -> Mapping[str, Any]:
    """A struct's fields and their types."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


class Shape(Struct, frozen=True):
    """What may stand at a place: the types of a union, null left out, and what each of them holds."""

    alternatives: tuple[tuple[Any, Meta | None], ...]
    kind: type[Struct] | None = None
    """The struct among them; objects that are none have ``names`` and ``values``."""
    names: Any = object
    values: Any = object
    items: Any = object
    """Of an array."""


_SHAPES: Final[dict[int, tuple[Any, Shape]]] = {}
"""By identity: hashing a type of `typing` takes longer than all else here. The hint is held, so that its id stays."""


def shape_of(hint: Any) -> Shape:
    """The shape of a type hint."""
    known = _SHAPES.get(id(hint))
    if known is None:
        known = _SHAPES[id(hint)] = (hint, _made(tuple(_each_alternative(hint))))
    return known[1]


def _made(alternatives: tuple[tuple[Any, Meta | None], ...]) -> Shape:
    structs = (kind for kind, _ in alternatives if isinstance(kind, type) and issubclass(kind, Struct))
    objects = (typing.get_args(kind) for kind, _ in alternatives if typing.get_origin(kind) is dict)
    arrays = (typing.get_args(kind)[0] for kind, _ in alternatives if typing.get_origin(kind) is tuple)
    names, values = next(objects, (object, object))
    return Shape(alternatives, next(structs, None), names, values, next(arrays, object))


def _each_alternative(hint: Any) -> Iterator[tuple[Any, Meta | None]]:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *metas = typing.get_args(hint)
        meta = next((each for each in metas if isinstance(each, Meta)), None)
        for inner, own in _each_alternative(base):
            yield inner, own or meta
    elif origin in {types.UnionType, typing.Union}:
        for each in typing.get_args(hint):
            if each is not type(None):
                yield from _each_alternative(each)
    else:
        yield hint, None
