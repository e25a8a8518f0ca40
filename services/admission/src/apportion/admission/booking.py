"""May nodes be reserved so? What a reservation has to be, beside well-formed; which nodes it gets is the placer's."""

from collections.abc import Mapping
from typing import Final

from apportion.admission.refusals import Refused, bounded
from apportion.admission.state import Asked
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.codec import instant_from_timestamp
from apportion.contracts.ids import TenantId
from apportion.pool.state import ReservationView

RESERVATIONS_MAX: Final = 64
"""Reservations at once: each is looked at for every node that a job might go to."""


def answer(
    known: Mapping[str, ReservationView],
    wish: ev.ReservationRequested | ev.ReservationCancelRequested,
    asked: Asked,
    actor: str,
    now: int,
) -> ev.Fact | Refused:
    """The fact that answers an operator's wish, or why it is refused."""
    name = wish.reservation
    if isinstance(wish, ev.ReservationCancelRequested):
        if name not in known:
            return Refused(
                code=Refusal.RESERVATION_NOT_FOUND,
                field="reservation",
                expected="a reservation that has not ended",
                found=name,
                hint="`apportion reservations ls` lists them.",
            )
        return ev.ReservationCancelled(
            reservation=name, answers=asked.seq, actor=actor, reason=wish.reason, caused_by=asked.event_id
        )
    if name in known:
        return Refused(
            code=Refusal.FIELD_INVALID,
            field="reservation",
            expected="a name that no other reservation has",
            found=name,
            hint="Cancel that one first, or choose another name.",
        )
    if len(known) >= RESERVATIONS_MAX:
        return Refused(
            code=Refusal.FIELD_INVALID,
            field="reservation",
            expected=f"at most {RESERVATIONS_MAX} reservations at once",
            found=str(len(known) + 1),
        )
    instants = {}
    for field, text in (("start", wish.start), ("end", wish.end)):
        try:
            instants[field] = instant_from_timestamp(text)
        except (ValueError, OverflowError):
            return Refused(
                code=Refusal.FIELD_INVALID,
                field=field,
                expected="an instant in RFC 3339, such as 2026-09-01T12:00:00Z",
                found=bounded(text),
            )
    if instants["end"] <= max(instants["start"], now):
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="end",
            expected="an instant after the start that is still to come",
            found=wish.end,
            hint="Name a later end.",
        )
    if wish.models and not wish.gpu:
        return Refused(
            code=Refusal.FIELD_MISSING, field="gpu", expected="how many devices of these models", found="nothing"
        )
    return ev.ReservationAdmitted(
        reservation=name,
        for_tenant=TenantId(wish.for_tenant),
        start_at=instants["start"],
        end_at=instants["end"],
        nodes=wish.nodes,
        devices=wish.gpu,
        models=wish.models,
        required=wish.required,
        answers=asked.seq,
        actor=actor,
        reason=wish.reason,
        caused_by=asked.event_id,
    )
