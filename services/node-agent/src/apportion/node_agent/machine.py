"""What this machine is, in the pool's terms: the driver's inventory and the host's size, made into one fact's content.

A mode is offered only where its means were found; nothing is assumed from a driver's version alone.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from apportion.contracts.causes import Mode
from apportion.contracts.events import Device, Mig, MigInstance, MigProfile
from apportion.contracts.ids import DeviceUuid
from apportion.contracts.units import mib_from_bytes
from apportion.node_agent.capabilities import probe
from apportion.node_agent.core import Inventory
from apportion.node_agent.enforce.mps import CONTROL
from apportion.node_agent.nvml import LINK_SWITCH, DeviceInfo, Devices
from apportion.node_agent.nvml_mig import MigState
from apportion.node_agent.simgpu.profiles import profiles

SIMULATED_CPU_MILLI: Final = 16_000
SIMULATED_MEMORY_MIB: Final = 131_072
"""Host CPUs and memory beside each simulated device, about as in the machines that such boards are sold in."""


Foreign = Callable[[DeviceUuid, MigState], tuple[MigInstance, ...]]
"""Which of a device's instances are none of ours."""


def inventory_of(
    devices: Devices,
    *,
    path: str,
    is_simulated: bool,
    env: Mapping[str, str] | None = None,
    foreign: Foreign | None = None,
    labels: dict[str, str] | None = None,
) -> Inventory:
    """The machine as its probes find it now. Blocks for some tens of milliseconds, as a tool is asked."""
    driver = devices.driver()
    modes = _modes(path)
    infos = devices.inventory()
    groups = link_groups(infos)
    found = tuple(
        _device(info, modes, _mig(devices, info, foreign), group) for info, group in zip(infos, groups, strict=True)
    )
    return Inventory(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        devices=found,
        cpu_milli=SIMULATED_CPU_MILLI * len(found) if is_simulated else 1000 * len(os.sched_getaffinity(0)),
        labels=labels or {},
        memory_mib=SIMULATED_MEMORY_MIB * len(found) if is_simulated else _host_memory_mib(),
        driver_version=driver.driver_version,
        simulated=is_simulated,
        agent_version=_version(),
        cuda_version=".".join(map(str, driver.cuda_version)),
        capabilities=probe(devices, path=path, env=env or {}),
    )


def with_lost(now: Inventory, before: Inventory) -> Inventory:
    """The inventory with the devices that only don't answer: a lost device is still the node's, and has failed."""
    known = {device.uuid for device in now.devices}
    lost = [device for device in before.devices if device.uuid not in known]
    if not lost:
        return now
    devices = tuple(sorted((*now.devices, *lost), key=lambda device: device.index))
    sizes = {"cpu_milli": before.cpu_milli, "memory_mib": before.memory_mib} if now.simulated else {}
    return msgspec.structs.replace(now, devices=devices, **sizes)


def model_of(name: str) -> str:
    """The name by which jobs choose a device: the profile's key for a board that we know, else a slug of its name.

    >>> model_of("NVIDIA Strange Board 9000 (PCIe)")
    'strange-board-9000-pcie'
    """
    for profile in profiles().values():
        if profile.name == name:
            return profile.key
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")[:63] or "unknown"


def _device(info: DeviceInfo, modes: tuple[Mode, ...], mig: Mig | None, link_group: str) -> Device:
    major, minor = info.compute_capability
    return Device(
        uuid=info.uuid,
        index=info.index,
        model=model_of(info.name),
        memory_mib=info.usable_mib,
        sms=info.sms,
        arch=info.architecture,
        compute_capability=f"{major}.{minor}",
        numa_node=info.numa_node if info.numa_node is not None else _numa_node(info.pci_bus_id),
        # In MIG mode a board offers its instances and nothing else.
        modes=(Mode.MIG,) if mig is not None and mig.enabled else modes,
        cpus=info.cpus,
        pci_bus_id=info.pci_bus_id,
        pcie_generation=info.pcie_generation,
        pcie_lanes=info.pcie_lanes,
        nvlinks=info.nvlinks,
        encoders=info.encoder_percent,
        mig=mig,
        link_group=link_group,
    )


def link_groups(infos: Sequence[DeviceInfo]) -> list[str]:
    """For each device the group that it reaches over NVLink: named after its first device, empty where it has none.

    All that hang on the switch are one group; without one, those that are linked device by device.
    """
    group = list(range(len(infos)))
    first_on_switch: int | None = None
    for at, info in enumerate(infos):
        for other, found in enumerate(infos[:at]):
            if found.pci_bus_id in info.link_peers or info.pci_bus_id in found.link_peers:
                joined, left = group[other], group[at]
                group = [joined if each == left else each for each in group]
        if LINK_SWITCH in info.link_peers:
            if first_on_switch is not None:
                group[at] = group[first_on_switch]
            else:
                first_on_switch = at
    return [f"nvlink-{first}" if group.count(first) > 1 else "" for first in group]


def _mig(devices: Devices, info: DeviceInfo, foreign: Foreign | None) -> Mig | None:
    state = devices.mig.state(info.uuid) if info.is_mig_capable else None
    if state is None:
        return None
    # A size whose places the driver doesn't tell can't be placed, so it isn't offered.
    sizes = [size for size in state.sizes if size.starts]
    return Mig(
        enabled=state.is_enabled,
        memory_slices=max((start + size.size for size in sizes for start in size.starts), default=0),
        compute_slices=max((size.compute_slices for size in sizes), default=0),
        profiles=tuple(
            MigProfile(
                name=size.name,
                starts=size.starts,
                size=size.size,
                memory_mib=size.memory_mib,
                sms=size.sms,
                compute_slices=size.compute_slices,
                instances_max=size.instances_max,
            )
            for size in sizes
        ),
        foreign=() if foreign is None else foreign(info.uuid, state),
    )


def _numa_node(pci_bus_id: str) -> int:
    """As the kernel has it; 0 where it doesn't know, which is right on a machine with one node."""
    name = pci_bus_id.lower()
    name = name[4:] if name.startswith("0000") and len(name) > 12 else name
    try:
        return max(0, int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text()))
    except (OSError, ValueError):
        return 0


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
