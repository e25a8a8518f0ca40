"""The drill: a backup is made, the pool is gone, and another machine goes on from the log alone."""

import asyncio
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from apportion.cli import restoring
from apportion.cli.app import outcome
from apportion.contracts import events as ev
from apportion.contracts import subjects
from apportion.contracts.causes import RunCause
from apportion.contracts.envelope import Basis, Entry, Stream
from apportion.contracts.ids import NodeId, PoolId, RunId
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement, a_queue
from apportion.monitor import manifest, segments
from apportion.monitor.log import EventLog, messages_of, own_questions, verify
from apportion.monitor.projections import entry_of
from apportion.monitor.segments import SegmentsUnusable
from apportion.monitor.signing import Checkpoint, Signer
from apportion.monitor.testing import Recorded, Tape, replaced
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

pytestmark = pytest.mark.timeout(180)
POOL = PoolId("main")
DAY = 86_400_000_000_000


def a_history(tape: Tape) -> Iterator[Recorded]:
    """Three days: a job that ended, one that runs, one that waits; a wish that nobody can read, and one sent twice."""
    basis = Basis(facts=1, wishes=1, decided_at=NOON, policy="test@1#0")
    run = RunId("acme/a/0/1")
    yield tape.wish(a_job_request(job_id="a"))
    yield tape.fact(a_queue())
    yield tape.fact(a_node())
    yield tape.fact(a_job("a"), basis=basis)
    yield tape.fact(a_placement("acme/a"), basis=basis)
    tape.at += DAY
    yield tape.fact(ev.RunFinished(run_id=run, node_id=NodeId("node-1"), cause=RunCause.SUCCESS, finished_at=NOON))
    yield tape.fact(ev.RunReleased(run_id=run, node_id=NodeId("node-1"), released_at=NOON))
    yield tape.fact(ev.JobSucceeded(job_id=a_job("a").job_id, attempts=1, wait_ms=1, run_ms=1), basis=basis)
    twice = tape.wish(a_job_request(job_id="b"))
    yield twice
    tape.at += DAY
    yield replaced(tape.wish(a_job_request(job_id="b")), headers=twice.headers)
    yield tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", None, b"\xff")
    expecting = tape.fact(a_job("b", answers=2), basis=basis)
    # As a fenced batch leaves them: a server that got these again would refuse the message.
    odd = {**(expecting.headers or {}), "Nats-Expected-Last-Subject-Sequence": "77", "Nats-Batch-Id": "x"}
    yield replaced(expecting, headers=odd)
    yield tape.fact(a_placement("acme/b"), basis=basis)
    yield tape.fact(a_job("c", answers=3), basis=basis)


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pool's log, signed."""
    path = tmp_path_factory.mktemp("backup") / "log.duckdb"
    with EventLog.open(path) as log:
        log.append(list(a_history(Tape())))
        unsigned = Checkpoint(
            pool="main", ordinal=9, hash=log.ask("SELECT hash FROM events WHERE ordinal = 9").rows[0][0].hex(),
            wishes_seq=2, facts_seq=7, signed_at=1, public_key="",
        )  # fmt: skip
        log.add_checkpoint(9, msgspec.json.encode(Signer(bytes(32)).sign(unsigned)).decode())
    return path


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """A command sends logs to the standard error that it has: the next test has another."""
    yield
    structlog.reset_defaults()


def rows_of(path: Path) -> list[Any]:
    return [list(messages_of(path, stream)) for stream in Stream]


def test_a_log_goes_through_parquet_and_back(backup: Path, tmp_path: Path) -> None:
    """A file a day; the same rows, the same chain, the same signatures, and DuckDB alone can read it."""
    import duckdb

    assert outcome(["log", "export", str(tmp_path / "out"), "--file", str(backup), "-o", "json"]) == 0
    held = segments.read(tmp_path / "out")
    assert [(one.day, one.first_ordinal, one.last_ordinal) for one in held.segments] == [
        ("2026-09-01", 1, 5), ("2026-09-02", 6, 9), ("2026-09-03", 10, 14),
    ]  # fmt: skip
    assert [one.prev_hash for one in held.segments[1:]] == [one.last_hash for one in held.segments[:-1]]
    found = duckdb.connect().execute(f"SELECT count(*) FROM '{tmp_path}/out/*.parquet'").fetchone()
    assert found == (14,)
    assert outcome(["log", "import", str(tmp_path / "out"), str(tmp_path / "again.duckdb")]) == 0
    assert verify(tmp_path / "again.duckdb") == verify(backup)
    assert rows_of(tmp_path / "again.duckdb") == rows_of(backup)
    with EventLog.open(tmp_path / "again.duckdb") as log:  # and it goes on
        tape = Tape()
        tape.last = {stream: position.last_seq for stream, position in log.positions.items()}
        assert log.append([tape.fact(a_node("node-2"))]) == 1
        assert log.signed_ordinal == 9
    assert verify(tmp_path / "again.duckdb").rows == 15
    assert outcome(["log", "export", str(tmp_path / "out"), "--file", str(backup)]) == 9
    assert outcome(["log", "import", str(tmp_path / "out"), str(tmp_path / "again.duckdb")]) == 9


