"""The log as Parquet files, a day each, that any engine reads; and a log made of them again, held against its chain.

A segment has whole rows, hashes included, so that a chain can be checked over segments as over the file. The manifest
beside them says which there are; checkpoints come along, one a line.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from apportion.monitor import attest
from apportion.monitor.log import EventLog, LogError, LogFile, Verdict

MANIFEST: Final = "manifest.json"
CHECKPOINTS: Final = "checkpoints.jsonl"
_NS_PER_DAY: Final = 86_400 * 1_000_000_000


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


class Manifest(Struct, frozen=True, kw_only=True):
    """All segments of a log, in order."""

    rows: int
    segments: tuple[Segment, ...]
    format: str = "apportion.log/1"


class SegmentsUnusable(LogError):
    """A folder that holds no log, or not all of one."""

    exit_code = 9


def export(path: Path, folder: Path) -> Manifest:
    """Write the log at ``path``, which nobody may be writing, as segments into a new or an empty folder.

    Raises LogUnavailable, SegmentsUnusable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SegmentsUnusable(f"expected an empty folder, found files in {folder}: name another")
    log = LogFile.open(path)
    try:
        segments = tuple(_written(log, folder, day, first, last) for day, first, last in _days(log))
        lines = [text for _, text in log.checkpoints()]
        (folder / CHECKPOINTS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    finally:
        log.close()
    manifest = Manifest(rows=segments[-1].last_ordinal if segments else 0, segments=segments)
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(content + b"\n")  # last: a folder without one is unfinished
    return manifest


def import_(folder: Path, path: Path) -> Verdict:
    """Make a log at ``path``, where there is none, of a folder's segments; the verdict on it, which is good.

    Raises SegmentsUnusable where a file is missing or other than it was, or the log isn't whole; then nothing is left.
    """
    manifest = read(folder)
    if path.exists():
        raise SegmentsUnusable(f"expected no file at {path}, found one: move it aside")
    for segment in manifest.segments:
        file = folder / segment.file
        if not file.is_file() or _digest(file) != segment.sha256:
            raise SegmentsUnusable(
                f"{file}: expected the segment of {segment.day} as it was written, found another or none"
            )
    checkpoints = [(one.ordinal, msgspec.json.encode(one).decode()) for one in attest.anchors_in(folder / CHECKPOINTS)]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with EventLog.open(path) as log:
            log.take_segments([folder / segment.file for segment in manifest.segments], checkpoints)
        verdict = attest.verify(path)
        if not verdict.ok or verdict.rows != manifest.rows:
            what = verdict.first_bad.what if verdict.first_bad else f"{verdict.rows} rows of {manifest.rows}"
            raise SegmentsUnusable(f"{folder} doesn't hold a whole log: row {verdict.rows + 1}: {what}")
    except LogError:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.wal").unlink(missing_ok=True)
        raise
    return verdict


def read(folder: Path) -> Manifest:
    """What a folder holds. Raises SegmentsUnusable."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as err:
        raise SegmentsUnusable(f"{folder}: expected an exported log with its {MANIFEST}; {err}") from err


def _days(log: LogFile) -> Iterator[tuple[str, int, int]]:
    """Each day with its first and last ordinal. A day ends with the first row of a later one: rows stay in order."""
    last = log.last_ordinal()
    first = 1
    while first <= last:
        at = log.recorded_at(first)
        following = log.first_ordinal_from((at // _NS_PER_DAY + 1) * _NS_PER_DAY, after=first)
        until = last if following is None else following - 1
        yield datetime.fromtimestamp(at // 1_000_000_000, tz=UTC).strftime("%Y-%m-%d"), first, until
        first = until + 1


def _written(log: LogFile, folder: Path, day: str, first: int, last: int) -> Segment:
    file = folder / f"{day}.{first:012d}.parquet"
    log.write_segment(file, first, last)
    prev_hash = log.hash_at(first - 1) if first > 1 else bytes(32)
    return Segment(
        file=file.name,
        day=day,
        first_ordinal=first,
        last_ordinal=last,
        prev_hash=(prev_hash or b"").hex(),
        last_hash=(log.hash_at(last) or b"").hex(),
        sha256=_digest(file),
    )


def _digest(file: Path) -> str:
    digest = sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
