"""Rates and full queues: who comes too fast is told when to come again, and is looked at anew then."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.admission import core, rates
from apportion.admission.rates import Flow, Limits
from apportion.admission.testing import History
from apportion.contracts import events as ev
from apportion.contracts.causes import OnLowered, Refusal, ServiceClass, WorkloadKind
from apportion.contracts.envelope import Undecodable
from apportion.contracts.ids import OPERATOR, TenantId
from apportion.contracts.testing import ACME, NOON, a_job_request, a_node, a_queue

S = 1_000_000_000


def a_pool(**policy: Any) -> History:
    """A pool whose operator has asked for this policy."""
    history = History()
    history.fact(a_queue(tenants=("acme", "other")))
    history.fact(a_node())
    if policy:
        ask_policy(history, **policy)
    return history


def ask_policy(history: History, **policy: Any) -> ev.Fact:
    history.wish(ev.PolicyUpsertRequested(reason="a test", **policy), tenant=OPERATOR)
    (fact,) = history.settle()
    return fact


def ask(history: History, name: str, at: int = NOON, **changes: Any) -> ev.Fact:
    history.wish(a_job_request(job_id=name), **changes)
    (fact,) = history.settle(at)
    return fact


def rejected(fact: ev.Fact) -> ev.JobRejected:
    assert isinstance(fact, ev.JobRejected), fact
    return fact


def test_a_burst_comes_in_and_the_rest_is_told_when_to_come_again() -> None:
    """Thirty a minute is one every two seconds; the number in the answer is when a token will be there."""
    history = a_pool(for_tenant="acme", rate_per_min=30, burst=2)
    for name in "abc":
        history.wish(a_job_request(job_id=name))
    a, b, c = history.settle()
    assert [type(fact) for fact in (a, b)] == [ev.JobAdmitted] * 2
    refused = rejected(c)
    assert (refused.code, refused.retry_after_s) == (Refusal.RATE_LIMITED, 2)
    assert refused.expected == "at most 30 jobs a minute of acme, 2 at once"
    assert "after 2 s" in refused.message
    assert isinstance(ask(history, "d", NOON + 2 * S), ev.JobAdmitted)
    assert rejected(ask(history, "e", NOON + 2 * S)).retry_after_s == 2
    assert isinstance(ask(history, "other", NOON, tenant=TenantId("other")), ev.JobAdmitted)


@pytest.mark.parametrize("in_one_round", [False, True])
def test_what_was_put_off_is_looked_at_anew_under_the_same_identity(in_one_round: bool) -> None:
    """The first answer stands for all but those that said: ask again. And once admitted, that answer stands."""
    history = a_pool(for_tenant="acme", rate_per_min=60, burst=1)
    ask(history, "a")
    first = history.wish(a_job_request(job_id="b", idempotency_key="k"), event_id="e1").seq
    put_off = rejected(history.settle()[0])
    assert (put_off.first_wish, put_off.retry_after_s) == (0, 1)
    later = NOON + S
    again = history.wish(a_job_request(job_id="b", idempotency_key="k"), event_id="e2").seq
    if not in_one_round:
        (admitted,) = history.settle(later)
        assert isinstance(admitted, ev.JobAdmitted)
        assert (admitted.first_wish, admitted.answers) == (first, again)
    history.wish(a_job_request(job_id="b", idempotency_key="k"), event_id="e1")
    duplicate = history.settle(later)[-1]
    assert isinstance(duplicate, ev.JobDuplicate)
    assert (duplicate.original_job_id, duplicate.first_wish) == ("acme/b", again)
    assert core.snapshot(core.restore(core.snapshot(history.state))) == core.snapshot(history.state)


def test_what_was_put_off_and_then_refused_stays_refused() -> None:
    """The second look found what is wrong with it; the third asks for nothing new."""
    history = a_pool(for_tenant="acme", rate_per_min=60, burst=1)
    ask(history, "a")
    first = history.wish(a_job_request(job_id="a2", idempotency_key="k")).seq
    history.settle()
    history.fact(a_queue(tenants=("other",)))
    for _ in range(2):
        history.wish(a_job_request(job_id="a2", idempotency_key="k"))
        refused = rejected(history.settle(NOON + 9 * S)[0])
        assert refused.code is Refusal.TENANT_UNKNOWN
        history.fact(a_queue(tenants=("acme", "other")))
    assert history.state.kept.remembered.settled_by(first) == first + 1


def test_a_wrong_request_is_told_so_even_when_it_comes_too_fast() -> None:
    """Whoever waits only to hear that the request is wrong has waited for nothing; and it costs no token."""
    history = a_pool(for_tenant="acme", rate_per_min=1, burst=1)
    assert rejected(ask_with(history, queue="nope")).code is Refusal.QUEUE_NOT_FOUND
    assert isinstance(ask(history, "a"), ev.JobAdmitted)
    assert rejected(ask_with(history, queue="nope")).code is Refusal.QUEUE_NOT_FOUND
    assert rejected(ask(history, "b")).retry_after_s == 60


def ask_with(history: History, **changes: Any) -> ev.Fact:
    history.wish(a_job_request(job_id="x", **changes))
    return history.settle()[0]


def test_a_full_queue_says_after_how_long_there_will_be_room() -> None:
    """At the pace at which the last ones stopped waiting; without any, a few seconds."""
    history = a_pool(for_tenant="acme", pending_max=2)
    for name in "abc":
        fact = ask(history, name)
    refused = rejected(fact)
    assert (refused.code, refused.found, refused.retry_after_s) == (Refusal.BUSY, "2", rates.RETRY_S_DEFAULT)
    for number, name in enumerate("ab"):
        history.place(f"acme/{name}", at=NOON + 10 * number * S)
    for name in "de":
        assert isinstance(ask(history, name, NOON + 10 * S), ev.JobAdmitted)
    assert rejected(ask(history, "f", NOON + 10 * S)).retry_after_s == 10
    # A cancelled job waits no more, and a job that is tried again does.
    history.wish(ev.JobCancelRequested(job_id="d"))
    history.settle(NOON + 20 * S)
    assert isinstance(ask(history, "g", NOON + 20 * S), ev.JobAdmitted)


def test_the_whole_pool_has_a_bound_as_well() -> None:
    """Whosever the jobs are."""
    history = a_pool(pool_pending_max=1)
    assert isinstance(ask(history, "a"), ev.JobAdmitted)
    refused = rejected(ask(history, "b", tenant=TenantId("other")))
    assert (refused.code, refused.expected) == (Refusal.BUSY, "at most 1 jobs of all tenants that wait")


def test_a_dry_run_takes_no_token_and_says_what_it_would_be_told() -> None:
    """Else asking would cost what it asks about."""
    history = a_pool(for_tenant="acme", rate_per_min=1, burst=1)
    for _ in range(3):
        history.wish(a_job_request(job_id="a", dry_run=True))
        (judged,) = history.settle()
        assert isinstance(judged, ev.WishJudged)
        assert judged.code is None
    ask(history, "b")
    history.wish(a_job_request(job_id="a", dry_run=True))
    (judged,) = history.settle()
    assert isinstance(judged, ev.WishJudged)
    assert judged.code is Refusal.RATE_LIMITED


def test_policies_are_facts_and_the_narrower_goes_first() -> None:
    """A tenant's own rule, then the pool's, then the settings; what a policy doesn't name, the wider one says."""
    history = a_pool(
        rate_per_min=600,
        isolation=ev.IsolationLevel.MEMORY,
        buffer_pct=15,
        defaults={WorkloadKind.BATCH: ev.KindDefaults(compute_milli=100, memory_mib=999)},
    )
    ask_policy(history, for_tenant="acme", pending_max=7)
    ask_policy(history, for_tenant="other", rate_per_min=5, isolation=ev.IsolationLevel.FAULT)
    acme, other = (history.state.rules_of(TenantId(name)) for name in ("acme", "other"))
    assert acme.limits == Limits(rate_per_min=600, burst=0, pending_max=7)
    assert (other.limits.rate_per_min, other.limits.depth) == (5, 5)
    assert acme.defaults.isolation is ev.IsolationLevel.MEMORY
    assert other.defaults.isolation is ev.IsolationLevel.FAULT
    assert acme.defaults.shares[WorkloadKind.BATCH].memory_mib == 999
    assert history.state.buffer_pct == 15
    restored = core.restore(core.snapshot(history.state))
    assert restored.rules_of(ACME) == acme
    # The whole policy is stated each time: what isn't named any more has no rule.
    ask_policy(history)
    assert history.state.rules_of(ACME).limits.rate_per_min == 0


