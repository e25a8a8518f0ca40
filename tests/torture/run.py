"""The torture of one node: a small placer places real runs, the agent is killed, and at quiet moments all is counted.

Four simulated devices, one in each mode. What must hold: no run is started twice, every exit code arrives, nothing of a
run is left on the machine or on a device, and the streams' ledger and the devices agree whenever nothing is under way.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from apportion.contracts.causes import Mode, StopCause
from apportion.contracts.codec import decode_fact, encode_fact
from apportion.contracts.envelope import Stream
from apportion.contracts.events import (
    Fact,
    LeaseClaimed,
    MigPlacement,
    NodeRegistered,
    RunFinished,
    RunPlaced,
    RunReleased,
    RunStarted,
    RunStopOrdered,
    Slice,
)
from apportion.contracts.ids import PLACER, NodeId, PoolId, RunId
from apportion.contracts.testing import a_placement
from apportion.node_agent import cgroups
from apportion.node_agent.enforce.cgroup_memory import root_of
from apportion.node_agent.nvml import COMPUTE_MODE_DEFAULT, open_devices
from apportion.node_agent.processes import RUN_ID_VARIABLE
from apportion.node_agent.simgpu import workload
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus, Lease, StreamReader
from tests.torture.zygote import Zygote

POOL: Final = PoolId("main")
NODE: Final = NodeId("node-1")
PROFILE: Final = "h100-80"
MIG_STARTS: Final = 7
SHARED_MAX: Final = 4
QUIET_EVERY: Final = 25
QUIET_S_MAX: Final = 60.0
BEGIN_S_MAX: Final = 60.0
MOMENT_S_MAX: Final = 1.2
"""An agent lives so long at most: its start takes a quarter of it."""


class Broken(Exception):
    """A rule doesn't hold."""


