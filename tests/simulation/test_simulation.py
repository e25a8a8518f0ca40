"""Years of bad days in minutes: every seed is a run, and a rule that breaks prints the command that repeats it."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from apportion.admission import core as admission_core
from apportion.contracts import events as ev
from apportion.contracts.causes import StopCause
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import JobId
from apportion.contracts.testing import NOON, a_node, a_placement, as_fact
from apportion.node_agent import core as agent_core
from apportion.placer import books, evictions, preempt, reclaim
from apportion.placer import core as placer_core
from apportion.pool import state as pool_state
from tests.simulation import checkers
from tests.simulation.run import RunBroken, corpus, options_of, run
from tests.simulation.world import Actor, MemoryBus, Options

CHUNKS = 8
EVENTS = int(os.environ.get("SIM_EVENTS", "200000"))
"""CI, which has ten minutes on machines that may be slow, asks for fewer."""


@pytest.mark.parametrize("seed", corpus())
def test_a_seed_that_once_failed_holds(seed: int) -> None:
    """What was broken once stays mended."""
    run(options_of(seed))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_rule_holds_at_every_step_of_any_run(chunk: int) -> None:
    """Two hundred thousand events with crashes, lost acknowledgements, stale placers, lost nodes: no rule broken."""
    done = 0
    seed = chunk * 1000 + 1
    while done < EVENTS // CHUNKS:
        done += run(options_of(seed)).events
        seed += 1


def test_a_seed_is_a_run() -> None:
    """The same seed gives the same history, so a failure can be looked at again."""
    options = options_of(4)
    options.jobs = 60
    assert run(options).digest == run(options).digest


def small(seed: int) -> Options:
    """A short run with many faults."""
    return Options(
        seed=seed, nodes=3, devices=2, jobs=80, arrival_ms=200, fault_ms=300, cancelled=0.3, slow_batches=0.15
    )


def hurried(seed: int) -> Options:
    """A crowded run in which people change their minds while the placer's batches are on their way."""
    return Options(
        seed=seed, nodes=2, devices=2, jobs=60, arrival_ms=120, fault_ms=3000, cancelled=0.6, slow_batches=0.5
    )


def contested(seed: int) -> Options:
    """A short run without faults in which all want the same few devices at once, and nothing is guaranteed."""
    return Options(seed=seed, nodes=2, devices=2, jobs=30, arrival_ms=60, faults=False, guaranteed_pct=0)


def promised(seed: int) -> Options:
    """The same with half of the pool guaranteed to queues."""
    return Options(seed=seed, nodes=2, devices=2, jobs=30, arrival_ms=60, faults=False)


def broken_within(seeds: int, kinds: tuple[Callable[[int], Options], ...] = (small, hurried)) -> str:
    """What the first seed that breaks a rule says; fails where none does."""
    for options in (kind(seed) for seed in range(1, seeds + 1) for kind in kinds):
        try:
            run(options)
        except RunBroken as broken:
            return str(broken)
        except Exception as crashed:  # noqa: BLE001 - a core that trips over its own bug was caught, too
            return f"crashed: {type(crashed).__name__}: {crashed}"
    pytest.fail(f"{seeds} seeds did not notice")


def no_lease_check(patch: pytest.MonkeyPatch) -> None:
    """The bus lets a paused session's batch through."""
    real = MemoryBus.publish

    def publish(self: MemoryBus, lease: str, claim: int, messages: list[Any]) -> int | None:
        return real(self, lease, self.leases.get(lease, claim), messages)

    patch.setattr(MemoryBus, "publish", publish)


def no_waiting_for_the_echo(patch: pytest.MonkeyPatch) -> None:
    """Deciding again before one's own events came round, from a state that lacks them."""
    real = Actor._arrive

    def arrive(self: Actor) -> None:
        real(self)
        self.published_seq = 0
        self.caught_up_at = (0, 0)

    patch.setattr(Actor, "_arrive", arrive)


def fenced_runs_keep_their_slices(patch: pytest.MonkeyPatch) -> None:
    """A fencing that frees nothing."""
    patch.setattr(pool_state, "_fenced", lambda pool, entry, event: None)


def released_twice(patch: pytest.MonkeyPatch) -> None:
    """Slices given back at the run's end, and again at its release."""
    real = pool_state._finished

    def finished(pool: pool_state.Pool, entry: Entry, event: ev.RunFinished) -> None:
        real(pool, entry, event)
        run_view = pool_state.run_of(pool, event.run_id)
        if run_view is not None:
            pool_state._give_back(pool, run_view, entry.seq)

    patch.setattr(pool_state, "_finished", finished)


def overtaken_placements_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """A job's end forgets what was placed meanwhile."""
    real = pool_state._placed

    def placed(pool: pool_state.Pool, entry: Entry, event: ev.RunPlaced) -> None:
        if event.job_id in pool.jobs:
            real(pool, entry, event)

    patch.setattr(pool_state, "_placed", placed)


def agents_forget_what_ran(patch: pytest.MonkeyPatch) -> None:
    """A restarted agent that doesn't look at its run directories."""
    real = agent_core.AgentCore._settle

    def settle(self: Any, state: Any, now: int) -> None:
        state.found = {}
        real(self, state, now)

    patch.setattr(agent_core.AgentCore, "_settle", settle)


