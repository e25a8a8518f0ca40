"""The simulated node as a process: sockets, clocks and process identities around model.py.

One unix socket serves everybody, a line a message: workloads and the MPS tools in fields separated by 0x1f (their
client must start fast), the agent's NVML module and fault injection in JSON. A peer is known by what the kernel says
about the other end of the socket, so a process can't claim to be another, and everything it had is freed when it ends.
"""

# ruff: noqa: ASYNC240  a few looks at local files when the node starts and ends

import argparse
import asyncio
import contextlib
import math
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from apportion.node_agent import cgroups
from apportion.node_agent.simgpu import tools
from apportion.node_agent.simgpu.model import (
    CONTEXT_MIB,
    MPS_SERVER_MIB,
    SLOWDOWN_C,
    Client,
    ComputeMode,
    Context,
    Device,
    DriverError,
    MigDevice,
    MpsDaemon,
    MpsServer,
    SimNode,
)
from apportion.node_agent.simgpu.mps import ControlAnswer, control
from apportion.node_agent.simgpu.profiles import DRIVERS, profiles

_LINE_BYTES_MAX: Final = 65536
_SEPARATOR: Final = "\x1f"
_EVENT_WAIT_MS_MAX: Final = 600_000
_BOUNDS: Final = frozenset({"sm", "l2", "dram"})


class _Request(msgspec.Struct, frozen=True, tag_field="op", forbid_unknown_fields=True):
    pass


class SystemInfo(_Request, frozen=True, tag="system"):
    """Versions and the UUIDs of all devices, lost ones too."""


class DeviceState(_Request, frozen=True, tag="device"):
    """Everything that NVML's getters say about a device, or about one of its GPU instances."""

    index: int
    instance: int | None = None


class DeviceProcesses(_Request, frozen=True, tag="processes"):
    """The processes with a context on a device (its instances included) or on one instance: all, or those of MPS."""

    index: int
    mps: bool
    instance: int | None = None


class ProcessUtilization(_Request, frozen=True, tag="process_utilization"):
    """SM use by process over the last second."""

    index: int
    instance: int | None = None


class MigState(_Request, frozen=True, tag="mig"):
    """A board's MIG mode, the sizes that it can be cut into, where each would fit now, and its instances."""

    index: int


class SetMig(_Request, frozen=True, tag="set_mig"):
    """As nvmlDeviceSetMigMode: an operator's doing."""

    index: int
    enabled: bool


class CreateInstance(_Request, frozen=True, tag="create_instance"):
    """As nvmlDeviceCreateGpuInstanceWithPlacement."""

    index: int
    profile_id: int
    start: int
    size: int


class ChangeInstance(_Request, frozen=True, tag="change_instance"):
    """The other calls about one GPU instance: ``destroy``, ``create_compute``, ``destroy_compute``."""

    index: int
    instance: int
    what: str


class SetComputeMode(_Request, frozen=True, tag="set_compute_mode"):
    """As nvmlDeviceSetComputeMode."""

    index: int
    mode: ComputeMode


class SetAccounting(_Request, frozen=True, tag="set_accounting"):
    """As nvmlDeviceSetAccountingMode."""

    index: int
    enabled: bool


class AccountingPids(_Request, frozen=True, tag="accounting_pids"):
    """The processes with an account, oldest first."""

    index: int


class AccountingStats(_Request, frozen=True, tag="accounting_stats"):
    """What a process has used, the latest under its pid; also after its end."""

    index: int
    pid: int


class WaitEvent(_Request, frozen=True, tag="event"):
    """The first event after a sequence on one of these devices; null once the time is up."""

    after: int
    indexes: tuple[int, ...]
    timeout_ms: int
    kinds: tuple[str, ...] = ("xid",)


class InjectXid(_Request, frozen=True, tag="inject_xid"):
    """A fault of a board; 79 also takes it off the bus."""

    index: int
    xid: int


class InjectHeat(_Request, frozen=True, tag="inject_heat"):
    """Degrees above what the load explains."""

    index: int
    celsius: int


class InjectEcc(_Request, frozen=True, tag="inject_ecc"):
    """Memory errors; an uncorrectable one leaves a row to be replaced at the next reset."""

    index: int
    corrected: int
    uncorrected: int


