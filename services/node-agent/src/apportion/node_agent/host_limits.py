"""What a run may take of its host: memory, CPU time and processes, by control groups; chosen by probe, read back.

Only a run that has limits gets a group, of its own in each hierarchy. The agent makes and reads it before anybody is
asked to start the run; the shim joins it for the moment in which it starts the workload, tells whether the kernel
killed for want of memory, and removes it at the end (spawner.py). What a killed shim leaves, the agent removes at the
release, and what a killed agent leaves, the next one at its start.

Version 1 has a hierarchy for each controller. In version 2 there is one, and a group with processes of its own can't
hand controllers on: the agent steps aside into a group of its own first, which takes a delegated place: its unit's
(``Delegate=yes``), or a scope that systemd makes for it (systemd_scope.py). Sources: Linux,
Documentation/admin-guide/cgroup-v1/ and cgroup-v2.rst.
"""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from apportion.contracts.events import Enforced
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.contracts.units import BYTES_PER_MIB
from apportion.node_agent.run_records import Group, Groups, directory_name, run_of_directory

MEMORY: Final = "host_memory"
"""MiB."""
CPU: Final = "host_cpu"
"""Thousandths of a CPU's time."""
CPUS: Final = "host_cpus"
"""How many it is kept to."""
PROCESSES: Final = "host_processes"

HOST_LIMITS: Final = "host_limits"
"""The probe's name in a node's registration: by what runs are held to their limits, and to which."""
ON_THE_HOST: Final = DeviceUuid("")
NOBODY: Final = "none"
V1: Final = "cgroup-v1"
V2: Final = "cgroup-v2"
SCOPE: Final = "systemd-scope"
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")

_PERIOD_US: Final = 100_000
_CPU_MILLI_MIN: Final = 10
"""The kernel takes no quota below 1 ms."""
_CPUSET: Final = ("cpuset.cpus", "cpuset.mems")
_KILL_S_MAX: Final = 5.0
_MAKE_ATTEMPTS_MAX: Final = 5
_PAUSE_S: Final = 0.01


class LimitsNotSet(Exception):
    """The kernel refused a limit, or holds another than was asked for."""

    def __init__(self, run_id: RunId, detail: str) -> None:
        super().__init__(f"{run_id}: {detail}")


class Limits(Struct, frozen=True, kw_only=True):
    """What one run may take; 0 is no limit."""

    memory_mib: int = 0
    cpu_milli: int = 0
    processes: int = 0
    cpus: tuple[int, ...] = ()
    """It is kept to these; none: any."""
    nodes: tuple[int, ...] = ()
    """Its memory comes from these NUMA nodes; none: any."""
    is_strict: bool = False
    """It isn't started where it can't be kept to CPUs next to its devices."""


class Near(Struct, frozen=True, kw_only=True):
    """CPUs and NUMA nodes next to some devices, as far as this process may use them."""

    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


def near_devices(devices: Sequence[tuple[tuple[int, ...], int]], usable: Collection[int] | None = None) -> Near:
    """What is next to all of the devices, each given by its near CPUs and its NUMA node; nothing where one is unknown.

    >>> near_devices([((0, 1, 2), 0), ((1, 2, 3), 1)], usable=(1, 2, 9))
    Near(cpus=(1, 2), nodes=(0, 1))
    >>> near_devices([((0, 1), 0), ((), 0)], usable=(0, 1))
    Near(cpus=(), nodes=())
    """
    if not devices or not all(cpus for cpus, _ in devices):
        return Near()
    here = os.sched_getaffinity(0) if usable is None else set(usable)
    # Devices on two nodes share no CPUs, and then those of both are near to one of them.
    common = set.intersection(*(set(cpus) for cpus, _ in devices)) & here
    any_near = set[int]().union(*(cpus for cpus, _ in devices)) & here
    cpus = tuple(sorted(common or any_near))
    return Near(cpus=cpus, nodes=tuple(sorted({node for _, node in devices if node >= 0})) if cpus else ())


