"""Vendors' tools, asked for one answer: never through a shell, never for longer than told, never with our own input."""

import asyncio
import functools
import subprocess
from collections.abc import Mapping, Sequence

Said = subprocess.CompletedProcess[str]


def ask(argv: Sequence[str], *, env: Mapping[str, str], s_max: float, text: str = "") -> Said:
    """What the tool answered to ``text``, whatever its exit code. Blocks.

    Raises OSError or ValueError where it can't be started, subprocess.TimeoutExpired where it is silent for ``s_max``.
    """
    return subprocess.run(
        argv,
        env=env,
        input=text,
        text=True,
        errors="replace",
        capture_output=True,
        start_new_session=True,
        check=False,
        timeout=s_max,
    )


async def ask_soon(argv: Sequence[str], *, env: Mapping[str, str], s_max: float, text: str = "") -> Said:
    """As ``ask``, in a thread: seldom, and event loops differ in how they see a tool off whose daemon lives on."""
    asked = functools.partial(ask, argv, env=env, s_max=s_max, text=text)
    return await asyncio.get_running_loop().run_in_executor(None, asked)
