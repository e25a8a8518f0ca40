"""How long the log keeps what, as operators said in facts, and what is due by it: the monitor orders it itself. Pure.

Days are sealed, and what jobs said is forgotten, by orders that are facts like an operator's: whoever reads the log
finds who wanted it and why. Carrying them out is ``keeping``'s business, and a legal hold wins there.
"""

from typing import Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry

NS_PER_DAY: Final = 86_400 * 1_000_000_000


class Retention(Struct, kw_only=True):
    """What was said last, and what was ordered."""

    payload_days: int = 0
    seal_daily: bool = False
    actor: str = ""
    reason: str = ""
    set_by: str = ""
    """The event that said so."""
    sealed_before: int = 0
    """Days before this instant were ordered to be sealed."""
    erased_before: int = 0
    """What had ended by this instant was ordered to be forgotten."""
    last_at: int = 0
    """When the newest fact was recorded."""


def evolve(retention: Retention, entry: Entry) -> None:
    """Fold a fact, in place."""
    retention.last_at = max(retention.last_at, entry.recorded_at)
    event = entry.event
    match event:
        case ev.LogRetentionChanged():
            retention.payload_days, retention.seal_daily = event.payload_days, event.seal_daily
            retention.actor, retention.reason, retention.set_by = event.actor, event.reason, entry.event_id
        case ev.LogSealOrdered():
            retention.sealed_before = max(retention.sealed_before, event.before_at)
        case ev.PayloadsEraseOrdered():
            retention.erased_before = max(retention.erased_before, event.before_at)
        case _:
            pass


def due(retention: Retention, now: int) -> list[ev.Fact]:
    """What has to be ordered: nothing between two midnights."""
    facts: list[ev.Fact] = []
    # A clock that jumped ahead must not forget anything: the bus has to have said something that late as well.
    midnight = min(now, retention.last_at) // NS_PER_DAY * NS_PER_DAY
    if retention.seal_daily and retention.sealed_before < midnight:
        facts.append(
            ev.LogSealOrdered(
                before_at=midnight,
                actor=retention.actor,
                reason=f"retention: {retention.reason}",
                answers=0,
                caused_by=retention.set_by,
            )
        )
    before_at = midnight - retention.payload_days * NS_PER_DAY
    if retention.payload_days and retention.erased_before < before_at:
        facts.append(
            ev.PayloadsEraseOrdered(
                before_at=before_at,
                actor=retention.actor,
                reason=f"retention: {retention.reason}",
                caused_by=retention.set_by,
            )
        )
    return facts


def wake_at(retention: Retention, now: int) -> int | None:
    """The next midnight, where something may be due then; None where nothing is."""
    if not (retention.seal_daily or retention.payload_days):
        return None
    return (now // NS_PER_DAY + 1) * NS_PER_DAY
