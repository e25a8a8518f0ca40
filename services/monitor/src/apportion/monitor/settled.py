"""What a copy of the log knows of jobs that are over, so that heavy views answer at once. Needs a connection to ask.

A job is over once it has ended and nothing is held for it: what SETTLED views say of it can't change any more. A copy
keeps their rows for jobs that are over (``kept_<view>``), and the events of all others (``open_events``); it answers
with the former and with what the view makes of the latter. Both are derived, rebuilt freely, and of no use to a version
with other views. Each view is written once, over ``events``; here it is read over other tables of the same shape.
"""

# ruff: noqa: S608 - what is put into SQL text here is our own names and numbers; values are always parameters

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

SETTLED: Final = ("v_job", "v_run", "v_pending_now", "v_waits", "v_usage", "v_orphans", "v_contradictions")
"""Views whose rows are each of one job, named by job_id, and follow from its events and those of POOL_TYPES alone."""
MOMENTS: Final = ("v_double_slice",)
"""Views whose rows are each of a moment, named by fact_seq, and follow from what was held at it or after it.

What is held is of jobs that are not over: so a copy finds these rows among the open events as far as it has settled
them, and keeps them, too.
"""
SETTLE_EVERY: Final = 5_000
"""So many new events before it is looked which jobs are over: until then they are read with the others."""
OPEN: Final = "open_events"
"""The table that tells a copy from a log."""
CHUNK: Final = 250_000
"""Rows that are gone through at once where a copy is new."""

_POOL_TYPES: Final = ("NodeRegistered", "NodeFenced")
"""Of no job, and part of what is said of many."""
_PASSING_TYPES: Final = (
    "JobDuplicate", "LateFactIgnored", "WishJudged", "WishRejected", "LegalHoldPlaced", "PayloadEraseOrdered"
)  # fmt: skip
"""Facts that name a job and change none of these views: a job that is over stays so."""
_TERMINAL_TYPES: Final = ("JobSucceeded", "JobFailed", "JobCancelled", "JobExpired")
_NAMES: Final = re.compile(r"(?<![.\w])(events|v_[a-z_]+)\b")
_KIND: Final = "split_part(type, '.', 1)"
_COUNTS: Final = (
    f"(job_id IS NOT NULL OR run_id IS NOT NULL OR {_KIND} IN {_POOL_TYPES}) AND {_KIND} NOT IN {_PASSING_TYPES}"
)
_CLOSING: Final = (
    "SELECT * FROM replica.open_events WHERE job_id IN (SELECT job_id FROM closing) "
    f"OR (job_id IS NULL AND {_KIND} IN {_POOL_TYPES})"
)


class Connection(Protocol):
    """What can be asked."""

    def execute(self, query: str, parameters: Sequence[Any] = ..., /) -> Any:
        """Anything with fetchall()."""


def needed(names: Sequence[str], views: Mapping[str, str]) -> list[str]:
    """These views and those that they build on, in the order of ``views``, in which they build on each other."""
    wanted = set(names)
    for name in reversed(list(views)):
        if name in wanted:
            wanted.update(found for found in _NAMES.findall(views[name]) if found in views)
    return [name for name in views if name in wanted]


