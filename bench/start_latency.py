"""From a placement's receipt to its running process, slice set up and read back: the agent's core and shell, no bus.

On a simulated device, in modes that runs share; starts and finishes of ``/bin/true`` a second beside bare posix_spawn
in turns on the same machine. One JSON object. ``python bench/start_latency.py [--runs N] [--rounds N] [--at-once N]``.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from apportion.contracts.causes import Mode
from apportion.contracts.events import Fact, LeaseClaimed, RunPlaced, Slice
from apportion.contracts.ids import NodeId, RunId, agent_author
from apportion.contracts.testing import a_placement, as_fact
from apportion.node_agent import core
from apportion.node_agent.enforce.exclusive import Exclusive
from apportion.node_agent.enforce.mps import Mps
from apportion.node_agent.enforce.slices import Enforcer, Slices
from apportion.node_agent.enforce.timeslice import TimeSlice
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.host_limits import no_limits
from apportion.node_agent.machine import inventory_of
from apportion.node_agent.nvml import open_devices
from apportion.node_agent.processes import Processes
from apportion.node_agent.shell import Shell, session_leaders
from apportion.node_agent.simgpu.client import SOCKET_VARIABLE
from apportion.node_agent.simnode import SimulatedNode
from bench.spawn_rate import TRUE, bare, percentile

NODE = NodeId("node-1")
ME = agent_author(NODE)


class Node:
    """One node's core and shell, and a stream that is only remembered."""

    def __init__(self, shell: Shell, device: Any) -> None:
        self.core = core.AgentCore(NODE)
        self.state = self.core.initial()
        self.shell = shell
        self.device = device
        self.seq = 0
        self.count = 0
        self.started: dict[RunId, asyncio.Future[float]] = {}
        self.released: dict[RunId, asyncio.Future[None]] = {}
        shell.feed = self.observe

    def fold(self, fact: Fact, author: str = "") -> None:
        """Believe a fact, and act on it."""
        self.seq += 1
        self.state = self.core.evolve(self.state, as_fact(fact, self.seq, author=author))
        self.act()

    def act(self) -> None:
        """As the reactor does: instruct, then state, until there is nothing to say."""
        while True:
            for instruction in self.core.instruct(self.state, 1):
                self.state = self.core.issued(self.state, instruction)
                self.shell.perform(instruction)
            facts = self.core.decide(self.state, 1)
            if not facts:
                return
            for fact in facts:
                self.seq += 1
                self.state = self.core.evolve(self.state, as_fact(fact, self.seq, author=ME))

    def observe(self, seen: core.Observation) -> None:
        """What the shell saw; who waits for it is told."""
        if isinstance(seen, core.ProcessStarted):
            self.started[seen.run_id].set_result(time.perf_counter())
        elif isinstance(seen, core.StartFailed):
            self.started[seen.run_id].set_exception(RuntimeError(seen.detail))
        self.state = self.core.observe(self.state, seen, 1)
        self.act()
        if isinstance(seen, core.SlicesReleased):
            self.released[seen.run_id].set_result(None)

    def place(self, mode: Mode) -> tuple[RunPlaced, float]:
        """Place one more run; when that was received."""
        self.count += 1
        piece = Slice(device_uuid=self.device.uuid, compute_milli=10, memory_mib=256, mode=mode)
        order = a_placement(f"bench/true-{self.count}", command=(TRUE,), slices=(piece,))
        loop = asyncio.get_running_loop()
        self.started[order.run_id], self.released[order.run_id] = loop.create_future(), loop.create_future()
        received = time.perf_counter()
        self.fold(order)
        return order, received

    async def latencies_ms(self, runs: int, mode: Mode) -> list[float]:
        """From the placement to the running process, one at a time."""
        took = []
        for _ in range(runs):
            order, received = self.place(mode)
            took.append((await self.started[order.run_id] - received) * 1000)
            await self.released[order.run_id]
        return took

    async def rate(self, runs: int, at_once: int, mode: Mode) -> float:
        """Runs a second from placement to released slices."""
        room = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with room:
                order, _ = self.place(mode)
                await self.started[order.run_id]
                await self.released[order.run_id]

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(runs)))
        return runs / (time.perf_counter() - began)


@asynccontextmanager
async def a_node(directory: Path) -> AsyncIterator[Node]:
    """A node with one simulated device and all that its agent has, less the bus."""
    simulated = SimulatedNode(NODE, state_dir=directory, devices=1, profile="h200")
    await simulated.open()
    try:
        with open_devices(simulated.socket_path) as devices:
            async with Processes(directory, spawner_idle_s=1) as processes:
                path, env = f"{simulated.tools}:{os.defpath}", {SOCKET_VARIABLE: str(simulated.socket_path)}
                watchdog = Watchdog(devices, session_of=session_leaders(processes))
                mps = Mps(devices, watchdog, directory=directory / "mps", path=path, env=env)
                enforcers: dict[Mode, Enforcer] = {
                    Mode.EXCLUSIVE: Exclusive(devices, end_idle_mps=mps.end_idle, directory=directory / "exclusive"),
                    Mode.MPS: mps,
                    Mode.TIMESLICE: TimeSlice(devices, watchdog),
                }
                inventory = inventory_of(devices, path=path, is_simulated=True, env=env)
                slices = Slices(devices, enforcers, usable={one.uuid: one for one in inventory.devices})
                shell = Shell(
                    processes=processes,
                    slices=slices,
                    watchdog=watchdog,
                    mps=mps,
                    path=path,
                    node_env=env,
                    host=no_limits(directory),
                )
                node = Node(shell, inventory.devices[0])
                node.observe(core.InventoryChanged(inventory=inventory))
                node.observe(await shell.adopt("bench"))
                node.fold(LeaseClaimed(author=ME, session="bench", core=core.POLICY), author=ME)
                ends = asyncio.create_task(shell.run())
                try:
                    yield node
                finally:
                    ends.cancel()
                    await shell.close()
                    await mps.end_idle(inventory.devices[0].uuid)
    finally:
        await simulated.close()
        simulated.kill()


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    result: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "kernel": os.uname().release, "load": os.getloadavg()[0]},
        "runs": arguments.runs,
        "at_once": arguments.at_once,
    }
    with tempfile.TemporaryDirectory(prefix="apportion-bench-") as text:
        async with a_node(Path(text)) as node:
            for mode in (Mode.TIMESLICE, Mode.MPS, Mode.EXCLUSIVE):
                at_once = 1 if mode is Mode.EXCLUSIVE else arguments.at_once
                await node.latencies_ms(5, mode)  # The spawner's and the daemon's start belong to no run.
                took = await node.latencies_ms(arguments.runs // 2, mode)
                rates, ratios, bares, cpu_ms = [], [], [], []
                for _ in range(arguments.rounds):
                    bares.append((await asyncio.to_thread(bare, arguments.runs))[0])
                    before = time.process_time()
                    rates.append(await node.rate(arguments.runs, at_once, mode))
                    cpu_ms.append((time.process_time() - before) / arguments.runs * 1000)
                    ratios.append(rates[-1] / bares[-1])
                result[str(mode)] = {
                    "placed_to_running_ms_p50": round(percentile(took, 0.5), 2),
                    "placed_to_running_ms_p99": round(percentile(took, 0.99), 2),
                    "runs_per_s": round(statistics.median(rates), 1),
                    "agent_cpu_ms": round(statistics.median(cpu_ms), 2),
                    "posix_spawn_per_s": round(statistics.median(bares), 1),
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
