"""Whose turn it is: guarantees first, then dominant shares by weight, of what is held now and was held lately.

Integers only, and times are those of facts, so that a replay comes to the same shares. A share is in millionths of the
pool; what was held lately is a mean that forgets half in each half-life, kept as 65,536ths of its unit.
"""

from collections.abc import Mapping
from math import isqrt
from typing import Final

from msgspec import Struct

from apportion.pool import quota
from apportion.pool.quota import Amounts

VERSION: Final = "drf@2"
"""Changes whenever a turn may come out another way."""
MILLION: Final = 1_000_000
_ONE: Final = 1 << 32
_UNIT: Final = 1 << 16
_STEP_BITS: Final = 20
"""A half-life has 2**20 steps, in which time is counted: 3.4 ms where it is an hour."""


def _halvings() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """2 to the power of -k/2**10, and of -k/2**20, for each k below 1024, with 32 bits behind the point.

    By integer roots, so that all machines agree.
    """
    one = 1 << 128
    tables = []
    root = one // 2
    for _ in range(2):
        for _ in range(10):
            root = isqrt(root * one)
        power, found = one, []
        for _ in range(1024):
            found.append(power >> 96)
            power = power * root >> 128
        tables.append(tuple(found))
    return tables[0], tables[1]


_COARSE, _FINE = _halvings()


class Past(Struct):
    """What was held lately."""

    at: int
    """Up to when, in ns since the epoch."""
    amounts: Amounts = {}


def steps_between(at: int, now: int, half_life_s: int) -> int:
    """Whole steps of the half-life from one instant to another; 0 where the clock was set back."""
    return max(0, now - at) // (half_life_s * 1_000_000_000 >> _STEP_BITS)


def remaining(steps: int) -> int:
    """What is left of 2**32 after this many steps."""
    whole = steps >> _STEP_BITS
    return (_COARSE[steps >> 10 & 1023] * _FINE[steps & 1023] >> 32) >> whole if whole < 64 else 0


def lately(past: Past | None, used: Mapping[str, int], now: int, half_life_s: int) -> Amounts:
    """What was held lately as of ``now``, where ``used`` has been held since; in 65,536ths."""
    if past is None or half_life_s <= 0:
        return {}
    left = remaining(steps_between(past.at, now, half_life_s))
    if left == _ONE:
        return past.amounts
    found = {}
    for name in sorted({*past.amounts, *used}):
        if name == quota.JOBS:
            continue
        amount = (past.amounts.get(name, 0) * left + used.get(name, 0) * _UNIT * (_ONE - left)) // _ONE
        if amount:
            found[name] = amount
    return found


def settled(past: Past | None, used: Mapping[str, int], now: int, half_life_s: int) -> Past:
    """What was held lately, taken forward to ``now``, before another amount is held than ``used``."""
    if past is None:
        return Past(at=now)  # nothing is known from before, so what is held counts from here on
    steps = steps_between(past.at, now, half_life_s)
    if not steps:
        return past
    # By whole steps: of many facts within one step, none would count otherwise.
    at = past.at + steps * (half_life_s * 1_000_000_000 >> _STEP_BITS)
    return Past(at=at, amounts=lately(past, used, now, half_life_s))


def turn(
    used: Mapping[str, int],
    past: Mapping[str, int],
    totals: Mapping[str, int],
    guaranteed: Mapping[str, int],
    weight: int = 1,
    *,
    weights: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """When it is somebody's turn: the least goes first. ``past`` is what ``lately`` said.

    The first is 0 for those below what is guaranteed to them, in all that is guaranteed; among them, who has the least
    of it goes first. It is 1 for the others, who go by the dominant share of what they hold beyond, over their weight.
    ``weights`` has those of single resources; with any, each share counts over its own weight.
    """
    claims = [(used.get(name, 0), amount) for name, amount in guaranteed.items() if amount > 0]
    if claims and all(held < amount for held, amount in claims):
        return 0, max(held * MILLION // amount for held, amount in claims)
    if weights:
        own = _weighed(guaranteed, totals, weight, weights)
        now = _weighed(used, totals, weight, weights)
        before = _weighed(past, totals, weight, weights) // _UNIT
        return 1, max(0, now - own) + max(0, before - own)
    own = dominant(guaranteed, totals)
    beyond = max(0, dominant(used, totals) - own) + max(0, dominant(past, totals) // _UNIT - own)
    return 1, beyond * 1000 // weight


def dominant(held: Mapping[str, int], totals: Mapping[str, int]) -> int:
    """The largest part that this is of any resource of the pool, in millionths."""
    share = 0
    for name, total in totals.items():
        if total > 0 and (amount := held.get(name, 0)):
            share = max(share, amount * MILLION // total)
    return share


def _weighed(held: Mapping[str, int], totals: Mapping[str, int], weight: int, weights: Mapping[str, int]) -> int:
    """As ``dominant``, each part over the weight of its resource; in thousandths of a millionth."""
    share = 0
    for name, total in totals.items():
        if total > 0 and (amount := held.get(name, 0)):
            share = max(share, amount * MILLION // total * 1000 // weights.get(name, weight))
    return share
