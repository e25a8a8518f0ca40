"""The service's own rounds on the openb fleet: how much of it is allocated, and what a decision costs.

The whole core at work: jobs are admitted, decided, folded, and those that fit nowhere are cancelled, as the protocol of
the trace has it (``apportion bench placement`` measures the kernel alone). A share of a device asks as much of its
memory as of its compute. ``python -m bench.placer_rounds --trace DIR [--policy P] [--variant V] [--seeds N]``.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from apportion.contracts import events as ev
from apportion.contracts.causes import WorkloadKind
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import (
    ADMISSION,
    PLACER,
    Author,
    JobId,
    QueueId,
    TenantId,
    agent_author,
)
from apportion.contracts.testing import NOON
from apportion.placer import bench_openb, core
from apportion.placer.bench_pool import DEVICE_MIB, registered
from apportion.placer.packing.demand import Shape
from apportion.placer.policies import DEFAULT
from apportion.placer.state import State

QUEUE = QueueId("main")
TENANT = TenantId("acme")
FIRST_SEED = bench_openb.FIRST_SEED


class Teller:
    """Folds facts into a placer's state, one sequence after the other."""

    def __init__(self, config: dict[str, int | str]) -> None:
        self.state: State = core.initial()
        self.seq = 0
        self.tell(ev.LeaseClaimed(author=PLACER, session="s1", core=core.POLICY, config=config), PLACER)

    def tell(self, fact: ev.Fact, author: Author = ADMISSION) -> None:
        """One more fact."""
        self.seq += 1
        entry = Entry(
            stream=Stream.FACTS, seq=self.seq, recorded_at=NOON, event=fact, event_id=f"f{self.seq}", author=author
        )
        self.state = core.evolve(self.state, entry)


def admitted(number: int, shape: Shape) -> ev.JobAdmitted:
    """A task of the trace as a job."""
    is_share = shape.devices == 1 and shape.device_milli < 1000
    return ev.JobAdmitted(
        job_id=JobId(f"acme/t{number}"),
        tenant=TENANT,
        answers=1,
        wish_id="w",
        spec=ev.JobSpec(
            queue=QUEUE,
            kind=WorkloadKind.BATCH,
            command=("/bin/true",),
            devices=shape.devices,
            compute_milli=shape.device_milli if shape.devices else 1000,
            memory_mib=shape.device_milli * DEVICE_MIB // 1000 if is_share else 0,
            models=shape.models,
            cpu_milli=shape.cpu_milli,
            host_memory_mib=shape.memory_mib,
        ),
    )


def run(trace: bench_openb.Trace, policy: str, seed: int, batch: int) -> dict[str, Any]:
    """One pass over a seed's arrivals."""
    teller = Teller({"policy": policy, "reserve_after_s": -1})
    for node in registered(trace, seed):
        teller.tell(node, agent_author(node.node_id))
    capacity = sum(node.devices for node in trace.nodes) * 1000
    asked = allocated = placed = 0
    decide_ns = fold_ns = 0
    curve: dict[str, float] = {}
    waiting: dict[JobId, int] = {}
    order = list(bench_openb.arrivals(trace, seed))
    for start in range(0, len(order), batch):
        now = time.thread_time_ns()
        for number in range(start, min(start + batch, len(order))):
            job = admitted(number, order[number])
            waiting[job.job_id] = order[number].total_milli
            asked += order[number].total_milli
            teller.tell(job)
        fold_ns += time.thread_time_ns() - now
        while True:
            now = time.thread_time_ns()
            facts = core.decide(teller.state, NOON)
            decide_ns += time.thread_time_ns() - now
            if not facts:
                break
            now = time.thread_time_ns()
            for fact in facts:
                teller.tell(fact, PLACER)
                if isinstance(fact, ev.RunPlaced):
                    allocated += waiting.pop(fact.job_id)
                    placed += 1
            fold_ns += time.thread_time_ns() - now
        for job_id in waiting:
            teller.tell(ev.JobCancelled(job_id=job_id, actor="user:bench"))
        waiting.clear()
        for load in bench_openb.LOADS_PERCENT:
            if str(load) not in curve and asked * 100 >= load * capacity:
                curve[str(load)] = round(100 * allocated / capacity, 3)
    return {
        "seed": seed,
        "allocated_pct": curve,
        "decisions": len(order),
        "placed": placed,
        "decide_us": decide_ns / len(order) / 1000,
        "fold_us": fold_ns / len(order) / 1000,
    }


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--variant", default="default")
    parser.add_argument("--policy", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    trace = bench_openb.read_trace(options.trace, options.variant)
    policy = options.policy or DEFAULT.name
    runs = [run(trace, policy, FIRST_SEED + at, options.batch) for at in range(options.seeds)]
    found = {
        "policy": policy,
        "variant": options.variant,
        "seeds": len(runs),
        "allocated_pct": {
            load: round(sum(each["allocated_pct"][load] for each in runs) / len(runs), 3)
            for load in runs[0]["allocated_pct"]
        },
        "decisions_per_s": round(1e6 * len(runs) / sum(each["decide_us"] for each in runs)),
        "folded_per_s": round(1e6 * len(runs) / sum(each["fold_us"] for each in runs)),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
