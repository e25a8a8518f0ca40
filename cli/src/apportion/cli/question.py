"""SQL on the event log, wherever it is: asked of the monitor while the pool runs, of the file while it doesn't.

Jobs, nodes and reasons are answered by SQL as well, so that what a command says is what an auditor would find.
"""

import re
from typing import Any, Final

from msgspec import Struct

from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.places import Place, log_file

ROWS_MAX: Final = 50_000
_JOB: Final = re.compile(r"^[a-z0-9_][a-z0-9_-]{0,62}/[a-z0-9_-]{1,63}$")


class Found(Struct, frozen=True, kw_only=True):
    """An answer: rows as mappings, and how fresh they are."""

    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    truncated: bool
    freshness: dict[str, Any]
    """What the answer covers: where it was asked, the log's last row, how old the copy is."""


async def ask_sql(place: Place, statement: str, *, limit: int = 1_000) -> Found:
    """The answer to one SELECT. Raises CommandFailed where it is refused or nobody has the log."""
    if place.note is not None or not log_file(place.data_dir, place.pool).exists():
        from apportion.cli.client import actor, ask, bus_of

        async with bus_of(place) as bus:
            answer = await ask(bus, "sql", {"statement": statement, "limit": limit, "actor": actor()})
        source = "monitor"
    else:
        from apportion.monitor.log import whole
        from apportion.monitor.sql import ask as ask_file

        answer = ask_file(whole(log_file(place.data_dir, place.pool)), statement, limit=limit)
        if "error" in answer:
            raise CommandFailed(str(answer["error"]["message"]), code=Exit.FAILURE)
        source = f"{log_file(place.data_dir, place.pool)} (the pool is not running)"
    columns = tuple(answer["columns"])
    freshness = {"source": source, **{k: v for k, v in answer.items() if k not in {"columns", "rows", "truncated"}}}
    return Found(
        columns=columns,
        rows=[dict(zip(columns, row, strict=True)) for row in answer["rows"]],
        truncated=bool(answer.get("truncated")),
        freshness=freshness,
    )


def literal(text: str) -> str:
    """The text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


async def job_named(place: Place, name: str) -> str:
    """The full id of the job that a person named: by its id, its name alone, or the beginning of either.

    Raises CommandFailed where there is none, or more than one.
    """
    if ("/" not in name and _JOB.match(f"x/{name}") is None) or ("/" in name and _JOB.match(name) is None):
        raise CommandFailed(f"{name!r} is no job id: expected <tenant>/<name>", code=Exit.USAGE)
    if "/" in name:
        exact = await ask_sql(place, f"SELECT 1 FROM events WHERE job_id = {literal(name)} LIMIT 1")  # noqa: S608  quoted
        if exact.rows:
            return name
    found = await ask_sql(
        place,
        "SELECT DISTINCT job_id FROM events WHERE job_id IS NOT NULL AND "  # noqa: S608  quoted
        f"(job_id = {literal(name)} OR starts_with(job_id, {literal(name)}) "
        f"OR starts_with(split_part(job_id, '/', 2), {literal(name)})) ORDER BY job_id",
        limit=21,
    )
    ids = [row["job_id"] for row in found.rows]
    named = [job for job in ids if name in {job, job.partition("/")[2]}]
    if len(named) == 1:
        return str(named[0])
    if len(ids) == 1:
        return str(ids[0])
    if not ids:
        raise CommandFailed(
            f"no job {name!r} in pool {place.pool}", code=Exit.NOT_FOUND, hint="`apportion jobs --all` lists every job."
        )
    shown = ", ".join(ids[:8]) + (" …" if len(ids) > 8 else "")
    raise CommandFailed(f"{name!r} names several jobs: {shown}", code=Exit.USAGE, hint="Give more of the id.")
