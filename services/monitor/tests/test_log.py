"""The event log on real DuckDB files: exactly once, chained, and checked against the bus."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.envelope import Basis, Stream
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement
from apportion.monitor import chain, damage
from apportion.monitor.log import (
    EventLog,
    LogAhead,
    LogBehind,
    LogDamaged,
    LogUnavailable,
    LogWriteFailed,
    NotACopy,
    SequenceGap,
    check_bus,
    messages_of,
    verify,
)
from apportion.monitor.testing import Recorded, Tape, replaced

BASIS = Basis(facts=1, wishes=1, decided_at=NOON, policy="test@1#0")


def a_history(tape: Tape) -> list[Recorded]:
    """One job from its wish to its placement, and a wish that doesn't decode."""
    return [
        tape.wish(a_job_request()),
        tape.fact(a_node()),
        tape.fact(a_job(), basis=BASIS),
        tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", None, b"\xff{not json"),
        tape.fact(a_placement(), basis=BASIS),
    ]


def a_closed_log(path: Path) -> Path:
    """A log of a_history on disk."""
    with EventLog.open(path) as log:
        log.append(a_history(Tape()))
    return path


def changed(path: Path, *statements: str) -> Path:
    """The log after somebody with a database shell was at it."""
    connection = duckdb.connect(str(path))
    for statement in statements:
        connection.execute(statement)
    connection.close()
    return path


def test_a_row_keeps_the_raw_message_and_says_what_it_is_about(tmp_path: Path) -> None:
    """Byte for byte: whatever the columns say, the message itself is there to be read again."""
    tape = Tape()
    message = tape.fact(a_placement(), basis=BASIS)
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([message])
        asked = log.ask(
            "SELECT payload, headers, type, tenant, job_id, run_id, node_id, author, basis_facts, basis_wishes, "
            "decided_at, policy, recorded_at FROM events"
        )
    row = asked.rows[0]
    assert row[0] == message.body
    assert '"ce-type":"io.apportion.RunPlaced.v1"' in row[1]
    assert row[2:8] == ("RunPlaced.v1", "acme", "acme/train-7", "acme/train-7/0/1", "node-1", "placer")
    assert row[8:] == (1, 1, NOON, "test@1#0", message.recorded_at)


def test_bytes_that_decode_to_nothing_are_in_the_log_with_the_reason(tmp_path: Path) -> None:
    """An auditor sees what was sent, however broken; nothing is dropped."""
    tape = Tape()
    hostile = [
        tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", None, b"\x00\xff\xfe"),
        tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", {}, b"[" * 40_000),
        tape.record(
            Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", {}, b'{"x":' + b"[" * 9000 + b"]" * 9000 + b"}"
        ),
        tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.Nonsense", {"a": "\udcff\x00"}, b""),
        tape.record(Stream.WISHES, "elsewhere", None, b"{}"),
        tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", None, b"x" * 10_000_000),
        tape.record(Stream.FACTS, "elsewhere", {"ce-type": "io.apportion.RunPlaced.v1", "ce-decidedat": "soon"}, b"{}"),
        tape.record(Stream.FACTS, "apportion.v1.main.fact.placer.pool", {"ce-type": "io.apportion.New.v9"}, b"{}"),
    ]
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        assert log.append(hostile) == len(hostile)
        asked = log.ask("SELECT payload, parse_error, type FROM events ORDER BY ordinal")
    assert [row[0] for row in asked.rows] == [message.body for message in hostile]
    # Which code each of them gets is the contract's to say (tests/contract); that each has one is the log's.
    assert all(row[1] for row in asked.rows)
    assert asked.rows[5][1].startswith("TooLarge: expected at most 65536 bytes, found 10000000 bytes")
    assert asked.rows[7][1].startswith("TypeUnknown")
    assert verify(path).ok


def test_what_is_in_the_log_already_is_passed_over(tmp_path: Path) -> None:
    """Every delivery may come twice; a row never does."""
    messages = a_history(Tape())
    with EventLog.open(tmp_path / "log.duckdb") as log:
        assert log.append(messages[:3]) == 3
        assert log.append(messages) == 2
        assert log.append(messages) == 0
        assert log.ask("SELECT count(*) FROM events").rows == [(5,)]


def test_a_gap_is_refused_and_nothing_of_the_batch_is_written(tmp_path: Path) -> None:
    """A hole in the log could never be told from a message that never was."""
    tape = Tape()
    first, _, third = tape.wish(a_job_request()), tape.wish(a_job_request()), tape.wish(a_job_request())
    with EventLog.open(tmp_path / "log.duckdb") as log:
        with pytest.raises(SequenceGap) as refused:
            log.append([first, third])
        assert (refused.value.expected, refused.value.found) == (2, 3)
        assert log.head.ordinal == 0
        assert log.append([first]) == 1


def test_a_batch_that_fails_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    """Rows and position are one transaction, also when the second of them fails."""
    tape = Tape()
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([tape.fact(a_node())])
        before = log.head
        message = tape.fact(a_job())
        log._connection.execute("ALTER TABLE applied RENAME TO applied_away")
        with pytest.raises(LogWriteFailed):
            log.append([message])
        log._connection.execute("ALTER TABLE applied_away RENAME TO applied")
        assert log.head == before
        assert log.ask("SELECT count(*) FROM events").rows == [(1,)]
        assert log.append([message]) == 1


def test_the_next_life_goes_on_where_the_last_one_committed(tmp_path: Path) -> None:
    """Position, chain and order survive; the chain is one over both lives."""
    path = tmp_path / "log.duckdb"
    messages = a_history(Tape())
    with EventLog.open(path) as log:
        log.append(messages[:2])
        head, positions = log.head, log.positions
    with EventLog.open(path) as log:
        assert (log.head, log.positions) == (head, positions)
        log.append(messages[2:])
        assert log.positions[Stream.WISHES].last_event_id == "wish-2"
    assert verify(path).rows == 5


def test_only_one_process_writes(tmp_path: Path) -> None:
    """Said with the file's name, as an operator will ask which one."""
    path = a_closed_log(tmp_path / "log.duckdb")
    taken = duckdb.connect(str(path), read_only=True)
    try:
        with pytest.raises(LogUnavailable, match=r"log\.duckdb"):
            EventLog.open(path)
    finally:
        taken.close()


# The chain ----------------------------------------------------------------------------------------------------------


def test_an_untouched_log_verifies(tmp_path: Path) -> None:
    """And says which head it verified, to be compared with one that is kept elsewhere."""
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        log.append(a_history(Tape()))
        head = log.head
    verdict = verify(path)
    assert (verdict.ok, verdict.rows, verdict.head_hash, verdict.first_bad) == (True, 5, head.hash.hex(), None)


@pytest.mark.parametrize(
    ("tampering", "ordinal", "what"),
    [
        ("UPDATE events SET payload = 'x'::BLOB WHERE ordinal = 3", 3, "payload"),
        ("UPDATE events SET payload = NULL WHERE ordinal = 2", 2, "payload"),
        ("UPDATE events SET headers = replace(headers, 'placer', 'player') WHERE ordinal = 5", 5, "envelope"),
        ("UPDATE events SET tenant = 'globex' WHERE ordinal = 3", 3, "envelope"),
        ("UPDATE events SET recorded_at = recorded_at + 1 WHERE ordinal = 1", 1, "envelope"),
        ("UPDATE events SET stream_seq = 7 WHERE ordinal = 4", 4, "hash does not follow"),
        ("UPDATE events SET stream = 'else' WHERE ordinal = 4", 4, "stream was changed"),
        ("UPDATE events SET stream = 'facts' WHERE ordinal = 1", 1, "hash does not follow"),
        ("UPDATE events SET prev_hash = hash WHERE ordinal = 2", 2, "does not follow the row"),
        ("UPDATE events SET hash = prev_hash WHERE ordinal = 5", 5, "hash does not follow"),
        ("DELETE FROM events WHERE ordinal = 1", 2, "row 1 is missing"),
        ("DELETE FROM events WHERE ordinal = 3", 4, "row 3 is missing"),
        ("INSERT INTO events SELECT * EXCLUDE (recorded) FROM events WHERE ordinal = 2", 2, "twice"),
        ("UPDATE events SET ordinal = CASE ordinal WHEN 2 THEN 3 ELSE 2 END WHERE ordinal IN (2, 3)", 2, "not follow"),
        ("UPDATE events SET ordinal = -ordinal WHERE ordinal = 5", 5, "rows are stored"),
    ],
)
def test_verification_names_the_first_row_that_was_changed(
    tmp_path: Path, tampering: str, ordinal: int, what: str
) -> None:
    """Whoever edits the log has to rewrite everything after the edit, and the head that others hold."""
    names = "ordinal"
    if tampering.startswith("INSERT"):
        connection = duckdb.connect(str(a_closed_log(tmp_path / "log.duckdb")))
        names = ", ".join(
            row[0] for row in connection.execute("DESCRIBE SELECT * EXCLUDE (recorded) FROM events").fetchall()
        )
        connection.close()
        tampering = tampering.replace("INTO events", f"INTO events({names})")
        path = changed(tmp_path / "log.duckdb", tampering)
    else:
        path = changed(a_closed_log(tmp_path / "log.duckdb"), tampering)
    verdict = verify(path)
    assert not verdict.ok
    assert verdict.first_bad is not None
    assert verdict.first_bad.ordinal == ordinal
    assert what in verdict.first_bad.what
    assert verdict.rows < 6


def test_a_cut_tail_shows_as_long_as_the_position_stands(tmp_path: Path) -> None:
    """Whoever cuts that as well is found by a head that was kept elsewhere."""
    verdict = verify(changed(a_closed_log(tmp_path / "log.duckdb"), "DELETE FROM events WHERE ordinal >= 4"))
    assert not verdict.ok
    assert verdict.first_bad is not None
    assert "tail is gone" in verdict.first_bad.what


def test_a_rewritten_row_with_all_its_own_hashes_breaks_the_next_row(tmp_path: Path) -> None:
    """Consistent in itself is not enough: the next row says what came before it."""
    path = a_closed_log(tmp_path / "log.duckdb")
    connection = duckdb.connect(str(path))
    row = connection.execute(
        "SELECT prev_hash, stream, stream_seq, envelope_hash FROM events WHERE ordinal = 2"
    ).fetchone()
    assert row is not None
    payload = chain.payload_hash(b"{}")
    forged = chain.link(row[0], Stream(row[1]), row[2], row[3], payload)
    connection.execute(
        "UPDATE events SET payload = ?, payload_sha256 = ?, hash = ? WHERE ordinal = 2", [b"{}", payload, forged]
    )
    connection.close()
    verdict = verify(path)
    assert verdict.first_bad is not None
    assert verdict.first_bad.ordinal == 3
    assert "does not follow the row before it" in verdict.first_bad.what


def test_verification_goes_past_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is read in pieces; no row falls between two of them."""
    monkeypatch.setattr("apportion.monitor.log._VERIFY_ROWS", 2)
    path = a_closed_log(tmp_path / "log.duckdb")
    assert verify(path).rows == 5
    changed(path, "DELETE FROM events WHERE ordinal IN (3, 4)")
    bad = verify(path).first_bad
    assert bad is not None
    assert bad.what == "row 3 is missing"


# The bus ------------------------------------------------------------------------------------------------------------


def a_log_with_two_wishes(tmp_path: Path) -> tuple[EventLog, list[Recorded]]:
    """Sequences 1 and 2 of the wishes."""
    tape = Tape()
    wishes = [tape.wish(a_job_request(job_id=name)) for name in ("a", "b")]
    log = EventLog.open(tmp_path / "log.duckdb")
    log.append(wishes)
    return log, wishes


def test_a_bus_that_goes_on_where_the_log_stands_is_accepted(tmp_path: Path) -> None:
    """With news or without."""
    log, wishes = a_log_with_two_wishes(tmp_path)
    with log:
        position = log.positions[Stream.WISHES]
        check_bus(position, first_seq=1, last_seq=2, at_last=wishes[1])
        check_bus(position, first_seq=1, last_seq=9, at_last=wishes[1])
        check_bus(position, first_seq=3, last_seq=9, at_last=None)
        check_bus(log.positions[Stream.FACTS], first_seq=1, last_seq=0, at_last=None)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (LogAhead, lambda _: {"first_seq": 1, "last_seq": 1, "at_last": None}),
        (LogAhead, lambda _: {"first_seq": 1, "last_seq": 0, "at_last": None}),
        (LogAhead, lambda wishes: {"first_seq": 1, "last_seq": 5, "at_last": replaced(wishes[1], body=b"{}")}),
        (LogBehind, lambda _: {"first_seq": 4, "last_seq": 9, "at_last": None}),
    ],
    ids=["shorter", "empty", "another event", "gone from the bus"],
)
def test_a_bus_that_is_another_one_is_refused(
    tmp_path: Path, error: type[LogAhead | LogBehind], state: Callable[[list[Recorded]], dict[str, object]]
) -> None:
    """Going on would write a log that no bus ever said; the exit code tells a supervisor not to try again."""
    log, wishes = a_log_with_two_wishes(tmp_path)
    with log, pytest.raises(error) as refused:
        check_bus(log.positions[Stream.WISHES], **state(wishes))  # type: ignore[arg-type]  # one of its argument lists
    assert refused.value.exit_code == 9


# Copies and reading back --------------------------------------------------------------------------------------------


def test_a_copy_takes_what_is_new_and_verifies_like_the_log(tmp_path: Path) -> None:
    """A reader of a copy can check the chain for itself."""
    messages = a_history(Tape())
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(messages[:2])
        assert log.copy_into(tmp_path / "copy.duckdb").ordinal == 2
        log.append(messages[2:])
        assert log.copy_into(tmp_path / "copy.duckdb") == log.head
        assert verify(tmp_path / "copy.duckdb").rows == 5


@pytest.mark.integration
def test_a_copy_that_is_being_read_is_left_alone(tmp_path: Path) -> None:
    """The reader keeps what it opened."""
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(a_history(Tape()))
        log.copy_into(tmp_path / "copy.duckdb")
        # A reader in this process would share the writer's instance; another process is what it is about.
        hold = (
            "import duckdb, sys; c = duckdb.connect(sys.argv[1], read_only=True); print('open', flush=True);"
            " sys.stdin.read(); c.close()"
        )
        reader = subprocess.Popen(
            [sys.executable, "-c", hold, str(tmp_path / "copy.duckdb")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"open\n"
            with pytest.raises(LogUnavailable):
                log.copy_into(tmp_path / "copy.duckdb")
        finally:
            reader.communicate(b"")
        assert log.copy_into(tmp_path / "copy.duckdb") == log.head


def test_a_file_that_is_no_copy_of_this_log_is_not_added_to(tmp_path: Path) -> None:
    """After a log was moved aside its old copies may lie about still."""
    other = Tape()
    with EventLog.open(tmp_path / "other.duckdb") as log:
        log.append([other.wish(a_job_request(job_id="other"))])
        log.copy_into(tmp_path / "copy.duckdb")
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(a_history(Tape()))
        with pytest.raises(NotACopy):
            log.copy_into(tmp_path / "copy.duckdb")


def test_messages_come_back_as_they_were(tmp_path: Path) -> None:
    """What a replay reads is what the bus said."""
    messages = a_history(Tape())
    path = a_closed_log(tmp_path / "log.duckdb")
    for stream in Stream:
        read = [(m.seq, m.recorded_at, m.subject, m.headers, m.body) for m in messages_of(path, stream, rows=2)]
        assert read == [(m.seq, m.recorded_at, m.subject, m.headers, m.body) for m in messages if m.stream is stream]


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    """An older program must not write into a newer log."""
    path = changed(a_closed_log(tmp_path / "log.duckdb"), "UPDATE meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(LogUnavailable, match="schema is 99"):
        EventLog.open(path)


def test_every_fact_fills_the_columns_that_it_can(tmp_path: Path) -> None:
    """A rejection answers a wish, has a cause, and belongs to a tenant."""
    tape = Tape()
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(
            [
                tape.fact(
                    ev.JobRejected(
                        tenant="acme",  # type: ignore[arg-type]  # the wire's text
                        answers=7,
                        wish_id="w",
                        code="TenantUnknown",  # type: ignore[arg-type]  # the wire's text
                        caused_by="w",
                    )
                )
            ]
        )
        rows = log.ask("SELECT tenant, answers, cause, caused_by, author, job_id FROM events").rows
    assert rows == [("acme", 7, "TenantUnknown", "w", "admission", None)]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(Stream), st.binary(max_size=40), st.dictionaries(st.text(max_size=8), st.text())),
        min_size=1,
        max_size=25,
    ),
    st.data(),
)
def test_any_messages_in_any_batches_end_in_the_same_log(
    tmp_path_factory: pytest.TempPathFactory, content: list[tuple[Stream, bytes, dict[str, str]]], data: st.DataObject
) -> None:
    """However they are cut into batches, delivered twice, or spread over lives of the writer."""
    tape = Tape()
    messages = [
        tape.record(stream, f"apportion.v1.main.{stream}.x", headers, body) for stream, body, headers in content
    ]
    folder = tmp_path_factory.mktemp("log")
    with EventLog.open(folder / "once.duckdb") as log:
        log.append(messages)
        head = log.head
    reached = 0
    for _ in range(2):
        with EventLog.open(folder / "pieces.duckdb") as log:
            for _ in range(3):
                upto = data.draw(st.integers(reached, len(messages)))
                again = data.draw(st.integers(0, reached))
                log.append(messages[again:upto])
                reached = upto
    with EventLog.open(folder / "pieces.duckdb") as log:
        log.append(messages[reached:])
        assert log.head == head
    assert verify(folder / "pieces.duckdb").rows == len(messages)


@pytest.mark.parametrize("which", [0, 1, 37, 59])
def test_one_flipped_byte_in_the_file_itself_names_its_row(tmp_path: Path, which: int) -> None:
    """DuckDB refuses a damaged block of 256 KiB whole, and hundreds of good rows with it; the verdict is one row."""
    tape = Tape()
    noise = Random(1)
    bodies = [noise.randbytes(3_000) for _ in range(60)]
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        log.append([tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", {}, b) for b in bodies])
    assert damage.verify(path).ok
    content = bytearray(path.read_bytes())
    at = content.find(bodies[which][100:164])
    assert at > 0
    content[at] ^= 1
    path.write_bytes(content)
    assert not verify(path).ok
    verdict = damage.verify(path)
    bad = verdict.first_bad
    assert bad is not None
    assert (bad.ordinal, bad.stream, bad.stream_seq) == (which + 1, "wishes", which + 1)
    assert bad.what.startswith("its payload was changed, in the file itself")
    assert verdict.rows == which
    assert path.read_bytes() == bytes(content)  # looked at, not mended
    with pytest.raises(LogDamaged, match="log verify") as raised:
        list(messages_of(path, Stream.WISHES))
    assert raised.value.exit_code == 9  # as for every log that is not what was written


def test_a_damaged_block_that_cannot_be_read_either_way_is_still_a_verdict(tmp_path: Path) -> None:
    """Zeros where a block was: its bytes mean nothing to DuckDB, whatever their checksum."""
    tape = Tape()
    body = Random(1).randbytes(3_000)
    path = tmp_path / "log.duckdb"
    with EventLog.open(path) as log:
        log.append(
            [tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", {}, body) for _ in range(60)]
        )
    content = bytearray(path.read_bytes())
    block = (content.find(body) - 3 * 4096) // 262_144 * 262_144 + 3 * 4096
    content[block + 8 : block + 262_144] = bytes(262_136)
    path.write_bytes(content)
    verdict = damage.verify(path)
    assert not verdict.ok
    assert verdict.first_bad is not None
