"""Exit codes are a published interface: scripts branch on them."""

import pytest

from apportion.cli.app import outcome
from apportion.cli.exits import CommandFailed, Exit, code_of
from apportion.contracts.envelope import Stream
from apportion.monitor.log import LogAhead
from apportion.runtime.settings import SettingsInvalid
from apportion.runtime.stream import BusUnreachable


def test_the_numbers_stay_what_they_are() -> None:
    """A script that tests for 6 means a refusal, next year too."""
    assert {code.name: int(code) for code in Exit} == {
        "OK": 0,
        "FAILURE": 1,
        "USAGE": 2,
        "NOT_PLACED": 3,
        "JOB_FAILED": 4,
        "NOT_FOUND": 5,
        "REFUSED": 6,
        "NOT_PERMITTED": 7,
        "BUS_UNREACHABLE": 8,
        "INTEGRITY": 9,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsInvalid(where="flags", key="--x", expected="a known flag", found="none"), Exit.USAGE),
        (BusUnreachable(url="nats://127.0.0.1:1", waited_s=1, detail="OSError"), Exit.BUS_UNREACHABLE),
        (LogAhead(stream=Stream.FACTS, log_seq=2, bus_seq=1, detail=""), Exit.INTEGRITY),
        (PermissionError("no"), Exit.NOT_PERMITTED),
        (KeyboardInterrupt(), Exit.INTERRUPTED),
        (CommandFailed("no job", code=Exit.NOT_FOUND), Exit.NOT_FOUND),
        (ValueError("whatever"), Exit.FAILURE),
    ],
)
def test_each_error_ends_with_its_code(error: BaseException, code: Exit) -> None:
    """What went wrong is told by the number alone."""
    assert code_of(error) is code


def test_a_typo_is_a_usage_error_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command says which one was meant, on stderr, and stdout stays empty."""
    assert outcome(["jbos"]) == Exit.USAGE
    said = capsys.readouterr()
    assert "No such command 'jbos'" in said.err
    assert said.out == ""


def test_an_unreachable_bus_ends_with_8_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cron job may try again on 8; it must not on 6."""
    monkeypatch.setattr("apportion.cli.client.CONNECT_S", 0.3)
    code = outcome(["events", "--bus-url", "nats://127.0.0.1:9", "--data-dir", str(tmp_path)])
    assert code == Exit.BUS_UNREACHABLE
    said = capsys.readouterr()
    assert "nats://127.0.0.1:9" in said.err
    assert "apportion up" in said.err
    assert said.out == ""
