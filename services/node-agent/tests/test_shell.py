"""The agent's core and shell over real processes and a real simulated node; the stream alone is a list here."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import pytest

from apportion.contracts.causes import SPENDS_NO_RETRY, DeviceHealth, Mode, RunAction, RunCause, StopCause
from apportion.contracts.events import (
    CheckpointPlan,
    DeviceHealthChanged,
    Fact,
    LeaseClaimed,
    NodeRegistered,
    RunActionOrdered,
    RunCheckpointed,
    RunFinished,
    RunPlaced,
    RunReleased,
    RunResumed,
    RunStarted,
    RunStopOrdered,
    RunSuspended,
    Slice,
)
from apportion.contracts.ids import NodeId, RunId, agent_author
from apportion.contracts.testing import a_placement, as_fact
from apportion.node_agent import canaries
from apportion.node_agent.containers import Containers, probe
from apportion.node_agent.core import AgentCore, DeviceHealthSeen, InventoryChanged, Observation
from apportion.node_agent.enforce.cgroup_memory import CgroupMemory
from apportion.node_agent.enforce.exclusive import Exclusive
from apportion.node_agent.enforce.mps import Mps
from apportion.node_agent.enforce.slices import Enforcer, Slices
from apportion.node_agent.enforce.timeslice import TimeSlice
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.host_limits import CPU, CPUS, MEMORY, NOBODY, near_devices, open_limits
from apportion.node_agent.machine import inventory_of
from apportion.node_agent.nvml import Devices, open_devices
from apportion.node_agent.processes import Processes, RootInUse
from apportion.node_agent.shell import Shell, session_leaders
from apportion.node_agent.simgpu import workload
from apportion.node_agent.simgpu.client import SOCKET_VARIABLE
from apportion.node_agent.simnode import SimulatedNode
from tests import engine_stand_in

pytestmark = pytest.mark.integration

NODE = NodeId("node-1")
ME = agent_author(NODE)
WORKLOAD = (sys.executable, "-S", "-E", workload.__file__)
PATIENCE_S = 60.0


class Agent:
    """One agent, from start to its death; the stream and the machine outlive it."""

    def __init__(self, world: "World", session: str) -> None:
        self.world = world
        self.session = session
        self.core = AgentCore(NODE)
        self.state = self.core.initial()
        self.observations: asyncio.Queue[Observation] = asyncio.Queue()
        self.stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        world = self.world
        self.processes = await self.stack.enter_async_context(Processes(world.root))
        self.devices: Devices = self.stack.enter_context(open_devices(world.simulated.socket_path))
        self.host = open_limits(world.root)
        path = f"{world.simulated.tools}:{os.defpath}"
        node_env = {SOCKET_VARIABLE: str(world.simulated.socket_path)}
        inventory = inventory_of(self.devices, path=path, is_simulated=True)
        watchdog = Watchdog(self.devices, session_of=session_leaders(self.processes))
        memory = CgroupMemory.found(self.devices, NODE, state_dir=world.root)
        if memory is not None:
            self.stack.callback(memory.close)
        self.limits_memory = memory is not None
        self.mps = Mps(self.devices, watchdog, directory=world.root / "mps", path=path, env=node_env, memory=memory)
        enforcers: dict[Mode, Enforcer] = {
            Mode.EXCLUSIVE: Exclusive(self.devices, end_idle_mps=self.mps.end_idle, directory=world.root / "exclusive"),
            Mode.MPS: self.mps,
            Mode.TIMESLICE: TimeSlice(self.devices, watchdog, memory=memory),
        }
        self.uuids = [device.uuid for device in inventory.devices]
        for uuid in self.uuids:
            assert self.devices.keep_accounts(uuid)
        self.shell = Shell(
            processes=self.processes,
            slices=Slices(self.devices, enforcers, usable={d.uuid: d for d in inventory.devices}),
            watchdog=watchdog,
            mps=self.mps,
            path=path,
            node_env=node_env,
            host=self.host,
            open_files_max=world.open_files_max,
            containers=world.containers,
        )
        self.shell.feed = self.observations.put_nowait
        self.observe(InventoryChanged(inventory=inventory))
        self.observe(await self.shell.adopt(self.session))
        world.append(LeaseClaimed(author=ME, session=self.session, core=self.core.POLICY), ME)
        self.ends = asyncio.create_task(self.shell.run())
        self.stack.push_async_callback(self.shell.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ends.cancel()
        await self.stack.aclose()

    def observe(self, observation: Observation) -> None:
        self.state = self.core.observe(self.state, observation, 1)

    def round(self) -> None:
        """As the reactor's loop: fold, act, state."""
        while not self.observations.empty():
            self.observe(self.observations.get_nowait())
        position, _ = self.core.position(self.state)
        for entry in self.world.stream[position:]:
            self.state = self.core.evolve(self.state, entry)
        for instruction in self.core.instruct(self.state, 1):
            self.state = self.core.issued(self.state, instruction)
            self.shell.perform(instruction)
        for fact in self.core.decide(self.state, 1):
            self.world.append(fact, ME)

    async def until(self, happened: Callable[[], Any]) -> Any:
        """Work until it has happened; the time limit only ends a test that would hang."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.round()
                if (found := happened()) is not None:
                    return found
                if self.shell.failure.done():
                    self.shell.failure.result()
                await asyncio.sleep(0.005)


class World:
    """A machine with a simulated node, and a stream."""

    def __init__(self, directory: Path, driver: str = "580") -> None:
        self.root = directory / "agent"
        self.stream: list[Any] = []
        self.open_files_max = 0
        self.containers: Containers | None = None
        self.simulated = SimulatedNode(NODE, state_dir=directory, devices=2, profile="a100-40", driver=driver)

    def append(self, fact: Fact, author: str = "") -> None:
        self.stream.append(as_fact(fact, len(self.stream) + 1, author=author))

    def facts(self, kind: type[Fact], run: str = "") -> list[Any]:
        return [
            e.event for e in self.stream if isinstance(e.event, kind) and run in (getattr(e.event, "run_id", ""), "")
        ]

    def first(self, kind: type[Fact], run: str = "") -> Any:
        return next(iter(self.facts(kind, run)), None)


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="na-") as directory:
        world = World(Path(directory), getattr(request, "param", "580"))
        await world.simulated.open()
        try:
            yield world
        finally:
            await world.simulated.close()
            world.simulated.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(world.simulated.pid, 0)  # noqa: ASYNC222  it was killed a moment ago


def an_order(agent: Agent, name: str, *command: str, device: int = 0, **changes: Any) -> RunPlaced:
    mode = changes.pop("mode", Mode.TIMESLICE)
    memory_mib = changes.pop("memory_mib", 4096)
    compute_milli = changes.pop("compute_milli", 250)
    piece = Slice(device_uuid=agent.uuids[device], compute_milli=compute_milli, memory_mib=memory_mib, mode=mode)
    return a_placement(f"acme/{name}", command=command, slices=(piece,), **changes)


def a_workload(agent: Agent, name: str, *options: str, **changes: Any) -> RunPlaced:
    return an_order(agent, name, *WORKLOAD, *options, **changes)


async def test_a_run_is_started_within_its_slice_and_told_to_its_end(world: World) -> None:
    """The chain that every job lives by, on real processes."""
    async with Agent(world, "s1") as agent:
        order = a_workload(agent, "a", "train", "--seconds", "0.05", "--memory-mib", "2000")
        world.append(order)
        await agent.until(lambda: world.first(RunReleased))
        started, finished = world.first(RunStarted), world.first(RunFinished)
        assert (finished.cause, finished.exit_code, finished.was_started) == (RunCause.SUCCESS, 0, True)
        assert finished.peak_memory_mib == 2000
        assert {(e.what, e.asked, e.observed, e.by) for e in started.enforced} == {
            ("memory", 4096, 4096, "watchdog"),
            ("compute", 250, 0, "best_effort"),
            ("fault_domain", 1, 1, "own_context"),
        }
        await agent.until(lambda: True if not any((world.root / "runs").iterdir()) else None)
        assert [type(e.event) for e in world.stream if type(e.event) is NodeRegistered] == [NodeRegistered]


async def test_a_run_is_told_its_share_and_nothing_of_the_agents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what would loosen its slice is dropped."""
    monkeypatch.setenv("AGENT_SECRET", "hush")
    async with Agent(world, "s1") as agent:
        script = "import os; print(dict(os.environ))"
        env = {"MINE": "1", "CUDA_VISIBLE_DEVICES": "0,1", "LD_PRELOAD": "/evil.so", "CUDA_MPS_PIPE_DIRECTORY": "/x"}
        order = an_order(
            agent, "a", sys.executable, "-c", f"{script}; import sys; sys.stdout.flush(); input()", env=env
        )
        world.append(order)
        await agent.until(lambda: world.first(RunFinished))
        # Its directory goes with the release, so what it printed is read before that is folded.
        seen = eval(agent.processes.log_paths(order.run_id)["stdout"][-1].read_text())
        assert seen["MINE"] == "1"
        assert seen["CUDA_VISIBLE_DEVICES"] == agent.uuids[0]
        assert (seen["APPORTION_MEMORY_MIB"], seen["APPORTION_COMPUTE_MILLI"]) == ("4096", "250")
        assert (seen["APPORTION_REPLICA"], seen["APPORTION_ATTEMPT"], seen["APPORTION_RUN_ID"]) == (
            "0",
            "1",
            order.run_id,
        )
        assert not {"AGENT_SECRET", "LD_PRELOAD", "CUDA_MPS_PIPE_DIRECTORY"} & set(seen)


