"""May this job in, and how does it end? Admission's decisions, pure and in the order in which wishes came.

Every wish that is admission's to answer gets exactly one fact that names it. Then jobs whose runs or hours call for it
go on or end (`lifecycle`). Where a job runs is the placer's decision, and how the agents'.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Final

from msgspec.structs import replace

from apportion.admission import booking, dry_run, learned, lifecycle, rates, tree, validate
from apportion.admission.dry_run import Holder, Seen
from apportion.admission.refusals import Refused, bounded, refusal_of
from apportion.admission.remembered import CODES
from apportion.admission.state import (
    CONFIG_NAMES,
    POOL,
    WISHES_PER_ROUND,
    Asked,
    State,
    evolve,
    initial,
    job_of,
    looked_at,
    position,
    profile_of,
    restore,
    snapshot,
)
from apportion.contracts import events as ev
from apportion.contracts.causes import PUT_OFF, OnLowered, Refusal, StopCause, Verdict
from apportion.contracts.cloudevents import NOTES
from apportion.contracts.ids import JobId, QueueId, TenantId, is_name, tenant_of_job
from apportion.pool import quota
from apportion.pool.state import JobState, JobView, Pool, is_met

__all__ = ["POLICY", "State", "decide", "evolve", "initial", "position", "restore", "snapshot", "wake_at"]

FACTS_PER_ROUND: Final = 900
"""Facts of one decision; the bus stores at most 1,000 as one batch."""

REFUSED_PER_ROUND: Final = 300
"""Undecodable wishes that one decision refuses, beside the wishes that it answers."""

_TENANTS_OWN: Final = (
    "limit_compute_milli",
    "limit_memory_mib",
    "limit_cpu_milli",
    "limit_jobs",
    "limit_model_milli",
)
"""Fields of a policy that go for one tenant."""

RULES: Final = 6
"""Goes up whenever the same history would lead to another decision."""


OfJob = (
    ev.JobCancelRequested
    | ev.JobHoldRequested
    | ev.JobReleaseRequested
    | ev.JobReprioritizeRequested
    | ev.JobPreemptRequested
    | ev.JobResizeRequested
    | ev.JobSuspendRequested
    | ev.JobResumeRequested
    | ev.JobCheckpointRequested
)
"""Wishes about a job that there is."""


def _policy() -> str:
    said = repr(
        (
            RULES,
            CONFIG_NAMES,
            WISHES_PER_ROUND,
            FACTS_PER_ROUND,
            REFUSED_PER_ROUND,
            lifecycle.BACKOFF_S_MAX,
            validate.SIZING,
            validate.BUFFER_PCT,
            learned.RULES,
            validate.REPLICAS_MAX,
            CODES,
            validate.RESERVED_ENV,
            validate.RESERVED_ENV_PREFIXES,
            sorted(validate.SERVICE_CLASSES.items()),
            sorted((str(level), modes) for level, modes in validate.MODES_OF_LEVEL.items()),
            sorted((str(kind), modes) for kind, modes in validate.DEFAULT_MODES.items()),
            sorted(
                (str(kind), share.compute_milli, share.memory_mib) for kind, share in validate.DEFAULT_SHARES.items()
            ),
        )
    )
    return f"admission@{RULES}#{hashlib.sha256(said.encode()).hexdigest()[:12]}"


POLICY: Final = _policy()


def decide(state: State, now: int) -> list[ev.Fact]:
    """Answers to the oldest wishes, then what follows for jobs; silent once that was folded.

    At most ``FACTS_PER_ROUND`` facts: what is left is said by the next decision.
    """
    round_ = _Round(state, now)
    judged = refused = 0
    for asked in state.inbox:
        # What can't be read is refused beside the others: it takes no good wish's place in the round.
        if asked.wish is None:
            refused += 1
        else:
            judged += 1
        if judged > state.wishes_per_round or refused > REFUSED_PER_ROUND or round_.is_full():
            break
        if not round_.answer(asked):
            break
    round_.go_on()
    return round_.facts


def wake_at(state: State, now: int) -> int | None:
    """The earliest deadline or time limit of a job; None where no job has one to come."""
    del now  # what is due already is due now, and the instant says so
    return state.next_timer()


class _Round:
    """One decision in the making: what the facts stated so far will change, laid over a state that stays as it is."""

    def __init__(self, state: State, now: int) -> None:
        self.facts: list[ev.Fact] = []
        self._state = state
        self._now = now
        self._answers: dict[int, ev.JobAdmitted | ev.JobRejected | ev.JobDuplicate] = {}
        self._new_jobs: dict[JobId, ev.JobAdmitted] = {}
        self._ended: dict[JobId, str] = {}
        self._changed: dict[JobId, Seen] = {}
        """Jobs as the wishes answered so far leave them."""
        self._let_in: Counter[TenantId] = Counter()
        """Jobs that this round has admitted, of each tenant, and of the pool under POOL."""
        self._looked: Counter[TenantId] = Counter()
        """Wishes that this round has looked at, by whose bucket they took from."""
        self._settled: dict[int, int] = {}
        """First wishes that were put off, and those of this round that were answered for good in their place."""
        self._touched: set[JobId] = set()
        """Jobs about which this round has stated something; what else follows waits for the next."""

    def is_full(self) -> bool:
        """True where the answer to one more wish might not fit: it may bring with it what was due for its job."""
        return len(self.facts) + 2 > FACTS_PER_ROUND

    # ------------------------------------------------------------------------------------------- wishes

    def answer(self, asked: Asked) -> bool:
        """State the answer to a wish; False where the wishes behind it have to wait for that to be folded."""
        if not self._state.bounds_wishes or ev.is_operator(asked.tenant):
            return self._answer(asked)
        if wait_s := self._wait_s(asked.tenant):
            self._put_off_unseen(asked, wait_s)
            return True
        before = len(self.facts)
        is_last = not self._answer(asked)
        for fact in self.facts[before:]:
            if (tenant := looked_at(fact)) is not None:
                self._looked[self._state.pays(tenant)] += 1
        return not is_last

    def _wait_s(self, tenant: TenantId) -> int:
        """Seconds until a wish of the tenant's is looked at again; 0 for now."""
        whose = self._state.pays(tenant)
        limits = self._state.rules_of(whose).wishes
        flow = self._state.kept.flows.get(whose)
        full_at = 0 if flow is None else flow.wishes_full_at
        return rates.wait_s(rates.taken(full_at, limits, self._now, self._looked[whose]), limits, self._now)

    def _put_off_unseen(self, asked: Asked, wait_s: int) -> None:
        """Answer a wish that came too fast, before anything that it says is looked at."""
        limits = self._state.rules_of(self._state.pays(asked.tenant)).wishes
        refused = Refused(
            code=Refusal.RATE_LIMITED,
            expected=bounded(
                f"at most {limits.rate_per_min} wishes a minute of {asked.tenant}, {limits.depth} at once, "
                "whatever they ask"
            ),
            found="more than that",
            hint=f"Send it again after {wait_s} s: until then nothing of it is looked at.",
        )
        if asked.wish is not None and asked.wish.dry_run:
            self.facts.append(
                ev.WishJudged(
                    tenant=asked.tenant,
                    answers=asked.seq,
                    wish_id=asked.event_id,
                    wish_type=bounded(asked.subject_type),
                    verdict=Verdict.REJECTED,
                    fact=ev.WishRejected.__name__,
                    code=refused.code,
                    expected=refused.expected,
                    found=refused.found,
                    message=refused.message(),
                    caused_by=asked.event_id,
                )
            )
        elif asked.subject_type == ev.JobRequested.__name__:
            self._reject(asked, refused, None, retry_after_s=wait_s)
        else:
            self._refuse(asked, refused, retry_after_s=wait_s)

    def _answer(self, asked: Asked) -> bool:
        match asked.wish:
            case None:
                self._refuse_undecodable(asked)
            case _ if asked.wish.dry_run:
                self._answer_dry_run(asked, asked.wish)
            case ev.JobRequested():
                self._answer_request(asked, asked.wish)
            case ev.QueueUpsertRequested():
                # Whether the next wish's tenant is known may depend on this one.
                return not self._answer_queue(asked, asked.wish)
            case ev.ReservationRequested() | ev.ReservationCancelRequested():
                # Whether the next one's name is taken may depend on this one.
                return not self._answer_reservation(asked, asked.wish)
            case ev.PolicyUpsertRequested():
                return not self._answer_policy(asked, asked.wish)
            case _:
                self._answer_job_wish(asked, asked.wish)
        return True

    def _answer_dry_run(self, asked: Asked, wish: ev.JobWish) -> None:
        """State what the wish would be answered: it is answered in earnest, by a round that nobody hears of."""
        trial = _Round(self._state, self._now)
        trial._answers = self._answers.copy()
        trial._new_jobs = self._new_jobs.copy()
        trial._ended = self._ended.copy()
        trial._changed = self._changed.copy()
        trial._touched = self._touched.copy()
        trial._let_in = self._let_in.copy()
        trial._settled = self._settled.copy()
        trial.answer(replace(asked, wish=replace(wish, dry_run=False)))
        # What is due for the job anyway may come before it.
        fact = next(fact for fact in trial.facts if getattr(fact, "answers", 0) == asked.seq)
        job_id = getattr(fact, "job_id", None)
        before = None if job_id is None else self._seen(job_id)
        self.facts.append(dry_run.judgement(asked, fact, before, self._state.pool.queues))

    def _refuse_undecodable(self, asked: Asked) -> None:
        undecodable = asked.undecodable
        assert undecodable is not None, f"wish {asked.seq} is neither a wish nor undecodable"
        if asked.subject_type == ev.JobRequested.__name__:
            self._reject(asked, refusal_of(undecodable), undecodable.job_id)
        else:
            self._refuse(asked, refusal_of(undecodable))

    def _answer_request(self, asked: Asked, request: ev.JobRequested) -> None:
        first = self._first_of(asked)
        if first is not None and self._answer_repeat(asked, request, *first):
            return
        first_wish = 0 if first is None else first[0]
        admissible = self._admissible(asked, request)
        if isinstance(admissible, Refused):
            self._reject(asked, admissible, request.job_id, first_wish=first_wish)
            return
        spec, size = admissible
        followed = self._followed(asked, request)
        if isinstance(followed, Refused):
            self._reject(asked, followed, request.job_id, first_wish=first_wish)
            return
        depends_on, waits_for = followed
        if depends_on:
            spec = replace(spec, depends_on=depends_on)
        job_id = self._job_id(asked, request)
        taken = self._taken_by(job_id)
        if taken:
            refused = Refused(
                code=Refusal.JOB_ID_TAKEN,
                field="job_id",
                expected="a name that none of the tenant's jobs had before",
                found=f"{request.job_id}, {taken}",
                hint="Choose another name, or leave it out and get one.",
            )
            self._reject(asked, refused, request.job_id, first_wish=first_wish)
            return
        if (put_off := self._put_off(asked.tenant)) is not None:
            # Last: whoever waits only to be told that the request is wrong has waited for nothing.
            refused, retry_after_s = put_off
            self._reject(asked, refused, request.job_id, first_wish=first_wish, retry_after_s=retry_after_s)
            return
        queue = self._state.pool.queues[spec.queue]
        admitted = ev.JobAdmitted(
            job_id=job_id,
            tenant=asked.tenant,
            answers=asked.seq,
            wish_id=asked.event_id,
            spec=spec,
            request_digest="" if asked.identity is None else asked.identity.digest,
            idempotency_key=request.idempotency_key or "",
            quota_used_milli=queue.used_compute_milli,
            quota_used_mib=queue.used_memory_mib,
            external_uri=request.external_uri or "",
            sized=size,
            advice=self._advice(asked.tenant, spec),
            first_wish=first_wish,
            waits_for=waits_for,
            note=NOTES.get(asked.ingress, ""),
            caused_by=asked.event_id,
        )
        self._answers[asked.seq] = admitted
        self._let_in[asked.tenant] += 1
        self._let_in[POOL] += 1
        if first_wish:
            self._settled[first_wish] = asked.seq
        self._new_jobs[job_id] = admitted
        self.facts.append(admitted)

    def _admissible(self, asked: Asked, request: ev.JobRequested) -> tuple[ev.JobSpec, ev.Sized | None] | Refused:
        tenant = asked.tenant
        expired = self._expired(asked)
        if expired is not None:
            return expired
        mine = self._state.queues_of.get(tenant)
        if mine is None:
            return Refused(
                code=Refusal.TENANT_UNKNOWN,
                expected="a tenant that a queue names",
                found=bounded(tenant),
                hint="Ask the pool's operator for a queue that names this tenant.",
            )
        if request.tenant is not None and request.tenant != tenant:
            return Refused(
                code=Refusal.TENANT_MISMATCH,
                field="tenant",
                expected=tenant,
                found=bounded(request.tenant),
                hint="Leave it out: the subject says whose the job is.",
            )
        if request.queue not in mine:
            return Refused(
                code=Refusal.QUEUE_NOT_FOUND,
                field="queue",
                expected=bounded("one of " + ", ".join(mine)) if mine else "a queue that no other is below",
                found=request.queue,
                hint=f"Name a queue that {tenant} may submit to.",
            )
        rules = self._state.rules_of(tenant)
        size = validate.sized(request, self._state.kept.learned, self._state.buffer_pct)
        if isinstance(size, Refused):
            return size
        spec = validate.job_spec(request, self._now, rules.defaults, size)
        if isinstance(spec, Refused):
            return spec
        return (
            _beyond_limits(spec, tenant, self._state.pool)
            or validate.not_offered(spec, self._state.offers)
            or validate.no_engine(spec, (node.labels for node in self._state.pool.nodes.values()))
            or (spec, size)
        )

    def _put_off(self, tenant: TenantId) -> tuple[Refused, int] | None:
        """Why the tenant's next job has to be asked for again, and after how many seconds; None where it may come."""
        state, now = self._state, self._now
        limits = state.rules_of(tenant).limits
        flow = state.kept.flows.get(tenant)
        full_at = rates.taken(0 if flow is None else flow.full_at, limits, now, self._let_in[tenant])
        if wait_s := rates.wait_s(full_at, limits, now):
            refused = Refused(
                code=Refusal.RATE_LIMITED,
                expected=f"at most {limits.rate_per_min} jobs a minute of {tenant}, {limits.depth} at once",
                found="more than that",
                hint=f"Send it again after {wait_s} s; then it is looked at anew, under the same idempotency key too.",
            )
            return refused, wait_s
        for whose, most, name in (
            (tenant, limits.pending_max, bounded(f"of {tenant}")),
            (POOL, state.pool_pending_max, "of all tenants"),
        ):
            waiting = state.pending[whose] + self._let_in[whose]
            if most and waiting >= most:
                wait_s = rates.room_s(state.kept.flows.get(whose), waiting + 1 - most, now)
                refused = Refused(
                    code=Refusal.BUSY,
                    expected=f"at most {most} jobs {name} that wait",
                    found=f"{waiting}",
                    hint=f"Send it again after {wait_s} s; then it is looked at anew.",
                )
                return refused, wait_s
        return None

    def _advice(self, tenant: TenantId, spec: ev.JobSpec) -> ev.MemoryAdvice | None:
        peaks = self._state.kept.learned.peaks_mib
        found = peaks.get(profile_of(tenant, spec.command)) if peaks and spec.memory_mib else None
        advice = None if found is None else learned.advice(spec.memory_mib, found)
        if advice is None:
            return None
        return ev.MemoryAdvice(
            asked_mib=advice.asked_mib,
            peak_mib_max=advice.peak_mib_max,
            runs=advice.runs,
            suggested_mib=advice.suggested_mib,
            text=advice.text,
        )

    def _followed(
        self, asked: Asked, request: ev.JobRequested
    ) -> tuple[tuple[ev.DependsOn, ...], tuple[JobId, ...]] | Refused:
        """The jobs that this one is to follow, and those of them that have not ended.

        They have to be there before it, so jobs can't wait for each other in a circle.
        """
        depends_on: dict[JobId, ev.DependsOn] = {}
        waits_for: list[JobId] = []
        for index, dependency in enumerate(request.depends_on):
            field = f"depends_on[{index}].job_id"
            job_id = JobId(f"{asked.tenant}/{dependency.job_id}")
            if dependency.job_id == request.job_id or job_id in depends_on:
                return Refused(
                    code=Refusal.FIELD_CONFLICT,
                    field=field,
                    expected="another job, named once",
                    found=dependency.job_id,
                )
            if not self._taken_by(job_id):
                return Refused(
                    code=Refusal.JOB_NOT_FOUND,
                    field=field,
                    expected="a job of the tenant's that was admitted before",
                    found=dependency.job_id,
                    hint="Ask for the jobs that go first before those that follow them.",
                )
            end = self._ended.get(job_id) or self._state.kept.remembered.end_of(job_id)
            if end and not is_met(dependency.condition, end):
                return Refused(
                    code=Refusal.DEPENDENCY_FAILED,
                    field=f"depends_on[{index}]",
                    expected=f"{dependency.job_id} {dependency.condition}",
                    found=f"{job_id}, which ended by {end}",
                    hint="It can't end otherwise any more: leave it out, or name the job that took its place.",
                )
            depends_on[job_id] = ev.DependsOn(job_id=job_id, condition=dependency.condition)
            if not end:
                waits_for.append(job_id)
        return tuple(depends_on.values()), tuple(waits_for)

    def _job_id(self, asked: Asked, request: ev.JobRequested) -> JobId:
        names = _names(asked.tenant, request, asked.seq)
        if request.job_id is not None:
            return next(names)
        # Somebody may have chosen that name for a job of their own.
        return next(job_id for job_id in names if not self._taken_by(job_id))

    def _taken_by(self, job_id: JobId) -> str:
        """Whose id it is already; empty where it is free."""
        if job_id in self._new_jobs:
            return f"which wish {self._new_jobs[job_id].answers} asked for"
        seq = self._state.kept.remembered.wish_of(job_id)
        if seq is None:
            return ""
        end = self._state.kept.remembered.end_of(job_id)
        return f"which wish {seq} asked for" + (f" ({end})" if end else "")

    def _first_of(self, asked: Asked) -> tuple[int, str] | None:
        """The earliest job request with the same identity, and which field that is; None where this is it."""
        identity = asked.identity
        assert identity is not None, f"wish {asked.seq} asks for a job and has no identity"
        for mark, field in ((identity.by_event, "id"), (identity.by_key, "idempotency_key")):
            # A dry run has no identity to be found by, and requests behind it are no earlier ones.
            first = self._state.kept.remembered.first_with(mark) if mark else None
            if first is not None and first < asked.seq:
                return first, field
        return None

    def _answer_repeat(self, asked: Asked, request: ev.JobRequested, first: int, field: str) -> bool:
        """State what the first was answered; False where that was put off, and this one is to be looked at."""
        identity = asked.identity
        assert identity is not None, f"wish {asked.seq} repeats another and has no identity"
        if not self._state.kept.remembered.asked_the_same(first, identity):
            refused = Refused(
                code=Refusal.IDEMPOTENCY_CONFLICT,
                field=field,
                expected=f"the body of wish {first}, which had the same one",
                found="another body",
            )
            self._reject(asked, refused, request.job_id)
            return True
        settled = self._settled.get(first) or self._state.kept.remembered.settled_by(first)
        answer = self._answer_of(settled, asked.tenant, request)
        if isinstance(answer, Refused) and answer.code in PUT_OFF:
            return False
        if isinstance(answer, Refused):
            # The first answer stands, whatever has changed since: a repeat must be safe to send at any time.
            self._reject(asked, answer, request.job_id, message=answer.hint)
            return True
        job_id, first_wish = answer
        duplicate = ev.JobDuplicate(
            tenant=asked.tenant,
            answers=asked.seq,
            wish_id=asked.event_id,
            original_job_id=job_id,
            first_wish=first_wish,
            caused_by=asked.event_id,
        )
        self._answers[asked.seq] = duplicate
        self.facts.append(duplicate)
        return True

    def _answer_of(self, seq: int, tenant: TenantId, request: ev.JobRequested) -> tuple[JobId, int] | Refused:
        """What a job request was answered, of which this one is a repeat: its job and its wish, or the refusal."""
        match self._answers.get(seq):
            case ev.JobAdmitted(job_id=job_id):
                return job_id, seq
            case ev.JobDuplicate(original_job_id=job_id, first_wish=first):
                return job_id, first
            case ev.JobRejected() as rejected:
                return Refused(
                    code=rejected.code,
                    field=rejected.field,
                    expected=rejected.expected,
                    found=rejected.found,
                    hint=rejected.message,
                )
            case None:
                pass
        remembered = self._state.kept.remembered
        if (refused := remembered.refusal_of(seq)) is not None:
            return refused
        # Wishes are answered in order, so an earlier one has its answer: what wasn't refused is a job, or repeats one.
        first = remembered.repeat_of(seq) or seq
        for job_id in _names(tenant, request, first):
            wish = remembered.wish_of(job_id)
            assert wish is not None, f"wish {first} was answered, and neither refused nor made a job"
            if wish == first:
                return job_id, first
        raise AssertionError(f"wish {first} made a job of another name")

    def _answer_job_wish(self, asked: Asked, wish: OfJob) -> None:
        job = self._asked_job(asked, wish.job_id)
        if isinstance(job, Refused):
            self._refuse(asked, job)
            return
        match wish:
            case ev.JobCancelRequested():
                self._cancel(asked, wish, job)
            case ev.JobHoldRequested():
                self._hold(asked, wish, job)
            case ev.JobReleaseRequested():
                self._release(asked, wish, job)
            case ev.JobReprioritizeRequested():
                self._reprioritize(asked, wish, job)
            case ev.JobPreemptRequested():
                self._preempt(asked, wish, job)
            case ev.JobResizeRequested():
                self._resize(asked, wish, job)
            case ev.JobSuspendRequested():
                self._suspend(asked, wish, job)
            case ev.JobResumeRequested():
                self._resume(asked, wish, job)
            case ev.JobCheckpointRequested():
                self._checkpoint(asked, wish, job)

    def _asked_job(self, asked: Asked, name: str) -> Seen | Refused:
        """The job that a wish is about, where it has not ended. States its end where that was due already."""
        if (expired := self._expired(asked)) is not None:
            return expired
        job_id = JobId(name)
        if ev.is_operator(asked.tenant):
            if "/" not in name:
                return Refused(
                    code=Refusal.FIELD_INVALID,
                    field="job_id",
                    expected="<tenant>/<name>",
                    found=name,
                    hint="An operator names the job's tenant as well.",
                )
        elif not name.startswith(f"{asked.tenant}/"):
            job_id = JobId(f"{asked.tenant}/{name}")
        job = self._seen(job_id)
        if job is None:
            return self._no_such_job(job_id)
        fact = self._due_fact(job)
        if isinstance(fact, ev.TERMINAL):
            # It had come to its end before the wish was looked at: that end stands.
            self._state_end(job_id, fact)
            return self._no_such_job(job_id)
        return job

    def _seen(self, job_id: JobId) -> Seen | None:
        """The job as the facts of this round leave it; None where there is none, or it has ended."""
        if job_id in self._ended:
            return None
        if (seen := self._changed.get(job_id)) is not None:
            return seen
        if (admitted := self._new_jobs.get(job_id)) is not None:
            return Seen(job_id=job_id, spec=admitted.spec)
        job = job_of(self._state, job_id)
        if job is None:
            return None
        held_by = None if job.hold is None else Holder.OPERATOR if job.hold.by_operator else Holder.TENANT
        stilled_by = None if job.suspend is None else Holder.OPERATOR if job.suspend.by_operator else Holder.TENANT
        return Seen(
            job_id=job_id,
            spec=job.spec,
            state=job.state,
            stop=job.stop,
            held_by=held_by,
            stilled_by=stilled_by,
            view=job,
        )

    def _due_fact(self, job: Seen) -> ev.Fact | None:
        """What follows for the job whatever was wished, where this round has not stated it."""
        return None if job.view is None or job.job_id in self._touched else self._next_fact(job.view)

    def _cancel(self, asked: Asked, wish: ev.JobCancelRequested, job: Seen) -> None:
        if job.view is not None and not lifecycle.holds_nothing(job.view):
            self._stop(asked, job, StopCause.CANCELLED, wish.reason)
            return
        self._state_end(
            job.job_id,
            ev.JobCancelled(
                job_id=job.job_id,
                actor=_actor(asked),
                reason=wish.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            ),
        )

    def _stop(self, asked: Asked, job: Seen, cause: StopCause, reason: str, *, requeue: bool = True) -> None:
        assert job.view is not None, "a job that is new has nothing to stop"
        self._touched.add(job.job_id)
        self._changed[job.job_id] = replace(job, state=JobState.STOPPING, stop=cause)
        self.facts.append(
            ev.JobStopping(
                job_id=job.job_id,
                attempt=job.view.attempt,
                cause=cause,
                actor=_actor(asked),
                reason=reason,
                answers=asked.seq,
                requeue=requeue,
                caused_by=asked.event_id,
            )
        )

    def _hold(self, asked: Asked, wish: ev.JobHoldRequested, job: Seen) -> None:
        by_operator = ev.is_operator(asked.tenant)
        if by_operator or job.held_by is None:
            holder = Holder.OPERATOR if by_operator else Holder.TENANT
            self._changed[job.job_id] = replace(job, held_by=holder)
        self.facts.append(
            ev.JobHeld(
                job_id=job.job_id,
                actor=_actor(asked),
                by_operator=by_operator,
                reason=wish.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        )

    def _release(self, asked: Asked, wish: ev.JobReleaseRequested, job: Seen) -> None:
        if job.held_by is None:
            self._refuse(asked, _not_in_state(job, "a job that is held", "which nobody holds"))
            return
        if job.held_by is Holder.OPERATOR and not ev.is_operator(asked.tenant):
            self._refuse(asked, _not_permitted(asked, "holds", "release"))
            return
        self._changed[job.job_id] = replace(job, held_by=None)
        self.facts.append(
            ev.JobReleased(
                job_id=job.job_id,
                actor=_actor(asked),
                reason=wish.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        )

    def _reprioritize(self, asked: Asked, wish: ev.JobReprioritizeRequested, job: Seen) -> None:
        self._changed[job.job_id] = replace(job, spec=replace(job.spec, priority=wish.priority))
        self.facts.append(
            ev.JobReprioritized(
                job_id=job.job_id,
                before=job.spec.priority,
                priority=wish.priority,
                actor=_actor(asked),
                reason=wish.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        )

    def _preempt(self, asked: Asked, wish: ev.JobPreemptRequested, job: Seen) -> None:
        refused = self._not_running(job, waits="which waits and has nothing to give back")
        if refused is None:
            self._stop(asked, job, StopCause.PREEMPTED, wish.reason, requeue=wish.requeue)
        else:
            self._refuse(asked, refused)

    def _not_running(self, job: Seen, *, waits: str, hint: str = "") -> Refused | None:
        """Why nothing can be asked of the job's runs, ``waits`` if it waits; None where they go on."""
        fact = self._due_fact(job)
        if fact is not None:
            # Its attempt was over before anybody wished for it: what that comes to isn't the wish's.
            self._touched.add(job.job_id)
            self.facts.append(fact)
        if (
            job.view is not None
            and job.state is JobState.RUNNING
            and fact is None
            and lifecycle.has_live_runs(job.view)
        ):
            return None
        found = {
            JobState.QUEUED: waits,
            JobState.RUNNING: "whose runs have ended, or are about to be stopped",
            JobState.STOPPING: f"whose runs are being stopped ({job.stop})",
        }[job.state]
        return replace(_not_in_state(job, "a job with runs that are placed or started", found), hint=hint)

    def _suspend(self, asked: Asked, wish: ev.JobSuspendRequested, job: Seen) -> None:
        refused = self._not_running(job, waits="which waits", hint="A job that waits is held instead.")
        if refused is not None:
            self._refuse(asked, refused)
            return
        by_operator = ev.is_operator(asked.tenant)
        if job.stilled_by is Holder.OPERATOR and not by_operator:
            self._refuse(asked, _not_in_state(job, "a job that goes on", "which the pool's operator suspended"))
            return
        self._changed[job.job_id] = replace(job, stilled_by=Holder.OPERATOR if by_operator else Holder.TENANT)
        self.facts.append(
            ev.JobSuspended(
                job_id=job.job_id,
                actor=_actor(asked),
                by_operator=by_operator,
                reason=wish.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        )

    def _resume(self, asked: Asked, wish: ev.JobResumeRequested, job: Seen) -> None:
        if job.stilled_by is None:
            refused = _not_in_state(job, "a job that is suspended", "which nobody suspended")
            if job.held_by is not None:
                refused = replace(refused, hint="It is held: release it.")
            self._refuse(asked, refused)
            return
        if job.stilled_by is Holder.OPERATOR and not ev.is_operator(asked.tenant):
            self._refuse(asked, _not_permitted(asked, "suspended", "resume"))
            return
        self._changed[job.job_id] = replace(job, stilled_by=None)
        self.facts.append(
            ev.JobResumed(
                job_id=job.job_id,
                actor=_actor(asked),
                reason=wish.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        )

    def _checkpoint(self, asked: Asked, wish: ev.JobCheckpointRequested, job: Seen) -> None:
        refused = None
        if job.spec.checkpoint is None:
            refused = Refused(
                code=Refusal.JOB_STATE,
                field="job_id",
                expected="a job that says how it checkpoints",
                found=f"{job.job_id}, without checkpoint",
                hint="Submit it with checkpoint.signal, and have it handle that signal.",
            )
        elif job.stilled_by is not None:
            refused = replace(
                _not_in_state(job, "a job that goes on", "which is suspended"), hint="Resume it first: it does nothing."
            )
        refused = refused or self._not_running(job, waits="which waits", hint="There is nothing to keep.")
        if refused is not None:
            self._refuse(asked, refused)
            return
        assert job.view is not None
        self.facts.append(
            ev.JobCheckpointing(
                job_id=job.job_id,
                attempt=job.view.attempt,
                actor=_actor(asked),
                reason=wish.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        )

    def _resize(self, asked: Asked, wish: ev.JobResizeRequested, job: Seen) -> None:
        spec = validate.resized(job.spec, wish.gpu_milli, wish.gpu_memory_mib)
        if isinstance(spec, ev.JobSpec):
            spec = _beyond_limits(spec, tenant_of_job(job.job_id), self._state.pool) or spec
        if isinstance(spec, Refused):
            self._refuse(asked, spec)
            return
        self._changed[job.job_id] = replace(job, spec=spec)
        self.facts.append(
            ev.JobResized(
                job_id=job.job_id,
                compute_milli=spec.compute_milli,
                memory_mib=spec.memory_mib,
                compute_milli_before=job.spec.compute_milli,
                memory_mib_before=job.spec.memory_mib,
                actor=_actor(asked),
                reason=wish.reason,
                answers=asked.seq,
                caused_by=asked.event_id,
            )
        )

    def _no_such_job(self, job_id: JobId) -> Refused:
        end = self._ended.get(job_id) or self._state.kept.remembered.end_of(job_id)
        if not end:
            return Refused(
                code=Refusal.JOB_NOT_FOUND,
                field="job_id",
                expected="a job that was admitted",
                found=job_id,
                hint="Check the name; `apportion jobs` lists them.",
            )
        return Refused(
            code=Refusal.JOB_TERMINAL,
            field="job_id",
            expected="a job that has not ended",
            found=f"{job_id}: {end}",
            hint="It has ended, and nothing about it can be changed.",
        )

    def _answer_queue(self, asked: Asked, wish: ev.QueueUpsertRequested) -> bool:
        """True where a queue has changed."""
        refused = self._expired(asked)
        if not ev.is_operator(asked.tenant):
            refused = _operators_alone(asked, "Queues and limits are set by the pool's operator: ask them.")
        refused = refused or tree.refusal(self._state.pool.queues, wish)
        if refused is not None:
            self._refuse(asked, refused)
            return False
        self.facts.append(
            ev.QueueUpserted(
                queue=QueueId(wish.queue),
                tenants=tuple(TenantId(tenant) for tenant in dict.fromkeys(wish.tenants)),
                parent=None if wish.parent is None else QueueId(wish.parent),
                limit_compute_milli=wish.limit_compute_milli,
                limit_memory_mib=wish.limit_memory_mib,
                limit_cpu_milli=wish.limit_cpu_milli,
                limit_jobs=wish.limit_jobs,
                limit_model_milli=wish.limit_model_milli,
                guaranteed_compute_milli=wish.guaranteed_compute_milli,
                guaranteed_memory_mib=wish.guaranteed_memory_mib,
                guaranteed_cpu_milli=wish.guaranteed_cpu_milli,
                guaranteed_jobs=wish.guaranteed_jobs,
                guaranteed_model_milli=wish.guaranteed_model_milli,
                weight=wish.weight,
                weights=wish.weights,
                order=wish.order,
                is_fair=wish.is_fair,
                reclaim=wish.reclaim,
                is_cordoned=wish.is_cordoned,
                on_lowered=wish.on_lowered,
                answers=asked.seq,
                actor=_actor(asked),
                reason=wish.reason,
                note=tree.note(self._state.pool, wish),
                caused_by=asked.event_id,
            )
        )
        return True

    def _answer_reservation(self, asked: Asked, wish: ev.ReservationRequested | ev.ReservationCancelRequested) -> bool:
        """True where what is reserved has changed."""
        found: ev.Fact | Refused | None = self._expired(asked)
        if not ev.is_operator(asked.tenant):
            found = _operators_alone(asked, "Nodes are reserved by the pool's operator: ask them.")
        if found is None:
            found = booking.answer(self._state.pool.reservations, wish, asked, _actor(asked), self._now)
        if isinstance(found, Refused):
            self._refuse(asked, found)
            return False
        self.facts.append(found)
        return True

    def _answer_policy(self, asked: Asked, wish: ev.PolicyUpsertRequested) -> bool:
        """True where a policy has changed: what the wishes behind it are answered may depend on it."""
        refused = self._expired(asked)
        if not ev.is_operator(asked.tenant):
            refused = _operators_alone(asked, "Rates and defaults are set by the pool's operator: ask them.")
        for field in ("pool_pending_max", "buffer_pct", "defaults", "placement"):
            if refused is None and wish.for_tenant is not None and getattr(wish, field):
                refused = Refused(
                    code=Refusal.FIELD_CONFLICT,
                    field=field,
                    expected="nothing in a tenant's policy",
                    found=bounded(str(getattr(wish, field))),
                    hint="It goes for the whole pool: leave for_tenant out.",
                )
        for field in (*_TENANTS_OWN, *(("on_lowered",) if wish.on_lowered is not OnLowered.KEEP else ())):
            found = getattr(wish, field)
            if refused is None and wish.for_tenant is None and found is not None and found != {}:
                refused = Refused(
                    code=Refusal.FIELD_CONFLICT,
                    field=field,
                    expected="nothing in the pool's policy",
                    found=bounded(str(found)),
                    hint="It is a tenant's: name for_tenant; what a queue may hold is the queue's.",
                )
        for rate, burst in (("rate_per_min", wish.burst), ("wish_rate_per_min", wish.wish_burst)):
            if refused is None and burst and not getattr(wish, rate):
                refused = Refused(
                    code=Refusal.FIELD_MISSING,
                    field=rate,
                    expected="a rate beside burst" if rate == "rate_per_min" else "a rate beside wish_burst",
                    found="nothing",
                )
        if refused is not None:
            self._refuse(asked, refused)
            return False
        self.facts.append(
            ev.PolicyUpserted(
                for_tenant=None if wish.for_tenant is None else TenantId(wish.for_tenant),
                rate_per_min=wish.rate_per_min,
                burst=wish.burst,
                pending_max=wish.pending_max,
                wish_rate_per_min=wish.wish_rate_per_min,
                wish_burst=wish.wish_burst,
                isolation=wish.isolation,
                limit_compute_milli=wish.limit_compute_milli,
                limit_memory_mib=wish.limit_memory_mib,
                limit_cpu_milli=wish.limit_cpu_milli,
                limit_jobs=wish.limit_jobs,
                limit_model_milli=wish.limit_model_milli,
                on_lowered=wish.on_lowered,
                pool_pending_max=wish.pool_pending_max,
                buffer_pct=wish.buffer_pct,
                defaults=wish.defaults,
                placement=wish.placement,
                answers=asked.seq,
                actor=_actor(asked),
                reason=wish.reason,
                caused_by=asked.event_id,
            )
        )
        return True

    def _expired(self, asked: Asked) -> Refused | None:
        if not asked.expires_at or asked.expires_at > self._now:
            return None
        late_ms = (self._now - asked.expires_at) // 1_000_000
        return Refused(
            code=Refusal.EXPIRED,
            field="expirytime",
            expected="an answer before the wish expired",
            found=f"{late_ms} ms later",
        )

    def _reject(
        self,
        asked: Asked,
        refused: Refused,
        name: str | None,
        *,
        message: str = "",
        first_wish: int = 0,
        retry_after_s: int = 0,
    ) -> None:
        is_readable = name is not None and is_name(name) and is_name(asked.tenant)
        rejected = ev.JobRejected(
            tenant=asked.tenant,
            answers=asked.seq,
            wish_id=asked.event_id,
            code=refused.code,
            field=refused.field,
            expected=refused.expected,
            found=refused.found,
            message=message or refused.message(),
            job_id=JobId(f"{asked.tenant}/{name}") if is_readable else None,
            retry_after_s=retry_after_s,
            first_wish=first_wish,
            note=NOTES.get(asked.ingress, ""),
            caused_by=asked.event_id,
        )
        self._answers[asked.seq] = rejected
        if first_wish and refused.code not in PUT_OFF:
            self._settled[first_wish] = asked.seq
        self.facts.append(rejected)

    def _refuse(self, asked: Asked, refused: Refused, *, retry_after_s: int = 0) -> None:
        self.facts.append(
            ev.WishRejected(
                tenant=asked.tenant,
                answers=asked.seq,
                wish_id=asked.event_id,
                wish_type=bounded(asked.subject_type),
                code=refused.code,
                field=refused.field,
                expected=refused.expected,
                found=refused.found,
                message=refused.message(),
                retry_after_s=retry_after_s,
                note=NOTES.get(asked.ingress, ""),
                caused_by=asked.event_id,
            )
        )

    # ------------------------------------------------------------------------------------------- jobs

    def go_on(self) -> None:
        """State what follows for jobs whose runs or hours call for it, and which facts came too late."""
        state = self._state
        for job_id in sorted((state.due | state.timed_out(self._now)) - self._touched):
            if len(self.facts) >= FACTS_PER_ROUND:
                return
            job = state.pool.jobs.get(job_id)
            fact = None if job is None else self._next_fact(job)
            if fact is not None:
                self.facts.append(fact)
        for seq in sorted(state.kept.late):
            if len(self.facts) >= FACTS_PER_ROUND:
                return
            late = state.kept.late[seq]
            self.facts.append(
                ev.LateFactIgnored(run_id=late.run_id, fact_seq=seq, why=late.why, caused_by=late.event_id)
            )

    def _next_fact(self, job: JobView) -> ev.Fact | None:
        remembered = self._state.kept.remembered
        requested_at = remembered.recorded_at(remembered.wish_of(job.job_id) or 0) or job.requested_at
        return lifecycle.next_fact(job, self._now, requested_at, self._state.pool)

    def _state_end(self, job_id: JobId, fact: ev.Fact) -> None:
        self._touched.add(job_id)
        self._ended[job_id] = type(fact).__name__
        self.facts.append(fact)


def _beyond_limits(spec: ev.JobSpec, tenant: TenantId, pool: Pool) -> Refused | None:
    """Why the job can never run within the limits of its tenant, its queue and those above; None where it can.

    What is in use now is the placer's, and so is what depends on the devices that the job comes to.
    """
    slices = spec.devices * spec.replicas_least
    asked = {
        quota.COMPUTE: (slices * spec.compute_milli, "milli-GPU", "resources"),
        quota.MEMORY: (slices * spec.memory_mib, "MiB of device memory", "resources.gpu_memory_mib"),
        quota.CPU: (spec.replicas_least * spec.cpu_milli, "milli-CPU", "resources.cpu_milli"),
        quota.JOBS: (1, "jobs", "queue"),
    }
    if len(spec.models) == 1:
        model = spec.models[0]
        milli = slices * spec.compute_milli
        asked[quota.of_model(model)] = (milli, f"milli-GPU of {model}", "resources")
    amounts = {name: amount for name, (amount, _, _) in asked.items()}
    bounds = [(f"queue {queue.queue_id}", queue.limits) for queue in quota.lineage(pool.queues, spec.queue)]
    if (own := pool.tenants.get(tenant)) is not None:
        bounds.append((f"tenant {tenant}", own.limits))
    for whose, limits in bounds:
        for name in quota.exceeded({}, amounts, limits):
            limit = limits[name]
            amount, unit, field = asked[name]
            return Refused(
                code=Refusal.QUOTA_EXCEEDED,
                field=field,
                expected=f"at most {limit} {unit}, the limit of {whose}",
                found=f"{amount} {unit}" + (f" over {spec.replicas_least} replicas" if spec.replicas_least > 1 else ""),
                hint="Ask for less, or ask the pool's operator for a higher limit: this could never run.",
            )
    return None


def _names(tenant: TenantId, request: ev.JobRequested, seq: int) -> Iterator[JobId]:
    """Names that the job of that wish may have: the one that was asked for, or the first free one of these."""
    if request.job_id is not None:
        yield JobId(f"{tenant}/{request.job_id}")
        return
    yield JobId(f"{tenant}/job-{seq}")
    for suffix in count(2):
        yield JobId(f"{tenant}/job-{seq}-{suffix}")


def _operators_alone(asked: Asked, hint: str) -> Refused:
    return Refused(
        code=Refusal.NOT_PERMITTED,
        expected="the pool's operator",
        found=f"tenant {bounded(asked.tenant)}",
        hint=hint,
    )


def _not_in_state(job: Seen, expected: str, found: str) -> Refused:
    return Refused(code=Refusal.JOB_STATE, field="job_id", expected=expected, found=f"{job.job_id}, {found}")


def _not_permitted(asked: Asked, did: str, undo: str) -> Refused:
    return Refused(
        code=Refusal.NOT_PERMITTED,
        field="job_id",
        expected=f"the pool's operator, who {did} the job",
        found=f"tenant {bounded(asked.tenant)}",
        hint=f"Ask the pool's operator to {undo} it.",
    )


def _actor(asked: Asked) -> str:
    """Who asked: the principal that the broker let in, then whom the publisher says it acted for."""
    principal = "operator" if ev.is_operator(asked.tenant) else f"tenant:{asked.tenant}"
    # What would not print could make the line read as another name.
    said = "".join(char for char in asked.actor if char.isprintable())
    return f"{principal} ({said})" if said else principal
