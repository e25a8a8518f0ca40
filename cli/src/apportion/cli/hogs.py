"""Processes that take what is others': a device's memory or SMs, its MPS server, a disk's speed or its room.

Each holds what it takes by living, and ends when the pipe to whoever started it does. So nothing of them outlives an
injector, however that one went, and what they took is free again without anybody mending it.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from apportion.contracts import events as ev
from apportion.contracts.causes import FaultKind

_DISK_HOG: Final = Path(__file__).with_name("disk_hog.py")
_STEPS_MIB: Final = (4096, 256, 16, 1)
_KERNEL_US: Final = 20_000
_BEGUN_S_MAX: Final = 30.0
_END_S_MAX: Final = 5.0


class CannotBreak(Exception):
    """There is no such thing on this machine, or it is broken already."""


async def on_device(fault: ev.FaultInjected, data_dir: Path) -> None:
    """Take a device's memory or SMs until cancelled, or wedge its MPS server once. Raises CannotBreak."""
    from apportion.node_agent.isolation.party import Party, PartyRefused
    from apportion.node_agent.nvml import has_driver, open_devices
    from apportion.node_agent.simgpu.client import SOCKET_VARIABLE
    from apportion.node_agent.simgpu.tools import directory_of
    from apportion.node_agent.simnode import socket_of

    node, _, index = fault.target.partition("/")
    state_dir = data_dir / "nodes" / node
    simulated: Path | None = socket_of(state_dir)
    env = {"PATH": os.environ.get("PATH", os.defpath)}
    if await asyncio.to_thread(socket_of(state_dir).exists):
        env = {"PATH": f"{directory_of(socket_of(state_dir))}:{env['PATH']}", SOCKET_VARIABLE: str(simulated)}
    elif await asyncio.to_thread(state_dir.is_dir) and has_driver():
        simulated = None
    else:
        raise CannotBreak(f"no node {node} on this machine")
    with open_devices(simulated) as devices:
        uuid = next((one.uuid for one in devices.inventory() if one.index == int(index)), None)
    if uuid is None:
        raise CannotBreak(f"no device {index} on {node}")
    env["CUDA_VISIBLE_DEVICES"] = uuid
    if fault.kind is FaultKind.DEVICE_MPS_WEDGE:
        env["CUDA_MPS_PIPE_DIRECTORY"] = str(state_dir / "mps" / index)
    else:
        # Not a client of anybody's server: there is none here.
        env["CUDA_MPS_PIPE_DIRECTORY"] = str(data_dir / "run" / "no-mps")
    try:
        party = await Party.start(env)
    except PartyRefused as err:
        raise CannotBreak(f"device {index} of {node} takes no process that nobody placed: {err.code}") from err
    try:
        match fault.kind:
            case FaultKind.DEVICE_MPS_WEDGE:
                if not party.is_mps_client:
                    raise CannotBreak(f"no MPS server runs on device {index} of {node}")
                if await party.say("crash", "flight") != ["ok", "in", "flight"]:
                    raise CannotBreak("nothing could be put in flight")
                party.kill()
                return
            case FaultKind.DEVICE_MEMORY_HOG:
                for mib in _STEPS_MIB:
                    while await party.number("alloc", mib) is not None:
                        pass
            case _:
                if await party.say("hog", "sm", party.sms, _KERNEL_US) != ["ok", "hogging"]:
                    raise CannotBreak("no kernel could be started")
        await asyncio.sleep(fault.for_s)
    finally:
        await party.end()


async def on_disk(fault: ev.FaultInjected, data_dir: Path) -> None:
    """Take the room, or the speed, of the disk that the pool's files are on, until cancelled. Raises CannotBreak."""
    how = "full" if fault.kind is FaultKind.DISK_FULL else "slow"
    if how == "full" and not fault.allow_real and (others := _shares_disk_with(data_dir)):
        raise CannotBreak(f"{data_dir} is on the same disk as {', '.join(others)}: it is filled with allow_real alone")
    async with _disk_hog(how, data_dir):
        await asyncio.sleep(fault.for_s)


def _shares_disk_with(data_dir: Path) -> list[str]:
    """What of others' is on the same disk."""
    places = ("/", str(Path.home()), tempfile.gettempdir(), "/dev/shm", "/run")  # noqa: S108 - looked at, not written
    disk = data_dir.stat().st_dev
    return sorted({place for place in places if Path(place).exists() and Path(place).stat().st_dev == disk})


@contextlib.asynccontextmanager
async def _disk_hog(how: str, folder: Path) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_DISK_HOG), how, str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = b""
        # Not wait_for: before Python 3.12 it drops a cancellation that comes with its result.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEGUN_S_MAX):
                said = await process.stdout.readline()
        if said.split()[:1] != [b"ok"]:
            raise CannotBreak(f"disk {folder}: {said.decode(errors='replace').strip() or 'it ended without a word'}")
        yield
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_S_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
