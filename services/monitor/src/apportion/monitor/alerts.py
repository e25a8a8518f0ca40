"""When somebody should be told: rules as data, and what is firing by them. Pure.

A rule watches one measure. It raises once the measure was at ``raise_at`` or more for ``for_s``, and clears once it was
at ``clear_at`` or less for ``clear_for_s``: a value that swings between the two does neither. What is firing, and who
looks at it, is a fold of facts; for how long a value has been high is this process's own observation, by its monotonic
clock. Measures are integers in which more is worse.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import Severity
from apportion.contracts.envelope import Entry

NS_PER_S: Final = 1_000_000_000
FACTS_AT_ONCE: Final = 50
FIRING_MAX: Final = 500
"""More alerts than that tell nobody anything."""

Measures = Mapping[str, Mapping[str, int]]
"""Value by measure and by what it is of (a device, a class; empty for the pool)."""


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule."""

    name: ev.AlertRuleName
    measure: str
    about: str = ""
    """Only of this; empty: of each that is measured."""
    raise_at: int
    clear_at: int
    for_s: Annotated[int, Meta(ge=0, le=86_400)] = 60
    clear_for_s: Annotated[int, Meta(ge=0, le=86_400)] = 60
    severity: Severity = Severity.WARNING
    unit: str
    summary: str
    action: str = ""

    def __post_init__(self) -> None:
        if self.clear_at >= self.raise_at:
            raise ValueError(f"rule {self.name}: clear_at {self.clear_at} is not below raise_at {self.raise_at}")


def _rule(name: str, measure: str, at: tuple[int, int], unit: str, summary: str, **more: object) -> Rule:
    return Rule(name=name, measure=measure, raise_at=at[0], clear_at=at[1], unit=unit, summary=summary, **more)  # type: ignore[arg-type]  # checked by the struct


RULES: Final = (
    _rule("frozen", "frozen", (1, 0), "", "most of the fleet is silent: nothing is placed or fenced",
          severity=Severity.CRITICAL, for_s=0, clear_for_s=0,
          action="is the network to the nodes up? if they are gone: apportion thaw --reason"),
    _rule("node-lost", "fenced", (1, 0), "", "a node is lost; its jobs have moved", for_s=0, clear_for_s=30,
          action="apportion nodes"),
    _rule("device-failed", "device_failed", (1, 0), "", "a device has failed", for_s=0, clear_for_s=60,
          action='apportion sql "SELECT * FROM v_health"'),
    _rule("device-memory", "memory_pct", (95, 90), "pct", "nearly all of a device's memory is in use", for_s=300,
          action="a job may run out of it soon"),
    _rule("device-hot", "temperature_c", (85, 80), "C", "a device is hot", for_s=120,
          action="cooling; apportion drain NODE"),
    _rule("device-pcie", "pcie_pct", (80, 60), "pct", "a device's PCIe link is nearly full in one direction", for_s=300,
          severity=Severity.INFO, action="are transfers what its job waits for?"),
    _rule("held-idle", "held_idle_s", (900, 60), "s", "runs hold a device that does nothing", for_s=0,
          severity=Severity.INFO, action="apportion nodes -o wide says whose"),
    _rule("pending-online", "pending_s", (60, 30), "s", "an online job waits too long", about="online", for_s=15,
          action="apportion jobs --state queued; apportion why JOB"),
    _rule("pending-standard", "pending_s", (900, 600), "s", "a standard job waits too long", about="standard",
          action="apportion jobs --state queued; apportion why JOB"),
    _rule("pending-batch", "pending_s", (14_400, 10_800), "s", "a batch job waits too long", about="batch",
          severity=Severity.INFO, action="apportion jobs --state queued; apportion why JOB"),
    _rule("latency-online", "scheduling_p95_ms", (5_000, 2_000), "ms", "online jobs are placed slowly", about="online",
          action="is there room? apportion nodes"),
    _rule("latency-standard", "scheduling_p95_ms", (60_000, 30_000), "ms", "standard jobs are placed slowly",
          about="standard", action="is there room? apportion nodes"),
    _rule("quota-near", "quota_pct", (90, 80), "pct", "a queue nears its limit", for_s=300, severity=Severity.INFO,
          action="its jobs will wait for its own"),
    _rule("jobs-fail", "failed_pct", (30, 20), "pct", "many jobs fail", for_s=60,
          action='apportion sql "SELECT cause, count(*) FROM v_run GROUP BY 1"'),
    _rule("consumer-lag", "lag_ms", (5_000, 1_000), "ms", "a consumer does not read what is said", for_s=10,
          clear_for_s=10, action="is it stopped, paused, or out of CPU?"),
    _rule("log-behind", "log_behind", (10_000, 1_000), "messages", "the log is behind the bus", for_s=30,
          action="the log's disk; apportion log verify"),
    _rule("disk-full", "disk_pct", (90, 85), "pct", "the log's disk is nearly full", severity=Severity.CRITICAL,
          for_s=10, action="make room: a full disk stops the log, and then the pool"),
    _rule("clock-skew", "skew_ms", (500, 250), "ms", "a node's clock is wrong", action="look at its time daemon"),
)  # fmt: skip
"""The rules of a pool that has no others. A file of ``[[rule]]`` tables replaces those of the same name, and adds."""


