"""Which pool a command talks about."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.cli.places import PoolNote, find, start_ticks, write_note
from apportion.contracts.testing import NOON

pytestmark = pytest.mark.integration

URL = "nats://127.0.0.1:49999"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pool's directory that is not the default one, with a note and a process that looks like its monitor."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("APPORTION_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    data_dir = tmp_path / "pool"
    write_note(
        PoolNote(
            pool="other",
            bus_url=URL,
            supervisor_pid=os.getpid(),
            supervisor_start_ticks=ticks,
            started_at=NOON,
            data_dir=str(data_dir),
            version="0.1.0",
        )
    )
    return data_dir


def test_a_pool_on_this_machine_is_found_by_its_bus_alone(elsewhere: Path) -> None:
    """`up --data-dir X` on a port: whoever names the port means the log in X."""
    script = "import sys; print(flush=True); sys.stdin.read()"
    program = [sys.executable, "-c", script, "-m", "apportion.monitor"]
    environ = {**os.environ, "APPORTION_DATA_DIR": str(elsewhere)}
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as monitor:
        try:
            assert monitor.stdout is not None
            monitor.stdout.readline()  # Until then the kernel may not show its command line yet.
            found = find({"bus_url": URL})
            other = find({"bus_url": "nats://127.0.0.1:49998"})
        finally:
            monitor.kill()
    assert (found.data_dir, found.pool, found.bus_url) == (elsewhere, "other", URL)
    assert (other.note, other.data_dir) == (None, Path(os.environ["XDG_DATA_HOME"]) / "apportion")


def test_a_directory_that_was_named_is_the_one(elsewhere: Path, tmp_path: Path) -> None:
    """However many pools run."""
    assert find({"data_dir": str(tmp_path / "mine"), "bus_url": URL}).data_dir == tmp_path / "mine"
