"""The named questions on one small history, against answers that were worked out by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, RunCause, StopCause
from apportion.contracts.envelope import Basis, Stream
from apportion.contracts.ids import OPERATOR, JobId, NodeId, RunId, TenantId
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement
from apportion.monitor.log import VIEWS, EventLog, views
from apportion.monitor.testing import Recorded, Tape, replaced

BASIS = Basis(facts=3, wishes=2, decided_at=NOON, policy="test@1#0")
NODE = NodeId("node-1")
TRAIN, WAITS, ODD = JobId("acme/train-7"), JobId("acme/waits"), JobId("globex/odd")


def a_run(job: JobId, attempt: int = 1) -> RunId:
    return RunId(f"{job}/0/{attempt}")


def started(run: RunId, node: NodeId = NODE) -> ev.Fact:
    return ev.RunStarted(run_id=run, node_id=node, pid=1, started_at=NOON)


def finished(run: RunId, cause: RunCause, node: NodeId = NODE, **more: Any) -> ev.Fact:
    return ev.RunFinished(run_id=run, node_id=node, cause=cause, finished_at=NOON, **more)


def released(run: RunId, node: NodeId = NODE) -> ev.Fact:
    return ev.RunReleased(run_id=run, node_id=node, released_at=NOON)


def a_history(tape: Tape) -> Iterator[Recorded]:
    """train-7 loses its node, moves, and succeeds; waits waits; globex's job is cancelled while it runs."""
    yield tape.wish(a_job_request())  # row 1, 1 ms after noon; every row is 1 ms later
    yield tape.wish(a_job_request(job_id="waits"))
    yield tape.fact(a_node())
    yield tape.fact(a_node("node-2"))
    yield tape.fact(a_job(), basis=BASIS)  # row 5
    yield tape.fact(a_job("waits", answers=2), basis=BASIS)
    yield tape.fact(a_placement(), basis=BASIS)  # row 7: fact 5
    yield tape.fact(started(a_run(TRAIN)))
    yield tape.fact(
        ev.JobPendingReasonChanged(
            job_id=WAITS, code=Pending.FRAGMENTED_DEVICES, requested={"memory_mib": 9}, since_at=NOON, hint="wait"
        ),
        basis=BASIS,
    )
    yield tape.fact(ev.NodeFenced(node_id=NODE, epoch=1, runs=(a_run(TRAIN),), reason="silent"))  # row 10: fact 8
    yield tape.fact(ev.JobRequeued(job_id=TRAIN, attempt=2, cause=RunCause.NODE_LOST), basis=BASIS)
    yield tape.fact(a_placement(node="node-2", attempt=2), basis=BASIS)  # row 12: fact 10
    yield tape.fact(started(a_run(TRAIN, 2), NodeId("node-2")))
    yield tape.fact(finished(a_run(TRAIN, 2), RunCause.SUCCESS, NodeId("node-2"), exit_code=0))
    yield tape.fact(released(a_run(TRAIN, 2), NodeId("node-2")))  # row 15: fact 13
    yield tape.fact(ev.JobSucceeded(job_id=TRAIN, attempts=2, wait_ms=7, run_ms=2), basis=BASIS)
    yield tape.wish(a_job_request(job_id="odd"), tenant="globex")  # row 17: wish 3
    yield tape.fact(a_job("odd", tenant=TenantId("globex"), answers=3), basis=BASIS)
    yield tape.fact(a_placement("globex/odd", node="node-2", compute_milli=1000), basis=BASIS)  # row 19: fact 16
    yield tape.wish(ev.JobCancelRequested(job_id="globex/odd", reason="no"), tenant=OPERATOR)  # row 20: wish 4
    yield tape.fact(
        ev.JobStopping(job_id=ODD, attempt=1, cause=StopCause.CANCELLED, actor="alice", reason="no", answers=4),
        basis=BASIS,
    )
    yield tape.fact(
        ev.RunStopOrdered(
            run_id=a_run(ODD),
            node_id=NodeId("node-2"),
            cause=StopCause.CANCELLED,
            grace_s=1,
            actor="alice",
            reason="no",
        ),
        basis=BASIS,
    )
    yield tape.record(Stream.WISHES, "apportion.v1.main.wish.acme.JobRequested", None, b"\xff")  # row 23: wish 5
    yield tape.fact(finished(a_run(TRAIN), RunCause.NODE_LOST))  # row 24: late, from the node that was fenced
    yield tape.fact(released(a_run(TRAIN)))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventLog]:
    """The history above, in one file."""
    with EventLog.open(tmp_path_factory.mktemp("log") / "log.duckdb") as opened:
        opened.append(list(a_history(Tape())))
        yield opened


def at(row: int) -> int:
    """When a row was recorded: microseconds after noon are its number in ms."""
    return NOON + row * 1_000_000


def asked(log: EventLog, question: str) -> list[tuple[Any, ...]]:
    return log.ask(question).rows


def test_every_view_has_a_file_and_an_answer(log: EventLog) -> None:
    """Binding all of them finds a column that was renamed."""
    assert [name for name, _ in views()] == list(VIEWS)
    for name in VIEWS:
        log.ask(f"SELECT * FROM {name}")


