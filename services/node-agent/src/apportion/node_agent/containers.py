"""Runs in containers: docker's and podman's command lines, what is read back of them, and the end of what is left.

A container is made first, with all its limits, and read back; only then is a shim asked to start it, attached, so that
its output, its signals and its exit code are those of any other run. Devices are named by CDI. A container's processes
are the engine's children and not the shim's: it is removed before its run's slices are free, whatever became of the
client. Sources: docker's and podman's reference of ``create``, ``start``, ``inspect``, ``rm``; the CDI specification.
"""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct

from apportion.contracts.events import Enforced
from apportion.contracts.ids import NodeId, RunId
from apportion.contracts.units import BYTES_PER_MIB
from apportion.node_agent import tools
from apportion.node_agent.host_limits import CPU, CPUS, MEMORY, ON_THE_HOST, PROCESSES, Limits

ENGINES: Final = ("docker", "podman")
ENGINE: Final = "container_engine"
"""The probe's name in a node's registration: such as ``docker 28.2.2``, or ``none``."""
READY: Final = "containers"
"""The label, with the value ``yes``, of nodes that can start containers: jobs with an image require it."""
CONTAINER_VARIABLE: Final = "APPORTION_CONTAINER"
WORK: Final = "/work"
CDI_KIND: Final = "nvidia.com/gpu"

_NODE: Final = "io.apportion.node"
_RUN: Final = "io.apportion.run"
_CREATE_S_MAX: Final = 600.0
"""An image may have to be fetched."""
_ANSWER_S_MAX: Final = 30.0
_PROBE_S_MAX: Final = 5.0
_CLIENT_VARIABLES: Final = ("DOCKER_HOST", "DOCKER_CONFIG", "CONTAINER_HOST", "HOME", "PATH", "XDG_RUNTIME_DIR")
"""What the client is told of the agent's environment: nothing of a job's ever reaches it."""

log = structlog.get_logger(__name__)


class Engine(Struct, frozen=True, kw_only=True):
    """A container engine that answers."""

    name: str
    path: str
    version: str


class Box(Struct, frozen=True, kw_only=True):
    """One container to be made."""

    run_id: RunId
    image: str
    command: tuple[str, ...] = ()
    """In place of the image's own; none: the image's."""
    env: Mapping[str, str] = {}
    devices: tuple[str, ...] = ()
    """By UUID, as CDI names them."""
    limits: Limits = Limits()
    open_files_max: int = 0
    user: str = ""
    """``uid:gid``; empty: the image's."""
    work: Path
    mps_pipe: str = ""


class ContainerRefused(Exception):
    """The engine made no such container, or another than was asked for; nothing of it is left."""

    def __init__(self, run_id: RunId, detail: str, *, is_unenforced: bool = False) -> None:
        super().__init__(f"{run_id}: {detail}")
        self.is_unenforced = is_unenforced


def name_of(node: NodeId, run: RunId) -> str:
    """The container's name, the same for an agent that comes later.

    >>> name_of(NodeId("n"), RunId("acme/a/0/1"))
    'apportion-f1e03cc6cea2c1f4'
    """
    return "apportion-" + hashlib.sha256(f"{node} {run}".encode()).hexdigest()[:16]


