"""What was used in a period, and what it costs: integers from the segments of ``v_usage``, whole to the last one. Pure.

A segment is one slice that a run held. Instants are cut to whole milliseconds before they are subtracted, and a cost to
whole micro-units of the currency after it was summed from the segment's beginning: so the figures of two periods that
meet add up to those of both together, exactly, whatever the instant between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import lcm
from typing import Any, Final

from msgspec import Struct

NS_PER_MS: Final = 1_000_000
MS_PER_HOUR: Final = 3_600_000
MILLI: Final = 1_000
MIB_PER_GIB: Final = 1_024
_COST_UNIT: Final = lcm(MILLI * MS_PER_HOUR, MIB_PER_GIB * MS_PER_HOUR)
"""Costs are summed in this part of a micro-unit: both prices have whole numbers in it."""

ON_DEMAND: Final = "on_demand"
SPOT: Final = "spot"
RESERVED: Final = "reserved"
ANY_MODEL: Final = ""

KEYS: Final = ("tenant", "queue", "model", "mode", "class", "workload", "pricing", "job", "node", "device", "day")
"""What usage can be summed by."""

SEGMENTS: Final = """
    SELECT run_id, job_id, tenant, queue, service_class, workload, mode, model, node_id, device_uuid,
        requested_compute_milli, requested_memory_mib, compute_milli, memory_mib, peak_memory_mib,
        epoch_ns(held_from), epoch_ns(held_to), epoch_ns(started), epoch_ns(ended)
    FROM v_usage ORDER BY epoch_ns(held_from), run_id, device_uuid
"""
"""Asks for all of them: rows of ``Segment``."""


CARDS: Final = """
    SELECT epoch_ns(effective), ordinal, currency, pricing, model, queues, micro_per_gpu_hour, micro_per_gib_hour
    FROM v_rates ORDER BY epoch_ns(effective), ordinal
"""
"""Asks for every rate: rows of ``cards_of``."""


class Segment(Struct, frozen=True):
    """One slice that a run held; in the order of SEGMENTS. Instants in ns since the Unix epoch."""

    run_id: str
    job_id: str
    tenant: str
    queue: str
    service_class: str
    workload: str
    mode: str
    model: str
    node_id: str
    device_uuid: str
    requested_milli: int
    requested_mib: int
    milli: int
    mib: int
    peak_mib: int | None
    held_from: int
    held_to: int | None
    started: int | None
    ended: int | None


class Rate(Struct, frozen=True, kw_only=True):
    """What one kind of use costs; a rate for a model goes before one for any."""

    pricing: str
    model: str = ANY_MODEL
    queues: tuple[str, ...] = ()
    """Of reserved capacity: whose runs it is for."""
    micro_per_gpu_hour: int
    """Micro-units of the currency for a whole device for an hour; a share costs its share."""
    micro_per_gib_hour: int = 0
    """For the memory of the slice, beside."""


class Card(Struct, frozen=True, kw_only=True):
    """What is charged from an instant on, until the next card's."""

    effective_at: int
    currency: str
    rates: tuple[Rate, ...]


