"""Copies of the live log, for those who may read and must not be able to harm anything.

DuckDB lets one process open a file that is written, so the writer itself makes copies and brings them up to date, a few
in turns: one is read while the next is filled. A copy is never written while a reader of ours has it.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from apportion.monitor.log import EventLog, Head, LogUnavailable, NotACopy

FILES_MAX: Final = 4
"""At two questions at a time one copy is read, one is newest, one is filled; a fourth for somebody from outside."""
FRESH_S: Final = 0.5
"""A copy this young is used as it is."""


class Copy(Struct, frozen=True, kw_only=True):
    """One copy, and what it holds."""

    path: Path
    head: Head
    generation: int
    copied_at: int
    """Everything that the log had at this instant is in it; ns since the Unix epoch."""


class Replicas:
    """The copies of one log, in one folder. Use it from one event loop."""

    def __init__(self, log: EventLog, folder: Path) -> None:
        self._log = log
        self._folder = folder
        self._readers: dict[Path, int] = {}
        self._newest: Copy | None = None
        self._made_at = 0.0
        self._turn = asyncio.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.asynccontextmanager
    async def newest(self, *, fresh_s: float = FRESH_S) -> AsyncIterator[Copy]:
        """A copy that is at most ``fresh_s`` behind the log where that can be had; it stays as it is while it is used.

        Raises LogUnavailable where there is none at all.
        """
        async with self._turn:
            copy = self._newest
            is_fresh = copy is not None and copy.generation == self._log.generation
            if copy is None or not is_fresh or time.monotonic() - self._made_at > fresh_s:
                copy = await self._refresh(copy)
            self._readers[copy.path] = self._readers.get(copy.path, 0) + 1
        try:
            yield copy
        finally:
            self._readers[copy.path] -= 1

    async def _refresh(self, old: Copy | None) -> Copy:
        if old is not None and (old.head.ordinal, old.generation) == (self._log.head.ordinal, self._log.generation):
            self._made_at = time.monotonic()
            self._newest = replace(old, copied_at=time.time_ns())
            return self._newest
        failure: LogUnavailable | None = None
        for path in self._candidates(old):
            began, at, generation = time.monotonic(), time.time_ns(), self._log.generation
            try:
                head = await asyncio.to_thread(self._fill, path)
            except LogUnavailable as err:
                failure = err  # somebody from outside reads it: the next one, then
                continue
            self._newest = Copy(path=path, head=head, generation=generation, copied_at=at)
            self._made_at = began
            await asyncio.to_thread(self._announce, self._newest)
            return self._newest
        if old is not None and old.generation == self._log.generation:
            return old  # its age is told with the answer
        raise failure or LogUnavailable(path=self._folder, detail="every copy is being read")

    def _candidates(self, old: Copy | None) -> list[Path]:
        """Files that nobody of ours reads, those that exist before new ones: the least is left to copy."""
        paths = [self._folder / f"log-{number}.duckdb" for number in range(FILES_MAX)]
        free = [p for p in paths if not self._readers.get(p) and (old is None or p != old.path)]
        return sorted(free, key=lambda p: (not p.exists(), p.name))

    def _fill(self, path: Path) -> Head:
        try:
            return self._log.copy_into(path)
        except NotACopy:
            path.unlink()
            return self._log.copy_into(path)

    def _announce(self, copy: Copy) -> None:
        """Tell other programs which file is the newest; replaced whole, so that nobody reads half a name."""
        named = self._folder / "newest.json"
        temporary = named.with_suffix(f".{os.getpid()}.tmp")
        said = {"file": copy.path.name, "ordinal": copy.head.ordinal, "copied_at": copy.copied_at}
        temporary.write_text(json.dumps(said), encoding="utf-8")
        temporary.replace(named)
