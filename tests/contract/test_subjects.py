"""Subjects say who, and come back as what went in."""

import msgspec
import pytest

from apportion.contracts import codec, subjects
from apportion.contracts import events as ev
from apportion.contracts.ids import MONITOR, PLACER, Author, NodeId, PoolId, TenantId, agent_author
from tests.contract.golden import example

POOL = PoolId("main")
TENANT = TenantId("acme")


@pytest.mark.parametrize("kind", ev.WISHES, ids=ev.type_name)
def test_a_wish_comes_back_with_its_tenant_and_type(kind: type[ev.Wish]) -> None:
    """The tenant is what the subject says, whatever the body claims."""
    subject = subjects.wish(POOL, TENANT, kind)
    assert subjects.tenant_and_type_of_wish(subject) == ("acme", kind.__name__)


@pytest.mark.parametrize("kind", ev.FACTS, ids=ev.type_name)
def test_a_fact_comes_back_as_it_went_with_its_author(kind: type[ev.Fact]) -> None:
    """Encoding and decoding lose nothing, and the author is the subject's."""
    event = example(kind)
    assert isinstance(event, ev.Fact)
    author = getattr(kind, "AUTHOR", Author(getattr(event, "author", MONITOR)))
    if author == ev.AGENT:
        author = agent_author(NodeId("node-1"))
    message = codec.encode_fact(POOL, author, event, event_id="e1")
    entry = codec.decode_fact(message.subject, message.headers, message.body, seq=1, recorded_at=2)
    assert (entry.event, entry.author, entry.event_id) == (event, author, "e1")
    assert " " not in message.subject
    assert "*" not in message.subject


@pytest.mark.parametrize("kind", ev.FACTS, ids=ev.type_name)
def test_a_fact_by_another_author_is_not_believed(kind: type[ev.Fact]) -> None:
    """Identity comes from the subject: what a body says of another node or author grants nothing."""
    event = example(kind)
    assert isinstance(event, ev.Fact)
    for author in ("admission", "placer", "monitor", "agent-node-1", "agent-node-2", "stranger"):
        stated_by = str(getattr(kind, "AUTHOR", getattr(event, "author", "")))
        is_right = author == "agent-node-1" if stated_by == ev.AGENT else author == stated_by
        message = codec.encode_fact(POOL, Author(author), event, event_id="e1")
        entry = codec.decode_fact(message.subject, message.headers, message.body, seq=1, recorded_at=2)
        assert isinstance(entry.event, ev.Fact) is is_right, author


def test_an_agent_hears_of_its_own_node_only() -> None:
    """Its filters match its runs, and no other node's, even one whose name begins like its own."""
    node = NodeId("node-1")
    filters = subjects.facts_for_agent(POOL, node, agent_author(node))
    for name, expected in (("node-1", True), ("node-10", False), ("node-2", False)):
        event = example(ev.RunPlaced)
        assert isinstance(event, ev.RunPlaced)
        subject = subjects.fact(POOL, PLACER, msgspec.structs.replace(event, node_id=NodeId(name)))
        assert any(_matches(f, subject) for f in filters) is expected


def _matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or token not in {"*", given[position]}:
            return False
    return len(wanted) == len(given)


@pytest.mark.parametrize("subject", ["", "apportion.v1.main", "apportion.v1.main.fact.x", "other.v1.main.wish.acme.X"])
def test_a_strange_subject_is_told_apart(subject: str) -> None:
    """Nothing is read out of a subject that is none of ours."""
    with pytest.raises(subjects.SubjectInvalid):
        subjects.tenant_and_type_of_wish(subject)
