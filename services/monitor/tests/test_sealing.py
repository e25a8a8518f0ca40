"""Past days become segments: the log says what it said, and whatever is done to a segment shows."""

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import duckdb
import msgspec
import pytest

from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import NodeId, RunId
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement
from apportion.monitor import manifest, segments
from apportion.monitor.attest import verify
from apportion.monitor.history import History
from apportion.monitor.keeping import Keeper
from apportion.monitor.log import EventLog, Verdict, messages_of, own_questions, sealed_of, whole
from apportion.monitor.replicas import Replicas
from apportion.monitor.signing import Checkpoint, Signer
from apportion.monitor.sql import ask
from apportion.monitor.testing import Recorded, Tape

DAY = 86_400_000_000_000
OURS, THEIRS = Signer(bytes(32)), Signer(bytes([1]) * 32)


def four_days(tape: Tape) -> Iterator[Recorded]:
    """Sixteen rows: a job that runs a day, one that waits, and runs that come on every day."""
    yield tape.wish(a_job_request(job_id="a"))
    yield tape.fact(a_node())
    yield tape.fact(a_job("a"))
    yield tape.fact(a_placement("acme/a"))
    for day in range(3):
        tape.at += DAY
        yield tape.wish(a_job_request(job_id=f"b{day}"))
        yield tape.fact(a_job(f"b{day}", answers=day + 2))
        yield tape.fact(a_placement(f"acme/b{day}"))
        run = RunId("acme/a/0/1" if day == 0 else f"acme/b{day - 1}/0/1")
        yield tape.fact(ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=NOON))


def sign(log: EventLog) -> None:
    positions = log.positions
    unsigned = Checkpoint(
        pool="main", ordinal=log.head.ordinal, hash=log.head.hash.hex(), wishes_seq=positions[Stream.WISHES].last_seq,
        facts_seq=positions[Stream.FACTS].last_seq, signed_at=1, public_key="",
    )  # fmt: skip
    log.add_checkpoint(log.head.ordinal, msgspec.json.encode(OURS.sign(unsigned)).decode())


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same log, with all rows in its file and with three of its four days sealed."""
    folder = tmp_path_factory.mktemp("logs")
    unsealed, sealed = folder / "one" / "log.duckdb", folder / "two" / "log.duckdb"
    with EventLog.open(unsealed) as log:
        log.append(list(four_days(Tape())))
        sign(log)
    sealed.parent.mkdir()
    shutil.copyfile(unsealed, sealed)
    with EventLog.open(sealed) as log:
        made = segments.seal(log, NOON + 9 * DAY, OURS.sign)
        assert [(one.day, one.first_ordinal, one.last_ordinal) for one in made] == [
            ("2026-09-01", 1, 4), ("2026-09-02", 5, 8), ("2026-09-03", 9, 12),
        ]  # fmt: skip
        assert segments.seal(log, NOON + 9 * DAY, OURS.sign) == (), "the newest row's day stays"
    return unsealed, sealed


@pytest.fixture
def sealed(logs: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the sealed log to do harm to."""
    shutil.copytree(logs[1].parent, tmp_path / "log")
    return tmp_path / "log" / "log.duckdb"


def test_a_sealed_log_says_what_it_said(logs: tuple[Path, Path]) -> None:
    """Rows, chain, views, the pool at each moment; the file itself has the last day alone."""
    before, after = logs
    assert sealed_of(after) == 12
    with duckdb.connect(str(after), read_only=True) as connection:
        assert connection.execute("SELECT min(ordinal), count(*) FROM events").fetchone() == (13, 4)
    assert verify(after, public_key=OURS.public_key) == verify(before, public_key=OURS.public_key)
    for stream in Stream:
        assert list(messages_of(after, stream)) == list(messages_of(before, stream))
    questions = ["SELECT * FROM v_run ORDER BY run_id", "SELECT * FROM v_usage ORDER BY run_id", "SELECT * FROM events"]
    with own_questions(before) as one, own_questions(after) as two:
        assert [two(question) for question in questions] == [one(question) for question in questions]
        assert len(one(questions[0])) == 4
    with History.open(before) as one_, History.open(after) as two_:
        for seq in range(one_.last_seq + 1):
            assert two_.at_seq(seq) == one_.at_seq(seq)


