"""Every hostile message gets the answer that the contract promises, and none brings a service down."""

import json
from collections import Counter

import pytest

from tests.contract import make_corpus
from tests.contract.judge import CORPUS, Group, groups, judged

GROUPS = groups()


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.group)
def test_every_message_of_the_group_gets_its_answer(group: Group) -> None:
    """A wrong code sends the publisher looking in the wrong place; a crash takes everybody's wishes with it."""
    wrong = {case.name: (case.expected, found) for case in group.cases if (found := judged(case)) != case.expected}
    assert wrong == {}


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    """A case that is found by its name can be fixed."""
    names = Counter((group.group, case.name) for group in GROUPS for case in group.cases)
    assert sum(names.values()) >= 300
    assert [name for name, count in names.items() if count > 1] == []


def test_the_files_are_what_the_script_makes() -> None:
    """Whoever changes one changes the other."""
    for make in make_corpus.GROUPS:
        assert list(make()) == json.loads((CORPUS / f"{make.__name__}.json").read_bytes())["cases"], make.__name__
