"""Is the log what was written? Its chain, the checkpoints that were signed over it, and what is anchored elsewhere.

The chain alone shows edits, deletions and reorderings. That all of it was written anew shows by the signatures, and
that its tail was cut by an anchor that names a later row, for whoever keeps the public key and the anchors elsewhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from apportion.contracts.envelope import Stream
from apportion.monitor import damage, manifest
from apportion.monitor.log import BadRow, LogFile, LogUnavailable, Verdict, sealed_of
from apportion.monitor.signing import Checkpoint

UNSIGNED_ROWS_MAX: Final = 4_000
"""A writer signs at least every 1,000 rows, after the batch (of two streams) that reached them."""
_DAMAGED: Final = "the file isn't as it was sealed"


class AnchorsUnusable(Exception):
    """The file of anchors can't be read as one checkpoint a line."""

    exit_code = 2


def verify(
    path: Path,
    *,
    public_key: str | None = None,
    anchors: Sequence[Checkpoint] = (),
    segments_of: Path | None = None,
) -> Verdict:
    """The verdict on a log that nobody writes, and on its sealed segments. Raises LogUnavailable.

    With ``public_key`` checkpoints by any other key are bad, and so is a log without one. ``anchors`` are checkpoints
    that were kept elsewhere, in any order. ``segments_of`` is the log that a copy was made of, with its segments.
    """
    sealed = sealed_of(path)
    bad = _missealed(manifest.sealed_folder(path), sealed, public_key) if sealed else None
    if bad is None and segments_of is not None and segments_of != path:
        folder = manifest.sealed_folder(segments_of)
        bad = _missealed(folder, None, public_key) if folder.exists() else None
    if bad is not None:
        closer = _looked_closer(path, bad)
        if closer is not None and closer.first_bad is not None:
            return closer
        return Verdict(ok=False, rows=bad.ordinal - 1, head_ordinal=0, head_hash="", first_bad=bad)
    verdict = damage.verify(path)
    if not verdict.ok:
        return verdict
    log = LogFile.open(path)
    try:
        return _attested(log, verdict, public_key, anchors)
    finally:
        log.close()


def _looked_closer(path: Path, bad: BadRow) -> Verdict | None:
    """The verdict by the chain, which may know the row itself; None where it can't be told."""
    if bad.what.endswith(_DAMAGED):
        return damage.looked_into(path)  # in a process of its own, which may end over it
    try:
        return damage.verify(path)
    except LogUnavailable:
        return None


def _missealed(folder: Path, sealed: int | None, public_key: str | None) -> BadRow | None:
    """The first row whose segment isn't as it was sealed, by the manifest, its signature and digests; None for none.

    ``sealed`` is the last row that has to be in a segment; None: as many as the manifest says. ``public_key`` is who
    must have signed; None: anybody.
    """
    try:
        whole = manifest.read(folder)
    except (OSError, msgspec.MsgspecError) as err:
        return _bad_row(1, f"the manifest of sealed segments can't be read: {_first_line(err)}")
    if not whole.is_signed:
        return _bad_row(1, "the manifest of sealed segments was changed: its signature doesn't fit")
    if public_key is not None and whole.public_key != public_key:
        return _bad_row(1, f"the manifest of sealed segments was signed by another key: {whole.public_key}")
    at = 1
    for segment in whole.segments:
        if sealed is not None and segment.first_ordinal > sealed:
            break  # written, and not let go by the file when its writer died
        if segment.first_ordinal != at:
            return _bad_row(at, "no segment holds it")
        file = folder / segment.file
        if not file.is_file():
            return _bad_row(at, f"its segment {segment.file} is gone")
        if manifest.digest(file) != segment.sha256:
            return _bad_row(at, f"it or a later row of its segment {segment.file} was changed: {_DAMAGED}")
        at = segment.last_ordinal + 1
    return None if sealed is None or at == sealed + 1 else _bad_row(at, "no segment holds it")


