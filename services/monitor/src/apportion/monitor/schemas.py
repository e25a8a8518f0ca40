"""The contract as the monitor serves it: every event's JSON Schema, and the pool as an AsyncAPI document.

Both are made from the structs that this process decodes with, once, so that what is served is what is meant.
"""

import functools
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from apportion.contracts import schema

_SCHEMA: Final = "application/schema+json"
_JSON: Final = "application/json"


@functools.cache
def schemas() -> Mapping[str, schema.Schema]:
    """Each event version's JSON Schema, by its name on the wire."""
    return schema.schemas()


@functools.cache
def asyncapi() -> schema.Schema:
    """The AsyncAPI document."""
    return schema.asyncapi()


def pages() -> dict[str, tuple[str, bytes]]:
    """What is served over HTTP: content type and body by path.

    ``/schemas`` names what there is; the rest are the documents' files, byte for byte.
    """
    found = {
        f"/{path}": (_JSON if path == "asyncapi.json" else _SCHEMA, text.encode())
        for path, text in schema.files().items()
    }
    return {"/schemas": (_JSON, msgspec.json.encode(listed()) + b"\n"), **found}


def listed() -> dict[str, Any]:
    """Which schemas there are, and where over HTTP."""
    return {"schemas": {name: f"/schemas/{name}.json" for name in schemas()}, "asyncapi": "/asyncapi.json"}
