"""Runs as real processes: started once, found again, ended whole."""

import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from apportion.contracts.ids import RunId
from apportion.node_agent.processes import (
    Launch,
    Processes,
    RootInUse,
    RunStillLives,
    StartedProcess,
    StartFailed,
    StartRefused,
    kill_processes_of,
)
from apportion.node_agent.run_records import (
    ExecFailed,
    Exited,
    LossReason,
    Lost,
    NeverStarted,
    Running,
    directory_name,
)

pytestmark = pytest.mark.integration

RUN = RunId("acme/train/0/1")
PATIENCE_S = 60.0
"""It only ends a test that would hang."""


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="apportion-processes-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def processes(root: Path) -> AsyncIterator[Processes]:
    async with Processes(root, spawner_idle_s=0.5) as opened:
        await opened.adopt()
        yield opened
        for run in opened.live():
            await opened.stop(run, grace_s=0)


def a_launch(*argv: str, run: RunId = RUN, epoch: int = 1, **env: str) -> Launch:
    return Launch(run_id=run, epoch=epoch, argv=argv or ("/bin/true",), env=env)


def a_shell(script: str, run: RunId = RUN) -> Launch:
    return a_launch("/bin/sh", "-c", script, run=run, PATH=os.defpath)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def output(processes: Processes, run: RunId = RUN) -> str:
    return "".join(path.read_text() for path in processes.log_paths(run)["stdout"])


async def test_a_run_gets_exactly_its_environment_directory_and_code(processes: Processes) -> None:
    """Nothing of the agent leaks into a run, and its exit code comes back."""
    script = "import os, json, sys; print(json.dumps([dict(os.environ), os.getcwd()])); sys.exit(7)"
    await processes.start(a_launch(sys.executable, "-I", "-S", "-c", script, GREETING="hello"))
    end = await processes.ended(RUN)
    assert isinstance(end, Exited)
    assert (end.exit_code, end.signal) == (7, None)
    assert end.started_at_ns <= end.finished_at_ns
    env, cwd = json.loads(output(processes))
    env.pop("LC_CTYPE", None)  # Python itself may add it.
    assert sorted(env) == ["APPORTION_RUN_ID", "APPORTION_RUN_TOKEN", "GREETING"]
    assert (env["APPORTION_RUN_ID"], env["GREETING"]) == (RUN, "hello")
    assert Path(cwd).name == "work"
    assert Path(cwd).stat().st_mode & 0o777 == 0o700


async def test_asked_twice_at_once_and_later_it_runs_once(processes: Processes) -> None:
    """A placement that is delivered twice must not cost two runs."""
    launch = a_shell("echo ran; sleep 30")
    first, second = await asyncio.gather(processes.start(launch), processes.start(launch))
    third = await processes.start(launch)
    assert first == second == third
    while not output(processes):
        await asyncio.sleep(0.01)
    await processes.stop(RUN, grace_s=1)
    assert output(processes) == "ran\n"
    with pytest.raises(StartRefused):
        await processes.start(launch)
    assert output(processes) == "ran\n"


async def test_a_signal_that_kills_the_workload_is_recorded(processes: Processes) -> None:
    started = await processes.start(a_launch("/bin/sleep", "30"))
    os.kill(started.pid, signal.SIGKILL)
    told = await asyncio.wait_for(processes.ends.get(), PATIENCE_S)
    assert told.run_id == RUN
    assert isinstance(told.end, Exited)
    assert (told.end.exit_code, told.end.signal) == (None, signal.SIGKILL)


async def test_a_killed_shim_leaves_no_process_and_the_run_is_lost(processes: Processes) -> None:
    """Nobody knows how such a run ended, but it must not go on using its slice either: not even its daemons."""
    escape = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
    started = await processes.start(
        a_shell(f"{sys.executable} -I -S -c '{escape}' & while [ ! -s ../stdout ]; do sleep 0.01; done; sleep 60")
    )
    while not output(processes).strip():
        await asyncio.sleep(0.01)
    daemon = int(output(processes))
    os.kill(started.shim_pid, signal.SIGKILL)
    told = await asyncio.wait_for(processes.ends.get(), PATIENCE_S)
    assert told.end == Lost(reason=LossReason.SHIM_GONE)
    assert [is_alive(pid) for pid in (started.pid, started.shim_pid, daemon)] == [False, False, False]


