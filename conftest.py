"""What holds for every test."""

import os

import pytest
from hypothesis import settings

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

LIVE_RERUNS = "LIVE_RERUNS"
"""How often a test with real processes may be tried again; nothing else is, since what is pure has no second answer."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a machine that stands still for seconds a live test may fail by that alone; a rerun is counted and printed."""
    reruns = int(os.environ.get(LIVE_RERUNS, "0"))
    for item in items if reruns else ():
        if item.get_closest_marker("integration") is not None:
            item.add_marker(pytest.mark.flaky(reruns=reruns))
