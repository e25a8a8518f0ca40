"""What is free on each node, as values: how a demand fits, and why it does not.

A room is a picture of a node that nobody changes: taking slices makes a new one. So a round of placements can try
things out on top of the folded state without touching it.
"""

from collections.abc import Callable
from enum import StrEnum, unique

from msgspec import Struct

from apportion.contracts.causes import DeviceHealth, Mode
from apportion.contracts.events import JobSpec, Slice
from apportion.contracts.ids import DeviceUuid, NodeId, TenantId, job_of_run, tenant_of_job
from apportion.pool.state import DeviceView, NodeState, NodeView

SHARED = (Mode.MPS, Mode.TIMESLICE)
"""Modes in which several runs share a device, the preferred one first."""
SEVERAL = TenantId("*")
"""Stands for a device whose MPS clients belong to more than one tenant."""


@unique
class Out(StrEnum):
    """Why a node is out for a demand."""

    NO_MATCHING_DEVICE = "NoMatchingDevice"
    ISOLATION_UNAVAILABLE = "IsolationUnavailable"
    HOST_TOO_SMALL = "HostTooSmall"
    NODE_CORDONED = "NodeCordoned"
    NODE_DRAINING = "NodeDraining"
    NODE_SUSPECTED = "NodeSuspected"
    NODE_FENCED = "NodeFenced"
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    DEVICES_BUSY = "DevicesBusy"
    """Too few devices that are free, or shared in an accepted mode."""
    INSUFFICIENT_GPU_MEMORY = "InsufficientGpuMemory"
    INSUFFICIENT_COMPUTE = "InsufficientCompute"
    FRAGMENTED_DEVICES = "FragmentedDevices"
    INSUFFICIENT_HOST = "InsufficientHost"


NEVER = frozenset({Out.NO_MATCHING_DEVICE, Out.ISOLATION_UNAVAILABLE, Out.HOST_TOO_SMALL})
"""Reasons that stay while the node is what it is, however empty it gets."""

_OUT_BY_STATE = {
    NodeState.CORDONED: Out.NODE_CORDONED,
    NodeState.DRAINING: Out.NODE_DRAINING,
    NodeState.SUSPECTED: Out.NODE_SUSPECTED,
    NodeState.FENCED: Out.NODE_FENCED,
}


class Demand(Struct, frozen=True, kw_only=True):
    """What each replica of a job needs of one node. Jobs with equal demands are alike to every policy."""

    devices: int
    compute_milli: int
    memory_mib: int
    """0: the whole device's."""
    is_whole: bool
    """Devices that nobody else uses, charged in full; ``memory_mib`` is then the least that they must have."""
    mode: Mode | None
    models: tuple[str, ...]
    cpu_milli: int
    host_memory_mib: int
    replicas: int
    trust: TenantId
    """Whom the job shares an MPS device with: its own tenant; empty where the pool is one trust group."""


def demand_of(spec: JobSpec, tenant: TenantId, *, is_pool_trusted: bool) -> Demand:
    """What a job of this specification needs of a node."""
    has_devices = spec.devices > 0
    return Demand(
        devices=spec.devices,
        compute_milli=spec.compute_milli if has_devices else 0,
        memory_mib=spec.memory_mib if has_devices else 0,
        is_whole=has_devices
        and (spec.mode is Mode.EXCLUSIVE or spec.devices > 1 or (spec.compute_milli >= 1000 and spec.memory_mib == 0)),
        mode=spec.mode if has_devices else None,
        models=spec.models if has_devices else (),
        cpu_milli=spec.cpu_milli,
        host_memory_mib=spec.host_memory_mib,
        replicas=spec.replicas,
        trust=TenantId("") if is_pool_trusted else tenant,
    )


class DeviceRoom(Struct, frozen=True):
    """One device and what is free on it."""

    uuid: DeviceUuid
    model: str
    compute_milli: int
    memory_mib: int
    free_compute_milli: int
    free_memory_mib: int
    modes: tuple[Mode, ...]
    is_healthy: bool
    runs: int
    mode: Mode | None
    """How its runs share it; None where it is empty."""
    tenant: TenantId
    """Whose runs they are; SEVERAL where they belong to more than one."""


class NodeRoom(Struct, frozen=True):
    """One node and what is free on it. Devices are ordered by UUID."""

    node_id: NodeId
    epoch: int
    state: NodeState
    cpu_milli: int
    memory_mib: int
    free_cpu_milli: int
    free_memory_mib: int
    devices: tuple[DeviceRoom, ...]
    empty_devices: int
    """Healthy devices without a run."""


