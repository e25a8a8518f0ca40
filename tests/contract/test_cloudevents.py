"""What the CloudEvents SDK writes we read alike in each mode, and what we write the SDK reads.

The SDK is the oracle: nothing but this test uses it. Its HTTP binding has the header names and the escaping that the
NATS binding has.
"""

import json
from typing import Any

import pytest
from cloudevents.core.bindings import http
from cloudevents.core.v1.event import CloudEvent
from hypothesis import example, given, settings
from hypothesis import strategies as st

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.cloudevents import Ingress, escaped, opened
from apportion.contracts.envelope import Entry, Undecodable
from apportion.contracts.ids import ADMISSION, PoolId
from apportion.contracts.testing import NOON, a_job, a_job_request

SUBJECT = "apportion.v1.main.wish.acme.JobRequested"
TYPE = "io.apportion.JobRequested.v1"
REQUEST = a_job_request()
DATA = json.loads(codec.encode_body(REQUEST))

# What an attribute may hold: CloudEvents leaves out controls, surrogates and noncharacters, we bidirectional ones too.
TEXT = st.text(
    st.characters(
        exclude_categories=("Cs", "Cc", "Cn"),
        exclude_characters="\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff",
    ),
    min_size=1,
    max_size=40,
)


def sdk_event(event_id: str, source: str, **extensions: Any) -> CloudEvent:
    attributes = {"id": event_id, "source": source, "type": TYPE, "specversion": "1.0", **extensions}
    return CloudEvent(attributes={**attributes, "datacontenttype": "application/json"}, data=DATA)


def read(headers: dict[str, str], body: bytes) -> Entry:
    return codec.decode_wish(SUBJECT, headers, body, seq=7, recorded_at=NOON)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(event_id=TEXT, source=TEXT, actor=TEXT)
@example(event_id='a "b" 100% é/你😀', source="%41", actor='\\"')
@example(event_id='"', source='""', actor="%")
@example(event_id="%25", source="'", actor='"a')
def test_what_the_sdk_writes_we_read_alike_in_each_mode(event_id: str, source: str, actor: str) -> None:
    """A publisher chooses a library and a mode; neither may change what was asked, or who is known to ask."""
    event = sdk_event(event_id, source, actor=actor, expirytime="2026-09-01T13:00:00Z", correlationid="c")
    binary, structured = http.to_binary_event(event), http.to_structured_event(event)
    bare: dict[str, str] = {}
    for headers, body, ingress in (
        (binary.headers, binary.body, Ingress.BINARY),
        (structured.headers, structured.body, Ingress.STRUCTURED),
        (bare, structured.body, Ingress.BARE),
    ):
        entry = read(headers, body)
        assert entry.event == REQUEST
        assert (entry.event_id, entry.source, entry.actor) == (event_id, source, actor)
        assert (entry.ingress, entry.expires_at) == (ingress, NOON + 3_600_000_000_000)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(event_id=TEXT, source=TEXT)
@example(event_id='a "b" 100% é/你😀', source="%41")
def test_what_we_write_the_sdk_reads_and_so_do_we(event_id: str, source: str) -> None:
    """Another system that follows the pool has a library already."""
    message = codec.encode_wish(PoolId("main"), REQUEST, tenant="acme", event_id=event_id, source=source)
    found = http.from_binary_event(http.HTTPMessage(headers=message.headers, body=message.body))
    assert (found.get_id(), found.get_source(), found.get_type()) == (event_id, source, TYPE)
    data = found.get_data()
    assert (json.loads(data) if isinstance(data, str | bytes) else data) == json.loads(message.body)
    entry = read(message.headers, message.body)
    assert (entry.event, entry.event_id, entry.source) == (REQUEST, event_id, source)


def test_the_sdk_reads_our_facts() -> None:
    """Facts are CloudEvents as much as wishes are, whatever the id of the wish that caused them."""
    fact = a_job()
    caused = ev.JobRejected(tenant=fact.tenant, answers=1, wish_id="é", code=Refusal.NOT_JSON, caused_by='é "1"')
    message = codec.encode_fact(PoolId("main"), ADMISSION, caused, event_id="f-1", correlation_id="acme/é")
    found = http.from_binary_event(http.HTTPMessage(headers=message.headers, body=message.body))
    assert found.get_extension("causationid") == 'é "1"'
    assert found.get_extension("correlationid") == "acme/é"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(value=TEXT)
def test_escaping_comes_back(value: str) -> None:
    """One round of each, and nothing is left or lost."""
    headers = {"ce-specversion": "1.0", "ce-id": escaped(value), "ce-source": "s", "ce-type": "t"}
    assert opened(headers, b"").id == value
    assert escaped(value).isascii()
    assert " " not in escaped(value)


@pytest.mark.parametrize("value", ["%C0%A0", "%ff", "%ED%A0%80"])
def test_what_is_no_utf8_is_refused_and_leaves_no_id(value: str) -> None:
    """An id that two readers decode differently is no identity."""
    entry = read({"ce-specversion": "1.0", "ce-id": value, "ce-source": "s", "ce-type": TYPE}, b"{}")
    assert isinstance(entry.event, Undecodable)
    assert (entry.event.code, entry.event.field, entry.event.found) == (
        Refusal.ENVELOPE_INVALID,
        "ce-id",
        f'"{value}"',
    )
    assert entry.event_id == "wish-7"


def test_a_message_without_headers_or_envelope_is_known_by_its_place() -> None:
    """The simplest publisher is heard; only a repeat can't be told."""
    entry = codec.decode_wish(SUBJECT, None, codec.encode_body(REQUEST), seq=7, recorded_at=NOON)
    assert (entry.event, entry.event_id, entry.source, entry.ingress) == (REQUEST, "wish-7", "", Ingress.REQUEST)


def test_a_trace_context_is_carried_where_it_can_be_read() -> None:
    """It joins our spans to the publisher's; a broken one must not break the request."""
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"ce-specversion": "1.0", "ce-id": "a", "ce-source": "s", "ce-type": TYPE}
    body = codec.encode_body(REQUEST)
    assert read({**headers, "traceparent": good}, body).traceparent == good
    assert read({**headers, "Traceparent": good}, body).traceparent == good
    assert read({**headers, "ce-traceparent": good}, body).traceparent == good
    assert read({**headers, "traceparent": "00-1-2-3"}, body).traceparent == ""