class Torture:
    """One node's world: its bus, what was ordered, and what was said."""

    def __init__(self, bus: Bus, reader: StreamReader, directory: Path, rng: random.Random) -> None:
        self.bus = bus
        self.reader = reader
        self.directory = directory
        self.rng = rng
        self.lease: Lease | None = None
        self.sent = 0
        self.orders: dict[RunId, tuple[RunPlaced, int]] = {}
        """With the exit code that the workload ends with by itself."""
        self.stopped: set[RunId] = set()
        self.facts: dict[type[Fact], list[Any]] = {}
        self.started: Counter[RunId] = Counter()
        self.finished: dict[RunId, list[RunFinished]] = {}
        self.released: Counter[RunId] = Counter()

    # The stream

    async def say(self, *facts: Fact) -> None:
        """State something as the placer."""
        if self.lease is None:
            claim = LeaseClaimed(author=PLACER, session="torture", core="torture@1#0")
            self.lease = await self.bus.claim(PLACER, encode_fact(POOL, PLACER, claim, event_id="placer.claim"))
        messages = []
        for fact in facts:
            self.sent += 1
            messages.append(encode_fact(POOL, PLACER, fact, event_id=f"torture.{self.sent}"))
        await self.bus.publish_fenced(self.lease, messages)

    def hear(self) -> bool:
        """Take in what has been stated; False, so that it can stand before what is waited for."""
        for raw in self.reader.take():
            event = decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at).event
            match event:
                case RunStarted():
                    self.started[event.run_id] += 1
                case RunFinished():
                    self.finished.setdefault(event.run_id, []).append(event)
                case RunReleased():
                    self.released[event.run_id] += 1
                case NodeRegistered():
                    self.facts.setdefault(NodeRegistered, []).append(event)
                case _:
                    pass
        return False

    def live(self) -> dict[RunId, RunPlaced]:
        """What holds slices by the streams' ledger."""
        return {run: order for run, (order, _) in self.orders.items() if not self.released[run]}

    # Orders

    def order(self) -> list[RunPlaced]:
        """A few runs, where the ledger has room for them."""
        devices = self.facts[NodeRegistered][-1].devices
        live = list(self.live().values())
        found: list[RunPlaced] = []
        for _ in range(self.rng.randrange(0, 4)):
            index = self.rng.randrange(len(devices))
            piece = self._piece(index, devices[index], [*live, *found])
            if piece is None:
                continue
            name = f"acme/t-{len(self.orders)}"
            code = self.rng.choice([0, 0, 3, 5, 41])
            command = ("/bin/sh", "-c", self._script(name.replace("/", "."), code, piece.mode))
            order = a_placement(name, command=command, slices=(piece,), grace_s=1)
            self.orders[order.run_id] = (order, code)
            found.append(order)
        return found

    def _script(self, name: str, code: int, mode: Mode) -> str:
        """Leaves a line for each time that it was started, uses its device or waits, and ends with its code."""
        seconds = self.rng.choice([0, 0.02, 0.1, 0.4])
        work = f"sleep {seconds}"
        if self.rng.random() < 0.3:
            program = f"{sys.executable} -S -E {workload.__file__}"
            work = f"{program} train --seconds {seconds} --memory-mib 600 >/dev/null"
        del mode
        return f"echo $$ >> {self.directory}/starts/{name}; {work}; exit {code}"

    def _piece(self, index: int, device: Any, live: list[RunPlaced]) -> Slice | None:
        mode = (Mode.MIG, Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE)[index]
        here = [piece for order in live for piece in order.slices if piece.device_uuid == device.uuid]
        base = {"device_uuid": device.uuid, "mode": mode, "memory_mib": 2000, "compute_milli": 100}
        if mode is Mode.MIG:
            taken = {piece.mig.start for piece in here if piece.mig is not None}
            free = sorted(set(range(MIG_STARTS)) - taken)
            if not free:
                return None
            return Slice(**base, mig=MigPlacement(profile="1g.10gb", start=self.rng.choice(free), size=1))
        if len(here) >= (1 if mode is Mode.EXCLUSIVE else SHARED_MAX):
            return None
        # Equal shares: unequal ones on MPS wait for each other by design, and the rounds would measure that.
        return Slice(**base)

    async def maybe_stop(self) -> None:
        """Sometimes a run is told to stop."""
        live = sorted(set(self.live()) - self.stopped)
        if live and self.rng.random() < 0.04:
            run = self.rng.choice(live)
            self.stopped.add(run)
            await self.say(
                RunStopOrdered(run_id=run, node_id=NODE, cause=StopCause.CANCELLED, grace_s=0, actor="torture")
            )

    # What must hold

    def check_runs(self) -> None:
        """Started once at most, told once, with the code that it ended with."""
        for run, (_, code) in self.orders.items():
            lines = _lines(self.directory / "starts" / run.rpartition("/0/")[0].replace("/", "."))
            ends = self.finished.get(run, [])
            if lines > 1 or self.started[run] > 1 or len(ends) > 1 or self.released[run] > 1:
                raise Broken(
                    f"{run}: {lines} starts, {self.started[run]} RunStarted, {len(ends)} RunFinished, "
                    f"{self.released[run]} RunReleased"
                )
            if not ends or run in self.stopped:
                continue
            (end,) = ends
            if end.exit_code != code or lines != 1:
                raise Broken(f"{run}: ended with {code} after {lines} starts, and was told as {end}")

    def check_devices(self, *, socket: Path) -> None:
        """With no run in the ledger, the devices show none, and nothing is set up on them."""
        with open_devices(socket) as devices:
            for info in devices.inventory():
                state = devices.mig.state(info.uuid)
                left = [one.name for one in state.instances] if state is not None else []
                clients = [one.pid for one in devices.processes(info.uuid) if not _is_mps_server(one.pid)]
                mode = devices.compute_mode(info.uuid)
                if left or clients or mode != COMPUTE_MODE_DEFAULT:
                    raise Broken(f"{info.uuid}: instances {left}, processes {clients}, compute mode {mode}")
        for place in ("mig", "runs"):
            directory = self.directory / "nodes" / NODE / place
            names = [path.name for path in directory.iterdir()] if directory.exists() else []
            if names:
                raise Broken(f"left in {place}: {names}")
        if group := _group_of_runs(self.directory):
            names = [path.name for path in group.iterdir() if path.is_dir()]
            if names:
                raise Broken(f"cgroups of runs: {names}")
        if runs := _processes_with(RUN_ID_VARIABLE, self.directory):
            raise Broken(f"processes of runs: {runs}")


