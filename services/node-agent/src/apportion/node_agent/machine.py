"""What this machine is, in the pool's terms: the driver's inventory and the host's size, made into one fact's content.

A mode is offered only where its means were found; nothing is assumed from a driver's version alone.
"""

import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from apportion.contracts.causes import Mode
from apportion.contracts.events import Device
from apportion.contracts.units import mib_from_bytes
from apportion.node_agent.core import Inventory
from apportion.node_agent.enforce.mps import CONTROL
from apportion.node_agent.nvml import DeviceInfo, Devices
from apportion.node_agent.simgpu.profiles import profiles

SIMULATED_CPU_MILLI: Final = 16_000
SIMULATED_MEMORY_MIB: Final = 131_072
"""Host CPUs and memory beside each simulated device, about as in the machines that such boards are sold in."""


def inventory_of(devices: Devices, *, path: str, is_simulated: bool) -> Inventory:
    """The machine as its probes find it now."""
    driver = devices.driver()
    modes = _modes(path)
    found = tuple(_device(info, modes) for info in devices.inventory())
    return Inventory(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        devices=found,
        cpu_milli=SIMULATED_CPU_MILLI * len(found) if is_simulated else 1000 * len(os.sched_getaffinity(0)),
        memory_mib=SIMULATED_MEMORY_MIB * len(found) if is_simulated else _host_memory_mib(),
        driver_version=driver.driver_version,
        simulated=is_simulated,
        agent_version=_version(),
    )


def model_of(name: str) -> str:
    """The name by which jobs choose a device: the profile's key for a board that we know, else a slug of its name.

    >>> model_of("NVIDIA Strange Board 9000 (PCIe)")
    'strange-board-9000-pcie'
    """
    for profile in profiles().values():
        if profile.name == name:
            return profile.key
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")[:63] or "unknown"


def _device(info: DeviceInfo, modes: tuple[Mode, ...]) -> Device:
    major, minor = info.compute_capability
    return Device(
        uuid=info.uuid,
        index=info.index,
        model=model_of(info.name),
        memory_mib=info.usable_mib,
        sms=info.sms,
        arch=info.architecture,
        compute_capability=f"{major}.{minor}",
        numa_node=info.numa_node or 0,
        modes=modes,
    )


def _modes(path: str, which: Callable[..., str | None] = shutil.which) -> tuple[Mode, ...]:
    if which(CONTROL, path=path) is None:
        return (Mode.EXCLUSIVE, Mode.TIMESLICE)
    return (Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE)


def _host_memory_mib() -> int:
    return mib_from_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _version() -> str:
    try:
        return version("apportion-node-agent")
    except PackageNotFoundError:
        return ""
