"""Reservations: by operators alone, with a name of their own, and for a time that is still to come."""

from typing import Any

import pytest

from apportion.admission.testing import History
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.codec import instant_from_timestamp
from apportion.contracts.ids import OPERATOR, TenantId
from apportion.contracts.testing import ACME, NOON

GOOD: dict[str, Any] = {
    "reservation": "demo",
    "for_tenant": "acme",
    "start": "2030-01-01T00:00:00Z",
    "end": "2030-01-01T01:00:00Z",
    "reason": "a demo",
}


def answers(*wishes: ev.Wish, tenant: TenantId = OPERATOR) -> list[ev.Fact]:
    history = History()
    for wish in wishes:
        history.wish(wish, tenant=tenant)
    return history.settle(NOON)


def test_what_is_asked_is_stated_with_its_instants() -> None:
    """And a name is free again once it is cancelled."""
    cancel = ev.ReservationCancelRequested(reservation="demo", reason="no more")
    wish = ev.ReservationRequested(**GOOD, nodes=2, gpu=8, models=("h100-80",), required={"rack": "a"})
    first, gone, again = answers(wish, cancel, wish)
    assert isinstance(first, ev.ReservationAdmitted)
    assert (first.reservation, first.for_tenant, first.nodes, first.devices) == ("demo", "acme", 2, 8)
    assert first.start_at == instant_from_timestamp(GOOD["start"])
    assert (first.models, first.required, first.reason) == (("h100-80",), {"rack": "a"}, "a demo")
    assert isinstance(gone, ev.ReservationCancelled)
    assert isinstance(again, ev.ReservationAdmitted)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"end": "2030-01-01T00:00:00Z"}, Refusal.FIELD_CONFLICT, "end"),
        ({"start": "2001-01-01T00:00:00Z", "end": "2001-01-02T00:00:00Z"}, Refusal.FIELD_CONFLICT, "end"),
        ({"start": "2030-99-01T00:00:00Z"}, Refusal.FIELD_INVALID, "start"),
        ({"models": ("h100-80",)}, Refusal.FIELD_MISSING, "gpu"),
    ],
)
def test_what_can_not_be_reserved_is_refused(changes: dict[str, Any], code: Refusal, field: str) -> None:
    """By the field that is wrong."""
    [refused] = answers(ev.ReservationRequested(**GOOD | changes))
    assert isinstance(refused, ev.WishRejected)
    assert (refused.code, refused.field) == (code, field)


def test_names_are_used_once_and_by_operators_alone() -> None:
    """A second of the name, one that there is not, and a tenant's."""
    wish = ev.ReservationRequested(**GOOD)
    _, second = answers(wish, wish)
    [nobody] = answers(ev.ReservationCancelRequested(reservation="demo"))
    [tenants] = answers(wish, tenant=ACME)
    codes = [fact.code for fact in (second, nobody, tenants) if isinstance(fact, ev.WishRejected)]
    assert codes == [Refusal.FIELD_INVALID, Refusal.RESERVATION_NOT_FOUND, Refusal.NOT_PERMITTED]


def test_a_dry_run_says_what_would_follow() -> None:
    """And changes nothing."""
    [judged] = answers(ev.ReservationRequested(**GOOD, nodes=3, dry_run=True))
    assert isinstance(judged, ev.WishJudged)
    assert judged.would == ("3 node(s) are kept for acme: the placer says which.",)
