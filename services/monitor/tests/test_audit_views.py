"""The views that an auditor asks, on a small history answers worked out by hand; those that must be empty, filled."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apportion.contracts import events as ev
from apportion.contracts.causes import (
    DeviceHealth,
    IsolationFinding,
    IsolationTest,
    Mode,
    Pending,
    PreemptionKind,
    RunCause,
    Severity,
    StopCause,
)
from apportion.contracts.ids import ADMISSION, DeviceUuid, JobId, NodeId, QueueId, RunId, TenantId
from apportion.contracts.testing import NOON, a_job, a_job_request, a_node, a_placement, a_queue
from apportion.monitor.log import EventLog, views, views_in
from apportion.monitor.testing import Recorded, Tape

NODE = NodeId("node-1")
LOW, HIGH = JobId("acme/low"), JobId("acme/high")
LOW_1, LOW_2, HIGH_1 = RunId("acme/low/0/1"), RunId("acme/low/0/2"), RunId("acme/high/0/1")
MINUTE = 60_000_000_000


def claim(core: str, **config: int | str) -> ev.Fact:
    return ev.LeaseClaimed(author="admission", session="s", core=core, config=config)


def pending(job: JobId, code: Pending) -> ev.Fact:
    return ev.JobPendingReasonChanged(job_id=job, code=code, since_at=NOON)


def a_history(tape: Tape) -> Iterator[Recorded]:
    """Low runs, gives way to high, waits for two reasons, and runs again. Every row is 1 ms later."""
    yield tape.wish(a_job_request(job_id="low"))  # row 1
    yield tape.wish(a_job_request(job_id="high"))
    yield tape.fact(claim("rules@1#a", x=1), author=ADMISSION)  # row 3
    yield tape.fact(claim("rules@1#a", x=1), author=ADMISSION)
    yield tape.fact(claim("rules@1#a", x=2), author=ADMISSION)
    yield tape.fact(a_queue(limit_compute_milli=4000, limit_jobs=9))  # row 6
    yield tape.fact(a_queue(limit_compute_milli=2000, actor="user:ann", reason="less"))
    yield tape.fact(a_node())  # row 8: two devices
    yield tape.fact(a_job("low", answers=1))  # row 9
    yield tape.fact(a_placement("acme/low", compute_milli=1000, memory_mib=100))
    yield tape.fact(ev.RunStarted(run_id=LOW_1, node_id=NODE, pid=1, started_at=NOON))  # row 11
    yield tape.fact(a_job("high", answers=2))  # row 12
    yield tape.fact(pending(HIGH, Pending.WAITING_FOR_PREEMPTION))
    yield tape.fact(
        ev.RunStopOrdered(
            run_id=LOW_1,
            node_id=NODE,
            cause=StopCause.PREEMPTED,
            grace_s=7,
            actor="service:placer",
            reason="for acme/high",
            caused_by="x",
        )
    )  # row 14
    yield tape.fact(ev.RunFinished(run_id=LOW_1, node_id=NODE, cause=RunCause.PREEMPTED, finished_at=NOON))
    yield tape.fact(ev.RunReleased(run_id=LOW_1, node_id=NODE, released_at=NOON))  # row 16
    yield tape.fact(ev.JobRequeued(job_id=LOW, attempt=2, cause=RunCause.PREEMPTED))  # row 17
    yield tape.fact(a_placement("acme/high", device=1, compute_milli=500, memory_mib=200))  # row 18
    yield tape.fact(pending(LOW, Pending.PRIORITY))
    yield tape.fact(pending(LOW, Pending.INSUFFICIENT_COMPUTE))
    yield tape.fact(ev.RunStarted(run_id=HIGH_1, node_id=NODE, pid=2, started_at=NOON))  # row 21
    yield tape.fact(a_placement("acme/low", attempt=2, compute_milli=250, memory_mib=50))  # row 22
    yield tape.fact(ev.NodeSuspected(node_id=NODE, epoch=0, silent_ms=5100, lease_ms=20_000))
    yield tape.fact(ev.NodeTrusted(node_id=NODE, epoch=0, silent_ms=5900))
    yield tape.fact(
        ev.DeviceHealthChanged(
            node_id=NODE,
            device_uuid=DeviceUuid("GPU-node-1-0"),
            before=DeviceHealth.HEALTHY,
            after=DeviceHealth.DEGRADED,
            code="xid-63",
            detail="row remap",
        )
    )  # row 25
    yield tape.fact(
        ev.AuditQueryRun(
            query_id="q1",
            actor="user:eve",
            statement="SELECT 1",
            statement_sha256="00",
            rows=1,
            elapsed_ms=3,
            age_ms=40,
            log_ordinal=25,
        )
    )  # row 26


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventLog]:
    """The history above, in one file."""
    with EventLog.open(tmp_path_factory.mktemp("log") / "log.duckdb") as opened:
        opened.append(list(a_history(Tape())))
        yield opened


def at(row: int) -> int:
    return NOON + row * 1_000_000


def asked(log: EventLog, question: str) -> list[tuple[Any, ...]]:
    return log.ask(question).rows


def test_a_wait_is_one_attempts_and_has_its_reasons(log: EventLog) -> None:
    """From admission or requeue to the first start; what has not started yet has no length."""
    rows = asked(
        log,
        "SELECT job_id, queue, attempt, epoch_ns(queued), epoch_ns(started), placed_after_ms, wait_ms, codes"
        " FROM v_waits ORDER BY job_id, attempt",
    )
    assert rows == [
        ("acme/high", "main", 1, at(12), at(21), 6, 9, ["WaitingForPreemption"]),
        ("acme/low", "main", 1, at(9), at(11), 1, 2, []),
        ("acme/low", "main", 2, at(17), None, 5, None, ["Priority", "InsufficientCompute"]),
    ]


def test_a_preemption_says_who_what_and_how_much_was_lost(log: EventLog) -> None:
    assert asked(
        log,
        "SELECT ordinal, run_id, tenant, actor, reason, grace_s, compute_milli, memory_mib, ended_as, stopped_after_ms,"
        " ran_ms FROM v_preemptions",
    ) == [(14, LOW_1, "acme", "service:placer", "for acme/high", 7, 1000, 100, "Preempted", 1, 4)]


def test_a_move_says_from_where_to_where_and_what_it_cost(tmp_path: Path) -> None:
    tape = Tape()
    moved = ev.MigrationCompleted(
        job_id=JobId("acme/low"),
        attempt=2,
        cause=RunCause.NODE_LOST,
        from_nodes=(NODE,),
        to_nodes=(NodeId("node-2"), NodeId("node-3")),
        downtime_ms=24_000,
        lost_work_s=79,
    )
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([tape.fact(moved)])
        assert asked(
            log,
            "SELECT job_id, tenant, cause, attempt, from_nodes, to_nodes, downtime_ms, lost_work_s FROM v_migrations",
        ) == [("acme/low", "acme", "NodeLost", 2, ["node-1"], ["node-2", "node-3"], 24_000, 79)]


def test_what_is_kept_is_told_with_its_nodes_until_it_ends(tmp_path: Path) -> None:
    """One that was cancelled or is over is none; a name may be used again; the oldest blocked job has its line."""
    tape = Tape()

    def admitted(name: str, start_at: int) -> Recorded:
        return tape.fact(
            ev.ReservationAdmitted(
                reservation=name,
                for_tenant=TenantId("acme"),
                start_at=start_at,
                end_at=start_at + 10,
                nodes=2,
                answers=1,
                actor="op",
                reason="a demo",
            )
        )

    kept = ev.NodesReserved(reservation="b", nodes=(NODE, NodeId("node-2")), start_at=7, end_at=17, late=(NODE,))
    told = [
        admitted("a", 5),
        admitted("b", 7),
        admitted("c", 9),
        tape.fact(kept),
        tape.fact(ev.ReservationCancelled(reservation="a", answers=2, actor="op")),
        tape.fact(ev.NodesReserved(reservation="c", is_over=True)),
        tape.fact(ev.NodesReserved(job_id=JobId("acme/big"), nodes=(NODE,), start_at=3)),
        admitted("a", 11),
    ]
    columns = "reservation, tenant, job_id, start_at, end_at, wanted, nodes, late"
    question = f"SELECT {columns} FROM v_reservations ORDER BY start_at"
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(told)
        assert asked(log, question) == [
            ("(oldest blocked job)", None, "acme/big", 3, None, None, ["node-1"], []),
            ("b", "acme", None, 7, 17, 2, ["node-1", "node-2"], ["node-1"]),
            ("a", "acme", None, 11, 21, 2, [], []),
        ]
        log.append([tape.fact(ev.NodesReserved(job_id=JobId("acme/big")))])
        assert [row[0] for row in asked(log, question)] == ["b", "a"]


def test_a_line_for_each_check_of_isolation_and_the_newest_is_marked(tmp_path: Path) -> None:
    """A control that failed is beside what held."""
    tape = Tape()

    def verdict(test_id: str, *checks: ev.IsolationCheck) -> ev.IsolationVerdict:
        return ev.IsolationVerdict(
            test_id=test_id,
            node_id=NODE,
            device_uuid=DeviceUuid("GPU-1"),
            mode=Mode.MPS,
            test=IsolationTest.MEMORY,
            verdict=IsolationFinding.PASSED,
            checks=checks,
            driver_version="580.95.05",
            simulated=True,
            started_at=NOON,
            finished_at=NOON,
        )

    passed = ev.IsolationCheck(
        name="a", verdict=IsolationFinding.PASSED, figures={"failures": 0}, control={"failures": 3}
    )
    told = ev.IsolationCheck(name="b", verdict=IsolationFinding.REPORTED, detail="not promised")
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([tape.fact(verdict("t1", passed)), tape.fact(verdict("t2", passed, told))])
        assert asked(
            log,
            "SELECT test_id, check_name, check_verdict, CAST(figures -> '$.failures' AS INT),"
            " CAST(control -> '$.failures' AS INT), detail, driver_version, simulated, is_latest"
            " FROM v_isolation ORDER BY ordinal, check_name",
        ) == [
            ("t1", "a", "passed", 0, 3, None, "580.95.05", True, False),
            ("t2", "a", "passed", 0, 3, None, "580.95.05", True, True),
            ("t2", "b", "reported", None, None, "not promised", "580.95.05", True, True),
        ]


def test_an_alert_has_its_end_and_whoever_looked_at_it(tmp_path: Path) -> None:
    tape = Tape()
    hot = ev.AlertRaised(
        rule="device-hot", about="GPU-1", severity=Severity.WARNING, value=90, threshold=85, unit="C", summary="hot"
    )
    seen = ev.AlertAcknowledged(rule="device-hot", about="GPU-1", until_at=1, actor="user:eve", reason="r", answers=1)
    over = ev.AlertCleared(rule="device-hot", about="GPU-1", value=70, threshold=80, raised_seq=1)
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([tape.fact(hot), tape.fact(seen), later(tape.fact(over), MINUTE), tape.fact(hot)])
        assert asked(
            log, "SELECT rule, about, severity, value, fired_s, acknowledged_by FROM v_alerts ORDER BY ordinal"
        ) == [
            ("device-hot", "GPU-1", "warning", 90, 60, "user:eve"),
            ("device-hot", "GPU-1", "warning", 90, None, None),
        ]


def test_a_preemption_by_the_placer_names_the_job_that_it_was_for(tmp_path: Path) -> None:
    """One that an operator asked for names none: then the actor and the reason say why."""
    decided = ev.PreemptionDecided(
        job_id=HIGH,
        kind=PreemptionKind.PRIORITY,
        victims=(LOW,),
        runs=(LOW_1,),
        nodes=(NODE,),
        rule="a higher class goes first",
    )
    stops = [
        ev.RunStopOrdered(run_id=run, node_id=NODE, cause=StopCause.PREEMPTED, grace_s=7, actor="service:placer")
        for run in (LOW_1, RunId("acme/other/0/1"))
    ]
    tape = Tape()
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([tape.fact(a_node()), tape.fact(decided), *(tape.fact(stop) for stop in stops)])
        rows = asked(log, "SELECT run_id, for_job, preemption, rule FROM v_preemptions ORDER BY ordinal")
    assert rows == [
        (LOW_1, "acme/high", PreemptionKind.PRIORITY.value, "a higher class goes first"),
        ("acme/other/0/1", None, None, None),
    ]


def test_what_a_queue_may_hold_and_holds(log: EventLog) -> None:
    """500 of high and 250 of low's second attempt, of 2 devices."""
    assert asked(
        log,
        "SELECT queue, tenants, limit_compute_milli, limit_jobs, held_compute_milli, held_memory_mib, runs, live_jobs,"
        " share_ppm FROM v_queue_share",
    ) == [("main", ["acme"], 2000, None, 750, 250, 2, 2, 375_000)]


