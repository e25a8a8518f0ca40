"""Looks after the devices' health: hears the driver's events, reads, probes, and tells the core what has changed.

What follows from what is seen is the book's to say (health.py). One device's trouble is never another's: a call that
fails for one is looked into for that one, and an event that can't be read is no event.
"""

import asyncio
import contextlib
import functools
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import structlog

from apportion.contracts.ids import DeviceUuid
from apportion.node_agent import canaries, core, tools
from apportion.node_agent.health import Changed, HealthBook
from apportion.node_agent.nvml import DeviceLost, Devices, NvmlFailed, XidSeen
from apportion.node_agent.sampling import sampled
from apportion.runtime.clock import Clock

_READ_EVERY: Final = 5
"""Of the looks, each so manieth reads what tells of illness; each looks whether the device answers."""
_RESET_S_MAX: Final = 60.0

log = structlog.get_logger(__name__)


class HealthWatch:
    """The health of this node's devices."""

    def __init__(
        self,
        devices: Devices,
        uuids: Iterable[DeviceUuid],
        *,
        clock: Clock,
        feed: Callable[[core.Observation], None],
        suspect: Callable[[DeviceUuid, int], None],
        env: Mapping[str, str],
        file: Path,
        may_reset: bool,
    ) -> None:
        """``suspect`` hears of each Xid; ``file`` keeps conditions for the next agent of this boot."""
        self._devices = devices
        self._uuids = tuple(uuids)
        self._clock = clock
        self._feed = feed
        self._suspect = suspect
        self._env = env
        self._file = file
        self._may_reset = may_reset
        self._looks = 0
        self._book = HealthBook(self._kept())
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Tell what an earlier agent had found, and register for the driver's events."""
        self._tell(self._book.now())
        with contextlib.suppress(NvmlFailed):
            self._devices.watch_xids(self._uuids)

    async def hear(self) -> None:
        """The driver's events, until cancelled. The wait is in a thread: the library's call blocks."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                seen: XidSeen | None = await loop.run_in_executor(None, self._devices.wait_xid, 1000)
            except NvmlFailed as err:
                # No reason to doubt any device: what it was about is found by the next look.
                log.warning("events_unheard", error=str(err))
                await asyncio.sleep(1)
                continue
            if seen is None:
                continue
            if seen.xid:
                log.warning("xid", device=seen.uuid, xid=seen.xid)
                self._suspect(seen.uuid, seen.xid)
                self._tell(self._book.xid(seen.uuid, seen.xid, self._clock.now()))
            self._read(seen.uuid)

    def look(self) -> None:
        """See whether each device answers, and what it says of itself; to be called once a second."""
        self._looks += 1
        for uuid in self._uuids:
            try:
                self._devices.compute_mode(uuid)
            except DeviceLost as err:
                self._tell(self._book.lost(uuid, err.name, self._clock.now()))
                continue
            except NvmlFailed:
                continue  # The driver itself is away, which is told elsewhere.
            self._tell(self._book.answered(uuid, "it answers again"))
            is_ill = self._book.is_ill(uuid)
            if is_ill or self._looks % _READ_EVERY == 0:
                self._read(uuid)
            if is_ill and not self._tasks and self._looks % _READ_EVERY == 0:
                self._tasks.add(task := asyncio.get_running_loop().create_task(self._try(uuid)))
                task.add_done_callback(self._tasks.discard)

    def samples(self) -> bytes:
        """How the devices are, as a sample's body."""
        return sampled(self._devices, self._uuids, at=self._clock.now())

    def forget(self) -> None:
        """Every device is new: the driver was loaded again."""
        for uuid in self._uuids:
            self._tell(
                [*self._book.answered(uuid, "driver loaded again"), *self._book.reset(uuid, "driver loaded again")]
            )

    def _read(self, uuid: DeviceUuid) -> None:
        with contextlib.suppress(NvmlFailed):
            self._tell(self._book.reading(uuid, self._devices.health(uuid), self._clock.now()))

    async def _try(self, uuid: DeviceUuid) -> None:
        """See whether an ill device that nobody uses works, and reset it where that would help and we may."""
        loop = asyncio.get_running_loop()
        try:
            if self._devices.processes(uuid):
                return
            if self._may_reset and self._book.needs_reset(uuid):
                said = await loop.run_in_executor(None, self._reset, uuid)
                log.warning("device_reset", device=uuid, said=said)
                if said:
                    return
                self._tell(self._book.reset(uuid, f"reset; canary: {await self._canary(uuid)}"))
            elif not self._book.needs_reset(uuid):
                canary = await self._canary(uuid)
                if canary == canaries.OK:
                    self._tell(self._book.quiet(uuid, "canary: ok", self._clock.now()))
        except NvmlFailed as err:
            log.warning("device_not_tried", device=uuid, error=str(err))

    async def _canary(self, uuid: DeviceUuid) -> str:
        env = {**self._env, "CUDA_VISIBLE_DEVICES": uuid}
        is_seen = functools.partial(_is_on, self._devices, uuid)
        return await asyncio.get_running_loop().run_in_executor(None, canaries.ask, env, is_seen)

    def _reset(self, uuid: DeviceUuid) -> str:
        """Nothing where the reset was done; else what the tool said."""
        try:
            argv = ["/usr/bin/env", "nvidia-smi", "--gpu-reset", "-i", uuid]
            done = tools.ask(argv, env=self._env, s_max=_RESET_S_MAX)
        except (OSError, subprocess.TimeoutExpired) as err:
            return str(err)
        return "" if done.returncode == 0 else (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"

    def _tell(self, changes: list[Changed]) -> None:
        for one in changes:
            log.warning("device_health", device=one.device_uuid, health=one.health, code=one.code, detail=one.detail)
            self._feed(
                core.DeviceHealthSeen(
                    device_uuid=one.device_uuid,
                    health=one.health,
                    code=one.code,
                    detail=one.detail,
                    wants_reboot=one.wants_reboot,
                )
            )
        if changes:
            new = self._file.with_name(f".{self._file.name}")
            new.write_bytes(_boot_id() + b"\n" + self._book.keep())
            new.replace(self._file)

    def _kept(self) -> bytes:
        """What an earlier agent of this boot kept; a reboot resets every device."""
        try:
            boot_id, _, kept = self._file.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return b""
        return kept if boot_id == _boot_id() else b""


def _is_on(devices: Devices, uuid: DeviceUuid, pid: int) -> bool:
    return any(one.pid == pid for one in devices.processes(uuid))


def _boot_id() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