class Files(Protocol):
    """The control files, as far as they are used; the kernel's in earnest."""

    def read(self, path: Path) -> str:
        """The file's text."""

    def write(self, path: Path, text: str) -> None:
        """Write at once; the kernel refuses with an OSError."""

    def make(self, path: Path) -> None:
        """Make a group, and those above it; one that is there is fine."""

    def remove(self, path: Path) -> None:
        """Remove an empty group."""

    def groups(self, path: Path) -> list[str]:
        """The names of the groups in a group; none where it isn't there."""


class KernelFiles:
    """The kernel's own."""

    def read(self, path: Path) -> str:
        """See Files."""
        return path.read_text()

    def write(self, path: Path, text: str) -> None:
        """See Files."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def make(self, path: Path) -> None:
        """See Files."""
        for _ in range(_MAKE_ATTEMPTS_MAX):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError:
                continue  # The last run before this one took the place along, right now.
            return
        path.mkdir(parents=True, exist_ok=True)

    def remove(self, path: Path) -> None:
        """See Files."""
        path.rmdir()

    def groups(self, path: Path) -> list[str]:
        """See Files."""
        try:
            return [entry.name for entry in os.scandir(path) if entry.is_dir()]
        except FileNotFoundError:
            return []


class Knob(Struct, frozen=True, kw_only=True):
    """One promise as one hierarchy keeps it: files to write in order, the last of which is read back."""

    what: str
    applied: int
    writes: tuple[tuple[str, str, bool], ...]
    """Name, text, and whether it must be there: swap has no file where the kernel doesn't count it."""
    read: tuple[str, int, int]
    """Name, which field of it, and by what to divide after multiplying: see ``_observed``."""


class Hierarchy(Struct, frozen=True, kw_only=True):
    """A place for groups, and which promises can be kept there."""

    home: Path
    """The agent's own group, or what was its own before it stepped aside: the runs' groups are made in it."""
    back: Path
    """Where what starts the runs lives, and goes back to."""
    keeps: tuple[str, ...]


