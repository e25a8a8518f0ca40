"""Why a job waits, in numbers and in one sentence: what it asked, what there is, who holds it, and what would help."""

from collections.abc import Iterator
from heapq import merge
from itertools import chain, islice
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from apportion.contracts.causes import Mode, Pending
from apportion.contracts.events import JobHeld
from apportion.contracts.ids import JobId, QueueId
from apportion.placer.bookings import PREFIX
from apportion.placer.books import tenant_of
from apportion.placer.constraints import Where
from apportion.placer.estimates import Estimate, estimate
from apportion.placer.orders import OrderKey
from apportion.placer.rooms import NEVER, Demand, Out
from apportion.placer.rounds import GANG_MAX, Block, Line, Round
from apportion.placer.state import Shape, order_of
from apportion.pool.state import JobView

BLOCKERS_MAX: Final = 8
ESTIMATES_MAX: Final = 64
"""Shapes of jobs of which one round says when they may start."""
_SCAN_MAX: Final = 64
"""Holders that are looked at to name the blockers: those who end soonest are the ones worth naming."""
_STOPPED: Final = frozenset({Out.NODE_CORDONED, Out.NODE_DRAINING})
_AWAY: Final = frozenset({Out.NODE_SUSPECTED, Out.NODE_FENCED})

_BUSY: Final = frozenset(
    {
        Pending.INSUFFICIENT_GPU,
        Pending.INSUFFICIENT_GPU_MEMORY,
        Pending.INSUFFICIENT_COMPUTE,
        Pending.FRAGMENTED_DEVICES,
        Pending.INSUFFICIENT_HOST,
        Pending.GANG_INCOMPLETE,
        Pending.MIG_PLACEMENT,
        Pending.CONCURRENCY_CAP_REACHED,
        Pending.RESERVED_FOR_OTHER,
        Pending.WAITING_FOR_QUOTA,
        Pending.WAITING_FOR_PREEMPTION,
        Pending.BID_TOO_LOW,
    }
)
"""Waiting for others to end, one way or another."""


_CODE: Final = "code"
"""Under which a ranking keeps what its counts come to."""
_NEVER_CODES: Final = (
    (Out.NODE_AVOIDED, Pending.NO_MATCHING_NODE),
    (Out.TOPOLOGY_MISMATCH, Pending.TOPOLOGY_MISMATCH),
    (Out.ISOLATION_UNAVAILABLE, Pending.ISOLATION_UNAVAILABLE),
    (Out.ARCHITECTURE_TOO_OLD, Pending.NO_MATCHING_DEVICE),
    (Out.NO_MATCHING_DEVICE, Pending.NO_MATCHING_DEVICE),
    (Out.VERSION_MISMATCH, Pending.VERSION_MISMATCH),
    (Out.LABEL_MISMATCH, Pending.NO_MATCHING_NODE),
)


class Reason(Struct, frozen=True, kw_only=True):
    """What JobPendingReasonChanged says of a job, apart from whose and since when."""

    code: Pending
    requested: dict[str, int] = {}
    available: dict[str, int] = {}
    limit: dict[str, int] = {}
    blocking_ids: tuple[str, ...] = ()
    nodes: dict[str, int] = {}
    hint: str = ""
    start_low_at: int = 0
    start_high_at: int = 0
    """When it may start, by ``estimates``; 0 where nobody can say."""


def code_of(round_: Round, demand: Demand, block: Block) -> Pending:
    """The code of what keeps a job waiting."""
    if block.is_frozen:
        return Pending.CONTROL_PLANE_FROZEN
    if block.is_cordoned:
        return Pending.QUEUE_CORDONED
    if block.over_quota:
        return Pending.WAITING_FOR_QUOTA
    if block.awaits:
        return Pending.WAITING_FOR_PREEMPTION
    if block.reserved_for is not None:
        return Pending.RESERVED_FOR_OTHER
    if block.apart:
        return Pending.TOPOLOGY_MISMATCH
    if block.replicas_fit or demand.replicas > GANG_MAX:
        return Pending.GANG_INCOMPLETE
    ranking = round_.ranking(demand)
    version, known = ranking.notes.get(_CODE, (-1, None))
    if version == ranking.version and isinstance(known, Pending) and not block.bids_from:
        return known
    counts = {why: count for why, count in ranking.counts.items() if count}
    code = _code_of_counts(counts, len(round_.state.rooms), is_outbid=bool(block.bids_from))
    if not block.bids_from:
        ranking.notes[_CODE] = (ranking.version, code)
    return code


