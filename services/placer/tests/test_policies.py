"""Policies: what each prefers, how the mix is learned, and that nothing is decided under a policy that isn't here."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import WorkloadKind
from apportion.contracts.ids import PLACER, DeviceUuid, NodeId, QueueId, agent_author
from apportion.contracts.testing import NOON, a_device, a_job, a_node, a_queue, a_spec, as_fact
from apportion.placer import core, plugins
from apportion.placer.__main__ import PlacerSettings
from apportion.placer.mix import KEYS_MAX, MEMORY, Asked, Mix, basis_of, count
from apportion.placer.outlook import Outlook
from apportion.placer.policies import POLICIES, PolicyUnknown, policy_id, register, resolved
from apportion.placer.state import State
from apportion.placer.values import Values


def told(*facts: ev.Fact, policy: str = "best_fit", **config: int | str) -> State:
    """The state of a placer with this policy after these facts."""
    state = core.initial()
    claim = ev.LeaseClaimed(author="placer", session="s1", core=core.POLICY, config={"policy": policy, **config})
    for seq, fact in enumerate((claim, *facts), 1):
        author = agent_author(fact.node_id) if isinstance(fact, ev.NodeRegistered) else ""
        state = core.evolve(state, as_fact(fact, seq, author=PLACER if fact is claim else author))
    return state


def with_devices(node: ev.NodeRegistered, *devices: ev.Device) -> ev.NodeRegistered:
    """The node with these devices."""
    return msgspec.structs.replace(node, devices=devices)


def placed(state: State) -> list[ev.RunPlaced]:
    """What is placed next."""
    return [fact for fact in core.decide(state, NOON) if isinstance(fact, ev.RunPlaced)]


def where(state: State) -> list[str]:
    """On which devices, in the order of the decision."""
    return [piece.device_uuid.removeprefix("GPU-node-") for fact in placed(state) for piece in fact.slices]


def shares(*sizes: int) -> list[ev.Fact]:
    """Jobs that ask for so many thousandths of a device in both dimensions."""
    return [a_job(f"s{at}", compute_milli=size, memory_mib=80 * size) for at, size in enumerate(sizes)]


def test_pack_fills_a_node_before_the_next() -> None:
    """Whole nodes stay empty, so that they can be spared."""
    state = told(a_queue(), a_node("node-1"), a_node("node-2"), *shares(500, 500, 500), policy="pack")
    assert where(state) == ["1-0", "1-0", "1-1"]


def test_spread_takes_the_emptiest() -> None:
    """Neighbours are few, and one fault takes little along."""
    state = told(a_queue(), a_node("node-1"), a_node("node-2"), *shares(300, 300, 300, 300), policy="spread")
    assert where(state) == ["1-0", "2-0", "1-1", "2-1"]


def test_each_queue_may_have_a_policy_of_its_own() -> None:
    """Inference spreads while training packs, in one pool."""
    state = told(
        a_queue("main"),
        a_queue("side"),
        a_node("node-1"),
        a_node("node-2"),
        *shares(300, 300),
        a_job("x", queue=QueueId("side"), compute_milli=300, memory_mib=24_000),
        policy="pack",
        policy_by_queue="side=spread",
    )
    assert where(state) == ["1-0", "2-0", "1-0"]
    assert [fact.policy.partition("@")[0] for fact in placed(state)] == ["pack", "spread", "pack"]


def test_least_response_looks_for_the_quietest_device() -> None:
    """A request waits for what its device does already, whatever memory is in use there."""
    busy = [a_job("a", compute_milli=600, memory_mib=1000), a_job("b", compute_milli=100, memory_mib=60_000)]
    state = told(a_queue(), a_node("node-1"), *busy, *shares(200), policy="least_response")
    assert where(state) == ["1-0", "1-1", "1-1"]


def test_round_robin_deals_in_turn() -> None:
    """Time slices are as long as they can be: the next run goes where the fewest take turns."""
    pool = [a_queue(), a_node("node-1"), a_node("node-2", devices=1)]
    assert where(told(*pool, *shares(10, 10, 10, 10), policy="round_robin")) == ["1-0", "2-0", "1-1", "2-0"]


def test_throughput_takes_the_fastest_that_is_free() -> None:
    """How fast a model is, the pool says; what it doesn't name is as slow as the slowest."""
    nodes = [with_devices(a_node(f"node-{at}"), a_device(0, node=f"node-{at}", model=f"m{at}")) for at in (1, 2, 3)]
    whole = [a_job(f"w{at}", compute_milli=1000, memory_mib=0) for at in range(3)]
    state = told(a_queue(), *nodes, *whole, policy="throughput:m2=300+m3=100")
    assert where(state) == ["2-0", "1-0", "3-0"]
    assert placed(state)[0].policy.startswith("throughput:m2=300+m3=100@2#")