class InjectRemapFailure(_Request, frozen=True, tag="inject_remap_failure"):
    """There is no spare row left, which no reset mends."""

    index: int


class SetMemoryLimit(_Request, frozen=True, tag="set_memory_limit"):
    """As nvmlDeviceSetMemoryLimits_v1; the namespace is a directory of the host's unified cgroup hierarchy."""

    index: int
    namespace: str
    soft: int
    hard: int


class GetMemoryLimit(_Request, frozen=True, tag="memory_limit"):
    """As nvmlDeviceGetMemoryLimits_v1."""

    index: int
    namespace: str


class ResetDevice(_Request, frozen=True, tag="reset"):
    """Bring a board back to health."""

    index: int


Request = (
    SystemInfo | DeviceState | DeviceProcesses | ProcessUtilization | SetComputeMode | SetAccounting | AccountingPids
    | AccountingStats | WaitEvent | InjectXid | InjectHeat | ResetDevice | MigState | SetMig | CreateInstance
    | ChangeInstance | InjectEcc | InjectRemapFailure
    | SetMemoryLimit | GetMemoryLimit
)  # fmt: skip


class _Sync:
    """What a client's kernels have done since it last asked."""

    def __init__(self) -> None:
        self.first_us: int | None = None
        self.last_us = 0.0
        self.waits = False