class Firing(Struct, kw_only=True):
    """An alert that was raised and isn't cleared."""

    fact: ev.AlertRaised
    raised_seq: int
    raised_at: int
    acknowledged: ev.AlertAcknowledged | None = None


class Alerts(Struct, kw_only=True):
    """What is firing, who looks at it, and what nobody wants to hear: a fold of facts."""

    firing: dict[str, Firing] = {}
    silences: dict[str, ev.AlertSilenced] = {}


class Levels(Struct, kw_only=True):
    """What was measured in this life: since when each key was high or well."""

    at_ns: int = 0
    high_ns: dict[str, int] = {}
    well_ns: dict[str, int] = {}
    values: dict[str, int] = {}


def key_of(rule: str, about: str) -> str:
    """What tells one alert from another.

    >>> key_of("device-hot", "GPU-1"), key_of("frozen", "")
    ('device-hot:GPU-1', 'frozen')
    """
    return f"{rule}:{about}" if about else rule


def with_changes(text: str) -> tuple[Rule, ...]:
    """The rules, those of ``text`` (a JSON list) in the place of others of their name. Raises ValidationError."""
    changed = {rule.name: rule for rule in msgspec.json.decode(text, type=list[Rule])} if text else {}
    kept = tuple(changed.pop(rule.name, rule) for rule in RULES)
    return (*kept, *changed.values())


def evolve(alerts: Alerts, entry: Entry) -> None:
    """Take in one fact."""
    event = entry.event
    match event:
        case ev.AlertRaised():
            alerts.firing[key_of(event.rule, event.about)] = Firing(
                fact=event, raised_seq=entry.seq, raised_at=entry.recorded_at
            )
        case ev.AlertCleared():
            alerts.firing.pop(key_of(event.rule, event.about), None)
        case ev.AlertAcknowledged():
            if (firing := alerts.firing.get(key_of(event.rule, event.about))) is not None:
                firing.acknowledged = event
        case ev.AlertSilenced():
            alerts.silences = {key: one for key, one in alerts.silences.items() if one.until_at > entry.recorded_at}
            key = key_of(event.rule, event.about)
            alerts.silences.pop(key, None)
            if event.until_at > entry.recorded_at:
                alerts.silences[key] = event
        case _:
            pass


def measured(levels: Levels, alerts: Alerts, rules: tuple[Rule, ...], measures: Measures, at_ns: int) -> None:
    """Take in what was measured at an instant of the monotonic clock."""
    levels.at_ns = at_ns
    high: dict[str, int] = {}
    well: dict[str, int] = {}
    values: dict[str, int] = {}
    for rule in rules:
        for about, value in measures.get(rule.measure, {}).items():
            if rule.about and rule.about != about:
                continue
            key = key_of(rule.name, about)
            values[key] = value
            if value >= rule.raise_at:
                high[key] = levels.high_ns.get(key, at_ns)
            elif value <= rule.clear_at:
                well[key] = levels.well_ns.get(key, at_ns)
    for key in alerts.firing:
        if key not in values:  # what isn't measured any more is nobody's trouble
            well[key] = levels.well_ns.get(key, at_ns)
    levels.high_ns, levels.well_ns, levels.values = high, well, values


def due(levels: Levels, alerts: Alerts, rules: tuple[Rule, ...]) -> list[ev.Fact]:
    """What is to be raised and cleared."""
    facts: list[ev.Fact] = []
    by_name = {rule.name: rule for rule in rules}
    for key, firing in sorted(alerts.firing.items()):
        rule = by_name.get(firing.fact.rule)
        since = levels.well_ns.get(key)
        if since is None or levels.at_ns - since < (rule.clear_for_s if rule else 0) * NS_PER_S:
            continue
        facts.append(
            ev.AlertCleared(
                rule=firing.fact.rule,
                about=firing.fact.about,
                value=levels.values.get(key),
                threshold=rule.clear_at if rule else firing.fact.threshold,
                raised_seq=firing.raised_seq,
            )
        )
    room = FIRING_MAX - len(alerts.firing)
    for key, since in sorted(levels.high_ns.items()):
        name, _, about = key.partition(":")
        rule = by_name[name]
        held_ns = levels.at_ns - since
        if key in alerts.firing or held_ns < rule.for_s * NS_PER_S or room <= 0:
            continue
        room -= 1
        facts.append(
            ev.AlertRaised(
                rule=name,
                about=about,
                severity=rule.severity,
                value=levels.values[key],
                threshold=rule.raise_at,
                unit=rule.unit,
                for_s=held_ns // NS_PER_S,
                summary=rule.summary,
                action=rule.action,
            )
        )
    return facts[:FACTS_AT_ONCE]


def silenced_by(alerts: Alerts, rule: str, about: str, now: int) -> ev.AlertSilenced | None:
    """The silence that covers the alert at this moment."""
    for key in (key_of(rule, about), rule):
        found = alerts.silences.get(key)
        if found is not None and found.until_at > now:
            return found
    return None