def test_throughput_is_of_the_workload() -> None:
    """What is fast for one is slow for another: by the label, else the kind, else the rows of everybody."""
    nodes = [with_devices(a_node(f"node-{at}"), a_device(0, node=f"node-{at}", model=f"m{at}")) for at in (1, 2)]
    table = "throughput:m1=10+m2=20+resnet/m1=90+resnet/m2=30+inference/m1=7"
    for labels, kind, expected in (
        ({"workload": "resnet"}, WorkloadKind.TRAINING, "1-0"),
        ({"workload": "other"}, WorkloadKind.TRAINING, "2-0"),
        ({}, WorkloadKind.INFERENCE, "2-0"),
        ({}, WorkloadKind.TRAINING, "2-0"),
    ):
        job = a_job("w", compute_milli=1000, memory_mib=0, labels=labels, kind=kind)
        assert where(told(a_queue(), *nodes, job, policy=table)) == [expected], labels


@pytest.mark.parametrize(
    "policy",
    [
        "best_fit",
        "pack",
        "spread",
        "least_response",
        "round_robin",
        "fragmentation_gradient",
        "throughput:m1=9+m2=1",
        "weighted:quiet_node=1",
        "strict_priority:fragmentation_gradient",
        "bidding:spread",
        "hybrid:share=spread",
    ],
)
def test_a_list_of_models_is_kept_whatever_else_would_be_better(policy: str) -> None:
    """The less liked node is faster, emptier, tighter or fuller by turns: the list decides."""
    for sizes in ((1, 4), (4, 1)):
        nodes = [
            with_devices(a_node(f"node-{at}"), *[a_device(i, node=f"node-{at}", model=f"m{at}") for i in range(count)])
            for at, count in zip((1, 2), sizes, strict=True)
        ]
        busy = [a_job("a", compute_milli=300, memory_mib=24_000, models=(model,)) for model in ("m1", "m2")]
        for taken in busy:
            job = a_job("b", compute_milli=300, memory_mib=24_000, models=("m2", "m1"))
            state = told(a_queue(), *nodes, *seen_before((600, 48_000)), taken, job, policy=policy)
            assert where(state)[-1].startswith("2-"), (sizes, taken.spec.models)


def test_a_hybrid_has_a_policy_for_each_sort_of_job() -> None:
    """Shares are spread while whole devices are packed; its digest is over the ids of its parts."""
    policy = "hybrid:share=spread|whole=pack"
    whole: dict[str, Any] = {"compute_milli": 1000, "memory_mib": 0}
    state = told(a_queue(), a_node("node-1"), a_node("node-2"), *shares(300, 300), policy=policy)
    assert where(state) == ["1-0", "2-0"]
    state = told(a_queue(), a_node("node-1"), a_node("node-2"), a_job("a", **whole), a_job("b", **whole), policy=policy)
    assert where(state) == ["1-0", "1-1"]
    assert placed(state)[0].policy == policy_id(resolved(policy))
    assert policy_id(resolved("hybrid:share=spread")) != policy_id(resolved("hybrid:share=pack"))
    for nonsense in ("hybrid:much=pack", "hybrid:share=nobody", "hybrid:share=hybrid:cpu=pack", "bidding:bidding"):
        with pytest.raises(PolicyUnknown):
            resolved(nonsense)


