"""Policies: how good each way of placing a replica is. One policy a file; pure, and integers only.

A third party's policy is registered by the process that runs the placer or replays its decisions (see
``apportion.placer.plugins``). A decision under a policy that isn't there can't be made, and says so.
"""

from typing import Final

from apportion.placer.policies.base import Policy, policy_id
from apportion.placer.policies.best_fit import BEST_FIT
from apportion.placer.policies.gradient import GRADIENT
from apportion.placer.policies.headroom import HEADROOM
from apportion.placer.policies.pack import PACK
from apportion.placer.policies.spread import SPREAD

BUILT_IN: Final[tuple[Policy, ...]] = (BEST_FIT, GRADIENT, HEADROOM, PACK, SPREAD)
POLICIES: Final[dict[str, Policy]] = {policy.name: policy for policy in BUILT_IN}
"""Every policy that a pool can be set to, by name; those of third parties once they are registered."""


class PolicyUnknown(LookupError):
    """The policy that the settings name isn't here, or not in that version."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        here = POLICIES.get(wanted.partition("@")[0])
        found = f"here is {policy_id(here)}" if here is not None else f"here are {', '.join(sorted(POLICIES))}"
        super().__init__(
            f"no policy {wanted}: {found}; install the package that offers it (entry points of the group "
            "apportion.placer.policies), in the version that decided"
        )


def register(policy: Policy) -> None:
    """Offer one more policy. Raises ValueError where another of that name is there already."""
    known = POLICIES.get(policy.name)
    if known is not None and policy_id(known) != policy_id(policy):
        raise ValueError(f"two policies are called {policy.name}: {policy_id(known)} and {policy_id(policy)}")
    POLICIES[policy.name] = policy


def resolved(wanted: str) -> Policy:
    """The policy of this name, or of this id (``name@version#digest``). Raises PolicyUnknown."""
    policy = POLICIES.get(wanted.partition("@")[0])
    if policy is None or ("@" in wanted and policy_id(policy) != wanted):
        raise PolicyUnknown(wanted)
    return policy


__all__ = ["BEST_FIT", "BUILT_IN", "POLICIES", "Policy", "PolicyUnknown", "policy_id", "register", "resolved"]
