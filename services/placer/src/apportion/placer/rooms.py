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
    NODE_AVOIDED = "NodeAvoided"
    """An attempt of the job failed there, and it asked not to meet the node again."""
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


NEVER = frozenset({Out.NO_MATCHING_DEVICE, Out.ISOLATION_UNAVAILABLE, Out.HOST_TOO_SMALL, Out.NODE_AVOIDED})
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
    shared: tuple[Mode, ...] = SHARED
    """Modes in which it may share a device, the preferred one first."""
    avoid: tuple[NodeId, ...] = ()
    policy: str = ""
    """By which policy it is placed, where that isn't the pool's."""


def demand_of(
    spec: JobSpec, tenant: TenantId, *, is_pool_trusted: bool, avoid: tuple[NodeId, ...] = (), policy: str = ""
) -> Demand:
    """What a job of this specification needs of a node."""
    has_devices = spec.devices > 0
    shared = tuple(mode for mode in spec.modes if mode in SHARED) if spec.modes else SHARED
    return Demand(
        devices=spec.devices,
        compute_milli=spec.compute_milli if has_devices else 0,
        memory_mib=spec.memory_mib if has_devices else 0,
        is_whole=has_devices
        and (
            spec.mode is Mode.EXCLUSIVE
            or spec.dedicated
            or not shared
            or spec.devices > 1
            or (spec.compute_milli >= 1000 and spec.memory_mib == 0)
        ),
        mode=spec.mode if has_devices else None,
        models=spec.models if has_devices else (),
        cpu_milli=spec.cpu_milli,
        host_memory_mib=spec.host_memory_mib,
        replicas=spec.replicas,
        trust=TenantId("") if is_pool_trusted else tenant,
        shared=shared if has_devices else SHARED,
        avoid=avoid,
        policy=policy,
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


DeviceKind = tuple[str, int, int, tuple[Mode, ...]]
"""Model, milli-GPU, MiB and modes of a device."""


class Kind:
    """What a node is, whatever runs on it; the same object for all nodes that are alike."""

    __slots__ = ("cpu_milli", "devices", "group", "memory_mib")

    def __init__(
        self, cpu_milli: int, memory_mib: int, devices: tuple[tuple[str, int, int, tuple[Mode, ...]], ...]
    ) -> None:
        self.cpu_milli = cpu_milli
        self.memory_mib = memory_mib
        self.devices = devices
        """In the order of their UUIDs."""
        self.group = "+".join(sorted({model for model, *_ in devices}))
        """Its device models: what nodes are told apart by where some models are scarce."""


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
    kind: "Kind"
    """Equal for nodes that are alike when empty."""
    free_share: int
    """What is free of its healthy devices, in thousandths of both dimensions together."""


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


def free_share(device: DeviceRoom) -> int:
    """What is free of a device, in thousandths of both dimensions together; nothing where one of them is used up."""
    if not device.is_healthy or device.free_compute_milli <= 0 or device.free_memory_mib <= 0:
        return 0
    return device.free_compute_milli * 1000 // device.compute_milli + device.free_memory_mib * 1000 // device.memory_mib


def room_of_node(node: NodeView, kinds: dict[object, Kind]) -> NodeRoom:
    """The node as a value; ``kinds`` holds the kinds met so far."""
    devices = tuple(room_of_device(node.devices[uuid]) for uuid in sorted(node.devices))
    static = tuple((device.model, device.compute_milli, device.memory_mib, device.modes) for device in devices)
    key = (node.cpu_milli, node.memory_mib, static)
    kind = kinds.get(key)
    if kind is None:
        kind = kinds[key] = Kind(*key)
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
        kind,
        sum(map(free_share, devices)),
    )


def room_after(room: NodeRoom, node: NodeView, slices: tuple[Slice, ...]) -> NodeRoom:
    """The node as a value, where since ``room`` only a run with these slices came or went."""
    touched = {piece.device_uuid for piece in slices}
    devices = tuple(
        room_of_device(node.devices[device.uuid]) if device.uuid in touched else device for device in room.devices
    )
    return NodeRoom(
        room.node_id,
        node.epoch,
        node.state,
        node.cpu_milli,
        node.memory_mib,
        node.cpu_milli - node.used_cpu_milli,
        node.memory_mib - node.used_memory_mib,
        devices,
        sum(1 for device in devices if device.is_healthy and not device.runs),
        room.kind,
        sum(map(free_share, devices)),
    )


def offered_mode(demand: Demand, modes: tuple[Mode, ...]) -> Mode | None:
    """How an empty device with these modes would give what is asked; None where it cannot."""
    if demand.is_whole:
        wanted = demand.mode or Mode.EXCLUSIVE
        return wanted if wanted in modes else None
    if demand.mode is not None:
        return demand.mode if demand.mode in SHARED and demand.mode in modes else None
    for mode in demand.shared:
        if mode in modes:
            return mode
    return None


