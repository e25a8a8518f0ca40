"""Runs the canary (canary.py), which shows whether a process gets a context here, and is seen where it should be."""

import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from apportion.node_agent.nvml import NvmlFailed

OK: Final = "ok"
_CANARY: Final = Path(__file__).parent / "canary.py"
_ANSWER_S_MAX: Final = 3.0
"""Without persistence mode a driver takes a second or two to wake a board; a wedged server takes for ever."""


def ask(env: Mapping[str, str], is_seen: Callable[[int], bool]) -> str:
    """``ok`` where a process with this environment gets a context and is seen; else how it fared. Blocks."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CANARY)],
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        if not select.select([process.stdout], [], [], _ANSWER_S_MAX)[0]:
            return f"no answer in {_ANSWER_S_MAX:g} s"
        said = process.stdout.readline().strip()
        if not said.startswith("ok "):
            return said or "it ended without a word"
        return OK if is_seen(process.pid) else "the driver doesn't list it where it should"
    except NvmlFailed as err:
        return str(err)
    finally:
        try:
            process.communicate(timeout=_ANSWER_S_MAX)  # It ends with its stdin, by itself: a kill might harm others.
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
