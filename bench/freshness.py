"""How old an SQL answer is while the log is written: its copy's age, and how far that stood behind the bus.

A bus and a monitor of their own; facts are published at a fixed rate while one question after another is asked.
``python -m bench.freshness [--rate N] [--seconds S]``.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import nats.errors
import structlog

from apportion.contracts import codec, subjects
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PLACER, PoolId
from apportion.contracts.testing import a_placement
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

POOL = PoolId("main")
QUESTION = "SELECT max(recorded_at), count(*) FROM v_event WHERE kind = 'RunPlaced'"


async def measured(rate: int, seconds: float) -> dict[str, Any]:
    """Percentiles in ms: ``age`` as the answer says, ``behind`` from its newest row to the moment it was there."""
    with tempfile.TemporaryDirectory(prefix="apportion-freshness-") as folder:
        async with EmbeddedServer(Path(folder) / "bus", port=0) as server:
            bus = await Bus.connect(server.url, pool=POOL, name="bench")
            await bus.provision()
            monitor = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "apportion.monitor", "--bus-url", server.url, "--data-dir", folder
            )
            stop = asyncio.Event()
            writing = asyncio.create_task(_write(bus, rate, stop))
            try:
                return {**await _asked(bus, seconds), "rate": rate}
            finally:
                stop.set()
                await writing
                monitor.terminate()
                await monitor.wait()
                await bus.close()


async def _write(bus: Bus, rate: int, stop: asyncio.Event) -> None:
    number = 0
    began = time.monotonic()
    while not stop.is_set():
        due = int((time.monotonic() - began) * rate) - number
        messages = [
            codec.encode_fact(POOL, PLACER, a_placement(f"acme/j{n}"), event_id=f"f{n}")
            for n in range(number, number + due)
        ]
        await asyncio.gather(*(bus.jetstream.publish(m.subject, m.body, headers=m.headers) for m in messages))
        number += due
        await asyncio.sleep(0.02)


async def _asked(bus: Bus, seconds: float) -> dict[str, Any]:
    ages: list[int] = []
    behind: list[int] = []
    deadline: float | None = None
    rows = 0
    while deadline is None or time.monotonic() < deadline:
        try:
            reply = await bus.client.request(
                subjects.query(POOL, "sql"), msgspec.json.encode({"statement": QUESTION}), timeout=15
            )
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
            await asyncio.sleep(0.1)  # the monitor is starting
            continue
        answer = msgspec.json.decode(reply.data)
        if deadline is None:
            deadline = time.monotonic() + seconds
            continue
        ages.append(answer["as_of"]["age_ms"])
        behind.append((time.time_ns() - answer["rows"][0][0]) // 1_000_000)
        rows = answer["rows"][0][1]
    last = (await bus.position(Stream.FACTS)).last_seq
    return {
        "answers": len(ages),
        "rows": rows,
        "facts": last,
        "age_ms": _percentiles(ages),
        "behind_ms": _percentiles(behind),
    }


def _percentiles(values: list[int]) -> dict[str, int]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95, 100)}


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=20.0)
    given, _ = parser.parse_known_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    found = asyncio.run(measured(given.rate, given.seconds))
    print(json.dumps({"bench": "freshness", "machine": f"{platform.machine()} {platform.python_version()}", **found}))


if __name__ == "__main__":
    main()
