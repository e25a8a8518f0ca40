"""The simulated node's process: found again by its socket, started where there is none, started again where it dies.

It outlives the agent, as a driver does. What it simulates is its own business (simgpu/).
"""

import asyncio
import contextlib
import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from apportion.contracts.ids import NodeId
from apportion.node_agent.simgpu.tools import directory_of

_SOCKET_PATH_MAX: Final = 100
"""The kernel's limit is 107 bytes; the server's own files get a few more letters."""
_START_S_MAX: Final = 20.0
_RESTART_PAUSE_S: Final = 0.2

log = structlog.get_logger(__name__)


class SimulatedNodeFailed(Exception):
    """The simulated node didn't come up."""

    exit_code = 1


class SimulatedNode:
    """One simulated node; ``on_gone`` and ``on_back`` tell of its death and its return."""

    def __init__(
        self,
        node: NodeId,
        *,
        state_dir: Path,
        devices: int,
        profile: str,
        driver: str = "580",
        mig_devices: int = 0,
    ) -> None:
        self._node = node
        self._state_dir = state_dir
        self._devices = devices
        self._profile = profile
        self._driver = driver
        self._mig_devices = mig_devices
        self._pidfd = -1
        self._restart: asyncio.Task[None] | None = None
        self._is_closed = False
        self.socket_path = socket_of(state_dir)
        self.pid = 0
        self.on_gone: Callable[[], None] = lambda: None
        self.on_back: Callable[[], None] = lambda: None

    @property
    def tools(self) -> Path:
        """Where its command-line tools are."""
        return directory_of(self.socket_path)

    async def open(self) -> None:
        """Find it, or start it; raises SimulatedNodeFailed."""
        if not self._find():
            await self._start()
        self._watch()

    async def close(self) -> None:
        """Let go of it; it lives on, as the runs on it do."""
        self._is_closed = True
        if self._restart is not None:
            self._restart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restart
        self._unwatch()

    def _find(self) -> bool:
        """Its pid from whoever listens on its socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(str(self.socket_path))
            except OSError:
                return False
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid = int(struct.unpack("3i", credentials)[0])
        return True

    async def _start(self) -> None:
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket_path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        with (self._state_dir / "simgpu.log").open("ab") as output:
            # Not asyncio's subprocess: that one kills its child when its loop ends, and this child outlives us.
            process = subprocess.Popen(  # noqa: ASYNC220  once per node; the wait for it is below
                [
                    *(sys.executable, "-m", "apportion.node_agent.simgpu.server"),
                    *("--socket", str(self.socket_path), "--devices", str(self._devices)),
                    *("--profile", self._profile, "--node-name", self._node),
                    *("--driver", self._driver, "--mig-devices", str(self._mig_devices)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout as stdout:
            line = await asyncio.get_running_loop().run_in_executor(None, _line_within, stdout.fileno(), _START_S_MAX)
        if not line:
            process.kill()
            process.wait()
            raise SimulatedNodeFailed(
                f"the simulated node {self._node} did not come up at {self.socket_path}: "
                f"see {self._state_dir}/simgpu.log"
            )
        process.returncode = 0  # It isn't waited for, and that is deliberate: see _on_ended.
        self.pid = process.pid
        log.info("simulated_node_started", pid=self.pid, devices=self._devices, profile=self._profile)

    def _watch(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(self._on_ended)
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_ended)

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_ended(self) -> None:
        self._unwatch()
        if self._is_closed:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # Ours to bury where we started it, init's where an earlier agent did.
        log.error("simulated_node_gone", pid=self.pid)
        self.on_gone()
        self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        while True:
            await asyncio.sleep(_RESTART_PAUSE_S)
            try:
                await self.open()
            except (SimulatedNodeFailed, OSError) as err:
                log.warning("simulated_node_not_back", error=str(err))
            else:
                self.on_back()
                return

    def kill(self) -> None:
        """End it at once (fault injection and tests)."""
        os.kill(self.pid, signal.SIGKILL)


def _line_within(fd: int, seconds: float) -> bytes:
    """The first line that the process says, whole; nothing where it ends or takes too long. Blocks."""
    line = b""
    deadline = time.monotonic() + seconds
    # To its end: an unbuffered process writes text and newline apart, and dies of a pipe that is closed in between.
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(fd, 4096) if ready else b""
        if not data:
            return b""
        line += data
    return line


def socket_of(state_dir: Path) -> Path:
    """In the state directory, or by its digest in the directory for temporary files where its path is too long."""
    path = state_dir.absolute() / "simgpu" / "node.sock"
    if len(str(path)) <= _SOCKET_PATH_MAX:
        return path
    digest = hashlib.sha256(str(state_dir.absolute()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"apportion-{os.getuid()}" / f"{digest}.sock"