def test_a_folder_that_was_changed_makes_no_log(backup: Path, tmp_path: Path) -> None:
    """By its digests where a file differs; by the chain where somebody fitted the digests, too."""
    folder = tmp_path / "out"
    held = segments.export(backup, folder)
    first, second, third = (folder / one.file for one in held.segments)
    content = second.read_bytes()
    second.write_bytes(content[:-1] + b"x")
    with pytest.raises(SegmentsUnusable, match="2026-09-02"):
        segments.import_(folder, tmp_path / "log.duckdb")
    second.unlink()
    with pytest.raises(SegmentsUnusable, match="found another or none"):
        segments.import_(folder, tmp_path / "log.duckdb")
    manifest.write(folder, msgspec.structs.replace(held, segments=(held.segments[0], held.segments[2])))
    with pytest.raises(SegmentsUnusable, match="row 6: row 6 is missing"):
        segments.import_(folder, tmp_path / "log.duckdb")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert (first.exists(), third.exists()) == (True, True)


def test_a_log_that_is_not_what_was_written_restores_nothing(backup: Path, tmp_path: Path) -> None:
    import duckdb

    shutil.copyfile(backup, tmp_path / "bad.duckdb")
    with duckdb.connect(str(tmp_path / "bad.duckdb")) as connection:
        connection.execute("UPDATE events SET tenant = 'mallory' WHERE ordinal = 4")
    assert outcome(["restore", str(tmp_path / "bad.duckdb"), "--data-dir", str(tmp_path / "new")]) == 9
    assert not (tmp_path / "new" / "log").exists()


def test_the_pools_own_log_is_made_of_a_folder(backup: Path, tmp_path: Path) -> None:
    """Where the pool has none: a log that is there is never written over."""
    segments.export(backup, tmp_path / "out")
    command = ["log", "import", str(tmp_path / "out"), "--data-dir", str(tmp_path / "new")]
    assert outcome(command) == 0
    assert rows_of(tmp_path / "new" / "log" / "main.duckdb") == rows_of(backup)
    assert outcome(command) == 9


@pytest.fixture
def copied(backup: Path, tmp_path: Path) -> Path:
    """A copy as the monitor makes them for readers, with what it keeps of jobs that are over."""
    with EventLog.open(Path(shutil.copyfile(backup, tmp_path / "live.duckdb"))) as log:
        log.copy_into(tmp_path / "log-0.duckdb")
    return tmp_path / "log-0.duckdb"


@pytest.mark.parametrize("is_old", [False, True], ids=["copy", "copy of a release that didn't say what it is"])
def test_a_copy_is_a_log_to_every_command(
    backup: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_old: bool
) -> None:
    """Read where it lies; and in the place of a pool's log, read, sealed and written to."""
    import duckdb

    if is_old:
        with duckdb.connect(str(copied)) as connection:
            connection.execute("DELETE FROM meta WHERE key = 'schema'")
    reading: tuple[tuple[str, ...], ...] = (
        ("log", "verify"), ("usage",), ("replay", "--at", "5"), ("replay", "--from", "1", "--speed", "max"),
        ("whatif", "--from", "3"), ("log", "export", "{}"),
    )  # fmt: skip
    for words in reading:
        told = []
        for file in (backup, copied):
            folder = tmp_path / f"{file.stem}-out"
            assert outcome([*(one.format(folder) for one in words), "--file", str(file), "-o", "json"]) == 0, words
            told.append(capsys.readouterr().out.replace(str(file), "").replace(str(folder), ""))
        assert told[0] == told[1], words
    found = [outcome(["replay", "--verify", "--file", str(file)]) for file in (backup, copied)]
    assert found[0] == found[1]
    assert outcome(["log", "import", str(tmp_path / "log-0-out"), str(tmp_path / "again.duckdb")]) == 0
    assert rows_of(tmp_path / "again.duckdb") == rows_of(backup)

    capsys.readouterr()
    for place, source in (("one", backup), ("two", copied)):
        (tmp_path / place / "log").mkdir(parents=True)
        shutil.copyfile(source, tmp_path / place / "log" / "main.duckdb")
    owning: tuple[tuple[str, ...], ...] = (
        ("sql", "SELECT * FROM v_job ORDER BY job_id"), ("audit", "acme/a"), ("jobs", "--all"),
 ("sql", "SELECT * FROM v_usage ORDER BY run_id"), ("log", "segments"),
    )  # fmt: skip
    for words in owning:
        told = []
        for place in ("one", "two"):
            assert outcome([*words, "--data-dir", str(tmp_path / place), "-o", "json"]) == 0, words
            told.append(capsys.readouterr().out.replace(str(tmp_path / place), ""))
        assert told[0] == told[1], words


