"""Which nodes' silence has lasted, found without asking every node at each step. Pure.

A heap holds for each node an instant at which its silence may have lasted too long. A sign of life moves the true
instant and leaves the heap as it is; the stale entry is put right once it is the first. So a step costs what has
changed, at any number of nodes.
"""

import heapq
from collections.abc import Callable, Iterable

from msgspec import Struct

from apportion.contracts.ids import NodeId

DeadlineOf = Callable[[NodeId], int | None]
"""When a node's silence lasts too long, by the monotonic clock in ns; None for one that isn't watched any more."""


class Due(Struct, kw_only=True):
    """Every watched node is either in the heap, once, or overdue."""

    heap: list[tuple[int, NodeId]] = []
    known: set[NodeId] = set()
    overdue: set[NodeId] = set()


def restart(due: Due, nodes: Iterable[NodeId], deadline_of: DeadlineOf, clock_ns: int) -> None:
    """Watch exactly these nodes, from their deadlines as they are now."""
    due.heap = [(at, node_id) for node_id in nodes if (at := deadline_of(node_id)) is not None]
    heapq.heapify(due.heap)
    due.known = {node_id for _, node_id in due.heap}
    due.overdue = set()
    settle(due, deadline_of, clock_ns)


def touch(due: Due, node_id: NodeId, deadline_of: DeadlineOf, clock_ns: int) -> None:
    """The node's deadline may be another now; one that is new is watched from here on."""
    if node_id in due.overdue or node_id not in due.known:
        due.overdue.discard(node_id)
        due.known.discard(node_id)
        at = deadline_of(node_id)
        if at is not None:
            due.known.add(node_id)
            heapq.heappush(due.heap, (at, node_id))
    settle(due, deadline_of, clock_ns)


def settle(due: Due, deadline_of: DeadlineOf, clock_ns: int) -> None:
    """Afterwards the first of the heap is true and later than the clock, and whatever isn't is overdue."""
    heap = due.heap
    while heap:
        at, node_id = heap[0]
        true = deadline_of(node_id)
        if true is None:
            heapq.heappop(heap)
            due.known.discard(node_id)
        elif true <= clock_ns:
            heapq.heappop(heap)
            due.overdue.add(node_id)
        elif true != at:
            heapq.heapreplace(heap, (true, node_id))
        else:
            return
