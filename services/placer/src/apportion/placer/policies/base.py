"""What the placer asks of a policy, and what most policies have in common."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from apportion.placer.market import Market
from apportion.placer.outlook import Outlook
from apportion.placer.rooms import Demand, Fit, NodeRoom


class Policy(Protocol):
    """How good each way of placing a replica is. Pure, in integers; equal scores go to the lower node id.

    ``choose`` sees one node as a value, so that what it says holds for as long as the node stays as it is, and ranks
    all nodes. Where ``weighs`` is above 0, so many of the best (of those that ``choose`` scores alike, one) are
    weighed: by what they are worth to the work that the pool is asked for, and by a bid for what is scarce. The
    heaviest wins.
    """

    @property
    def name(self) -> str:
        """What the policy is chosen by: letters, digits and underscores."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever a score may."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the rules and their weights."""
        ...

    @property
    def weighs(self) -> int:
        """How many of the best are weighed; 0: the first is taken."""
        ...

    @property
    def is_blind(self) -> bool:
        """Whether names of nodes and devices make no difference to it; then what it says of a node holds for all alike.

        False where nobody thought of it: nodes are then looked at one by one, which takes longer.
        """
        ...

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The best devices among ``fits`` (places in ``room.devices``, at least as many as asked), and their score."""
        ...

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """What the score of these devices is made of: the values sum up to it. Not asked of a policy that weighs."""
        ...

    def weigh(self, outlook: Outlook, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The best devices among ``fits`` at second sight; it depends on the node and the mix alone."""
        ...

    def level(self, market: Market, demand: Demand, group: str) -> int:
        """Nodes with devices of these models are weighed after those of a lower level."""
        ...

    def bid(self, market: Market, demand: Demand, room: NodeRoom, picks: Sequence[int]) -> int:
        """What others would give for these devices now, in the unit of ``weigh``'s score; taken off it.

        Not asked while nothing is scarce.
        """
        ...


class Plain(ABC):
    """A policy that takes the best at first sight: it needs ``name``, ``rules``, ``choose`` and ``parts``."""

    name: str
    version: str = "1"
    rules: str
    """Its weights and the order of its parts, in words: whoever changes one, changes this."""
    weighs: int = 0
    is_blind: bool = False

    @cached_property
    def digest(self) -> str:
        """Digest of the rules and their weights."""
        return hashlib.sha256(f"{self.name}@{self.version}:{self.rules}".encode()).hexdigest()[:12]

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """All of the score."""
        return {self.name: self.choose(demand, room, list(picks)).score}

    @abstractmethod
    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """The best devices among ``fits``, and their score."""

    def weigh(self, outlook: Outlook, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """As at first sight."""
        del outlook
        return self.choose(demand, room, fits)

    def level(self, market: Market, demand: Demand, group: str) -> int:
        """All alike."""
        del market, demand, group
        return 0

    def bid(self, market: Market, demand: Demand, room: NodeRoom, picks: Sequence[int]) -> int:
        """Nothing."""
        del market, demand, room, picks
        return 0


def preference_of(demand: Demand, room: NodeRoom, picks: Sequence[int]) -> int:
    """How far down the list of accepted models the worst of these devices is; 0: the favourite, or any will do."""
    if not demand.models or not picks:
        return 0
    return max(demand.models.index(room.devices[place].model) for place in picks)


def policy_id(policy: Policy) -> str:
    """Name, version and digest: what a decision says that it was made by."""
    return f"{policy.name}@{policy.version}#{policy.digest}"
