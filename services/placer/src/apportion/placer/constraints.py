"""What a job may demand of a node beside room: kinds of devices, versions, labels, nearness; and what a node is.

A ``Where`` holds the demands of one job, a ``Kind`` the facts of all nodes that are alike. Neither knows what runs.
"""

from typing import Final

from msgspec import Struct

from apportion.contracts.causes import Mode
from apportion.contracts.events import Device, JobSpec
from apportion.contracts.units import ARCHITECTURES, LANE_MBPS, version_of
from apportion.placer.geometry import Board
from apportion.pool.state import NodeView

MPS_CLIENTS_MAX: Final = 48
"""Client contexts that one MPS server serves on a device, by the drivers up to CUDA 13.0."""
RUNS_PER_CORE: Final = 3
"""Where the pool sets no cap: so many runs a device for each core of its node."""
PCT: Final = 100
LIKES_MAX: Final = 4_096
"""States of nodes of one kind that are told apart by objects of their own, before all of them are forgotten."""


class Limits(Struct, frozen=True, kw_only=True):
    """How far the pool lets shares of a device go."""

    runs_per_device_max: int = 0
    """0: three for each core of the node."""
    memory_buffer_pct: int = 0
    """Percent of a shared device's memory that nobody may book."""
    memory_oversubscribe_pct: int = PCT
    """Percent of a shared device's memory that may be booked; above 100 more than there is."""


