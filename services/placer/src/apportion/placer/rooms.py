"""What is free on each node, as values: how a demand fits, and why it does not.

A room is a picture of a node that nobody changes: taking slices makes a new one. So a round of placements can try
things out on top of the folded state without touching it.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum, unique
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts.causes import DeviceHealth, Mode
from apportion.contracts.events import JobSpec, MigPlacement, MigProfile, Slice
from apportion.contracts.ids import DeviceUuid, NodeId, TenantId, job_of_run, tenant_of_job
from apportion.placer.constraints import DeviceKind, Kind, Like, Limits, Where, where_of
from apportion.placer.geometry import Board, Instances, instances_on
from apportion.pool.state import DeviceView, NodeState, NodeView

SHARED = (Mode.MPS, Mode.TIMESLICE, Mode.MIG)
"""Modes in which several runs share a device, the preferred one first."""
SEVERAL = TenantId("*")
"""Stands for a device whose MPS clients belong to more than one tenant."""


@unique
class Out(StrEnum):
    """Why a node is out for a demand."""

    NO_MATCHING_DEVICE = "NoMatchingDevice"
    """Too few devices of an accepted kind, vendor, model and size."""
    ARCHITECTURE_TOO_OLD = "ArchitectureTooOld"
    """Its devices are of an older architecture, or of a lower compute capability, than asked."""
    VERSION_MISMATCH = "VersionMismatch"
    """Its driver, or the CUDA that it runs, is older than asked."""
    LABEL_MISMATCH = "LabelMismatch"
    """It lacks a label that is required; its site and network segment are labels, too."""
    NODE_AVOIDED = "NodeAvoided"
    """The job asked not to be there, or not to be there again after an attempt failed."""
    TOPOLOGY_MISMATCH = "TopologyMismatch"
    """Too few of its devices are on one NUMA node, or joined by fast links."""
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
    MIG_PLACEMENT = "MigPlacement"
    """No device has the memory slices free, together and where such an instance may begin."""
    RUNS_CAPPED = "RunsCapped"
    """Devices with room have as many runs as one device may."""
    INSUFFICIENT_ENCODERS = "InsufficientEncoders"
    INSUFFICIENT_PCIE = "InsufficientPcie"
    TOPOLOGY_BUSY = "TopologyBusy"
    """Enough devices are free, and too few of them on one NUMA node, or joined by fast links."""


NEVER = frozenset(
    {
        Out.NO_MATCHING_DEVICE,
        Out.ARCHITECTURE_TOO_OLD,
        Out.VERSION_MISMATCH,
        Out.LABEL_MISMATCH,
        Out.NODE_AVOIDED,
        Out.TOPOLOGY_MISMATCH,
        Out.ISOLATION_UNAVAILABLE,
        Out.HOST_TOO_SMALL,
    }
)
"""Reasons that stay while the node is what it is, however empty it gets."""

_OUT_BY_STATE = {
    NodeState.CORDONED: Out.NODE_CORDONED,
    NodeState.DRAINING: Out.NODE_DRAINING,
    NodeState.SUSPECTED: Out.NODE_SUSPECTED,
    NodeState.FENCED: Out.NODE_FENCED,
}


NODE_KEY: Final = "node"
"""Stands for the node itself where labels tell what is near."""
PREFERRED: Final = 10**15
"""What each preference that a node meets adds to its score: more than any policy's own parts."""
MODE_STEP: Final = 10**14
"""What each step up in the order of accepted modes adds."""
_MIG_KEPT_PCT: Final = 97
"""Sizes in a board's table add up to a little more than the driver leaves usable: the last instance has so much."""


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
    """How many start together, or none does; an elastic gang may grow beyond."""
    trust: TenantId
    """Whom the job shares an MPS device with: its own tenant; empty where the pool is one trust group."""
    shared: tuple[Mode, ...] = SHARED
    """Modes in which it takes a device that is not its alone, the preferred one first; EXCLUSIVE among them means that
    a whole device does where no share of one is to be had so."""
    is_ranked: bool = False
    """The order of those modes counts for more than how well it fits."""
    avoid: tuple[NodeId, ...] = ()
    policy: str = ""
    """By which policy it is placed, where that isn't the pool's."""
    mig_profile: str = ""
    """The sort of MIG instance that it is; compute and memory are then the instance's, and 0 here."""
    is_distinct: bool = False
    """No two of the replicas share a device."""
    topology: str = ""
    """The label of which all replicas shall have one value, or NODE_KEY; only of gangs."""
    is_together: bool = False
    """Whether they must."""
    workload: str = ""
    """What sort of work it is, where its policy goes by that."""
    where: Where | None = None
    """What else the node and its devices must be; None for the many jobs that don't mind."""


