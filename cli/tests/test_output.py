"""What programs read from us keeps its form."""

import json
from typing import Any

import pytest

from apportion.cli.output import print_rows, printable, table

_ROWS: list[dict[str, Any]] = [
    {"job_id": "acme/train-7", "gpus": 2, "state": "running", "seen": None},
    {"job_id": "acme/b", "gpus": 16, "state": "waiting", "seen": 1},
]


def _printed(output: str, capsys: pytest.CaptureFixture[str], **more: Any) -> str:
    print_rows(_ROWS, kind="jobs", output=output, columns=("job_id", "gpus"), wide=("state",), **more)
    return capsys.readouterr().out


def test_json_is_one_object_with_a_schema_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns of a table are a choice for people; programs get everything."""
    assert json.loads(_printed("json", capsys, extra={"truncated": False})) == {
        "schema": "apportion.jobs/1",
        "jobs": _ROWS,
        "truncated": False,
    }


def test_jsonl_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """So that a stream can be read as it comes."""
    assert [json.loads(line) for line in _printed("jsonl", capsys).splitlines()] == _ROWS


def test_wide_adds_columns_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever cuts out the second column finds it in both forms."""
    assert _printed("table", capsys).splitlines()[0].split() == ["JOB-ID", "GPUS"]
    assert _printed("wide", capsys).splitlines()[0].split() == ["JOB-ID", "GPUS", "STATE"]


def test_name_prints_ids_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """For ``xargs``."""
    assert _printed("name", capsys).splitlines() == ["acme/train-7", "acme/b"]


def test_what_a_stranger_sent_cannot_steer_a_terminal() -> None:
    """Reasons and names come from outside; an escape sequence in one is shown, not obeyed."""
    assert "\x1b" not in table([{"reason": "\x1b[2Jgone"}], ["reason"])
    assert printable("a\nb") == "a\\nb"