def test_a_copy_that_became_a_log_forgets_what_it_kept(backup: Path, copied: Path, tmp_path: Path) -> None:
    """Of a job that was over then: a late word of it counts, though nothing settles the log's own file."""
    late = shutil.copyfile(backup, tmp_path / "same.duckdb")
    for path in (copied, late):
        with EventLog.open(path) as log:
            assert log.signed_ordinal == 9
            assert log.copy_into(tmp_path / f"of-{path.name}").ordinal == 14
            tape = Tape()
            tape.at += 3 * DAY
            tape.last = {stream: position.last_seq for stream, position in log.positions.items()}
            log.append([tape.fact(a_placement("acme/a", attempt=2))])
    question = "SELECT * FROM v_run ORDER BY run_id"
    with own_questions(copied) as one, own_questions(late) as two:
        assert one(question) == two(question)
        assert len(one(question)) == 3
        assert one("SELECT count(*) FROM duckdb_tables()") == [(4,)]


def test_a_log_whose_writer_was_killed_is_restored_to_its_last_row(backup: Path, tmp_path: Path) -> None:
    """Its newest rows are in the write-ahead log beside it."""
    with EventLog.open(Path(shutil.copyfile(backup, tmp_path / "live.duckdb"))) as log:
        tape = Tape()
        tape.last = {stream: position.last_seq for stream, position in log.positions.items()}
        log.append([tape.fact(a_node("node-2"))])
        (tmp_path / "killed").mkdir()
        for name in ("live.duckdb", "live.duckdb.wal"):
            shutil.copyfile(tmp_path / name, tmp_path / "killed" / name)
    new = tmp_path / "new" / "log" / "main.duckdb"
    new.parent.mkdir(parents=True)
    restoring.put_in_place(tmp_path / "killed" / "live.duckdb", new)
    assert verify(new).rows == 15
    assert rows_of(new) == rows_of(tmp_path / "live.duckdb")


@pytest.mark.integration
def test_a_pool_goes_on_from_its_log_alone(backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On an empty bus: every message at its sequence, as it decoded before, and a monitor that goes on with the log.

    Its first days had been sealed before it was backed up: a file, and a folder beside it.
    """
    data_dir = tmp_path / "new"
    source = Path(shutil.copyfile(backup, tmp_path / "sealed.duckdb"))
    with EventLog.open(source) as log:
        made = segments.seal(log, NOON + 9 * DAY, Signer(bytes(32)).sign)
        assert [one.day for one in made] == ["2026-09-01", "2026-09-02"]
    assert outcome(["restore", str(source), "--data-dir", str(data_dir), "-o", "json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["streams"] == {"wishes": 4, "facts": 10}
    assert outcome(["restore", str(backup), "--data-dir", str(data_dir)]) == 2, "there is a pool in it now"
    asyncio.run(_goes_on(backup, data_dir))
    restored = data_dir / "log" / "main.duckdb"
    assert verify(restored).ok
    assert verify(restored).rows > 14, "the monitor's claim, at least, is new"


async def _goes_on(backup: Path, data_dir: Path) -> None:
    async with EmbeddedServer(data_dir, port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="test")
        for stream in Stream:
            before = [entry_of(message) for message in messages_of(backup, stream)]
            reader = await bus.reader(stream, after=0)
            after: list[Entry] = []
            async with asyncio.timeout(60):
                while len(after) < len(before):
                    await reader.ready.wait()
                    after += [entry_of(message) for message in reader.take()]
            clock = {"recorded_at": 0}  # a new bus has its own; every other word is the same
            assert [msgspec.structs.replace(entry, **clock) for entry in after] == [
                msgspec.structs.replace(entry, **clock) for entry in before
            ]
        arguments = ["--bus-url", server.url, "--data-dir", str(data_dir)]
        monitor = await asyncio.create_subprocess_exec(sys.executable, "-m", "apportion.monitor", *arguments)
        code: int | None = None
        try:
            async with asyncio.timeout(60):
                jobs = await _asked(bus, "jobs")
                assert [(job["job_id"], job["state"]) for job in jobs["jobs"]] == [
                    ("acme/b", "running"),
                    ("acme/c", "queued"),
                ]
                while (status := await _asked(bus, "status"))["streams"]["facts"]["behind"]:
                    await asyncio.sleep(0.05)
                assert status["streams"]["facts"]["log_seq"] > 10
            monitor.terminate()
            code = await asyncio.wait_for(monitor.wait(), 60)
        finally:
            if monitor.returncode is None:
                monitor.kill()
                await monitor.wait()
            await bus.close()
        assert code == 0


async def _asked(bus: Bus, name: str) -> dict[str, Any]:
    while True:
        try:
            reply = await bus.client.request(subjects.query(POOL, name), b"{}", timeout=60)
        except Exception:  # noqa: BLE001 - the monitor is starting
            await asyncio.sleep(0.1)
            continue
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if answer.get("as_of", {}).get("facts_seq", 0) >= 10:
            return answer
