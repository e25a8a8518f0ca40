"""Log lines, traces and metrics as somebody who reads them finds them."""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from apportion.runtime import telemetry
from apportion.runtime.settings import Common, LogLevel, Secret, Traces
from apportion.runtime.telemetry import FIXED_KEYS, Telemetry, TraceFile, TracesUnavailable, configure_logs

UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]
    structlog.reset_defaults()


MakeTelemetry = Callable[..., Telemetry]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeTelemetry]:
    made: list[Telemetry] = []

    def one(service: str = "placer", traces: Traces = Traces.FILE, pct: int = 100) -> Telemetry:
        made.append(Telemetry(service, data_dir=tmp_path, traces=traces, trace_sample_pct=pct))
        return made[-1]

    yield one
    for each in made:
        each.shutdown()


def spans_of(data_dir: Path, service: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (data_dir / "traces" / f"{service}.jsonl").read_text().splitlines()]


def samples(service: Telemetry) -> dict[str, float]:
    """Every sample by name, with labels where a name has several."""
    return {
        sample.name + (sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(service.prometheus().decode())
        for sample in family.samples
    }


# Logs


def test_a_line_is_json_with_fixed_keys_in_fixed_order() -> None:
    """People grep, tools select: both rely on names that never move."""
    out = io.StringIO()
    configure_logs("placer", node="node-1", stream=out)
    structlog.get_logger("any").info("run_placed", zebra=1, seq=7, tenant="acme", job_id="acme/a", traceparent=SAMPLED)
    line = json.loads(out.getvalue())
    assert list(line) == [*FIXED_KEYS, "zebra"]
    assert line["ts"].endswith("Z")
    assert {key: line[key] for key in FIXED_KEYS if key != "ts"} == {
        "level": "info",
        "event": "run_placed",
        "service": "placer",
        "node": "node-1",
        "job_id": "acme/a",
        "tenant": "acme",
        "seq": 7,
        "trace_id": SAMPLED[3:35],
        "span_id": SAMPLED[36:52],
    }


def test_lines_below_the_level_are_not_written_and_secrets_never() -> None:
    """The level is the operator's; a secret in a line is an accident waiting."""
    out = io.StringIO()
    configure_logs("placer", level=LogLevel.WARNING, stream=out)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud", token=Secret("s3cret"), path=Path("/x"))
    (line,) = out.getvalue().splitlines()
    assert (json.loads(line)["event"], json.loads(line)["path"]) == ("loud", "/x")
    assert "s3cret" not in line


def test_an_exception_and_a_librarys_warning_are_lines_too() -> None:
    """One format on stderr, or a collector chokes on what it cannot parse."""
    out = io.StringIO()
    configure_logs("placer", stream=out)
    configure_logs("placer", stream=out)
    try:
        _ = 1 // 0
    except ZeroDivisionError:
        structlog.get_logger().exception("sum_failed")
    logging.getLogger("nats.aio").warning("slow %s", "consumer")
    logging.getLogger("nats.aio").info("chatter")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert "ZeroDivisionError" in first["exception"]
    assert (second["event"], second["logger"], second["message"]) == ("library_logged", "nats.aio", "slow consumer")


def test_a_terminal_gets_text() -> None:
    """JSON is for machines."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    configure_logs("placer", stream=out)
    structlog.get_logger().info("ready", seq=3)
    assert "ready" in out.getvalue()
    assert not out.getvalue().startswith("{")


# Traces


def test_one_trace_follows_a_job_through_two_services(make: MakeTelemetry, tmp_path: Path) -> None:
    """The chain of parents is the job's life; one id finds it in all files."""
    admission, placer = make("admission"), make("placer")
    admitted = admission.trace("JobAdmitted", "acme/a", SAMPLED)
    admission.published(1, 0.002)
    placed = placer.trace("RunPlaced", "acme/a", admitted)
    placer.published(1, 0.002)
    assert placed != admitted != SAMPLED
    admission.shutdown()
    placer.shutdown()
    (first,), (second,) = spans_of(tmp_path, "admission"), spans_of(tmp_path, "placer")
    assert first["trace_id"] == second["trace_id"] == SAMPLED[3:35]
    assert first["parent_span_id"] == SAMPLED[36:52]
    assert second["parent_span_id"] == first["span_id"] == admitted[36:52]
    assert (second["name"], second["service"], second["kind"]) == ("publish RunPlaced", "placer", "producer")
    assert second["attributes"] == {
        "messaging.system": "nats",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "apportion.event.type": "RunPlaced",
        "apportion.job.id": "acme/a",
        "apportion.outcome": "stored",
    }


def test_the_log_ends_each_step_of_a_sampled_job_and_of_no_other(make: MakeTelemetry, tmp_path: Path) -> None:
    """What a job's trace shows last is that its event is kept."""
    monitor = make("monitor")
    monitor.logged("RunPlaced.v1", "acme/a", SAMPLED)
    monitor.logged("RunPlaced.v1", "acme/b", SAMPLED[:-1] + "0")
    monitor.logged("RunPlaced.v1", "acme/c", "nonsense")
    monitor.shutdown()
    (only,) = spans_of(tmp_path, "monitor")
    assert (only["name"], only["kind"], only["trace_id"]) == ("log RunPlaced.v1", "consumer", SAMPLED[3:35])
    assert only["parent_span_id"] == SAMPLED[36:52]


@pytest.mark.parametrize("traces", [Traces.OFF, Traces.FILE])
@pytest.mark.parametrize("flags", ["00", "02"])
def test_an_unsampled_trace_is_passed_on_unchanged(make: MakeTelemetry, traces: Traces, flags: str) -> None:
    """Whoever began the trace decided for everybody; newer SDKs set further flag bits."""
    parent = UNSAMPLED[:-2] + flags
    assert make(traces=traces).trace("RunPlaced", "acme/a", parent) == parent


def test_a_service_without_traces_does_not_break_those_of_others(make: MakeTelemetry) -> None:
    """The next service finds its parent, one step further up."""
    assert make(traces=Traces.OFF).trace("RunPlaced", "acme/a", SAMPLED) == SAMPLED


@pytest.mark.parametrize(
    "parent", ["", "nonsense", "00-" + "0" * 32 + SAMPLED[35:], SAMPLED.replace("a", "x"), SAMPLED.replace("-", "_")]
)
def test_a_job_without_a_usable_trace_gets_one_from_its_id(make: MakeTelemetry, parent: str) -> None:
    """Every service derives the same id by itself, so one restart does not split a job's trace in two."""
    traced = {service: make(service).trace("RunPlaced", "acme/a", parent) for service in ("admission", "placer")}
    assert {text[3:35] for text in traced.values()} == {telemetry.trace_id_of_job("acme/a")}
    assert all(telemetry.is_traceparent(text) and text.endswith("-01") for text in traced.values())


def test_services_agree_on_which_jobs_are_sampled(make: MakeTelemetry) -> None:
    """Half a trace is worth less than none."""
    jobs = [f"acme/{number}" for number in range(400)]
    chosen = [
        {job for job in jobs if service.trace("JobAdmitted", job, "").endswith("-01")}
        for service in (make("admission", pct=25), make("placer", pct=25))
    ]
    assert chosen[0] == chosen[1]
    assert 60 <= len(chosen[0]) <= 140
    assert not [job for job in jobs if make(pct=0).trace("JobAdmitted", job, "").endswith("-01")]


def test_a_span_whose_batch_was_not_acknowledged_says_so(make: MakeTelemetry, tmp_path: Path) -> None:
    """It may be stored or not; the log tells, the trace doesn't guess."""
    placer = make()
    placer.trace("RunPlaced", "acme/a", SAMPLED)
    placer.decided(1, 0.001)
    placer.trace("RunPlaced", "acme/a", SAMPLED)
    placer.shutdown()
    placer.shutdown()
    outcomes = [span["attributes"] for span in spans_of(tmp_path, "placer")]
    assert [str(one).count("'apportion.outcome': 'unknown'") for one in outcomes] == [1, 1]


def test_a_full_trace_file_makes_room_and_a_broken_disk_costs_only_spans(make: MakeTelemetry, tmp_path: Path) -> None:
    """Telemetry never takes a service down."""
    path = tmp_path / "small.jsonl"
    placer = make()
    exporter = TraceFile(path, service="placer", bytes_max=1)
    placer.trace("RunPlaced", "acme/a", SAMPLED)
    span = placer._open[0]
    placer.published(1, 0.001)
    assert exporter.export([span]).name == "SUCCESS"  # type: ignore[list-item]
    assert exporter.export([span]).name == "SUCCESS"  # type: ignore[list-item]
    assert not path.exists()
    assert path.with_name("small.jsonl.1").read_text().count("\n") == 1
    blocked = TraceFile(tmp_path / "small.jsonl.1" / "x.jsonl", service="placer")
    assert blocked.export([span]).name == "FAILURE"  # type: ignore[list-item]


def test_otlp_without_its_exporter_is_refused_with_what_to_do(
    make: MakeTelemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces that go nowhere without a word are found out when they are needed."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracesUnavailable, match=r"apportion-runtime\[otlp\]"):
        make(traces=Traces.OTLP)


# Metrics


def test_the_names_of_our_metrics_are_an_interface(make: MakeTelemetry) -> None:
    """Dashboards and alerts are built on them."""
    ours = {name for name in samples(make()) if "bucket" not in name and not name.startswith(("process_", "target"))}
    assert ours == {
        "apportion_decisions_total",
        "apportion_entries_folded_total",
        "apportion_facts_published_total",
        "apportion_lag_entries",
        *(
            f"{name}_seconds_{part}"
            for name in (
                "apportion_fold",
                "apportion_decide",
                "apportion_publish",
                "messaging_client_operation_duration",
                "messaging_process_duration",
            )
            for part in ("count", "sum")
        ),
        "messaging_client_consumed_messages_total",
        "messaging_client_sent_messages_total",
    }


def test_a_round_is_counted_where_it_belongs(make: MakeTelemetry) -> None:
    """Bounds hold their own value; a decision that says nothing is timed, not counted."""
    placer = make()
    placer.folded(40, 0.001)
    placer.folded(2, 0.0011)
    placer.decided(0, 0.2)
    placer.decided(3, 100.0)
    placer.published(3, 0.004)
    placer.lag_of = lambda: 5
    said = samples(placer)
    assert said["apportion_entries_folded_total"] == said["messaging_client_consumed_messages_total"] == 42
    assert said["apportion_decisions_total"] == 1
    assert said["apportion_facts_published_total"] == said["messaging_client_sent_messages_total"] == 3
    assert said["apportion_lag_entries"] == 5
    fold = [said[f"apportion_fold_seconds_bucket{le}"] for le in ("0.001", "0.0025", "60.0", "+Inf")]
    assert fold == [1, 2, 2, 2]
    assert said["apportion_fold_seconds_sum"] == pytest.approx(0.0021)
    decide = [said[f"apportion_decide_seconds_bucket{le}"] for le in ("0.1", "0.25", "60.0", "+Inf")]
    assert decide == [0, 1, 1, 2]
    assert said["messaging_client_operation_duration_seconds_count"] == 1


def test_no_label_grows_with_the_jobs(make: MakeTelemetry) -> None:
    """A job id in a label would fill the metrics store."""
    placer = make()
    before = len(placer.prometheus().splitlines())
    for number in range(200):
        placer.trace("RunPlaced", f"acme/{number}", "")
        placer.decided(1, 0.001)
        placer.published(1, 0.001)
    assert len(placer.prometheus().splitlines()) == before


def test_start_takes_all_from_the_settings(tmp_path: Path) -> None:
    """One line of wiring in each service."""
    service = telemetry.start("placer", Common(data_dir=tmp_path, traces=Traces.FILE, trace_sample_pct=100), node="n1")
    service.trace("RunPlaced", "acme/a", "")
    service.shutdown()
    assert spans_of(tmp_path, "placer-n1")[0]["node"] == "n1"
