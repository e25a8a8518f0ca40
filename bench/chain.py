"""The whole chain with ``/bin/true`` as the workload: jobs a second, latency when idle, and where the time goes.

Every step is durable: fsync before each acknowledgement, a row in the log for each event. A bare posix_spawn loop is
measured beside it, so that a slow machine shows as one. ``python -m bench.chain [--jobs N] [--idle N]``.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import structlog

from apportion.cli import leftovers
from apportion.cli.supervisor import NodePlan, PoolPlan, Supervisor
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.causes import Mode
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PoolId
from apportion.runtime.stream import Bus

POOL = PoolId("main")
HERTZ = os.sysconf("SC_CLK_TCK")
TERMINAL = frozenset(ev.type_name(kind) for kind in ev.TERMINAL)


def bare_rate(runs: int = 500) -> float:
    """Starts and ends a second of ``/bin/true`` by posix_spawn alone."""
    began = time.perf_counter()
    for _ in range(runs):
        os.waitpid(os.posix_spawn("/bin/true", ["/bin/true"], {}), 0)
    return runs / (time.perf_counter() - began)


def a_request(name: str) -> ev.JobRequested:
    """A quarter of a device for ``/bin/true``."""
    return ev.JobRequested(
        queue="main",
        job_id=name,
        workload=ev.Workload(command=("/bin/true",)),
        resources=ev.Resources(gpu_milli=250, gpu_memory_mib=4096, mode=Mode.TIMESLICE),
    )


def cpu_seconds(data_dir: Path) -> dict[str, float]:
    """CPU seconds that each process of the pool has used, its ended children included, by what it is."""
    used: defaultdict[str, float] = defaultdict(float)
    for found in leftovers.processes_of(data_dir):
        pid, kind = found.pid, found.kind
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        name = next(
            (
                s
                for s in ("admission", "placer", "monitor", "node_agent.simgpu", "spawner", "node_agent")
                if s in command
            ),
            "nats-server" if "nats-server" in command else str(kind),
        )
        used[name] += sum(map(int, fields[11:15])) / HERTZ
    return dict(used)


class Watch:
    """Follows the facts and notes when each job started and ended."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.started: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.steps: dict[str, dict[str, int]] = {}
        """Job to the stream's instant of each kind of fact, ns."""
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Follow from the end of the stream on."""
        reader = await self._bus.reader(Stream.FACTS, after=(await self._bus.position(Stream.FACTS)).last_seq)

        async def follow() -> None:
            async for batch in reader.batches():
                now = time.perf_counter()
                for raw in batch:
                    headers = raw.headers or {}
                    job = headers.get("ce-correlationid", "")
                    kind = headers.get("ce-type", "").removeprefix(codec.TYPE_PREFIX)
                    self.steps.setdefault(job, {})[kind.partition(".")[0]] = raw.recorded_at
                    if kind == "RunStarted.v1":
                        self.started[job] = now
                    elif kind in TERMINAL:
                        self.ended[job] = now
                self._news.set()

        self._task = asyncio.create_task(follow())

    async def until(self, there: dict[str, float], job: str = "", count: int = 0) -> None:
        """Until the job, or that many jobs, are in ``there``."""
        while (job and job not in there) or len(there) < count:
            self._news.clear()
            await self._news.wait()


async def idle_latency(bus: Bus, watch: Watch, count: int) -> dict[str, Any]:
    """One job at a time: from the publish to RunStarted, and to the end, as another client of the bus sees it."""
    starts, ends, steps = [], [], Counter[str]()
    for number in range(count):
        name = f"idle-{number}"
        message = codec.encode_wish(POOL, a_request(name), tenant="default", event_id=name, source="/bench")
        began = time.perf_counter()
        await bus.publish_wish(message)
        async with asyncio.timeout(60):
            await watch.until(watch.started, job=f"default/{name}")
            await watch.until(watch.ended, job=f"default/{name}")
        starts.append((watch.started[f"default/{name}"] - began) * 1000)
        ends.append((watch.ended[f"default/{name}"] - began) * 1000)
        seen = watch.steps[f"default/{name}"]
        order = ["JobAdmitted", "RunPlaced", "RunStarted", "RunFinished", "JobSucceeded"]
        for before, after in pairwise(order):
            if before in seen and after in seen:
                steps[f"{before} to {after}"] += seen[after] - seen[before]
        await asyncio.sleep(0.02)
    return {
        "jobs": count,
        "publish_to_started_ms_p50": round(statistics.median(starts), 1),
        "publish_to_started_ms_p99": round(statistics.quantiles(starts, n=100)[98], 1),
        "publish_to_ended_ms_p50": round(statistics.median(ends), 1),
        "between_facts_ms_mean": {step: round(ns / count / 1e6, 1) for step, ns in steps.items()},
    }


async def throughput(bus: Bus, watch: Watch, jobs: int, data_dir: Path) -> dict[str, Any]:
    """As many jobs as asked, published at once: from the first publish to the last job's end."""
    before = cpu_seconds(data_dir)
    ended = len(watch.ended)
    bare = bare_rate()
    began = time.perf_counter()
    window = asyncio.Semaphore(128)

    async def publish(number: int) -> None:
        async with window:
            name = f"load-{number}"
            await bus.publish_wish(
                codec.encode_wish(POOL, a_request(name), tenant="default", event_id=name, source="/bench")
            )

    publishing = asyncio.gather(*(publish(number) for number in range(jobs)))
    async with asyncio.timeout(600):
        await publishing
        published = time.perf_counter()
        await watch.until(watch.ended, count=ended + jobs)
    wall = time.perf_counter() - began
    after = cpu_seconds(data_dir)
    spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in sorted(after)}
    return {
        "jobs": jobs,
        "wall_s": round(wall, 2),
        "jobs_per_s": round(jobs / wall, 1),
        "published_in_s": round(published - began, 2),
        "cpu_ms_per_job": round(sum(spent.values()) / jobs * 1000, 2),
        "cpu_ms_per_job_by_process": {name: round(s / jobs * 1000, 2) for name, s in spent.items()},
        "bare_posix_spawn_per_s": round(bare, 1),
        "ratio_to_bare": round(jobs / wall / bare, 3),
    }


