"""What was once published can be read for ever."""

import pytest

from apportion.contracts.codec import decode_body, encode_body
from apportion.contracts.events import FACTS, WISHES, Event, type_name
from tests.contract.golden import GOLDEN, example, path_of

KINDS = (*WISHES, *FACTS)


@pytest.mark.parametrize("kind", KINDS, ids=type_name)
def test_every_event_still_reads_and_writes_its_released_bytes(kind: type[Event]) -> None:
    """A renamed field, another unit or a lost default would change what old logs say."""
    path = path_of(kind)
    assert path.exists(), f"{path.name} is missing: run `python -m tests.contract.golden` and commit it"
    golden = path.read_bytes()
    event = decode_body(type_name(kind), golden)
    assert isinstance(event, kind)
    assert event == example(kind)
    assert encode_body(event) == golden


def test_no_released_event_was_dropped() -> None:
    """A type that was published stays readable."""
    assert {p.name for p in GOLDEN.glob("*.json")} == {f"{type_name(kind)}.json" for kind in KINDS}
