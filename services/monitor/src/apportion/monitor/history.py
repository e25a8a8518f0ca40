"""The pool as it was at any moment, rebuilt from the log by folding its facts. It can't act: a file and a fold, no bus.

Folds are kept on the way, one each FOLD_EVERY facts, beside the log, so that the next seek begins near its goal. They
are a cache: named by what folds and by the row that they end with, deleted freely, never believed where either differs.
"""

import contextlib
import functools
import gc
import hashlib
import inspect
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import msgspec
from msgspec import Struct

from apportion.contracts import codec, events
from apportion.contracts.envelope import Basis, Entry, Stream
from apportion.contracts.events import FACTS, type_name
from apportion.contracts.ids import Author
from apportion.monitor.log import FactRow, LogFile
from apportion.monitor.projections import entry_of
from apportion.pool import state as pool_state
from apportion.pool.state import Pool, evolve

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLD_EVERY: Final = 5_000
_KNOWN: Final = frozenset(type_name(kind) for kind in FACTS)
_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


class _Fold(Struct, kw_only=True, array_like=True):
    """One fold on disk."""

    row_hash: bytes
    """Chain hash of the row of its last fact: by the chain, of everything before it."""
    pool: Pool


_DECODER: Final = msgspec.msgpack.Decoder(_Fold)


class NoSuchMoment(Exception):
    """A sequence or an instant that the log doesn't reach."""

    exit_code = 5

    def __init__(self, *, asked: str, last: str) -> None:
        super().__init__(f"the log doesn't reach {asked}: its last fact is {last}")


class History:
    """A log that nobody writes, as states of the pool. Use it as a context."""

    def __init__(self, log: LogFile, folds: Path) -> None:
        self._log = log
        self._folds = folds / fold_digest()
        self.last_seq = log.last_seq(Stream.FACTS)

    @classmethod
    def open(cls, path: Path, *, folds: Path | None = None) -> Self:
        """The history in a log, or in a copy of one, which has its folds elsewhere. Raises LogUnavailable."""
        return cls(LogFile.open(path), folds or path.with_suffix(".folds"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()

    def seq_at(self, instant: int) -> int:
        """The last fact that was recorded at that instant (ns since the Unix epoch) or before; 0 for none."""
        return self._log.last_seq(Stream.FACTS, until=instant)

    def span(self) -> tuple[int, int]:
        """When the first and the last fact were recorded; 0, 0 for a log without any."""
        return self._log.span(Stream.FACTS)

    def at_seq(self, seq: int) -> Pool:
        """The pool after the fact with this sequence; 0: before the first. Raises NoSuchMoment."""
        if not 0 <= seq <= self.last_seq:
            raise NoSuchMoment(asked=f"fact {seq}", last=str(self.last_seq))
        with _uncollected():
            pool = self._nearest(seq)
            for entry in self.entries(after=pool.seq, to=seq):
                pool = evolve(pool, entry)
                if pool.seq % FOLD_EVERY == 0:
                    self._keep(pool)
        return pool

    def entries(self, *, after: int, to: int) -> "Iterator[Entry]":
        """The facts between, in order."""
        return entries_of(self._log.facts(after=after, to=to), self._log)

    def _nearest(self, seq: int) -> Pool:
        for number in range(seq // FOLD_EVERY, 0, -1):
            pool = self._kept(number * FOLD_EVERY)
            if pool is not None:
                return pool
        return Pool()

    def _path(self, seq: int) -> Path:
        return self._folds / f"{seq:012d}.fold"

    def _kept(self, seq: int) -> Pool | None:
        try:
            fold = _DECODER.decode(zlib.decompress(self._path(seq).read_bytes()))
        except (OSError, zlib.error, msgspec.MsgspecError):
            return None
        is_ours = fold.pool.seq == seq and fold.row_hash == self._log.hash_of(Stream.FACTS, seq)
        return fold.pool if is_ours else None

    def _keep(self, pool: Pool) -> None:
        path = self._path(pool.seq)
        content = _ENCODER.encode(_Fold(row_hash=self._log.hash_of(Stream.FACTS, pool.seq) or b"", pool=pool))
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # a place where nothing can be written has slower seeks
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(zlib.compress(content, level=1))
            temporary.replace(path)


def entries_of(rows: "Iterable[FactRow]", log: LogFile) -> Iterator[Entry]:
    """What a core folds of rows of facts: the same as ``projections.entry_of`` makes of the messages themselves.

    The envelope was taken apart when the row was written, so only the body is decoded here; a row that could not be
    read then is looked at as a whole, as this version may know what that one didn't.
    """
    for row in rows:
        seq, at, type_, event_id, author, facts, wishes, decided_at, policy, parse_error, body = row
        if parse_error is not None or body is None or type_ not in _KNOWN:
            yield entry_of(log.message(Stream.FACTS, seq))
            continue
        yield Entry(
            stream=Stream.FACTS,
            seq=seq,
            recorded_at=at,
            event=codec.decode_body(type_, body),
            event_id=event_id or "",
            author=Author(author),
            basis=None
            if decided_at is None or facts is None or wishes is None
            else Basis(facts=facts, wishes=wishes, decided_at=decided_at, policy=policy or ""),
        )


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No collection while a state is built: nothing of it is garbage, and looking for some takes a seventh longer."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@functools.cache
def fold_digest() -> str:
    """Names what folds: the code of the fold and of the events. Another version has folds of its own."""
    texts = (inspect.getsource(module) for module in (pool_state, events, codec))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