def test_a_latency_objective_asks_for_the_quietest_device() -> None:
    """Without being told so: a job that promises its users an answer in time is placed where little else runs."""
    busy = a_job("a", compute_milli=300, memory_mib=24_000)
    quick = a_job("q", compute_milli=200, memory_mib=16_000, latency_ms=50)
    state = told(a_queue(), a_node("node-1"), busy, quick)
    assert where(state) == ["1-0", "1-1"]
    assert [fact.policy.partition("@")[0] for fact in placed(state)] == ["best_fit", "least_response"]
    assert where(told(a_queue(), a_node("node-1"), busy, quick, policy_for_latency="")) == ["1-0", "1-0"]
    by_queue = told(a_queue(), a_node("node-1"), busy, quick, policy_by_queue="main=pack")
    assert where(by_queue) == ["1-0", "1-0"]


def test_weighted_aims_are_what_the_pool_says() -> None:
    """The same two nodes, two pools with other weights."""
    pool = [a_queue(), a_node("node-1"), a_node("node-2"), *shares(400, 300)]
    assert where(told(*pool, policy="weighted:full_node=3+quiet_device=1")) == ["1-0", "1-1"]
    assert where(told(*pool, policy="weighted:quiet_node=1")) == ["1-0", "2-0"]


def test_balance_keeps_both_dimensions_of_use() -> None:
    """A share that asks for little memory goes where memory is short already."""
    state = told(
        a_queue(),
        a_node("node-1", devices=1),
        a_node("node-2", devices=1),
        a_job("a", compute_milli=100, memory_mib=60_000),
        a_job("c", compute_milli=390, memory_mib=1000),
        policy="weighted:balance=1",
    )
    assert where(state) == ["1-0", "1-0"]


def test_each_kind_of_work_may_have_a_policy_and_its_queue_goes_first() -> None:
    """Training packs and inference is spread, in one queue."""
    jobs = [
        a_job(f"{kind}-{at}", kind=kind, compute_milli=200, memory_mib=16_000)
        for kind in (WorkloadKind.TRAINING, WorkloadKind.INFERENCE)
        for at in range(2)
    ]
    state = told(
        a_queue(),
        a_node("node-1"),
        a_node("node-2"),
        *jobs,
        policy_by_kind="training=pack,inference=least_response",
    )
    found = {fact.job_id: (fact.policy.partition("@")[0], fact.slices[0].device_uuid) for fact in placed(state)}
    assert {policy for policy, _ in found.values()} == {"pack", "least_response"}
    assert found["acme/training-0"][1] == found["acme/training-1"][1]  # type: ignore[index]  # ids are texts
    assert found["acme/inference-0"][1] != found["acme/inference-1"][1]  # type: ignore[index]  # ids are texts


@pytest.mark.parametrize("wanted", ["throughput:m1", "throughput:m1=0", "weighted:fast=1", "weighted:balance=-1"])
def test_a_policy_that_is_made_of_nonsense_says_what_it_wants(wanted: str) -> None:
    """Found out when the process starts, not at the first job."""
    with pytest.raises(PolicyUnknown, match=r"is no (MODEL=SPEED|AIM=WEIGHT)"):
        resolved(wanted)


def seen_before(*sizes: tuple[int, int], often: int = 40) -> list[ev.Fact]:
    """A pool that was asked for these sizes often, and has none of those jobs any more."""
    facts: list[ev.Fact] = []
    for at, (compute, memory) in enumerate(sizes):
        for number in range(often):
            job = a_job(f"old-{at}-{number}", compute_milli=compute, memory_mib=memory)
            facts += [job, ev.JobCancelled(job_id=job.job_id, actor="user:eva")]
    return facts


