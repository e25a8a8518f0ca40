"""The monitor as a process: settings, adapters, run."""

import asyncio
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
from msgspec import Meta

from apportion.contracts import events as ev
from apportion.contracts.causes import Severity
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import MONITOR, PoolId
from apportion.monitor import alerts, core, schemas
from apportion.monitor.auditing import Recorder
from apportion.monitor.checkpoints import Checkpoints
from apportion.monitor.figures import Figures
from apportion.monitor.hearing import Hearing
from apportion.monitor.keeping import Keeper
from apportion.monitor.log import EventLog, LogError, log_path
from apportion.monitor.measures import Seen, measures_of
from apportion.monitor.notify import Notifier
from apportion.monitor.reading import Reading
from apportion.monitor.readings import Readings, StreamFills
from apportion.monitor.replicas import Replicas
from apportion.monitor.scrape import PoolMetrics, Sources
from apportion.monitor.service import QueryService
from apportion.monitor.signing import key_path, signer_at
from apportion.monitor.writer import LogWriter
from apportion.pool.state import Pool
from apportion.runtime import telemetry
from apportion.runtime.clock import Clock, SystemClock
from apportion.runtime.disturbed import Disturbances
from apportion.runtime.drain import run_service
from apportion.runtime.health import HealthServer
from apportion.runtime.reactor import Reactor, SnapshotFile
from apportion.runtime.settings import Secret, SettingsInvalid, from_command_line
from apportion.runtime.standby import AuthorSettings, Vigil
from apportion.runtime.stream import Bus, BusShorter, RawMessage

SERVICE: Final = "monitor"
MEASURE_S: Final = 2.0

log = structlog.get_logger(__name__)


class MonitorSettings(AuthorSettings, frozen=True, kw_only=True):
    """What the monitor can be told."""

    suspect_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = core.SUSPECT_MS
    """After this much silence nothing new is placed on a node."""
    lease_ms: Annotated[int, Meta(ge=200, le=86_400_000)] = core.LEASE_MS
    """After this much silence a node is fenced and its runs move."""
    freeze_ms: Annotated[int, Meta(ge=1_000, le=86_400_000)] = core.FREEZE_MS
    """Frozen for so long while some nodes are heard, the control plane takes the silent ones for gone."""
    alert_rules: Path | None = None
    """A TOML file of [[rule]] tables: alert rules in the place of ours of the same name, and more."""
    webhook_url: str = ""
    """Where alerts are posted as JSON; empty: nowhere."""
    alertmanager_url: str = ""
    """An Alertmanager that is told of alerts by its API (v2); empty: none."""
    alert_token: Secret | None = None
    """Sent to both as a bearer token."""
    self_cordon: bool = True
    """Whether flapping nodes, and nodes on which runs fail, are cordoned without anybody asking."""
    log_batch_ms: Annotated[int, Meta(ge=1, le=1_000)] = 250
    """How long the log waits for more rows before it commits those that came."""
    anchor_command: str = ""
    """A program and its arguments that keep a signed checkpoint, JSON on standard input, where we can't change it."""
    anchor_s: Annotated[int, Meta(ge=1, le=86_400)] = 60
    """How often it is called at most."""


