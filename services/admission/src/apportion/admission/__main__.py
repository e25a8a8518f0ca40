"""Admission as a process: settings, bus, reactor, run."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Final

import structlog
from msgspec import Meta

from apportion.admission import core, ingress
from apportion.admission.asks import Asks
from apportion.admission.dead_letters import DeadLetters
from apportion.admission.state import POOL, POOL_PENDING_MAX, TENANT_PENDING_MAX, WISHES_PER_ROUND, WISHES_PER_ROUND_MAX
from apportion.admission.validate import BUFFER_PCT, BUFFER_PCT_MAX, BUFFER_PCT_MIN, DEFAULT_MODES, DEFAULT_SHARES
from apportion.contracts.causes import Mode, WorkloadKind
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import ADMISSION, PoolId
from apportion.runtime import telemetry
from apportion.runtime.clock import Clock
from apportion.runtime.disturbed import Disturbances
from apportion.runtime.drain import run_service
from apportion.runtime.health import HealthServer
from apportion.runtime.reactor import Reactor, SnapshotFile
from apportion.runtime.settings import SettingsInvalid, from_command_line
from apportion.runtime.standby import AuthorSettings, Vigil
from apportion.runtime.stream import Bus, RawMessage

SERVICE: Final = "admission"

log = structlog.get_logger(__name__)

_Share = Annotated[int, Meta(ge=1, le=1000)]
_Mib = Annotated[int, Meta(ge=1, le=2_147_483_647)]
_Count = Annotated[int, Meta(ge=0, le=2_147_483_647)]
_MODE = f"({'|'.join(Mode)})"
_Modes = Annotated[str, Meta(pattern=f"^({_MODE}(,{_MODE})*)?$")]
"""Modes in order of preference, with commas between; empty: whatever the placer prefers."""


class AdmissionSettings(AuthorSettings, frozen=True, kw_only=True):
    """What admission can be told. All of it but what every service knows goes into the lease's claim."""

    wishes_per_round: Annotated[int, Meta(ge=1, le=WISHES_PER_ROUND_MAX)] = WISHES_PER_ROUND
    """Wishes answered by one decision."""
    buffer_pct: Annotated[int, Meta(ge=BUFFER_PCT_MIN, le=BUFFER_PCT_MAX)] = BUFFER_PCT
    """What is booked above the p95 of a model's size."""
    tenant_rate_per_min: _Count = 0
    """Jobs that a tenant may have admitted in a minute, where no policy says otherwise; 0: no limit."""
    tenant_burst: _Count = 0
    """How many of them may come at once; 0: all."""
    tenant_pending_max: _Count = TENANT_PENDING_MAX
    """Jobs of a tenant that may wait at once; 0: no limit."""
    tenant_wish_rate_per_min: _Count = 0
    """Wishes of a tenant that are looked at in a minute, whatever they ask, where no policy says otherwise; 0: all."""
    tenant_wish_burst: _Count = 0
    """How many of them may come at once; 0: all."""
    pool_pending_max: _Count = POOL_PENDING_MAX
    """Jobs that may wait at once, whosever they are; 0: no limit."""
    default_compute_milli_training: _Share = DEFAULT_SHARES[WorkloadKind.TRAINING].compute_milli
    """Share of a device for a job of this kind that asks for device memory alone."""
    default_compute_milli_inference: _Share = DEFAULT_SHARES[WorkloadKind.INFERENCE].compute_milli
    default_compute_milli_batch: _Share = DEFAULT_SHARES[WorkloadKind.BATCH].compute_milli
    default_compute_milli_interactive: _Share = DEFAULT_SHARES[WorkloadKind.INTERACTIVE].compute_milli
    default_compute_milli_hpc: _Share = DEFAULT_SHARES[WorkloadKind.HPC].compute_milli
    default_memory_mib_training: _Mib = DEFAULT_SHARES[WorkloadKind.TRAINING].memory_mib
    """Device memory for a job of this kind that asks for a share of a device alone."""
    default_memory_mib_inference: _Mib = DEFAULT_SHARES[WorkloadKind.INFERENCE].memory_mib
    default_memory_mib_batch: _Mib = DEFAULT_SHARES[WorkloadKind.BATCH].memory_mib
    default_memory_mib_interactive: _Mib = DEFAULT_SHARES[WorkloadKind.INTERACTIVE].memory_mib
    default_memory_mib_hpc: _Mib = DEFAULT_SHARES[WorkloadKind.HPC].memory_mib
    modes_training: _Modes = ",".join(DEFAULT_MODES[WorkloadKind.TRAINING])
    """Modes that a job of this kind prefers for a share of a device, the best first."""
    modes_inference: _Modes = ",".join(DEFAULT_MODES[WorkloadKind.INFERENCE])
    modes_batch: _Modes = ",".join(DEFAULT_MODES[WorkloadKind.BATCH])
    modes_interactive: _Modes = ",".join(DEFAULT_MODES[WorkloadKind.INTERACTIVE])
    modes_hpc: _Modes = ",".join(DEFAULT_MODES[WorkloadKind.HPC])

    def config(self) -> dict[str, int | str]:
        """The settings that decisions depend on, as the claim states them."""
        common = set(AuthorSettings.__struct_fields__)
        return {name: getattr(self, name) for name in sorted(self.__struct_fields__) if name not in common}


