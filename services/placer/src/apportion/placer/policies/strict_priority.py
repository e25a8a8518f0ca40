"""Strict priority: who comes first has it, however long others waited; where it goes is another policy's matter.

Written ``strict_priority``, or ``strict_priority:POLICY`` to place by another than best fit. Jobs wait by service
class, then priority, then age: waiting earns nothing, and shares of queues and tenants come after. A job of a higher
priority has those of a lower one stopped that run under this policy, are of its class, and agreed to be.
"""

from typing import Final

from apportion.placer.policies.base import Policy, policy_id
from apportion.placer.policies.best_fit import BEST_FIT
from apportion.placer.policies.composed import Composed, PartOf, plain_part
from apportion.placer.rooms import Demand

NAME: Final = "strict_priority"


class StrictPriority(Composed):
    """See the module; the order itself is ``orders.QueueOrder.STRICT``, which goes with the name."""

    def __init__(self, text: str, part_of: PartOf) -> None:
        """Raises ValueError where the text can't be read."""
        self.name = f"{NAME}:{text}" if text else NAME
        self._part = plain_part(text, part_of) if text else BEST_FIT
        self.rules = f"class,priority,age;{policy_id(self._part)}"
        self.is_blind = self._part.is_blind

    def policy_for(self, demand: Demand) -> Policy:
        """One part for all."""
        del demand
        return self._part
