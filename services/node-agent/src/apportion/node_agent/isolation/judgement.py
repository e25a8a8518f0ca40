"""From what was measured to a verdict; pure.

Each check has a control, the same thing with the enforcement off. A control that does no harm proves that the check
could not have failed, and then its verdict is ``inconclusive`` whatever it measured.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from apportion.contracts.causes import IsolationFinding
from apportion.contracts.events import IsolationCheck

GATE_PERMILLE: Final = 50
"""A neighbour may make SM-bound kernels slower by less than 5 %."""


def percentile(values: Sequence[int], percent: int) -> int:
    """The smallest value that so many percent of all don't exceed.

    >>> percentile([5, 1, 4, 2, 3], 50), percentile([5, 1, 4, 2, 3], 95)
    (3, 5)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def changes_permille(rounds: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, int]:
    """Median over rounds of how much slower p50 and p95 are with a neighbour, and the noise between lonely rounds.

    A round is the kernel times alone and with the neighbour. Positive is slower.
    """
    found = {}
    for percent in (50, 95):
        each = [_permille(percentile(alone, percent), percentile(beside, percent)) for alone, beside in rounds]
        found[f"p{percent}_change_permille"] = round(median(each))
    lonely = [percentile(alone, 50) for alone, _ in rounds]
    noise = [abs(_permille(before, after)) for before, after in pairwise(lonely)]
    return {**found, "noise_permille": round(median(noise)) if noise else 0}


def _permille(before: int, after: int) -> int:
    return round(1000 * (after - before) / max(1, before))


def check(
    name: str,
    *,
    holds: bool,
    figures: Mapping[str, int],
    control: Mapping[str, int] | None,
    control_harmed: bool,
    detail: str = "",
) -> IsolationCheck:
    """One check's verdict; without ``control`` there was none to be had."""
    if control is None:
        verdict, detail = IsolationFinding.INCONCLUSIVE, detail or "no control could be run here"
    elif not control_harmed:
        verdict, detail = (
            IsolationFinding.INCONCLUSIVE,
            detail or "the control, without enforcement, did no harm either",
        )
    else:
        verdict = IsolationFinding.PASSED if holds else IsolationFinding.FAILED
    return IsolationCheck(name=name, verdict=verdict, figures=dict(figures), control=dict(control or {}), detail=detail)


def reported(name: str, *, figures: Mapping[str, int], detail: str) -> IsolationCheck:
    """Figures of what isn't promised."""
    return IsolationCheck(name=name, verdict=IsolationFinding.REPORTED, figures=dict(figures), detail=detail)


def overall(checks: Sequence[IsolationCheck]) -> IsolationFinding:
    """The verdict of a test: one failed check fails it, and one without proof leaves it open.

    >>> str(overall([reported("l2", figures={}, detail="")]))
    'reported'
    """
    verdicts = {one.verdict for one in checks}
    for worst in (IsolationFinding.FAILED, IsolationFinding.INCONCLUSIVE, IsolationFinding.PASSED):
        if worst in verdicts:
            return worst
    return IsolationFinding.REPORTED
