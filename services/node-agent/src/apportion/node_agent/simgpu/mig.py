"""MIG on a simulated board: which instances there can be, from ``mig_boards.json``, and which there are; pure.

An instance is a device of its own: its memory, its SMs, its clock, its faults. What a board allows is the driver's
rule here as there: sizes begin at fixed places, two never overlap, and memory slice 7 of 8 is no start.
"""

from functools import cache
from pathlib import Path

import msgspec


class MigSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size of instance; names and numbers as NVML says them."""

    name: str
    profile: int
    """NVML's enum, by which the size is looked up."""
    id: int
    """NVML's id, by which an instance is made."""
    compute_slices: int
    starts: tuple[int, ...]
    size: int
    """In memory slices."""
    instances_max: int
    sms: int
    memory_mib: int
    copy_engines: int
    decoders: int
    jpegs: int
    ofas: int
    assumed: tuple[str, ...] = ()
    """Which of these figures nobody published."""


class MigBoard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one kind of board can be cut into."""

    key: str
    compute_slices: int
    memory_slices: int
    needs_reset: bool
    """Switching the mode takes effect at the next reset (Ampere)."""
    profiles: tuple[MigSize, ...]

    def by_profile(self, profile: int) -> MigSize | None:
        """The size with this enum."""
        return next((size for size in self.profiles if size.profile == profile), None)

    def by_id(self, number: int) -> MigSize | None:
        """The size with this id."""
        return next((size for size in self.profiles if size.id == number), None)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    boards: tuple[MigBoard, ...]


@cache
def boards() -> dict[str, MigBoard]:
    """All boards that can be cut, by the key of their profile."""
    data = (Path(__file__).parent / "mig_boards.json").read_bytes()
    return {board.key: board for board in msgspec.json.decode(data, type=_File).boards}


def free_starts(board: MigBoard, size: MigSize, taken: list[tuple[MigSize, int]]) -> list[int]:
    """Where one more instance of this size could begin; ``taken`` are the sizes and starts that there are.

    >>> board = boards()["h100-80"]
    >>> three, one = board.by_profile(2), board.by_profile(0)
    >>> free_starts(board, three, [(one, 4)])
    [0]
    """
    same = sum(1 for other, _ in taken if other.name == size.name)
    slices = sum(other.compute_slices for other, _ in taken) + size.compute_slices
    has_media = any(other.name.endswith("+me") for other, _ in taken)
    if same >= size.instances_max or slices > board.compute_slices or (has_media and size.name.endswith("+me")):
        return []
    return [
        start
        for start in size.starts
        if all(start + size.size <= at or at + other.size <= start for other, at in taken)
    ]


def remaining(board: MigBoard, size: MigSize, taken: list[tuple[MigSize, int]]) -> int:
    """How many more instances of this size there is room for.

    >>> board = boards()["h100-80"]
    >>> remaining(board, board.by_profile(1), [(board.by_profile(0), 2)])
    2
    """
    placed = list(taken)
    while starts := free_starts(board, size, placed):
        placed.append((size, starts[0]))
    return len(placed) - len(taken)
