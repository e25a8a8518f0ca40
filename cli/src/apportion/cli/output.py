"""What commands print: tables for people, JSON for programs. Results on stdout, everything else on stderr.

Columns and their order are stable, and no id is shortened. In JSON an instant that ends in ``_at`` is ns since the Unix
epoch, as everywhere; what SQL gives as a timestamp is RFC 3339 in UTC.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import click

FORMATS: Final = ("table", "wide", "json", "jsonl", "name")
SCHEMA_VERSION: Final = 1
_NS_PER_S: Final = 1_000_000_000


def output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``-o table|wide|json|jsonl|name`` and its alias ``--json``."""
    command = click.option("--json", "output", flag_value="json", help="The same as -o json.")(command)
    return click.option(
        "-o",
        "--output",
        "output",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="How to print the result.",
    )(command)


def say(text: str) -> None:
    """A message for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def is_plain(stream: TextIO) -> bool:
    """True where no colours shall be used: not a terminal, ``NO_COLOR``, or ``TERM=dumb``."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    kind: str,
    output: str,
    columns: Sequence[str],
    wide: Sequence[str] = (),
    name: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """A list of things. ``columns`` are shown in a table, ``wide`` too with ``-o wide``; JSON has every field.

    JSON is one object: ``{"schema": "apportion.<kind>/1", "<kind>": [...], **extra}``; jsonl is one object a line.
    """
    match output:
        case "json":
            print(to_json({"schema": f"apportion.{kind}/{SCHEMA_VERSION}", kind: list(rows), **(extra or {})}))
        case "jsonl":
            for row in rows:
                print(to_json(row, indent=None))
        case "name":
            for row in rows:
                print(row[name or columns[0]])
        case _:
            print(table(rows, [*columns, *(wide if output == "wide" else ())]))


def print_object(content: Mapping[str, Any], *, kind: str, output: str, text: Callable[[], str]) -> None:
    """One thing: as JSON with its schema, or as ``text()`` for people."""
    if output in {"json", "jsonl"}:
        indent = 2 if output == "json" else None
        print(to_json({"schema": f"apportion.{kind}/{SCHEMA_VERSION}", **content}, indent=indent))
    else:
        print(text())


def to_json(content: object, *, indent: int | None = 2) -> str:
    """JSON with readable instants; what JSON has no form for is written as text."""
    return json.dumps(content, indent=indent, default=_plain, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows under their columns' names in capitals; numbers to the right, the last column as long as it is.

    >>> print(table([{"job": "acme/a", "gpus": 2}, {"job": "acme/bb", "gpus": 10}], ["job", "gpus"]))
    JOB      GPUS
    acme/a      2
    acme/bb    10
    """
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    heads = [column.upper().replace("_", "-") for column in columns]
    is_number = [
        bool(rows)
        and all(isinstance(row.get(column), int | float | None) and row.get(column) is not True for row in rows)
        for column in columns
    ]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(columns))]
    lines = []
    for line in [heads, *cells]:
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def cell(value: object) -> str:
    """A value in a table: empty for nothing, compact JSON for structures, no control characters."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict | list | tuple):
        return printable(to_json(value, indent=None))
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.") + f"{value.microsecond // 1000:03d}"
    return printable(str(value))


def printable(text: str) -> str:
    r"""The text with control characters as escapes, so that what a stranger sent can't steer a terminal.

    >>> print(printable("a" + chr(27) + "[31m"))
    a\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def ago(instant: int | None, now: int | None = None) -> str:
    """How long ago an instant (ns since the Unix epoch) was, in one or two units.

    >>> ago(0, 95 * 10**9)
    '1m35s'
    """
    if instant is None:
        return ""
    return duration_text(((time.time_ns() if now is None else now) - instant) / _NS_PER_S)


def duration_text(seconds: float) -> str:
    """A duration for people.

    >>> [duration_text(s) for s in (0.25, 12.3, 95, 7260, 200_000)]
    ['0.2s', '12s', '1m35s', '2h1m', '2d7h']
    """
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"


def clock(seconds: float) -> str:
    """A moment of a story: minutes and seconds since it began.

    >>> clock(75.9)
    '01:15'
    """
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def width_of_terminal() -> int:
    """Columns that a line may have."""
    return shutil.get_terminal_size((120, 24)).columns
