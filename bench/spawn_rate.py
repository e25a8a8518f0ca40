"""How fast a node starts and finishes runs: ``/bin/true`` through the spawner and its shims, beside bare posix_spawn.

Both are measured in turns on the same machine, so that the ratio means something where other work is going on.
Prints one JSON object. ``python bench/spawn_rate.py [--runs N] [--rounds N] [--at-once N]``.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from apportion.contracts.ids import RunId
from apportion.node_agent.processes import Launch, Processes
from apportion.node_agent.run_records import Exited

TRUE = "/bin/true"
HERTZ = os.sysconf("SC_CLK_TCK")


def bare(runs: int) -> tuple[float, float]:
    """Runs a second by posix_spawn and wait alone, and CPU milliseconds of each."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time(), time.perf_counter()
    for _ in range(runs):
        os.waitpid(os.posix_spawn(TRUE, [TRUE], {}), 0)
    wall_s = time.perf_counter() - before[2]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = children.ru_utime + children.ru_stime - before[0].ru_utime - before[0].ru_stime
    return runs / wall_s, (cpu_s + time.process_time() - before[1]) / runs * 1000


def cpu_s_of(pid: int) -> float:
    """CPU seconds that a process has used, its children left out."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HERTZ


class Bench:
    """One node's processes under measurement."""

    def __init__(self, processes: Processes, *, held: bool) -> None:
        self._processes = processes
        self._held = held
        self._count = 0

    async def start(self) -> RunId:
        """One more run, through the gate where runs are held."""
        self._count += 1
        run = RunId(f"bench/true-{int(self._held)}/{self._count}/1")
        launch = Launch(run_id=run, epoch=1, argv=(TRUE,), env={})
        if self._held:
            await self._processes.prepare(launch)
            await self._processes.release(run)
        else:
            await self._processes.start(launch)
        return run

    async def latencies_ms(self, runs: int) -> list[float]:
        """From the order to the running workload, one at a time."""
        took = []
        for _ in range(runs):
            began = time.perf_counter()
            run = await self.start()
            took.append((time.perf_counter() - began) * 1000)
            await self._processes.ended(run)
        return took

    async def rate(self, runs: int, at_once: int) -> dict[str, float]:
        """Starts and finishes a second, and where the CPU time went."""
        room = asyncio.Semaphore(at_once)
        ends: list[Exited] = []

        async def one() -> None:
            async with room:
                end = await self._processes.ended(await self.start())
                assert isinstance(end, Exited)
                assert end.exit_code == 0
                ends.append(end)

        spawner = self._processes.spawner_pid
        assert spawner is not None
        before = time.process_time(), cpu_s_of(spawner), time.perf_counter()
        await asyncio.gather(*(one() for _ in range(runs)))
        wall_s = time.perf_counter() - before[2]
        return {
            "per_s": runs / wall_s,
            "agent_cpu_ms": (time.process_time() - before[0]) / runs * 1000,
            "spawner_cpu_ms": (cpu_s_of(spawner) - before[1]) / runs * 1000,
            "shim_cpu_ms": sum(end.shim_cpu_us for end in ends) / runs / 1000,
            "workload_cpu_ms": sum(end.cpu_us for end in ends) / runs / 1000,
        }


def percentile(values: list[float], fraction: float) -> float:
    """The value that this fraction of all stays at or below."""
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    result: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "kernel": os.uname().release, "load": os.getloadavg()[0]},
        "runs": arguments.runs,
        "at_once": arguments.at_once,
    }
    with tempfile.TemporaryDirectory(prefix="apportion-bench-") as directory:
        async with Processes(Path(directory), spawner_idle_s=1) as processes:
            await processes.adopt()
            for name, held in (("open", False), ("held", True)):
                bench = Bench(processes, held=held)
                await bench.latencies_ms(5)  # The spawner's start belongs to no run.
                took = await bench.latencies_ms(arguments.runs // 2)
                rounds, ratios, bares = [], [], []
                for _ in range(arguments.rounds):
                    bares.append(await asyncio.to_thread(bare, arguments.runs))
                    rounds.append(await bench.rate(arguments.runs, arguments.at_once))
                    ratios.append(rounds[-1]["per_s"] / bares[-1][0])
                medians = {key: round(statistics.median(r[key] for r in rounds), 3) for key in rounds[0]}
                result[name] = {
                    "idle_start_ms_p50": round(percentile(took, 0.5), 2),
                    "idle_start_ms_p99": round(percentile(took, 0.99), 2),
                    **medians,
                    "cpu_ms": round(sum(value for key, value in medians.items() if key.endswith("cpu_ms")), 3),
                    "posix_spawn_per_s": round(statistics.median(rate for rate, _ in bares), 1),
                    "posix_spawn_cpu_ms": round(statistics.median(cpu for _, cpu in bares), 3),
                    "ratio_to_posix_spawn": round(statistics.median(ratios), 3),
                }
    return result


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=16)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
