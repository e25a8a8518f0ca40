"""Random faults on a real pool, one after the other, while jobs come and go; then whether everything held that must.

Processes are real, devices are simulated, all of it is drawn from the seed. Each round is one fault of a few seconds;
after the last everything has to come to its end. Prints the checks with their figures and ends with 1 where one fails.
``python -m bench.chaos [--rounds N] [--seed N] [--fill-disk] [--keep FOLDER]``.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from apportion.cli.scenario import MUST_HOLD, Check, FaultStep, Figure, Scenario, Step, Submit, log_of, run
from apportion.contracts.causes import FaultKind
from apportion.monitor.history import History
from bench.replaced import replaced, sorts

NODES, DEVICES = 3, 2
OWN_DISK = "APPORTION_CHAOS_DISK"
"""Set within the mount namespace: the folder on a file system of its own."""
ROUND_S = 5.0
REPLACED_S_MAX = 2.0
"""Within so long of the fencing 95 of 100 jobs are placed again, where there was room and deciding was not broken."""
DISK_MIB = 1024
"""Of the pool's own file system, where it has one: what is filled is nobody else's."""
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
)


def scenario_of(seed: int, rounds: int, *, fills_disk: bool = False) -> Scenario:
    """What happens, from the seed, and from whether the disk may be filled."""
    draw = random.Random(seed)
    weights = {**WEIGHTS, FaultKind.DISK_FULL: 3} if fills_disk else WEIGHTS
    steps: list[Step] = []
    for number in range(rounds):
        at_s = 2.0 + number * ROUND_S
        kind = draw.choices(list(weights), list(weights.values()))[0]
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


def replaced_figure(path: Path, say: Callable[[str], None]) -> Figure:
    """Says how soon jobs were placed again, by sort; the figure of those that nothing stood in the way of."""
    with History.open(path) as history:
        found = sorts(replaced(history.entries(after=0, to=history.last_seq)))
    for one in found:
        sort = f"{'room' if one.had_room else 'no room'}{', deciding broken' if one.is_hindered else ''}"
        times = (
            f": placed again after {one.p50_s:.2f} s (50 of 100), {one.p95_s:.2f} s (95), {one.max_s:.2f} s (all);"
            f" of which requeued after {one.requeued_s_p50:.2f} s (50)"
        )
        say(f"      {sort}: {one.jobs} jobs{times if one.jobs else ''}")
    free = found[0]
    return Figure(
        name=f"placed again after fencing with room, 95 of 100 of {free.jobs}, within",
        unit="s",
        value=round(free.p95_s, 2) if free.jobs else None,
        wanted=f"at most {REPLACED_S_MAX:g}" if free.jobs else "shown",
        passed=free.p95_s <= REPLACED_S_MAX,
    )


def _in_a_namespace() -> int:
    """This command once more, where a file system of its own is mounted for it alone."""
    with tempfile.TemporaryDirectory(prefix="apportion-chaos-") as folder:
        mount = f'mount -t tmpfs -o size={DISK_MIB}m,mode=0700 none "$0" && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", mount, folder, sys.executable, "-m", "bench.chaos", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, OWN_DISK: folder}, check=False).returncode


def main() -> int:
    """Print every check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="an empty folder for the pool's files, which stay there")
    parser.add_argument(
        "--fill-disk",
        action="store_true",
        help=f"also disk-full, on a tmpfs of {DISK_MIB} MiB that nobody else sees (needs the right to mount)",
    )
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    began = time.monotonic()
    if arguments.fill_disk and OWN_DISK not in os.environ:
        return _in_a_namespace()

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"{arguments.rounds} random faults from seed {arguments.seed} on {NODES} nodes of {DEVICES} simulated devices")
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="apportion-chaos-")))
        if arguments.fill_disk:
            folder = Path(os.environ[OWN_DISK])
        scenario = scenario_of(arguments.seed, arguments.rounds, fills_disk=arguments.fill_disk)
        figures = [*run(scenario, folder, say)]
        figures.append(replaced_figure(log_of(folder), say))
    for figure in figures:
        value = "nothing" if figure.value is None else f"{figure.value:g} {figure.unit}".rstrip()
        is_shown = figure.wanted == "shown"
        say(f"{'    ' if is_shown else 'pass' if figure.passed else 'FAIL'}  {figure.name}: {value}"
            + ("" if is_shown else f"  (wanted {figure.wanted})"))  # fmt: skip
    failed = sum(not figure.passed for figure in figures)
    say(f"{'PASS' if not failed else 'FAIL'}: {len(MUST_HOLD) + 1} rules, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
