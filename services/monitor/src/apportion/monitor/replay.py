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
from apportion.contracts.codec import encode_body
from apportion.contracts.envelope import Basis, Entry, Stream
from apportion.contracts.ids import Author
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
    by_author: dict[str, int] = {}
    entries: int = 0
    """Messages read, of both streams."""

    @property
    def holds(self) -> bool:
        """True where every decision was made again and came out the same."""
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

    def fold_to(self, basis: Basis) -> None:
        """Fold what the decision had folded, and nothing more."""
        while self.waiting and self.waiting[0].seq <= basis.facts:
            entry = self.waiting.popleft()
            self.state = self.core.evolve(self.state, entry)
            self.facts_seq = entry.seq
        while self._next_wish is not None and self._next_wish.seq <= basis.wishes:
            self.state = self.core.evolve(self.state, self._next_wish)
            self.wishes_seq = self._next_wish.seq
            self._next_wish = next(self._wishes, None)


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
    recomputed = list(author.core.decide(author.state, basis.decided_at))
    report.decisions += 1
    report.facts += len(batch)
    report.by_author[who] += 1
    recorded = [entry.event for entry in batch]
    if recorded == recomputed:
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


def _leave(report: Report, why: str) -> None:
    report.unchecked[why] = report.unchecked.get(why, 0) + 1


def _as_text(entry: Entry) -> str:
    return encode_body(entry.event).decode() if isinstance(entry.event, ev.Event) else described(entry.event)
