"""Where a pool is: its settings, its files, and the note by which a running pool tells other commands where it is."""

import json
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from apportion.contracts.ids import PoolId
from apportion.runtime.settings import Common, Loaded, default_data_dir, load

DEFAULT_QUEUE: Final = "main"
DEFAULT_TENANT: Final = "default"


class CliSettings(Common, frozen=True, kw_only=True):
    """What the command can be told, beside what all services can."""

    tenant: Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$(?!\n)")] = DEFAULT_TENANT
    """On whose behalf `submit` and `cancel` ask."""
    bus_port: Annotated[int, Meta(ge=0, le=65535)] = 4222
    """Where `up` and `demo` want their bus; a free port is taken where it is in use."""
    nodes: Annotated[int, Meta(ge=1, le=64)] = 2
    """How many nodes `up` simulates where there is no NVIDIA driver."""
    devices: Annotated[int, Meta(ge=1, le=64)] = 4
    """How many devices each simulated node has."""
    profile: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,40}$(?!\n)")] = "h200"
    """Which board is simulated."""


class PoolNote(Struct, kw_only=True):
    """``run/pool.json``: a running pool's addresses and processes."""

    pool: str
    bus_url: str
    monitor_url: str = ""
    supervisor_pid: int
    supervisor_start_ticks: int
    pids: dict[str, int] = {}
    started_at: int
    """Ns since the Unix epoch."""
    data_dir: str
    version: str
    nodes: list[str] = []
    simulated: bool = True
    key_file: str = ""
    """The operator's seed, for who may read it; empty where everybody on this machine is let in."""
    stopped_because: str = ""
    """Why nothing is decided any more; empty while the pool works."""


def note_path(data_dir: Path) -> Path:
    """Where a running pool's note lies."""
    return data_dir / "run" / "pool.json"


def write_note(note: PoolNote) -> None:
    """Replace the note: whole or not at all."""
    path = note_path(Path(note.data_dir))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(msgspec.to_builtins(note), indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_note(data_dir: Path) -> PoolNote | None:
    """The note of the pool that runs in this directory; None where none does."""
    try:
        note = msgspec.json.decode(note_path(data_dir).read_bytes(), type=PoolNote)
    except (OSError, msgspec.MsgspecError):
        return None
    return note if start_ticks(note.supervisor_pid) == note.supervisor_start_ticks else None


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None where it is no more. Tells a pid from its reuse."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


def demo_data_dir() -> Path:
    """Where the demo keeps its files: beside the default pool's, never inside."""
    base = default_data_dir()
    return base.with_name(f"{base.name}-demo")


def log_file(data_dir: Path, pool: str) -> Path:
    """The pool's event log."""
    from apportion.monitor.log import log_path

    return log_path(data_dir, PoolId(pool))


def copies_dir(data_dir: Path, pool: str) -> Path:
    """Where the monitor keeps copies of the log for readers."""
    return log_file(data_dir, pool).parent / "copies"


class Place(Struct, frozen=True, kw_only=True):
    """Which pool a command talks about."""

    loaded: Loaded[CliSettings]
    pool: str
    bus_url: str
    data_dir: Path
    note: PoolNote | None
    """The running pool's note, where it runs on this machine."""
    key_file: Path | None = None
    """The seed to speak with; None where none is known."""

    @property
    def settings(self) -> CliSettings:
        """What was said in flags, environment and file."""
        return self.loaded.settings


def running_elsewhere(data_dir: Path) -> list[PoolNote]:
    """The notes of pools that run on this machine in other directories than this one."""
    from apportion.cli.leftovers import data_dirs

    notes = (read_note(each) for each in data_dirs() if each.absolute() != data_dir.absolute())
    return [note for note in notes if note is not None]


def find(flags: dict[str, str]) -> Place:
    """The pool that was named, else the one that runs on this machine: the default one, or the demo's.

    Where its bus alone was named, and it runs on this machine, its directory is found as well.

    Raises SettingsInvalid.
    """
    loaded = load(CliSettings, "cli", flags=flags)
    settings = loaded.settings
    data_dir = settings.data_dir
    note = read_note(data_dir)
    if note is None and loaded.origins["data_dir"] == "default" and loaded.origins["bus_url"] == "default":
        note = read_note(demo_data_dir())
        if note is not None:
            data_dir = Path(note.data_dir)
    if (note is None or note.bus_url != settings.bus_url) and (
        loaded.origins["data_dir"] == "default" and loaded.origins["bus_url"] != "default"
    ):
        named = next((each for each in running_elsewhere(data_dir) if each.bus_url == settings.bus_url), None)
        if named is not None:
            note, data_dir = named, Path(named.data_dir)
    bus_url = settings.bus_url
    if loaded.origins["bus_url"] == "default" and note is not None:
        bus_url = note.bus_url
    pool = note.pool if note is not None and loaded.origins["pool"] == "default" else settings.pool
    key_file = settings.bus_key_file
    if key_file is None and note is not None and note.key_file and bus_url == note.bus_url:
        key_file = Path(note.key_file)
    return Place(loaded=loaded, pool=pool, bus_url=bus_url, data_dir=data_dir.absolute(), note=note, key_file=key_file)
