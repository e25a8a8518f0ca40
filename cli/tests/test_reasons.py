"""What is told about a job is what the log says, in words."""

from apportion.cli.reasons import event_line, is_about, stopped_text, waiting_text, why_text
from apportion.cli.replaying import replay_lines
from apportion.contracts.causes import Refusal
from apportion.contracts.envelope import Undecodable
from apportion.contracts.testing import a_job, a_job_request, a_placement, as_fact, as_wish

PENDING = {
    "code": "InsufficientGpu",
    "hint": "It needs 8 device(s) on one node.",
    "requested": '{"devices":8}',
    "available": {"devices": 2},
    "limit": None,
    "blocking_ids": '["acme/a","acme/b"]',
}


def test_a_wait_is_told_with_its_numbers_and_who_holds_what_it_needs() -> None:
    """JSON comes as text from one place and as an object from the other; people see the same."""
    assert waiting_text("acme/big", PENDING) == [
        "acme/big waits: InsufficientGpu. It needs 8 device(s) on one node.",
        "  it asks for: 8 devices",
        "  the best there is: 2 devices",
        "  likely ended by: acme/a, acme/b",
    ]


def test_a_failed_job_names_the_run_that_decided_it() -> None:
    """Which node, which cause, which exit code: what somebody would look for next."""
    timeline = [
        {"kind": "JobRequeued", "cause": "NodeLost", "body": "{}"},
        {
            "kind": "RunFinished",
            "cause": "UserError",
            "run_id": "acme/a/0/2",
            "node_id": "node-1",
            "body": '{"exit_code":3}',
        },
    ]
    job = {"job_id": "acme/a", "state": "failed", "reason": "UserError", "attempts": 2}
    assert why_text({"job": job, "pending": None, "runs": [], "timeline": timeline}) == [
        "acme/a failed: UserError",
        "  it took 2 attempts; the earlier ones ended by NodeLost",
        "  its run acme/a/0/2 on node-1 ended UserError exit_code 3",
    ]


def test_who_waits_again_is_told_who_stopped_it_and_why() -> None:
    """Else a preempted job reads as if it had never run."""
    body = '{"actor":"service:placer","reason":"queue train takes back what is guaranteed to it"}'
    stop = {"kind": "RunStopOrdered", "cause": "Preempted", "said_by": "placer", "body": body}
    assert stopped_text([stop, {"kind": "RunReleased"}]) == [
        "  its last run was stopped (Preempted) by service:placer: queue train takes back what is guaranteed to it"
    ]
    assert stopped_text([{"kind": "RunPlaced"}]) == []


def test_an_event_is_one_line_whatever_a_stranger_put_into_it() -> None:
    """A terminal shows it; it doesn't obey it."""
    bad = Undecodable(code=Refusal.NOT_JSON, type="JobRequested", expected="one JSON object", found="\x1b[2J\n", size=3)
    line = event_line(as_wish(bad, 4))  # type: ignore[arg-type]  # what the stream holds where a wish didn't decode
    assert "\x1b" not in line
    assert "\n" not in line
    assert "NotJson" in line
    assert "w4" in line


def test_a_jobs_events_are_its_wish_its_facts_and_its_runs() -> None:
    """The tenant's own name in the wish, the full id in facts, the run's id in what agents say."""
    for entry in (as_wish(a_job_request(), 1), as_fact(a_job(), 1), as_fact(a_placement(), 2)):
        assert is_about(entry, "acme/train-7")
        assert not is_about(entry, "acme/train-70")
        assert not is_about(entry, "other/train-7")


def test_a_difference_is_shown_field_by_field() -> None:
    """Two facts of a kilobyte each tell nobody what differs."""
    report = {
        "by_author": {"placer": 1},
        "observed": 3,
        "unchecked": {},
        "erased": [],
        "first": {
            "author": "placer",
            "first_seq": 9,
            "index": 0,
            "recorded": ['{"type":"RunPlaced.v1","run_id":"acme/a/0/1","node_id":"node-1"}'],
            "recomputed": ['{"type":"RunPlaced.v1","run_id":"acme/a/0/1","node_id":"node-2"}'],
        },
        "differences": 1,
        "decisions": 1,
        "facts": 1,
        "path": "log.duckdb",
    }
    assert replay_lines(report)[1:] == [
        "agents          3 facts, which are what they observed and did",
        "FIRST DIFFERENCE: placer, the decision stored from fact 9 on",
        "  RunPlaced.v1 acme/a/0/1",
        '  node_id: recorded   "node-1"',
        '  node_id: recomputed "node-2"',
        "1 of 1 decisions came out OTHERWISE (log.duckdb)",
    ]
