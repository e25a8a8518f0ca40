"""Integer quantities, and the only conversions between units.

Memory is MiB, compute is milli-GPU (1000 = one whole device), instants are ns since the Unix epoch.
"""

from typing import Final

MILLI_PER_DEVICE: Final = 1000
BYTES_PER_MIB: Final = 1024 * 1024
NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000


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