def mode_now(demand: Demand, device: DeviceRoom) -> Mode | None:
    """How the device gives what is asked beside the runs that it has; None where their modes or owners don't go."""
    if device.mode is None:
        return offered_mode(demand, device.modes)
    if demand.is_whole or device.mode not in demand.shared or device.mode not in device.modes:
        return None
    if demand.mode is not None and demand.mode is not device.mode:
        return None
    if device.mode is Mode.MPS and demand.trust and demand.trust != device.tenant:
        return None
    return device.mode


def places_on(demand: Demand, kind: Kind) -> tuple[int, ...] | Out:
    """Places of the devices that could serve the demand if they were free; or why the node never hosts it."""
    if demand.cpu_milli > kind.cpu_milli or demand.host_memory_mib > kind.memory_mib:
        return Out.HOST_TOO_SMALL
    matching = [
        place
        for place, (model, compute_milli, memory_mib, _) in enumerate(kind.devices)
        if (not demand.models or model in demand.models)
        and demand.compute_milli <= compute_milli
        and demand.memory_mib <= memory_mib
    ]
    if len(matching) < demand.devices:
        return Out.NO_MATCHING_DEVICE
    offering = tuple(place for place in matching if offered_mode(demand, kind.devices[place][3]) is not None)
    return Out.ISOLATION_UNAVAILABLE if len(offering) < demand.devices else offering


def look(demand: Demand, room: NodeRoom, places: tuple[int, ...], choose: Choose) -> Fit | Out:
    """How the node hosts one replica on devices among ``places`` (see places_on), or why it does not now."""
    if room.state is not NodeState.READY:
        return _OUT_BY_STATE[room.state]
    if room.node_id in demand.avoid:
        return Out.NODE_AVOIDED
    if not demand.devices:
        fits: list[int] = []
    elif demand.is_whole:
        if room.empty_devices < demand.devices:
            return _whole_out(demand, room, places)
        compute, memory = demand.compute_milli, demand.memory_mib
        fits = []
        for place in places:
            device = room.devices[place]
            # A device that came back smaller may be without runs and yet short of room for a moment.
            if (
                not device.runs
                and device.is_healthy
                and device.free_compute_milli >= compute
                and device.free_memory_mib >= memory
            ):
                fits.append(place)
        if len(fits) < demand.devices:
            return _whole_out(demand, room, places)
    else:
        found = _shares(demand, room, places)
        if isinstance(found, Out):
            return found
        fits = found
    if demand.cpu_milli > room.free_cpu_milli or demand.host_memory_mib > room.free_memory_mib:
        return Out.INSUFFICIENT_HOST
    return choose(demand, room, fits)


def _whole_out(demand: Demand, room: NodeRoom, places: tuple[int, ...]) -> Out:
    healthy = 0
    for place in places:
        healthy += room.devices[place].is_healthy
        if healthy == demand.devices:
            return Out.DEVICES_BUSY
    return Out.DEVICE_UNHEALTHY


def _shares(demand: Demand, room: NodeRoom, places: tuple[int, ...]) -> list[int] | Out:
    compute, memory = demand.compute_milli, demand.memory_mib
    fits: list[int] = []
    healthy = usable = 0
    has_compute = has_memory = False
    for place in places:
        device = room.devices[place]
        if not device.is_healthy:
            continue
        healthy += 1
        if device.runs and mode_now(demand, device) is None:
            continue
        usable += 1
        enough_compute = device.free_compute_milli >= compute
        enough_memory = device.free_memory_mib >= (memory or device.memory_mib)
        if enough_compute and enough_memory:
            fits.append(place)
        has_compute = has_compute or enough_compute
        has_memory = has_memory or enough_memory
    if len(fits) >= demand.devices:
        return fits
    if healthy < demand.devices:
        return Out.DEVICE_UNHEALTHY
    if usable < demand.devices:
        return Out.DEVICES_BUSY
    if has_compute and has_memory:
        return Out.FRAGMENTED_DEVICES
    if has_compute:
        return Out.INSUFFICIENT_GPU_MEMORY
    return Out.INSUFFICIENT_COMPUTE if has_memory else Out.DEVICES_BUSY


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


def with_run(demand: Demand, room: NodeRoom, picks: tuple[int, ...], tenant: TenantId) -> NodeRoom:
    """The node once one replica of the tenant's holds its slices there."""
    devices = list(room.devices)
    emptied = 0
    share = room.free_share
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
        share += free_share(devices[place]) - free_share(device)
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
        room.kind,
        share,
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
        if device.is_healthy and is_match(demand, device) and offered_mode(demand, device.modes) is not None
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
            if device.is_healthy and is_match(demand, device) and offered_mode(demand, device.modes) is not None:
                places += 1 if demand.is_whole else _shares_when_empty(demand, device)
        counts.append(places // demand.devices)
    return min(counts, default=demand.replicas)


def _shares_when_empty(demand: Demand, device: DeviceRoom) -> int:
    return min(
        device.compute_milli // max(1, demand.compute_milli),
        device.memory_mib // (demand.memory_mib or device.memory_mib),
    )
