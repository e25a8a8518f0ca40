"""What runs may take of their host: version 1 for real where this machine lets us, version 2 on its files' rules."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from apportion.contracts.events import Enforced
from apportion.contracts.ids import DeviceUuid, RunId
from apportion.node_agent.host_limits import (
    CPU,
    CPUS,
    MEMORY,
    NOBODY,
    SCOPE,
    V1,
    V2,
    HostLimits,
    Limits,
    LimitsNotSet,
    no_limits,
    open_limits,
)
from apportion.node_agent.processes import Launch, Processes, StartFailed
from apportion.node_agent.run_records import ExecFailed, Exited, Lost, directory_name
from apportion.node_agent.systemd_scope import enter_scope

RUN = RunId("acme/train/0/1")
MIB = 1024 * 1024


def found(what: str, asked: int, observed: int, by: str, applied: int | None = None) -> Enforced:
    applied = asked if applied is None else applied
    return Enforced(device_uuid=DeviceUuid(""), what=what, asked=asked, applied=applied, observed=observed, by=by)


class FakeV2:
    """Control files of a unified hierarchy, as far as its rules matter here."""

    CONTROLLERS = "cpuset cpu memory pids"

    def __init__(self, *, neighbours: tuple[str, ...] = (), rounds_down_to: int = 1) -> None:
        self.rounds_down_to = rounds_down_to
        self.of: dict[Path, dict[str, str]] = {}
        self.procs: dict[Path, set[str]] = {}
        self.handed: dict[Path, str] = {}
        self.make(Path("/cg/slice/unit"))
        self.procs[Path("/cg/slice/unit")] = {str(os.getpid()), *neighbours}
        self.handed[Path("/cg/slice")] = self.CONTROLLERS

    def read(self, path: Path) -> str:
        group, name = path.parent, path.name
        if group not in self.procs:
            raise FileNotFoundError(path)
        if name == "cgroup.procs":
            return "\n".join(sorted(self.procs[group]))
        if name == "cgroup.controllers":
            return self.handed.get(group.parent, "")
        if name == "cpuset.mems.effective":
            return "0-1\n"
        return self.of[group][name]

    def write(self, path: Path, text: str) -> None:
        group, name = path.parent, path.name
        if group not in self.procs:
            raise FileNotFoundError(path)
        if name == "cgroup.procs":
            for pids in self.procs.values():
                pids.discard(text)
            self.procs[group].add(text)
        elif name == "cgroup.subtree_control":
            if self.procs[group]:
                raise OSError(16, "no internal processes")
            self.handed[group] = text.replace("+", "")
        elif name.partition(".")[0] not in self.handed.get(group.parent, "").split() or name == "memory.swap.max":
            raise FileNotFoundError(path)
        else:
            if name == "memory.max":
                text = str(int(text) // self.rounds_down_to * self.rounds_down_to)
            self.of[group][name] = text

    def make(self, path: Path) -> None:
        for each in (*reversed(path.parents), path):
            self.procs.setdefault(each, set())
            self.of.setdefault(each, {"memory.events": "oom 0\noom_kill 0\n"})

    def remove(self, path: Path) -> None:
        if self.procs[path] or self.groups(path):
            raise OSError(16, "busy")
        del self.procs[path], self.of[path]

    def groups(self, path: Path) -> list[str]:
        return [each.name for each in self.procs if each.parent == path and each != path]


def on_v2(directory: Path, files: FakeV2) -> HostLimits:
    return open_limits(directory, files=files, root=Path("/cg"), own="0::/slice/unit\n")


def test_version_2_is_used_where_the_place_is_the_agents_own(tmp_path: Path) -> None:
    """It steps aside, since a group with processes of its own can't hand controllers on."""
    files = FakeV2()
    limits = on_v2(tmp_path, files)
    assert (limits.by, limits.can) == (V2, ("host_cpu", "host_cpus", "host_memory", "host_processes"))
    assert files.procs[Path("/cg/slice/unit/apportion-agent")] == {str(os.getpid())}
    groups, enforced = limits.apply(RUN, Limits(memory_mib=512, cpu_milli=1500, processes=64))
    assert groups is not None
    (group,) = groups.joins
    assert group.back == "/cg/slice/unit/apportion-agent"
    assert groups.oom_file == f"{group.path}/memory.events"
    assert enforced == (
        found(MEMORY, 512, 512, V2),
        found(CPU, 1500, 1500, V2),
        found("host_processes", 64, 64, V2),
    )
    written = files.of[Path(group.path)]
    assert written["memory.max"] == str(512 * MIB)
    assert (written["memory.oom.group"], written["cpu.max"], written["pids.max"]) == ("1", "150000 100000", "64")
    limits.release(RUN)
    assert Path(group.path) not in files.procs
    # The next agent of this place finds it the way it was left.
    assert on_v2(tmp_path, files).by == V2


