"""Headroom: place where what the known workload could still fit loses least, and pay for what others will need.

A placement costs the drop in its node's value (see `streams`), plus two bids: for multi-device slots that it destroys,
and for devices of scarce models, each at the probability that the demand still to come exceeds what is left of them.
Only the tightest nodes that fit are judged, so an equal cost goes to the least left over.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from apportion.placer.packing.demand import WHOLE_DEVICE_MILLI, Mix, Shape
from apportion.placer.packing.fleet import ClassKey, Fleet, Follower, NodeClass, key_after
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


class _Notes(NamedTuple):
    """What is known of a class under one mix: its value, and its slots of each kind (none: no kind)."""

    epoch: int
    value: int
    slots: list[int]


class _Record:
    """What is known of one class for one shape; losses and destroyed slots depend on its state alone."""

    __slots__ = ("cls", "loss", "room", "slots")

    def __init__(self, cls: NodeClass) -> None:
        self.cls = cls
        self.loss = -_NEVER
        self.room = 0
        # Which kinds of slot go, and how many devices with them.
        self.slots: tuple[tuple[int, int], ...] = ()


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
        self._epoch = 0
        self._indexes: dict[Shape, _ShapeIndex] = {}
        self._values: list[StreamValues] = []
        self._slots: list[_Slot] = []
        self._slots_left: list[int] = []
        self._slot_counts: dict[ClassKey, list[int]] = {}
        self._bound: list[_Bound] = []
        self._tasks_per_milli = (0, 1)
        self._tails: tuple[int, dict[int, list[int]]] = (-1, {})
        self._odds: list[int] = []
        self._dear = False
        self._model_prices: tuple[tuple[int, ...], list[int]] = ((), [0] * len(fleet.models))
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
        # A task without devices has no business with what devices are worth.
        prices = self._prices_of_models() if self._bound and shape.devices else None
        if self._slots:
            self._update_odds()
        dear = self._dear
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
            if dear and record.slots:
                cost += self._bid_for_slots(record.slots)
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
        self._tails = (-1, {})
        self._slot_counts.clear()
        self._model_prices = ((), self._model_prices[1])
        for values in self._values:
            values.forget()

    def _refresh(self) -> None:
        fleet = self._fleet
        self._epoch += 1
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
        self._tails = (-1, {})
        self._model_prices = ((), [0] * len(fleet.models))

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
        self._slot_counts.clear()
        for live in self._fleet.live:
            for cls in live.values():
                for at, slots in enumerate(self._slots_of(cls.key)):
                    self._slots_left[at] += slots * len(cls.nodes)

    def _slots_of(self, key: ClassKey) -> list[int]:
        """How many of each slot a node of that class has; empty where it could have none."""
        free, cpu, memory, model, rooms = key
        if free < 2 * WHOLE_DEVICE_MILLI or rooms[1] < WHOLE_DEVICE_MILLI:
            return []
        known = self._slot_counts.get(key)
        if known is not None:
            return known
        whole = rooms.count(WHOLE_DEVICE_MILLI)
        found: list[int] = []
        for shape, allowed, _ in self._slots:
            slots = 0
            if allowed >> model & 1 and whole >= shape.devices:
                slots = whole // shape.devices
                if shape.cpu_milli:
                    slots = min(slots, cpu // shape.cpu_milli)
                if shape.memory_mib:
                    slots = min(slots, memory // shape.memory_mib)
            found.append(slots)
        if len(self._slot_counts) >= _SLOT_COUNTS_MAX:
            self._slot_counts.clear()
        self._slot_counts[key] = found
        return found

    def _moved(self, before: NodeClass, after: NodeClass) -> None:
        if not self._slots or (before.whole < 2 and after.whole < 2):
            return
        none = [0] * len(self._slots)
        for at, (had, has) in enumerate(
            zip(self._slots_of(before.key) or none, self._slots_of(after.key) or none, strict=True)
        ):
            if had != has:
                self._slots_left[at] += has - had
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
        self._odds[at] = odds
        # Never reset here: a needless look at the bids costs little, a missed one would change choices.
        self._dear = self._dear or odds > 0

    def _update_odds(self) -> None:
        """Renew the odds of all kinds of slot, if the number of tasks to come has changed."""
        tasks = self._tasks_to_come()
        if self._tails[0] != tasks:
            self._tails = (tasks, {})
            self._dear = False
            self._odds = [0] * len(self._slots)
            for at in range(len(self._slots)):
                self._set_odds(at)

    def _bid_for_slots(self, destroyed: tuple[tuple[int, int], ...]) -> int:
        """The dearest of the slots that go, in milli: its devices at the odds that somebody will miss it."""
        odds = self._odds
        # A device is 1000 milli and odds are in thousandths: the product is in milli as it stands.
        return max([devices * odds[at] for at, devices in destroyed]) * _SLOT_BID_PERCENT // 100

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
        free = [_rounded(left) for left in self._fleet.free_by_model]
        tasks = self._tasks_to_come()
        basis = (tasks, *free)
        if self._model_prices[0] == basis:
            return self._model_prices[1]
        wanted = [0] * len(free)
        variance = [0] * len(free)
        for models, milli, squared in self._bound:
            together = sum(free[model] for model in models)
            if not together:
                continue
            for model in models:
                wanted[model] += tasks * milli * free[model] // (together * self._mix_total)
                variance[model] += tasks * squared * free[model] // (together * self._mix_total)
        prices = [
            normal_exceeds(wanted[model] - free[model] * _USEFUL_MILLE // MILLE, variance[model])
            for model in range(len(free))
        ]
        self._model_prices = (basis, prices)
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
        if not isinstance(notes, _Notes) or notes.epoch != self._epoch:
            value = self._values[cls.model].value(cls.cpu_milli, cls.memory_mib, cls.rooms)
            notes = cls.notes = _Notes(self._epoch, value, self._slots_of(cls.key) if self._slots else [])
        return notes

    def _judge(self, record: _Record, shape: Shape) -> None:
        cls = record.cls
        rooms = cls.rooms[:1] or (0,)
        if 0 < shape.device_milli < WHOLE_DEVICE_MILLI:
            rooms = tuple(sorted({room for room in cls.rooms if room >= shape.device_milli}))
        if not self._values:
            record.loss, record.room = 0, rooms[0]
            return
        value = self._values[cls.model].value
        most = -1
        best_after = cls.key
        for room in rooms:
            after = key_after(cls, shape, room)
            kept = value(after[1], after[2], after[4])
            if kept > most:
                most = kept
                record.room = room
                best_after = after
        notes = self._notes_on(cls)
        record.loss = notes.value - most
        if notes.slots:
            slots_after = self._slots_of(best_after) or [0] * len(self._slots)
            if slots_after != notes.slots:
                record.slots = tuple(
                    [
                        (at, (had - has) * self._slots[at].shape.devices)
                        for at, (had, has) in enumerate(zip(notes.slots, slots_after, strict=True))
                        if had > has
                    ]
                )
