"""What brought down a fault domain, and whose doing it was: a judgement from what was seen; pure.

The clients of one MPS server share one fate. Whoever was near isn't to blame, and whoever is to blame isn't guessed: an
offender is named where the server's log names a process, or where one was killed just before the server went deaf.
Ends are noticed in any order, a neighbour's before that of the run which caused it; so kills count by when they were.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from apportion.contracts.ids import DeviceUuid, RunId

_STAMPED_LATE_NS: Final = 2_000_000_000
"""On a busy host a run's guardian puts down its end so much later than it was, at most."""
_CAUSED: Final = re.compile(r"(?i)fault.*\bclient\b\D{0,12}(\d+)")


class Kill(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A run that a signal ended which nobody here sent, with whatever it had in flight."""

    at: int
    """When it ended (ns since the Unix epoch), whenever that was noticed."""
    run_id: RunId


class DomainFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A device's MPS server serves nobody any more."""

    device_uuid: DeviceUuid
    evidence: str
    """What was seen, for people."""
    offender: RunId | None = None
    """None where nothing seen names one: then all runs there count as victims."""
    is_over: bool = False
    """It serves again, as it does once the clients that failed are gone: who lives may live on."""


class DomainSigns(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a domain at one moment."""

    device_uuid: DeviceUuid
    status: str
    """The server's word: ``ACTIVE``, ``FAULT``, nothing where it is gone or didn't answer."""
    canary: str
    """``ok``, or how a process that tried to initialise the driver fared; empty where none was tried."""
    log: str = ""
    """What the server's log has gained since the server came up."""
    run_of_pid: Mapping[int, RunId] = {}
    kills: tuple[Kill, ...] = ()
    """Since the server was last seen to work."""
    seen_at: int = 0
    """When this was seen, in ns since the Unix epoch: what was killed later has no part in it."""
    xid: int = 0
    """What the driver reported of the device a moment ago; 0 for nothing."""


def judge(signs: DomainSigns) -> DomainFailed | None:
    """Whether the domain has failed; None where it works."""
    pid = next((int(found[1]) for line in reversed(signs.log.splitlines()) if (found := _CAUSED.search(line))), None)
    works = signs.status == "ACTIVE" and signs.canary in {"", "ok"}
    if works and pid is None and not signs.xid:
        return None
    offender = None if pid is None else signs.run_of_pid.get(pid)
    seen = [f"server status {signs.status or 'none'}"]
    if signs.canary:
        seen.append(f"canary: {signs.canary}")
    if signs.xid:
        seen.append(f"Xid {signs.xid}")
    if pid is not None:
        seen.append(f"server log: fault by client {pid}")
    kills = [one for one in signs.kills if one.at <= signs.seen_at + _STAMPED_LATE_NS]
    if offender is None and signs.status == "ACTIVE" and not works and kills:
        # Killed with work in flight: the server lives, and is wedged. The first: those after it may be its victims, as
        # a process that meets an error of its device may well abort.
        offender = min(kills).run_id
        seen.append("killed with work in flight")
    whose = f"; caused by {offender}" if offender is not None else "; nobody was seen to cause it"
    return DomainFailed(
        device_uuid=signs.device_uuid,
        evidence=f"fault domain of {signs.device_uuid}: {', '.join(seen)}{whose}",
        offender=offender,
        is_over=works,
    )
