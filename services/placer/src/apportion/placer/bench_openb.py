"""The quality of placement on the openb trace: the published protocol, any policy, seed by seed.

The trace is read from a directory and is not part of the product. The protocol: tasks sorted by name, shuffled by the
seed, resampled to 130 % of the fleet's device capacity, offered one by one; none leaves, none waits.
"""

import argparse
import csv
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from apportion.placer.packing.best_fit import BestFit
from apportion.placer.packing.demand import WHOLE_DEVICE_MILLI, Mix, Shape
from apportion.placer.packing.fleet import Fleet, NodeSpec
from apportion.placer.packing.fragmentation import FragmentationGradient
from apportion.placer.packing.headroom import Headroom
from apportion.placer.packing.policy import Packer, Policy
from apportion.placer.packing.random_fit import RandomFit
from apportion.placer.packing.streams import StreamLibrary

FIRST_SEED = 42
LOADS_PERCENT = (90, 95, 98, 100, 110, 120, 130)
POLICIES = ("random", "best-fit", "fragmentation-gradient", "headroom")
_LOAD_PERCENT_MAX = 130


class Trace(NamedTuple):
    """A fleet and its population of tasks (name and shape)."""

    nodes: list[NodeSpec]
    tasks: list[tuple[str, Shape]]

    def mix(self) -> Mix:
        """How often each shape occurs in the population."""
        counts: dict[Shape, int] = {}
        for _, shape in self.tasks:
            counts[shape] = counts.get(shape, 0) + 1
        return Mix(counts)


class Outcome(TypedDict):
    """What a benchmark of placement reports; shares are means over the seeds, in % of the fleet's devices."""

    policy: str
    variant: str
    learn: bool
    seeds: list[int]
    allocated_pct: dict[str, float]
    declined: int
    decisions_per_s: float
    decision_us_p50: float
    decision_us_p99: float


