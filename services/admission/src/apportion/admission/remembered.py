"""What was asked under which identity, what it was answered, and which names are taken: as long as the streams are.

A repeat gets the first answer however late it comes, which is what the broker's window of duplicates can't promise. So
something of every request stays, in records of a fixed size (`ledger`); texts stay only where they are bounded.
"""

import hashlib
from itertools import islice
from typing import Final

from msgspec import Struct

from apportion.admission.ledger import KEY_BYTES, Column, Table, of_seq, to_seq
from apportion.admission.refusals import Refused
from apportion.contracts import events as ev
from apportion.contracts.causes import PUT_OFF, Refusal
from apportion.contracts.ids import JobId

REFUSALS_KEPT: Final = 10_000
"""Refusals that are repeated word by word; of older ones the code is kept, and the log has the words."""
ENDS: Final = ("", *(kind.__name__ for kind in ev.TERMINAL))
CODES: Final = tuple(Refusal)


class Identity(Struct, frozen=True, array_like=True):
    """By what a job request is known."""

    recorded_at: int
    digest: str
    """SHA-256 of what was asked."""
    by_event: bytes
    """Fingerprint of (tenant, source, id)."""
    by_key: bytes = b""
    """Fingerprint of (tenant, idempotency key); empty where none was given."""


class Written(Struct, kw_only=True, array_like=True):
    """``Remembered`` as it stands in a snapshot."""

    requests: tuple[bytes, bytes] = (b"", b"")
    marks: tuple[bytes, bytes, bytes] = (b"", b"", b"")
    jobs: tuple[bytes, bytes, bytes] = (b"", b"", b"")
    repeats: tuple[bytes, bytes] = (b"", b"")
    refusals: tuple[bytes, bytes] = (b"", b"")
    words: list[tuple[int, Refused]] = []
    settled: tuple[bytes, bytes, bytes] = (b"", b"", b"")


class Remembered:
    """Grows by some 80 to 105 bytes with each job request; nothing of it is ever dropped but the words of refusals."""

    def __init__(self, written: Written | None = None) -> None:
        found = written or Written()
        self._requests = Column(8 + KEY_BYTES, *found.requests)
        """Wish to when it was recorded and what it asked."""
        self._marks = Table(found.marks)
        """Fingerprint to the first wish that had it."""
        self._jobs = Table(found.jobs)
        """Job to the wish that it answers, eight times, and how it ended (place in ENDS)."""
        self._repeats = Column(8, *found.repeats)
        """Wish to the one that it repeats."""
        self._refusals = Column(1, *found.refusals)
        self._words = dict(found.words)
        self._settled = Table(found.settled)
        """First wish of an identity that was put off to the one that was answered for good."""

    def written(self) -> Written:
        """For a snapshot: equal contents, equal bytes."""
        return Written(
            requests=self._requests.to_bytes(),
            marks=self._marks.to_bytes(),
            jobs=self._jobs.to_bytes(),
            repeats=self._repeats.to_bytes(),
            refusals=self._refusals.to_bytes(),
            words=list(self._words.items()),
            settled=self._settled.to_bytes(),
        )

    # ------------------------------------------------------------------------------------------- wishes

    def note_request(self, seq: int, identity: Identity) -> None:
        """Somebody asked for a job."""
        self._requests.append(seq, of_seq(identity.recorded_at) + _digest(identity))
        self._marks.put(identity.by_event, seq, is_kept=True)
        if identity.by_key:
            self._marks.put(identity.by_key, seq, is_kept=True)

    def first_with(self, mark: bytes) -> int | None:
        """The first wish with this fingerprint; None where there was none."""
        return self._marks.get(mark)

    def asked_the_same(self, seq: int, identity: Identity) -> bool:
        """True where that wish asked what this identity's does."""
        found = self._requests.get(seq)
        return found is not None and found[8:] == _digest(identity)

    def recorded_at(self, seq: int) -> int | None:
        """When that wish was recorded; None where it is not known."""
        found = self._requests.get(seq)
        return None if found is None else to_seq(found)

    # ------------------------------------------------------------------------------------------- answers

    def note_admitted(self, job_id: JobId, seq: int) -> None:
        """That wish became this job."""
        self._jobs.put(_key(job_id), seq << 3)

    def note_ended(self, job_id: JobId, end: str) -> None:
        """The job ended so; the first end counts."""
        found = self._jobs.get(_key(job_id))
        if found is not None and not found & 7:
            self._jobs.put(_key(job_id), found | ENDS.index(end))

    def note_repeated(self, seq: int, first: int) -> None:
        """That wish was answered as the repeat of another, which became a job."""
        self._repeats.append(seq, of_seq(first))

    def note_refused(self, seq: int, refused: Refused) -> None:
        """That wish was refused."""
        self._refusals.append(seq, bytes((CODES.index(refused.code),)))
        if refused.code in PUT_OFF:
            return  # asked again it is looked at anew: nobody will want these words
        self._words[seq] = refused
        for oldest in list(islice(self._words, max(0, len(self._words) - REFUSALS_KEPT))):
            del self._words[oldest]

    def note_settled(self, first: int, seq: int) -> None:
        """The identity of that first wish, which was put off, was answered for good by a later one."""
        self._settled.put(bytes(8) + of_seq(first), seq, is_kept=True)

    def settled_by(self, first: int) -> int:
        """The wish whose answer stands for the identity of that first one: itself, or a later one."""
        return self._settled.get(bytes(8) + of_seq(first)) or first

    def wish_of(self, job_id: JobId) -> int | None:
        """The wish that the job answers; None where no job ever had that id."""
        found = self._jobs.get(_key(job_id))
        return None if found is None else found >> 3

    def end_of(self, job_id: JobId) -> str:
        """The name of the fact with which the job ended; empty where it lives or never was."""
        found = self._jobs.get(_key(job_id))
        return "" if found is None else ENDS[found & 7]

    def repeat_of(self, seq: int) -> int | None:
        """The wish that this one was answered as a repeat of."""
        found = self._repeats.get(seq)
        return None if found is None else to_seq(found)

    def refusal_of(self, seq: int) -> Refused | None:
        """Why that wish was refused; None where it was not."""
        found = self._refusals.get(seq)
        if found is None:
            return None
        words = self._words.get(seq)
        if words is not None:
            return words
        return Refused(code=CODES[found[0]], hint=f"Wish {seq}, which this repeats, was refused so: see the log.")


def fingerprint(*parts: str) -> bytes:
    """Sixteen bytes that stand for texts of any length: a stranger's long source must not cost us memory for ever.

    Each part goes in behind its length, so that no two lists of parts read the same.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "big"))
        digest.update(data)
    return digest.digest()


def _key(job_id: JobId) -> bytes:
    return fingerprint("job", job_id)


def _digest(identity: Identity) -> bytes:
    return bytes.fromhex(identity.digest[: 2 * KEY_BYTES])