class HostLimits:
    """Limits by control groups of one version, or none at all."""

    def __init__(
        self, by: str, hierarchies: tuple[Hierarchy, ...], *, directory: Path, files: Files, place: str = ""
    ) -> None:
        """``directory`` is the node's own: names its groups, and keeps where they were made."""
        self.by = by
        self.place = place
        """``systemd-scope`` where systemd was asked for the place; empty where the agent had it."""
        self._hierarchies = hierarchies
        self._files = files
        self._journal = directory / "host-cgroups"
        self._name = _name_of(directory)

    @property
    def can(self) -> tuple[str, ...]:
        """Which promises can be kept here."""
        return tuple(sorted(what for hierarchy in self._hierarchies for what in hierarchy.keeps))

    def recover(self, live: Collection[RunId]) -> int:
        """Remove the groups of runs that don't live, also of an agent that lived elsewhere; how many there were.

        Processes that are still in one are killed: no run of ours is theirs any more.
        """
        count = 0
        before = self._journal.read_text().splitlines() if self._journal.exists() else []
        homes = list(dict.fromkeys([str(one.home) for one in self._hierarchies] + before))
        for home in homes:
            place = Path(home) / self._name
            for name in self._files.groups(place):
                run = run_of_directory(name)
                if run is None or run not in live:
                    count += 1
                    self._end(place / name)
            self._remove_quietly(place)
        return count

    def apply(
        self, run: RunId, limits: Limits, *, within: Path | None = None
    ) -> tuple[Groups | None, tuple[Enforced, ...]]:
        """Make the run's groups and read them back; the groups that its shim shall join, and what was found.

        ``within`` is a group of the unified hierarchy that the run is started in anyway, and that somebody else
        removes: a process can't be in two, so the limits are set on that one. What nobody can hold here is said so
        (``by`` is ``none``). Raises LimitsNotSet, and then leaves nothing.
        """
        asked = {MEMORY: limits.memory_mib, CPU: limits.cpu_milli, PROCESSES: limits.processes}
        asked[CPUS] = len(limits.cpus)
        asked = {what: amount for what, amount in asked.items() if amount}
        if limits.is_strict and not (limits.cpus and CPUS in self.can):
            why = (
                f"runs can't be kept to CPUs here ({self.by})"
                if limits.cpus
                else "no usable CPU is next to its devices"
            )
            raise LimitsNotSet(run, why)
        if not asked:
            return None, ()
        found: list[Enforced] = []
        groups: list[Group] = []
        try:
            for hierarchy in self._hierarchies:
                here = {what: asked.pop(what) for what in hierarchy.keeps if what in asked}
                if here:
                    group = hierarchy.home / self._name / directory_name(run)
                    if within is not None and self.by == V2:
                        group = within
                        self._files.write(group.parent / "cgroup.subtree_control", _handed_on(hierarchy))
                    else:
                        groups.append(Group(path=str(group), back=str(hierarchy.back)))
                        self._make(hierarchy, group)
                    if CPUS in here:
                        found.append(self._bind(run, hierarchy, group, limits))
                        del here[CPUS]
                    found += [self._set(run, group, what, amount) for what, amount in here.items()]
        except (OSError, ValueError, LimitsNotSet) as err:
            for each in groups:
                self._remove_quietly(Path(each.path))
            if isinstance(err, LimitsNotSet):
                raise
            raise LimitsNotSet(run, f"{type(err).__name__}: {err}") from err
        found += [
            Enforced(device_uuid=ON_THE_HOST, what=what, asked=amount, applied=0, observed=0, by=NOBODY)
            for what, amount in asked.items()
        ]
        oom = next((f"{group.path}/{self._oom_file}" for group in groups if self._counts_kills(group)), "")
        return (Groups(joins=tuple(groups), oom_file=oom) if groups else None), tuple(found)

    def release(self, run: RunId) -> None:
        """Remove what is left of the run's groups, if anything: its shim does, unless it was killed."""
        for hierarchy in self._hierarchies:
            place = hierarchy.home / self._name
            name = directory_name(run)
            if name in self._files.groups(place):
                self._end(place / name)
                self._remove_quietly(place)

    # One group

    @property
    def _oom_file(self) -> str:
        return "memory.events" if self.by == V2 else "memory.oom_control"

    def _counts_kills(self, group: Group) -> bool:
        try:
            return "oom_kill" in self._files.read(Path(group.path) / self._oom_file)
        except OSError:
            return False

    def _make(self, hierarchy: Hierarchy, group: Path) -> None:
        known = self._journal.read_text().splitlines() if self._journal.exists() else []
        if str(hierarchy.home) not in known:
            # Before the first group: an agent that dies right after has said where to look.
            self._journal.write_text("".join(f"{home}\n" for home in (*known, hierarchy.home)))
        self._files.make(group)
        if self.by == V2:
            self._files.write(group.parent / "cgroup.subtree_control", _handed_on(hierarchy))

    def _set(self, run: RunId, group: Path, what: str, amount: int) -> Enforced:
        knob = _knob(self.by, what, amount)
        for name, text, is_needed in knob.writes:
            try:
                self._files.write(group / name, text)
            except FileNotFoundError:
                if is_needed:
                    raise
        observed = _observed(self._files.read(group / knob.read[0]), knob)
        if observed != knob.applied:
            raise LimitsNotSet(run, f"{what}: asked for {knob.applied}, and {group / knob.read[0]} says {observed}")
        return Enforced(
            device_uuid=ON_THE_HOST, what=what, asked=amount, applied=knob.applied, observed=observed, by=self.by
        )

    def _bind(self, run: RunId, hierarchy: Hierarchy, group: Path, limits: Limits) -> Enforced:
        """Keep the run to CPUs, and its memory to their nodes as far as this process may use them."""
        if self.by == V1 and group.parent != hierarchy.home:
            # Version 1 hands nothing down: a group without any can hold no process.
            for name in _CPUSET:
                self._files.write(group.parent / name, self._files.read(hierarchy.home / name).strip())
        prefix = "cpuset.mems.effective" if self.by == V2 else "cpuset.mems"
        there = set(_listed(self._files.read(hierarchy.home / prefix)))
        nodes = sorted(there & set(limits.nodes)) or sorted(there)
        for name, wanted in (("cpuset.mems", nodes), ("cpuset.cpus", sorted(limits.cpus))):
            self._files.write(group / name, ",".join(map(str, wanted)))
            observed = _listed(self._files.read(group / name))
            if observed != wanted:
                raise LimitsNotSet(run, f"{name}: asked for {wanted}, and {group / name} says {observed}")
        count = len(limits.cpus)
        return Enforced(
            device_uuid=ON_THE_HOST, what=CPUS, asked=count, applied=count, observed=len(observed), by=self.by
        )

    def _end(self, group: Path) -> None:
        """Kill what is in the group, and remove it."""
        deadline = time.monotonic() + _KILL_S_MAX
        while time.monotonic() < deadline:
            try:
                pids = [int(pid) for pid in self._files.read(group / "cgroup.procs").split()]
            except OSError:
                return
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
            if not pids and self._remove_quietly(group):
                return
            time.sleep(_PAUSE_S)

    def _remove_quietly(self, group: Path) -> bool:
        try:
            self._files.remove(group)
        except OSError:
            return False
        return True


