"""What was used and what it costs: exact over any period, and the same as the pool's own fold says was held."""

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, Pricing, RunCause, ServiceClass
from apportion.contracts.ids import DeviceUuid, JobId, NodeId, QueueId, RunId, TenantId, run_id
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, a_queue
from apportion.monitor import metering
from apportion.monitor.log import EventLog
from apportion.monitor.metering import Card, Rate, Segment, Usage, summed, total_of, usage_of
from apportion.monitor.projections import entry_of
from apportion.monitor.testing import Recorded, Tape
from apportion.pool.state import Pool, evolve

NODE = NodeId("node-1")
HOUR = 3_600_000_000_000
MS = 1_000_000


def a_segment(**changes: Any) -> Segment:
    """Half a device for an hour, of which its process ran from 1 to 51 minutes, with 30 of 40 GiB in use."""
    fields: dict[str, Any] = {
        "run_id": "acme/a/0/1", "job_id": "acme/a", "tenant": "acme", "queue": "main", "service_class": "batch",
        "workload": "batch", "mode": "mps", "model": "h100-80", "node_id": "node-1", "device_uuid": "GPU-1",
        "requested_milli": 400, "requested_mib": 30_000, "milli": 500, "mib": 40_960, "peak_mib": 30_720,
        "held_from": NOON, "held_to": NOON + HOUR, "started": NOON + HOUR // 60, "ended": NOON + 51 * HOUR // 60,
    }  # fmt: skip
    return Segment(**{**fields, **changes})


def test_requested_allocated_and_used_are_three_numbers() -> None:
    """Asked 400, given 500 for 60 minutes, computing for 50 of them; a quarter of its memory was never in use."""
    minute = 60_000
    assert usage_of(a_segment(), NOON, NOON + HOUR) == Usage(
        segments=1,
        held_ms=60 * minute,
        requested_milli_ms=400 * 60 * minute,
        allocated_milli_ms=500 * 60 * minute,
        used_milli_ms=500 * 50 * minute,
        requested_mib_ms=30_000 * 60 * minute,
        allocated_mib_ms=40_960 * 60 * minute,
        used_mib_ms=30_720 * 50 * minute,
        over_asked_mib_ms=10_240 * 50 * minute,
        unpriced_milli_ms=500 * 60 * minute,
    )
    assert usage_of(a_segment(), NOON, NOON + HOUR).idle_milli_ms == 500 * 10 * minute


def test_what_nobody_looked_at_is_neither_used_nor_over_asked() -> None:
    used = usage_of(a_segment(peak_mib=None, started=None, ended=None), NOON, NOON + HOUR)
    assert (used.used_milli_ms, used.used_mib_ms, used.over_asked_mib_ms) == (0, 0, 0)
    assert used.idle_milli_ms == used.allocated_milli_ms


