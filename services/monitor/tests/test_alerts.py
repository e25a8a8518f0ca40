"""Alerts: raised and cleared by rules that don't swing, seen and silenced for a while, and told to real receivers."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from apportion.contracts import events as ev
from apportion.contracts.causes import Pending, Refusal, RunCause, Severity
from apportion.contracts.ids import OPERATOR, DeviceUuid, NodeId, PoolId
from apportion.contracts.samples import DeviceSample
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, a_queue, as_fact, as_wish
from apportion.monitor import alerts, core
from apportion.monitor.alerts import RULES, Alerts, Rule, silenced_by
from apportion.monitor.figures import Figures
from apportion.monitor.measures import Seen, measures_of
from apportion.monitor.notify import Notifier
from apportion.pool.state import Pool
from apportion.runtime.settings import Secret

S = core.NS_PER_MS * 1_000
GPU = "GPU-node-1-0"


class Monitor:
    """A monitor whose facts come back as the bus would bring them."""

    def __init__(self, state: core.State | None = None) -> None:
        self.state = core.initial() if state is None else state
        self.seq, self.wishes = core.position(self.state)

    def measure(self, second: float, **measures: dict[str, int]) -> list[ev.Fact]:
        self.state = core.observe(self.state, core.Measured(at_ns=int(second * S), measures=measures), NOON)
        return self.decided()

    def wish(self, event: ev.Wish, **changes: object) -> list[ev.Fact]:
        self.wishes += 1
        self.state = core.evolve(self.state, as_wish(event, self.wishes, **{"tenant": OPERATOR, **changes}))  # type: ignore[arg-type]  # a builder's fields
        return self.decided()

    def decided(self, now: int = NOON) -> list[ev.Fact]:
        said: list[ev.Fact] = []
        while facts := core.decide(self.state, now):
            for fact in facts:
                self.seq += 1
                self.state = core.evolve(self.state, as_fact(fact, self.seq, author="monitor"))
            said += facts
        return said


HOT = next(rule for rule in RULES if rule.name == "device-hot")


def raised(about: str = GPU, value: int = 90, for_s: int = 120) -> ev.AlertRaised:
    return ev.AlertRaised(
        rule="device-hot",
        about=about,
        severity=Severity.WARNING,
        value=value,
        threshold=85,
        unit="C",
        for_s=for_s,
        summary=HOT.summary,
        action=HOT.action,
    )


def test_an_alert_is_raised_once_it_was_so_for_long_enough_and_cleared_below_another_mark() -> None:
    """A value that swings around one threshold would tell somebody every minute."""
    monitor = Monitor()
    assert monitor.measure(0, temperature_c={GPU: 90}) == []
    assert monitor.measure(60, temperature_c={GPU: 84}) == []  # not all the time
    assert monitor.measure(70, temperature_c={GPU: 90}) == []
    assert monitor.measure(189, temperature_c={GPU: 90}) == []
    assert monitor.measure(190, temperature_c={GPU: 90}) == [raised()]
    assert monitor.measure(250, temperature_c={GPU: 83}) == []  # between the marks
    assert monitor.measure(260, temperature_c={GPU: 80}) == []
    assert monitor.measure(300, temperature_c={GPU: 81}) == []
    assert monitor.measure(310, temperature_c={GPU: 80}) == []
    assert monitor.measure(370, temperature_c={GPU: 79}) == [
        ev.AlertCleared(rule="device-hot", about=GPU, value=79, threshold=80, raised_seq=1)
    ]


def test_what_is_not_measured_any_more_is_nobody_s_trouble() -> None:
    """A device that left takes its alert with it."""
    monitor = Monitor()
    for second in (0, 120):
        monitor.measure(second, temperature_c={GPU: 90})
    assert monitor.measure(130, temperature_c={}) == []
    assert monitor.measure(190, temperature_c={}) == [
        ev.AlertCleared(rule="device-hot", about=GPU, threshold=80, raised_seq=1)
    ]


def test_a_restart_keeps_what_fires_and_measures_anew() -> None:
    """It is neither raised twice nor cleared because nobody looked for a while."""
    monitor = Monitor()
    for second in (0, 120):
        monitor.measure(second, temperature_c={GPU: 90})
    again = Monitor(core.restore(core.snapshot(monitor.state)))
    assert again.measure(5_000, temperature_c={GPU: 90}) == []
    assert again.measure(9_000, temperature_c={GPU: 90}) == []
    assert list(again.state.alerts.firing) == [f"device-hot:{GPU}"]


def test_a_rule_of_ones_own_takes_the_place_of_ours_and_others_are_added() -> None:
    """They reach the core by the claim, like every setting that decisions depend on."""
    own = [
        {**msgspec.to_builtins(HOT), "raise_at": 60, "clear_at": 50, "for_s": 0},
        {"name": "very-hot", "measure": "temperature_c", "raise_at": 95, "clear_at": 90, "unit": "C", "summary": "s"},
    ]
    monitor = Monitor()
    claim = ev.LeaseClaimed(author="monitor", session="s", core="c", config={"alert_rules": json.dumps(own)})
    monitor.seq += 1
    monitor.state = core.evolve(monitor.state, as_fact(claim, monitor.seq, author="monitor"))
    assert len(monitor.state.rules) == len(RULES) + 1
    assert monitor.measure(1, temperature_c={GPU: 60}) == [
        msgspec.structs.replace(raised(value=60, for_s=0), threshold=60)
    ]
    assert core.restore(core.snapshot(monitor.state)).rules == monitor.state.rules


def test_a_rule_that_would_swing_is_refused() -> None:
    """Hysteresis is what makes an alert worth reading."""
    with pytest.raises(msgspec.ValidationError, match="clear_at 5 is not below raise_at 5"):
        alerts.with_changes(
            '[{"name":"a","measure":"m","raise_at":5,"clear_at":5,"unit":"","summary":"s"}]',
        )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_watches_something_that_is_measured(rule: Rule) -> None:
    """And can be raised and cleared by it."""
    measured = measures_of(a_pool(), a_history(), A_LOOK, NOON + 1_000 * S)
    assert rule.measure in measured
    about = rule.about or next(iter(measured[rule.measure]), "x")
    monitor = Monitor()
    said = [f for second in (0, rule.for_s) for f in monitor.measure(second, **{rule.measure: {about: rule.raise_at}})]
    assert [type(fact) for fact in said] == [ev.AlertRaised]
    well = {rule.measure: {about: rule.clear_at}}
    said = [f for second in (0, rule.clear_for_s) for f in monitor.measure(10_000 + second, **well)]
    assert [type(fact) for fact in said] == [ev.AlertCleared]


def a_pool() -> Pool:
    state = core.initial()
    facts = [
        a_queue(limit_compute_milli=1_000),
        a_job(),
        a_job("waits"),
        ev.JobPendingReasonChanged(job_id=a_job("waits").job_id, code=Pending.PRIORITY, since_at=NOON),
        a_placement(compute_milli=900),
    ]
    node = a_node()
    linked = tuple(replace(device, pcie_generation=5, pcie_lanes=16) for device in node.devices)
    core.evolve(state, as_fact(replace(node, devices=linked), 1, author="agent-node-1"))
    for number, fact in enumerate(facts, start=2):
        core.evolve(state, as_fact(fact, number))
    return state.pool


def a_history() -> Figures:
    figures = Figures()
    for number in range(40):
        ended: ev.Fact = ev.JobSucceeded(job_id=a_job().job_id, attempts=1, wait_ms=1, run_ms=1)
        if number < 10:
            ended = ev.JobFailed(job_id=a_job().job_id, attempts=1, cause=RunCause.KILLED)
        figures.saw(as_fact(ended, number + 1), a_pool())
    figures.recent = {"online": deque((NOON + 900 * S, ms) for ms in range(100))}
    return figures


A_LOOK = Seen(
    devices=[
        (
            DeviceSample(uuid=DeviceUuid(GPU), used_mib=96, free_mib=4, busy_pct=0, temperature_c=70),
            1_000,
        )
    ],
    pcie_bps={DeviceUuid(GPU): 56_707_200_000, DeviceUuid("GPU-unknown"): 1},
    lags_ms={"placer/facts": 7_000},
    log_behind={"facts": 12},
    disk_pct=91,
    skews_ms={NodeId("node-1"): -600},
)


def test_measures_are_what_the_rules_mean() -> None:
    """Whole numbers, more is worse."""
    found = measures_of(a_pool(), a_history(), A_LOOK, NOON + 1_000 * S)
    assert found["memory_pct"] == {GPU: 96}
    assert found["held_idle_s"] == {GPU: 1_000}
    assert found["pcie_pct"] == {GPU: 90}
    assert found["pending_s"] == {"batch": 1_000}
    assert found["quota_pct"] == {"main": 90}
    assert found["failed_pct"] == {"": 25}
    assert found["scheduling_p95_ms"] == {"online": 95}
    assert found["skew_ms"] == {"node-1": 600}
    assert found["frozen"] == {"": 0}
    assert found["device_failed"] == {"GPU-node-1-0": 0, "GPU-node-1-1": 0}


# Seen and silenced ----------------------------------------------------------------------------------------------------


def firing() -> Monitor:
    monitor = Monitor()
    for second in (0, 120):
        monitor.measure(second, temperature_c={GPU: 90})
    return monitor


def test_an_alert_is_acknowledged_and_silenced_for_as_long_as_was_asked() -> None:
    """By whom and why is a fact; neither lasts for ever."""
    monitor = firing()
    ack = ev.AlertAcknowledgeRequested(rule="device-hot", about=GPU, for_s=60, reason="on it")
    (answer,) = monitor.wish(ack, actor="user:alice")
    assert isinstance(answer, ev.AlertAcknowledged)
    assert (answer.until_at, answer.actor) == (NOON + 60 * S, "user:alice")
    (answer,) = monitor.wish(ev.AlertSilenceRequested(rule="device-hot", for_s=30, reason="new fans"))
    assert isinstance(answer, ev.AlertSilenced)
    found = monitor.state.alerts
    assert silenced_by(found, "device-hot", GPU, NOON + 29 * S) == answer
    assert silenced_by(found, "device-hot", GPU, NOON + 30 * S) is None
    monitor.wish(ev.AlertSilenceRequested(rule="device-hot", for_s=0, reason="they work"))
    assert silenced_by(monitor.state.alerts, "device-hot", GPU, NOON) is None


@pytest.mark.parametrize(
    "wish",
    [
        ev.AlertAcknowledgeRequested(rule="device-hot", about="GPU-other", reason="r"),
        ev.AlertAcknowledgeRequested(rule="no-such-rule", reason="r"),
        ev.AlertSilenceRequested(rule="no-such-rule", for_s=9, reason="r"),
    ],
)
def test_what_does_not_fire_is_not_acknowledged(wish: ev.Wish) -> None:
    """The answer says what there is."""
    (answer,) = firing().wish(wish)
    assert isinstance(answer, ev.NodeWishRejected)
    assert answer.code is Refusal.ALERT_NOT_FOUND


def test_a_dry_run_of_a_silence_says_until_when() -> None:
    monitor = firing()
    (judged,) = monitor.wish(ev.AlertSilenceRequested(rule="device-hot", for_s=30, reason="r", dry_run=True))
    assert isinstance(judged, ev.NodeWishJudged)
    assert judged.fact == "AlertSilenced"
    assert not monitor.state.alerts.silences


# Told to others -------------------------------------------------------------------------------------------------------


class Receiver:
    """A real HTTP server that keeps what it is sent; it refuses the first ``refusals`` with 503."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.refusals = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        status = "200 OK"
        if self.refusals:
            self.refusals -= 1
            status = "503 Service Unavailable"
        else:
            self.requests.append((head[0].split(" ")[1], headers, body))
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield found
    server.close()
    await server.wait_closed()


