"""Wiring of one node's agent: settings, devices, processes, bus, reactor; run until told to stop.

On SIGTERM it stops reading, flushes and leaves; its runs, its simulated node and its MPS daemons go on, and the next
agent finds them again.
"""

import asyncio
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
from msgspec import Meta

from apportion.contracts import samples, subjects
from apportion.contracts.causes import DeviceHealth, IsolationFinding, IsolationTest, Mode
from apportion.contracts.events import Device, IsolationTestStarted, IsolationVerdict, Slice
from apportion.contracts.fields import LABEL
from apportion.contracts.ids import JobId, NodeId, PoolId, RunId, agent_author, job_of_run
from apportion.contracts.units import BYTES_PER_MIB, MILLI_PER_DEVICE
from apportion.node_agent import core
from apportion.node_agent.capabilities import MEMORY_LIMITS, MPS_PARTITIONS
from apportion.node_agent.containers import ENGINE, READY, Containers
from apportion.node_agent.containers import probe as probe_engine
from apportion.node_agent.dcgm import JobMapping
from apportion.node_agent.enforce.cgroup_memory import CgroupMemory
from apportion.node_agent.enforce.exclusive import Exclusive
from apportion.node_agent.enforce.mig import Mig
from apportion.node_agent.enforce.mps import Mps
from apportion.node_agent.enforce.slices import Enforcer, Slices
from apportion.node_agent.enforce.timeslice import TimeSlice
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.health_watch import HealthWatch
from apportion.node_agent.host_limits import HOST_LIMITS, no_limits, open_limits
from apportion.node_agent.isolation.ground import Tools, tools_env
from apportion.node_agent.isolation.tester import HARDWARE_KERNELS, Effort, not_tried, try_isolation
from apportion.node_agent.machine import inventory_of, with_lost
from apportion.node_agent.nvml import Devices, NoDriver, NvmlFailed, open_devices
from apportion.node_agent.processes import Processes, RootInUse
from apportion.node_agent.run_logs import Retention
from apportion.node_agent.run_users import USER, RunUsers, UserInvalid, closed_above, users_of
from apportion.node_agent.shell import Shell, session_leaders
from apportion.node_agent.simgpu.client import SOCKET_VARIABLE
from apportion.node_agent.simnode import SimulatedNode
from apportion.node_agent.systemd_scope import enter_scope
from apportion.runtime import telemetry
from apportion.runtime.clock import Clock, SystemClock
from apportion.runtime.disturbed import Disturbances
from apportion.runtime.drain import run_service
from apportion.runtime.health import HealthServer
from apportion.runtime.reactor import Reactor, SnapshotFile
from apportion.runtime.settings import Common, Name, SettingsInvalid, from_command_line
from apportion.runtime.stream import Bus

SERVICE: Final = "node-agent"
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_RECLAIM_PAUSE_S: Final = 2.0
_TRIM_PAUSE_S: Final = 60.0
LABEL_VALUE_MAX: Final = 1024

log = structlog.get_logger(__name__)


