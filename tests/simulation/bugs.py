"""Mistakes of the kind that one makes, planted one at a time: a simulation that misses one of them proves nothing.

Each is a patch of our own code. ``test_bugs.py`` has the simulation find them; ``python -m tests.simulation.bugs``
prints which run found which, and the share that was found. What no rule forbids, because it does no harm that a user
would meet, is no bug of this list.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Final

import pytest
from msgspec.structs import replace

from apportion.admission import core as admission_core
from apportion.admission import lifecycle
from apportion.admission import state as admission_state
from apportion.contracts import events as ev
from apportion.contracts.causes import RunCause
from apportion.contracts.envelope import Entry
from apportion.monitor import core as monitor_core
from apportion.node_agent import core as agent_core
from apportion.placer import core as placer_core
from apportion.placer import rounds
from apportion.placer import state as placer_state
from apportion.pool import state as pool_state
from tests.simulation.run import RunBroken, run
from tests.simulation.world import Actor, MemoryBus, Options

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]

SEEDS: Final = 25


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


def found_by(seeds: int = SEEDS) -> tuple[str, str] | None:
    """The first run that breaks a rule, and what it says; None where none does."""
    for seed in range(1, seeds + 1):
        for kind in (small, hurried):
            try:
                run(kind(seed))
            except RunBroken as broken:
                return f"{kind.__name__} {seed}", str(broken).splitlines()[0]
            except Exception as crashed:  # noqa: BLE001 - a core that trips over its own bug was caught, too
                return f"{kind.__name__} {seed}", f"crashed: {type(crashed).__name__}: {crashed}"
    return None


# ------------------------------------------------------------------------------------------------- the pool's fold


def compute_is_taken_and_never_counted(patch: Patch) -> None:
    """One of the two dimensions is forgotten."""
    real = pool_state._take

    def take(pool: pool_state.Pool, run_view: Any, seq: int) -> None:
        real(pool, run_view, seq)
        for piece in run_view.slices:
            view = pool.nodes[run_view.node_id].devices.get(piece.device_uuid)
            if view is not None:
                view.used_compute_milli = 0

    patch.setattr(pool_state, "_take", take)


def slices_are_free_when_the_process_ends(patch: Patch) -> None:
    """Not when it was seen to have left its devices."""
    real = pool_state._finished

    def finished(pool: pool_state.Pool, entry: Entry, event: ev.RunFinished) -> None:
        real(pool, entry, event)
        run_view = pool_state.run_of(pool, event.run_id)
        if run_view is not None and run_view.holds:
            pool_state._give_back(pool, run_view, entry.seq)
            run_view.holds = False

    patch.setattr(pool_state, "_finished", finished)


def requeues_keep_the_attempt(patch: Patch) -> None:
    """The next run has the name of the last."""
    real = pool_state._requeued

    def requeued(pool: pool_state.Pool, entry: Entry, event: ev.JobRequeued) -> None:
        job = pool.jobs.get(event.job_id)
        real(pool, entry, event if job is None else replace(event, attempt=job.attempt))

    patch.setattr(pool_state, "_requeued", requeued)


def ends_are_forgotten(patch: Patch) -> None:
    """A job that ended waits on."""
    patch.setattr(pool_state, "_ended", lambda pool, job_id: None)


def what_comes_twice_counts_twice(patch: Patch) -> None:
    """Redelivery is not recognised."""
    real = pool_state._take

    def take(pool: pool_state.Pool, run_view: Any, seq: int) -> None:
        real(pool, run_view, seq)
        if seq % 7 == 0:
            real(pool, run_view, seq)

    patch.setattr(pool_state, "_take", take)


def limits_are_charged_once_in_two(patch: Patch) -> None:
    """Quota in use is less than what runs hold."""
    real = pool_state._charge
    count = [0]

    def charge(pool: pool_state.Pool, run_view: Any, sign: int) -> None:
        count[0] += 1
        if sign < 0 or count[0] % 2:
            real(pool, run_view, sign)

    patch.setattr(pool_state, "_charge", charge)


# ------------------------------------------------------------------------------------------------- admission


def an_answer_answers_the_next_wish_too(patch: Patch) -> None:
    """A wish is dropped without a word."""
    real = admission_state.State._answered

    def answered(self: Any, seq: int) -> None:
        real(self, seq + 1 if seq % 5 == 0 else seq)

    patch.setattr(admission_state.State, "_answered", answered)


def snapshots_lose_who_waits_for_an_answer(patch: Patch) -> None:
    """After a crash nobody remembers what was asked."""
    real = admission_core.restore

    def restore(data: bytes) -> Any:
        state = real(data)
        state.inbox.clear()
        return state

    patch.setattr(admission_core, "restore", restore)


def a_gang_has_succeeded_when_one_of_it_has(patch: Patch) -> None:
    """A job's end is stated while others of it run."""
    patch.setattr(lifecycle, "is_settled", lambda job: any(r.cause is RunCause.SUCCESS for r in job.current_runs()))


