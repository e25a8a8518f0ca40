"""What history may change about an estimate, and what it may not."""

from __future__ import annotations

import copy

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.admission.learned import (
    CORRECTED_BP_MAX,
    CORRECTED_BP_MIN,
    FAMILIES_KEPT,
    ONE_BP,
    RUNS_KEPT,
    RUNS_MIN,
    Learned,
    advice,
    corrected,
    evolve_peak,
)
from apportion.admission.model_spec import parse_model
from apportion.admission.sizing import estimate

SIZING = estimate(parse_model({"name": "llama-3.1-8b", "batch": 8, "context_tokens": 8192}))
FAMILY = SIZING.family


def after_runs(*observed_bp: int) -> Learned:
    """The state after runs whose peaks were these parts of the estimate."""
    state = Learned()
    for ratio_bp in observed_bp:
        state = evolve_peak(state, FAMILY, 100_000, 100_000 * ratio_bp // ONE_BP)
    return state


def test_a_few_runs_change_nothing() -> None:
    """One odd run must not move a family."""
    answer = corrected(after_runs(*[5_000] * (RUNS_MIN - 1)), SIZING, FAMILY)
    assert (answer.memory_mib_p50, answer.memory_mib_p95_device) == (
        SIZING.memory_mib_p50,
        SIZING.memory_mib_p95_device,
    )
    assert answer.ratio_bp == ONE_BP
    assert answer.runs == RUNS_MIN - 1


def test_a_family_that_needs_a_tenth_more_is_booked_more() -> None:
    """The formula's error is the same for the next run of the family."""
    answer = corrected(after_runs(*[12_000] * 8), SIZING, FAMILY)
    assert answer.ratio_bp == 12_000
    # The device's peak grows by a fifth; what p50 leaves out of it (the context) stays out.
    outside = SIZING.memory_mib_device - SIZING.memory_mib_p50
    assert answer.memory_mib_p50 == SIZING.memory_mib_device * 12 // 10 - outside
    assert answer.memory_mib_p95_device == -(-SIZING.memory_mib_device * 126 // 100)
    assert answer.method.endswith("+history-v1")


def test_a_family_that_needs_less_stops_wasting() -> None:
    """The other half of the point: the rest of the card is free for others."""
    answer = corrected(after_runs(*[8_000] * 8), SIZING, FAMILY)
    assert answer.memory_mib_p95_device < SIZING.memory_mib_p95_device
    assert answer.memory_mib_p95_device >= SIZING.memory_mib_device * 8 // 10


def test_the_largest_run_counts_until_there_are_many() -> None:
    """Of nine runs the 95th percentile is the largest; of forty, one outlier no longer decides."""
    few = corrected(after_runs(*[9_000] * 8, 15_000), SIZING, FAMILY)
    many = corrected(after_runs(*[9_000] * 39, 15_000), SIZING, FAMILY)
    assert few.memory_mib_p95_device == -(-SIZING.memory_mib_device * 15_000 * 10_500 // 10**8)
    assert many.memory_mib_p95_device < few.memory_mib_p95_device


def test_other_families_are_not_touched() -> None:
    """A bf16 model says nothing about its 4-bit sister."""
    state = after_runs(*[20_000] * 10)
    assert corrected(state, SIZING, "another/nf4/other/none").memory_mib_p95_device == SIZING.memory_mib_p95_device


def test_runs_without_a_peak_teach_nothing() -> None:
    """An agent that could not read a peak reports 0, which is no measurement."""
    assert evolve_peak(Learned(), FAMILY, 1000, 0) == Learned()
    assert evolve_peak(Learned(), FAMILY, 0, 1000) == Learned()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), max_size=200))
def test_history_moves_an_estimate_within_bounds(runs: list[tuple[int, int]]) -> None:
    """Whatever was reported, p95 stays within half and twice the formula's, and p50 below it."""
    state = Learned()
    for estimated_mib, observed_mib in runs:
        state = evolve_peak(state, FAMILY, estimated_mib, observed_mib)
    answer = corrected(state, SIZING, FAMILY)
    assert SIZING.memory_mib_p95_device * CORRECTED_BP_MIN // ONE_BP <= answer.memory_mib_p95_device
    assert answer.memory_mib_p95_device <= SIZING.memory_mib_p95_device * CORRECTED_BP_MAX // ONE_BP
    assert 0 < answer.memory_mib_p50 <= answer.memory_mib_p95_device
    assert len(state.ratios_bp.get(FAMILY, ())) <= RUNS_KEPT


def test_replaying_the_same_runs_gives_the_same_state() -> None:
    """It is a fold: a snapshot and the rest of the stream equal the whole stream."""
    runs = [(f"family-{index % 7}", 1000 + index, 900 + index * 3) for index in range(100)]
    whole, first = Learned(), Learned()
    for run in runs:
        whole = evolve_peak(whole, *run)
    for run in runs[:40]:
        first = evolve_peak(first, *run)
    resumed = msgspec.msgpack.decode(msgspec.msgpack.encode(copy.deepcopy(first)), type=Learned)
    for run in runs[40:]:
        resumed = evolve_peak(resumed, *run)
    assert resumed == whole
    assert list(resumed.ratios_bp) == list(whole.ratios_bp)


def test_the_family_unheard_of_for_longest_is_forgotten_first() -> None:
    """A tenant that invents names must not grow the state for ever."""
    state = Learned()
    for index in range(FAMILIES_KEPT):
        state = evolve_peak(state, f"family-{index}", 1000, 1000)
    state = evolve_peak(state, "family-0", 1000, 1000)
    state = evolve_peak(state, "newcomer", 1000, 1000)
    assert len(state.ratios_bp) == FAMILIES_KEPT
    assert "family-0" in state.ratios_bp
    assert "family-1" not in state.ratios_bp


def test_waste_is_said_in_one_sentence() -> None:
    """The sentence that a tenant reads."""
    found = advice(40 * 1024, [12 * 1024, 14 * 1024, 13 * 1024])
    assert found is not None
    assert found.text == "asked 40 GiB, never used more than 14 GiB in 3 runs"
    assert found.suggested_mib == 16640
    assert found.suggested_mib % 256 == 0


@pytest.mark.parametrize(
    ("asked_mib", "peaks_mib"),
    [
        (40960, [14336, 14000]),  # too few runs
        (40960, [14336, 0, 0]),  # two of the runs reported nothing
        (20000, [16500, 16000, 16400]),  # room, but no waste to speak of
        (0, [1000, 1000, 1000]),  # nothing was asked
    ],
)
def test_no_advice_without_reason(asked_mib: int, peaks_mib: list[int]) -> None:
    """Advice that is often wrong is not read."""
    assert advice(asked_mib, peaks_mib) is None


def test_a_job_at_its_limit_is_told_to_ask_for_more() -> None:
    """The next run may be the one that dies."""
    found = advice(10_000, [9_900, 9_700, 9_800])
    assert found is not None
    assert found.suggested_mib == 11520
    assert "little is left" in found.text
