"""Another author on a real bus, for tests and benchmarks of one service alone."""

from apportion.contracts import events as ev
from apportion.contracts.codec import Message, encode_fact
from apportion.contracts.ids import Author
from apportion.runtime.stream import Bus, Lease


class Speaker:
    """Claims its lease with its first facts; their ids are counted."""

    def __init__(self, bus: Bus, author: Author) -> None:
        self._bus = bus
        self._author = author
        self._lease: Lease | None = None
        self._count = 0

    async def state(self, *facts: ev.Fact) -> None:
        """Publish the facts as one batch."""
        if self._lease is None:
            claim = ev.LeaseClaimed(author=self._author, session="test", core="test@1#0")
            self._lease = await self._bus.claim(self._author, self._message(claim))
        await self._bus.publish_fenced(self._lease, [self._message(fact) for fact in facts])

    def _message(self, fact: ev.Fact) -> Message:
        self._count += 1
        return encode_fact(self._bus.pool, self._author, fact, event_id=f"{self._author}.{self._count}")