def test_shares_are_summed_up_the_tree_of_queues(tmp_path: Path) -> None:
    """Two devices, 163,840 MiB and 64 CPUs. train holds half of one device and serve a whole one with 6.4 CPUs."""
    tape = Tape()
    team = QueueId("team")
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(
            [
                tape.fact(a_node(devices=2)),
                tape.fact(a_queue("team", tenants=(), guaranteed_compute_milli=1000, limit_compute_milli=2000)),
                tape.fact(a_queue("train", parent=team, guaranteed_compute_milli=1000, weight=3)),
                tape.fact(a_queue("serve", parent=team, limit_cpu_milli=8000, is_cordoned=True)),
                tape.fact(a_queue("idle")),
                tape.fact(a_job("t", queue=QueueId("train"))),
                tape.fact(a_placement("acme/t", compute_milli=500, memory_mib=8192)),
                tape.fact(a_job("s", queue=QueueId("serve"))),
                tape.fact(a_placement("acme/s", device=1, compute_milli=1000, memory_mib=81_920, cpu_milli=6400)),
                tape.fact(a_job("w", queue=QueueId("serve"))),
            ]
        )
        rows = asked(
            log,
            "SELECT queue, parent, guaranteed_compute_milli, limit_compute_milli, held_compute_milli,"
            " borrowed_compute_milli, held_memory_mib, held_cpu_milli, held_jobs, live_jobs, waiting, weight,"
            " dominant_ppm, is_cordoned FROM v_queue_share ORDER BY queue",
        )
    assert rows == [
        ("idle", None, None, None, 0, 0, 0, 0, 0, 0, 0, 1, 0, False),
        # A whole device of two, half the memory, a tenth of the CPUs.
        ("serve", "team", None, None, 1000, 1000, 81_920, 6400, 1, 2, 1, 1, 500_000, True),
        ("team", None, 1000, 2000, 1500, 500, 90_112, 6400, 2, 3, 1, 1, 750_000, False),
        ("train", "team", 1000, None, 500, 0, 8192, 0, 1, 1, 0, 3, 250_000, False),
    ]