def test_a_place_that_others_live_in_is_left_as_it_was(tmp_path: Path) -> None:
    """Not delegated to us: a login session, a container's only group. Runs are told that nothing holds them."""
    files = FakeV2(neighbours=("1",))
    limits = on_v2(tmp_path, files)
    assert files.procs[Path("/cg/slice/unit")] == {"1", str(os.getpid())}
    assert Path("/cg/slice/unit/apportion-agent") not in files.procs
    assert limits.apply(RUN, Limits(memory_mib=512)) == (None, (found(MEMORY, 512, 0, NOBODY, applied=0),))


def test_where_the_place_is_shared_systemd_is_asked_for_one(tmp_path: Path) -> None:
    """In a login session too runs are held to what they asked; the session's group is left as it was."""
    files = FakeV2(neighbours=("1",))
    scope = Path("/cg/system.slice/apportion.scope")
    asked = []

    def enter(name: str) -> str:
        asked.append(name)
        files.make(scope)
        files.handed[scope.parent] = files.CONTROLLERS
        files.write(scope / "cgroup.procs", str(os.getpid()))
        return "0::/system.slice/apportion.scope\n"

    limits = open_limits(tmp_path, files=files, root=Path("/cg"), own="0::/slice/unit\n", enter_scope=enter)
    assert (limits.by, limits.place, len(asked)) == (V2, SCOPE, 1)
    assert files.procs[Path("/cg/slice/unit")] == {"1"}
    groups, enforced = limits.apply(RUN, Limits(memory_mib=64))
    assert groups is not None
    assert groups.joins[0].path.startswith(f"{scope}/apportion-")
    assert enforced == (found(MEMORY, 64, 64, V2),)
    # Who has a place of its own asks nobody.
    assert (
        open_limits(tmp_path, files=FakeV2(), root=Path("/cg"), own="0::/slice/unit\n", enter_scope=enter).place == ""
    )
    assert len(asked) == 1


BUSCTL = """#!/bin/sh
printf '%s\\n' "$@" > "{directory}/said"
[ -e "{directory}/refuses" ] && {{ echo 'Call failed: Access denied' >&2; exit 1; }}
unit=$(sed -n '/^ssa(sv)a(sa(sv))$/{{n;p}}' "{directory}/said")
echo "0::/system.slice/$unit" > "{directory}/cgroup"
"""


