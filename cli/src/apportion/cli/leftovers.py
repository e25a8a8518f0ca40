"""The processes of one data directory, found in /proc: what a pool left behind, and what a lost node consists of.

A process is ours by its command line *and* a path or variable that names the data directory; an editor with one of our
files open is never taken for one. What a shim started is found by its ancestry and by the token in its environment.
"""

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, unique
from pathlib import Path
from typing import Final

_SERVICES: Final = (
    "apportion.admission",
    "apportion.placer",
    "apportion.monitor",
    "apportion.node_agent",
    "apportion.cli.relay",
)
_SIMULATOR: Final = "apportion.node_agent.simgpu"
_SPAWNER: Final = "/apportion/node_agent/spawner.py"
_MPS_TOOL: Final = "/apportion/node_agent/simgpu/mps_tool.py"
_MPS_PROGRAMS: Final = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
_MPS_VARIABLE: Final = b"CUDA_MPS_PIPE_DIRECTORY="
_RUN_VARIABLE: Final = b"APPORTION_RUN_TOKEN="
_DATA_DIR_VARIABLE: Final = b"APPORTION_DATA_DIR="
_POLL_S: Final = 0.02


@unique
class Kind(StrEnum):
    """What a process is to the pool."""

    SERVICE = "service"
    SIMULATOR = "device daemon"
    """The simulated devices of a node, and MPS daemons."""
    SHIM = "spawner or shim"
    RUN = "run"
    BUS = "bus"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One process; the start time tells it from a later one with the same pid."""

    pid: int
    start_ticks: int
    kind: Kind
    command: str


@dataclass(frozen=True, kw_only=True)
class _Process:
    pid: int
    parent: int
    start_ticks: int
    arguments: tuple[str, ...]


def processes_of(data_dir: Path, *, node: str | None = None) -> list[Found]:
    """Every live process that belongs to the data directory, by pid; with ``node``, those of that node alone.

    The calling process is never among them. A zombie isn't either: it holds nothing.
    """
    root = str(data_dir.absolute())
    everything = {process.pid: process for process in _all_processes()}
    kinds: dict[int, Kind] = {}
    for process in everything.values():
        kind = _kind_of(process, root, node)
        if kind is not None:
            kinds[process.pid] = kind
    _add_runs(everything, kinds, root, node)
    kinds.pop(os.getpid(), None)
    return [
        Found(
            pid=pid,
            start_ticks=everything[pid].start_ticks,
            kind=kind,
            command=" ".join(everything[pid].arguments)[:160],
        )
        for pid, kind in sorted(kinds.items())
    ]


def data_dirs() -> list[Path]:
    """The data directories that services on this machine run in, as far as we may look."""
    found = {
        value
        for process in _all_processes()
        if _module_of(process.arguments) in _SERVICES
        for value in _values(_environment(process.pid), _DATA_DIR_VARIABLE)
    }
    return [Path(value) for value in sorted(found)]


def end(found: Iterable[Found], *, number: signal.Signals, wait_s: float) -> list[Found]:
    """Send a signal to each, wait, and return those that still live."""
    alive = [process for process in found if _signal(process, number)]
    deadline = time.monotonic() + wait_s
    while alive and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        alive = [process for process in alive if _is_alive(process)]
    return alive


def end_all(data_dir: Path, kinds: frozenset[Kind], *, wait_s: float = 5.0) -> int:
    """Kill every process of these kinds, and what appears meanwhile; how many there were."""
    ended = 0
    deadline = time.monotonic() + wait_s
    while True:
        found = [process for process in processes_of(data_dir) if process.kind in kinds]
        if not found or time.monotonic() > deadline:
            return ended
        ended += len(found)
        end(found, number=signal.SIGKILL, wait_s=1.0)


def _kind_of(process: _Process, root: str, node: str | None) -> Kind | None:
    arguments = process.arguments
    module = _module_of(arguments)
    if module is not None and module.startswith(_SIMULATOR):
        return Kind.SIMULATOR if _belongs(process, root) and _names(arguments, node) else None
    if module in _SERVICES:
        if not _belongs(process, root) or (node is not None and module != "apportion.node_agent"):
            return None
        return Kind.SERVICE if _names(arguments, node) else None
    if any(argument.endswith(_SPAWNER) for argument in arguments):
        return Kind.SHIM if _is_under(arguments, root) and _names(arguments, node) else None
    program = arguments[0].rpartition("/")[2] if arguments else ""
    if program in _MPS_PROGRAMS or any(argument.endswith(_MPS_TOOL) for argument in arguments):
        pipes = _values(_environment(process.pid), _MPS_VARIABLE)
        return Kind.SIMULATOR if _is_under(pipes, root) and _names(pipes, node) else None
    is_bus = program == "nats-server"
    return Kind.BUS if is_bus and node is None and _is_under(arguments, root) else None


def _module_of(arguments: tuple[str, ...]) -> str | None:
    """What follows ``-m``; None for a program that was not started as a module."""
    for flag, module in itertools.pairwise(arguments):
        if flag == "-m":
            return module.removesuffix(".__main__")
    return None


def _belongs(process: _Process, root: str) -> bool:
    return _is_under(process.arguments, root) or root in _values(_environment(process.pid), _DATA_DIR_VARIABLE)


def _values(environment: list[bytes], variable: bytes) -> tuple[str, ...]:
    return tuple(os.fsdecode(line.removeprefix(variable)) for line in environment if line.startswith(variable))


def _is_under(arguments: tuple[str, ...], root: str) -> bool:
    return any(argument == root or f"{root}/" in argument for argument in arguments)


def _names(arguments: tuple[str, ...], node: str | None) -> bool:
    """True where an argument is the node's name, or a path through a folder of that name."""
    if node is None:
        return True
    return any(node in argument.replace("=", "/").replace(".", "/").split("/") for argument in arguments)


