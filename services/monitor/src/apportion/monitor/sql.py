"""Other people's SQL: asked of a copy, in a process of its own, with an end in time, memory and rows.

The guard is the operating system's (a process that can write no file, sql_worker.py) and DuckDB's (a file opened
read-only, locked down, log.LOCKED_DOWN). That only a SELECT or EXPLAIN is let through is courtesy: a common table
expression may write and still be called a SELECT.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

ROWS_DEFAULT: Final = 1_000
ROWS_MAX: Final = 50_000
SECONDS_MAX: Final = 10.0
STATEMENT_CHARS_MAX: Final = 64 * 1024
_GRACE_S: Final = 5.0
"""What starting the process and opening the file may take beside the question itself."""


def ask(
    path: Path,
    statement: str,
    *,
    limit: int = ROWS_DEFAULT,
    seconds: float = SECONDS_MAX,
    running: "set[subprocess.Popen[bytes]] | None" = None,
) -> dict[str, Any]:
    """``columns``, ``rows`` and ``truncated`` of a statement on a log that nobody writes; or ``error`` and why.

    Never raises for what the statement says. At most ``limit`` rows (1 to ROWS_MAX) and 768 KiB come back. While the
    question's process lives it is in ``running``, so that whoever has to leave can end it.
    """
    if len(statement) > STATEMENT_CHARS_MAX:
        return _refused(f"a statement has at most {STATEMENT_CHARS_MAX} characters, not {len(statement)}")
    if not 1 <= limit <= ROWS_MAX:
        return _refused(f"a limit is 1 to {ROWS_MAX} rows, not {limit}")
    question = {
        "path": str(path.absolute()),
        "statement": statement,
        "limit": limit,
        "seconds": min(seconds, SECONDS_MAX),
    }
    try:
        encoded = msgspec.json.encode(question)
    except UnicodeEncodeError:
        return _refused("a statement is UTF-8")
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "apportion.monitor.sql_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},  # nothing of ours: no addresses, no tokens
        cwd=path.absolute().parent,
    ) as worker:
        if running is not None:
            running.add(worker)
        try:
            said, words = worker.communicate(encoded, timeout=seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            return _refused(f"it took longer than {seconds:g} s and was killed")
        finally:
            if running is not None:
                running.discard(worker)
    try:
        answer: dict[str, Any] = msgspec.json.decode(said)
    except msgspec.DecodeError:
        # Killed by one of its limits, or worse; its last words help whoever looks into it.
        last = words.decode(errors="replace").strip().rpartition("\n")[2][:300]
        return _refused(f"the question ended its process (exit {worker.returncode}): {last}")
    return answer


def _refused(message: str) -> dict[str, Any]:
    return {"error": {"code": "StatementRefused", "message": message}}
