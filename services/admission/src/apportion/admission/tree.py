"""May this queue stand where the wish wants it? Parents, levels, and guarantees that must fit into those above."""

from collections.abc import Iterable, Mapping

from apportion.admission.refusals import Refused
from apportion.contracts import events as ev
from apportion.contracts.causes import Refusal
from apportion.contracts.ids import QueueId
from apportion.pool import quota
from apportion.pool.quota import Amounts, QueueView
from apportion.pool.state import NodeState, Pool


def refusal(queues: Mapping[QueueId, QueueView], wish: ev.QueueUpsertRequested) -> Refused | None:
    """Why the tree can't have the queue so; None where it can."""
    queue_id = QueueId(wish.queue)
    below = quota.children(queues)
    return _misplaced(queues, below, queue_id, wish) or _overpromised(queues, below, queue_id, wish)


def _misplaced(
    queues: Mapping[QueueId, QueueView],
    below: Mapping[QueueId | None, list[QueueId]],
    queue_id: QueueId,
    wish: ev.QueueUpsertRequested,
) -> Refused | None:
    if wish.parent is None:
        return None
    parent = QueueId(wish.parent)
    if parent != queue_id and parent not in queues:
        return Refused(
            code=Refusal.QUEUE_NOT_FOUND,
            field="parent",
            expected="a queue that there is",
            found=wish.parent,
            hint="Ask for the queue above first.",
        )
    above = [view.queue_id for view in quota.lineage(queues, parent)]
    if parent == queue_id or queue_id in above:
        return Refused(
            code=Refusal.FIELD_INVALID,
            field="parent",
            expected=f"a queue that is not {wish.queue} and not below it",
            found=wish.parent,
            hint="Move the queue that is below it first.",
        )
    levels = len(above) + _height(below, queue_id)
    if levels > quota.LEVELS_MAX:
        return Refused(
            code=Refusal.FIELD_INVALID,
            field="parent",
            expected=f"at most {quota.LEVELS_MAX} levels of queues",
            found=f"{levels} levels below {above[-1]}",
        )
    return None


def _height(below: Mapping[QueueId | None, list[QueueId]], queue_id: QueueId) -> int:
    return 1 + max((_height(below, child) for child in below.get(queue_id, ())), default=0)


def _overpromised(
    queues: Mapping[QueueId, QueueView],
    below: Mapping[QueueId | None, list[QueueId]],
    queue_id: QueueId,
    wish: ev.QueueUpsertRequested,
) -> Refused | None:
    """Where a guarantee is more than may ever be held, or more than the guarantee above it has to give."""
    guaranteed = quota.guaranteed_of(wish)
    limits = quota.limits_of(wish)
    parent = None if wish.parent is None else queues[QueueId(wish.parent)]
    others = _promised(queues, () if parent is None else below.get(parent.queue_id, ()), queue_id)
    own = _promised(queues, below.get(queue_id, ()), queue_id)
    for name in sorted({*guaranteed, *own}):
        amount = guaranteed.get(name, 0)
        field = _field("guaranteed", name)
        if own.get(name, 0) > amount:
            return Refused(
                code=Refusal.FIELD_CONFLICT,
                field=field,
                expected=f"at least {own[name]}, which is guaranteed to queues below it",
                found=str(amount),
                hint="Lower the guarantees of the queues below it first.",
            )
        if amount > limits.get(name, amount):
            return Refused(
                code=Refusal.FIELD_CONFLICT,
                field=field,
                expected=f"at most {limits[name]}, which is its {_field('limit', name)}",
                found=str(amount),
                hint="Guarantee no more than the queue may hold.",
            )
        if parent is not None and amount + others.get(name, 0) > parent.guaranteed.get(name, 0):
            left = parent.guaranteed.get(name, 0) - others.get(name, 0)
            return Refused(
                code=Refusal.FIELD_CONFLICT,
                field=field,
                expected=f"at most {max(0, left)}, which is left of what is guaranteed to {wish.parent}",
                found=str(amount),
                hint=f"Guarantee more to {wish.parent} first, or less to another queue below it.",
            )
    return None


def _promised(queues: Mapping[QueueId, QueueView], names: Iterable[QueueId], without: QueueId) -> Amounts:
    """What is guaranteed to these queues together, but for one."""
    found: Amounts = {}
    for name in names:
        if name != without:
            quota.add(found, queues[name].guaranteed)
    return found


def note(pool: Pool, wish: ev.QueueUpsertRequested) -> str:
    """What is guaranteed beyond what the pool has, with this queue as wished; empty where nothing is.

    That is told and not refused: nodes come and go, and a guarantee says who goes first as far as there is something.
    A pool of which nobody knows a node says nothing of those that will come.
    """
    nodes = [node for node in pool.nodes.values() if node.state is not NodeState.FENCED]
    if not nodes or not quota.guaranteed_of(wish):
        return ""
    has: Amounts = {}
    for node in nodes:
        quota.add(has, {quota.CPU: node.cpu_milli})
        for view in node.devices.values():
            quota.charge(has, view.device.model, view.device.compute_milli, view.device.memory_mib)
    queue_id = QueueId(wish.queue)
    promised = _promised(pool.queues, quota.children(pool.queues).get(None, ()), queue_id)
    top = quota.guaranteed_of(wish) if wish.parent is None else {}
    quota.add(promised, top)
    beyond = [
        f"{_field('guaranteed', name)} comes to {amount} and the pool has {has.get(name, 0)}"
        for name, amount in sorted(promised.items())
        if name != quota.JOBS and name in quota.guaranteed_of(wish) and amount > has.get(name, 0)
    ]
    if not beyond:
        return ""
    return f"More is guaranteed than there is on {len(nodes)} node(s): {'; '.join(beyond)}."


def _field(kind: str, name: str) -> str:
    base, _, model = name.partition(":")
    return f"{kind}_model_milli.{model}" if model else f"{kind}_{base}"
