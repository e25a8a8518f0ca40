"""Hybrid: one policy for whole devices, one for shares, one for gangs, one for jobs without a device.

Written ``hybrid:CASE=POLICY|CASE=POLICY``. Cases are ``gang`` (several replicas), ``whole`` (devices that nobody else
uses), ``share`` (a part of one device) and ``cpu`` (none); the first of them that a job is, and that is named, decides.
Who is none of those goes by best fit. Each POLICY is written as it would be alone; the digest of a hybrid is over the
names, versions and digests of its parts.
"""

from typing import Final

from apportion.placer.policies.base import Policy, policy_id
from apportion.placer.policies.best_fit import BEST_FIT
from apportion.placer.policies.composed import Composed, PartOf, plain_part
from apportion.placer.rooms import Demand

CASES: Final = ("gang", "whole", "share", "cpu")


class Hybrid(Composed):
    """See the module."""

    def __init__(self, text: str, part_of: PartOf) -> None:
        """Raises ValueError where the text can't be read."""
        self.name = f"hybrid:{text}"
        self._parts: dict[str, Policy] = {}
        for part in text.split("|"):
            case, _, wanted = part.partition("=")
            if case not in CASES or not wanted or case in self._parts:
                raise ValueError(f"{part!r} is no CASE=POLICY: cases are {', '.join(CASES)}, each once")
            self._parts[case] = plain_part(wanted, part_of)
        self.rules = "|".join(f"{case}={policy_id(policy)}" for case, policy in sorted(self._parts.items()))
        self.is_blind = all(policy.is_blind for policy in (BEST_FIT, *self._parts.values()))

    def policy_for(self, demand: Demand) -> Policy:
        """The part of the first case that the job is."""
        is_case = {
            "gang": demand.replicas > 1,
            "whole": demand.is_whole,
            "share": demand.devices > 0 and not demand.is_whole,
            "cpu": not demand.devices,
        }
        return next((self._parts[case] for case in CASES if is_case[case] and case in self._parts), BEST_FIT)
