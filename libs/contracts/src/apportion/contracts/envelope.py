"""One message as a stream recorded it: the envelope around a wish or a fact."""

from enum import StrEnum, unique

from msgspec import Struct

from apportion.contracts.causes import Refusal
from apportion.contracts.cloudevents import Ingress
from apportion.contracts.events import Event
from apportion.contracts.ids import Author, TenantId


@unique
class Stream(StrEnum):
    """Which of a pool's two streams."""

    WISHES = "wishes"
    FACTS = "facts"


class Basis(Struct, frozen=True, kw_only=True):
    """What a decision was made from: enough to make it again, bit for bit."""

    facts: int
    """Sequence of the last fact that had been folded; 0 for none."""
    wishes: int
    """Sequence of the last wish that had been folded; 0 for none, and for authors who read no wishes."""
    decided_at: int
    """The instant given to ``decide``; ns since the Unix epoch."""
    policy: str
    """Name, version and digest of the rules that decided: ``name@version#digest``."""


class Undecodable(Struct, frozen=True, kw_only=True):
    """Bytes that are no valid event, described: what was expected, what was found, and where."""

    code: Refusal
    type: str
    """The type that the message claimed to be; empty where it claimed none."""
    field: str = ""
    expected: str = ""
    found: str = ""
    size: int
    """Bytes of the body."""
    job_id: str | None = None
    """The name of the job, where one could still be read."""


class Entry(Struct, frozen=True, kw_only=True, gc=False):
    """What a core folds: one message, its place in the stream, and who said it."""

    stream: Stream
    seq: int
    recorded_at: int
    """When the stream stored it; ns since the Unix epoch. Information: order is ``seq``."""
    event: Event | Undecodable
    event_id: str
    tenant: TenantId | None = None
    """Whose wish; from the subject. None for facts."""
    author: Author | None = None
    """Whose fact; from the subject. None for wishes."""
    source: str = ""
    """The CloudEvents source of a wish; identity is (tenant, source, id)."""
    digest: str = ""
    """SHA-256 of a wish's body, in hex. Empty for facts."""
    expires_at: int = 0
    """After this instant a wish is refused rather than done; 0: never."""
    actor: str = ""
    """Who asked, as the publisher says it; information, never a permission."""
    subject_type: str = ""
    """The type that the subject of a wish names, such as ``JobRequested``."""
    basis: Basis | None = None
    """A fact's basis, where its author decides from the streams."""
    traceparent: str = ""
    """W3C trace context, where the message carried one; never part of a state."""
    ingress: Ingress = Ingress.BINARY
    """How a wish came: with its attributes in headers, as one JSON object, or without an envelope."""
