"""A few rounds of torture; ``make torture`` has the thousand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_an_agent_killed_at_random_moments_loses_nothing_and_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--rounds", "3", "--seed", "7"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout[done.stdout.index("{") :])
    assert (figures["rounds"], figures["quiet_moments"]) == (3, 1)
    assert figures["runs"] == sum(figures["causes"].values())
