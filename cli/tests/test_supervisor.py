"""What the supervisor writes on command lines is what the services read; what it ends is its own alone."""

import errno
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from apportion.cli import leftovers, queues, supervisor
from apportion.cli.leftovers import Kind
from apportion.contracts.events import QueueUpsertRequested
from apportion.runtime.settings import SettingsInvalid, from_command_line

pytestmark = pytest.mark.integration

SETTINGS = {
    "apportion.monitor": ("MonitorSettings", "monitor"),
    "apportion.admission": ("AdmissionSettings", "admission"),
    "apportion.placer": ("PlacerSettings", "placer"),
    "apportion.node_agent": ("AgentSettings", "node-agent"),
}


def _plan(tmp_path: Path, **changes: Any) -> supervisor.PoolPlan:
    given: dict[str, Any] = {
        "pool": "lab",
        "data_dir": tmp_path,
        "bus_port": 0,
        "nodes": (supervisor.NodePlan(name="node-1", devices=8, profile="h200"),),
        "queues": queues.DEFAULT,
        "suspect_ms": 1000,
        "lease_ms": 3000,
    }
    return supervisor.PoolPlan(**{**given, **changes})


def test_every_service_understands_what_it_is_started_with(tmp_path: Path) -> None:
    """A flag that was renamed on one side would only show when a pool is started."""
    plan = _plan(tmp_path)
    environ = supervisor.service_environment(plan, "nats://127.0.0.1:4333")
    seen = {}
    for name, argv in supervisor.command_lines(plan, python="python3"):
        assert argv[:2] == ["python3", "-m"]
        kind, table = SETTINGS[argv[2]]
        module = importlib.import_module(f"{argv[2]}.__main__")
        seen[name] = from_command_line(getattr(module, kind), table, argv[3:], environ=environ).settings
    assert {(each.pool, each.bus_url, each.data_dir) for each in seen.values()} == {
        ("lab", "nats://127.0.0.1:4333", tmp_path)
    }
    assert (seen["monitor"].suspect_ms, seen["monitor"].lease_ms) == (1000, 3000)
    agent = seen["node-agent-node-1"]
    assert (agent.node_id, agent.simulated_devices, agent.simulated_profile) == ("node-1", 8, "h200")
    assert agent.heartbeat_ms * 3 < 1000


def test_standbys_are_the_same_services_with_files_of_their_own(tmp_path: Path) -> None:
    """Two processes of one author must not write the same files; agents have no standby."""
    plan = _plan(tmp_path, standby=True)
    lines = dict(supervisor.command_lines(plan, python="python3"))
    assert sorted(lines) == [
        "admission",
        "admission-standby",
        "monitor",
        "monitor-standby",
        "node-agent-node-1",
        "placer",
        "placer-standby",
    ]
    environ = supervisor.service_environment(plan, "nats://127.0.0.1:4333")
    for author in supervisor.AUTHORS:
        first, second = lines[author], lines[f"{author}-{supervisor.STANDBY}"]
        assert second[: len(first)] == first
        module = importlib.import_module(f"{first[2]}.__main__")
        kind, table = SETTINGS[first[2]]
        read = [
            from_command_line(getattr(module, kind), table, argv[3:], environ=environ).settings
            for argv in (first, second)
        ]
        assert [(each.standby, each.data_dir) for each in read] == [(False, tmp_path), (True, tmp_path / "standby")]


def test_the_file_decides_a_services_log_level_where_nobody_said_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `up` hands to services by environment beats their file: only what it was told there itself may be."""
    file = tmp_path / "apportion.toml"
    file.write_text('[common]\nlog_level = "warning"\n[placer]\nlog_level = "debug"\n')
    module = importlib.import_module("apportion.placer.__main__")

    def level() -> str:
        plan = _plan(tmp_path, config_file=file)
        argv = dict(supervisor.command_lines(plan, python="python3"))["placer"]
        environ = supervisor.service_environment(plan, "nats://127.0.0.1:4333")
        return str(from_command_line(module.PlacerSettings, "placer", argv[3:], environ=environ).settings.log_level)

    monkeypatch.delenv("APPORTION_LOG_LEVEL", raising=False)
    assert level() == "debug"
    monkeypatch.setenv("APPORTION_LOG_LEVEL", "error")
    assert level() == "error"


def test_a_node_with_its_own_driver_is_not_simulated(tmp_path: Path) -> None:
    """Simulated devices on a machine with real ones would be a lie."""
    plan = _plan(tmp_path, nodes=(supervisor.NodePlan(name="gpu-7"),))
    argv = dict(supervisor.command_lines(plan, python="python3"))["node-agent-gpu-7"]
    assert not [argument for argument in argv if argument.startswith("--simulated")]


def test_queues_come_from_the_file_as_the_operators_wishes(tmp_path: Path) -> None:
    """They are answered, logged and replayed like any other wish, and say where they are from."""
    file = tmp_path / "apportion.toml"
    file.write_text('[[queue]]\nname = "train"\ntenants = ["acme"]\nlimit_compute_milli = 4000\n')
    assert queues.from_file(file) == (
        QueueUpsertRequested(
            queue="train", tenants=("acme",), limit_compute_milli=4000, reason="as apportion.toml has it"
        ),
    )


def test_queues_above_are_asked_for_first(tmp_path: Path) -> None:
    """However the file has them; one that others are below needs nobody who may submit to it."""
    file = tmp_path / "apportion.toml"
    file.write_text(
        '[[queue]]\nname = "train"\nparent = "team"\ntenants = ["acme"]\nguaranteed_model_milli = {h100-80 = 2000}\n'
        '[[queue]]\nname = "team"\nguaranteed_model_milli = {h100-80 = 2000}\n'
    )
    assert [queue.queue for queue in queues.from_file(file)] == ["team", "train"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[[queue]]\nname = "train"\ntenants = ["acme"]\nlimit = 3\n', "limit"),
        ('[[queue]]\nname = "Train"\ntenants = ["acme"]\n', "name"),
        ('[[queue]]\nname = "train"\n', "tenants"),
        ('[[queue]]\ntenants = ["acme"]\n', "name"),
        ('[[queue]]\nname = "train"\ntenants = []\n', "tenants"),
        ('[[queue]]\nname = "train"\nparent = "train"\ntenants = ["acme"]\n', "parent"),
        ('[[queue]]\nname = "train"\ntenants = ["acme"]\n' * 2, "name"),
    ],
)
def test_a_queue_that_cannot_be_is_told_with_its_key(tmp_path: Path, text: str, key: str) -> None:
    """Before anything is started."""
    file = tmp_path / "apportion.toml"
    file.write_text(text)
    with pytest.raises(SettingsInvalid) as refused:
        queues.from_file(file)
    assert refused.value.key == key


def _sleeper(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process that looks as it is told to, and sleeps."""
    return subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
    )


