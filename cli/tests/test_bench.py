"""``apportion bench placement``: figures from a directory, or what is missing there."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from apportion.cli import bench_commands
from apportion.cli.app import cli
from apportion.cli.exits import Exit

assert bench_commands


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    nodes = [{"sn": f"n{i}", "cpu_milli": 64000, "memory_mib": 262144, "gpu": 2, "model": "T4"} for i in range(4)]
    tasks = [
        {"name": f"t{i}", "cpu_milli": 4000, "memory_mib": 8192, "num_gpu": 1, "gpu_milli": 500, "gpu_spec": ""}
        for i in range(16)
    ]
    for name, rows in (("openb_node_list_gpu_node", nodes), ("openb_pod_list_default", tasks)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return tmp_path


def test_the_figures_are_one_json_object(trace: Path) -> None:
    """Scripts read it; the names are those that the documentation gives."""
    shown = CliRunner().invoke(
        cli, ["bench", "placement", "--trace", str(trace), "--policy", "best-fit", "--seeds", "2", "-o", "json"]
    )
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert {"policy", "variant", "seeds", "declined", "decisions_per_s", "decision_us_p50", "decision_us_p99"} <= set(
        found
    )
    assert found["allocated_pct"]["100"] == 100
    assert found["declined"] == 0


@pytest.mark.parametrize("churn", [[], ["--churn", "100"]])
def test_two_dimensions_and_churn_are_measured_on_the_services_rules(trace: Path, churn: list[str]) -> None:
    """The same object, with what is allocated of memory and what was served beside it."""
    asked = ["--trace", str(trace), "--dimensions", "2", "--seeds", "2", "-o", "json", *churn]
    shown = CliRunner().invoke(cli, ["bench", "placement", *asked])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert (found["dimensions"], found["learn"]) == (2, True)
    assert 0 < found["served_pct"] <= 100
    assert all(0 < share <= 100 for share in found["memory_allocated_pct"].values())
    assert set(found["memory_allocated_pct"]) == set(found["allocated_pct"])
    again = json.loads(CliRunner().invoke(cli, ["bench", "placement", *asked]).stdout)
    assert again["allocated_pct"] == found["allocated_pct"], "a seed is a run"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--dimensions", "2", "--policy", "random"], Exit.USAGE, "expected one of"),
        (["--dimensions", "2", "--mix", "default"], Exit.USAGE, "the mix is learned"),
        (["--policy", "wishful"], Exit.USAGE, "expected one of"),
        (["--variant", "missing"], Exit.NOT_FOUND, "openb_pod_list_missing.csv"),
    ],
)
def test_what_is_missing_is_named(trace: Path, arguments: list[str], code: Exit, says: str) -> None:
    """The next step is in the message."""
    shown = CliRunner().invoke(cli, ["bench", "placement", "--trace", str(trace), *arguments])
    assert shown.exit_code == code
    assert says in shown.output
