"""`apportion replay`: the pool as it was and the way between two moments, from a file, with no bus anywhere."""

import json
from pathlib import Path

import pytest

from apportion.cli import past
from apportion.cli.app import outcome
from apportion.cli.exits import CommandFailed
from apportion.cli.moments import instant
from apportion.contracts import events as ev
from apportion.contracts.causes import Pending
from apportion.contracts.ids import JobId, NodeId, RunId
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, a_queue
from apportion.monitor.history import History
from apportion.monitor.log import EventLog
from apportion.monitor.testing import Tape


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job runs, another waits."""
    tape = Tape()
    path = tmp_path_factory.mktemp("log") / "log.duckdb"
    waits = ev.JobPendingReasonChanged(
        job_id=JobId("acme/b"), code=Pending.INSUFFICIENT_COMPUTE, since_at=NOON, hint="a device is full"
    )
    with EventLog.open(path) as log:
        log.append(
            [
                tape.fact(a_queue()),
                tape.fact(a_node(devices=1)),
                tape.fact(a_job("a")),
                tape.fact(a_job("b")),
                tape.fact(a_placement("acme/a", compute_milli=900)),
                tape.fact(ev.RunStarted(run_id=RunId("acme/a/0/1"), node_id=NodeId("node-1"), pid=1, started_at=NOON)),
                tape.fact(waits),
            ]
        )
    return path


def test_the_pool_as_it_was_for_people(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes, devices with what is held of them, and who waits and why."""
    assert outcome(["replay", "--at", "7", "--file", str(path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "fact 7, 2026-09-01 12:00:00.007Z: 1 of 1 nodes ready, 1 devices, 900 of 1000 milli-GPU held by 1 runs, "
        "1 jobs wait"
    )
    assert said[3].split() == ["node-1", "ready", "0", "1", "1", "900", "1000", "4096", "81920"]
    assert said[6].split() == ["node-1", "GPU-node-1-0", "healthy", "mps", "900", "4096", "acme/a/0/1", "started"]
    assert said[9].split(maxsplit=5) == ["acme/b", "main", "1", "0.0s", "InsufficientCompute", "a device is full"]


def test_the_pool_as_it_was_for_programs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By an instant: the last fact at it or before it counts."""
    assert outcome(["replay", "--at", "2026-09-01T12:00:00.0059Z", "--file", str(path), "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "apportion.pool/1"
    assert said["as_of"] == {"facts_seq": 5, "recorded_at": NOON + 5_000_000}
    assert [(job["job_id"], job["state"], job["pending"]) for job in said["jobs"]] == [
        ("acme/a", "running", None),
        ("acme/b", "queued", "PendingEvaluation"),
    ]
    assert said["jobs"][0]["runs"][0]["slices"][0]["compute_milli"] == 900
    assert said["nodes"][0]["devices"][0]["used_compute_milli"] == 900


def test_a_stretch_is_played_at_its_pace(path: Path) -> None:
    """As far apart as the facts were recorded, divided by the speed; none of it is needed for a program."""
    waits: list[float] = []
    with History.open(path) as history:
        played = [past.fact_shown(*one) for one in past.play(history, first=4, last=7, speed=0.5, sleep=waits.append)]
    assert waits == [0.002] * 3
    assert [(fact["seq"], fact["kind"], fact["held_milli"], fact["waiting"]) for fact in played] == [
        (5, "RunPlaced", 900, 1),
        (6, "RunStarted", 900, 1),
        (7, "JobPendingReasonChanged", 900, 1),
    ]
    assert "acme/b: waits: InsufficientCompute: a device is full  [placer]" in past.fact_line(played[-1])


def test_playing_ends_where_it_was_told_to(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--speed", "max", "--file", str(path), "-o", "jsonl"]
    assert outcome(["replay", "--from", "-5m", "--to", "2", *options]) == 5
    assert outcome(["replay", "--from", "+00:00", "--to", "3", *options]) == 0
    assert [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()] == [2, 3]
    assert outcome(["replay", "--from", "3", "--to", "2", *options]) == 2
    assert outcome(["replay", "--from", "99", *options]) == 5


@pytest.mark.parametrize(
    "arguments",
    [[], ["--at", "1", "--verify"], ["--to", "3"], ["--at", "yesterday"], ["--from", "1", "--speed", "-2x"]],
)
def test_what_makes_no_sense_is_said_with_what_would(arguments: list[str], path: Path) -> None:
    assert outcome(["replay", *arguments, "--file", str(path)]) == 2


def test_an_instant_without_a_zone_is_utc() -> None:
    """Whatever the terminal's own zone is: the same command names the same moment everywhere."""
    assert instant("2026-09-01 12:00", first_at=0, last_at=0, option="--at") == NOON
    assert instant("2026-09-01T14:00:00+02:00", first_at=0, last_at=0, option="--at") == NOON
    with pytest.raises(CommandFailed, match="--at: expected a sequence"):
        instant("noon", first_at=0, last_at=0, option="--at")