def test_strangers_are_answered_over_both(sealed: Path) -> None:
    """From a copy with all rows, as what they ask may open no other file. It is brought up to date, not made anew."""
    assert ask(whole(sealed), "SELECT count(*) FROM v_run")["rows"] == [[4]]
    made = whole(sealed).stat().st_ino
    with EventLog.open(sealed) as log:
        tape = Tape()
        tape.last = {stream: position.last_seq for stream, position in log.positions.items()}
        log.append([tape.fact(a_placement("acme/late"))])
    assert whole(sealed).stat().st_ino == made
    assert ask(whole(sealed), "SELECT count(*), max(ordinal) FROM events")["rows"] == [[17, 17]]
    assert whole(sealed.with_name("other.duckdb")) == sealed.with_name("other.duckdb"), "nothing sealed, no copy"


def test_the_writer_goes_on_over_what_it_sealed(sealed: Path, tmp_path: Path) -> None:
    """Its own questions and its copies have all rows, old copies and new ones; and it appends to the same chain."""
    with EventLog.open(sealed) as log:
        assert log.ask("SELECT count(*), min(ordinal) FROM v_event").rows == [(16, 1)]
        assert log.copy_into(tmp_path / "new.duckdb").ordinal == 16
        tape = Tape()
        tape.last = {stream: position.last_seq for stream, position in log.positions.items()}
        log.append([tape.fact(a_node("node-2"))])
        assert log.copy_into(tmp_path / "new.duckdb").ordinal == 17
    assert verify(tmp_path / "new.duckdb", public_key=OURS.public_key).rows == 17
    assert verify(sealed, public_key=OURS.public_key).rows == 17
    folder = tmp_path / "out"
    segments.export(sealed, folder)
    assert segments.import_(folder, tmp_path / "again.duckdb").rows == 17


def test_a_copy_that_was_made_before_goes_on_after(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log.duckdb") as log:
        rows = list(four_days(Tape()))
        log.append(rows[:6])
        log.copy_into(tmp_path / "copy.duckdb")
        log.append(rows[6:])
        sign(log)
        segments.seal(log, NOON + 9 * DAY, OURS.sign)
        log.copy_into(tmp_path / "copy.duckdb")
    assert verify(tmp_path / "copy.duckdb", public_key=OURS.public_key).rows == 16


def test_what_is_not_signed_or_not_over_is_not_sealed(tmp_path: Path) -> None:
    """Whole days alone, up to the one that was asked for."""
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(list(four_days(Tape())))
        assert segments.seal(log, NOON + 9 * DAY, OURS.sign) == ()
        sign(log)
        made = segments.seal(log, NOON + DAY, OURS.sign)
        assert [one.day for one in made] == ["2026-09-01"]
        made = segments.seal(log, NOON + 9 * DAY, OURS.sign)
        assert [one.day for one in made] == ["2026-09-02", "2026-09-03"]
        assert made[0].prev_hash == segments.read(tmp_path / "log.sealed").segments[0].last_hash
    assert verify(tmp_path / "log.duckdb", public_key=OURS.public_key).rows == 16


def test_a_death_between_writing_and_letting_go_changes_nothing(logs: tuple[Path, Path], tmp_path: Path) -> None:
    """The file has its rows until it says that it hasn't; the next life writes the segments anew."""
    path = tmp_path / "log.duckdb"
    shutil.copyfile(logs[0], path)
    with EventLog.open(path) as log:
        assert segments.prepare(log, NOON + 9 * DAY, OURS.sign) is not None
    assert verify(path, public_key=OURS.public_key) == verify(logs[0], public_key=OURS.public_key)
    (tmp_path / "log.sealed" / "2026-09-02.000000000005.parquet").write_bytes(b"half of it")
    assert verify(path, public_key=OURS.public_key).ok
    with EventLog.open(path) as log:
        assert len(segments.seal(log, NOON + 9 * DAY, OURS.sign)) == 3
    assert verify(path, public_key=OURS.public_key).rows == 16


def first_bad(path: Path) -> tuple[int, str]:
    verdict: Verdict = verify(path, public_key=OURS.public_key)
    assert not verdict.ok
    assert verdict.first_bad is not None
    return verdict.first_bad.ordinal, verdict.first_bad.what


def rewritten(path: Path, segment: int, change: str) -> None:
    """A segment with other rows, and a manifest that has its digest."""
    folder = manifest.sealed_folder(path)
    held = manifest.read(folder)
    file = folder / held.segments[segment].file
    connection = duckdb.connect()
    connection.execute(f"CREATE TABLE t AS SELECT * FROM read_parquet('{file}')")
    connection.execute(change)
    connection.execute(f"COPY t TO '{file}' (FORMAT parquet)")
    connection.close()
    fitted = msgspec.structs.replace(held.segments[segment], sha256=manifest.digest(file))
    parts = (*held.segments[:segment], fitted, *held.segments[segment + 1 :])
    manifest.write(folder, msgspec.structs.replace(held, segments=parts))


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ("UPDATE t SET tenant = 'mallory' WHERE ordinal = 6", 6),
        ("UPDATE t SET payload = 'x'::BLOB WHERE ordinal = 7", 7),
        ("DELETE FROM t WHERE ordinal = 6", 6),
        ("INSERT INTO t SELECT * FROM t WHERE ordinal = 6", 6),
        ("UPDATE t SET ordinal = 13 - ordinal WHERE ordinal IN (6, 7)", 6),
    ],
)
def test_a_segment_that_was_rewritten_shows_by_the_chain(sealed: Path, change: str, row: int) -> None:
    """Also where its digest was fitted: then the manifest's signature tells, and the chain says which row it is."""
    rewritten(sealed, 1, change)
    ordinal, _ = first_bad(sealed)
    assert ordinal in {row, row + 1}


