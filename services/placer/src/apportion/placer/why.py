"""Why does this job wait? One paragraph for people, the same as numbers for programs; asked at any moment, of any fold.

It goes over the queue as the placer would, so its answer is today's and not the one last stated; and it asks what would
start the job now, one change at a time. It changes nothing.
"""

from collections.abc import Iterator
from itertools import chain

import msgspec
from msgspec import Struct

from apportion.contracts.causes import Pending
from apportion.contracts.ids import JobId, QueueId
from apportion.placer.books import tenant_of
from apportion.placer.constraints import Where
from apportion.placer.estimates import Estimate, estimate
from apportion.placer.orders import OrderKey, S, head_of
from apportion.placer.reasons import Reason, held_back, reason_of, too_early
from apportion.placer.rooms import Demand
from apportion.placer.rounds import Block, Round
from apportion.placer.state import Kept, Settings, Shape, State, order_in, order_of, shape_of, state_of
from apportion.placer.topology import could_hold
from apportion.pool.state import JobState, JobView, Pool


class Change(Struct, frozen=True, kw_only=True):
    """One thing that could be asked otherwise."""

    constraint: str
    """Such as ``models``; as in the job's specification, and ``queue_limit`` for its queue's."""
    asked: str
    instead: str
    starts_now: bool
    """Whether the job would start at once."""
    could_start: bool
    """Whether it would in an empty pool."""


class Why(Struct, frozen=True, kw_only=True):
    """Why a job waits, or that it does not."""

    job_id: JobId
    state: JobState
    code: Pending | None = None
    """None where it doesn't wait, or would be placed by the next decision."""
    since_at: int = 0
    waiting_s: int = 0
    ahead: int = 0
    """Jobs that go before it."""
    could_start: bool = True
    """Whether it would start in an empty pool."""
    requested: dict[str, int] = {}
    available: dict[str, int] = {}
    limit: dict[str, int] = {}
    blocking_ids: tuple[str, ...] = ()
    nodes: dict[str, int] = {}
    start_low_at: int = 0
    """When it may start at the soonest, as the runs in its way are expected to end; 0: nobody can say."""
    start_high_at: int = 0
    """When its turn has come at the latest, as things stand; 0: nobody can say."""
    start_basis: str = ""
    """What the range rests on."""
    changes: tuple[Change, ...] = ()
    """What could be asked otherwise, those that would start it now first."""
    text: str = ""
    """All of it in one paragraph."""


def why(pool: Pool, job_id: JobId, now: int, settings: Settings | None = None) -> Why | None:
    """Why the job waits at this moment; None where the pool knows no such job (any more)."""
    return why_in(state_of(Kept(pool=pool, settings=settings or Settings())), job_id, now)


def why_in(state: State, job_id: JobId, now: int) -> Why | None:
    """The same, of a placer's state."""
    pool = state.pool
    job = pool.jobs.get(job_id)
    if job is None:
        return None
    if job.state is not JobState.QUEUED:
        return Why(job_id=job_id, state=job.state, text=_settled(job))
    waited = max(0, now - job.queued_at) // S
    if job.hold is not None:
        reason = held_back(job.hold)
        return _answer(job, reason, waited, text=f"{job_id} is not placed. {reason.hint}")
    if job.not_before_at > now:
        reason = too_early(job)
        seconds = (job.not_before_at - now + S - 1) // S
        # The instant itself is no start: what is free then, nobody knows.
        return _answer(job, reason, waited, text=f"{job_id} waits for {seconds} s more. {reason.hint}")
    # As many facts as it takes: this round is published nowhere.
    round_ = Round(state, now, room_for=2**62)
    round_.run()
    shape = shape_of(state, job)
    line = next(line for line in round_.lines if line.shape == shape)
    if job_id in round_.placed or line.block is None:
        return Why(job_id=job_id, state=job.state, waiting_s=waited, text=f"{job_id} fits and is placed next.")
    reason = reason_of(round_, shape, line.block)
    ahead = _ahead(state, job, now, set(round_.placed))
    could_start = _could_start(state, shape.demand)
    changes = tuple(
        sorted(_changes(round_, job, shape, line.block), key=lambda each: (not each.starts_now, not each.could_start))
    )
    found = Estimate()
    if could_start:
        found = estimate(round_, shape, line.block, nodes=state.rooms, is_first=line.keys[line.at][3] == job_id)
    reason = msgspec.structs.replace(reason, start_low_at=found.low_at, start_high_at=found.high_at)
    parts = [_text(job, reason, waited, ahead, changes, could_start=could_start)]
    if could_start:
        parts.append(_when(found, now))
    return _answer(
        job,
        reason,
        waited,
        ahead=ahead,
        could_start=could_start,
        changes=changes,
        basis=found.basis,
        text=" ".join(parts),
    )


