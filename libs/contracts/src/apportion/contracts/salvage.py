"""The entry of a message on which the codec itself failed.

``codec`` says what is wrong with what strangers send, and raises nothing for it. What it raises all the same is a fault
of its own, or comes from a message that only an administrator can write: such a message becomes an entry too, the same
one for everybody who reads it, so that the message behind it is read and a replay decides as the service did.
"""

import hashlib
from typing import Final

from apportion.contracts import codec, subjects
from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Entry, Stream, Undecodable
from apportion.contracts.ids import Author, TenantId

PART_MAX: Final = 128
"""Characters of a subject's part that are repeated."""


def decode(
    stream: Stream, subject: str, headers: codec.Headers | None, body: bytes, *, seq: int, recorded_at: int
) -> Entry:
    """What a stored message says. What is raised is no verdict on the message: see ``undecoded``."""
    decoder = codec.decode_wish if stream is Stream.WISHES else codec.decode_fact
    return decoder(subject, headers, body, seq=seq, recorded_at=recorded_at)


def undecoded(stream: Stream, subject: str, body: bytes, *, seq: int, recorded_at: int, error: Exception) -> Entry:
    """The entry of a message on which ``decode`` raised: kept in its place, and refused where it was a wish."""
    is_wish = stream is Stream.WISHES
    tenant, subject_type, author = "", "", ""
    try:
        if is_wish:
            tenant, subject_type = subjects.tenant_and_type_of_wish(subject)
        else:
            author = subjects.author_of_fact(subject)
    except subjects.SubjectInvalid:
        pass  # nobody's, then
    return Entry(
        stream=stream,
        seq=seq,
        recorded_at=recorded_at,
        event=Undecodable(
            code=Refusal.ENVELOPE_INVALID,
            type=_short(subject_type),
            field="subject or headers",
            expected=f"those of a {'wish' if is_wish else 'fact'}",
            found=type(error).__name__,
            size=len(body),
        ),
        event_id=f"{'wish' if is_wish else 'fact'}-{seq}",
        tenant=TenantId(_short(tenant)) if is_wish else None,
        author=None if is_wish else Author(author),
        digest=hashlib.sha256(body).hexdigest() if is_wish else "",
        subject_type=_short(subject_type),
    )


def _short(part: str) -> str:
    return part[:PART_MAX].encode("utf-8", "replace").decode()