class Fit(Struct, frozen=True):
    """The best way, by the policy, in which a node can host a demand."""

    score: int
    picks: tuple[int, ...]
    """Places of the devices in ``NodeRoom.devices``."""


Choose = Callable[[Demand, NodeRoom, list[int]], Fit]
"""A policy's choice among the devices (by place) that fit, which are at least as many as asked."""


def room_of_device(view: DeviceView) -> DeviceRoom:
    """The device as a value."""
    device = view.device
    mode: Mode | None = None
    tenant = TenantId("")
    for run_id, piece in view.runs.items():
        owner = tenant_of_job(job_of_run(run_id))
        mode = piece.mode
        tenant = owner if tenant in {"", owner} else SEVERAL
    return DeviceRoom(
        device.uuid,
        device.model,
        device.compute_milli,
        device.memory_mib,
        view.free_compute_milli,
        view.free_memory_mib,
        device.modes,
        device.health is DeviceHealth.HEALTHY,
        len(view.runs),
        mode,
        tenant,
    )


def room_of_node(node: NodeView) -> NodeRoom:
    """The node as a value."""
    devices = tuple(room_of_device(node.devices[uuid]) for uuid in sorted(node.devices))
    return NodeRoom(
        node.node_id,
        node.epoch,
        node.state,
        node.cpu_milli,
        node.memory_mib,
        node.cpu_milli - node.used_cpu_milli,
        node.memory_mib - node.used_memory_mib,
        devices,
        sum(1 for device in devices if device.is_healthy and not device.runs),
    )


def offered_mode(demand: Demand, device: DeviceRoom) -> Mode | None:
    """How the device, were it empty, would give what is asked; None where it cannot."""
    if demand.is_whole:
        wanted = demand.mode or Mode.EXCLUSIVE
        return wanted if wanted in device.modes else None
    if demand.mode is not None:
        return demand.mode if demand.mode in SHARED and demand.mode in device.modes else None
    for mode in SHARED:
        if mode in device.modes:
            return mode
    return None


def mode_now(demand: Demand, device: DeviceRoom) -> Mode | None:
    """How the device gives what is asked beside the runs that it has; None where their modes or owners don't go."""
    if device.mode is None:
        return offered_mode(demand, device)
    if demand.is_whole or device.mode not in SHARED or device.mode not in device.modes:
        return None
    if demand.mode is not None and demand.mode is not device.mode:
        return None
    if device.mode is Mode.MPS and demand.trust and demand.trust != device.tenant:
        return None
    return device.mode


def look(demand: Demand, room: NodeRoom, choose: Choose) -> Fit | Out:
    """How the node hosts one replica, or why it does not."""
    if demand.cpu_milli > room.cpu_milli or demand.host_memory_mib > room.memory_mib:
        return Out.HOST_TOO_SMALL
    needed = demand.devices
    fits: list[int] = []
    if needed:
        models = demand.models
        compute, memory = demand.compute_milli, demand.memory_mib
        matching = offering = healthy = usable = 0
        has_compute = has_memory = False
        for place, device in enumerate(room.devices):
            if models and device.model not in models:
                continue
            if compute > device.compute_milli or memory > device.memory_mib:
                continue
            matching += 1
            if offered_mode(demand, device) is None:
                continue
            offering += 1
            if not device.is_healthy:
                continue
            healthy += 1
            if demand.is_whole:
                # Freed runs that a smaller device came back from may leave it without runs and yet short of room.
                if not device.runs and device.free_compute_milli >= compute and device.free_memory_mib >= memory:
                    fits.append(place)
                continue
            if mode_now(demand, device) is None:
                continue
            usable += 1
            enough_compute = device.free_compute_milli >= compute
            enough_memory = device.free_memory_mib >= (memory or device.memory_mib)
            has_compute = has_compute or enough_compute
            has_memory = has_memory or enough_memory
            if enough_compute and enough_memory:
                fits.append(place)
        if offering < needed:
            return Out.NO_MATCHING_DEVICE if matching < needed else Out.ISOLATION_UNAVAILABLE
    if room.state is not NodeState.READY:
        return _OUT_BY_STATE[room.state]
    if len(fits) < needed:
        if healthy < needed:
            return Out.DEVICE_UNHEALTHY
        if usable < needed:
            return Out.DEVICES_BUSY
        if has_compute and has_memory:
            return Out.FRAGMENTED_DEVICES
        if has_compute:
            return Out.INSUFFICIENT_GPU_MEMORY
        return Out.INSUFFICIENT_COMPUTE if has_memory else Out.DEVICES_BUSY
    if demand.cpu_milli > room.free_cpu_milli or demand.host_memory_mib > room.free_memory_mib:
        return Out.INSUFFICIENT_HOST
    return choose(demand, room, fits)