def _answer(
    job: JobView,
    reason: Reason,
    waited: int,
    *,
    ahead: int = 0,
    could_start: bool = True,
    changes: tuple[Change, ...] = (),
    basis: str = "",
    text: str,
) -> Why:
    return Why(
        job_id=job.job_id,
        state=job.state,
        code=reason.code,
        since_at=job.pending_since_at,
        waiting_s=waited,
        ahead=ahead,
        could_start=could_start,
        requested=reason.requested,
        available=reason.available,
        limit=reason.limit,
        blocking_ids=reason.blocking_ids,
        nodes=reason.nodes,
        changes=changes,
        start_low_at=reason.start_low_at,
        start_high_at=reason.start_high_at,
        start_basis=basis,
        text=text,
    )


def _settled(job: JobView) -> str:
    runs = sorted(job.current_runs(), key=lambda run: run.run_id)
    places = ", ".join(sorted({run.node_id for run in runs if run.holds}))
    match job.state:
        case JobState.RUNNING:
            size = ""
            if job.spec.replicas_min:
                size = f" {len(job.members())} replicas of {job.spec.replicas_min} to {job.spec.replicas} have"
            return f"{job.job_id} does not wait:{size or ' it has'} its slices on {places or 'no node any more'}."
        case JobState.STOPPING:
            return f"{job.job_id} does not wait: its runs are being stopped ({job.stop})."
        case _:
            return f"{job.job_id} has ended."


def _ahead(state: State, job: JobView, now: int, placed: set[JobId]) -> int:
    """Jobs of its queue that go before it, by the queue's own order; whose turn it is between queues, shares say."""
    order = order_in(state, job.spec.queue)

    def key(other: JobView) -> OrderKey:
        return head_of(other, order_of(state, other), order, state.settings, now)

    own = key(job)
    waiting = [other for name in state.waiting if (other := state.pool.jobs[name]).spec.queue == job.spec.queue]
    due = [state.pool.jobs[other[3]] for at, other in state.delayed if at <= now]
    others = (other for other in (*waiting, *due) if other.job_id not in placed)
    return sum(1 for other in others if other.spec.queue == job.spec.queue and key(other) < own)


def _could_start(state: State, demand: Demand) -> bool:
    """Whether all replicas would fit on the nodes that there are, were they empty and in use."""
    return could_hold(demand, state.rooms.values())


def _changes(round_: Round, job: JobView, shape: Shape, block: Block) -> Iterator[Change]:
    """One change at a time to what was asked, each tried on the pool as the round leaves it."""
    demand = shape.demand
    if block.is_frozen or block.is_cordoned:
        return
    if block.over_quota:
        # A queue that nobody announced has no limits.
        open_shape = Shape(QueueId(""), demand)
        names = ", ".join(block.over_quota)
        whose = "queue_limit" if block.quota_of is None or tenant_of(block.quota_of) is None else "tenant_limit"
        yield _tried(round_, job, open_shape, (whose, names, "a higher limit"))
    for name, asked, instead, other in chain(_without(demand), _smaller(demand, block)):
        yield _tried(round_, job, Shape(shape.queue, other, limited=shape.limited), (name, asked, instead))


def _without(demand: Demand) -> Iterator[tuple[str, str, str, Demand]]:
    replace = msgspec.structs.replace
    if demand.models:
        yield "models", ", ".join(demand.models), "any model", replace(demand, models=())
    if demand.mode is not None:
        yield "mode", demand.mode, "any mode", replace(demand, mode=None, is_whole=demand.devices > 1)
    if demand.mig_profile:
        other = replace(demand, mig_profile="", mode=None, compute_milli=1, memory_mib=1)
        yield "mig_profile", demand.mig_profile, "the smallest share in any mode", other
    if demand.is_together:
        yield "gang.required", f"one {demand.topology}", "preferred", replace(demand, is_together=False)
    if demand.is_distinct:
        yield "device.distinct", "true", "false", replace(demand, is_distinct=False)
    if demand.avoid:
        yield "placement.avoid_nodes", ", ".join(demand.avoid), "no node", replace(demand, avoid=())
    if demand.where is not None:
        for name, asked, instead, where in _elsewhere(demand.where):
            yield name, asked, instead, replace(demand, where=where)
    if demand.cpu_milli:
        yield "cpu_milli", str(demand.cpu_milli), "0", replace(demand, cpu_milli=0)
    if demand.host_memory_mib:
        yield "host_memory_mib", str(demand.host_memory_mib), "0", replace(demand, host_memory_mib=0)


