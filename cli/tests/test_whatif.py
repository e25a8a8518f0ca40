"""What would have happened: the real cores on a virtual clock, against outcomes that were worked out by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apportion.cli.app import outcome
from apportion.cli.replaying import replay_all
from apportion.cli.whatif import stretch as stretches
from apportion.cli.whatif import trace as traces
from apportion.cli.whatif.engine import Simulation
from apportion.cli.whatif.figures import Figures, Reckoning
from apportion.cli.whatif.report import rows
from apportion.cli.whatif.stretch import Fleet
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import JobId, NodeId, RunId
from apportion.contracts.testing import NOON, a_job, a_node, a_placement, as_fact
from apportion.monitor.history import History
from apportion.monitor.log import EventLog
from apportion.monitor.testing import Recorded
from apportion.pool.state import Pool

S = 1_000_000_000
HEAD = "job_id,submit_s,duration_s,gpus,tenant,gpu_milli,gpu_memory_mib,service_class\n"


def files(folder: Path, jobs: str, fleet: str) -> tuple[Path, Path]:
    (folder / "jobs.csv").write_text(HEAD + jobs)
    (folder / "fleet.csv").write_text("nodes,devices,model,memory_mib\n" + fleet)
    return folder / "jobs.csv", folder / "fleet.csv"


def ends(entries: list[Entry]) -> dict[str, float]:
    """When each job succeeded, in seconds from the trace's beginning."""
    return {
        entry.event.job_id: (entry.recorded_at - traces.START) / S
        for entry in entries
        if isinstance(entry.event, ev.JobSucceeded)
    }


def decided(folder: Path, jobs: str, fleet: str, **config: int | str) -> tuple[traces.Trace, Simulation]:
    trace = traces.read(*files(folder, jobs, fleet))
    return trace, traces.simulated(trace, config=dict(config), until=2**62)


def test_who_shares_a_device_is_slowed_as_was_measured(tmp_path: Path) -> None:
    """678 s of work beside a neighbour take 1,000 s; it did 678 of its 1,000 meanwhile, and does the rest alone."""
    jobs = "a,0,678,1,acme,500,1000,\nb,0,1000,1,acme,500,1000,\n"
    _, done = decided(tmp_path, jobs, "1,1,h100-80,80000\n")
    assert ends(done.entries) == {"acme/a": 1000.1, "acme/b": 1322.1}


def test_a_job_waits_for_what_another_holds_and_a_large_one_is_a_gang(tmp_path: Path) -> None:
    """Two nodes of two devices: four GPUs for a minute, then one that waited for it; figures to the millisecond."""
    trace, done = decided(tmp_path, "a,0,60,4,acme,,,\nb,10,5,1,acme,,,\n", "2,2,h100-80,80000\n")
    placed = [entry.event for entry in done.entries if isinstance(entry.event, ev.RunPlaced)]
    assert [(run.run_id, len(run.slices)) for run in placed] == [
        ("acme/a/0/1", 2), ("acme/a/1/1", 2), ("acme/b/0/1", 1),
    ]  # fmt: skip
    assert ends(done.entries) == {"acme/a": 60.1, "acme/b": 65.2}
    figures = Reckoning(Pool(), traces.START, ()).reckon(done.entries, trace.asked_at, done.now + 1)
    assert (figures.requested, figures.started, figures.succeeded, figures.unfinished) == (2, 2, 2, 0)
    wait, took = figures.waits["all"], figures.completions["all"]
    assert (wait.p50_ms, wait.p95_ms) == (100, 50_200)
    assert (took.p50_ms, took.p95_ms) == (55_200, 60_100)
    assert figures.held_milli_ms == 4000 * 60_100 + 1000 * 5_100
    assert figures.capacity_milli_ms == 4000 * 65_200
    assert figures.stranded_milli_ms == 0


def a_log(path: Path, trace: traces.Trace, done: Simulation) -> None:
    """The simulated history as a log: what the services would have recorded, had it happened so."""
    messages = []
    for wish in trace.wishes:
        assert isinstance(wish.event, ev.Wish)
        made = codec.encode_wish(traces.POOL, wish.event, tenant=str(wish.tenant), event_id=wish.event_id, source="/t")
        messages.append((wish.recorded_at, 0, Stream.WISHES, wish.seq, made))
    for entry in done.entries:
        assert isinstance(entry.event, ev.Fact)
        assert entry.author is not None
        fact = codec.encode_fact(traces.POOL, entry.author, entry.event, event_id=entry.event_id, basis=entry.basis)
        messages.append((entry.recorded_at, 1, Stream.FACTS, entry.seq, fact))
    messages.sort(key=lambda one: one[:4])
    with EventLog.open(path) as log:
        log.append(
            [
                Recorded(stream=stream, seq=seq, recorded_at=at, subject=m.subject, headers=m.headers, body=m.body)
                for at, _, stream, seq, m in messages
            ]
        )