class Noon:
    def now(self) -> int:
        return NOON

    def monotonic(self) -> int:
        return 0


def notifier(receiver: Receiver, state: Alerts, *, to: str, repeat_s: float = 60.0) -> Notifier:
    return Notifier(
        pool=PoolId("main"),
        webhook_url=f"{receiver.url}/hook" if to == "webhook" else "",
        alertmanager_url=receiver.url if to == "alertmanager" else "",
        token=Secret("hush"),
        alerts=lambda: state,
        clock=Noon(),
        repeat_s=repeat_s,
    )


async def told(receiver: Receiver, notifying: Notifier, count: int) -> None:
    task = asyncio.create_task(notifying.run())
    async with asyncio.timeout(60):
        while len(receiver.requests) < count:
            await asyncio.sleep(0.01)
    task.cancel()


CLEARED = ev.AlertCleared(rule="device-hot", about=GPU, value=70, threshold=80, raised_seq=1)


async def test_a_webhook_is_told_of_the_raise_and_of_the_end(receiver: Receiver) -> None:
    """With an id that both have, so that whoever hears it twice knows."""
    notifying = notifier(receiver, Alerts(), to="webhook")
    receiver.refusals = 1
    notifying.begin()
    notifying.saw(as_fact(raised(), 1))
    notifying.saw(as_fact(CLEARED, 2, at=NOON + S))
    await told(receiver, notifying, 2)
    (path, headers, first), (_, _, second) = receiver.requests
    assert (path, headers["authorization"]) == ("/hook", "Bearer hush")
    assert (first["status"], first["rule"], first["about"], first["value"]) == ("firing", "device-hot", GPU, 90)
    assert (second["status"], second["cleared_at"]) == ("resolved", NOON + S)
    assert first["id"] == second["id"] == f"main/device-hot:{GPU}/{NOON}"


