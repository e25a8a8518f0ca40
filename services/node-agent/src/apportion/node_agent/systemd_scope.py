"""A place of its own among control groups, where systemd is who hands them out: one delegated scope for each agent.

In a unit with ``Delegate=yes`` the agent needs none. In a login session it is in a group with others, whose controllers
are not its to hand on; so it asks systemd for a transient scope, moves there, and is alone. The runs' groups are made
in it as anywhere (host_limits.py). Sources: org.freedesktop.systemd1(5), "Control Group APIs and Delegation".
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from apportion.node_agent import tools

RUNNING: Final = Path("/run/systemd/system")
OWN: Final = Path("/proc/self/cgroup")
_ANSWER_S_MAX: Final = 5.0
_MOVED_S_MAX: Final = 5.0
_PAUSE_S: Final = 0.02
_VARIABLES: Final = ("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR")
"""How the bus of a user's own systemd is found."""

log = structlog.get_logger(__name__)


def scope_line(tool: str, unit: str, pid: int, *, is_root: bool) -> tuple[str, ...]:
    """The command that asks for a delegated scope with this process in it."""
    manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
    properties = (
        *("Description", "s", "Apportion node agent and its runs"),
        *("PIDs", "au", "1", str(pid)),
        *("Delegate", "b", "true"),
        # Gone with the last process of it, however that ended.
        *("CollectMode", "s", "inactive-or-failed"),
    )
    return (
        *(tool, "--system" if is_root else "--user", "--quiet", "call", *manager, "StartTransientUnit"),
        *("ssa(sv)a(sa(sv))", unit, "fail", "4", *properties, "0"),
    )


def _is_in_scope(text: str) -> bool:
    """A session's, say. A service is where systemd looks for it: its unit says ``Delegate=yes``, or wants it so."""
    return any(line.startswith("0::") and line.endswith(".scope") for line in text.splitlines())


def enter_scope(name: str, *, env: Mapping[str, str], own: Path = OWN, running: Path = RUNNING) -> str | None:
    """Move this process into a scope of its own; what its groups are then, as /proc says. None where that can't be had.

    ``name`` begins the unit's name. Blocks until systemd has moved it, for some seconds at most.
    """
    tool = shutil.which("busctl", path=env.get("PATH", os.defpath))
    if tool is None or not running.is_dir() or not _is_in_scope(own.read_text()):
        return None
    unit = f"{name}-{os.getpid()}-{time.monotonic_ns()}.scope"
    try:
        done = tools.ask(
            scope_line(tool, unit, os.getpid(), is_root=os.geteuid() == 0),
            env={key: env[key] for key in _VARIABLES if key in env},
            s_max=_ANSWER_S_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        log.warning("no_scope", error=str(err))
        return None
    if done.returncode:
        log.warning("no_scope", error=(done.stderr.strip() or f"exit code {done.returncode}")[:512])
        return None
    # The answer is a job: it is done once we are there.
    until = time.monotonic() + _MOVED_S_MAX
    while time.monotonic() < until:
        text = own.read_text()
        if any(line.startswith("0::") and line.endswith(f"/{unit}") for line in text.splitlines()):
            return text
        time.sleep(_PAUSE_S)
    log.warning("no_scope", error=f"systemd did not move this process to {unit} within {_MOVED_S_MAX:g} s")
    return None
