"""One machine's pool as processes of the operating system: started in order, watched, restarted, ended without a trace.

::

    apportion up ─┬─ nats-server            (EmbeddedServer, in this process's care; with --cluster 3, three of them)
                  ├─ apportion.admission    ┐
                  ├─ apportion.placer       │ one process each, restarted when it dies: after 0.1 s, then 0.2 … 5 s
                  ├─ apportion.monitor      │
                  └─ apportion.node_agent   ┘ one per node; its simulated node and its runs are processes of their own

With ``standby`` there are two of each author, and whichever is restarted stands by for the other.

What the services decide is theirs. This module knows their command lines, their files and their signals.
"""

import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from apportion.cli import leftovers, relay
from apportion.cli.declared import Outcome, declare_on
from apportion.cli.exits import Exit
from apportion.cli.injector import Injector
from apportion.cli.key_changes import say_changes
from apportion.cli.leftovers import Kind
from apportion.cli.places import PoolNote, note_path, start_ticks, write_note
from apportion.contracts.events import PolicyUpsertRequested, QueueUpsertRequested
from apportion.contracts.ids import PoolId
from apportion.runtime.access import Role
from apportion.runtime.cluster import Cluster, check_single
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.keys import By, KeyRing
from apportion.runtime.stream import Bus

AUTHORS: Final = ("monitor", "admission", "placer")
"""Services of which one process decides at a time."""
BACKOFF_S_MIN: Final = 0.1
BACKOFF_S_MAX: Final = 5.0
SETTLED_S: Final = 10.0
"""A service that lived this long had started well: its next death is answered at once again."""
READY_S_MAX: Final = 60.0
DRAIN_S_MAX: Final = 10.0
STANDBY: Final = "standby"
KEY_ENV: Final = "APPORTION_BUS_KEY_FILE"
_OF_A_NODE: Final = "node-"
"""Where the second process of each author keeps its files, below the pool's directory, and the end of its name."""
HEARTBEATS: Final = 4
"""Signs of life within the silence that makes a node suspect: one may be lost, and one late."""
_POLL_S: Final = 0.03
_OF_THE_POOL: Final = frozenset({Kind.SERVICE, Kind.SIMULATOR, Kind.SHIM, Kind.RUN})
"""What may be left once the services were told to stop: their own processes only if one was just being started."""

log = structlog.get_logger(__name__)


class ServiceMisconfigured(Exception):
    """A service ended over what it was told; the same again would end the same."""

    exit_code = Exit.USAGE

    def __init__(self, name: str, said: str) -> None:
        self.service = name
        super().__init__(f"{name} can't run with what it was told:\n{said}")


class PoolNotReady(Exception):
    """A service did not become ready in time."""

    exit_code = 1

    def __init__(self, *, missing: Sequence[str], waited_s: float, log_dir: Path, tails: str) -> None:
        self.missing = tuple(missing)
        super().__init__(
            f"not ready after {waited_s:.0f} s: {', '.join(missing)}. Their logs are in {log_dir}; the last lines:\n"
            f"{tails}"
        )


class NodePlan(Struct, frozen=True, kw_only=True):
    """One node: simulated with these devices, or this machine's own."""

    name: str
    devices: int = 0
    profile: str = ""

    @property
    def is_simulated(self) -> bool:
        """True where the devices are made up."""
        return self.devices > 0


class PoolPlan(Struct, frozen=True, kw_only=True):
    """What shall run."""

    pool: str
    data_dir: Path
    bus_port: int
    nodes: tuple[NodePlan, ...]
    queues: tuple[QueueUpsertRequested, ...]
    policies: tuple[PolicyUpsertRequested, ...] = ()
    suspect_ms: int | None = None
    """After this silence a node is suspected; None: the monitor's own default."""
    lease_ms: int | None = None
    """After this silence a node is fenced; None: the monitor's own default."""
    log_level: str | None = None
    """What all services log from; None: what each is told by its environment and file."""
    is_open: bool = False
    """Let everybody on this machine in, without keys."""
    cluster: int = 1
    """On how many nats-servers each message is kept: 1, or 3 of which one may be lost."""
    standby: bool = False
    """Two processes of each author, one of which follows and takes over."""
    faults: bool = False
    """Operators may have things broken on purpose; this process does it."""
    config_file: Path | None = None
    why_simulated: str = "no NVIDIA driver found"
    """Why the nodes are simulated, for the banner."""