def test_systemd_is_asked_by_the_line_that_was_recorded_and_believed_once_it_has_moved_us(tmp_path: Path) -> None:
    """One transient scope, delegated, with this process in it; a refusal leaves everything as it was."""
    tool = tmp_path / "busctl"
    tool.write_text(BUSCTL.format(directory=tmp_path))
    tool.chmod(0o755)
    own = tmp_path / "cgroup"
    own.write_text("0::/user.slice/session-1.scope\n")
    env = {"PATH": f"{tmp_path}:{os.defpath}"}

    def enter(running: Path = tmp_path) -> str | None:
        return enter_scope("apportion-abc", env=env, own=own, running=running)

    assert enter(tmp_path / "no-systemd") is None
    own.write_text("0::/system.slice/agent.service\n")
    assert enter() is None  # A service is left where systemd looks for it.
    own.write_text("0::/user.slice/session-1.scope\n")
    (tmp_path / "refuses").touch()
    assert enter() is None
    assert own.read_text() == "0::/user.slice/session-1.scope\n"
    (tmp_path / "refuses").unlink()
    moved = enter()
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0] == ("--system" if os.geteuid() == 0 else "--user")
    assert said[1:7] == [
        *("--quiet", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"),
        *("org.freedesktop.systemd1.Manager", "StartTransientUnit"),
    ]
    unit = said[8]
    assert unit.startswith(f"apportion-abc-{os.getpid()}-")
    assert unit.endswith(".scope")
    assert [said[7], *said[9:11]] == ["ssa(sv)a(sa(sv))", "fail", "4"]
    assert said[14:] == [
        *("PIDs", "au", "1", str(os.getpid()), "Delegate", "b", "true"),
        *("CollectMode", "s", "inactive-or-failed", "0"),
    ]
    assert moved == f"0::/system.slice/{unit}\n"


def test_a_run_that_is_in_a_group_for_its_slices_is_limited_in_that_one(tmp_path: Path) -> None:
    """A process is in one group of the unified hierarchy; whoever made it removes it."""
    files = FakeV2()
    limits = on_v2(tmp_path, files)
    theirs = Path("/cg/slice/unit/devices/run-1")
    files.make(theirs)
    files.handed[theirs.parent.parent] = files.CONTROLLERS
    groups, enforced = limits.apply(RUN, Limits(memory_mib=64), within=theirs)
    assert (groups, enforced) == (None, (found(MEMORY, 64, 64, V2),))
    assert files.of[theirs]["memory.max"] == str(64 * MIB)


def test_a_limit_that_reads_back_otherwise_is_undone_and_refused(tmp_path: Path) -> None:
    files = FakeV2(rounds_down_to=1000 * MIB)
    limits = on_v2(tmp_path, files)
    with pytest.raises(LimitsNotSet, match="asked for 1500"):
        limits.apply(RUN, Limits(memory_mib=1500))
    assert not [path for path in files.procs if path.name == directory_name(RUN)]


def test_a_run_is_kept_to_what_is_next_to_its_devices(tmp_path: Path) -> None:
    """Memory nodes that aren't there are left out; the CPUs are what binds."""
    limits = on_v2(tmp_path, files := FakeV2())
    groups, enforced = limits.apply(RUN, Limits(cpus=(2, 3), nodes=(1, 7), is_strict=True))
    assert groups is not None
    assert enforced == (found(CPUS, 2, 2, V2),)
    written = files.of[Path(groups.joins[0].path)]
    assert (written["cpuset.cpus"], written["cpuset.mems"]) == ("2,3", "1")


def test_strict_never_starts_on_a_misfit(tmp_path: Path) -> None:
    """Neither where nothing is near, nor where nobody could keep it there; preferred starts, and is told."""
    with pytest.raises(LimitsNotSet, match="no usable CPU"):
        on_v2(tmp_path, FakeV2()).apply(RUN, Limits(is_strict=True))
    with pytest.raises(LimitsNotSet, match="can't be kept to CPUs"):
        no_limits(tmp_path).apply(RUN, Limits(cpus=(0,), is_strict=True))
    assert no_limits(tmp_path).apply(RUN, Limits(cpus=(0,))) == (None, (found(CPUS, 1, 0, NOBODY, applied=0),))


def test_without_control_groups_what_was_asked_is_said_to_be_held_by_nobody(tmp_path: Path) -> None:
    limits = no_limits(tmp_path)
    assert limits.apply(RUN, Limits()) == (None, ())
    assert limits.apply(RUN, Limits(cpu_milli=500)) == (None, (found(CPU, 500, 0, NOBODY, applied=0),))


# For real


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="apportion-host-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def limits(root: Path) -> Iterator[HostLimits]:
    opened = open_limits(root)
    if opened.by != V1 or MEMORY not in opened.can:
        pytest.skip(f"no memory groups of version 1 can be made here: {opened.by} {opened.can}")
    yield opened
    opened.recover(())


@pytest.fixture
async def processes(root: Path) -> AsyncIterator[Processes]:
    async with Processes(root, spawner_idle_s=0.5) as opened:
        await opened.adopt()
        yield opened
        for run in opened.live():
            await opened.stop(run, grace_s=0)


def a_launch(limits: HostLimits, script: str, run: RunId = RUN, **asked: Any) -> tuple[Launch, Path]:
    groups, enforced = limits.apply(run, Limits(**asked))
    assert groups is not None
    assert all(one.observed == one.applied == one.asked for one in enforced)
    argv = (sys.executable, "-I", "-S", "-c", script)
    return Launch(run_id=run, epoch=1, argv=argv, env={}, groups=groups), Path(groups.joins[0].path)


async def test_a_run_that_takes_too_much_of_its_hosts_memory_is_killed_and_known_for_it(
    limits: HostLimits, processes: Processes
) -> None:
    """Its shim lives outside and tells; its next run is under nobody's limit."""
    launch, group = a_launch(limits, "b'x' * (200 << 20)", memory_mib=64)
    await processes.start(launch)
    end = await processes.ended(RUN)
    assert isinstance(end, Exited)
    assert (end.signal, end.oom_kills) == (signal.SIGKILL, 1)
    assert not group.exists()
    other = RunId("acme/train/0/2")
    argv = (sys.executable, "-I", "-S", "-c", "b'x' * (100 << 20)")
    await processes.start(Launch(run_id=other, epoch=1, argv=argv, env={}))
    end = await processes.ended(other)
    assert isinstance(end, Exited)
    assert (end.exit_code, end.oom_kills) == (0, 0)


async def test_the_run_and_not_its_shim_is_in_the_group_and_gains_no_rights(
    limits: HostLimits, processes: Processes
) -> None:
    launch, group = a_launch(limits, "import time; time.sleep(60)", memory_mib=256, cpu_milli=500)
    started = await processes.start(launch)
    assert [int(pid) for pid in (group / "cgroup.procs").read_text().split()] == [started.pid]
    assert "NoNewPrivs:\t1" in Path(f"/proc/{started.pid}/status").read_text()
    assert "Max core file size        0                    0" in Path(f"/proc/{started.pid}/limits").read_text()
    await processes.stop(RUN, grace_s=0)
    assert not group.exists()
    assert not group.parent.exists()


async def test_a_run_is_on_its_cpus_and_cannot_leave_them(limits: HostLimits, processes: Processes) -> None:
    """Unlike an affinity, which a process may change by itself."""
    if CPUS not in limits.can:
        pytest.skip("no cpuset groups can be made here")
    (mine, *others) = sorted(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, {{{mine}, {(others or [mine])[0]}}}); print(os.sched_getaffinity(0))"
    launch, group = a_launch(limits, script, cpus=(mine,), nodes=(0,), is_strict=True)
    await processes.start(launch)
    await processes.ended(RUN)
    assert processes.log_paths(RUN)["stdout"][0].read_text() == f"{{{mine}}}\n"
    assert not group.exists()


async def test_what_a_killed_shim_leaves_is_removed_at_the_release(limits: HostLimits, processes: Processes) -> None:
    launch, group = a_launch(limits, "import time; time.sleep(60)", memory_mib=256)
    started = await processes.start(launch)
    os.kill(started.shim_pid, signal.SIGKILL)
    assert isinstance(await processes.ended(RUN), Lost)
    assert group.exists()
    limits.release(RUN)
    assert not group.exists()
    assert not group.parent.exists()


async def test_what_a_killed_agent_leaves_is_found_by_the_next(
    limits: HostLimits, processes: Processes, root: Path
) -> None:
    """Groups of live runs are kept; a process in any other is nobody's."""
    launch, kept = a_launch(limits, "import time; time.sleep(60)", memory_mib=256)
    await processes.start(launch)
    _, stale = a_launch(limits, "", run=RunId("acme/gone/0/1"), memory_mib=64)
    assert open_limits(root).recover({RUN}) == 1
    assert (kept.exists(), stale.exists()) == (True, False)


async def test_whoever_ends_a_whole_node_removes_its_groups_without_knowing_how_they_were_made(
    limits: HostLimits, processes: Processes, root: Path
) -> None:
    """As `apportion up` does at its end, when no agent will come: the node's journal says where to look."""
    launch, group = a_launch(limits, "import time; time.sleep(60)", memory_mib=256, cpu_milli=500)
    await processes.start(launch)
    os.kill(processes.live()[RUN].pid, signal.SIGKILL)
    await processes.ended(RUN)
    assert no_limits(root).recover(()) == len(launch.groups.joins if launch.groups else ())
    assert not group.parent.exists()


async def test_a_run_whose_group_is_gone_is_not_started_without_it(limits: HostLimits, processes: Processes) -> None:
    launch, group = a_launch(limits, "", memory_mib=64)
    group.rmdir()
    with pytest.raises(StartFailed) as failed:
        await processes.start(launch)
    assert isinstance(failed.value.end, ExecFailed)
    assert not failed.value.end.is_confined
