"""What admission keeps of each job request for ever: bytes of memory, of its snapshot, and what a fold costs.

Every request is asked for, admitted and cancelled, so that nothing of it is left but what idempotency needs.
``python -m bench.admission_memory [--wishes N]``. Memory is the process's resident set, so it counts all overheads.
"""

import argparse
import gc
import json
import time
from pathlib import Path

from apportion.admission import core
from apportion.contracts import events as ev
from apportion.contracts.causes import WorkloadKind
from apportion.contracts.ids import JobId, QueueId
from apportion.contracts.testing import ACME, NOON, a_queue, as_fact, as_wish


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Fold that many whole stories, and print what is left of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wishes", type=int, default=200_000)
    asked = parser.parse_args()
    state = core.initial()
    core.evolve(state, as_fact(a_queue(), 1))
    spec = ev.JobSpec(queue=QueueId("main"), kind=WorkloadKind.BATCH, command=("/bin/true",))
    fact = 1
    began, before = time.perf_counter(), 0
    for number in range(1, asked.wishes + 1):
        if number == asked.wishes // 10:
            began, before, first = time.perf_counter(), resident(), number
        name = f"nightly-evaluation-{number:08d}"
        request = ev.JobRequested(
            queue="main",
            job_id=name,
            idempotency_key=f"airflow-{number:08d}" if number % 2 else None,
            workload=ev.Workload(command=("/bin/true",)),
            resources=ev.Resources(gpu=1),
        )
        core.evolve(state, as_wish(request, number, event_id=f"run-{number:08d}"))
        job_id = JobId(f"{ACME}/{name}")
        admitted = ev.JobAdmitted(job_id=job_id, tenant=ACME, answers=number, wish_id=f"w{number}", spec=spec)
        cancelled = ev.JobCancelled(job_id=job_id, actor="tenant:acme")
        for event in (admitted, cancelled):
            fact += 1
            core.evolve(state, as_fact(event, fact, at=NOON + number))
    took = time.perf_counter() - began
    count = asked.wishes - first
    left = resident() - before
    began = time.perf_counter()
    data = core.snapshot(state)
    stored = time.perf_counter() - began
    began = time.perf_counter()
    core.restore(data)
    print(
        json.dumps(
            {
                "wishes": asked.wishes,
                "with_idempotency_key_pct": 50,
                "resident_bytes_per_wish": left // count,
                "snapshot_bytes_per_wish": len(data) // asked.wishes,
                "fold_us_per_story": round(took / count * 1e6, 1),
                "snapshot_ms": round(stored * 1000),
                "restore_ms": round((time.perf_counter() - began) * 1000),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
