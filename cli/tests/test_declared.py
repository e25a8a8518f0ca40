"""Policy as a file has it, asked of a real admission core: what differs is asked for, and doing it again is silence."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from apportion.admission.testing import History
from apportion.cli.declared import Outcome, PolicyWish, Upserted, declare
from apportion.cli.queues import DEFAULT, from_file, policies_from_file
from apportion.contracts import events as ev
from apportion.contracts.ids import OPERATOR
from apportion.contracts.testing import a_queue
from apportion.runtime.settings import SettingsInvalid

FILE = """
[[queue]]
name = "team"
guaranteed_compute_milli = {team}
[[queue]]
name = "train"
parent = "team"
tenants = ["acme"]
guaranteed_compute_milli = {train}
weight = 3
[[queue]]
name = "serve"
parent = "team"
tenants = ["acme"]
guaranteed_compute_milli = {serve}
[[policy]]
rate_per_min = 600
reason = "quarter 3"
[[policy]]
for_tenant = "acme"
pending_max = {pending}
"""


class Pool:
    """Admission alone, asked as an operator asks it; counts what it was asked."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "apportion.toml"
        self._history = History()
        self.asked = 0

    def apply(self, text: str) -> list[Outcome]:
        self._file.write_text(text)
        queues, policies = from_file(self._file), policies_from_file(self._file)
        return self.declare((*queues, *policies))

    def declare(self, wanted: Sequence[PolicyWish]) -> list[Outcome]:
        return asyncio.run(declare(wanted, newest=self.newest, ask=self._ask))

    async def newest(self, wish: PolicyWish) -> Upserted | None:
        found: Upserted | None = None
        for entry in self._history.entries:
            match entry.event, wish:
                case (ev.QueueUpserted() as fact, ev.QueueUpsertRequested()) if fact.queue == wish.queue:
                    found = fact
                case (ev.PolicyUpserted() as fact, ev.PolicyUpsertRequested()) if fact.for_tenant == wish.for_tenant:
                    found = fact
        return found

    async def _ask(self, wishes: Sequence[PolicyWish]) -> list[ev.Fact]:
        for wish in wishes:
            self.asked += 1
            self._history.wish(wish, tenant=OPERATOR, event_id=f"w{self.asked}", actor="user:ann")
        return self._history.settle()

    def tell(self, fact: ev.Fact) -> None:
        self._history.fact(fact)


def results(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {f"{outcome.kind} {outcome.name}": outcome.result for outcome in outcomes}


def test_a_file_is_asked_for_once(tmp_path: Path) -> None:
    """A pool that starts again with the file it had publishes nothing; with one line changed, that one alone."""
    pool = Pool(tmp_path)
    first = pool.apply(FILE.format(team=4000, train=3000, serve=1000, pending=5))
    assert set(results(first).values()) == {"new"}
    assert pool.asked == 5
    again = pool.apply(FILE.format(team=4000, train=3000, serve=1000, pending=5))
    assert set(results(again).values()) == {"unchanged"}
    assert pool.asked == 5
    changed = pool.apply(FILE.format(team=4000, train=3000, serve=1000, pending=7))
    assert {name for name, result in results(changed).items() if result == "changed"} == {"policy acme"}
    assert pool.asked == 6


def test_each_change_has_an_actor_and_a_reason(tmp_path: Path) -> None:
    """The table's own reason, or else the file's name."""
    pool = Pool(tmp_path)
    pool.apply(FILE.format(team=4000, train=3000, serve=1000, pending=5))
    said = {
        (fact.actor, fact.reason)
        for wish in policies_from_file(tmp_path / "apportion.toml")
        if (fact := asyncio.run(pool.newest(wish))) is not None
    }
    assert said == {("operator (user:ann)", "quarter 3"), ("operator (user:ann)", "as apportion.toml has it")}


@pytest.mark.parametrize(("team", "train", "serve"), [(8000, 6000, 2000), (400, 300, 100), (4000, 1000, 3000)])
def test_guarantees_may_grow_shrink_and_move_in_one_file(tmp_path: Path, team: int, train: int, serve: int) -> None:
    """Each single change must fit into the tree as it is then: the order is found, or the refused are asked again."""
    pool = Pool(tmp_path)
    pool.apply(FILE.format(team=4000, train=3000, serve=1000, pending=5))
    moved = pool.apply(FILE.format(team=team, train=train, serve=serve, pending=5))
    assert "refused" not in results(moved).values()
    assert "unchanged" in set(results(pool.apply(FILE.format(team=team, train=train, serve=serve, pending=5))).values())
    assert pool.asked <= 5 + 3


def test_what_can_never_be_is_refused_with_its_numbers(tmp_path: Path) -> None:
    """And is not asked for again and again; what else the file has is done."""
    pool = Pool(tmp_path)
    found = pool.apply(FILE.format(team=4000, train=4000, serve=1000, pending=5))
    refused = [outcome for outcome in found if outcome.result == "refused"]
    assert [(one.name, one.code, one.field) for one in refused] == [
        ("serve", "FieldConflict", "guaranteed_compute_milli")
    ]
    assert "at most 0" in refused[0].message
    assert results(found)["queue train"] == results(found)["policy acme"] == "new"
    assert pool.asked == 6


def test_the_default_queue_is_not_set_back(tmp_path: Path) -> None:
    """It is for a pool of which nobody said anything: an operator's limits on it stay, start after start."""
    pool = Pool(tmp_path)
    assert results(pool.declare(DEFAULT)) == {"queue main": "new"}
    pool.tell(a_queue("main", limit_compute_milli=4000))
    assert results(pool.declare(DEFAULT)) == {"queue main": "unchanged"}
    assert pool.asked == 1


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[[policy]]\nrate = 3\n", "rate"),
        ("[[policy]]\nrate_per_min = 0\n", "rate_per_min"),
        ('[[policy]]\nfor_tenant = "Acme"\n', "for_tenant"),
        ("[[policy]]\n[policy.defaults.training]\ncompute = 3\n", "defaults.training.compute"),
        ("[[policy]]\nburst = 2\n[[policy]]\nburst = 3\n", "for_tenant"),
    ],
)
def test_a_policy_that_cannot_be_is_told_with_its_key(tmp_path: Path, text: str, key: str) -> None:
    """Before anything is started."""
    file = tmp_path / "apportion.toml"
    file.write_text(text)
    with pytest.raises(SettingsInvalid) as refused:
        policies_from_file(file)
    assert refused.value.key == key
