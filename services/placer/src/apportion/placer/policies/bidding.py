"""Bidding: spot jobs say what they would pay, and who bids most has it; where it goes is another policy's matter.

Written ``bidding``, or ``bidding:POLICY`` to place by another than best fit. Jobs wait by service class, then bid, then
age. A spot job has others stopped that run under this policy and bid less, with their grace as notice. The price is one
for all of them (see ``prices``): what the highest bidder that is left out offers, and never more than any of those who
run has bid.
"""

from typing import Final

from apportion.placer.policies.base import Policy, policy_id
from apportion.placer.policies.best_fit import BEST_FIT
from apportion.placer.policies.composed import Composed, PartOf, plain_part
from apportion.placer.rooms import Demand

NAME: Final = "bidding"


class Bidding(Composed):
    """See the module; the order itself is ``orders.QueueOrder.BIDS``, which goes with the name."""

    def __init__(self, text: str, part_of: PartOf) -> None:
        """Raises ValueError where the text can't be read."""
        self.name = f"{NAME}:{text}" if text else NAME
        self._part = plain_part(text, part_of) if text else BEST_FIT
        self.rules = f"class,bid,age;one price;{policy_id(self._part)}"
        self.is_blind = self._part.is_blind

    def policy_for(self, demand: Demand) -> Policy:
        """One part for all."""
        del demand
        return self._part