def test_only_the_directorys_own_processes_are_found_and_ended(tmp_path: Path) -> None:
    """An editor with one of our files open, and the pool next door, live on."""
    ours, theirs = tmp_path / "pool", tmp_path / "pool2"
    spawner = "/x/apportion/node_agent/spawner.py"
    started = {
        "shim": _sleeper(spawner, str(ours / "nodes" / "node-1")),
        "other node's shim": _sleeper(spawner, str(ours / "nodes" / "node-10")),
        "neighbour": _sleeper(spawner, str(theirs / "nodes" / "node-1")),
        "editor": _sleeper(str(ours / "logs" / "monitor.log"), APPORTION_DATA_DIR=str(ours)),
    }
    try:
        for process in started.values():
            assert process.stdout is not None
            process.stdout.readline()
        found = {process.pid: process.kind for process in leftovers.processes_of(ours)}
        assert found == {started["shim"].pid: Kind.SHIM, started["other node's shim"].pid: Kind.SHIM}
        assert [process.pid for process in leftovers.processes_of(ours, node="node-1")] == [started["shim"].pid]
        assert leftovers.end_all(ours, frozenset(Kind)) == 2
        assert started["shim"].wait(10) != 0
        assert started["other node's shim"].wait(10) != 0
        assert started["neighbour"].poll() is None
        assert started["editor"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


async def test_a_service_that_dies_is_started_again(tmp_path: Path) -> None:
    """And one that is held is not, until it is wanted again."""
    import asyncio
    import signal

    (tmp_path / "logs").mkdir()
    changed = asyncio.Event()
    service = supervisor.Service(
        "sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], env=dict(os.environ), data_dir=tmp_path
    )

    async def next_pid() -> int:
        await asyncio.wait_for(changed.wait(), 30)
        changed.clear()
        assert service.pid is not None
        return service.pid

    service.start(changed.set)
    try:
        first = await next_pid()
        os.kill(first, signal.SIGKILL)
        second = await next_pid()
        assert second != first
        assert service.restarts == 1
        service.hold()
        os.kill(second, signal.SIGKILL)
        began = time.monotonic()
        while service.pid is not None and time.monotonic() - began < 30:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * supervisor.BACKOFF_S_MIN)
        assert service.pid is None

        def cannot() -> None:
            changed.set()
            raise OSError(errno.ENOSPC, "No space left on device")

        service.start(cannot)
        third = await next_pid()
        assert third not in {first, second}
        os.kill(third, signal.SIGKILL)
        assert await next_pid() != third, "what others couldn't write down keeps no service from running"
    finally:
        await service.stop(1.0)
    assert service.pid is None


async def test_a_service_that_was_told_nonsense_ends_the_start_at_once(tmp_path: Path) -> None:
    """What it says of its settings is what the operator gets, with the exit code of wrong configuration."""
    (tmp_path / "logs").mkdir()
    pool = supervisor.Supervisor(_plan(tmp_path))
    says = "import sys; print('apportion.toml [placer]: ageing_s: expected a number'); sys.exit(2)"
    service = supervisor.Service("placer", [sys.executable, "-c", says], env=dict(os.environ), data_dir=tmp_path)
    pool.services = {"placer": service}
    service.start(lambda: None)
    try:
        with pytest.raises(
            supervisor.ServiceMisconfigured, match=r"placer can't run.*\n.*ageing_s: expected"
        ) as caught:
            await pool.wait_ready(timeout_s=600)
    finally:
        await service.stop(1.0)
    assert caught.value.exit_code == 2
