"""What changed about who is let in, said on the bus: what the log then has of it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apportion.runtime.keys import KeyRing
    from apportion.runtime.stream import Bus


async def say_changes(bus: "Bus", ring: "KeyRing") -> int:
    """Say what the log hasn't got yet, each once; how much that was. Raises BusError."""
    changes = ring.unsaid()
    for change in changes:
        await bus.publish_wish(change.message(bus.pool))
        ring.said({change.id})
    return len(changes)