async def serve(settings: MonitorSettings, stop: asyncio.Event) -> None:
    """Run the monitor until ``stop``; whatever ends it before is raised."""
    metrics = telemetry.start(SERVICE, settings)
    itself = Disturbances(SERVICE) if settings.faults else None
    clock: Clock = itself or SystemClock()
    pool = PoolId(settings.pool)
    path = log_path(settings.data_dir, pool)
    event_log = await asyncio.to_thread(EventLog.without_what_was_erased, path)
    bus: Bus | None = None
    health: HealthServer | None = None
    try:
        bus = await Bus.connect(
            settings.bus_url,
            pool=pool,
            name=SERVICE,
            on_error=lambda err: log.warning("bus_error", error=str(err)),
            disturbances=itself,
            **settings.link(),
        )
        await bus.provision(replicas=settings.bus_replicas)
        signer = signer_at(key_path(settings.data_dir))
        checkpoints = Checkpoints(
            event_log,
            signer,
            pool=pool,
            anchor_command=settings.anchor_command,
            anchor_s=settings.anchor_s,
        )
        writer = LogWriter(
            event_log,
            bus,
            batch_s=settings.log_batch_ms / 1000,
            checkpoints=checkpoints,
            keeper=Keeper(event_log, signer),
            on_logged=metrics.logged,
        )
        recorder = Recorder()
        figures, readings = Figures(), Readings(bus, clock)
        notifier = Notifier(
            pool=pool,
            webhook_url=settings.webhook_url,
            alertmanager_url=settings.alertmanager_url,
            token=settings.alert_token,
            alerts=lambda: reactor.state.alerts,
            clock=clock,
        )
        witness = _Witness(recorder, figures, readings, notifier)
        reactor = Reactor(
            core=core,
            author=MONITOR,
            bus=bus,
            config={
                "suspect_ms": settings.suspect_ms,
                "lease_ms": settings.lease_ms,
                "freeze_ms": settings.freeze_ms,
                "self_cordon": int(settings.self_cordon),
                "alert_rules": _alert_rules(settings.alert_rules),
                "faults": int(settings.faults),
            },
            reads_wishes=True,
            snapshots=SnapshotFile(settings.data_dir / "snapshots" / f"{pool}-{SERVICE}.msgpack"),
            clock=clock,
            meter=metrics,
            vigil=Vigil(bus, MONITOR, is_standby=settings.standby, takeover_ms=settings.takeover_ms),
            witness=witness,
        )
        recorder.feed = reactor.feed
        witness.pool = lambda: reactor.state.pool
        readings.on_log = lambda: {stream: position.last_seq for stream, position in event_log.positions.items()}
        fills = StreamFills(bus)
        hearing = Hearing(bus, clock, reactor.feed, suspect_ms=settings.suspect_ms)
        queries = QueryService(
            bus=bus,
            event_log=event_log,
            replicas=Replicas(event_log, path.parent / "copies"),
            writer=writer,
            recorder=recorder,
            pool=lambda: reactor.state.pool,
            alerts=lambda: reactor.state.alerts,
            faults=lambda: reactor.state.faults,
            skews=hearing.skews,
            clock=clock,
        )
        reading = Reading(bus)
        metrics.lag_of = lambda: reactor.lag
        metrics.show(
            PoolMetrics(
                Sources(
                    pool=lambda: reactor.state.pool,
                    figures=figures,
                    readings=readings,
                    clock=clock,
                    is_active=lambda: reactor.lease is not None,
                    skews=lambda: hearing.skews.seconds(reactor.state.pool.nodes),
                    streams=lambda: fills.found,
                    log_entries=lambda: event_log.head.ordinal,
                    log_path=path,
                    is_connected=lambda: bus.client.is_connected,
                    reconnects=lambda: bus.client.stats["reconnects"],
                    bus_errors=lambda: bus.errors,
                    alerts=lambda: reactor.state.alerts,
                    notifier=notifier,
                )
            )
        )
        is_answering = asyncio.Event()
        health = HealthServer(
            SERVICE,
            settings.data_dir,
            port=settings.health_port,
            is_ready=lambda: (
                is_answering.is_set() or reactor.following.is_set(),
                {"role": reactor.role, "log_ordinal": event_log.head.ordinal, "facts_seq": reactor.state.pool.seq},
            ),
            metrics=metrics.prometheus,
            pages=schemas.pages(),
        )
        health.start()
        try:
            await writer.start()
        except LogError as err:
            await notifier.cry(_log_disagrees(err))
            raise
        await hearing.start()
        await readings.start()

        def seen() -> Seen:
            disk = shutil.disk_usage(path.parent)
            streams = readings.on_log()
            fresh = list(readings.devices())
            return Seen(
                devices=[(one.sample, readings.idle_s(one)) for one in fresh],
                pcie_bps={one.sample.uuid: one.pcie_bps for one in fresh if one.pcie_bps is not None},
                lags_ms={f"{who}/{stream}": round(s * 1000) for (who, stream), s in readings.lags_s().items()},
                log_behind={
                    stream.value: max(0, fills.found[stream.value].last_seq - seq)
                    for stream, seq in streams.items()
                    if stream.value in fills.found
                },
                disk_pct=100 - disk.free * 100 // disk.total,
                skews_ms={node: round(s * 1000) for node, s in hearing.skews.seconds(reactor.state.pool.nodes).items()},
            )

        async def measure() -> None:
            while True:
                await asyncio.sleep(MEASURE_S)
                measures = measures_of(reactor.state.pool, figures, seen(), clock.now())
                reactor.feed(core.Measured(at_ns=clock.monotonic(), measures=measures))

        async def notify_once_active() -> None:
            await reactor.ready.wait()
            notifier.begin()
            await notifier.run()

        beside = [
            asyncio.create_task(fills.run(), name="stream-fills"),
            asyncio.create_task(measure(), name="measure"),
            asyncio.create_task(notify_once_active(), name="notify"),
        ]

        async def answer_once_active() -> None:
            # Of several monitors one answers, or a question would have as many answers as there are.
            await reactor.ready.wait()
            await queries.start()
            await reading.start()
            is_answering.set()

        answering = asyncio.create_task(answer_once_active(), name="queries")
        try:
            await _until_stopped(stop, reactor, hearing, writer, beside)
        except (LogError, BusShorter) as err:
            await notifier.cry(_log_disagrees(err))
            raise
        finally:
            answering.cancel()
            for task in beside:
                task.cancel()
            queries.close()
            reading.close()
    finally:
        if health is not None:
            health.stop()
        if bus is not None:
            await bus.close()
        await asyncio.to_thread(event_log.close)
        metrics.shutdown()


