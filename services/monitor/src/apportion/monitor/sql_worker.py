"""One question of a stranger, in a process of its own that can do nothing but read one file and answer.

The parent (sql.py) writes the question to standard input and reads the answer from standard output, both JSON. Before
anything of the stranger's is looked at, the process gives up what it could do harm with: writing files, memory, time.
"""

import resource
import sys
from datetime import date, datetime, time
from math import isfinite
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from apportion.monitor.log import LogError, LogUnavailable, ask_locked_down

ADDRESS_SPACE_BYTES: Final = 3 * 1024**3
"""DuckDB's own limit is 256 MB; this one is for what escapes it. Thread stacks and libraries are mapped, not used."""
ANSWER_BYTES_MAX: Final = 768 * 1024
"""An answer travels in one message of the bus, which takes 1 MiB."""


class Question(Struct, frozen=True, kw_only=True):
    """What the parent asks for."""

    path: str
    statement: str
    limit: int
    seconds: float


def main() -> int:
    """Read a question, answer it; 0 even where the answer is a refusal."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    give_up_rights(int(question.seconds) + 5)
    sys.stdout.buffer.write(msgspec.json.encode(answer(question)))
    sys.stdout.buffer.flush()
    return 0


def answer(question: Question) -> dict[str, Any]:
    """``columns``, ``rows`` and ``truncated``, or ``error``. Only in a process that has given up its rights."""
    try:
        return _answer(question)
    except LogError as err:
        code = "LogUnavailable" if isinstance(err, LogUnavailable) else "StatementRefused"
        return {"error": {"code": code, "message": str(err)}}
    except MemoryError:
        return {"error": {"code": "StatementRefused", "message": "it took more memory than a question may"}}


def give_up_rights(cpu_s: int) -> None:
    """No file can be written, no core dumped, and memory, open files and CPU time have an end."""
    for what, most in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_AS, ADDRESS_SPACE_BYTES),
        (resource.RLIMIT_CPU, cpu_s),
    ):
        _, hard = resource.getrlimit(what)
        lowered = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (lowered, lowered))


def _answer(question: Question) -> dict[str, Any]:
    # One row more than asked for tells whether there are more.
    found = ask_locked_down(Path(question.path), question.statement, limit=question.limit + 1, seconds=question.seconds)
    rows: list[list[Any]] = []
    size = 0
    for row in found.rows[: question.limit]:
        shown = [plain(value) for value in row]
        size += len(msgspec.json.encode(shown)) + 1
        if size > ANSWER_BYTES_MAX:
            break
        rows.append(shown)
    return {"columns": list(found.columns), "rows": rows, "truncated": len(rows) < len(found.rows)}


def plain(value: Any) -> Any:
    r"""The value as JSON has it: bytes as hex, instants as ISO 8601, and what JSON has no number for as text.

    >>> plain([b"\x00\xff", float("nan"), {"a": date(2026, 9, 1)}])
    ['00ff', 'nan', {'a': '2026-09-01'}]
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(inner) for inner in value]
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
