"""The placer as a process: settings, bus, reactor, run."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Final, Literal

import structlog
from msgspec import Meta

from apportion.contracts.causes import WorkloadKind
from apportion.contracts.ids import PLACER, PoolId
from apportion.placer import core, plugins
from apportion.placer.policies import DEFAULT, PolicyUnknown, policy_id, resolved
from apportion.placer.questions import Questions
from apportion.placer.state import Settings, State, policies_by_name
from apportion.runtime import telemetry
from apportion.runtime.disturbed import Disturbances
from apportion.runtime.drain import run_service
from apportion.runtime.health import HealthServer
from apportion.runtime.reactor import Reactor, SnapshotFile
from apportion.runtime.settings import SettingsInvalid, from_command_line
from apportion.runtime.standby import AuthorSettings, Vigil
from apportion.runtime.stream import Bus

SERVICE: Final = "placer"
_DEFAULT: Final = Settings()
_Seconds = Annotated[int, Meta(ge=0, le=2_147_483_647)]
_Points = Annotated[int, Meta(ge=0, le=1_000_000)]

log = structlog.get_logger(__name__)


class PlacerSettings(AuthorSettings, frozen=True, kw_only=True):
    """What the placer can be told. All of it but what every service knows goes into the lease's claim."""

    policy: str = DEFAULT.name
    """How candidates are scored: headroom, best_fit, pack, spread, fragmentation_gradient, least_response, round_robin,
    throughput:MODEL=SPEED+..., weighted:AIM=WEIGHT+..., hybrid:CASE=POLICY|..., strict_priority[:POLICY],
    bidding[:POLICY], or what an installed package offers."""
    policy_by_queue: str = ""
    """Queues that have a policy of their own: ``queue=policy``, comma-separated."""
    policy_by_kind: str = ""
    """Kinds of work that have one, where their queue has none: ``training=headroom,inference=least_response``."""
    policy_for_latency: str = _DEFAULT.policy_for_latency
    """By which jobs with a latency objective are placed, where their queue has none; empty: like those without one."""
    mps_trust: Literal["pool", "tenant"] = "tenant"
    """Who may share an MPS device, where one client's fault ends the others: everybody, or jobs of one tenant."""
    reserve_after_s: Annotated[int, Meta(ge=-1, le=2_147_483_647)] = _DEFAULT.reserve_after_s
    """Seconds after which nodes are kept for the first job that is blocked; -1: never."""
    runs_per_device_max: Annotated[int, Meta(ge=0, le=1024)] = _DEFAULT.runs_per_device_max
    """Runs that share a device, at most; 0: three for each core of its node."""
    memory_buffer_pct: Annotated[int, Meta(ge=0, le=90)] = _DEFAULT.memory_buffer_pct
    """Percent of a shared device's memory that nobody may book; not beside oversubscription."""
    memory_oversubscribe_pct: Annotated[int, Meta(ge=100, le=400)] = _DEFAULT.memory_oversubscribe_pct
    """Percent of a shared device's memory that may be booked: above 100 more than there is, at the tenants' risk."""
    order: Literal["classes", "seed", "strict", "bids"] = "classes"
    """How jobs of a queue are ordered that doesn't say so itself."""
    between_queues: Literal["fair", "classes"] = "fair"
    """Whose turn it is: by guarantees and shares, or first by the service class of who is next."""
    fair_half_life_s: _Seconds = _DEFAULT.fair_half_life_s
    """Seconds after which half of what was held is forgotten; 0: shares are of what is held now."""
    ageing_s: _Seconds = _DEFAULT.ageing_s
    """Seconds of waiting that are worth one point of priority; 0: only between equals."""
    class_points_online: _Points = _DEFAULT.class_points_online
    """What the service class is worth in points of priority."""
    class_points_standard: _Points = _DEFAULT.class_points_standard
    """What the service class is worth in points of priority."""
    class_points_batch: _Points = _DEFAULT.class_points_batch
    """What the service class is worth in points of priority."""
    class_points_spot: _Points = _DEFAULT.class_points_spot
    """What the service class is worth in points of priority."""
    kind_points_training: _Points = _DEFAULT.kind_points_training
    """What the kind of work is worth in points of priority."""
    kind_points_inference: _Points = _DEFAULT.kind_points_inference
    """What the kind of work is worth in points of priority."""
    kind_points_batch: _Points = _DEFAULT.kind_points_batch
    """What the kind of work is worth in points of priority."""
    kind_points_interactive: _Points = _DEFAULT.kind_points_interactive
    """What the kind of work is worth in points of priority."""
    kind_points_hpc: _Points = _DEFAULT.kind_points_hpc
    """What the kind of work is worth in points of priority."""
    seed_priority_weight: _Points = _DEFAULT.seed_priority_weight
    """Weight of priority, from 0 to 1, in the order ``seed``."""
    seed_waiting_weight: _Points = _DEFAULT.seed_waiting_weight
    """Weight of waiting, from 0 to 1, in the order ``seed``."""
    seed_waiting_s: Annotated[int, Meta(ge=1, le=2_147_483_647)] = _DEFAULT.seed_waiting_s
    """Seconds of waiting that count as 1 in the order ``seed``."""
    preempt_victims_max: Annotated[int, Meta(ge=0, le=1000)] = _DEFAULT.preempt_victims_max
    """Jobs that may be stopped for one of a class before theirs; 0: nobody is."""
    preempt_spares_s: Annotated[int, Meta(ge=1, le=2_147_483_647)] = _DEFAULT.preempt_spares_s
    """Seconds after its placement in which nobody is stopped for another, whatever it asked for."""
    preempt_per_minute: Annotated[int, Meta(ge=0, le=100_000)] = _DEFAULT.preempt_per_minute
    """Jobs that may be stopped for others within a minute, over the pool."""
    pinned: str = ""
    """Settings of these that the pool's policy does not change, comma-separated."""

    def config(self) -> dict[str, int | str]:
        """The settings that decisions depend on, as the claim states them."""
        found = {name: getattr(self, name) for name in sorted(Settings.__struct_fields__)}
        # By their ids, so that a replay by another version of a policy is known to be one.
        found["policy"] = policy_id(resolved(self.policy))
        if self.policy_for_latency:
            found["policy_for_latency"] = policy_id(resolved(self.policy_for_latency))
        for key in ("policy_by_queue", "policy_by_kind"):
            pairs = policies_by_name(getattr(self, key)).items()
            found[key] = ",".join(f"{name}={policy_id(resolved(policy))}" for name, policy in sorted(pairs))
        return found