async def test_stop_asks_first_and_waits_for_the_grace(processes: Processes) -> None:
    await processes.start(a_shell("trap 'echo saved; exit 5' TERM; echo ready; while :; do sleep 0.05; done"))
    while "ready" not in output(processes):
        await asyncio.sleep(0.01)
    end = await processes.stop(RUN, grace_s=30)
    assert isinstance(end, Exited)
    assert end.exit_code == 5
    assert output(processes) == "ready\nsaved\n"


async def test_stop_kills_what_ignores_it_and_what_hid_in_a_session_of_its_own(processes: Processes) -> None:
    escape = (
        "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    await processes.start(a_shell(f"trap '' TERM; {sys.executable} -I -S -c '{escape}' & while :; do sleep 0.05; done"))
    while not output(processes).strip():
        await asyncio.sleep(0.01)
    daemon = int(output(processes))
    end = await processes.stop(RUN, grace_s=0.2)
    assert isinstance(end, Exited)
    assert end.signal == signal.SIGKILL
    assert not is_alive(daemon)


async def test_every_process_of_a_run_stands_still_and_goes_on(processes: Processes) -> None:
    """Those in sessions of their own too: one that goes on computing would be no suspension."""
    tick = "import os, time; os.setsid(); print(os.getpid(), flush=True); [time.sleep(0.01) for _ in iter(int, 1)]"
    started = await processes.start(a_shell(f"{sys.executable} -I -S -c '{tick}' & while :; do sleep 0.05; done"))
    while not output(processes).strip():
        await asyncio.sleep(0.01)
    pids = (started.pid, int(output(processes)))

    def states() -> set[str]:
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    async with asyncio.timeout(PATIENCE_S):
        count = await processes.still(RUN, is_still=True)
        assert (states(), processes.is_still(RUN)) == ({"T"}, True)
        assert count is not None
        assert count >= 2
        assert await processes.still(RUN, is_still=False)
        assert "T" not in states()
        await processes.still(RUN, is_still=True)
        end = await processes.stop(RUN, grace_s=PATIENCE_S)  # Who stands still is asked to end all the same.
    assert isinstance(end, Exited)
    assert end.signal == signal.SIGTERM
    assert await processes.still(RUN, is_still=True) is None


async def test_a_signal_for_the_first_process_is_sent_where_it_is_handled(processes: Processes) -> None:
    """Sent to who doesn't handle it, a request to checkpoint would end the run."""
    started = await processes.start(
        a_shell("echo begun; while [ ! -e go ]; do sleep 0.01; done; trap 'exit 4' USR1; echo ready; sleep 60 & wait")
    )
    while "begun" not in output(processes):
        await asyncio.sleep(0.01)
    assert not processes.signal_first(started, signal.SIGUSR1)
    (processes.work_path(RUN) / "go").touch()
    while "ready" not in output(processes):
        await asyncio.sleep(0.01)
    assert processes.signal_first(started, signal.SIGUSR1)
    end = await asyncio.wait_for(processes.ended(RUN), PATIENCE_S)
    assert isinstance(end, Exited)
    assert end.exit_code == 4
    assert not processes.signal_first(started, signal.SIGUSR1)


async def test_a_run_ends_with_its_first_process(processes: Processes) -> None:
    """An exit is reported only once nothing of the run is left to use the device."""
    await processes.start(a_shell("sleep 60 & echo $!"))
    end = await processes.ended(RUN)
    assert isinstance(end, Exited)
    assert end.exit_code == 0
    assert not is_alive(int(output(processes)))


async def test_a_program_that_is_not_there_fails_to_start(processes: Processes) -> None:
    with pytest.raises(StartFailed) as failure:
        await processes.start(a_launch("/no/such/program"))
    assert isinstance(failure.value.end, ExecFailed)
    assert failure.value.end.errno == errno.ENOENT


async def test_a_gate_holds_the_workload_until_it_is_released(processes: Processes) -> None:
    """Nothing may run before its slice was read back."""
    launch = a_shell("echo ran")
    claim = await processes.prepare(launch)
    assert is_alive(claim.pid)
    assert Path(f"/proc/{claim.pid}/task/{claim.pid}/children").read_text() == ""
    started = await processes.release(RUN)
    assert started.shim_pid == claim.pid
    await processes.ended(RUN)
    assert output(processes) == "ran\n"


async def test_a_withdrawn_order_never_ran_and_may_be_given_again(processes: Processes) -> None:
    await processes.prepare(a_shell("echo first"))
    assert await processes.withdraw(RUN) == NeverStarted(epoch=1)
    with pytest.raises(StartRefused):
        await processes.start(a_launch(epoch=0))
    await processes.start(a_shell("echo second"))
    await processes.ended(RUN)
    assert output(processes) == "second\n"


async def test_an_older_epoch_may_not_start_what_a_later_one_ordered(processes: Processes) -> None:
    await processes.start(a_launch("/bin/sleep", "30", epoch=4))
    with pytest.raises(StartRefused):
        await processes.start(a_launch("/bin/sleep", "30", epoch=3))


async def test_output_is_bounded_and_keeps_the_end(processes: Processes) -> None:
    launch = a_launch(sys.executable, "-I", "-S", "-c", "for i in range(100000): print(i)")
    await processes.start(
        Launch(run_id=RUN, epoch=1, argv=launch.argv, env={}, log_bytes_max=80_000),
    )
    await processes.ended(RUN)
    text = output(processes)
    assert len(text) <= 2 * max(20_000, 65536)
    assert text.endswith("99998\n99999\n")


async def test_another_agent_cannot_take_the_same_directory(processes: Processes, root: Path) -> None:
    with pytest.raises(RootInUse):
        async with Processes(root):
            pass


async def test_only_an_ended_run_is_removed(processes: Processes, root: Path) -> None:
    await processes.start(a_launch("/bin/sleep", "30"))
    with pytest.raises(RunStillLives):
        await processes.remove(RUN)
    await processes.stop(RUN, grace_s=1)
    await processes.remove(RUN)
    assert list((root / "runs").iterdir()) == []


AGENT = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    from apportion.contracts.ids import RunId
    from apportion.node_agent.processes import Launch, Processes

    async def main():
        async with Processes(Path(sys.argv[1]), spawner_idle_s=0.5) as processes:
            def launch(name, script):
                run = RunId(f"acme/{name}/0/1")
                return Launch(run_id=run, epoch=1, argv=("/bin/sh", "-c", script), env={"PATH": "/usr/bin:/bin"})

            await processes.start(launch("short", "while [ ! -e go ]; do sleep 0.02; done; exit 9"))
            await processes.start(launch("long", "exec sleep 60"))
            await processes.prepare(launch("held", "true"))
            print("ready", flush=True)
            await asyncio.sleep(600)

    asyncio.run(main())
""")


async def test_runs_survive_the_agents_death_and_their_ends_arrive(root: Path) -> None:
    """Kill -9 of the agent: what ran goes on, what ended is reported, what waited at the gate never starts."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(root)], stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        assert await asyncio.to_thread(agent.stdout.readline) == b"ready\n"
    finally:
        agent.kill()
        agent.communicate()
    short, long, held = (RunId(f"acme/{name}/0/1") for name in ("short", "long", "held"))
    async with Processes(root, spawner_idle_s=0.5) as processes:
        before = processes.observe(short)
        assert isinstance(before, Running)
        (root / "runs" / directory_name(short) / "work" / "go").touch()
        while is_alive(before.claim.pid):  # It ends while no agent looks.
            await asyncio.sleep(0.01)
        found = await processes.adopt()
        assert isinstance(found[short], Exited)
        assert found[short].exit_code == 9  # type: ignore[union-attr]  # narrowed by the line above
        assert isinstance(found[long], Running)
        assert set(processes.live()) <= {long, held}
        if found[held] != NeverStarted(epoch=1):
            assert await processes.ended(held) == NeverStarted(epoch=1)
        end = await processes.stop(long, grace_s=PATIENCE_S)
        assert isinstance(end, Exited)
        assert end.signal == signal.SIGTERM


async def test_an_ended_run_is_not_taken_for_running_because_its_shim_guards_another(root: Path) -> None:
    """Pid, start time and boot id of its shim are all still right; its own last word counts."""
    other = RunId("acme/train/0/2")
    async with Processes(root, spawner_idle_s=0.5) as processes:
        first = await processes.start(a_launch())
        await processes.ended(RUN)
        second = await processes.start(a_launch("/bin/sleep", "60", run=other))
        assert first.shim_pid == second.shim_pid
    async with Processes(root, spawner_idle_s=0.5) as processes:
        found = await processes.adopt()
        assert isinstance(found[RUN], Exited)
        assert isinstance(found[other], Running)
        assert set(processes.live()) == {other}
        end = await processes.stop(other, grace_s=PATIENCE_S)
        assert isinstance(end, Exited)
        assert end.signal == signal.SIGTERM
        assert await asyncio.wait_for(processes.ends.get(), PATIENCE_S)
        while is_alive(second.shim_pid):  # No agent asked for it, so it ends with its run.
            await asyncio.sleep(0.01)


async def test_without_an_agent_too_a_killed_shim_leaves_nothing(root: Path) -> None:
    async with Processes(root, spawner_idle_s=0.5) as processes:
        started = await processes.start(a_shell("sleep 60 & exec sleep 60"))
    os.kill(started.shim_pid, signal.SIGKILL)
    while is_alive(started.pid):
        await asyncio.sleep(0.01)
    async with Processes(root, spawner_idle_s=0.5) as processes:
        assert await processes.adopt() == {RUN: Lost(reason=LossReason.SHIM_GONE)}


BUSY_AGENT = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    from apportion.contracts.ids import RunId
    from apportion.node_agent.processes import Launch, Processes, StartFailed, StartRefused
    from apportion.node_agent.run_records import Absent, NeverStarted, Prepared

    async def main():
        root = Path(sys.argv[1])
        async with Processes(root, spawner_idle_s=0.5) as processes:
            await processes.adopt()
            print("ready", flush=True)

            async def one(index):
                run = RunId(f"acme/busy/{index}/1")
                if not isinstance(processes.observe(run), Absent | NeverStarted | Prepared):
                    return
                argv = ("/bin/sh", "-c", f"echo {index} >> {root}/ran")
                launch = Launch(run_id=run, epoch=1, argv=argv, env={"PATH": "/usr/bin:/bin"})
                if index % 2:
                    await processes.prepare(launch)
                    await processes.release(run)
                else:
                    await processes.start(launch)
                await processes.ended(run)

            room = asyncio.Semaphore(6)

            async def in_turn(index):
                async with room:
                    await one(index)

            await asyncio.gather(*(in_turn(index) for index in range(int(sys.argv[2]))))

    asyncio.run(main())
""")


async def test_no_run_starts_twice_and_no_end_is_lost_however_often_the_agent_is_killed(root: Path) -> None:
    """Eight agents in a row, each killed in the middle of its starts; the ninth finishes the rest."""
    count = 60
    generator = random.Random(7)
    for is_last in [False] * 8 + [True]:
        agent = subprocess.Popen([sys.executable, "-c", BUSY_AGENT, str(root), str(count)], stdout=subprocess.PIPE)
        try:
            assert agent.stdout is not None
            assert await asyncio.to_thread(agent.stdout.readline) == b"ready\n"
            if is_last:
                assert await asyncio.to_thread(agent.wait) == 0
            else:
                await asyncio.sleep(generator.uniform(0, 0.1))
        finally:
            agent.kill()
            agent.communicate()
    async with Processes(root, spawner_idle_s=0.5) as processes:
        found = await processes.adopt()
        ends = {run: await processes.ended(run) for run in found}
    assert len(ends) == count
    assert all(isinstance(end, Exited) and end.exit_code == 0 for end in ends.values())
    ran = [int(line) for line in (root / "ran").read_text().split()]
    assert sorted(ran) == list(range(count))


async def test_a_pid_that_passed_to_another_process_is_neither_adopted_nor_killed(root: Path) -> None:
    async with Processes(root, spawner_idle_s=0.5) as processes:
        await processes.start(a_launch("/bin/sleep", "60"))
        await processes.stop(RUN, grace_s=0)
    directory = root / "runs" / directory_name(RUN)
    (directory / "exit").unlink()
    stranger = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
    try:
        claim = json.loads((directory / "claim").read_text())
        # A pid comes back only after all others were used, so its new holder never began in the same clock tick.
        # Here the stranger may begin within the tick of the first, so it is the claim that is put back by one.
        earlier = {**claim, "pid": stranger.pid, "start_ticks": claim["start_ticks"] - 1}
        (directory / "claim").write_text(json.dumps(earlier))
        async with Processes(root, spawner_idle_s=0.5) as processes:
            assert await processes.adopt() == {RUN: Lost(reason=LossReason.SHIM_GONE)}
            assert processes.live() == {}
            await processes.stop(RUN, grace_s=0)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_spawner_that_died_is_replaced_and_its_runs_go_on(processes: Processes, root: Path) -> None:
    first = await processes.start(a_launch("/bin/sleep", "60"))
    spawner = int(Path(f"/proc/{first.shim_pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(spawner, signal.SIGKILL)
    second = RunId("acme/train/0/2")
    started = await processes.start(a_launch("/bin/sleep", "60", run=second))
    assert isinstance(started, StartedProcess)
    assert is_alive(first.pid)
    for run in (RUN, second):
        end = await processes.stop(run, grace_s=5)
        assert isinstance(end, Exited)
        assert end.signal == signal.SIGTERM


async def test_a_shim_guards_one_run_after_the_other_and_no_order_reaches_the_wrong_one(processes: Processes) -> None:
    """What was meant for an ended run must not hit the one that its shim guards now."""
    first = await processes.start(a_launch())
    await processes.ended(RUN)
    second = RunId("acme/train/0/2")
    started = await processes.start(a_launch("/bin/sleep", "60", run=second))
    assert started.shim_pid == first.shim_pid
    assert not processes.signal(RUN, signal.SIGKILL)
    assert isinstance(await processes.stop(RUN, grace_s=0), Exited)
    assert is_alive(started.pid)


async def test_a_limit_on_open_files_holds_for_its_run_alone(processes: Processes) -> None:
    script = "ulimit -n"
    limited = Launch(run_id=RUN, epoch=1, argv=("/bin/sh", "-c", script), env={"PATH": os.defpath}, open_files_max=64)
    await processes.start(limited)
    await processes.ended(RUN)
    other = RunId("acme/train/0/2")
    await processes.start(a_shell(script, run=other))
    await processes.ended(other)
    assert output(processes) == "64\n"
    assert output(processes, other) != "64\n"


async def test_two_hundred_runs_are_all_accounted_for(processes: Processes) -> None:
    runs = [RunId(f"acme/many/{index}/1") for index in range(200)]
    room = asyncio.Semaphore(12)

    async def one(run: RunId) -> None:
        async with room:
            await processes.start(a_launch(run=run))
            await processes.ended(run)

    await asyncio.gather(*map(one, runs))
    told = [processes.ends.get_nowait() for _ in runs]
    assert processes.ends.empty()
    assert sorted(end.run_id for end in told) == sorted(runs)
    assert all(isinstance(end.end, Exited) and end.end.exit_code == 0 for end in told)
    assert processes.live() == {}


def test_a_session_of_another_is_not_swept() -> None:
    """A live leader means that the number of the session is not ours."""
    stranger = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
    try:
        assert kill_processes_of("no-such-token", stranger.pid) == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
