"""Commands that ask: what is missing or wrong is said before anything is asked, by its own name."""

from pathlib import Path

import pytest

from apportion.cli.app import outcome


@pytest.mark.parametrize(
    "command",
    [
        ("cordon", "node-1"),
        ("uncordon", "node-1"),
        ("drain", "node-1"),
        ("preempt", "train"),
        ("thaw",),
        ("fault", "inject", "node-loss"),
    ],
    ids=" ".join,
)
def test_a_reason_that_others_will_ask_for_is_asked_for(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome([*command, "--data-dir", str(tmp_path)]) == 2
    assert "--reason" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("fault", "inject", "nonsense"), "kind: expected one of service-kill,"),
        (("cordon", "No Such"), "node_id: expected a name of 1 to 63"),
    ],
)
def test_a_wrong_value_is_told_by_field_with_what_was_expected_and_found(
    command: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome([*command, "--reason", "x", "--data-dir", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert f'found "{command[-1]}"' in told
