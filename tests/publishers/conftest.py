"""A bus and an admission process, as a publisher meets them."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from apportion.cli.supervisor import is_ready
from apportion.contracts import events as ev
from apportion.contracts.codec import encode_wish
from apportion.contracts.ids import OPERATOR, PoolId
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

POOL = PoolId("main")
PATIENCE_S = 60.0
"""Only how long a broken pool may keep a test waiting; nothing is said about speed here."""


class Pool:
    """Where a publisher connects, and what its operator can do."""

    def __init__(self, bus: Bus, data_dir: Path) -> None:
        self.bus = bus
        self.url = bus.url
        self.data_dir = data_dir

    async def program(self, *argv: str, cwd: Path | None = None, stdin: bytes = b"") -> tuple[int, str, str]:
        """How a program ended, and what it said on stdout and stderr."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), PATIENCE_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def command(self, *argv: str, stdin: bytes = b"") -> tuple[int, dict[str, Any], str]:
        """How ``apportion …  -o json`` ended, and what it said."""
        code, out, err = await self.program(
            sys.executable, "-m", "apportion.cli", *argv, "-o", "json",
            "--bus-url", self.url, "--data-dir", str(self.data_dir), stdin=stdin,
        )  # fmt: skip
        return code, json.loads(out) if out else {}, err


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """A bus, its streams, one queue, and admission, ready."""
    async with EmbeddedServer(tmp_path / "bus", port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="test")
        await bus.provision()
        queue = ev.QueueUpsertRequested(queue="main", tenants=("default",))
        await bus.publish_wish(encode_wish(POOL, queue, tenant=OPERATOR, event_id="q-1", source="/test"))
        data_dir = tmp_path / "admission"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "apportion.admission", "--bus-url", server.url, "--data-dir", str(data_dir),
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await asyncio.to_thread(is_ready, _health_port(data_dir)):
                    await asyncio.sleep(0.05)
            yield Pool(bus, data_dir)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()
            await bus.close()


def _health_port(data_dir: Path) -> int | None:
    try:
        note = json.loads((data_dir / "run" / "admission.json").read_text())
    except (OSError, ValueError):
        return None
    port: int = note["health_port"]
    return port
