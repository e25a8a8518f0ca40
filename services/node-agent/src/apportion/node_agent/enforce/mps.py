"""A share of a device side by side with others: one MPS daemon for each device, started when it is first needed.

A limit on the server binds whoever connects afterwards, and a process can only tighten it. So the server carries the
limits of the run that is about to connect; before they are changed, those who were promised the present ones get time
to connect; and while runs with different limits share a device, the server falls back to the smallest, so that a late
child process gets less than its run's share rather than more. Equal runs need no change, and so cost no command.

MPS fails open: a process with a wrong pipe directory has the whole device. Therefore nothing of the user's CUDA_MPS_*
reaches the process, limits name devices by UUID, and the watchdog looks for processes that aren't clients.

The clients of a server share one fate. When a run ends badly its server is examined, with a process that tries what a
workload would (canary.py): a server that serves nobody is replaced once its runs are gone, and they are told why.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from apportion.contracts.events import Enforced, Slice
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.node_agent import canaries, tools
from apportion.node_agent.enforce.cgroup_memory import CgroupMemory
from apportion.node_agent.enforce.fault_domains import DomainFailed, DomainSigns, Kill, judge
from apportion.node_agent.enforce.partitions import PartitionBook
from apportion.node_agent.enforce.slices import EnforcementFailed, SetUp
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.nvml import Devices, NvmlFailed

CONTROL: Final = "nvidia-cuda-mps-control"
_TRIAL: Final = "trial-"
_COMMAND_S_MAX: Final = 10.0
_ANSWER_S_MAX: Final = 3.0
"""For what a healthy server does in milliseconds: later is never."""
_CLEAR_S_MAX: Final = 15.0
_LATELY_S: Final = 10.0
"""An end so soon after a fault of the device is put down to it."""
_IDLE_S: Final = 30.0
"""A daemon without a run is ended after it, which costs a start later and clears what may be wrong with it."""
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
        self.pids: dict[int, RunId] = {}
        """First processes of its runs, also of those that ended lately."""
        self.log_from = 0
        """Where the server's log stood when the server came up."""
        self.kills: dict[RunId, Kill] = {}
        """Runs that were killed since the server was last seen to work; whoever judges next goes by them."""
        self.failure: DomainFailed | None = None
        self.signs: DomainSigns | None = None
        """Those of the failure."""
        self.lately: tuple[DomainFailed, float] | None = None
        """A failure that is over, and when it was seen: neighbours that it ended are told of one by one."""
        self.xid: tuple[int, float] = (0, 0.0)
        self.idle_since = time.monotonic()
        self.partitions: PartitionBook | None = None
        """Where its SMs are split for good."""


