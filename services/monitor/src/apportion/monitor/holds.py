"""What of the log nobody may erase or drop: legal holds, folded from facts. Pure."""

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.envelope import Undecodable


class Holds(Struct, kw_only=True):
    """The holds in force."""

    active: dict[str, ev.LegalHoldPlaced] = {}


def copy(holds: Holds) -> Holds:
    """Holds that can be changed by themselves."""
    return Holds(active=dict(holds.active))


def evolve(holds: Holds, event: ev.Event | Undecodable) -> None:
    """Fold a fact, in place."""
    if isinstance(event, ev.LegalHoldPlaced):
        holds.active[event.hold_id] = event
    elif isinstance(event, ev.LegalHoldReleased):
        holds.active.pop(event.hold_id, None)


def keeping(holds: Holds, *, tenant: str | None, job_id: str | None, recorded_at: int) -> list[str]:
    """Ids of the holds that keep a row of the log, in order."""
    return sorted(
        hold_id
        for hold_id, hold in holds.active.items()
        if hold.tenant in {None, tenant}
        and hold.job_id in {None, job_id}
        and hold.since_at <= recorded_at
        and (not hold.until_at or recorded_at < hold.until_at)
    )
