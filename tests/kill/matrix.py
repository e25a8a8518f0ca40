"""One pool, work that never ends, and a kill at each moment of each service: ``python -m tests.kill --rounds 3``.

A cell is a service and a moment. All cells share one pool, as its troubles would in life: what a kill leaves behind is
there when the next one comes. At the end every job has to have ended, and the log has to prove that nothing was lost,
started twice or over-allocated, and that every decision is made again the same.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from apportion.cli import demo, leftovers, supervisor
from apportion.cli.leftovers import Kind
from apportion.cli.places import log_file
from apportion.cli.supervisor import NodePlan, PoolPlan, Supervisor
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import OPERATOR, NodeId, PoolId, TenantId
from apportion.runtime.stream import Bus
from tests.kill.crashing import MOMENTS

CRASHING: Final = Path(__file__).with_name("crashing.py")
POOL: Final = PoolId("kill")
TENANT: Final = TenantId("default")
FIRST, SECOND = NodeId("node-1"), NodeId("node-2")
AGENT: Final = f"node-agent-{FIRST}"
_NODE_WISHES: Final = (ev.NodeCordonRequested, ev.NodeUncordonRequested)
REACTORS: Final = ("admission", "placer", "monitor", AGENT)
SERVICES: Final = (*REACTORS, "nats-server", "shim")
IN_FLIGHT: Final = 16
REACHED_S: Final = 8.0
"""How long a moment is waited for; a service that doesn't come to it is killed anyway."""
RECOVERED_S_MAX: Final = 60.0
ENDED_S_MAX: Final = 120.0


@dataclass(frozen=True)
class Cell:
    """Who is killed, and when."""

    service: str
    moment: str


@dataclass
class Outcome:
    """What a matrix showed."""

    cells: int = 0
    reached: int = 0
    """Cells whose service came to the moment and died there; the others were killed while it was waited for."""
    unreached: list[str] = field(default_factory=list)
    jobs: int = 0
    recovery_ms: list[int] = field(default_factory=list)
    """From a service's death until it was ready again."""
    proof: dict[str, Any] = field(default_factory=dict)


def cells() -> list[Cell]:
    """Every service at every moment; the bus and the shims have no moments of ours, so chance chooses theirs."""
    found = [Cell(service, moment) for moment in (*MOMENTS, "drain", "load") for service in REACTORS]
    return [*found, *(Cell(service, f"chance-{n}") for n in range(6) for service in SERVICES[-2:])]


class Load:
    """Jobs, one after the other ends, until it is told to stop."""

    def __init__(self, bus: Bus, in_flight: int) -> None:
        self._bus = bus
        self._in_flight = in_flight
        self._number = 0
        self._live: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.is_over = False

    @property
    def jobs(self) -> int:
        """How many were asked for."""
        return self._number

    async def run(self) -> None:
        """Ask for jobs in pairs, so that answers come in batches; some as gangs, so that placements do.

        A second node is cordoned and uncordoned all the while, so that the monitor decides, too.
        """
        reader = await self._bus.reader(Stream.FACTS, after=0)
        while not (self.is_over and not self._live):
            while not self.is_over and len(self._live) < self._in_flight:
                await asyncio.gather(*(self._ask_for_one() for _ in range(2)))
                if not self._number % 4:
                    await asyncio.gather(*(self._ask_about_node(kind) for kind in _NODE_WISHES))
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(0.5):
                    await reader.ready.wait()
            for raw in reader.take():
                entry = codec.decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at)
                if isinstance(entry.event, ev.TERMINAL):
                    self._live.discard(entry.event.job_id)
                    self.ended[type(entry.event).__name__] += 1
            await asyncio.sleep(0)

    async def _ask_for_one(self) -> None:
        self._number += 1
        name = f"job-{self._number}"
        self._live.add(f"{TENANT}/{name}")
        request = ev.JobRequested(
            queue="main",
            job_id=name,
            workload=ev.Workload(command=("/bin/sleep", f"0.{1 + self._number % 4}")),
            resources=ev.Resources(gpu_milli=250, gpu_memory_mib=1024),
            gang=ev.Gang(size=2) if self._number % 3 == 0 else ev.Gang(),
        )
        await self._publish(codec.encode_wish(POOL, request, tenant=TENANT, event_id=name, source="/kill"))

    async def _ask_about_node(self, kind: type[ev.NodeCordonRequested | ev.NodeUncordonRequested]) -> None:
        wish = kind(node_id=SECOND, reason="the matrix wants the monitor to decide")
        name = f"{kind.__name__}-{self._number}"
        await self._publish(codec.encode_wish(POOL, wish, tenant=OPERATOR, event_id=name, source="/kill"))

    async def _publish(self, message: codec.Message) -> None:
        while True:
            try:
                await self._bus.publish_wish(message)
            except Exception:  # noqa: BLE001 - the bus is being killed: the same id again is the same job
                await asyncio.sleep(0.1)
            else:
                return


