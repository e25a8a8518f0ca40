"""Clocks: the system's, and the one that a test sets."""

import pytest

from apportion.runtime.clock import NS_PER_S, Clock, ManualClock, SystemClock


def test_a_manual_clock_moves_only_when_told() -> None:
    """A test that sets time never waits for it."""
    clock: Clock = ManualClock(now=5 * NS_PER_S)
    assert (clock.now(), clock.now(), clock.monotonic()) == (5 * NS_PER_S, 5 * NS_PER_S, 0)


def test_a_wall_clock_may_step_back_and_the_monotonic_one_does_not() -> None:
    """Deadlines inside a process must survive an administrator who sets the clock."""
    clock = ManualClock(now=100)
    clock.advance(7)
    clock.step(-50)
    assert (clock.now(), clock.monotonic()) == (57, 7)
    with pytest.raises(AssertionError, match="time passes forwards"):
        clock.advance(-1)


def test_the_system_clock_counts_in_ns_since_1970() -> None:
    """Seconds or ms by mistake would put every deadline into the past."""
    clock: Clock = SystemClock()
    assert 1_700_000_000 < clock.now() / NS_PER_S < 5_000_000_000
    assert clock.monotonic() <= clock.monotonic()
