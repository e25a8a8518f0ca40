"""The agent's hands and eyes: carries out the core's instructions, and tells it what became of them.

Every instruction is answered by an observation, whatever goes wrong. What has to be done is the core's to say, how a
process is kept is processes.py's, how a slice is enforced is enforce/'s.
"""

import asyncio
import contextlib
import functools
import json
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Final, assert_never

import msgspec
import structlog

from apportion.contracts.causes import Mode, RunCause
from apportion.contracts.events import Enforced, IsolationTestStarted, IsolationVerdict, RunPlaced, Slice
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.node_agent import checkpoints, core, run_records
from apportion.node_agent.containers import CONTAINER_VARIABLE, WORK, Box, ContainerRefused, Containers, start_line
from apportion.node_agent.enforce.cgroup_memory import enter
from apportion.node_agent.enforce.fault_domains import DomainFailed, Kill
from apportion.node_agent.enforce.mps import Mps
from apportion.node_agent.enforce.slices import EnforcementFailed, SetUp, Slices
from apportion.node_agent.enforce.watchdog import Escape, Offence, Watchdog
from apportion.node_agent.environment import (
    CPUS_VARIABLE,
    SLICES_VARIABLE,
    cpus_in,
    enforced_in,
    environment_of,
    slices_in,
)
from apportion.node_agent.host_limits import CPUS, NOBODY, HostLimits, Limits, LimitsNotSet, Near, near_devices
from apportion.node_agent.nvml import NvmlFailed
from apportion.node_agent.processes import (
    LOG_BYTES_MAX,
    RUN_ID_VARIABLE,
    Launch,
    Processes,
    RunEnded,
    SpawnerUnavailable,
    StartedProcess,
    StartFailed,
    StartRefused,
)
from apportion.node_agent.run_records import RunAs
from apportion.node_agent.run_users import NoUserFree, RunUsers, variables_of
from apportion.runtime.clock import Clock, SystemClock

_RELEASE_PAUSE_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Between looks at a device that still shows a process of an ended run; the last one repeats."""
_CHECKPOINT_PAUSE_S: Final = 0.05
"""Between looks for a run's word that it has checkpointed."""
_CLIENT_S_MAX: Final = 10
"""A client of a container that was killed ends within it."""
_SHIM_LOST: Final = frozenset({run_records.LossReason.SHIM_GONE, run_records.LossReason.SHIM_UNRESPONSIVE})
"""What befell the run's guardian alone: the node is as it was."""

log = structlog.get_logger(__name__)


