"""Runs the canary (canary.py), which shows whether a process gets a context here, and is seen where it should be."""

import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from apportion.node_agent.nvml import NvmlFailed

OK: Final = "ok"
_SILENCE: Final = "no answer"
_CANARY: Final = Path(__file__).parent / "canary.py"
ANSWERS_S_MAX: Final = (3.0, 6.0)
"""Without persistence mode a driver takes a second or two to wake a board; a wedged server takes for ever.

Who doesn't answer is asked once more, and given longer: on a busy host silence alone proves nothing, and to be believed
it costs all who share the server.
"""


def ask(env: Mapping[str, str], is_seen: Callable[[int], bool]) -> str:
    """``ok`` where a process with this environment gets a context and is seen; else how it fared. Blocks."""
    said = ""
    for s_max in ANSWERS_S_MAX:
        said = _ask(env, is_seen, s_max)
        if not said.startswith(_SILENCE):
            break
    return said


def _ask(env: Mapping[str, str], is_seen: Callable[[int], bool], s_max: float) -> str:
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
        if not select.select([process.stdout], [], [], s_max)[0]:
            process.kill()  # It has no context yet, and so nothing in flight.
            return f"{_SILENCE} in {s_max:g} s"
        said = process.stdout.readline().strip()
        if not said.startswith("ok "):
            return said or "it ended without a word"
        return OK if is_seen(process.pid) else "the driver doesn't list it where it should"
    except NvmlFailed as err:
        return str(err)
    finally:
        try:
            process.communicate(timeout=s_max)  # It ends with its stdin, by itself: a kill might harm others.
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
