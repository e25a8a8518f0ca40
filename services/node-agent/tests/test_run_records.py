"""What may be concluded from a run directory: one rule a test."""

from hypothesis import given
from hypothesis import strategies as st

from apportion.contracts.ids import RunId
from apportion.node_agent.run_records import (
    Absent,
    Claim,
    Claimed,
    ExecFailed,
    Exited,
    ExitRecord,
    Gate,
    Intent,
    LossReason,
    Lost,
    NeverStarted,
    Observed,
    Prepared,
    ProcessSeen,
    Running,
    Started,
    Unreadable,
    directory_name,
    interpret,
    run_of_directory,
)

BOOT = "boot-1"
INTENT = Intent(
    run_id=RunId("acme/train/0/1"),
    epoch=3,
    argv=("/bin/true",),
    env={},
    gate=Gate.OPEN,
    log_bytes_max=1024,
    open_files_max=None,
    boot_id=BOOT,
    token="t",
)
CLAIM = Claim(pid=41, start_ticks=900, boot_id=BOOT, token="t")
STARTED = Started(pid=42, start_ticks=901, started_at_ns=5)
ALIVE = ProcessSeen(start_ticks=900)
EXIT = ExitRecord(outcome="exited", exit_code=0, started_at_ns=5, finished_at_ns=9)


def judged(
    *,
    intent: Intent | Unreadable | None = INTENT,
    claim: Claim | Unreadable | None = CLAIM,
    shim: ProcessSeen | None = ALIVE,
    started: Started | Unreadable | None = STARTED,
    exit_record: ExitRecord | Unreadable | None = None,
    boot_id: str = BOOT,
) -> Observed:
    return interpret(intent=intent, claim=claim, shim=shim, started=started, exit_record=exit_record, boot_id=boot_id)


def test_a_live_shim_with_a_started_workload_is_running() -> None:
    assert judged() == Running(intent=INTENT, claim=CLAIM, started=STARTED)


def test_a_live_shim_without_a_workload_is_claimed() -> None:
    assert judged(started=None) == Claimed(intent=INTENT, claim=CLAIM)


def test_no_directory_is_absent() -> None:
    assert judged(intent=None, claim=None, shim=None, started=None) == Absent()


def test_an_order_that_nobody_claimed_is_prepared() -> None:
    assert judged(claim=None, shim=None, started=None) == Prepared(intent=INTENT)


def test_an_unclaimed_order_of_another_boot_is_lost() -> None:
    """The claim isn't synced, so its absence proves nothing after a power failure."""
    assert judged(claim=None, shim=None, started=None, boot_id="boot-2") == Lost(reason=LossReason.REBOOTED)


def test_the_same_pid_in_another_boot_is_another_process() -> None:
    assert judged(boot_id="boot-2") == Lost(reason=LossReason.REBOOTED)


def test_the_same_pid_with_another_start_time_is_another_process() -> None:
    assert judged(shim=ProcessSeen(start_ticks=901)) == Lost(reason=LossReason.SHIM_GONE)


def test_a_shim_that_left_no_word_is_lost() -> None:
    assert judged(shim=None) == Lost(reason=LossReason.SHIM_GONE)


def test_a_claim_that_belongs_to_another_order_is_not_believed() -> None:
    assert judged(claim=Claim(pid=41, start_ticks=900, boot_id=BOOT, token="other")) == Lost(
        reason=LossReason.RECORD_UNREADABLE
    )


def test_the_shims_last_word_counts_in_any_boot_and_while_it_still_ends() -> None:
    said = Exited(exit_code=0, signal=None, started_at_ns=5, finished_at_ns=9, max_rss_kib=0, cpu_us=0)
    assert judged(exit_record=EXIT) == said
    assert judged(exit_record=EXIT, boot_id="boot-2", shim=None) == said


def test_an_unreadable_file_is_never_taken_for_a_run_that_may_be_started() -> None:
    lost = Lost(reason=LossReason.RECORD_UNREADABLE)
    assert judged(intent=Unreadable(), claim=None) == lost
    assert judged(claim=Unreadable(), shim=None) == lost
    assert judged(exit_record=Unreadable()) == lost


def test_withdrawn_and_failed_orders_never_ran() -> None:
    abandoned = ExitRecord(outcome="abandoned", finished_at_ns=9)
    failed = ExitRecord(outcome="exec_failed", errno=2, finished_at_ns=9)
    taken_back = Claim(pid=0, start_ticks=0, boot_id=BOOT, token="t")
    assert judged(exit_record=abandoned, started=None) == NeverStarted(epoch=3)
    assert judged(claim=taken_back, shim=None, started=None) == NeverStarted(epoch=3)
    assert judged(exit_record=failed, started=None) == ExecFailed(errno=2, finished_at_ns=9)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20))
def test_directory_names_are_reversible_and_stay_in_their_directory(text: str) -> None:
    """Whatever an id holds, it can't climb out or meet another's directory."""
    name = directory_name(RunId(text))
    assert run_of_directory(name) == text
    assert "/" not in name
    assert not name.startswith(".")
