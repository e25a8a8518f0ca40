"""What a folder of segments holds: one Parquet file a day, each with its place in the chain and its digest, signed.

Exported logs have one, and so has the folder beside a log whose past days are sealed. Reads and writes the manifest
alone; what is in the files is ``log``'s and ``segments``'s business.
"""

import contextlib
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from apportion.monitor import signed

NAME: Final = "manifest.json"
_DOMAIN: Final = b"apportion-manifest/1\n"


class Segment(Struct, frozen=True, kw_only=True):
    """One file, and what it holds."""

    file: str
    day: str
    """In UTC, by the streams' clock: the day in which its first row was recorded."""
    first_ordinal: int
    last_ordinal: int
    prev_hash: str
    """What its first row links to, in hex."""
    last_hash: str
    sha256: str
    """Of the file."""


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All segments of a log, in order."""

    rows: int
    segments: tuple[Segment, ...]
    format: str = "apportion.log/1"
    public_key: str = ""
    """Whose signature it is, in hex; empty of an exported log, whose checkpoints are signed."""
    signature: str = ""
    """In hex, over everything else."""

    def statement(self) -> bytes:
        """What is signed."""
        return signed.statement(_DOMAIN, self)

    @property
    def is_signed(self) -> bool:
        """True where its own key signed it. Whose key that is, is another question."""
        return signed.holds(self.statement(), public_key=self.public_key, signature=self.signature)


Sign = Callable[[Manifest], Manifest]
"""Puts a key's name and signature under a manifest."""


def sealed_folder(log_path: Path) -> Path:
    """Where the sealed segments of a log are."""
    return log_path.with_suffix(".sealed")


def read(folder: Path) -> Manifest:
    """What a folder says that it holds. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)


def write(folder: Path, manifest: Manifest) -> None:
    """Say what the folder holds, whole or not at all, and on disk once this returns."""
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    temporary = folder / f".{NAME}.{os.getpid()}"
    with temporary.open("wb") as file:
        file.write(content + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / NAME)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder."""
    with contextlib.suppress(OSError):  # not every file system syncs folders
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def digest(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    found = sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            found.update(block)
    return found.hexdigest()
