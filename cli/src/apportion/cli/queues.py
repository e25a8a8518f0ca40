"""Policy as a file has it: ``[[queue]]`` and ``[[policy]]`` of apportion.toml, read as the wishes that ask for it."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from apportion.contracts import diagnosis
from apportion.contracts.events import PolicyUpsertRequested, QueueUpsertRequested
from apportion.runtime.settings import SettingsInvalid

DEFAULT: Final = (
    QueueUpsertRequested(queue="main", tenants=("default",), reason="no apportion.toml names queues: the default one"),
)
"""Asked for where no file names a queue and the pool has none of that name: nobody chose its limits."""

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
    given = {"reason": f"as {path.name} has it"}
    given |= {("queue" if key == "name" else key): value for key, value in content.items()}
    try:
        return msgspec.convert(given, QueueUpsertRequested)
    except msgspec.ValidationError as err:
        expected, _, at = str(err).partition(" - at ")
        key = at.strip("`$.").replace("queue", "name", 1) if at else ""
        raise SettingsInvalid(
            where=where, key=key, expected=expected.removeprefix("Expected "), found="otherwise"
        ) from err


_OF_A_POLICY: Final = tuple(field for field in PolicyUpsertRequested.__struct_fields__ if field != "dry_run")


def policies_from_file(path: Path | None) -> tuple[PolicyUpsertRequested, ...]:
    """The file's policies, the pool's or a tenant's each, in its order; none where there is no file.

    Raises SettingsInvalid.
    """
    if path is None:
        return ()
    with path.open("rb") as opened:
        tables = tomllib.load(opened).get("policy", [])
    found = tuple(_policy(path, number, content) for number, content in enumerate(tables, start=1))
    whose = [policy.for_tenant for policy in found]
    for tenant in whose:
        if whose.count(tenant) > 1:
            twice = f"{tenant or 'the pool, which leaves it out,'} twice"
            raise SettingsInvalid(where=f"{path} [[policy]]", key="for_tenant", expected="each once", found=twice)
    return found


def _policy(path: Path, number: int, content: dict[str, Any]) -> PolicyUpsertRequested:
    where = f"{path} [[policy]] number {number}"
    for key in content:
        if key not in _OF_A_POLICY:
            expected = f"one of {', '.join(_OF_A_POLICY)}"
            raise SettingsInvalid(where=where, key=key, expected=expected, found="another key")
    given = {"reason": f"as {path.name} has it", **content}
    try:
        return msgspec.convert(given, PolicyUpsertRequested)
    except msgspec.ValidationError as err:
        fault = diagnosis.fault_of(msgspec.json.encode(given), PolicyUpsertRequested, err)
        raise SettingsInvalid(where=where, key=fault.field, expected=fault.expected, found=fault.found) from err