async def serve(settings: AdmissionSettings, stop: asyncio.Event) -> None:
    """Run admission until ``stop``; whatever ends it before is raised."""
    pool = PoolId(settings.pool)
    async with AsyncExitStack() as stack:
        metrics = telemetry.start(SERVICE, settings)
        stack.callback(metrics.shutdown)
        bus = await Bus.connect(
            settings.bus_url,
            pool=pool,
            name=SERVICE,
            on_error=lambda err: log.warning("bus_error", error=str(err)),
            disturbances=Disturbances(SERVICE) if settings.faults else None,
            **settings.link(),
        )
        stack.push_async_callback(bus.close)
        await bus.provision(replicas=settings.bus_replicas)
        shell = _Shell(bus, bus.clock, is_busy=lambda: reactor.lag > 0 or bool(reactor.state.inbox))
        reactor = Reactor(
            core=core,
            author=ADMISSION,
            bus=bus,
            config=settings.config(),
            reads_wishes=True,
            snapshots=SnapshotFile(settings.data_dir / "snapshots" / f"{pool}-{SERVICE}.msgpack"),
            clock=bus.clock,
            meter=metrics,
            witness=shell,
            vigil=Vigil(bus, ADMISSION, is_standby=settings.standby, takeover_ms=settings.takeover_ms),
        )
        metrics.lag_of = lambda: reactor.lag
        ingress.show(metrics, lambda: reactor.state.kept.ingress)
        health = HealthServer(
            SERVICE,
            settings.data_dir,
            port=settings.health_port,
            is_ready=lambda: (
                shell.asks.is_serving or reactor.following.is_set(),
                {"role": reactor.role, **_details(reactor.state), **shell.details()},
            ),
            metrics=metrics.prometheus,
        )
        health.start()
        stack.callback(health.stop)
        await stack.enter_async_context(shell.running(reactor.ready))
        await reactor.run(stop)


class _Shell:
    """What happens beside the reactor: letters are laid aside, and requests are answered inline."""

    def __init__(self, bus: Bus, clock: Clock, *, is_busy: Callable[[], bool]) -> None:
        self.letters = DeadLetters(bus, service=SERVICE, clock=clock, is_busy=is_busy)
        self.asks = Asks(bus)

    def saw(self, raw: RawMessage, entry: Entry) -> None:
        self.letters.saw(raw, entry)
        self.asks.saw(entry)

    def is_settled(self) -> bool:
        return self.letters.is_settled()  # who asked asks again; a copy would be forgotten

    def details(self) -> dict[str, object]:
        return {
            "dead_letters": self.letters.copied,
            "dead_letters_failed": self.letters.failed,
            "dead_letters_left_out": self.letters.left_out,
            "asks_replied": self.asks.replied,
        }

    @asynccontextmanager
    async def running(self, ready: asyncio.Event) -> AsyncIterator[None]:
        async def ask_once_ready() -> None:
            await ready.wait()
            await self.asks.start()

        starting = asyncio.create_task(ask_once_ready(), name="asks")
        try:
            async with self.letters.running():
                yield
        finally:
            starting.cancel()
            await self.asks.close()


def _details(state: core.State) -> dict[str, object]:
    facts_seq, wishes_seq = core.position(state)
    return {
        "facts_seq": facts_seq,
        "wishes_seq": wishes_seq,
        "wishes_waiting": len(state.inbox),
        "jobs": len(state.pool.jobs),
        "jobs_waiting": state.pending[POOL],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of an admission service that was started with these arguments."""
    try:
        settings = from_command_line(AdmissionSettings, SERVICE, sys.argv[1:] if argv is None else argv).settings
    except SettingsInvalid as err:
        print(err, file=sys.stderr)
        return err.exit_code
    os.umask(0o077)
    return run_service(lambda stop: serve(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