async def test_alertmanager_is_told_by_its_api_again_and_again(receiver: Receiver) -> None:
    """It takes an alert for over where it isn't repeated."""
    monitor = firing()
    notifying = notifier(receiver, monitor.state.alerts, to="alertmanager", repeat_s=0.05)
    notifying.begin()
    await told(receiver, notifying, 2)
    for path, _, body in receiver.requests[:2]:
        assert path == "/api/v2/alerts"
        assert body == [
            {
                "labels": {"alertname": "device-hot", "severity": "warning", "pool": "main", "about": GPU},
                "annotations": {
                    "summary": HOT.summary,
                    "action": HOT.action,
                    "value": "90 C (raised at 85)",
                },
                "startsAt": "2026-09-01T12:00:00.000Z",
            }
        ]


async def test_of_what_is_silenced_and_by_a_standby_nobody_is_told(receiver: Receiver) -> None:
    """Of two monitors one tells; what is silenced is raised all the same, and shown."""
    monitor = firing()
    standby = notifier(receiver, monitor.state.alerts, to="webhook")
    standby.saw(as_fact(raised("GPU-from-the-standby"), 1))
    monitor.wish(ev.AlertSilenceRequested(rule="device-hot", about=GPU, for_s=30, reason="new fans"))
    active = notifier(receiver, monitor.state.alerts, to="webhook")
    active.begin()
    active.saw(as_fact(raised("GPU-other"), 9))
    running = asyncio.create_task(standby.run())
    await told(receiver, active, 1)
    running.cancel()
    assert [body["about"] for _, _, body in receiver.requests] == ["GPU-other"]


