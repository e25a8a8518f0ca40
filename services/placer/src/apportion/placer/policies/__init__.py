"""Policies: how good each way of placing a replica is. One policy a file; pure, and integers only.

A third party's policy is registered by the process that runs the placer or replays its decisions (see
``apportion.placer.plugins``). A decision under a policy that isn't there can't be made, and says so.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from apportion.placer.policies.base import Policy, policy_id
from apportion.placer.policies.best_fit import BEST_FIT
from apportion.placer.policies.bidding import Bidding
from apportion.placer.policies.gradient import GRADIENT
from apportion.placer.policies.headroom import HEADROOM
from apportion.placer.policies.hybrid import Hybrid
from apportion.placer.policies.least_response import LEAST_RESPONSE
from apportion.placer.policies.pack import PACK
from apportion.placer.policies.round_robin import ROUND_ROBIN
from apportion.placer.policies.spread import SPREAD
from apportion.placer.policies.strict_priority import StrictPriority
from apportion.placer.policies.throughput import Throughput
from apportion.placer.policies.weighted import Weighted

BUILT_IN: Final[tuple[Policy, ...]] = (BEST_FIT, GRADIENT, HEADROOM, LEAST_RESPONSE, PACK, ROUND_ROBIN, SPREAD)
POLICIES: Final[dict[str, Policy]] = {policy.name: policy for policy in BUILT_IN}
"""Every policy that a pool can be set to, by name; those of third parties once they are registered."""
DEFAULT: Final[Policy] = HEADROOM
"""By which a placer places that was started without one. What a claim says nothing of was decided by best fit."""


def _part(name: str) -> Policy:
    """A part of a composed policy."""
    try:
        return resolved(name)
    except PolicyUnknown as err:
        raise ValueError(str(err)) from err


MAKERS: Final[dict[str, Callable[[str], Policy]]] = {
    "bidding": lambda of: Bidding(of, _part),
    "hybrid": lambda of: Hybrid(of, _part),
    "strict_priority": lambda of: StrictPriority(of, _part),
    "throughput": Throughput,
    "weighted": Weighted,
}
"""Policies that are made of what stands behind their name and a colon; they raise ValueError where that is nonsense.

What is remembered of a composed one goes with the names of its parts, and those are registered once.
"""


class PolicyUnknown(LookupError):
    """The policy that the settings name isn't here, or not in that version."""

    def __init__(self, wanted: str, here: Policy | None = None, detail: str = "") -> None:
        self.wanted = wanted
        names = ", ".join(sorted([*POLICIES, *(f"{name}:..." for name in MAKERS)]))
        found = detail or (f"here is {policy_id(here)}" if here is not None else f"here are {names}")
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
    name = wanted.partition("@")[0]
    try:
        policy = POLICIES.get(name) or _made(name)
    except ValueError as err:
        raise PolicyUnknown(wanted, detail=str(err)) from err
    if policy is None or ("@" in wanted and policy_id(policy) != wanted):
        raise PolicyUnknown(wanted, policy)
    return policy


@lru_cache(maxsize=256)
def _made(name: str) -> Policy | None:
    kind, _, of = name.partition(":")
    return MAKERS[kind](of) if kind in MAKERS else None


__all__ = ["BEST_FIT", "BUILT_IN", "MAKERS", "POLICIES", "Policy", "PolicyUnknown", "policy_id", "register", "resolved"]