async def test_a_killed_process_is_told_as_killed(world: World) -> None:
    """Somebody on the machine did it, and nobody in the pool."""
    async with Agent(world, "s1") as agent:
        world.append(a_workload(agent, "a", "train", "--seconds", "60"))
        started = await agent.until(lambda: world.first(RunStarted))
        os.kill(started.pid, signal.SIGKILL)
        finished = await agent.until(lambda: world.first(RunFinished))
        assert (finished.cause, finished.signal) == (RunCause.KILLED, 9)


async def test_a_run_is_held_to_what_its_job_asked_of_the_host_or_told_that_nobody_does(world: World) -> None:
    """A neighbour's leak must not take the machine's memory; where nothing can prevent it, the fact says so."""
    async with Agent(world, "s1") as agent:
        script = "b'x' * (100 << 20)"
        order = an_order(agent, "a", sys.executable, "-c", script, host_memory_mib=50, cpu_milli=800)
        world.append(order)
        await agent.until(lambda: world.first(RunReleased))
        started, finished = world.first(RunStarted), world.first(RunFinished)
        held = {e.what: (e.asked, e.observed, e.by) for e in started.enforced if not e.device_uuid}
        can = agent.host.can
        assert held == {
            MEMORY: (50, 50, agent.host.by) if MEMORY in can else (50, 0, NOBODY),
            CPU: (800, 800, agent.host.by) if CPU in can else (800, 0, NOBODY),
        }
        if MEMORY in can:
            assert (finished.cause, finished.signal) == (RunCause.HOST_OUT_OF_MEMORY, 9)
            assert finished.detail == "processes killed at its limit of host memory: 1"
        else:
            assert finished.cause is RunCause.SUCCESS


