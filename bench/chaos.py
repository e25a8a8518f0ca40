"""Random faults on a real pool, one after the other, while jobs come and go; then whether everything held that must.

Processes are real, devices are simulated, all of it is drawn from the seed. Each round is one fault of a few seconds;
after the last everything has to come to its end. Prints the checks with their figures and ends with 1 where one fails.
``python -m bench.chaos [--rounds N] [--seed N]``.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import structlog

from apportion.cli.scenario import MUST_HOLD, Check, FaultStep, Scenario, Step, Submit, run
from apportion.contracts.causes import FaultKind

NODES, DEVICES = 3, 2
ROUND_S = 5.0
WEIGHTS = {
    FaultKind.SERVICE_KILL: 4,
    FaultKind.SERVICE_RESTART: 2,
    FaultKind.SERVICE_PAUSE: 3,
    FaultKind.PLACER_STALE: 3,
    FaultKind.NODE_LOSS: 3,
    FaultKind.NODE_STALL: 3,
    FaultKind.NODE_FLAP: 2,
    FaultKind.DEVICE_XID: 2,
    FaultKind.DEVICE_LOST: 1,
    FaultKind.DEVICE_ECC: 1,
    FaultKind.NODE_PARTITION: 3,
    FaultKind.DEVICE_MPS_WEDGE: 1,
    FaultKind.DEVICE_MEMORY_HOG: 1,
    FaultKind.DEVICE_COMPUTE_HOG: 1,
    FaultKind.DISK_SLOW: 1,
    FaultKind.MESSAGE_DELAY: 2,
    FaultKind.MESSAGE_DUPLICATE: 2,
    FaultKind.MESSAGE_DROP: 3,
    FaultKind.CLOCK_JUMP: 2,
    FaultKind.BUS_RESTART: 2,
    FaultKind.BUS_PAUSE: 1,
    FaultKind.BUS_SLOW: 1,
}
XIDS = (13, 31, 48, 63, 79, 94)
REPLACED = Check(
    name="re-placed after fencing, 95 of 100 within",
    unit="s",
    sql=(
        "SELECT quantile_cont((epoch_ns(again.placed) - epoch_ns(run.lost)) / 1e9, 0.95) FROM v_run AS run"
        " JOIN v_run AS again ON again.job_id = run.job_id"
        " AND split_part(again.run_id, '/', 3) = split_part(run.run_id, '/', 3)"
        " AND CAST(split_part(again.run_id, '/', 4) AS INT) = CAST(split_part(run.run_id, '/', 4) AS INT) + 1"
        " WHERE run.lost IS NOT NULL AND (run.finished IS NULL OR run.finished > run.lost)"
    ),
)
SHOWN = (
    Check(name="jobs", sql="SELECT count(*) FROM v_job"),
    Check(name="runs", sql="SELECT count(*) FROM v_run"),
    Check(name="faults", sql="SELECT count(*) FROM v_event WHERE kind = 'FaultInjected'"),
    Check(name="nodes fenced", sql="SELECT count(*) FROM v_event WHERE kind = 'NodeFenced'"),
    Check(
        name="leases taken over",
        sql="SELECT count(*) FROM v_event WHERE kind = 'LeaseClaimed' AND body ->> '$.follows' <> ''",
    ),
    Check(name="jobs moved", sql="SELECT count(*) FROM v_migrations"),
    REPLACED,
)


def scenario_of(seed: int, rounds: int) -> Scenario:
    """What happens, from the seed."""
    draw = random.Random(seed)
    steps: list[Step] = []
    for number in range(rounds):
        at_s = 2.0 + number * ROUND_S
        kind = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        service = draw.choice(("admission", "placer", "monitor"))
        node = f"node-{draw.randrange(NODES) + 1}"
        target = {
            "service": service,
            "node": node,
            "device": f"{node}/{draw.randrange(DEVICES)}",
            "message": draw.choice((service, node)),
            "clock": draw.choice((service, node)),
        }.get(kind.value.partition("-")[0], "")
        xid = draw.choice(XIDS) if kind is FaultKind.DEVICE_XID else None
        fault = FaultStep(kind=kind, target=target, for_s=draw.randrange(2, 9), seed=draw.randrange(1 << 30), xid=xid)
        steps.append(Step(at_s=at_s, fault=fault))
        for job in range(draw.randrange(1, 4)):
            gang = draw.choice((1, 1, 1, 2))
            steps.append(
                Step(
                    at_s=at_s + draw.uniform(-1.5, ROUND_S),
                    submit=Submit(name=f"job-{number}-{job}"),
                    job={
                        "workload": {"command": ["sleep", f"{draw.uniform(0.5, 9.0):.1f}"]},
                        "resources": {"gpu_milli": draw.choice((250, 500)), "gpu_memory_mib": 8000},
                        "gang": {"size": gang},
                        "retry": {"limit": 3, "backoff_s": 1},
                    },
                )
            )
    return Scenario(
        name=f"{rounds} random faults, seed {seed}",
        nodes=NODES,
        devices=DEVICES,
        standby=True,
        settle_s=240,
        step=tuple(steps),
        check=SHOWN,
    )


def main() -> int:
    """Print every check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    began = time.monotonic()

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"{arguments.rounds} random faults from seed {arguments.seed} on {NODES} nodes of {DEVICES} simulated devices")
    with tempfile.TemporaryDirectory(prefix="apportion-chaos-") as folder:
        figures = run(scenario_of(arguments.seed, arguments.rounds), Path(folder), say)
    for figure in figures:
        value = "nothing" if figure.value is None else f"{figure.value:g} {figure.unit}".rstrip()
        is_shown = figure.wanted == "shown"
        say(f"{'    ' if is_shown else 'pass' if figure.passed else 'FAIL'}  {figure.name}: {value}"
            + ("" if is_shown else f"  (wanted {figure.wanted})"))  # fmt: skip
    failed = sum(not figure.passed for figure in figures)
    say(f"{'PASS' if not failed else 'FAIL'}: {len(MUST_HOLD)} rules, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
