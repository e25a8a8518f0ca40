"""What a service says about itself: log lines, traces that follow one job through all services, and metrics.

Logs are for people and are no events: nothing downstream may parse them. Telemetry never decides anything, and the
unsampled path costs next to nothing.
"""

import hashlib
import logging
import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec
import structlog
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from apportion.runtime import semconv
from apportion.runtime.settings import Common, LogLevel, Traces

FIXED_KEYS: Final = ("ts", "level", "event", "service", "node", "job_id", "tenant", "seq", "trace_id", "span_id")
"""Every line has the same names for these, in this order; a line has those that it knows."""
TRACE_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A trace file that has grown to this becomes ``<service>.jsonl.1``; the one before that is dropped."""
_SAMPLED_DIGITS: Final = frozenset("13579bdfBDF")
"""Last digits of a traceparent whose lowest flag bit, "sampled", is set. Other bits may be set too: SDKs set them."""
_TRACEPARENT_LENGTH: Final = 55


class TracesUnavailable(Exception):
    """Traces were asked for in a way that is not installed."""

    exit_code = 2


# Logs --------------------------------------------------------------------------------------------------------------


def configure_logs(
    service: str, *, node: str = "", level: LogLevel = LogLevel.INFO, stream: TextIO | None = None
) -> None:
    """Log lines of this process: JSON on stderr, or coloured text where stderr is a terminal.

    The standard library's loggers go the same way. Called again it replaces the earlier set-up.
    """
    out = sys.stderr if stream is None else stream
    is_console = out.isatty()
    known = {"service": service, **({"node": node} if node else {})}

    def add_known(_logger: object, _name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in known.items():
            line.setdefault(key, value)
        return line

    renderers: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(timestamp_key="ts", colors="NO_COLOR" not in os.environ)]
        if is_console
        else [structlog.processors.format_exc_info, _in_fixed_order, structlog.processors.JSONRenderer(_json_text)]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            add_known,
            _trace_ids,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level.value),
        logger_factory=structlog.WriteLoggerFactory(out),
        # Loggers are made at import; a cached one would keep writing to what was configured before.
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler, _LibraryLines)]
    root.addHandler(_LibraryLines())
    # Libraries chat on info; what they warn about may be ours to know.
    root.setLevel(logging.DEBUG if level is LogLevel.DEBUG else logging.WARNING)


class _LibraryLines(logging.Handler):
    """What libraries log through the standard library, as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        line = structlog.get_logger().bind(logger=record.name, message=record.getMessage())
        line.log(record.levelno, "library_logged", exc_info=record.exc_info or None)


