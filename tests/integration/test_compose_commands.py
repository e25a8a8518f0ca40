"""The exact commands of compose.yaml, as processes: each becomes ready, answers its health check, and drains."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from apportion.cli import leftovers
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.health import probe

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parent.parent.parent
SERVICES: dict[str, Any] = {
    name: service
    for name, service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].items()
    if "build" in service
}


async def a_health_port(data_dir: Path, process: asyncio.subprocess.Process) -> int:
    """Where the process answers, as its run file says."""
    while process.returncode is None:
        for path in (data_dir / "run").glob("*.json"):
            said = json.loads(path.read_text())
            if said["pid"] == process.pid and "health_port" in said:
                return int(said["health_port"])
        await asyncio.sleep(0.02)
    return 0


async def test_each_command_of_the_compose_file_becomes_ready_and_drains(tmp_path: Path) -> None:
    """No engine is assumed, so the containers' contents are run here: same command, same environment."""
    async with EmbeddedServer(tmp_path / "bus", port=0) as bus, asyncio.timeout(100):
        started: dict[str, asyncio.subprocess.Process] = {}
        try:
            for name, service in SERVICES.items():
                # Of the container's environment only what the container itself changes: addresses and paths.
                env = {
                    **service["environment"],
                    "APPORTION_BUS_URL": bus.url,
                    "APPORTION_DATA_DIR": str(tmp_path / name),
                    "APPORTION_HEALTH_PORT": "0",
                    "PATH": os.environ["PATH"],
                    "HOME": str(tmp_path),
                }
                program = Path(sys.executable).parent / service["command"][0]
                with (tmp_path / f"{name}.log").open("wb") as log:
                    started[name] = await asyncio.create_subprocess_exec(
                        program, *service["command"][1:], env=env, cwd=tmp_path, stdout=log, stderr=log
                    )
            for name, process in started.items():
                said = (tmp_path / f"{name}.log").read_text
                port = await a_health_port(tmp_path / name, process)
                assert port, f"{name} exited with {process.returncode}: {said()}"
                while not (await asyncio.to_thread(probe, port))[0]:
                    assert process.returncode is None, f"{name} exited with {process.returncode}: {said()}"
                    await asyncio.sleep(0.05)
            for process in started.values():
                process.send_signal(signal.SIGTERM)
            ends = {name: await process.wait() for name, process in started.items()}
            assert ends == dict.fromkeys(SERVICES, 0)
        finally:
            for process in started.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            # The simulated devices outlive their agent, as real ones do.
            for name in SERVICES:
                await asyncio.to_thread(leftovers.end_all, tmp_path / name, frozenset(leftovers.Kind))
