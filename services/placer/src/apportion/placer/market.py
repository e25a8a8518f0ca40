"""What is scarce: the odds that the demand to come exceeds what is left, of models and of room for several devices.

Follows the rooms as they change. All odds are integers in thousandths, worked out from amounts rounded to their leading
digits, so that they hold for a while.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from apportion.placer.constraints import Like
from apportion.placer.mix import Asked
from apportion.placer.packing.tails import MILLE, normal_exceeds, poisson_tail
from apportion.placer.rooms import NodeRoom
from apportion.placer.values import is_untouched
from apportion.pool.state import NodeState

_HORIZON_MILLE: Final = 1_300
"""Demand to come, in pools of what is free now: pools are asked for more than they have."""
_USEFUL_MILLE: Final = 900
"""Of a model's free devices, the share that a perfect packing would still leave useful."""
_SLOT_BID_PERCENT: Final = 50
"""A slot's bid is this share of its devices' worth: the node isn't idle while nobody asks for the slot."""
_SLOTS_AMPLE: Final = 40
"""More slots than twice the expected demand and this many have no price: the odds are below a thousandth."""
_DIGITS: Final = 6
"""Leading binary digits that prices are worked out from."""
_ROWS_MAX: Final = 1 << 12
_DEVICES_MAX: Final = 1 << 13
"""States of nodes of which it is remembered what they have free."""
LEVEL_MILLE: Final = 25
"""Prices that differ by less are one level."""


Row = tuple[int, ...]
"""How many slots of each kind; empty where there are none."""


class _Rows(NamedTuple):
    """Of one model and number of free devices: the most CPU and host memory that slots take, and rows by less."""

    cpu_most: int
    host_most: int
    known: dict[tuple[int, int], Row]
    told: dict[Row, Row]
    """Each row once."""


class _Devices(NamedTuple):
    """Of healthy devices: the milli-GPU free by model, and how many can be had whole."""

    free: tuple[tuple[str, int], ...]
    whole: int


class _Slot(NamedTuple):
    """A demand for several devices of one node, and how often demands that need such a slot are asked."""

    asked: Asked
    rivals: int


class _Bound(NamedTuple):
    """Demand that only some models can take: milli and squared milli per arrival, times the mix's total."""

    models: tuple[str, ...]
    milli: int
    squared: int


