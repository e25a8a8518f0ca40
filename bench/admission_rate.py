"""Admissions a second through the live chain: durable wishes from one process, durable facts from admission's.

A real nats-server that syncs before each acknowledgement, the real admission process, and a publisher that waits for
the server's word on every wish, many at a time. Measured by the server's clock, from the first wish stored to the last
admission stored. Before each round the same publisher fills another pool's stream, which nobody reads: what disk and
server give at best, at that moment. CPU is told of each process, as that says more of a machine that is shared than
its rate does.
``python -m bench.admission_rate [--wishes N] [--rounds N] [--profile]``.
"""

import argparse
import asyncio
import json
import os
import platform
import pstats
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import OPERATOR, PoolId, TenantId
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

POOL = PoolId("main")
UNREAD = PoolId("bare")
ACME = TenantId("acme")
WINDOW = 256
"""Wishes on their way at once, as one publisher's window."""
HERTZ = os.sysconf("SC_CLK_TCK")


def a_wish(name: str) -> ev.JobRequested:
    """What most wishes are like: a share of a device, a command, a little text."""
    return ev.JobRequested(
        queue="main",
        job_id=name,
        idempotency_key=f"airflow-{name}",
        workload=ev.Workload(command=("/usr/bin/python3", "train.py", "--epochs", "3"), env={"LEVEL": "debug"}),
        resources=ev.Resources(gpu_milli=250, gpu_memory_mib=4096),
        labels={"team": "vision"},
    )


async def publish(url: str, pool: PoolId, prefix: str, count: int) -> None:
    """Publish that many wishes and wait for each to be on disk; prints the seconds that it took."""
    bus = await Bus.connect(url, pool=pool, name="publisher")
    messages = [
        codec.encode_wish(pool, a_wish(f"{prefix}-{i}"), tenant=ACME, event_id=f"{prefix}-{i}", source="/bench")
        for i in range(count)
    ]
    free = asyncio.Semaphore(WINDOW)

    async def one(message: codec.Message) -> None:
        async with free:
            await bus.publish_wish(message)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(message) for message in messages))
    print(time.perf_counter() - began, time.process_time() - cpu, flush=True)
    await bus.close()


async def publisher(url: str, pool: PoolId, prefix: str, count: int) -> tuple[float, float]:
    """Seconds that a process of its own took to publish that many, and how many of CPU."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.admission_rate", "--publish", url, pool, prefix, "--wishes", str(count),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0, f"the publisher ended with {process.returncode}"
    took_s, used_s = map(float, out.split())
    return took_s, used_s


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HERTZ


async def admitted(bus: Bus, after: int, count: int) -> tuple[int, int]:
    """Once that many jobs were admitted after that fact: the last one's instant, and how many batches they came in."""
    reader = await bus.reader(Stream.FACTS, after=after)
    seen, last_at, bases = 0, 0, set[str]()
    try:
        async for batch in reader.batches():
            for raw in batch:
                headers = raw.headers or {}
                if headers.get("ce-type", "").endswith("JobAdmitted.v1"):
                    seen += 1
                    last_at = raw.recorded_at
                    bases.add(headers.get("ce-id", "").rpartition(".")[0])
            if seen >= count:
                return last_at, len(bases)
    finally:
        await reader.close()
    raise AssertionError("the stream of facts ended")


async def a_round(bus: Bus, url: str, name: str, count: int, pids: dict[str, int]) -> dict[str, Any]:
    """One burst of wishes, from the first stored to the last admitted."""
    facts = (await bus.position(Stream.FACTS)).last_seq
    wishes = (await bus.position(Stream.WISHES)).last_seq
    before = {who: cpu_s(pid) for who, pid in pids.items()}
    watching = asyncio.create_task(admitted(bus, facts, count))
    published_s, publisher_s = await publisher(url, POOL, name, count)
    last_at, batches = await watching
    used = {who: cpu_s(pid) - before[who] for who, pid in pids.items()} | {"publisher": publisher_s}
    first = await bus.jetstream.get_msg(bus.stream_name(Stream.WISHES), wishes + 1)
    assert first.time is not None
    took_s = last_at / 1e9 - first.time.timestamp()
    return {
        "admissions_per_s": round(count / took_s),
        "published_per_s": round(count / published_s),
        "batches": batches,
        "cpu_ms_per_admission": {who: round(1000 * seconds / count, 2) for who, seconds in used.items()},
    }


async def measure(wishes: int, rounds: int, data_dir: Path, profile: Path | None) -> dict[str, Any]:
    """Figures of each round, with the bare publishes before it."""
    async with EmbeddedServer(data_dir, port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="bench")
        await bus.provision()
        found: dict[str, Any] = {"wishes": wishes, "rounds": []}
        unread = await Bus.connect(server.url, pool=UNREAD, name="bench")
        await unread.provision()
        await unread.close()
        queue = ev.QueueUpsertRequested(queue="main", tenants=("acme",))
        arguments = ["-m", "apportion.admission", "--bus-url", server.url, "--pool", POOL, "--data-dir", str(data_dir)]
        if profile is not None:
            arguments = ["-m", "cProfile", "-o", str(profile), *arguments]
        admission = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, "--tenant-pending-max", "0", "--pool-pending-max", "0",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            seq = await bus.publish_wish(
                codec.encode_wish(POOL, queue, tenant=OPERATOR, event_id="queue", source="/bench")
            )
            await answered(bus, seq)
            assert server.pid is not None
            pids = {"admission": admission.pid, "nats-server": server.pid}
            for number in range(rounds):
                took_s, _ = await publisher(server.url, UNREAD, f"bare-{number}", wishes)
                rate = wishes / took_s
                figures = await a_round(bus, server.url, f"round-{number}", wishes, pids)
                figures["bare_publishes_per_s"] = round(rate)
                figures["of_bare"] = round(figures["admissions_per_s"] / rate, 2)
                found["rounds"].append(figures)
        finally:
            with suppress(ProcessLookupError):
                admission.terminate()
            await admission.wait()
            await bus.close()
    return found


async def answered(bus: Bus, seq: int) -> None:
    """Once that wish has its answer."""
    reader = await bus.reader(Stream.FACTS, after=0)
    try:
        async for batch in reader.batches():
            for raw in batch:
                entry = codec.decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at)
                if getattr(entry.event, "answers", 0) == seq:
                    return
    finally:
        await reader.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wishes", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="admission runs under cProfile; its top is printed")
    parser.add_argument("--publish", nargs=3, metavar=("URL", "POOL", "PREFIX"), help=argparse.SUPPRESS)
    asked, _ = parser.parse_known_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    if asked.publish:
        url, pool, prefix = asked.publish
        asyncio.run(publish(url, PoolId(pool), prefix, asked.wishes))
        return
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile" if asked.profile else None
        found = asyncio.run(measure(asked.wishes, asked.rounds, Path(folder), profile))
        machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
        sys.stdout.write(json.dumps({**machine, **found}, indent=1) + "\n")
        if profile is not None:
            pstats.Stats(str(profile), stream=sys.stdout).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
