"""How fast the pool is rebuilt from the log: facts folded a second, and what a seek to any moment takes.

A synthetic log: a steady pool of 64 nodes of 8 devices, a job's ordinary life after another on it.
``python -m bench.history [--facts N] [--keep FILE]``.
"""

import argparse
import json
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, RunCause
from apportion.contracts.envelope import Basis
from apportion.contracts.ids import JobId, NodeId, run_id
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement, a_queue
from apportion.monitor.history import FOLD_EVERY, History
from apportion.monitor.log import EventLog
from apportion.monitor.testing import Recorded, Tape

NODES: Final = 64
DEVICES: Final = 8
LIVE: Final = NODES * DEVICES * 2
WAITING: Final = 200


def a_log(path: Path, facts: int, *, wishes: bool = False) -> None:
    """A log of about so many facts at ``path``."""
    batch: list[Recorded] = []
    with EventLog.open(path) as log:
        for message in messages(facts, wishes=wishes):
            batch.append(message)
            if len(batch) == 5_000:
                log.append(batch)
                batch = []
        log.append(batch)


def messages(facts: int, *, wishes: bool) -> Iterator[Recorded]:
    """Registrations, then jobs that come, run and end; LIVE of them run at a time, WAITING wait."""
    tape = Tape()
    basis = Basis(facts=1, wishes=1, decided_at=NOON, policy="bench@1#0")
    yield tape.fact(a_queue())
    for node in range(NODES):
        yield tape.fact(a_node(f"node-{node}", devices=DEVICES))
    number, said = 0, NODES + 1
    while said < facts:
        job = f"acme/j{number}"
        if wishes:
            yield tape.wish(a_job_request(job_id=f"j{number}"))
        yield tape.fact(a_job(f"j{number}", answers=number + 1), basis=basis)
        said += 1
        if number >= WAITING:
            placed = number - WAITING
            job, on = f"acme/j{placed}", f"node-{placed % NODES}"
            run = run_id(JobId(job), 0, 1)
            yield tape.fact(
                ev.JobPendingReasonChanged(job_id=JobId(job), code=Pending.PRIORITY, since_at=NOON), basis=basis
            )
            yield tape.fact(a_placement(job, node=on, device=placed // NODES % DEVICES), basis=basis)
            yield tape.fact(ev.RunStarted(run_id=run, node_id=NodeId(on), pid=7, started_at=tape.at))
            said += 3
        if number >= WAITING + LIVE:
            ended = number - WAITING - LIVE
            job, on = f"acme/j{ended}", f"node-{ended % NODES}"
            run = run_id(JobId(job), 0, 1)
            yield tape.fact(
                ev.RunFinished(run_id=run, node_id=NodeId(on), cause=RunCause.SUCCESS, exit_code=0, finished_at=tape.at)
            )
            yield tape.fact(ev.RunReleased(run_id=run, node_id=NodeId(on), released_at=tape.at))
            yield tape.fact(ev.JobSucceeded(job_id=JobId(job), attempts=1, wait_ms=9, run_ms=9), basis=basis)
            said += 3
        number += 1


def measured(path: Path, seeks: int = 40) -> dict[str, Any]:
    """Rates and percentiles; folds are built beside ``path`` by the first pass."""
    shutil.rmtree(path.with_suffix(".folds"), ignore_errors=True)
    with History.open(path) as history:
        began, cpu = time.perf_counter(), time.process_time()
        last = history.at_seq(history.last_seq)
        fold_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    with (
        tempfile.TemporaryDirectory(prefix="apportion-folds-") as folder,
        History.open(path, folds=Path(folder)) as history,
    ):
        few = min(last.seq, FOLD_EVERY - 1)  # as many as are folded between two that are kept
        cpu = time.process_time()
        for _ in range(10):
            history.at_seq(few)
        between_s = (time.process_time() - cpu) / 10
    chance = random.Random(1)
    took: list[float] = []
    took_cpu: list[float] = []
    for _ in range(seeks):
        began, cpu = time.perf_counter(), time.process_time()
        with History.open(path) as history:  # as a command does it: the file is opened anew
            history.at_seq(chance.randrange(1, last.seq))
        took.append((time.perf_counter() - began) * 1e3)
        took_cpu.append((time.process_time() - cpu) * 1e3)
    took.sort()
    took_cpu.sort()
    return {
        "facts": last.seq,
        "folds_mib": round(sum(f.stat().st_size for f in path.with_suffix(".folds").rglob("*.fold")) / 2**20, 1),
        "fold_and_snapshot_s": round(fold_s, 2),
        "folded_per_s": round(last.seq / fold_s),
        "folded_and_kept_per_cpu_s": round(last.seq / cpu_s),
        "folded_per_cpu_s": round(few / between_s),
        "seek_ms": _spread(took),
        "seek_cpu_ms": _spread(took_cpu),
    }


def _spread(took: list[float]) -> dict[str, int]:
    count = len(took)
    return {"p50": round(took[count // 2]), "p95": round(took[count * 95 // 100]), "max": round(took[-1])}


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=int, default=200_000)
    parser.add_argument("--keep", type=Path, help="Make the log there, or use the one that is there.")
    given, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="apportion-history-") as folder:
        path = given.keep or Path(folder) / "log.duckdb"
        if not path.exists():
            began = time.perf_counter()
            a_log(path, given.facts)
            sys.stderr.write(f"a log of {given.facts} facts in {time.perf_counter() - began:.0f} s\n")
        print(
            json.dumps(
                {"bench": "history", "machine": f"{platform.machine()} {platform.python_version()}", **measured(path)}
            )
        )


if __name__ == "__main__":
    main()
