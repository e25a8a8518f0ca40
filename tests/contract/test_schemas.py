"""The published schemas say what the decoder does, by the word of two validators that know nothing of each other."""

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import codec, schema
from apportion.contracts import events as ev
from tests.contract.golden import example
from tests.contract.judge import groups
from tests.contract.mutations import Mutator, decoder_takes, profiled, schema_takes
from tests.npm import installed

DOCS = Path(__file__).resolve().parents[2] / "docs"
NODE = Path(__file__).with_name("node")
KINDS = (*ev.WISHES, *ev.FACTS)
NAMES = {kind.__name__: ev.type_name(kind) for kind in ev.WISHES}


def corpus_bodies() -> list[tuple[str, bytes]]:
    """Type and body of every message of the corpus that is small enough to be looked at, data of envelopes included."""
    found = []
    for case in (case for group in groups() for case in group.cases):
        name = NAMES.get(case.subject.rpartition(".")[2], "JobRequested.v1")
        body = case.bytes()
        if len(body) > codec.EVENT_BYTES_MAX:
            continue
        found.append((name, body))
        document = profiled(body)
        if isinstance(document, dict) and isinstance(document.get("data"), dict):
            found.append((name, json.dumps(document["data"]).encode()))
    return found


def test_the_files_are_current() -> None:
    """What others validate against is what we decode with."""
    assert schema.stale(DOCS) == [], "run `make docs` and commit the result"


def test_writing_makes_a_folder_current_and_removes_what_is_gone(tmp_path: Path) -> None:
    """The check and the writer agree, a second run changes nothing, and a type that is gone leaves no file."""
    assert schema.main(["--check", str(tmp_path)]) == 1
    assert schema.main(["--write", str(tmp_path)]) == 0
    assert schema.main(["--check", str(tmp_path)]) == 0
    assert schema.write(tmp_path) == []
    (tmp_path / "schemas" / "JobGone.v1.json").write_text("{}")
    assert schema.main(["--check", str(tmp_path)]) == 1
    assert schema.write(tmp_path) == ["schemas/JobGone.v1.json"]


@pytest.mark.parametrize("kind", KINDS, ids=ev.type_name)
def test_each_schema_is_valid_and_takes_the_golden_event(kind: type[ev.Event]) -> None:
    """A schema that refuses our own messages would be worse than none."""
    found = schema.event_schema(kind)
    jsonschema.Draft202012Validator.check_schema(found)
    assert schema_takes(ev.type_name(kind), codec.encode_body(example(kind)))


@pytest.mark.parametrize("kind", ev.WISHES, ids=ev.type_name)
def test_schemas_keep_to_what_tools_for_older_drafts_read(kind: type[ev.Event]) -> None:
    """Tuples by position are written in another way there; nothing of ours needs them."""
    text = json.dumps(schema.event_schema(kind))
    for keyword in ("prefixItems", "unevaluated", "dependentSchemas", "$dynamicRef", "$anchor"):
        assert keyword not in text


def test_every_address_is_what_the_events_are_published_to() -> None:
    """The document's channels are built by the code that builds subjects."""
    addresses = {name: channel["address"] for name, channel in schema.asyncapi()["channels"].items()}
    assert addresses["JobRequested"] == "apportion.v1.{pool}.wish.{tenant}.JobRequested"
    assert addresses["JobRejected"] == "apportion.v1.{pool}.fact.admission.wish.{tenant}"
    assert addresses["RunStarted"] == (
        "apportion.v1.{pool}.fact.agent-{node}.run.{node}.{tenant}.{job}.{replica}.{attempt}"
    )
    assert addresses.keys() == {kind.__name__ for kind in KINDS}


def test_decoder_and_schema_agree_on_the_whole_corpus() -> None:
    """A publisher who validated a request must not find it refused, nor the other way round."""
    differing = [
        (name, body[:200])
        for name, body in corpus_bodies()
        if decoder_takes(name, body) is not schema_takes(name, body)
    ]
    assert differing == []


def test_decoder_and_schema_agree_on_changed_messages() -> None:
    """The corpus holds what somebody thought of; this is what nobody did."""
    mutator = Mutator(seed=20)
    bodies = [(name, json.dumps(mutator.document()).encode()) for _ in range(60) for name in NAMES.values()]
    verdicts = [(decoder_takes(name, body), schema_takes(name, body), name, body) for name, body in bodies]
    assert [found for found in verdicts if found[0] is not found[1]] == []
    assert any(found[0] for found in verdicts)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=70),
    st.sampled_from(["main", "mps", "a\n", ""]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from([*ev.JobRequested.__struct_fields__, "type", "gpus", "kind"])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(changes=st.dictionaries(FIELDS, VALUES, max_size=3), parts=st.dictionaries(FIELDS, VALUES, max_size=2))
def test_decoder_and_schema_agree_on_any_values(changes: dict[str, Any], parts: dict[str, Any]) -> None:
    """Whatever stands in whichever field, here or in an object within."""
    document = {"queue": "main", "workload": {"command": ["a"]}, "resources": {"gpu": 1}, **changes}
    if isinstance(document["resources"], dict):
        document["resources"] = {**document["resources"], **parts}
    body = json.dumps(document).encode()
    assert decoder_takes("JobRequested.v1", body) is schema_takes("JobRequested.v1", body)


# Outside of Python --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node() -> Path:
    """A folder with the packages that the lock file names; without one the test is skipped, with its reason."""
    return installed(NODE, without="ajv and the AsyncAPI parser")


def ask(node: Path, what: str, where: Path, given: str = "") -> Any:
    """What check.mjs says."""
    command = ["node", str(NODE / "check.mjs"), what, str(where)]
    made = subprocess.run(command, cwd=node, input=given, capture_output=True, text=True, timeout=100, check=False)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


@pytest.mark.timeout(240)
def test_a_second_validator_agrees_on_the_corpus_and_on_changed_messages(node: Path) -> None:
    """Patterns and lengths mean the same in another language's dialect."""
    mutator = Mutator(seed=21)
    bodies = corpus_bodies()
    bodies += [(name, json.dumps(mutator.document()).encode()) for _ in range(500) for name in NAMES.values()]
    # What the wire profile refuses is the decoder's alone to refuse: another language's parser would not show it.
    documents = [(name, document, body) for name, body in bodies if (document := profiled(body)) is not None]
    verdicts = ask(node, "schemas", DOCS / "schemas", json.dumps([(name, document) for name, document, _ in documents]))
    taken = [decoder_takes(name, body) for name, _, body in documents]
    differing = [each for each, ours, theirs in zip(documents, taken, verdicts, strict=True) if ours is not theirs]
    assert differing == []
    assert 100 < sum(taken) < len(taken) - 100


@pytest.mark.timeout(240)
def test_the_official_parser_has_nothing_to_say_about_the_asyncapi_document(node: Path) -> None:
    """Generators and viewers start from it."""
    found = ask(node, "asyncapi", DOCS / "asyncapi.json")
    assert found == {"said": [], "messages": len(KINDS)}