class Usage(Struct, kw_only=True):
    """Sums over segments, or parts of them, in a period."""

    segments: int = 0
    held_ms: int = 0
    requested_milli_ms: int = 0
    allocated_milli_ms: int = 0
    used_milli_ms: int = 0
    """While its process ran: what is held and not used is idle."""
    requested_mib_ms: int = 0
    allocated_mib_ms: int = 0
    used_mib_ms: int = 0
    """The most that was seen in use, while the process ran; of segments where somebody looked."""
    over_asked_mib_ms: int = 0
    """What of the slice was never in use, while the process ran; of segments where somebody looked."""
    unpriced_milli_ms: int = 0
    """Allocated, and no rate says what it costs."""
    cost_micro: dict[str, int] = {}
    """By currency."""

    @property
    def idle_milli_ms(self) -> int:
        """Held, and no process was running on it."""
        return self.allocated_milli_ms - self.used_milli_ms

    def add(self, other: "Usage") -> None:
        """Count another's in."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for currency, micro in other.cost_micro.items():
            self.cost_micro[currency] = self.cost_micro.get(currency, 0) + micro


_SUMS: Final = tuple(name for name in Usage.__struct_fields__ if name != "cost_micro")


def cards_of(rows: Iterable[Sequence[Any]]) -> tuple[Card, ...]:
    """The cards of CARDS' rows, in order; of two with one instant the later said one counts."""
    cards: dict[int, tuple[int, Card]] = {}
    for effective_at, ordinal, currency, pricing, model, queues, gpu, gib in rows:
        rate = Rate(pricing=pricing, model=model, queues=tuple(queues), micro_per_gpu_hour=gpu, micro_per_gib_hour=gib)
        said, card = cards.get(effective_at, (0, None))
        rates = card.rates if card is not None and said == ordinal else ()
        cards[effective_at] = (ordinal, Card(effective_at=effective_at, currency=currency, rates=(*rates, rate)))
    return tuple(card for _, card in cards.values())


def usage_of(segment: Segment, begin: int, end: int, cards: Sequence[Card] = ()) -> Usage:
    """What of the segment falls into the period, ``end`` excluded; ``cards`` in order of ``effective_at``.

    ``end`` is at most the log's newest instant: what is held still counts until there.
    """
    first, last = _clipped(segment.held_from, segment.held_to, begin, end)
    if last <= first:
        return Usage()
    held_ms = _ms(first, last)
    run_ms = 0
    if segment.started is not None:
        ended = last if segment.ended is None else min(segment.ended, last)
        run_ms = max(0, _ms(max(segment.started, first), ended))
    cost, unpriced = _cost(segment, first, last, cards)
    peak = segment.peak_mib
    return Usage(
        segments=1,
        held_ms=held_ms,
        requested_milli_ms=segment.requested_milli * held_ms,
        allocated_milli_ms=segment.milli * held_ms,
        used_milli_ms=segment.milli * run_ms,
        requested_mib_ms=segment.requested_mib * held_ms,
        allocated_mib_ms=segment.mib * held_ms,
        used_mib_ms=0 if peak is None else peak * run_ms,
        over_asked_mib_ms=0 if peak is None else max(0, segment.mib - peak) * run_ms,
        unpriced_milli_ms=segment.milli * unpriced,
        cost_micro=cost,
    )


def summed(
    segments: Iterable[Segment], by: Sequence[str], begin: int, end: int, cards: Sequence[Card] = ()
) -> dict[tuple[str, ...], Usage]:
    """Usage in the period by those of KEYS, in order of the keys. With ``day`` a segment is parted at midnight UTC."""
    totals: dict[tuple[str, ...], Usage] = {}
    for segment in segments:
        spans = _days(segment, begin, end) if "day" in by else [(begin, end)]
        for first, last in spans:
            used = usage_of(segment, first, last, cards)
            if used.segments:
                totals.setdefault(tuple(key(segment, name, first, cards) for name in by), Usage()).add(used)
    return dict(sorted(totals.items()))


def key(segment: Segment, name: str, at: int, cards: Sequence[Card] = ()) -> str:
    """One of KEYS of a segment, whose day is that of ``at`` and whose pricing that of the newest card."""
    match name:
        case "tenant":
            return segment.tenant
        case "queue":
            return segment.queue
        case "model":
            return segment.model
        case "mode":
            return segment.mode
        case "class":
            return segment.service_class
        case "workload":
            return segment.workload
        case "pricing":
            return pricing_of(segment, cards[-1] if cards else None)
        case "job":
            return segment.job_id
        case "node":
            return segment.node_id
        case "device":
            return segment.device_uuid
        case "day":
            return _date(max(at, segment.held_from))
        case _:
            raise ValueError(f"expected one of {', '.join(KEYS)}, found {name!r}")


