"""The contract as files: a JSON Schema of every event version, and one AsyncAPI document, made from the structs.

``python -m apportion.contracts.schema --write docs`` writes ``schemas/*.json`` and ``asyncapi.json``; ``--check docs``
says whether they are current. Schemas are JSON Schema 2020-12 and keep to what tools for draft-07 read as well.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import NODEFAULT

from apportion.contracts import codec, subjects
from apportion.contracts import events as ev
from apportion.contracts.ids import Author, PoolId, TenantId

VERSION: Final = "1"
"""Of the contract as a whole; events carry their own."""

PROFILE: Final = (
    f"On the wire: one JSON object in UTF-8 of at most {codec.EVENT_BYTES_MAX} bytes and {codec.DEPTH_MAX} levels. "
    "Numbers are written without a fraction, an exponent and -0; no name occurs twice in an object; no byte order "
    "mark, no lone surrogate. A JSON Schema can't say this, and messages that differ are refused."
)

Schema = dict[str, Any]


def event_schema(kind: type[ev.Event]) -> Schema:
    """The JSON Schema of one event version, complete in itself."""
    (reference,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    name = ev.type_name(kind)
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:apportion:{name}",
        "$comment": PROFILE,
        **reference,
        "$defs": {part: _as_read(schema) for part, schema in sorted(parts.items())},
    }
    # As a reader of the file has it: arrays are lists, and nothing else than JSON knows.
    return dict(json.loads(json.dumps(found)))


def _as_read(schema: Schema) -> Schema:
    """The schema of a struct as the decoder reads it: the tag may be left out, since envelope or subject say it too."""
    properties = schema.get("properties", {})
    if list(properties)[:1] != ["type"] or "enum" not in properties["type"]:
        return schema
    required = [name for name in schema.get("required", ()) if name != "type"]
    return {**schema, "required": required}


def schemas() -> dict[str, Schema]:
    """Every event version's schema, by its name on the wire."""
    return {ev.type_name(kind): event_schema(kind) for kind in (*ev.WISHES, *ev.FACTS)}


# AsyncAPI -----------------------------------------------------------------------------------------------------------


def asyncapi() -> Schema:
    """The pool as an AsyncAPI application: it receives wishes and sends facts."""
    kinds = (*ev.WISHES, *ev.FACTS)
    _, parts = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    channels: dict[str, Schema] = {}
    operations: dict[str, Schema] = {}
    for kind in kinds:
        name = kind.__name__
        channels[name] = _channel(kind)
        is_wish = issubclass(kind, ev.Wish)
        operations[f"{'receive' if is_wish else 'send'}{name}"] = {
            "action": "receive" if is_wish else "send",
            "channel": {"$ref": f"#/channels/{name}"},
            "summary": _first_line(kind),
        }
    return {
        "asyncapi": "3.1.0",
        "info": {
            "title": "Apportion",
            "version": VERSION,
            "description": (
                "Wishes are what anyone with permission asks of a pool of GPUs; facts are what its services state. "
                "Messages are CloudEvents 1.0 on NATS JetStream, in binary or structured mode. " + PROFILE
            ),
        },
        "defaultContentType": "application/json",
        "servers": {
            "local": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "The bus of one machine's pool."}
        },
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {kind.__name__: _message(kind) for kind in kinds},
            "messageTraits": {"cloudevent": {"headers": _HEADERS}},
            "schemas": {part: _without_siblings(_as_read(schema)) for part, schema in sorted(parts.items())},
        },
    }


_HEADERS: Final[Schema] = {
    "type": "object",
    "required": ["ce-specversion", "ce-id", "ce-source", "ce-type"],
    "properties": {
        "ce-specversion": {"type": "string", "enum": ["1.0"]},
        "ce-id": {"type": "string", "description": "Unique in its source: a repeat gets the first answer."},
        "ce-source": {"type": "string", "description": "Which system sent it."},
        "ce-type": {"type": "string", "description": "io.apportion.<type>, its version included."},
        "ce-expirytime": {"type": "string", "description": "RFC 3339: a wish that is answered later is refused."},
        "ce-actor": {"type": "string", "description": "Who asks, as the publisher says it."},
        "ce-correlationid": {"type": "string", "description": "The job, for the whole of its story."},
        "ce-causationid": {"type": "string", "description": "Id of the event that led to this one."},
        "traceparent": {"type": "string", "description": "W3C trace context."},
        "Nats-Msg-Id": {"type": "string", "description": "Tenant, source and id: the bus drops what it just stored."},
    },
}

