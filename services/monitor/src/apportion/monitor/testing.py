"""Messages as the bus would hand them over, for tests of the log and of what reads it."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Basis, Stream
from apportion.contracts.ids import Author, PoolId, agent_author
from apportion.contracts.testing import NOON

POOL = PoolId("main")


class Recorded(Struct, frozen=True, kw_only=True):
    """One message as a stream holds it."""

    stream: Stream
    seq: int
    recorded_at: int
    subject: str
    headers: Mapping[str, str] | None
    body: bytes


class Tape:
    """Numbers messages the way the two streams would, one millisecond apart."""

    def __init__(self) -> None:
        self.at = NOON
        self.last = dict.fromkeys(Stream, 0)

    def record(
        self, stream: Stream, subject: str, headers: Mapping[str, str] | None, body: bytes, *, seq: int = 0
    ) -> Recorded:
        """Any message whatever."""
        self.last[stream] = seq or self.last[stream] + 1
        self.at += 1_000_000
        return Recorded(
            stream=stream, seq=self.last[stream], recorded_at=self.at, subject=subject, headers=headers, body=body
        )

    def fact(self, event: ev.Fact, *, author: str = "", basis: Basis | None = None) -> Recorded:
        """A fact, by the author who may state it."""
        said_by = Author(author) if author else getattr(type(event), "AUTHOR", Author("admission"))
        if said_by == ev.AGENT:
            said_by = agent_author(event.node_id)  # type: ignore[attr-defined]  # every agent's fact names its node
        event_id = f"{said_by}-{self.last[Stream.FACTS] + 1}"
        message = codec.encode_fact(POOL, said_by, event, event_id=event_id, basis=basis)
        return self.record(Stream.FACTS, message.subject, message.headers, message.body)

    def wish(self, event: ev.Wish, *, tenant: str = "acme") -> Recorded:
        """A wish in binary mode."""
        event_id = f"wish-{self.last[Stream.WISHES] + 1}"
        message = codec.encode_wish(POOL, event, tenant=tenant, event_id=event_id, source="/test")
        return self.record(Stream.WISHES, message.subject, message.headers, message.body)


def replaced(message: Recorded, **changes: Any) -> Recorded:
    """The message with other content."""
    return msgspec.structs.replace(message, **changes)
