"""Whatever is done to a log shows: an edit by its chain, a rewritten chain by a signature, a cut tail by an anchor."""

import asyncio
import atexit
import functools
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest

from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PoolId
from apportion.contracts.testing import a_job, a_job_request, a_node, a_placement
from apportion.monitor import attest, chain, checkpoints
from apportion.monitor import log as log_module
from apportion.monitor.attest import AnchorsUnusable, anchors_in, verify
from apportion.monitor.checkpoints import Checkpoints, side_file
from apportion.monitor.log import EventLog, Verdict
from apportion.monitor.signing import (
    Checkpoint,
    KeyUnusable,
    Signer,
    key_path,
    public_key_of,
    public_key_path,
    signer_at,
)
from apportion.monitor.testing import Recorded, Tape, replaced

OURS, THEIRS = Signer(bytes(32)), Signer(bytes([1]) * 32)


def messages() -> list[Recorded]:
    """Ten rows: two wishes, eight facts."""
    tape = Tape()
    made = [tape.wish(a_job_request()), tape.wish(a_job_request(job_id="b")), tape.fact(a_node()), tape.fact(a_job())]
    return [*made, *(tape.fact(a_placement(f"acme/j{n}")) for n in range(6))]


def written(
    path: Path, rows: Sequence[Recorded], *, signed_at: Sequence[int] = (), by: Signer = OURS
) -> list[Checkpoint]:
    """A log of these rows, its head signed after so many of them; the checkpoints."""
    made: list[Checkpoint] = []
    shutil.copyfile(blank(), path)  # making the tables and views takes ten times as long
    with EventLog.open(path) as log:
        for first, last in pairwise((0, *signed_at, len(rows))):
            log.append(rows[first:last])
            if last in signed_at:
                at = {stream: position.last_seq for stream, position in log.positions.items()}
                unsigned = Checkpoint(
                    pool="main", ordinal=last, hash=log.head.hash.hex(), wishes_seq=at[Stream.WISHES],
                    facts_seq=at[Stream.FACTS], signed_at=last, public_key="",
                )  # fmt: skip
                made.append(by.sign(unsigned))
                log.add_checkpoint(last, msgspec.json.encode(made[-1]).decode())
    return made


@functools.cache
def blank() -> Path:
    """An empty log, made once."""
    path = Path(tempfile.mkdtemp(prefix="apportion-test-")) / "blank.duckdb"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    EventLog.open(path).close()
    return path


def tampered(path: Path, *statements: str) -> None:
    with duckdb.connect(str(path)) as connection:
        for statement in statements:
            connection.execute(statement)


def first_bad(verdict: Verdict) -> tuple[int, str, int]:
    assert not verdict.ok
    assert verdict.first_bad is not None
    return verdict.first_bad.ordinal, verdict.first_bad.stream, verdict.first_bad.stream_seq


def test_a_signed_log_says_up_to_where_and_by_whom(tmp_path: Path) -> None:
    made = written(tmp_path / "log.duckdb", messages(), signed_at=(4, 8))
    verdict = verify(tmp_path / "log.duckdb", public_key=OURS.public_key, anchors=made)
    assert verdict.ok
    assert (verdict.rows, verdict.signed_ordinal, verdict.checkpoints, verdict.anchors) == (10, 8, 2, 2)
    assert verdict.public_key == OURS.public_key
    # A copy takes the checkpoints with it, and none of a row that it hasn't.
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.copy_into(tmp_path / "copy.duckdb")
    assert verify(tmp_path / "copy.duckdb", public_key=OURS.public_key).signed_ordinal == 8


def test_every_changed_byte_of_a_row_shows(tmp_path: Path) -> None:
    """Each byte of each column of each row, one bit at a time and by itself: none can be changed unseen."""
    written(tmp_path / "log.duckdb", messages())
    names = log_module._NAMES
    with duckdb.connect(str(tmp_path / "log.duckdb"), read_only=True) as connection:
        rows = connection.execute(f"SELECT {names} FROM events ORDER BY ordinal").fetchall()
    last = dict.fromkeys(Stream, 0)
    previous = chain.GENESIS
    changed = 0
    for number, row in enumerate(rows, 1):
        for column, value in enumerate(row):
            for forged in _forgeries(value):
                other = (*row[:column], forged, *row[column + 1 :])
                assert log_module._wrong(other, number, previous, dict(last), lambda *_: False) is not None, (
                    number,
                    column,
                    forged,
                )
                changed += 1
        assert log_module._wrong(row, number, previous, last, lambda *_: False) is None
        previous = row[-1]
        last[Stream(row[1])] = row[2]
    assert changed > 5_000


