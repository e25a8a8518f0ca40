"""Tail probabilities in whole thousandths, by integer arithmetic, so that every machine reaches the same price."""

from math import isqrt

MILLE = 1000

# The standard normal distribution function at 0.0, 0.1, … 3.2, in thousandths.
_NORMAL = (
    500, 540, 579, 618, 655, 691, 726, 758, 788, 816, 841, 864, 885, 903, 919, 933, 945,
    955, 964, 971, 977, 982, 986, 989, 992, 994, 995, 997, 997, 998, 999, 999, 999,
)  # fmt: skip

# A Poisson mean beyond this (in thousandths) is cut to it: no price hangs on whether one of so many is missed.
_POISSON_MEAN_MAX = 400_000


def poisson_tail(mean_mille: int) -> list[int]:
    """At each count from 0 on, the odds that a Poisson variable with that mean reaches it, until they are nil.

    The mean and the odds are in thousandths.
    """
    mean_mille = min(mean_mille, _POISSON_MEAN_MAX)
    terms: list[int] = []
    term = 1 << 40
    while term:
        terms.append(term)
        term = term * mean_mille // (MILLE * len(terms))
    total = sum(terms)
    tail: list[int] = []
    beyond = total
    for term in terms:
        odds = beyond * MILLE // total
        if not odds:
            break
        tail.append(odds)
        beyond -= term
    return tail


def normal_exceeds(margin: int, variance: int) -> int:
    """The probability, in thousandths, that a normal variable with mean `margin` and this variance is above zero."""
    if variance <= 0:
        return MILLE if margin > 0 else 0
    tenths = abs(margin) * 10 // max(isqrt(variance), 1)
    tail = _NORMAL[tenths] if tenths < len(_NORMAL) else MILLE
    return tail if margin >= 0 else MILLE - tail
