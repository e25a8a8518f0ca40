"""Figures of `apportion usage`: read from a log, summed, made readable, and written for other tools.

Column names of exports are FOCUS 1.2's and OpenCost's; what they have no name for begins with ``x_``, as FOCUS wants.
"""

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.moments import instant
from apportion.monitor import metering
from apportion.monitor.log import own_questions, write_parquet
from apportion.monitor.metering import Card, Segment, Usage

COLUMNS: Final = (
    "segments",
    "requested_gpu_h",
    "allocated_gpu_h",
    "used_gpu_h",
    "allocated_gib_h",
    "used_gib_h",
    "cost",
)
WASTE_COLUMNS: Final = ("segments", "allocated_gpu_h", "idle_gpu_h", "idle_pct", "over_asked_gib_h", "over_asked_pct")
WIDE_COLUMNS: Final = ("requested_milli_ms", "allocated_milli_ms", "used_milli_ms", "allocated_mib_ms", "used_mib_ms")
_MILLI_MS_PER_GPU_H: Final = 1_000 * 3_600_000
_MIB_MS_PER_GIB_H: Final = 1_024 * 3_600_000
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")
_PRICING: Final = {"on_demand": "Standard", "spot": "Dynamic", "reserved": "Committed"}
"""FOCUS's words for how something is priced."""


class Period(Struct, frozen=True, kw_only=True):
    """What a log holds of a period."""

    path: Path
    begin: int
    end: int
    """Excluded; at most the log's newest instant. Both in ns since the Unix epoch."""
    segments: tuple[Segment, ...]
    cards: tuple[Card, ...] = ()


def read(path: Path, since: str | None, until: str | None) -> Period:
    """The segments of a log that nobody writes, and the period that two moments name. Raises CommandFailed."""
    with own_questions(path) as ask:
        ((first_at, last_at),) = ask("SELECT coalesce(min(recorded_at), 0), coalesce(max(recorded_at), 0) FROM events")
        segments = tuple(Segment(*row) for row in ask(metering.SEGMENTS))
        cards = metering.cards_of(ask(metering.CARDS))
    begin = first_at if since is None else instant(since, first_at=first_at, last_at=last_at, option="--from")
    end = last_at if until is None else instant(until, first_at=first_at, last_at=last_at, option="--to")
    if end < begin:
        raise CommandFailed(f"--to: expected a moment after --from, found {_iso(end)}", code=Exit.USAGE)
    return Period(path=path, begin=begin, end=min(end, last_at), segments=segments, cards=cards)


def cards_in(path: Path) -> tuple[Card, ...]:
    """Every rate card of a log that nobody writes."""
    with own_questions(path) as ask:
        return metering.cards_of(ask(metering.CARDS))


def rows(period: Period, by: Sequence[str]) -> list[dict[str, Any]]:
    """One object a group, by its keys; whole numbers."""
    sums = metering.summed(period.segments, by, period.begin, period.end, period.cards)
    return [{**dict(zip(by, keys, strict=True)), **_plain(used)} for keys, used in sums.items()]


def total(period: Period) -> dict[str, Any]:
    """All groups together: what a bill has at its end."""
    return _plain(metering.total_of(metering.summed(period.segments, (), period.begin, period.end, period.cards)))


def _plain(used: Usage) -> dict[str, Any]:
    return {**msgspec.to_builtins(used), "idle_milli_ms": used.idle_milli_ms}


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """The same in hours, for people: cut, never rounded up."""
    measured = row["used_mib_ms"] + row["over_asked_mib_ms"]
    return {
        **row,
        "requested_gpu_h": _hours(row["requested_milli_ms"], _MILLI_MS_PER_GPU_H),
        "allocated_gpu_h": _hours(row["allocated_milli_ms"], _MILLI_MS_PER_GPU_H),
        "used_gpu_h": _hours(row["used_milli_ms"], _MILLI_MS_PER_GPU_H),
        "idle_gpu_h": _hours(row["idle_milli_ms"], _MILLI_MS_PER_GPU_H),
        "idle_pct": _percent(row["idle_milli_ms"], row["allocated_milli_ms"]),
        "allocated_gib_h": _hours(row["allocated_mib_ms"], _MIB_MS_PER_GIB_H),
        "used_gib_h": _hours(row["used_mib_ms"], _MIB_MS_PER_GIB_H),
        "over_asked_gib_h": _hours(row["over_asked_mib_ms"], _MIB_MS_PER_GIB_H),
        "over_asked_pct": _percent(row["over_asked_mib_ms"], measured),
        "cost": money(row["cost_micro"]),
    }