def no_limits(directory: Path) -> HostLimits:
    """Nothing is held to anything, and each run that asked is told so."""
    return HostLimits(NOBODY, (), directory=directory, files=KernelFiles())


def open_limits(
    directory: Path,
    *,
    files: Files | None = None,
    root: Path = CGROUPS,
    own: str | None = None,
    enter_scope: Callable[[str], str | None] = lambda _: None,
) -> HostLimits:
    """What this machine can hold runs to, by trying; where it can do nothing, that is what each run is told.

    ``own`` is what /proc/self/cgroup says, for tests. ``enter_scope`` is asked for a place of our own, by the beginning
    of its name, where ours is shared: it moves this process, and answers what /proc/self/cgroup says then.
    """
    port = files or KernelFiles()
    try:
        text = OWN.read_text() if own is None else own
    except OSError:
        text = ""
    paths = dict(_own_groups(text))
    if (found := _try_v2(port, root, paths.get("", "/"))) is not None:
        return HostLimits(V2, (found,), directory=directory, files=port)
    is_unified = "" in paths and not any(paths.keys() - {""})
    if is_unified and (moved := enter_scope(_name_of(directory))) is not None:
        found = _try_v2(port, root, dict(_own_groups(moved)).get("", "/"))
        if found is not None:
            return HostLimits(V2, (found,), directory=directory, files=port, place=SCOPE)
    v1 = tuple(
        Hierarchy(home=home, back=home, keeps=(what,))
        for controller, what in (("memory", MEMORY), ("cpu", CPU), ("pids", PROCESSES), ("cpuset", CPUS))
        if controller in paths and _takes_groups(port, home := _inside(root / controller, paths[controller]))
    )
    return HostLimits(V1 if v1 else NOBODY, v1, directory=directory, files=port)


def _name_of(directory: Path) -> str:
    return "apportion-" + hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]


