"""Streams of tasks drawn from a mix, and which of a stream's tasks fit an amount: what values of nodes are made of.

The benchmark's kernel and the service's policies value nodes in other dimensions, by the same draws.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, TypeVar

from apportion.placer.packing.draws import Draws

STREAMS: Final = 10
STREAM_TASKS: Final = 60

T = TypeVar("T")


def samples(mix: list[tuple[T, int]], seed: int) -> Iterator[list[T]]:
    """``STREAMS`` streams of ``STREAM_TASKS`` tasks each, by their weights in the mix; none where it is empty."""
    running: list[int] = []
    total = 0
    for _, weight in mix:
        total += weight
        running.append(total)
    if not total:
        return
    draws = Draws(seed)
    for _ in range(STREAMS):
        # One from each equal part of the mix, in a drawn order: a stream by chance rich in large tasks would say more
        # about itself than about the node.
        drawn = [
            mix[bisect_right(running, (part * total + draws.below(total)) // STREAM_TASKS)][0]
            for part in range(STREAM_TASKS)
        ]
        for last in range(STREAM_TASKS - 1, 0, -1):
            other = draws.below(last + 1)
            drawn[last], drawn[other] = drawn[other], drawn[last]
        yield drawn


def masks(needs: list[int], most: int) -> list[int]:
    """For each amount from 0 to ``most``: the positions, as bits, whose need is no more than that."""
    found: list[int] = []
    mask = 0
    for need, position in sorted((need, position) for position, need in enumerate(needs)):
        found += [mask] * (min(need, most + 1) - len(found))
        if need <= most:
            mask |= 1 << position
    return found + [mask] * (most + 1 - len(found))