def _is_everything(spec: JobSpec) -> bool:
    """A share that is all of a device is better had whole, by those who may have that."""
    is_accepted = not spec.modes or Mode.EXCLUSIVE in spec.modes
    return spec.compute_milli >= 1000 and spec.memory_mib == 0 and is_accepted


def demand_of(
    spec: JobSpec,
    tenant: TenantId,
    *,
    is_pool_trusted: bool,
    avoid: tuple[NodeId, ...] = (),
    policy: str = "",
    workload: str = "",
) -> Demand:
    """What a job of this specification needs of a node."""
    has_devices = spec.devices > 0
    has_amounts = has_devices and not spec.mig_profile
    shared = tuple(spec.modes) or SHARED
    return Demand(
        devices=spec.devices,
        compute_milli=spec.compute_milli if has_amounts else 0,
        memory_mib=spec.memory_mib if has_amounts else 0,
        is_whole=has_devices
        and (
            spec.mode is Mode.EXCLUSIVE
            or spec.dedicated
            or spec.devices > 1
            or shared == (Mode.EXCLUSIVE,)
            or (_is_everything(spec) and spec.mode is not Mode.MIG)
        ),
        mode=spec.mode if has_devices else None,
        models=spec.models if has_devices else (),
        cpu_milli=spec.cpu_milli,
        host_memory_mib=spec.host_memory_mib,
        replicas=spec.replicas_least,
        trust=TenantId("") if is_pool_trusted else tenant,
        shared=shared if has_devices else SHARED,
        is_ranked=has_devices and len(spec.modes) > 1,
        avoid=tuple(sorted({*avoid, *(NodeId(node) for node in spec.avoid_nodes)})),
        policy=policy,
        mig_profile=spec.mig_profile if has_devices else "",
        is_distinct=spec.distinct and spec.devices > 0 and spec.replicas > 1,
        topology=spec.topology_key if spec.replicas > 1 else "",
        is_together=spec.replicas > 1 and bool(spec.topology_key) and spec.topology_required,
        workload=workload,
        where=where_of(spec),
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
    kind: DeviceKind
    free_encoders: int = 0
    free_pcie_mbps: int = 0
    instances: Instances = ()
    """What is on it already, where it is cut into MIG instances."""
    like: tuple[object, ...] = ()
    """What sets it apart from other devices of its kind, apart from its name."""

    @property
    def free_share_mib(self) -> int:
        """MiB that shares may still take: fewer than are free with a buffer, more where the pool oversubscribes."""
        return self.free_memory_mib - self.memory_mib + self.kind.share_mib


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
    kind: Kind
    """The same for nodes that are alike when empty."""
    free_share: int
    """What is free of its healthy devices, in thousandths of both dimensions together."""
    like: Like
    """The same object for nodes that are alike in all but the names of node and devices."""
    devices_like: Like
    """The same object for nodes whose devices are."""


class Fit(Struct, frozen=True):
    """The best way, by the policy, in which a node can host a demand."""

    score: int
    picks: tuple[int, ...]
    """Places of the devices in ``NodeRoom.devices``."""


Choose = Callable[[Demand, NodeRoom, list[int]], Fit]
"""A policy's choice among the devices (by place) that fit, which are at least as many as asked."""


def room_of_device(view: DeviceView, kind: DeviceKind) -> DeviceRoom:
    """The device as a value."""
    device = view.device
    mode: Mode | None = None
    tenant = TenantId("")
    encoders = kind.encoders
    pcie_mbps = kind.pcie_mbps
    for run_id, piece in view.runs.items():
        owner = tenant_of_job(job_of_run(run_id))
        mode = piece.mode
        tenant = owner if tenant in {"", owner} else SEVERAL
        encoders -= piece.encoders
        pcie_mbps -= piece.pcie_mbps
    return _device(
        device.uuid,
        kind,
        (device.compute_milli, device.memory_mib, view.free_compute_milli, view.free_memory_mib),
        (len(view.runs), mode, tenant),
        (encoders, pcie_mbps),
        () if device.mig is None else instances_on(device.mig, (piece.mig for piece in view.runs.values())),
        is_healthy=device.health is DeviceHealth.HEALTHY,
    )


def _device(  # noqa: PLR0917 - called often: what is free, and whose runs are on it
    uuid: DeviceUuid,
    kind: DeviceKind,
    amounts: tuple[int, int, int, int],
    runs: tuple[int, Mode | None, TenantId],
    links: tuple[int, int],
    instances: Instances,
    *,
    is_healthy: bool,
) -> DeviceRoom:
    return DeviceRoom(
        uuid,
        kind.model,
        *amounts,
        kind.modes,
        is_healthy,
        *runs,
        kind,
        *links,
        instances,
        (*amounts, is_healthy, *runs, *links, instances),
    )


def free_share(device: DeviceRoom) -> int:
    """What is free of a device, in thousandths of both dimensions together; nothing where one of them is used up."""
    if not device.is_healthy or device.free_compute_milli <= 0 or device.free_memory_mib <= 0:
        return 0
    return device.free_compute_milli * 1000 // device.compute_milli + device.free_memory_mib * 1000 // device.memory_mib


def room_of_node(node: NodeView, kinds: dict[object, Kind], limits: Limits) -> NodeRoom:
    """The node as a value; ``kinds`` holds the kinds met so far, all of them under these limits."""
    views = [node.devices[uuid] for uuid in sorted(node.devices)]
    kind = Kind.of(node, [view.device for view in views], kinds, limits)
    return _room(node, tuple(room_of_device(view, each) for view, each in zip(views, kind.devices, strict=True)), kind)


def room_after(room: NodeRoom, node: NodeView, slices: tuple[Slice, ...]) -> NodeRoom:
    """The node as a value, where since ``room`` only a run with these slices came or went."""
    touched = {piece.device_uuid for piece in slices}
    devices = tuple(
        room_of_device(node.devices[device.uuid], device.kind) if device.uuid in touched else device
        for device in room.devices
    )
    return _room(node, devices, room.kind)


def _room(node: NodeView, devices: tuple[DeviceRoom, ...], kind: Kind) -> NodeRoom:
    cpu_milli, memory_mib = node.cpu_milli - node.used_cpu_milli, node.memory_mib - node.used_memory_mib
    return NodeRoom(
        node.node_id,
        node.epoch,
        node.state,
        node.cpu_milli,
        node.memory_mib,
        cpu_milli,
        memory_mib,
        devices,
        sum(1 for device in devices if device.is_healthy and not device.runs),
        kind,
        sum(map(free_share, devices)),
        *_likes(kind, node.state, cpu_milli, memory_mib, devices),
    )


def _likes(
    kind: Kind, state: NodeState, free_cpu_milli: int, free_memory_mib: int, devices: Sequence[DeviceRoom]
) -> tuple[Like, Like]:
    devices_like = kind.like(tuple([device.like for device in devices]))
    return kind.like((state, free_cpu_milli, free_memory_mib, devices_like)), devices_like


def offered_mode(demand: Demand, modes: tuple[Mode, ...]) -> Mode | None:
    """How an empty device with these modes would give what is asked; None where it cannot."""
    if demand.is_whole:
        wanted = demand.mode or Mode.EXCLUSIVE
        return wanted if wanted in modes else None
    if demand.mig_profile:
        return Mode.MIG if Mode.MIG in modes else None
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
    if demand.is_whole or device.mode is Mode.EXCLUSIVE:
        return None
    if device.mode not in demand.shared or device.mode not in device.modes:
        return None
    if (demand.mode is not None and demand.mode is not device.mode) or (
        demand.mig_profile and device.mode is not Mode.MIG
    ):
        return None
    if device.mode is Mode.MPS and demand.trust and demand.trust != device.tenant:
        return None
    return device.mode


def places_on(demand: Demand, kind: Kind) -> tuple[int, ...] | Out:
    """Places of the devices that could serve the demand if they were free; or why the node never hosts it."""
    if demand.cpu_milli > kind.cpu_milli or demand.host_memory_mib > kind.memory_mib:
        return Out.HOST_TOO_SMALL
    if demand.is_together and demand.topology != NODE_KEY and demand.topology not in kind.labels:
        return Out.LABEL_MISMATCH
    where = demand.where
    if where is not None:
        if not where.has_labels(kind):
            return Out.LABEL_MISMATCH
        if not where.has_versions(kind):
            return Out.VERSION_MISMATCH
    matching = [place for place, device in enumerate(kind.devices) if is_match(demand, device)]
    if len(matching) < demand.devices:
        return Out.NO_MATCHING_DEVICE
    if where is not None and demand.devices:
        matching = [place for place in matching if where.is_new_enough(kind.devices[place])]
        if len(matching) < demand.devices:
            return Out.ARCHITECTURE_TOO_OLD
    offering = [place for place in matching if is_offered(demand, kind.devices[place])]
    if len(offering) < demand.devices:
        return Out.ISOLATION_UNAVAILABLE
    if where is not None and demand.devices > 1:
        offering = [place for group in _strict_groups(where, kind, offering, demand.devices) for place in group]
        if not offering:
            return Out.TOPOLOGY_MISMATCH
    return tuple(sorted(offering))


def look(demand: Demand, room: NodeRoom, places: tuple[int, ...], choose: Choose) -> Fit | Out:
    """How the node hosts one replica on devices among ``places`` (see places_on), or why it does not now."""
    return look_with(demand, room, device_fits(demand, room, places), choose)


def look_with(demand: Demand, room: NodeRoom, fits: list[int] | Out, choose: Choose) -> Fit | Out:
    """As ``look``, where it is known which of its devices would do (see device_fits)."""
    if room.state is not NodeState.READY:
        return _OUT_BY_STATE[room.state]
    if demand.avoid and room.node_id in demand.avoid:
        return Out.NODE_AVOIDED
    if not isinstance(fits, list):
        return fits
    if demand.cpu_milli > room.free_cpu_milli or demand.host_memory_mib > room.free_memory_mib:
        return Out.INSUFFICIENT_HOST
    if demand.devices > 1 and (demand.where is not None or room.kind.has_links):
        return _look_together(demand, room, fits, choose)
    fit = choose(demand, room, fits)
    return fit if demand.where is None and not demand.is_ranked else _with_preferences(demand, room, fit)


def device_fits(demand: Demand, room: NodeRoom, places: tuple[int, ...]) -> list[int] | Out:
    """Which devices among ``places`` would do, whatever else is asked of the node; or why too few of them do."""
    if not demand.devices:
        return []
    if not demand.is_whole:
        return _shares(demand, room, places)
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
            and not device.instances
        ):
            fits.append(place)
    return fits if len(fits) >= demand.devices else _whole_out(demand, room, places)