def test_health_of_nodes_and_devices_in_order(log: EventLog) -> None:
    assert asked(
        log, "SELECT ordinal, kind, device_uuid, before, after, code, reason, silent_ms FROM v_health ORDER BY ordinal"
    ) == [
        (8, "NodeRegistered", None, None, None, None, "", None),
        (23, "NodeSuspected", None, None, None, None, "", 5100),
        (24, "NodeTrusted", None, None, None, None, "", 5900),
        (25, "DeviceHealthChanged", "GPU-node-1-0", "healthy", "degraded", "xid-63", "row remap", None),
    ]


def test_changes_of_queues_and_rules_with_what_was_before(log: EventLog) -> None:
    rows = asked(
        log,
        "SELECT ordinal, what, name, actor, reason, before ->> '$.limit_jobs', before -> '$.config', "
        " after -> '$.config', after ->> '$.limit_compute_milli' FROM v_changes ORDER BY ordinal",
    )
    same, other = "the same rules by a new session", "other rules or settings"
    assert rows == [
        (3, "policy", "admission", None, other, None, None, '{"x":1}', None),
        (4, "policy", "admission", None, same, None, '{"x":1}', '{"x":1}', None),
        (5, "policy", "admission", None, other, None, '{"x":1}', '{"x":2}', None),
        (6, "queue", "main", "service:test", "", None, None, None, "4000"),
        (7, "queue", "main", "user:ann", "less", "9", None, None, "2000"),
    ]


