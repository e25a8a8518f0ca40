"""A bus and its log under a steady load: ``python -m tests.torture.soak``; ends with 9 where a bound was broken.

A real nats-server with fsync before each acknowledgement, the monitor's own process, and one author that commits facts
in fenced batches at a fixed rate: jobs that come, run and end on 64 nodes. Measured once a tenth of a second: how long
what was acknowledged took to be in the log, and what either process holds. What admission and the placer bear is
``bench.admission_rate``'s and ``bench.placer_rounds``'s to say.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import nats.errors
import structlog

from apportion.contracts import codec, subjects
from apportion.contracts import events as ev
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PLACER, PoolId
from apportion.monitor.log import log_path, verify
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus, Lease
from bench.history import messages

POOL: Final = PoolId("main")
BATCH_S: Final = 0.05
LOG_P99_S_MAX: Final = 1.0
GROWTH_MIB_MAX: Final = 48
"""From the middle of the run to its end, of either process: a leak of 40 bytes an event exceeds it in ten minutes."""
DRAINED_S_MAX: Final = 120.0


@dataclass
class Seen:
    """What was measured."""

    acked: int = 0
    behind_max: int = 0
    to_log_s: list[float] = field(default_factory=list)
    rss_mib: dict[str, list[float]] = field(default_factory=lambda: {"monitor": [], "bus": []})
    fds: dict[str, list[int]] = field(default_factory=lambda: {"monitor": [], "bus": []})
    batch_ms: list[float] = field(default_factory=list)
    late_s: float = 0.0
    """How far the author was behind its own plan at the worst."""


def _facts(count: int) -> Iterator[Message]:
    for one in messages(count, wishes=False):
        yield Message(subject=one.subject, headers=dict(one.headers or {}), body=one.body)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


class Soak:
    """One run."""

    def __init__(self, bus: Bus, lease: Lease, pids: dict[str, int]) -> None:
        self._bus, self._lease, self.pids = bus, lease, pids
        self._waiting: deque[tuple[int, float]] = deque()
        """Sequences that were acknowledged, and when: not known to be in the log yet."""
        self.seen = Seen()
        self.is_over = False

    async def publish(self, rate: int, seconds: float) -> float:
        """Commit facts at this rate; the seconds that it took."""
        source = _facts(int(rate * seconds) + 1)
        began = time.monotonic()
        total = int(rate * seconds)
        while self.seen.acked < total:
            due = min(total, int((time.monotonic() - began) * rate)) - self.seen.acked
            batch = [message for _, message in zip(range(min(due, 1000)), source, strict=False)]
            if batch:
                at = time.monotonic()
                seq = await self._bus.publish_fenced(self._lease, batch)
                now = time.monotonic()
                self.seen.batch_ms.append((now - at) * 1e3)
                self._waiting.append((seq, now))
                self.seen.acked += len(batch)
            late = (time.monotonic() - began) - self.seen.acked / rate
            self.seen.late_s = max(self.seen.late_s, late)
            await asyncio.sleep(max(0.0, BATCH_S - late))
        return time.monotonic() - began

    async def look(self) -> None:
        """What the monitor says it has, and what the processes hold, until it is over."""
        number = 0
        while not (self.is_over and not self._waiting):
            try:
                reply = await self._bus.client.request(subjects.query(POOL, "status"), b"{}", timeout=5)
            except (nats.errors.Error, TimeoutError):
                await asyncio.sleep(0.1)
                continue
            now = time.monotonic()
            facts = json.loads(reply.data)["streams"]["facts"]
            self.seen.behind_max = max(self.seen.behind_max, int(facts["behind"]))
            while self._waiting and self._waiting[0][0] <= int(facts["log_seq"]):
                self.seen.to_log_s.append(now - self._waiting.popleft()[1])
            if number % 10 == 0:
                for name, pid in self.pids.items():
                    self.seen.rss_mib[name].append(_rss_mib(pid))
                    self.seen.fds[name].append(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))
            number += 1
            await asyncio.sleep(0.1)


async def soak(folder: Path, *, rate: int, seconds: float) -> dict[str, Any]:
    """One run's figures."""
    async with EmbeddedServer(folder / "bus", port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="soak")
        await bus.provision()
        monitor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "apportion.monitor", "--bus-url", server.url, "--data-dir", str(folder)),
            stderr=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            claim = ev.LeaseClaimed(author=PLACER, session="soak", core="soak@1")
            lease = await bus.claim(PLACER, codec.encode_fact(POOL, PLACER, claim, event_id="claim"))
            assert server.pid is not None
            run = Soak(bus, lease, {"monitor": monitor.pid, "bus": server.pid})
            looking = asyncio.create_task(run.look())
            try:
                took_s = await run.publish(rate, seconds)
                run.is_over = True
                async with asyncio.timeout(DRAINED_S_MAX):
                    await looking
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            position = await bus.position(Stream.FACTS)
            # Wall time is the machine's; this is what an event costs wherever nothing else is at work.
            cpu = {name: round(_cpu_s(pid) / run.seen.acked * 1e6) for name, pid in run.pids.items()}
        finally:
            if monitor.returncode is None:
                monitor.terminate()
            await monitor.wait()
            await bus.close()
    verdict = await asyncio.to_thread(verify, log_path(folder, POOL))
    return {
        **_told(run.seen, took_s),
        "cpu_us_per_event": cpu,
        "facts_on_bus": position.last_seq,
        "rows_in_log": verdict.rows,
        "chain": verdict.ok,
    }


def _told(seen: Seen, took_s: float) -> dict[str, Any]:
    to_log = sorted(seen.to_log_s)
    return {
        "events": seen.acked,
        "seconds": round(took_s, 1),
        "events_per_s": round(seen.acked / took_s),
        "author_late_s_max": round(seen.late_s, 2),
        "batch_ms_p50": round(statistics.median(seen.batch_ms), 1),
        "to_log_s_p50": round(to_log[len(to_log) // 2], 2),
        "to_log_s_p99": round(to_log[len(to_log) * 99 // 100], 2),
        "behind_max": seen.behind_max,
        "rss_mib_max": {name: round(max(marks)) for name, marks in seen.rss_mib.items()},
        "growth_mib": {
            name: round(max(marks) - max(marks[: len(marks) // 2 + 1])) for name, marks in seen.rss_mib.items()
        },
        "fds_max": {name: max(marks) for name, marks in seen.fds.items()},
    }


def broken(told: dict[str, Any], rate: int) -> list[str]:
    """Which bounds were broken."""
    found = []
    if told["events_per_s"] < rate * 0.98:
        found.append(f"{told['events_per_s']} events/s of {rate}")
    if told["to_log_s_p99"] > LOG_P99_S_MAX:
        found.append(f"p99 of {told['to_log_s_p99']} s until in the log")
    found += [f"{name} grew by {mib} MiB" for name, mib in told["growth_mib"].items() if mib > GROWTH_MIB_MAX]
    if told["rows_in_log"] < told["facts_on_bus"] or not told["chain"]:
        found.append("the log has not what the bus has")
    return found


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.soak", description=__doc__)
    parser.add_argument("--rate", type=int, default=5_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="apportion-soak-") as folder:
        told = asyncio.run(soak(Path(folder), rate=asked.rate, seconds=asked.seconds))
    told["broken"] = broken(told, asked.rate)
    print(json.dumps({"cpus": os.cpu_count(), "load_before": round(load, 1), **told}, indent=2))
    return 9 if told["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
