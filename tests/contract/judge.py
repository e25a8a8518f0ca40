"""What becomes of one message: read as from the bus, folded by admission and monitor, and answered exactly once.

The real codec and the real cores, without a bus between them. Nothing here may raise, whatever the message is.
"""

import base64
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from apportion.admission import core as admission
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import ADMISSION, MONITOR, PoolId
from apportion.contracts.testing import NOON, a_node, a_queue, as_fact
from apportion.monitor import core as monitor

POOL: Final = PoolId("main")
CORPUS: Final = Path(__file__).with_name("corpus")


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a message is answered: admitted, duplicate, done (a wish other than a job request), or rejected."""

    verdict: str
    code: Refusal | None = None
    field: str = ""


class Sent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message as it lies on the bus; the body as text, as base64, or as base64 of its deflated bytes."""

    subject: str
    headers: dict[str, str] = {}
    body: str | None = None
    body_base64: str | None = None
    body_zlib: str | None = None

    def bytes(self) -> bytes:
        """The body."""
        if self.body is not None:
            return self.body.encode()
        if self.body_base64 is not None:
            return base64.b64decode(self.body_base64)
        return zlib.decompress(base64.b64decode(self.body_zlib or ""))


class Case(Sent, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A message with what it has to be answered, and what was sent before it."""

    name: str
    before: tuple[Sent, ...] = ()
    expected: Verdict


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the corpus."""

    group: str
    about: str
    cases: tuple[Case, ...]


def groups() -> list[Group]:
    """The corpus."""
    return [msgspec.json.decode(path.read_bytes(), type=Group) for path in sorted(CORPUS.glob("*.json"))]


class Bench:
    """A pool with one node and two queues, and the two cores that answer wishes."""

    def __init__(self) -> None:
        self.admission = admission.initial()
        self.monitor = monitor.initial()
        self._facts = 0
        self._wishes = 0
        self._fact(a_queue(), str(ADMISSION))
        self._fact(a_queue("small", limit_compute_milli=500, limit_memory_mib=8192), str(ADMISSION))
        self._fact(a_queue("theirs", tenants=("beta",)), str(ADMISSION))
        self._fact(a_node(), "agent-node-1")

    def _fact(self, fact: ev.Fact, author: str) -> None:
        self._facts += 1
        entry = as_fact(fact, self._facts, author=author)
        admission.evolve(self.admission, entry)
        monitor.evolve(self.monitor, entry)

    def read(self, subject: str, headers: Mapping[str, str] | None, body: bytes) -> Entry:
        """The message as the next entry of the stream of wishes."""
        self._wishes += 1
        return codec.decode_wish(subject, headers, body, seq=self._wishes, recorded_at=NOON)

    def answer_all(self, entries: Sequence[Entry]) -> dict[int, list[ev.Fact]]:
        """The answers to these wishes, by the wishes' sequences.

        All that the cores say is published, read back and folded, until they fall silent.
        """
        for entry in entries:
            admission.evolve(self.admission, entry)
            monitor.evolve(self.monitor, entry)
        answers: dict[int, list[ev.Fact]] = {}
        while facts := [
            *((fact, ADMISSION) for fact in admission.decide(self.admission, NOON)),
            *((fact, MONITOR) for fact in monitor.decide(self.monitor, NOON)),
        ]:
            for fact, author in facts:
                message = codec.encode_fact(POOL, author, fact, event_id=f"fact-{self._facts + 1}")
                back = codec.decode_fact(message.subject, message.headers, message.body, seq=1, recorded_at=NOON)
                assert back.event == fact, f"it reads back as another: {back.event!r}"
                self._fact(fact, str(author))
                answers.setdefault(getattr(fact, "answers", 0), []).append(fact)
        return answers

    def judge(self, subject: str, headers: Mapping[str, str] | None, body: bytes) -> Verdict:
        """What the message is answered."""
        entry = self.read(subject, headers, body)
        facts = self.answer_all([entry]).get(entry.seq, [])
        assert len(facts) == 1, f"{len(facts)} answers to one wish: {facts!r}"
        return verdict_of(facts[0])


def verdict_of(fact: ev.Fact) -> Verdict:
    """The answer in the corpus's words."""
    match fact:
        case ev.JobAdmitted():
            return Verdict(verdict="admitted")
        case ev.JobDuplicate():
            return Verdict(verdict="duplicate")
        case ev.JobRejected() | ev.WishRejected() | ev.NodeWishRejected():
            return Verdict(verdict="rejected", code=fact.code, field=fact.field)
        case _:
            return Verdict(verdict="done")


def judged(case: Case) -> Verdict:
    """What the case's message is answered in a fresh pool."""
    bench = Bench()
    for sent in case.before:
        bench.judge(sent.subject, sent.headers, sent.bytes())
    return bench.judge(case.subject, case.headers, case.bytes())
