"""The vendor's command-line tools of a simulated node, as executables in a directory for PATH.

They are written when the node starts, never installed: on a machine with a driver they would hide the real ones.
"""

import shlex
import sys
from pathlib import Path
from typing import Final

from apportion.node_agent.simgpu.client import SOCKET_VARIABLE

_TOOLS: Final = {"nvidia-cuda-mps-control": "mps_tool.py", "nvidia-smi": "smi_tool.py"}


def directory_of(socket_path: Path) -> Path:
    """Where the tools of the node at this socket are."""
    return socket_path.with_name(socket_path.name + ".bin")


def install(directory: Path, *, socket_path: Path) -> None:
    """Write the tools; they speak to the node at ``socket_path`` unless the environment names another."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, module in _TOOLS.items():
        program = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name(module))])
        tool = directory / name
        tool.write_text(
            f"#!/bin/sh\n{SOCKET_VARIABLE}=${{{SOCKET_VARIABLE}:-{shlex.quote(str(socket_path.resolve()))}}}\n"
            f'export {SOCKET_VARIABLE}\nexec {program} "$@"\n'
        )
        tool.chmod(0o755)
