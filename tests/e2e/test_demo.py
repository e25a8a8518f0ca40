"""The demo, shortened: the same story and the same proof, within a smaller day."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.cli.leftovers import processes_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMISED = (
    "jobs_requested", "jobs_admitted", "jobs_rejected", "jobs_succeeded", "jobs_failed", "runs_started", "runs_moved",
    "lost", "started_twice", "over_allocated", "events", "chain_ok", "replay_decisions", "replay_differences", "wall_s",
)  # fmt: skip


def test_the_demo_loses_a_node_and_proves_that_it_lost_no_job(tmp_path: Path) -> None:
    """What a newcomer sees first has to be true, and a script has to be able to tell."""
    place = tmp_path / "demo"
    command = [sys.executable, "-m", "apportion.cli", "demo", "--once", "-o", "json", "--seconds", "9", "--port", "0"]
    done = subprocess.run(
        [*command, "--data-dir", str(place)], capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(PROMISED) <= set(found)
    assert found["jobs_requested"] == found["jobs_admitted"] + found["jobs_rejected"]
    assert found["jobs_rejected"] == 9
    assert found["jobs_admitted"] == found["jobs_succeeded"] + found["jobs_failed"] > 50
    assert found["nodes_fenced"] >= 1
    assert found["runs_moved"] >= 1
    assert (found["lost"], found["started_twice"], found["over_allocated"]) == (0, 0, 0)
    assert found["chain_ok"] is True
    assert found["replay_decisions"] > 0
    assert found["replay_differences"] == 0
    assert processes_of(place) == []


def test_the_demo_wipes_only_what_a_demo_made(tmp_path: Path) -> None:
    """A mistyped --data-dir must not cost anybody their files."""
    (tmp_path / "thesis.tex").write_text("years of work")
    command = [sys.executable, "-m", "apportion.cli", "demo", "--once", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "not wiped" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