async def test_a_run_has_as_many_files_as_the_node_allows_and_its_output_stays_after_it(world: World) -> None:
    """A leak of descriptors ends with the run that leaks, and what it said can be read after its release."""
    world.open_files_max = 99
    async with Agent(world, "s1") as agent:
        order = an_order(agent, "a", "/bin/sh", "-c", "ulimit -n; ulimit -c")
        world.append(order)
        await agent.until(lambda: world.first(RunReleased))
        await agent.until(lambda: agent.processes.kept.directory(order.run_id))
        answer = json.loads(agent.processes.desk.answer(json.dumps({"run": order.run_id}).encode()))
        assert (base64.b64decode(answer["data"]), answer["is_live"]) == (b"99\n0\n", False)


async def test_a_bound_run_is_kept_next_to_its_device_or_not_started(world: World) -> None:
    """What was not asked for, nobody is bound to; strict is a promise, preferred an attempt that is told."""
    async with Agent(world, "s1") as agent:
        near = near_devices([(agent.shell._slices.usable[agent.uuids[0]].cpus, 0)])
        is_fit = bool(near.cpus) and CPUS in agent.host.can
        for binding in ("preferred", "strict"):
            world.append(an_order(agent, binding, "/bin/true", cpu_bind=binding))
        await agent.until(lambda: True if len(world.facts(RunReleased)) == 2 else None)
        preferred, strict = (world.first(RunFinished, f"acme/{name}/0/1") for name in ("preferred", "strict"))
        assert preferred.cause is RunCause.SUCCESS
        assert world.first(RunStarted, "acme/preferred/0/1").cpus == (near.cpus if is_fit else ())
        assert strict.cause is (RunCause.SUCCESS if is_fit else RunCause.ENFORCEMENT_FAILED)


