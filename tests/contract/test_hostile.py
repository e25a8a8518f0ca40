"""Whatever the bytes, the headers and the subject: an entry comes back, and the cores answer it once."""

import functools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import codec, diagnosis
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Entry, Undecodable
from apportion.contracts.testing import NOON
from tests.contract import fuzz
from tests.contract.judge import groups
from tests.contract.mutations import Message, Mutator

SUBJECT = "apportion.v1.main.wish.acme.JobRequested"


def refusal(body: str | bytes, subject: str = SUBJECT) -> Undecodable:
    data = body.encode() if isinstance(body, str) else body
    found = codec.decode_wish(subject, None, data, seq=1, recorded_at=NOON).event
    assert isinstance(found, Undecodable), found
    return found


@settings(max_examples=500, deadline=None, derandomize=True)
@given(subject=st.text(), headers=st.dictionaries(st.text(), st.text(), max_size=6), body=st.binary(max_size=300))
def test_nothing_that_anybody_sends_raises(subject: str, headers: dict[str, str], body: bytes) -> None:
    """One message that stops a reader stops everybody behind it."""
    entry = codec.decode_wish(subject, headers, body, seq=1, recorded_at=NOON)
    assert isinstance(entry, Entry)
    fuzz.check_texts(entry)


@functools.cache
def messages() -> list[Message]:
    mutator = Mutator(11)
    return [mutator.message() for _ in range(1000)]


def test_the_quick_parser_reads_what_the_careful_one_reads() -> None:
    """Which of them reads a body depends on how it is written; what its publisher is told must not."""
    read = 0
    bodies = [case.bytes() for group in groups() for case in group.cases]
    for body in (*bodies, *(body for _, _, body in messages())):
        quick = diagnosis._plainly_parsed(body)
        if quick is not None:
            read += 1
            assert diagnosis.parsed(body) == _as_written(quick), body
    assert read > 300


def _as_written(value: object) -> object:
    """The value with its numbers as the careful parser keeps them: as text."""
    match value:
        case bool():
            return value
        case int():
            return str(value)
        case dict():
            return {name: _as_written(item) for name, item in value.items()}
        case list():
            return [_as_written(item) for item in value]
        case _:
            assert not isinstance(value, float), value
            return value


HEADER_NAMES = st.sampled_from(
    [
        "ce-id",
        "Ce-Id",
        "ce-source",
        "ce-type",
        "ce-specversion",
        "content-type",
        "ce-expirytime",
        "traceparent",
        "ce-actor",
    ]
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(index=st.integers(0, 999), headers=st.dictionaries(HEADER_NAMES, st.text(max_size=30), max_size=6))
def test_no_headers_around_a_nearly_good_message_raise(index: int, headers: dict[str, str]) -> None:
    """Envelope and body are each half right."""
    subject, _, body = messages()[index]
    entry = codec.decode_wish(subject, headers, body, seq=1, recorded_at=NOON)
    fuzz.check_texts(entry)


@pytest.mark.timeout(240)
def test_three_thousand_changed_messages_are_each_answered_once() -> None:
    """Read, decided, stored and read back, with the schema as the second opinion: a part of the long run, each time."""
    counts = fuzz.run(3_000, seed=7)
    assert sum(counts[verdict] for verdict in ("admitted", "duplicate", "done", "rejected")) == 3_000
    assert counts["admitted"] > 100


def test_the_mutator_is_the_same_for_the_same_seed() -> None:
    """A failure is found again."""
    first, second = Mutator(3), Mutator(3)
    assert [first.message() for _ in range(200)] == [second.message() for _ in range(200)]


def test_the_mutator_reaches_every_way_to_be_refused() -> None:
    """Changes that all end in the same answer would prove little."""
    counts: Counter[str] = Counter()
    mutator = Mutator(1)
    for _ in range(3_000):
        event = codec.decode_wish(*mutator.message(), seq=1, recorded_at=NOON).event
        counts[str(event.code) if isinstance(event, Undecodable) else "good"] += 1
    reached = {
        Refusal.NOT_JSON,
        Refusal.NOT_UTF8,
        Refusal.TYPE_UNKNOWN,
        Refusal.TYPE_MISMATCH,
        Refusal.ENVELOPE_INVALID,
        Refusal.FIELD_UNKNOWN,
        Refusal.FIELD_MISSING,
        Refusal.FIELD_INVALID,
        Refusal.FIELD_CONFLICT,
    }
    assert reached <= counts.keys()
    assert counts["good"] > 200


# What a refusal says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field", "expected", "found"),
    [
        ('{"queue":"Main","workload":{}}', "queue", "a name of 1 to 63", '"Main"'),
        ('{"queue":"main","workload":{},"priority":1001}', "priority", "a whole number from 0 to 1000", "1001"),
        ('{"queue":"main","workload":{},"priority":1.50}', "priority", "a whole number from 0 to 1000", "1.50"),
        ('{"queue":"main","workload":{"kind":"gpu"}}', "workload.kind", "one of training, inference, batch", '"gpu"'),
        ('{"queue":"main","workload":{"command":["a",{}]}}', "workload.command[1]", "text", "an object with 0 fields"),
        ('{"queue":"main","workload":{"command":"a"}}', "workload.command", "an array", '"a"'),
        ('{"queue":"main","workload":{"env":{"A":"1","B":2}}}', "workload.env.B", "text or an object", "2"),
        ('{"queue":"main","workload":{},"labels":{"a":"\\u001b[31m"}}', "labels.a", "text without", '"\\u001b[31m"'),
        ('{"queue":"main","workload":{},"preemptible":"yes"}', "preemptible", "true or false", '"yes"'),
        ('{"queue":"main","workload":{},"job_id":"\u0430cme"}', "job_id", "a name of", '"\\u0430cme"'),
        ('{"queue":"main","workload":[]}', "workload", "an object", "an array of 0"),
        (
            '{"queue":"main","workload":{"command":[' + ",".join(['""'] * 257) + "]}}",
            "workload.command",
            "at most 256 entries",
            "an array of 257",
        ),
        (
            '{"queue":"main","workload":{},"job_set":"%s"}' % ("a" * 500),
            "job_set",
            "at most 63 characters",
            '"' + "a" * 128 + "…",
        ),
    ],
)
def test_a_refusal_names_the_field_what_belongs_there_and_what_was_there(
    body: str, field: str, expected: str, found: str
) -> None:
    """Enough to correct the request without a look at the documents; what was found can't harm who reads it."""
    said = refusal(body)
    assert (said.code, said.field) == (Refusal.FIELD_INVALID, field)
    assert expected in said.expected
    assert said.found.startswith(found)