def _code_of_counts(counts: dict[Out, int], nodes: int, *, is_outbid: bool) -> Pending:
    if nodes == counts.get(Out.NODE_FENCED, 0):
        return Pending.NO_NODES_IN_POOL
    if nodes == sum(counts.get(why, 0) for why in NEVER):
        if Out.HOST_TOO_SMALL in counts:
            return Pending.INSUFFICIENT_HOST
        # The node that came nearest says most: this is the order in which nodes are looked at, from its end.
        return next((code for out, code in _NEVER_CODES if out in counts), Pending.NO_MATCHING_DEVICE)
    if not counts.keys() - NEVER - _STOPPED - _AWAY:
        return Pending.NODES_CORDONED if counts.keys() & _STOPPED else Pending.NO_NODES_IN_POOL
    if is_outbid:
        return Pending.BID_TOO_LOW
    if Out.INSUFFICIENT_HOST in counts:
        return Pending.INSUFFICIENT_HOST
    if Out.FRAGMENTED_DEVICES in counts or (
        Out.INSUFFICIENT_COMPUTE in counts and Out.INSUFFICIENT_GPU_MEMORY in counts
    ):
        return Pending.FRAGMENTED_DEVICES
    if Out.INSUFFICIENT_COMPUTE in counts:
        return Pending.INSUFFICIENT_COMPUTE
    if Out.INSUFFICIENT_GPU_MEMORY in counts:
        return Pending.INSUFFICIENT_GPU_MEMORY
    if Out.MIG_PLACEMENT in counts:
        return Pending.MIG_PLACEMENT
    if Out.RUNS_CAPPED in counts:
        return Pending.CONCURRENCY_CAP_REACHED
    return Pending.INSUFFICIENT_GPU


def reason_of(round_: Round, shape: Shape, block: Block) -> Reason:
    """What keeps a job of this shape waiting, with its numbers."""
    demand = shape.demand
    code = code_of(round_, demand, block)
    requested = requested_by(demand)
    match code:
        case Pending.CONTROL_PLANE_FROZEN:
            return Reason(
                code=code,
                requested=requested,
                hint="Too many nodes fell silent at once, so nothing is placed until they speak again.",
            )
        case Pending.WAITING_FOR_QUOTA:
            return _quota(round_, shape, block, requested)
        case Pending.QUEUE_CORDONED:
            return Reason(
                code=code,
                requested=requested,
                hint=f"Queue {block.quota_of} is cordoned: nothing is placed until an operator opens it again.",
            )
        case Pending.WAITING_FOR_PREEMPTION:
            return Reason(
                code=code,
                requested=requested,
                blocking_ids=tuple(map(str, block.awaits[:BLOCKERS_MAX])),
                nodes=_nodes(round_, demand),
                hint=f"{len(block.awaits)} job(s) were told to stop for it, and what they free is kept for it.",
            )
        case Pending.RESERVED_FOR_OTHER:
            return Reason(
                code=code,
                requested=requested,
                blocking_ids=(str(block.reserved_for),),
                nodes=_nodes(round_, demand) | {"Reserved": len(round_.reserved)},
                hint=f"It would fit on what is kept for {block.reserved_for}"
                + (
                    ", beyond whose beginning it would run."
                    if str(block.reserved_for).startswith(PREFIX)
                    else ", which has waited longer."
                ),
            )
        case _:
            pass
    available = _available(round_, demand)
    if code is Pending.GANG_INCOMPLETE or block.apart:
        available["replicas"] = block.replicas_fit
    return Reason(
        code=code,
        requested=requested,
        available=available,
        limit={"bid_micro": block.bids_from} if code is Pending.BID_TOO_LOW else {},
        blocking_ids=tuple(_blockers(round_, shape)) if code in _BUSY or block.apart else (),
        nodes=_nodes(round_, demand),
        hint=_hint_of_block(code, demand, block)
        or _hint_of_nodes(round_, code, demand)
        or _hint(code, demand, available),
    )


