"""How many events a second the log takes in on one core, alone and beside a reader that never rests.

Rows are projected, chained, appended and committed in batches of 1,000, as the writer does it; the reader asks the
heaviest views of copies that it makes itself. ``python -m bench.ingest [--rows N] [--views N|FILE]``: with a log, or
so many facts to make one of, what each view takes on a copy of it, too, beside a plain count (10 million take an hour).
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from apportion.monitor.log import EventLog, own_questions, views
from bench.history import a_log, messages

BATCH: Final = 1_000
HEAVY: Final = ("v_usage", "v_waits", "v_reconciliation")


def measured(rows: int, *, is_read: bool) -> dict[str, Any]:
    """Rows a second of wall time and of the writer's own CPU time, and the slowest commit in ms."""
    prepared = list(messages(rows, wishes=True))
    with tempfile.TemporaryDirectory(prefix="apportion-ingest-") as folder:
        log = EventLog.open(Path(folder) / "log.duckdb")
        stop = threading.Event()
        asked = [0]
        reader = threading.Thread(target=_read, args=(log, Path(folder), stop, asked), daemon=True)
        with log:
            if is_read:
                reader.start()
            slowest = 0.0
            began, cpu = time.perf_counter(), time.thread_time()
            for first in range(0, len(prepared), BATCH):
                at = time.perf_counter()
                log.append(prepared[first : first + BATCH])
                slowest = max(slowest, time.perf_counter() - at)
            wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu
            stop.set()
            if is_read:
                reader.join()
    return {
        "rows": len(prepared),
        "rows_per_s": round(len(prepared) / wall_s),
        "rows_per_cpu_s": round(len(prepared) / cpu_s),
        "slowest_batch_ms": round(slowest * 1e3),
        "questions_answered": asked[0],
    }


def _read(log: EventLog, folder: Path, stop: threading.Event, asked: list[int]) -> None:
    """Copies the log and asks, over and over; in this process, so that both share the interpreter's lock."""
    while not stop.is_set():
        log.copy_into(folder / "copy.duckdb")
        with own_questions(folder / "copy.duckdb") as ask:
            for name in HEAVY:
                ask(f"SELECT count(*) FROM {name}")
                asked[0] += 1


def timed_views(log: Path) -> dict[str, Any]:
    """Milliseconds of CPU time that each view takes for every column of all of its rows, by one thread, on a copy."""
    copy = log.with_suffix(".copy.duckdb")
    began = time.process_time()
    with EventLog.open(log, memory_limit="2GB") as opened:
        rows = opened.copy_into(copy).ordinal
    copied_s = time.process_time() - began
    took: dict[str, int] = {}
    with own_questions(copy) as ask:
        plain = round(_ms(lambda: ask("SELECT count(*), max(recorded_at) FROM events")))
        for name, _ in views():
            # Every column of every row: a count alone would leave most of them unread.
            question = f"SELECT bit_xor(hash(*COLUMNS(*))), count(*) FROM {name}"
            ask(f"SELECT * FROM {name} LIMIT 0")  # made, and bound once
            took[name] = round(_ms(lambda question=question: ask(question)))  # type: ignore[misc]
    return {"rows": rows, "copied_cpu_s": round(copied_s, 1), "plain_count_cpu_ms": plain, "views_cpu_ms": took}


def _ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--views", metavar="N|FILE")
    given, _ = parser.parse_known_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, for everything
    machine = f"{platform.machine()} {platform.python_version()}"
    alone, read = measured(given.rows, is_read=False), measured(given.rows, is_read=True)
    found: dict[str, Any] = {"bench": "ingest", "machine": machine, "alone": alone, "beside_a_reader": read}
    with tempfile.TemporaryDirectory(prefix="apportion-views-") as folder:
        if given.views is not None:
            log = Path(given.views)
            if given.views.isdigit():
                log = Path(folder) / "log.duckdb"
                a_log(log, int(given.views), wishes=True)
            found["views"] = timed_views(log)
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