def late_words_are_believed(patch: Patch) -> None:
    """A run of an attempt that is over decides the next one."""
    patch.setattr(admission_state, "why_late", lambda kept, event: "")


# ------------------------------------------------------------------------------------------------- placer


def a_round_forgets_what_it_gave(patch: Patch) -> None:
    """Two placements of one round get the same slice."""
    patch.setattr(rounds.Round, "_set", lambda self, room: None)


def gangs_go_in_pieces(patch: Patch) -> None:
    """The last replica is left for the next round."""
    real = placer_core.decide

    def decide(state: Any, now: int) -> list[ev.Fact]:
        facts = real(state, now)
        placed = [fact for fact in facts if isinstance(fact, ev.RunPlaced)]
        return [fact for fact in facts if len(placed) < 2 or fact is not placed[-1]]

    patch.setattr(placer_core, "decide", decide)


def rooms_are_not_looked_at_again(patch: Patch) -> None:
    """What changed on a node since the last round is not seen."""
    real = placer_state._refresh_room

    def refresh(state: Any, node_id: Any, slices: Any = None) -> None:
        if node_id not in state.rooms or state.pool.seq % 3:
            real(state, node_id, slices)

    patch.setattr(placer_state, "_refresh_room", refresh)


def quotas_are_not_asked(patch: Patch) -> None:
    """A queue takes what there is."""
    patch.setattr(rounds.Round, "_out_of_quota", lambda self, shape: None)


def snapshots_of_the_placer_are_a_step_behind(patch: Patch) -> None:
    """A restarted placer believes that it has read what it has not."""
    real = placer_core.restore

    def restore(data: bytes) -> Any:
        state = real(data)
        state.pool.seq += 2
        return state

    patch.setattr(placer_core, "restore", restore)


# ------------------------------------------------------------------------------------------------- agent


def starts_are_not_remembered(patch: Patch) -> None:
    """Whoever looks again starts again."""
    real = agent_core.AgentCore.issued

    def issued(self: Any, state: Any, instruction: Any) -> Any:
        return state if isinstance(instruction, agent_core.StartRun) else real(self, state, instruction)

    patch.setattr(agent_core.AgentCore, "issued", issued)


def a_fenced_agent_goes_on(patch: Patch) -> None:
    """Its runs were placed elsewhere, and run here as well."""
    patch.setattr(agent_core.AgentCore, "_fenced", lambda self, state, entry, event: None)


def exits_are_not_heard(patch: Patch) -> None:
    """Every third process ends unnoticed."""
    real = agent_core.AgentCore.observe
    count = [0]

    def observe(self: Any, state: Any, observation: Any, now: int) -> Any:
        if isinstance(observation, agent_core.ProcessExited):
            count[0] += 1
            if count[0] % 3 == 0:
                return state
        return real(self, state, observation, now)

    patch.setattr(agent_core.AgentCore, "observe", observe)


def releases_come_before_the_end(patch: Patch) -> None:
    """Slices are said to be free while the process runs."""
    real = agent_core.AgentCore.decide

    def decide(self: Any, state: Any, now: int) -> list[Any]:
        facts = list(real(self, state, now))
        for run_view in state.runs.values():
            if run_view.is_started_stated and not run_view.is_finished_stated and not facts:
                released = ev.RunReleased(run_id=run_view.order.run_id, node_id=self.node_id, released_at=now)
                return [replace(released, caused_by=run_view.last_event)]
        return facts

    patch.setattr(agent_core.AgentCore, "decide", decide)


def ends_are_told_twice(patch: Patch) -> None:
    """What was stated is not remembered."""
    real = agent_core.AgentCore._own

    def own(self: Any, state: Any, entry: Entry) -> None:
        if not isinstance(entry.event, ev.RunFinished):
            real(self, state, entry)

    patch.setattr(agent_core.AgentCore, "_own", own)


# ------------------------------------------------------------------------------------------------- monitor


def fences_keep_the_epoch(patch: Patch) -> None:
    """A fencing that no order can be told from."""
    real = monitor_core.lost

    def lost(state: Any, node: Any, silent_ms: int) -> list[ev.Fact]:
        facts = real(state, node, silent_ms)
        return [replace(fact, epoch=fact.epoch - 1) if isinstance(fact, ev.NodeFenced) else fact for fact in facts]

    patch.setattr(monitor_core, "lost", lost)


def wishes_about_nodes_are_answered_twice(patch: Patch) -> None:
    """An answer is not noted."""
    patch.setattr(monitor_core, "_note_answer", lambda state, answers: None)


