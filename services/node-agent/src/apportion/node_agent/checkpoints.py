"""How a run is told to keep what it has done, and how it says that it has.

It gets its job's signal, once it handles it, and answers by a file in its private directory: one JSON object with any
of ``step``, ``uri`` and ``bytes``, best moved into its place whole. What it says is told, and nothing rests on it.
"""

import os
import signal
import stat
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from apportion.contracts.events import CheckpointPlan
from apportion.contracts.fields import Uri

SIGNAL_VARIABLE: Final = "APPORTION_CHECKPOINT_SIGNAL"
FILE_VARIABLE: Final = "APPORTION_CHECKPOINT_FILE"
URI_VARIABLE: Final = "APPORTION_CHECKPOINT_URI"
FILE: Final = "checkpoint.json"
_BYTES_MAX: Final = 4096
_COUNT_MAX: Final = 2**53

Amount = Annotated[int, Meta(ge=0, le=_COUNT_MAX)]


class Report(Struct, frozen=True, kw_only=True):
    """What a run says of its checkpoint."""

    step: Amount | None = None
    uri: Uri | None = None
    bytes: Amount | None = None


_REPORTS: Final = msgspec.json.Decoder(Report)


class Stamp(Struct, frozen=True):
    """Which report lies there: another one has another stamp."""

    inode: int = 0
    at_ns: int = 0
    size: int = 0


def variables(plan: CheckpointPlan | None, work: Path) -> dict[str, str]:
    """What a run is told; nothing where its job says nothing of checkpoints."""
    if plan is None:
        return {}
    return {SIGNAL_VARIABLE: plan.signal, FILE_VARIABLE: str(work / FILE), URI_VARIABLE: plan.uri}


def number_of(plan: CheckpointPlan) -> int:
    """The plan's signal as the kernel counts them."""
    return int(signal.Signals[plan.signal])


def look(work: Path) -> tuple[Stamp, Report | None]:
    """The report that lies there, and its stamp; None where there is none that can be read (yet)."""
    try:
        # What a run puts there may be anything: a link to elsewhere, a pipe that nobody writes to.
        fd = os.open(work / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return Stamp(), None
    try:
        found = os.fstat(fd)
        stamp = Stamp(found.st_ino, found.st_mtime_ns, found.st_size)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _BYTES_MAX:
            return stamp, None
        return stamp, _REPORTS.decode(os.read(fd, _BYTES_MAX))
    except (OSError, msgspec.MsgspecError):
        return Stamp(), None
    finally:
        os.close(fd)
