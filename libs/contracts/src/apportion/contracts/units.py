"""Integer quantities, and the only conversions between units.

Memory is MiB, compute is milli-GPU (1000 = one whole device), instants are ns since the Unix epoch.
"""

from typing import Final

MILLI_PER_DEVICE: Final = 1000
BYTES_PER_MIB: Final = 1024 * 1024
NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

ARCHITECTURES: Final = (
    "kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin",
)  # fmt: skip
"""Of NVIDIA's boards, the oldest first: what "at least" means for an architecture."""
LANE_MBPS: Final = (0, 2_000, 4_000, 7_876, 15_752, 31_504, 60_504)
"""Megabits a second of one PCIe lane in one direction, by generation, after line coding."""


def version_of(text: str) -> tuple[int, ...]:
    """The version's numbers, to be compared: without zeros at the end, and up to what is no number.

    >>> version_of("580.95.05") >= version_of("580")
    True
    >>> version_of("13") >= version_of("13.0")
    True
    """
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def mib_from_bytes(count: int) -> int:
    """Whole MiB in ``count`` bytes, rounded down: what is surely there.

    >>> mib_from_bytes(3 * 1024 * 1024 - 1)
    2
    """
    return count // BYTES_PER_MIB


def mib_holding_bytes(count: int) -> int:
    """MiB that hold ``count`` bytes, rounded up: what must be set aside.

    >>> mib_holding_bytes(3 * 1024 * 1024 + 1)
    4
    """
    return -(-count // BYTES_PER_MIB)


def bytes_from_mib(mib: int) -> int:
    """Bytes in ``mib`` MiB."""
    return mib * BYTES_PER_MIB


def ns_from_s(seconds: int) -> int:
    """Nanoseconds in whole seconds."""
    return seconds * NS_PER_S


def ms_from_ns(ns: int) -> int:
    """Whole milliseconds, rounded down."""
    return ns // NS_PER_MS
