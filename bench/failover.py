"""How long nobody decides: an active author killed or paused in a pool with standbys, until another has taken over.

A whole pool of ``apportion up --standby``, in turns for monitor, admission and placer. Measured from the signal to the
other session's claim on the stream, and to its readiness. Prints one JSON object.
``python -m bench.failover [--rounds N]``.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import structlog

from apportion.cli.queues import DEFAULT
from apportion.cli.supervisor import AUTHORS, STANDBY, NodePlan, PoolPlan, Service, Supervisor
from apportion.contracts import subjects
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import Author, PoolId
from apportion.runtime.health import probe
from apportion.runtime.stream import Bus

POOL = PoolId("main")
WAIT_S_MAX = 30.0


def role(service: Service) -> str:
    """``active``, ``standby``, or what it isn't ready for."""
    port = service.health_port
    is_ready, said = probe(port, timeout_s=0.5) if port else (False, "")
    return str(json.loads(said)["role"]) if is_ready else "not ready"


async def until_role(service: Service, wanted: str) -> None:
    """Once the service has that role."""

    def wait() -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while role(service) != wanted:
            assert time.monotonic() < deadline, f"{service.name} is not {wanted} after {WAIT_S_MAX:g} s"
            time.sleep(0.01)

    await asyncio.to_thread(wait)


async def a_round(supervisor: Supervisor, bus: Bus, name: str, number: signal.Signals) -> tuple[float, float]:
    """Seconds from the signal to the other's claim, and to its being ready to decide."""
    pair = [supervisor.services[name], supervisor.services[f"{name}-{STANDBY}"]]
    while True:
        roles = [await asyncio.to_thread(role, service) for service in pair]
        if sorted(roles) == ["active", "standby"]:
            break
        await asyncio.sleep(0.05)
    active, other = pair if roles[0] == "active" else pair[::-1]
    at = (await bus.position(Stream.FACTS)).last_seq
    claims = await bus.reader(Stream.FACTS, after=at, filters=(subjects.lease(POOL, Author(name)),))
    await asyncio.sleep(0.5)  # the reader's consumer is made, and neither process has just begun
    pid = active.pid
    assert pid is not None
    os.kill(pid, number)
    began = time.monotonic()
    async with asyncio.timeout(WAIT_S_MAX):
        await claims.ready.wait()
    claimed_s = time.monotonic() - began
    await until_role(other, "active")
    ready_s = time.monotonic() - began
    await claims.close()
    if number is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)  # it reads of the claim, ends, and is started as the standby
    await until_role(active, "standby")
    return claimed_s, ready_s


async def measure(rounds: int, data_dir: Path) -> dict[str, dict[str, float]]:
    """Figures by author and signal."""
    supervisor = Supervisor(
        PoolPlan(
            pool=POOL,
            data_dir=data_dir,
            bus_port=0,
            nodes=(NodePlan(name="node-1", devices=2, profile="h200"),),
            queues=DEFAULT,
            standby=True,
        )
    )
    found: dict[str, dict[str, float]] = {}
    try:
        await supervisor.start()
        bus = await Bus.connect(supervisor.server.url, pool=POOL, name="bench", key=supervisor.key_of("operator"))
        try:
            for name in AUTHORS:
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    times = [await a_round(supervisor, bus, name, number) for _ in range(rounds)]
                    claimed, ready = [one for one, _ in times], [other for _, other in times]
                    found[f"{name} {number.name}"] = {
                        "rounds": rounds,
                        "claimed_s_p50": round(statistics.median(claimed), 2),
                        "claimed_s_max": round(max(claimed), 2),
                        "ready_s_p50": round(statistics.median(ready), 2),
                        "ready_s_max": round(max(ready), 2),
                    }
        finally:
            await bus.close()
    finally:
        await supervisor.stop()
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments, _ = parser.parse_known_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(arguments.rounds, Path(folder)))
    load = os.getloadavg()[0]
    sys.stdout.write(json.dumps({"load": round(load, 1), "cpus": os.cpu_count(), "failover": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
