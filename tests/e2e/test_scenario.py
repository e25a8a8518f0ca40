"""A scenario through the command: faults on real processes, and the verdict as an exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SCENARIO = """
name = "a placer dies under load, and a node with it"
nodes = 2
devices = 2
standby = true

[[step]]
at_s = 0.5
submit = { name = "job", count = 8, every_ms = 200 }
job = { workload = { command = ["sleep", "3"] }, resources = { gpu_milli = 500, gpu_memory_mib = 8000 } }

[[step]]
at_s = 1
fault = { kind = "service-kill", target = "placer", for_s = 1 }

[[step]]
at_s = 3
fault = { kind = "node-loss", target = "node-1", for_s = 6 }

[[check]]
name = "jobs that succeeded"
sql = "SELECT count(*) FROM v_job WHERE outcome = 'succeeded'"
at_least = %d
"""


@pytest.mark.parametrize(("wanted", "code", "says"), [(8, 0, "PASS: 9 of 9 checks hold"), (9, 1, "FAIL: 8 of 9")])
def test_a_scenario_ends_with_its_verdict(tmp_path: Path, wanted: int, code: int, says: str) -> None:
    """What CI asks is the exit code; what a person reads is which figure it was."""
    file = tmp_path / "scenario.toml"
    file.write_text(SCENARIO % wanted)
    done = subprocess.run(
        [sys.executable, "-m", "apportion.cli", "scenario", "run", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout + done.stderr