def silence(until_at: int) -> ev.AlertSilenced:
    return ev.AlertSilenced(
        rule="device-hot", about=GPU, until_at=until_at, actor="operator", reason="new fans", answers=3
    )


async def test_the_end_of_what_was_told_is_told_though_it_is_silenced_by_then(receiver: Receiver) -> None:
    """A receiver would hold it open for ever; and what it never heard of has no end for it."""
    silenced = Alerts()
    notifying = notifier(receiver, silenced, to="webhook")
    notifying.begin()
    notifying.saw(as_fact(raised(), 1))
    await told(receiver, notifying, 1)
    silenced.silences["device-hot"] = silence(NOON + 60 * S)
    notifying.saw(as_fact(raised("GPU-quiet"), 2))
    notifying.saw(as_fact(replace(CLEARED, about=DeviceUuid("GPU-quiet")), 3))
    notifying.saw(as_fact(CLEARED, 4, at=NOON + S))
    await told(receiver, notifying, 2)
    assert [(body["status"], body["about"]) for _, _, body in receiver.requests] == [
        ("firing", GPU),
        ("resolved", GPU),
    ]


async def test_what_still_fires_when_its_silence_ends_is_told_then(receiver: Receiver) -> None:
    """A webhook is told once: what came in the silence would be told never."""
    silenced = Alerts(silences={"device-hot": silence(NOON + 60 * S)})
    notifying = notifier(receiver, silenced, to="webhook", repeat_s=0.05)
    notifying.begin()
    notifying.saw(as_fact(raised(), 1))
    running = asyncio.create_task(notifying.run())
    try:
        await asyncio.sleep(0.2)
        assert receiver.requests == []
        silenced.silences.clear()
        async with asyncio.timeout(60):
            while not receiver.requests:
                await asyncio.sleep(0.01)
        notifying.saw(as_fact(CLEARED, 2, at=NOON + S))
        async with asyncio.timeout(60):
            while len(receiver.requests) < 2:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
    assert [body["status"] for _, _, body in receiver.requests] == ["firing", "resolved"]


def test_the_docs_have_the_rules_that_we_have() -> None:
    """Marks that one can look up are marks that one can trust."""
    page = (Path(__file__).parents[3] / "docs" / "alerts.md").read_text()
    for rule in RULES:
        unit = f" {rule.unit}" if rule.unit else ""
        row = next(line for line in page.splitlines() if line.startswith(f"| `{rule.name}` | {rule.severity} |"))
        assert (
            f"| {rule.raise_at:,}{unit} for {rule.for_s} s | {rule.clear_at:,}{unit} for {rule.clear_for_s} s |" in row
        )
