"""Where an isolation test takes place: one device, the node's own enforcers, and parties with or without a slice.

What is set up here is taken down here. A party with a slice is enforced as a run is, by the same code; one without has
whatever the device gives to anybody.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from apportion.contracts.causes import Mode
from apportion.contracts.events import Device, MigPlacement, Slice
from apportion.contracts.ids import RunId
from apportion.node_agent.enforce.mps import CONTROL, Mps
from apportion.node_agent.enforce.slices import Slices
from apportion.node_agent.enforce.watchdog import Escape, Offence, Watchdog
from apportion.node_agent.isolation.party import GROUP_VARIABLE, Party
from apportion.node_agent.nvml import Devices, NvmlFailed
from apportion.node_agent.processes import RUN_ID_VARIABLE

SHARE_PERMILLE: Final = 400
"""Of the device, for each of two parties; the rest is what a watchdog's slowness may cost."""
_TOOL_S_MAX: Final = 10.0
_LET_GO_S_MAX: Final = 10.0
_PAUSE_S: Final = 0.02


class Tools:
    """What a node's isolation tests need of its agent."""

    def __init__(
        self, *, devices: Devices, slices: Slices, watchdog: Watchdog, mps: Mps, env: Mapping[str, str]
    ) -> None:
        """``env``: PATH, and where a simulated node is."""
        self.devices = devices
        self.slices = slices
        self.watchdog = watchdog
        self.mps = mps
        self.env = dict(env)