def test_jobs_from_request_to_end(log: EventLog) -> None:
    rows = asked(
        log,
        "SELECT job_id, tenant, queue, outcome, attempts, epoch_ns(requested), epoch_ns(admitted),"
        " epoch_ns(first_started), epoch_ns(ended), wait_ms, run_ms, compute_milli, memory_mib, terminal_facts"
        " FROM v_job ORDER BY job_id",
    )
    assert rows == [
        ("acme/train-7", "acme", "main", "succeeded", 2, at(1), at(5), at(8), at(16), 7, 2, 250, 4096, 1),
        ("acme/waits", "acme", "main", "live", 1, at(2), at(6), None, None, None, None, 250, 4096, 0),
        ("globex/odd", "globex", "main", "live", 1, at(17), at(18), None, None, None, None, 250, 4096, 0),
    ]


def test_runs_and_how_each_ended(log: EventLog) -> None:
    """A run whose node was fenced is lost, whatever its agent says later."""
    rows = asked(
        log,
        "SELECT run_id, node_id, state, epoch_ns(placed), epoch_ns(started), epoch_ns(finished), epoch_ns(released),"
        " epoch_ns(lost), cause, exit_code, stop, compute_milli, memory_mib, placed_seq, freed_seq FROM v_run"
        " ORDER BY placed_seq",
    )
    assert rows == [
        (
            "acme/train-7/0/1", "node-1", "lost", at(7), at(8), at(24), at(25), at(10), "NodeLost", None, None,
            250, 4096, 5, 8,
        ),
        (
            "acme/train-7/0/2", "node-2", "released", at(12), at(13), at(14), at(15), None, "Success", 0, None,
            250, 4096, 10, 13,
        ),
        (
            "globex/odd/0/1", "node-2", "placed", at(19), None, None, None, None, None, None, "Cancelled",
            1000, 4096, 16, None,
        ),
    ]  # fmt: skip


def test_a_jobs_timeline_is_whole_and_in_order(log: EventLog) -> None:
    """The fencing of its node is part of the job's story, though the fact does not name the job."""
    rows = asked(
        log, "SELECT ordinal, kind, said_by FROM v_job_timeline WHERE job_id = 'acme/train-7' ORDER BY ordinal"
    )
    assert rows == [
        (1, "JobRequested", "acme"),
        (5, "JobAdmitted", "admission"),
        (7, "RunPlaced", "placer"),
        (8, "RunStarted", "agent-node-1"),
        (10, "NodeFenced", "monitor"),
        (11, "JobRequeued", "admission"),
        (12, "RunPlaced", "placer"),
        (13, "RunStarted", "agent-node-2"),
        (14, "RunFinished", "agent-node-2"),
        (15, "RunReleased", "agent-node-2"),
        (16, "JobSucceeded", "admission"),
        (24, "RunFinished", "agent-node-1"),
        (25, "RunReleased", "agent-node-1"),
    ]


def test_who_waits_now_and_why(log: EventLog) -> None:
    rows = asked(log, "SELECT job_id, tenant, epoch_ns(since), code, hint, requested FROM v_pending_now")
    assert rows == [("acme/waits", "acme", at(6), "FragmentedDevices", "wait", '{"memory_mib":9}')]


def test_decisions_with_their_basis(log: EventLog) -> None:
    rows = asked(
        log,
        "SELECT author, kind, count(*), min(basis_facts), min(basis_wishes), any_value(policy) FROM v_decisions"
        " GROUP BY ALL ORDER BY author, kind",
    )
    assert rows == [
        ("admission", "JobAdmitted", 3, 3, 2, "test@1#0"),
        ("admission", "JobRequeued", 1, 3, 2, "test@1#0"),
        ("admission", "JobStopping", 1, 3, 2, "test@1#0"),
        ("admission", "JobSucceeded", 1, 3, 2, "test@1#0"),
        ("placer", "JobPendingReasonChanged", 1, 3, 2, "test@1#0"),
        ("placer", "RunPlaced", 3, 3, 2, "test@1#0"),
        ("placer", "RunStopOrdered", 1, 3, 2, "test@1#0"),
    ]


def test_every_stop_has_an_actor_a_cause_and_a_reason(log: EventLog) -> None:
    rows = asked(log, "SELECT ordinal, kind, job_id, actor, cause, reason FROM v_stops ORDER BY ordinal")
    assert rows == [
        (10, "NodeFenced", None, None, None, "silent"),
        (20, "JobCancelRequested", "globex/odd", None, None, "no"),
        (21, "JobStopping", "globex/odd", "alice", "Cancelled", "no"),
        (22, "RunStopOrdered", "globex/odd", "alice", "Cancelled", "no"),
    ]


