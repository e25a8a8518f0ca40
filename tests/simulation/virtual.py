"""An event loop whose clock jumps to the next timer: hours of asyncio in seconds, the same each time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """Nothing is due, ever: whatever is waited for will not come."""


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: the time that it would wait for has passed."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Stuck("no timer is left, and something is still waited for")
        self.loop.seconds += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while anything can run. No sockets, threads, processes: their clock is another."""

    def __init__(self) -> None:
        selector = _Jumping()
        selector.loop = self
        self.seconds = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
