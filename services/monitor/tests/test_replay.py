"""Decisions made again from a log: the same where nothing was touched, and named where something was."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.envelope import Basis, Entry, Stream
from apportion.contracts.ids import ADMISSION, PLACER, Author
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement, as_fact, as_wish
from apportion.monitor.log import EventLog
from apportion.monitor.replay import Decider, Report, replay, replay_verify
from apportion.monitor.testing import Tape

POLICY = "test@1#000000000000"


def a_core(decide: Any, *, policy: str = POLICY) -> Decider:
    """A core whose state is the list of what it folded; ``decide`` gets that and the instant."""

    def evolve(state: list[Entry], entry: Entry) -> list[Entry]:
        return [*state, entry]

    return SimpleNamespace(POLICY=policy, initial=list, evolve=evolve, decide=decide)


def admit_all(state: list[Entry], _now: int) -> list[ev.Fact]:
    """Answers every wish that no fact answers, in order."""
    answered = max((e.event.answers for e in state if isinstance(e.event, ev.JobAdmitted)), default=0)
    wishes = [e for e in state if e.stream is Stream.WISHES and e.seq > answered]
    return [a_job(e.event.job_id or "", answers=e.seq) for e in wishes if isinstance(e.event, ev.JobRequested)]


def place_all(state: list[Entry], now: int) -> list[ev.Fact]:
    """Places every admitted job that is not placed, at an index that depends on the instant."""
    placed = {e.event.job_id for e in state if isinstance(e.event, ev.RunPlaced)}
    return [
        a_placement(e.event.job_id, device=now % 2)
        for e in state
        if isinstance(e.event, ev.JobAdmitted) and e.event.job_id not in placed
    ]


CORES = {ADMISSION: a_core(admit_all), PLACER: a_core(place_all)}


class World:
    """Authors that really decide, one after another, and the two streams that come of it."""

    def __init__(self) -> None:
        self.facts: list[Entry] = []
        self.wishes: list[Entry] = []
        self.now = NOON

    def wish(self, name: str) -> None:
        self.wishes.append(as_wish(a_job_request(job_id=name), len(self.wishes) + 1))

    def decide(self, author: Author, *, behind: int = 0) -> None:
        """One decision from all but the last ``behind`` facts of others, as a slower reader would."""
        self.now += 1
        own = max((e.seq for e in self.facts if e.author == author), default=0)
        seen = max(own, len(self.facts) - behind)
        wishes = self.wishes if author == ADMISSION else []
        said = CORES[author].decide([*self.facts[:seen], *wishes], self.now)
        basis = Basis(facts=seen, wishes=len(wishes), decided_at=self.now, policy=POLICY)
        for fact in said:
            self.facts.append(as_fact(fact, len(self.facts) + 1, author=author, basis=basis))

    def replayed(self) -> Report:
        return replay(self.facts, dict.fromkeys(CORES, self.wishes), CORES)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.just(("wish", 0)),
            st.tuples(st.sampled_from([ADMISSION, PLACER]), st.integers(0, 5)),
            st.just(("node", 0)),
        ),
        max_size=40,
    )
)
def test_any_history_of_honest_authors_replays_without_a_difference(steps: list[tuple[str, int]]) -> None:
    """However far behind each of them was when it decided."""
    world = World()
    batches = 0
    for number, (what, behind) in enumerate(steps):
        if what == "wish":
            world.wish(f"job-{number}")
        elif what == "node":
            world.facts.append(as_fact(a_node(), len(world.facts) + 1, author="agent-node-1"))
        else:
            before = len(world.facts)
            world.decide(Author(what), behind=behind)
            batches += len(world.facts) > before
    report = world.replayed()
    assert report.holds
    assert report.decisions == batches
    assert report.facts == sum(1 for fact in world.facts if fact.basis is not None)


def a_world_with_two_batches() -> World:
    """One admission and one placement, of two jobs each."""
    world = World()
    world.wish("a")
    world.wish("b")
    world.decide(ADMISSION)
    world.decide(PLACER)
    return world


def test_a_fact_that_was_not_decided_like_that_is_named_with_both_sides() -> None:
    """The first difference is where an investigation begins."""
    world = a_world_with_two_batches()
    forged = as_fact(a_placement("acme/b", device=7), 4, author=PLACER, basis=world.facts[3].basis)
    world.facts[3] = forged
    report = world.replayed()
    assert (report.decisions, report.differences) == (2, 1)
    assert report.first is not None
    assert (report.first.author, report.first.first_seq, report.first.index) == (PLACER, 3, 1)
    assert "GPU-node-1-7" in report.first.recorded[1]
    assert "GPU-node-1-7" not in report.first.recomputed[1]


@pytest.mark.parametrize("kept", [0, 1])
def test_a_decision_that_is_not_whole_is_a_difference(kept: int) -> None:
    """A batch is all or none; half of one was never decided."""
    world = a_world_with_two_batches()
    del world.facts[2 + kept]
    report = world.replayed()
    assert report.differences == 1


def test_a_decision_by_other_rules_is_told_apart_from_a_difference() -> None:
    """It can't be made again by these; that is no accusation, and no proof either."""
    world = a_world_with_two_batches()
    cores = {ADMISSION: CORES[ADMISSION], PLACER: a_core(place_all, policy="other@2#1")}
    report = replay(world.facts, dict.fromkeys(cores, world.wishes), cores)
    assert (report.decisions, report.differences, report.holds) == (1, 0, False)
    assert report.unchecked == {f"decided by {POLICY}, given other@2#1": 1}