def _own_groups(text: str) -> Iterable[tuple[str, str]]:
    r"""The agent's own group by controller; in the unified hierarchy the controller is "".

    >>> dict(_own_groups("4:memory:/a/b\n2:cpu,cpuacct:/\n0::/c\n"))
    {'memory': '/a/b', 'cpu': '/', 'cpuacct': '/', '': '/c'}
    """
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _inside(mount: Path, path: str) -> Path:
    """A group's directory. In a container that sees its own group as the root, /proc may still name the host's path."""
    group = mount / path.lstrip("/")
    return group if group.is_dir() else mount


def _takes_groups(files: Files, home: Path) -> bool:
    probe = home / f"apportion-probe-{os.getpid()}"
    try:
        files.make(probe)
        files.remove(probe)
    except OSError:
        return False
    return True


def _try_v2(files: Files, root: Path, path: str) -> Hierarchy | None:
    """The unified hierarchy, made ready to hand its controllers on; None where it isn't ours to use."""
    home = root / path.lstrip("/") if path.strip("/") else root
    if home.name == "apportion-agent":
        home = home.parent  # An earlier agent of this place stepped aside.
    try:
        there = files.read(home / "cgroup.controllers").split()
    except OSError:
        return None
    keeps = {"memory": MEMORY, "cpu": CPU, "pids": PROCESSES, "cpuset": CPUS}
    usable = [controller for controller in keeps if controller in there]
    if not usable:
        return None
    wanted = " ".join(f"+{controller}" for controller in usable)
    back = home
    try:
        if home != root:
            # Only ourselves: where others live as well, the place isn't delegated to us, and the kernel refuses below.
            back = home / "apportion-agent"
            files.make(back)
            files.write(back / "cgroup.procs", str(os.getpid()))
        files.write(home / "cgroup.subtree_control", wanted)
    except OSError:
        _step_back(files, home, back)
        return None
    return Hierarchy(home=home, back=back, keeps=tuple(keeps[controller] for controller in usable))


def _step_back(files: Files, home: Path, aside: Path) -> None:
    if aside == home:
        return
    try:
        files.write(home / "cgroup.procs", str(os.getpid()))
        files.remove(aside)
    except OSError:
        return  # Others of ours live there, and go on.


def _handed_on(hierarchy: Hierarchy) -> str:
    names = {MEMORY: "memory", CPU: "cpu", PROCESSES: "pids", CPUS: "cpuset"}
    return " ".join(f"+{names[what]}" for what in hierarchy.keeps)


def _knob(by: str, what: str, amount: int) -> Knob:
    is_v2 = by == V2
    writes: tuple[tuple[str, str, bool], ...]
    if what == MEMORY:
        text = str(amount * BYTES_PER_MIB)
        writes = (
            (("memory.max", text, True), ("memory.swap.max", "0", False), ("memory.oom.group", "1", False))
            if is_v2
            else (("memory.limit_in_bytes", text, True), ("memory.memsw.limit_in_bytes", text, False))
        )
        return Knob(what=what, applied=amount, writes=writes, read=(writes[0][0], 1, BYTES_PER_MIB))
    if what == CPU:
        applied = max(_CPU_MILLI_MIN, amount)
        quota = str(applied * _PERIOD_US // 1000)
        writes = (
            (("cpu.max", f"{quota} {_PERIOD_US}", True),)
            if is_v2
            else (("cpu.cfs_period_us", str(_PERIOD_US), True), ("cpu.cfs_quota_us", quota, True))
        )
        return Knob(what=what, applied=applied, writes=writes, read=(writes[-1][0], 1000, _PERIOD_US))
    return Knob(what=what, applied=amount, writes=(("pids.max", str(amount), True),), read=("pids.max", 1, 1))


def _listed(text: str) -> list[int]:
    """The numbers in a kernel's list.

    >>> _listed("0-2,7")
    [0, 1, 2, 7]
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _observed(text: str, knob: Knob) -> int:
    """The amount that a control file holds, in the promise's unit; -1 where it holds none."""
    _, times, by = knob.read
    first = text.split(maxsplit=1)[0]
    return int(first) * times // by if first.lstrip("-").isdecimal() else -1
