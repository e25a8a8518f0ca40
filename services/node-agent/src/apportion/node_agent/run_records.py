"""What the files of a run directory say, and what may be concluded from them; pure.

The reading of files and of /proc is left to processes.py; here is the judgement alone: is the run still to be
started, running, ended, or lost?
"""

from enum import StrEnum
from functools import lru_cache
from urllib.parse import quote, unquote

import msgspec

from apportion.contracts.ids import RunId

_NAME_BYTES_MAX = 240
"""Within the 255 bytes of a file name, with room for the prefix of a directory that is being made or removed."""


class Gate(StrEnum):
    """Whether the shim starts the workload at once, or waits until its slice was read back."""

    OPEN = "open"
    HELD = "held"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A control group that holds the run to its limits on the host."""

    path: str
    back: str
    """The group to which its shim goes back, once the workload was started."""


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run's control groups: its shim joins them for the start, and removes them at the end."""

    joins: tuple[Group, ...]
    oom_file: str = ""
    """Says ``oom_kill N``: how many processes the kernel killed for want of memory; empty where nobody counts."""


class RunAs(msgspec.Struct, frozen=True, kw_only=True):
    """Another user than the agent's, as whom a run is started; it has no other groups."""

    uid: int
    gid: int


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's order, written before anything is started (``intent.json``)."""

    run_id: RunId
    epoch: int
    argv: tuple[str, ...]
    env: dict[str, str]
    gate: Gate
    log_bytes_max: int
    open_files_max: int | None
    boot_id: str
    groups: Groups | None = None
    user: RunAs | None = None
    owner: RunAs | None = None
    """Whose its private directory is, where that is neither the agent's user nor ``user``."""
    token: str
    """Random, and in the workload's environment: marks the processes of this start of this run and no others."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The shim that may start the run (``claim``); pid 0 where the agent took the claim to withdraw the order."""

    pid: int
    start_ticks: int
    boot_id: str
    token: str


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The workload's first process (``started``)."""

    pid: int
    start_ticks: int
    started_at_ns: int


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The shim's last word (``exit``): ``outcome`` is ``exited``, ``exec_failed`` or ``abandoned``."""

    outcome: str
    finished_at_ns: int
    exit_code: int | None = None
    signal: int | None = None
    started_at_ns: int | None = None
    max_rss_kib: int = 0
    cpu_us: int = 0
    shim_cpu_us: int = 0
    oom_kills: int = 0
    errno: int = 0
    is_confined: bool = True


class ProcessSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What /proc shows under a pid; a zombie counts as nothing."""

    start_ticks: int


class Unreadable(msgspec.Struct, frozen=True):
    """A file that is there, but is not what its name says."""


class Absent(msgspec.Struct, frozen=True):
    """No directory: nobody ever ordered the run here, or it was removed."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Ordered in this boot and claimed by nobody: a shim that is on its way may still start it."""

    intent: Intent


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """Its shim lives and has not started the workload yet."""

    intent: Intent
    claim: Claim


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """Its shim lives and has started the workload."""

    intent: Intent
    claim: Claim
    started: Started


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """The workload ran and ended: by exit code, or by signal; nothing of it is left."""

    exit_code: int | None
    signal: int | None
    started_at_ns: int
    finished_at_ns: int
    max_rss_kib: int
    cpu_us: int
    shim_cpu_us: int = 0
    """What the run cost beside itself: its shim's own CPU time."""
    oom_kills: int = 0
    """Processes of it that the kernel killed at the run's limit of host memory."""


class ExecFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The workload could not be started, for this ``errno``, and never will be."""

    errno: int
    finished_at_ns: int
    is_confined: bool = True
    """False where its control groups could not be joined: then the program was not even tried."""


class NeverStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The order was withdrawn before its gate opened: the run may be ordered again."""

    epoch: int


