"""The page of threats names tests: each of them exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
THREATS = 27


def test_each_threat_has_its_row_and_each_row_a_test_that_exists() -> None:
    """A proof that was renamed away is none."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, THREATS + 1))
    for number, row in rows:
        named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", row)
        assert named, f"threat {number} names no test"
        for path, test in named:
            assert f"def {test}(" in (ROOT / path).read_text(), f"threat {number}: {path}::{test}"


def test_each_view_that_is_named_as_evidence_exists() -> None:
    """A question that can't be asked is no evidence."""
    there = {path.stem for path in (ROOT / "services/monitor/src/apportion/monitor/queries").glob("*.sql")}
    named = set(re.findall(r"from (v_\w+)", PAGE))
    assert named
    assert {name.removeprefix("v_") for name in named} <= {name.removeprefix("v_") for name in there}, there
