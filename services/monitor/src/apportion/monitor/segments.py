"""The log as Parquet files, a day each, that any engine reads; and a log made of them again, held against its chain.

A segment has whole rows, hashes included, so that a chain can be checked over segments as over the file. The manifest
beside them says which there are; checkpoints come along, one a line.

A log seals its past days in the same way, into the folder beside it: from then on those rows are there, and in its file
no more, and whatever opens the log sees both. That manifest is signed by the log's key.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from apportion.monitor import attest, manifest
from apportion.monitor.log import EventLog, LogError, LogFile, Verdict, write_ahead
from apportion.monitor.manifest import Manifest, Segment, Sign

CHECKPOINTS: Final = "checkpoints.jsonl"
_NS_PER_DAY: Final = 86_400 * 1_000_000_000


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
        segments = tuple(_written(log, folder, day) for day in _days(log, first=1, last=log.last_ordinal()))
        lines = [text for _, text in log.checkpoints()]
        (folder / CHECKPOINTS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    finally:
        log.close()
    whole = Manifest(rows=segments[-1].last_ordinal if segments else 0, segments=segments)
    manifest.write(folder, whole)  # last: a folder without one is unfinished
    return whole


def import_(folder: Path, path: Path) -> Verdict:
    """Make a log at ``path``, where there is none, of a folder's segments; the verdict on it, which is good.

    Raises SegmentsUnusable where a file is missing or other than it was, or the log isn't whole; then nothing is left.
    """
    given = read(folder)
    if path.exists():
        raise SegmentsUnusable(f"expected no file at {path}, found one: move it aside")
    for segment in given.segments:
        file = folder / segment.file
        if not file.is_file() or manifest.digest(file) != segment.sha256:
            raise SegmentsUnusable(
                f"{file}: expected the segment of {segment.day} as it was written, found another or none"
            )
    checkpoints = [(one.ordinal, msgspec.json.encode(one).decode()) for one in attest.anchors_in(folder / CHECKPOINTS)]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with EventLog.open(path) as log:
            log.take_segments([folder / segment.file for segment in given.segments], checkpoints)
        verdict = attest.verify(path)
        if not verdict.ok or verdict.rows != given.rows:
            what = verdict.first_bad.what if verdict.first_bad else f"{verdict.rows} rows of {given.rows}"
            raise SegmentsUnusable(f"{folder} doesn't hold a whole log: row {verdict.rows + 1}: {what}")
    except LogError:
        path.unlink(missing_ok=True)
        write_ahead(path).unlink(missing_ok=True)
        raise
    return verdict


def read(folder: Path) -> Manifest:
    """What a folder holds. Raises SegmentsUnusable."""
    try:
        return manifest.read(folder)
    except (OSError, msgspec.MsgspecError) as err:
        raise SegmentsUnusable(f"{folder}: expected an exported log with its {manifest.NAME}; {err}") from err


def prepare(log: EventLog, before_at: int, sign: Sign) -> Manifest | None:
    """Write the days that ended by an instant as segments, beside a log that goes on being written; None for no days.

    Only rows that a checkpoint speaks for, and never the newest. Nothing is changed by it until ``EventLog.let_go``:
    what is left of an attempt that ended halfway is written over by the next. Raises LogUnavailable.
    """
    folder = manifest.sealed_folder(log.path)
    signed, head = log.signed_ordinal, log.head.ordinal
    beside = log.beside()
    try:
        sealed = log.sealed_ordinal
        kept = _kept(folder, sealed)
        following = beside.first_ordinal_from(before_at // _NS_PER_DAY * _NS_PER_DAY, after=sealed)
        last = min(signed, head - 1, head if following is None else following - 1)
        # Whole days alone, or a day would come in pieces; what isn't signed yet waits with its day for the next time.
        ended = [day for day in _days(beside, first=sealed + 1, last=head) if day[2] <= last]
        if not ended:
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        segments = (*kept, *(_written(beside, folder, day, kept[-1:]) for day in ended))
        for segment in segments[len(kept) :]:
            with (folder / segment.file).open("rb") as file:
                os.fsync(file.fileno())
        whole = sign(Manifest(rows=segments[-1].last_ordinal, segments=segments))
        manifest.write(folder, whole)
    finally:
        beside.close()
    return whole


def seal(log: EventLog, before_at: int, sign: Sign) -> tuple[Segment, ...]:
    """Seal the days that ended by an instant, of a log that nobody else appends to meanwhile; the new segments.

    Raises LogUnavailable, LogWriteFailed.
    """
    before = log.sealed_ordinal
    whole = prepare(log, before_at, sign)
    if whole is None:
        return ()
    log.let_go(whole.rows)
    return tuple(one for one in whole.segments if one.first_ordinal > before)


def erase(log: EventLog, ordinals: Sequence[int], sign: Sign) -> None:
    """Forget the payloads of rows, sealed or not. Between two appends. Raises LogError, OSError."""
    folder = manifest.sealed_folder(log.path)

    def rewrite(sealed: list[int]) -> None:
        whole = read(folder)
        for old in whole.segments:
            ours = [ordinal for ordinal in sealed if old.first_ordinal <= ordinal <= old.last_ordinal]
            if not ours:
                continue
            new = _without(log, folder, old, ours)
            whole = replace(whole, segments=tuple(new if one is old else one for one in whole.segments))
            manifest.write(folder, sign(whole))
            (folder / old.file).unlink()

    log.erase(ordinals, rewrite=rewrite)


def _without(log: EventLog, folder: Path, old: Segment, erased: Sequence[int]) -> Segment:
    """The segment without the payloads of these rows, as another file that is on disk."""
    file = folder / f"{old.day}.{old.first_ordinal:012d}.{log.generation}.parquet"
    beside = log.beside()
    try:
        beside.rewrite_segment(folder / old.file, file, erased)
    finally:
        beside.close()
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return replace(old, file=file.name, sha256=manifest.digest(file))


def _kept(folder: Path, sealed: int) -> tuple[Segment, ...]:
    """The segments that hold the rows which the log let go. Raises SegmentsUnusable."""
    if not sealed:
        return ()
    return tuple(one for one in read(folder).segments if one.last_ordinal <= sealed)


def _days(log: LogFile, *, first: int, last: int) -> Iterator[tuple[str, int, int]]:
    """Each day with its first and last ordinal. A day ends with the first row of a later one: rows stay in order."""
    while first <= last:
        at = log.recorded_at(first)
        following = log.first_ordinal_from((at // _NS_PER_DAY + 1) * _NS_PER_DAY, after=first)
        until = last if following is None else following - 1
        yield datetime.fromtimestamp(at // 1_000_000_000, tz=UTC).strftime("%Y-%m-%d"), first, until
        first = until + 1


def _written(log: LogFile, folder: Path, span: tuple[str, int, int], before: Sequence[Segment] = ()) -> Segment:
    day, first, last = span
    file = folder / f"{day}.{first:012d}.parquet"
    log.write_segment(file, first, last)
    if first == 1:
        prev_hash = bytes(32).hex()
    else:
        found = log.hash_at(first - 1)
        prev_hash = before[-1].last_hash if found is None else found.hex()
    return Segment(
        file=file.name,
        day=day,
        first_ordinal=first,
        last_ordinal=last,
        prev_hash=prev_hash,
        last_hash=(log.hash_at(last) or b"").hex(),
        sha256=manifest.digest(file),
    )