JOBS = "".join(
    f"j{n},{n * 7 % 60},{20 + n * 13 % 50},{1 + n % 2},{('acme', 'globex')[n % 2]},"
    f"{'' if n % 3 else 400},{'' if n % 3 else 9000},{('batch', 'online', 'spot')[n % 3]}\n"
    for n in range(24)
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 jobs of two tenants and three classes on two nodes of two devices, far too many at once."""
    folder = tmp_path_factory.mktemp("recorded")
    trace, done = decided(folder, JOBS, "2,2,h100-80,80000\n", policy="best_fit")
    a_log(folder / "log.duckdb", trace, done)
    return folder / "log.duckdb"


def said(stretch: stretches.Stretch, simulation: Simulation) -> tuple[list[Any], list[Any]]:
    """Both histories as when what was said, but for the sessions' claims, and for the ids that follow from them."""
    return _said(stretch.facts), _said(simulation.entries)


def _said(entries: list[Entry]) -> list[Any]:
    return [
        (entry.recorded_at, msgspec.structs.replace(entry.event, caused_by=""))
        for entry in entries
        if isinstance(entry.event, ev.Fact) and not isinstance(entry.event, ev.LeaseClaimed)
    ]


@pytest.mark.parametrize("first", [0, 40, 101])
def test_the_recorded_policy_simulated_is_what_was_recorded(first: int, recorded: Path) -> None:
    """Where the record was made by the model itself there is no model error: fact by fact, from any moment on."""
    with History.open(recorded) as history:
        last = history.last_seq
    stretch = stretches.read(recorded, None, first, last)
    again = stretches.simulated(stretch, config={}, fleet=Fleet())
    before, after = said(stretch, again)
    assert len(before) > 50
    assert after == before
    assert not again.assumed


def test_another_fleet_and_another_policy_come_out_otherwise(recorded: Path, tmp_path: Path) -> None:
    """With twice the nodes everybody is done sooner; with half of them later; and all the same each job once."""
    done = {}
    for name, arguments in {
        "more": ["--nodes", "4"],
        "less": ["--drop", "node-0002"],
        "spread": ["--policy", "spread", "--set", "runs_per_device_max=1"],
    }.items():
        assert outcome(["whatif", "--file", str(recorded), "--export", str(tmp_path / name), *arguments]) == 0
        lines = [json.loads(line) for line in (tmp_path / name / "whatif.jsonl").read_text().splitlines()]
        started = [line["body"]["run_id"] for line in lines if line["kind"] == "RunStarted"]
        assert len(started) == len(set(started))
        done[name] = (
            sum(line["kind"] == "JobSucceeded" for line in lines),
            max(line["recorded_at"] for line in lines if line["kind"] == "RunStarted"),
            {line["body"]["node_id"] for line in lines if line["kind"] == "RunPlaced"},
        )
    recorded_lines = (tmp_path / "more" / "recorded.jsonl").read_text().splitlines()
    recorded_last = max(x["recorded_at"] for x in map(json.loads, recorded_lines) if x["kind"] == "RunStarted")
    assert done["more"][0] == 24
    assert done["more"][1] < recorded_last
    assert len(done["more"][2]) == 4
    assert done["less"][0] < 24
    assert done["less"][2] == {"node-0001"}


def test_the_comparison_has_three_columns(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First the record, then the model of it, then what was asked; the same in JSON, in whole numbers."""
    assert outcome(["whatif", "--file", str(recorded), "--policy", "spread"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["FIGURE", "RECORDED", "RESIMULATED", "WHATIF"]
    assert outcome(["whatif", "--file", str(recorded), "--nodes", "3", "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    record, model, asked = answer["histories"]
    assert [each["history"] for each in answer["histories"]] == ["recorded", "resimulated", "whatif"]
    for name in ("waits", "completions", "held_milli_ms", "capacity_milli_ms", "stranded_milli_ms", "succeeded"):
        assert record[name] == model[name], name
    assert asked["capacity_milli_ms"] * 2 == record["capacity_milli_ms"] * 3
    assert asked["waits"]["all"]["p95_ms"] < record["waits"]["all"]["p95_ms"]
    assert set(record["waits"]) == {"all", "batch", "online", "spot"}
    assert answer["assumed_jobs"] == []


def test_a_trace_is_decided_by_several_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, fleet = files(tmp_path, JOBS, "1,4,h100-80,80000\n")
    arguments = ["simulate", "--trace", str(jobs), "--fleet", str(fleet), "--policy", "best_fit", "--policy", "spread"]
    assert outcome([*arguments, "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(each["history"], each["succeeded"]) for each in answer["histories"]] == [("best_fit", 24), ("spread", 24)]


@pytest.mark.parametrize(
    "arguments",
    [["--policy", "magic"], ["--set", "colour=1"], ["--set", "reserve_after_s=x"], ["--from", "9", "--to", "3"]],
)
def test_what_makes_no_sense_is_said_with_what_would(arguments: list[str], recorded: Path) -> None:
    assert outcome(["whatif", "--file", str(recorded), *arguments]) == 2


def test_a_trace_without_its_columns_is_refused(tmp_path: Path) -> None:
    jobs, fleet = files(tmp_path, "", "1,1,x,1\n")
    jobs.write_text("job,when\n")
    assert outcome(["simulate", "--trace", str(jobs), "--fleet", str(fleet)]) == 2


def test_a_log_without_what_a_job_said_is_replayed_and_says_which_decisions_rest_on_it(
    recorded: Path, tmp_path: Path
) -> None:
    """By the real cores: most of a busy pool's decisions come out the same, and none of the others counts as wrong."""
    path = Path(shutil.copyfile(recorded, tmp_path / "log.duckdb"))
    whole = replay_all(path)
    assert (whole["differences"], whole["erased"]) == (0, [])
    with EventLog.open(path) as log:
        said = ("JobRequested.v1", "JobAdmitted.v1", "RunPlaced.v1")
        about = "FROM events WHERE job_id = 'acme/j0' AND list_contains(?, type)"
        rows = log.ask(f"SELECT ordinal, stream_seq {about} ORDER BY ordinal", [said]).rows
        assert len(rows) == 3
        for ordinal, _ in rows:
            log.erase([ordinal], rewrite=lambda _: None)
    without = replay_all(path)
    assert without["differences"] == 0
    assert without["erased"][0]["rests_on"] == (f"wishes {rows[0][1]} (acme/j0)",)
    assert 0 < len(without["erased"]) < without["decisions"]
    with History.open(path) as history:
        assert history.at_seq(history.last_seq).seq == history.last_seq


def test_a_promise_that_came_due_was_kept_or_not() -> None:
    """Of waits and of deadlines, each by itself; what isn't due yet counts for nothing, nor what was taken back."""

    def fact(event: ev.Fact, seconds: int, seq: int) -> Entry:
        return as_fact(event, seq, at=NOON + seconds * S)

    def started(name: str) -> ev.RunStarted:
        return ev.RunStarted(run_id=RunId(f"acme/{name}/0/1"), node_id=NodeId("node-1"), pid=1, started_at=NOON)

    def ended(name: str) -> ev.JobSucceeded:
        return ev.JobSucceeded(job_id=JobId(f"acme/{name}"), attempts=1, wait_ms=1, run_ms=1)

    history = [
        (a_node(), 0),
        (a_job("in-time", max_wait_s=10, deadline_at=NOON + 30 * S), 0),
        (a_placement("acme/in-time"), 9),
        (started("in-time"), 10),
        (a_job("late", max_wait_s=10, deadline_at=NOON + 30 * S), 0),
        (a_placement("acme/late", device=1), 10),
        (started("late"), 11),
        (ended("in-time"), 30),
        (ended("late"), 31),
        (a_job("never", max_wait_s=10), 40),
        (a_job("taken-back", max_wait_s=10), 40),
        (ev.JobCancelled(job_id=JobId("acme/taken-back"), actor="user:ann", reason="r"), 45),
        (a_job("not-due", max_wait_s=60, deadline_at=NOON + 200 * S), 50),
    ]
    entries = [fact(event, at, seq) for seq, (event, at) in enumerate(history, 1)]
    figures = Reckoning(Pool(), NOON, ()).reckon(entries, {}, NOON + 100 * S)
    assert (figures.kept, figures.promised, figures.kept_ppm) == (2, 5, 400_000)
    (row,) = (row for row in rows({"whatif": figures, "recorded": Figures()}) if row["figure"] == "promises kept")
    assert row == {"figure": "promises kept", "whatif": "40.0 % (2 of 5)", "recorded": "-"}
