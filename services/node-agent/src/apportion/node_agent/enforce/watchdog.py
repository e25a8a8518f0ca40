"""Who uses how much device memory, by run and not by process; and who has used too much for too long.

For every mode without a hard limit, and for MPS, whose limit holds for each process alone. What it can't do: an
allocation between two looks may make a neighbour's fail, and then the offender is ended after the harm.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from apportion.contracts.events import Slice
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.node_agent.nvml import Devices, NvmlFailed
from apportion.node_agent.processes import RUN_ID_VARIABLE

TOLERANCE_MIB: Final = 16
LOOKS: Final = 2
"""Over its limit in so many looks in a row: one alone may have met memory that is just being freed."""


class Offence(msgspec.Struct, frozen=True, kw_only=True):
    """A run has used more device memory than its slice for two looks in a row."""

    run_id: RunId
    device_uuid: DeviceUuid
    used_mib: int
    limit_mib: int


class Escape(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a run that must be an MPS client uses the device directly, past every limit."""

    run_id: RunId
    device_uuid: DeviceUuid
    pid: int


class Watchdog:
    """The memory of all watched runs; ``look`` costs two NVML calls for each device that is watched."""

    def __init__(self, devices: Devices, *, session_of: Callable[[int], RunId | None]) -> None:
        self._devices = devices
        self._session_of = session_of
        """The run whose shim leads this session; None for a session that is none of ours."""
        self._limits: dict[DeviceUuid, dict[RunId, Slice]] = {}
        self._over: defaultdict[tuple[RunId, DeviceUuid], int] = defaultdict(int)
        self._mps: set[RunId] = set()
        self._runs: dict[int, RunId] = {}
        self.used_mib: dict[RunId, int] = {}
        """By run, over all devices, at the last look."""
        self.peak_mib: dict[RunId, int] = {}
        self.guests: dict[RunId, Callable[[Offence | Escape], None]] = {}
        """Who hears of runs that the pool doesn't know: those of isolation tests."""

    def watch(self, run: RunId, piece: Slice, *, is_mps: bool = False) -> None:
        """Hold the run to the memory of this slice from now on."""
        self._limits.setdefault(piece.device_uuid, {})[run] = piece
        if is_mps:
            self._mps.add(run)

    def forget(self, run: RunId) -> None:
        """The run has ended."""
        for runs in self._limits.values():
            runs.pop(run, None)
        for key in [key for key in self._over if key[0] == run]:
            del self._over[key]
        self._mps.discard(run)
        self.used_mib.pop(run, None)
        self.peak_mib.pop(run, None)
        self._runs = {pid: owner for pid, owner in self._runs.items() if owner != run}

    def limit_of(self, run: RunId, device: DeviceUuid) -> int:
        """The limit that the run is held to, in MiB; 0 where it isn't watched."""
        piece = self._limits.get(device, {}).get(run)
        return 0 if piece is None else piece.memory_mib

    def pids_of(self, run: RunId) -> set[int]:
        """Processes of the run that were seen on a device at the last look."""
        return {pid for pid, owner in self._runs.items() if owner == run}

    def look(self) -> list[Offence | Escape]:
        """Look at every watched device once; who has to be ended now."""
        found: list[Offence | Escape] = []
        used: defaultdict[RunId, int] = defaultdict(int)
        seen: dict[int, RunId] = {}
        for device, runs in self._limits.items():
            if not runs:
                continue
            try:
                processes = self._devices.processes(device)
            except NvmlFailed:
                continue  # Lost or being reset: its health is somebody else's business.
            here: defaultdict[RunId, int] = defaultdict(int)
            for process in processes:
                run = self._runs.get(process.pid) or self._run_of(process.pid)
                if run is None or run not in runs:
                    continue
                seen[process.pid] = run
                here[run] += process.used_mib or 0
                if run in self._mps and not process.is_mps_client:
                    found.append(Escape(run_id=run, device_uuid=device, pid=process.pid))
            for run, piece in runs.items():
                used[run] += here[run]
                is_over = here[run] > piece.memory_mib + TOLERANCE_MIB
                self._over[run, device] = self._over[run, device] + 1 if is_over else 0
                if self._over[run, device] == LOOKS:
                    found.append(
                        Offence(run_id=run, device_uuid=device, used_mib=here[run], limit_mib=piece.memory_mib)
                    )
        self._runs = seen
        self.used_mib = dict(used)
        for run, mib in used.items():
            self.peak_mib[run] = max(self.peak_mib.get(run, 0), mib)
        for one in found:
            if (hears := self.guests.get(one.run_id)) is not None:
                hears(one)
        return [one for one in found if one.run_id not in self.guests]

    def _run_of(self, pid: int) -> RunId | None:
        """By session, since a child may outlive its parent but seldom leaves its session; else by its environment."""
        try:
            run = self._session_of(os.getsid(pid))
            if run is not None:
                return run
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            return None
        marker = f"{RUN_ID_VARIABLE}=".encode()
        value = next((line for line in environ.split(b"\0") if line.startswith(marker)), None)
        return None if value is None else RunId(value.removeprefix(marker).decode(errors="replace"))
