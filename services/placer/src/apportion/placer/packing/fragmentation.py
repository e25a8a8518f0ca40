"""Fragmentation gradient descent: place where what typical demands can no longer use grows least.

After Weng et al., "Beware of Fragmentation" (USENIX ATC 2023), with the details that decide its published figures: a
logistic score in whole points, the most popular demands up to 95 % of the tasks (CPU-only ones too), no host memory.
"""

from bisect import bisect_right
from decimal import Decimal, localcontext
from typing import NamedTuple

from apportion.placer.packing.demand import WHOLE_DEVICE_MILLI, Mix, Shape
from apportion.placer.packing.fleet import Fleet, NodeClass, key_after
from apportion.placer.packing.policy import Choice
from apportion.placer.packing.scored import SCORE_MAX, Rating, ScoredSearch

_POPULAR_PERCENT = 95


def _logistic_steps() -> list[int]:
    # The score is floor(100 / (1 + e**-x)); we keep the x, in millionths, at which it reaches each point. Decimal gives
    # the same digits on every machine, which the C library's exp doesn't promise.
    with localcontext() as context:
        context.prec = 30
        return [
            int((Decimal(score) / Decimal(SCORE_MAX - score)).ln() * 1_000_000 // 1) for score in range(1, SCORE_MAX)
        ]


LOGISTIC_STEPS = _logistic_steps()
"""The changes, in millionths, from which on the score is 1, 2, … 99."""


class _Typical(NamedTuple):
    cpu_milli: int
    device_milli: int
    devices: int
    allowed: int
    weight: int


class FragmentationGradient:
    """The published policy; with `learn`, the typical demands are those that arrived so far."""

    def __init__(self, fleet: Fleet, mix: Mix, *, learn: bool = False) -> None:
        self._fleet = fleet
        self._mix = mix
        self._learn = learn
        self._search = ScoredSearch(fleet, self._rate)
        self._typical: list[_Typical] = []
        self._weight = 0
        self._amounts: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._arrivals_to_refresh = 1
        if not learn:
            self._refresh()

    def choose(self, shape: Shape) -> Choice | None:
        """The class whose fragmentation grows least."""
        return self._search.best(shape)

    def arrived(self, shape: Shape) -> None:
        """Count the arrival where the mix is learned; the typical demands are renewed as their number grows by half."""
        if self._learn:
            if not self._arrivals_to_refresh:
                self._refresh()
                self._arrivals_to_refresh = max(self._mix.total // 2, 1)
            self._arrivals_to_refresh -= 1
            self._mix.add(shape)

    def forget(self) -> None:
        """Drop indexes and amounts."""
        self._search.forget()
        self._amounts.clear()

    def _refresh(self) -> None:
        merged: dict[tuple[int, int, int, int], int] = {}
        for shape, count in self._mix.ranked():
            key = (shape.cpu_milli, shape.device_milli, shape.devices, self._fleet.allowed(shape))
            merged[key] = merged.get(key, 0) + count
        self._typical = []
        self._weight = 0
        for key, count in sorted(merged.items(), key=lambda item: (-item[1], item[0])):
            if self._weight * 100 >= self._mix.total * _POPULAR_PERCENT:
                break
            self._typical.append(_Typical(*key, count))
            self._weight += count
        self.forget()

    def _rate(self, cls: NodeClass, shape: Shape) -> Rating:
        if not self._weight:
            return 0, cls.rooms[0] if shape.devices == 1 else 0
        before = self._amount(cls.model, cls.cpu_milli, cls.rooms)
        best = (-1, 0)
        rooms = sorted({room for room in cls.rooms if room >= shape.device_milli}, reverse=True)
        for room in rooms if shape.devices == 1 else (0,):
            after = key_after(cls, shape, room)
            growth = self._amount(cls.model, after[1], after[4]) - before
            # Amounts are milli times counts; one device wide is 1000 milli, so this is x in millionths.
            score = bisect_right(LOGISTIC_STEPS, -growth * 1_000 // self._weight)
            if score > best[0]:
                best = (score, room)
        return best

    def _amount(self, model: int, cpu_milli: int, rooms: tuple[int, ...]) -> int:
        """What is left on the devices and useless to a typical demand, in milli, summed over the demands' counts."""
        key = (model, cpu_milli, rooms)
        known = self._amounts.get(key)
        if known is not None:
            return known
        free = sum(rooms)
        whole = rooms.count(WHOLE_DEVICE_MILLI)
        top = rooms[0] if rooms else 0
        usable = 0
        for cpu, device_milli, devices, allowed, weight in self._typical:
            if not devices or cpu > cpu_milli or device_milli > top or not allowed >> model & 1 or devices > len(rooms):
                continue
            if devices > 1 and devices > whole:
                continue
            usable += weight * (free if device_milli <= rooms[-1] else sum(r for r in rooms if r >= device_milli))
        amount = self._amounts[key] = free * self._weight - usable
        return amount
