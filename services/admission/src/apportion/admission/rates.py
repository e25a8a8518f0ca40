"""How fast a tenant's jobs come in and how many may wait: buckets of tokens and counts, from recorded instants alone.

A bucket is one number, the instant at which it will be full again: each admission moves it on by what one costs, and
one that would move it further than the bucket is deep is put off. Integers throughout, so a replay puts off the same.
"""

from typing import Final

from msgspec import Struct

MINUTE_NS: Final = 60_000_000_000
_S: Final = 1_000_000_000
DEPARTURES_KEPT: Final = 16
RETRY_S_DEFAULT: Final = 5
"""What whoever meets a full queue is told, where nobody has left it yet."""
RETRY_S_MAX: Final = 300


class Limits(Struct, frozen=True, kw_only=True):
    """What a tenant may ask at most. 0: no limit."""

    rate_per_min: int = 0
    burst: int = 0
    """Jobs that may come at once after a pause; 0: as many as come in a minute."""
    pending_max: int = 0

    @property
    def depth(self) -> int:
        """How many tokens the bucket holds."""
        return self.burst or self.rate_per_min


class Flow(Struct):
    """What came in and what went on, of one tenant or of the whole pool. Changed in place by the fold."""

    full_at: int = 0
    """When the bucket will be full again."""
    left_at: list[int] = []
    """When the last jobs stopped waiting, oldest first."""
    wishes_full_at: int = 0
    """When the bucket of wishes that are looked at will be full again."""


def taken(full_at: int, limits: Limits, now: int, times: int = 1) -> int:
    """When the bucket is full again after another admission, or several."""
    return max(full_at, now) + times * (MINUTE_NS // limits.rate_per_min) if limits.rate_per_min else full_at


def wait_s(full_at: int, limits: Limits, now: int) -> int:
    """Seconds until the next job may come in; 0 for now.

    >>> limits = Limits(rate_per_min=60, burst=2)
    >>> full_at = taken(taken(0, limits, now=1_000), limits, now=1_000)
    >>> wait_s(full_at, limits, now=1_000), wait_s(full_at, limits, now=1_000_001_000)
    (1, 0)
    """
    if not limits.rate_per_min:
        return 0
    ahead = full_at - now - (limits.depth - 1) * (MINUTE_NS // limits.rate_per_min)
    return max(0, -(-ahead // _S))


def room_s(flow: Flow | None, over: int, now: int) -> int:
    """Seconds after which so many more will probably have stopped waiting, at the pace of those who did last."""
    left_at = [] if flow is None else flow.left_at
    if len(left_at) < 2:
        return RETRY_S_DEFAULT
    # A pause longer than the pace so far counts as the pace.
    each = max((left_at[-1] - left_at[0]) // (len(left_at) - 1), now - left_at[-1])
    return min(max(-(-over * each // _S), 1), RETRY_S_MAX)


def has_left(flow: Flow, at: int) -> None:
    """One more has stopped waiting."""
    flow.left_at.append(at)
    del flow.left_at[:-DEPARTURES_KEPT]