def test_wishes_and_what_answered_them(log: EventLog) -> None:
    """One that no service has answered yet stands out, the undecodable one too."""
    rows = asked(
        log,
        "SELECT wish_seq, tenant, kind, answer, latency_ms, answering_facts, parse_error IS NOT NULL"
        " FROM v_wish_answers ORDER BY wish_seq",
    )
    assert rows == [
        (1, "acme", "JobRequested", "JobAdmitted", 4, 1, False),
        (2, "acme", "JobRequested", "JobAdmitted", 4, 1, False),
        (3, "globex", "JobRequested", "JobAdmitted", 1, 1, False),
        (4, "_operator", "JobCancelRequested", "JobStopping", 1, 1, False),
        (5, "acme", "JobRequested", None, None, 0, True),
    ]


def test_no_slice_is_held_twice_in_an_honest_history(log: EventLog) -> None:
    """A whole device and a quarter of it held one after the other is no overlap."""
    assert asked(log, "SELECT * FROM v_double_slice") == []


def test_a_slice_that_is_held_twice_is_found(tmp_path: Path) -> None:
    """The view that must be empty would be worthless if it were always empty."""
    tape = Tape()
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(
            [
                tape.fact(a_node()),
                tape.fact(a_placement("acme/a", compute_milli=800)),
                tape.fact(a_placement("acme/b", compute_milli=300)),
                tape.fact(a_placement("acme/c", device=1, memory_mib=81_921)),
                tape.fact(a_placement("acme/d", device=9)),
            ]
        )
        rows = asked(
            log, "SELECT device_uuid, fact_seq, run_id, compute_milli, memory_mib FROM v_double_slice ORDER BY fact_seq"
        )
    assert rows == [
        ("GPU-node-1-0", 3, "acme/b/0/1", 1100, 8192),
        ("GPU-node-1-1", 4, "acme/c/0/1", 250, 81_921),
        ("GPU-node-1-9", 5, "acme/d/0/1", 250, 4096),  # a device that nobody ever registered has nothing to give
    ]


def test_a_slice_is_free_once_it_was_released_or_its_node_fenced(tmp_path: Path) -> None:
    """Released at one sequence and given away at the next is how a full device is handed on."""
    tape = Tape()
    run = a_run(JobId("acme/a"))
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(
            [
                tape.fact(a_node()),
                tape.fact(a_placement("acme/a", compute_milli=1000)),
                tape.fact(released(run)),
                tape.fact(a_placement("acme/b", compute_milli=1000)),
                tape.fact(ev.NodeFenced(node_id=NODE, epoch=1, runs=(a_run(JobId("acme/b")),))),
                tape.fact(a_placement("acme/c", compute_milli=1000)),
            ]
        )
        assert asked(log, "SELECT * FROM v_double_slice") == []


def test_a_start_that_is_told_with_the_end_counts_as_one(tmp_path: Path) -> None:
    """An agent killed between starting a run and saying so tells of both later; a stale order never started."""
    tape = Tape()
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(
            [
                tape.fact(a_node()),
                tape.fact(a_job()),
                tape.fact(a_placement()),
                tape.fact(finished(a_run(TRAIN), RunCause.SUCCESS, started_at=NOON + 7)),
                tape.fact(a_placement(attempt=2)),
                tape.fact(finished(a_run(TRAIN, 2), RunCause.STALE, was_started=False)),
            ]
        )
        rows = asked(log, "SELECT run_id, epoch_ns(started) FROM v_run ORDER BY run_id")
    assert rows == [(a_run(TRAIN), NOON + 7), (a_run(TRAIN, 2), None)]


def test_a_strangers_bytes_spoil_no_question(tmp_path: Path) -> None:
    """What one decoder lets pass another may refuse; the views pass over it, and the raw row is there."""
    tape = Tape()
    data = b'"data":{"queue":"main","workload":{"command":["x"]},"job_id":"a","labels":{"k":"\\u0000\\ud83d"}}'
    wish = b'{"specversion":"1.0","id":"i","source":"s","type":"io.apportion.JobRequested.v1",%s,"other":%s}'
    good = b'"data":{"queue":"main","workload":{"command":["x"]},"job_id":"a"}'
    bodies = [
        wish % (good, b'"\xff\xfe"'),
        wish % (good, b"[" * 5000 + b"]" * 5000),
        wish % (good, b'"\\ud800"'),
        wish % (good, b"1e999"),
        wish % (good, b"9" * 400),
        wish % (data, b"1"),
        wish % (good, b'1,"other":2'),
    ]
    subject = "apportion.v1.main.wish.acme.JobRequested"
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([tape.record(Stream.WISHES, subject, {}, body) for body in bodies])
        trusted = tape.fact(ev.NodeTrusted(node_id=NODE, epoch=0, silent_ms=1))
        odd = replaced(trusted, body=trusted.body[:-1] + b',"later":"\xff"}')
        log.append([odd, tape.fact(a_node()), tape.fact(a_job("a"), basis=BASIS)])
        for name in VIEWS:
            log.ask(f"SELECT * FROM {name}")
        assert asked(log, "SELECT count(*) FROM v_event") == [(10,)]
        # A fact like any other to us, as unknown fields pass, with bytes in it that no text may hold: no body as JSON.
        assert asked(log, "SELECT kind FROM v_event WHERE parse_error IS NULL AND body IS NULL") == [("NodeTrusted",)]