@pytest.mark.parametrize("policy", ["headroom", "fragmentation_gradient"])
def test_what_was_asked_lately_decides_which_rest_is_worth_keeping(policy: str) -> None:
    """600 are asked all the time: so 300 go beside a 700, not into the last place where 600 fit."""
    busy = [
        a_job("a", compute_milli=700, memory_mib=56_000, models=("m1",)),
        a_job("b", compute_milli=400, memory_mib=32_000, models=("m2",)),
    ]
    nodes = [
        with_devices(a_node("node-1"), *[a_device(0, node="node-1", model="m1")]),
        with_devices(a_node("node-2"), *[a_device(0, node="node-2", model="m2")]),
    ]
    state = told(a_queue(), *nodes, *seen_before((600, 48_000), (300, 24_000)), *busy, *shares(300), policy=policy)
    assert where(state) == ["1-0", "2-0", "1-0"]


def test_both_dimensions_count() -> None:
    """What leaves compute without memory is worth less than what leaves both."""
    values = Values([(Asked(1, 500, 40_960, 0, 0), 1)], 81_920)
    whole = values.value(0, 0, [(1000, 640)])
    assert whole == 2000
    even, odd = values.left_of(500, 40_960, is_empty=False), values.left_of(500, 10_000, is_empty=False)
    assert even is not None
    assert values.value(0, 0, [even]) == 1000
    assert odd is None


def test_the_mix_is_bounded_and_told_apart_by_what_was_asked() -> None:
    """A million jobs of a million kinds take no more room than a few hundred."""
    mix = Mix()
    for number in range(3 * KEYS_MAX):
        count(mix, a_spec(cpu_milli=number))
    assert len(mix.counts) <= KEYS_MAX
    for _ in range(2 * MEMORY):
        count(mix, a_spec(models=("b", "a")))
    assert mix.total < MEMORY
    assert basis_of(mix)[-1][0] == Asked(1, 250, 4096, 0, 0, ("a", "b"))


def test_a_mix_that_is_plainly_anothers_is_given_up() -> None:
    """A pool that is suddenly asked for other things must not go by the old ones for thousands of arrivals."""
    mix = Mix()
    for _ in range(4_000):
        count(mix, a_spec(cpu_milli=1))
    for number in range(600):
        count(mix, a_spec(cpu_milli=2 + number % 2))
    known = {one.cpu_milli: many for one, many in basis_of(mix)}
    assert known[2] + known[3] > known.get(1, 0)
    for _ in range(2_000):
        count(mix, a_spec(cpu_milli=2))
    epoch = mix.epoch
    for number in range(1_000):
        count(mix, a_spec(cpu_milli=2 if number % 8 else 9))
    assert mix.epoch <= epoch + 1, "a few strangers are no reason"


def test_the_mix_survives_a_restart() -> None:
    """It is folded from facts alone, so a snapshot and a replay know the same."""
    state = told(a_queue(), a_node("node-1"), *seen_before((250, 4096)), policy="headroom")
    again = core.restore(core.snapshot(state))
    assert again.kept.mix == state.kept.mix
    assert again.kept.mix.total == 40


def test_a_pool_that_was_asked_nothing_yet_takes_the_tightest() -> None:
    """With an empty mix, as of a state that was kept before mixes were, nothing is worth more than the rest."""
    nodes = [
        with_devices(a_node("node-1"), *[a_device(i, node="node-1") for i in range(4)]),
        with_devices(a_node("node-2"), *[a_device(i, node="node-2") for i in range(2)]),
    ]
    state = told(a_queue(), *nodes, *shares(300, 300), policy="headroom")
    state.kept.mix = Mix()
    state.outlook, state.market = None, None
    assert where(state) == ["2-0", "2-0"]
    [first, *_] = placed(state)
    assert [each.score for each in first.candidates] == [0, 0]


def test_a_placer_that_is_told_none_goes_by_headroom_and_older_claims_by_best_fit() -> None:
    """The claim names the policy, so that what earlier placers decided is decided again as they did."""
    config = PlacerSettings().config()
    assert config["policy"] == policy_id(resolved("headroom"))
    assert told(policy=str(config["policy"])).settings.policy == config["policy"]
    assert core.initial().settings.policy == "best_fit"


