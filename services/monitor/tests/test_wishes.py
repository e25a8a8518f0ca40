"""What the monitor says to wishes that it refuses."""

import pytest

from apportion.contracts.causes import Refusal
from apportion.monitor.wishes import _MESSAGES


@pytest.mark.parametrize("code", [code for code in _MESSAGES if code.value.endswith("NotFound")])
def test_who_names_what_is_not_there_is_told_where_to_look(code: Refusal) -> None:
    assert "`apportion " in _MESSAGES[code]