def admission_answers_repeats(patch: pytest.MonkeyPatch) -> None:
    """Deciding that depends on more than was folded: the clock's last bit."""
    real = admission_core.decide

    def decide(state: Any, now: int) -> list[ev.Fact]:
        facts = list(real(state, now))
        return facts[: 1 + now % 2] if len(facts) > 1 and decide_count(facts) % 2 else facts

    count = [0]

    def decide_count(_: list[ev.Fact]) -> int:
        count[0] += 1
        return count[0]

    patch.setattr(admission_core, "decide", decide)


def placer_forgets_memory(patch: pytest.MonkeyPatch) -> None:
    """Memory is taken and never counted."""
    real = pool_state._take

    def take(pool: pool_state.Pool, run_view: Any, seq: int) -> None:
        real(pool, run_view, seq)
        for piece in run_view.slices:
            view = pool.nodes[run_view.node_id].devices.get(piece.device_uuid)
            if view is not None:
                view.used_memory_mib = 0

    patch.setattr(pool_state, "_take", take)


def placer_changes_its_mind(patch: pytest.MonkeyPatch) -> None:
    """A decision that isn't a function of state and time: every second one is late."""
    real = placer_core.decide
    count = [0]

    def decide(state: Any, now: int) -> list[ev.Fact]:
        count[0] += 1
        return [] if count[0] % 2 else real(state, now)

    patch.setattr(placer_core, "decide", decide)


def holds_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A job that is held is placed like any other."""
    patch.setattr(pool_state, "_held", lambda pool, event: None)


def sizes_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A job that was resized is placed with the size that it had."""
    patch.setattr(pool_state, "_resized", lambda pool, entry, event: None)


def anybody_is_stopped_for_anybody(patch: pytest.MonkeyPatch) -> None:
    """Preemption that forgets whose class comes first: two jobs take each other's place for ever."""
    patch.setattr(evictions, "BY_CLASS", evictions.BY_CLASS._replace(may=lambda one, other: True))
    patch.setattr(evictions, "RULES", (evictions.BY_CLASS,))


def what_was_freed_is_anybodys(patch: pytest.MonkeyPatch) -> None:
    """Others are stopped, and whoever comes first takes the room."""
    patch.setattr(evictions.Evictions, "kept_for", lambda self, node_id, shape: None)


def gangs_lose_a_part(patch: pytest.MonkeyPatch) -> None:
    """Only the run that is in the way is stopped, and the rest of its gang runs on."""
    real = preempt.Planner.victims

    def victims(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = real(self, *args, **kwargs)
        return None if plan is None else plan._replace(runs=plan.runs[:1])

    patch.setattr(preempt.Planner, "victims", victims)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "bug",
    [
        no_lease_check,
        no_waiting_for_the_echo,
        fenced_runs_keep_their_slices,
        released_twice,
        overtaken_placements_hold_nothing,
        agents_forget_what_ran,
        admission_answers_repeats,
        placer_forgets_memory,
        placer_changes_its_mind,
        holds_are_forgotten,
        sizes_are_forgotten,
    ],
    ids=lambda bug: bug.__name__,
)
def test_a_planted_bug_is_caught(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation that never fails proves nothing: each of these must break a rule."""
    bug(monkeypatch)
    assert broken_within(25)


@pytest.mark.parametrize(
    "bug",
    [anybody_is_stopped_for_anybody, what_was_freed_is_anybodys, gangs_lose_a_part],
    ids=lambda bug: bug.__name__,
)
def test_a_planted_bug_of_preemption_is_caught(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all want the same, short runs tell."""
    bug(monkeypatch)
    assert broken_within(25, (contested,))


def limits_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Queues hold what they like."""
    patch.setattr(books.Books, "over", lambda self, queue, more: None)


def everything_is_owed(patch: pytest.MonkeyPatch) -> None:
    """A queue takes back what was never guaranteed to it."""
    patch.setattr(reclaim.Reclaim, "_is_owed", lambda self, view, charge: True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", [limits_are_forgotten, everything_is_owed], ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_quota_is_caught(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all want the same, and half of it is guaranteed."""
    bug(monkeypatch)
    assert broken_within(25, (promised,))


def test_an_order_to_stop_that_does_not_come_breaks_a_rule() -> None:
    """Who was told to stop holds its devices until somebody says so to its node."""
    checker, run = checkers.Checker(), a_placement()
    stopping = ev.JobStopping(job_id=JobId("acme/train-7"), attempt=1, cause=StopCause.CANCELLED, actor="user:ann")
    late = checkers.ORDERED_S_MAX * 1_000_000_000 + 1
    checker.holding[run.run_id] = checker.placed[run.run_id] = run
    checker._orders_come(as_fact(stopping, 1, at=NOON))
    checker._orders_come(as_fact(a_node(), 2, at=NOON + late - 1))
    with pytest.raises(checkers.Violation, match="an order to stop comes within 30 s"):
        checker._orders_come(as_fact(a_node(), 3, at=NOON + late))
    order = ev.RunStopOrdered(run_id=run.run_id, node_id=run.node_id, cause=StopCause.CANCELLED, grace_s=5, actor="a")
    checker._orders_come(as_fact(order, 4, at=NOON + late))
    checker._orders_come(as_fact(a_node(), 5, at=NOON + 2 * late))
