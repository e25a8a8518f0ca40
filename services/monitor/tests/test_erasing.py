"""What a job said can be forgotten, by order and unless a hold keeps it; the chain holds, and everybody is told."""

import asyncio
from pathlib import Path

import duckdb
import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal, RowOf
from apportion.contracts.envelope import Stream, Undecodable
from apportion.contracts.ids import JobId, NodeId, RunId, TenantId
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement
from apportion.monitor import segments
from apportion.monitor.attest import verify
from apportion.monitor.history import History
from apportion.monitor.keeping import Keeper
from apportion.monitor.log import EventLog, messages_of, own_questions, whole
from apportion.monitor.manifest import sealed_folder
from apportion.monitor.projections import entry_of
from apportion.monitor.replicas import Replicas
from apportion.monitor.signing import Signer
from apportion.monitor.testing import Recorded, Tape

DAY = 86_400_000_000_000
OURS = Signer(bytes(32))
SECRET = b"/bin/mrs-smith"
A = JobId("acme/a")


def a_life(tape: Tape) -> list[Recorded]:
    """A job's whole life on the first day, with a name in it; another's on the second, and one more row."""
    rows = a_first_day(tape)
    tape.at += DAY
    return [*rows, tape.wish(a_job_request(job_id="b")), tape.fact(a_job("b", answers=2))]


def a_first_day(tape: Tape) -> list[Recorded]:
    request = a_job_request(job_id="a")
    named = ev.Workload(command=(SECRET.decode(),))
    return [
        tape.wish(ev.JobRequested(queue="main", job_id="a", workload=named, resources=request.resources)),
        tape.fact(a_node()),
        tape.fact(a_job("a", command=(SECRET.decode(),))),
        tape.fact(a_placement("acme/a")),
        tape.fact(ev.RunReleased(run_id=RunId("acme/a/0/1"), node_id=NodeId("node-1"), released_at=NOON)),
        tape.fact(ev.JobSucceeded(job_id=A, attempts=1, wait_ms=1, run_ms=1)),
    ]


def order(tape: Tape, row: Recorded, *, job_id: JobId = A, answers: int = 9) -> Recorded:
    return tape.fact(
        ev.PayloadEraseOrdered(
            stream=RowOf(row.stream), stream_seq=row.seq, job_id=job_id, recorded_at=row.recorded_at,
            actor="user:ann", reason="art. 17", answers=answers,
        )
    )  # fmt: skip


def hold(tape: Tape, *, tenant: str) -> Recorded:
    held = ev.LegalHoldPlaced(hold_id="hold-7", tenant=tenant, actor="user:ann", reason="a dispute", answers=7)
    return tape.fact(held)


async def kept(log: EventLog, messages: list[Recorded]) -> None:
    """Append them, and let a keeper work until nothing is left that it can do at once."""
    keeper = Keeper(log, OURS)
    await keeper.start()
    log.append(messages)
    keeper.saw(messages)
    async with asyncio.timeout(60):
        while keeper.due_in_s() == 0.0:
            await keeper.work()
    await keeper.finish()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_payload_that_was_ordered_to_be_erased_is_gone_and_the_chain_holds(is_sealed: bool, tmp_path: Path) -> None:
    """From the file, from its segments, and from copies that were made before; what is said of it stays."""
    path = tmp_path / "log.duckdb"
    asyncio.run(_erased(path, is_sealed=is_sealed))
    verdict = verify(path)
    assert (verdict.ok, verdict.rows) == (True, 11), verdict.first_bad
    EventLog.without_what_was_erased(path).close()
    written = path.stat().st_ino
    EventLog.without_what_was_erased(path).close()
    assert path.stat().st_ino == written, "once is enough"
    assert verify(path) == verdict
    for file in (path, whole(path)):
        assert SECRET not in file.read_bytes()
    for file in sealed_folder(path).glob("*.parquet"):
        (payloads,) = duckdb.execute(f"SELECT list(payload) FROM '{file}'").fetchall()[0]
        assert not [payload for payload in payloads if payload is not None and SECRET in payload]
    with own_questions(path) as ask:
        assert ask("SELECT ordinal, tenant, job_id, type FROM events WHERE payload IS NULL ORDER BY ordinal") == [
            (1, "acme", "acme/a", "JobRequested.v1"), (3, "acme", "acme/a", "JobAdmitted.v1"),
        ]  # fmt: skip
        assert ask("SELECT what, about, state, erased_ordinal, actor FROM v_keeping WHERE what = 'erase'") == [
            ("erase", "wishes 1", "erased", 1, "user:ann"), ("erase", "facts 2", "erased", 3, "user:ann"),
        ]  # fmt: skip
        assert ask("SELECT * FROM v_event WHERE ordinal = 3")[0][-1] is None
    (wish, _) = messages_of(path, Stream.WISHES)
    entry = entry_of(wish)
    assert isinstance(entry.event, Undecodable)
    assert (entry.event.code, entry.event.job_id, len(entry.digest)) == (Refusal.ERASED, A, 64)
    with History.open(path) as history:
        assert A not in history.at_seq(history.last_seq).jobs


