"""The way of each node's agent to the bus, which can be cut: a process of its own that passes bytes on, both ways.

A cut way passes nothing in either direction and closes nothing: connections stand and are silent, new ones are taken
and never answered, as where a network is partitioned. What was under way goes on where the way is whole again, as it
would by TCP's own repeats. A cut ends by the monotonic clock, whatever became of who asked for it. Only pools that were
started with faults have a relay.

::

    agent ──► 127.0.0.1:<port of its node> ──► relay ──► nats-server        <data dir>/run/relay.json: the ports
                                                └─ reads <data dir>/run/cuts.json: {name: [node, until]}
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from apportion.runtime.private_files import write_private

_POLL_S: Final = 0.05
_CHUNK_BYTES: Final = 65_536


def command_line(data_dir: Path, bus_url: str, nodes: Sequence[str]) -> list[str]:
    """How it is started."""
    return [
        *(sys.executable, "-m", "apportion.cli.relay", "--data-dir", str(data_dir)),
        *("--bus-url", bus_url, *nodes),
    ]


def ways(data_dir: Path, *, pid: int | None = None) -> dict[str, str] | None:
    """Where each node finds the bus; None where no relay has said so, or not the one with this pid."""
    said = _read(_ways_path(data_dir))
    if not said or (pid is not None and said.get("pid") != pid):
        return None
    return {node: f"nats://127.0.0.1:{port}" for node, port in said["ports"].items()}


def is_between(data_dir: Path, node: str) -> bool:
    """True where the node's way to the bus leads through a relay here."""
    return node in (ways(data_dir) or {})


def cuts_path(data_dir: Path) -> Path:
    """Where the cuts are told."""
    return data_dir / "run" / "cuts.json"


def cut(path: Path, name: str, node: str, *, for_s: float) -> None:
    """Cut the node's way; it is whole again after ``for_s``, or by ``heal``."""
    write_private(path, json.dumps({**_read(path), name: [node, time.monotonic() + for_s]}).encode())


def heal(path: Path, name: str) -> None:
    """End one cut; nothing where there is none of that name."""
    cuts = _read(path)
    if cuts.pop(name, None) is not None:
        write_private(path, json.dumps(cuts).encode())


def _ways_path(data_dir: Path) -> Path:
    return data_dir / "run" / "relay.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Way:
    """One node's way: open, or cut."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._addresses = addresses
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def set_cut(self, *, is_cut: bool) -> None:
        """Take effect before the next byte."""
        if is_cut:
            self._open.clear()
        else:
            self._open.set()

    def taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody connected."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all that is connected."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            found = await self._connected()
            if found is None:
                return
            other_reader, other_writer = found
            try:
                pumps = [
                    asyncio.create_task(self._pump(reader, other_writer)),
                    asyncio.create_task(self._pump(other_reader, writer)),
                ]
                try:
                    # Whichever end goes, both do: a half-closed connection is of no use to either.
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                other_writer.close()
        finally:
            writer.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The first server of the bus that takes a connection; None where none does."""
        for host, port in self._addresses:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(host, port)
        return None

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
            await self._open.wait()  # that it ended is news, too


class Relay:
    """The ways of one machine's nodes."""

    def __init__(self, data_dir: Path, bus_url: str, nodes: Sequence[str]) -> None:
        parts = [urlsplit(url) for url in bus_url.split(",")]
        addresses = [(part.hostname or "127.0.0.1", part.port or 4222) for part in parts]
        self._data_dir = data_dir
        self._ways = {node: _Way(addresses) for node in nodes}
        self.cut_off: frozenset[str] = frozenset()
        """Nodes whose way is cut now."""

    async def run(self) -> None:
        """Relay until cancelled."""
        # Agents know their port, so a relay that is started again takes the ports that it had.
        before: Mapping[str, int] = _read(_ways_path(self._data_dir)).get("ports", {})
        servers = {
            node: await asyncio.start_server(way.taken, "127.0.0.1", before.get(node, 0))
            for node, way in self._ways.items()
        }
        _ways_path(self._data_dir).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ports = {node: server.sockets[0].getsockname()[1] for node, server in servers.items()}
        write_private(_ways_path(self._data_dir), json.dumps({"pid": os.getpid(), "ports": ports}).encode())
        try:
            while True:
                now = time.monotonic()
                cuts = _read(cuts_path(self._data_dir)).values()
                self.cut_off = frozenset(node for node, until in cuts if now < until)
                for node, way in self._ways.items():
                    way.set_cut(is_cut=node in self.cut_off)
                await asyncio.sleep(_POLL_S)
        finally:
            for server in servers.values():
                server.close()
            for way in self._ways.values():
                await way.close()


def main() -> None:
    """Relay until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--bus-url", required=True)
    parser.add_argument("nodes", nargs="+")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Relay(given.data_dir, given.bus_url, given.nodes).run())


if __name__ == "__main__":
    main()
