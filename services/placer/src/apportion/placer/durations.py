"""How long runs of this pool took lately, by tenant and kind of work: what an estimate of a wait may go by."""

from typing import Final

from msgspec import Struct

from apportion.contracts.causes import RunCause, WorkloadKind
from apportion.contracts.ids import TenantId

SAMPLES_MAX: Final = 32
"""Of each sort, the newest."""
SORTS_MAX: Final = 256
SAMPLES_MIN: Final = 3
"""With fewer nothing is said."""
OWN_END: Final = frozenset(
    {
        RunCause.SUCCESS,
        RunCause.USER_ERROR,
        RunCause.KILLED,
        RunCause.OUT_OF_MEMORY,
        RunCause.HOST_OUT_OF_MEMORY,
        RunCause.TIME_LIMIT,
    }
)
"""Ends that say how long the work takes; what was stopped for others' sake says nothing."""

_EVERYBODY: Final = TenantId("")


class Samples(Struct):
    """Of one sort of run."""

    seconds: list[int] = []
    """How long they took, the newest last."""
    last: int = 0
    """The count of all runs when the newest of these was noted."""


class Durations(Struct, kw_only=True):
    """What is remembered. Changed only by ``note``."""

    seen: dict[str, Samples] = {}
    count: int = 0
    """Runs that were noted."""


def note(durations: Durations, tenant: TenantId, kind: WorkloadKind, seconds: int) -> None:
    """Take note of a run that ended by itself, in place."""
    durations.count += 1
    for whose in (tenant, _EVERYBODY):
        samples = durations.seen.setdefault(_key(whose, kind), Samples())
        samples.seconds = [*samples.seconds[-(SAMPLES_MAX - 1) :], seconds]
        samples.last = durations.count
    while len(durations.seen) > SORTS_MAX:
        # Not by the order of the dict, which a snapshot doesn't keep.
        del durations.seen[min(durations.seen, key=lambda key: (durations.seen[key].last, key))]


def expected(durations: Durations, tenant: TenantId, kind: WorkloadKind) -> tuple[int, int] | None:
    """The quarter that ended soonest took at most so many seconds, and the longest so many; None where too few did.

    By the tenant's own runs of that kind, else by everybody's.
    """
    for whose in (tenant, _EVERYBODY):
        samples = durations.seen.get(_key(whose, kind))
        if samples is not None and len(samples.seconds) >= SAMPLES_MIN:
            seconds = sorted(samples.seconds)
            return seconds[len(seconds) // 4], seconds[-1]
    return None


def _key(tenant: TenantId, kind: WorkloadKind) -> str:
    return f"{tenant} {kind}"