def test_a_rate_for_the_model_goes_before_one_for_any() -> None:
    """3.00 an hour for a whole h100, 1.00 a GiB-hour-hundredth beside: half a device and 40 GiB for an hour."""
    card = Card(
        effective_at=NOON,
        currency="EUR",
        rates=(
            Rate(pricing="on_demand", micro_per_gpu_hour=1),
            Rate(pricing="on_demand", model="h100-80", micro_per_gpu_hour=3_000_000, micro_per_gib_hour=10_000),
            Rate(pricing="spot", micro_per_gpu_hour=1_000_000),
            Rate(pricing="reserved", queues=("prod",), micro_per_gpu_hour=2_000_000),
        ),
    )

    def cost(**changes: Any) -> dict[str, int]:
        return usage_of(a_segment(**changes), NOON, NOON + HOUR, [card]).cost_micro

    assert cost() == {"EUR": 1_500_000 + 400_000}
    assert cost(model="a100-40") == {}  # half a micro-euro: less than one is none yet
    assert cost(service_class="spot") == {"EUR": 500_000}
    assert cost(queue="prod") == {"EUR": 1_000_000}
    assert cost(held_to=NOON + HOUR // 2) == {"EUR": 950_000}


def test_each_price_counts_from_its_instant_on() -> None:
    """A quarter of an hour without a price, half of one at 2.00, the last quarter at 4.00, in another currency."""
    two, four = (Rate(pricing="on_demand", micro_per_gpu_hour=price) for price in (2_000_000, 4_000_000))
    cards = [
        Card(effective_at=NOON + HOUR // 4, currency="EUR", rates=(two,)),
        Card(effective_at=NOON + 3 * HOUR // 4, currency="USD", rates=(four,)),
        Card(effective_at=NOON + 9 * HOUR, currency="USD", rates=()),
    ]
    used = usage_of(a_segment(), NOON, NOON + HOUR, cards)
    assert used.cost_micro == {"EUR": 500_000, "USD": 500_000}
    assert used.unpriced_milli_ms == 500 * 15 * 60_000


def test_cards_are_read_from_the_log(tmp_path: Path) -> None:
    """In the order of their instants; of two for one instant the later said one counts."""

    def card(at: int, *rates: ev.Rate) -> ev.Fact:
        return ev.RateCardChanged(effective_at=at, currency="EUR", rates=rates, actor="user:ann", reason="r")

    ten, one = (ev.Rate(pricing=Pricing.ON_DEMAND, micro_per_gpu_hour=price) for price in (10, 1))
    prod = ev.Rate(
        pricing=Pricing.RESERVED, queues=("prod",), model="h100-80", micro_per_gpu_hour=5, micro_per_gib_hour=2
    )
    tape = Tape()
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([tape.fact(card(NOON + HOUR, ten)), tape.fact(card(NOON, ten)), tape.fact(card(NOON, one, prod))])
        found = metering.cards_of(log.ask(metering.CARDS).rows)
        (change,) = log.ask("SELECT name, actor, reason FROM v_changes WHERE what = 'rates' AND before IS NULL").rows
    assert found == (
        Card(
            effective_at=NOON,
            currency="EUR",
            rates=(
                Rate(pricing="on_demand", micro_per_gpu_hour=1),
                Rate(pricing="reserved", model="h100-80", queues=("prod",), micro_per_gpu_hour=5, micro_per_gib_hour=2),
            ),
        ),
        Card(effective_at=NOON + HOUR, currency="EUR", rates=(Rate(pricing="on_demand", micro_per_gpu_hour=10),)),
    )
    assert change == ("EUR", "user:ann", "r")


def test_a_day_ends_at_midnight_utc() -> None:
    segment = a_segment(held_from=NOON + 11 * HOUR, held_to=NOON + 37 * HOUR, started=None, ended=None)
    days = summed([segment], ["tenant", "day"], NOON, NOON + 100 * HOUR)
    assert {day: used.held_ms // 3_600_000 for (_, day), used in days.items()} == {
        "2026-09-01": 1,
        "2026-09-02": 24,
        "2026-09-03": 1,
    }


instants = st.integers(NOON, NOON + 10 * HOUR)
rates = st.builds(
    Rate,
    pricing=st.sampled_from(["on_demand", "spot"]),
    model=st.sampled_from(["", "h100-80"]),
    micro_per_gpu_hour=st.integers(0, 9_999_999),
    micro_per_gib_hour=st.integers(0, 99_999),
)
cards = st.lists(
    st.builds(Card, effective_at=instants, currency=st.sampled_from(["EUR", "USD"]), rates=st.lists(rates).map(tuple)),
    max_size=4,
).map(lambda found: sorted(found, key=lambda card: card.effective_at))


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Any slice: held still or not, started or not, ended before its release or after a fencing took it."""
    at = sorted(draw(st.lists(instants, min_size=4, max_size=4)))
    return a_segment(
        milli=draw(st.integers(1, 1000)),
        mib=draw(st.integers(1, 80_000)),
        peak_mib=draw(st.none() | st.integers(0, 90_000)),
        service_class=draw(st.sampled_from(["batch", "spot"])),
        held_from=at[0],
        started=draw(st.none() | st.just(at[1])),
        ended=draw(st.none() | st.just(at[draw(st.integers(2, 3))])),
        held_to=draw(st.none() | st.just(at[draw(st.integers(2, 3))])),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
@given(st.lists(segments(), max_size=5), cards, st.lists(instants, min_size=1, max_size=4))
def test_bills_of_periods_that_meet_add_up_to_the_whole(
    held: list[Segment], known: list[Card], cuts: list[int]
) -> None:
    """To the last micro-unit and millisecond, wherever the month ends and however often prices change."""
    borders = [NOON - HOUR, *sorted(cuts), NOON + 11 * HOUR]
    parts = Usage()
    for begin, end in pairwise(borders):
        parts.add(total_of(summed(held, ["tenant", "queue"], begin, end, known)))
    whole = total_of(summed(held, ["job"], borders[0], borders[-1], known))
    by_day = total_of(summed(held, ["day", "pricing"], borders[0], borders[-1], known))
    parts.segments = by_day.segments = whole.segments  # a segment counts in each period that it touches
    assert parts == whole == by_day


def a_random_history(chance: Random, tape: Tape, facts: int) -> list[Recorded]:
    """Runs that are placed, started, ended, released, fenced and placed too late, at odd instants."""
    said: list[Recorded] = []
    epochs = {"node-1": 0, "node-2": 0}
    number = 0
    live: list[tuple[RunId, NodeId]] = []

    def say(event: ev.Fact, author: str = "") -> None:
        tape.at += chance.randrange(0, 3_000_000_000)
        said.append(tape.fact(event, author=author))

    say(a_queue())
    for name in epochs:
        say(a_node(name, devices=4))
    while len(said) < facts:
        match chance.randrange(8):
            case 0 | 1 | 2:
                number += 1
                tenant = chance.choice(["acme", "globex"])
                job = f"{tenant}/j{number}"
                service = chance.choice([ServiceClass.BATCH, ServiceClass.SPOT])
                say(a_job(f"j{number}", tenant=TenantId(tenant), service_class=service, answers=number))
                node = chance.choice(list(epochs))
                slices = tuple(
                    ev.Slice(
                        device_uuid=DeviceUuid(f"GPU-{node}-{device}"),
                        compute_milli=chance.randrange(1, 1000),
                        memory_mib=chance.randrange(1, 9000),
                        mode=chance.choice([Mode.MPS, Mode.EXCLUSIVE]),
                    )
                    for device in chance.sample(range(4), chance.randrange(1, 4))
                )
                epoch = max(0, epochs[node] - chance.choice([0, 0, 0, 1]))
                say(a_placement(job, node=node, slices=slices, node_epoch=epoch, queue=QueueId("main")))
                live.append((run_id(JobId(job), 0, 1), NodeId(node)))
            case 3 | 4 if live:
                run, on = chance.choice(live)
                say(ev.RunStarted(run_id=run, node_id=on, pid=1, started_at=tape.at))
            case 5 if live:
                run, on = chance.choice(live)
                peak = chance.choice([None, 5, 7001])
                say(ev.RunFinished(run_id=run, node_id=on, cause=RunCause.SUCCESS, finished_at=1, peak_memory_mib=peak))
            case 6 if live:
                run, on = live.pop(chance.randrange(len(live)))
                say(ev.RunReleased(run_id=run, node_id=on, released_at=tape.at))
            case 7 if chance.random() < 0.3:
                name = chance.choice(list(epochs))
                epochs[name] += 1
                lost = tuple(run for run, on in live if on == name)
                say(ev.NodeFenced(node_id=NodeId(name), epoch=epochs[name], runs=lost))
                if chance.random() < 0.5:
                    say(a_node(name, devices=4, epoch=epochs[name]))
            case _:
                pass
    return said


def held_by_the_fold(messages: list[Recorded], begin: int, end: int) -> dict[str, list[int]]:
    """Milli-GPU-ms and MiB-ms of each tenant, by summing what the pool's fold says is held between any two facts."""
    pool, total, before = Pool(), {"acme": [0, 0], "globex": [0, 0]}, 0
    for message in messages:
        ms = max(0, min(message.recorded_at, end) // MS - max(before, begin) // MS)
        for job in pool.jobs.values():
            for run in job.runs.values():
                if run.holds:
                    total[job.tenant][0] += ms * sum(piece.compute_milli for piece in run.slices)
                    total[job.tenant][1] += ms * sum(piece.memory_mib for piece in run.slices)
        before = message.recorded_at
        pool = evolve(pool, entry_of(message))
    return total


@pytest.mark.parametrize("seed", range(3))
def test_what_is_metered_is_what_was_held_exactly(seed: int, tmp_path: Path) -> None:
    """SQL over the log on one side, the services' own fold on the other: the same integers, in every period."""
    chance = Random(seed)
    messages = a_random_history(chance, Tape(), 250)
    newest = messages[-1].recorded_at
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(messages)
        found = [Segment(*row) for row in log.ask(metering.SEGMENTS).rows]
        columns = "sum(allocated_milli_ms), sum(allocated_mib_ms), sum(used_milli_ms), sum(coalesce(used_mib_ms, 0))"
        (in_sql,) = log.ask(f"SELECT {columns}, sum(requested_milli_ms), sum(held_ms) FROM v_usage").rows
        wrong = log.ask("SELECT * FROM v_double_slice WHERE compute_milli < 0").rows
    assert not wrong
    whole = total_of(summed(found, ["tenant"], 0, newest))
    assert in_sql == (
        whole.allocated_milli_ms, whole.allocated_mib_ms, whole.used_milli_ms, whole.used_mib_ms,
        whole.requested_milli_ms, whole.held_ms,
    )  # fmt: skip
    assert 0 < whole.used_milli_ms < whole.allocated_milli_ms
    for _ in range(4):
        begin, end = sorted(chance.randrange(NOON, newest + 1) for _ in range(2))
        metered = {
            tenant: [used.allocated_milli_ms, used.allocated_mib_ms]
            for (tenant,), used in summed(found, ["tenant"], begin, end).items()
        }
        assert {t: n for t, n in held_by_the_fold(messages, begin, end).items() if n != [0, 0]} == metered