async def torture(rounds: int, seed: int, zygote: Zygote, directory: Path) -> dict[str, Any]:
    """Kill the agent so often; the figures. Raises Broken where a rule doesn't hold."""
    rng = random.Random(seed)
    (directory / "starts").mkdir()
    began = time.monotonic()
    async with EmbeddedServer(directory, port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="torture")
        await bus.provision()
        world = Torture(bus, await bus.reader(Stream.FACTS, after=0), directory, rng)
        arguments = ["--node-id", NODE, "--simulated-devices", "4", "--simulated-profile", PROFILE]
        arguments += ["--simulated-mig-devices", "1", "--data-dir", str(directory), "--bus-url", server.url]
        socket = directory / "nodes" / NODE / "simgpu" / "node.sock"
        agent = zygote.start(arguments)
        try:
            await _until(lambda: world.hear() or bool(world.facts.get(NodeRegistered)), BEGIN_S_MAX, "registered")
            quiet = 0
            for number in range(1, rounds + 1):
                await _live_a_while(world)
                os.kill(agent, signal.SIGKILL)
                zygote.reap(agent)
                agent = zygote.start(arguments)
                if number % QUIET_EVERY == 0 or number == rounds:
                    await _settle(world)
                    world.check_runs()
                    world.check_devices(socket=socket)
                    quiet += 1
                    print(f"round {number}: {len(world.orders)} runs, all told", file=sys.stderr, flush=True)
            # The last agent finds nothing to keep: what is left of MPS is ended at its start.
            os.kill(agent, signal.SIGKILL)
            zygote.reap(agent)
            registered = len(world.facts[NodeRegistered])
            agent = zygote.start(arguments)
            await _until(
                lambda: world.hear() or len(world.facts[NodeRegistered]) > registered, BEGIN_S_MAX, "registered"
            )
            daemons = _processes_with("CUDA_MPS_PIPE_DIRECTORY", directory)
            if daemons:
                raise Broken(f"MPS daemons without a run: {daemons}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
            zygote.reap(agent)
            await bus.close()
            _end_all(directory)
            if group := _group_of_runs(directory):
                with contextlib.suppress(OSError):
                    group.rmdir()
    causes = Counter(str(end.cause) for ends in world.finished.values() for end in ends)
    return {
        "seed": seed,
        "driver": world.facts[NodeRegistered][-1].driver_version,
        "capabilities": world.facts[NodeRegistered][-1].capabilities,
        "rounds": rounds,
        "quiet_moments": quiet,
        "runs": len(world.orders),
        "started": sum(world.started.values()),
        "stopped": len(world.stopped),
        "double_starts": 0,
        "lost_exit_codes": 0,
        "left_behind": 0,
        "causes": dict(sorted(causes.items())),
        "wall_s": round(time.monotonic() - began, 1),
    }


async def _live_a_while(world: Torture) -> None:
    """Orders at random moments of an agent's short life."""
    end = time.monotonic() + world.rng.uniform(0, MOMENT_S_MAX)
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, world.rng.uniform(0, 0.2)))
        world.hear()
        if orders := world.order():
            await world.say(*orders)
        await world.maybe_stop()


async def _settle(world: Torture) -> None:
    await _until(lambda: world.hear() or not world.live(), QUIET_S_MAX, "all runs released")


async def _until(happened: Any, s_max: float, what: str) -> None:
    until = time.monotonic() + s_max
    while not happened():
        if time.monotonic() > until:
            raise Broken(f"not {what} within {s_max:g} s")
        await asyncio.sleep(0.02)


def _group_of_runs(directory: Path) -> Path | None:
    """The cgroup that the runs' cgroups are in; None where there is none."""
    mount = cgroups.mount_here()
    group = None if mount is None else root_of(mount, NODE, directory / "nodes" / NODE)
    return group if group is not None and group.is_dir() else None


def _lines(path: Path) -> int:
    try:
        return len(path.read_text().splitlines())
    except FileNotFoundError:
        return 0


def _is_mps_server(pid: int) -> bool:
    try:
        return b"mps_tool" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _processes_with(variable: str, directory: Path) -> list[str]:
    """Live processes whose environment has the variable and names the directory."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes()
            if f"\0{variable}=".encode() in b"\0" + environ and os.fsencode(directory) in environ:
                found.append(f"{process.name} {(process / 'cmdline').read_text()}")
    return found


def _end_all(directory: Path) -> None:
    """End the simulated node and the spawner: everything that names the directory."""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            said = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if os.fsencode(directory) in said and b"nats-server" not in said:
                os.kill(int(process.name), signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 where every rule held, 1 where one was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the files where a rule was broken")
    arguments = parser.parse_args(argv)
    directory = Path(tempfile.mkdtemp(prefix="to-"))
    with Zygote(str(directory / "agent.log")) as zygote:
        try:
            figures = asyncio.run(torture(arguments.rounds, arguments.seed, zygote, directory))
        except Broken as err:
            print(f"broken (seed {arguments.seed}): {err}\n{directory}/agent.log", file=sys.stderr)
            return 1
        print(json.dumps(figures, indent=2))
    shutil.rmtree(directory, ignore_errors=True)
    return 0


__all__ = ["Broken", "main", "torture"]