def test_who_asked_the_log(log: EventLog) -> None:
    assert asked(
        log,
        "SELECT ordinal, actor, query_id, statement, rows, truncated, elapsed_ms, age_ms, log_ordinal, refused"
        " FROM v_queries",
    ) == [(26, "user:eve", "q1", "SELECT 1", 1, False, 3, 40, 25, None)]


def test_an_honest_history_contradicts_itself_nowhere(log: EventLog) -> None:
    """The three views that must be empty are, while jobs run and wait."""
    for name in ("v_reconciliation", "v_orphans", "v_double_slice"):
        assert asked(log, f"SELECT * FROM {name}") == [], name


def later(message: Recorded, by_ns: int) -> Recorded:
    return Recorded(
        stream=message.stream,
        seq=message.seq,
        recorded_at=message.recorded_at + by_ns,
        subject=message.subject,
        headers=message.headers,
        body=message.body,
    )


def test_every_contradiction_is_found(tmp_path: Path) -> None:
    """A view that must be empty would be worthless if it always were."""
    tape = Tape()
    success = ev.JobSucceeded(job_id=LOW, attempts=1, wait_ms=0, run_ms=0)
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(
            [
                tape.wish(a_job_request(job_id="low")),
                tape.fact(a_node()),
                tape.fact(a_node("node-2")),
                tape.fact(a_job("low")),
                tape.fact(a_job("low")),
                tape.fact(a_job("other", answers=7)),
                tape.fact(a_placement("acme/low")),
                tape.fact(a_placement("acme/low", attempt=2)),
                tape.fact(a_placement("acme/stranger")),
                tape.fact(ev.RunStarted(run_id=LOW_1, node_id=NODE, pid=1, started_at=NOON)),
                tape.fact(ev.RunStarted(run_id=LOW_1, node_id=NodeId("node-2"), pid=1, started_at=NOON)),
                tape.fact(success),
                tape.fact(success),
            ]
        )
        found = asked(log, "SELECT what, entity FROM v_reconciliation ORDER BY what, entity")
        assert found == [
            ("a job ended several times", "acme/low"),
            ("a run of a job that nobody admitted", "acme/stranger/0/1"),
            ("a run started several times", "acme/low/0/1"),
            ("a run told of by another node than its own", "acme/low/0/1"),
            ("a wish has several answers", "wish 1"),
            ("an answer to no wish", "JobAdmitted at 5"),
            ("two attempts of a replica at once", "acme/low/0/2"),
        ]
        log._connection.execute("DELETE FROM events WHERE ordinal = 9")
        log._connection.execute("INSERT INTO events BY NAME SELECT * EXCLUDE recorded FROM events WHERE ordinal = 8")
        found = asked(log, "SELECT what, entity FROM v_reconciliation WHERE what LIKE 'a seq%' OR what LIKE '%placed%'")
        assert found == [("a run was placed several times", "acme/low/0/2")]
        log._connection.execute("DELETE FROM events WHERE ordinal = 8")
        found = asked(log, "SELECT what, entity FROM v_reconciliation WHERE what LIKE 'a seq%' OR what LIKE 'the log%'")
        assert sorted(found) == [
            ("a sequence is missing or twice", "facts"),
            ("the log does not begin at its first row", "events"),
        ]


