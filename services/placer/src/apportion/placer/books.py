"""What queues hold as a round has it so far, against their limits and those of the queues above them."""

from collections.abc import Iterator, Mapping
from typing import Final

from apportion.contracts.ids import QueueId, TenantId
from apportion.placer.rooms import Demand, NodeRoom, amounts_on, is_sized
from apportion.pool import quota
from apportion.pool.quota import Amounts, QueueView, TenantView

_TENANT: Final = "tenant:"


def account_of(tenant: TenantId) -> QueueId:
    """The name under which a tenant's own limits stand beside those of queues; no queue can have it."""
    return QueueId(f"{_TENANT}{tenant}")


def tenant_of(account: QueueId) -> TenantId | None:
    """Whose account it is; None where it is a queue."""
    return TenantId(account.removeprefix(_TENANT)) if account.startswith(_TENANT) else None


class Books:
    """Queues and tenants with limits as they are in the folded state, and on top of that what the round has placed."""

    def __init__(
        self,
        queues: Mapping[QueueId, QueueView],
        tenants: Mapping[TenantId, TenantView] | None = None,
        held_by: Mapping[TenantId, Amounts] | None = None,
    ) -> None:
        self._queues = queues
        self._tenants = tenants or {}
        self._held_by = held_by or {}
        self._used: dict[QueueId, Amounts] = {}
        self._used_by: dict[tuple[QueueId, TenantId], Amounts] = {}
        self._lineages: dict[QueueId, tuple[QueueView, ...]] = {}
        self._cordoned: dict[QueueId, QueueId | None] = {}
        self._unlimited: dict[QueueId, bool] = {}
        self._least: dict[Demand, Amounts] = {}
        self.changes = 0
        """Grows whenever somebody holds more, or less."""

    def lineage(self, queue: QueueId) -> tuple[QueueView, ...]:
        """The queue and those above it, from below."""
        found = self._lineages.get(queue)
        if found is None:
            found = self._lineages[queue] = tuple(quota.lineage(self._queues, queue))
        return found

    def used(self, queue: QueueId) -> Amounts:
        """What runs of the queue, and below it, hold now; or those of a tenant. Not to be changed."""
        found = self._used.get(queue)
        if found is None:
            tenant = tenant_of(queue)
            if tenant is not None:
                return self._held_by.get(tenant, {})
            view = self._queues.get(queue)
            found = {} if view is None else view.used
        return found

    def limits(self, queue: QueueId | None) -> Amounts:
        """The queue's own limits, or the tenant's."""
        if queue is None:
            return {}
        tenant = tenant_of(queue)
        view = self._queues.get(queue) if tenant is None else self._tenants.get(tenant)
        return {} if view is None else view.limits

    def holders(self, queue: QueueId, tenant: TenantId) -> Iterator[QueueId]:
        """Who is charged for what the tenant holds there: its account, where it has limits; the queue; those above."""
        if tenant in self._tenants:
            yield account_of(tenant)
        for view in self.lineage(queue):
            yield view.queue_id

    def used_by(self, queue: QueueId, tenant: TenantId) -> Amounts:
        """What runs of this tenant in the queue hold now. Not to be changed."""
        found = self._used_by.get((queue, tenant))
        if found is None:
            view = self._queues.get(queue)
            found = {} if view is None else view.used_by.get(tenant, {})
        return found

    def charge(self, queue: QueueId, tenant: TenantId, amounts: Mapping[str, int], sign: int = 1) -> None:
        """Let the tenant in the queue, the queue, and those above it, hold that much more, or less."""
        self.changes += 1
        held = self._used_by.get((queue, tenant))
        if held is None:
            held = self._used_by[queue, tenant] = self.used_by(queue, tenant).copy()
        quota.add(held, amounts, sign)
        for view in self.lineage(queue):
            used = self._used.get(view.queue_id)
            if used is None:
                used = self._used[view.queue_id] = view.used.copy()
            quota.add(used, amounts, sign)
        if tenant in self._tenants:
            account = account_of(tenant)
            own = self._used.get(account)
            if own is None:
                own = self._used[account] = self._held_by.get(tenant, {}).copy()
            quota.add(own, amounts, sign)

    def over(self, queue: QueueId, tenant: TenantId, more: Mapping[str, int]) -> tuple[QueueId, tuple[str, ...]] | None:
        """The first whose limits that much more would exceed, and which those are; None where it may be held.

        The tenant's own come first, then the queue's, then those of the queues above it.
        """
        for name in self.holders(queue, tenant):
            limits = self.limits(name)
            if limits and (names := quota.exceeded(self.used(name), more, limits)):
                return name, names
        return None

    def cordoned(self, queue: QueueId) -> QueueId | None:
        """The queue, or the lowest above it, that is cordoned."""
        if queue not in self._cordoned:
            self._cordoned[queue] = next((view.queue_id for view in self.lineage(queue) if view.is_cordoned), None)
        return self._cordoned[queue]

    def is_unlimited(self, queue: QueueId) -> bool:
        """Whether neither the queue nor one above it has limits, or is cordoned."""
        found = self._unlimited.get(queue)
        if found is None:
            found = self._unlimited[queue] = not any(view.limits or view.is_cordoned for view in self.lineage(queue))
        return found

    def least(self, demand: Demand) -> Amounts:
        """As ``least_charge``, which a round asks for again and again. Not to be changed."""
        found = self._least.get(demand)
        if found is None:
            found = self._least[demand] = least_charge(demand)
        return found

    def is_open(self, queue: QueueId, tenant: TenantId, demand: Demand) -> bool:
        """Whether a limit may hold on one device and not on another, as what is charged depends on the device."""
        is_same = is_sized(demand)
        for holder in self.holders(queue, tenant):
            for name in self.limits(holder):
                if name not in quota.RESOURCES or (not is_same and name in {quota.COMPUTE, quota.MEMORY}):
                    return True
        return False


def least_charge(demand: Demand) -> Amounts:
    """What one job of this demand takes from its queue's limits wherever it goes, at least."""
    slices = demand.devices * demand.replicas
    least = {
        quota.COMPUTE: demand.compute_milli * slices,
        quota.MEMORY: demand.memory_mib * slices,
        quota.CPU: demand.cpu_milli * demand.replicas,
        quota.JOBS: 1,
    }
    if len(demand.models) == 1:
        least[quota.of_model(demand.models[0])] = demand.compute_milli * slices
    return {name: amount for name, amount in least.items() if amount}


def charge_on(demand: Demand, room: NodeRoom, picks: tuple[int, ...]) -> Amounts:
    """What one replica on these devices takes from its queue's limits."""
    charge: Amounts = {}
    for place in picks:
        device = room.devices[place]
        quota.charge(charge, device.model, *amounts_on(demand, device))
    if demand.cpu_milli:
        charge[quota.CPU] = demand.cpu_milli
    return charge
