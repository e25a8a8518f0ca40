"""The queues that `up` asks for: from ``[[queue]]`` in apportion.toml, or a default. They are wishes like any other."""

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from apportion.contracts.codec import Message, encode_body, encode_wish
from apportion.contracts.events import QueueUpsertRequested
from apportion.contracts.ids import OPERATOR, PoolId
from apportion.runtime.settings import SettingsInvalid

DEFAULT: Final = (
    QueueUpsertRequested(queue="main", tenants=("default",), reason="no apportion.toml names queues: the default one"),
)

_FIELDS: Final = ("name", "tenants", "limit_compute_milli", "limit_memory_mib", "limit_jobs", "reason")
_REQUIRED: Final = ("name", "tenants")


def from_file(path: Path | None) -> tuple[QueueUpsertRequested, ...]:
    """The file's queues; the default one where there is no file or it names none. Raises SettingsInvalid."""
    if path is None:
        return DEFAULT
    with path.open("rb") as opened:
        tables = tomllib.load(opened).get("queue", [])
    return tuple(_queue(path, number, content) for number, content in enumerate(tables, start=1)) or DEFAULT


def _queue(path: Path, number: int, content: dict[str, Any]) -> QueueUpsertRequested:
    where = f"{path} [[queue]] number {number}"
    for key in content:
        if key not in _FIELDS:
            raise SettingsInvalid(where=where, key=key, expected=f"one of {', '.join(_FIELDS)}", found="another key")
    for key in _REQUIRED:
        if key not in content:
            raise SettingsInvalid(where=where, key=key, expected="a value", found="none")
    given = {("queue" if key == "name" else key): value for key, value in content.items()}
    try:
        return msgspec.convert(given, QueueUpsertRequested)
    except msgspec.ValidationError as err:
        expected, _, at = str(err).partition(" - at ")
        key = at.strip("`$.").replace("queue", "name", 1) if at else ""
        raise SettingsInvalid(
            where=where, key=key, expected=expected.removeprefix("Expected "), found="otherwise"
        ) from err


def wishes(pool: PoolId, queues: Sequence[QueueUpsertRequested], *, session: str) -> list[Message]:
    """The wishes that ask for them, in the operator's name; ``session`` makes their ids another start's."""
    return [
        encode_wish(
            pool,
            queue,
            tenant=OPERATOR,
            event_id=f"queue-{queue.queue}-{session}-{hashlib.sha256(encode_body(queue)).hexdigest()[:12]}",
            source="/apportion/up",
        )
        for queue in queues
    ]