class AgentSettings(Common, frozen=True, kw_only=True):
    """What a node's agent can be told, beside what all services can."""

    node_id: Name
    """Which node of the pool this is."""
    labels: str = ""
    """What jobs may require of this node's place, as name=value,…: `site=oslo,rack=r7`."""
    simulated_devices: Annotated[int, Meta(ge=0, le=64)] = 0
    """How many devices to simulate; 0: this machine's own, by its driver."""
    simulated_profile: Name = "h200"
    """Which board is simulated."""
    simulated_driver: Annotated[str, Meta(pattern="^(580|590|610|615)$")] = "580"
    """Which driver branch is simulated: later ones have more ways to enforce."""
    simulated_mig_devices: Annotated[int, Meta(ge=0, le=64)] = 0
    """So many of the simulated devices are in MIG mode."""
    heartbeat_ms: Annotated[int, Meta(ge=50, le=60_000)] = 1000
    """How often the agent says that it is alive."""
    inventory_s: Annotated[int, Meta(ge=1, le=86_400)] = 30
    """How often devices, driver and probes are looked at again."""
    mps_sm_partitions: Annotated[str, Meta(pattern="^([1-9][0-9]{0,3}(,[1-9][0-9]{0,3}){0,15})?$")] = ""
    """Split the SMs of shared devices into such parts for good, in thousandths, as in 500,250,250; empty: don't."""
    reset_failed_devices: bool = False
    """Reset a device that needs it once nobody uses it; else an operator does, and the agent sees it."""
    run_log_mib: Annotated[int, Meta(ge=1, le=4096)] = 16
    """How much of a run's output is kept, stdout and stderr together: the newest."""
    kept_logs_mib: Annotated[int, Meta(ge=0, le=1_048_576)] = 1024
    """How much output of ended runs this node keeps; the oldest run's goes first."""
    kept_logs_h: Annotated[int, Meta(ge=0, le=87_600)] = 168
    """For how long output of ended runs is kept."""
    host_limits: bool = True
    """Hold runs to the host memory and CPU that their jobs ask for, by control groups where this machine has them."""
    run_open_files_max: Annotated[int, Meta(ge=0, le=1_048_576)] = 0
    """How many files each process of a run may have open; 0: as many as this agent may. Costs a fork for each run."""
    run_processes_max: Annotated[int, Meta(ge=0, le=4_194_304)] = 0
    """How many processes and threads a run may have at once, by control groups; 0: as many as the machine takes."""
    run_user: Annotated[str, Meta(pattern=USER)] = ""
    """Runs are started as this user (a name, uid or uid:gid), or as one each of a range such as 20000-20999."""
    container_engine: Annotated[str, Meta(pattern="^(auto|docker|podman|none)$")] = "auto"
    """What starts jobs that name an image: the first of docker and podman that answers, one of them, or none."""
    dcgm_job_mapping_dir: str = ""
    """Where to write which job has which device, for dcgm-exporter; empty: nowhere."""
    watchdog_ms: Annotated[int, Meta(ge=50, le=60_000)] = 500
    """How often device memory is looked at; a run is ended after two looks over its limit."""


class AgentRefused(Exception):
    """The agent can't be started here, and says what to do."""

    exit_code = 2


def labels_of(text: str) -> dict[str, str]:
    """The labels that the setting says. Raises SettingsInvalid."""
    labels = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not re.match(LABEL, name) or not value or len(value) > LABEL_VALUE_MAX:
            raise SettingsInvalid(
                where="labels", key="labels", expected="name=value,… such as site=oslo,rack=r7", found=repr(part)
            )
        labels[name] = value
    return labels


