"""Output in pieces, over rotation and the end of its run; what is kept, and for how long."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from apportion.contracts.ids import RunId, TenantId
from apportion.node_agent.run_logs import KeptLogs, LogDesk, Retention, piece_of
from apportion.node_agent.run_records import directory_name
from apportion.node_agent.spawner import _BoundedLog

RUN = RunId("acme/train/0/1")


def kept(root: Path, **retention: int) -> KeptLogs:
    logs = KeptLogs(root / "logs", Retention(**retention))
    logs.open()
    return logs


def a_run(root: Path, run: RunId, **files: str) -> Path:
    directory = root / "runs" / directory_name(run)
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def test_who_follows_reads_every_byte_over_rotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files move on while they are read, and nothing is told twice or left out unsaid."""
    monkeypatch.chdir(tmp_path)
    log = _BoundedLog("stdout", 10)
    read, generation, offset = b"", 0, 0
    for number in range(20):
        log.write(b"%04d\n" % number)
        piece = piece_of(tmp_path, "stdout", generation, offset)
        assert not piece.is_cut
        read, generation, offset = read + piece.data, piece.generation, piece.offset
    log.close()
    assert read == b"".join(b"%04d\n" % number for number in range(20))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stdout.8", "stdout.9"]


def test_who_comes_late_is_told_that_something_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = _BoundedLog("stderr", 10)
    for number in range(7):
        log.write(b"%04d\n" % number)
    log.close()
    first = piece_of(tmp_path, "stderr", 0, 0)
    assert (first.data, first.is_cut) == (b"0004\n0005\n", True)
    rest = piece_of(tmp_path, "stderr", first.generation, first.offset)
    assert (rest.data, rest.is_cut) == (b"0006\n", False)
    assert piece_of(tmp_path, "stderr", rest.generation, rest.offset).data == b""


def test_what_a_run_puts_in_place_of_its_output_is_not_followed(tmp_path: Path) -> None:
    """Else it would read to others what only the agent may."""
    secret = tmp_path / "secret"
    secret.write_text("hush")
    directory = a_run(tmp_path, RUN)
    (directory / "stdout").symlink_to(secret)
    assert piece_of(directory, "stdout", 0, 0).data == b""


def ask(desk: LogDesk, **question: Any) -> Any:
    return json.loads(desk.answer(json.dumps(question).encode()))


def test_output_is_answered_live_and_after_the_run_has_gone(tmp_path: Path) -> None:
    """With the same place in it: who follows over the end notices nothing."""
    live = {RUN}
    directory = a_run(tmp_path, RUN, stdout="one\ntwo\n", stderr="oh\n")
    logs = kept(tmp_path)
    desk = LogDesk(runs=tmp_path / "runs", kept=logs, live=lambda: live)
    answer = ask(desk, run=RUN)
    assert (base64.b64decode(answer["data"]), answer["is_live"], answer["is_cut"]) == (b"one\ntwo\n", True, False)
    with (directory / "stdout").open("a") as file:
        file.write("three\n")
    live.clear()
    logs.keep(RUN, directory, 1000.0)
    directory.rmdir()
    answer = ask(desk, run=RUN, generation=answer["generation"], offset=answer["offset"])
    assert (base64.b64decode(answer["data"]), answer["is_live"]) == (b"three\n", False)
    assert base64.b64decode(ask(desk, run=RUN, stream="stderr")["data"]) == b"oh\n"
    # And by the next agent.
    again = LogDesk(runs=tmp_path / "runs", kept=kept(tmp_path), live=lambda: live)
    assert base64.b64decode(ask(again, run=RUN)["data"]) == b"one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ({"run": "acme/other/0/1"}, "LogNotFound"),
        ({"run": "../../etc"}, "LogNotFound"),
        ({"run": "x" * 300}, "QuestionInvalid"),
        ({"run": RUN, "stream": "../intent.json"}, "QuestionInvalid"),
        ({"run": RUN, "offset": -1}, "QuestionInvalid"),
        ({"stream": "stdout"}, "QuestionInvalid"),
    ],
)
def test_no_question_reaches_another_file(tmp_path: Path, question: dict[str, Any], code: str) -> None:
    a_run(tmp_path, RUN, stdout="x", **{"intent.json": "{}"})
    desk = LogDesk(runs=tmp_path / "runs", kept=kept(tmp_path), live=lambda: ())
    assert ask(desk, **question)["error"]["code"] == code


def test_the_oldest_goes_first_and_what_is_too_old_goes_too(tmp_path: Path) -> None:
    logs = kept(tmp_path, bytes_max=25, seconds_max=100)
    runs = [RunId(f"acme/job-{number}/0/1") for number in range(4)]
    for number, run in enumerate(runs):
        logs.keep(run, a_run(tmp_path, run, stdout="x" * 10), 1000.0 + number)
    assert [logs.directory(run) is not None for run in runs] == [False, False, True, True]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {directory_name(run) for run in runs[2:]}
    # An agent that begins anew knows their age from the files.
    logs = kept(tmp_path, bytes_max=25, seconds_max=100)
    logs.trim(1102.5)
    assert [logs.directory(run) is not None for run in runs] == [False, False, False, True]
    assert logs.directory(RUN) is None


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    logs = kept(tmp_path)
    logs.keep(RUN, a_run(tmp_path, RUN, started="{}"), 1.0)
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_tenant_reads_its_own_runs_and_learns_nothing_of_others(tmp_path: Path) -> None:
    """Not even whether there is such a run: the answer is the same either way."""
    a_run(tmp_path, RUN, stdout="mine\n")
    desk = LogDesk(runs=tmp_path / "runs", kept=kept(tmp_path), live=lambda: ())

    def asked(tenant: str, run: str) -> Any:
        return json.loads(desk.answer(json.dumps({"run": run}).encode(), TenantId(tenant)))

    assert base64.b64decode(asked("acme", RUN)["data"]) == b"mine\n"
    there, nowhere = (asked("globex", run)["error"] for run in (RUN, "acme/nobody/0/1"))
    assert there["code"] == nowhere["code"] == "NotPermitted"
    assert asked("acm", RUN)["error"]["code"] == "NotPermitted"
