"""A log that a release wrote is a log to every later one: verified, decoded row by row, folded to the same pool."""

from pathlib import Path

import pytest

from apportion.contracts.envelope import Stream, Undecodable
from apportion.contracts.events import JobSucceeded
from apportion.monitor import attest, segments
from apportion.monitor.history import History
from apportion.monitor.log import messages_of, own_questions
from apportion.monitor.projections import entry_of
from tests.contract.golden_log import FOLDER, JOBS, SIGNER, VERSION


def test_this_version_has_its_log() -> None:
    """Written once, before it is released: ``python -m tests.contract.golden_log``."""
    assert VERSION in {folder.name for folder in FOLDER.iterdir()}


@pytest.mark.parametrize("folder", sorted(FOLDER.iterdir()), ids=lambda folder: folder.name)
def test_a_released_log_is_read_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    """Its chain and signature hold, nothing of it is unreadable, and each job ended as it did."""
    path = tmp_path / "log.duckdb"
    rows = segments.import_(folder, path).rows
    verdict = attest.verify(path, public_key=SIGNER.public_key)
    assert (verdict.ok, verdict.rows, verdict.signed_ordinal) == (True, rows, rows)
    entries = [entry_of(message) for stream in Stream for message in messages_of(path, stream)]
    assert [entry for entry in entries if isinstance(entry.event, Undecodable)] == []
    assert sum(isinstance(entry.event, JobSucceeded) for entry in entries) == JOBS
    with History.open(path) as history:
        pool = history.at_seq(history.last_seq)
    devices = [view for node in pool.nodes.values() for view in node.devices.values()]
    assert [(view.used_compute_milli, view.used_memory_mib) for view in devices] == [(0, 0)] * 4
    with own_questions(path) as ask:
        assert ask("SELECT outcome, count(*) FROM v_job GROUP BY ALL") == [("succeeded", JOBS)]
        assert ask("SELECT * FROM v_reconciliation") == []
