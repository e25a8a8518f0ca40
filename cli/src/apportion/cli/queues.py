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

_FIELDS: Final = (
    "name",
    *(field for field in QueueUpsertRequested.__struct_fields__ if field not in {"queue", "dry_run"}),
)


def from_file(path: Path | None) -> tuple[QueueUpsertRequested, ...]:
    """The file's queues, each behind the one above it; the default one where there is no file or it names none.

    Raises SettingsInvalid.
    """
    if path is None:
        return DEFAULT
    with path.open("rb") as opened:
        tables = tomllib.load(opened).get("queue", [])
    parents = {content.get("parent") for content in tables}
    queues = [_queue(path, number, content, parents) for number, content in enumerate(tables, start=1)]
    return _from_above(path, queues) or DEFAULT


def _from_above(path: Path, queues: Sequence[QueueUpsertRequested]) -> tuple[QueueUpsertRequested, ...]:
    """Parents first, else in the file's order: a queue can't be asked for before the one above it."""
    names = [queue.queue for queue in queues]
    for name in names:
        if names.count(name) > 1:
            raise SettingsInvalid(
                where=f"{path} [[queue]]", key="name", expected="each name once", found=f"{name} twice"
            )
    left, found = list(queues), list[QueueUpsertRequested]()
    while left:
        waiting = {queue.queue for queue in left}
        ready = [queue for queue in left if queue.parent not in waiting]
        if not ready:
            circle = ", ".join(sorted(waiting))
            raise SettingsInvalid(
                where=f"{path} [[queue]]",
                key="parent",
                expected="no queue above itself",
                found=f"a circle among {circle}",
            )
        found += ready
        left = [queue for queue in left if queue not in ready]
    return tuple(found)


def _queue(path: Path, number: int, content: dict[str, Any], parents: set[object]) -> QueueUpsertRequested:
    where = f"{path} [[queue]] number {number}"
    for key in content:
        if key not in _FIELDS:
            raise SettingsInvalid(where=where, key=key, expected=f"one of {', '.join(_FIELDS)}", found="another key")
    # Jobs go to queues that no other is below: those alone need somebody who may submit.
    for key in ("name",) if content.get("name") in parents else ("name", "tenants"):
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