@pytest.mark.parametrize(
    ("body", "field", "meant"),
    [
        ('{"queue":"main","workload":{},"priorty":1}', "priorty", "perhaps priority"),
        ('{"Queue":"main","workload":{}}', "Queue", "perhaps queue"),
        ('{"queue":"main","workload":{"comand":["a"]}}', "workload.comand", "perhaps workload.command"),
        ('{"queue":"main","workload":{},"gpu_milli":100}', "gpu_milli", "perhaps resources.gpu_milli"),
        ('{"queue":"main","workload":{},"command":["a"]}', "command", "perhaps workload.command"),
        (
            '{"queue":"main","workload":{},"resources":{"gpu-milli":1}}',
            "resources.gpu-milli",
            "perhaps resources.gpu_milli",
        ),
        (
            '{"queue":"main","workload":{},"gang":{"zzz":1}}',
            "gang.zzz",
            "one of min, preferred, required, size, topology_key",
        ),
    ],
)
def test_an_unknown_field_is_refused_with_the_name_that_was_likely_meant(body: str, field: str, meant: str) -> None:
    """A typo is corrected in one look."""
    said = refusal(body)
    assert (said.code, said.field) == (Refusal.FIELD_UNKNOWN, field)
    assert meant in said.expected


def test_a_subject_of_ten_thousand_characters_is_answered_in_few() -> None:
    """Whoever sends it must not make everybody store it again."""
    said = refusal("{}", "x" * 10_000)
    assert (said.code, said.field) == (Refusal.TYPE_UNKNOWN, "subject")
    entry = codec.decode_wish(f"apportion.v1.main.wish.{'a' * 10_000}.JobRequested", None, b"{}", seq=1, recorded_at=0)
    assert len(str(entry.tenant)) <= codec.SUBJECT_PART_MAX


@pytest.mark.parametrize("kind", ev.WISHES, ids=ev.type_name)
def test_every_wish_is_held_to_the_same_rules(kind: type[ev.Wish]) -> None:
    """Not only the one that is asked most."""
    subject = f"apportion.v1.main.wish.acme.{kind.__name__}"
    assert refusal("[]", subject).code is Refusal.NOT_JSON
    assert refusal('{"nonsense":1}', subject).code is Refusal.FIELD_UNKNOWN
    assert refusal("{}", subject).code is Refusal.FIELD_MISSING
    assert refusal('{"dry_run":true,"dry_run":false}', subject).code in {Refusal.FIELD_MISSING, Refusal.FIELD_CONFLICT}


def test_an_event_written_with_defaults_spelled_out_is_no_repeat() -> None:
    """The quick look for repeated names compares with an event that is written without its defaults."""
    body = b'{"queue":"main","workload":{"command":["a"],"kind":"batch","env":{}},"gang":{"size":1},"dry_run":false}'
    event = codec.decode_body("JobRequested.v1", body)
    assert isinstance(event, ev.JobRequested)
    assert diagnosis.fault_of_event(body, event) is None
    twice = body.replace(b'"dry_run"', b'"queue":"main","dry_run"')
    assert isinstance(codec.decode_body("JobRequested.v1", twice), Undecodable)