async def test_a_killed_shim_ends_its_run_and_is_not_taken_for_a_lost_node(world: World) -> None:
    """The run's processes are gone before its slices are free, and its job pays nothing."""
    async with Agent(world, "s1") as agent:
        order = a_workload(agent, "a", "train", "--seconds", "60")
        world.append(order)
        started = await agent.until(lambda: world.first(RunStarted))
        os.kill(agent.processes.live()[order.run_id].pid, signal.SIGKILL)
        await agent.until(lambda: world.first(RunReleased))
        finished = world.first(RunFinished)
        assert (finished.cause, finished.detail) == (RunCause.SHIM_LOST, "lost: shim_gone")
        assert finished.cause in SPENDS_NO_RETRY
        assert not Path(f"/proc/{started.pid}").exists()
        assert not agent.devices.processes(agent.uuids[0])


async def test_a_stop_is_obeyed_by_steps(world: World) -> None:
    """A workload that ignores SIGTERM is ended all the same."""
    async with Agent(world, "s1") as agent:
        world.append(a_workload(agent, "a", "train", "--seconds", "60", "--ignore-sigterm"))
        started = await agent.until(lambda: world.first(RunStarted))
        # It ignores the signal once it is at work, and not while it starts.
        await agent.until(lambda: True if agent.devices.processes(agent.uuids[0]) else None)
        run = started.run_id
        stop = RunStopOrdered(run_id=run, node_id=NODE, cause=StopCause.CANCELLED, grace_s=1, actor="user:ann")
        world.append(stop)
        finished = await agent.until(lambda: world.first(RunFinished))
        assert (finished.cause, finished.signal) == (RunCause.CANCELLED, 9)
        await agent.until(lambda: world.first(RunReleased))


async def test_a_run_is_suspended_resumed_and_checkpoints_and_its_next_attempt_goes_on_from_there(
    world: World, tmp_path: Path
) -> None:
    """The whole way of a run that makes room for others and loses nothing."""
    kept = tmp_path / "steps"
    plan = CheckpointPlan(signal="SIGUSR1", grace_s=int(PATIENCE_S), uri=f"file://{kept}")
    async with Agent(world, "s1") as agent:
        order = a_workload(agent, "a", "train", "--seconds", "600", "--step-ms", "20", checkpoint=plan)
        world.append(order)
        started = await agent.until(lambda: world.first(RunStarted))
        device, run = agent.uuids[0], order.run_id
        await agent.until(lambda: True if agent.devices.processes(device) else None)

        def ask(action: RunAction) -> None:
            world.append(RunActionOrdered(run_id=run, node_id=NODE, action=action, actor="tenant:acme"))

        ask(RunAction.SUSPEND)
        await agent.until(lambda: world.first(RunSuspended))
        assert Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        ask(RunAction.RESUME)
        await agent.until(lambda: world.first(RunResumed))
        ask(RunAction.CHECKPOINT)
        told = await agent.until(lambda: world.first(RunCheckpointed))
        assert (told.is_done, told.uri, told.detail) == (True, f"file://{kept}", "")
        assert told.step > 0
        stop = RunStopOrdered(
            run_id=run, node_id=NODE, cause=StopCause.PREEMPTED, grace_s=2 * int(PATIENCE_S), actor="service:placer"
        )
        world.append(stop)
        finished = await agent.until(lambda: world.first(RunFinished))
        assert (finished.cause, finished.exit_code) == (RunCause.PREEMPTED, 143)
        first, last = world.facts(RunCheckpointed)
        assert first.step <= last.step <= int(kept.read_text())
        await agent.until(lambda: world.first(RunReleased))
        steps = int(kept.read_text())
        again = a_workload(
            agent, "b", "train", "--seconds", f"{(steps + 1) * 0.02:.2f}", "--step-ms", "20", checkpoint=plan
        )
        world.append(again)
        await agent.until(lambda: world.first(RunReleased, again.run_id))
        await agent.until(lambda: agent.processes.kept.directory(again.run_id))
        answer = json.loads(agent.processes.desk.answer(json.dumps({"run": again.run_id}).encode()))
        assert base64.b64decode(answer["data"]).startswith(f"train steps={steps + 1} device_ms=20 ".encode())