async def _erased(path: Path, *, is_sealed: bool) -> None:
    with EventLog.open(path) as log:
        tape = Tape()
        rows = a_life(tape)
        log.append(rows)
        log.signed_ordinal = log.head.ordinal
        replicas = Replicas(log, path.parent / "copies")
        async with replicas.newest() as copy:
            assert SECRET in copy.path.read_bytes()
        if is_sealed:
            assert len(segments.seal(log, NOON + 5 * DAY, OURS.sign)) == 1
        await kept(log, [order(tape, rows[0]), order(tape, rows[2]), tape.fact(a_node("node-2"))])
        assert log.generation == 2
        async with replicas.newest(fresh_s=60) as copy:
            with own_questions(copy.path) as ask:
                assert ask("SELECT count(*) FROM events WHERE payload IS NULL") == [(2,)]
            assert verify(copy.path, segments_of=path).ok


def test_a_hold_keeps_a_payload_until_it_is_released(tmp_path: Path) -> None:
    """Also one that came between the order and its turn; the next life carries out what waited."""
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        tape = Tape()
        rows = a_life(tape)
        waits = [*rows, order(tape, rows[0]), hold(tape, tenant="acme"), tape.fact(a_node("node-2"))]
        asyncio.run(kept(log, waits))
        assert log.ask("SELECT state FROM v_keeping ORDER BY ordinal").rows == [("waits",), ("holds",)]
    with EventLog.open(path) as log:
        released = tape.fact(ev.LegalHoldReleased(hold_id="hold-7", actor="user:bob", reason="settled", answers=8))
        log.append([released])
        asyncio.run(kept(log, [tape.fact(a_node("node-3"))]))
        found = log.ask("SELECT what, state, erased_ordinal FROM v_keeping ORDER BY ordinal").rows
        assert found == [("erase", "erased", 1), ("hold", "released", None), ("release", "ordered", None)]
    assert verify(path).ok


def test_an_order_that_says_something_else_of_the_row_erases_nothing(tmp_path: Path) -> None:
    """Holds were looked at by what it says; nor is what keeps the log in order ever erased."""
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        tape = Tape()
        rows = a_life(tape)
        of_another, true = order(tape, rows[0], job_id=JobId("acme/b")), order(tape, rows[0])
        asyncio.run(kept(log, [*rows, of_another, true, tape.fact(a_node("n-2"))]))
        asyncio.run(kept(log, [order(tape, true), tape.fact(a_node("n-3"))]))
        assert log.ask("SELECT ordinal FROM events WHERE payload IS NULL").rows == [(1,)]


def test_a_payload_that_is_gone_without_an_order_shows(tmp_path: Path) -> None:
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        log.append(a_life(Tape()))
    with duckdb.connect(str(path)) as connection:
        connection.execute("UPDATE events SET payload = NULL WHERE ordinal = 3")
    bad = verify(path).first_bad
    assert bad is not None
    assert (bad.ordinal, bad.what) == (3, "its payload is gone, and nobody ordered that")


def a_year(tape: Tape) -> list[Recorded]:
    """On the first day one job ends, one is refused, one begins to run; on the third another comes and ends."""
    refused = ev.JobRejected(
        job_id=JobId("acme/no"), tenant=TenantId("acme"), wish_id="w", code=Refusal.QUEUE_NOT_FOUND, answers=2
    )
    rows = [
        *a_first_day(tape),
        tape.wish(a_job_request(job_id="no")),
        tape.fact(refused),
        tape.wish(a_job_request(job_id="runs")),
        tape.fact(a_job("runs", answers=3)),
    ]
    tape.at += DAY
    rows += [
        tape.wish(a_job_request(job_id="no")),
        tape.fact(a_job("no", answers=4)),
        tape.wish(a_job_request(job_id="late")),
        tape.fact(a_job("late", answers=5)),
        tape.fact(ev.JobSucceeded(job_id=JobId("acme/late"), attempts=1, wait_ms=1, run_ms=1)),
        tape.wish(a_job_request(job_id="newest")),
    ]
    tape.at += DAY
    return rows


def forget(tape: Tape, before_at: int) -> Recorded:
    return tape.fact(ev.PayloadsEraseOrdered(before_at=before_at, actor="user:ann", reason="retention: policy 7"))


