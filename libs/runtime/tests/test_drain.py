"""Start to exit of a real process: signals, drain, exit codes, on both event loops."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Protocol

import pytest

pytestmark = pytest.mark.integration

PRELUDE = """
import asyncio, sys, time
if {loop!r} == "asyncio":
    sys.modules["uvloop"] = None
from apportion.runtime.drain import run_service
"""


class Starts(Protocol):
    """Starts a process that runs ``main(stop)``; back once it has said "up"."""

    def __call__(self, body: str, loop: str = "uvloop", drain_s_max: float = 30.0) -> subprocess.Popen[str]: ...


@pytest.fixture
def a_service() -> Iterator[Starts]:
    """Processes that are ended and buried whatever a test finds."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, loop: str = "uvloop", drain_s_max: float = 30.0) -> subprocess.Popen[str]:
        end = f"\nsys.exit(run_service(main, drain_s_max={drain_s_max}))"
        script = PRELUDE.format(loop=loop) + textwrap.dedent(body) + end
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            with process:
                pass


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what was said until then."""
    assert process.stdout is not None
    assert process.stderr is not None
    # Not communicate(): it reads past the buffer into which readline() may have taken more than its line.
    said = process.stdout.read() + process.stderr.read()
    return process.wait(60), said


both_loops = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])

DRAINS = """
    async def main(stop):
        print("up", flush=True)
        await stop.wait()
        await asyncio.sleep(0.05)
        print("drained", type(asyncio.get_running_loop()).__module__, flush=True)
"""

HANGS_IN_PYTHON = """
    async def main(stop):
        print("up", flush=True)
        await stop.wait()
        print("draining", flush=True)
        while True:
            time.sleep(0.01)
"""


@both_loops
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_exits_0(a_service: Starts, loop: str, signum: signal.Signals) -> None:
    """A planned stop is no failure: what was begun is ended."""
    process = a_service(DRAINS, loop)
    process.send_signal(signum)
    code, said = end_of(process)
    assert code == 0
    assert f"drained {loop}" in said


@both_loops
def test_the_second_signal_exits_at_once_even_if_the_loop_hangs(a_service: Starts, loop: str) -> None:
    """Whoever presses Ctrl-C twice means it."""
    process = a_service(HANGS_IN_PYTHON, loop)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    # Log lines share the stream.
    assert "draining\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGINT)
    code, said = end_of(process)
    assert code == 128 + signal.SIGINT
    assert "second signal (SIGINT)" in said


@both_loops
def test_a_drain_that_hangs_is_ended_at_its_limit(a_service: Starts, loop: str) -> None:
    """A service manager would kill it without a word; this one says why."""
    process = a_service(HANGS_IN_PYTHON, loop, drain_s_max=0.2)
    process.send_signal(signal.SIGTERM)
    code, said = end_of(process)
    assert code == 1
    assert "drain took over 0.2 s" in said


def test_an_error_exits_with_its_own_code_and_a_sentence(a_service: Starts) -> None:
    """Scripts tell a bad setting (2) from a crash (1) by the code alone."""
    process = a_service(
        """
        from apportion.runtime.settings import SettingsInvalid
        async def main(stop):
            print("up", flush=True)
            raise SettingsInvalid(where="flags", key="--pool", expected="a name", found="''")
        """
    )
    code, said = end_of(process)
    assert code == 2
    assert "flags: --pool: expected a name" in said
    assert "Traceback" not in said


def test_a_crash_exits_1_with_its_traceback(a_service: Starts) -> None:
    """An invariant that broke is to be found by its line."""
    process = a_service(
        """
        async def main(stop):
            print("up", flush=True)
            assert 1 == 2, "sums must agree"
        """
    )
    code, said = end_of(process)
    assert code == 1
    assert "sums must agree" in said
    assert "Traceback" in said


def test_what_main_returns_is_the_exit_code(a_service: Starts) -> None:
    """A service may end by itself, with a verdict."""
    process = a_service(
        """
        async def main(stop):
            print("up", flush=True)
            return 9
        """
    )
    assert end_of(process)[0] == 9