class _Health(Struct):
    """``run/<service>.json``."""

    pid: int
    health_port: int


class _Said(Struct):
    """A line of a service's log that says why it ended."""

    error: str = ""


class Service:
    """One service: its process, and the loop that keeps one running."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: dict[str, str],
        data_dir: Path,
        when_restarted: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self._when_restarted = tuple(when_restarted)
        """Arguments more of a process that is started because the last one died."""
        self._has_died = False
        self.restarts = 0
        self.ended_with: int | None = None
        """How the last process that died ended."""
        self.log_path = data_dir / "logs" / f"{name}.log"
        self._env = env
        folder = data_dir / STANDBY if name.endswith(f"-{STANDBY}") else data_dir
        self._run_path = folder / "run" / f"{name.removesuffix(f'-{STANDBY}')}.json"
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._changed: Callable[[], None] = lambda: None
        self.on_disagreement: Callable[[], None] = lambda: None
        """Called when it ended because the bus is not the one that it knew (exit code 9): trying again is no use."""

    @property
    def pid(self) -> int | None:
        """Of the process that runs now; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def health_port(self) -> int | None:
        """Where the running process answers about its health; None until it says so."""
        try:
            health = msgspec.json.decode(self._run_path.read_bytes(), type=_Health)
        except (OSError, msgspec.MsgspecError):
            return None
        return health.health_port if health.pid == self.pid else None

    def start(self, changed: Callable[[], None]) -> None:
        """Keep one process running from now on; ``changed`` is called when it is another."""
        self._changed = changed
        self._has_died = False
        self.ended_with = None
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name=f"keep-{self.name}")

    def hold(self) -> None:
        """Don't restart it when it dies, until ``start``."""
        self._wanted.clear()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM; SIGKILL after ``timeout_s``. It is not restarted."""
        self._wanted.clear()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                log.warning("service_killed", service=self.name, after_s=timeout_s)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _keep(self) -> None:
        failures = 0
        while True:
            await self._wanted.wait()
            began = time.monotonic()
            try:
                process = await self._spawn()
            except OSError as err:
                log.warning("service_not_started", service=self.name, error=str(err))
                await asyncio.sleep(BACKOFF_S_MAX)
                continue
            try:
                self._changed()
            except OSError as err:
                # A full disk keeps nobody's processes from running; the next change is noted anew.
                log.warning("service_not_noted", service=self.name, error=str(err))
            code = await process.wait()
            if not self._wanted.is_set():
                continue
            if code == Exit.INTEGRITY:
                self._wanted.clear()
                self.on_disagreement()
                continue
            self.ended_with = code
            failures = 1 if time.monotonic() - began > SETTLED_S else failures + 1
            pause = min(BACKOFF_S_MIN * 2 ** (failures - 1), BACKOFF_S_MAX)
            log.warning("service_died", service=self.name, exit_code=code, restart_in_s=pause, log=str(self.log_path))
            self.restarts += 1
            self._has_died = True
            await asyncio.sleep(pause)

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self.log_path.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.argv,
                *(self._when_restarted if self._has_died else ()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._env,
                # Its own session: Ctrl-C reaches the supervisor alone, which then stops things in order.
                start_new_session=True,
            )
        return self._process


class Supervisor:
    """A pool on this machine; ``start``, then ``stop`` in any case."""

    def __init__(self, plan: PoolPlan) -> None:
        self.plan = plan
        self.data_dir = plan.data_dir.absolute()
        self.keys = KeyRing(self.data_dir, PoolId(plan.pool))
        self.server: EmbeddedServer | Cluster = a_bus(
            self.data_dir, plan, access=None if plan.is_open else self.keys.access_path
        )
        self.services: dict[str, Service] = {}
        self.ready_s = 0.0
        self.declared: list[Outcome] = []
        """What became of each queue and policy that the plan names."""
        self.leftovers_ended = 0
        """Processes of an earlier pool in this directory that had to be ended at the start."""
        self.stopped_because = ""
        """Why nothing is decided any more; empty while the pool works."""
        self.started_at = time.time_ns()
        self._watch: asyncio.Task[None] | None = None
        self._relay: Service | None = None
        """What agents reach the bus through, where nodes may be cut off from it."""
        self._breaking: asyncio.Task[None] | None = None
        self._owns_directory = False

    async def start(self) -> None:
        """A pool that is ready: bus, streams, services, nodes, queues.

        Raises BusServerError, PoolNotReady, ServiceMisconfigured, or CommandFailed where nobody answers for the queues.
        """
        began = time.monotonic()
        # What jobs are asked to run, and what they write, is nobody else's business.
        for folder in (self.data_dir, self.data_dir / "logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.plan.is_open:
            self.keys.ensure(
                principals(self.plan), by=By(actor="service:supervisor", reason="the pool was started with it")
            )
        if self.plan.cluster == 1:
            check_single(self.data_dir)
        await self.server.start()
        self._owns_directory = True
        self._watch = asyncio.create_task(self.server.supervise(), name="bus-supervisor")
        # Only now do we know that no other supervisor has this directory.
        await asyncio.to_thread(self._end_old_services)
        bus = await self._connect()
        try:
            await bus.provision(replicas=self.server.replicas)
            if self.plan.faults:
                await self._start_relay()
            self.services = {service.name: service for service in self._services()}
            for service in self.services.values():
                service.on_disagreement = functools.partial(self._stop_deciding, service)
            await self._start_services()
            if not self.plan.is_open:
                await say_changes(bus, self.keys)
            await self.wait_ready()
            self.declared = await declare_on(bus, (*self.plan.queues, *self.plan.policies))
        finally:
            await bus.close()
        if self.plan.faults:
            self._breaking = asyncio.create_task(self._break_on_demand(), name="injector")
        self._note()
        self.ready_s = time.monotonic() - began

    async def wait_ready(self, timeout_s: float = READY_S_MAX, *, only: Sequence[str] = ()) -> None:
        """Returns once every service, or each of ``only``, says that it is ready.

        Raises PoolNotReady, or ServiceMisconfigured as soon as one of them ends over its settings.
        """
        began = time.monotonic()
        waiting = [service for name, service in self.services.items() if not only or name in only]
        while True:
            waiting = [service for service in waiting if not await asyncio.to_thread(is_ready, service.health_port)]
            if not waiting:
                return
            for service in waiting:
                if service.ended_with == Exit.USAGE:
                    raise ServiceMisconfigured(service.name, "\n".join(tail(service.log_path, 4)))
            if time.monotonic() - began > timeout_s:
                raise PoolNotReady(
                    missing=[service.name for service in waiting],
                    waited_s=timeout_s,
                    log_dir=self.data_dir / "logs",
                    tails="\n".join(
                        f"{service.name}: {line}" for service in waiting for line in tail(service.log_path, 4)
                    ),
                )
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> bool:
        """End everything of this pool: services drain, then nodes and their runs end, then the bus. Idempotent.

        False where ``start`` found the directory in another supervisor's hands: what lives there is not ours to end.
        """
        if not self._owns_directory:
            return False
        if self._breaking is not None:
            self._breaking.cancel()  # mended first: what stands still doesn't stop
            await asyncio.gather(self._breaking, return_exceptions=True)
            self._breaking = None
        await self.stop_services()
        if self._relay is not None:
            await self._relay.stop(DRAIN_S_MAX)
            self._relay = None
        await asyncio.to_thread(leftovers.end_all, self.data_dir, _OF_THE_POOL)
        await asyncio.to_thread(_remove_groups, self.data_dir)
        await self.server.stop()
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        note_path(self.data_dir).unlink(missing_ok=True)
        self._owns_directory = False
        return True

    async def _start_relay(self) -> None:
        """Raises PoolNotReady where it doesn't say in time where agents find it."""
        began = time.monotonic()
        self._relay = Service(
            "relay",
            relay.command_line(self.data_dir, self.server.url, [node.name for node in self.plan.nodes]),
            env=service_environment(self.plan, self.server.url),
            data_dir=self.data_dir,
        )
        self._relay.start(self._note)
        while relay.ways(self.data_dir, pid=self._relay.pid) is None:
            if time.monotonic() - began > READY_S_MAX:
                tails = "\n".join(f"relay: {line}" for line in tail(self._relay.log_path, 4))
                raise PoolNotReady(missing=["relay"], waited_s=READY_S_MAX, log_dir=self.data_dir / "logs", tails=tails)
            await asyncio.sleep(_POLL_S)

    async def restart_services(self) -> None:
        """Start again what ``stop_services`` ended. Raises PoolNotReady."""
        await self._start_services()
        await self.wait_ready()

    async def _start_services(self) -> None:
        """All of them; standbys once there is somebody to stand by for, or both would claim what nobody has."""
        standbys = [name for name in self.services if name.endswith(f"-{STANDBY}")]
        for name, service in self.services.items():
            if name not in standbys:
                service.start(self._note)
        if standbys:
            await self.wait_ready(only=AUTHORS)
        for name in standbys:
            self.services[name].start(self._note)

    async def stop_services(self) -> None:
        """Drain every service, at most 10 s. All at once: a monitor that outlived the agents would miss them.

        What a service says last and the log didn't get is on the bus, and gets into the log at the next start.
        """
        await asyncio.gather(*(service.stop(DRAIN_S_MAX) for service in self.services.values()))

    def _stop_deciding(self, service: Service) -> None:
        """The bus is not the one that a service knew: whoever decided on would decide from what never was.

        What runs, runs on, with its agent or without. Only a person can say which of the two is right.
        """
        if self.stopped_because:
            return
        said = tail(service.log_path, 1)[-1]
        with contextlib.suppress(msgspec.MsgspecError):
            said = msgspec.json.decode(said, type=_Said).error or said
        self.stopped_because = f"{service.name} ended with {int(Exit.INTEGRITY)}: {said}"
        log.critical("nothing_is_decided", service=service.name, why=said, log=str(service.log_path))
        for name, one in self.services.items():
            if name.removesuffix(f"-{STANDBY}") in AUTHORS:
                one.hold()
                if one.pid is not None:
                    os.kill(one.pid, signal.SIGTERM)
        self._note()

    async def lose_node(self, node: str) -> dict[str, int]:
        """Kill everything of one node at once, as if its power went; it stays off until ``return_node``.

        How many processes of which kind that were.
        """
        self.services[agent_name(node)].hold()
        return await asyncio.to_thread(self._kill_node, node)

    def _kill_node(self, node: str) -> dict[str, int]:
        ended: dict[str, int] = {}
        for _ in range(50):
            found = leftovers.processes_of(self.data_dir, node=node)
            if not found:
                break
            # The agent first: what it would still say of the others' deaths is not what a lost node says.
            found.sort(key=lambda process: process.kind is not Kind.SERVICE)
            leftovers.end(found, number=signal.SIGKILL, wait_s=1.0)
            for process in found:
                ended[process.kind.value] = ended.get(process.kind.value, 0) + 1
        return ended

    def return_node(self, node: str) -> None:
        """Switch a lost node on again."""
        self.services[agent_name(node)].start(self._note)

    @property
    def monitor_url(self) -> str:
        """Where the monitor answers over HTTP; empty until it does."""
        monitor = self.services.get("monitor")
        port = None if monitor is None else monitor.health_port
        return f"http://127.0.0.1:{port}" if port else ""

    async def _break_on_demand(self) -> None:
        bus = await self._connect()
        try:
            await Injector(self).run(bus)
        finally:
            await bus.close()

    async def _connect(self) -> Bus:
        return await Bus.connect(
            self.server.url, pool=PoolId(self.plan.pool), name="supervisor", key=self.key_of(str(Role.ADMIN))
        )

    def key_of(self, principal: str) -> Path | None:
        """Where the principal's seed lies; None where everybody is let in."""
        return None if self.plan.is_open else self.keys.seed_path(principal)

    def _environment_of(self, service: str) -> dict[str, str]:
        """What a service inherits: what all do, and the key of its own principal alone."""
        url = self.server.url
        if self._relay is not None and service.startswith(_OF_A_NODE):
            url = (relay.ways(self.data_dir) or {}).get(service.removeprefix(agent_name("")), url)
        env = service_environment(self.plan, url)
        # Two of an author are one principal: which of them may write is the lease's to say.
        key = self.key_of(service.removeprefix(_OF_A_NODE).removesuffix(f"-{STANDBY}"))
        return env if key is None else {**env, KEY_ENV: str(key)}

    def _services(self) -> list[Service]:
        restarted = ("--standby",) if self.plan.standby else ()
        return [
            Service(
                name,
                argv,
                env=self._environment_of(name),
                data_dir=self.data_dir,
                when_restarted=restarted if name in AUTHORS else (),
            )
            for name, argv in command_lines(self.plan, python=sys.executable)
        ]

    def _end_old_services(self) -> None:
        """Services of a supervisor that was killed still run; two of each would fence one another."""
        old = [process for process in leftovers.processes_of(self.data_dir) if process.kind is Kind.SERVICE]
        for number in (signal.SIGTERM, signal.SIGKILL):
            if old:
                log.warning("old_services_ended", pids=[process.pid for process in old], signal=number.name)
                self.leftovers_ended += len(old)
                old = leftovers.end(old, number=number, wait_s=DRAIN_S_MAX)

    def _note(self) -> None:
        from importlib.metadata import version

        pid = os.getpid()
        pids = {name: service.pid for name, service in self.services.items() if service.pid is not None}
        pids |= self.server.pids
        if self._relay is not None and self._relay.pid is not None:
            pids["relay"] = self._relay.pid
        write_note(
            PoolNote(
                pool=self.plan.pool,
                bus_url=self.server.url,
                monitor_url=self.monitor_url,
                supervisor_pid=pid,
                supervisor_start_ticks=start_ticks(pid) or 0,
                pids=pids,
                started_at=self.started_at,
                data_dir=str(self.data_dir),
                version=version("apportion-cli"),
                nodes=[node.name for node in self.plan.nodes],
                simulated=all(node.is_simulated for node in self.plan.nodes),
                key_file=str(self.key_of(str(Role.OPERATOR)) or ""),
                stopped_because=self.stopped_because,
            )
        )


