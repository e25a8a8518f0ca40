"""Past days of a stopped pool's log become segments by one command, and every other command goes on over both."""

import shutil
from pathlib import Path

import msgspec
import pytest

from apportion.cli.app import outcome
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement
from apportion.monitor.log import EventLog
from apportion.monitor.segments import seal
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


def sealed(data_dir: Path) -> None:
    """As the pool's monitor does it."""
    with EventLog.open(data_dir / "log" / "main.duckdb") as log:
        seal(log, NOON + 9 * DAY, signer_at(key_path(data_dir)).sign)


def test_nobody_seals_the_log_of_a_stopped_pool(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who ordered it would be in no log: the command says what to do instead, and nothing is changed."""
    assert outcome(["log", "seal", "--reason", "space", "--data-dir", str(data_dir)]) == 2
    told = capsys.readouterr().err
    assert "running pool" in told
    assert "apportion up" in told
    assert not (data_dir / "log" / "main.sealed").exists()


def test_the_retention_is_listed(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Newest last; where nobody said anything, that."""
    assert outcome(["log", "retention", "ls", "--data-dir", str(data_dir)]) == 0
    assert "for ever" in capsys.readouterr().err
    with EventLog.open(data_dir / "log" / "main.duckdb") as log:
        tape = Tape()
        tape.at += 3 * DAY
        tape.last = {stream: position.last_seq for stream, position in log.positions.items()}
        said = [(90, False), (0, True)]
        log.append(
            [
                tape.fact(
                    ev.LogRetentionChanged(
                        payload_days=days, seal_daily=is_sealed, actor="user:ann", reason="7", answers=4
                    )
                )
                for days, is_sealed in said
            ]
        )
    rows = asked(capsys, data_dir, "log", "retention", "ls")["retention"]
    assert isinstance(rows, list)
    assert [(row["payload_days"], row["seal_daily"]) for row in rows] == said
    assert outcome(["log", "retention", "--data-dir", str(data_dir)]) == 2, "options belong to ls"


def test_a_sealed_log_of_a_stopped_pool_is_asked(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The days that have ended, listed; then SQL, verify, the past and holds say what they said before."""
    questions = (
        ("sql", "SELECT count(*), max(ordinal) FROM v_event"),
        ("sql", "SELECT what, about, state, actor FROM v_keeping"),
        ("log", "holds"),
        ("log", "holds", "--all"),
    )
    before = [asked(capsys, data_dir, *words) for words in questions]
    verdict = asked(capsys, data_dir, "log", "verify")
    sealed(data_dir)
    listed = asked(capsys, data_dir, "log", "segments")["segments"]
    assert isinstance(listed, list)
    assert [(row["day"], row["rows"]) for row in listed] == [("2026-09-01", 3), ("2026-09-02", 2)]
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
    sealed(data_dir)
    shutil.rmtree(data_dir / "log" / "main.sealed")
    assert outcome(["log", "verify", "--data-dir", str(data_dir)]) == 9
    assert "manifest of sealed segments can't be read" in capsys.readouterr().out
    assert outcome(["replay", "--at", "2", "--data-dir", str(data_dir)]) == 1
    assert "main.sealed" in capsys.readouterr().err
