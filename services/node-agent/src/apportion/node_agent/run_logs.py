"""What runs wrote: read while they live and after they ended, in pieces, and kept within bounds.

A stream's output lies in generations, ``stdout``, ``stdout.1``, ``stdout.2`` …, of which the shim keeps the newest two
(spawner.py), so that ``(generation, offset)`` names a byte for good and whoever follows notices what was dropped. When
a run's directory goes, its output moves to ``logs/`` beside it, and stays there until it is too old or the node has
too much of it. Answering requests is here as well; who may ask is the broker's to say.
"""

import base64
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from apportion.contracts.ids import RunId, TenantId
from apportion.node_agent.run_records import directory_name, run_of_directory

STREAMS: Final = ("stdout", "stderr")
PIECE_BYTES_MAX: Final = 262_144
"""Most bytes of one answer; as text of JSON they stay well within what the bus takes in one message."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How much output of ended runs a node keeps, and for how long."""

    bytes_max: int = 1024 * 1024 * 1024
    seconds_max: int = 7 * 86_400


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Some output, and where the next begins."""

    data: bytes
    generation: int
    offset: int
    is_cut: bool
    """Something between what was asked for and what this begins with is gone."""


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of an agent: output of one of its runs, from a place on."""

    run: RunId
    stream: str = STREAMS[0]
    generation: Annotated[int, Meta(ge=0)] = 0
    offset: Annotated[int, Meta(ge=0)] = 0


_QUESTION: Final = msgspec.json.Decoder(Question)


def generations(directory: Path, stream: str) -> dict[int, Path]:
    """The files of a stream by their generation, oldest first."""
    found = {0: directory / stream} if (directory / stream).is_file() else {}
    for path in directory.glob(f"{stream}.*"):
        number = path.name.removeprefix(f"{stream}.")
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def piece_of(directory: Path, stream: str, generation: int, offset: int) -> Piece:
    """The output from there on, some hundred KiB of it at most; empty where there is no more yet."""
    files = generations(directory, stream)
    newer = [number for number in files if number >= generation]
    if not newer:
        return Piece(data=b"", generation=generation, offset=offset, is_cut=False)
    # Output begins with generation 0: who asked for one that is gone has missed the rest of it.
    is_cut = generation not in files
    # A newer one is only looked at once an older is at its end, which is final when there is a newer one.
    for number in newer:
        begin = offset if number == generation else 0
        try:
            # What a run put in place of its output is not followed to where it points.
            fd = os.open(files[number], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            is_cut = True  # Dropped in this moment.
            continue
        try:
            data = os.pread(fd, PIECE_BYTES_MAX, begin)
        finally:
            os.close(fd)
        if data or number == newer[-1]:
            return Piece(data=data, generation=number, offset=begin + len(data), is_cut=is_cut)
    return Piece(data=b"", generation=generation, offset=offset, is_cut=is_cut)


class KeptLogs:
    """The output of ended runs, under one directory; safe to use from several threads."""

    def __init__(self, root: Path, retention: Retention) -> None:
        self._root = root
        self._retention = retention
        self.lock = threading.RLock()
        """Held while output moves: who holds it finds a run's output in one place or the other."""
        self._sizes: dict[str, tuple[int, float]] = {}
        """Bytes and the second in which it was kept, oldest first."""

    def open(self) -> None:
        """See what is there."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for entry in self._root.iterdir():
            if run_of_directory(entry.name) is None:
                shutil.rmtree(entry, ignore_errors=True)  # Being moved in or removed when its agent died.
            else:
                found.append((entry.stat().st_mtime, entry.name, _bytes_in(entry)))
        self._sizes = {name: (size, kept_at) for kept_at, name, size in sorted(found)}

    def keep(self, run: RunId, directory: Path, now_s: float) -> None:
        """Take over what an ended run wrote; one that wrote nothing leaves nothing."""
        try:
            names = [name for name in os.listdir(directory) if name.partition(".")[0] in STREAMS]  # noqa: PTH208  on every run's way
        except FileNotFoundError:
            return
        if not names:
            return
        name = directory_name(run)
        draft, place = self._root / f".keeping-{name}", self._root / name
        with self.lock:
            draft.mkdir(mode=0o700, exist_ok=True)
            for each in names:
                (directory / each).rename(draft / each)
            shutil.rmtree(place, ignore_errors=True)
            draft.rename(place)
            os.utime(place, (now_s, now_s))
            self._sizes.pop(name, None)
            self._sizes[name] = (_bytes_in(place), now_s)
        self.trim(now_s)

    def trim(self, now_s: float) -> None:
        """Let the oldest go until the rest is within bounds."""
        with self.lock:
            total = sum(size for size, _ in self._sizes.values())
            gone = []
            for name, (size, kept_at) in self._sizes.items():
                if total <= self._retention.bytes_max and now_s - kept_at <= self._retention.seconds_max:
                    break
                total -= size
                gone.append(name)
            for name in gone:
                del self._sizes[name]
        for name in gone:
            shutil.rmtree(self._root / name, ignore_errors=True)

    def directory(self, run: RunId) -> Path | None:
        """Where the run's output is kept; None where it isn't."""
        name = directory_name(run)
        with self.lock:
            return self._root / name if name in self._sizes else None


class LogDesk:
    """Answers questions about the output of one node's runs."""

    def __init__(self, *, runs: Path, kept: KeptLogs, live: Callable[[], Collection[RunId]]) -> None:
        """``runs`` holds the directories of runs that are not released, ``live`` says which of them may still write."""
        self._runs = runs
        self._kept = kept
        self._live = live

    def answer(self, body: bytes, tenant: TenantId | None = None) -> bytes:
        """The answer, as JSON: ``data`` (base64), ``generation``, ``offset``, ``is_cut``, ``is_live``; or an ``error``.

        A ``tenant`` that asks is told of its own runs alone, and of others not even whether there are any. Blocks for a
        read of a file.
        """
        try:
            question = _QUESTION.decode(body)
        except msgspec.MsgspecError as err:
            return _error("QuestionInvalid", str(err))
        if question.stream not in STREAMS:
            return _error("QuestionInvalid", f"stream: expected stdout or stderr, found {question.stream!r}")
        if tenant is not None and not question.run.startswith(f"{tenant}/"):
            return _error("NotPermitted", f"run: expected one of tenant {tenant}'s own, found {question.run!r}")
        # Asked before it is read: what doesn't live by then has written all that it ever will.
        is_live = question.run in self._live()
        try:
            directory = self._runs / directory_name(question.run)
        except ValueError as err:
            return _error("QuestionInvalid", f"run: {err}")
        with self._kept.lock:
            kept = self._kept.directory(question.run)
            if kept is None and not directory.is_dir():
                return _error("LogNotFound", f"nothing that {question.run} wrote is kept here")
            piece = piece_of(kept or directory, question.stream, question.generation, question.offset)
        answer = {
            "run": question.run,
            "data": base64.b64encode(piece.data).decode(),
            "generation": piece.generation,
            "offset": piece.offset,
            "is_cut": piece.is_cut,
            "is_live": is_live,
        }
        return json.dumps(answer).encode()


def _bytes_in(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.iterdir())


def _error(code: str, message: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": message}}).encode()