_ABOUT: Final[Mapping[str, str]] = {
    "pool": "The pool that is spoken to.",
    "tenant": "Whose wish or job; the bus checks who may publish for whom.",
    "job": "The tenant's name for the job.",
    "replica": "Which replica of the job, from 0.",
    "attempt": "Which attempt of the job, from 1.",
    "node": "The node.",
    "queue": "The queue.",
    "author": "The service that states it.",
}


def _channel(kind: type[ev.Event]) -> Schema:
    address = _address(kind)
    stream = "WISHES" if issubclass(kind, ev.Wish) else "FACTS"
    return {
        "address": address,
        "messages": {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"}},
        "parameters": {name: {"description": _ABOUT[name]} for name in _parameters(address)},
        "x-jetstream": {"stream": f"APPORTION_<POOL>_{stream}", "deduplication": "Nats-Msg-Id"},
    }


def _parameters(address: str) -> Iterator[str]:
    for piece in address.split("{")[1:]:
        yield piece.partition("}")[0]


_PLACEHOLDERS: Final[Mapping[str, str]] = {
    "job_id": "{tenant}/{job}",
    "run_id": "{tenant}/{job}/{replica}/{attempt}",
    "node_id": "{node}",
    "tenant": "{tenant}",
    "queue": "{queue}",
}


def _address(kind: type[ev.Event]) -> str:
    """Where events of this type are published, with parameters in braces."""
    pool = PoolId("{pool}")
    if issubclass(kind, ev.Wish):
        return subjects.wish(pool, TenantId("{tenant}"), kind)
    assert issubclass(kind, ev.Fact)
    said = getattr(kind, "AUTHOR", Author("{author}"))
    author = Author("agent-{node}") if said == ev.AGENT else said
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__
    required = [
        name
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True)
        if default is NODEFAULT
    ]
    values: dict[str, Any] = {
        name: _PLACEHOLDERS.get(name) for name in (*names[: len(names) - len(defaults)], *required)
    }
    # Structs check nothing when they are made in code, so that placeholders can stand where ids would.
    address = subjects.fact(pool, author, kind(**values))
    return address.replace("._tenant_", ".{tenant}")


def _message(kind: type[ev.Event]) -> Schema:
    return {
        "name": f"{codec.TYPE_PREFIX}{ev.type_name(kind)}",
        "title": ev.type_name(kind),
        "summary": _first_line(kind),
        "contentType": "application/json",
        "traits": [{"$ref": "#/components/messageTraits/cloudevent"}],
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }


def _first_line(kind: type[ev.Event]) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _without_siblings(node: Any) -> Any:
    """The schema without what stands beside a reference: readers of draft-07 pass over it."""
    if isinstance(node, dict):
        if "$ref" in node:
            return {"$ref": node["$ref"]}
        return {key: _without_siblings(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_siblings(value) for value in node]
    return node


# Files --------------------------------------------------------------------------------------------------------------


def files() -> dict[str, str]:
    """Every generated file's text, by its path in the folder of documents."""
    found = {f"schemas/{name}.json": _text(schema) for name, schema in schemas().items()}
    return {**found, "asyncapi.json": _text(asyncapi())}


def _text(schema: Schema) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def stale(folder: Path) -> list[str]:
    """Files in ``folder`` that differ from the code, are missing, or describe what is gone."""
    wanted = files()
    there = {f"schemas/{path.name}" for path in (folder / "schemas").glob("*.json")}
    differing = {name for name, text in wanted.items() if not _is(folder / name, text)}
    return sorted(differing | (there - wanted.keys()))


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text("utf-8") == text


def write(folder: Path) -> list[str]:
    """Make ``folder`` current; the files that changed."""
    changed = stale(folder)
    wanted = files()
    for name in changed:
        path = folder / name
        if name in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[name], "utf-8")
        else:
            path.unlink()
    return changed


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or say which are not current."""
    parser = argparse.ArgumentParser(prog="python -m apportion.contracts.schema", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="DIR", help="write what is not current")
    what.add_argument("--check", type=Path, metavar="DIR", help="exit with 1 where something is not current")
    options = parser.parse_args(arguments)
    if options.write is not None:
        for name in write(options.write):
            sys.stdout.write(f"wrote {options.write / name}\n")
        return 0
    found = stale(options.check)
    for name in found:
        sys.stderr.write(f"{options.check / name} differs from the code: write it anew and commit the result\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