def test_a_basis_that_the_log_lacks_is_said() -> None:
    """A log that was cut can't prove anything about what came after the cut."""
    world = a_world_with_two_batches()
    report = replay(world.facts, dict.fromkeys(CORES, world.wishes[:1]), CORES)
    assert report.unchecked == {"the log lacks a part of the basis": 1}


def test_decisions_are_recomputed_from_a_file_alone(tmp_path: Path) -> None:
    """Through real bytes: encoded, logged, read back, decoded."""
    tape = Tape()
    world = a_world_with_two_batches()
    path = tmp_path / "log.duckdb"
    rows = [tape.wish(e.event) for e in world.wishes if isinstance(e.event, ev.Wish)]
    rows += [
        tape.fact(e.event, author=e.author or "", basis=e.basis) for e in world.facts if isinstance(e.event, ev.Fact)
    ]
    with EventLog.open(path) as log:
        log.append(rows)
    report = replay_verify(path, CORES)
    assert report.holds
    assert report.by_author == {ADMISSION: 1, PLACER: 1}
    assert (report.facts, report.entries) == (4, 6)
    connection = duckdb.connect(str(path))
    connection.execute(
        "UPDATE events SET payload = encode(replace(decode(payload), 'GPU-node-1-', 'GPU-node-2-')) WHERE ordinal = 6"
    )
    connection.close()
    report = replay_verify(path, CORES)
    assert report.first is not None
    assert report.first.first_seq == 3


def test_a_decision_that_rests_on_an_erased_payload_is_told_and_is_no_difference(tmp_path: Path) -> None:
    """By order: the admission lacks its wish, the placement its job. Others come out the same; a forged one differs."""
    tape = Tape()
    world = World()
    for name in ("a", "b"):
        world.wish(name)
        world.decide(ADMISSION)
        world.decide(PLACER)
    rows = [tape.wish(a_job_request(job_id=name)) for name in ("a", "b")]
    for fact in world.facts:
        assert isinstance(fact.event, ev.Fact)
        rows.append(tape.fact(fact.event, author=fact.author or "", basis=fact.basis))
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(rows)
        for ordinal in (1, 3):
            log.erase([ordinal], rewrite=lambda _: None)
    cores = {ADMISSION: a_core(admit_all), PLACER: a_core(place_all)}
    report = replay_verify(tmp_path / "log.duckdb", cores)
    assert [(one.author, one.first_seq, one.rests_on) for one in report.erased] == [
        (ADMISSION, 1, ("wishes 1 (acme/a)",)),
        (PLACER, 2, ("facts 1 (acme/a)",)),
    ]
    assert (report.differences, report.holds, report.decisions) == (0, True, 4)
