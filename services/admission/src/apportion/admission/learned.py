"""What observed peaks teach about estimates: a fold over finished runs, and advice on a job's own figure.

Per family (`model_spec.family_key`) it keeps the last ratios of observed to estimated peak, in basis points, so that
a model which always needs a tenth more is booked a tenth more, and one that needs less stops wasting the rest. Which
event carries a peak is the caller's business; so is whether a correction is wanted at all.

Per profile (a tenant's command) it keeps the last peaks, for advice. Both are bounded, and what was unheard of for
longest goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from apportion.admission.sizing import Sizing

RULES = "history-v1"
"""Goes up with whatever decides what the same peaks teach."""
ONE_BP = 10_000
RUNS_MIN = 5
"""Fewer runs than this correct nothing: one odd run must not move a family."""
RUNS_KEPT = 64
FAMILIES_KEPT = 4096
RATIO_BP_MIN = 2_500
RATIO_BP_MAX = 40_000
"""A ratio outside of these says that the request described another model, not that the formula is off."""
CORRECTED_BP_MIN = 5_000
CORRECTED_BP_MAX = 20_000
"""However much history says, p95 stays within half and twice what the formula says."""
SAFETY_BP = 500
"""Kept above the largest ratio seen: the next run may be the largest."""

PROFILES_KEPT = 8192
PEAKS_KEPT = 16
ADVICE_RUNS_MIN = 3
ADVICE_HEADROOM_BP = 1_500
ADVICE_WASTE_BP = 2_500
"""Advice is given if at least this part of the asked memory was never used."""
ADVICE_STEP_MIB = 256


class Learned(msgspec.Struct, kw_only=True):
    """Ratios of observed to estimated peak by family, oldest first; families in order of their last run."""

    ratios_bp: dict[str, list[int]] = msgspec.field(default_factory=dict)
    peaks_mib: dict[bytes, list[int]] = msgspec.field(default_factory=dict)
    """The newest peaks of each profile, on one device, oldest first; profiles in order of their last run."""


class Corrected(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate after what was learned."""

    memory_mib_p50: int
    memory_mib_p95: int
    memory_mib_p95_device: int
    runs: int
    """Runs of the family that were looked at; below RUNS_MIN the estimate is unchanged."""
    ratio_bp: int
    """The family's median of observed to estimated peak; 10 000 where too little is known."""
    method: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asked for against what its runs used."""

    asked_mib: int
    peak_mib_max: int
    runs: int
    suggested_mib: int
    text: str


def evolve_peak(state: Learned, family_key: str, estimated_mib: int, observed_peak_mib: int) -> Learned:
    """The state after one finished run; changes it in place.

    Both figures are MiB on one device, the estimate being `Sizing.memory_mib_device` of that run. Runs that reported
    no peak (0) teach nothing.
    """
    if estimated_mib <= 0 or observed_peak_mib <= 0:
        return state
    ratio_bp = _clamp(observed_peak_mib * ONE_BP // estimated_mib, RATIO_BP_MIN, RATIO_BP_MAX)
    # Taken out and put back, the family moves to the end: the first of the dict is the one unheard of for longest.
    ratios = state.ratios_bp.pop(family_key, [])
    ratios.append(ratio_bp)
    del ratios[:-RUNS_KEPT]
    state.ratios_bp[family_key] = ratios
    for oldest in list(islice(state.ratios_bp, max(0, len(state.ratios_bp) - FAMILIES_KEPT))):
        del state.ratios_bp[oldest]
    return state


def evolve_profile(state: Learned, profile: bytes, observed_peak_mib: int) -> Learned:
    """The state after one run of this profile that ended well; changes it in place."""
    if observed_peak_mib <= 0:
        return state
    peaks = state.peaks_mib.pop(profile, [])
    peaks.append(observed_peak_mib)
    del peaks[:-PEAKS_KEPT]
    state.peaks_mib[profile] = peaks
    for oldest in list(islice(state.peaks_mib, max(0, len(state.peaks_mib) - PROFILES_KEPT))):
        del state.peaks_mib[oldest]
    return state


def corrected(state: Learned, sizing: Sizing, family: str) -> Corrected:
    """The estimate, corrected by the family's history once that is long enough.

    p50 moves with the median ratio; p95 becomes the expected device peak times the 95th percentile of the ratios
    (of less than 20 runs the largest) with a margin, within half and twice the formula's p95.
    """
    ratios = sorted(state.ratios_bp.get(family, ()))
    if len(ratios) < RUNS_MIN:
        return Corrected(
            memory_mib_p50=sizing.memory_mib_p50,
            memory_mib_p95=sizing.memory_mib_p95,
            memory_mib_p95_device=sizing.memory_mib_p95_device,
            runs=len(ratios),
            ratio_bp=ONE_BP,
            method=sizing.method,
        )
    median_bp = ratios[len(ratios) // 2]
    high_bp = ratios[-(len(ratios) // 20) - 1]
    device_p50 = sizing.memory_mib_device * median_bp // ONE_BP
    booked = -(-sizing.memory_mib_device * high_bp * (ONE_BP + SAFETY_BP) // (ONE_BP * ONE_BP))
    p95 = _clamp(
        booked,
        sizing.memory_mib_p95_device * CORRECTED_BP_MIN // ONE_BP,
        sizing.memory_mib_p95_device * CORRECTED_BP_MAX // ONE_BP,
    )
    # In the measure that the estimate was asked in: what p50 leaves out of the device stays out.
    outside = sizing.memory_mib_device - sizing.memory_mib_p50
    own_p95 = max(1, p95 - outside)
    return Corrected(
        memory_mib_p50=min(max(1, device_p50 - outside), own_p95),
        memory_mib_p95=own_p95,
        memory_mib_p95_device=p95,
        runs=len(ratios),
        ratio_bp=median_bp,
        method=f"{sizing.method}+{RULES}",
    )


def advice(asked_mib: int, peaks_mib: Sequence[int]) -> Advice | None:
    """Advice to ask for less (or more), if enough runs show it; None where the asked figure is about right.

    The suggestion is the largest peak and 15 %, rounded up to 256 MiB.
    """
    seen = [peak for peak in peaks_mib if peak > 0]
    if len(seen) < ADVICE_RUNS_MIN or asked_mib <= 0:
        return None
    peak_mib_max = max(seen)
    wanted = -(-peak_mib_max * (ONE_BP + ADVICE_HEADROOM_BP) // ONE_BP)
    suggested_mib = -(-wanted // ADVICE_STEP_MIB) * ADVICE_STEP_MIB
    is_wasteful = suggested_mib < asked_mib and (asked_mib - peak_mib_max) * ONE_BP >= asked_mib * ADVICE_WASTE_BP
    is_tight = peak_mib_max * 20 > asked_mib * 19
    if is_wasteful:
        text = f"asked {_gib(asked_mib)}, never used more than {_gib(peak_mib_max)} in {len(seen)} runs"
    elif is_tight:
        text = f"asked {_gib(asked_mib)}, used up to {_gib(peak_mib_max)} in {len(seen)} runs: little is left"
    else:
        return None
    return Advice(
        asked_mib=asked_mib, peak_mib_max=peak_mib_max, runs=len(seen), suggested_mib=suggested_mib, text=text
    )


def _gib(mib: int) -> str:
    """GiB with one decimal, without it where it is zero."""
    tenths = (mib * 10 + 512) // 1024
    whole, tenth = divmod(tenths, 10)
    return f"{whole}.{tenth} GiB" if tenth else f"{whole} GiB"


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