def _hint_of_block(code: Pending, demand: Demand, block: Block) -> str:
    """What would help, where that is said by more than what is free; else nothing."""
    if code is Pending.BID_TOO_LOW:
        return (
            f"Everybody who runs in the market bids at least {block.bids_from}, and it bids no more: it starts when "
            "runs end, or with a higher bid."
        )
    if block.domain and code is Pending.TOPOLOGY_MISMATCH:
        return (
            f"{block.apart} replicas would fit, and at most {block.replicas_fit} of them with one {demand.topology} "
            f"({block.domain}), where it wants all {demand.replicas}: it starts when runs there end, or with "
            "gang.preferred."
        )
    if block.domain and code is Pending.GANG_INCOMPLETE:
        return (
            f"{block.replicas_fit} of {demand.replicas} replicas fit now with one {demand.topology} ({block.domain}), "
            "and they start together: it starts when runs end, or with fewer replicas."
        )
    return ""


def requested_by(demand: Demand) -> dict[str, int]:
    """What each replica asks of a node, without what it doesn't ask."""
    asked = {
        "devices": demand.devices,
        "compute_milli": demand.compute_milli,
        "memory_mib": demand.memory_mib,
        "cpu_milli": demand.cpu_milli,
        "host_memory_mib": demand.host_memory_mib,
    }
    if demand.where is not None:
        asked |= {"encoders": demand.where.encoders, "pcie_mbps": demand.where.pcie_mbps}
    found = {name: amount for name, amount in asked.items() if amount}
    return found | {"replicas": demand.replicas} if demand.replicas > 1 else found


def too_early(job: JobView) -> Reason:
    """Why a job whose instant has not come waits."""
    is_retry = job.attempt > 1 and job.not_before_at != job.spec.not_before_at
    return Reason(
        code=Pending.BACKOFF if is_retry else Pending.NOT_BEFORE,
        limit={"not_before_at": job.not_before_at},
        start_low_at=job.not_before_at,
        hint="Its last attempt failed, and it is tried again at not_before_at."
        if is_retry
        else "It asked not to start before not_before_at.",
    )


def held_back(hold: JobHeld) -> Reason:
    """Why a job that somebody holds waits."""
    why = f": {hold.reason}" if hold.reason else ""
    who = "by the pool's operator" if hold.by_operator else f"by {hold.actor}"
    return Reason(code=Pending.HELD, hint=f"Held {who}{why}. It can be placed once it is released.")


def waits_on(job: JobView) -> Reason:
    """Why a job that is to follow others waits."""
    count = len(job.waits_for)
    which = job.waits_for[0] if count == 1 else f"{count} other jobs"
    return Reason(
        code=Pending.DEPENDENCY,
        requested={"depends_on": len(job.spec.depends_on)},
        available={"depends_on": len(job.spec.depends_on) - count},
        blocking_ids=tuple(job.waits_for[:BLOCKERS_MAX]),
        hint=f"It is placed once {which} ended as it asked; if one ends otherwise, it fails.",
    )


def _put_off(job: JobView) -> Reason:
    if job.hold is not None:
        return held_back(job.hold)
    return waits_on(job) if job.waits_for else too_early(job)