@pytest.mark.parametrize(
    ("policy", "tenant", "code", "field"),
    [
        ({}, ACME, Refusal.NOT_PERMITTED, ""),
        ({"for_tenant": "acme", "buffer_pct": 12}, OPERATOR, Refusal.FIELD_CONFLICT, "buffer_pct"),
        ({"for_tenant": "acme", "pool_pending_max": 12}, OPERATOR, Refusal.FIELD_CONFLICT, "pool_pending_max"),
        (
            {"for_tenant": "acme", "placement": ev.PlacementRules(ageing_s=1)},
            OPERATOR,
            Refusal.FIELD_CONFLICT,
            "placement",
        ),
        ({"burst": 3}, OPERATOR, Refusal.FIELD_MISSING, "rate_per_min"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(
    policy: dict[str, Any], tenant: TenantId, code: Refusal, field: str
) -> None:
    """Stored, it would look as if it went for something."""
    history = a_pool()
    history.wish(ev.PolicyUpsertRequested(reason="x", **policy), tenant=tenant)
    (refused,) = history.settle()
    assert isinstance(refused, ev.WishRejected)
    assert (refused.code, refused.field) == (code, field)


def test_who_goes_first_is_stated_with_who_wanted_it() -> None:
    """The placer reads it from the fact; admission itself decides nothing by it."""
    history = a_pool()
    rules = ev.PlacementRules(class_points={ServiceClass.SPOT: 7000}, preempt_per_minute=3)
    history.wish(ev.PolicyUpsertRequested(placement=rules, reason="quarter 3"), tenant=OPERATOR)
    (fact,) = history.settle()
    assert isinstance(fact, ev.PolicyUpserted)
    assert (fact.placement, fact.reason, bool(fact.actor)) == (rules, "quarter 3", True)


@settings(deadline=None)
@given(
    st.integers(1, 120),
    st.integers(0, 8),
    st.lists(st.integers(0, 5 * S), max_size=40),
)
def test_no_stretch_of_time_lets_more_in_than_its_rate_and_one_burst(
    rate_per_min: int, burst: int, pauses: list[int]
) -> None:
    """Whatever the pauses; and who waits as long as told is let in."""
    limits = Limits(rate_per_min=rate_per_min, burst=burst)
    full_at, now, let_in = 0, NOON, list[int]()
    for pause in pauses:
        now += pause
        wait_s = rates.wait_s(full_at, limits, now)
        if not wait_s:
            full_at = rates.taken(full_at, limits, now)
            let_in.append(now)
            for since in range(len(let_in)):
                most = limits.depth + (now - let_in[since]) * rate_per_min // rates.MINUTE_NS + 1
                assert len(let_in) - since <= most
        else:
            assert not rates.wait_s(full_at, limits, now + wait_s * S)


def test_the_pace_is_that_of_those_who_left_last() -> None:
    """A pause that is longer than the pace counts as the pace, and nobody is told to come back next week."""
    flow = Flow()
    for at in (0, 2, 4):
        rates.has_left(flow, at * S)
    assert rates.room_s(flow, 3, 4 * S) == 6
    assert rates.room_s(flow, 1, 34 * S) == 30
    assert rates.room_s(flow, 1000, 34 * S) == rates.RETRY_S_MAX
    assert rates.room_s(None, 1, 0) == rates.RETRY_S_DEFAULT


def test_wishes_that_come_too_fast_are_put_off_before_anything_of_them_is_looked_at() -> None:
    """Whatever they ask, and even where nobody could read them; each has its answer, and others are served."""
    history = a_pool(for_tenant="acme", wish_rate_per_min=60, wish_burst=2)
    history.wish(a_job_request(queue="nope"), event_id="a")
    history.wish(Undecodable(code=Refusal.NOT_JSON, type="JobRequested", size=3))
    for wish in (
        a_job_request(job_id="b"),
        a_job_request(job_id="c", dry_run=True),
        ev.JobCancelRequested(job_id="nobody"),
        Undecodable(code=Refusal.NOT_JSON, type="JobRequested", size=3),
    ):
        history.wish(wish)
    history.wish(a_job_request(job_id="b"), tenant=TenantId("other"))
    facts = history.settle()
    assert [getattr(fact, "answers", 0) for fact in facts] == [2, 3, 4, 5, 6, 7, 8]
    codes = [getattr(fact, "code", None) for fact in facts]
    put_off = [Refusal.RATE_LIMITED] * 4
    assert codes == [Refusal.QUEUE_NOT_FOUND, Refusal.NOT_JSON, *put_off, None]
    assert [fact.retry_after_s for fact in facts if isinstance(fact, ev.JobRejected | ev.WishRejected)] == [
        0,
        0,
        1,
        1,
        1,
    ]
    assert rejected(facts[2]).expected == "at most 60 wishes a minute of acme, 2 at once, whatever they ask"
    assert isinstance(ask(history, "b", NOON + S), ev.JobAdmitted)


def test_a_replay_puts_off_the_same_wishes() -> None:
    """The bucket is a number in the fold; a snapshot has it, and the facts alone come to it."""
    history = a_pool(wish_rate_per_min=6, wish_burst=3)
    said = [type(ask(history, f"j{number}", NOON + number * S)).__name__ for number in range(6)]
    assert said == ["JobAdmitted"] * 3 + ["JobRejected"] * 3
    again = core.initial()
    for entry in history.entries:
        core.evolve(again, entry)
    for state in (again, core.restore(core.snapshot(history.state))):
        assert core.snapshot(state) == core.snapshot(history.state)
        assert state.kept.flows[ACME].wishes_full_at == NOON + 30 * S


def test_tenants_that_nobody_knows_share_one_bucket() -> None:
    """There may be any number of names, and a count for each would grow for ever. Operators have none."""
    history = a_pool(wish_rate_per_min=60, wish_burst=2)
    for number in range(4):
        history.wish(a_job_request(), tenant=TenantId(f"stranger-{number}"))
        history.wish(ev.JobCancelRequested(job_id="acme/x"), tenant=OPERATOR)
    codes = [getattr(fact, "code", None) for fact in history.settle()]
    assert codes[::2] == [Refusal.TENANT_UNKNOWN] * 2 + [Refusal.RATE_LIMITED] * 2
    assert set(codes[1::2]) == {Refusal.JOB_NOT_FOUND}
    assert "?" in history.state.kept.flows
    assert len(history.state.kept.flows) == 1


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"limit_jobs": 3}, "limit_jobs"),
        ({"limit_model_milli": {"b200": 1}}, "limit_model_milli"),
        ({"on_lowered": OnLowered.RECLAIM}, "on_lowered"),
        ({"for_tenant": "acme", "wish_burst": 3}, "wish_rate_per_min"),
    ],
)
def test_limits_are_a_tenants_and_a_burst_is_of_a_rate(policy: dict[str, Any], field: str) -> None:
    """What the pool or a queue may hold is said elsewhere."""
    fact = ask_policy(a_pool(), **policy)
    assert isinstance(fact, ev.WishRejected)
    assert fact.field == field


def test_a_job_that_its_tenant_may_never_hold_is_refused() -> None:
    """Waiting for a limit that it can never meet would be waiting for ever."""
    history = a_pool(for_tenant="acme", limit_memory_mib=6000, limit_jobs=2)
    assert isinstance(ask(history, "a"), ev.JobAdmitted)
    refused = rejected(ask_with(history, gang=ev.Gang(size=2)))
    assert (refused.code, refused.field) == (Refusal.QUOTA_EXCEEDED, "resources.gpu_memory_mib")
    assert refused.expected == "at most 6000 MiB of device memory, the limit of tenant acme"
    assert isinstance(ask(history, "b", tenant=TenantId("other"), event_id="o"), ev.JobAdmitted)