class Ground:
    """One device during one test; use as an asynchronous context."""

    def __init__(self, tools: Tools, device: Device, mode: Mode, *, test_id: str) -> None:
        self.tools = tools
        self.device = device
        self.mode = mode
        self._test_id = test_id
        self._pieces: dict[str, Slice] = {}
        self._parties: dict[str, list[Party]] = {}
        self._env: dict[str, dict[str, str]] = {}
        self._servers: list[Path] = []
        self.offences: dict[str, Offence | Escape] = {}
        """What the watchdog found, by the name of who did it; who did it was ended."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing of the test is left."""
        await self.clear()

    async def clear(self) -> None:
        """End all parties and take all slices down."""
        for name in list(self._parties):
            await self.leave(name)  # All of them before any slice: a control has two in one.
        for name in list(self._pieces):
            await self.end(name)
        for pipe in self._servers:
            await self._tool(pipe, [], "quit\n", {})
            shutil.rmtree(pipe, ignore_errors=True)
        self._servers.clear()
        self.offences.clear()

    def run_of(self, name: str) -> RunId:
        """The run that stands for a party."""
        return RunId(f"isolation/{self._test_id}-{name}/0/1")

    async def give_slice(self, name: str) -> Slice:
        """Set up a slice for a party, as for a run; raises EnforcementFailed."""
        piece = self._piece(len(self._pieces))
        run = self.run_of(name)
        self._pieces[name] = piece
        self.tools.watchdog.guests[run] = lambda found: self._caught(name, found)
        set_up = await self.tools.slices.apply(run, (piece,))
        self._env[name] = {**set_up.env, RUN_ID_VARIABLE: run, GROUP_VARIABLE: set_up.cgroup}
        return piece

    async def share_slice(self, name: str, other: str) -> None:
        """Put a party into another's slice: nothing is between the two."""
        self._env[name] = {key: value for key, value in self._env[other].items() if key != RUN_ID_VARIABLE}

    async def share_server(self, *names: str, visible: str = "") -> bool:
        """Make parties clients of one plain MPS server, without any limit; False where there is no MPS here."""
        if shutil.which(CONTROL, path=self.tools.env.get("PATH")) is None:
            return False
        pipe = self.tools.mps.trial_pipe()  # Where the next agent finds it, should this one die.
        self._servers.append(pipe)
        await self._tool(pipe, ["-d"], "", {"CUDA_VISIBLE_DEVICES": visible or self.device.uuid})
        for name in names:
            self._env[name] = {
                "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
                "CUDA_VISIBLE_DEVICES": visible or self.device.uuid,
            }
        return True

    def visible_to(self, name: str) -> str:
        """What a party's environment names as its device."""
        return self._env[name]["CUDA_VISIBLE_DEVICES"]

    async def enter(self, name: str) -> Party:
        """A process of this party; raises PartyRefused where it gets no device."""
        env = {"CUDA_VISIBLE_DEVICES": self.device.uuid, **self._env.get(name, {})}
        party = await Party.start({**self.tools.env, **env})
        self._parties.setdefault(name, []).append(party)
        if name in self._pieces:
            self.tools.slices.started(self.run_of(name), (self._pieces[name],), party.pid)
        return party

    async def drain(self, name: str) -> None:
        """Take a party's work off its MPS server, as the agent does before it kills; nothing in other modes."""
        if self.mode is Mode.MPS and name in self._pieces:
            await self.tools.mps.terminate(self.device.uuid, {party.pid for party in self._parties.get(name, [])})

    async def end(self, name: str) -> None:
        """End a party's processes, and take its slice down once the device shows none of them."""
        await self.leave(name)
        piece = self._pieces.pop(name, None)
        self._env.pop(name, None)
        if piece is not None:
            run = self.run_of(name)
            self.tools.watchdog.guests.pop(run, None)
            await self._release(run, piece)

    async def leave(self, name: str) -> None:
        """End a party's processes; its slice stays."""
        parties = self._parties.pop(name, [])
        for party in parties:
            await party.end()
        await self._let_go({party.pid for party in parties})

    async def _let_go(self, pids: set[int]) -> None:
        """Wait until the device shows none of these processes."""
        until = time.monotonic() + _LET_GO_S_MAX
        while pids & {one.pid for one in self.tools.devices.processes(self.device.uuid)}:
            if time.monotonic() > until:
                raise TimeoutError(f"{self.device.uuid} still shows processes that have ended")
            await asyncio.sleep(_PAUSE_S)

    async def _release(self, run: RunId, piece: Slice) -> None:
        until = time.monotonic() + _LET_GO_S_MAX
        while True:
            try:
                await self.tools.slices.release(run, (piece,))
            except NvmlFailed:  # In use, for a moment after the last process.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    def _caught(self, name: str, found: Offence | Escape) -> None:
        """As the agent does with a run: its processes are ended."""
        if name in self.offences:
            return
        self.offences[name] = found
        self._ending = asyncio.get_running_loop().create_task(self._end_caught(name))

    async def _end_caught(self, name: str) -> None:
        await self.drain(name)
        for party in self._parties.get(name, []):
            party.kill()

    def _piece(self, number: int) -> Slice:
        uuid, usable_mib = self.device.uuid, self.device.memory_mib
        if self.mode is Mode.MIG:
            place, memory_mib, milli = self._place()
            return Slice(device_uuid=uuid, compute_milli=milli, memory_mib=memory_mib, mode=self.mode, mig=place)
        if self.mode is Mode.EXCLUSIVE:
            assert number == 0, "an exclusive device has one owner"
            return Slice(device_uuid=uuid, compute_milli=1000, memory_mib=usable_mib, mode=self.mode)
        memory_mib = usable_mib * SHARE_PERMILLE // 1000
        return Slice(device_uuid=uuid, compute_milli=SHARE_PERMILLE, memory_mib=memory_mib, mode=self.mode)

    def _place(self) -> tuple[MigPlacement, int, int]:
        """A free place for an instance of the smallest size, with its MiB and milli."""
        state = self.tools.devices.mig.state(self.device.uuid)
        assert state is not None, "the mode was offered"
        total = max(size.compute_slices for size in state.sizes)
        for size in sorted(state.sizes, key=lambda one: (one.compute_slices, one.memory_mib, one.name)):
            for start in size.starts:
                if all(start + size.size <= one.start or one.start + one.size <= start for one in state.instances):
                    place = MigPlacement(profile=size.name, start=start, size=size.size)
                    return place, size.memory_mib, 1000 * size.compute_slices // total
        raise LookupError("no place for another MIG instance")

    async def _tool(self, pipe: Path, arguments: list[str], commands: str, env: Mapping[str, str]) -> None:
        def run() -> None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    ["/usr/bin/env", CONTROL, *arguments],
                    env={
                        **self.tools.env,
                        "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
                        "CUDA_MPS_LOG_DIRECTORY": str(pipe),
                        **env,
                    },
                    input=commands,
                    text=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    check=False,
                    timeout=_TOOL_S_MAX,
                )

        await asyncio.get_running_loop().run_in_executor(None, run)


def tools_env(path: str, node_env: Mapping[str, str]) -> dict[str, str]:
    """The environment that every party has: where programs are, and where a simulated node is."""
    return {"HOME": os.environ.get("HOME", "/"), "PATH": path, **node_env}
