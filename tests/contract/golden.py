"""One example of every released event, the bytes it had when it was released, and the schema it was released with.

``python -m tests.contract.golden`` writes those of types that have none yet; it never rewrites one. A type that was
never released may still change: then delete its two files first.
"""

import json
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from apportion.contracts import schema
from apportion.contracts.codec import encode_body
from apportion.contracts.events import FACTS, WISHES, Event, type_name
from apportion.contracts.fields import NAME

GOLDEN = Path(__file__).with_name("golden")
RELEASED = Path(__file__).with_name("released")

_TEXT = {
    "job_id": "acme/train-7",
    "original_job_id": "acme/train-7",
    "run_id": "acme/train-7/0/1",
    "runs": "acme/train-7/0/1",
    "node_id": "node-1",
    "device_uuid": "GPU-0a1b",
    "devices": "GPU-0a1b",
    "uuid": "GPU-0a1b",
    "tenant": "acme",
    "queue": "main",
    "image": "registry/team/train:1.2",
    "mig_profile": "1g.10gb",
    "min_compute_capability": "8.0",
    "numa": "strict",
    "external_uri": "https://example.org/jobs/7",
    "not_before": "2026-09-01T12:00:00Z",
    "deadline": "2026-09-02T12:00:00.5+02:00",
    "start": "2026-09-01T12:00:00Z",
    "end": "2026-09-02T12:00:00Z",
    "before": "2026-09-02T00:00:00Z",
    "since": "2026-09-01T00:00:00Z",
    "until": "2026-09-02T00:00:00Z",
    "stream": "wishes",
    "kind": "gpu",
    "actor": "user:alice",
    "currency": "EUR",
    "effective_at": "2026-09-01T12:00:00Z",
    "uri": "s3://bucket/job-7",
    "inputs": "s3://bucket/data",
    "min_driver": "550.54",
    "min_cuda": "12.4",
    "role": "viewer",
    "of": "jane",
    "public": "U" + "A" * 55,
}


def example(kind: type[Event]) -> Event:
    """An event with every field set to something valid that is not its default."""
    values = {field.name: _value(field.name, field.type) for field in _fields(kind)}
    if "Requested" in kind.__name__:
        values["job_id" if "job_id" in values else next(iter(values))] = (
            "train-7" if "job_id" in values else values[next(iter(values))]
        )
    return msgspec.convert(values, kind)


def _fields(kind: Any) -> tuple[Any, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _value(name: str, info: Any) -> Any:
    match info:
        case inspect.Metadata(type=inner):
            return _value(name, inner)
        case inspect.UnionType(types=types):
            return _value(name, next(t for t in types if not isinstance(t, inspect.NoneType)))
        case inspect.IntType():
            low = info.ge if info.ge is not None else 0
            high = info.le if info.le is not None else 1_000_000
            return max(low, min(high, 100 + sum(map(ord, name)) % 800))
        case inspect.BoolType():
            return True
        case inspect.StrType():
            text = _TEXT.get(name, name.replace("_", "-")[:60])
            # A tenant names its jobs without itself.
            return text.rpartition("/")[2] if info.pattern == NAME else text
        case inspect.EnumType(cls=cls):
            members: list[Enum] = list(cls)
            return members[-1].value
        case inspect.VarTupleType(item_type=item):
            return [_value(name, item)]
        case inspect.DictType(key_type=inspect.EnumType() as key, value_type=value):
            return {_value(name, key): _value("value", value)}
        case inspect.DictType(value_type=value):
            return {"LEVEL" if name == "env" else "level": _value("value", value)}
        case inspect.StructType(cls=cls):
            return {field.name: _value(field.name, field.type) for field in _fields(cls)}
        case _:
            raise AssertionError(f"no example for {name}: {info}")


def path_of(kind: type[Event]) -> Path:
    """Where the type's golden bytes are."""
    return GOLDEN / f"{type_name(kind)}.json"


def main() -> None:
    """Write what is missing."""
    GOLDEN.mkdir(exist_ok=True)
    RELEASED.mkdir(exist_ok=True)
    for kind in (*WISHES, *FACTS):
        name = type_name(kind)
        for path, content in (
            (path_of(kind), encode_body(example(kind))),
            (RELEASED / f"{name}.json", (json.dumps(schema.event_schema(kind), indent=1) + "\n").encode()),
        ):
            if not path.exists():
                path.write_bytes(content)
                print(f"wrote {path.parent.name}/{path.name}")


if __name__ == "__main__":
    main()
