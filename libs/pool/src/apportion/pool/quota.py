"""Queues as a tree: what each may hold, what is guaranteed to it, and what its runs hold, those below it included.

Amounts are integers by resource: ``compute_milli``, ``memory_mib``, ``cpu_milli``, ``jobs``, and
``compute_milli:<model>`` for milli-GPU on devices of one model. What isn't named is 0 of what is held, and no limit.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from apportion.contracts import events as ev
from apportion.contracts.causes import OnLowered, QueueOrder
from apportion.contracts.ids import QueueId, TenantId

Amounts = dict[str, int]

COMPUTE: Final = "compute_milli"
MEMORY: Final = "memory_mib"
CPU: Final = "cpu_milli"
JOBS: Final = "jobs"
RESOURCES: Final = (COMPUTE, MEMORY, CPU, JOBS)
ONE_JOB: Final[Amounts] = {JOBS: 1}
LEVELS_MAX: Final = 8
"""Queues above one another."""


class Told(Struct, frozen=True):
    """Who said how much somebody may hold, and what becomes of those who hold more."""

    on_lowered: OnLowered = OnLowered.KEEP
    actor: str = ""
    reason: str = ""
    event_id: str = ""


class TenantView(Struct, frozen=True):
    """What a tenant may hold in all queues together."""

    limits: Amounts
    told: Told


class QueueView(Struct):
    """One queue: its limits and what runs in it and below it hold."""

    queue_id: QueueId
    tenants: tuple[TenantId, ...]
    parent: QueueId | None = None
    limits: Amounts = {}
    guaranteed: Amounts = {}
    weight: int = 1
    weights: Amounts = {}
    """Of single resources; of the others it is ``weight``."""
    order: QueueOrder | None = None
    is_fair: bool = True
    reclaim: bool = True
    is_cordoned: bool = False
    told: Told = Told()
    used: Amounts = {}
    """Held by runs here and below: a projection of the runs, without what is 0."""
    used_by: dict[TenantId, Amounts] = {}
    """The same of its own runs alone, by tenant."""
    jobs: int = 0
    """Jobs of its own that have not ended."""

    @property
    def limit_compute_milli(self) -> int | None:
        """Milli-GPU that it may hold; None where it has no limit of its own."""
        return self.limits.get(COMPUTE)

    @property
    def limit_memory_mib(self) -> int | None:
        """MiB of device memory that it may hold; None where it has no limit of its own."""
        return self.limits.get(MEMORY)

    @property
    def limit_jobs(self) -> int | None:
        """Jobs that may hold something; None where it has no limit of its own."""
        return self.limits.get(JOBS)

    @property
    def used_compute_milli(self) -> int:
        """Milli-GPU that its runs hold."""
        return self.used.get(COMPUTE, 0)

    @property
    def used_memory_mib(self) -> int:
        """MiB of device memory that its runs hold."""
        return self.used.get(MEMORY, 0)


def of_model(model: str) -> str:
    """The name of milli-GPU on devices of this model."""
    return f"{COMPUTE}:{model}"


def limits_of(
    event: ev.QueueUpserted | ev.QueueUpsertRequested | ev.PolicyUpserted | ev.PolicyUpsertRequested,
) -> Amounts:
    """What the queue, or the tenant, may hold, by resource."""
    return _amounts(
        event.limit_compute_milli,
        event.limit_memory_mib,
        event.limit_cpu_milli,
        event.limit_jobs,
        event.limit_model_milli,
    )


def guaranteed_of(event: ev.QueueUpserted | ev.QueueUpsertRequested) -> Amounts:
    """What is guaranteed to the queue, by resource."""
    return _amounts(
        event.guaranteed_compute_milli,
        event.guaranteed_memory_mib,
        event.guaranteed_cpu_milli,
        event.guaranteed_jobs,
        event.guaranteed_model_milli,
    )


def weights_of(event: ev.QueueUpserted) -> Amounts:
    """The queue's weight in single resources."""
    named = {(name if name in RESOURCES else of_model(name)): weight for name, weight in event.weights.items()}
    return dict(sorted(named.items()))


