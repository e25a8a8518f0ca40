"""One simulated node: devices, contexts, MPS, faults, accounting. Pure: time and processes are told, never looked up.

The shell (server.py) knows connections and clocks; here is what a driver would know. Whoever asks for more than there
is gets a DriverError with the code that CUDA or NVML gives.
"""

import uuid
from collections import deque
from enum import StrEnum
from typing import Final

import msgspec

from apportion.node_agent.simgpu.compute import DeviceClock
from apportion.node_agent.simgpu.mig import MigBoard, MigSize, boards, free_starts, remaining
from apportion.node_agent.simgpu.profiles import Profile

CONTEXT_MIB: Final = 256
"""What a process uses on a device before its first allocation; 250 to 500 MiB were observed on hardware."""
MPS_SERVER_MIB: Final = 30
_ACCOUNTED_MAX: Final = 4000
_EVENTS_MAX: Final = 10_000
_AMBIENT_C: Final = 32
_HEAT_C: Final = 44
_MPS_CLIENTS_MAX: Final = 48
_MPS_CLIENTS_MAX_13_1: Final = 60
_CUDA_13_1: Final = 13010
_CUDA_13_5: Final = 13050
_DRIVER_LIMITS: Final = 615
"""From this branch on, device memory can be limited by cgroup."""
_DRIVER_CONTAINS: Final = 610
"""From this branch on, a fault that an SM raised stays within its static partition."""
_SMS_A_CHUNK: Final = 8
"""What static partitions are made of; 8 was seen on GH200, 4 on L40S."""

XID_ILLEGAL_ACCESS: Final = 31
XID_LOST: Final = 79
_XIDS_THAT_END_ALL: Final = frozenset({48, 79, 95, 109, 119, 120})
"""Faults that no context on the device survives."""
_XIDS_THAT_WANT_A_RESET: Final = frozenset({46, 48, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143})
_ACTION_GPU_RESET: Final = 1
_ACTION_BUS_RESET: Final = 6
SLOWDOWN_C: Final = 90
"""Modelled: near what boards for servers have."""


class ComputeMode(StrEnum):
    """Who may have a context on a device."""

    DEFAULT = "default"
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive_process"


class DriverError(Exception):
    """A refusal in the driver's words: a CUDA or NVML error code without its prefix's long form."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message


class Context:
    """One process on one device."""

    def __init__(self, number: int, client: "Client", device: "Device", server: "MpsServer | None") -> None:
        self.number = number
        self.client = client
        self.device = device
        self.server = server
        self.pinned_mib: int | None = None
        self.allocations: dict[int, int] = {}
        self.used_mib = CONTEXT_MIB
        self.peak_mib = CONTEXT_MIB
        self.cap_sms: float = device.profile.sms


class Client:
    """One process that uses the driver, and what it sees."""

    def __init__(
        self, number: int, pid: int, start_ticks: int, devices: "list[Device]", mps: "MpsDaemon | None"
    ) -> None:
        self.number = number
        self.pid = pid
        self.start_ticks = start_ticks
        self.devices = devices
        self.mps = mps
        self.thread_percentage: float = 100
        self.pinned: dict[str, int] = {}
        self.drops_pinned_limits = False
        self.contexts: dict[str, Context] = {}
        self.fault: str | None = None
        """Sticky, as in CUDA: once set, every later call of this client fails with it."""
        self.partition: str | None = None
        """The static SM partition that it works in."""
        self.cgroup = "/"


class MpsServer:
    """A server of an MPS daemon: the clients' one context on each of its devices, hence their one fate."""

    def __init__(self, pid: int, daemon: "MpsDaemon") -> None:
        self.pid = pid
        self.daemon = daemon
        self.faulted = False
        self.is_wedged = False
        """A client was killed with work in flight: it looks healthy, and serves nobody any more."""
        self.thread_percentage = daemon.thread_percentage
        self.pinned_mib = dict(daemon.pinned_mib)
        self.clients: dict[int, Client] = {}


