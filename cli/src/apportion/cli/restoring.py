"""A pool from its log alone: the log put in its place, and a bus filled with every message that the log holds.

The new bus has the same messages at the same sequences, so every service folds what it had folded, and the log goes on
where it stood. What was on its way when the log was last written is not in it, and has to be asked again.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from apportion.cli.app import run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.places import log_file
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PoolId
from apportion.monitor import attest, segments
from apportion.monitor.log import Stored, messages_of, write_ahead
from apportion.monitor.manifest import sealed_folder
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

BATCH: Final = 500
BATCH_BYTES: Final = 4 * 1024 * 1024


def restore(source: Path, data_dir: Path, pool: str) -> dict[str, Any]:
    """Make the pool's log and its bus in ``data_dir``, which has neither, of a log file or an exported folder.

    Raises CommandFailed, SegmentsUnusable, LogUnavailable.
    """
    path = log_file(data_dir, pool)
    for made in (path, data_dir / "bus" / "jetstream"):
        if made.exists():
            raise CommandFailed(
                f"expected a data directory without a pool, found {made}",
                code=Exit.USAGE,
                hint="Name a new one: --data-dir DIR.",
            )
    rows = put_in_place(source, path)
    return {"log": str(path), "rows": rows, "streams": run(_fill_bus(path, data_dir, pool))}


def put_in_place(source: Path, path: Path) -> int:
    """Make the log at ``path`` of a log file, a copy of one, or an exported folder; its rows, which are good.

    Raises CommandFailed, SegmentsUnusable, LogUnavailable.
    """
    if source.is_dir():
        return segments.import_(source, path).rows
    verdict = attest.verify(source)
    if verdict.first_bad is not None:
        bad = verdict.first_bad
        raise CommandFailed(
            f"{source} is not what was written: {bad.stream} {bad.stream_seq} (row {bad.ordinal}): {bad.what}",
            code=Exit.INTEGRITY,
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if sealed_folder(source).exists():
        shutil.copytree(sealed_folder(source), sealed_folder(path))
    shutil.copyfile(source, path)
    if write_ahead(source).exists():  # of a writer that was killed: its newest rows are there
        shutil.copyfile(write_ahead(source), write_ahead(path))
    return verdict.rows


async def _fill_bus(path: Path, data_dir: Path, pool: str) -> dict[str, int]:
    """Messages stored, by stream. The server is ours alone: nobody is told where it is, and it ends with this."""
    stored: dict[str, int] = {}
    async with EmbeddedServer(data_dir, port=0) as server:
        bus = await Bus.connect(server.url, pool=PoolId(pool), name="apportion-restore")
        try:
            await bus.provision()
            for stream in Stream:
                last = 0
                for batch in _batches(messages_of(path, stream)):
                    assert batch[0].seq == last + 1, "a verified log has no gap"
                    last = await bus.refill([_as_published(message) for message in batch], after=last)
                position = await bus.position(stream)
                assert position.last_seq == last, f"{stream}: {position.last_seq} on the bus, {last} in the log"
                stored[stream.value] = last
        finally:
            await bus.close()
    return stored


def _batches(messages: Iterator[Stored]) -> Iterator[list[Stored]]:
    batch: list[Stored] = []
    size = 0
    for message in messages:
        if batch and (len(batch) >= BATCH or size + len(message.body) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += len(message.body)
    if batch:
        yield batch


def _as_published(message: Stored) -> Message:
    """The message without what it told the server at the time: expectations, batches and ids for repeats."""
    headers = {name: value for name, value in (message.headers or {}).items() if not name.startswith("Nats-")}
    return Message(subject=message.subject, headers=headers, body=message.body)
