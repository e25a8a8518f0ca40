"""Refusals as data: what was wrong, where, and in plain words what to do next.

Builds no event; `core` puts a refusal into the fact that fits the wish.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Undecodable

TEXT_MAX: Final = 256
"""Longest piece of a stranger's text that a refusal repeats."""


class Refused(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a wish can't be done."""

    code: Refusal
    field: str = ""
    """Path in the request; empty where it is no field's fault."""
    expected: str = ""
    found: str = ""
    hint: str = ""
    """What to do next; empty where the code alone says it."""

    def message(self) -> str:
        """One or two sentences for the person who asked."""
        where = f"{self.field}: " if self.field else ""
        facts = ", ".join(
            part
            for part in (
                f"expected {self.expected}" if self.expected else "",
                f"found {self.found}" if self.found else "",
            )
            if part
        )
        said = f"{where}{facts}. " if facts else where
        return f"{said}{self.hint or _NEXT_STEP.get(self.code, 'Change the request and send it as a new event.')}"


_NEXT_STEP: Final[Mapping[Refusal, str]] = {
    Refusal.NOT_JSON: "Send the request as one JSON object in UTF-8.",
    Refusal.NOT_UTF8: "Send the request as one JSON object in UTF-8.",
    Refusal.TOO_LARGE: "Keep the request below the limit: put data where the job can read it, and pass its address.",
    Refusal.TOO_DEEP: "Send the request with fewer levels of nesting.",
    Refusal.TYPE_UNKNOWN: "Publish to a subject that ends in a wish's type, with that type in the event.",
    Refusal.TYPE_MISMATCH: "Let the subject's last token and the event's type name the same wish.",
    Refusal.ENVELOPE_INVALID: "Correct the CloudEvents attribute; version 1.0 is spoken here.",
    Refusal.FIELD_UNKNOWN: "Correct the field's name or leave it out: unknown fields are refused, never ignored.",
    Refusal.FIELD_MISSING: "Add the field and send the request as a new event.",
    Refusal.FIELD_INVALID: "Correct the field and send the request as a new event.",
    Refusal.FIELD_CONFLICT: "Keep one of the fields and send the request as a new event.",
    Refusal.NOT_SUPPORTED: "This version can't honour the field yet: leave it out.",
    Refusal.EXPIRED: "It was not looked at in time; send it again with a later expiry if it is still wanted.",
    Refusal.JOB_STATE: "Look at the job, with `apportion show`, and ask again if it is still wanted.",
    Refusal.IDEMPOTENCY_CONFLICT: "Send a changed request under a new event id and a new idempotency key.",
}


def bounded(text: str) -> str:
    """The text, cut where it is longer than a refusal should repeat."""
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def refusal_of(undecodable: Undecodable) -> Refused:
    """Why bytes that are no valid wish are refused."""
    return Refused(
        code=undecodable.code,
        field=bounded(undecodable.field),
        expected=bounded(undecodable.expected),
        found=bounded(undecodable.found),
    )