def test_each_byte_of_a_segment_counts(sealed: Path) -> None:
    """A drawn sample of every byte of every file in the folder, the manifest among them."""
    folder = manifest.sealed_folder(sealed)
    chance = random.Random(7)
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        at = chance.randrange(len(content))
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :])
        ordinal, what = first_bad(sealed)
        held = {one.file: one for one in manifest.read(folder).segments} if file.name != manifest.NAME else {}
        if file.name in held:
            assert held[file.name].first_ordinal <= ordinal <= held[file.name].last_ordinal, what
        file.write_bytes(content)
    assert verify(sealed, public_key=OURS.public_key).ok


def test_a_segment_that_is_gone_and_a_manifest_of_another_key_show(sealed: Path) -> None:
    folder = manifest.sealed_folder(sealed)
    held = manifest.read(folder)
    second = folder / held.segments[1].file
    second.rename(folder / "aside")
    assert first_bad(sealed) == (5, f"its segment {second.name} is gone")
    (folder / "aside").rename(second)
    manifest.write(folder, msgspec.structs.replace(held, segments=held.segments[1:]))
    assert first_bad(sealed) == (5, "row 1 is missing")
    manifest.write(folder, msgspec.structs.replace(held, rows=11))
    assert "its signature doesn't fit" in first_bad(sealed)[1]
    manifest.write(folder, THEIRS.sign(held))
    assert "another key" in first_bad(sealed)[1]
    manifest.write(folder, OURS.sign(msgspec.structs.replace(held, segments=held.segments[:2])))
    assert first_bad(sealed) == (13, "row 9 is missing")
    (folder / manifest.NAME).unlink()
    assert "can't be read" in first_bad(sealed)[1]


def test_a_running_pools_copy_is_checked_with_the_segments_of_its_log(sealed: Path, tmp_path: Path) -> None:
    """The copy has all rows, and none of the log's files: those are held against their manifest all the same."""
    with EventLog.open(sealed) as log:
        log.copy_into(tmp_path / "copy.duckdb")
    copy = tmp_path / "copy.duckdb"
    assert verify(copy, public_key=OURS.public_key, segments_of=sealed).ok
    next(manifest.sealed_folder(sealed).glob("2026-09-02*")).write_bytes(b"")
    assert verify(copy, public_key=OURS.public_key).ok
    verdict = verify(copy, public_key=OURS.public_key, segments_of=sealed)
    assert verdict.first_bad is not None
    assert verdict.first_bad.ordinal == 5


def test_an_order_is_carried_out_beside_the_appends(tmp_path: Path) -> None:
    """The keeper hears it in what is appended, or finds it in the log; copies have all rows before and after."""
    asyncio.run(_kept(tmp_path))


async def _kept(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log.duckdb") as log:
        tape = Tape()
        rows = list(four_days(tape))
        order = tape.fact(ev.LogSealOrdered(before_at=NOON + 2 * DAY, actor="user:ann", reason="r", answers=5))
        keeper = Keeper(log, OURS)
        await keeper.start()
        assert keeper.due_in_s() is None
        log.append([*rows, order])
        sign(log)
        keeper.saw([*rows, order])
        async with asyncio.timeout(60):
            while not (made := await keeper.work()):
                await asyncio.sleep(0.01)
        assert [one.day for one in made] == ["2026-09-01", "2026-09-02"]
        async with Replicas(log, tmp_path / "copies").newest() as copy:
            assert verify(copy.path, segments_of=log.path).rows == 17
    with EventLog.open(tmp_path / "log.duckdb") as log:
        again = Keeper(log, OURS)
        await again.start()
        assert again.due_in_s() == 0.0, "an order of an earlier life"
        assert log.sealed_ordinal == 8
