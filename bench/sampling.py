"""What looking costs a node's agent: devices' readings and health every second, runs' memory twice a second.

With 8 devices and 64 runs, each a real process with a context on a simulated device. The CPU time of the agent's own
process is measured, in percent of one core; NVML's answers come over a socket here, which costs more than the library.
One JSON object. ``python -m bench.sampling [--devices N] [--runs N] [--seconds N]``.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from apportion.contracts.causes import Mode
from apportion.contracts.events import Slice
from apportion.contracts.ids import DeviceUuid, NodeId, RunId
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.health_watch import HealthWatch
from apportion.node_agent.nvml import Devices, open_devices
from apportion.node_agent.simgpu import workload
from apportion.node_agent.simgpu.client import SOCKET_VARIABLE
from apportion.node_agent.simnode import SimulatedNode
from apportion.runtime.clock import SystemClock

_MEMORY_MIB: Final = 512
_LOOKS_PER_S: Final = 2
_COME_S_MAX: Final = 120.0


def _hold(node: SimulatedNode, uuid: DeviceUuid) -> "subprocess.Popen[bytes]":
    """A run's process: it takes its memory and waits."""
    options = ("serve", "--seconds", "3600", "--interval-ms", "3600000", "--memory-mib", str(_MEMORY_MIB))
    return subprocess.Popen(
        [sys.executable, "-S", "-E", workload.__file__, *options],
        env={SOCKET_VARIABLE: str(node.socket_path), "CUDA_VISIBLE_DEVICES": uuid},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _all_there(devices: Devices, uuids: list[DeviceUuid], count: int) -> None:
    async with asyncio.timeout(_COME_S_MAX):
        while sum(len(devices.processes(uuid)) for uuid in uuids) < count:  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.1)


async def measure(*, devices: int, runs: int, seconds: int) -> dict[str, Any]:
    """The figures: CPU time for each second of sampling, and what each part of it takes."""
    with tempfile.TemporaryDirectory(prefix="sampling-") as directory:
        node = SimulatedNode(NodeId("node-1"), state_dir=Path(directory), devices=devices, profile="h200")
        await node.open()
        held: list[subprocess.Popen[bytes]] = []
        try:
            with open_devices(node.socket_path) as opened:
                uuids = [info.uuid for info in opened.inventory()]
                sessions: dict[int, RunId] = {}
                watchdog = Watchdog(opened, session_of=sessions.get)
                for number in range(runs):
                    uuid = uuids[number % devices]
                    process = _hold(node, uuid)
                    held.append(process)
                    run = RunId(f"acme/job-{number}/0/1")
                    sessions[process.pid] = run
                    piece = Slice(device_uuid=uuid, compute_milli=100, memory_mib=2048, mode=Mode.TIMESLICE)
                    watchdog.watch(run, piece)
                await _all_there(opened, uuids, runs)
                health = HealthWatch(
                    opened,
                    uuids,
                    clock=SystemClock(),
                    feed=lambda _: None,
                    suspect=lambda *_: None,
                    env={},
                    file=Path(directory) / "health.json",
                    may_reset=False,
                )
                parts = {"memory_of_runs": watchdog.look, "readings": health.samples, "health": health.look}
                watchdog.look()
                spent = dict.fromkeys(parts, 0.0)
                for _ in range(seconds):
                    for name, part in parts.items():
                        for _ in range(_LOOKS_PER_S if name == "memory_of_runs" else 1):
                            began = time.process_time()
                            part()
                            await asyncio.sleep(0)  # Health is looked at in a task of its own.
                            spent[name] += time.process_time() - began
                seen = len(watchdog.used_mib)
        finally:
            for process in held:
                process.kill()
                process.wait()
            await node.close()
            node.kill()
            os.waitpid(node.pid, 0)  # noqa: ASYNC222  it was killed a moment ago
    each = {f"{name}_cpu_us_per_s": round(1e6 * total / seconds) for name, total in spent.items()}
    return {
        "devices": devices,
        "runs": runs,
        "runs_seen": seen,
        **each,
        "core_permille": round(1000 * sum(spent.values()) / seconds, 1),
        "cpus": os.cpu_count(),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=20, help="of sampling, done without waiting in between")
    given, _ = parser.parse_known_args()
    sys.stdout.write(json.dumps(asyncio.run(measure(**vars(given)))) + "\n")


if __name__ == "__main__":
    main()