def test_scarce_models_are_kept_for_those_who_need_them() -> None:
    """Half of what is asked can only use m1, so what takes any goes to m2, though m1 is tighter."""
    nodes = [
        with_devices(a_node("node-1", cpu_milli=10_000), *[a_device(0, node="node-1", model="m1")]),
        with_devices(a_node("node-2"), *[a_device(i, node="node-2", model="m2") for i in range(4)]),
    ]
    history: list[ev.Fact] = []
    for number in range(40):
        for models in (("m1",), ()):
            job = a_job(f"o-{len(models)}-{number}", compute_milli=1000, memory_mib=0, models=models)
            history += [job, ev.JobCancelled(job_id=job.job_id, actor="user:eva")]
    wanted = a_job("any", compute_milli=1000, memory_mib=0)
    assert where(told(a_queue(), *nodes, wanted, policy="headroom")) == ["1-0"]
    state = told(a_queue(), *nodes, *history, wanted, policy="headroom")
    assert where(state) == ["2-0"]
    [fact] = placed(state)
    assert all(sum(each.parts.values()) == each.score for each in fact.candidates)
    assert any(each.parts["bids"] < 0 for each in fact.candidates)


def test_a_decision_under_an_unknown_policy_is_not_made() -> None:
    """Another policy's answer would pass for the recorded one; so there is none, and the error says what to do."""
    for wanted in ("acme_shelf", "best_fit@9#000000000000"):
        state = told(a_queue(), a_node(), a_job(), policy=wanted)
        why = core.cannot_decide(state)
        assert why is not None
        assert wanted in why
        assert "entry points" in why
        with pytest.raises(PolicyUnknown):
            core.decide(state, NOON)
    assert core.cannot_decide(told(a_queue(), policy=policy_id(resolved("pack")))) is None


SHELF = '''
from apportion.placer.policies.base import Plain
from apportion.placer.rooms import Fit

class Shelf(Plain):
    """The node whose name comes last."""
    name = "acme_shelf"
    rules = "last name"
    def choose(self, demand, room, fits):
        return Fit(int(room.node_id.removeprefix("node-")), tuple(fits[: demand.devices]))

SHELF = Shelf()
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A third party's package on the path, as pip would leave it; and no policy of it afterwards."""
    (tmp_path / "acme_shelf.py").write_text(SHELF)
    info = tmp_path / "acme_shelf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-shelf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nacme_shelf = acme_shelf:SHELF\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(POLICIES)
    yield info
    POLICIES.clear()
    POLICIES.update(before)
    sys.modules.pop("acme_shelf", None)


def test_a_third_partys_policy_is_an_entry_point(installed: Path) -> None:
    """Install the package, name the policy, and it decides; without it, a replay says what is missing."""
    del installed
    wanted = told(a_queue(), a_node("node-1"), a_node("node-2"), a_job(), policy="acme_shelf")
    assert core.cannot_decide(wanted) is not None
    assert plugins.load() == ["acme_shelf"]
    assert core.cannot_decide(wanted) is None
    [fact] = placed(wanted)
    assert fact.node_id == NodeId("node-2")
    assert fact.policy == policy_id(resolved("acme_shelf"))
    assert fact.candidates[0].devices == (DeviceUuid("GPU-node-2-0"),)


def test_what_is_no_policy_is_named(installed: Path) -> None:
    """The operator reads which package to mend, before anything is decided."""
    (installed / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nacme_shelf = acme_shelf:Fit\n")
    with pytest.raises(plugins.PluginInvalid, match="acme_shelf:Fit"):
        plugins.load()


def test_a_name_belongs_to_one_policy() -> None:
    """Two policies of one name would make every record ambiguous."""

    class Other:
        name = "pack"
        version = "2"
        digest = "0"

    with pytest.raises(ValueError, match="two policies are called pack"):
        register(Other())  # type: ignore[arg-type]  # only its name matters
    assert Outlook(Mix()).asked == []