def changes(round_: Round) -> Iterator[tuple[JobView, Reason]]:
    """What is to be said of those who wait: first of the first in each line, then of the rest, both in order.

    Of the first job in each line everything new is said. Those behind it wait for the same, and are told again only
    when another sort of thing keeps them waiting: else one slice that changes hands would mean a fact for each of them.
    """
    jobs = round_.state.pool.jobs
    blocked = [line for line in round_.lines if line.block is not None and line.at < len(line.keys)]
    codes = [_code(round_, line) for line in blocked]
    known: dict[Shape, Reason] = {}
    firsts = [
        (line.keys[line.at], number)
        for number, (line, code) in enumerate(zip(blocked, codes, strict=True))
        if _is_outdated(round_, line, code, jobs[line.keys[line.at][3]])
    ]
    # Merged as they are asked for: a batch holds a few hundred of what may be many thousands.
    rest = merge(
        *(
            _behind(round_, line, code, number)
            for number, (line, code) in enumerate(zip(blocked, codes, strict=True))
            if _has_news_behind(line, code)
        )
    )
    estimates: dict[Shape, Estimate] = {}
    heads = {key for key, _ in firsts}
    for key, number in chain(sorted(firsts), merge(rest, _early(round_))):
        if number < 0:
            job = jobs[key[3]]
            yield job, _put_off(job)
            continue
        line = blocked[number]
        assert line.block is not None
        reason = known.get(line.shape)
        if reason is None:
            reason = known[line.shape] = reason_of(round_, line.shape, line.block)
            if len(estimates) < ESTIMATES_MAX:
                estimates[line.shape] = estimate(round_, line.shape, line.block)
        found = estimates.get(line.shape)
        if found is not None and (found.low_at or found.high_at):
            # When the first one goes is known to a point; when those behind it do depends on that.
            high_at = found.high_at if key in heads else 0
            yield jobs[key[3]], replace(reason, start_low_at=found.low_at, start_high_at=high_at)
        else:
            yield jobs[key[3]], reason


def _code(round_: Round, line: Line) -> Pending:
    assert line.block is not None
    return code_of(round_, line.shape.demand, line.block)


def _early(round_: Round) -> list[tuple[OrderKey, int]]:
    """Those of which nothing was said yet and whose instant has not come, or that somebody holds."""
    jobs = round_.state.pool.jobs
    early = [job_id for job_id in round_.state.untold if jobs[job_id].not_before_at > round_.now]
    return sorted((order_of(round_.state, jobs[job_id]), -1) for job_id in (*early, *round_.state.held))


def _behind(round_: Round, line: Line, code: Pending, number: int) -> Iterator[tuple[OrderKey, int]]:
    """Those behind the first who are to be told, in order."""
    jobs = round_.state.pool.jobs
    first = line.keys[line.at]
    told = line.group.told if line.group is not None else {}
    for key in merge(line.due, *(keys for before, keys in sorted(told.items()) if not _is_alike(before, code))):
        if key > first and jobs[key[3]].not_before_at <= round_.now:
            yield key, number


def _has_news_behind(line: Line, code: Pending) -> bool:
    """Whether anybody in the line may have to be told, the first or one behind."""
    if line.due or line.group is None:
        return True
    return any(not _is_alike(before, code) for before in line.group.told)


def _is_alike(told: Pending, code: Pending) -> bool:
    if told is Pending.PENDING_EVALUATION:
        return False
    return told is code or code is Pending.CONTROL_PLANE_FROZEN or (told in _BUSY and code in _BUSY)


def _is_outdated(round_: Round, line: Line, code: Pending, job: JobView) -> bool:
    told = job.pending_fact
    if told is None or told.code is not code:
        return True
    if code is Pending.RESERVED_FOR_OTHER:
        assert line.block is not None
        return told.blocking_ids != (line.block.reserved_for,)
    if code is Pending.BID_TOO_LOW and line.block is not None and told.limit != {"bid_micro": line.block.bids_from}:
        return True
    if code is Pending.WAITING_FOR_QUOTA:
        assert line.block is not None
        if told.limit != round_.books.limits(line.block.quota_of):
            return True
    # Names are worth saying again once nobody of those named holds anything.
    holds = round_.state.holds
    return bool(told.blocking_ids) and not any(name in holds or name in round_.placed for name in told.blocking_ids)


