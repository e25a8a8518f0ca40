"""What is kept for ever is kept exactly, comes back from a snapshot, and takes a bounded number of bytes a wish."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from apportion.admission import ledger, remembered
from apportion.admission.ledger import Column, Table
from apportion.admission.refusals import Refused
from apportion.admission.remembered import ENDS, Identity, Remembered, Written, fingerprint
from apportion.admission.testing import History
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.ids import JobId
from apportion.contracts.testing import a_job_request, a_queue

# Few upper halves, so that keys which differ only in their lower half are seen; few values, so that repeats are.
_KEYS = st.builds(
    lambda high, low: high.to_bytes(8, "big") + low.to_bytes(8, "big"),
    st.sampled_from((0, 1, 2, 3, (1 << 64) - 1)) | st.integers(0, 40),
    st.integers(0, 5) | st.just((1 << 64) - 1),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(_KEYS, st.integers(0, 2**64 - 1), st.booleans()), max_size=120))
def test_a_table_is_a_dict_of_the_same(puts: list[tuple[bytes, int, bool]]) -> None:
    """Blocks of four, so that splits and ties over them are met; whatever order, equal contents are equal bytes."""
    model: dict[bytes, int] = {}
    table = Table()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "BLOCK_MAX", 4)
        for key, value, is_kept in puts:
            table.put(key, value, is_kept=is_kept)
            if not (is_kept and key in model):
                model[key] = value
        for key, _, _ in puts:
            assert table.get(key) == model[key]
            other = bytes((key[0] ^ 0x40, *key[1:]))
            assert table.get(other) == model.get(other)
        assert len(table) == len(model)
        sorted_in = Table()
        for key in sorted(model):
            sorted_in.put(key, model[key])
        again = Table(table.to_bytes())
        assert again.to_bytes() == table.to_bytes() == sorted_in.to_bytes()
        assert all(again.get(key) == value for key, value in model.items())


@given(st.lists(st.integers(1, 50), max_size=20))
def test_a_column_finds_each_sequence_and_no_other(steps: list[int]) -> None:
    """Sequences rise with gaps: wishes that are no job requests lie between."""
    column = Column(2)
    model: dict[int, bytes] = {}
    seq = 0
    for step in steps:
        seq += step
        model[seq] = seq.to_bytes(2, "big")
        column.append(seq, model[seq])
    again = Column(2, *column.to_bytes())
    for wanted in range(seq + 2):
        assert column.get(wanted) == again.get(wanted) == model.get(wanted)


def test_the_first_end_and_the_first_wish_of_an_identity_stand() -> None:
    """Later words about the same change nothing, whoever says them."""
    kept = Remembered()
    mark = fingerprint("event", "acme", "/a", "1")
    for seq in (5, 9):
        kept.note_request(seq, Identity(seq * 10, f"{seq:064x}", mark))
    kept.note_admitted(JobId("acme/a"), 5)
    kept.note_ended(JobId("acme/a"), "JobFailed")
    kept.note_ended(JobId("acme/a"), "JobSucceeded")
    kept.note_ended(JobId("acme/never"), "JobSucceeded")
    again = Remembered(kept.written())
    for found in (kept, again):
        assert found.first_with(mark) == 5
        assert (found.wish_of(JobId("acme/a")), found.end_of(JobId("acme/a"))) == (5, "JobFailed")
        assert (found.wish_of(JobId("acme/never")), found.end_of(JobId("acme/never"))) == (None, "")
        assert (found.recorded_at(9), found.recorded_at(6)) == (90, None)
    assert len(ENDS) <= 8, "the end of a job has three bits"


def test_of_old_refusals_the_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of refusals must not fill the memory; a repeat is refused all the same, and told where the words are."""
    monkeypatch.setattr(remembered, "REFUSALS_KEPT", 2)
    history = History()
    history.fact(a_queue())
    for number in range(4):
        history.wish(a_job_request(queue="nope", job_id=f"j{number}"), event_id=f"e{number}")
    history.settle()
    history.wish(a_job_request(queue="nope", job_id="j0"), event_id="e0")
    history.wish(a_job_request(queue="nope", job_id="j3"), event_id="e3")
    old, new = history.decide()
    assert isinstance(old, ev.JobRejected)
    assert isinstance(new, ev.JobRejected)
    assert (old.code, old.field) == (Refusal.QUEUE_NOT_FOUND, "")
    assert "Wish 1" in old.message
    assert (new.code, new.field, new.found) == (Refusal.QUEUE_NOT_FOUND, "queue", "nope")


def test_a_request_costs_a_bounded_number_of_bytes() -> None:
    """However long its texts: 56 bytes of the request, 24 of its key, 24 of its job, and 16 more for luck."""
    kept = Remembered()
    empty = _size(kept.written())
    count = 500
    for seq in range(1, count + 1):
        identity = Identity(seq, f"{seq:064x}", fingerprint("event", str(seq)), fingerprint("key", str(seq)))
        kept.note_request(seq, identity)
        kept.note_admitted(JobId(f"acme/{seq:063d}"), seq)
    assert (_size(kept.written()) - empty) / count <= 120


def test_words_of_refusals_come_back_from_a_snapshot() -> None:
    """A restart answers a repeat as before."""
    kept = Remembered()
    kept.note_refused(3, Refused(code=Refusal.BUSY, field="queue", expected="a", found="b", hint="c"))
    assert Remembered(kept.written()).refusal_of(3) == kept.refusal_of(3)


def _size(written: Written) -> int:
    parts = (*written.requests, *written.marks, *written.jobs, *written.repeats, *written.refusals)
    return sum(map(len, parts))