def _amounts(
    compute: int | None, memory: int | None, cpu: int | None, jobs: int | None, models: Mapping[str, int]
) -> Amounts:
    found = {
        name: amount for name, amount in zip(RESOURCES, (compute, memory, cpu, jobs), strict=True) if amount is not None
    }
    found |= {of_model(model): amount for model, amount in models.items()}
    # A restored snapshot has them in this order, and which limit is named first must not depend on that.
    return dict(sorted(found.items()))


def add(amounts: Amounts, others: Mapping[str, int], sign: int = 1) -> None:
    """Change ``amounts`` by the others; what comes to 0 is left out, so that equal amounts are equal dicts."""
    for name, amount in others.items():
        after = amounts.get(name, 0) + sign * amount
        if after:
            amounts[name] = after
        else:
            amounts.pop(name, None)


def charge(amounts: Amounts, model: str, compute_milli: int, memory_mib: int) -> None:
    """Add one slice on a device of this model; without a model where the device isn't known."""
    add(amounts, {COMPUTE: compute_milli, MEMORY: memory_mib} | ({of_model(model): compute_milli} if model else {}))


def exceeded(used: Mapping[str, int], more: Mapping[str, int], limits: Mapping[str, int]) -> tuple[str, ...]:
    """The limits that would be exceeded with this much more; what asks for nothing of a resource exceeds none of it."""
    return tuple(name for name in limits if more.get(name, 0) and used.get(name, 0) + more[name] > limits[name])


def lineage(queues: Mapping[QueueId, QueueView], queue: QueueId | None) -> Iterator[QueueView]:
    """The queue and those above it, from below; nothing for a queue that nobody announced."""
    for _ in range(LEVELS_MAX):
        found = None if queue is None else queues.get(queue)
        if found is None:
            return
        yield found
        queue = found.parent


def children(queues: Mapping[QueueId, QueueView]) -> dict[QueueId | None, list[QueueId]]:
    """The queues directly below each, by id; those at the top under None."""
    found: dict[QueueId | None, list[QueueId]] = {}
    for queue_id in sorted(queues):
        found.setdefault(queues[queue_id].parent, []).append(queue_id)
    return found


def upsert(queues: dict[QueueId, QueueView], event: ev.QueueUpserted, event_id: str) -> None:
    """Let the queue be as the fact says; what its runs hold goes with it where it moves in the tree."""
    queue = queues.get(event.queue)
    if queue is None:
        queue = queues[event.queue] = QueueView(queue_id=event.queue, tenants=event.tenants)
    if event.parent != queue.parent:
        for above in lineage(queues, queue.parent):
            add(above.used, queue.used, -1)
        for above in lineage(queues, event.parent):
            add(above.used, queue.used)
    queue.tenants = event.tenants
    queue.parent = event.parent
    queue.limits = limits_of(event)
    queue.guaranteed = guaranteed_of(event)
    queue.weight = event.weight
    queue.weights = weights_of(event)
    queue.told = Told(event.on_lowered, event.actor, event.reason, event_id)
    queue.order = event.order
    queue.is_fair = event.is_fair
    queue.reclaim = event.reclaim
    queue.is_cordoned = event.is_cordoned


def bound(tenants: dict[TenantId, TenantView], event: ev.PolicyUpserted, event_id: str) -> None:
    """Let the tenant hold what the fact allows; a pool's policy says nothing of that."""
    if event.for_tenant is None:
        return
    limits = limits_of(event)
    if limits:
        told = Told(event.on_lowered, event.actor, event.reason, event_id)
        tenants[event.for_tenant] = TenantView(limits, told)
    else:
        tenants.pop(event.for_tenant, None)
