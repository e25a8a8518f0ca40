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
from apportion.monitor import damage
from apportion.monitor.log import BadRow, LogFile, Verdict
from apportion.monitor.signing import Checkpoint

UNSIGNED_ROWS_MAX: Final = 4_000
"""A writer signs at least every 1,000 rows, after the batch (of two streams) that reached them."""


class AnchorsUnusable(Exception):
    """The file of anchors can't be read as one checkpoint a line."""

    exit_code = 2


def verify(path: Path, *, public_key: str | None = None, anchors: Sequence[Checkpoint] = ()) -> Verdict:
    """The verdict on a log that nobody writes. Raises LogUnavailable.

    With ``public_key`` checkpoints by any other key are bad, and so is a log without one. ``anchors`` are checkpoints
    that were kept elsewhere, in any order.
    """
    verdict = damage.verify(path)
    if not verdict.ok:
        return verdict
    log = LogFile.open(path)
    try:
        return _attested(log, verdict, public_key, anchors)
    finally:
        log.close()


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