async def measure(jobs: int, idle: int, devices: int) -> dict[str, Any]:
    """A fresh pool, the latencies, the load, and the figures."""
    with tempfile.TemporaryDirectory(prefix="apportion-bench-") as folder:
        data_dir = Path(folder) / "data"
        queue = ev.QueueUpsertRequested(queue="main", tenants=("default",))
        plan = PoolPlan(
            pool=POOL,
            data_dir=data_dir,
            bus_port=0,
            nodes=(NodePlan(name="node-1", devices=devices, profile="h200"),),
            queues=(queue,),
            log_level="warning",
        )
        supervisor = Supervisor(plan)
        try:
            await supervisor.start()
            await supervisor.wait_ready()
            bus = await Bus.connect(supervisor.server.url, pool=POOL, name="bench", key=supervisor.key_of("operator"))
            watch = Watch(bus)
            await watch.start()
            warm = await throughput_warm_up(bus, watch)
            latency = await idle_latency(bus, watch, idle)
            load = await throughput(bus, watch, jobs, data_dir)
            await bus.close()
        finally:
            await supervisor.stop()
    return {"machine": machine(), "warm_up_jobs": warm, "idle": latency, "load": load}


async def throughput_warm_up(bus: Bus, watch: Watch) -> int:
    """A few jobs first, so that nothing measured pays for what happens once."""
    for number in range(10):
        name = f"warm-{number}"
        await bus.publish_wish(
            codec.encode_wish(POOL, a_request(name), tenant="default", event_id=name, source="/bench")
        )
    async with asyncio.timeout(60):
        await watch.until(watch.ended, count=10)
    return 10


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def main() -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=100)
    parser.add_argument("--devices", type=int, default=8)
    asked = parser.parse_args()
    # Figures alone on standard output: what the supervisor says belongs beside them.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        import uvloop  # the services' loop, where it is there

        figures = uvloop.run(measure(asked.jobs, asked.idle, asked.devices))
    except ImportError:
        figures = asyncio.run(measure(asked.jobs, asked.idle, asked.devices))
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