def test_every_orphan_is_found_and_only_after_a_minute(tmp_path: Path) -> None:
    """What is on its way to be released is none."""
    tape = Tape()
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append(
            [
                tape.fact(a_node()),
                tape.fact(a_job("low")),
                tape.fact(a_job("high")),
                tape.fact(a_placement("acme/low")),
                tape.fact(a_placement("acme/low", attempt=2)),
                tape.fact(a_placement("acme/high", device=1)),
                tape.fact(ev.NodeFenced(node_id=NODE, epoch=1, runs=(LOW_2,))),
                tape.fact(ev.JobCancelled(job_id=HIGH, actor="x")),
            ]
        )
        assert asked(log, "SELECT * FROM v_orphans") == []
        stray = ev.RunFinished(run_id=RunId("acme/x/0/1"), node_id=NODE, cause=RunCause.STALE, finished_at=NOON)
        log.append([later(tape.fact(stray), MINUTE)])
        found = asked(log, "SELECT what, run_id, epoch_ns(since) FROM v_orphans ORDER BY what, run_id")
    assert found == [
        ("a run that nobody placed", "acme/x/0/1", at(9) + MINUTE),
        ("slices of a job that ended", HIGH_1, at(8)),
        ("slices of an attempt that another follows", LOW_1, at(4)),
        ("slices on a node that was fenced", HIGH_1, at(7)),
        ("slices on a node that was fenced", LOW_1, at(7)),
    ]


