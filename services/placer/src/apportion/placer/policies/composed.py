"""Policies made of others: which part a job goes by is theirs to say, and how good a node is for it that part's."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

from apportion.placer.market import Market
from apportion.placer.outlook import Outlook
from apportion.placer.policies.base import Plain, Policy
from apportion.placer.rooms import Demand, Fit, NodeRoom

PartOf = Callable[[str], Policy]
"""Finds a policy by its name, written as it would be alone. Raises ValueError where there is none."""


class Composed(Plain):
    """It needs ``name``, ``rules`` over the ids of its parts, and ``policy_for``."""

    @abstractmethod
    def policy_for(self, demand: Demand) -> Policy:
        """The part that such a job goes by; no composed one."""

    def choose(self, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """As its part says."""
        return self.policy_for(demand).choose(demand, room, fits)

    def parts(self, demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> dict[str, int]:
        """As its part says."""
        return self.policy_for(demand).parts(demand, room, picks)

    def weigh(self, outlook: Outlook, demand: Demand, room: NodeRoom, fits: list[int]) -> Fit:
        """As its part says."""
        return self.policy_for(demand).weigh(outlook, demand, room, fits)

    def level(self, market: Market, demand: Demand, group: str) -> int:
        """As its part says."""
        return self.policy_for(demand).level(market, demand, group)

    def bid(self, market: Market, demand: Demand, room: NodeRoom, picks: Sequence[int]) -> int:
        """As its part says."""
        return self.policy_for(demand).bid(market, demand, room, picks)


def plain_part(text: str, part_of: PartOf) -> Policy:
    """A part that is no composed policy itself. Raises ValueError."""
    found = part_of(text)
    if isinstance(found, Composed):
        raise ValueError(f"{text!r} is made of others, and can't be a part")  # noqa: TRY004 - it was read as a text
    return found
