"""A history for tests: events in the order in which the two streams recorded them, and the state that they make."""

from typing import Any

from apportion.admission import core
from apportion.contracts import events as ev
from apportion.contracts.causes import RunCause
from apportion.contracts.envelope import Basis, Entry, Stream, Undecodable
from apportion.contracts.ids import Author, JobId, NodeId, RunId, TenantId, agent_author, run_id
from apportion.contracts.testing import ACME, NOON, a_placement, as_fact, as_wish


class History:
    """Folds what it is told; ``entries`` is what the streams hold."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.state = core.initial()
        self._facts = 0
        self._wishes = 0

    def add(self, entry: Entry) -> Entry:
        """Record an entry and fold it."""
        self.entries.append(entry)
        core.evolve(self.state, entry)
        return entry

    def wish(self, wish: ev.Wish | Undecodable, *, tenant: TenantId = ACME, **changes: Any) -> Entry:
        """Somebody asks."""
        self._wishes += 1
        if isinstance(wish, Undecodable):
            entry = Entry(
                stream=Stream.WISHES,
                seq=self._wishes,
                recorded_at=NOON,
                event=wish,
                event_id=f"wish-{self._wishes}",
                tenant=tenant,
                subject_type=changes.pop("subject_type", wish.type),
                **changes,
            )
        else:
            entry = as_wish(wish, self._wishes, tenant=tenant, **changes)
        return self.add(entry)

    def fact(self, event: ev.Fact, *, at: int = NOON, basis: int | None = None) -> Entry:
        """Its author states something; ``basis`` is the last fact that it had folded, where it decides from facts."""
        self._facts += 1
        author = agent_author(event.node_id) if isinstance(event, _AGENTS) else Author("")
        if isinstance(event, ev.LeaseClaimed):
            author = Author(event.author)
        known = None if basis is None else Basis(facts=basis, wishes=0, decided_at=at, policy="test")
        return self.add(as_fact(event, self._facts, author=author, at=at, basis=known))

    def decide(self, now: int = NOON) -> list[ev.Fact]:
        """What admission says now."""
        return core.decide(self.state, now)

    def settle(self, now: int = NOON) -> list[ev.Fact]:
        """Let admission decide and hear itself until it falls silent: everything that it said."""
        said: list[ev.Fact] = []
        while facts := self.decide(now):
            said += facts
            for fact in facts:
                self.fact(fact, at=now)
        return said

    def place(self, job: str = "acme/train-7", *, replica: int = 0, attempt: int = 1, at: int = NOON) -> RunId:
        """The placer places a replica."""
        placed = a_placement(job, replica=replica, attempt=attempt)
        self.fact(placed, at=at)
        return placed.run_id

    def start(self, run: RunId, *, at: int = NOON) -> None:
        """Its agent starts it."""
        self.fact(ev.RunStarted(run_id=run, node_id=NODE, pid=1, started_at=at), at=at)

    def finish(self, run: RunId, cause: RunCause = RunCause.SUCCESS, *, at: int = NOON, **fields: Any) -> None:
        """Its process ends."""
        self.fact(ev.RunFinished(run_id=run, node_id=NODE, cause=cause, finished_at=at, **fields), at=at)

    def release(self, run: RunId, *, at: int = NOON) -> None:
        """Its slices are free."""
        self.fact(ev.RunReleased(run_id=run, node_id=NODE, released_at=at), at=at)

    def run_to_end(
        self, job: str = "acme/train-7", cause: RunCause = RunCause.SUCCESS, *, attempt: int = 1, at: int = NOON
    ) -> None:
        """A job's only replica is placed, runs and ends so."""
        run = self.place(job, attempt=attempt, at=at)
        self.start(run, at=at)
        self.finish(run, cause, at=at)
        self.release(run, at=at)


NODE = NodeId("node-1")
_AGENTS = (ev.NodeRegistered, ev.DeviceHealthChanged, ev.RunStarted, ev.RunFinished, ev.RunReleased)


def run_of(name: str = "train-7", *, replica: int = 0, attempt: int = 1) -> RunId:
    """The id of acme's run."""
    return run_id(JobId(f"{ACME}/{name}"), replica, attempt)