def money(cost: dict[str, int]) -> str:
    """Amounts by currency, to the cent and cut.

    >>> money({"EUR": 1_239_999, "USD": 5})
    '1.23 EUR, 0.00 USD'
    """
    return ", ".join(f"{micro // 10_000 / 100:.2f} {currency}" for currency, micro in sorted(cost.items()))


def period_text(period: Period) -> str:
    """Which period it is, in one line."""
    priced = "" if period.cards else "; no rate card, so nothing is priced"
    return f"({_iso(period.begin)} to {_iso(period.end)}, {period.path}{priced})"


def export(period: Period, path: Path, columns: str, *, pool: str) -> int:
    """Write each segment of the period, as far as it falls into it; how many those are."""
    made = {"own": _own, "focus": _focus, "opencost": _opencost}[columns]
    content = []
    for segment in period.segments:
        used = metering.usage_of(segment, period.begin, period.end, period.cards)
        if used.segments:
            content.append(made(period, segment, used, pool))
    heads = list(made(period, _EXAMPLE, Usage(), pool))
    if path.suffix == ".parquet":
        write_parquet(path, heads, [[row[head] for head in heads] for row in content])
    else:
        write_csv(path, heads, content)
    return len(content)


def write_csv(path: Path, heads: Sequence[str], content: Sequence[dict[str, Any]]) -> None:
    """A file that a spreadsheet can open without running what a stranger wrote into a name."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows([safe_cell(row[head]) for head in heads] for row in content)


def safe_cell(value: Any) -> Any:
    """The value; text that a spreadsheet would take for a formula begins with an apostrophe.

    >>> safe_cell("=HYPERLINK(1)"), safe_cell("plain"), safe_cell(-5)
    ("'=HYPERLINK(1)", 'plain', -5)
    """
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _span(period: Period, segment: Segment) -> tuple[int, int]:
    return max(segment.held_from, period.begin), min(segment.held_to or period.end, period.end)


def _own(period: Period, segment: Segment, used: Usage, pool: str) -> dict[str, Any]:
    begin, end = _span(period, segment)
    currency, micro = _first(used)
    return {
        "pool": pool,
        "run_id": segment.run_id,
        "job_id": segment.job_id,
        "tenant": segment.tenant,
        "queue": segment.queue,
        "class": segment.service_class,
        "workload": segment.workload,
        "pricing": _pricing(period, segment),
        "mode": segment.mode,
        "model": segment.model,
        "node_id": segment.node_id,
        "device_uuid": segment.device_uuid,
        "from": _iso(begin),
        "to": _iso(end),
        **{name: getattr(used, name) for name in Usage.__struct_fields__ if name not in {"segments", "cost_micro"}},
        "currency": currency,
        "cost_micro": micro,
    }


def _focus(period: Period, segment: Segment, used: Usage, pool: str) -> dict[str, Any]:
    begin, end = _span(period, segment)
    currency, micro = _first(used)
    cost = Decimal(micro).scaleb(-6)
    quantity = _decimal(used.allocated_milli_ms, _MILLI_MS_PER_GPU_H)
    pricing = _pricing(period, segment)
    rate = metering.rate_of(segment, period.cards[-1]) if period.cards else None
    return {
        "BilledCost": cost,
        "BillingAccountId": pool,
        "BillingCurrency": currency,
        "BillingPeriodStart": _iso(period.begin),
        "BillingPeriodEnd": _iso(period.end),
        "ChargeCategory": "Usage",
        "ChargeClass": None,
        "ChargeDescription": f"{segment.milli} milli-GPU and {segment.mib} MiB of {segment.model} ({segment.mode})",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _iso(begin),
        "ChargePeriodEnd": _iso(end),
        "ConsumedQuantity": quantity,
        "ConsumedUnit": "GPU-Hours",
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "ListCost": cost,
        "ListUnitPrice": None if rate is None else Decimal(rate.micro_per_gpu_hour).scaleb(-6),
        "PricingCategory": _PRICING[pricing],
        "PricingQuantity": quantity,
        "PricingUnit": "GPU-Hours",
        "InvoiceIssuerName": "Apportion",
        "ProviderName": "Apportion",
        "PublisherName": "Apportion",
        "ResourceId": segment.device_uuid,
        "ResourceName": segment.node_id,
        "ResourceType": "GPU slice",
        "ServiceCategory": "Compute",
        "ServiceName": "Apportion",
        "SkuId": f"{segment.model}/{segment.mode}/{pricing}",
        "SubAccountId": segment.tenant,
        "SubAccountName": segment.tenant,
        "Tags": msgspec.json.encode(
            {"queue": segment.queue, "job": segment.job_id, "class": segment.service_class}
        ).decode(),
        "x_RunId": segment.run_id,
        "x_RequestedMilliGpuMs": used.requested_milli_ms,
        "x_AllocatedMilliGpuMs": used.allocated_milli_ms,
        "x_UsedMilliGpuMs": used.used_milli_ms,
        "x_RequestedMibMs": used.requested_mib_ms,
        "x_AllocatedMibMs": used.allocated_mib_ms,
        "x_UsedMibMs": used.used_mib_ms,
    }


def _opencost(period: Period, segment: Segment, used: Usage, pool: str) -> dict[str, Any]:
    begin, end = _span(period, segment)
    currency, micro = _first(used)
    return {
        "name": segment.run_id,
        "cluster": pool,
        "node": segment.node_id,
        "namespace": segment.tenant,
        "controller": segment.job_id,
        "controllerKind": "job",
        "pod": segment.run_id,
        "windowStart": _iso(period.begin),
        "windowEnd": _iso(period.end),
        "start": _iso(begin),
        "end": _iso(end),
        "minutes": _decimal(used.held_ms, 60_000),
        "gpuCount": Decimal(segment.milli).scaleb(-3),
        "gpuHours": _decimal(used.allocated_milli_ms, _MILLI_MS_PER_GPU_H),
        "gpuCost": Decimal(micro).scaleb(-6),
        "totalCost": Decimal(micro).scaleb(-6),
        "x_currency": currency,
        "x_providerID": segment.device_uuid,
        "x_gpuModel": segment.model,
        "x_gpuRequestHours": _decimal(used.requested_milli_ms, _MILLI_MS_PER_GPU_H),
        "x_gpuUsageHours": _decimal(used.used_milli_ms, _MILLI_MS_PER_GPU_H),
        "x_gpuMemoryMibMs": used.allocated_mib_ms,
        "x_queue": segment.queue,
    }


def _pricing(period: Period, segment: Segment) -> str:
    return metering.pricing_of(segment, period.cards[-1] if period.cards else None)


def _first(used: Usage) -> tuple[str, int]:
    """The currency and the amount of a segment's part; parts that saw a currency change have the first by name."""
    return min(used.cost_micro.items(), default=("", 0))


def _decimal(parts: int, unit: int) -> Decimal:
    """In units, to nine places: exact sums are in the whole numbers beside."""
    return (Decimal(parts) / unit).quantize(Decimal("1.000000000"))


def _hours(parts: int, unit: int) -> float:
    return parts * 1_000 // unit / 1_000


def _percent(part: int, whole: int) -> int | None:
    return part * 100 // whole if whole else None


def _iso(at: int) -> str:
    moment = datetime.fromtimestamp(at // 1_000_000_000, tz=UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S") + f".{at // 1_000_000 % 1_000:03d}Z"


_EXAMPLE: Final = Segment("", "", "", "", "", "", "", "", "", "", 0, 0, 0, 0, None, 0, 0, None, None)
"""For the columns of an export without rows."""
