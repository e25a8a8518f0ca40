"""The examples in the monitor's docstrings."""

import doctest
from types import ModuleType

import pytest

from apportion.monitor import chain, projections, sql_worker


@pytest.mark.parametrize("module", [chain, projections, sql_worker], ids=lambda module: module.__name__)
def test_examples_are_true(module: ModuleType) -> None:
    """An example that is wrong is worse than none."""
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
