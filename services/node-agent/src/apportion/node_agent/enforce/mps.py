"""A share of a device side by side with others: one MPS daemon for each device, started when it is first needed.

A limit on the server binds whoever connects afterwards, and a process can only tighten it. So the server carries the
limits of the run that is about to connect; before they are changed, those who were promised the present ones get time
to connect; and while runs with different limits share a device, the server falls back to the smallest, so that a late
child process gets less than its run's share rather than more. Equal runs need no change, and so cost no command.

MPS fails open: a process with a wrong pipe directory has the whole device. Therefore nothing of the user's CUDA_MPS_*
reaches the process, limits name devices by UUID, and the watchdog looks for processes that aren't clients.
"""

import asyncio
import functools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

import structlog

from apportion.contracts.events import Enforced, Slice
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.node_agent.enforce.slices import EnforcementFailed, SetUp
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.nvml import Devices, NvmlFailed

CONTROL: Final = "nvidia-cuda-mps-control"
_COMMAND_S_MAX: Final = 10.0
_CONNECT_S_MAX: Final = 2.0
_CONNECT_PAUSE_S: Final = 0.1

log = structlog.get_logger(__name__)


class MpsCommandFailed(Exception):
    """The control tool refused, or didn't answer in time."""

    def __init__(self, commands: str, *, code: int | None, said: str) -> None:
        super().__init__(f"{CONTROL} {commands!r}: {'no answer' if code is None else f'exit code {code}'}: {said}")
        self.code = code


class _Limits:
    """What a server is set to."""

    def __init__(self, percentage: int, memory_mib: int) -> None:
        self.percentage = percentage
        self.memory_mib = memory_mib

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Limits) and (self.percentage, self.memory_mib) == (other.percentage, other.memory_mib)

    __hash__ = None  # type: ignore[assignment]


class _Domain:
    """One device's daemon and what its server is set to."""

    def __init__(self, uuid: DeviceUuid, pipe: Path) -> None:
        self.uuid = uuid
        self.pipe = pipe
        self.lock = asyncio.Lock()
        self.server_pid = 0
        self.limits: _Limits | None = None
        """As last read back; None where nobody knows."""
        self.runs: dict[RunId, _Limits] = {}
        self.pending: dict[RunId, tuple[int, float]] = {}
        """Runs that weren't seen as clients yet: their pid (0 before the start) and until when they are waited for."""


