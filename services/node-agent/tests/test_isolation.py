"""The isolation tests judge fairly, prove that they could fail, and leave nothing behind."""

import argparse
import contextlib
import tempfile
from pathlib import Path

import pytest

from apportion.contracts.causes import IsolationFinding, IsolationTest
from apportion.contracts.events import IsolationCheck
from apportion.node_agent import canaries
from apportion.node_agent.isolation.__main__ import run
from apportion.node_agent.isolation.judgement import changes_permille, check, overall, reported

PASSED, FAILED = IsolationFinding.PASSED, IsolationFinding.FAILED
INCONCLUSIVE, REPORTED = IsolationFinding.INCONCLUSIVE, IsolationFinding.REPORTED


@pytest.mark.parametrize(
    ("holds", "control", "harmed", "verdict"),
    [
        (True, {"failures": 3}, True, PASSED),
        (False, {"failures": 3}, True, FAILED),
        (True, {"failures": 0}, False, INCONCLUSIVE),
        (False, {"failures": 0}, False, INCONCLUSIVE),
        (True, None, False, INCONCLUSIVE),
    ],
)
def test_without_a_control_that_fails_nothing_is_proved(
    holds: bool, control: dict[str, int] | None, harmed: bool, verdict: IsolationFinding
) -> None:
    assert check("x", holds=holds, figures={}, control=control, control_harmed=harmed).verdict is verdict


def test_the_worst_check_decides_and_reported_figures_dont() -> None:
    def one(verdict: IsolationFinding) -> IsolationCheck:
        return IsolationCheck(name="x", verdict=verdict)

    assert overall([one(PASSED), reported("y", figures={}, detail="")]) is PASSED
    assert overall([one(PASSED), one(INCONCLUSIVE)]) is INCONCLUSIVE
    assert overall([one(INCONCLUSIVE), one(FAILED), one(PASSED)]) is FAILED
    assert overall([reported("y", figures={}, detail="")]) is REPORTED


def test_changes_are_medians_over_rounds() -> None:
    """One round with a hiccup decides nothing."""
    quiet, slow, hiccup = [100, 100, 110], [104, 104, 115], [100, 900, 9000]
    found = changes_permille([(quiet, slow), (quiet, slow), (quiet, hiccup)])
    assert found == {"p50_change_permille": 40, "p95_change_permille": 45, "noise_permille": 0}


async def test_a_shared_device_is_tried_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same script as on hardware, in small: each check passes, and its control does harm."""
    directory = Path(tempfile.mkdtemp(prefix="na-"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(canaries, "ANSWERS_S_MAX", (2.0, 4.0))
    verdicts = await run(
        argparse.Namespace(
            mode="mps",
            profile="a30",
            driver="580",
            hardware=False,
            device=0,
            rounds=2,
            kernels=3,
            test=["compute", "crash"],
        )
    )
    assert [(one.test, one.verdict) for one in verdicts] == [
        (IsolationTest.COMPUTE, PASSED),
        (IsolationTest.CRASH, PASSED),
    ]
    checks = {check.name: check for verdict in verdicts for check in verdict.checks}
    assert checks["hog-sm"].control["p50_change_permille"] >= 50
    assert checks["hog-dram"].verdict is REPORTED
    assert checks["illegal-access"].figures["attributed"] == 1
    assert {one.control["neighbour_unharmed"] for one in checks.values() if "neighbour_unharmed" in one.control} == {0}
    assert _processes(directory) == set()
    directory.rmdir()


def _processes(directory: Path) -> set[str]:
    """Processes that were told of this directory, without those that have ended."""
    found = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and str(directory).encode() in (process / "environ").read_bytes():
                found.add(f"{process.name} {(process / 'cmdline').read_text()}")
    return found