def pricing_of(segment: Segment, card: Card | None) -> str:
    """Under which of the three prices a segment falls."""
    if card is not None and any(rate.pricing == RESERVED and segment.queue in rate.queues for rate in card.rates):
        return RESERVED
    return SPOT if segment.service_class == "spot" else ON_DEMAND


def rate_of(segment: Segment, card: Card) -> Rate | None:
    """What the segment costs by this card; None where it says nothing of it."""
    pricing = pricing_of(segment, card)
    fits = [
        rate
        for rate in card.rates
        if rate.pricing == pricing
        and rate.model in {ANY_MODEL, segment.model}
        and (pricing != RESERVED or segment.queue in rate.queues)
    ]
    # The first one that names the model, else the first that names none.
    return min(fits, key=lambda rate: rate.model == ANY_MODEL, default=None)


def _clipped(held_from: int, held_to: int | None, begin: int, end: int) -> tuple[int, int]:
    return max(held_from, begin), end if held_to is None else min(held_to, end)


def _ms(first: int, last: int) -> int:
    return last // NS_PER_MS - first // NS_PER_MS


def _cost(segment: Segment, first: int, last: int, cards: Sequence[Card]) -> tuple[dict[str, int], int]:
    """Micro-units by currency, and milliseconds that no rate covers, between two instants of the segment."""
    cost: dict[str, int] = {}
    unpriced = _unpriced(segment, last, cards) - _unpriced(segment, first, cards)
    upto, before = _cumulated(segment, last, cards), _cumulated(segment, first, cards)
    for currency, parts in upto.items():
        micro = parts // _COST_UNIT - before.get(currency, 0) // _COST_UNIT
        if micro:
            cost[currency] = micro
    return cost, unpriced


def _spans(segment: Segment, until: int, cards: Sequence[Card]) -> Iterable[tuple[int, Card | None]]:
    """How long, of the segment from its beginning, each card counted; None: before the first."""
    ends = [*(card.effective_at for card in cards), until]
    before: Card | None = None
    at = segment.held_from
    for card, reached in zip([*cards, None], ends, strict=True):
        upto = min(max(at, reached), until)
        if upto > at:
            yield _ms(at, upto), before
            at = upto
        before = card


def _cumulated(segment: Segment, until: int, cards: Sequence[Card]) -> dict[str, int]:
    """What the segment cost from its beginning, in parts of which _COST_UNIT make a micro-unit, by currency."""
    total: dict[str, int] = {}
    for ms, card in _spans(segment, until, cards):
        rate = None if card is None else rate_of(segment, card)
        if card is not None and rate is not None:
            gpu = ms * segment.milli * rate.micro_per_gpu_hour * (_COST_UNIT // (MILLI * MS_PER_HOUR))
            memory = ms * segment.mib * rate.micro_per_gib_hour * (_COST_UNIT // (MIB_PER_GIB * MS_PER_HOUR))
            total[card.currency] = total.get(card.currency, 0) + gpu + memory
    return total


def _unpriced(segment: Segment, until: int, cards: Sequence[Card]) -> int:
    spans = _spans(segment, until, cards)
    return sum(ms for ms, card in spans if card is None or rate_of(segment, card) is None)


_NS_PER_DAY: Final = 24 * MS_PER_HOUR * NS_PER_MS


def _days(segment: Segment, begin: int, end: int) -> list[tuple[int, int]]:
    first, last = _clipped(segment.held_from, segment.held_to, begin, end)
    days = range(first // _NS_PER_DAY, (last - 1) // _NS_PER_DAY + 1) if last > first else range(0)
    return [(max(first, day * _NS_PER_DAY), min(last, (day + 1) * _NS_PER_DAY)) for day in days]


def _date(at: int) -> str:
    """The day of an instant, in UTC.

    >>> _date(1_788_264_000_000_000_000)
    '2026-09-01'
    """
    return datetime.fromtimestamp(at // 1_000_000_000, tz=UTC).strftime("%Y-%m-%d")


def total_of(totals: Mapping[tuple[str, ...], Usage]) -> Usage:
    """Everything together."""
    total = Usage()
    for each in totals.values():
        total.add(each)
    return total
