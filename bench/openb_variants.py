"""Further variants of the openb trace, derived from its two: other shares of shared, large, bound and CPU-only tasks.

The published trace has such variants, too; these are made from ``default`` and ``gpuspec33`` alone, by one seed, so
that a policy can be tried on mixes that nobody tuned it for. ``python -m bench.openb_variants --trace DIR --out DIR``.
"""

import argparse
import csv
import random
import shutil
from pathlib import Path

Row = dict[str, str]
SEED = 7
NODES = "openb_node_list_gpu_node.csv"


def asked_milli(row: Row) -> int:
    """What the task asks of all its devices together."""
    return int(row["num_gpu"]) * int(row["gpu_milli"] or 0)


def variants(default: list[Row], bound: list[Row]) -> dict[str, list[Row]]:
    """Each variant's tasks; all but the last two ask for as much of the devices as ``default`` does."""
    draws = random.Random(SEED)
    none = [row for row in default if row["num_gpu"] == "0"]
    part = [row for row in default if row["num_gpu"] == "1" and int(row["gpu_milli"]) < 1000]
    one = [row for row in default if row["num_gpu"] == "1" and row["gpu_milli"] == "1000"]
    several = [row for row in default if int(row["num_gpu"]) > 1]
    total = sum(map(asked_milli, default))

    def filled(*pools: tuple[list[Row], float]) -> list[Row]:
        found = []
        for pool, share in pools:
            got = 0
            while got < total * share:
                found.append(draws.choice(pool))
                got += asked_milli(found[-1])
        return found

    def split(rest: float, first: list[Row], second: list[Row]) -> tuple[tuple[list[Row], float], ...]:
        mine, theirs = sum(map(asked_milli, first)), sum(map(asked_milli, second))
        return (first, rest * mine / (mine + theirs)), (second, rest * theirs / (mine + theirs))

    found: dict[str, list[Row]] = {}
    for percent in (40, 60, 80, 100):
        found[f"gpushare{percent}"] = none + filled((part, percent / 100), *split(1 - percent / 100, one, several))
    for percent in (20, 30, 40, 50):
        found[f"multigpu{percent}"] = none + filled((several, percent / 100), *split(1 - percent / 100, part, one))
    models = [row["gpu_spec"] for row in bound if row["gpu_spec"]]
    for percent in (10, 20, 25):
        found[f"gpuspec{percent}"] = [
            {**row, "gpu_spec": draws.choice(models)}
            if row["num_gpu"] != "0" and draws.random() < percent / 100
            else row
            for row in default
        ]
    for percent in (50, 200):
        found[f"cpu{percent}"] = [draws.choice(none) for _ in range(len(none) * percent // 100)] + [
            row for row in default if row["num_gpu"] != "0"
        ]
    return found


def main() -> int:
    """Read, derive, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.openb_variants", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="directory with the openb files")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    read = {}
    for name in ("default", "gpuspec33"):
        with (options.trace / f"openb_pod_list_{name}.csv").open(newline="") as file:
            read[name] = list(csv.DictReader(file))
    shutil.copyfile(options.trace / NODES, options.out / NODES)
    for name, rows in variants(read["default"], read["gpuspec33"]).items():
        with (options.out / f"openb_pod_list_{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(read["default"][0]))
            writer.writeheader()
            writer.writerows({**row, "name": f"openb-pod-{at:05}"} for at, row in enumerate(rows))
        print(f"{name}: {len(rows)} tasks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