def test_only_the_views_that_a_statement_needs_are_made() -> None:
    """Binding them costs more than many an answer."""
    assert [name for name, _ in views_in("SELECT 1")] == []
    assert [name for name, _ in views_in('select * from "V_WAITS"')] == ["v_event", "v_job", "v_run", "v_waits"]
    assert len(views_in(" ".join(name for name, _ in views()))) == len(views())


def test_every_view_is_documented_with_its_columns(log: EventLog) -> None:
    """Auditors write questions against docs/audit.md: what it says is what there is, in this order."""
    text = (Path(__file__).parents[3] / "docs" / "audit.md").read_text(encoding="utf-8")
    documented = {}
    for section in text.split("\n### ")[1:]:
        name, _, rest = section.partition("\n")
        documented[name.strip("`")] = re.findall(r"`([a-z0-9_]+)`", rest.strip().rpartition("\n\n")[2])
    assert documented == {name: list(log.ask(f"SELECT * FROM {name} LIMIT 0").columns) for name, _ in views()}


def test_memory_that_is_asked_for_and_never_used_is_named(tmp_path: Path) -> None:
    """Of runs that ended well, the largest peak of a device. Failures say nothing of the need."""
    tape = Tape()
    facts: list[ev.Fact] = [a_queue(), a_node()]
    for number, (peak, cause) in enumerate(
        ((9_000, RunCause.SUCCESS), (14_336, RunCause.SUCCESS), (2, RunCause.USER_ERROR), (800, RunCause.SUCCESS)), 1
    ):
        job, run = f"acme/j{number}", RunId(f"acme/j{number}/0/1")
        facts += [
            a_job(f"j{number}", answers=number, memory_mib=40_960),
            a_placement(job, memory_mib=40_960),
            ev.RunFinished(run_id=run, node_id=NODE, cause=cause, finished_at=NOON, peak_memory_mib=peak),
        ]
    facts.append(a_job("other", answers=9, command=("/bin/false",)))
    with EventLog.open(tmp_path / "log.duckdb") as log:
        log.append([tape.fact(fact) for fact in facts])
        rows = asked(log, "SELECT job_id, used_mib, runs, used_mib_max, suggested_mib, advice FROM v_memory ORDER BY 1")
    advice = "asked 40 GiB, never used more than 14 GiB in 3 runs"
    assert rows == [
        ("acme/j1", 9_000, 3, 14_336, 16_640, advice),
        ("acme/j2", 14_336, 3, 14_336, 16_640, advice),
        ("acme/j3", None, 3, 14_336, 16_640, advice),
        ("acme/j4", 800, 3, 14_336, 16_640, advice),
        ("acme/other", None, 0, None, None, None),
    ]