def read_trace(directory: Path, variant: str) -> Trace:
    """The nodes with devices, and the variant's tasks, in the order of their files."""
    with (directory / "openb_node_list_gpu_node.csv").open(newline="") as file:
        nodes = [
            NodeSpec(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
            for row in csv.DictReader(file)
        ]
    with (directory / f"openb_pod_list_{variant}.csv").open(newline="") as file:
        tasks = [(row["name"], _shape_of(row)) for row in csv.DictReader(file)]
    return Trace(nodes, tasks)


def _shape_of(row: dict[str, str]) -> Shape:
    devices = int(row["num_gpu"])
    models = tuple(sorted(set(filter(None, row["gpu_spec"].split("|")))))
    milli = int(row["gpu_milli"]) if devices else 0
    return Shape(int(row["cpu_milli"]), int(row["memory_mib"]), devices, milli, models)


def arrivals(trace: Trace, seed: int) -> Iterator[Shape]:
    """The tasks in the order in which the seed offers them."""
    draws = random.Random(seed)  # noqa: S311 — a benchmark's order, no secret
    population = [shape for _, shape in sorted(trace.tasks)]
    first = list(population)
    draws.shuffle(first)
    yield from first
    capacity = sum(node.devices for node in trace.nodes) * WHOLE_DEVICE_MILLI
    asked = sum(shape.total_milli for shape in first)
    while True:
        shape = draws.choice(population)
        asked += shape.total_milli
        if asked * 100 > capacity * _LOAD_PERCENT_MAX:
            return
        yield shape


def build_policy(
    name: str, fleet: Fleet, mix: Mix, *, learn: bool, seed: int, library: StreamLibrary | None = None
) -> Policy:
    """The policy of that name; with `learn`, it starts from nothing and sees arrivals only."""
    known = Mix() if learn else mix
    match name:
        case "random":
            return RandomFit(fleet, seed)
        case "best-fit":
            return BestFit(fleet)
        case "fragmentation-gradient":
            return FragmentationGradient(fleet, known, learn=learn)
        case "headroom":
            return Headroom(fleet, known, learn=learn, library=library)
        case _:
            raise ValueError(f"no policy is called {name!r}; there are {', '.join(POLICIES)}")


class _Run(NamedTuple):
    curve: dict[int, float]
    declined: int
    decision_ns: list[int]


def run_seed(
    trace: Trace, mix: Mix, policy: str, seed: int, *, learn: bool = False, library: StreamLibrary | None = None
) -> _Run:
    """One pass over the arrivals of a seed: allocated share by load, tasks declined though they fit, and times."""
    nodes = list(trace.nodes)
    random.Random(seed + 1_000_003).shuffle(nodes)  # noqa: S311 — the order that breaks ties
    fleet = Fleet(nodes)
    packer = Packer(fleet, build_policy(policy, fleet, mix, learn=learn, seed=seed, library=library))
    asked = allocated = declined = 0
    sums: dict[int, list[int]] = {}
    decision_ns: list[int] = []
    # Nothing is released, so what once fitted nowhere never will.
    hopeless: set[Shape] = set()
    for shape in arrivals(trace, seed):
        began_at = time.thread_time_ns()
        placement = packer.offer(shape)
        decision_ns.append(time.thread_time_ns() - began_at)
        asked += shape.total_milli
        if placement is not None:
            allocated += shape.total_milli
        elif shape not in hopeless:
            if any(_hosts(fleet, node, shape) for node in range(len(nodes))):
                declined += 1
            else:
                hopeless.add(shape)
        load = (200 * asked + fleet.capacity_milli) // (2 * fleet.capacity_milli)
        total, count = sums.get(load, (0, 0))
        sums[load] = [total + allocated, count + 1]
    curve = {load: 100 * total / count / fleet.capacity_milli for load, (total, count) in sums.items()}
    return _Run(curve, declined, decision_ns)


def _hosts(fleet: Fleet, node: int, shape: Shape) -> bool:
    """Whether the node has room, asked of its devices one by one and of no index."""
    cls = fleet.class_of(node)
    if cls.cpu_milli < shape.cpu_milli or cls.memory_mib < shape.memory_mib:
        return False
    if shape.models and fleet.specs[node].model not in shape.models:
        return False
    return sum(room >= shape.device_milli for room in fleet.rooms_of(node)) >= shape.devices


def measure(
    trace: Trace,
    *,
    variant: str,
    policy: str,
    seeds: Sequence[int],
    learn: bool = False,
    mix: Mix | None = None,
) -> Outcome:
    """The benchmark's figures; `mix` stands in for the variant's own, to see what a wrong one costs."""
    known = mix or trace.mix()
    # A live pool keeps what it knows of a mix as long as the mix holds; so do the seeds of one benchmark.
    library = StreamLibrary()
    runs = [run_seed(trace, known, policy, seed, learn=learn, library=library) for seed in seeds]
    times = sorted(ns for run in runs for ns in run.decision_ns)
    return Outcome(
        policy=policy,
        variant=variant,
        learn=learn,
        seeds=list(seeds),
        allocated_pct={
            str(load): round(sum(run.curve[load] for run in runs) / len(runs), 3)
            for load in LOADS_PERCENT
            if all(load in run.curve for run in runs)
        },
        declined=sum(run.declined for run in runs),
        decisions_per_s=round(len(times) * 1e9 / sum(times), 1),
        decision_us_p50=round(times[len(times) // 2] / 1000, 1),
        decision_us_p99=round(times[len(times) * 99 // 100] / 1000, 1),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m apportion.placer.bench_openb", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="directory with the openb files")
    parser.add_argument("--variant", default="default")
    parser.add_argument("--policy", choices=POLICIES, default="headroom")
    parser.add_argument("--seeds", type=int, default=10, help="how many, from 42 on")
    parser.add_argument("--learn", action="store_true", help="learn the mix from arrivals only")
    parser.add_argument("--mix", help="another variant whose mix the policy is told instead")
    parser.add_argument("-o", "--output", choices=("json", "text"), default="text")
    options = parser.parse_args(argv)
    trace = read_trace(options.trace, options.variant)
    told = read_trace(options.trace, options.mix).mix() if options.mix else None
    outcome = measure(
        trace,
        variant=options.variant,
        policy=options.policy,
        seeds=range(FIRST_SEED, FIRST_SEED + options.seeds),
        learn=options.learn,
        mix=told,
    )
    if options.output == "json":
        sys.stdout.write(json.dumps(outcome) + "\n")
    else:
        curve = "  ".join(f"{load} %: {share:.2f}" for load, share in outcome["allocated_pct"].items())
        sys.stdout.write(
            f"{outcome['policy']} on {outcome['variant']}, {len(outcome['seeds'])} seeds: {curve}\n"
            f"declined {outcome['declined']}, {outcome['decisions_per_s']:.0f} decisions/s, "
            f"p50 {outcome['decision_us_p50']} us, p99 {outcome['decision_us_p99']} us\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
