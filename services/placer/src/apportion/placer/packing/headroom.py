"""Headroom: place where what the known workload could still fit loses least, and pay for what others will need.

A placement costs the drop in its node's value (see `streams`), plus two bids: for multi-device slots that it destroys,
and for devices of scarce models, each at the probability that the demand still to come exceeds what is left of them.
Only the tightest nodes that fit are judged, so an equal cost goes to the least left over.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from apportion.placer.packing.demand import WHOLE_DEVICE_MILLI, Mix, Shape
from apportion.placer.packing.fleet import ClassKey, Fleet, Follower, NodeClass
from apportion.placer.packing.policy import Choice
from apportion.placer.packing.streams import StreamLibrary, StreamValues
from apportion.placer.packing.tails import MILLE, normal_exceeds, poisson_tail

# How many classes are judged per decision, the tightest first, those of the cheapest models before the others.
CANDIDATES = 16

# Demand to come, in fleets of what is free now: pools are asked for more than they have.
_HORIZON_MILLE = 1300
# Of a model's free devices, the share that a perfect packing would still leave useful.
_USEFUL_MILLE = 900
# Model prices that differ by less than this (in thousandths) are one level when candidates are gathered.
_LEVEL_MILLE = 25

# A slot's bid is this share of its devices' worth: the node isn't idle while nobody asks for the slot.
_SLOT_BID_PERCENT = 50
# More slots than twice the expected demand and this many have no price: the odds are below a thousandth.
_SLOTS_AMPLE = 40
# What prices are worked out from keeps this many binary digits, so that a price holds for a while.
_PRICE_BITS = 6

# A told mix is given up when, after so many arrivals, more than one in so many is of a shape that it doesn't know.
_DOUBT_ARRIVALS = 64
_DOUBT_ONE_IN = 10

_INDEXES_MAX = 512
_SLOT_COUNTS_MAX = 1 << 16
_NEVER = 1 << 62


def _rounded(amount: int) -> int:
    """The amount without its digits below the leading few."""
    spare = max(amount.bit_length() - _PRICE_BITS, 0)
    return amount >> spare << spare


class _Slot(NamedTuple):
    """A demand for several devices, and how often demands that need such a slot are asked, per task of the mix."""

    shape: Shape
    allowed: int
    rivals: int


class _Bound(NamedTuple):
    """Demand that only some models can take: milli and squared milli per arrival, times the mix's total."""

    models: tuple[int, ...]
    milli: int
    squared: int


class _SlotsKnown(NamedTuple):
    """For one model and number of free devices: the most CPU and memory that slots take, and the rows by less."""

    cpu_most: int
    memory_most: int
    rows: dict[tuple[int, int], int]


class _Notes(NamedTuple):
    """What one policy knows of a class under one mix: its value, and its row of slots."""

    epoch: object
    value: int
    slots: int


class _Record:
    """What is known of one class for one shape; losses and destroyed slots depend on its state alone."""

    __slots__ = ("cls", "loss", "room", "slots")

    def __init__(self, cls: NodeClass) -> None:
        self.cls = cls
        self.loss = -_NEVER
        self.room = 0
        # The rows of slots before and after, where any go.
        self.slots: tuple[int, int] | None = None


class _ShapeIndex:
    """The classes that can host one shape, tightest first."""

    __slots__ = ("follower", "order", "records", "total_milli")

    def __init__(self, fleet: Fleet, shape: Shape) -> None:
        self.follower = Follower(fleet, shape)
        self.records: dict[ClassKey, _Record] = {}
        # Keys are unique, so that no comparison ever reaches the record.
        self.order: list[tuple[ClassKey, _Record]] = []
        self.total_milli = shape.total_milli


