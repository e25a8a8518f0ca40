"""Other people's SQL: asked of a copy, in a process of its own, with an end in time, memory and rows.

The guard is the operating system's (a process that can write no file, sql_worker.py) and DuckDB's (a file opened
read-only, locked down, log.LOCKED_DOWN). That only a SELECT or EXPLAIN is let through is courtesy: a common table
expression may write and still be called a SELECT.
"""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

import msgspec

ROWS_DEFAULT: Final = 1_000
ROWS_MAX: Final = 50_000
SECONDS_MAX: Final = 10.0
STATEMENT_CHARS_MAX: Final = 64 * 1024
_GRACE_S: Final = 5.0
"""What starting the process and opening the file may take beside the question itself."""


class Workers:
    """Processes for questions. The next one is started beforehand: starting takes longer than most answers."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._spare: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def ask(
        self, path: Path, statement: str, *, limit: int = ROWS_DEFAULT, seconds: float = SECONDS_MAX
    ) -> dict[str, Any]:
        """As ``ask`` below, by the process that waits, where one does. May be called from several threads at once."""
        refusal, encoded = _question(path, statement, limit, seconds)
        if refusal is not None:
            return refusal
        with self._lock:
            worker, self._spare = self._spare, None
            if self._closed:
                return _refused("the monitor is stopping")
            if worker is None or worker.poll() is not None:
                worker = _start()
            self._running.add(worker)
        try:
            return _answered(worker, encoded, seconds)
        finally:
            with self._lock:
                self._running.discard(worker)

    def prepare(self) -> None:
        """Start the next question's process, unless one waits. Once the answer is given: it takes CPU time."""
        with self._lock:
            if self._spare is None and not self._closed:
                self._spare = _start()

    def close(self) -> None:
        """End all of them: a drain does not wait for questions."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, None
            workers = list(self._running)
        for worker in workers:
            worker.kill()
        if spare is not None:
            spare.kill()
            spare.communicate()


def ask(path: Path, statement: str, *, limit: int = ROWS_DEFAULT, seconds: float = SECONDS_MAX) -> dict[str, Any]:
    """``columns``, ``rows`` and ``truncated`` of a statement on a log that nobody writes; or ``error`` and why.

    Never raises for what the statement says. At most ``limit`` rows (1 to ROWS_MAX) and 768 KiB come back.
    """
    refusal, encoded = _question(path, statement, limit, seconds)
    return _answered(_start(), encoded, seconds) if refusal is None else refusal


def _question(path: Path, statement: str, limit: int, seconds: float) -> tuple[dict[str, Any] | None, bytes]:
    """What is refused before a process is asked, and what it is asked."""
    if len(statement) > STATEMENT_CHARS_MAX:
        return _refused(f"a statement has at most {STATEMENT_CHARS_MAX} characters, not {len(statement)}"), b""
    if not 1 <= limit <= ROWS_MAX:
        return _refused(f"a limit is 1 to {ROWS_MAX} rows, not {limit}"), b""
    question = {
        "path": str(path.absolute()),
        "statement": statement,
        "limit": limit,
        "seconds": min(seconds, SECONDS_MAX),
    }
    try:
        return None, msgspec.json.encode(question)
    except UnicodeEncodeError:
        return _refused("a statement is UTF-8"), b""


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "apportion.monitor.sql_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},  # nothing of ours: no addresses, no tokens
        cwd="/",
    )


def _answered(worker: "subprocess.Popen[bytes]", encoded: bytes, seconds: float) -> dict[str, Any]:
    with worker:
        try:
            said, words = worker.communicate(encoded, timeout=seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            return _refused(f"it took longer than {seconds:g} s and was killed")
    try:
        answer: dict[str, Any] = msgspec.json.decode(said)
    except msgspec.DecodeError:
        # Killed by one of its limits, or worse; its last words help whoever looks into it.
        last = words.decode(errors="replace").strip().rpartition("\n")[2][:300]
        return _refused(f"the question ended its process (exit {worker.returncode}): {last}")
    return answer


def _refused(message: str) -> dict[str, Any]:
    return {"error": {"code": "StatementRefused", "message": message}}
