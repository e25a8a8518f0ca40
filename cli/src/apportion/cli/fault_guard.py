"""Mends what a dead injector left broken: a process of its own that reads what is broken, and waits for its pipe's end.

Lines of JSON on stdin: ``{"break": key, "mend": …}`` as something is broken, ``{"mended": key}`` once it is whole.
When the pipe ends, whoever held it is gone, however it went, and everything that is still broken is mended.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from apportion.cli import relay
from apportion.cli.places import start_ticks


def mend(how: dict[str, Any]) -> None:
    """Undo one thing; what isn't there any more needs no mending."""
    match how:
        case {"cont": pid, "ticks": ticks}:
            if start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        case {"cut": path, "name": name}:
            relay.heal(Path(path), name)
        case {"socket": path, "index": index, "cool": _}:
            with _faults(path) as faults, contextlib.suppress(Exception):
                faults.heat(index, 0)
        case {"socket": path, "index": index, "reset": _}:
            with _faults(path) as faults, contextlib.suppress(Exception):
                faults.reset(index)
        case _:
            raise AssertionError(f"nothing that can be mended: {how}")


def _faults(path: str) -> Any:
    from apportion.node_agent.simgpu.faults import Faults

    return Faults(Path(path))


def main() -> None:
    """Until the pipe ends; then mend, the newest first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    broken: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        said = json.loads(line)
        if "break" in said:
            broken[said["break"]] = said["mend"]
        else:
            broken.pop(said["mended"], None)
    for how in reversed(broken.values()):
        mend(how)


if __name__ == "__main__":
    main()
