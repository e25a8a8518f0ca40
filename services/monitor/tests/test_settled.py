"""A copy that keeps what is settled answers as the log itself does, wherever it was brought up to date."""

import random
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, RunCause
from apportion.contracts.envelope import Basis, Stream
from apportion.contracts.ids import JobId, NodeId, RunId, run_id
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement, a_queue
from apportion.monitor import settled
from apportion.monitor.log import EventLog, own_questions, views, views_in
from apportion.monitor.testing import Recorded, Tape

COMPARED = (*settled.SETTLED, *settled.MOMENTS, "v_queue_share")


def a_busy_pool(tape: Tape, chance: random.Random, steps: int) -> Iterator[Recorded]:
    """Jobs that come, run and end in any order, with all that goes wrong: lost nodes, late words, lies, repeats."""
    basis = Basis(facts=1, wishes=1, decided_at=NOON, policy="test@1#0")
    epochs = {"node-1": 0, "node-2": 0}
    live: list[tuple[JobId, RunId, str]] = []
    over: list[tuple[JobId, RunId, str]] = []
    yield tape.fact(a_queue())
    for node in epochs:
        yield tape.fact(a_node(node))
    for number in range(steps):
        tape.at += chance.randrange(3) * 40_000_000_000
        what = chance.randrange(10)
        if what < 4 or not live:
            yield tape.wish(a_job_request(job_id=f"j{number}"))
            wish = tape.last[Stream.WISHES]
            yield tape.fact(a_job(f"j{number}", answers=wish), basis=basis)
            job, node = JobId(f"acme/j{number}"), chance.choice(sorted(epochs))
            if what == 1:
                yield tape.fact(
                    ev.JobPendingReasonChanged(job_id=job, code=Pending.PRIORITY, since_at=NOON), basis=basis
                )
            if what == 2:
                continue  # it waits for ever
            run = run_id(job, 0, 1)
            # All on one device: now and then it holds more than it has.
            yield tape.fact(a_placement(job, node=node, device=0, memory_mib=30_000), basis=basis)
            yield tape.fact(ev.RunStarted(run_id=run, node_id=NodeId(node), pid=1, started_at=NOON))
            live.append((job, run, node))
        elif what < 8:
            job, run, node = live.pop(chance.randrange(len(live)))
            yield tape.fact(ev.RunFinished(run_id=run, node_id=NodeId(node), cause=RunCause.SUCCESS, finished_at=NOON))
            if what != 7:
                yield tape.fact(ev.RunReleased(run_id=run, node_id=NodeId(node), released_at=NOON))
            yield tape.fact(ev.JobSucceeded(job_id=job, attempts=1, wait_ms=1, run_ms=1), basis=basis)
            over.append((job, run, node))
        elif what == 8:
            node = chance.choice(sorted(epochs))
            epochs[node] += 1
            lost = tuple(run for _, run, on in live if on == node)
            yield tape.fact(ev.NodeFenced(node_id=NodeId(node), epoch=epochs[node], runs=lost, reason="silent"))
            yield tape.fact(a_node(node, epoch=epochs[node]))
        elif over:
            # Of a job that is over: a late word of its agent, a second end, a repeat of the wish, one more attempt.
            job, run, node = chance.choice(over)
            yield tape.wish(a_job_request(job_id=job.partition("/")[2]))
            late: list[ev.Fact] = [
                ev.RunReleased(run_id=run, node_id=NodeId(node), released_at=NOON),
                ev.JobSucceeded(job_id=job, attempts=1, wait_ms=1, run_ms=1),
                ev.RunStarted(run_id=run, node_id=NodeId(node), pid=2, started_at=NOON),
                a_placement(job, node=node, attempt=2),
            ]
            yield tape.fact(chance.choice(late))


def answers(path: Path) -> dict[str, list[str]]:
    with own_questions(path) as ask:
        return {name: sorted(map(repr, ask(f"SELECT * FROM {name}"))) for name in COMPARED}


def test_a_copy_answers_as_the_log_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was settled when, and came late of jobs that were over: every row of every view is the log's own."""
    monkeypatch.setattr(settled, "SETTLE_EVERY", 60)
    rows = list(a_busy_pool(Tape(), random.Random(1), 60))
    path, copy = tmp_path / "log.duckdb", tmp_path / "copy.duckdb"
    first = 0
    for last in (90, 160, 200, len(rows)):
        with EventLog.open(path) as log:
            log.append(rows[first:last])
            log.copy_into(copy)
        first = last
    told = answers(path)
    assert answers(copy) == told
    with own_questions(copy) as ask:
        ((kept,),) = ask("SELECT count(*) FROM kept_v_job")
        ((left,),) = ask("SELECT count(*) FROM open_events")
    assert kept > 10
    assert left < len(rows) * 2 / 3
    assert all(told[name] for name in ("v_contradictions", "v_double_slice", "v_orphans")), "nothing compared"


def test_a_copy_of_other_views_is_read_without_what_it_keeps(tmp_path: Path) -> None:
    """Until it is brought up to date by the version that has them, which settles everything anew."""
    copy = tmp_path / "copy.duckdb"
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(list(a_busy_pool(Tape(), random.Random(3), 14)))
        log.copy_into(copy)
    with own_questions(copy) as ask:
        before = sorted(ask("SELECT * FROM v_job"), key=repr)
    with EventLog.open(tmp_path / "log.duckdb") as log:
        with duckdb.connect(str(copy)) as changed:
            changed.execute("UPDATE meta SET value = 'another' WHERE key = 'kept'")
            changed.execute("UPDATE kept_v_job SET tenant = 'nobody'")
        with own_questions(copy) as ask:
            assert sorted(ask("SELECT * FROM v_job"), key=repr) == before
        log.copy_into(copy)
    with own_questions(copy) as ask:
        assert sorted(ask("SELECT * FROM v_job"), key=repr) == before
        assert ask("SELECT DISTINCT tenant FROM kept_v_job") == [("acme",)]


def test_only_what_a_question_names_is_made() -> None:
    """A settled view takes its open half alone; what builds on it takes both."""
    assert [name for name, _ in views_in("SELECT * FROM v_job", is_kept=True)] == [
        "events_open", "v_event_open", "v_job_open", "v_job",
    ]  # fmt: skip
    made = [name for name, _ in views_in("SELECT 1 FROM v_queue_share", is_kept=True)]
    assert [name for name in made if not name.endswith("_open")] == [
        "v_event", "v_job", "v_run", "v_pending_now", "v_queue_share",
    ]  # fmt: skip
    assert views_in("SELECT 1 FROM events", is_kept=True) == []
    assert len(views_in(" ".join(name for name, _ in views()), is_kept=True)) > len(views())