def a_bus(data_dir: Path, plan: PoolPlan, *, access: Path | None) -> EmbeddedServer | Cluster:
    """The pool's bus: one server, or several that are one."""
    if plan.cluster == 1:
        return EmbeddedServer(data_dir, port=plan.bus_port, access=access)
    return Cluster(data_dir, size=plan.cluster, port=plan.bus_port, access=access)


def principals(plan: PoolPlan) -> list[tuple[Role, str]]:
    """Who needs a key: each service, the operator, a gateway, and each tenant that a queue names."""
    tenants = sorted({tenant for queue in plan.queues for tenant in queue.tenants})
    return [
        (Role.ADMISSION, ""),
        (Role.PLACER, ""),
        (Role.MONITOR, ""),
        (Role.ADMIN, ""),
        (Role.OPERATOR, ""),
        (Role.GATEWAY, ""),
        *((Role.AGENT, node.name) for node in plan.nodes),
        *((Role.TENANT, tenant) for tenant in tenants),
    ]


def agent_name(node: str) -> str:
    """The name of a node's agent among the services."""
    return f"{_OF_A_NODE}agent-{node}"


def command_lines(plan: PoolPlan, *, python: str) -> list[tuple[str, list[str]]]:
    """Each service's name and argument vector."""
    config = [] if plan.config_file is None else ["--config", str(plan.config_file.absolute())]
    monitor = [python, "-m", "apportion.monitor", *config]
    if plan.suspect_ms is not None:
        monitor += ["--suspect-ms", str(plan.suspect_ms)]
    if plan.lease_ms is not None:
        monitor += ["--lease-ms", str(plan.lease_ms)]
    lines = [
        ("monitor", monitor),
        ("admission", [python, "-m", "apportion.admission", *config]),
        ("placer", [python, "-m", "apportion.placer", *config]),
    ]
    if plan.standby:
        # Files of its own, the log's second copy among them: what a paused process holds open, no other can write.
        apart = ["--standby", "--data-dir", str(plan.data_dir.absolute() / STANDBY)]
        lines += [(f"{name}-{STANDBY}", [*argv, *apart]) for name, argv in lines]
    for node in plan.nodes:
        agent = [python, "-m", "apportion.node_agent", *config, "--node-id", node.name]
        if node.is_simulated:
            agent += ["--simulated-devices", str(node.devices), "--simulated-profile", node.profile]
        if plan.suspect_ms is not None:
            agent += ["--heartbeat-ms", str(max(50, plan.suspect_ms // HEARTBEATS))]
        lines.append((agent_name(node.name), agent))
    return lines


def service_environment(plan: PoolPlan, bus_url: str) -> dict[str, str]:
    """What every service inherits: ours, with this pool's places in it."""
    return {
        # A key that was meant for the command is no service's.
        **{name: value for name, value in os.environ.items() if name != KEY_ENV},
        "APPORTION_POOL": plan.pool,
        "APPORTION_BUS_URL": bus_url,
        "APPORTION_DATA_DIR": str(plan.data_dir.absolute()),
        **({} if plan.log_level is None else {"APPORTION_LOG_LEVEL": plan.log_level}),
        **({"APPORTION_FAULTS": "true"} if plan.faults else {}),
        "PYTHONUNBUFFERED": "1",
    }


def is_ready(health_port: int | None) -> bool:
    """True where a service answers on that port that it is ready."""
    import http.client

    if not health_port:
        return False
    connection = http.client.HTTPConnection("127.0.0.1", health_port, timeout=2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log, or that there is none."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:] or ["(it said nothing)"]
    except OSError:
        return ["(no log)"]


def local_nodes(*, simulate: int, devices: int, profile: str) -> tuple[NodePlan, ...]:
    """This machine's own node where an NVIDIA driver answers, else ``simulate`` simulated ones."""
    import socket

    from apportion.node_agent.nvml import has_driver

    if has_driver():
        name = "".join(c if c.isalnum() else "-" for c in socket.gethostname().partition(".")[0].lower()).strip("-")
        return (NodePlan(name=name[:63] or "node-1"),)
    return tuple(NodePlan(name=f"node-{number}", devices=devices, profile=profile) for number in range(1, simulate + 1))


def _remove_groups(data_dir: Path) -> None:
    """Remove the control groups of runs that were killed with their shims: no agent comes to do it."""
    from apportion.node_agent.host_limits import no_limits

    for state_dir in (data_dir.absolute() / "nodes").glob("*"):
        no_limits(state_dir).recover(())
