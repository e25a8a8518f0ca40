"""Every decision made again from the log, and compared with what was recorded. It can't act: cores and a file, no bus.

A decision was stored as one batch of facts that name their basis. Here the same core folds the same entries up to that
basis and decides at the same instant: it has to say the same facts, or the promise of the log is broken.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.codec import encode_body
from apportion.contracts.envelope import Basis, Entry, Stream, Undecodable
from apportion.contracts.ids import Author, job_of_run
from apportion.monitor.log import messages_of
from apportion.monitor.projections import described, entry_of


class Decider(Protocol):
    """What a replay needs of a core; usually a module."""

    @property
    def POLICY(self) -> str:  # noqa: N802 - a constant of the module
        """``name@version#digest`` of the rules."""

    def initial(self) -> Any:
        """The state before the first entry."""

    def evolve(self, state: Any, entry: Entry) -> Any:
        """The state after an entry."""

    def decide(self, state: Any, now: int) -> Sequence[ev.Fact]:
        """What follows."""


class Difference(Struct, frozen=True, kw_only=True):
    """A decision that comes out differently: both sides, as JSON texts in the order of the batch."""

    author: Author
    first_seq: int
    """Sequence of the first fact of the batch that was recorded."""
    basis: Basis
    index: int
    """The first fact of the batch that differs, from 0."""
    recorded: tuple[str, ...]
    recomputed: tuple[str, ...]


class Resting(Struct, frozen=True, kw_only=True):
    """A decision that can't be made again, as a payload that it rests on was erased by order."""

    author: Author
    first_seq: int
    rests_on: tuple[str, ...]
    """Such as ``wishes 12 (acme/train-7)``."""


class Report(Struct, kw_only=True):
    """What a replay found."""

    decisions: int = 0
    """Decisions made again: recorded batches."""
    facts: int = 0
    """Facts in them."""
    differences: int = 0
    first: Difference | None = None
    unchecked: dict[str, int] = {}
    """Decisions that could not be made again, by reason: made by other rules, or the log lacks their basis."""
    erased: list[Resting] = []
    """Decisions that rest on an erased payload and don't come out the same without it: nothing wrong with them."""
    by_author: dict[str, int] = {}
    observed: int = 0
    """Facts of others, nodes' agents above all: what they saw and did, and nothing to decide again."""
    entries: int = 0
    """Messages read, of both streams."""

    @property
    def holds(self) -> bool:
        """True where every decision was made again and came out the same, but for those without their basis."""
        return not self.differences and not self.unchecked


class _Author:
    """One core on its way through the streams."""

    def __init__(self, core: Decider, wishes: Iterator[Entry]) -> None:
        self.core = core
        self.state = core.initial()
        self.waiting: deque[Entry] = deque()
        """Facts that came and are not in any basis yet."""
        self._wishes = wishes
        self._next_wish = next(wishes, None)
        self.facts_seq = 0
        self.wishes_seq = 0
        self.erased: list[_Erased] = []
        """Payloads that it should have folded, and are gone."""

    def fold_to(self, basis: Basis) -> None:
        """Fold what the decision had folded, and nothing more."""
        while self.waiting and self.waiting[0].seq <= basis.facts:
            entry = self.waiting.popleft()
            self._fold(entry)
            self.facts_seq = entry.seq
        while self._next_wish is not None and self._next_wish.seq <= basis.wishes:
            self._fold(self._next_wish)
            self.wishes_seq = self._next_wish.seq
            self._next_wish = next(self._wishes, None)

    def _fold(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, Undecodable) and event.code is Refusal.ERASED:
            self.erased.append(_Erased(stream=entry.stream, seq=entry.seq, job_id=event.job_id))
        elif isinstance(event, ev.TERMINAL):
            for one in self.erased:
                one.is_over = one.is_over or one.job_id == event.job_id
        self.state = self.core.evolve(self.state, entry)

    def missed(self, batch: list[Entry], recomputed: Sequence[ev.Fact]) -> tuple[str, ...]:
        """The erased payloads that a decision which comes out otherwise rests on.

        Those of jobs that it is about, and of jobs that had not ended; where there is none of these, all: what a job
        held counts for whose turn it is, and how long it ran for what is expected of the next, long after its end.
        """
        facts = [entry.event for entry in batch] + list(recomputed)
        jobs = {_job_of(fact) for fact in facts}
        answers = {getattr(fact, "answers", 0) for fact in facts}
        near = [
            one
            for one in self.erased
            if not one.is_over or one.job_id in jobs or (one.stream is Stream.WISHES and one.seq in answers)
        ]
        return tuple(f"{one.stream} {one.seq} ({one.job_id or 'no job'})" for one in near or self.erased)