def devices_asked(demand: Demand) -> Demand:
    """What of the demand ``device_fits`` depends on: the same for many that differ in what they ask of the host."""
    return replace(
        demand,
        cpu_milli=0,
        host_memory_mib=0,
        replicas=1,
        avoid=(),
        policy="",
        workload="",
        topology="",
        is_together=False,
        is_distinct=False,
    )


def preferences(demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
    """What the score of these devices has for preferences that they meet; empty where the job has none."""
    where = demand.where
    found: dict[str, int] = {}
    if demand.is_ranked and picks:
        ranks = [_rank(demand, mode_now(demand, room.devices[place])) for place in picks]
        found["mode"] = MODE_STEP * (len(demand.shared) - max(ranks))
    if where is None:
        return found
    if where.preferred:
        found["preferred_labels"] = PREFERRED * where.labels_met(room.kind)
    if where.numa == "preferred":
        nodes = {room.kind.devices[place].numa_node for place in picks}
        found["one_numa_node"] = PREFERRED * (len(nodes) <= 1)
    return found


def _with_preferences(demand: Demand, room: NodeRoom, fit: Fit) -> Fit:
    added = sum(preferences(demand, room, fit.picks).values())
    return Fit(fit.score + added, fit.picks) if added else fit


def _look_together(demand: Demand, room: NodeRoom, fits: list[int], choose: Choose) -> Fit | Out:
    """The best devices that are as near to each other as they must be, and where possible as near as they may be."""
    where = demand.where
    kind = room.kind
    strict = [fits] if where is None else _strict_groups(where, kind, fits, demand.devices)
    if not strict:
        return Out.TOPOLOGY_BUSY
    wants_numa = where is not None and bool(where.numa)
    near = []
    for group in strict:
        by_key: dict[tuple[int, str], list[int]] = {}
        for place in group:
            device = kind.devices[place]
            by_key.setdefault((device.numa_node if wants_numa else 0, device.link_group), []).append(place)
        near += [each for each in by_key.values() if len(each) >= demand.devices]
    # One NUMA node is worth more than a link across it only to those who say so; else the widest group that is near.
    options = [_with_preferences(demand, room, choose(demand, room, group)) for group in near or strict]
    return min(options, key=lambda fit: (-fit.score, fit.picks))


def _strict_groups(where: Where, kind: Kind, places: list[int], devices: int) -> list[list[int]]:
    """The places by what they must have in common, without groups that are too small."""
    if where.numa != "strict" and not where.is_linked:
        return [places] if len(places) >= devices else []
    groups: dict[tuple[int, str], list[int]] = {}
    for place in places:
        device = kind.devices[place]
        if where.is_linked and not device.link_group:
            continue
        key = (device.numa_node if where.numa == "strict" else 0, device.link_group if where.is_linked else "")
        groups.setdefault(key, []).append(place)
    return [group for _, group in sorted(groups.items()) if len(group) >= devices]


def _whole_out(demand: Demand, room: NodeRoom, places: tuple[int, ...]) -> Out:
    healthy = 0
    for place in places:
        healthy += room.devices[place].is_healthy
        if healthy == demand.devices:
            return Out.DEVICES_BUSY
    return Out.DEVICE_UNHEALTHY


def _shares(demand: Demand, room: NodeRoom, places: tuple[int, ...]) -> list[int] | Out:
    compute, memory = demand.compute_milli, demand.memory_mib
    where = demand.where
    fits: list[int] = []
    partitions: list[int] = []
    healthy = usable = capped = 0
    has_compute = has_memory = is_blocked = False
    short: Out | None = None
    for place in places:
        device = room.devices[place]
        if not device.is_healthy:
            continue
        healthy += 1
        if device.runs:
            if device.runs >= device.kind.runs_max:
                capped += 1
                continue
            if mode_now(demand, device) is None:
                continue
        usable += 1
        if where is not None and (found := where.shortage(device.free_encoders, device.free_pcie_mbps)):
            short = Out(found)
            continue
        if device.kind.board is not None:
            if _instance_on(demand, device, device.kind.board) is None:
                is_blocked = True
            else:
                partitions.append(place)
            continue
        if not device.runs and offered_mode(demand, device.modes) is Mode.EXCLUSIVE:
            # It takes all of the device, which is free: what it asks for was looked at with the kind of device.
            if not device.instances:
                fits.append(place)
            continue
        enough_compute = device.free_compute_milli >= compute
        enough_memory = device.free_share_mib >= (memory or device.kind.one_share_mib)
        if enough_compute and enough_memory:
            fits.append(place)
        has_compute = has_compute or enough_compute
        has_memory = has_memory or enough_memory
    if partitions:
        fits = sorted(fits + _least_broken(demand, room, partitions))
    if demand.is_ranked and len(fits) > demand.devices:
        fits = _preferred_modes(demand, room, fits)
    if len(fits) >= demand.devices:
        return fits
    if healthy < demand.devices:
        return Out.DEVICE_UNHEALTHY
    if usable < demand.devices:
        return Out.RUNS_CAPPED if capped else Out.DEVICES_BUSY
    if has_compute and has_memory:
        return Out.FRAGMENTED_DEVICES
    if has_compute:
        return Out.INSUFFICIENT_GPU_MEMORY
    if has_memory:
        return Out.INSUFFICIENT_COMPUTE
    return short or (Out.MIG_PLACEMENT if is_blocked else Out.DEVICES_BUSY)


def _preferred_modes(demand: Demand, room: NodeRoom, fits: list[int]) -> list[int]:
    """Those of the devices that come in the best of the accepted modes that enough of them come in."""
    ranks = {place: _rank(demand, mode_now(demand, room.devices[place])) for place in fits}
    for worst in sorted(set(ranks.values())):
        kept = [place for place in fits if ranks[place] <= worst]
        if len(kept) >= demand.devices:
            return kept
    return fits


def _rank(demand: Demand, mode: Mode | None) -> int:
    return demand.shared.index(mode) if mode in demand.shared else len(demand.shared)


def _profile_on(demand: Demand, board: Board) -> MigProfile | None:
    # Who asked for all of a device's memory gets all of the board.
    memory = demand.memory_mib or board.memory_mib
    return board.profile_for(demand.mig_profile, demand.compute_milli, memory)


def _instance_on(demand: Demand, device: DeviceRoom, board: Board) -> MigPlacement | None:
    profile = _profile_on(demand, board)
    if profile is None or demand.memory_mib > device.free_memory_mib:
        return None
    if device.free_memory_mib * 100 < profile.memory_mib * _MIG_KEPT_PCT:
        return None
    start = board.start_of(device.instances, profile)
    return None if start is None else MigPlacement(profile=profile.name, start=start, size=profile.size)


def _least_broken(demand: Demand, room: NodeRoom, places: list[int]) -> list[int]:
    """Of the devices that can be cut for it, those that lose the least of what large instances could use."""
    losses = []
    for place in places:
        device = room.devices[place]
        board = device.kind.board
        assert board is not None
        placed = _instance_on(demand, device, board)
        assert placed is not None
        before = board.capacity(device.instances)
        after = board.capacity((*device.instances, (placed.profile, placed.start, placed.size)))
        losses.append(tuple(had - has for had, has in zip(before, after, strict=True)))
    least = min(losses)
    return [place for place, loss in zip(places, losses, strict=True) if loss == least]


class Piece(Struct, frozen=True):
    """What one replica takes of one device."""

    compute_milli: int
    memory_mib: int
    mode: Mode
    mig: MigPlacement | None = None


def piece_on(demand: Demand, device: DeviceRoom) -> Piece:
    """What one replica takes of this device, which must have room for it."""
    mode = mode_now(demand, device)
    assert mode is not None
    if mode is Mode.EXCLUSIVE or demand.is_whole:
        return Piece(device.compute_milli, device.memory_mib, mode)
    board = device.kind.board
    if board is None:
        return Piece(demand.compute_milli, demand.memory_mib or device.kind.one_share_mib, mode)
    placed = _instance_on(demand, device, board)
    profile = _profile_on(demand, board)
    assert placed is not None
    assert profile is not None
    return Piece(board.compute_milli(profile), min(profile.memory_mib, device.free_memory_mib), mode, placed)


def amounts_on(demand: Demand, device: DeviceRoom) -> tuple[int, int]:
    """Milli-GPU and MiB that one replica takes of this device, also where there is no room for it now."""
    if demand.is_whole or (not device.runs and offered_mode(demand, device.modes) is Mode.EXCLUSIVE):
        return device.compute_milli, device.memory_mib
    board = device.kind.board
    if board is not None:
        profile = _profile_on(demand, board)
        if profile is not None:
            return board.compute_milli(profile), min(profile.memory_mib, max(device.free_memory_mib, demand.memory_mib))
    return demand.compute_milli, demand.memory_mib or device.kind.one_share_mib


def slices_on(demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> tuple[Slice, ...]:
    """The slices that one replica holds of these devices."""
    where = demand.where
    slices = []
    for place in picks:
        device = room.devices[place]
        piece = piece_on(demand, device)
        slices.append(
            Slice(
                device_uuid=device.uuid,
                compute_milli=piece.compute_milli,
                memory_mib=piece.memory_mib,
                mode=piece.mode,
                mig=piece.mig,
                encoders=0 if where is None else where.encoders,
                pcie_mbps=0 if where is None else where.pcie_mbps,
            )
        )
    return tuple(slices)


def is_sized(demand: Demand) -> bool:
    """True where what a replica takes is the same on every device."""
    return not (demand.is_whole or not demand.memory_mib or demand.mode is Mode.MIG or Mode.MIG in demand.shared)


def with_run(demand: Demand, room: NodeRoom, picks: tuple[int, ...], tenant: TenantId) -> NodeRoom:
    """The node once one replica of the tenant's holds its slices there."""
    devices = list(room.devices)
    emptied = 0
    share = room.free_share
    for place, piece in zip(picks, slices_on(demand, room, picks), strict=True):
        device = devices[place]
        emptied += not device.runs
        devices[place] = _device(
            device.uuid,
            device.kind,
            (
                device.compute_milli,
                device.memory_mib,
                device.free_compute_milli - piece.compute_milli,
                device.free_memory_mib - piece.memory_mib,
            ),
            (device.runs + 1, piece.mode, tenant if device.tenant in {"", tenant} else SEVERAL),
            (device.free_encoders - piece.encoders, device.free_pcie_mbps - piece.pcie_mbps),
            device.instances if piece.mig is None else _with_instance(device.instances, piece.mig),
            is_healthy=device.is_healthy,
        )
        share += free_share(devices[place]) - free_share(device)
    cpu_milli, memory_mib = room.free_cpu_milli - demand.cpu_milli, room.free_memory_mib - demand.host_memory_mib
    return NodeRoom(
        room.node_id,
        room.epoch,
        room.state,
        room.cpu_milli,
        room.memory_mib,
        cpu_milli,
        memory_mib,
        tuple(devices),
        room.empty_devices - emptied,
        room.kind,
        share,
        *_likes(room.kind, room.state, cpu_milli, memory_mib, devices),
    )


def hidden(room: NodeRoom, picks: tuple[int, ...], *, is_back: bool = False) -> NodeRoom:
    """The node as one whose devices there are out of use; with ``is_back`` in use again."""
    devices = tuple(
        _hidden(device, is_back=is_back) if place in picks else device for place, device in enumerate(room.devices)
    )
    like, devices_like = _likes(room.kind, room.state, room.free_cpu_milli, room.free_memory_mib, devices)
    return replace(
        room,
        devices=devices,
        empty_devices=sum(1 for device in devices if device.is_healthy and not device.runs),
        free_share=sum(map(free_share, devices)),
        like=like,
        devices_like=devices_like,
    )


def _hidden(device: DeviceRoom, *, is_back: bool) -> DeviceRoom:
    return _device(
        device.uuid,
        device.kind,
        (device.compute_milli, device.memory_mib, device.free_compute_milli, device.free_memory_mib),
        (device.runs, device.mode, device.tenant),
        (device.free_encoders, device.free_pcie_mbps),
        device.instances,
        is_healthy=is_back,
    )


def without_run(room: NodeRoom, slices: tuple[Slice, ...], cpu_milli: int, host_memory_mib: int) -> NodeRoom:
    """The node once a run that holds these slices is gone; of the owners of what remains nothing more is known."""
    gone = {piece.device_uuid: piece for piece in slices}
    devices = []
    for device in room.devices:
        piece = gone.get(device.uuid)
        if piece is None:
            devices.append(device)
            continue
        runs = device.runs - 1
        instances = device.instances
        if piece.mig is not None:
            placed = (piece.mig.profile, piece.mig.start, piece.mig.size)
            instances = tuple(each for each in instances if each != placed)
        devices.append(
            _device(
                device.uuid,
                device.kind,
                (
                    device.compute_milli,
                    device.memory_mib,
                    device.free_compute_milli + piece.compute_milli,
                    device.free_memory_mib + piece.memory_mib,
                ),
                (runs, device.mode if runs else None, device.tenant if runs else TenantId("")),
                (device.free_encoders + piece.encoders, device.free_pcie_mbps + piece.pcie_mbps),
                instances,
                is_healthy=device.is_healthy,
            )
        )
    free_cpu_milli, free_memory_mib = room.free_cpu_milli + cpu_milli, room.free_memory_mib + host_memory_mib
    return NodeRoom(
        room.node_id,
        room.epoch,
        room.state,
        room.cpu_milli,
        room.memory_mib,
        free_cpu_milli,
        free_memory_mib,
        tuple(devices),
        sum(1 for device in devices if device.is_healthy and not device.runs),
        room.kind,
        sum(map(free_share, devices)),
        *_likes(room.kind, room.state, free_cpu_milli, free_memory_mib, devices),
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
        if device.is_healthy and is_eligible(demand, device.kind)
    )
    return missing + sum(each[: demand.devices])


def is_match(demand: Demand, device: DeviceKind) -> bool:
    """True where the device is of an accepted kind and model, and large enough when empty."""
    if demand.models and device.model not in demand.models:
        return False
    if demand.compute_milli > device.compute_milli:
        return False
    if demand.memory_mib > (device.memory_mib if demand.is_whole else device.one_share_mib):
        return False
    return device.kind == "gpu" if demand.where is None else demand.where.is_kind(device)


def is_offered(demand: Demand, device: DeviceKind) -> bool:
    """True where the device, empty, gives what is asked in an accepted mode."""
    if offered_mode(demand, device.modes) is None:
        return False
    if device.board is None or demand.is_whole:
        return not demand.mig_profile
    return _profile_on(demand, device.board) is not None


def is_eligible(demand: Demand, device: DeviceKind) -> bool:
    """True where the device could serve the demand if it were free, whatever its node is."""
    where = demand.where
    return is_match(demand, device) and is_offered(demand, device) and (where is None or where.is_new_enough(device))


def _with_instance(instances: Instances, placed: MigPlacement) -> Instances:
    return tuple(sorted([*instances, (placed.profile, placed.start, placed.size)]))


def _device_shortfall(demand: Demand, device: DeviceRoom) -> int:
    if demand.is_whole or mode_now(demand, device) is None:
        held = (device.compute_milli - device.free_compute_milli) * 1000 // max(1, device.compute_milli)
        held += (device.memory_mib - device.free_memory_mib) * 1000 // max(1, device.memory_mib)
        return held + device.runs
    compute, memory = amounts_on(demand, device)
    return max(0, compute - device.free_compute_milli) * 1000 // max(1, compute) + max(
        0, memory - device.free_share_mib
    ) * 1000 // max(1, memory)


def replicas_when_empty(demand: Demand, room: NodeRoom) -> int:
    """How many replicas the node would hold with nothing else on it, its unhealthy devices left out."""
    if room.node_id in demand.avoid:
        return 0
    counts = []
    if demand.cpu_milli:
        counts.append(room.cpu_milli // demand.cpu_milli)
    if demand.host_memory_mib:
        counts.append(room.memory_mib // demand.host_memory_mib)
    if demand.devices:
        places = [
            place for place, device in enumerate(room.devices) if device.is_healthy and is_eligible(demand, device.kind)
        ]
        where = demand.where
        groups = [places] if where is None else _strict_groups(where, room.kind, places, demand.devices)
        counts.append(
            sum(
                sum(1 if demand.is_whole else _shares_when_empty(demand, room.devices[place]) for place in group)
                // demand.devices
                for group in groups
            )
        )
    return min(counts, default=demand.replicas)


def _shares_when_empty(demand: Demand, device: DeviceRoom) -> int:
    kind = device.kind
    if offered_mode(demand, kind.modes) is Mode.EXCLUSIVE:
        return 1
    if kind.board is not None and not demand.is_distinct:
        return kind.board.fills(_profile_on(demand, kind.board))
    if demand.is_distinct:
        return 1
    counts = [
        kind.runs_max,
        device.compute_milli // max(1, demand.compute_milli),
        kind.share_mib // (demand.memory_mib or kind.one_share_mib),
    ]
    if demand.where is not None:
        counts += demand.where.shares_of(kind)
    return min(counts)