def _bad_row(ordinal: int, what: str) -> BadRow:
    return BadRow(ordinal=ordinal, stream="", stream_seq=0, what=what)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def anchors_in(path: Path) -> list[Checkpoint]:
    """Checkpoints of a file, one JSON object a line; a last line that was cut off is passed over.

    Raises AnchorsUnusable.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as err:
        raise AnchorsUnusable(f"{path}: expected checkpoints, one a line; found {err}") from err
    decoder = msgspec.json.Decoder(Checkpoint)
    found = []
    for number, line in enumerate(lines[:-1], 1):  # a whole file ends with a newline
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as err:
            raise AnchorsUnusable(f"{path}, line {number}: expected a checkpoint; found {err}") from err
    return found


def _attested(log: LogFile, verdict: Verdict, public_key: str | None, anchors: Sequence[Checkpoint]) -> Verdict:
    texts = log.checkpoints()
    inside: list[Checkpoint] = []
    for ordinal, text in texts:
        checkpoint = _read(text)
        if checkpoint is None or checkpoint.ordinal != ordinal or not checkpoint.is_signed:
            return _bad(log, verdict, _last(inside) + 1, f"the checkpoint of row {ordinal} was changed")
        inside.append(checkpoint)
    for name, checkpoints in (("checkpoint", inside), ("anchor", sorted(anchors, key=lambda one: one.ordinal))):
        good = 0
        for checkpoint in checkpoints:
            what = _wrong(log, verdict, checkpoint, public_key, name)
            if what is not None:
                # Of a tail that is gone, what is left is whole; of rows that differ, the first may be any since.
                first = verdict.rows if checkpoint.ordinal > verdict.rows else good
                return _bad(log, verdict, first + 1, what, checkpoint)
            good = checkpoint.ordinal
    signed = _last(inside)
    expected = public_key is not None or bool(inside)
    if expected and verdict.rows - signed > UNSIGNED_ROWS_MAX:
        return _bad(
            log, verdict, signed + 1, f"no checkpoint speaks for it, or for the {verdict.rows - signed - 1} after it"
        )
    return replace(
        verdict,
        checkpoints=len(inside),
        signed_ordinal=signed,
        anchors=len(anchors),
        public_key=inside[-1].public_key if inside else "",
    )


def _read(text: str) -> Checkpoint | None:
    try:
        return msgspec.json.decode(text, type=Checkpoint)
    except msgspec.MsgspecError:
        return None


def _wrong(log: LogFile, verdict: Verdict, checkpoint: Checkpoint, public_key: str | None, name: str) -> str | None:
    if not checkpoint.is_signed:
        return f"the {name} of row {checkpoint.ordinal} was changed: its signature doesn't fit"
    if public_key is not None and checkpoint.public_key != public_key:
        return f"the {name} of row {checkpoint.ordinal} was signed by another key: {checkpoint.public_key}"
    if checkpoint.ordinal > verdict.rows:
        return (
            f"the tail is gone: the {name} of row {checkpoint.ordinal} says that the log had got to wish "
            f"{checkpoint.wishes_seq} and fact {checkpoint.facts_seq}"
        )
    found = log.hash_at(checkpoint.ordinal)
    if found is None or found.hex() != checkpoint.hash:
        return f"rows were rewritten: row {checkpoint.ordinal} is not the one that the {name} was signed over"
    return None


def _last(checkpoints: Iterable[Checkpoint]) -> int:
    return max((one.ordinal for one in checkpoints), default=0)


def _bad(log: LogFile, verdict: Verdict, ordinal: int, what: str, checkpoint: Checkpoint | None = None) -> Verdict:
    """The verdict that names the first row which nothing trustworthy speaks for."""
    stream, seq = log.place_of(ordinal) or next(_gone(log, checkpoint), ("", 0))
    row = BadRow(ordinal=ordinal, stream=stream, stream_seq=seq, what=what)
    return replace(verdict, ok=False, rows=ordinal - 1, first_bad=row)


def _gone(log: LogFile, checkpoint: Checkpoint | None) -> Iterator[tuple[str, int]]:
    """The first sequence of each stream that a checkpoint knew and the log lacks."""
    if checkpoint is None:
        return
    for stream, reached in ((Stream.FACTS, checkpoint.facts_seq), (Stream.WISHES, checkpoint.wishes_seq)):
        last = log.last_seq(stream)
        if last < reached:
            yield stream.value, last + 1
