"""Kills in one pool: services at their moments, the bus and the shims by chance; some of them in `make test`."""

from pathlib import Path

import pytest

from tests.kill.matrix import REACTORS, SERVICES, cells, matrix, sample

SAMPLE = 24
"""A kill costs 0.8 s of CPU, most of it an interpreter's start: all sixty would be half a minute of `make test`."""


@pytest.mark.integration
@pytest.mark.timeout(600)
async def test_nothing_is_lost_doubled_or_over_allocated_by_some_kills_of_every_service(tmp_path: Path) -> None:
    """Four moments of each service, which the seed chose: what `make e2e` runs all of."""
    outcome = await sample(tmp_path / "pool", seed=1, size=SAMPLE)
    assert outcome.cells == SAMPLE == 4 * len(SERVICES)
    assert outcome.proof["holds"], outcome.proof
    assert outcome.jobs == outcome.proof["jobs_admitted"] > 0
    assert outcome.reached >= outcome.cells - 6, outcome.unreached
    assert len(outcome.recovery_ms) >= len(REACTORS)


@pytest.mark.e2e
@pytest.mark.timeout(400)
async def test_nothing_is_lost_doubled_or_over_allocated_wherever_a_service_dies(tmp_path: Path) -> None:
    """All sixty under as much work as a small pool bears; the longer form is `make torture`."""
    outcome = await matrix(tmp_path / "pool")
    assert outcome.cells == len(cells()) >= 60
    assert outcome.proof["holds"], outcome.proof
    assert outcome.jobs == outcome.proof["jobs_admitted"] > 0
    # Not every service comes to every moment within the time that a test has; most do, or the matrix tests nothing.
    assert outcome.reached >= outcome.cells - 6, outcome.unreached
    assert len(outcome.recovery_ms) >= len(REACTORS)
