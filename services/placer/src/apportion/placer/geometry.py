"""Where on a board a MIG instance goes: by start and size, so that the largest blocks stay whole.

Memory slices of a board are bits of a mask, the first one lowest; a set bit is taken. Instances never overlap, each
begins where its profile may, and no profile has more instances than the driver allows.
"""

from collections.abc import Iterable
from typing import Final

from apportion.contracts.events import Mig, MigPlacement, MigProfile

Instances = tuple[tuple[str, int, int], ...]
"""What is on a board: profile, start and size of each instance, sorted."""


class Board:
    """What one sort of device can be cut into. Answers are kept: boards are few, and so are the states of each."""

    __slots__ = ("_capacities", "_starts", "compute_slices", "memory_mib", "profiles")

    def __init__(self, mig: Mig) -> None:
        self.profiles: Final = mig.profiles
        self.compute_slices: Final = max(1, mig.compute_slices)
        self.memory_mib: Final = max((profile.memory_mib for profile in mig.profiles), default=1)
        """The most that one instance can have."""
        self._starts: dict[tuple[Instances, str], int | None] = {}
        self._capacities: dict[int, tuple[int, ...]] = {}

    def compute_milli(self, profile: MigProfile) -> int:
        """The share of the board's compute that an instance has."""
        return profile.compute_slices * 1000 // self.compute_slices

    def profile_for(self, name: str, compute_milli: int, memory_mib: int) -> MigProfile | None:
        """The profile of that name; without a name, the smallest with this much of both. None where there is none."""
        if name:
            return next((profile for profile in self.profiles if profile.name == name), None)
        # What carries the board's media engines is for those who name it: there is one on a board.
        enough = (
            profile
            for profile in self.profiles
            if "+" not in profile.name
            and self.compute_milli(profile) >= compute_milli
            and profile.memory_mib >= memory_mib
        )
        return min(enough, key=lambda each: (each.size, each.compute_slices, each.memory_mib, each.name), default=None)

    def start_of(self, taken: Instances, profile: MigProfile) -> int | None:
        """Where one more instance of the profile goes beside these; None where it can't.

        Of all starts the one after which most of the largest profile still fit, then of the next largest, and so on;
        then the highest, as large profiles begin low.
        """
        key = (taken, profile.name)
        if key not in self._starts:
            self._starts[key] = self._start_of(taken, profile)
        return self._starts[key]

    def capacity(self, taken: Instances) -> tuple[int, ...]:
        """How many starts of each profile are free, the largest profile first: what a placement should keep high."""
        return self._capacity(mask_of(taken))

    def fills(self, profile: MigProfile | None) -> int:
        """How many instances of the profile an empty board takes."""
        taken: Instances = ()
        while profile is not None and (start := self.start_of(taken, profile)) is not None:
            taken = tuple(sorted([*taken, (profile.name, start, profile.size)]))
        return len(taken)

    def _start_of(self, taken: Instances, profile: MigProfile) -> int | None:
        if sum(name == profile.name for name, _, _ in taken) >= profile.instances_max:
            return None
        busy = mask_of(taken)
        starts = [start for start in profile.starts if not busy & _bits(start, profile.size)]
        return max(starts, key=lambda start: (self._capacity(busy | _bits(start, profile.size)), start), default=None)

    def _capacity(self, busy: int) -> tuple[int, ...]:
        found = self._capacities.get(busy)
        if found is None:
            sizes = sorted({(-each.size, -each.compute_slices, each.starts) for each in self.profiles})
            found = self._capacities[busy] = tuple(
                sum(not busy & _bits(start, -size) for start in starts) for size, _, starts in sizes
            )
        return found


def mask_of(taken: Instances) -> int:
    """The memory slices that these instances take."""
    busy = 0
    for _, start, size in taken:
        busy |= _bits(start, size)
    return busy


def instances_on(mig: Mig, held: Iterable[MigPlacement | None]) -> Instances:
    """What runs hold of a board, and what else is on it."""
    own = [(piece.profile, piece.start, piece.size) for piece in held if piece is not None]
    return tuple(sorted([*own, *((each.profile, each.start, each.size) for each in mig.foreign)]))


def _bits(start: int, size: int) -> int:
    return ((1 << size) - 1) << start
