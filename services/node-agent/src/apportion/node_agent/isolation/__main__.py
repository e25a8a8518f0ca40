"""The isolation tests without a pool: ``python -m apportion.node_agent.isolation``, for a laptop, CI or a new board.

On simulated devices of its own, or with ``--hardware`` on this machine's. One JSON object a verdict; the exit code is
0 only where every test passed, or reported what its mode doesn't promise.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import structlog

from apportion.contracts.causes import IsolationFinding, IsolationTest, Mode
from apportion.contracts.events import IsolationVerdict
from apportion.contracts.ids import NodeId
from apportion.node_agent.enforce.cgroup_memory import CgroupMemory
from apportion.node_agent.enforce.exclusive import Exclusive
from apportion.node_agent.enforce.mig import Mig
from apportion.node_agent.enforce.mps import Mps
from apportion.node_agent.enforce.slices import Enforcer, Slices
from apportion.node_agent.enforce.timeslice import TimeSlice
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.isolation.ground import Tools, tools_env
from apportion.node_agent.isolation.tester import HARDWARE_KERNELS, Effort, try_isolation
from apportion.node_agent.machine import inventory_of
from apportion.node_agent.nvml import open_devices
from apportion.node_agent.simgpu.client import SOCKET_VARIABLE
from apportion.node_agent.simgpu.profiles import DRIVERS, profiles
from apportion.node_agent.simnode import SimulatedNode
from apportion.runtime.clock import SystemClock

_LOOK_S = 0.2


def main() -> int:
    """The exit code: 0 where all is well, 1 where a test failed, 3 where one proved nothing."""
    parser = argparse.ArgumentParser(prog="python -m apportion.node_agent.isolation", description=__doc__)
    parser.add_argument("--mode", choices=[str(mode) for mode in Mode], default="mps")
    parser.add_argument("--profile", choices=sorted(profiles()), default="a100-40")
    parser.add_argument("--driver", choices=sorted(DRIVERS), default="580")
    parser.add_argument("--hardware", action="store_true", help="this machine's own devices")
    parser.add_argument("--device", type=int, default=0, help="its index")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=0, help="in a round; 0: 20 simulated, 5000 on hardware")
    parser.add_argument("--test", choices=[str(test) for test in IsolationTest], action="append")
    # Standard output is for the result alone.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    verdicts = asyncio.run(run(parser.parse_args()))
    for verdict in verdicts:
        print(msgspec.json.encode(verdict).decode())
    found = {verdict.verdict for verdict in verdicts}
    return 1 if IsolationFinding.FAILED in found else 3 if IsolationFinding.INCONCLUSIVE in found else 0


async def run(arguments: argparse.Namespace) -> tuple[IsolationVerdict, ...]:
    """Set a node up, try one device, take it down."""
    mode = Mode(arguments.mode)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isolation-")))
        simulated = None if arguments.hardware else await _simulated(stack, directory, arguments, mode)
        devices = stack.enter_context(open_devices(None if simulated is None else simulated.socket_path))
        path = os.environ.get("PATH", os.defpath)
        node_env: dict[str, str] = {}
        if simulated is not None:
            path, node_env = f"{simulated.tools}:{path}", {SOCKET_VARIABLE: str(simulated.socket_path)}
        watchdog = Watchdog(devices, session_of=lambda _: None)
        memory = CgroupMemory.found(devices, NodeId("here"), state_dir=directory)
        if memory is not None:
            stack.callback(memory.close)
        mps = Mps(
            devices, watchdog, directory=directory / "mps", path=path, env={"HOME": "/", **node_env}, memory=memory
        )
        enforcers: dict[Mode, Enforcer] = {
            Mode.EXCLUSIVE: Exclusive(devices, end_idle_mps=mps.end_idle, directory=directory / "exclusive"),
            Mode.MIG: Mig(devices, watchdog, directory=directory / "mig"),
            Mode.MPS: mps,
            Mode.TIMESLICE: TimeSlice(devices, watchdog, memory=memory),
        }
        inventory = inventory_of(devices, path=path, is_simulated=simulated is not None, env=node_env)
        slices = Slices(devices, enforcers, usable={device.uuid: device for device in inventory.devices})
        tools = Tools(devices=devices, slices=slices, watchdog=watchdog, mps=mps, env=tools_env(path, node_env))
        looks = asyncio.create_task(_look(watchdog))
        try:
            return await try_isolation(
                tools,
                inventory.devices[arguments.device],
                mode,
                node=NodeId("here"),
                test_id="isolation-here",
                clock=SystemClock(),
                effort=Effort(
                    rounds=arguments.rounds,
                    kernels=arguments.kernels or (20 if simulated is not None else HARDWARE_KERNELS),
                    tests=tuple(map(IsolationTest, arguments.test or IsolationTest)),
                ),
            )
        finally:
            looks.cancel()
            for device in inventory.devices:
                await mps.end_idle(device.uuid)


async def _look(watchdog: Watchdog) -> None:
    while True:
        await asyncio.sleep(_LOOK_S)
        watchdog.look()


async def _simulated(
    stack: AsyncExitStack, directory: Path, arguments: argparse.Namespace, mode: Mode
) -> SimulatedNode:
    node = SimulatedNode(
        NodeId("here"),
        state_dir=directory,
        devices=1,
        profile=arguments.profile,
        driver=arguments.driver,
        mig_devices=int(mode is Mode.MIG),
    )
    await node.open()

    async def close() -> None:
        await node.close()
        node.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(node.pid, 0)  # noqa: ASYNC222  it was killed a moment ago

    stack.push_async_callback(close)
    return node


if __name__ == "__main__":
    sys.exit(main())
