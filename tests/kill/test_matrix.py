"""Sixty kills in one pool: each service at each of its moments, the bus and the shims by chance."""

from pathlib import Path

import pytest

from tests.kill.matrix import REACTORS, cells, matrix

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


async def test_nothing_is_lost_doubled_or_over_allocated_wherever_a_service_dies(tmp_path: Path) -> None:
    """Run by `make e2e`: a minute of kills has no place between quick tests. The longer form is `make torture`."""
    outcome = await matrix(tmp_path / "pool")
    assert outcome.cells == len(cells()) >= 60
    assert outcome.proof["holds"], outcome.proof
    assert outcome.jobs == outcome.proof["jobs_admitted"] > 0
    # Not every service comes to every moment within the time that a test has; most do, or the matrix tests nothing.
    assert outcome.reached >= outcome.cells - 6, outcome.unreached
    assert len(outcome.recovery_ms) >= len(REACTORS)
