"""What runs used corrects what the next ones are expected to need: from facts alone, and after a restart the same."""

from typing import Any

import pytest

from apportion.admission import core
from apportion.admission.learned import PEAKS_KEPT, PROFILES_KEPT, RUNS_MIN, Learned, evolve_profile
from apportion.admission.testing import History
from apportion.contracts import events as ev
from apportion.contracts.causes import RunCause
from apportion.contracts.ids import JobId, run_id
from apportion.contracts.testing import NOON, a_job_request, a_node, a_queue

LLAMA = ev.Model(name="llama-3.1-8b", batch=2, context_tokens=4096)


def a_pool() -> History:
    history = History()
    history.fact(a_queue())
    history.fact(a_node())
    return history


def admitted(history: History, name: str, **changes: Any) -> ev.JobAdmitted:
    request = a_job_request(job_id=name, **{"resources": ev.Resources(), "model": LLAMA, **changes})
    history.wish(request)
    (fact,) = (fact for fact in history.settle() if isinstance(fact, ev.JobAdmitted))
    return fact


def ran(history: History, name: str, peak_mib: int, cause: RunCause = RunCause.SUCCESS) -> None:
    """The job's only run is placed, uses that much at most, and ends so."""
    run = history.place(f"acme/{name}")
    history.start(run)
    history.finish(run, cause, peak_memory_mib=peak_mib)
    history.release(run)
    history.settle()


def test_observed_peaks_correct_the_next_estimate_of_the_family() -> None:
    """Five runs that needed a fifth more move the sixth; the fact says by which runs, and from what."""
    history = a_pool()
    first = admitted(history, "j0")
    assert first.sized is not None
    assert first.sized.correction is None
    needs = first.sized.memory_mib_device * 6 // 5
    for number in range(RUNS_MIN):
        if number:
            admitted(history, f"j{number}")
        ran(history, f"j{number}", needs)
    again = admitted(history, "again")
    assert again.sized is not None
    assert again.sized.correction == ev.Correction(
        runs=RUNS_MIN,
        ratio_bp=needs * 10_000 // first.sized.memory_mib_device,
        memory_mib_p50_before=first.sized.memory_mib_p50,
        memory_mib_p95_before=first.sized.memory_mib_p95,
    )
    assert again.sized.memory_mib_p50 > first.sized.memory_mib_p50
    assert again.sized.memory_mib_p95_device >= needs
    assert again.sized.method.endswith("+history-v1")
    assert again.spec.memory_mib == again.sized.booked_mib == -(-again.sized.memory_mib_p95_device * 110 // 100)
    # Another model has its own history, and the same formula as ever.
    other = admitted(history, "other", model=ev.Model(name="llama-2-7b"))
    assert other.sized is not None
    assert other.sized.correction is None


def test_a_restart_and_a_replay_have_learned_the_same() -> None:
    """It is a fold over facts, so a snapshot holds it and a replay decides the same again."""
    history = a_pool()
    for number in range(RUNS_MIN):
        admitted(history, f"j{number}")
        ran(history, f"j{number}", 20_000 + number)
    history.wish(a_job_request(job_id="again", resources=ev.Resources(), model=LLAMA))
    said = history.decide()
    restored = core.restore(core.snapshot(history.state))
    assert core.decide(restored, NOON) == said
    replayed = core.initial()
    for entry in history.entries:
        core.evolve(replayed, entry)
        core.evolve(replayed, entry)  # delivered twice
    assert core.snapshot(replayed) == core.snapshot(history.state)


@pytest.mark.parametrize(
    ("cause", "peak_mib", "teaches"),
    [
        (RunCause.USER_ERROR, 9_000, None),
        (RunCause.PREEMPTED, 9_000, None),
        (RunCause.SUCCESS, 9_000, 9_000),
        # It was stopped at its limit: that it needs more is all that is known.
        (RunCause.OUT_OF_MEMORY, 3_000, 4_096),
        (RunCause.QUOTA_EXCEEDED, 5_000, 5_000),
    ],
)
def test_only_a_run_that_did_its_work_or_ran_out_says_what_was_needed(
    cause: RunCause, peak_mib: int, teaches: int | None
) -> None:
    """A run that failed early has used little, and would make the next one too small."""
    history = a_pool()
    sized = admitted(history, "j0", model=ev.Model(params_millions=2_000)).sized
    assert sized is not None
    ran(history, "j0", peak_mib, cause)
    ratios = history.state.kept.learned.ratios_bp
    assert ratios == ({} if teaches is None else {sized.family: [teaches * 10_000 // sized.memory_mib_device]})


def test_the_peak_of_a_run_on_several_devices_is_shared_out() -> None:
    """The agent tells the sum; an estimate is of one device."""
    history = a_pool()
    sized = admitted(history, "wide", model=ev.Model(name="llama-3.1-8b", tensor_parallel=2)).sized
    assert sized is not None
    placed = history.place("acme/wide")
    run = history.state.pool.jobs[JobId("acme/wide")].runs[placed]
    run.slices = run.slices * 2
    history.finish(placed, peak_memory_mib=16_000)
    assert history.state.kept.learned.ratios_bp[sized.family] == [8_000 * 10_000 // sized.memory_mib_device]


def test_what_was_never_used_is_said_to_whoever_asks_for_it_again() -> None:
    """Forty GiB asked, fourteen used: the answer says so, and decides nothing."""
    history = a_pool()
    ask = {"resources": ev.Resources(gpu_milli=500, gpu_memory_mib=40_960), "model": None}
    for number, peak in enumerate((9_000, 14_336, 800)):
        assert admitted(history, f"j{number}", **ask).advice is None
        ran(history, f"j{number}", peak)
    again = admitted(history, "again", **ask)
    assert again.spec.memory_mib == 40_960
    assert again.advice == ev.MemoryAdvice(
        asked_mib=40_960,
        peak_mib_max=14_336,
        runs=3,
        suggested_mib=16_640,
        text="asked 40 GiB, never used more than 14 GiB in 3 runs",
    )
    assert admitted(history, "else", workload=ev.Workload(command=("/bin/other",)), **ask).advice is None


def test_what_is_learned_is_bounded() -> None:
    """Commands of one use must not fill the memory: the one unheard of for longest goes."""
    state = Learned()
    for number in range(PROFILES_KEPT + 3):
        evolve_profile(state, number.to_bytes(16, "big"), 1 + number)
    for _ in range(PEAKS_KEPT + 5):
        evolve_profile(state, b"x" * 16, 7)
    assert len(state.peaks_mib) == PROFILES_KEPT
    assert state.peaks_mib[b"x" * 16] == [7] * PEAKS_KEPT
    assert (3).to_bytes(16, "big") not in state.peaks_mib


def test_a_jobs_estimate_goes_with_the_job_and_its_ratio_stays() -> None:
    """What lives is bounded by what runs."""
    history = a_pool()
    admitted(history, "j0")
    assert list(history.state.kept.estimates) == ["acme/j0"]
    ran(history, "j0", 9_000)
    assert history.state.kept.estimates == {}
    assert run_id(JobId("acme/j0"), 0, 1) not in history.state.pool.run_jobs


def test_the_buffer_is_the_pools() -> None:
    """Ten percent above p95, or what the claim says."""
    history = a_pool()
    history.fact(ev.LeaseClaimed(author="admission", session="s", core="c", config={"buffer_pct": 20}))
    sized = admitted(history, "j0").sized
    assert sized is not None
    assert (sized.buffer_pct, sized.booked_mib) == (20, -(-sized.memory_mib_p95_device * 120 // 100))