def slices_on(demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> tuple[Slice, ...]:
    """The slices that one replica holds of these devices."""
    slices = []
    for place in picks:
        device = room.devices[place]
        mode = mode_now(demand, device)
        assert mode is not None
        slices.append(
            Slice(
                device_uuid=device.uuid,
                compute_milli=device.compute_milli if demand.is_whole else demand.compute_milli,
                memory_mib=device.memory_mib if demand.is_whole else demand.memory_mib or device.memory_mib,
                mode=mode,
            )
        )
    return tuple(slices)


def charge_on(demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> tuple[int, int]:
    """Milli-GPU and MiB that one replica on these devices takes from its queue's limits."""
    if demand.is_whole:
        return (
            sum(room.devices[place].compute_milli for place in picks),
            sum(room.devices[place].memory_mib for place in picks),
        )
    if demand.memory_mib:
        return demand.compute_milli * len(picks), demand.memory_mib * len(picks)
    return demand.compute_milli * len(picks), sum(room.devices[place].memory_mib for place in picks)


def with_run(demand: Demand, room: NodeRoom, picks: tuple[int, ...], tenant: TenantId) -> NodeRoom:
    """The node once one replica of the tenant's holds its slices there."""
    devices = list(room.devices)
    emptied = 0
    for place, piece in zip(picks, slices_on(demand, room, picks), strict=True):
        device = devices[place]
        emptied += not device.runs
        devices[place] = DeviceRoom(
            device.uuid,
            device.model,
            device.compute_milli,
            device.memory_mib,
            device.free_compute_milli - piece.compute_milli,
            device.free_memory_mib - piece.memory_mib,
            device.modes,
            device.is_healthy,
            device.runs + 1,
            piece.mode,
            tenant if device.tenant in {"", tenant} else SEVERAL,
        )
    return NodeRoom(
        room.node_id,
        room.epoch,
        room.state,
        room.cpu_milli,
        room.memory_mib,
        room.free_cpu_milli - demand.cpu_milli,
        room.free_memory_mib - demand.host_memory_mib,
        tuple(devices),
        room.empty_devices - emptied,
    )


def shortfall(demand: Demand, room: NodeRoom) -> int:
    """How far the node is from hosting one replica, in thousandths summed over what is missing; 0 where it does.

    Only for nodes that could host it if they were empty.
    """
    missing = max(0, demand.cpu_milli - room.free_cpu_milli) * 1000 // max(1, demand.cpu_milli)
    missing += max(0, demand.host_memory_mib - room.free_memory_mib) * 1000 // max(1, demand.host_memory_mib)
    if not demand.devices:
        return missing
    each = sorted(
        _device_shortfall(demand, device)
        for device in room.devices
        if device.is_healthy and is_match(demand, device) and offered_mode(demand, device) is not None
    )
    return missing + sum(each[: demand.devices])


def is_match(demand: Demand, device: DeviceRoom) -> bool:
    """True where the device is of an accepted model and large enough when empty."""
    return (
        (not demand.models or device.model in demand.models)
        and demand.compute_milli <= device.compute_milli
        and demand.memory_mib <= device.memory_mib
    )


def _device_shortfall(demand: Demand, device: DeviceRoom) -> int:
    if demand.is_whole or mode_now(demand, device) is None:
        held = (device.compute_milli - device.free_compute_milli) * 1000 // max(1, device.compute_milli)
        held += (device.memory_mib - device.free_memory_mib) * 1000 // max(1, device.memory_mib)
        return held + device.runs
    memory = demand.memory_mib or device.memory_mib
    return (
        max(0, demand.compute_milli - device.free_compute_milli) * 1000 // max(1, demand.compute_milli)
        + max(0, memory - device.free_memory_mib) * 1000 // memory
    )


def replicas_when_empty(demand: Demand, room: NodeRoom) -> int:
    """How many replicas the node would hold with nothing else on it, its unhealthy devices left out."""
    counts = []
    if demand.cpu_milli:
        counts.append(room.cpu_milli // demand.cpu_milli)
    if demand.host_memory_mib:
        counts.append(room.memory_mib // demand.host_memory_mib)
    if demand.devices:
        places = 0
        for device in room.devices:
            if device.is_healthy and is_match(demand, device) and offered_mode(demand, device) is not None:
                places += 1 if demand.is_whole else _shares_when_empty(demand, device)
        counts.append(places // demand.devices)
    return min(counts, default=demand.replicas)


def _shares_when_empty(demand: Demand, device: DeviceRoom) -> int:
    return min(
        device.compute_milli // max(1, demand.compute_milli),
        device.memory_mib // (demand.memory_mib or device.memory_mib),
    )