class _Erased(Struct):
    """A payload that is gone, and whose it was."""

    stream: Stream
    seq: int
    job_id: str | None
    is_over: bool = False
    """The job has ended since."""


def replay_verify(path: Path, cores: Mapping[Author, Decider]) -> Report:
    """Make every decision of these authors again from the log at ``path``, which nobody may be writing.

    Raises log.LogUnavailable.
    """
    return replay(
        (entry_of(message) for message in messages_of(path, Stream.FACTS)),
        {author: (entry_of(message) for message in messages_of(path, Stream.WISHES)) for author in cores},
        cores,
    )


def replay(facts: Iterable[Entry], wishes: Mapping[Author, Iterable[Entry]], cores: Mapping[Author, Decider]) -> Report:
    """Make every decision of these authors again. Facts and wishes come in stream order; each author has its wishes."""
    authors = {author: _Author(core, iter(wishes[author])) for author, core in cores.items()}
    report = Report(by_author=dict.fromkeys(sorted(authors), 0))
    for (who, basis), batch in groupby(facts, key=lambda entry: (entry.author, entry.basis)):
        entries = list(batch)
        report.entries += len(entries)
        if who in authors and basis is not None:
            _check(report, who, authors[who], basis, entries)
        elif who not in authors:
            report.observed += len(entries)
        for one in authors.values():
            one.waiting.extend(entries)
    report.entries += max((author.wishes_seq for author in authors.values()), default=0)
    return report


def _check(report: Report, who: Author, author: _Author, basis: Basis, batch: list[Entry]) -> None:
    author.fold_to(basis)
    if basis.policy != author.core.POLICY:
        return _leave(report, f"decided by {basis.policy}, given {author.core.POLICY}")
    if author.facts_seq != basis.facts or author.wishes_seq < basis.wishes:
        return _leave(report, "the log lacks a part of the basis")
    # Rules may be known by a name that others gave them: then nothing but those can make the decision again.
    cannot_decide = getattr(author.core, "cannot_decide", None)
    if cannot_decide is not None and (why := cannot_decide(author.state)) is not None:
        return _leave(report, why)
    try:
        recomputed = _decided_again(author, basis, [entry.event for entry in batch])
    except Exception:
        if not author.erased:
            raise
        recomputed = []  # without what was erased, the state may be none that the core knows
    report.decisions += 1
    report.facts += len(batch)
    report.by_author[who] += 1
    recorded = [entry.event for entry in batch]
    if recorded == recomputed:
        return None
    missed = author.missed(batch, recomputed)
    if missed:
        report.erased.append(Resting(author=who, first_seq=batch[0].seq, rests_on=missed))
        return None
    report.differences += 1
    if report.first is None:
        sides = [_as_text(entry) for entry in batch], [encode_body(fact).decode() for fact in recomputed]
        pairs = zip(recorded, recomputed, strict=False)
        report.first = Difference(
            author=who,
            first_seq=batch[0].seq,
            basis=basis,
            index=next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(recorded), len(recomputed))),
            recorded=tuple(sides[0]),
            recomputed=tuple(sides[1]),
        )
    return None


def _decided_again(author: _Author, basis: Basis, recorded: list[Any]) -> list[ev.Fact]:
    # An author that observes what is in no stream decides anew from what was said of it.
    redecide = getattr(author.core, "redecide", None)
    if redecide is None:
        return list(author.core.decide(author.state, basis.decided_at))
    return list(redecide(author.state, basis.decided_at, recorded))


def _job_of(fact: ev.Event | Undecodable) -> str | None:
    run = getattr(fact, "run_id", None)
    job: str | None = getattr(fact, "job_id", None)
    return job_of_run(run) if job is None and run is not None else job


def _leave(report: Report, why: str) -> None:
    report.unchecked[why] = report.unchecked.get(why, 0) + 1


def _as_text(entry: Entry) -> str:
    return encode_body(entry.event).decode() if isinstance(entry.event, ev.Event) else described(entry.event)