class MpsDaemon:
    """A control daemon, known by its pipe directory; what it sets binds clients that come later."""

    def __init__(self, pipe_directory: str, pid: int, devices: "list[Device]", *, is_partitioned: bool = False) -> None:
        self.pipe_directory = pipe_directory
        self.pid = pid
        self.devices = devices
        self.is_partitioned = is_partitioned
        """Started with -S: its clients work in static SM partitions."""
        self.partitions: dict[str, Partition] = {}
        """By name: the device's UUID, a slash, and a number."""
        self.thread_percentage: float = 100
        self.pinned_mib: dict[str, int] = {}
        self.server: MpsServer | None = None


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """SMs of one device that are kept for the clients that name them."""

    name: str
    device_uuid: str
    chunks: int

    @property
    def sms(self) -> int:
        """How many."""
        return self.chunks * _SMS_A_CHUNK


class Accounted(msgspec.Struct, kw_only=True):
    """What one process used on one device, kept after its end."""

    pid: int
    peak_mib: int
    started_at_us: int
    ended_at_us: int | None = None
    sm_us: float = 0.0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that NVML's event set reports."""

    sequence: int
    device: int
    kind: str
    data: int
    instance: int | None = None
    """The GPU instance that it is about; None for the whole board."""


class Device:
    """One board."""

    def __init__(self, index: int, node_name: str, profile: Profile) -> None:
        self.index = index
        self.profile = profile
        # By node and index alone, so that a node that is started again has the devices it had.
        self.uuid = f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'apportion-simgpu/{node_name}/{index}')}"
        self.clock = DeviceClock(profile.sms)
        self.compute_mode = ComputeMode.DEFAULT
        self.is_lost = False
        self.heat_c = 0
        self.recovery_action = 0
        self.ecc_corrected = 0
        self.ecc_uncorrected = 0
        self.remapped_rows = 0
        self.is_remap_pending = False
        self.has_remap_failed = False
        self.accounting = False
        self.accounted: deque[Accounted] = deque(maxlen=_ACCOUNTED_MAX)
        self.contexts: dict[int, Context] = {}
        self.mig_board: MigBoard | None = boards().get(profile.key) if profile.mig_capable else None
        self.is_mig_enabled = False
        self.is_mig_pending = False
        """What the mode becomes at the next reset."""
        self.memory_limits: dict[str, tuple[int, int]] = {}
        """Soft and hard limit in bytes, by cgroup."""
        self.instances: dict[int, MigDevice] = {}
        """By GPU instance id."""

    def all_contexts(self) -> "list[Context]":
        """Those of its instances, too."""
        inner = [context for instance in self.instances.values() for context in instance.contexts.values()]
        return [*self.contexts.values(), *inner]

    def used_mib(self) -> int:
        """Memory in use, without what the driver keeps for itself."""
        inner = sum(instance.used_mib() for instance in self.instances.values())
        servers = {context.server.pid for context in self.contexts.values() if context.server is not None}
        return sum(context.used_mib for context in self.contexts.values()) + MPS_SERVER_MIB * len(servers) + inner

    def free_mib(self) -> int:
        """Memory that an allocation could still get."""
        return self.profile.memory_mib - self.profile.reserved_mib - self.used_mib()


class MigDevice(Device):
    """A GPU instance with its one compute instance: a board of its own, cut from another."""

    def __init__(self, parent: Device, number: int, size: MigSize, start: int, name: str) -> None:
        share = msgspec.structs.replace(
            parent.profile, sms=size.sms, memory_mib=size.memory_mib, reserved_mib=0, mig_capable=False
        )
        super().__init__(parent.index, name, share)
        self.parent = parent
        self.number = number
        self.size = size
        self.start = start
        self.has_compute = False
        """Its compute instance was made: only then can a process use it."""
        # Another one each time that it is made, as on hardware.
        self.uuid = f"MIG-{uuid.uuid5(uuid.NAMESPACE_URL, f'apportion-simgpu/{name}')}"