def _trace_ids(_logger: object, _name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """``traceparent=`` given to a line becomes its two ids."""
    if traceparent := line.pop("traceparent", None):
        parts = str(traceparent).split("-")
        if len(parts) == 4:
            line["trace_id"], line["span_id"] = parts[1], parts[2]
    return line


def _in_fixed_order(_logger: object, _name: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    fixed = {key: line[key] for key in FIXED_KEYS if key in line}
    return fixed | {key: line[key] for key in sorted(line) if key not in fixed}


def _json_text(line: object, **_options: object) -> str:
    return msgspec.json.encode(line, enc_hook=str).decode()


# Traces ------------------------------------------------------------------------------------------------------------


def trace_id_of_job(job_id: str) -> str:
    """The trace that a job belongs to when its publisher named none: 32 hex digits, the same in every service.

    >>> trace_id_of_job("acme/train-7") == trace_id_of_job("acme/train-7") != trace_id_of_job("acme/train-8")
    True
    """
    return hashlib.blake2b(job_id.encode(), digest_size=16).hexdigest()


def is_traceparent(text: str) -> bool:
    """True where ``text`` is a W3C traceparent whose ids can be used."""
    parts = text.split("-")
    if len(text) < _TRACEPARENT_LENGTH or len(parts) < 4 or list(map(len, parts[:4])) != [2, 32, 16, 2]:
        return False
    try:
        version, trace_id, span_id, _flags = (int(part, 16) for part in parts[:4])
    except ValueError:
        return False
    return version != 0xFF and trace_id != 0 and span_id != 0


def _context_of(traceparent: str) -> Context:
    """The context in which spans that follow from it begin."""
    _, trace_id, span_id, _ = traceparent.split("-")[:4]
    remote = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(TraceFlags.SAMPLED))
    return otel.set_span_in_context(NonRecordingSpan(remote))


class _JobIds(RandomIdGenerator):
    """Random span ids; a root's trace id is the one that was set just before."""

    def __init__(self) -> None:
        self.next_trace_id = 0

    def generate_trace_id(self) -> int:
        trace_id, self.next_trace_id = self.next_trace_id, 0
        return trace_id or super().generate_trace_id()


class TraceFile(SpanExporter):
    """Spans as JSON lines, one span a line, readable by DuckDB and by people."""

    def __init__(self, path: Path, *, service: str, node: str = "", bytes_max: int = TRACE_FILE_BYTES_MAX) -> None:
        self._path = path
        self._known = {"service": service, **({"node": node} if node else {})}
        self._bytes_max = bytes_max

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans. A full disk costs spans, never the service."""
        lines = b"".join(msgspec.json.encode(self._row(span), enc_hook=str) + b"\n" for span in spans)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(fd).st_size + os.write(fd, lines)
            finally:
                os.close(fd)
            if size >= self._bytes_max:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
        except OSError as err:
            structlog.get_logger().warning("trace_file_failed", path=str(self._path), error=str(err), spans=len(spans))
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is held open between exports."""

    def _row(self, span: ReadableSpan) -> dict[str, object]:
        context = span.get_span_context()
        assert context is not None
        return {
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "parent_span_id": None if span.parent is None else f"{span.parent.span_id:016x}",
            "name": span.name,
            "kind": span.kind.name.lower(),
            **self._known,
            "started_at": span.start_time,
            "ended_at": span.end_time,
            "status": span.status.status_code.name.lower(),
            "attributes": dict(span.attributes or {}),
        }


# Metrics -----------------------------------------------------------------------------------------------------------


class _Seconds:
    """A histogram of durations that costs an addition. The SDK's costs ten times that, five times in each round."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(semconv.SECONDS_BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(semconv.SECONDS_BOUNDS, seconds)] += 1
        self.total += seconds


class _Durations(Collector):
    """Shows durations to whoever scrapes: rows of (name, about, labels, durations)."""

    def __init__(self, rows: Sequence[tuple[str, str, Mapping[str, str], _Seconds]]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """One histogram a row."""
        bounds = [*map(str, semconv.SECONDS_BOUNDS), "+Inf"]
        for name, about, labels, seconds in self._rows:
            family = HistogramMetricFamily(
                name.replace(".", "_"), about, labels=[key.replace(".", "_") for key in labels], unit="seconds"
            )
            buckets = list(zip(bounds, accumulate(seconds.counts), strict=True))
            family.add_metric(list(labels.values()), buckets, sum_value=seconds.total)
            yield family


# All together ------------------------------------------------------------------------------------------------------


class Telemetry:
    """One service's traces and metrics. It is what a reactor reports to: once a round, never per event.

    Totals are plain numbers that are read when somebody scrapes, so that counting costs an addition.
    """

    def __init__(
        self,
        service: str,
        *,
        node: str = "",
        data_dir: Path,
        traces: Traces = Traces.OFF,
        trace_sample_pct: int = 5,
    ) -> None:
        self.service = service
        self.lag_of: Callable[[], int] = lambda: 0
        """How many entries this service has received and not folded yet; set by whoever knows."""
        self._decisions = 0
        self._facts_published = 0
        self._entries_folded = 0
        labels = {semconv.LABEL_SERVICE: service, **({semconv.LABEL_NODE: node} if node else {})}
        self._labels = labels
        self._send_labels = {**labels, semconv.MESSAGING_SYSTEM: semconv.SYSTEM_NATS, **_operation("publish", "send")}
        self._process_labels = {
            **labels,
            semconv.MESSAGING_SYSTEM: semconv.SYSTEM_NATS,
            **_operation("fold", "process"),
        }
        resource = Resource(
            {semconv.SERVICE_NAME: f"apportion-{service}", **({semconv.SERVICE_INSTANCE_ID: node} if node else {})}
        )
        self._registry = CollectorRegistry()
        # CPU seconds and memory of the process: where the time goes, by service.
        ProcessCollector(registry=self._registry)
        reader = PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)
        self._meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self.meter = self._meters.get_meter("apportion")
        """For what a service measures beside its reactor."""
        self._fold_seconds, self._decide_seconds, self._publish_seconds = _Seconds(), _Seconds(), _Seconds()
        self._registry.register(self._durations())
        self._make_instruments()
        self._sample_below = round(trace_sample_pct / 100 * 2**64) if traces is not Traces.OFF else 0
        self._ids = _JobIds()
        self._tracers: TracerProvider | None = None
        self._open: list[otel.Span] = []
        self.tracer: otel.Tracer = otel.NoOpTracer()
        if traces is not Traces.OFF:
            self._tracers = TracerProvider(
                sampler=ParentBased(TraceIdRatioBased(trace_sample_pct / 100)),
                resource=resource,
                id_generator=self._ids,
                shutdown_on_exit=False,
            )
            path = data_dir / "traces" / f"{service}{f'-{node}' if node else ''}.jsonl"
            exporter = TraceFile(path, service=service, node=node) if traces is Traces.FILE else _otlp_exporter()
            self._tracers.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
            self.tracer = self._tracers.get_tracer("apportion")

    def _make_instruments(self) -> None:
        total = self._show_total

        def observe_lag(_options: CallbackOptions) -> list[Observation]:
            return [Observation(self.lag_of(), self._labels)]

        total(semconv.DECISIONS, lambda: self._decisions, "Decisions that stated at least one fact.", self._labels)
        total(semconv.FACTS_PUBLISHED, lambda: self._facts_published, "Facts stored by the bus.", self._labels)
        total(semconv.ENTRIES_FOLDED, lambda: self._entries_folded, "Entries folded into the state.", self._labels)
        total(semconv.MESSAGING_CLIENT_SENT, lambda: self._facts_published, "Messages sent.", self._send_labels)
        total(
            semconv.MESSAGING_CLIENT_CONSUMED, lambda: self._entries_folded, "Messages consumed.", self._process_labels
        )
        self.meter.create_observable_gauge(semconv.LAG, [observe_lag], description="Entries that are not folded yet.")

    def _show_total(self, name: str, read: Callable[[], int], about: str, labels: Mapping[str, str]) -> None:
        def observe(_options: CallbackOptions) -> list[Observation]:
            return [Observation(read(), labels)]

        self.meter.create_observable_counter(name, [observe], description=about)

    def show_total(self, name: str, read: Callable[[], int], about: str) -> None:
        """Show a total that the service itself counts; ``read`` is called whenever somebody scrapes."""
        self._show_total(name, read, about, self._labels)

    def show(self, collector: Collector) -> None:
        """Show whatever ``collector`` has whenever somebody scrapes."""
        self._registry.register(collector)

    def _durations(self) -> "_Durations":
        publish, fold = self._publish_seconds, self._fold_seconds
        return _Durations(
            [
                (semconv.FOLD, "One round's folding.", self._labels, fold),
                (semconv.DECIDE, "One decision.", self._labels, self._decide_seconds),
                (semconv.PUBLISH, "One batch, from sending to its acknowledgement.", self._labels, publish),
                # The same durations under the names that general messaging dashboards look for.
                (semconv.MESSAGING_CLIENT_OPERATION_DURATION, "One batch sent.", self._send_labels, publish),
                (semconv.MESSAGING_PROCESS_DURATION, "One round's messages processed.", self._process_labels, fold),
            ]
        )

    # What a reactor reports.

    def folded(self, entries: int, seconds: float) -> None:
        """``entries`` were folded in one go."""
        self._entries_folded += entries
        self._fold_seconds.add(seconds)

    def decided(self, facts: int, seconds: float) -> None:
        """One decision stated ``facts`` facts, or none."""
        self._decisions += facts > 0
        self._decide_seconds.add(seconds)
        if self._open:
            # Their batch was never acknowledged to us; reading settles what became of it.
            self._end_spans("unknown")

    def published(self, facts: int, seconds: float) -> None:
        """The bus has stored ``facts`` facts in one batch."""
        self._facts_published += facts
        self._publish_seconds.add(seconds)
        if self._open:
            self._end_spans("stored")

    def trace(self, event_type: str, job_id: str, parent: str) -> str:
        """The traceparent of a fact that follows from ``parent``.

        Where the job isn't sampled, ``parent`` itself; where it has none, a root whose ids derive from the job. Where
        it is sampled, a new span's, which lasts until the batch is reported as published.
        """
        if len(parent) >= _TRACEPARENT_LENGTH:
            # By hand, as the SDK takes ten times as long to say "not sampled".
            if parent[54] not in _SAMPLED_DIGITS or self._tracers is None:
                return parent
            if is_traceparent(parent):
                return self._span(event_type, job_id, _context_of(parent))
        root = hashlib.blake2b(job_id.encode(), digest_size=16).hexdigest()
        if int(root[16:], 16) >= self._sample_below:
            return f"00-{root}-{root[:16]}-00"
        self._ids.next_trace_id = int(root, 16)
        return self._span(event_type, job_id, otel.set_span_in_context(otel.INVALID_SPAN))

    def logged(self, event_type: str, job_id: str, parent: str) -> None:
        """Tell that an event of a sampled job is in the log: the last span of each step. Others cost a comparison."""
        is_sampled = len(parent) >= _TRACEPARENT_LENGTH and parent[54] in _SAMPLED_DIGITS
        if is_sampled and self._tracers is not None and is_traceparent(parent):
            self.tracer.start_span(
                f"log {event_type}",
                _context_of(parent),
                otel.SpanKind.CONSUMER,
                {
                    semconv.MESSAGING_SYSTEM: semconv.SYSTEM_NATS,
                    **_operation("log", "process"),
                    semconv.EVENT_TYPE: event_type,
                    semconv.JOB_ID: job_id,
                },
            ).end()

    def _span(self, event_type: str, job_id: str, context: Context) -> str:
        span = self.tracer.start_span(
            f"publish {event_type}",
            context,
            otel.SpanKind.PRODUCER,
            {
                semconv.MESSAGING_SYSTEM: semconv.SYSTEM_NATS,
                **_operation("publish", "send"),
                semconv.EVENT_TYPE: event_type,
                semconv.JOB_ID: job_id,
            },
        )
        self._open.append(span)
        made = span.get_span_context()
        return f"00-{made.trace_id:032x}-{made.span_id:016x}-01"

    def _end_spans(self, outcome: str) -> None:
        for span in self._open:
            span.set_attribute(semconv.OUTCOME, outcome)
            span.end()
        self._open.clear()

    # What others ask for.

    def prometheus(self) -> bytes:
        """All metrics, as Prometheus text."""
        return generate_latest(self._registry)

    def shutdown(self) -> None:
        """Write what is still held. Idempotent."""
        self._end_spans("unknown")
        if self._tracers is not None:
            self._tracers.shutdown()
            self._tracers = None
        self._meters.shutdown()


def start(service: str, settings: Common, *, node: str = "") -> Telemetry:
    """Logs configured, and the telemetry of this service as its settings say. Raises TracesUnavailable."""
    configure_logs(service, node=node, level=settings.log_level)
    return Telemetry(
        service,
        node=node,
        data_dir=settings.data_dir,
        traces=settings.traces,
        trace_sample_pct=settings.trace_sample_pct,
    )


def _operation(name: str, kind: str) -> dict[str, str]:
    return {semconv.MESSAGING_OPERATION_NAME: name, semconv.MESSAGING_OPERATION_TYPE: kind}


def _otlp_exporter() -> SpanExporter:
    """The OTLP exporter over HTTP, configured by OTEL_EXPORTER_OTLP_* as everywhere; it is an extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  (an extra)
    except ImportError as err:
        raise TracesUnavailable(
            "traces = otlp: expected the OTLP exporter, found it not installed. "
            "Install it with 'pip install apportion-runtime[otlp]', or set traces = file."
        ) from err
    exporter: SpanExporter = OTLPSpanExporter()
    return exporter