class Mps:
    """The mps mode, on every device of the node."""

    def __init__(
        self, devices: Devices, watchdog: Watchdog, *, directory: Path, path: str, env: dict[str, str]
    ) -> None:
        self._devices = devices
        self._watchdog = watchdog
        self._directory = directory
        self._env = {**env, "PATH": path}
        self._domains: dict[DeviceUuid, _Domain] = {}

    async def apply(self, run: RunId, piece: Slice) -> SetUp:
        """Set the server to the run's limits, and read them back."""
        domain = self._domain(piece.device_uuid)
        wanted = _limits_of(piece)
        async with domain.lock:
            try:
                await self._ensure_server(domain)
                if domain.limits != wanted:
                    await self._let_connect(domain)
                    await self._set(domain, wanted)
            except MpsCommandFailed as err:
                domain.server_pid = 0
                domain.limits = None
                raise EnforcementFailed(piece.device_uuid, "mps", asked=_text(wanted), observed=err) from err
            assert domain.limits is not None
            domain.runs[run] = wanted
            domain.pending[run] = (0, time.monotonic() + _CONNECT_S_MAX)
            seen = domain.limits
        self._watchdog.watch(run, piece, is_mps=True)
        uuid = piece.device_uuid
        return SetUp(
            env={
                "CUDA_MPS_PIPE_DIRECTORY": str(domain.pipe),
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(wanted.percentage),
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{uuid}={wanted.memory_mib}M",
            },
            enforced=(
                Enforced(
                    device_uuid=uuid,
                    what="memory",
                    asked=piece.memory_mib,
                    applied=wanted.memory_mib,
                    observed=seen.memory_mib,
                    by="mps_pinned_limit+watchdog",
                ),
                Enforced(
                    device_uuid=uuid,
                    what="compute",
                    asked=piece.compute_milli,
                    applied=wanted.percentage * 10,
                    observed=seen.percentage * 10,
                    by="mps_active_thread_percentage",
                ),
                # 0: shared with the device's other clients, and the tenant is told so.
                Enforced(device_uuid=uuid, what="fault_domain", asked=0, applied=0, observed=0, by="mps_server"),
            ),
        )

    def started(self, run: RunId, piece: Slice, pid: int) -> None:
        """The run may connect now, or has connected before this agent came."""
        domain = self._domain(piece.device_uuid)
        domain.runs[run] = _limits_of(piece)
        domain.pending[run] = (pid, time.monotonic() + _CONNECT_S_MAX)
        self._watchdog.watch(run, piece, is_mps=True)

    async def release(self, run: RunId, piece: Slice) -> None:
        """Forget the run. The daemon stays: starting one costs more than keeping it."""
        domain = self._domain(piece.device_uuid)
        domain.runs.pop(run, None)
        domain.pending.pop(run, None)
        self._watchdog.forget(run)

    async def lower(self) -> None:
        """Set every server that is shared by unequal runs to the smallest of their limits; called now and then."""
        for domain in list(self._domains.values()):
            if len(domain.runs) < 2 or domain.lock.locked() or domain.limits is None:
                continue
            floor = _floor(list(domain.runs.values()))
            if domain.limits == floor or self._waiting(domain):
                continue
            async with domain.lock:
                try:
                    await self._set(domain, floor)
                except (MpsCommandFailed, EnforcementFailed) as err:
                    log.warning("mps_not_lowered", device=domain.uuid, error=str(err))
                    domain.limits = None

    def forget_servers(self) -> None:
        """The driver went away, and every daemon with it."""
        for domain in self._domains.values():
            domain.server_pid = 0
            domain.limits = None

    async def terminate(self, device: DeviceUuid, pids: set[int]) -> None:
        """Take these processes' work off the server, before they are killed: work in flight would harm neighbours."""
        domain = self._domains.get(device)
        if domain is None or not domain.server_pid:
            return
        try:
            clients = {p.pid for p in self._devices.processes(device) if p.is_mps_client} & pids
            if clients:
                commands = [f"terminate_client {domain.server_pid} {pid}" for pid in sorted(clients)]
                await self._control(domain, "\n".join(commands))
        except (MpsCommandFailed, NvmlFailed) as err:
            # It may have ended by itself meanwhile; a server that is wedged is found by the next start.
            log.warning("mps_client_not_terminated", device=device, error=str(err))

    async def end_idle(self, uuid: DeviceUuid) -> None:
        """End the device's daemon if it has no run: its server's context would stand in an exclusive run's way."""
        domain = self._domains.get(uuid)
        if domain is None or not domain.server_pid or domain.runs:
            return
        async with domain.lock:
            try:
                await self._control(domain, "quit")
            except MpsCommandFailed as err:
                log.warning("mps_not_ended", device=uuid, error=str(err))
            domain.server_pid = 0
            domain.limits = None

    def _domain(self, uuid: DeviceUuid) -> _Domain:
        domain = self._domains.get(uuid)
        if domain is None:
            # Short and by index: the tool's sockets lie in it, and their paths are limited to 107 bytes.
            index = self._devices.info(uuid).index
            domain = self._domains[uuid] = _Domain(uuid, self._directory / str(index))
        return domain

    async def _ensure_server(self, domain: _Domain) -> None:
        if domain.server_pid and _is_alive(domain.server_pid):
            return
        domain.limits = None
        domain.server_pid = 0
        daemon_pid = _read_pid(domain.pipe / f"{CONTROL}.pid")
        if daemon_pid == 0 or not _is_alive(daemon_pid):
            await self._start_daemon(domain)
        elif not await self._answers(domain):
            # Ours by its pid file, and deaf: whoever depends on it is lost already.
            log.warning("mps_daemon_replaced", device=domain.uuid, pid=daemon_pid)
            os.kill(daemon_pid, signal.SIGKILL)
            await self._start_daemon(domain)
        servers = (await self._control(domain, f"start_server -uid {os.getuid()}\nget_server_list")).split()
        if not servers or not servers[-1].isdecimal():
            raise MpsCommandFailed("get_server_list", code=0, said=" ".join(servers) or "no server")
        domain.server_pid = int(servers[-1])
        status = await self._control(domain, f"get_server_status {domain.server_pid}")
        if status.strip() != "ACTIVE":
            raise MpsCommandFailed("get_server_status", code=0, said=status.strip())

    async def _answers(self, domain: _Domain) -> bool:
        try:
            await self._control(domain, "get_server_list")
        except MpsCommandFailed:
            return False
        return True

    async def _start_daemon(self, domain: _Domain) -> None:
        domain.pipe.mkdir(mode=0o711, parents=True, exist_ok=True)
        (domain.pipe / f"{CONTROL}.pid").unlink(missing_ok=True)
        # The daemon alone is told its device: a client that is told one as well would have to count by its order.
        await self._tool(domain, ["-d"], "", {"CUDA_VISIBLE_DEVICES": domain.uuid})

    async def _set(self, domain: _Domain, wanted: _Limits) -> None:
        """Set both limits and read both back, in one command."""
        server, uuid = domain.server_pid, domain.uuid
        domain.limits = None
        answer = await self._control(
            domain,
            f"set_active_thread_percentage {server} {wanted.percentage}\n"
            f"set_device_pinned_mem_limit {server} {uuid} {wanted.memory_mib}M\n"
            f"get_active_thread_percentage {server}\n"
            f"get_device_pinned_mem_limit {server} {uuid}",
        )
        lines = answer.split()
        percentage, memory = (lines[-2], lines[-1]) if len(lines) >= 2 else ("", "")
        seen = _Limits(int(float(percentage)) if _is_number(percentage) else 0, _mib(memory))
        if seen != wanted:
            raise EnforcementFailed(uuid, "mps limits", asked=_text(wanted), observed=_text(seen))
        domain.limits = seen

    async def _let_connect(self, domain: _Domain) -> None:
        """Wait until those who were promised the present limits have connected, have ended, or took too long."""
        while self._waiting(domain):  # noqa: ASYNC110  no event tells of a client, only a look at the device
            await asyncio.sleep(_CONNECT_PAUSE_S)

    def _waiting(self, domain: _Domain) -> bool:
        now = time.monotonic()
        waiting = {run: (pid, until) for run, (pid, until) in domain.pending.items() if until > now}
        if waiting:
            try:
                clients = {process.pid for process in self._devices.processes(domain.uuid) if process.is_mps_client}
            except NvmlFailed:
                clients = set()
            waiting = {
                run: (pid, until)
                for run, (pid, until) in waiting.items()
                if pid not in clients and (pid == 0 or _is_alive(pid))
            }
        domain.pending = waiting
        return bool(waiting)

    async def _control(self, domain: _Domain, commands: str) -> str:
        return await self._tool(domain, [], commands + "\n", {})

    async def _tool(self, domain: _Domain, arguments: list[str], commands: str, env: dict[str, str]) -> str:
        pipe = str(domain.pipe)
        # In a thread: a few times in a device's life, and event loops differ in how they see a tool off whose daemon
        # lives on (uvloop waits for it).
        run = functools.partial(
            subprocess.run,
            ["/usr/bin/env", CONTROL, *arguments],
            env={**self._env, "CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": pipe, **env},
            input=commands,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            check=False,
            timeout=_COMMAND_S_MAX,
        )
        try:
            done = await asyncio.get_running_loop().run_in_executor(None, run)
        except OSError as err:
            raise MpsCommandFailed(commands, code=None, said=str(err)) from err
        except subprocess.TimeoutExpired as err:
            raise MpsCommandFailed(commands, code=None, said=f"nothing in {_COMMAND_S_MAX:g} s") from err
        if done.returncode:
            raise MpsCommandFailed(commands or " ".join(arguments), code=done.returncode, said=done.stdout.strip())
        return done.stdout


def _limits_of(piece: Slice) -> _Limits:
    return _Limits(max(1, piece.compute_milli // 10), piece.memory_mib)


def _floor(limits: list[_Limits]) -> _Limits:
    return _Limits(min(one.percentage for one in limits), min(one.memory_mib for one in limits))


def _text(limits: _Limits) -> str:
    return f"{limits.percentage} % and {limits.memory_mib} MiB"


def _mib(text: str) -> int:
    number = text[:-1]
    if not number.isdecimal():
        return 0
    return int(number) * {"M": 1, "G": 1024}.get(text[-1], 0)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _read_pid(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in (b"Z", b"X")