def joined(names: Sequence[str], views: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and text of all views that these take, in a copy that keeps settled rows, in the order to make them in."""
    kept = (*SETTLED, *MOMENTS)
    # What a kept view builds on is asked for by the open one alone, unless somebody else names it.
    direct = needed(names, {name: "" if name in kept else text for name, text in views.items()})
    open_ones = [name for name in kept if name in direct]
    if open_ones:
        yield from _over("open", "SELECT * FROM open_events", open_ones, views)
    for name in direct:
        text = views[name]
        if name in kept:
            text = f"SELECT * FROM kept_{name} UNION ALL SELECT * FROM {name}_open"
        if name in MOMENTS:
            text += " WHERE fact_seq > (SELECT CAST(value AS BIGINT) FROM meta WHERE key = 'settled_facts')"
        yield name, text


def _over(suffix: str, events: str, names: Sequence[str], views: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """These views over other events, each name with a suffix."""
    yield f"events_{suffix}", events
    for name in needed(names, views):
        yield f"{name}_{suffix}", _NAMES.sub(lambda found: f"{found[1]}_{suffix}", views[name])


def settle(connection: Connection, views: Mapping[str, str], *, digest: str, last: int, columns: str) -> None:
    """Bring what the copy that is attached as ``replica`` keeps up to its row ``last``, in the transaction it is in.

    ``digest`` names the views, ``columns`` are those of ``events`` as they are made. Raises what the connection raises.
    """
    notes = dict(connection.execute("SELECT key, value FROM replica.meta").fetchall())
    is_new = notes.get("kept") != digest
    if is_new:
        _begin(connection, views, digest=digest, columns=columns)
        notes.update(settled="0", taken="0")
    taken = int(notes["taken"])
    if last - int(notes["settled"]) < SETTLE_EVERY and not is_new:
        _take(connection, taken, last)
    else:
        while taken < last:
            upto = min(last, taken + CHUNK)
            _take(connection, taken, upto)
            _close(connection, views, upto, columns)
            taken = upto
        _note(connection, "settled", last)
    _note(connection, "taken", last)


def forget(connection: Connection, tables: Collection[str]) -> None:
    """Make a log of a copy: it has none of what was kept, whichever version kept it. ``tables`` are those it has."""
    for name in tables:
        if name == OPEN or name.startswith("kept_"):
            connection.execute(f'DROP TABLE "{name}"')
    connection.execute("DELETE FROM meta WHERE key IN ('kept', 'settled', 'settled_facts', 'taken')")


def _note(connection: Connection, key: str, value: int | str) -> None:
    connection.execute("DELETE FROM replica.meta WHERE key = ?", [key])
    connection.execute("INSERT INTO replica.meta VALUES (?, ?)", [key, str(value)])


def _begin(connection: Connection, views: Mapping[str, str], *, digest: str, columns: str) -> None:
    connection.execute(f"CREATE OR REPLACE TABLE replica.open_events({columns})")
    connection.execute("CREATE OR REPLACE TEMP TABLE closing(job_id VARCHAR)")
    for name, text in _over("closing", _CLOSING, (*SETTLED, *MOMENTS), views):
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {text}")
    for name in (*SETTLED, *MOMENTS):
        connection.execute(f"CREATE OR REPLACE TABLE replica.kept_{name} AS SELECT * FROM {name}_closing LIMIT 0")
    _note(connection, "kept", digest)
    _note(connection, "settled_facts", 0)


def _take(connection: Connection, after: int, last: int) -> None:
    """Put new events with the open ones; where they are of a job that was over, all of its events."""
    new = f"ordinal > {after} AND ordinal <= {last}"
    over = "SELECT job_id FROM replica.kept_v_job"
    rows = "INSERT INTO replica.open_events BY NAME SELECT * EXCLUDE (recorded) FROM replica.events"
    found = connection.execute(
        f"SELECT DISTINCT job_id FROM replica.events WHERE {new} AND stream = 'facts' AND {_COUNTS} "
        f"AND job_id IN ({over})"
    ).fetchall()
    for (job_id,) in found:
        for name in SETTLED:
            connection.execute(f"DELETE FROM replica.kept_{name} WHERE job_id = ?", [job_id])
        connection.execute(f"{rows} WHERE job_id = ? AND ordinal <= {after} AND {_COUNTS} ORDER BY ordinal", [job_id])
    # Who asks for a job that is over once more, changes nothing of it.
    connection.execute(
        f"{rows} WHERE {new} AND {_COUNTS} AND (job_id IS NULL OR job_id NOT IN ({over})) ORDER BY ordinal"
    )


def _close(connection: Connection, views: Mapping[str, str], last: int, columns: str) -> None:
    """Keep the rows of jobs that are over and of moments that are past, and let the events of those jobs go."""
    for name, text in _over("open", "SELECT * FROM replica.open_events", ("v_run", *MOMENTS), views):
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {text}")
    for name in MOMENTS:
        connection.execute(
            f"INSERT INTO replica.kept_{name} SELECT * FROM {name}_open "
            "WHERE fact_seq > (SELECT CAST(value AS BIGINT) FROM replica.meta WHERE key = 'settled_facts')"
        )
    connection.execute("CREATE OR REPLACE TEMP TABLE closing(job_id VARCHAR)")
    connection.execute(
        f"INSERT INTO closing SELECT DISTINCT job_id FROM replica.open_events WHERE {_KIND} IN {_TERMINAL_TYPES} "
        f"AND job_id IN (SELECT job_id FROM replica.open_events WHERE {_KIND} = 'JobAdmitted' AND job_id IS NOT NULL) "
        "EXCEPT SELECT job_id FROM v_run_open WHERE freed_seq IS NULL"
    )
    for name, text in _over("closing", _CLOSING, SETTLED, views):
        view = name.removesuffix("_closing")
        if view in SETTLED:
            # Others build on it: once is enough.
            connection.execute(f"CREATE OR REPLACE TEMP TABLE {name}_rows AS {text}")
            connection.execute(f"INSERT INTO replica.kept_{view} SELECT * FROM {name}_rows")
            text = f"SELECT * FROM {name}_rows"  # noqa: PLW2901
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {text}")
    # Written anew, not deleted from: what is deleted in the transaction that wrote it is scanned for ever.
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE remaining AS SELECT * EXCLUDE (recorded) FROM replica.open_events "
        "WHERE job_id IS NULL OR job_id NOT IN (SELECT job_id FROM closing)"
    )
    connection.execute(f"CREATE OR REPLACE TABLE replica.open_events({columns})")
    connection.execute("INSERT INTO replica.open_events BY NAME SELECT * FROM remaining ORDER BY ordinal")
    facts = f"SELECT coalesce(max(stream_seq), 0) FROM replica.events WHERE stream = 'facts' AND ordinal <= {last}"
    _note(connection, "settled_facts", connection.execute(facts).fetchall()[0][0])
