"""Several nats-servers that are one bus: each message is on the disk of a majority before it is acknowledged.

For trying on one machine what a fleet runs on three: `apportion up --cluster 3`. Each server is an ``EmbeddedServer``
with files of its own under ``<data_dir>/cluster/<n>``, supervised like a single one. They know one another by a secret,
and let in the same principals. Which of them leads, and how long nobody does after one is lost, is theirs
(docs/reliability.md has the measured gaps).
"""

import asyncio
import contextlib
import secrets
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import structlog

from apportion.runtime.embedded import (
    BusServerError,
    EmbeddedServer,
    Membership,
    ServerDidNotStart,
    free_port,
    monitor_says,
)
from apportion.runtime.private_files import write_private

FOLDER: Final = "cluster"
_NOTE: Final = "cluster.json"
_TRIES: Final = 5
_POLL_S: Final = 0.05
FORMED_S_MAX: Final = 60.0

log = structlog.get_logger(__name__)


class OtherBusInDirectory(BusServerError):
    """The directory holds the streams of a bus of another shape: starting this one would leave them behind."""

    exit_code = 2

    def __init__(self, data_dir: Path, *, expected: str, found: str, do: str) -> None:
        super().__init__(f"{data_dir}: expected {expected}, found {found}. {do}")


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """``cluster/cluster.json``: what has to be the same at each start."""

    ports: tuple[int, ...]
    secret: str


class Cluster:
    """``size`` servers on loopback; used like an ``EmbeddedServer``."""

    def __init__(self, data_dir: Path, *, size: int = 3, port: int = 4222, access: Path | None = None) -> None:
        assert size % 2 == 1, f"{size} servers: an even number survives no more losses than one fewer"
        self.data_dir = data_dir.absolute()
        self.size = size
        self.members: list[EmbeddedServer] = []
        self._port = port
        self._access = access
        self._folder = self.data_dir / FOLDER

    @property
    def url(self) -> str:
        """Where clients connect: any of these, and another when that one is lost."""
        return ",".join(member.url for member in self.members)

    @property
    def monitor_url(self) -> str:
        """Where the first server tells about itself."""
        return self.members[0].monitor_url

    @property
    def version(self) -> str:
        """The servers' version."""
        return self.members[0].version if self.members else ""

    @property
    def replicas(self) -> int:
        """On how many servers a stream's messages are kept."""
        return self.size

    @property
    def restarts(self) -> int:
        """How often any of them was started again."""
        return sum(member.restarts for member in self.members)

    @property
    def pid(self) -> int | None:
        """One of the processes: the first that there is."""
        return next((pid for member in self.members if (pid := member.pid) is not None), None)

    @property
    def route_ports(self) -> tuple[int, ...]:
        """Where the servers listen for one another."""
        return self._note().ports

    @property
    def pids(self) -> dict[str, int]:
        """The processes by what they are called."""
        return {
            f"nats-server-{number}": member.pid
            for number, member in enumerate(self.members, start=1)
            if member.pid is not None
        }

    async def __aenter__(self) -> Self:
        """Start, and supervise in the background."""
        await self.start()
        self._supervisor = asyncio.create_task(self.supervise(), name="cluster-supervisor")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the servers and their supervision."""
        await self.stop()
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)

    async def start(self) -> None:
        """A bus that has a leader. Raises BusServerError, with what to do, where there can be none."""
        if (self.data_dir / "bus" / "jetstream").exists():
            raise OtherBusInDirectory(
                self.data_dir,
                expected=f"no bus, or one of {self.size} servers",
                found="the streams of a single server",
                do="Start it without --cluster, or choose another --data-dir.",
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for tries_left in reversed(range(_TRIES)):
            self.members = self._made(self._note())
            try:
                await self._start_together()
            except ServerDidNotStart as err:
                await self.stop()
                if tries_left == 0 or "address already in use" not in err.log_tail:
                    raise
                (self._folder / _NOTE).unlink(missing_ok=True)  # somebody has a port of ours: others, then
            except BaseException:
                await self.stop()
                raise
            else:
                return

    async def _start_together(self) -> None:
        """All of them at once: a server is not ready before there is a leader, and there is none without a majority."""
        for outcome in await asyncio.gather(*(member.start() for member in self.members), return_exceptions=True):
            if outcome is not None:
                raise outcome
        await self._until_formed()

    async def supervise(self) -> None:
        """Restart each server that dies or whose stream is stuck; returns after ``stop``."""
        await asyncio.gather(*(member.supervise() for member in self.members))

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the servers. Idempotent; what was acknowledged stays."""
        await asyncio.gather(*(member.stop(timeout_s) for member in self.members))

    def reload(self) -> None:
        """Have each server read again who is let in."""
        for member in self.members:
            member.reload()

    async def health(self) -> str:
        """What a server says is wrong with it; empty where nothing is with any."""
        found = await asyncio.gather(*(member.health() for member in self.members))
        return "; ".join(f"{member.name}: {wrong}" for member, wrong in zip(self.members, found, strict=True) if wrong)

    def member(self, name: str) -> EmbeddedServer:
        """The server of that name, such as the one that a stream's information calls its leader."""
        return next(member for member in self.members if member.name == name)

    def _made(self, note: _Note) -> list[EmbeddedServer]:
        return [
            EmbeddedServer(
                self._folder / str(number),
                port=0 if self._port == 0 else self._port + number - 1,
                name=f"apportion-{number}",
                access=self._access,
                membership=Membership(cluster="apportion", port=port, ports=note.ports, secret=note.secret),
            )
            for number, port in enumerate(note.ports, start=1)
        ]

    def _note(self) -> _Note:
        """What the servers of this directory know of one another; chosen anew where nothing was."""
        path = self._folder / _NOTE
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            note = msgspec.json.decode(path.read_bytes(), type=_Note)
            if len(note.ports) != self.size:
                raise OtherBusInDirectory(
                    self.data_dir,
                    expected=f"no bus, or one of {self.size} servers",
                    found=f"one of {len(note.ports)}",
                    do=f"Start it with --cluster {len(note.ports)}, or choose another --data-dir.",
                )
            return note
        note = _Note(ports=tuple(free_port() for _ in range(self.size)), secret=secrets.token_hex(24))
        write_private(path, msgspec.json.encode(note))
        return note

    async def _until_formed(self) -> None:
        """Returns once the servers have a leader, and each says that it is well."""
        try:
            async with asyncio.timeout(FORMED_S_MAX):
                while True:
                    if await self._is_formed():
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            wrong = await self.health()
            raise ServerDidNotStart(f"no leader after {FORMED_S_MAX:g} s ({wrong})", "") from None

    async def _is_formed(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            said = await asyncio.to_thread(monitor_says, self.monitor_url, "/jsz")
            return bool((said.get("meta_cluster") or {}).get("leader")) and not await self.health()
        return False


def check_single(data_dir: Path) -> None:
    """Raises OtherBusInDirectory where a cluster's streams are in the directory, and a single server is wanted."""
    note = data_dir / FOLDER / _NOTE
    if note.exists():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            size = len(msgspec.json.decode(note.read_bytes(), type=_Note).ports)
            raise OtherBusInDirectory(
                data_dir,
                expected="no bus, or a single server's",
                found=f"the streams of {size} servers",
                do=f"Start it with --cluster {size}, or choose another --data-dir.",
            )


__all__ = ["Cluster", "OtherBusInDirectory", "check_single"]
