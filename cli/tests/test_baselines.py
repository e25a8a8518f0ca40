"""What sharing is compared with: outcomes on pools that don't share, worked out by hand."""

from pathlib import Path

import pytest

from apportion.cli.baselines import baselines
from cli.tests.test_whatif import a_log, decided

FLEET = "1,2,h100-80,80000\n"
SERVING = "a,0,60,1,acme,500,1000,online\nb,0,60,1,acme,500,1000,online\n"
TRAINING = "c,10,10,1,acme,250,1000,batch\n"


def test_both_baselines_are_decided_from_the_record_by_the_real_cores(tmp_path: Path) -> None:
    """Two jobs of a minute, and one of 10 s after 10 s, on two devices; a start takes a tenth of a second."""
    log = tmp_path / "log.duckdb"
    a_log(log, *decided(tmp_path, SERVING + TRAINING, FLEET))
    found = baselines(log)
    assert list(found) == ["recorded", "resimulated", "whole-cards", "static-partition"]
    assert all((figures.requested, figures.succeeded) == (3, 3) for figures in found.values())
    assert found["resimulated"].completions == found["recorded"].completions
    assert found["recorded"].waits["batch"].p95_ms == 100
    # Whole cards: both are taken for the minute, and who comes later waits for it.
    assert found["whole-cards"].waits["batch"].p95_ms == pytest.approx(50_200, abs=2)
    assert found["whole-cards"].completions["online"].p95_ms == pytest.approx(60_100, abs=2)
    # One for each: the later one doesn't wait, and the second of the first two does, though a device is free.
    assert found["static-partition"].waits["batch"].p95_ms == 100
    assert found["static-partition"].completions["online"].p95_ms == pytest.approx(120_200, abs=2)


def test_a_pool_with_work_of_one_kind_is_not_parted(tmp_path: Path) -> None:
    """Half of it would stand idle for nobody: nothing to compare with."""
    log = tmp_path / "log.duckdb"
    a_log(log, *decided(tmp_path, SERVING, FLEET))
    assert list(baselines(log)) == ["recorded", "resimulated", "whole-cards"]