def _log_disagrees(error: LogError | BusShorter) -> ev.AlertRaised:
    """That the bus is not the one that the log was written from: told to people alone, as the bus can't be trusted."""
    return ev.AlertRaised(
        rule="log-disagrees",
        severity=Severity.CRITICAL,
        value=1,
        threshold=1,
        unit="",
        summary="the log and the bus disagree: the monitor has ended, and nothing is admitted or placed",
        action=str(error),
    )


class _Witness:
    """What has to hear of each entry once it is folded."""

    def __init__(self, recorder: Recorder, figures: Figures, readings: Readings, notifier: Notifier) -> None:
        self.pool: Callable[[], Pool] = Pool
        self._recorder = recorder
        self._figures = figures
        self._readings = readings
        self._notifier = notifier

    def saw(self, raw: RawMessage, entry: Entry) -> None:
        self._recorder.saw(raw, entry)
        self._readings.saw(raw)
        self._figures.saw(entry, self.pool())
        self._notifier.saw(entry)

    def is_settled(self) -> bool:
        return self._recorder.is_settled()


async def _until_stopped(
    stop: asyncio.Event,
    reactor: "Reactor[core.State]",
    hearing: Hearing,
    writer: LogWriter,
    beside: Sequence["asyncio.Task[None]"],
) -> None:
    """Decide and write until told to stop or until one of them can't go on; the log is flushed last."""
    writing_stop = asyncio.Event()
    writing = asyncio.create_task(writer.run(writing_stop), name="writer")
    deciding = [
        asyncio.create_task(reactor.run(stop), name="reactor"),
        asyncio.create_task(hearing.run(stop), name="hearing"),
    ]
    try:
        await asyncio.wait({writing, *deciding, *beside}, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        for task in beside:  # they have no end of their own: one that has ended has failed
            if task.done():
                task.result()
        # What was decided last is on the bus by now, and goes into the log before it closes.
        ended = await asyncio.gather(*deciding, return_exceptions=True)
    finally:
        writing_stop.set()
    await writing
    for outcome in ended:
        if isinstance(outcome, BaseException):
            raise outcome


def load(argv: list[str]) -> MonitorSettings:
    """The settings of a monitor that was started with these arguments. Raises SettingsInvalid."""
    settings = from_command_line(MonitorSettings, SERVICE, argv).settings
    for name in ("webhook_url", "alertmanager_url"):
        url = getattr(settings, name)
        if url and not url.startswith(("http://", "https://")):
            raise SettingsInvalid(where=f"settings of {SERVICE}", key=name, expected="an http or https URL", found=url)
    _alert_rules(settings.alert_rules)
    if settings.suspect_ms < settings.lease_ms:
        return settings
    raise SettingsInvalid(
        where=f"settings of {SERVICE}",
        key="lease_ms",
        expected=f"more than suspect_ms ({settings.suspect_ms})",
        found=str(settings.lease_ms),
    )


def _alert_rules(path: Path | None) -> str:
    """The file's rules as JSON, which is how they reach the core; empty for none. Raises SettingsInvalid."""
    if path is None:
        return ""
    try:
        rules = tomllib.loads(path.read_text(encoding="utf-8"))["rule"]
        text = msgspec.json.encode(rules).decode()
        alerts.with_changes(text)
    except (OSError, ValueError, KeyError) as err:  # of msgspec, of tomllib and of the rules themselves
        raise SettingsInvalid(
            where=f"settings of {SERVICE}", key="alert_rules", expected="a TOML file of [[rule]] tables", found=str(err)
        ) from err
    return text


def main(argv: list[str] | None = None) -> int:
    """The exit code of a monitor that was started with these arguments."""
    try:
        settings = load(sys.argv[1:] if argv is None else argv)
    except SettingsInvalid as err:
        print(err, file=sys.stderr)
        return err.exit_code
    return run_service(lambda stop: serve(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