async def serve(settings: PlacerSettings, stop: asyncio.Event) -> None:
    """Run the placer until ``stop``; whatever ends it before is raised."""
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
        reactor = Reactor(
            core=core,
            author=PLACER,
            bus=bus,
            config=settings.config(),
            snapshots=SnapshotFile(settings.data_dir / "snapshots" / f"{pool}-{SERVICE}.msgpack"),
            clock=bus.clock,
            meter=metrics,
            vigil=Vigil(bus, PLACER, is_standby=settings.standby, takeover_ms=settings.takeover_ms),
        )
        metrics.lag_of = lambda: reactor.lag
        health = HealthServer(
            SERVICE,
            settings.data_dir,
            port=settings.health_port,
            is_ready=lambda: (reactor.is_in_place, {"role": reactor.role, **_details(reactor.state)}),
            metrics=metrics.prometheus,
        )
        health.start()
        stack.callback(health.stop)
        await Questions(bus, state=lambda: reactor.state, clock=bus.clock).start()
        await reactor.run(stop)


def _details(state: State) -> dict[str, object]:
    facts_seq, _ = core.position(state)
    return {
        "facts_seq": facts_seq,
        "jobs": len(state.pool.jobs),
        "jobs_waiting": len(state.waiting) + len(state.delayed),
        "nodes": len(state.rooms),
        "is_frozen": state.pool.frozen,
    }


def _settings(argv: Sequence[str]) -> PlacerSettings:
    loaded = from_command_line(PlacerSettings, SERVICE, argv)
    for key in ("policy", "policy_for_latency", "policy_by_queue", "policy_by_kind"):
        text = getattr(loaded.settings, key)
        is_one = not key.startswith("policy_by")
        named = ({"": text} if text else {}) if is_one else policies_by_name(text)
        expected = ""
        for policy in named.values():
            try:
                resolved(policy)
            except PolicyUnknown as err:
                expected = f"a policy: {err}"
        if key == "policy" and not text:
            expected = "a policy"
        if not is_one and len(named) != sum(1 for part in text.split(",") if part.strip()):
            expected = "name=policy, comma-separated, each name once"
        if key == "policy_by_kind" and not named.keys() <= set(WorkloadKind):
            expected = f"kinds of work: {', '.join(WorkloadKind)}"
        if expected:
            raise SettingsInvalid(where=loaded.origins[key], key=key, expected=expected, found=repr(text))
    settings = loaded.settings
    if settings.memory_buffer_pct and settings.memory_oversubscribe_pct != _DEFAULT.memory_oversubscribe_pct:
        raise SettingsInvalid(
            where=loaded.origins["memory_buffer_pct"],
            key="memory_buffer_pct",
            expected=f"0 beside memory_oversubscribe_pct {settings.memory_oversubscribe_pct}",
            found=str(settings.memory_buffer_pct),
            hint="A pool keeps memory back, or books more than it has: never both.",
        )
    return loaded.settings


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of a placer that was started with these arguments."""
    try:
        plugins.load()
        settings = _settings(sys.argv[1:] if argv is None else argv)
    except SettingsInvalid as err:
        print(err, file=sys.stderr)
        return err.exit_code
    except plugins.PluginInvalid as err:
        print(err, file=sys.stderr)
        return 2
    os.umask(0o077)
    return run_service(lambda stop: serve(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
