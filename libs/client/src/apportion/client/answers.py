"""How a wish was answered, as a closed set of types. Each carries the fact that says so."""

from typing import TypeAlias

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import JobId, NodeId


class Stored(Struct, frozen=True, kw_only=True):
    """The wish is on disk; nobody was waited for."""

    id: str
    wish_seq: int
    is_repeat: bool = False
    """The bus had a wish of this id already: ``wish_seq`` is that one's."""


class Unanswered(Struct, frozen=True, kw_only=True):
    """The wish is on disk, and was not answered in the time given. It will be."""

    id: str
    wish_seq: int


class Admitted(Struct, frozen=True, kw_only=True):
    """The job is accepted, and waits for slices."""

    id: str
    wish_seq: int
    fact_seq: int
    fact: ev.JobAdmitted

    @property
    def job_id(self) -> JobId:
        """The job that it is now."""
        return self.fact.job_id

    @property
    def replicas(self) -> int:
        """How many runs an attempt has."""
        return self.fact.spec.replicas


class Duplicate(Struct, frozen=True, kw_only=True):
    """The wish repeats an earlier one; the job is that one's."""

    id: str
    wish_seq: int
    fact_seq: int
    fact: ev.JobDuplicate

    @property
    def job_id(self) -> JobId:
        """The job of the first wish."""
        return self.fact.original_job_id


class Rejected(Struct, frozen=True, kw_only=True):
    """The wish is refused; nothing was or will be done."""

    id: str
    wish_seq: int
    fact_seq: int
    fact: ev.JobRejected | ev.WishRejected

    @property
    def code(self) -> Refusal:
        """Why, as a word of a closed set."""
        return self.fact.code

    @property
    def field(self) -> str:
        """Path in the request; empty where it is no field's fault."""
        return self.fact.field

    @property
    def expected(self) -> str:
        """What would have been right."""
        return self.fact.expected

    @property
    def found(self) -> str:
        """What was there."""
        return self.fact.found

    @property
    def message(self) -> str:
        """The same in a sentence, and what to do."""
        return self.fact.message


class Judged(Struct, frozen=True, kw_only=True):
    """What a dry run would be answered; nothing was done."""

    id: str
    wish_seq: int
    fact_seq: int
    fact: ev.WishJudged


class Cancelled(Struct, frozen=True, kw_only=True):
    """The job held nothing, and is over."""

    id: str
    wish_seq: int
    fact_seq: int
    fact: ev.JobCancelled


class Stopping(Struct, frozen=True, kw_only=True):
    """The job's runs are told to stop; it is over when they are."""

    id: str
    wish_seq: int
    fact_seq: int
    fact: ev.JobStopping


class Started(Struct, frozen=True, kw_only=True):
    """Every replica of the job runs."""

    job_id: JobId
    fact_seq: int
    fact: ev.RunStarted
    """The last replica's."""
    nodes: tuple[NodeId, ...]
    first: "Admitted | Duplicate | None" = None
    """How the request was answered, where this call sent it."""


class Finished(Struct, frozen=True, kw_only=True):
    """The job is over."""

    job_id: JobId
    fact_seq: int
    fact: ev.JobSucceeded | ev.JobFailed | ev.JobCancelled | ev.JobExpired
    nodes: tuple[NodeId, ...] = ()
    """Where its last attempt started; empty where it never did."""
    detail: str = ""
    """What the node said of the last run's end."""
    first: "Admitted | Duplicate | None" = None

    @property
    def is_success(self) -> bool:
        """True where every replica ended well."""
        return isinstance(self.fact, ev.JobSucceeded)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the run that decided it; 0 for success, None where no process said one."""
        return 0 if self.is_success else getattr(self.fact, "exit_code", None)


Answer: TypeAlias = Stored | Unanswered | Admitted | Duplicate | Rejected | Judged | Started | Finished
CancelAnswer: TypeAlias = Unanswered | Cancelled | Stopping | Rejected | Judged
Direct: TypeAlias = Admitted | Duplicate | Rejected | Judged | Cancelled | Stopping
"""What one fact can say to one wish."""


def answer_of(entry: Entry, *, id: str, wish_seq: int) -> Direct | None:  # noqa: A002 - CloudEvents' own name
    """The answer that the fact gives to the wish; None where it gives none."""
    event = entry.event
    if getattr(event, "answers", None) != wish_seq:
        return None
    match event:
        case ev.JobAdmitted():
            return Admitted(id=id, wish_seq=wish_seq, fact_seq=entry.seq, fact=event)
        case ev.JobDuplicate():
            return Duplicate(id=id, wish_seq=wish_seq, fact_seq=entry.seq, fact=event)
        case ev.JobRejected() | ev.WishRejected():
            return Rejected(id=id, wish_seq=wish_seq, fact_seq=entry.seq, fact=event)
        case ev.WishJudged():
            return Judged(id=id, wish_seq=wish_seq, fact_seq=entry.seq, fact=event)
        case ev.JobCancelled():
            return Cancelled(id=id, wish_seq=wish_seq, fact_seq=entry.seq, fact=event)
        case ev.JobStopping():
            return Stopping(id=id, wish_seq=wish_seq, fact_seq=entry.seq, fact=event)
        case _:
            return None
