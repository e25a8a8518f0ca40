"""`apportion usage`: what it prints is what the log's own SQL says, and what it exports is safe to open."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from apportion.cli.app import outcome
from apportion.cli.usage import safe_cell
from apportion.contracts import events as ev
from apportion.contracts.causes import Pricing, RunCause, ServiceClass
from apportion.contracts.ids import NodeId, RunId, TenantId
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, a_queue
from apportion.monitor.log import EventLog, own_questions
from apportion.monitor.testing import Recorded, Tape

NODE = NodeId("node-1")
A, B = RunId("acme/a/0/1"), RunId("globex/b/0/1")
MINUTE = 60_000_000_000

CARD = ev.RateCardChanged(
    effective_at=NOON,
    currency="EUR",
    rates=(
        ev.Rate(pricing=Pricing.ON_DEMAND, micro_per_gpu_hour=6_000_000),
        ev.Rate(pricing=Pricing.SPOT, micro_per_gpu_hour=3_000_000),
    ),
    actor="user:ann",
    reason="2027",
)


def a_history(tape: Tape) -> list[Recorded]:
    """Acme holds half a device for 4 minutes and computes for 2; globex a whole one from minute 3 on, until now."""

    def at(minute: int, event: ev.Fact) -> Recorded:
        tape.at = NOON + minute * MINUTE - 1_000_000
        return tape.fact(event)

    return [
        at(0, a_queue()),
        at(0, CARD),
        at(0, a_node()),
        at(0, a_job("a")),
        at(0, a_job("b", tenant=TenantId("globex"), service_class=ServiceClass.SPOT)),
        at(0, a_placement("acme/a", compute_milli=500, memory_mib=1000)),
        at(1, ev.RunStarted(run_id=A, node_id=NODE, pid=1, started_at=NOON)),
        at(3, ev.RunFinished(run_id=A, node_id=NODE, cause=RunCause.SUCCESS, finished_at=1, peak_memory_mib=250)),
        at(3, a_placement("globex/b", device=1, compute_milli=1000, memory_mib=2000)),
        at(4, ev.RunReleased(run_id=A, node_id=NODE, released_at=NOON)),
        at(6, a_node("node-2")),
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That history."""
    path = tmp_path_factory.mktemp("log") / "log.duckdb"
    with EventLog.open(path) as log:
        log.append(a_history(Tape()))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert outcome(["usage", "-o", "json", *map(str, arguments)]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_log_is_summed_in_whole_numbers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The totals are the rows', and the rows are SQL's over the same log."""
    answer = said(capsys, "--file", path, "--by", "tenant,class")
    minute = 60_000
    rows = {
        (row["tenant"], row["class"]): (
            row["requested_milli_ms"], row["allocated_milli_ms"], row["used_milli_ms"], row["idle_milli_ms"],
            row["allocated_mib_ms"], row["used_mib_ms"], row["over_asked_mib_ms"],
        )
        for row in answer["usage"]
    }  # fmt: skip
    assert rows == {
        ("acme", "batch"): (
            250 * 4 * minute, 500 * 4 * minute, 500 * 2 * minute, 500 * 2 * minute,
            1000 * 4 * minute, 250 * 2 * minute, 750 * 2 * minute,
        ),
        ("globex", "spot"): (250 * 3 * minute, 1000 * 3 * minute, 0, 1000 * 3 * minute, 2000 * 3 * minute, 0, 0),
    }  # fmt: skip
    with own_questions(path) as ask:
        assert ask("SELECT sum(allocated_milli_ms), sum(used_milli_ms), sum(allocated_mib_ms) FROM v_usage") == [
            tuple(answer["total"][name] for name in ("allocated_milli_ms", "used_milli_ms", "allocated_mib_ms"))
        ]


def test_what_it_costs_is_what_was_allocated_times_the_price(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a device for 4 minutes at 6.00 an hour; a whole one for 3 minutes at the spot price of 3.00."""
    answer = said(capsys, "--file", path, "--by", "pricing")
    assert {row["pricing"]: row["cost_micro"] for row in answer["usage"]} == {
        "on_demand": {"EUR": 200_000},
        "spot": {"EUR": 150_000},
    }
    assert answer["total"]["cost_micro"] == {"EUR": 350_000}
    assert answer["total"]["unpriced_milli_ms"] == 0


def test_two_periods_make_the_whole(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut in the middle of a held slice."""
    cut = "2026-09-01T12:03:30.123456Z"
    parts = [said(capsys, "--file", path, *more)["total"] for more in (("--to", cut), ("--from", cut))]
    whole = said(capsys, "--file", path)["total"]
    for name in ("held_ms", "requested_milli_ms", "allocated_milli_ms", "used_milli_ms", "used_mib_ms"):
        assert sum(part[name] for part in parts) == whole[name], name


def test_the_most_idle_comes_first(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(["usage", "--waste", "--file", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["TENANT", "SEGMENTS", "ALLOCATED-GPU-H", "IDLE-GPU-H", "IDLE-PCT", "OVER-ASKED-GIB-H", "OVER-ASKED-PCT"],
        ["globex", "1", "0.05", "0.05", "100", "0.0"],
        ["acme", "1", "0.033", "0.016", "50", "0.024", "75"],
        ["(total)", "2", "0.083", "0.066", "80", "0.024", "75"],
    ]


@pytest.mark.parametrize("columns", ["own", "focus", "opencost"])
def test_an_export_has_each_segment_once_in_both_formats(columns: str, path: Path, tmp_path: Path) -> None:
    """Read back with other tools than those that wrote it: Python's csv, and SQL."""
    import duckdb

    for suffix in ("csv", "parquet"):
        arguments = ["usage", "--file", str(path), "--export", str(tmp_path / f"x.{suffix}"), "--columns", columns]
        assert outcome(arguments) == 0
    with (tmp_path / "x.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    found = duckdb.read_parquet(str(tmp_path / "x.parquet"))
    assert list(lines[0]) == found.columns
    rows = found.fetchall()
    assert len(lines) == len(rows) == 2
    for line, row in zip(lines, rows, strict=True):
        same = [("" if value is None else str(value)) for value in row]
        assert all(text == seen or float(text) == float(seen) for text, seen in zip(line.values(), same, strict=True))
    assert {"own": "tenant", "focus": "SubAccountId", "opencost": "namespace"}[columns] in lines[0]
    assert "acme" in lines[0].values()


def test_nothing_that_a_stranger_wrote_runs_in_a_spreadsheet() -> None:
    """Text alone: a negative number stays a number."""
    assert [safe_cell(text) for text in ("=1", "+1", "-1", "@x", "\t=1", "\r=1", "a=1", -1, None)] == [
        "'=1", "'+1", "'-1", "'@x", "'\t=1", "'\r=1", "a=1", -1, "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["--by", "colour"], ["--by", ""], ["--export", "x.xls"], ["--from", "-1m", "--to", "+0s"]]
)
def test_what_makes_no_sense_is_said_with_what_would(arguments: list[str], path: Path) -> None:
    assert outcome(["usage", "--file", str(path), *arguments]) == 2
