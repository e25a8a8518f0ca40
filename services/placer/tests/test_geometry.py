"""MIG by place: where an instance may lie, and what it leaves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts.events import Mig, MigInstance, MigPlacement, MigProfile
from apportion.contracts.testing import a_board
from apportion.placer.geometry import Board, Instances, instances_on

H100 = a_board()
NAMES = [profile.name for profile in H100.profiles]


def profile_named(name: str) -> MigProfile:
    return next(profile for profile in H100.profiles if profile.name == name)


def legal(mig: Mig, taken: list[tuple[str, int, int]]) -> bool:
    """By the rules alone: starts as announced, no slice twice, and as many of a kind as there may be."""
    by_name = {profile.name: profile for profile in mig.profiles}
    units = [unit for _, start, size in taken for unit in range(start, start + size)]
    return (
        len(units) == len(set(units))
        and all(start in by_name[name].starts and size == by_name[name].size for name, start, size in taken)
        and all(sum(name == each for each, _, _ in taken) <= by_name[name].instances_max for name in by_name)
    )


def best_left(taken: list[tuple[str, int, int]]) -> tuple[int, ...]:
    """How many starts each size has left, the largest first: counted slice by slice."""
    busy = {unit for _, start, size in taken for unit in range(start, start + size)}
    sizes = sorted({(profile.size, profile.compute_slices, profile.starts) for profile in H100.profiles}, reverse=True)
    return tuple(
        sum(all(unit not in busy for unit in range(start, start + size)) for start in starts)
        for size, _, starts in sorted(sizes, key=lambda each: (-each[0], -each[1], each[2]))
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=14), st.data())
def test_every_start_is_legal_and_none_that_is_legal_leaves_more(
    steps: list[tuple[str, bool]], data: st.DataObject
) -> None:
    """Tried by brute force on a board where instances come and go; refused only where no start is legal."""
    board = Board(H100)
    taken: list[tuple[str, int, int]] = []
    for name, is_removal in steps:
        if is_removal and taken:
            taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            continue
        profile = profile_named(name)
        options = [start for start in range(8) if legal(H100, [*taken, (name, start, profile.size)])]
        start = board.start_of(tuple(sorted(taken)), profile)
        assert (start is None) == (not options)
        if start is None:
            continue
        assert start in options
        left = {option: best_left([*taken, (name, option, profile.size)]) for option in options}
        assert left[start] == max(left.values())
        taken.append((name, start, profile.size))


def test_small_instances_go_where_they_break_no_large_block() -> None:
    """Seven small ones come from the top down, so that the first half of the board stays whole longest."""
    board = Board(H100)
    small = profile_named("1g.10gb")
    taken: Instances = ()
    starts = []
    while (start := board.start_of(taken, small)) is not None:
        starts.append(start)
        taken = tuple(sorted([*taken, (small.name, start, small.size)]))
    assert starts == [6, 5, 4, 3, 2, 1, 0]
    assert board.fills(small) == 7


def test_the_smallest_profile_with_enough_of_both_is_taken() -> None:
    """A share asked in milli and MiB becomes an instance; the one with media engines is for those who name it."""
    board = Board(H100)
    assert board.profile_for("", 100, 9_000) == profile_named("1g.10gb")
    assert board.profile_for("", 100, 15_000) == profile_named("1g.20gb")
    assert board.profile_for("", 250, 15_000) == profile_named("2g.20gb")
    assert board.profile_for("", 500, 1) == profile_named("4g.40gb")
    assert board.profile_for("1g.10gb+me", 0, 0) == profile_named("1g.10gb+me")
    assert board.profile_for("", 1000, 90_000) is None


def test_instances_of_others_are_in_the_way() -> None:
    """What somebody else made on the board is not ours to move."""
    mig = a_board(foreign=(MigInstance(uuid="MIG-1", profile="1g.10gb", start=5, size=1),))
    taken = instances_on(mig, [MigPlacement(profile="1g.10gb", start=6, size=1), None])
    assert taken == (("1g.10gb", 5, 1), ("1g.10gb", 6, 1))
    board = Board(mig)
    assert board.start_of(taken, profile_named("3g.40gb")) == 0
    assert board.start_of(taken, profile_named("7g.80gb")) is None