@dataclass(slots=True)
class Market:
    """What is left, and what is to come. A copy follows other changes from there on."""

    slots: Sequence[_Slot]
    bound: Sequence[_Bound]
    total: int
    """Arrivals in the mix."""
    milli: int
    """What they asked of devices, together."""
    free: dict[str, int] = field(default_factory=dict)
    """Milli-GPU free on devices of each model."""
    left: list[int] = field(default_factory=list)
    """Slots of each kind."""
    _tails: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By what is to come and how often a slot is asked: the same dict in every copy, as it never turns false."""
    _prices: dict[str, int] = field(default_factory=dict)
    """Replaced, and never changed, when they are renewed."""
    _odds: list[int] = field(default_factory=list)
    _is_renewed: bool = False
    """Whether prices and odds are of what is left now."""
    _dear: bool = False
    _basis: tuple[int | tuple[str, int], ...] = ()
    """What the prices were worked out from."""
    _tasks: int = -1
    """What is to come, when the odds were worked out."""
    _stale: set[int] = field(default_factory=set)
    """Kinds of slot of which there are more or fewer since."""
    _bids: dict[tuple[Row, Row], int] = field(default_factory=dict)
    """By the slots before and after, until any odds change."""
    _rows: dict[tuple[str, int], _Rows] = field(default_factory=dict)
    """Slots by model and free devices: the same dict in every copy, as are the next."""
    _devices: dict[Like, _Devices] = field(default_factory=dict)

    def copy(self) -> "Market":
        """One that follows other changes."""
        return Market(
            self.slots,
            self.bound,
            self.total,
            self.milli,
            self.free.copy(),
            self.left.copy(),
            self._tails,
            self._prices,
            self._odds.copy(),
            self._is_renewed,
            self._dear,
            self._basis,
            self._tasks,
            self._stale.copy(),
            self._bids.copy(),
            self._rows,
            self._devices,
        )

    def moved(self, before: NodeRoom | None, after: NodeRoom) -> None:
        """The node is like this now."""
        self._is_renewed = False
        free = self.free
        rows: list[Row] = []
        for room, sign in ((before, -1), (after, 1)):
            if room is None or room.state is not NodeState.READY:
                rows.append(())
                continue
            for model, milli in self._devices_of(room).free:
                free[model] = free.get(model, 0) + sign * milli
            rows.append(self.slots_on(room))
        had, has = rows
        if had is not has and self.slots:
            none = (0,) * len(self.slots)
            for at, (less, more) in enumerate(zip(had or none, has or none, strict=True)):
                if less != more:
                    self.left[at] += more - less
                    self._stale.add(at)

    def slots_on(self, room: NodeRoom) -> Row:
        """How many slots of each kind the node has; the same tuple where they are the same."""
        return self.slots_left_on(room, room.free_cpu_milli, room.free_memory_mib, 0)

    def slots_left_on(self, room: NodeRoom, cpu_milli: int, host_mib: int, taken: int) -> Row:
        """How many it would have with so much CPU and host memory left and so many of its free devices taken."""
        whole = self._devices_of(room).whole - taken
        if whole < 2 or not self.slots:
            return ()
        key = (room.devices[0].model, whole)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = self._rows_of(*key)
        # More than all slots take makes no difference.
        rest = (max(0, min(cpu_milli, rows.cpu_most)), max(0, min(host_mib, rows.host_most)))
        row = rows.known.get(rest)
        if row is None:
            if len(rows.known) >= _ROWS_MAX:
                rows.known.clear()
            found = tuple([_slots(slot.asked, *key, *rest) for slot in self.slots])
            row = rows.known[rest] = rows.told.setdefault(found, found) if any(found) else ()
        return row

    def _rows_of(self, model: str, whole: int) -> _Rows:
        wanted = [
            (whole // slot.asked.devices, slot.asked)
            for slot in self.slots
            if whole >= slot.asked.devices and (not slot.asked.models or model in slot.asked.models)
        ]
        return _Rows(
            max((slots * asked.cpu_milli for slots, asked in wanted), default=0),
            max((slots * asked.host_memory_mib for slots, asked in wanted), default=0),
            {},
            {},
        )

    def _devices_of(self, room: NodeRoom) -> _Devices:
        known = self._devices.get(room.devices_like)
        if known is None:
            if len(self._devices) >= _DEVICES_MAX:
                self._devices.clear()
            free: dict[str, int] = {}
            for device in room.devices:
                if device.is_healthy:
                    free[device.model] = free.get(device.model, 0) + device.free_compute_milli
            whole = sum(1 for device in room.devices if device.is_healthy and is_untouched(device))
            known = self._devices[room.devices_like] = _Devices(tuple(sorted(free.items())), whole)
        return known

    @property
    def is_dear(self) -> bool:
        """Whether any kind of slot has a price."""
        if not self._is_renewed:
            self._renew()
        return self._dear

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has a price."""
        return not self.is_dear and not any(self.prices().values())

    def prices(self) -> dict[str, int]:
        """For each model the odds that demand bound to it exceeds what is left of it."""
        if not self._is_renewed:
            self._renew()
        return self._prices

    def odds(self) -> list[int]:
        """For each kind of slot the odds that one fewer will be missed."""
        if not self._is_renewed:
            self._renew()
        return self._odds

    def _renew(self) -> None:
        self._is_renewed = True
        tasks = self._tasks_to_come()
        if tasks != self._tasks:
            self._tasks = tasks
            self._stale.update(range(len(self.slots)))
        if self._stale:
            for at in self._stale:
                odds = self._odds_of(self.slots[at], self.left[at], tasks)
                if odds != self._odds[at]:
                    self._odds[at] = odds
                    self._bids.clear()
            self._stale.clear()
            self._dear = any(self._odds)
        if not self.bound:
            return
        # Only what there is something left of: a model whose last node went is as one that never was.
        free = {model: _rounded(left) for model, left in sorted(self.free.items()) if left > 0}
        basis: tuple[int | tuple[str, int], ...] = (tasks, *free.items())
        if basis != self._basis:
            self._basis = basis
            self._prices = self._prices_of(free, tasks)

    def _prices_of(self, free: dict[str, int], tasks: int) -> dict[str, int]:
        wanted = dict.fromkeys(free, 0)
        variance = dict.fromkeys(free, 0)
        for models, milli, squared in self.bound:
            accepted = [model for model in models if model in free]
            if len(accepted) == len(free):
                continue  # whatever there is will do
            together = sum(free[model] for model in accepted)
            for model in accepted:
                if together:
                    wanted[model] += tasks * milli * free[model] // (together * self.total)
                    variance[model] += tasks * squared * free[model] // (together * self.total)
        return {
            model: normal_exceeds(wanted[model] - free[model] * _USEFUL_MILLE // MILLE, variance[model])
            for model in free
        }

    def _odds_of(self, slot: _Slot, left: int, tasks: int) -> int:
        mean_mille = tasks * slot.rivals * MILLE // max(1, self.total)
        # So far above the mean the odds are nil; the tail itself is only worked out where it matters.
        if left * MILLE >= 2 * mean_mille + _SLOTS_AMPLE * MILLE:
            return 0
        key = (tasks, slot.rivals)
        tail = self._tails.get(key)
        if tail is None:
            if len(self._tails) > 4 * len(self.slots) + 64:
                self._tails.clear()
            tail = self._tails[key] = poisson_tail(mean_mille)
        return tail[left] if 0 <= left < len(tail) else 0

    def bid_for_slots(self, before: Row, after: Row) -> int:
        """The dearest of the slots that go, in milli-GPU: its devices at the odds that somebody will miss it."""
        if before is after or not before:
            return 0
        odds = self.odds()
        bid = self._bids.get((before, after))
        if bid is None:
            dearest = 0
            for at, (had, has) in enumerate(zip(before, after or (0,) * len(before), strict=True)):
                if had > has:
                    dearest = max(dearest, (had - has) * self.slots[at].asked.devices * odds[at])
            bid = self._bids[before, after] = dearest * _SLOT_BID_PERCENT // 100
        return bid

    def _tasks_to_come(self) -> int:
        """How many replicas of the mix fill what is free, over the horizon."""
        if not self.milli:
            return 0
        free = sum(max(0, left) for left in self.free.values())
        return _rounded(free * self.total * _HORIZON_MILLE // (self.milli * MILLE))


def market_of(basis: Sequence[tuple[Asked, int]], rooms: Iterable[NodeRoom]) -> Market:
    """The market of a mix over these rooms."""
    rooms = list(rooms)
    several = [(one, many) for one, many in basis if one.devices > 1]
    slots = [
        _Slot(
            one,
            # A demand for more devices takes as many slots of this kind as it has room for.
            sum(
                many * (other.devices // one.devices)
                for other, many in several
                if other.devices >= one.devices and other.cpu_milli >= one.cpu_milli and _overlap(one, other)
            ),
        )
        for one, _ in several
    ]
    bound: dict[tuple[str, ...], tuple[int, int]] = {}
    for one, many in basis:
        if one.devices and one.models:
            milli, squared = bound.get(one.models, (0, 0))
            asked = one.devices * one.compute_milli
            bound[one.models] = (milli + many * asked, squared + many * asked * asked)
    market = Market(
        slots,
        [_Bound(accepted, *sums) for accepted, sums in sorted(bound.items())],
        sum(many for _, many in basis),
        sum(one.devices * one.compute_milli * many for one, many in basis),
        left=[0] * len(slots),
        _odds=[0] * len(slots),
    )
    for room in rooms:
        market.moved(None, room)
    return market


def _overlap(one: Asked, other: Asked) -> bool:
    return not one.models or not other.models or bool(set(one.models) & set(other.models))


def _slots(asked: Asked, model: str, whole: int, cpu_milli: int, host_mib: int) -> int:
    if whole < asked.devices or (asked.models and model not in asked.models):
        return 0
    slots = whole // asked.devices
    if asked.cpu_milli:
        slots = min(slots, cpu_milli // asked.cpu_milli)
    if asked.host_memory_mib:
        slots = min(slots, host_mib // asked.host_memory_mib)
    return slots


def _rounded(amount: int) -> int:
    """The amount without its digits below the leading few."""
    spare = max(amount.bit_length() - _DIGITS, 0)
    return amount >> spare << spare
