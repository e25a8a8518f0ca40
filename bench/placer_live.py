"""A thousand placements through the live chain: admissions on the bus, a real placer's process, placements on the bus.

A real nats-server that syncs before each acknowledgement, the whole openb fleet registered on it, and bursts of tasks
of the trace, admitted at once. Measured by the server's clock, from the first admission stored to the last placement
stored, so that reading, deciding and committing are in it. CPU is told of each process.
``python -m bench.placer_live --trace DIR [--policy P] [--jobs N] [--rounds N] [--profile]``.
"""

import argparse
import asyncio
import json
import os
import platform
import pstats
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from apportion.contracts.envelope import Stream
from apportion.contracts.ids import ADMISSION, PoolId, agent_author
from apportion.contracts.testing import a_queue
from apportion.placer import bench_openb
from apportion.placer.bench_pool import registered
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus
from bench.admission_rate import cpu_s
from bench.placer_rounds import QUEUE, admitted
from tests.speaker import Speaker

POOL = PoolId("main")
BATCH = 500
"""Admissions that travel together."""


async def instants(bus: Bus, after: int, name: str, count: int) -> list[int]:
    """When that many facts of a type were stored, once they are."""
    reader = await bus.reader(Stream.FACTS, after=after)
    found: list[int] = []
    try:
        async for batch in reader.batches():
            found += [raw.recorded_at for raw in batch if (raw.headers or {}).get("ce-type", "").endswith(name)]
            if len(found) >= count:
                return found
    finally:
        await reader.close()
    raise AssertionError("the stream of facts ended")


async def measure(trace: bench_openb.Trace, options: argparse.Namespace, data_dir: Path) -> dict[str, Any]:
    """Figures of each burst."""
    async with EmbeddedServer(data_dir, port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="bench")
        await bus.provision()
        admission = Speaker(bus, ADMISSION)
        await admission.state(a_queue(QUEUE))
        for node in registered(trace, bench_openb.FIRST_SEED):
            await Speaker(bus, agent_author(node.node_id)).state(node)
        arguments = ["-m", "apportion.placer", "--bus-url", server.url, "--pool", POOL, "--data-dir", str(data_dir)]
        if options.policy:
            arguments += ["--policy", options.policy]
        profile = data_dir / "profile"
        if options.profile:
            arguments = ["-m", "cProfile", "-o", str(profile), *arguments]
        placer = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        found: dict[str, Any] = {"jobs": options.jobs, "nodes": len(trace.nodes), "rounds": []}
        tasks = list(bench_openb.arrivals(trace, bench_openb.FIRST_SEED))
        try:
            assert server.pid is not None
            pids = {"placer": placer.pid, "nats-server": server.pid}
            # One job first: the placer has read the fleet once that is placed.
            await admission.state(admitted(0, tasks[0]))
            await asyncio.wait_for(instants(bus, 0, "RunPlaced.v1", 1), 120)
            number = 1
            for _ in range(options.rounds):
                after = (await bus.position(Stream.FACTS)).last_seq
                before = {who: cpu_s(pid) for who, pid in pids.items()}
                jobs = [admitted(number + at, tasks[number + at]) for at in range(options.jobs)]
                number += options.jobs
                for start in range(0, len(jobs), BATCH):
                    await admission.state(*jobs[start : start + BATCH])
                placed = await asyncio.wait_for(instants(bus, after, "RunPlaced.v1", options.jobs), 120)
                came = await instants(bus, after, "JobAdmitted.v1", options.jobs)
                used = {who: round(cpu_s(pid) - before[who], 2) for who, pid in pids.items()}
                found["rounds"].append({"seconds": round((placed[-1] - came[0]) / 1e9, 3), "cpu_s": used})
        finally:
            with suppress(ProcessLookupError):
                placer.terminate()
            await placer.wait()
            await bus.close()
        if options.profile:
            pstats.Stats(str(profile), stream=sys.stderr).sort_stats("tottime").print_stats(30)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="directory with the openb files")
    parser.add_argument("--policy", default="", help="the placer's own default where it is not said")
    parser.add_argument("--jobs", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="the placer runs under cProfile; its top is printed")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    trace = bench_openb.read_trace(options.trace, "default")
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(trace, options, Path(folder)))
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    sys.stdout.write(json.dumps({**machine, **found}) + "\n")


if __name__ == "__main__":
    main()
