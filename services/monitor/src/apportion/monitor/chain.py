"""The hash chain over the event log: what links a row to everything before it.

::

    hash(n) = SHA-256( hash(n-1) ‖ stream ‖ stream_seq ‖ SHA-256(envelope) ‖ SHA-256(payload) )

The payload goes in by its hash, so that a payload can be erased one day and the chain still verifies. The chain shows
edits, deletions and reorderings; that a tail was cut or everything rewritten shows only against a head kept elsewhere.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import msgspec

from apportion.contracts.envelope import Stream

GENESIS: Final = bytes(32)
"""What the first row links to."""

_ENCODER: Final = msgspec.json.Encoder()


def payload_hash(payload: bytes) -> bytes:
    """SHA-256 of a message's body."""
    return sha256(payload).digest()


def envelope_hash(columns: Sequence[str | int | None]) -> bytes:
    """SHA-256 of everything else that a row holds, in the order of ``projections.ENVELOPE_COLUMNS``.

    The columns themselves are hashed, not what they were derived from: an edit of any of them shows, and a later
    version that derives more leaves the rows of earlier ones valid.
    """
    return sha256(_ENCODER.encode(columns)).digest()


def link(previous: bytes, stream: Stream, seq: int, envelope: bytes, payload: bytes) -> bytes:
    """The hash of the row that follows ``previous``; ``envelope`` and ``payload`` are hashes.

    >>> link(GENESIS, Stream.FACTS, 1, bytes(32), bytes(32)).hex()[:16]
    '5cb5e6cb13a9bc0d'
    """
    # Everything but the stream's name has a fixed length, so that no two rows make the same bytes.
    return sha256(b"".join((previous, stream.encode(), seq.to_bytes(8, "big"), envelope, payload))).digest()