class _Connection(asyncio.Protocol):
    """One peer."""

    def __init__(self, server: "SimServer") -> None:
        self._server = server
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.pid = 0
        self.client: Client | None = None
        self.daemon: MpsDaemon | None = None
        self.mps_server: MpsServer | None = None
        self.syncs: dict[int, _Sync] = {}
        self._pidfd = -1
        self.is_clean = False
        """The process has let go of the driver by itself."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer: socket.socket = transport.get_extra_info("socket")
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid = struct.unpack("3i", credentials)[0]
        self._server.connections.add(self)

    def watch_process(self) -> None:
        """Drop the peer with its process: a child that inherited the socket would keep it open."""
        if self._pidfd >= 0:
            return
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self.close()
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self.close)

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._server.handle(self, line)
        if len(self._buffer) > _LINE_BYTES_MAX:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._server.connections.discard(self)
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._server.forget(self)

    def send(self, line: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(line + b"\n")

    def answer(self, *fields: object) -> None:
        self.send(_SEPARATOR.join(("ok", *map(str, fields))).encode())

    def refuse(self, error: DriverError) -> None:
        self.send(_SEPARATOR.join(("error", error.code, error.message.replace("\n", " "))).encode())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class SimServer:
    """Everybody's requests, in order of arrival, against one node."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.connections: set[_Connection] = set()
        self._by_context: dict[int, tuple[_Connection, Device]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waiting_for_server: dict[str, list[Callable[[], None]]] = {}
        self._daemons: dict[str, _Connection] = {}
        self._event_waits: list[tuple[_Connection, WaitEvent, asyncio.TimerHandle]] = []
        self._started_s = asyncio.get_running_loop().time()

    def protocol(self) -> _Connection:
        """A connection for asyncio."""
        return _Connection(self)

    def handle(self, connection: _Connection, line: bytes) -> None:
        """Carry out one message; whatever is wrong with it is answered, not raised."""
        if line.startswith(b"{"):
            self._handle_json(connection, line)
            return
        try:
            operation, *fields = line.decode().split(_SEPARATOR)
            self._handle_fields(connection, operation, fields)
        except DriverError as error:
            connection.refuse(error)
        except (ValueError, UnicodeDecodeError) as error:
            connection.refuse(DriverError("CUDA_ERROR_INVALID_VALUE", f"message not understood: {error}"))

    # Workloads and MPS tools

    def _handle_fields(self, connection: _Connection, operation: str, fields: list[str]) -> None:
        match operation, fields:
            case "hello", [visible, pipe_directory, percentage, pinned, partition]:
                self._hello(connection, pipe_directory, (visible, percentage, pinned, partition))
            case "bye", []:
                connection.is_clean = True
                self.forget(connection)
            case "alloc", [ordinal, mib]:
                connection.answer(self.node.allocate(self._context(connection, ordinal), int(mib)))
            case "free", [handle]:
                self.node.free(self._client(connection), int(handle))
                connection.answer()
            case "memory", [ordinal]:
                context = self._context(connection, ordinal)
                # The total is the whole board's also under a pinned limit, as cudaMemGetInfo says it.
                connection.answer(context.device.free_mib(), context.device.profile.memory_mib)
            case "launch", [ordinal, sms, us, bound]:
                self._launch(connection, ordinal, int(sms), int(us), bound)
            case "sync", [ordinal]:
                self._sync(connection, ordinal)
            case "illegal", [ordinal]:
                context = self._context(connection, ordinal)
                self._log_fault(context)
                self._fail(self.node.illegal_access(context, self._now_us()))
                self._tell_events()
                raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")
            case "mps_daemon", [pipe_directory, visible, partitioned]:
                connection.daemon = self.node.add_daemon(
                    pipe_directory, connection.pid, _optional(visible), is_partitioned=partitioned == "S"
                )
                self._daemons[pipe_directory] = connection
                connection.watch_process()
                connection.answer()
            case "mps_server", [pipe_directory]:
                daemon = self._daemon(pipe_directory)
                connection.mps_server = self.node.add_server(daemon, connection.pid)
                connection.watch_process()
                connection.answer()
                for proceed in self._waiting_for_server.pop(pipe_directory, []):
                    proceed()
            case "mps_control", [pipe_directory, command]:
                self._control(connection, pipe_directory, command)
            case _:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", f"{operation} with {len(fields)} fields")

    def _hello(self, connection: _Connection, pipe_directory: str, variables: tuple[str, str, str, str]) -> None:
        daemon = self.node.daemons.get(pipe_directory)
        if daemon is not None and daemon.server is None:
            # The daemon starts its server for the first client, and the client waits.
            self._start_server(pipe_directory, lambda: self._hello(connection, pipe_directory, variables))
            return
        if daemon is not None and daemon.server is not None and daemon.server.is_wedged:
            return  # The driver's initialisation hangs, and nothing says why.
        visible, percentage, pinned, partition = variables
        try:
            client = self.node.connect(
                pid=connection.pid,
                start_ticks=_start_ticks(connection.pid),
                visible=_optional(visible),
                pipe_directory=pipe_directory,
                thread_percentage=_optional(percentage),
                pinned_limit=_optional(pinned),
                partition=_optional(partition),
                cgroup=cgroups.group_of(connection.pid),
            )
        except DriverError as error:
            connection.refuse(error)
            return
        if connection not in self.connections:
            self.node.disconnect(client, self._now_us())
            return
        connection.client = client
        connection.watch_process()
        devices = [
            f"{device.uuid},{device.profile.memory_mib},{self.node.sms_of(client, device)}" for device in client.devices
        ]
        connection.answer("mps" if client.mps is not None else "direct", CONTEXT_MIB, *devices)

    def _client(self, connection: _Connection) -> Client:
        if connection.client is None:
            raise DriverError("CUDA_ERROR_NOT_INITIALIZED")
        return connection.client

    def _context(self, connection: _Connection, ordinal: str) -> Context:
        context = self.node.context(self._client(connection), int(ordinal), self._now_us())
        if context.number not in self._by_context:
            self._by_context[context.number] = (connection, context.device)
            connection.syncs[context.number] = _Sync()
        return context

    def _launch(self, connection: _Connection, ordinal: str, sms: int, us: int, bound: str) -> None:
        """Queue a kernel; there is no answer, and what is wrong is told at the next sync, as CUDA does."""
        try:
            context = self._context(connection, ordinal)
        except DriverError:
            return
        now_us = self._now_us()
        sync = connection.syncs[context.number]
        if sync.first_us is None:
            sync.first_us = now_us
        context.device.clock.submit(context.number, sms, us, now_us, bound=bound if bound in _BOUNDS else "sm")
        self._settle(context.device)

    def _sync(self, connection: _Connection, ordinal: str) -> None:
        context = self._context(connection, ordinal)
        context.device.clock.advance(self._now_us())
        connection.syncs[context.number].waits = True
        self._settle(context.device)
        self._answer_sync(connection, context)

    def _answer_sync(self, connection: _Connection, context: Context) -> None:
        sync = connection.syncs[context.number]
        if sync.waits and context.device.clock.pending(context.number) == 0:
            took = 0 if sync.first_us is None else max(0, round(sync.last_us - sync.first_us))
            sync.waits, sync.first_us = False, None
            connection.answer(took)

    def _settle(self, device: Device) -> None:
        """Tell who waits for kernels that have ended, and come back when the next one ends."""
        for number, end_us in device.clock.take_done():
            if number in self._by_context and number in device.contexts:
                connection, _ = self._by_context[number]
                connection.syncs[number].last_us = end_us
                self._answer_sync(connection, device.contexts[number])
        timer = self._timers.pop(device.uuid, None)
        if timer is not None:
            timer.cancel()
        due_us = device.clock.next_completion_us()
        if due_us is not None:
            loop = asyncio.get_running_loop()
            at_s = self._started_s + math.ceil(due_us + 1) / 1e6
            self._timers[device.uuid] = loop.call_at(at_s, self._on_timer, device)

    def _on_timer(self, device: Device) -> None:
        device.clock.advance(self._now_us())
        self._settle(device)

    def _fail(self, clients: list[Client]) -> None:
        """Wake up the failed clients that wait, and reckon their devices anew."""
        failed = {client.number for client in clients}
        for connection in self.connections:
            if connection.client is not None and connection.client.number in failed:
                for sync in connection.syncs.values():
                    if sync.waits:
                        sync.waits = False
                        connection.refuse(DriverError(connection.client.fault or "CUDA_ERROR_UNKNOWN"))
        for device in self.node.boards():
            self._settle(device)

    def _log_fault(self, context: Context) -> None:
        """Have the MPS server write down who it was, as its log does on hardware; the wording is ours."""
        for connection in self.connections:
            if connection.mps_server is not None and connection.mps_server is context.server:
                connection.send(
                    f"log Fatal fault on device {context.device.uuid} by client {context.client.pid}".encode()
                )

    def forget(self, connection: _Connection) -> None:
        """The peer is gone."""
        now_us = self._now_us()
        if connection.client is not None:
            for number in connection.syncs:
                self._by_context.pop(number, None)
            failed = self.node.disconnect(connection.client, now_us, is_clean=connection.is_clean)
            connection.client = None
            self._fail(failed)
            for device in self.node.boards():
                self._settle(device)
        if connection.mps_server is not None:
            self._fail(self.node.remove_server(connection.mps_server, now_us))
        if connection.daemon is not None:
            self._remove_daemon(connection.daemon, now_us)
        for wait in [wait for wait in self._event_waits if wait[0] is connection]:
            wait[2].cancel()
            self._event_waits.remove(wait)

    # MPS

    def _daemon(self, pipe_directory: str) -> MpsDaemon:
        daemon = self.node.daemons.get(pipe_directory)
        if daemon is None:
            raise DriverError("DAEMON_NOT_FOUND", "Cannot find MPS control daemon process")
        return daemon

    def _start_server(self, pipe_directory: str, proceed: Callable[[], None]) -> None:
        waiting = self._waiting_for_server.setdefault(pipe_directory, [])
        waiting.append(proceed)
        if len(waiting) == 1:
            self._daemons[pipe_directory].send(b"start_server")

    def _remove_daemon(self, daemon: MpsDaemon, now_us: int) -> None:
        server = daemon.server
        self._fail(self.node.remove_daemon(daemon, now_us))
        self._end_server(server)
        self._daemons.pop(daemon.pipe_directory, None)
        for proceed in self._waiting_for_server.pop(daemon.pipe_directory, []):
            proceed()

    def _end_server(self, server: MpsServer | None) -> None:
        for connection in list(self.connections):
            if server is not None and connection.mps_server is server:
                connection.close()  # Its process ends with the connection.

    def _control(self, connection: _Connection, pipe_directory: str, command: str) -> None:
        daemon = self._daemon(pipe_directory)
        server = daemon.server
        answer: ControlAnswer = control(self.node, daemon, command, self._now_us())
        self._fail(answer.failed)
        if answer.never_answers:
            return
        if answer.starts_server:
            self._start_server(pipe_directory, connection.answer)
            return
        if answer.ends_server or answer.ends_daemon:
            self._end_server(server)
        if answer.ends_daemon:
            self._daemons.pop(pipe_directory).send(b"quit")
        connection.answer(*answer.text.split("\n"))

    # NVML and faults

    def _handle_json(self, connection: _Connection, line: bytes) -> None:
        try:
            request = msgspec.json.decode(line, type=Request)
            answer = self._answer_json(connection, request)
        except DriverError as error:
            connection.send(msgspec.json.encode({"error": error.code, "message": error.message}))
        except msgspec.DecodeError as error:
            connection.send(msgspec.json.encode({"error": "NVML_ERROR_INVALID_ARGUMENT", "message": str(error)}))
        else:
            if answer is not _LATER:
                connection.send(msgspec.json.encode({"ok": answer}))

    def _answer_json(self, connection: _Connection, request: Request) -> Any:
        now_us = self._now_us()
        match request:
            case SystemInfo():
                return {
                    "driver_version": self.node.driver_version,
                    "cuda_version": self.node.cuda_version,
                    "uuids": [device.uuid for device in self.node.devices],
                    "event_sequence": self.node.event_sequence,
                }
            case DeviceState():
                return self._device_state(self._board(request.index, request.instance), now_us)
            case DeviceProcesses():
                return self._processes(self._board(request.index, request.instance), request.mps)
            case ProcessUtilization():
                return self._process_utilization(self._board(request.index, request.instance), now_us)
            case SetComputeMode():
                self._device(request.index).compute_mode = request.mode
            case SetAccounting():
                self._device(request.index).accounting = request.enabled
            case AccountingPids():
                return list(dict.fromkeys(entry.pid for entry in self._device(request.index).accounted))
            case AccountingStats():
                return self._accounting_stats(self._device(request.index), request.pid, now_us)
            case WaitEvent():
                return self._wait_event(connection, request)
            case InjectXid():
                self._fail(self.node.inject_xid(self._device(request.index, may_be_lost=True), request.xid, now_us))
                self._tell_events()
            case InjectHeat():
                self._device(request.index).heat_c = request.celsius
            case InjectEcc():
                device = self._device(request.index)
                self.node.inject_ecc(device, corrected=request.corrected, uncorrected=request.uncorrected)
                self._tell_events()
            case SetMemoryLimit():
                device = self._device(request.index)
                self.node.set_memory_limit(device, _cgroup(request.namespace), request.soft, request.hard)
            case GetMemoryLimit():
                device = self._device(request.index)
                # Asked first: an old driver doesn't know the call, whatever the directory.
                self.node.memory_limit(device, "/")
                return self.node.memory_limit(device, _cgroup(request.namespace))
            case InjectRemapFailure():
                self._device(request.index).has_remap_failed = True
            case ResetDevice():
                self.node.reset(self._device(request.index, may_be_lost=True))
            case MigState():
                return self._mig_state(self._device(request.index))
            case SetMig():
                self.node.set_mig_mode(self._device(request.index), enabled=request.enabled)
            case CreateInstance():
                device = self._device(request.index)
                return self.node.create_instance(device, request.profile_id, request.start, request.size).number
            case ChangeInstance():
                self._change_instance(self._board(request.index, request.instance), request.what)
        return None

    def _board(self, index: int, instance: int | None) -> Device:
        """A device, or one of its GPU instances."""
        device = self._device(index)
        if instance is None:
            return device
        if instance not in device.instances:
            raise DriverError("NVML_ERROR_NOT_FOUND", f"no GPU instance {instance} on device {index}")
        return device.instances[instance]

    def _change_instance(self, board: Device, what: str) -> None:
        assert isinstance(board, MigDevice)
        match what:
            case "destroy":
                self.node.destroy_instance(board)
                timer = self._timers.pop(board.uuid, None)
                if timer is not None:
                    timer.cancel()
            case "create_compute":
                self.node.create_compute(board)
            case "destroy_compute":
                self.node.destroy_compute(board)
            case _:
                raise DriverError("NVML_ERROR_INVALID_ARGUMENT", what)

    def _mig_state(self, device: Device) -> dict[str, Any]:
        board = device.mig_board
        if board is None:
            raise DriverError("NVML_ERROR_NOT_SUPPORTED")
        return {
            "enabled": device.is_mig_enabled,
            "pending": device.is_mig_pending,
            "sizes": [
                {
                    **msgspec.to_builtins(size),
                    "remaining": self.node.remaining(device, size.id) if device.is_mig_enabled else 0,
                }
                for size in board.profiles
            ],
            "instances": [
                {
                    "id": one.number,
                    "uuid": one.uuid,
                    "profile_id": one.size.id,
                    "start": one.start,
                    "size": one.size.size,
                    "has_compute": one.has_compute,
                }
                for one in device.instances.values()
            ],
        }

    def _device(self, index: int, *, may_be_lost: bool = False) -> Device:
        if not 0 <= index < len(self.node.devices):
            raise DriverError("NVML_ERROR_INVALID_ARGUMENT", f"no device {index}")
        device = self.node.devices[index]
        if device.is_lost and not may_be_lost:
            raise DriverError("NVML_ERROR_GPU_IS_LOST")
        return device

    def _device_state(self, device: Device, now_us: int) -> dict[str, Any]:
        device.clock.advance(now_us)
        self._settle(device)
        profile = device.profile
        return {
            "uuid": device.uuid,
            "name": profile.name,
            "architecture": profile.architecture,
            "compute_capability": profile.compute_capability,
            "cores": profile.sms * profile.cores_per_sm,
            "sms": profile.sms,
            "memory_mib": profile.memory_mib,
            "reserved_mib": profile.reserved_mib,
            "used_mib": device.used_mib(),
            "gpu_percent": round(100 * device.clock.active.growth_fraction(now_us, 1)),
            "sm_percent": round(100 * device.clock.used.growth_fraction(now_us, profile.sms)),
            "temperature_c": self.node.temperature_c(device, now_us),
            "power_mw": self.node.power_mw(device, now_us),
            "limit_mw": profile.limit_w * 1000,
            "energy_mj": self.node.energy_mj(device, now_us),
            "compute_mode": device.compute_mode,
            "accounting": device.accounting,
            "mig_capable": profile.mig_capable,
            "pcie_generation": profile.pcie_generation,
            "nvlinks": profile.nvlinks,
            "mig_enabled": device.is_mig_enabled,
            "mig_pending": device.is_mig_pending,
            "slowdown_c": SLOWDOWN_C,
            "recovery_action": device.recovery_action,
            "ecc_corrected": device.ecc_corrected,
            "ecc_uncorrected": device.ecc_uncorrected,
            "remapped_rows": device.remapped_rows,
            "remap_pending": device.is_remap_pending,
            "remap_failed": device.has_remap_failed,
        }

    def _processes(self, device: Device, mps: bool) -> list[tuple[int, int, int | None]]:
        """Pid, MiB and GPU instance of each."""
        used: dict[tuple[int, int | None], int] = {}
        for context in device.all_contexts():
            instance = context.device.number if isinstance(context.device, MigDevice) else None
            if context.server is not None and not mps:
                used.setdefault((context.server.pid, instance), MPS_SERVER_MIB)
            if context.server is not None or not mps:
                key = (context.client.pid, instance)
                used[key] = used.get(key, 0) + context.used_mib
        return sorted(((pid, mib, instance) for (pid, instance), mib in used.items()), key=lambda one: one[0])

    def _process_utilization(self, device: Device, now_us: int) -> list[tuple[int, int]]:
        device.clock.advance(now_us)
        self._settle(device)
        used: dict[int, float] = {}
        for context in device.all_contexts():
            clock = context.device.clock
            clock.advance(now_us)
            fraction = clock.sm_use_fraction(context.number, now_us) * clock.sms / device.clock.sms
            used[context.client.pid] = used.get(context.client.pid, 0.0) + fraction
        return [(pid, round(100 * fraction)) for pid, fraction in sorted(used.items())]

    def _accounting_stats(self, device: Device, pid: int, now_us: int) -> dict[str, Any]:
        for entry in reversed(device.accounted):
            if entry.pid != pid:
                continue
            end_us = now_us if entry.ended_at_us is None else entry.ended_at_us
            live = [context for context in device.contexts.values() if context.client.pid == pid]
            sm_us = device.clock.sm_us(live[0].number) if entry.ended_at_us is None and live else entry.sm_us
            span = max(1, end_us - entry.started_at_us)
            return {
                "gpu_percent": round(100 * min(1.0, sm_us / (span * device.profile.sms))),
                "peak_mib": self.node.peak_mib(device, entry),
                "time_ms": span // 1000 if entry.ended_at_us is not None else 0,
                "started_at_us": entry.started_at_us,
                "is_running": entry.ended_at_us is None,
            }
        raise DriverError("NVML_ERROR_NOT_FOUND", f"no account of {pid}")

    def _wait_event(self, connection: _Connection, request: WaitEvent) -> Any:
        found = self._event_after(request)
        if found is not None or request.timeout_ms <= 0:
            return found
        delay_s = min(request.timeout_ms, _EVENT_WAIT_MS_MAX) / 1000
        timer = asyncio.get_running_loop().call_later(delay_s, self._end_event_wait, connection, request)
        self._event_waits.append((connection, request, timer))
        return _LATER

    def _event_after(self, request: WaitEvent) -> Any:
        for event in self.node.events:
            if event.sequence > request.after and event.device in request.indexes and event.kind in request.kinds:
                return msgspec.to_builtins(event)
        return None

    def _end_event_wait(self, connection: _Connection, request: WaitEvent) -> None:
        self._event_waits = [wait for wait in self._event_waits if wait[1] is not request]
        connection.send(msgspec.json.encode({"ok": None}))

    def _tell_events(self) -> None:
        still: list[tuple[_Connection, WaitEvent, asyncio.TimerHandle]] = []
        for connection, request, timer in self._event_waits:
            found = self._event_after(request)
            if found is None:
                still.append((connection, request, timer))
            else:
                timer.cancel()
                connection.send(msgspec.json.encode({"ok": found}))
        self._event_waits = still

    def _now_us(self) -> int:
        return int((asyncio.get_running_loop().time() - self._started_s) * 1e6)


_LATER: Final = object()
"""The answer is sent when there is one."""


def _cgroup(namespace: str) -> str:
    """The group's path below the mount; refused for what is none, and for the root, which has no limits."""
    mount = cgroups.mount_here()
    if mount is None:
        raise DriverError("NVML_ERROR_NOT_SUPPORTED", "no unified cgroup hierarchy")
    path = Path(namespace)
    if not path.is_dir() or not path.is_relative_to(mount):
        raise DriverError("NVML_ERROR_NOT_FOUND", namespace)
    if path == mount:
        raise DriverError("NVML_ERROR_NOT_SUPPORTED", "the root has no limits")
    return f"/{path.relative_to(mount)}"


def _optional(field: str) -> str | None:
    """A variable of the client's environment: ``=value`` where it is set, nothing where it isn't."""
    return field[1:] if field.startswith("=") else None


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


async def serve(path: Path, node: SimNode, ready: Callable[[], None]) -> None:
    """Serve the node at ``path`` until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    server = SimServer(node)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = await loop.create_unix_server(server.protocol, str(path))
    path.chmod(0o666)  # As /dev/nvidiactl: any user's workload may open it.
    tools.install(tools.directory_of(path), socket_path=path)
    ready()
    await stopped.wait()
    listener.close()
    for connection in list(server.connections):
        connection.close()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def main() -> None:
    """Entry point: ``python -m apportion.node_agent.simgpu.server --socket PATH``; prints a line once it serves."""
    parser = argparse.ArgumentParser(description="A node's simulated devices.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--profile", choices=sorted(profiles()), default="h200")
    parser.add_argument("--node-name", default="node-1")
    parser.add_argument("--driver", choices=sorted(DRIVERS), default="580")
    parser.add_argument("--mig-devices", type=int, default=0, help="so many of the first devices have MIG mode on")
    arguments = parser.parse_args()
    driver_version, cuda_version = DRIVERS[arguments.driver]
    major, _, minor = cuda_version.partition(".")
    node = SimNode(
        node_name=arguments.node_name,
        profile=profiles()[arguments.profile],
        devices=arguments.devices,
        driver_version=driver_version,
        cuda_version=int(major) * 1000 + int(minor or 0) * 10,
    )

    for device in node.devices[: arguments.mig_devices]:
        node.set_mig_mode(device, enabled=True)
        node.reset(device)

    def ready() -> None:
        print(f"simgpu: {arguments.devices} x {arguments.profile} at {arguments.socket}")
        sys.stdout.flush()

    asyncio.run(serve(arguments.socket, node, ready))


if __name__ == "__main__":
    main()