class Headroom:
    """The pool's own policy; with `learn`, the mix is what has arrived so far.

    A mix that was told is believed until too many arrivals are of shapes that it doesn't know; then it is learned.
    """

    def __init__(self, fleet: Fleet, mix: Mix, *, learn: bool = False, library: StreamLibrary | None = None) -> None:
        self._fleet = fleet
        self._mix = mix
        self._learn = learn
        self._library = library or StreamLibrary(limit=len(fleet.models))
        self._epoch = object()
        self._indexes: dict[Shape, _ShapeIndex] = {}
        self._values: list[StreamValues] = []
        self._slots: list[_Slot] = []
        self._slots_left: list[int] = []
        self._slots_known: dict[tuple[int, int], _SlotsKnown] = {}
        # How many of each kind a node can have, each such row once; the first is none at all.
        self._slot_rows: list[tuple[int, ...]] = [()]
        self._slot_numbers: dict[tuple[int, ...], int] = {(): 0}
        self._slot_changes: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        self._bound: list[_Bound] = []
        self._tasks_per_milli = (0, 1)
        self._tails: tuple[int, dict[int, list[int]]] = (-1, {})
        self._odds: list[int] = []
        # By the rows of slots before and after, until any odds change.
        self._bids: dict[tuple[int, int], int] = {}
        self._dear = False
        self._tasks = 0
        self._is_moved = True
        self._is_priced = False
        self._model_prices = [0] * len(fleet.models)
        self._free_rounded = [_rounded(free) for free in fleet.free_by_model]
        self._arrivals_to_refresh = 1
        self._seen = Mix()
        self._strangers = 0
        fleet.watch(self._moved)
        if not learn:
            self._refresh()

    def choose(self, shape: Shape) -> Choice | None:
        """The class whose loss and bids are least among the tightest that fit."""
        index = self._indexes.get(shape)
        if index is None:
            if len(self._indexes) >= _INDEXES_MAX:
                del self._indexes[next(iter(self._indexes))]
            index = self._indexes[shape] = _ShapeIndex(self._fleet, shape)
        records = index.records
        order = index.order
        for cls in index.follower.news():
            record = records.get(cls.key)
            if record is None:
                record = records[cls.key] = _Record(cls)
                insort(order, (cls.key, record))
            else:
                record.cls = cls
        if self._is_moved:
            self._follow_moves()
        # A task without devices has no business with what devices are worth.
        prices = self._prices_of_models() if self._bound and shape.devices else None
        dear, bids = self._dear, self._bids
        best: _Record | None = None
        best_cost = _NEVER
        judged = 0
        dead: list[ClassKey] = []
        for key, record in order if prices is None else self._by_price(order, prices):
            if not record.cls.nodes:
                dead.append(key)
                continue
            cost = record.loss
            if cost == -_NEVER:
                self._judge(record, shape)
                cost = record.loss
            if prices is not None:
                cost += prices[key[3]] * index.total_milli // MILLE
            if dear and record.slots is not None:
                bid = bids.get(record.slots)
                cost += self._bid_for_slots(record.slots) if bid is None else bid
            # An equal cost stays with the tighter class, which came first.
            if cost < best_cost:
                best_cost = cost
                best = record
            judged += 1
            if judged == CANDIDATES:
                break
        for key in dead:
            del order[bisect_left(order, (key,))]
            del records[key]
        return None if best is None else Choice(best.cls, best.room)

    def arrived(self, shape: Shape) -> None:
        """Count the arrival where the mix is learned; streams and rates are renewed as their number doubles."""
        if not self._learn:
            self._doubt(shape)
        else:
            # Arrivals are counted here and not read off the mix, which forgets some once its memory is full.
            if not self._arrivals_to_refresh:
                self._refresh()
                self._arrivals_to_refresh = self._mix.total
            self._arrivals_to_refresh -= 1
            self._mix.add(shape)

    def _doubt(self, shape: Shape) -> None:
        """Count an arrival against the mix that was told, and give that mix up when it is plainly another pool's."""
        self._seen.add(shape)
        if shape not in self._mix.counts:
            self._strangers += 1
            if self._seen.total >= _DOUBT_ARRIVALS and self._strangers * _DOUBT_ONE_IN > self._seen.total:
                self._mix = self._seen
                self._learn = True
                self._refresh()
                self._arrivals_to_refresh = self._mix.total

    def forget(self) -> None:
        """Drop indexes, values and prices."""
        self._indexes.clear()
        self._forget_prices()
        self._slots_known.clear()
        self._slot_changes.clear()
        for values in self._values:
            values.forget()

    def _refresh(self) -> None:
        fleet = self._fleet
        self._epoch = object()
        # Sorted by shape, so that what arrived first makes no difference.
        counts = sorted((shape, count) for shape, count in self._mix.counts.items() if shape.devices)
        allowed = [fleet.allowed(shape) for shape, _ in counts]
        self._values = []
        for model in range(len(fleet.models)):
            accepted = tuple(at for at, mask in enumerate(allowed) if mask >> model & 1)
            self._values.append(self._library.values([counts[at] for at in accepted]))
        self._tasks_per_milli = (self._mix.total, sum(shape.total_milli * count for shape, count in counts))
        self._set_slots([(shape, mask, count) for (shape, count), mask in zip(counts, allowed, strict=True)])
        everything = (1 << len(fleet.models)) - 1
        bound: dict[int, tuple[int, int]] = {}
        for (shape, count), mask in zip(counts, allowed, strict=True):
            if mask not in {0, everything}:
                milli, squared = bound.get(mask, (0, 0))
                total = shape.total_milli
                bound[mask] = (milli + count * total, squared + count * total * total)
        self._bound = [
            _Bound(tuple(model for model in range(len(fleet.models)) if mask >> model & 1), *sums)
            for mask, sums in sorted(bound.items())
        ]
        self._indexes.clear()
        self._forget_prices()

    def _forget_prices(self) -> None:
        self._tails = (-1, {})
        self._is_moved = True
        self._is_priced = False

    # Slots: room for several devices at once -----------------------------------------------------------------------

    def _set_slots(self, demands: list[tuple[Shape, int, int]]) -> None:
        several = [demand for demand in demands if demand[0].devices > 1]
        self._slots = []
        for shape, mask, _ in several:
            # A demand for more devices takes as many slots of this kind as it has room for.
            rivals = sum(
                count * (other.devices // shape.devices)
                for other, other_mask, count in several
                if other_mask & mask and other.devices >= shape.devices and other.cpu_milli >= shape.cpu_milli
            )
            self._slots.append(_Slot(shape, mask, rivals))
        self._slots_left = [0] * len(self._slots)
        none = (0,) * len(self._slots)
        self._slot_rows = [none]
        self._slot_numbers = {none: 0}
        self._slots_known.clear()
        self._slot_changes.clear()
        for live in self._fleet.live:
            for cls in live.values():
                for at, slots in enumerate(self._slot_rows[self._slots_of(cls)]):
                    self._slots_left[at] += slots * len(cls.nodes)

    def _slots_of(self, cls: NodeClass) -> int:
        """The row of how many of each slot a node of that class has."""
        return self._slots_with(cls.model, cls.whole, cls.cpu_milli, cls.memory_mib) if cls.whole > 1 else 0

    def _slots_with(self, model: int, whole: int, cpu_milli: int, memory_mib: int) -> int:
        """The row of how many of each slot there would be beside so much CPU and memory."""
        if whole < 2:
            return 0
        by_rest = self._slots_known.get((model, whole))
        if by_rest is None:
            by_rest = self._slots_known[model, whole] = self._slots_known_of(model, whole)
        cpu_most, memory_most, known = by_rest
        # More than all slots take makes no difference.
        key = (min(cpu_milli, cpu_most), min(memory_mib, memory_most))
        number = known.get(key)
        if number is None:
            if len(known) >= _SLOT_COUNTS_MAX:
                known.clear()
            row = tuple([self._slots_beside(slot, model, whole, *key) for slot in self._slots])
            number = known[key] = self._slot_numbers.setdefault(row, len(self._slot_rows))
            if number == len(self._slot_rows):
                self._slot_rows.append(row)
        return number

    def _slots_known_of(self, model: int, whole: int) -> _SlotsKnown:
        wanted = [
            (whole // slot.shape.devices, slot.shape)
            for slot in self._slots
            if slot.allowed >> model & 1 and whole >= slot.shape.devices
        ]
        return _SlotsKnown(
            max((slots * shape.cpu_milli for slots, shape in wanted), default=0),
            max((slots * shape.memory_mib for slots, shape in wanted), default=0),
            {},
        )

    @staticmethod
    def _slots_beside(slot: _Slot, model: int, whole: int, cpu_milli: int, memory_mib: int) -> int:
        shape = slot.shape
        if not slot.allowed >> model & 1 or whole < shape.devices:
            return 0
        slots = whole // shape.devices
        if shape.cpu_milli:
            slots = min(slots, cpu_milli // shape.cpu_milli)
        if shape.memory_mib:
            slots = min(slots, memory_mib // shape.memory_mib)
        return slots

    def _slot_change(self, before: int, after: int) -> tuple[tuple[int, int], ...]:
        """Which kinds of slot differ between two rows, and how many more there are in the second."""
        known = self._slot_changes.get((before, after))
        if known is None:
            known = self._slot_changes[before, after] = tuple(
                [
                    (at, has - had)
                    for at, (had, has) in enumerate(zip(self._slot_rows[before], self._slot_rows[after], strict=True))
                    if had != has
                ]
            )
        return known

    def _moved(self, before: NodeClass, after: NodeClass) -> None:
        self._is_moved = True
        model = after.model
        free = _rounded(self._fleet.free_by_model[model])
        if free != self._free_rounded[model]:
            self._free_rounded[model] = free
            self._is_priced = False
        if not self._slots or (before.whole < 2 and after.whole < 2):
            return
        had, has = self._slots_of(before), self._slots_of(after)
        if had != has:
            for at, change in self._slot_change(had, has):
                self._slots_left[at] += change
                self._set_odds(at)

    def _set_odds(self, at: int) -> None:
        """Work out the odds that one kind of slot will be missed."""
        tasks, tails = self._tails
        if tasks < 0:
            return
        rivals = self._slots[at].rivals
        mean_mille = tasks * rivals * MILLE // self._mix_total
        left = self._slots_left[at]
        odds = 0
        # So far above the mean the odds are nil; the tail itself is only worked out where it matters.
        if left * MILLE < 2 * mean_mille + _SLOTS_AMPLE * MILLE:
            tail = tails.get(rivals)
            if tail is None:
                tail = tails[rivals] = poisson_tail(mean_mille)
            odds = tail[left] if left < len(tail) else 0
        if odds != self._odds[at]:
            self._odds[at] = odds
            self._bids.clear()
        # Never reset here: a needless look at the bids costs little, a missed one would change choices.
        self._dear = self._dear or odds > 0

    def _follow_moves(self) -> None:
        """Renew the odds of all kinds of slot, if the number of tasks to come has changed."""
        self._is_moved = False
        tasks = self._tasks_to_come()
        if self._tails[0] != tasks:
            self._tasks = tasks
            self._tails = (tasks, {})
            self._is_priced = False
            self._dear = False
            self._odds = [0] * len(self._slots)
            self._bids.clear()
            for at in range(len(self._slots)):
                self._set_odds(at)

    def _bid_for_slots(self, rows: tuple[int, int]) -> int:
        """The dearest of the slots that go, in milli: its devices at the odds that somebody will miss it."""
        odds, slots = self._odds, self._slots
        # A device is 1000 milli and odds are in thousandths: the product is in milli as it stands.
        gone = [-change * slots[at].shape.devices * odds[at] for at, change in self._slot_change(*rows) if change < 0]
        bid = self._bids[rows] = max(gone, default=0) * _SLOT_BID_PERCENT // 100
        return bid

    # Models: devices that some demands can't do without -------------------------------------------------------------

    @property
    def _mix_total(self) -> int:
        return self._tasks_per_milli[0]

    def _tasks_to_come(self) -> int:
        """How many tasks of the mix fill what is free, over the horizon; in steps, so that prices can be remembered."""
        tasks, milli = self._tasks_per_milli
        if not milli:
            return 0
        return _rounded(self._fleet.free_milli * tasks * _HORIZON_MILLE // (milli * MILLE))

    def _prices_of_models(self) -> list[int]:
        """For each model the odds, in thousandths, that demand bound to it exceeds what is left of it."""
        if self._is_priced:
            return self._model_prices
        self._is_priced = True
        free, tasks = self._free_rounded, self._tasks
        wanted = [0] * len(free)
        variance = [0] * len(free)
        for models, milli, squared in self._bound:
            together = sum(free[model] for model in models)
            if not together:
                continue
            for model in models:
                wanted[model] += tasks * milli * free[model] // (together * self._mix_total)
                variance[model] += tasks * squared * free[model] // (together * self._mix_total)
        prices = self._model_prices = [
            normal_exceeds(wanted[model] - free[model] * _USEFUL_MILLE // MILLE, variance[model])
            for model in range(len(free))
        ]
        return prices

    @staticmethod
    def _by_price(order: list[tuple[ClassKey, _Record]], prices: list[int]) -> Iterable[tuple[ClassKey, _Record]]:
        """The classes by the level of their model's price, the tightest first within a level."""
        levels = [price // _LEVEL_MILLE for price in prices]
        if not any(levels):
            return order
        # The cheapest level mostly has candidates enough, and then the others are never looked at.
        return (entry for level in sorted(set(levels)) for entry in order if levels[entry[0][3]] == level)

    # Loss: what the node's value drops by ---------------------------------------------------------------------------

    def _notes_on(self, cls: NodeClass) -> _Notes:
        notes = cls.notes
        if not isinstance(notes, _Notes) or notes.epoch is not self._epoch:
            value = self._values[cls.model].value(cls.cpu_milli, cls.memory_mib, cls.rooms)
            notes = cls.notes = _Notes(self._epoch, value, self._slots_of(cls))
        return notes

    def _judge(self, record: _Record, shape: Shape) -> None:
        cls = record.cls
        if not self._values:
            rooms = cls.rooms[:1] or (0,)
            if 0 < shape.device_milli < WHOLE_DEVICE_MILLI:
                rooms = (min(room for room in cls.rooms if room >= shape.device_milli),)
            record.loss, record.room = 0, rooms[0]
            return
        cpu, memory = cls.cpu_milli - shape.cpu_milli, cls.memory_mib - shape.memory_mib
        values = self._values[cls.model]
        most = -1
        for room, state in values.ways(cls.rooms, shape.devices, shape.device_milli):
            kept = values.worth(state, cpu, memory)
            if kept > most:
                most = kept
                record.room = room
        notes = self._notes_on(cls)
        record.loss = notes.value - most
        if notes.slots:
            whole = cls.whole - (shape.devices if record.room == WHOLE_DEVICE_MILLI else 0)
            after = self._slots_with(cls.model, whole, cpu, memory)
            if after != notes.slots:
                record.slots = (notes.slots, after)