class Where(Struct, frozen=True, kw_only=True):
    """What a job demands of nodes and devices."""

    kind: str = "gpu"
    vendor: str = ""
    min_arch: str = ""
    min_capability: tuple[int, ...] = ()
    min_driver: tuple[int, ...] = ()
    min_cuda: tuple[int, ...] = ()
    required: tuple[tuple[str, str], ...] = ()
    preferred: tuple[tuple[str, str], ...] = ()
    numa: str = ""
    is_linked: bool = False
    encoders: int = 0
    pcie_mbps: int = 0

    def has_labels(self, kind: "Kind") -> bool:
        """Whether nodes of this kind have every label that is required."""
        return all(kind.labels.get(name) == value for name, value in self.required)

    def labels_met(self, kind: "Kind") -> int:
        """How many of the preferred labels nodes of this kind have."""
        return sum(kind.labels.get(name) == value for name, value in self.preferred)

    def has_versions(self, kind: "Kind") -> bool:
        """Whether the driver, and the CUDA that it runs, are new enough."""
        return self.min_driver <= kind.driver and self.min_cuda <= kind.cuda

    def is_kind(self, device: "DeviceKind") -> bool:
        """Whether the device is of the kind and vendor, with the engines and the link that are asked for."""
        return (
            device.kind == self.kind
            and self.vendor in {"", device.vendor}
            and self.encoders <= device.encoders
            and self.pcie_mbps <= device.pcie_mbps
        )

    def is_new_enough(self, device: "DeviceKind") -> bool:
        """Whether the device's architecture and compute capability are what is asked or later."""
        return _age(self.min_arch) <= _age(device.arch) and self.min_capability <= device.capability

    def shortage(self, encoders: int, pcie_mbps: int) -> str:
        """What of a device's engines and link is too little, as an ``Out``; empty where there is enough."""
        if self.encoders > encoders:
            return "InsufficientEncoders"
        return "InsufficientPcie" if self.pcie_mbps > pcie_mbps else ""

    def shares_of(self, device: "DeviceKind") -> list[int]:
        """How many such shares the engines and the link of an empty device are enough for."""
        counts = []
        if self.encoders:
            counts.append(device.encoders // self.encoders)
        if self.pcie_mbps:
            counts.append(device.pcie_mbps // self.pcie_mbps)
        return counts


_ANYWHERE: Final = Where()


def where_of(spec: JobSpec) -> Where | None:
    """What the specification demands beside room; None where it is nothing."""
    if spec.devices:
        found = Where(
            kind=spec.device_kind,
            vendor=spec.vendor,
            min_arch=spec.min_arch,
            min_capability=version_of(spec.min_compute_capability),
            min_driver=version_of(spec.min_driver),
            min_cuda=version_of(spec.min_cuda),
            required=tuple(sorted(spec.required.items())),
            preferred=tuple(sorted(spec.preferred.items())),
            numa=spec.numa,
            is_linked=spec.linked and spec.devices > 1,
            encoders=spec.encoders,
            pcie_mbps=spec.pcie_mbps,
        )
    else:
        found = Where(
            min_driver=version_of(spec.min_driver),
            min_cuda=version_of(spec.min_cuda),
            required=tuple(sorted(spec.required.items())),
            preferred=tuple(sorted(spec.preferred.items())),
        )
    return None if found == _ANYWHERE else found


class DeviceKind:
    """What a device is, whatever runs on it."""

    __slots__ = (
        "arch", "board", "capability", "compute_milli", "encoders", "kind", "link_group", "memory_mib", "model",
        "modes", "numa_node", "one_share_mib", "pcie_mbps", "runs_max", "share_mib", "vendor",
    )  # fmt: skip

    def __init__(self, device: Device, *, board: Board | None, runs_max: int, limits: Limits) -> None:
        self.model = device.model
        self.compute_milli = device.compute_milli
        self.memory_mib = device.memory_mib
        self.modes = tuple(mode for mode in device.modes if (mode is Mode.MIG) == (board is not None))
        """A board that is cut into instances is used in no other way, and one that isn't has none."""
        self.kind = device.kind
        self.vendor = device.vendor
        self.arch = device.arch
        self.capability = version_of(device.compute_capability)
        self.numa_node = device.numa_node
        self.link_group = device.link_group
        self.encoders = device.encoders
        self.pcie_mbps = pcie_mbps_of(device)
        self.board = board
        """Where MIG mode is on: it is used by instances alone."""
        self.runs_max = runs_max
        whole = device.memory_mib
        self.share_mib = whole
        """MiB that all shares together may book."""
        if board is None:
            self.share_mib = whole * (PCT - limits.memory_buffer_pct) // PCT * limits.memory_oversubscribe_pct // PCT
        self.one_share_mib = min(whole, self.share_mib)
        """The most that one share may have."""


class Like:
    """Stands for nodes that are alike in all but names: of one kind, in one state, with equal room on each device.

    It is its own key: what is known of one of them is found by it, and holds for all.
    """

    __slots__ = ()


class Kind:
    """What a node is, whatever runs on it; the same object for all nodes that are alike."""

    __slots__ = ("_likes", "cpu_milli", "cuda", "devices", "driver", "group", "has_links", "labels", "memory_mib")

    def __init__(self, node: NodeView, devices: tuple[DeviceKind, ...]) -> None:
        self.cpu_milli = node.cpu_milli
        self.memory_mib = node.memory_mib
        self.labels = dict(node.labels)
        self.driver = version_of(node.driver_version)
        self.cuda = version_of(node.cuda_version)
        self.devices = devices
        """In the order of their UUIDs."""
        self.group = "+".join(sorted({device.model for device in devices}))
        """Its device models: what nodes are told apart by where some models are scarce."""
        self.has_links = any(device.link_group for device in devices)
        self._likes: dict[tuple[object, ...], Like] = {}

    def like(self, free: tuple[object, ...]) -> Like:
        """The one object for all nodes of this kind of which ``free`` is true.

        Forgetting them costs time and nothing else, as two objects may stand for what is alike.
        """
        found = self._likes.get(free)
        if found is None:
            if len(self._likes) >= LIKES_MAX:
                self._likes.clear()
            found = self._likes[free] = Like()
        return found

    @classmethod
    def of(cls, node: NodeView, devices: list[Device], known: dict[object, "Kind"], limits: Limits) -> "Kind":
        """The kind of this node; a new one only where none that is alike is known."""
        key = (
            node.cpu_milli,
            node.memory_mib,
            node.driver_version,
            node.cuda_version,
            tuple(sorted(node.labels.items())),
            tuple(_facts_of(device) for device in devices),
        )
        found = known.get(key)
        if found is None:
            boards: dict[object, Board] = {}
            found = known[key] = cls(node, tuple(_kind_of(device, node, boards, limits) for device in devices))
        return found


def pcie_mbps_of(device: Device) -> int:
    """Megabits a second of the device's link to its host; 0 where its driver doesn't say."""
    generation = min(device.pcie_generation, len(LANE_MBPS) - 1)
    return LANE_MBPS[generation] * device.pcie_lanes


def _kind_of(device: Device, node: NodeView, boards: dict[object, Board], limits: Limits) -> DeviceKind:
    board: Board | None = None
    if device.mig is not None and device.mig.enabled:
        key = (device.mig.profiles, device.mig.compute_slices)
        board = boards.get(key)
        if board is None:
            board = boards[key] = Board(device.mig)
    cap = limits.runs_per_device_max or max(1, RUNS_PER_CORE * node.cpu_milli // 1000)
    if Mode.MPS in device.modes:
        cap = min(cap, MPS_CLIENTS_MAX)
    return DeviceKind(device, board=board, runs_max=cap, limits=limits)


def _facts_of(device: Device) -> tuple[object, ...]:
    mig = device.mig
    return (
        device.model,
        device.compute_milli,
        device.memory_mib,
        device.modes,
        device.kind,
        device.vendor,
        device.arch,
        device.compute_capability,
        device.numa_node,
        device.link_group,
        device.encoders,
        device.pcie_generation,
        device.pcie_lanes,
        None if mig is None or not mig.enabled else (mig.profiles, mig.compute_slices),
    )


def _age(arch: str) -> int:
    return ARCHITECTURES.index(arch) + 1 if arch in ARCHITECTURES else 0
