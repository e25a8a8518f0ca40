"""Properties of the packing kernel over random fleets and histories of arrivals and departures."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.placer.packing.best_fit import BestFit
from apportion.placer.packing.demand import Mix, Shape
from apportion.placer.packing.fleet import Fleet, NodeSpec, Placement
from apportion.placer.packing.fragmentation import FragmentationGradient
from apportion.placer.packing.headroom import Headroom
from apportion.placer.packing.policy import Packer, Policy
from apportion.placer.packing.random_fit import RandomFit

MODELS = ("A10", "G2", "T4")

shapes = st.one_of(
    st.builds(
        Shape,
        st.integers(0, 40).map(lambda cores: cores * 500),
        st.integers(0, 40).map(lambda gib: gib * 1024),
        st.just(1),
        st.sampled_from((100, 230, 320, 470, 530, 810, 1000)),
        st.sampled_from(((), (), ("G2",), ("A10", "T4"))),
    ),
    st.builds(
        Shape,
        st.integers(0, 60).map(lambda cores: cores * 500),
        st.integers(0, 60).map(lambda gib: gib * 1024),
        st.sampled_from((2, 4, 8)),
        st.just(1000),
        st.sampled_from(((), (), ("G2",))),
    ),
    st.builds(Shape, st.integers(1, 60).map(lambda cores: cores * 500), st.just(4096), st.just(0), st.just(0)),
)

nodes = st.lists(
    st.builds(
        NodeSpec,
        st.just("n"),
        st.sampled_from((8_000, 32_000, 96_000)),
        st.sampled_from((32_768, 131_072, 393_216)),
        st.sampled_from((1, 2, 4, 8)),
        st.sampled_from(MODELS),
    ),
    min_size=1,
    max_size=8,
).map(lambda specs: [spec._replace(name=f"n{at}") for at, spec in enumerate(specs)])

# An arrival, or the departure of the task that was placed so long ago.
steps = st.lists(st.one_of(shapes, st.integers(0, 5)), max_size=60)

KNOWN = Mix(
    {
        Shape(3000, 5600, 1, 810): 50,
        Shape(11_300, 49_152, 1, 1000): 60,
        Shape(8000, 30_517, 1, 470, ("G2",)): 20,
        Shape(12_500, 57_344, 0, 0): 25,
        Shape(16_000, 65_536, 2, 1000): 6,
        Shape(60_000, 262_144, 8, 1000): 3,
        Shape(4000, 15_258, 1, 190, ("A10", "T4")): 12,
    }
)

BUILDERS: dict[str, Callable[[Fleet], Policy]] = {
    "random": lambda fleet: RandomFit(fleet, seed=7),
    "best fit": BestFit,
    "fragmentation": lambda fleet: FragmentationGradient(fleet, KNOWN),
    "fragmentation, learning": lambda fleet: FragmentationGradient(fleet, Mix(), learn=True),
    "headroom": lambda fleet: Headroom(fleet, KNOWN),
    "headroom, learning": lambda fleet: Headroom(fleet, Mix(), learn=True),
    "headroom, learning and forgetting": lambda fleet: Headroom(fleet, Mix(memory=16), learn=True),
}


def hosts(fleet: Fleet, held: list[Placement], node: int, shape: Shape) -> bool:
    """Whether the node has room, worked out from what was placed there and from nothing that the fleet says."""
    spec = fleet.specs[node]
    here = [placement for placement in held if placement.node == node]
    if shape.models and spec.model not in shape.models:
        return False
    if sum(p.shape.cpu_milli for p in here) + shape.cpu_milli > spec.cpu_milli:
        return False
    if sum(p.shape.memory_mib for p in here) + shape.memory_mib > spec.memory_mib:
        return False
    used = [sum(p.shape.device_milli for p in here if device in p.devices) for device in range(spec.devices)]
    return sum(milli + shape.device_milli <= 1000 for milli in used) >= shape.devices


def play(packer: Packer, history: list[Shape | int]) -> list[Placement | None]:
    """The answers to the arrivals of a history."""
    answers: list[Placement | None] = []
    held: list[Placement] = []
    for step in history:
        if isinstance(step, Shape):
            answer = packer.offer(step)
            answers.append(answer)
            if answer is not None:
                held.append(answer)
        elif step < len(held):
            packer.fleet.release(held.pop(step))
    return answers


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=20, deadline=None)
@given(nodes, steps)
def test_nothing_is_oversold_and_nothing_that_fits_is_declined(
    name: str, specs: list[NodeSpec], history: list[Shape | int]
) -> None:
    """The two promises that no policy may trade for a better score."""
    fleet = Fleet(specs)
    packer = Packer(fleet, BUILDERS[name](fleet))
    held: list[Placement] = []
    for step in history:
        if isinstance(step, Shape):
            able = [node for node in range(len(specs)) if hosts(fleet, held, node, step)]
            answer = packer.offer(step)
            if answer is None:
                assert able == []
                continue
            assert answer.node in able
            assert len(set(answer.devices)) == step.devices
            spec = specs[answer.node]
            assert all(0 <= device < spec.devices for device in answer.devices)
            held.append(answer)
            for device in range(spec.devices):
                here = [p for p in held if p.node == answer.node and device in p.devices]
                assert sum(p.shape.device_milli for p in here) <= 1000
        elif step < len(held):
            fleet.release(held.pop(step))
    for placement in held:
        fleet.release(placement)
    assert fleet.free_milli == fleet.capacity_milli
    assert all(fleet.rooms_of(node) == (1000,) * spec.devices for node, spec in enumerate(specs))


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "random"])
@settings(max_examples=20, deadline=None)
@given(nodes, steps)
def test_choices_are_the_same_with_and_without_what_was_remembered(
    name: str, specs: list[NodeSpec], history: list[Shape | int]
) -> None:
    """Indexes and caches only save time: dropping them before every decision changes none."""

    class Forgetful(Packer):
        def offer(self, shape: Shape) -> Placement | None:
            self.policy.forget()
            return super().offer(shape)

    remembering, forgetting = Fleet(specs), Fleet(specs)
    kept = play(Packer(remembering, BUILDERS[name](remembering)), history)
    dropped = play(Forgetful(forgetting, BUILDERS[name](forgetting)), history)
    assert kept == dropped


@settings(max_examples=20, deadline=None)
@given(nodes, steps)
def test_a_headroom_that_starts_late_agrees_with_one_that_saw_it_all(
    specs: list[NodeSpec], history: list[Shape | int]
) -> None:
    """A restarted placer builds its policy on a fleet that is already in use; what it counts must be the same."""
    fleet = Fleet(specs)
    early = Headroom(fleet, KNOWN)
    play(Packer(fleet, early), history)
    late = Headroom(fleet, KNOWN)
    for shape in sorted(KNOWN.counts):
        assert early.choose(shape) == late.choose(shape)