def create_line(engine: Engine, node: NodeId, box: Box) -> tuple[str, ...]:
    """The command that makes the container. Its environment comes by standard input, where no other process sees it."""
    limits = box.limits
    line = [
        *(engine.path, "create", "--name", name_of(node, box.run_id)),
        *("--label", f"{_NODE}={node}", "--label", f"{_RUN}={box.run_id}"),
        # What it writes goes through the shim, which bounds it; nobody keeps it twice.
        *("--log-driver", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--ulimit", "core=0:0", "--workdir", WORK, "--mount", _bind(str(box.work), WORK)),
    ]
    if box.user:
        line += ["--user", box.user]
    if box.open_files_max:
        line += ["--ulimit", f"nofile={box.open_files_max}:{box.open_files_max}"]
    if limits.processes:
        line += ["--pids-limit", str(limits.processes)]
    if limits.memory_mib:
        line += ["--memory", f"{limits.memory_mib}m", "--memory-swap", f"{limits.memory_mib}m"]
    if limits.cpu_milli:
        line += ["--cpus", f"{limits.cpu_milli // 1000}.{limits.cpu_milli % 1000:03}"]
    if limits.cpus:
        line += ["--cpuset-cpus", _listed(limits.cpus)]
    if limits.nodes:
        line += ["--cpuset-mems", _listed(limits.nodes)]
    if box.mps_pipe:
        # Clients and server of MPS share memory beside the sockets in the pipe directory.
        line += ["--ipc", "host", "--mount", _bind(box.mps_pipe, box.mps_pipe)]
    for device in box.devices:
        line += ["--device", f"{CDI_KIND}={device}"]
    line += ["--env-file", "/dev/stdin"]
    for name, value in sorted(box.env.items()):
        if "\n" in value:
            line += ["--env", f"{name}={value}"]  # A file of variables has one a line.
    if box.command:
        line += ["--entrypoint", box.command[0]]
    return (*line, box.image, *box.command[1:])


def env_file(env: Mapping[str, str]) -> str:
    """What ``create_line`` expects on its standard input."""
    return "".join(f"{name}={value}\n" for name, value in sorted(env.items()) if "\n" not in value)


def start_line(engine: Engine, name: str) -> tuple[str, ...]:
    """What a shim runs in the workload's place: it ends with the container, and as it does."""
    return (engine.path, "start", "--attach", "--sig-proxy=true", name)


def read_back(engine: Engine, box: Box, inspected: str) -> tuple[Enforced, ...]:
    """What the engine says of the container's limits; raises ContainerRefused where that isn't what was asked."""
    limits = box.limits
    asked = {MEMORY: limits.memory_mib, CPU: limits.cpu_milli, PROCESSES: limits.processes, CPUS: len(limits.cpus)}
    try:
        config = json.loads(inspected)
        seen = {
            MEMORY: int(config.get("Memory") or 0) // BYTES_PER_MIB,
            CPU: int(config.get("NanoCpus") or 0) // 1_000_000,
            PROCESSES: int(config.get("PidsLimit") or 0),
            CPUS: len(limits.cpus) if str(config.get("CpusetCpus") or "") == _listed(limits.cpus) else 0,
        }
    except (ValueError, TypeError, AttributeError) as err:
        raise ContainerRefused(box.run_id, f"{engine.name} inspect: {err}", is_unenforced=True) from err
    found = tuple(
        Enforced(device_uuid=ON_THE_HOST, what=what, asked=amount, applied=amount, observed=seen[what], by=engine.name)
        for what, amount in asked.items()
        if amount
    )
    for one in found:
        if one.observed != one.asked:
            raise ContainerRefused(
                box.run_id, f"{one.what}: asked {one.asked}, {engine.name} has {one.observed}", is_unenforced=True
            )
    return found


def probe(wanted: str, *, path: str, env: Mapping[str, str]) -> Engine | None:
    """The engine that answers: the one that is wanted, or with ``auto`` the first of those known. Blocks a moment."""
    for name in ENGINES if wanted == "auto" else (wanted,) if wanted in ENGINES else ():
        found = shutil.which(name, path=path)
        if found is None:
            continue
        # Docker's client alone starts nothing: its server is asked. Podman has none.
        part = "{{.Server.Version}}" if name == "docker" else "{{.Client.Version}}"
        try:
            done = tools.ask([found, "version", "--format", part], env=client_env(env), s_max=_PROBE_S_MAX)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and (version := done.stdout.strip()):
            return Engine(name=name, path=found, version=version[:64])
    return None


def client_env(env: Mapping[str, str]) -> dict[str, str]:
    """What an engine's client finds in its environment."""
    return {name: env[name] for name in _CLIENT_VARIABLES if name in env}


class Containers:
    """The containers of one node's runs."""

    def __init__(self, engine: Engine, node: NodeId, *, env: Mapping[str, str]) -> None:
        self.engine = engine
        self._node = node
        self.env = client_env(env)

    def name_of(self, run: RunId) -> str:
        """The name of the run's container."""
        return name_of(self._node, run)

    async def create(self, box: Box) -> tuple[Enforced, ...]:
        """Make the run's container and read it back. Raises ContainerRefused, and then there is none."""
        name = self.name_of(box.run_id)
        try:
            line = create_line(self.engine, self._node, box)
            await self._say(line[1:], text=env_file(box.env), s_max=_CREATE_S_MAX)
            return read_back(self.engine, box, await self._say(("inspect", "--format", "{{json .HostConfig}}", name)))
        except (_SaidNo, ContainerRefused) as err:
            await self.remove(box.run_id)
            if isinstance(err, ContainerRefused):
                raise
            raise ContainerRefused(box.run_id, str(err)) from err

    async def stand_still(self, run: RunId, *, is_still: bool) -> int | None:
        """Freeze the container or thaw it; how many processes it has. None where it is gone."""
        name = self.name_of(run)
        try:
            await self._say(("pause" if is_still else "unpause", name))
        except _SaidNo as err:
            log.warning("container_not_stilled", run_id=run, error=str(err))
        try:
            state = json.loads(await self._say(("inspect", "--format", "{{json .State}}", name)))
            if bool(state.get("Paused")) is not is_still or not state.get("Running", state.get("Paused")):
                return None
            return max(1, len((await self._say(("top", name, "-eo", "pid"))).splitlines()) - 1)
        except (_SaidNo, ValueError):
            return None

    async def kill(self, run: RunId) -> None:
        """SIGKILL to what is in it; its client ends with it."""
        try:
            await self._say(("kill", "--signal", "KILL", self.name_of(run)))
        except _SaidNo as err:
            log.info("container_not_killed", run_id=run, error=str(err))  # Ended by itself, most likely.

    async def ran_out_of_memory(self, run: RunId) -> bool:
        """Whether the kernel killed a process in it at its limit of memory."""
        try:
            said = await self._say(("inspect", "--format", "{{json .State.OOMKilled}}", self.name_of(run)))
        except _SaidNo:
            return False
        return said.strip() == "true"

    async def remove(self, run: RunId) -> bool:
        """Have nothing left of the run's container, running or not; False where the engine doesn't say so."""
        return await self._remove(self.name_of(run))

    async def recover(self, live: Collection[RunId]) -> int:
        """Remove the containers of runs that don't live; how many there were. To be called at the start."""
        template = '{{.Names}} {{.Label "' + _RUN + '"}}'
        try:
            said = await self._say(("ps", "--all", "--filter", f"label={_NODE}={self._node}", "--format", template))
        except _SaidNo as err:
            log.warning("containers_unknown", error=str(err))
            return 0
        dead = [name for name, _, run in (line.partition(" ") for line in said.splitlines()) if RunId(run) not in live]
        return sum([await self._remove(name) for name in dead])

    async def _remove(self, name: str) -> bool:
        try:
            await self._say(("rm", "--force", "--volumes", name))
        except _SaidNo as err:
            if "no such container" in str(err).lower():
                return True
            log.warning("container_not_removed", name=name, error=str(err))
            return False
        return True

    async def _say(self, words: Sequence[str], *, text: str = "", s_max: float = _ANSWER_S_MAX) -> str:
        what = f"{self.engine.name} {words[0]}"
        try:
            done = await tools.ask_soon([self.engine.path, *words], env=self.env, s_max=s_max, text=text)
        except (OSError, ValueError) as err:
            raise _SaidNo(f"{what}: {err}") from err
        except subprocess.TimeoutExpired as err:
            raise _SaidNo(f"{what}: nothing in {s_max:g} s") from err
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise _SaidNo(f"{what}: {lines[-1][:512]}")
        return done.stdout


class _SaidNo(Exception):
    """The engine refused, or didn't answer in time."""


def _bind(source: str, target: str) -> str:
    if set(source) & set(',"\n'):
        raise _SaidNo(f"a directory named {source!r} can't be given to a container")
    return f"type=bind,source={source},target={target}"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