class Mps:
    """The mps mode, on every device of the node."""

    def __init__(
        self,
        devices: Devices,
        watchdog: Watchdog,
        *,
        directory: Path,
        path: str,
        env: dict[str, str],
        partitions: tuple[int, ...] = (),
        memory: CgroupMemory | None = None,
    ) -> None:
        """``partitions``: parts of each device, in milli, that its SMs are split into, instead of by percentage."""
        self._devices = devices
        self._watchdog = watchdog
        self._directory = directory
        self._env = {**env, "PATH": path}
        self._partitions = partitions
        self._memory = memory
        self._domains: dict[DeviceUuid, _Domain] = {}

    async def apply(self, run: RunId, piece: Slice) -> SetUp:
        """Set the server to the run's limits, and read them back."""
        domain = self._domain(piece.device_uuid)
        wanted = _limits_of(piece)
        await self._let_clear(domain)
        async with domain.lock:
            try:
                await self._ensure_server(domain)
                if domain.partitions is not None:
                    wanted = _Limits(100, piece.memory_mib)
                    domain.partitions.take(run, piece.compute_milli)
                if domain.limits != wanted:
                    await self._let_connect(domain)
                    await self._set(domain, wanted)
                seen_partition = await self._see_partition(domain, run)
            except (MpsCommandFailed, EnforcementFailed) as err:
                domain.limits = None
                if domain.partitions is not None:
                    domain.partitions.give_back(run)
                if isinstance(err, EnforcementFailed):
                    raise
                domain.server_pid = 0
                raise EnforcementFailed(piece.device_uuid, "mps", asked=_text(wanted), observed=err) from err
            assert domain.limits is not None
            domain.runs[run] = wanted
            domain.pending[run] = (0, time.monotonic() + _CONNECT_S_MAX)
            seen = domain.limits
        self._watchdog.watch(run, piece, is_mps=True)
        uuid = piece.device_uuid
        env = {
            "CUDA_MPS_PIPE_DIRECTORY": str(domain.pipe),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(wanted.percentage),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{uuid}={wanted.memory_mib}M",
        }
        applied_milli, observed_milli, by = wanted.percentage * 10, seen.percentage * 10, "mps_active_thread_percentage"
        if seen_partition is not None:
            name, applied_milli, observed_milli = seen_partition
            env["CUDA_MPS_SM_PARTITION"] = name
            by = "mps_sm_partition"
        group, observed_mib, memory_by = "", seen.memory_mib, "mps_pinned_limit+watchdog"
        if self._memory is not None:
            # The pinned limit is each process's own; this one is all of the run's.
            path, limit_mib = self._memory.limit(run, piece)
            group, observed_mib = str(path), min(limit_mib, seen.memory_mib)
            memory_by = "cgroup_memory_limit+mps_pinned_limit+watchdog"
        return SetUp(
            env=env,
            cgroup=group,
            enforced=(
                Enforced(
                    device_uuid=uuid,
                    what="memory",
                    asked=piece.memory_mib,
                    applied=wanted.memory_mib,
                    observed=observed_mib,
                    by=memory_by,
                ),
                Enforced(
                    device_uuid=uuid,
                    what="compute",
                    asked=piece.compute_milli,
                    applied=applied_milli,
                    observed=observed_milli,
                    by=by,
                ),
                # 0: shared with the device's other clients, and the tenant is told so.
                Enforced(device_uuid=uuid, what="fault_domain", asked=0, applied=0, observed=0, by="mps_server"),
            ),
        )

    def started(self, run: RunId, piece: Slice, pid: int) -> None:
        """The run may connect now, or has connected before this agent came."""
        domain = self._domain(piece.device_uuid)
        domain.runs[run] = _Limits(100, piece.memory_mib) if self._partitions else _limits_of(piece)
        domain.pending[run] = (pid, time.monotonic() + _CONNECT_S_MAX)
        domain.pids[pid] = run
        self._watchdog.watch(run, piece, is_mps=True)

    async def release(self, run: RunId, piece: Slice) -> None:
        """Forget the run. The daemon stays for a while: starting one costs more than keeping it.

        One that failed goes with its last run.
        """
        domain = self._domain(piece.device_uuid)
        domain.runs.pop(run, None)
        domain.pending.pop(run, None)
        if domain.partitions is not None:
            domain.partitions.give_back(run)
        self._watchdog.forget(run)
        if self._memory is not None:
            self._memory.lift(run, piece)
        if not domain.runs:
            domain.idle_since = time.monotonic()
            domain.pids.clear()
            if domain.failure is not None:
                async with domain.lock:
                    await self._end_daemon(domain)

    # Shared fate

    def killed(self, device: DeviceUuid, kill: Kill) -> None:
        """A run on the device ended by a signal that nobody here sent; to be told before anybody is asked about it."""
        if (domain := self._domains.get(device)) is not None:
            domain.kills[kill.run_id] = kill

    async def examine(self, device: DeviceUuid) -> DomainFailed | None:
        """Whether the device's server still serves; asked when a run on it has ended badly."""
        domain = self._domains.get(device)
        if domain is None or not domain.server_pid:
            return None if domain is None else self._failure(domain)
        async with domain.lock:
            if domain.lately is not None and time.monotonic() - domain.lately[1] < _LATELY_S:
                return domain.lately[0]
            if domain.failure is None:
                known = list(domain.kills)
                status = await self._status(domain)
                canary = await self._canary(domain) if status == "ACTIVE" else ""
                if domain.failure is None:  # A run may have been stopped meanwhile, which shows it too.
                    failed = self._judge(domain, status=status, canary=canary)
                    if failed is None or failed.is_over:
                        # It serves, so these did no harm; of one killed meanwhile, the next examination tells.
                        for run in known:
                            domain.kills.pop(run, None)
                    return failed
            return self._failure(domain)

    def _failure(self, domain: _Domain) -> DomainFailed | None:
        """The domain's failure, put down to whom it is known by now to have been: the cause may be noticed last."""
        if domain.failure is not None and domain.signs is not None:
            known = judge(msgspec.structs.replace(domain.signs, kills=tuple(domain.kills.values())))
            if known is not None and known != domain.failure:
                log.error("mps_domain_attributed", device=domain.uuid, evidence=known.evidence)
                domain.failure = known
        return domain.failure

    def reported(self, device: DeviceUuid, xid: int) -> None:
        """The driver has reported a fault of a device whose clients share their fate."""
        if (domain := self._domains.get(device)) is not None:
            domain.xid = (xid, time.monotonic())

    def _judge(self, domain: _Domain, *, status: str, canary: str) -> DomainFailed | None:
        xid, xid_at = domain.xid
        signs = DomainSigns(
            device_uuid=domain.uuid,
            status=status,
            canary=canary,
            log=_read_from(domain.pipe / "server.log", domain.log_from),
            run_of_pid={**domain.pids, **{pid: run for run in domain.runs for pid in self._watchdog.pids_of(run)}},
            kills=tuple(domain.kills.values()),
            seen_at=time.time_ns(),
            xid=xid if time.monotonic() - xid_at < _LATELY_S else 0,
        )
        failed = judge(signs)
        if failed is not None:
            log.error("mps_domain_failed", device=domain.uuid, evidence=failed.evidence)
            if failed.is_over:
                domain.lately = (failed, time.monotonic())
                domain.log_from = _size(domain.pipe / "server.log")
            else:
                domain.failure = failed
                domain.signs = signs
        return failed

    def runs_on(self, device: DeviceUuid) -> tuple[RunId, ...]:
        """The runs that share the device's server."""
        domain = self._domains.get(device)
        return () if domain is None else tuple(sorted(domain.runs))

    async def recover(self, in_use: Collection[DeviceUuid]) -> None:
        """End the daemons and servers that earlier agents left on devices without a run; to be called at the start."""
        try:
            names = sorted(os.listdir(self._directory))  # noqa: PTH208  once, at the start
        except FileNotFoundError:
            return
        by_index = {str(info.index): info.uuid for info in self._devices.inventory()}
        for name in names:
            if name.startswith(_TRIAL):
                await self._end_daemon(_Domain(DeviceUuid(""), self._directory / name))
                shutil.rmtree(self._directory / name, ignore_errors=True)
                continue
            uuid = by_index.get(name)
            if uuid is None or uuid in in_use:
                continue
            domain = self._domain(uuid)
            if _ours(domain.pipe, _read_pid(domain.pipe / f"{CONTROL}.pid")) or _recorded_server(domain.pipe):
                async with domain.lock:
                    await self._end_daemon(domain)
                log.info("mps_daemon_reclaimed", device=uuid)

    def trial_pipe(self) -> Path:
        """A directory for a daemon of an isolation test, which ``recover`` would find."""
        self._directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_TRIAL, dir=self._directory))

    async def _let_clear(self, domain: _Domain) -> None:
        """Wait until a failed domain's last run is gone and its daemon with it."""
        until = time.monotonic() + _CLEAR_S_MAX
        while domain.failure is not None:
            if not domain.runs:
                async with domain.lock:
                    await self._end_daemon(domain)
            elif time.monotonic() > until:
                raise EnforcementFailed(domain.uuid, "fault domain", asked="ACTIVE", observed=domain.failure.evidence)
            else:
                await asyncio.sleep(_CONNECT_PAUSE_S)

    async def _status(self, domain: _Domain) -> str:
        if not _is_alive(domain.server_pid):
            return ""
        try:
            return (await self._control(domain, f"get_server_status {domain.server_pid}", s_max=_ANSWER_S_MAX)).strip()
        except MpsCommandFailed:
            return ""

    async def _canary(self, domain: _Domain) -> str:
        """``ok`` where a process gets a context as this server's client; else how it fared."""
        env = {**self._env, "CUDA_MPS_PIPE_DIRECTORY": str(domain.pipe), "CUDA_VISIBLE_DEVICES": domain.uuid}
        return await asyncio.get_running_loop().run_in_executor(None, canaries.ask, env, self._is_client(domain))

    def _is_client(self, domain: _Domain) -> Callable[[int], bool]:
        def is_client(pid: int) -> bool:
            return any(one.pid == pid and one.is_mps_client for one in self._devices.processes(domain.uuid))

        return is_client

    async def _end_daemon(self, domain: _Domain) -> None:
        """End daemon and server, asked and then made to; whatever they say, nothing of them is left."""
        daemon_pid = _read_pid(domain.pipe / f"{CONTROL}.pid")
        pids = [pid for pid in (daemon_pid,) if _ours(domain.pipe, pid)]
        if pids:
            try:
                await self._control(domain, "quit", s_max=_ANSWER_S_MAX)
            except MpsCommandFailed as err:
                log.warning("mps_not_ended", device=domain.uuid, error=str(err))
        if server_pid := _recorded_server(domain.pipe):
            pids.append(server_pid)
        await asyncio.get_running_loop().run_in_executor(None, _see_off, pids)
        (domain.pipe / f"{CONTROL}.pid").unlink(missing_ok=True)
        (domain.pipe / _SERVER_FILE).unlink(missing_ok=True)
        domain.server_pid = 0
        domain.limits = None
        domain.failure = None
        domain.signs = None
        domain.kills.clear()
        domain.lately = None
        domain.xid = (0, 0.0)
        domain.partitions = None

    async def lower(self) -> None:
        """Set every server that is shared by unequal runs to the smallest of their limits; called now and then."""
        for domain in list(self._domains.values()):
            if domain.server_pid and not domain.runs and time.monotonic() - domain.idle_since > _IDLE_S:
                await self.end_idle(domain.uuid)
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

    async def terminate(self, device: DeviceUuid, pids: set[int]) -> DomainFailed | None:
        """Take these processes' work off the server, before they are killed: work in flight would harm neighbours.

        A server that doesn't answer is wedged, and its domain has failed.
        """
        domain = self._domains.get(device)
        if domain is None or not domain.server_pid or domain.failure is not None:
            return None
        try:
            clients = {p.pid for p in self._devices.processes(device) if p.is_mps_client} & pids
            if clients:
                commands = [f"terminate_client {domain.server_pid} {pid}" for pid in sorted(clients)]
                await self._control(domain, "\n".join(commands), s_max=_ANSWER_S_MAX)
        except MpsCommandFailed as err:
            # It may have ended by itself meanwhile.
            log.warning("mps_client_not_terminated", device=device, error=str(err))
            if err.code is None and domain.failure is None:
                self._judge(domain, status="ACTIVE", canary="terminate_client did not return")
        except NvmlFailed as err:
            log.warning("mps_client_not_terminated", device=device, error=str(err))
        return domain.failure

    async def end_idle(self, uuid: DeviceUuid) -> None:
        """End the device's daemon if it has no run: its server's context would stand in an exclusive run's way."""
        domain = self._domains.get(uuid)
        if domain is None or not domain.server_pid or domain.runs:
            return
        async with domain.lock:
            if not domain.runs:
                await self._end_daemon(domain)

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
            await self._end_daemon(domain)
            await self._start_daemon(domain)
        servers = (await self._control(domain, f"start_server -uid {os.getuid()}\nget_server_list")).split()
        if not servers or not servers[-1].isdecimal():
            raise MpsCommandFailed("get_server_list", code=0, said=" ".join(servers) or "no server")
        domain.server_pid = int(servers[-1])
        domain.kills.clear()
        status = await self._control(domain, f"get_server_status {domain.server_pid}")
        if status.strip() != "ACTIVE":
            raise MpsCommandFailed("get_server_status", code=0, said=status.strip())
        _record_server(domain.pipe, domain.server_pid)
        domain.log_from = _size(domain.pipe / "server.log")
        if self._partitions:
            await self._split(domain)

    async def _split(self, domain: _Domain) -> None:
        """Keep SMs for each partition, or find what an earlier agent kept; before there is any client."""
        sms = self._devices.info(domain.uuid).sms
        listed = await self._control(domain, "lspart")
        if len(listed.splitlines()) <= 1:
            for milli in self._partitions:
                await self._control(domain, f"sm_partition add {domain.uuid} {PartitionBook.chunks_of(milli, sms)}")
            listed = await self._control(domain, "lspart")
        domain.partitions = PartitionBook(domain.uuid, sms, listed)
        for pid, run in domain.pids.items():
            domain.partitions.keep(run, _variable_of(pid, "CUDA_MPS_SM_PARTITION"))

    async def _see_partition(self, domain: _Domain, run: RunId) -> tuple[str, int, int] | None:
        """The run's partition: its name, and how much of the device it was to be and is, in milli."""
        if domain.partitions is None:
            return None
        listed = await self._control(domain, "lspart")
        return domain.partitions.read_back(run, listed)

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
        options = ["-d", "-S"] if self._partitions else ["-d"]
        await self._tool(domain, options, "", {"CUDA_VISIBLE_DEVICES": domain.uuid})

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

    async def _control(self, domain: _Domain, commands: str, *, s_max: float = _COMMAND_S_MAX) -> str:
        return await self._tool(domain, [], commands + "\n", {}, s_max=s_max)

    async def _tool(
        self,
        domain: _Domain,
        arguments: list[str],
        commands: str,
        env: Mapping[str, str],
        *,
        s_max: float = _COMMAND_S_MAX,
    ) -> str:
        pipe = str(domain.pipe)
        where = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": pipe}
        argv = ["/usr/bin/env", CONTROL, *arguments]
        try:
            done = await tools.ask_soon(argv, env={**self._env, **where, **env}, s_max=s_max, text=commands)
        except OSError as err:
            raise MpsCommandFailed(commands, code=None, said=str(err)) from err
        except subprocess.TimeoutExpired as err:
            raise MpsCommandFailed(commands, code=None, said=f"nothing in {s_max:g} s") from err
        if done.returncode:
            raise MpsCommandFailed(
                commands or " ".join(arguments), code=done.returncode, said=(done.stdout + done.stderr).strip()
            )
        return done.stdout