class SimNode:
    """The driver of one simulated node."""

    def __init__(
        self, *, node_name: str, profile: Profile, devices: int, driver_version: str, cuda_version: int
    ) -> None:
        self.driver_version = driver_version
        self.driver_branch = int(driver_version.partition(".")[0])
        self.cuda_version = cuda_version
        self.devices = [Device(index, node_name, profile) for index in range(devices)]
        self.daemons: dict[str, MpsDaemon] = {}
        self.clients: dict[int, Client] = {}
        self.events: deque[Event] = deque(maxlen=_EVENTS_MAX)
        self._serial = 0
        self._event_serial = 0
        self._made = 0

    def boards(self) -> list[Device]:
        """Whatever has memory and a clock of its own: devices and their MIG instances."""
        return [board for device in self.devices for board in (device, *device.instances.values())]

    # MIG: what an operator and an agent do to a board

    def set_mig_mode(self, device: Device, *, enabled: bool) -> None:
        """Switch the mode: at once on newer boards, at the next reset on Ampere; refused while the board is used."""
        if device.mig_board is None:
            raise DriverError("NVML_ERROR_NOT_SUPPORTED")
        if device.all_contexts() or device.instances:
            raise DriverError("NVML_ERROR_IN_USE", "the board has contexts or instances")
        device.is_mig_pending = enabled
        if not device.mig_board.needs_reset:
            device.is_mig_enabled = enabled

    def create_instance(self, device: Device, number: int, start: int, size_slices: int) -> MigDevice:
        """A GPU instance of the size with this id at this place; it can't be used before it has its compute part."""
        board, size = self._mig_size(device, number)
        if size_slices != size.size:
            raise DriverError("NVML_ERROR_INVALID_ARGUMENT", f"{size.name} covers {size.size} slices")
        if start not in self.free_starts(device, number):
            raise DriverError("NVML_ERROR_INSUFFICIENT_RESOURCES", f"no room for {size.name} at {start} of {board.key}")
        gi = next(free for free in range(1, 16) if free not in device.instances)
        self._made += 1
        instance = MigDevice(device, gi, size, start, f"{device.uuid}/{self._made}")
        device.instances[gi] = instance
        return instance

    def destroy_instance(self, instance: MigDevice) -> None:
        """End a GPU instance; its compute part first."""
        if instance.has_compute:
            raise DriverError("NVML_ERROR_IN_USE", "it has a compute instance")
        instance.parent.instances.pop(instance.number, None)

    def create_compute(self, instance: MigDevice) -> None:
        """Give the instance its compute part, all of it."""
        if instance.has_compute:
            raise DriverError("NVML_ERROR_INSUFFICIENT_RESOURCES", "it has a compute instance")
        instance.has_compute = True

    def destroy_compute(self, instance: MigDevice) -> None:
        """Take the compute part away; refused while a process uses it."""
        if instance.contexts:
            raise DriverError("NVML_ERROR_IN_USE", f"{len(instance.contexts)} contexts")
        instance.has_compute = False

    def free_starts(self, device: Device, number: int) -> list[int]:
        """Where one more instance of the size with this id could begin."""
        board, size = self._mig_size(device, number)
        return free_starts(board, size, [(one.size, one.start) for one in device.instances.values()])

    def remaining(self, device: Device, number: int) -> int:
        """How many more instances of the size with this id there is room for."""
        board, size = self._mig_size(device, number)
        return remaining(board, size, [(one.size, one.start) for one in device.instances.values()])

    def _mig_size(self, device: Device, number: int) -> tuple[MigBoard, MigSize]:
        if device.mig_board is None or not device.is_mig_enabled:
            raise DriverError("NVML_ERROR_NOT_SUPPORTED", "MIG mode is off")
        size = device.mig_board.by_id(number)
        if size is None:
            raise DriverError("NVML_ERROR_INVALID_ARGUMENT", f"no size {number}")
        return device.mig_board, size

    # Clients: what libcuda does

    def connect(
        self,
        *,
        pid: int,
        start_ticks: int,
        visible: str | None,
        pipe_directory: str,
        thread_percentage: str | None = None,
        pinned_limit: str | None = None,
        partition: str | None = None,
        cgroup: str = "/",
    ) -> Client:
        """A process that initialises the driver. Without a daemon at its pipe directory it gets whole devices.

        That is how MPS fails open on hardware too; it is the agent's part to notice.
        """
        daemon = self.daemons.get(pipe_directory)
        if daemon is not None and daemon.server is None:
            raise DriverError("CUDA_ERROR_MPS_SERVER_NOT_READY", "the server has not been started")
        devices = _visible(daemon.devices if daemon is not None else self.devices, visible)
        client = Client(self._next(), pid, start_ticks, devices, daemon)
        client.cgroup = cgroup
        if daemon is not None:
            assert daemon.server is not None
            if daemon.server.faulted:
                raise DriverError(
                    "CUDA_ERROR_MPS_SERVER_NOT_READY", "the server is in FAULT until its clients are gone"
                )
            most = _MPS_CLIENTS_MAX if self.cuda_version < _CUDA_13_1 else _MPS_CLIENTS_MAX_13_1
            if len(daemon.server.clients) >= most:
                raise DriverError("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", f"{most} clients")
            if daemon.is_partitioned:
                if partition not in daemon.partitions:
                    raise DriverError("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", f"no SM partition {partition}")
                client.partition = partition
            client.thread_percentage = min(daemon.server.thread_percentage, _percentage(thread_percentage))
            client.pinned, client.drops_pinned_limits = _pinned(pinned_limit, devices)
            # Bound now: what is set on the server later is for clients that come later.
            for device in devices:
                served = None if client.drops_pinned_limits else daemon.server.pinned_mib.get(device.uuid)
                own = client.pinned.get(device.uuid)
                limits = [limit for limit in (served, own) if limit is not None]
                if limits:
                    client.pinned[device.uuid] = min(limits)
            daemon.server.clients[client.number] = client
        self.clients[client.number] = client
        return client

    def disconnect(self, client: Client, now_us: int, *, is_clean: bool = True) -> list[Client]:
        """The process has ended, and everything that it had is free: the clients that fail by it.

        Not clean is a process that was killed. What it had in flight on an MPS server is orphaned, then: it runs on
        in memory that is nobody's, the neighbours fail, and the server is of no use any more, though it says ACTIVE.
        """
        if self.clients.pop(client.number, None) is None:
            return []
        failed: list[Client] = []
        server = client.mps.server if client.mps is not None else None
        is_busy = client.fault is None and any(one.device.clock.pending(one.number) for one in client.contexts.values())
        if server is not None and not is_clean and is_busy and self.cuda_version <= _CUDA_13_5:
            server.is_wedged = True
            failed = [other for other in server.clients.values() if other is not client and other.fault is None]
            for other in failed:
                self._fail(other, "CUDA_ERROR_ILLEGAL_ADDRESS", now_us)
        for context in list(client.contexts.values()):
            self._close(context, now_us)
        if client.mps is not None and client.mps.server is not None:
            server = client.mps.server
            server.clients.pop(client.number, None)
            if not server.clients:
                server.faulted = False
        return failed

    def sms_of(self, client: Client, device: Device) -> int:
        """The SM count that the process is told: its share, rounded down to what the hardware can split."""
        sms = device.profile.sms
        if client.mps is not None and client.partition is not None:
            part = client.mps.partitions.get(client.partition)
            if part is not None and part.device_uuid == device.uuid:
                sms = part.sms
        if client.mps is None or client.thread_percentage >= 100:
            return sms
        return max(2, int(sms * client.thread_percentage / 100) // 2 * 2)

    def context(self, client: Client, ordinal: int, now_us: int) -> Context:
        """The process's context on its ``ordinal``-th device, made at first use."""
        if client.fault is not None:
            raise DriverError(client.fault)
        if not 0 <= ordinal < len(client.devices):
            raise DriverError("CUDA_ERROR_INVALID_DEVICE", f"{ordinal} of {len(client.devices)}")
        device = client.devices[ordinal]
        if _is_lost(device):
            raise DriverError("CUDA_ERROR_UNKNOWN", "the device has fallen off the bus")
        context = client.contexts.get(device.uuid)
        return context if context is not None else self._open(client, device, now_us)

    def allocate(self, context: Context, mib: int) -> int:
        """Reserve memory; the allocation's handle. Refused beyond the pinned limit or the device's end."""
        if mib < 0:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", f"{mib} MiB")
        limit = context.pinned_mib
        if limit is not None and context.used_mib + mib > limit:
            raise DriverError(
                "CUDA_ERROR_OUT_OF_MEMORY",
                f"{mib} MiB asked, {limit - context.used_mib} of {limit} MiB left in the limit",
            )
        if mib > context.device.free_mib():
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", f"{mib} MiB asked, {context.device.free_mib()} MiB free")
        self._check_cgroups(context.client, context.device, mib)
        handle = self._next()
        context.allocations[handle] = mib
        context.used_mib += mib
        context.peak_mib = max(context.peak_mib, context.used_mib)
        return handle

    def set_memory_limit(self, device: Device, cgroup: str, soft: int, hard: int) -> None:
        """Limit what a cgroup's processes have of the device together, in bytes; from driver 615 on."""
        self._need_limits(device)
        if soft > hard:
            raise DriverError("NVML_ERROR_INVALID_ARGUMENT", "the soft limit is beyond the hard one")
        if hard >= _NO_LIMIT:
            device.memory_limits.pop(cgroup, None)
        else:
            device.memory_limits[cgroup] = (soft, hard)

    def memory_limit(self, device: Device, cgroup: str) -> tuple[int, int, int]:
        """Soft limit, hard limit, and what is in use, in bytes."""
        self._need_limits(device)
        soft, hard = device.memory_limits.get(cgroup, (0, _NO_LIMIT))
        return soft, hard, _used_by(device, cgroup) * 1024 * 1024

    def _need_limits(self, device: Device) -> None:
        if self.driver_branch < _DRIVER_LIMITS:
            raise DriverError("NVML_ERROR_FUNCTION_NOT_FOUND")
        if isinstance(device, MigDevice) or device.is_mig_enabled:
            raise DriverError("NVML_ERROR_NOT_SUPPORTED", "not on a board in MIG mode")

    def _check_cgroups(self, client: Client, device: Device, mib: int) -> None:
        """Refuse what is over the hard limit of the client's group, or of one above it."""
        for cgroup, (_, hard) in device.memory_limits.items():
            if _is_within(client.cgroup, cgroup) and (_used_by(device, cgroup) + mib) * 1024 * 1024 > hard:
                raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", f"{mib} MiB asked, beyond the limit of {cgroup}")

    def free(self, client: Client, handle: int) -> None:
        """Give an allocation back."""
        for context in client.contexts.values():
            if handle in context.allocations:
                context.used_mib -= context.allocations.pop(handle)
                return
        raise DriverError("CUDA_ERROR_INVALID_VALUE", f"no allocation {handle}")

    def illegal_access(self, context: Context, now_us: int) -> list[Client]:
        """A kernel touches memory that isn't its own; everybody in its fault domain fails: the failed clients."""
        self._report(context.device, "xid", XID_ILLEGAL_ACCESS)
        partition = context.client.partition
        is_contained = partition is not None and self.driver_branch >= _DRIVER_CONTAINS
        if context.server is None:
            failed = [context.client]
        else:
            context.server.faulted = not is_contained
            failed = [
                client
                for client in context.server.clients.values()
                if context.device.uuid in client.contexts and (not is_contained or client.partition == partition)
            ]
        for client in failed:
            self._fail(client, "CUDA_ERROR_ILLEGAL_ADDRESS", now_us)
        return failed

    def _open(self, client: Client, device: Device, now_us: int) -> Context:
        server = client.mps.server if client.mps is not None else None
        if client.mps is not None and server is None:
            raise DriverError("CUDA_ERROR_MPS_CONNECTION_FAILED")
        owner = _owner(client)
        others = [other for other in device.contexts.values() if _owner(other.client) != owner]
        if device.compute_mode is ComputeMode.PROHIBITED or (
            device.compute_mode is ComputeMode.EXCLUSIVE_PROCESS and others
        ):
            raise DriverError("CUDA_ERROR_DEVICE_UNAVAILABLE", f"compute mode {device.compute_mode}")
        context = Context(self._next(), client, device, server)
        context.pinned_mib = client.pinned.get(device.uuid) if server is not None else None
        context.cap_sms = self.sms_of(client, device)
        is_first = server is not None and all(other.server is not server for other in device.contexts.values())
        need = CONTEXT_MIB + (MPS_SERVER_MIB if is_first else 0)
        if need > device.free_mib() or (context.pinned_mib is not None and context.pinned_mib < CONTEXT_MIB):
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", f"a context needs {need} MiB, {device.free_mib()} MiB free")
        self._check_cgroups(client, device, CONTEXT_MIB)
        device.contexts[context.number] = context
        client.contexts[device.uuid] = context
        device.clock.open(context.number, owner, context.cap_sms, now_us, partition=client.partition)
        if device.accounting:
            device.accounted.append(Accounted(pid=client.pid, peak_mib=context.peak_mib, started_at_us=now_us))
        return context

    def _close(self, context: Context, now_us: int) -> None:
        device = context.device
        device.clock.advance(now_us)
        for entry in reversed(device.accounted):
            if entry.pid == context.client.pid and entry.ended_at_us is None:
                entry.ended_at_us = now_us
                entry.peak_mib = max(entry.peak_mib, context.peak_mib)
                entry.sm_us = device.clock.sm_us(context.number)
                break
        device.clock.close(context.number, now_us)
        del device.contexts[context.number]
        del context.client.contexts[device.uuid]

    def _fail(self, client: Client, code: str, now_us: int) -> None:
        """End the client's work; its memory stays taken until the process has ended, as on hardware."""
        client.fault = code
        for context in client.contexts.values():
            context.device.clock.cancel(context.number, now_us)

    # MPS: what its daemon and servers do

    def add_daemon(
        self, pipe_directory: str, pid: int, visible: str | None, *, is_partitioned: bool = False
    ) -> MpsDaemon:
        """A control daemon has come up."""
        if pipe_directory in self.daemons:
            raise DriverError("ALREADY_RUNNING", f"a daemon serves {pipe_directory}")
        if is_partitioned and self.cuda_version < _CUDA_13_1:
            raise DriverError("INVALID_VALUE", "static partitioning needs CUDA 13.1")
        daemon = MpsDaemon(pipe_directory, pid, _visible(self.devices, visible), is_partitioned=is_partitioned)
        self.daemons[pipe_directory] = daemon
        return daemon

    def remove_daemon(self, daemon: MpsDaemon, now_us: int) -> list[Client]:
        """A control daemon has ended, and its server with it: the clients that fail."""
        if self.daemons.get(daemon.pipe_directory) is not daemon:
            return []
        del self.daemons[daemon.pipe_directory]
        return self.remove_server(daemon.server, now_us) if daemon.server is not None else []

    def add_server(self, daemon: MpsDaemon, pid: int) -> MpsServer:
        """A server has come up; it starts with the daemon's defaults."""
        daemon.server = MpsServer(pid, daemon)
        self._keep_sms(daemon, 0)
        return daemon.server

    def add_partition(self, daemon: MpsDaemon, device: Device, chunks: int, now_us: int) -> Partition:
        """Keep so many chunks of SMs; refused without -S, beyond the device's end, or while it has clients."""
        if not daemon.is_partitioned:
            raise DriverError("NOT_SUPPORTED", "static partitioning is not enabled")
        if daemon.server is not None and daemon.server.clients:
            raise DriverError("IN_USE", "the device has clients")
        taken = sum(one.chunks for one in daemon.partitions.values() if one.device_uuid == device.uuid)
        if chunks < 1 or (taken + chunks) * _SMS_A_CHUNK > device.profile.sms:
            raise DriverError("INVALID_VALUE", f"{device.profile.sms // _SMS_A_CHUNK - taken} chunks are free")
        number = next(free for free in range(1, 1000) if f"{device.uuid}/{free}" not in daemon.partitions)
        part = Partition(name=f"{device.uuid}/{number}", device_uuid=device.uuid, chunks=chunks)
        daemon.partitions[part.name] = part
        self._keep_sms(daemon, now_us)
        return part

    def remove_partition(self, daemon: MpsDaemon, name: str, now_us: int) -> None:
        """Give the SMs back; refused while a client works in it."""
        if name not in daemon.partitions:
            raise DriverError("NOT_FOUND", f"no partition {name}")
        if self.clients_of(daemon, name):
            raise DriverError("IN_USE", f"partition {name} has clients")
        del daemon.partitions[name]
        self._keep_sms(daemon, now_us)

    def clients_of(self, daemon: MpsDaemon, partition: str) -> list[Client]:
        """Who works in a partition."""
        server = daemon.server
        return [] if server is None else [one for one in server.clients.values() if one.partition == partition]

    def _keep_sms(self, daemon: MpsDaemon, now_us: int) -> None:
        if daemon.server is None:
            return
        for device in daemon.devices:
            parts = {one.name: one.sms for one in daemon.partitions.values() if one.device_uuid == device.uuid}
            device.clock.keep(("mps", daemon.server.pid), parts, now_us)

    def remove_server(self, server: MpsServer, now_us: int) -> list[Client]:
        """A server has ended: the clients that fail."""
        if server.daemon.server is server:
            server.daemon.server = None
        failed = list(server.clients.values())
        for client in failed:
            self._fail(client, "CUDA_ERROR_MPS_CONNECTION_FAILED", now_us)
        server.clients.clear()
        return failed

    def terminate_client(self, server: MpsServer, pid: int, now_us: int) -> list[Client]:
        """End one process's work on the server without harm to the others: the clients that fail."""
        failed = [client for client in server.clients.values() if client.pid == pid]
        for client in failed:
            self._fail(client, "CUDA_ERROR_MPS_CLIENT_TERMINATED", now_us)
            for context in list(client.contexts.values()):
                self._close(context, now_us)
            del server.clients[client.number]
        if not server.clients:
            server.faulted = False
        return failed

    # Faults

    def inject_xid(self, device: Device, xid: int, now_us: int) -> list[Client]:
        """The board reports a fault: the clients that fail by it."""
        self._report(device, "xid", xid)
        if xid == XID_LOST:
            device.is_lost = True
            device.recovery_action = _ACTION_BUS_RESET
        if xid in _XIDS_THAT_WANT_A_RESET:
            device.recovery_action = _ACTION_GPU_RESET
            self._report(device, "recovery_action", device.recovery_action)
        if xid not in _XIDS_THAT_END_ALL:
            return []
        failed = [context.client for context in device.all_contexts()]
        for client in failed:
            self._fail(client, "CUDA_ERROR_UNKNOWN", now_us)
        return failed

    def inject_ecc(self, device: Device, *, corrected: int, uncorrected: int) -> None:
        """Memory errors are counted; an uncorrectable one has a row replaced at the next reset."""
        device.ecc_corrected += corrected
        device.ecc_uncorrected += uncorrected
        if uncorrected:
            device.is_remap_pending = True
            self._report(device, "double_bit", uncorrected)

    def reset(self, device: Device) -> None:
        """Bring a board back to health, without its instances; refused while anybody has a context on it."""
        if contexts := device.all_contexts():
            raise DriverError("NVML_ERROR_IN_USE", f"{len(contexts)} contexts")
        device.is_lost = False
        device.heat_c = 0
        device.recovery_action = 0
        device.ecc_corrected = device.ecc_uncorrected = 0
        if device.is_remap_pending:
            device.is_remap_pending, device.remapped_rows = False, device.remapped_rows + 1
        device.instances.clear()
        device.is_mig_enabled = device.is_mig_pending

    def _report(self, device: Device, kind: str, data: int) -> None:
        self._event_serial += 1
        instance = device.number if isinstance(device, MigDevice) else None
        self.events.append(
            Event(sequence=self._event_serial, device=device.index, kind=kind, data=data, instance=instance)
        )

    @property
    def event_sequence(self) -> int:
        """The sequence of the last event."""
        return self._event_serial

    # Readings

    def advance(self, now_us: int) -> None:
        """Let the kernels of every device run up to now."""
        for board in self.boards():
            board.clock.advance(now_us)

    def power_mw(self, device: Device, now_us: int) -> int:
        """Draw, following SM use."""
        use = device.clock.used.growth_fraction(now_us, device.profile.sms)
        return round(1000 * (device.profile.idle_w + (device.profile.limit_w - device.profile.idle_w) * use))

    def energy_mj(self, device: Device, now_us: int) -> int:
        """Energy since time 0."""
        busy_us = device.clock.used.total / device.profile.sms
        watts = device.profile.limit_w - device.profile.idle_w
        return round((device.profile.idle_w * now_us + watts * busy_us) / 1000)

    def temperature_c(self, device: Device, now_us: int) -> int:
        """Temperature, following SM use and what was injected."""
        use = device.clock.used.growth_fraction(now_us, device.profile.sms)
        return round(_AMBIENT_C + _HEAT_C * use) + device.heat_c

    def peak_mib(self, device: Device, entry: Accounted) -> int:
        """The most memory that the accounted process has held."""
        live = (context.peak_mib for context in device.contexts.values() if context.client.pid == entry.pid)
        return max(entry.peak_mib, *live) if entry.ended_at_us is None else entry.peak_mib

    def _next(self) -> int:
        self._serial += 1
        return self._serial


def _owner(client: Client) -> tuple[str, int]:
    """Whose turn on the device it is: each process has its own, the clients of one server share theirs."""
    if client.mps is not None and client.mps.server is not None:
        return ("mps", client.mps.server.pid)
    return ("process", client.pid)


_NO_LIMIT: Final = 2**64 - 1


def _is_within(cgroup: str, other: str) -> bool:
    return cgroup == other or cgroup.startswith(f"{other.rstrip('/')}/")


def _used_by(device: Device, cgroup: str) -> int:
    """MiB of the device that the group's processes have."""
    return sum(one.used_mib for one in device.contexts.values() if _is_within(one.client.cgroup, cgroup))


def _is_lost(device: Device) -> bool:
    return device.parent.is_lost if isinstance(device, MigDevice) else device.is_lost


def _visible(devices: list[Device], text: str | None) -> list[Device]:
    """What CUDA_VISIBLE_DEVICES leaves: entries up to the first that names nothing, as libcuda reads it.

    A board in MIG mode stands for its first instance, and a process gets one instance at most.
    """
    found: list[Device] = []
    if text is None:
        found = list(devices)
    else:
        for part in text.split(","):
            device = _device_by_name(devices, part.strip())
            if device is None or device in found:
                break
            found.append(device)
    usable = [board for device in found if (board := _usable(device)) is not None]
    instance = next((board for board in usable if isinstance(board, MigDevice)), None)
    return usable if instance is None else [instance]


def _usable(device: Device) -> Device | None:
    if not device.is_mig_enabled:
        return device
    return next((one for _, one in sorted(device.instances.items()) if one.has_compute), None)


def _device_by_name(devices: list[Device], name: str) -> Device | None:
    if name.isdecimal():
        return devices[int(name)] if int(name) < len(devices) else None
    matches = [device for device in devices if name.startswith("GPU-") and device.uuid.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    instances = [one for device in devices for one in (device, *device.instances.values()) if one.uuid == name]
    return next((one for one in instances if not isinstance(one, MigDevice) or one.has_compute), None)


def _percentage(text: str | None) -> float:
    try:
        value = float(text) if text else 100.0
    except ValueError:
        return 100.0
    return value if 0 < value <= 100 else 100.0


def _pinned(text: str | None, devices: list[Device]) -> tuple[dict[str, int], bool]:
    """The client's own limits in MiB by UUID, and whether it drops all limits, the server's too.

    Naming one device that the process can't see makes MPS drop every pinned limit: it fails open.
    """
    limits: dict[str, int] = {}
    for part in (text or "").split(","):
        name, _, amount = part.strip().partition("=")
        if not name:
            continue
        device = _device_by_name(devices, name)
        mib = mib_of(amount)
        if device is None or mib is None:
            return {}, True
        limits[device.uuid] = mib
    return limits, False


def mib_of(text: str) -> int | None:
    """MiB in an MPS memory size such as ``10G`` or ``512M``; None if it is none.

    >>> mib_of("10G"), mib_of("512M"), mib_of("7")
    (10240, 512, None)
    """
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    if not number.isdecimal() or unit not in ("G", "M"):
        return None
    return int(number) * (1024 if unit == "G" else 1)
