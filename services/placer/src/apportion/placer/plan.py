"""What would become of a job if it were asked for now: decided on a copy of the placer's state, by the same rules.

The job is folded in as if admission had just admitted it, and decisions are made until it is placed or nothing more
follows. So the answer is what the placer would state next if nothing else happened, those included who go before it
and those who would have to make room.
"""

from collections.abc import Sequence
from enum import StrEnum, unique
from typing import Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import ADMISSION, PLACER, Author, JobId, NodeId, RunId, TenantId, job_of_run
from apportion.placer import core
from apportion.placer.state import State
from apportion.placer.why import Why, why_in

ROUNDS_MAX: Final = 200
"""Decisions that are made for those who go before it; a pool with more waiting is told so."""


@unique
class Starts(StrEnum):
    """When the job would start."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"
    """Not in this pool as it is, were it empty."""
    UNKNOWN = "unknown"
    """Too many go before it."""


class Place(Struct, frozen=True, kw_only=True):
    """Where one replica would go."""

    run_id: RunId
    node_id: NodeId
    slices: tuple[ev.Slice, ...]
    candidates: tuple[ev.Candidate, ...]
    """The best few, the chosen one first."""
    excluded: dict[str, int]
    """Why the other nodes are out."""


class Stopped(Struct, frozen=True, kw_only=True):
    """A run that would be told to stop to make room."""

    run_id: RunId
    job_id: JobId
    node_id: NodeId
    grace_s: int


class Plan(Struct, frozen=True, kw_only=True):
    """The answer."""

    job_id: JobId
    starts: Starts
    places: tuple[Place, ...] = ()
    preempts: tuple[Stopped, ...] = ()
    """What would be stopped for this job."""
    rule: str = ""
    """By which right."""
    before: int = 0
    """Jobs that the same decisions would place."""
    why: Why | None = None
    """Where it would wait: for what, and until when."""
    policy: str = ""
    basis_seq: int = 0
    """The last fact that this goes by."""
    text: str = ""
    """All of it in one paragraph."""


def planned(state: State, job_id: JobId, tenant: TenantId, spec: ev.JobSpec, now: int) -> Plan:
    """What would become of the job. The state is used up: give a copy."""
    basis_seq = state.pool.seq
    admitted = ev.JobAdmitted(job_id=job_id, tenant=tenant, answers=0, wish_id="", spec=spec)
    _fold(state, [admitted], ADMISSION, now)
    places: list[Place] = []
    stops: list[Stopped] = []
    before: set[JobId] = set()
    chosen: set[RunId] = set()
    policy = rule = ""
    is_settled = False
    for _ in range(ROUNDS_MAX):
        facts = core.decide(state, now)
        for fact in facts:
            if isinstance(fact, ev.RunPlaced):
                if fact.job_id == job_id:
                    places.append(_place(fact))
                    policy = fact.policy
                elif not places:
                    before.add(fact.job_id)
            elif isinstance(fact, ev.PreemptionDecided) and fact.job_id == job_id:
                chosen.update(fact.runs)
                rule = fact.rule
            elif isinstance(fact, ev.RunStopOrdered) and fact.run_id in chosen:
                stops.append(
                    Stopped(
                        run_id=fact.run_id,
                        job_id=job_of_run(fact.run_id),
                        node_id=fact.node_id,
                        grace_s=fact.grace_s,
                    )
                )
        is_settled = not facts
        if places or is_settled:
            break
        _fold(state, facts, PLACER, now)
    why = None
    starts = Starts.NOW
    if not places:
        why = why_in(state, job_id, now) if is_settled else None
        starts = Starts.UNKNOWN if why is None else Starts.LATER if why.could_start else Starts.NEVER
    return Plan(
        job_id=job_id,
        starts=starts,
        places=tuple(places),
        preempts=tuple(stops),
        rule=rule,
        before=len(before),
        why=why,
        policy=policy,
        basis_seq=basis_seq,
        text=_text(starts, places, stops, len(before), why),
    )


def _fold(state: State, facts: Sequence[ev.Fact], author: Author, now: int) -> None:
    for fact in facts:
        seq = state.pool.seq + 1
        entry = Entry(stream=Stream.FACTS, seq=seq, recorded_at=now, event=fact, event_id=f"plan-{seq}", author=author)
        core.evolve(state, entry)


def _place(fact: ev.RunPlaced) -> Place:
    return Place(
        run_id=fact.run_id,
        node_id=fact.node_id,
        slices=fact.slices,
        candidates=fact.candidates,
        excluded=fact.excluded,
    )


def _text(starts: Starts, places: list[Place], stops: list[Stopped], before: int, why: Why | None) -> str:
    first = f"{before} job(s) that wait go first. " if before else ""
    match starts:
        case Starts.NOW:
            nodes = ", ".join(sorted({place.node_id for place in places}))
            return f"{first}It would start now on {nodes}."
        case Starts.UNKNOWN:
            return f"{first}More go before it than were looked at: ask again once fewer wait."
        case Starts.LATER if stops:
            names = ", ".join(sorted({stop.job_id for stop in stops}))
            grace_s = max(stop.grace_s for stop in stops)
            return (
                f"{first}It would start once {names} has made room, which is told to stop and has {grace_s} s for it."
            )
        case Starts.LATER:
            return f"{first}It would wait. {why.text if why else ''}"
        case Starts.NEVER:
            return f"It would never start in this pool as it is. {why.text if why else ''}"
