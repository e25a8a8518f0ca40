"""Past days of a stopped pool's log become segments by one command, and every other command goes on over both."""

import shutil
from pathlib import Path

import msgspec
import pytest

from apportion.cli.app import outcome
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.testing import a_job, a_job_request, a_node, a_placement
from apportion.monitor.log import EventLog
from apportion.monitor.signing import Checkpoint, key_path, signer_at
from apportion.monitor.testing import Tape

DAY = 86_400_000_000_000


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A stopped pool's, whose log has three days, signed; a hold that was released, and one that wasn't."""
    tape = Tape()
    with EventLog.open(tmp_path / "log" / "main.duckdb") as log:
        rows = [tape.wish(a_job_request(job_id="a")), tape.fact(a_node()), tape.fact(a_job("a"))]
        tape.at += DAY
        rows.append(tape.fact(ev.LegalHoldPlaced(hold_id="hold-1", actor="user:ann", reason="first", answers=1)))
        rows.append(
            tape.fact(ev.LegalHoldPlaced(hold_id="hold-2", tenant="acme", actor="user:ann", reason="x", answers=2))
        )
        tape.at += DAY
        rows.append(tape.fact(ev.LegalHoldReleased(hold_id="hold-1", actor="user:bob", reason="over", answers=3)))
        rows.append(tape.fact(a_placement("acme/a")))
        log.append(rows)
        unsigned = Checkpoint(
            pool="main", ordinal=log.head.ordinal, hash=log.head.hash.hex(), signed_at=1, public_key="",
            wishes_seq=log.positions[Stream.WISHES].last_seq, facts_seq=log.positions[Stream.FACTS].last_seq,
        )  # fmt: skip
        signed = signer_at(key_path(tmp_path)).sign(unsigned)
        log.add_checkpoint(signed.ordinal, msgspec.json.encode(signed).decode())
    return tmp_path


def asked(capsys: pytest.CaptureFixture[str], data_dir: Path, *words: str) -> dict[str, object]:
    assert outcome([*words, "--data-dir", str(data_dir), "-o", "json"]) == 0
    found: dict[str, object] = msgspec.json.decode(capsys.readouterr().out)
    return found


def test_a_stopped_pools_log_is_sealed_and_asked(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The days that have ended, listed; then SQL, verify, the past and holds say what they said before."""
    questions = (
        ("sql", "SELECT count(*), max(ordinal) FROM v_event"),
        ("sql", "SELECT what, about, state, actor FROM v_keeping"),
        ("log", "holds"),
        ("log", "holds", "--all"),
    )
    before = [asked(capsys, data_dir, *words) for words in questions]
    verdict = asked(capsys, data_dir, "log", "verify")
    made = asked(capsys, data_dir, "log", "seal", "--reason", "space")
    assert asked(capsys, data_dir, "log", "seal", "--reason", "space")["segments"] == []
    listed = asked(capsys, data_dir, "log", "segments")
    for one in (made, listed):
        segments = one["segments"]
        assert isinstance(segments, list)
        assert [(row["day"], row["rows"]) for row in segments] == [("2026-09-01", 3), ("2026-09-02", 2)]
    rows = ("rows", "holds")
    after = [asked(capsys, data_dir, *words) for words in questions]
    assert [[one.get(key) for key in rows] for one in after] == [[one.get(key) for key in rows] for one in before]
    assert [len(one["holds"]) for one in after[2:]] == [1, 2]  # type: ignore[arg-type]  # lists
    assert asked(capsys, data_dir, "log", "verify") == verdict
    assert asked(capsys, data_dir, "replay", "--at", "2")["as_of"] is not None


def test_a_sealed_log_without_its_folder_says_what_is_missing(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backup of the file alone is none."""
    asked(capsys, data_dir, "log", "seal", "--reason", "space")
    shutil.rmtree(data_dir / "log" / "main.sealed")
    assert outcome(["log", "verify", "--data-dir", str(data_dir)]) == 9
    assert "manifest of sealed segments can't be read" in capsys.readouterr().out
    assert outcome(["replay", "--at", "2", "--data-dir", str(data_dir)]) == 1
    assert "main.sealed" in capsys.readouterr().err
