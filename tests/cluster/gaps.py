"""How long nobody can write when a server of three is lost, and that nothing which was promised is lost with it."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

from apportion.contracts.envelope import Stream
from apportion.runtime.cluster import Cluster
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus
from tests.cluster.writing import POOL, Writer, lost, until_written, writers

FROZEN_S: Final = 12.0
"""Longer than it takes the others to do without it."""
LEADER, FOLLOWER = "leader", "follower"
FAULTS: Final = {
    "follower kill -9": (FOLLOWER, signal.SIGKILL),
    "leader kill -9": (LEADER, signal.SIGKILL),
    "leader frozen": (LEADER, signal.SIGSTOP),
    "leader told to end": (LEADER, signal.SIGTERM),
}


async def leader_of(bus: Bus, stream: Stream = Stream.WISHES) -> str:
    """The server that leads a stream."""
    async with asyncio.timeout(60):
        while True:
            try:
                info = await bus.jetstream.stream_info(bus.stream_name(stream))
            except Exception:  # noqa: BLE001 - nobody leads just now
                await asyncio.sleep(0.1)
                continue
            if info.cluster is not None and info.cluster.leader:
                return str(info.cluster.leader)
            await asyncio.sleep(0.1)


async def lose(cluster: Cluster, bus: Bus, found: list[Writer], who: str, number: signal.Signals) -> dict[str, float]:
    """The longest gap of the writer on the lost server, and of those elsewhere, in seconds."""
    leader = await leader_of(bus)
    name = leader if who == LEADER else next(one.name for one in cluster.members if one.name != leader)
    member = cluster.member(name)
    there = [writer for writer in found if writer.server == member.url.partition("//")[2]]
    pid = member.pid
    assert pid is not None
    began = time.monotonic()
    os.kill(pid, number)
    if number is signal.SIGSTOP:
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            os.kill(pid, signal.SIGCONT)
    await until_written(found, 30)
    async with asyncio.timeout(60):
        while await cluster.health():
            await asyncio.sleep(0.1)
    await until_written(found, 30)
    on_it = max((writer.gap_s(began) for writer in there), default=0.0)
    elsewhere = max((writer.gap_s(began) for writer in found if writer not in there), default=0.0)
    return {"on_it_s": round(on_it, 2), "elsewhere_s": round(elsewhere, 2)}


async def single(data_dir: Path, *, rounds: int = 5) -> dict[str, Any]:
    """The gap of one server alone, killed and started again by its supervision."""
    async with EmbeddedServer(data_dir, port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="gaps")
        try:
            await bus.provision()
            async with writers([server.url]) as saying:
                gaps = []
                for _ in range(rounds):
                    await until_written(saying, 30)
                    pid, began = server.pid, time.monotonic()
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    await until_written(saying, 30)
                    gaps.append(saying[0].gap_s(began))
            wrong = await lost(bus, saying)
        finally:
            await bus.close()
    return {
        "rounds": rounds,
        "s_max": round(max(gaps), 2),
        "acknowledged": len(saying[0].acked),
        "wrong": wrong,
        "holds": not wrong,
    }


async def measure(data_dir: Path, *, rounds: int = 2, faults: dict[str, Any] | None = None) -> dict[str, Any]:
    """Gaps by fault, and whether everything that was acknowledged is there."""
    found: dict[str, Any] = {}
    async with Cluster(data_dir, port=0) as cluster:
        bus = await Bus.connect(cluster.url, pool=POOL, name="gaps")
        try:
            await bus.provision(replicas=3)
            async with writers(cluster.url.split(",")) as saying:
                await until_written(saying, 50)
                for fault, (who, number) in (faults or FAULTS).items():
                    gaps = [await lose(cluster, bus, saying, who, number) for _ in range(rounds)]
                    found[fault] = {
                        "rounds": rounds,
                        **{f"{side}_max": max(gap[side] for gap in gaps) for side in ("on_it_s", "elsewhere_s")},
                    }
            found["acknowledged"] = sum(len(writer.acked) for writer in saying)
            found["wrong"] = await lost(bus, saying)
            found["holds"] = not found["wrong"]
        finally:
            await bus.close()
    return found