def _forgeries(value: Any) -> list[Any]:
    """The value with one byte changed, for each of its bytes; with something where nothing was, and the reverse."""
    if isinstance(value, bytes):
        return [value[:i] + bytes([value[i] ^ 1]) + value[i + 1 :] for i in range(len(value))]
    if isinstance(value, str):
        return [value[:i] + chr(ord(value[i]) ^ 1) + value[i + 1 :] for i in range(len(value))] + [None]
    return ["x"] if value is None else [value ^ (1 << bit) for bit in range(8)]


def test_deleted_doubled_and_moved_rows_show(tmp_path: Path) -> None:
    """With the sequences renumbered, too: the chain holds them."""
    for number, (statements, bad) in enumerate(
        (
            (["DELETE FROM events WHERE ordinal = 5"], (6, "facts", 4)),
            (["DELETE FROM events WHERE ordinal = 1"], (2, "wishes", 2)),
            (["UPDATE events SET ordinal = 11 - ordinal WHERE ordinal IN (5, 6)"], (5, "facts", 4)),
            (
                ["DELETE FROM events WHERE ordinal = 5", "UPDATE events SET ordinal = ordinal - 1 WHERE ordinal > 5"],
                (5, "facts", 4),
            ),
        )
    ):
        path = tmp_path / f"{number}.duckdb"
        written(path, messages(), signed_at=(8,))
        tampered(path, *statements)
        assert first_bad(verify(path)) == bad, statements


def rewritten() -> list[Recorded]:
    """Somebody else's placement in row 6."""
    rows = messages()
    other = rows[5].body.replace(b"acme/j1", b"acme/xx")
    assert other != rows[5].body
    return [*rows[:5], replaced(rows[5], body=other), *rows[6:]]


def test_a_chain_that_was_written_anew_shows_by_the_signature(tmp_path: Path) -> None:
    """Every hash fits; what was signed over row 8 is another row 8. What row 4 speaks for is good."""
    made = written(tmp_path / "true.duckdb", messages(), signed_at=(4, 8))
    written(tmp_path / "log.duckdb", rewritten())
    with EventLog.open(tmp_path / "log.duckdb") as log:
        for one in made:
            log.add_checkpoint(one.ordinal, msgspec.json.encode(one).decode())
    assert log_module.verify(tmp_path / "log.duckdb").ok
    verdict = verify(tmp_path / "log.duckdb")
    assert first_bad(verdict) == (5, "facts", 3)
    assert verdict.first_bad is not None
    assert "rows were rewritten: row 8" in verdict.first_bad.what
    assert verdict.rows == 4


def test_a_chain_written_and_signed_anew_shows_by_the_key_or_by_an_anchor(tmp_path: Path) -> None:
    """By another key, to whoever knows the right one; by the right one, to whoever kept a checkpoint elsewhere."""
    made = written(tmp_path / "true.duckdb", messages(), signed_at=(4, 8))
    written(tmp_path / "theirs.duckdb", rewritten(), signed_at=(4, 8), by=THEIRS)
    assert verify(tmp_path / "theirs.duckdb").ok
    assert first_bad(verify(tmp_path / "theirs.duckdb", public_key=OURS.public_key)) == (1, "wishes", 1)
    written(tmp_path / "insider.duckdb", rewritten(), signed_at=(4, 8))
    assert verify(tmp_path / "insider.duckdb", public_key=OURS.public_key).ok
    assert first_bad(verify(tmp_path / "insider.duckdb", anchors=made)) == (5, "facts", 3)


def test_a_cut_tail_shows_by_an_anchor_with_the_first_sequence_that_is_gone(tmp_path: Path) -> None:
    """As if rows 8 to 10 had never been, positions and checkpoints included."""
    made = written(tmp_path / "true.duckdb", messages(), signed_at=(4, 10))
    written(tmp_path / "log.duckdb", messages()[:7], signed_at=(4,))
    assert verify(tmp_path / "log.duckdb", public_key=OURS.public_key).ok
    verdict = verify(tmp_path / "log.duckdb", public_key=OURS.public_key, anchors=made[::-1])
    assert first_bad(verdict) == (8, "facts", 6)
    assert verdict.first_bad is not None
    assert "the tail is gone" in verdict.first_bad.what