class Agent:
    """One node's agent, from start to exit."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._labels = labels_of(settings.labels)
        self._node = NodeId(settings.node_id)
        self._pool = PoolId(settings.pool)
        self._state_dir = settings.data_dir.absolute() / "nodes" / settings.node_id
        self._itself = Disturbances(settings.node_id) if settings.faults else None
        self._clock: Clock = self._itself or SystemClock()
        self._simulated: SimulatedNode | None = None
        self._host = no_limits(self._state_dir)
        self._containers: Containers | None = None
        self._users = self._run_users(settings.run_user)
        self._limits_memory = False
        """Device memory can be limited by cgroup here."""

    async def run(self, stop: asyncio.Event) -> int:
        """Work until ``stop``, then leave everything running and in order."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            meter = telemetry.start(SERVICE, settings, node=self._node)
            stack.callback(meter.shutdown)
            processes = await self._enter_processes(stack)
            # Before the first shim: it lives where the agent does.
            self._host = (
                open_limits(self._state_dir, enter_scope=functools.partial(enter_scope, env=os.environ))
                if settings.host_limits
                else no_limits(self._state_dir)
            )
            devices = await self._enter_devices(stack)
            path = self._path()
            watchdog = Watchdog(devices, session_of=session_leaders(processes))
            mig = Mig(devices, watchdog, directory=self._state_dir / "mig")
            memory = CgroupMemory.found(devices, self._node, state_dir=self._state_dir)
            if memory is not None:
                stack.callback(memory.close)
            self._limits_memory = memory is not None
            self._find_engine()
            inventory = self._inventory_now(devices, mig)
            mps = Mps(
                devices,
                watchdog,
                directory=self._state_dir / "mps",
                path=path,
                env={"HOME": "/", **self._node_env()},
                partitions=self._partitions(inventory),
                memory=memory,
            )
            exclusive = Exclusive(devices, end_idle_mps=mps.end_idle, directory=self._state_dir / "exclusive")
            enforcers: dict[Mode, Enforcer] = {
                Mode.EXCLUSIVE: exclusive,
                Mode.MIG: mig,
                Mode.MPS: mps,
                Mode.TIMESLICE: TimeSlice(devices, watchdog, memory=memory),
            }
            slices = Slices(devices, enforcers, usable={device.uuid: device for device in inventory.devices})
            shell = Shell(
                processes=processes,
                slices=slices,
                watchdog=watchdog,
                mps=mps,
                path=path,
                node_env=self._node_env(),
                clock=self._clock,
                on_slices=self._mapping(inventory),
                log_bytes_max=settings.run_log_mib * BYTES_PER_MIB,
                host=self._host,
                processes_max=settings.run_processes_max,
                open_files_max=settings.run_open_files_max,
                containers=self._containers,
                users=self._users,
            )
            stack.push_async_callback(shell.close)
            tools = Tools(
                devices=devices, slices=slices, watchdog=watchdog, mps=mps, env=tools_env(path, self._node_env())
            )
            shell.try_isolation = functools.partial(self._try_isolation, tools, slices)
            for device in inventory.devices:
                devices.keep_accounts(device.uuid)

            author = agent_author(self._node)
            bus = await Bus.connect(
                settings.bus_url,
                pool=self._pool,
                name=f"apportion-{author}",
                disturbances=self._itself,
                **settings.link(),
            )
            stack.push_async_callback(bus.close)
            await bus.provision(replicas=settings.bus_replicas)
            reactor = Reactor(
                core=core.AgentCore(self._node),
                author=author,
                bus=bus,
                filters=subjects.facts_for_agent(self._pool, self._node, author),
                perform=shell.perform,
                snapshots=SnapshotFile(self._state_dir / "snapshot.msgpack"),
                clock=self._clock,
                meter=meter,
            )
            shell.feed = reactor.feed
            endpoint = HealthServer(
                f"{SERVICE}-{self._node}",
                settings.data_dir,
                port=settings.health_port,
                is_ready=lambda: self._is_ready(reactor),
                metrics=meter.prometheus,
            )
            endpoint.start()
            stack.callback(endpoint.stop)
            health = HealthWatch(
                devices,
                [device.uuid for device in inventory.devices],
                clock=self._clock,
                feed=reactor.feed,
                suspect=shell.suspect,
                env={"HOME": "/", "PATH": path, **self._node_env()},
                file=self._state_dir / "health.json",
                may_reset=settings.reset_failed_devices,
            )
            if self._simulated is not None:
                self._follow_simulated(
                    self._simulated, reactor, mps=mps, devices=devices, inventory=inventory, health=health
                )
            reactor.feed(core.InventoryChanged(inventory=inventory))
            health.begin()
            adopted = await shell.adopt(reactor.session)
            # What an earlier agent made for a run that doesn't live goes before anything new is made.
            live = {one.run_id for one in adopted.found if one.started is not None}
            self._host.recover(live)
            if self._containers is not None:
                await self._containers.recover(live)
            left = await mig.reconcile(live)
            await exclusive.reconcile(live)
            if memory is not None:
                memory.reconcile(live)
            await mps.recover(shell.mps_devices())
            reactor.feed(adopted)
            background = {
                "inventory": self._follow_inventory(reactor, devices, mig, slices, inventory),
                "reclaim": self._reclaim(mig, shell) if left else None,
                "logs": self._trim_logs(processes),
            }
            await self._serve_logs(bus, processes)
            await self._work(
                stop,
                reactor=reactor,
                shell=shell,
                bus=bus,
                health=health,
                background={name: work for name, work in background.items() if work is not None},
            )
        return 0

    async def _work(
        self,
        stop: asyncio.Event,
        *,
        reactor: "Reactor[core.State]",
        shell: Shell,
        bus: Bus,
        health: HealthWatch,
        background: Mapping[str, Coroutine[object, object, None]],
    ) -> None:
        """Everything that runs side by side; the first to fail ends all. ``background`` may end by itself."""
        loop_task = asyncio.create_task(reactor.run(stop), name="reactor")
        helpers = {
            asyncio.create_task(shell.run(), name="ends"),
            asyncio.create_task(self._beat(bus, reactor), name="heartbeat"),
            asyncio.create_task(self._look(bus, shell, health), name="watchdog"),
            asyncio.create_task(health.hear(), name="events"),
            asyncio.ensure_future(shell.failure),
        }
        beside = [asyncio.create_task(work, name=name) for name, work in background.items()]
        try:
            await asyncio.wait({loop_task, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            for helper in helpers:
                if helper.done():
                    helper.result()
            await loop_task
        finally:
            for task in (loop_task, *helpers, *beside):
                task.cancel()
            await asyncio.gather(loop_task, *helpers, *beside, return_exceptions=True)

    async def _serve_logs(self, bus: Bus, processes: Processes) -> None:
        """Answer whoever asks what runs of this node wrote."""

        async def answer(body: bytes) -> bytes:
            return await asyncio.get_running_loop().run_in_executor(None, processes.desk.answer, body)

        async def answer_tenant(subject: str, body: bytes) -> bytes:
            tenant = subjects.tenant_of_logs(subject)
            return await asyncio.get_running_loop().run_in_executor(None, processes.desk.answer, body, tenant)

        await bus.serve(subjects.node_query(self._pool, self._node, "logs"), answer)
        await bus.serve_all(subjects.logs_of_tenant(self._pool, self._node, "*"), answer_tenant)

    async def _trim_logs(self, processes: Processes) -> None:
        """Output that grew too old goes, also where nothing new comes."""
        while True:
            await asyncio.sleep(_TRIM_PAUSE_S)
            await asyncio.get_running_loop().run_in_executor(
                None, processes.kept.trim, self._clock.now() / 1_000_000_000
            )

    def _mapping(self, inventory: core.Inventory) -> "Callable[[Mapping[RunId, tuple[Slice, ...]]], None] | None":
        """Writes dcgm-exporter's files from the runs' slices; None where nobody asked for them."""
        if not self._settings.dcgm_job_mapping_dir:
            return None
        mapping = JobMapping(Path(self._settings.dcgm_job_mapping_dir))
        index = {device.uuid: device.index for device in inventory.devices}

        def write(slices: Mapping[RunId, tuple[Slice, ...]]) -> None:
            jobs: dict[int, set[JobId]] = {number: set() for number in index.values()}
            for run, pieces in slices.items():
                for piece in pieces:
                    if piece.device_uuid in index:
                        jobs[index[piece.device_uuid]].add(job_of_run(run))
            mapping.write(jobs)

        write({})
        return write

    def _partitions(self, inventory: core.Inventory) -> tuple[int, ...]:
        text = self._settings.mps_sm_partitions
        if not text:
            return ()
        parts = tuple(map(int, text.split(",")))
        if sum(parts) > MILLI_PER_DEVICE:
            raise AgentRefused(
                f"mps_sm_partitions: {text} is more than {MILLI_PER_DEVICE}: give the parts of one device"
            )
        if inventory.capabilities[MPS_PARTITIONS] != "yes":
            raise AgentRefused(
                f"mps_sm_partitions: driver {inventory.driver_version} has no static partitions (CUDA 13.1 and later "
                f"have): leave the setting out, or put a newer driver in"
            )
        return parts

    def _inventory_now(self, devices: Devices, mig: Mig) -> core.Inventory:
        found = inventory_of(
            devices,
            path=self._path(),
            is_simulated=self._simulated is not None,
            env=self._node_env(),
            foreign=mig.foreign,
            labels=self._labels,
        )
        limits = " ".join(filter(None, (self._host.by, *self._host.can, self._host.place)))
        engine = None if self._containers is None else self._containers.engine
        said = "none" if engine is None else f"{engine.name} {engine.version}"
        if self._users.is_other:
            # A server of MPS serves one user, and what looks after it has the agent's.
            found = msgspec.structs.replace(found, devices=tuple(map(_without_mps, found.devices)))
        capabilities = {**found.capabilities, HOST_LIMITS: limits, ENGINE: said}
        if engine is not None:
            found = msgspec.structs.replace(found, labels={**found.labels, READY: "yes"})
        if self._limits_memory:
            # Asked of a group that we made: our own may be the root, which has no limits.
            capabilities[MEMORY_LIMITS] = "ok"
        return msgspec.structs.replace(found, capabilities=capabilities)

    def _run_users(self, setting: str) -> RunUsers:
        try:
            users = users_of(setting)
        except UserInvalid as err:
            raise AgentRefused(f"run_user: {err}") from err
        if users.is_other and os.geteuid() != 0:
            raise AgentRefused("run_user: only root starts runs as others: start the agent as root, or leave it out")
        self._state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        if users.is_other and (closed := closed_above(self._state_dir)) is not None:
            raise AgentRefused(
                f"run_user: other users can't go through {closed} to their directories: chmod o+x it, or choose "
                f"another data_dir"
            )
        return users

    def _find_engine(self) -> None:
        """An engine that comes or goes later is found by the next agent: runs of this one depend on it."""
        wanted = self._settings.container_engine
        engine = probe_engine(wanted, path=SYSTEM_PATH, env=os.environ)
        if engine is None and wanted not in {"auto", "none"}:
            raise AgentRefused(f"container_engine: {wanted} doesn't answer here: start it, or leave the setting out")
        self._containers = None if engine is None else Containers(engine, self._node, env=os.environ)

    async def _follow_inventory(
        self,
        reactor: "Reactor[core.State]",
        devices: Devices,
        mig: Mig,
        slices: Slices,
        inventory: core.Inventory,
    ) -> None:
        """Look again now and then: an operator may have switched MIG mode, or put a new driver in."""
        before = inventory
        while True:
            await asyncio.sleep(self._settings.inventory_s)
            try:
                now = await asyncio.get_running_loop().run_in_executor(None, self._inventory_now, devices, mig)
            except NvmlFailed as err:
                log.warning("inventory_unreadable", error=str(err))  # Away for a moment; told elsewhere.
                continue
            now = with_lost(now, before)
            if now != before:
                log.info("inventory_changed", devices=len(now.devices), driver=now.driver_version)
                before = now
                slices.use({device.uuid: device for device in now.devices})
                reactor.feed(core.InventoryChanged(inventory=now))

    async def _try_isolation(
        self, tools: Tools, slices: Slices, order: IsolationTestStarted
    ) -> tuple[IsolationVerdict, ...]:
        device = slices.usable.get(order.device_uuid)
        if device is None:
            now = self._clock.now()
            return (
                IsolationVerdict(
                    test_id=order.test_id,
                    node_id=self._node,
                    device_uuid=order.device_uuid,
                    mode=order.mode,
                    test=IsolationTest.MEMORY,
                    verdict=IsolationFinding.INCONCLUSIVE,
                    checks=(not_tried("the node has no such device any more"),),
                    started_at=now,
                    finished_at=now,
                ),
            )
        effort = Effort() if self._simulated is not None else Effort(kernels=HARDWARE_KERNELS)
        return await try_isolation(
            tools, device, order.mode, node=self._node, test_id=order.test_id, clock=self._clock, effort=effort
        )

    async def _reclaim(self, mig: Mig, shell: Shell) -> None:
        """MIG instances of dead runs that something still held when the agent started."""
        while await mig.reconcile(shell.live_runs()):  # noqa: ASYNC110  nothing tells when a driver lets go
            await asyncio.sleep(_RECLAIM_PAUSE_S)

    async def _enter_processes(self, stack: AsyncExitStack) -> Processes:
        try:
            retention = Retention(
                bytes_max=self._settings.kept_logs_mib * BYTES_PER_MIB, seconds_max=self._settings.kept_logs_h * 3600
            )
            return await stack.enter_async_context(
                Processes(self._state_dir, retention=retention, is_passed_through=self._users.is_other)
            )
        except RootInUse as err:
            raise AgentRefused(
                f"another agent of {self._node} is at work in {self._state_dir}: stop it, or choose another --node-id"
            ) from err

    async def _enter_devices(self, stack: AsyncExitStack) -> Devices:
        settings = self._settings
        if settings.simulated_devices:
            self._simulated = SimulatedNode(
                self._node,
                state_dir=self._state_dir,
                devices=settings.simulated_devices,
                profile=settings.simulated_profile,
                driver=settings.simulated_driver,
                mig_devices=settings.simulated_mig_devices,
            )
            await self._simulated.open()
            stack.push_async_callback(self._simulated.close)
        try:
            return stack.enter_context(open_devices(None if self._simulated is None else self._simulated.socket_path))
        except NoDriver as err:
            raise AgentRefused(
                f"no NVIDIA driver answers here ({err}): install one, or simulate devices with --simulated-devices 4"
            ) from err

    def _follow_simulated(
        self,
        simulated: SimulatedNode,
        reactor: "Reactor[core.State]",
        *,
        mps: Mps,
        devices: Devices,
        inventory: core.Inventory,
        health: HealthWatch,
    ) -> None:
        """A simulated node that dies takes its devices along, as a driver that is unloaded does."""

        def tell(health: DeviceHealth, code: str) -> None:
            for device in inventory.devices:
                reactor.feed(core.DeviceHealthSeen(device_uuid=device.uuid, health=health, code=code))

        def gone() -> None:
            mps.forget_servers()
            tell(DeviceHealth.FAILED, "driver-gone")

        def back() -> None:
            for device in inventory.devices:
                devices.keep_accounts(device.uuid)
            tell(DeviceHealth.HEALTHY, "driver-back")
            health.forget()

        simulated.on_gone = gone
        simulated.on_back = back

    def _path(self) -> str:
        """Where a run finds programs: a simulated node's tools, this installation's own, then the system's."""
        tools = [] if self._simulated is None else [str(self._simulated.tools)]
        return ":".join([*tools, str(Path(sys.executable).parent), SYSTEM_PATH])

    def _node_env(self) -> dict[str, str]:
        return {} if self._simulated is None else {SOCKET_VARIABLE: str(self._simulated.socket_path)}

    def _is_ready(self, reactor: "Reactor[core.State]") -> tuple[bool, dict[str, object]]:
        state = reactor.state
        registered = state.registered
        is_ready = registered is not None and registered.session == reactor.session and registered.epoch == state.epoch
        return is_ready, {
            "node": self._node,
            "session": reactor.session,
            "epoch": state.epoch,
            "facts_seq": state.facts_seq,
            "runs": len(state.runs),
        }

    async def _beat(self, bus: Bus, reactor: "Reactor[core.State]") -> None:
        subject = subjects.sample(self._pool, self._node, "heartbeat")
        while True:
            body = {
                "session": reactor.session,
                "epoch": reactor.state.epoch,
                "facts_seq": reactor.state.facts_seq,
                "at": self._clock.now(),
            }
            # Not while the connection is down: the client would keep them, and tell of a life that is long past.
            if bus.client.is_connected:
                bus.send_soon(subject, json.dumps(body).encode())
            await asyncio.sleep(self._settings.heartbeat_ms / 1000)

    async def _look(
        self,
        bus: Bus,
        shell: Shell,
        health: HealthWatch,
    ) -> None:
        subject = subjects.sample(self._pool, self._node, "usage")
        of_devices = subjects.sample(self._pool, self._node, samples.DEVICES)
        told_at = 0
        while True:
            await asyncio.sleep(self._settings.watchdog_ms / 1000)
            shell.look()
            if self._clock.monotonic() - told_at >= 1_000_000_000:
                told_at = self._clock.monotonic()
                bus.send_soon(subject, shell.usage())
                bus.send_soon(of_devices, health.samples())
                health.look()


def _without_mps(device: Device) -> Device:
    return msgspec.structs.replace(device, modes=tuple(mode for mode in device.modes if mode is not Mode.MPS))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``apportion-node-agent``."""
    try:
        settings = from_command_line(AgentSettings, SERVICE, sys.argv[1:] if argv is None else argv).settings
        agent = Agent(settings)
    except SettingsInvalid as err:
        print(err, file=sys.stderr)
        return err.exit_code
    os.umask(0o077)
    return run_service(agent.run)


if __name__ == "__main__":
    sys.exit(main())
