"""What a wish that is only tried would come to, in words: from the fact that would have answered it.

The decision itself is `core`'s, made in earnest and thrown away; so a dry run can't say other than the wish would get.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum, unique

from msgspec import Struct

from apportion.admission.refusals import bounded
from apportion.admission.state import Asked
from apportion.contracts import events as ev
from apportion.contracts.causes import StopCause, Verdict
from apportion.contracts.ids import JobId, QueueId
from apportion.pool import quota
from apportion.pool.quota import QueueView
from apportion.pool.state import JobState, JobView, grace_s_of


@unique
class Holder(StrEnum):
    """Who keeps a job from being placed."""

    TENANT = "tenant"
    OPERATOR = "operator"


class Seen(Struct, frozen=True, kw_only=True):
    """A job as the wishes before this one leave it."""

    job_id: JobId
    spec: ev.JobSpec
    state: JobState = JobState.QUEUED
    stop: StopCause | None = None
    held_by: Holder | None = None
    stilled_by: Holder | None = None
    """Who suspended it."""
    view: JobView | None = None
    """As it was folded; None where it was admitted by this very decision."""


def judgement(asked: Asked, fact: ev.Fact, before: Seen | None, queues: Mapping[QueueId, QueueView]) -> ev.WishJudged:
    """The answer to a dry run. ``fact`` would have answered the wish, and found the job as ``before`` says."""
    if isinstance(fact, ev.JobRejected | ev.WishRejected):
        return ev.WishJudged(
            tenant=asked.tenant,
            answers=asked.seq,
            wish_id=asked.event_id,
            wish_type=bounded(asked.subject_type),
            verdict=Verdict.REJECTED,
            fact=type(fact).__name__,
            code=fact.code,
            field=fact.field,
            expected=fact.expected,
            found=fact.found,
            message=fact.message,
            job_id=fact.job_id if isinstance(fact, ev.JobRejected) else None,
            caused_by=asked.event_id,
        )
    job_id: JobId | None = None
    spec: ev.JobSpec | None = None
    sized: ev.Sized | None = None
    match fact:
        case ev.JobAdmitted():
            # A job without a name is named after its wish, and this wish makes none.
            is_named = isinstance(asked.wish, ev.JobRequested) and asked.wish.job_id is not None
            job_id = fact.job_id if is_named else None
            spec, sized = fact.spec, fact.sized
        case ev.JobDuplicate():
            job_id = fact.original_job_id
        case _:
            job_id = getattr(fact, "job_id", None)
    return ev.WishJudged(
        tenant=asked.tenant,
        answers=asked.seq,
        wish_id=asked.event_id,
        wish_type=bounded(asked.subject_type),
        verdict=Verdict.ACCEPTED,
        fact=type(fact).__name__,
        would=tuple(_sentences(fact, before, queues)),
        job_id=job_id,
        spec=spec,
        sized=sized,
        caused_by=asked.event_id,
    )


def _sentences(fact: ev.Fact, before: Seen | None, queues: Mapping[QueueId, QueueView]) -> Iterator[str]:
    """What would follow."""
    match fact:
        case ev.JobAdmitted():
            yield f"It is admitted to queue {fact.spec.queue}, and waits for {_share(fact.spec)}."
            if fact.waits_for:
                yield f"It is placed once {' and '.join(fact.waits_for)} ended as it asked."
            if fact.advice is not None:
                yield f"Advice: {fact.advice.text}; {fact.advice.suggested_mib} MiB would do."
            for queue in quota.lineage(queues, fact.spec.queue):
                yield from _limits(queue, is_own=queue.queue_id == fact.spec.queue)
        case ev.JobDuplicate():
            yield f"Nothing new: it repeats wish {fact.first_wish}, which made {fact.original_job_id}."
        case ev.QueueUpserted():
            yield from _queue(fact, queues.get(fact.queue))
        case ev.ReservationAdmitted():
            yield f"{fact.nodes} node(s) are kept for {fact.for_tenant}: the placer says which."
        case ev.ReservationCancelled():
            yield "Nothing is kept under that name any more."
        case ev.PolicyUpserted():
            whose = "the pool" if fact.for_tenant is None else fact.for_tenant
            yield f"It takes the place of what goes for {whose} now; jobs that were admitted stay as they are."
        case ev.JobCancelled():
            yield "It ends at once: nothing of it runs."
        case ev.JobStopping():
            yield f"{_runs(before)} told to stop, within a grace of {_grace(before, fact.cause)} s."
            if fact.cause is StopCause.CANCELLED or not fact.requeue:
                yield "Then the job ends as cancelled."
            else:
                yield "Then the job waits for slices again; no retry is spent."
                if before is not None and before.held_by is not None:
                    yield "It is held, so it isn't placed until it is released."
        case ev.JobHeld() if _is_queued(before):
            yield "It isn't placed until it is released."
        case ev.JobHeld():
            yield "Its runs go on; once it waits again, it isn't placed until it is released."
        case ev.JobReleased() if _is_queued(before):
            yield "It may be placed again."
        case ev.JobReleased():
            yield "Its runs go on; once it waits again, it may be placed."
        case ev.JobSuspended():
            yield f"{_runs(before)} told to stand still, and keeps its slices; its time limit goes on."
        case ev.JobResumed():
            yield "Its runs go on."
        case ev.JobCheckpointing():
            yield f"{_runs(before)} told to checkpoint, and said to have done so, or not, within its grace."
        case ev.JobReprioritized():
            yield f"Its priority goes from {fact.before} to {fact.priority}."
            if not _is_queued(before):
                yield "Its runs go on; it waits with the new one once it waits again."
        case ev.JobResized():
            yield from _resized(fact, before)
        case _:
            return


def _resized(fact: ev.JobResized, before: Seen | None) -> Iterator[str]:
    if (fact.compute_milli, fact.memory_mib) == (fact.compute_milli_before, fact.memory_mib_before):
        yield "It has that size already: nothing changes."
        return
    old = _amount(fact.compute_milli_before, fact.memory_mib_before)
    yield f"Its share of each device goes from {old} to {_amount(fact.compute_milli, fact.memory_mib)}."
    if not _is_queued(before):
        yield f"{_runs(before)} told to stop, within a grace of {_grace(before, StopCause.RESIZED)} s."
        yield "Then the job waits for slices of the new size; no retry is spent."


def _queue(fact: ev.QueueUpserted, queue: QueueView | None) -> Iterator[str]:
    if queue is None:
        yield f"Queue {fact.queue} is new, for {', '.join(fact.tenants)}."
        return
    changes = []
    if fact.tenants != queue.tenants:
        changes.append(f"Its tenants go from {', '.join(queue.tenants)} to {', '.join(fact.tenants)}.")
    for kind, before, after in (
        ("limit", queue.limits, quota.limits_of(fact)),
        ("guaranteed", queue.guaranteed, quota.guaranteed_of(fact)),
    ):
        changes += [
            f"Its {kind}_{name} goes from {_said(before.get(name))} to {_said(after.get(name))}."
            for name in dict.fromkeys((*before, *after))
            if before.get(name) != after.get(name)
        ]
    for name in ("parent", "weight", "order", "is_fair", "reclaim", "is_cordoned"):
        old, new = getattr(queue, name), getattr(fact, name)
        if old != new:
            changes.append(f"Its {name} goes from {_said(old)} to {_said(new)}.")
    if queue.told.on_lowered is not fact.on_lowered:
        changes.append(f"Its on_lowered goes from {queue.told.on_lowered} to {fact.on_lowered}.")
    weights = quota.weights_of(fact)
    changes += [
        f"Its weight of {name} goes from {queue.weights.get(name, queue.weight)} to {weights.get(name, fact.weight)}."
        for name in dict.fromkeys((*queue.weights, *weights))
        if queue.weights.get(name) != weights.get(name)
    ]
    yield from changes or ["It is so already: nothing changes."]
    if fact.note:
        yield fact.note


def _said(value: str | int | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _limits(queue: QueueView, *, is_own: bool) -> Iterator[str]:
    """How full the queue is, where it has limits."""
    which = "the queue" if is_own else f"queue {queue.queue_id}, which is above it,"
    for name, unit in ((quota.COMPUTE, "milli-GPU"), (quota.MEMORY, "MiB of device memory")):
        if name in queue.limits:
            yield f"Runs of {which} hold {queue.used.get(name, 0)} of {queue.limits[name]} {unit} now."
    if queue.is_cordoned:
        yield f"Nothing of {which} is placed now: it is cordoned."


def _is_queued(job: Seen | None) -> bool:
    return job is None or job.state is JobState.QUEUED


def _runs(job: Seen | None) -> str:
    live = 0 if job is None or job.view is None else sum(1 for run in job.view.current_runs() if run.holds)
    return "1 run is" if live == 1 else f"{live} runs are"


def _grace(job: Seen | None, cause: StopCause) -> int:
    return 0 if job is None else grace_s_of(job.spec, cause)


def _share(spec: ev.JobSpec) -> str:
    what = "no device" if not spec.devices else _amount(spec.compute_milli, spec.memory_mib)
    if spec.devices:
        what += " of a device" if spec.devices == 1 else f" of each of {spec.devices} devices on one node"
    return f"{spec.replicas} replicas at once, each with {what}" if spec.replicas > 1 else what


def _amount(compute_milli: int, memory_mib: int) -> str:
    return f"{compute_milli} milli-GPU and {f'{memory_mib} MiB' if memory_mib else 'all memory'}"
