"""In which order jobs of one queue are placed. One key for each that waits, fixed while it waits, and integers only.

That waiting moves a job up and its key stays the same is what makes a round cost the same however many wait. With
``classes``, each second of waiting is worth the same to all, so who stands before whom never changes: a job's key is
the instant at which it came, put back by its points. With ``seed``, waiting is worth nothing more after a while, so
that order does change, but never between jobs of one priority: each priority is a line of its own, and a round
compares the first of each line.
"""

from functools import lru_cache
from typing import Final

from msgspec import Struct

from apportion.contracts.causes import QueueOrder, ServiceClass, WorkloadKind
from apportion.contracts.ids import JobId
from apportion.pool.state import JobView

OrderKey = tuple[int, int, int, JobId]
"""The order of jobs in one line: the least goes first. The last is the id, so that no two are equal."""
S: Final = 1_000_000_000
"""Nanoseconds in a second."""
CLASS_RANK: Final = {
    ServiceClass.ONLINE: 0,
    ServiceClass.STANDARD: 1,
    ServiceClass.BATCH: 2,
    ServiceClass.SPOT: 3,
}
"""The first goes first, and stops those behind it where that is asked for."""
VERSION: Final = "classes@1,seed@1,strict@1,bids@1"
"""Changes whenever an order may come out another way."""
RANKED: Final = frozenset({QueueOrder.STRICT, QueueOrder.BIDS})
"""Orders in which nobody's share counts: who comes first goes first, and may have those stopped who come later."""
_BY_POLICY: Final = {"strict_priority": QueueOrder.STRICT, "bidding": QueueOrder.BIDS}
NORM: Final = 1_000_000
"""What 1 is in a normalised part of the seed's score."""


class Weights(Struct, frozen=True, kw_only=True):
    """Settings of the orders; a pool's are part of the placer's LeaseClaimed.config."""

    order: str = QueueOrder.CLASSES.value
    """Of queues that don't say theirs."""
    ageing_s: int = 10
    """Seconds of waiting that are worth one point of priority; 0: waiting makes no difference but between equals."""
    class_points_online: int = 9000
    class_points_standard: int = 6000
    class_points_batch: int = 3000
    class_points_spot: int = 0
    """What a service class is worth beside priority, which is worth 0 to 1000."""
    kind_points_training: int = 1001
    kind_points_inference: int = 0
    kind_points_batch: int = 0
    kind_points_interactive: int = 0
    kind_points_hpc: int = 0
    """What a kind of work is worth within its class."""
    seed_priority_weight: int = 60
    seed_waiting_weight: int = 40
    seed_waiting_s: int = 3600
    """Waiting that counts as 1 in the seed's score; more counts as 1, too."""


def points_of(job: JobView, weights: Weights) -> int:
    """What the job's class, kind and priority are worth; more goes first."""
    spec = job.spec
    match spec.service_class:
        case ServiceClass.ONLINE:
            points = weights.class_points_online
        case ServiceClass.STANDARD:
            points = weights.class_points_standard
        case ServiceClass.BATCH:
            points = weights.class_points_batch
        case ServiceClass.SPOT:
            points = weights.class_points_spot
    match spec.kind:
        case WorkloadKind.TRAINING:
            points += weights.kind_points_training
        case WorkloadKind.INFERENCE:
            points += weights.kind_points_inference
        case WorkloadKind.BATCH:
            points += weights.kind_points_batch
        case WorkloadKind.INTERACTIVE:
            points += weights.kind_points_interactive
        case WorkloadKind.HPC:
            points += weights.kind_points_hpc
    return points + spec.priority


@lru_cache(maxsize=256)
def order_of_policy(policy: str) -> QueueOrder | None:
    """The order that comes with a policy, by its name or id; None where it leaves that to the queue.

    By its name alone, so that a state is folded alike where the policy itself isn't installed.

    >>> order_of_policy("bidding:pack@1#0123")
    <QueueOrder.BIDS: 'bids'>
    """
    return _BY_POLICY.get(policy.partition("@")[0].partition(":")[0])


def rank_of(job: JobView, order: QueueOrder) -> tuple[int, int]:
    """Class and place in it, in an order of RANKED: the least goes first, and may have later ones of it stopped."""
    value = job.spec.bid_micro if order is QueueOrder.BIDS else job.spec.priority
    return (CLASS_RANK[job.spec.service_class], -value)


def since(job: JobView) -> int:
    """Since when the job waits: not while somebody held it, nor before it wanted to start. In ns since the epoch."""
    return max(job.waits_since_at, job.spec.not_before_at)


def key_of(job: JobView, order: QueueOrder, weights: Weights) -> OrderKey:
    """Where the job stands in its line."""
    match order:
        case QueueOrder.CLASSES:
            points = points_of(job, weights)
            if weights.ageing_s <= 0:
                return (-points, 0, job.admitted_seq, job.job_id)
            return (since(job) - points * weights.ageing_s * S, -points, job.admitted_seq, job.job_id)
        case QueueOrder.SEED:
            return (since(job), 0, job.admitted_seq, job.job_id)
        case QueueOrder.STRICT | QueueOrder.BIDS:
            return (*rank_of(job, order), job.admitted_seq, job.job_id)


def line_of(job: JobView, order: QueueOrder) -> int:
    """Which line of its queue the job is in, where its order needs several: those in one never overtake one another."""
    return job.spec.priority if order is QueueOrder.SEED else 0


def head_of(job: JobView, key: OrderKey, order: QueueOrder, weights: Weights, now: int) -> OrderKey:
    """Where the first of a line stands among the first of its queue's other lines, at this instant."""
    if order is not QueueOrder.SEED:
        return key
    return (-seed_score(job, weights, now), *key[1:])


def seed_score(job: JobView, weights: Weights, now: int) -> int:
    """Priority and waiting, each from 0 to ``NORM``, weighted and summed; more goes first."""
    horizon = max(1, weights.seed_waiting_s) * S
    waited = min(max(0, now - since(job)), horizon)
    return weights.seed_priority_weight * job.spec.priority * NORM // 1000 + (
        weights.seed_waiting_weight * waited * NORM // horizon
    )