def with_containers(world: World) -> Path:
    """Gives the world an engine that stands for docker; its state and what it was told are there."""
    home = world.root.parent / "engine"
    home.mkdir()
    engine_stand_in.install(home, "docker")
    engine = probe("auto", path=str(home), env={"HOME": str(home)})
    assert engine is not None
    world.containers = Containers(engine, NODE, env={"HOME": str(home)})
    return home


async def test_a_job_with_an_image_runs_in_a_container_of_its_own_that_is_gone_with_it(world: World) -> None:
    """Its output, its end and its share are those of any run; and its environment is the job's, not the engine's."""
    home = with_containers(world)
    async with Agent(world, "s1") as agent:
        script = "echo $APPORTION_MEMORY_MIB $MINE $HOME; pwd; exit 3"
        order = an_order(
            agent, "a", "/bin/sh", "-c", script, image="team/train:1.2", env={"MINE": "1"}, host_memory_mib=64
        )
        world.append(order)
        await agent.until(lambda: world.first(RunReleased))
        await agent.until(lambda: agent.processes.kept.directory(order.run_id))
        started, finished = world.first(RunStarted), world.first(RunFinished)
        assert (finished.cause, finished.exit_code) == (RunCause.USER_ERROR, 3)
        assert ("host_memory", 64, "docker") in {(one.what, one.observed, one.by) for one in started.enforced}
        answer = json.loads(agent.processes.desk.answer(json.dumps({"run": order.run_id}).encode()))
        told, where = base64.b64decode(answer["data"]).decode().splitlines()
        assert (told, Path(where).name) == ("4096 1", "work")
        said = [json.loads(line) for line in (home / "said").read_text().splitlines()]
        assert [words[0] for words in said] == ["version", "create", "inspect", "start", "inspect", "rm"]
        assert f"nvidia.com/gpu={agent.uuids[0]}" in said[1]
        assert list(home.glob("*.box")) == []


async def test_a_container_that_will_not_end_is_killed_and_removed(world: World) -> None:
    """Its client alone would leave it behind; its process is gone before the slices are free."""
    home = with_containers(world)
    async with Agent(world, "s1") as agent:
        script = "trap '' TERM; while :; do sleep 0.05; done"
        order = an_order(agent, "a", "/bin/sh", "-c", script, image="a:1")
        world.append(order)
        await agent.until(lambda: world.first(RunStarted))
        await agent.until(lambda: True if list(home.glob("*.pid")) else None)
        world.append(
            RunStopOrdered(run_id=order.run_id, node_id=NODE, cause=StopCause.CANCELLED, grace_s=1, actor="user:ann")
        )
        await agent.until(lambda: world.first(RunReleased))
        assert world.first(RunFinished).cause is RunCause.CANCELLED
        pid = next(home.glob("*.pid")).read_text()
        assert not Path(f"/proc/{pid}").exists()
        assert list(home.glob("*.box")) == []


async def test_an_image_is_refused_by_name_where_no_engine_answers(world: World) -> None:
    async with Agent(world, "s1") as agent:
        world.append(an_order(agent, "a", "true", image="team/train:1.2"))
        await agent.until(lambda: world.first(RunReleased))
        finished = world.first(RunFinished)
        assert (finished.cause, finished.was_started) == (RunCause.START_FAILED, False)
        assert "workload.image team/train:1.2: no container engine answers on this node" in finished.detail


async def test_an_mps_run_is_taken_off_its_server_before_it_is_killed(world: World) -> None:
    """Work that a killed client leaves in flight may end its neighbours; this neighbour works on."""
    async with Agent(world, "s1") as agent:
        mps = {"mode": Mode.MPS}
        # It ends when it is told to: one that ended by itself could be gone before the other has come.
        good = a_workload(agent, "good", "train", "--seconds", "60", "--step-ms", "50", "--checkpoint", "steps", **mps)
        world.append(good)
        world.append(a_workload(agent, "bad", "train", "--seconds", "60", "--ignore-sigterm", **mps))
        await agent.until(lambda: True if len(world.facts(RunStarted)) == 2 else None)
        device = agent.uuids[0]
        await agent.until(
            lambda: True if [p.is_mps_client for p in agent.devices.processes(device)].count(True) == 2 else None
        )
        bad = RunId("acme/bad/0/1")
        world.append(RunStopOrdered(run_id=bad, node_id=NODE, cause=StopCause.DRAINED, grace_s=0, actor="user:ann"))
        finished = await agent.until(lambda: world.first(RunFinished, bad))
        assert finished.cause is RunCause.DRAINED
        stop = RunStopOrdered(
            run_id=good.run_id, node_id=NODE, cause=StopCause.CANCELLED, grace_s=int(PATIENCE_S), actor="user:ann"
        )
        world.append(stop)
        finished = await agent.until(lambda: world.first(RunFinished, good.run_id))
        # 143: it was at work to its last step, and obeyed.
        assert (finished.cause, finished.exit_code) == (RunCause.CANCELLED, 143)
        await agent.until(lambda: True if len(world.facts(RunReleased)) == 2 else None)


