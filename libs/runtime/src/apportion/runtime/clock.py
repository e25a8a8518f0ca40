"""Time as an argument: where shells read it, and how a test sets it. Cores get instants, never a clock."""

import time
from typing import Protocol

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """Where a shell reads the time."""

    def now(self) -> int:
        """The instant; ns since the Unix epoch. It may step, in both directions."""
        ...

    def monotonic(self) -> int:
        """Ns since some fixed moment; never steps back. For durations and deadlines inside one process."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> int:
        """The wall clock; ns since the Unix epoch."""
        return time.time_ns()

    def monotonic(self) -> int:
        """The monotonic clock; ns."""
        return time.monotonic_ns()


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now: int = 0) -> None:
        self._now = now
        self._monotonic = 0

    def now(self) -> int:
        """The instant that was set; ns since the Unix epoch."""
        return self._now

    def monotonic(self) -> int:
        """Ns that were advanced so far."""
        return self._monotonic

    def advance(self, ns: int) -> None:
        """Let ``ns`` pass on both clocks."""
        assert ns >= 0, "time passes forwards; use step() for a wall clock that is set back"
        self._now += ns
        self._monotonic += ns

    def step(self, ns: int) -> None:
        """Set the wall clock on or back, as an administrator would; the monotonic clock does not notice."""
        self._now += ns