# ------------------------------------------------------------------------------------------------- shell and bus


def a_message_in_fifty_is_skipped(patch: Patch) -> None:
    """A gap in delivery that nobody notices."""
    real = Actor._read

    def read(self: Actor, stream: Any, *, limit: int) -> None:
        if self.wants is None and self.world.rng.random() < 0.02 and self.read[stream] < self.world.bus.last(stream):
            self.read[stream] += 1
        real(self, stream, limit=limit)

    patch.setattr(Actor, "_read", read)


def batches_are_stored_in_part(patch: Patch) -> None:
    """The bus keeps the first half of a batch."""
    real = MemoryBus.publish

    def publish(self: MemoryBus, lease: str, claim: int, messages: list[Any]) -> int | None:
        return real(self, lease, claim, messages[: max(1, len(messages) // 2)] if len(messages) > 3 else messages)

    patch.setattr(MemoryBus, "publish", publish)


# ------------------------------------------------------------------------------------------------- gangs and asides


def standing_still_is_told_again(patch: Patch) -> None:
    """An agent forgets that it said that a run stands still, or goes on."""
    real = agent_core.AgentCore._own

    def own(self: Any, state: Any, entry: Entry) -> None:
        if not isinstance(entry.event, ev.RunSuspended | ev.RunResumed):
            real(self, state, entry)

    patch.setattr(agent_core.AgentCore, "_own", own)


def checkpoints_are_told_again(patch: Patch) -> None:
    """One order to checkpoint has more than one answer."""
    real = agent_core.AgentCore._own

    def own(self: Any, state: Any, entry: Entry) -> None:
        if not isinstance(entry.event, ev.RunCheckpointed):
            real(self, state, entry)

    patch.setattr(agent_core.AgentCore, "_own", own)


def gangs_grow_past_their_most(patch: Patch) -> None:
    """A step more, whatever the largest size is."""
    real = rounds.Round._grow_one

    def grow(self: Any, job: Any, shape: Any, sizes: Any, blocked: Any) -> bool:
        larger = replace(job, spec=replace(job.spec, replicas=job.spec.replicas + 1))
        return real(self, larger, shape, sizes, blocked)

    patch.setattr(rounds.Round, "_grow_one", grow)


def avoided_nodes_are_forgotten(patch: Patch) -> None:
    """A retry goes to the node that failed it."""
    real = pool_state._requeued

    def requeued(pool: pool_state.Pool, entry: Entry, event: ev.JobRequeued) -> None:
        real(pool, entry, replace(event, avoid_nodes=()))

    patch.setattr(pool_state, "_requeued", requeued)


def what_it_follows_is_not_waited_for(patch: Patch) -> None:
    """A job that follows others is placed at once."""
    real = pool_state._admitted

    def admitted(pool: pool_state.Pool, entry: Entry, event: ev.JobAdmitted) -> None:
        real(pool, entry, replace(event, waits_for=()))

    patch.setattr(pool_state, "_admitted", admitted)


BUGS: Final[tuple[Bug, ...]] = (
    compute_is_taken_and_never_counted,
    slices_are_free_when_the_process_ends,
    requeues_keep_the_attempt,
    ends_are_forgotten,
    what_comes_twice_counts_twice,
    limits_are_charged_once_in_two,
    an_answer_answers_the_next_wish_too,
    snapshots_lose_who_waits_for_an_answer,
    a_gang_has_succeeded_when_one_of_it_has,
    late_words_are_believed,
    a_round_forgets_what_it_gave,
    gangs_go_in_pieces,
    rooms_are_not_looked_at_again,
    quotas_are_not_asked,
    snapshots_of_the_placer_are_a_step_behind,
    starts_are_not_remembered,
    a_fenced_agent_goes_on,
    exits_are_not_heard,
    releases_come_before_the_end,
    ends_are_told_twice,
    fences_keep_the_epoch,
    wishes_about_nodes_are_answered_twice,
    a_message_in_fifty_is_skipped,
    batches_are_stored_in_part,
    standing_still_is_told_again,
    checkpoints_are_told_again,
    gangs_grow_past_their_most,
    avoided_nodes_are_forgotten,
    what_it_follows_is_not_waited_for,
)


def main() -> int:
    """Plant each, and print what found it; 1 where one was not found."""
    caught = 0
    wanted = [bug for bug in BUGS if not sys.argv[1:] or bug.__name__ in sys.argv[1:]]
    for bug in wanted:
        began = time.perf_counter()
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            found = found_by()
        caught += found is not None
        seed, said = found or ("NOT FOUND", "")
        print(f"{bug.__name__:45} {seed:12} {time.perf_counter() - began:5.1f} s  {said[:110]}", flush=True)
    print(f"{caught} of {len(wanted)} found")
    return 0 if caught == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