class LossReason(StrEnum):
    """Why nobody can say how a run ended."""

    REBOOTED = "rebooted"
    SHIM_GONE = "shim_gone"
    SHIM_UNRESPONSIVE = "shim_unresponsive"
    RECORD_UNREADABLE = "record_unreadable"


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """The run may have been started, does not run any more, and left no word of its end."""

    reason: LossReason


Observed = Absent | Prepared | Claimed | Running | Exited | ExecFailed | NeverStarted | Lost
Ended = Exited | ExecFailed | NeverStarted | Lost


def interpret(
    *,
    intent: Intent | Unreadable | None,
    claim: Claim | Unreadable | None,
    shim: ProcessSeen | None,
    started: Started | Unreadable | None,
    exit_record: ExitRecord | Unreadable | None,
    boot_id: str,
) -> Observed:
    """The run's state by its directory; ``shim`` must have been looked up before ``exit_record`` was read.

    A pid proves nothing by itself: the shim is the process only if boot and start time agree as well.
    """
    if intent is None:
        return Absent()
    if isinstance(exit_record, ExitRecord):
        return end_of_record(exit_record, intent)
    if isinstance(intent, Unreadable) or isinstance(claim, Unreadable) or isinstance(exit_record, Unreadable):
        return Lost(reason=LossReason.RECORD_UNREADABLE)
    if intent.boot_id != boot_id:
        # Even without a claim: after a power failure what was not synced is missing, the claim perhaps among it.
        return Lost(reason=LossReason.REBOOTED)
    if claim is None:
        return Prepared(intent=intent)
    if claim.pid == 0:
        return NeverStarted(epoch=intent.epoch)
    if claim.boot_id != boot_id or claim.token != intent.token:
        return Lost(reason=LossReason.RECORD_UNREADABLE)
    if shim is None or shim.start_ticks != claim.start_ticks:
        return Lost(reason=LossReason.SHIM_GONE)
    if isinstance(started, Started):
        return Running(intent=intent, claim=claim, started=started)
    return Claimed(intent=intent, claim=claim)


def end_of_record(record: ExitRecord, intent: Intent | Unreadable) -> Ended:
    """The end that the shim wrote down."""
    match record.outcome:
        case "exited" if record.started_at_ns is not None:
            return Exited(
                exit_code=record.exit_code,
                signal=record.signal,
                started_at_ns=record.started_at_ns,
                finished_at_ns=record.finished_at_ns,
                max_rss_kib=record.max_rss_kib,
                cpu_us=record.cpu_us,
                shim_cpu_us=record.shim_cpu_us,
                oom_kills=record.oom_kills,
            )
        case "exec_failed":
            return ExecFailed(errno=record.errno, finished_at_ns=record.finished_at_ns, is_confined=record.is_confined)
        case "abandoned" if isinstance(intent, Intent):
            return NeverStarted(epoch=intent.epoch)
        case _:
            return Lost(reason=LossReason.RECORD_UNREADABLE)


@lru_cache(maxsize=4096)
def directory_name(run: RunId) -> str:
    """A file name for the run that nothing else shares; ``run_of_directory`` reverses it.

    >>> directory_name(RunId("acme/train-7/0/1"))
    'acme%2Ftrain-7%2F0%2F1'
    """
    name = quote(run, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]  # Names with a dot in front are for directories that are made or removed.
    if not name or len(name) > _NAME_BYTES_MAX:
        raise ValueError(f"run id of {len(run)} characters cannot name a directory")
    return name


def run_of_directory(name: str) -> RunId | None:
    """The run that a directory of this name belongs to; None for a name that we would not give.

    >>> run_of_directory("acme%2Ftrain-7%2F0%2F1")
    'acme/train-7/0/1'
    >>> run_of_directory(".making-1") is None
    True
    """
    if not name or name.startswith("."):
        return None
    run = RunId(unquote(name))
    return run if quote(run, safe="").replace(".", "%2E", 1 if run.startswith(".") else 0) == name else None
