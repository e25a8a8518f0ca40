"""The proof counts what the log says; a proof that can't fail would prove nothing."""

from pathlib import Path

import msgspec
import pytest

from apportion.cli import proof
from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, RunCause
from apportion.contracts.ids import JobId, NodeId, RunId
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement
from apportion.monitor.log import EventLog, own_questions
from apportion.monitor.testing import Recorded, Tape

NODE = NodeId("node-1")
JOB = JobId("acme/train-7")


class History:
    """What the bus recorded, in order."""

    def __init__(self) -> None:
        self.messages: list[Recorded] = []
        self._tape = Tape()

    def wish(self, name: str = "train-7") -> "History":
        """A job request of acme."""
        self.messages.append(self._tape.wish(a_job_request(job_id=name)))
        return self

    def fact(self, *facts: ev.Fact) -> "History":
        """Facts, each by the author whose kind it is."""
        self.messages += [self._tape.fact(fact) for fact in facts]
        return self


def _found(path: Path, history: History) -> dict[str, int]:
    file = path / "log.duckdb"
    with EventLog.open(file) as log:
        log.append(history.messages)
    with own_questions(file) as ask:
        return proof.figures(ask)


def _run_of(placed: ev.RunPlaced) -> tuple[ev.RunStarted, ev.RunFinished, ev.RunReleased]:
    run, node = placed.run_id, placed.node_id
    return (
        ev.RunStarted(run_id=run, node_id=node, pid=4711, started_at=NOON),
        ev.RunFinished(run_id=run, node_id=node, cause=RunCause.SUCCESS, exit_code=0, finished_at=NOON),
        ev.RunReleased(run_id=run, node_id=node, released_at=NOON),
    )


def _succeeded(job: JobId = JOB) -> ev.JobSucceeded:
    return ev.JobSucceeded(job_id=job, attempts=1, wait_ms=10, run_ms=20)


def _good() -> History:
    placed = a_placement()
    return History().wish().fact(a_node(), a_job(), placed, *_run_of(placed), _succeeded())


def test_a_job_that_went_well_breaks_no_claim(tmp_path: Path) -> None:
    """And the figures are those of the story."""
    found = _found(tmp_path, _good())
    assert proof.broken(found) == {}
    names = ("jobs_requested", "jobs_admitted", "jobs_succeeded", "runs_started", "runs_moved", "events")
    assert {name: found[name] for name in names} == {
        "jobs_requested": 1,
        "jobs_admitted": 1,
        "jobs_succeeded": 1,
        "runs_started": 1,
        "runs_moved": 0,
        "events": 8,
    }


def test_a_request_without_an_answer_is_lost(tmp_path: Path) -> None:
    """Acknowledged and forgotten is the worst that a queue can do."""
    assert proof.broken(_found(tmp_path, _good().wish("forgotten"))) == {"lost": 1}


def test_a_job_without_an_end_is_lost(tmp_path: Path) -> None:
    """Admitted is a promise that it will end."""
    history = _good().wish("other").fact(a_job("other", answers=2))
    assert proof.broken(_found(tmp_path, history)) == {"lost": 1}


def test_a_job_with_two_ends_is_lost_too(tmp_path: Path) -> None:
    """Terminal once, and it stays so: whoever read the first end was told wrong, or whoever read the second."""
    failed = ev.JobFailed(job_id=JOB, attempts=1, cause=RunCause.USER_ERROR)
    assert proof.broken(_found(tmp_path, _good().fact(failed))) == {"lost": 1}


def test_a_run_that_started_twice_is_counted(tmp_path: Path) -> None:
    """Two processes wrote to one checkpoint."""
    placed = a_placement()
    started, finished, released = _run_of(placed)
    again = msgspec.structs.replace(started, pid=4712)
    history = History().wish().fact(a_node(), a_job(), placed, started, again, finished, released, _succeeded())
    assert proof.broken(_found(tmp_path, history)) == {"started_twice": 1}


def test_two_attempts_that_hold_slices_at_once_are_counted(tmp_path: Path) -> None:
    """A second attempt may be placed only once the first is released or fenced."""
    first, second = a_placement(), a_placement(attempt=2, device=1)
    history = History().wish().fact(a_node(), a_job(), first, second, *_run_of(first), *_run_of(second), _succeeded())
    assert proof.broken(_found(tmp_path, history)) == {"started_twice": 1}


@pytest.mark.parametrize("share", [{"compute_milli": 600}, {"memory_mib": 50_000}])
def test_more_than_a_device_has_is_counted(tmp_path: Path, share: dict[str, int]) -> None:
    """Each dimension by itself: half the memory is no excuse for too much compute."""
    history = History().fact(a_node())
    runs = []
    for number, name in enumerate(("one", "two"), start=1):
        placed = a_placement(f"acme/{name}", **share)  # type: ignore[arg-type]  # both are integers
        history.wish(name).fact(a_job(name, answers=number), placed)
        runs.append((placed, name))
    for placed, name in runs:
        history.fact(*_run_of(placed), _succeeded(JobId(f"acme/{name}")))
    assert proof.broken(_found(tmp_path, history)) == {"over_allocated": 1}


def test_a_run_that_a_fencing_took_counts_as_moved_once_it_was_placed_again(tmp_path: Path) -> None:
    """And its slices are free from the fencing on, whatever its agent says later."""
    first = a_placement(mode=Mode.EXCLUSIVE, compute_milli=1000, memory_mib=81_920)
    started, *_ = _run_of(first)
    fenced = ev.NodeFenced(node_id=NODE, epoch=1, runs=(RunId(first.run_id),))
    requeued = ev.JobRequeued(job_id=JOB, attempt=2, cause=RunCause.NODE_LOST)
    second = a_placement(mode=Mode.EXCLUSIVE, compute_milli=1000, memory_mib=81_920, attempt=2, node_epoch=1)
    history = (
        History()
        .wish()
        .fact(a_node(), a_job(), first, started, fenced, requeued, second, *_run_of(second), _succeeded())
    )
    found = _found(tmp_path, history)
    assert proof.broken(found) == {}
    assert (found["runs_moved"], found["nodes_fenced"]) == (1, 1)


def test_a_run_placed_with_the_epoch_before_a_fencing_is_counted(tmp_path: Path) -> None:
    """The agent would have to refuse it, and a placer that read the fencing knew better."""
    fenced = ev.NodeFenced(node_id=NODE, epoch=1)
    placed = a_placement()
    history = History().wish().fact(a_node(), a_job(), fenced, placed, *_run_of(placed), _succeeded())
    assert proof.broken(_found(tmp_path, history)) == {"placed_on_fenced": 1}
