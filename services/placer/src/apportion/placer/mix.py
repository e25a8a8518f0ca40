"""What this pool was asked lately: how often each sort of replica, counted as jobs are admitted, and bounded.

Policies that value what is left of a node by what could still come learn it from here and from nowhere else. What they
go by is renewed only as the number of arrivals doubles, so that what they worked out holds for a while; old habits
fade, as all counts are halved whenever the memory is full.
"""

from typing import Final, NamedTuple

from msgspec import Struct

from apportion.contracts.events import JobSpec

MEMORY: Final = 8_192
"""Arrivals that are remembered."""
KEYS_MAX: Final = 512
"""Sorts of replica that are told apart; with more, the rare ones are forgotten."""

SETTLED: Final = 1_024
"""A basis of fewer arrivals is young, and strangers say nothing of it."""
DOUBT_ARRIVALS: Final = 128
DOUBT_ONE_IN: Final = 5
"""A settled basis is given up where, of so many arrivals at least, more than one in so many is strange to it.

They are counted anew after twice as many, so that a long calm doesn't hide a change.
"""


class Asked(NamedTuple):
    """What one replica asked of a node: equal ones are alike here."""

    devices: int
    compute_milli: int
    memory_mib: int
    """0: all of the device's."""
    cpu_milli: int
    host_memory_mib: int
    models: tuple[str, ...] = ()
    """Accepted device models, sorted; empty: any."""

    @property
    def is_whole(self) -> bool:
        """Whether it takes devices that nobody else uses."""
        return self.devices > 1 or self.compute_milli >= 1000 or not self.memory_mib


class Mix(Struct, kw_only=True):
    """The counts, and what of them policies go by. Changed only by ``count``."""

    counts: dict[str, int] = {}
    """By what was asked, written out."""
    total: int = 0
    basis: dict[str, int] = {}
    """The counts as they were when last renewed."""
    epoch: int = 0
    """How often the basis was renewed."""
    renew_after: int = 1
    """Arrivals until the next renewal."""
    fresh: dict[str, int] = {}
    """The counts of the latest arrivals alone."""
    arrived: int = 0
    """How many those are."""
    strangers: int = 0
    """Those of them that the basis doesn't know."""


def count(mix: Mix, spec: JobSpec) -> None:
    """Take note of an admitted job's replicas, in place."""
    key = _written(spec)
    mix.counts[key] = mix.counts.get(key, 0) + spec.replicas
    mix.total += spec.replicas
    while mix.total >= MEMORY or len(mix.counts) > KEYS_MAX:
        mix.counts = {known: many // 2 for known, many in mix.counts.items() if many > 1}
        mix.total = sum(mix.counts.values())
    mix.renew_after -= spec.replicas
    mix.arrived += spec.replicas
    mix.strangers += spec.replicas if key not in mix.basis else 0
    if key in mix.fresh or len(mix.fresh) < KEYS_MAX:
        mix.fresh[key] = mix.fresh.get(key, 0) + spec.replicas
    if _is_anothers(mix):
        mix.counts = mix.fresh
        mix.total = sum(mix.counts.values())
        mix.renew_after = 0
    if mix.renew_after <= 0:
        mix.basis = dict(sorted(mix.counts.items()))
        mix.epoch += 1
        mix.renew_after = max(mix.total, 1)
        mix.arrived = 2 * DOUBT_ARRIVALS
    if mix.arrived >= 2 * DOUBT_ARRIVALS:
        mix.fresh = {}
        mix.arrived = mix.strangers = 0


def _is_anothers(mix: Mix) -> bool:
    """Whether what arrives is plainly not what was learned: then that is forgotten at once, and learned anew."""
    return (
        sum(mix.basis.values()) >= SETTLED
        and mix.arrived >= DOUBT_ARRIVALS
        and mix.strangers * DOUBT_ONE_IN > mix.arrived
    )


def basis_of(mix: Mix) -> list[tuple[Asked, int]]:
    """What policies go by: each sort of replica with its count, in an order that no history changes."""
    return sorted((_read(key), many) for key, many in mix.basis.items())


def _written(spec: JobSpec) -> str:
    if not spec.devices:
        return f"0 0 0 {spec.cpu_milli} {spec.host_memory_mib} "
    numbers = (spec.devices, spec.compute_milli, spec.memory_mib, spec.cpu_milli, spec.host_memory_mib)
    return f"{' '.join(map(str, numbers))} {'|'.join(sorted(spec.models))}"


def _read(key: str) -> Asked:
    devices, compute, memory, cpu, host, models = key.split(" ", 5)
    return Asked(int(devices), int(compute), int(memory), int(cpu), int(host), tuple(filter(None, models.split("|"))))
