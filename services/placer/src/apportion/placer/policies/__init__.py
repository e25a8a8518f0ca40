"""Policies: how good each way of placing a replica is. One policy a file; pure, and integers only.

A policy sees one node at a time, as a value. So its scores may be kept for as long as the node stays the same, and a
placement depends on nothing but what is free and what is asked.
"""

from typing import Final, Protocol

from apportion.placer.policies.best_fit import BEST_FIT
from apportion.placer.rooms import Demand, Fit, NodeRoom


class Policy(Protocol):
    """What the placer asks of a policy. Equal scores are settled by the lower node id."""

    @property
    def name(self) -> str:
        """What the policy is chosen by."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever a score may."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the rules and their weights."""
        ...

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The best devices among ``fits`` (places in ``room.devices``, at least as many as asked), and their score."""
        ...

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """What the score of these devices is made of: the values sum up to it."""
        ...


POLICIES: Final[dict[str, Policy]] = {BEST_FIT.name: BEST_FIT}
"""Every policy that a pool can be set to."""
