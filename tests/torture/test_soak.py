"""Two seconds of load; ``make soak`` has ten minutes, and the bounds that a busy machine would break."""

from pathlib import Path

import pytest

from tests.torture.soak import soak

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


async def test_all_that_was_acknowledged_under_load_is_in_the_log(tmp_path: Path) -> None:
    """Whatever the rate that this machine bears: nothing is lost, and the log ends with what the bus has."""
    told = await soak(tmp_path, rate=1_000, seconds=2.0)
    assert told["events"] == 2_000
    assert told["rows_in_log"] == told["facts_on_bus"] >= 2_001
    assert told["chain"]