_SERVER_FILE: Final = "apportion-server"
"""Pid and start time of the server that we have seen, so that a successor can tell it from a stranger."""


def _record_server(pipe: Path, pid: int) -> None:
    (pipe / _SERVER_FILE).write_text(f"{pid} {_start_ticks(pid)}")


def _recorded_server(pipe: Path) -> int:
    """The recorded server's pid if it lives; else 0."""
    try:
        pid, ticks = map(int, (pipe / _SERVER_FILE).read_text().split())
    except (OSError, ValueError):
        return 0
    return pid if _is_alive(pid) and _start_ticks(pid) == ticks else 0


def _ours(pipe: Path, pid: int) -> bool:
    """True where this process was started for this pipe directory: a pid file alone may be stale."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes() if pid else b""
    except OSError:
        return False
    return f"CUDA_MPS_PIPE_DIRECTORY={pipe}".encode() in environ.split(b"\0")


def _variable_of(pid: int, name: str) -> str:
    """A variable of the process's environment as it was started; empty where it is gone or has none."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    prefix = f"{name}=".encode()
    found = next((line for line in environ.split(b"\0") if line.startswith(prefix)), prefix)
    return found.removeprefix(prefix).decode(errors="replace")


def _see_off(pids: list[int]) -> None:
    """Wait for these processes' end, and make it where they don't come to it; a number that passed on is left alone."""
    ticks = {pid: _start_ticks(pid) for pid in pids}
    until = time.monotonic() + 1.0
    while left := [pid for pid in pids if _is_alive(pid) and _start_ticks(pid) == ticks[pid]]:
        if time.monotonic() > until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(65536).decode(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


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