class Matrix:
    """The pool and its killer."""

    def __init__(self, data_dir: Path, seed: int, in_flight: int = IN_FLIGHT) -> None:
        self._data_dir = data_dir
        self._in_flight = in_flight
        self._random = random.Random(seed)
        self._supervisor = Supervisor(
            PoolPlan(
                pool=POOL,
                data_dir=data_dir,
                bus_port=0,
                nodes=tuple(NodePlan(name=name, devices=4, profile="h200") for name in (FIRST, SECOND)),
                queues=(ev.QueueUpsertRequested(queue="main", tenants=(TENANT,)),),
                log_level="warning",
            )
        )
        self.outcome = Outcome()
        self._recovering: dict[str, asyncio.Task[None]] = {}

    async def run(self, wanted: list[Cell]) -> Outcome:
        """Every cell in turn, then the proof."""
        supervisor.BACKOFF_S_MAX = 0.1  # type: ignore[misc]  # here a service dies more often than in a year
        real = supervisor.command_lines
        supervisor.command_lines = self._command_lines
        self._real_lines = real
        try:
            await self._supervisor.start()
            return await self._killed(wanted)
        finally:
            supervisor.command_lines = real
            await self._supervisor.stop()

    def _command_lines(self, plan: PoolPlan, *, python: str) -> list[tuple[str, list[str]]]:
        found = []
        for name, argv in self._real_lines(plan, python=python):
            # python -m MODULE …  becomes  python crashing.py PLAN -m MODULE …
            found.append((name, [argv[0], str(CRASHING), str(self._plan(name)), *argv[1:]]))
        return found

    def _plan(self, service: str) -> Path:
        return self._data_dir / "run" / f"{service}.dies-at"

    async def _killed(self, wanted: list[Cell]) -> Outcome:
        bus = await Bus.connect(
            self._supervisor.server.url, pool=POOL, name="kill", key=self._supervisor.key_of("operator")
        )
        load = Load(bus, self._in_flight)
        loading = asyncio.create_task(load.run())
        try:
            for cell in wanted:
                if loading.done():
                    loading.result()
                await self._kill(cell)
            for service in REACTORS:
                await self._until_ready(service)
            load.is_over = True
            async with asyncio.timeout(ENDED_S_MAX):
                await loading
            self.outcome.jobs = load.jobs
            await self._until_quiet(bus)
            positions = {
                "facts": (await bus.position(Stream.FACTS)).last_seq,
                "wishes": (await bus.position(Stream.WISHES)).last_seq,
            }
        finally:
            for task in (loading, *self._recovering.values()):
                task.cancel()
            await asyncio.gather(loading, *self._recovering.values(), return_exceptions=True)
            await bus.close()
        await self._supervisor.stop_services()
        path = log_file(self._data_dir, POOL)
        said = {"last_seq": positions["wishes"]}
        self.outcome.proof = await asyncio.to_thread(demo.proof_of, path, positions, said)
        return self.outcome

    async def _until_quiet(self, bus: Bus) -> None:
        """Nothing new for a while: what follows a job's end is said, and logged."""
        last, since = -1, time.monotonic()
        while time.monotonic() - since < 2.0:
            position = (await bus.position(Stream.FACTS)).last_seq
            if position != last:
                last, since = position, time.monotonic()
            await asyncio.sleep(0.1)

    async def _kill(self, cell: Cell) -> None:
        self.outcome.cells += 1
        match cell.service:
            case "nats-server":
                await asyncio.sleep(self._random.uniform(0, 0.3))
                _kill(self._supervisor.server.pid)
                self.outcome.reached += 1
            case "shim":
                await asyncio.sleep(self._random.uniform(0, 0.3))
                shims = [one for one in leftovers.processes_of(self._data_dir) if one.kind is Kind.SHIM]
                if shims:
                    _kill(self._random.choice(shims).pid)
                self.outcome.reached += 1
            case _:
                await self._kill_service(cell)

    async def _kill_service(self, cell: Cell) -> None:
        await self._until_ready(cell.service)
        pid = self._supervisor.services[cell.service].pid
        if cell.moment == "load":
            await asyncio.sleep(self._random.uniform(0, 0.3))
            _kill(pid)
        elif cell.moment == "drain":
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(self._random.uniform(0, 0.03))
            _kill(pid)
        else:
            self._plan(cell.service).write_text(cell.moment)
            if cell.moment in {"replay", "claim"}:
                _kill(pid)  # it comes to these when it starts
            elif cell.moment == "reconnect":
                _kill(self._supervisor.server.pid)
            if not await self._comes_to_it(cell.service):
                self.outcome.unreached.append(f"{cell.service} {cell.moment}")
                self._plan(cell.service).unlink(missing_ok=True)
                _kill(self._supervisor.services[cell.service].pid)
                self._recovers(cell.service)
                return
        self.outcome.reached += 1
        self._recovers(cell.service)

    async def _comes_to_it(self, service: str) -> bool:
        until = time.monotonic() + REACHED_S
        while self._plan(service).exists():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.005)
        return True

    def _recovers(self, service: str) -> None:
        """It died just now: how long until it is ready again is measured while others die."""
        self._recovering[service] = asyncio.create_task(self._recovery(service, time.monotonic()))

    async def _recovery(self, service: str, died: float) -> None:
        await asyncio.sleep(0.05)  # its last process may still answer for a moment
        await self._is_ready(service)
        self.outcome.recovery_ms.append(round((time.monotonic() - died) * 1000))

    async def _until_ready(self, service: str) -> None:
        recovering = self._recovering.pop(service, None)
        await (self._is_ready(service) if recovering is None else recovering)

    async def _is_ready(self, service: str) -> None:
        one = self._supervisor.services[service]
        until = time.monotonic() + RECOVERED_S_MAX
        while not await asyncio.to_thread(supervisor.is_ready, one.health_port):
            if time.monotonic() > until:
                tail = "\n".join(supervisor.tail(one.log_path, 20))
                raise AssertionError(f"{service} did not recover in {RECOVERED_S_MAX:g} s\n{tail}")
            await asyncio.sleep(0.02)


def _kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def matrix(data_dir: Path, *, seed: int = 1, rounds: int = 1) -> Outcome:
    """Every cell ``rounds`` times, in an order that the seed chooses."""
    wanted = cells() * rounds
    random.Random(seed).shuffle(wanted)
    return await Matrix(data_dir, seed).run(wanted)


async def sample(data_dir: Path, *, seed: int, size: int) -> Outcome:
    """Some of the cells, every service among them, under so little work that the kills are what costs."""
    chance = random.Random(seed)
    left = {service: [cell for cell in cells() if cell.service == service] for service in SERVICES}
    for one in left.values():
        chance.shuffle(one)
    wanted: list[Cell] = []
    while len(wanted) < size and any(left.values()):
        wanted += [one.pop() for one in left.values() if one]
    return await Matrix(data_dir, seed, in_flight=4).run(wanted[:size])
