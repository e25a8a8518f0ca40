"""When the log's head is signed, where that is written, and who outside is told.

A checkpoint goes into the log's file, into a file beside it, and to the anchor command where there is one: a program
of the operator's that puts it where the log's own administrator can't change it. It reads one JSON object.
"""

import asyncio
import contextlib
import os
import shlex
import time
from pathlib import Path
from typing import Final

import msgspec
import structlog

from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PoolId
from apportion.monitor.log import EventLog
from apportion.monitor.signing import Checkpoint, Signer

ROWS: Final = 1_000
SECONDS: Final = 10.0
ANCHOR_S_MAX: Final = 30.0
LAST_ANCHOR_S_MAX: Final = 3.0
"""What the anchor may take once the monitor was told to stop."""

log = structlog.get_logger(__name__)


def side_file(log_path: Path) -> Path:
    """Where a log's checkpoints are written a second time, one JSON object a line."""
    return log_path.with_suffix(".checkpoints")


class Checkpoints:
    """Signs one log's head, every ROWS rows or SECONDS. Use it from one event loop, between two appends."""

    def __init__(
        self, event_log: EventLog, signer: Signer, *, pool: PoolId, anchor_command: str = "", anchor_s: float = 60.0
    ) -> None:
        self._log = event_log
        self._signer = signer
        self._pool = pool
        self._argv = shlex.split(anchor_command)
        self._anchor_s = anchor_s
        self._signed = event_log.signed_ordinal
        self._due_at: float | None = None
        """By time.monotonic, while there is something that no checkpoint covers."""
        self._newest: Checkpoint | None = None
        self._anchoring: asyncio.Task[None] | None = None
        self._anchor_at = 0.0
        self.anchor_failures = 0

    def due_in_s(self) -> float | None:
        """How long until a checkpoint has to be written; None where all is signed."""
        unsigned = self._log.head.ordinal - self._signed
        if not unsigned:
            self._due_at = None
            return None
        if self._due_at is None:
            self._due_at = time.monotonic() + SECONDS
        return 0.0 if unsigned >= ROWS else max(0.0, self._due_at - time.monotonic())

    async def write_if_due(self) -> None:
        """Sign the head if it is time. Raises LogWriteFailed."""
        if self.due_in_s() == 0.0:
            await self._write()

    async def finish(self) -> None:
        """Sign what is left, and tell the anchor a last time."""
        if self.due_in_s() is not None:
            await self._write()
        if self._anchoring is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._anchoring), LAST_ANCHOR_S_MAX)
            self._anchoring.cancel()
        if self._argv and self._newest is not None:
            await self._anchor(LAST_ANCHOR_S_MAX)

    async def _write(self) -> None:
        head, positions = self._log.head, self._log.positions
        checkpoint = self._signer.sign(
            Checkpoint(
                pool=self._pool,
                ordinal=head.ordinal,
                hash=head.hash.hex(),
                wishes_seq=positions[Stream.WISHES].last_seq,
                facts_seq=positions[Stream.FACTS].last_seq,
                signed_at=time.time_ns(),
                public_key="",
            )
        )
        await asyncio.to_thread(self._store, checkpoint)
        self._signed, self._due_at = checkpoint.ordinal, None
        self._newest = checkpoint
        self._anchor_soon()

    def _store(self, checkpoint: Checkpoint) -> None:
        text = msgspec.json.encode(checkpoint)
        self._log.add_checkpoint(checkpoint.ordinal, text.decode())
        with side_file(self._log.path).open("ab") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _anchor_soon(self) -> None:
        if not self._argv or (self._anchoring is not None and not self._anchoring.done()):
            return
        if time.monotonic() >= self._anchor_at:
            self._anchor_at = time.monotonic() + self._anchor_s
            self._anchoring = asyncio.create_task(self._anchor(ANCHOR_S_MAX), name="anchor")

    async def _anchor(self, seconds: float) -> None:
        """Hand the newest checkpoint to the command. What goes wrong is logged; the next one says more anyway."""
        checkpoint, self._newest = self._newest, None
        if checkpoint is None:
            return
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as err:
            self._failed(checkpoint, str(err))
            return
        try:
            _, words = await asyncio.wait_for(process.communicate(msgspec.json.encode(checkpoint) + b"\n"), seconds)
        except TimeoutError:
            self._failed(checkpoint, f"it took longer than {seconds:g} s and was killed")
            return
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            self._failed(checkpoint, f"exit {process.returncode}: {words.decode(errors='replace').strip()[-300:]}")
        else:
            log.info("anchored", ordinal=checkpoint.ordinal)

    def _failed(self, checkpoint: Checkpoint, why: str) -> None:
        self.anchor_failures += 1
        self._newest = self._newest or checkpoint
        log.error("not_anchored", ordinal=checkpoint.ordinal, command=self._argv[0], error=why)
