"""Going back: the pool at any moment is what the facts up to then make of it, with folds on the way and without."""

from pathlib import Path

import msgspec
import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import RunCause
from apportion.contracts.envelope import Basis, Stream
from apportion.contracts.ids import JobId, NodeId, RunId
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement, a_queue
from apportion.monitor import history as module
from apportion.monitor.history import History, NoSuchMoment, entries_of
from apportion.monitor.log import EventLog, LogFile, messages_of
from apportion.monitor.projections import entry_of
from apportion.monitor.testing import Recorded, Tape, replaced
from apportion.pool.state import Pool, RunState, evolve

NODE = NodeId("node-1")
RUN = RunId("acme/train-7/0/1")
BASIS = Basis(facts=2, wishes=1, decided_at=NOON, policy="test@1#0")


def a_history(tape: Tape) -> list[Recorded]:
    """A job's life, among it what no version can read, what a newer one wrote, and what nobody may state."""
    fact = tape.fact(a_node("node-2"))
    assert fact.headers is not None
    newer = {**fact.headers, "ce-type": "io.apportion.NodeBlessed.v1"}
    return [
        tape.fact(a_queue()),
        tape.fact(a_node()),
        tape.wish(a_job_request()),
        tape.fact(a_job(), basis=BASIS),
        tape.fact(a_placement(), basis=BASIS),
        tape.fact(ev.RunStarted(run_id=RUN, node_id=NODE, pid=1, started_at=NOON)),
        replaced(tape.fact(a_node("node-2")), headers=newer),
        replaced(tape.fact(a_node("node-2")), body=b"{"),
        tape.fact(a_node("node-3"), author="agent-node-2"),
        replaced(tape.fact(a_node("node-2")), headers=None),
        tape.fact(ev.RunFinished(run_id=RUN, node_id=NODE, cause=RunCause.SUCCESS, finished_at=NOON)),
        tape.fact(ev.RunReleased(run_id=RUN, node_id=NODE, released_at=NOON)),
        tape.fact(ev.JobSucceeded(job_id=JobId("acme/train-7"), attempts=1, wait_ms=1, run_ms=1), basis=BASIS),
    ]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The history as a log; a fold is kept every three facts."""
    monkeypatch.setattr(module, "FOLD_EVERY", 3)
    tape = Tape()
    first = a_history(tape)
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(_in_order(first))
    return tmp_path / "log.duckdb"


def _in_order(messages: list[Recorded]) -> list[Recorded]:
    """Numbered as they stand, a millisecond apart."""
    last = dict.fromkeys(Stream, 0)
    numbered: list[Recorded] = []
    for message in messages:
        last[message.stream] += 1
        numbered.append(replaced(message, seq=last[message.stream], recorded_at=NOON + len(numbered) * 1_000_000))
    return numbered


def folded(path: Path, seq: int) -> Pool:
    """The plain way: every message decoded whole, from the first on."""
    pool = Pool()
    for message in messages_of(path, Stream.FACTS):
        if message.seq <= seq:
            pool = evolve(pool, entry_of(message))
    return pool


def test_rows_are_read_as_the_messages_that_they_were(path: Path) -> None:
    """The short way of a fold must see what a service saw, whatever the message."""
    with History.open(path) as history:
        short = list(history.entries(after=0, to=history.last_seq))
    whole = [entry_of(message) for message in messages_of(path, Stream.FACTS)]
    assert short == [msgspec.structs.replace(entry, traceparent="") for entry in whole]
    log = LogFile.open(path)
    try:
        assert list(entries_of(log.facts(after=0, to=12, rows=5), log)) == short
    finally:
        log.close()


def test_every_moment_is_the_fold_of_what_came_before(path: Path) -> None:
    """First without folds on disk, then with all of them, and with any one damaged."""
    for _ in range(2):
        with History.open(path) as history:
            for seq in range(13):
                assert history.at_seq(seq) == folded(path, seq)
    kept = sorted(path.with_suffix(".folds").rglob("*.fold"))
    assert [int(fold.stem) for fold in kept] == [3, 6, 9, 12]
    kept[-1].write_bytes(b"damaged")
    with History.open(path) as history:
        assert history.at_seq(12) == folded(path, 12)


def test_a_run_is_seen_as_it_was_then(path: Path) -> None:
    """Placed, then started, then gone: this is what an operator goes back for."""
    with History.open(path) as history:
        assert history.at_seq(4).jobs[JobId("acme/train-7")].runs[RUN].state is RunState.PLACED
        then = history.at_seq(history.seq_at(NOON + 5_500_000))
        assert then.jobs[JobId("acme/train-7")].runs[RUN].state is RunState.STARTED
        assert then.nodes[NODE].devices[a_placement().slices[0].device_uuid].used_compute_milli == 250
        assert history.at_seq(history.last_seq).jobs == {}
        assert history.seq_at(NOON - 1) == 0
        assert history.span() == (NOON, NOON + 12_000_000)
        with pytest.raises(NoSuchMoment, match="its last fact is 12"):
            history.at_seq(13)


def test_folds_of_another_log_are_not_believed(path: Path, tmp_path: Path) -> None:
    """A log that was moved aside leaves its folds behind; the chain's hash tells them apart."""
    with History.open(path) as history:
        history.at_seq(12)
    tape = Tape()
    with EventLog.open(tmp_path / "other.duckdb") as log:
        log.append([tape.fact(a_node(f"node-{n}")) for n in range(12)])
    with History.open(tmp_path / "other.duckdb", folds=path.with_suffix(".folds")) as history:
        assert len(history.at_seq(12).nodes) == 12


def test_a_place_where_nothing_can_be_written_has_slower_seeks(path: Path, tmp_path: Path) -> None:
    """An auditor's read-only share: folds are a cache, and their absence no error."""
    (tmp_path / "file").write_bytes(b"")
    with History.open(path, folds=tmp_path / "file" / "folds") as history:
        assert history.at_seq(12) == folded(path, 12)