def _quota(round_: Round, shape: Shape, block: Block, requested: dict[str, int]) -> Reason:
    assert block.quota_of is not None
    queue = block.quota_of
    used = round_.books.used(queue)
    limits = round_.books.limits(queue)
    over = " and ".join(f"{name} ({used.get(name, 0)} of {limits[name]} in use)" for name in block.over_quota)
    tenant = tenant_of(queue)
    if tenant is not None:
        where = f"Tenant {tenant}"
    else:
        where = f"Queue {queue}" if queue == shape.queue else f"Queue {queue}, which is above {shape.queue},"
    return Reason(
        code=Pending.WAITING_FOR_QUOTA,
        requested=requested,
        available={name: max(0, limit - used.get(name, 0)) for name, limit in limits.items()},
        limit=dict(limits),
        blocking_ids=tuple(islice(_holders(round_, queue), BLOCKERS_MAX)),
        hint=f"{where} is at its limit of {over}: it starts when runs {'of it' if tenant else 'there'} end, "
        "or with a higher limit.",
    )


def _holders(round_: Round, queue: QueueId) -> Iterator[JobId]:
    """Jobs of the queue, and below it, that hold something, the likeliest to end first."""
    state = round_.state
    books = round_.books
    if (tenant := tenant_of(queue)) is not None:
        yield from (key[2] for key in state.holders if state.pool.jobs[key[2]].tenant == tenant)
        yield from (job for job in round_.placed if state.pool.jobs[job].tenant == tenant)
        return
    held = [
        keys
        for name, keys in sorted(state.queue_holders.items())
        if any(above.queue_id == queue for above in books.lineage(name))
    ]
    yield from (key[2] for key in merge(*held))
    for job in round_.placed:
        if any(above.queue_id == queue for above in books.lineage(state.pool.jobs[job].spec.queue)):
            yield job


def _nodes(round_: Round, demand: Demand) -> dict[str, int]:
    return {str(why): count for why, count in sorted(round_.ranking(demand).counts.items()) if count}


def _available(round_: Round, demand: Demand) -> dict[str, int]:
    """The most that any one device (or node, for what is the node's) has free, where the job may go."""
    names = ["cpu_milli", "host_memory_mib"]
    if demand.devices:
        names += ["compute_milli", "memory_mib", "devices"]
    most = round_.most_free(demand.models)
    return {name: most.get(name, 0) for name in names}


def _blockers(round_: Round, shape: Shape) -> Iterator[str]:
    """Jobs that hold devices of an accepted model, the likeliest to end first."""
    state = round_.state
    models = shape.demand.models
    named = 0
    for key in state.holders[:_SCAN_MAX]:
        if models and not _holds_any(round_, key[2], models):
            continue
        yield key[2]
        named += 1
        if named == BLOCKERS_MAX:
            return
    yield from round_.placed[: BLOCKERS_MAX - named]


def _holds_any(round_: Round, job_id: JobId, models: tuple[str, ...]) -> bool:
    pool = round_.state.pool
    for run in pool.jobs[job_id].runs.values():
        node = pool.nodes.get(run.node_id)
        if node is None or not run.holds:
            continue
        for piece in run.slices:
            view = node.devices.get(piece.device_uuid)
            if view is not None and view.device.model in models:
                return True
    return False


def _hint_of_nodes(round_: Round, code: Pending, demand: Demand) -> str:
    """Which nodes would have to come back, where others are there that never could host it; else nothing."""
    if code not in {Pending.NO_NODES_IN_POOL, Pending.NODES_CORDONED}:
        return ""
    counts = round_.ranking(demand).counts
    unfit = {str(why): count for why, count in sorted(counts.items()) if why in NEVER and count}
    if not unfit:
        return ""
    away = {str(why): count for why, count in sorted(counts.items()) if why in _STOPPED | _AWAY and count}
    names = [", ".join(f"{count} {why}" for why, count in found.items()) for found in (unfit, away)]
    return (
        f"The nodes that can be used could never host it ({names[0]}); others may, and can't be used now ({names[1]}): "
        "it starts once one of those can, or another registers."
    )


