"""From start to exit of one service process: event loop, signals, drain, exit code."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import FrameType
from typing import Any, Final, TypeAlias

import structlog

DRAIN_S_MAX: Final = 10.0
"""A service that cannot end in this time is ended. All it knew is in the streams."""
EXIT_FAILURE: Final = 1
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Main: TypeAlias = Callable[[asyncio.Event], Awaitable[int | None]]
"""A service's own coroutine: it works until the event is set, then drains; returns an exit code (None: 0)."""

log = structlog.get_logger(__name__)


def run_service(main: Main, *, drain_s_max: float = DRAIN_S_MAX) -> int:
    """The exit code of a service that ran ``main`` to its end.

    The first SIGTERM or SIGINT sets main's event. The second one exits at once with 128 + its number, and so does the
    drain that outlasts ``drain_s_max``, with 1. An exception out of ``main`` is logged; its ``exit_code`` counts where
    it has one.
    """
    try:
        return _loop_runner()(_until_stopped(main, drain_s_max))
    except Exception as err:
        code = getattr(err, "exit_code", EXIT_FAILURE)
        # Settings and start-up refusals carry a code and explain themselves; a traceback would hide the sentence.
        if hasattr(err, "exit_code"):
            log.error("service_refused", error=str(err), kind=type(err).__name__, exit_code=code)  # noqa: TRY400
        else:
            log.exception("service_failed", exit_code=code)
        return int(code)


async def _until_stopped(main: Main, drain_s_max: float) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(signum: signal.Signals) -> None:
        log.info("draining", signal=signum.name, at_most_s=drain_s_max)
        stop.set()
        # From a thread: a loop that hangs could not end itself.
        timer = threading.Timer(drain_s_max, _exit_now, args=(EXIT_FAILURE, f"drain took over {drain_s_max:g} s"))
        timer.daemon = True
        timer.start()
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, _on_second_signal)

    for each in _SIGNALS:
        loop.add_signal_handler(each, on_signal, each)
    return await main(stop) or 0


def _on_second_signal(signum: int, _frame: FrameType | None) -> None:
    _exit_now(128 + signum, f"second signal ({signal.Signals(signum).name})")


def _exit_now(code: int, why: str) -> None:
    """Exit without clean-up: what could be cleaned up is what hangs."""
    # os.write, as the signal may have interrupted a writer that holds the stream's lock.
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"apportion: exiting at once: {why}\n".encode())
    os._exit(code)


def _loop_runner() -> Callable[[Coroutine[Any, Any, int]], int]:
    """Uvloop's run where it is installed, else asyncio's."""
    try:
        import uvloop  # noqa: PLC0415  (optional)
    except ImportError:
        return asyncio.run
    return uvloop.run
