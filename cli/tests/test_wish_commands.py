"""Commands that ask: what is missing or wrong is said before anything is asked, by its own name."""

from pathlib import Path

import pytest

from apportion.cli.app import outcome
from apportion.cli.wish_commands import answer_text


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


@pytest.mark.parametrize(
    "message", ["", "no such hold: `apportion log holds` lists them", "hold_id: expected a hold, found x. Look for it."]
)
def test_a_refusal_says_once_what_was_expected_and_found(message: str) -> None:
    """Some authors say it in the message, others beside it."""
    answer = {"type": "WishRejected.v1", "code": "HoldNotFound", "field": "hold_id", "message": message}
    text = answer_text({**answer, "expected": "a hold", "found": "x"})
    assert text.count("hold_id: expected a hold, found x") == 1
    assert message in text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"type": "LegalHoldPlaced.v1", "hold_id": "hold-25"}, "LegalHoldPlaced hold-25"),
        ({"type": "FaultInjected.v1", "fault_id": "fault-3"}, "FaultInjected fault-3"),
        ({"type": "LogSealOrdered.v1"}, "LogSealOrdered"),
    ],
)
def test_an_answer_names_what_the_next_command_asks_for(answer: dict[str, str], said: str) -> None:
    assert answer_text(answer) == said
