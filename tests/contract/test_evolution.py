"""What was released stays readable: schemas keep their promises, and old versions are upgraded step by step."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from apportion.contracts import codec, evolution, schema
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Undecodable
from apportion.contracts.evolution import Upcast

RELEASED = Path(__file__).with_name("released")


@pytest.mark.parametrize("path", sorted(RELEASED.glob("*.json")), ids=lambda path: path.stem)
def test_a_released_schema_still_holds(path: Path) -> None:
    """A change that is no addition needs a new version: old messages and other people's code don't change with us."""
    name = path.stem
    current = schema.schemas().get(name)
    if current is None:
        assert name in evolution.UPCASTS, f"{name} was released, and nothing reads it any more"
        return
    broken = evolution.breaking_changes(json.loads(path.read_bytes()), current)
    assert broken == [], f"{name} was released; give the changed type a new version, and an upgrade in `evolution`"


def test_every_type_has_a_released_schema() -> None:
    """`python -m tests.contract.golden` writes what is missing; it is committed with the type."""
    assert {path.stem for path in RELEASED.glob("*.json")} >= schema.schemas().keys()


# The check itself ---------------------------------------------------------------------------------------------------


def changed(path: str, value: Any) -> list[str]:
    """What the check says of JobRequested's schema after one change; ``...`` removes what is there."""
    released = schema.event_schema(ev.JobRequested)
    current = copy.deepcopy(released)
    *steps, last = path.split("/")
    node = current["$defs"]
    for step in steps:
        node = node[step]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return evolution.breaking_changes(released, current)


NAME = {"type": "string"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("Gang/properties/size", ...),
        ("Gang/properties/size/maximum", 512),
        ("Gang/properties/size/minimum", 2),
        ("Gang/properties/size/type", "string"),
        ("Gang/properties/size/default", 2),
        ("Gang/required", ["size"]),
        ("JobRequested/required", ["queue"]),
        ("JobRequested/required", ["queue", "workload", "resources"]),
        ("JobRequested/properties/queue/pattern", "^[a-z]+$"),
        ("JobRequested/properties/priority/anyOf", [{"type": "integer", "minimum": 0, "maximum": 1000}]),
        (
            "JobRequested/properties/priority/anyOf",
            [{"type": "integer", "minimum": 0, "maximum": 100}, {"type": "null"}],
        ),
        ("JobRequested/properties/labels/maxProperties", 8),
        ("JobRequested/additionalProperties", True),
        ("Mode/enum", ["exclusive", "mps", "timeslice"]),
        ("Workload/properties/command/items", {"type": "integer"}),
    ],
)
def test_a_change_that_breaks_a_promise_is_found(path: str, value: Any) -> None:
    """Each of these would refuse, or read differently, what was right before."""
    assert changed(path, value) != []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("JobRequested/properties/colour", NAME),
        ("Gang/properties/colour", NAME),
        ("Gang/properties/size/maximum", 2048),
        ("Gang/properties/size/minimum", 0),
        ("Gang/properties/size/maximum", ...),
        ("JobRequested/properties/labels/maxProperties", 64),
        ("Mode/enum", ["exclusive", "mig", "mps", "timeslice", "vgpu"]),
        ("Gang/description", "Other words."),
    ],
)
def test_an_addition_keeps_the_version(path: str, value: Any) -> None:
    """Optional fields, wider limits and new members refuse nothing that was right."""
    assert changed(path, value) == []


# Upgrades -----------------------------------------------------------------------------------------------------------


def _seconds(document: dict[str, Any]) -> dict[str, Any]:
    """Before version 1, say, limits were minutes and the job's name was called ``name``."""
    job_id = document.pop("name", None)
    minutes = document.pop("time_limit_min", None)
    return {
        **document,
        **({} if job_id is None else {"job_id": job_id}),
        **({} if minutes is None else {"time_limit_s": minutes * 60}),
    }


def _named(document: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in document.items() if key != "title"}, "name": document["title"]}


STEPS = {"JobRequested.v0": Upcast("JobRequested.v1", _seconds)}
CHAIN = {**STEPS, "JobRequested.v00": Upcast("JobRequested.v0", _named)}
OLD = b'{"type":"JobRequested.v0","queue":"main","name":"train","time_limit_min":2,"workload":{"command":["a"]}}'
OLDER = b'{"queue":"main","title":"train","time_limit_min":2,"workload":{"command":["a"]}}'
NEW = ev.JobRequested(queue="main", job_id="train", time_limit_s=120, workload=ev.Workload(command=("a",)))


def test_an_old_version_is_read_as_the_newest() -> None:
    """Nobody but the codec knows that there were others."""
    assert codec.decode_body("JobRequested.v0", OLD, STEPS) == NEW


def test_steps_are_chained() -> None:
    """Each step is written once; a third version adds one, and touches none."""
    assert codec.decode_body("JobRequested.v00", OLDER, CHAIN) == NEW


def test_a_step_leaves_the_document_that_it_was_given() -> None:
    """Bytes that are stored never change, nor does what was read from them."""
    document = json.loads(OLD)
    before = copy.deepcopy(document)
    name, upgraded = evolution.upcast("JobRequested.v0", document, STEPS)
    assert (name, upgraded["job_id"], document) == ("JobRequested.v1", "train", before)


def test_the_newest_version_is_upgraded_no_further() -> None:
    """Upgrading twice is upgrading once."""
    name, once = evolution.upcast("JobRequested.v00", json.loads(OLDER), CHAIN)
    assert evolution.upcast(name, once, CHAIN) == (name, once)


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"{", Refusal.NOT_JSON, ""),
        (b'{"queue":"main","queue":"b","workload":{}}', Refusal.FIELD_CONFLICT, "queue"),
        (b'{"queue":"main","workload":{"command":1}}', Refusal.FIELD_INVALID, "workload.command"),
        (b'{"queue":"main","workload":{},"colour":1}', Refusal.FIELD_UNKNOWN, "colour"),
        (b'{"queue":"main","workload":{},"time_limit_min":1e999}', Refusal.FIELD_INVALID, "time_limit_min"),
        (b"[" * 5000, Refusal.TOO_DEEP, ""),
    ],
)
def test_an_old_version_that_can_not_be_read_is_described_like_any_other(
    body: bytes, code: Refusal, field: str
) -> None:
    """A stranger's message never raises, whatever its age."""
    found = codec.decode_body("JobRequested.v0", body, STEPS)
    assert isinstance(found, Undecodable)
    assert (found.code, found.field) == (code, field)


def test_no_step_leads_to_itself() -> None:
    """A chain ends."""
    for first in evolution.UPCASTS:
        seen = [first]
        while (step := evolution.UPCASTS.get(seen[-1])) is not None:
            assert step.to not in seen
            seen.append(step.to)
        assert seen[-1] in schema.schemas()