def _add_runs(everything: dict[int, _Process], kinds: dict[int, Kind], root: str, node: str | None) -> None:
    """What spawners and shims started, and what carries the token of one of the directory's runs."""
    grown = True
    while grown:
        grown = False
        for process in everything.values():
            parent = kinds.get(process.parent)
            if process.pid not in kinds and parent in {Kind.SHIM, Kind.RUN, Kind.SIMULATOR}:
                kinds[process.pid] = Kind.SIMULATOR if parent is Kind.SIMULATOR else Kind.RUN
                grown = True
    tokens = {token for token in _tokens(Path(root)) if token}
    if not tokens or node is not None:
        return
    for process in everything.values():
        if process.pid not in kinds:
            for line in _environment(process.pid):
                if line.startswith(_RUN_VARIABLE) and os.fsdecode(line.removeprefix(_RUN_VARIABLE)) in tokens:
                    kinds[process.pid] = Kind.RUN


def _tokens(root: Path) -> Iterable[str]:
    """The tokens of all runs whose directories are still there."""
    # Run directories come and go under a live agent: os.walk passes over what vanished, where glob raises.
    for folder, folders, files in os.walk(root):
        if "intent.json" in files:
            folders.clear()
            with contextlib.suppress(OSError, ValueError):
                yield str(json.loads((Path(folder) / "intent.json").read_bytes()).get("token", ""))


def _all_processes() -> Iterable[_Process]:
    for name in os.listdir("/proc"):  # noqa: PTH208  names alone are wanted
        if name.isdigit():
            process = _process(int(name))
            if process is not None:
                yield process


def _process(pid: int) -> _Process | None:
    try:
        stat = _read(f"/proc/{pid}/stat")
        arguments = _read(f"/proc/{pid}/cmdline")
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in {b"Z", b"X"}:
        return None
    return _Process(
        pid=pid,
        parent=int(fields[1]),
        start_ticks=int(fields[19]),
        arguments=tuple(os.fsdecode(argument) for argument in arguments.split(b"\0")[:-1]),
    )


def _environment(pid: int) -> list[bytes]:
    try:
        return _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return []


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123  hundreds of small files: Path objects take most of the time
        return file.read()


def _is_alive(process: Found) -> bool:
    now = _process(process.pid)
    return now is not None and now.start_ticks == process.start_ticks


def _signal(process: Found, number: signal.Signals) -> bool:
    if not _is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True