def _hint(code: Pending, demand: Demand, available: dict[str, int]) -> str:
    kinds = " or ".join(demand.models) or "any model"
    where = demand.where or Where()
    match code:
        case Pending.NO_NODES_IN_POOL:
            return "No node can be used now: it starts once a node registers or comes back."
        case Pending.NODES_CORDONED:
            return "Every node that could host it is cordoned or draining: it starts once one is uncordoned."
        case Pending.NO_MATCHING_DEVICE:
            since = [where.min_arch, *([".".join(map(str, where.min_capability))] if where.min_capability else [])]
            newer = f" that is {' and '.join(filter(None, since))} or later" if any(since) else ""
            kind = "device(s)" if where.kind == "gpu" else f"{where.kind}(s)"
            return (
                f"No node has {demand.devices} {kind} of {kinds} of this size{newer}, even empty: "
                "ask for less or for another model, or add a node."
            )
        case Pending.NO_MATCHING_NODE:
            labels = ", ".join(f"{name}={value}" for name, value in where.required) or "no label"
            avoided = f", outside the {len(demand.avoid)} that it avoids" if demand.avoid else ""
            return f"No node has {labels}{avoided}: require less, or label or add a node."
        case Pending.VERSION_MISMATCH:
            asked = [("driver", where.min_driver), ("CUDA", where.min_cuda)]
            wanted = " and ".join(f"{what} {'.'.join(map(str, version))}" for what, version in asked if version)
            return f"No node that would do has {wanted} or later: ask for an earlier one, or have a node updated."
        case Pending.TOPOLOGY_MISMATCH:
            near = "joined by fast links" if where.is_linked else "on one NUMA node"
            return f"No node has {demand.devices} such devices {near}: ask for fewer, or let them be apart."
        case Pending.MIG_PLACEMENT:
            wanted = demand.mig_profile or "an instance of that size"
            return (
                f"No device has the memory slices for {wanted} free where it may begin: it starts when instances there "
                "end, or with a smaller one."
            )
        case Pending.CONCURRENCY_CAP_REACHED:
            return "Devices have room, and as many runs as one may have: it starts when one of them ends."
        case Pending.ISOLATION_UNAVAILABLE if demand.mig_profile:
            return f"No device in MIG mode offers {demand.mig_profile}: ask for another profile or mode."
        case Pending.ISOLATION_UNAVAILABLE:
            wanted = demand.mode or (Mode.EXCLUSIVE if demand.is_whole else "mps or timeslice")
            return f"No node offers {wanted} on enough devices: ask for another mode."
        case Pending.INSUFFICIENT_HOST:
            return (
                f"Devices would fit, and their nodes have at most {available['cpu_milli']} milli-CPU and "
                f"{available['host_memory_mib']} MiB of host memory free: it starts when runs there end."
            )
        case Pending.GANG_INCOMPLETE if demand.replicas > GANG_MAX:
            return f"At most {GANG_MAX} replicas can start together: ask for fewer."
        case Pending.GANG_INCOMPLETE:
            return (
                f"{available['replicas']} of {demand.replicas} replicas fit now, and they start together: "
                "it starts when runs end, or with fewer replicas."
            )
        case Pending.FRAGMENTED_DEVICES:
            return (
                f"Some device has {available['compute_milli']} milli-GPU free, some has {available['memory_mib']} MiB, "
                "and none has enough of both: it starts when runs on one device end."
            )
        case Pending.INSUFFICIENT_COMPUTE:
            return (
                f"Where the memory is free, too little compute is (at most {available['compute_milli']} milli-GPU on "
                "one device): it starts when runs end, or with a smaller share."
            )
        case Pending.INSUFFICIENT_GPU_MEMORY:
            return (
                f"No device has more than {available['memory_mib']} MiB free: "
                "it starts when runs end, or with less memory."
            )
        case _:
            return (
                f"It needs {demand.devices} device(s) on one node, and at most {available.get('devices', 0)} of "
                f"{kinds} are free on one: it starts when runs end."
            )