class Shell:
    """One agent's shell. ``perform`` is the reactor's; ``feed`` is set before it is first called."""

    def __init__(
        self,
        *,
        processes: Processes,
        slices: Slices,
        watchdog: Watchdog,
        mps: Mps | None,
        path: str,
        node_env: Mapping[str, str],
        clock: Clock | None = None,
        on_slices: Callable[[Mapping[RunId, tuple[Slice, ...]]], None] | None = None,
        log_bytes_max: int = LOG_BYTES_MAX,
        host: HostLimits,
        processes_max: int = 0,
        open_files_max: int = 0,
        containers: Containers | None = None,
        users: RunUsers | None = None,
    ) -> None:
        """``on_slices`` hears of the slices of all live runs, each time that they change."""
        self._processes = processes
        self._slices = slices
        self._watchdog = watchdog
        self._mps = mps
        self._path = path
        self._node_env = dict(node_env)
        self._inherited = dict(os.environ)
        self._clock: Clock = clock or SystemClock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: dict[RunId, RunEnded | None] = {}
        """Runs whose start isn't told yet, with their end where that came first."""
        self._releasing: list[RunPlaced] = []
        """What the next look at the devices is for."""
        self._slices_of: dict[RunId, tuple[Slice, ...]] = {}
        self._processes_of: dict[RunId, StartedProcess] = {}
        self._stopping: set[RunId] = set()
        self._on_slices = on_slices or (lambda _: None)
        self._log_bytes_max = log_bytes_max
        self._host = host
        self._processes_max = processes_max
        self._open_files_max = open_files_max or None
        self._containers = containers
        self._users = users or RunUsers()
        self._boxed: set[RunId] = set()
        """Runs that have a container, or may have one."""
        self._frozen: set[RunId] = set()
        """Those of them that stand still."""
        self.feed: Callable[[core.Observation], None] = lambda _: None
        self.try_isolation: Callable[[IsolationTestStarted], Awaitable[tuple[IsolationVerdict, ...]]]
        """Set with ``feed``, before the first instruction: what it needs is made of this shell's own parts."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails where an instruction ended in an error that nobody foresaw: then the agent has to begin anew."""

    # The beginning and the end

    async def adopt(self, session: str) -> core.Adopted:
        """What earlier sessions left on this machine; those that live are watched from now on."""
        found = []
        for run, observed in (await self._processes.adopt()).items():
            seen = observed
            if isinstance(seen, run_records.Claimed):
                # Its shim either starts it in a moment, or withdraws since the agent that held its gate is gone.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._processes.ended(run), 0.2)
                seen = self._processes.observe(run)
            found.append(self._found(run, seen))
        self._on_slices(self._slices_of)
        return core.Adopted(session=session, found=tuple(found))

    async def run(self) -> None:
        """Tell of every end, until cancelled."""
        while True:
            ended = await self._processes.ends.get()
            if ended.run_id in self._starting:
                self._starting[ended.run_id] = ended
            else:
                self._take_end(ended)

    async def close(self) -> None:
        """Finish what is being taken down, for a moment; the runs go on, and what was cut short is found again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Instructions

    def perform(self, instruction: core.Instruction) -> None:
        """Begin to carry out an instruction."""
        match instruction:
            case core.StartRun(order=order):
                self._starting[order.run_id] = None
                self._go(self._start(order))
            case core.StopRun():
                self._go(self._stop(instruction))
            case core.StillRun(run_id=run_id, is_still=is_still):
                self._go(self._still(run_id, is_still=is_still))
            case core.CheckpointRun():
                self._go(self._checkpoint(instruction))
            case core.ReleaseRun(order=order):
                if not self._releasing:
                    self._go(self._release_all())
                self._releasing.append(order)
            case core.RemoveRun(run_id=run_id):
                self._go(self._remove(run_id))
            case core.TryIsolation(order=order):
                self._go(self._try_isolation(order))
            case _:
                assert_never(instruction)

    async def _try_isolation(self, order: IsolationTestStarted) -> None:
        self.feed(core.IsolationTried(test_id=order.test_id, verdicts=await self.try_isolation(order)))

    async def _start(self, order: RunPlaced) -> None:
        run = order.run_id
        self._slices_of[run] = order.slices
        observation = await self._started(order)
        self.feed(observation)
        ended = self._starting.pop(run)
        if ended is not None and isinstance(observation, core.ProcessStarted):
            self._take_end(ended)

    async def _started(self, order: RunPlaced) -> core.ProcessStarted | core.StartFailed | core.ProcessExited:
        run = order.run_id
        try:
            set_up = await self._slices.apply(run, order.slices)
            limits = self._host_limits_of(order)
            if order.image:
                process, enforced, cpus = await self._started_in_container(order, set_up, limits)
                return self._running(order, process, enforced, cpus)
            work = self._processes.work_path(run)
            groups, enforced = await self._apply_host_limits(run, limits, set_up.cgroup)
            cpus = limits.cpus if any(one.what == CPUS and one.applied for one in enforced) else ()
            enforced = (*set_up.enforced, *enforced)
            env = environment_of(
                order,
                inherited=self._inherited,
                path=self._path,
                slice_env=set_up.env,
                enforced=enforced,
                node_env=self._node_env,
                cpus=cpus,
                checkpoint=checkpoints.variables(order.checkpoint, work),
            )
            user = self._users.take(run)
            env |= variables_of(user, work)
            # Only here, after everything was read back, is anybody asked to start it.
            launch = Launch(
                run_id=run,
                epoch=order.node_epoch,
                argv=order.command,
                env=env,
                log_bytes_max=self._log_bytes_max,
                groups=groups,
                user=user,
                open_files_max=self._open_files_max,
            )
            if set_up.cgroup:
                process = await self._born_in(launch, Path(set_up.cgroup))
            else:
                process = await self._processes.start(launch)
        except ContainerRefused as err:
            cause = RunCause.ENFORCEMENT_FAILED if err.is_unenforced else RunCause.START_FAILED
            return self._start_failed(run, cause, str(err))
        except (EnforcementFailed, LimitsNotSet) as err:
            return self._start_failed(run, RunCause.ENFORCEMENT_FAILED, str(err))
        except StartFailed as err:
            return self._end(run, err.end)
        except StartRefused as err:
            log.warning("start_refused", run_id=run, reason=err.reason)
            return (
                self._end(run, err.observed)
                if isinstance(err.observed, run_records.Ended)
                else self._start_failed(run, RunCause.START_FAILED, err.reason)
            )
        except (SpawnerUnavailable, NoUserFree, NvmlFailed, OSError, ValueError) as err:
            return self._start_failed(run, RunCause.START_FAILED, f"{type(err).__name__}: {err}")
        return self._running(order, process, enforced, cpus)

    def _running(
        self, order: RunPlaced, process: StartedProcess, enforced: tuple[Enforced, ...], cpus: tuple[int, ...]
    ) -> core.ProcessStarted:
        run = order.run_id
        self._processes_of[run] = process
        self._slices.started(run, order.slices, process.pid)
        self._on_slices(self._slices_of)
        return core.ProcessStarted(
            run_id=run, pid=process.pid, started_at=process.started_at_ns, enforced=enforced, cpus=cpus
        )

    async def _started_in_container(
        self, order: RunPlaced, set_up: SetUp, limits: Limits
    ) -> tuple[StartedProcess, tuple[Enforced, ...], tuple[int, ...]]:
        """Make the run's container, read it back, and have a shim start it; see ``_started`` for what it raises."""
        run = order.run_id
        if self._containers is None:
            raise ContainerRefused(run, f"workload.image {order.image}: no container engine answers on this node")
        if set_up.cgroup:
            raise ContainerRefused(
                run,
                "device memory can't be limited by cgroup for a container, whose group its engine makes",
                is_unenforced=True,
            )
        if limits.is_strict and not limits.cpus:
            raise LimitsNotSet(run, "no usable CPU is next to its devices")
        work = self._processes.work_path(run)
        user = self._users.take(run) or RunAs(uid=os.getuid(), gid=os.getgid())
        env = environment_of(
            order,
            inherited={},
            path="",
            slice_env=set_up.env,
            enforced=set_up.enforced,
            node_env=self._node_env,
            cpus=limits.cpus,
            checkpoint=checkpoints.variables(order.checkpoint, Path(WORK)),
        )
        if not order.env.get("PATH"):
            del env["PATH"]  # The image's own.
        env |= {RUN_ID_VARIABLE: run, "NVIDIA_VISIBLE_DEVICES": "void"}  # What it sees it has by CDI alone.
        visible = set_up.env.get("CUDA_VISIBLE_DEVICES", "")
        box = Box(
            run_id=run,
            image=order.image,
            command=order.command,
            env=env,
            devices=tuple(filter(None, visible.split(","))),
            limits=limits,
            open_files_max=self._open_files_max or 0,
            user=f"{user.uid}:{user.gid}",
            work=work,
            mps_pipe=set_up.env.get("CUDA_MPS_PIPE_DIRECTORY", ""),
        )
        self._boxed.add(run)
        # Its directory first: asked twice, the run is started once, and the container has what it mounts.
        launch = Launch(
            run_id=run,
            epoch=order.node_epoch,
            argv=start_line(self._containers.engine, self._containers.name_of(run)),
            env={
                **self._containers.env,
                **{name: env[name] for name in (SLICES_VARIABLE, CPUS_VARIABLE)},
                CONTAINER_VARIABLE: self._containers.name_of(run),
            },
            log_bytes_max=self._log_bytes_max,
            owner=user if self._users.is_other else None,  # The client itself is ours.
        )
        await self._processes.prepare(launch)
        try:
            enforced = (*set_up.enforced, *await self._containers.create(box))
        except ContainerRefused:
            await self._processes.withdraw(run)
            raise
        return await self._processes.release(run), enforced, limits.cpus

    def _host_limits_of(self, order: RunPlaced) -> Limits:
        """What the order asks of the host, in this machine's terms."""
        near = Near()
        if order.cpu_bind:
            usable = self._slices.usable
            used = [usable[piece.device_uuid] for piece in order.slices if piece.device_uuid in usable]
            near = near_devices([(device.cpus, device.numa_node) for device in used])
        return Limits(
            memory_mib=order.host_memory_mib,
            cpu_milli=order.cpu_milli,
            processes=self._processes_max,
            cpus=near.cpus,
            nodes=near.nodes,
            is_strict=order.cpu_bind == "strict",
        )

    async def _apply_host_limits(
        self, run: RunId, limits: Limits, within: str
    ) -> tuple[run_records.Groups | None, tuple[Enforced, ...]]:
        """The run's control groups and what was read back of them; ``within`` is one that its slices need anyway."""
        if limits == Limits():
            return None, ()
        apply = functools.partial(self._host.apply, run, limits, within=Path(within) if within else None)
        return await asyncio.get_running_loop().run_in_executor(None, apply)

    async def _born_in(self, launch: Launch, group: Path) -> StartedProcess:
        """Start the run's process in a cgroup: its shim goes in before the gate opens, and out again after."""
        claim = await self._processes.prepare(launch)
        try:
            before = enter(group, claim.pid)
        except OSError:
            await self._processes.withdraw(launch.run_id)
            raise
        try:
            return await self._processes.release(launch.run_id)
        finally:
            # It may serve another run next. Gone by now is fine, and then the group is empty as well.
            with contextlib.suppress(OSError):
                if before is not None:
                    enter(before, claim.pid)

    async def _still(self, run: RunId, *, is_still: bool) -> None:
        if self._containers is not None and run in self._boxed:
            (self._frozen.add if is_still else self._frozen.discard)(run)
            count = await self._containers.stand_still(run, is_still=is_still)
        else:
            count = await self._processes.still(run, is_still=is_still)
        if count is not None:
            self.feed(core.Stilled(run_id=run, is_still=is_still, processes=count, at=self._clock.now()))

    async def _checkpoint(self, order: core.CheckpointRun) -> None:
        self.feed(await self._checkpointed(order, order.plan.grace_s))

    async def _checkpointed(self, order: core.CheckpointRun, within_s: float) -> core.Checkpointed:
        """Tell a run to checkpoint, and wait for its word or its end, for so long at most."""
        run, process = order.run_id, self._processes_of.get(order.run_id)
        work = self._processes.work_path(run)
        loop = asyncio.get_running_loop()
        began_at = self._clock.monotonic()
        before, _ = await loop.run_in_executor(None, checkpoints.look, work)
        report, detail = None, f"it said nothing within {within_s:g} s"
        if process is None or not self._processes.signal_first(process, checkpoints.number_of(order.plan)):
            detail = f"its first process is gone, or doesn't handle {order.plan.signal}"
            within_s = 0
        end = asyncio.ensure_future(self._processes.ended(run))
        try:
            while report is None and self._clock.monotonic() - began_at < within_s * 1_000_000_000:
                is_over = bool((await asyncio.wait([end], timeout=_CHECKPOINT_PAUSE_S))[0])
                stamp, found = await loop.run_in_executor(None, checkpoints.look, work)
                report = None if stamp == before else found
                if is_over:
                    detail = "it ended without a word"
                    break
        finally:
            end.cancel()
        return core.Checkpointed(
            run_id=run,
            order_id=order.order_id,
            is_done=report is not None,
            at=self._clock.now(),
            duration_ms=(self._clock.monotonic() - began_at) // 1_000_000,
            uri=(report.uri if report is not None else None) or order.plan.uri,
            step=None if report is None else report.step,
            bytes=None if report is None else report.bytes,
            detail="" if report is not None else detail,
        )

    async def _stop(self, order: core.StopRun) -> None:
        run, grace_s = order.run_id, order.grace_s
        if grace_s > 0 and self._processes.is_still(run):
            await self._processes.still(run, is_still=False)  # It gets its chance too, with all its processes.
        if order.checkpoint is not None:
            told = await self._checkpointed(order.checkpoint, min(grace_s, order.checkpoint.plan.grace_s))
            self.feed(told)
            grace_s = max(1, grace_s - told.duration_ms // 1000)
        devices = self._mps_devices(run)
        process = self._processes_of.get(run)
        if self._mps is not None and devices and process is not None:
            if grace_s > 0:
                self._processes.signal(run, signal.SIGTERM)
                self._processes.signal(run, signal.SIGCONT)  # A suspended run gets its chance too.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._processes.ended(run), grace_s)
                    return
            for device in sorted(devices):
                failed = await self._mps.terminate(device, {process.pid, *self._watchdog.pids_of(run)})
                if failed is not None:
                    self._tell_failed_domain(failed, but=run)
            grace_s = 0
        if self._containers is not None and run in self._boxed:
            # Its client is asked, and asks it; killed, the client would leave it behind.
            if run in self._frozen:
                await self._containers.stand_still(run, is_still=False)
            if grace_s > 0:
                self._processes.signal(run, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._processes.ended(run), grace_s)
                    return
            self._stopping.add(run)
            await self._containers.kill(run)
            grace_s = _CLIENT_S_MAX
        self._stopping.add(run)
        await self._processes.stop(run, grace_s=grace_s)

    async def _release_all(self) -> None:
        """Take down the runs that ended; together, so that each device is asked once for all of them."""
        pauses = iter(_RELEASE_PAUSE_S)
        pause = 0.0
        orders, self._releasing = self._releasing, []
        while orders:
            try:
                on_device = self._slices.pids_on({piece.device_uuid for order in orders for piece in order.slices})
            except NvmlFailed as err:
                log.warning("devices_unreadable", error=str(err))
            else:
                orders = [order for order in orders if not await self._is_released(order, on_device)]
            if orders:
                pause = next(pauses, pause)
                await asyncio.sleep(pause)

    async def _is_released(self, order: RunPlaced, on_device: Mapping[DeviceUuid, set[int]]) -> bool:
        run = order.run_id
        left = self._left_on_devices(run, set().union(*(on_device[piece.device_uuid] for piece in order.slices)))
        if left:
            log.info("release_waits", run_id=run, pids=sorted(left))
            return False
        try:
            await self._slices.release(run, order.slices)
        except (NvmlFailed, EnforcementFailed) as err:
            log.warning("release_failed", run_id=run, error=str(err))
            return False
        if self._containers is not None and run in self._boxed and not await self._containers.remove(run):
            return False
        self._boxed.discard(run)
        self._frozen.discard(run)
        self._users.give_back(run)
        if self._host.by != NOBODY:
            await asyncio.get_running_loop().run_in_executor(None, self._host.release, run)
        self._processes_of.pop(run, None)
        self._slices_of.pop(run, None)
        self._stopping.discard(run)
        self._on_slices(self._slices_of)
        self.feed(core.SlicesReleased(run_id=run, at=self._clock.now()))
        return True

    async def _remove(self, run: RunId) -> None:
        self._processes_of.pop(run, None)
        if stray := self._slices_of.pop(run, ()):  # Of a run that nobody ordered, so nobody releases it either.
            with contextlib.suppress(NvmlFailed, EnforcementFailed):
                await self._slices.release(run, stray)
        if self._containers is not None and run in self._boxed:
            await self._containers.remove(run)
            self._boxed.discard(run)
        await self._processes.remove(run)

    # Seeing

    def look(self) -> None:
        """Hold the runs to their memory; called a few times a second."""
        for one in self._watchdog.look():
            match one:
                case Offence(run_id=run, used_mib=used_mib, limit_mib=limit_mib, device_uuid=device):
                    detail = f"used {used_mib} MiB of {limit_mib} on {device}"
                    self.feed(core.MustStop(run_id=run, cause=RunCause.QUOTA_EXCEEDED, detail=detail))
                case Escape(run_id=run, pid=pid, device_uuid=device):
                    detail = f"process {pid} uses {device} and is no MPS client"
                    self.feed(core.MustStop(run_id=run, cause=RunCause.ENFORCEMENT_FAILED, detail=detail))
        if self._mps is not None:
            self._go(self._mps.lower())

    def usage(self) -> bytes:
        """Device memory by run at the last look, as a sample's body."""
        return json.dumps({"at": self._clock.now(), "memory_mib": self._watchdog.used_mib}).encode()

    def live_runs(self) -> set[RunId]:
        """Runs that have slices, or are about to."""
        return {*self._slices_of, *self._starting, *self._watchdog.guests}

    def _left_on_devices(self, run: RunId, on_device: set[int]) -> set[int]:
        """Processes of an ended run that its devices still show."""
        process = self._processes_of.get(run)
        if process is None or not on_device:
            return set()
        ours = {process.pid, *self._watchdog.pids_of(run)}
        return {pid for pid in on_device & ours if not _is_another(pid, process)}

    def suspect(self, device: DeviceUuid, xid: int) -> None:
        """The device reported a fault: see whether those who share it still can."""
        if self._mps is not None and self._mps.runs_on(device):
            self._mps.reported(device, xid)
            self._go(self._examine(device))

    async def _examine(self, device: DeviceUuid) -> None:
        assert self._mps is not None
        failed = await self._mps.examine(device)
        if failed is not None:
            self._tell_failed_domain(failed, but=None)

    def _take_end(self, ended: RunEnded) -> None:
        run = ended.run_id
        if self._containers is not None and run in self._boxed and run not in self._stopping:
            self._go(self._take_end_of_container(self._containers, ended))
        else:
            self._take_any_end(ended)

    async def _take_end_of_container(self, containers: Containers, ended: RunEnded) -> None:
        """Only its engine knows whether the kernel killed for want of memory."""
        end = ended.end
        if isinstance(end, run_records.Exited) and end.exit_code and await containers.ran_out_of_memory(ended.run_id):
            ended = msgspec.structs.replace(ended, end=msgspec.structs.replace(end, oom_kills=1))
        self._take_any_end(ended)

    def _take_any_end(self, ended: RunEnded) -> None:
        run, end = ended.run_id, ended.end
        devices = self._mps_devices(run)
        is_bad = isinstance(end, run_records.Lost) or (
            isinstance(end, run_records.Exited) and end.exit_code not in {0, core.OUT_OF_MEMORY_EXIT}
        )
        if self._mps is not None and devices and is_bad and run not in self._stopping:
            # Told at once, and of every device: a neighbour's end may have come first and be examined already.
            killed_at = _killed_at(end, self._clock.now())
            for device in devices if killed_at else ():
                self._mps.killed(device, Kill(at=killed_at, run_id=run))
            self._go(self._end_in_shared_domain(ended, devices))
        else:
            self.feed(self._end(run, end))

    async def _end_in_shared_domain(self, ended: RunEnded, devices: set[DeviceUuid]) -> None:
        """Tell an end that may be a neighbour's doing, and may have been a neighbour's undoing."""
        assert self._mps is not None
        run, end = ended.run_id, self._end(ended.run_id, ended.end)
        for device in sorted(devices):
            failed = await self._mps.examine(device)
            if failed is None:
                continue
            self._tell_failed_domain(failed, but=run)
            if isinstance(end, core.ProcessExited):
                end = msgspec.structs.replace(end, is_victim=failed.offender != run, detail=failed.evidence)
        self.feed(end)

    def _tell_failed_domain(self, failed: DomainFailed, *, but: RunId | None) -> None:
        """All who share the domain have to end: nothing that they do on the device succeeds any more."""
        assert self._mps is not None
        for run in () if failed.is_over else self._mps.runs_on(failed.device_uuid):
            if run != but:
                cause = RunCause.USER_ERROR if run == failed.offender else RunCause.FAULT_DOMAIN_FAILED
                self.feed(core.MustStop(run_id=run, cause=cause, detail=failed.evidence))

    def _mps_devices(self, run: RunId) -> set[DeviceUuid]:
        return {piece.device_uuid for piece in self._slices_of.get(run, ()) if piece.mode is Mode.MPS}

    def mps_devices(self) -> set[DeviceUuid]:
        """Devices that runs share by MPS."""
        return {device for run in self._slices_of for device in self._mps_devices(run)}

    def _end(self, run: RunId, end: run_records.Ended) -> core.ProcessExited | core.StartFailed:
        match end:
            case run_records.Exited():
                return core.ProcessExited(
                    run_id=run,
                    finished_at=end.finished_at_ns,
                    started_at=end.started_at_ns,
                    exit_code=end.exit_code,
                    signal=end.signal,
                    peak_memory_mib=self._peak_mib(run),
                    host_out_of_memory=end.oom_kills > 0,
                    detail=f"processes killed at its limit of host memory: {end.oom_kills}" if end.oom_kills else "",
                )
            case run_records.ExecFailed():
                detail = os.strerror(end.errno)
                if not end.is_confined:
                    return self._start_failed(run, RunCause.ENFORCEMENT_FAILED, f"its control groups: {detail}")
                return core.StartFailed(run_id=run, cause=RunCause.START_FAILED, detail=detail, at=end.finished_at_ns)
            case run_records.NeverStarted():
                return self._start_failed(run, RunCause.START_FAILED, "the order was withdrawn")
            case run_records.Lost(reason=reason):
                return core.ProcessExited(
                    run_id=run,
                    finished_at=self._clock.now(),
                    is_shim_lost=reason in _SHIM_LOST,
                    detail=f"lost: {reason}",
                )
            case _:
                assert_never(end)

    def _found(self, run: RunId, observed: run_records.Observed) -> core.Found:
        match observed:
            case run_records.Running() | run_records.Claimed():
                env = observed.intent.env
                slices = slices_in(env)
                self._slices_of[run] = slices
                self._users.found(run, observed.intent.owner or observed.intent.user)
                if env.get(CONTAINER_VARIABLE):
                    self._boxed.add(run)
                started = None
                if isinstance(observed, run_records.Running):
                    process = StartedProcess(
                        run_id=run,
                        shim_pid=observed.claim.pid,
                        shim_start_ticks=observed.claim.start_ticks,
                        pid=observed.started.pid,
                        start_ticks=observed.started.start_ticks,
                        started_at_ns=observed.started.started_at_ns,
                    )
                    self._processes_of[run] = process
                    self._slices.started(run, slices, process.pid)
                    started = core.ProcessStarted(
                        run_id=run,
                        pid=process.pid,
                        started_at=process.started_at_ns,
                        enforced=enforced_in(env),
                        cpus=cpus_in(env),
                    )
                else:
                    # Claimed, and neither started nor withdrawn in time: as good as running, and never started again.
                    started = core.ProcessStarted(run_id=run, pid=observed.claim.pid, started_at=self._clock.now())
                return core.Found(run_id=run, started=started)
            case run_records.Exited() | run_records.ExecFailed() | run_records.Lost():
                return core.Found(run_id=run, ended=self._end(run, observed))
            case run_records.Absent() | run_records.Prepared() | run_records.NeverStarted():
                return core.Found(run_id=run)
            case _:
                assert_never(observed)

    def _peak_mib(self, run: RunId) -> int | None:
        """By the driver's account, which misses nothing; where it keeps none, by our own looks."""
        process = self._processes_of.get(run)
        slices = self._slices_of.get(run, ())
        peak = None if process is None or not slices else self._slices.peak_mib(slices, process.pid)
        seen = self._watchdog.peak_mib.get(run)
        return max((one for one in (peak, seen) if one is not None), default=None)

    def _start_failed(self, run: RunId, cause: RunCause, detail: str) -> core.StartFailed:
        return core.StartFailed(run_id=run, cause=cause, detail=detail, at=self._clock.now())

    def _go(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None:
            # Going on would leave a run without its observation for ever; a new session looks for itself.
            log.error("instruction_failed", error=f"{type(err).__name__}: {err}", exc_info=err)
            if not self.failure.done():
                self.failure.set_exception(err)


def session_leaders(processes: Processes) -> Callable[[int], RunId | None]:
    """Which run's shim leads a session."""

    def run_of(session: int) -> RunId | None:
        return next((run for run, claim in processes.live().items() if claim.pid == session), None)

    return run_of


def _killed_at(end: run_records.Ended, now: int) -> int:
    """When a signal ended the run, or ``now`` where its guardian is lost, and it with it; 0 where neither was so."""
    match end:
        case run_records.Exited(signal=int(), finished_at_ns=at):
            return at
        case run_records.Lost():
            return now
        case _:
            return 0


def _is_another(pid: int, process: StartedProcess) -> bool:
    """True where the pid lives and belongs to another session than the run's: the number was given away again."""
    try:
        return os.getsid(pid) != process.shim_pid
    except ProcessLookupError:
        return False
