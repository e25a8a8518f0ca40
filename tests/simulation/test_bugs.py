"""Each planted bug is found by some run: the other half of them is in ``test_simulation``."""

import pytest

from tests.simulation.bugs import BUGS, Bug, found_by

SLOW = {
    "snapshots_lose_who_waits_for_an_answer",
    "a_gang_has_succeeded_when_one_of_it_has",
    "a_fenced_agent_goes_on",
    "late_words_are_believed",
    "fences_keep_the_epoch",
    "gangs_grow_past_their_most",
}
"""Found, but not soon: `make torture` looks for these, too."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.__name__ not in SLOW], ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that nothing breaks may be no rule."""
    bug(monkeypatch)
    assert found_by() is not None