FORGOTTEN = (
    "SELECT list(concat(split_part(type, '.', 1), ' ', job_id) ORDER BY ordinal) FROM events WHERE payload IS NULL"
)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_jobs_said_is_forgotten_in_its_time_and_the_chain_holds(is_sealed: bool, tmp_path: Path) -> None:
    """Of jobs that had ended or were refused by then, once each; of what runs, or came again, nothing."""
    path = tmp_path / "log.duckdb"
    first = ["JobRequested acme/a", "JobAdmitted acme/a", "RunPlaced acme/a", "JobRequested acme/no"]
    with EventLog.open(path) as log:
        tape = Tape()
        log.append(a_year(tape))
        log.signed_ordinal = log.head.ordinal
        if is_sealed:
            log.append([tape.fact(a_node())])
            log.signed_ordinal = log.head.ordinal
            assert len(segments.seal(log, NOON + 9 * DAY, OURS.sign)) == 2
        asyncio.run(kept(log, [forget(tape, NOON // DAY * DAY + DAY)]))
        assert log.ask(FORGOTTEN).rows == [(first,)]
        assert log.generation == 1, "all at once"
    assert verify(path).ok
    with EventLog.open(path) as log:  # the next life finds the order again, and nothing to do
        asyncio.run(kept(log, [tape.fact(a_node("node-2"))]))
        assert log.generation == 1
        asyncio.run(kept(log, [forget(tape, NOON // DAY * DAY + 2 * DAY)]))
        assert log.ask(FORGOTTEN).rows == [([*first, "JobRequested acme/late", "JobAdmitted acme/late"],)]
        assert log.ask("SELECT what, until IS NULL, actor FROM v_keeping ORDER BY ordinal").rows == [
            ("forget", False, "user:ann"), ("forget", False, "user:ann"),
        ]  # fmt: skip
    verdict = verify(path)
    assert verdict.ok, verdict.first_bad
    assert SECRET not in whole(path).read_bytes()
    with duckdb.connect(str(path)) as connection:
        row = connection.execute("SELECT max(ordinal) FROM events").fetchone()
        assert row is not None
        connection.execute("UPDATE events SET payload = NULL WHERE ordinal = ?", row)
    bad = verify(path).first_bad
    assert bad is not None
    assert "nobody ordered that" in bad.what


def test_nothing_but_what_the_order_covers_may_be_gone(tmp_path: Path) -> None:
    """A live job's words, and those of one that ended later: the chain holds, and it shows all the same."""
    for row in (10, 12, 14, 15):
        path = tmp_path / f"log-{row}.duckdb"
        with EventLog.open(path) as log:
            tape = Tape()
            log.append([*a_year(tape), forget(tape, NOON // DAY * DAY + DAY)])
        with duckdb.connect(str(path)) as connection:
            connection.execute("UPDATE events SET payload = NULL WHERE ordinal = ?", [row])
        bad = verify(path).first_bad
        assert bad is not None
        assert (bad.ordinal, "nobody ordered that" in bad.what) == (row, True)


def test_a_hold_keeps_from_being_forgotten_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        tape = Tape()
        log.append([*a_year(tape), hold(tape, tenant="acme")])
        asyncio.run(kept(log, [forget(tape, NOON // DAY * DAY + 3 * DAY), tape.fact(a_node("node-2"))]))
        assert log.ask(FORGOTTEN).rows == [(None,)]
        released = tape.fact(ev.LegalHoldReleased(hold_id="hold-7", actor="user:bob", reason="settled", answers=8))
        asyncio.run(kept(log, [released, tape.fact(a_node("node-3"))]))
        assert len(log.ask(FORGOTTEN).rows[0][0]) == 6
    assert verify(path).ok


@pytest.mark.parametrize("is_by_retention", [False, True])
def test_a_wish_that_did_not_name_its_job_is_the_jobs_all_the_same(is_by_retention: bool, tmp_path: Path) -> None:
    """Admission named it: it is part of its story, and is forgotten with it; of another job's order nothing comes."""
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        tape = Tape()
        request = a_job_request(job_id="x")
        workload = ev.Workload(command=(SECRET.decode(),))
        nameless = tape.wish(ev.JobRequested(queue="main", workload=workload, resources=request.resources))
        rows = [
            nameless,
            tape.fact(a_job("job-1", answers=1)),
            tape.fact(ev.JobSucceeded(job_id=JobId("acme/job-1"), attempts=1, wait_ms=1, run_ms=1)),
            tape.wish(a_job_request(job_id="later")),
        ]
        tape.at += DAY
        log.append(rows)
        story = log.ask("SELECT kind FROM v_job_timeline WHERE job_id = 'acme/job-1' ORDER BY ordinal").rows
        assert story == [("JobRequested",), ("JobAdmitted",), ("JobSucceeded",)]
        asyncio.run(kept(log, [order(tape, nameless), tape.fact(a_node())]))
        assert log.ask(FORGOTTEN).rows == [(None,)], "the row is another than that order says"
        if is_by_retention:
            said = [forget(tape, NOON // DAY * DAY + DAY)]
        else:
            said = [order(tape, nameless, job_id=JobId("acme/job-1"))]
        asyncio.run(kept(log, [*said, tape.fact(a_node("node-2"))]))
        (ordinals,) = log.ask("SELECT list(ordinal ORDER BY ordinal) FROM events WHERE payload IS NULL").rows[0]
        assert ordinals == ([1, 2] if is_by_retention else [1])
    assert verify(path).ok