def test_a_checkpoint_that_was_changed_shows(tmp_path: Path) -> None:
    """Each byte of it. One that was taken out leaves the rows after it without one, and a log without any is told."""
    (made,) = written(tmp_path / "log.duckdb", messages(), signed_at=(8,))
    text = msgspec.json.encode(made)
    for at in range(len(text)):
        other = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
        try:
            read = msgspec.json.decode(other, type=Checkpoint)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        # Upper- or lower-case hex digits say the same.
        assert not read.is_signed or msgspec.json.encode(read) == text or read.signature.lower() == made.signature
    tampered(tmp_path / "log.duckdb", "UPDATE checkpoints SET checkpoint = replace(checkpoint, '\"pool\"', '\"Pool\"')")
    assert first_bad(verify(tmp_path / "log.duckdb")) == (1, "wishes", 1)


def test_too_many_rows_without_a_signature_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise whoever rewrites the tail would simply take its checkpoints out."""
    monkeypatch.setattr(attest, "UNSIGNED_ROWS_MAX", 5)
    written(tmp_path / "log.duckdb", messages(), signed_at=(4,))
    assert first_bad(verify(tmp_path / "log.duckdb")) == (5, "facts", 3)
    written(tmp_path / "never.duckdb", messages())
    assert verify(tmp_path / "never.duckdb").checkpoints == 0
    assert first_bad(verify(tmp_path / "never.duckdb", public_key=OURS.public_key)) == (1, "wishes", 1)


def test_the_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = key_path(tmp_path)
    first = signer_at(path)
    assert signer_at(path).public_key == first.public_key
    assert path.stat().st_mode & 0o777 == 0o600
    assert public_key_of(str(public_key_path(path))) == first.public_key == public_key_of(first.public_key.upper())
    path.chmod(0o640)
    with pytest.raises(KeyUnusable, match="chmod 600"):
        signer_at(path)
    path.chmod(0o600)
    path.write_text("ab")
    with pytest.raises(KeyUnusable, match="64 hex digits"):
        signer_at(path)
    for wrong in ("zz" * 32, str(tmp_path / "nothing"), str(path)):
        with pytest.raises(KeyUnusable):
            public_key_of(wrong)


KEEP = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"


async def test_the_head_is_signed_in_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log, beside it, and by the anchor command; what the command kept fits, also after the last row."""
    monkeypatch.setattr(checkpoints, "ROWS", 4)
    rows = messages()
    kept = tmp_path / "kept"
    with EventLog.open(tmp_path / "log.duckdb") as log:
        signing = Checkpoints(
            log, OURS, pool=PoolId("main"), anchor_command=f'{sys.executable} -c "{KEEP}" {kept}', anchor_s=1000
        )
        assert signing.due_in_s() is None
        log.append(rows[:3])
        due = signing.due_in_s()
        assert due is not None
        assert 0 < due <= checkpoints.SECONDS
        await signing.write_if_due()
        assert log.signed_ordinal == 0
        log.append(rows[3:5])
        await signing.write_if_due()
        assert log.signed_ordinal == 5
        assert signing._anchoring is not None
        await signing._anchoring
        log.append(rows[5:])
        await signing.finish()
        assert signing.due_in_s() is None
    assert [one.ordinal for one in anchors_in(side_file(tmp_path / "log.duckdb"))] == [5, 10]
    assert [one.ordinal for one in anchors_in(kept)] == [5, 10]
    assert verify(tmp_path / "log.duckdb", public_key=OURS.public_key, anchors=anchors_in(kept)).signed_ordinal == 10
    with EventLog.open(tmp_path / "log.duckdb") as log:
        assert Checkpoints(log, OURS, pool=PoolId("main")).due_in_s() is None


@pytest.mark.parametrize("command", ["/does/not/exist", f'{sys.executable} -c "import sys; sys.exit(3)"'])
async def test_an_anchor_that_fails_stops_nothing(command: str, tmp_path: Path) -> None:
    """The log goes on, the failure is counted and told, and the same checkpoint is handed over again."""
    with EventLog.open(tmp_path / "log.duckdb") as log:
        signing = Checkpoints(log, OURS, pool=PoolId("main"), anchor_command=command)
        log.append(messages())
        await asyncio.wait_for(signing.finish(), 60)
        assert log.signed_ordinal == 10
        assert signing.anchor_failures >= 1


def test_anchors_are_read_a_line_at_a_time(tmp_path: Path) -> None:
    """A line that was being written when the machine stopped is none yet; one that is wrong is said with its number."""
    made = written(tmp_path / "log.duckdb", messages(), signed_at=(4,))
    line = msgspec.json.encode(made[0])
    (tmp_path / "anchors").write_bytes(line + b"\n" + line[:40])
    assert anchors_in(tmp_path / "anchors") == made
    (tmp_path / "anchors").write_bytes(line + b"\nnonsense\n")
    with pytest.raises(AnchorsUnusable, match="line 2"):
        anchors_in(tmp_path / "anchors")