@pytest.mark.parametrize("world", ["615"], indirect=True)
async def test_a_run_is_born_in_the_cgroup_that_limits_its_memory(world: World) -> None:
    """Where the driver can: what it takes past its slice is refused, though nobody watches so closely."""
    async with Agent(world, "s1") as agent:
        if not agent.limits_memory:
            pytest.skip("no unified cgroup hierarchy that we may write to: limits by cgroup can't be tried here")
        world.append(a_workload(agent, "good", "train", "--seconds", "0.05", "--memory-mib", "4000"))
        world.append(a_workload(agent, "bad", "train", "--seconds", "0.05", "--memory-mib", "5000"))
        await agent.until(lambda: True if len(world.facts(RunReleased)) == 2 else None)
        causes = {fact.run_id: fact.cause for fact in world.facts(RunFinished)}
        assert causes == {
            "acme/good/0/1": RunCause.SUCCESS,
            "acme/bad/0/1": RunCause.OUT_OF_MEMORY,
        }
        started = world.first(RunStarted, RunId("acme/good/0/1"))
        assert ("memory", "cgroup_memory_limit+watchdog") in {(one.what, one.by) for one in started.enforced}


@pytest.mark.parametrize("crash", ["illegal access", "killed with work in flight"])
async def test_a_failed_fault_domain_is_attributed_and_replaced(
    world: World, crash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offender's end is its own; its neighbour's costs no retry; the next run finds a working device."""
    async with Agent(world, "s1") as agent:
        mps = {"mode": Mode.MPS}
        world.append(a_workload(agent, "good", "train", "--seconds", "60", "--step-ms", "20", **mps))
        # A kill finds its one kernel in flight, and no moment between two.
        options = (
            ["--step-ms", "100", "--illegal-access-after", "0.3"]
            if crash == "illegal access"
            else ["--step-ms", "60000"]
        )
        world.append(a_workload(agent, "bad", "train", "--seconds", "60", *options, **mps))
        await agent.until(lambda: True if len(world.facts(RunStarted)) == 2 else None)
        device = agent.uuids[0]
        if crash != "illegal access":
            await agent.until(
                lambda: True if [p.is_mps_client for p in agent.devices.processes(device)].count(True) == 2 else None
            )
            await agent.until(lambda: True if len(agent.devices.sm_percent_by_pid(device)) == 2 else None)
            os.kill(next(fact.pid for fact in world.facts(RunStarted) if "bad" in fact.run_id), signal.SIGKILL)
        with monkeypatch.context() as patch:
            # A wedged server is silent for as long as one waits; one that works is given its time, before and after.
            patch.setattr(canaries, "ANSWERS_S_MAX", (0.5, 1.5))
            bad = await agent.until(lambda: world.first(RunFinished, RunId("acme/bad/0/1")))
            good = await agent.until(lambda: world.first(RunFinished, RunId("acme/good/0/1")))
        assert bad.cause is (RunCause.USER_ERROR if crash == "illegal access" else RunCause.KILLED)
        assert good.cause is RunCause.FAULT_DOMAIN_FAILED
        assert good.cause in SPENDS_NO_RETRY
        assert good.detail.endswith("caused by acme/bad/0/1")
        await agent.until(lambda: True if len(world.facts(RunReleased)) == 2 else None)
        world.append(a_workload(agent, "next", "train", "--seconds", "0.05", **mps))
        finished = await agent.until(lambda: world.first(RunFinished, RunId("acme/next/0/1")))
        assert finished.cause is RunCause.SUCCESS


async def test_a_program_that_does_not_exist_is_a_failed_start(world: World) -> None:
    """It is the job's own mistake, and costs a retry."""
    async with Agent(world, "s1") as agent:
        world.append(an_order(agent, "a", "no-such-program"))
        await agent.until(lambda: world.first(RunReleased))
        finished = world.first(RunFinished)
        assert (finished.cause, finished.was_started) == (RunCause.START_FAILED, False)
        assert "No such file" in finished.detail


async def test_a_device_that_refuses_memory_is_told_as_out_of_memory(world: World) -> None:
    """By the exit code that the workload client uses."""
    async with Agent(world, "s1") as agent:
        world.append(a_workload(agent, "a", "train", "--memory-mib", "99999999"))
        finished = await agent.until(lambda: world.first(RunFinished))
        assert (finished.cause, finished.exit_code) == (RunCause.OUT_OF_MEMORY, 77)


async def test_runs_survive_their_agent_and_are_told_by_the_next(world: World) -> None:
    """One lives on, one ends meanwhile; neither is started a second time."""
    async with Agent(world, "s1") as agent:
        long = a_workload(agent, "long", "train", "--seconds", "60")
        short = a_workload(agent, "short", "train", "--seconds", "0.3", "--exit-code", "5", device=1)
        world.append(long)
        world.append(short)
        await agent.until(lambda: True if len(world.facts(RunStarted)) == 2 else None)
        pids = {fact.run_id: fact.pid for fact in world.facts(RunStarted)}
    exit_file = world.root / "runs"
    async with asyncio.timeout(PATIENCE_S):
        while not list(exit_file.glob("*short*/exit")):
            await asyncio.sleep(0.01)
    async with Agent(world, "s2") as agent:
        finished = await agent.until(lambda: world.first(RunFinished, short.run_id))
        assert finished.exit_code == 5
        await agent.until(lambda: world.first(RunReleased, short.run_id))
        os.kill(pids[long.run_id], 0)
        os.kill(pids[long.run_id], signal.SIGKILL)
        finished = await agent.until(lambda: world.first(RunFinished, long.run_id))
        assert finished.signal == 9
        await agent.until(lambda: world.first(RunReleased, long.run_id))
        assert len(world.facts(RunStarted)) == 2


async def test_a_run_that_no_stream_knows_is_ended_and_forgotten(world: World) -> None:
    """The pool was made anew, and the machine has still something of the old one."""
    async with Agent(world, "s1") as agent:
        world.append(a_workload(agent, "old", "train", "--seconds", "60", mode=Mode.EXCLUSIVE))
        started = await agent.until(lambda: world.first(RunStarted))
    world.stream.clear()
    async with Agent(world, "s2") as agent:
        await agent.until(lambda: True if not any((world.root / "runs").iterdir()) else None)
        assert not Path(f"/proc/{started.pid}").exists()
        await agent.until(lambda: True if agent.devices.compute_mode(agent.uuids[0]) == "default" else None)
        assert {type(entry.event) for entry in world.stream} == {LeaseClaimed, NodeRegistered}


async def test_two_agents_of_one_node_are_refused(world: World) -> None:
    """The second one would start everything again."""
    async with Agent(world, "s1"):
        with pytest.raises(RootInUse):
            await Processes(world.root).__aenter__()


async def test_a_simulated_node_that_dies_takes_its_devices_along(world: World) -> None:
    """Its runs end as by a device fault, and the devices come back with it."""
    async with Agent(world, "s1") as agent:

        def tell(health: DeviceHealth) -> None:
            for uuid in agent.uuids:
                agent.observations.put_nowait(DeviceHealthSeen(device_uuid=uuid, health=health, code="driver"))

        world.simulated.on_gone = lambda: tell(DeviceHealth.FAILED)
        world.simulated.on_back = lambda: tell(DeviceHealth.HEALTHY)
        world.append(a_workload(agent, "a", "serve", "--seconds", "60", "--ignore-sigterm", grace_s=0))
        await agent.until(lambda: world.first(RunStarted))
        world.simulated.kill()
        await agent.until(lambda: world.first(RunReleased))
        assert world.first(RunFinished).cause in {RunCause.DEVICE_FAULT, RunCause.USER_ERROR}
        await agent.until(lambda: True if len(world.facts(DeviceHealthChanged)) == 4 else None)
        world.append(a_workload(agent, "b", "train", "--seconds", "0.05"))
        finished = await agent.until(lambda: world.first(RunFinished, RunId("acme/b/0/1")))
        assert finished.cause is RunCause.SUCCESS