def _elsewhere(where: Where) -> Iterator[tuple[str, str, str, Where]]:
    """Each demand on nodes and devices dropped, one at a time."""
    replace = msgspec.structs.replace
    for name, value in where.required:
        rest = tuple(each for each in where.required if each[0] != name)
        yield f"placement.required.{name}", value, "any value", replace(where, required=rest)
    if where.vendor:
        yield "device.vendor", where.vendor, "any vendor", replace(where, vendor="")
    if where.min_arch:
        yield "device.min_arch", where.min_arch, "any", replace(where, min_arch="")
    versions = (
        ("device.min_compute_capability", where.min_capability, replace(where, min_capability=())),
        ("runtime.min_driver", where.min_driver, replace(where, min_driver=())),
        ("runtime.min_cuda", where.min_cuda, replace(where, min_cuda=())),
    )
    for name, version, other in versions:
        if version:
            yield name, ".".join(map(str, version)), "any", other
    if where.numa == "strict":
        yield "numa", "strict", "preferred", replace(where, numa="preferred")
    if where.is_linked:
        yield "device.linked", "true", "false", replace(where, is_linked=False)
    if where.encoders:
        yield "encoders", str(where.encoders), "0", replace(where, encoders=0)
    if where.pcie_mbps:
        yield "pcie_mbps", str(where.pcie_mbps), "0", replace(where, pcie_mbps=0)


def _smaller(demand: Demand, block: Block) -> Iterator[tuple[str, str, str, Demand]]:
    replace = msgspec.structs.replace
    if demand.replicas > 1:
        fewer = max(1, block.replicas_fit)
        yield "replicas", str(demand.replicas), str(fewer), replace(demand, replicas=fewer)
    if demand.devices > 1:
        fewer = demand.devices // 2
        yield "devices", str(demand.devices), str(fewer), replace(demand, devices=fewer)
    if demand.devices == 1 and demand.compute_milli > 1:
        half = demand.compute_milli // 2
        other = replace(demand, compute_milli=half, is_whole=False)
        yield "compute_milli", str(demand.compute_milli), str(half), other
    if demand.devices == 1 and demand.memory_mib > 1:
        half = demand.memory_mib // 2
        yield "memory_mib", str(demand.memory_mib), str(half), replace(demand, memory_mib=half)


def _tried(round_: Round, job: JobView, shape: Shape, what: tuple[str, str, str]) -> Change:
    name, asked, instead = what
    starts_now = round_.would_take(shape, job)
    return Change(
        constraint=name,
        asked=asked,
        instead=instead,
        starts_now=starts_now,
        could_start=starts_now or _could_start(round_.state, shape.demand),
    )


def _when(found: Estimate, now: int) -> str:
    if not found.low_at and not found.high_at:
        return "When it may start, nobody can say: the runs in its way have no time limit, and too few like them ended."
    low = f"in {_span(found.low_at - now)} at the soonest" if found.low_at - now >= S else "at any moment"
    high = f"in {_span(found.high_at - now)} at the latest" if found.high_at else "nobody can say when at the latest"
    return f"It may start {low}, and {high} (by {found.basis})."


def _span(ns: int) -> str:
    seconds = max(0, ns) // S
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h {seconds % 3600 // 60} min"


def _text(
    job: JobView, reason: Reason, waited: int, ahead: int, changes: tuple[Change, ...], *, could_start: bool
) -> str:
    asked = ", ".join(f"{name} {amount}" for name, amount in reason.requested.items())
    if job.spec.mig_profile:
        asked += f", a MIG instance {job.spec.mig_profile}"
    parts = [
        f"{job.job_id} has waited {waited} s with {ahead} before it, and asks for {asked} ({reason.code}).",
        reason.hint,
    ]
    if reason.blocking_ids:
        parts.append(f"In its way: {', '.join(reason.blocking_ids)}.")
    if reason.nodes:
        parts.append("Nodes: " + ", ".join(f"{count} {why_out}" for why_out, count in reason.nodes.items()) + ".")
    if not could_start:
        parts.append("As it asks, it would not start in an empty pool either.")
    now = [change for change in changes if change.starts_now]
    if now:
        parts.append(
            "It would start now with "
            + ", or ".join(f"{change.constraint} {change.instead} (not {change.asked})" for change in now)
            + "."
        )
    elif not could_start and (later := [change for change in changes if change.could_start]):
        parts.append("It could start later with " + ", or ".join(f"{c.constraint} {c.instead}" for c in later) + ".")
    return " ".join(parts)
