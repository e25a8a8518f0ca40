"""All cores in one world: one virtual clock, one in-memory bus, machines that run processes, one seed.

The cores are the real ones. What surrounds them is simulated: delivery, acknowledgements, crashes, machines. Everything
that happens comes from one random generator and one heap of moments, so a seed is a run.
"""

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from apportion.admission import core as admission_core
from apportion.contracts import codec, subjects
from apportion.contracts import events as ev
from apportion.contracts.causes import BetweenQueues, Mode, OnLowered, QueueOrder, RunCause, ServiceClass, WorkloadKind
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Basis, Entry, Stream
from apportion.contracts.ids import (
    ADMISSION,
    MONITOR,
    OPERATOR,
    PLACER,
    Author,
    DeviceUuid,
    NodeId,
    PoolId,
    RunId,
    TenantId,
    agent_author,
)
from apportion.monitor import core as monitor_core
from apportion.node_agent import core as agent_core
from apportion.placer import core as placer_core
from apportion.runtime.reactor import correlation_of
from tests.simulation.checkers import Violation

POOL = PoolId("sim")
MS = 1_000_000
S = 1_000_000_000
START = 1_788_264_000 * S

BOUNDED: Final = ev.PolicyUpsertRequested(
    for_tenant="tenant-1",
    rate_per_min=120,
    burst=6,
    limit_compute_milli=3_000,
    limit_jobs=2,
    on_lowered=OnLowered.RECLAIM,
    reason="one tenant is bounded",
)


@dataclass
class Options:
    """What a run is made of; printed before it starts."""

    seed: int
    nodes: int = 4
    devices: int = 4
    jobs: int = 300
    tenants: int = 3
    arrival_ms: int = 120
    """Mean time between requests."""
    faults: bool = True
    fault_ms: int = 900
    """Mean time between faults."""
    cancelled: float = 0.05
    """Share of jobs that somebody cancels."""
    guaranteed_pct: int = 50
    """How much of the pool is guaranteed to its tenants' queues, in equal parts."""
    asides: float = 0.1
    """Share of requests after which somebody suspends a job for a while, or has one checkpoint."""
    slow_batches: float = 0.03
    """Share of the placer's batches that take seconds to arrive: a cancellation, or a fencing, may overtake them."""
    heal_after_s: int = 0
    """Faults stop after this much virtual time; 0: when the last request was made."""


@dataclass
class Stored:
    """One message of a stream: what is delivered, any number of times."""

    entry: Entry
    subject: str


class MemoryBus:
    """Two streams with what the real ones promise: order, deduplication by id, fenced batches that are all or none."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.streams: dict[Stream, list[Stored]] = {Stream.WISHES: [], Stream.FACTS: []}
        self._ids: dict[Stream, dict[str, int]] = {Stream.WISHES: {}, Stream.FACTS: {}}
        self.leases: dict[str, int] = {}
        self.refused = 0
        """Batches that a lost lease kept out."""

    def last(self, stream: Stream) -> int:
        """Sequence of the last message."""
        return len(self.streams[stream])

    def publish_wish(self, message: Message) -> int:
        """Store a wish once."""
        return self._store(Stream.WISHES, message)

    def claim(self, message: Message) -> int:
        """Store a claim; it becomes the lease."""
        seq = self._store(Stream.FACTS, message)
        self.leases[message.subject] = seq
        return seq

    def publish(self, lease: str, claim: int, messages: list[Message]) -> int | None:
        """Sequence of the last message; None where the lease is another's. A stored batch is stored once."""
        if self.leases.get(lease) != claim:
            self.refused += 1
            return None
        known = [self._ids[Stream.FACTS].get(m.headers["Nats-Msg-Id"]) for m in messages]
        if any(known):
            if not all(known):
                raise Violation("a batch came again in another shape: ids must derive from the decision's basis")
            return known[-1]
        first = self.last(Stream.FACTS) + 1
        seq = 0
        for message in messages:
            seq = self._store(Stream.FACTS, message)
        self._world.checker.batch_stored([s.entry for s in self.streams[Stream.FACTS][first - 1 :]])
        return seq

    def _store(self, stream: Stream, message: Message) -> int:
        ids = self._ids[stream]
        id_ = message.headers.get("Nats-Msg-Id", "")
        if id_ and id_ in ids:
            return ids[id_]
        messages = self.streams[stream]
        seq = len(messages) + 1
        decode = codec.decode_fact if stream is Stream.FACTS else codec.decode_wish
        # Through bytes and back, so that what can't survive the wire can't pass here either.
        entry = decode(message.subject, message.headers, message.body, seq=seq, recorded_at=self._world.now)
        messages.append(Stored(entry=entry, subject=message.subject))
        if id_:
            ids[id_] = seq
        self._world.checker.stored(entry)
        return seq


class Actor:
    """One session of one author: the reactor's loop, step by step on virtual time."""

    def __init__(
        self,
        world: "World",
        author: Author,
        core: Any,
        *,
        reads_wishes: bool,
        config: dict[str, int | str] | None = None,
        wants: Callable[[str], bool] | None = None,
        perform: Callable[[Any], None] | None = None,
        snapshot: bytes | None = None,
    ) -> None:
        self.world = world
        self.author = author
        self.core = core
        self.reads_wishes = reads_wishes
        self.config = config or {}
        self.wants = wants
        self.perform = perform
        world.sessions += 1
        self.session = f"{author}-s{world.sessions}"
        self.state = core.initial() if snapshot is None else core.restore(snapshot)
        self.is_alive = True
        self.is_paused = False
        self.is_cut_off = False
        self.lease = subjects.lease(POOL, author)
        self.claim = 0
        self.published_seq = 0
        self.caught_up_at = (0, 0)
        facts, wishes = core.position(self.state)
        self.read = {Stream.FACTS: facts, Stream.WISHES: wishes}
        self.in_flight: list[Message] | None = None
        self.is_step_due = False
        self.wake: int | None = None
        self.last_snapshot = snapshot
        world.after(0, self._begin)

    def _begin(self) -> None:
        if not self.is_alive:
            return
        if self.is_cut_off:
            self.world.after(200 * MS, self._begin)
            return
        claim = ev.LeaseClaimed(author=self.author, session=self.session, core=self.core.POLICY, config=self.config)
        self.claim = self.world.bus.claim(
            codec.encode_fact(POOL, self.author, claim, event_id=f"{self.author}.claim.{self.session}")
        )
        self.published_seq = self.claim
        wishes = self.world.bus.last(Stream.WISHES) if self.reads_wishes else 0
        self.caught_up_at = (self.claim, wishes)
        self.deliver()

    def deliver(self) -> None:
        """Read on, after a network's moment."""
        if self.is_alive and not self.is_step_due:
            self.is_step_due = True
            self.world.after(self.world.delay(), self.step)

    def observe(self, observation: Any) -> None:
        """The shell saw something."""
        if self.is_alive:
            self.state = self.core.observe(self.state, observation, self.world.now)
            self.deliver()

    def step(self) -> None:
        """Fold a part of what is there, act, decide, publish."""
        self.is_step_due = False
        if not self.is_alive or self.claim == 0:
            return
        if self.is_paused or self.is_cut_off:
            return
        rng = self.world.rng
        for stream in (Stream.FACTS, Stream.WISHES) if rng.random() < 0.5 else (Stream.WISHES, Stream.FACTS):
            if stream is Stream.WISHES and not self.reads_wishes:
                continue
            self._read(stream, limit=rng.choice((1, 20, 500, 500)))
        if self.in_flight is not None:
            self.deliver()
            return  # the outcome of the last batch isn't known
        facts_seq, wishes_seq = self.core.position(self.state)
        behind = facts_seq < max(self.published_seq, self.caught_up_at[0]) and self.wants is None
        if self.wants is not None:
            behind = self.read[Stream.FACTS] < max(self.published_seq, self.caught_up_at[0])
        if behind or (self.reads_wishes and wishes_seq < self.caught_up_at[1]):
            self.deliver()
            return
        if self.perform is not None:
            for instruction in self.core.instruct(self.state, self.world.now):
                self.state = self.core.issued(self.state, instruction)
                self.perform(instruction)
        self._decide()
        if self._has_more():
            self.deliver()

    def _read(self, stream: Stream, *, limit: int) -> None:
        stored = self.world.bus.streams[stream]
        position = self.read[stream]
        if self.world.faults_on and position and self.world.rng.random() < 0.02:
            position = max(0, position - self.world.rng.randrange(1, 4))  # delivered again
        for message in stored[position : position + limit]:
            if self.wants is None or self.wants(message.subject):
                self.state = self.core.evolve(self.state, message.entry)
        self.read[stream] = max(self.read[stream], min(len(stored), position + limit))

    def _has_more(self) -> bool:
        streams = (Stream.FACTS, Stream.WISHES) if self.reads_wishes else (Stream.FACTS,)
        return any(self.read[stream] < self.world.bus.last(stream) for stream in streams)

    def _decide(self) -> None:
        now = self.world.now
        facts = list(self.core.decide(self.state, now))
        if not facts:
            wake = self.core.wake_at(self.state, now)
            if wake is not None and wake != self.wake:
                self.wake = wake
                self.world.at(max(wake, now + 1), lambda: self._woken(wake))
            return
        facts_seq, wishes_seq = self.core.position(self.state)
        basis = Basis(facts=facts_seq, wishes=wishes_seq, decided_at=now, policy=self.core.POLICY)
        self.in_flight = [
            codec.encode_fact(
                POOL,
                self.author,
                fact,
                event_id=f"{self.author}.{basis.facts}.{basis.wishes}.{index}",
                correlation_id=correlation_of(fact),
                basis=basis,
            )
            for index, fact in enumerate(facts)
        ]
        wait = self.world.delay()
        if self.author == PLACER and self.world.faults_on and self.world.rng.random() < self.world.options.slow_batches:
            wait = self.world.rng.randrange(500, 7000) * MS
        self.world.after(wait, self._arrive)

    def _woken(self, wake: int) -> None:
        # As the reactor's one timer: an instant that has moved since wakes nobody, or each would beget another.
        if wake == self.wake:
            self.wake = None
            self.deliver()

    def _arrive(self) -> None:
        """The batch reaches the bus; its acknowledgement may not come back."""
        if not self.is_alive or self.in_flight is None:
            return
        if self.is_cut_off or self.is_paused:
            self.world.after(300 * MS, self._arrive)
            return
        seq = self.world.bus.publish(self.lease, self.claim, self.in_flight)
        if seq is None:
            self.is_alive = False  # fenced: a newer session writes
            return
        if self.world.faults_on and self.world.rng.random() < 0.02:
            self.world.after(500 * MS, self._arrive)  # unknown outcome: the same batch again
            return
        self.in_flight = None
        self.published_seq = seq
        self.deliver()

    def keep_snapshot(self) -> None:
        """As the reactor does now and then."""
        facts_seq, wishes_seq = self.core.position(self.state)
        if self.claim and facts_seq >= self.caught_up_at[0] and wishes_seq >= self.caught_up_at[1]:
            self.last_snapshot = self.core.snapshot(self.state)


@dataclass
class Process:
    """A run's process on a simulated machine."""

    run_id: RunId
    pid: int
    started_at: int
    ends_at: int
    exit_code: int
    ended_at: int = 0
    signal: int | None = None
    stopped_by_order: bool = False
    is_still: bool = False
    """Suspended: it doesn't come to its end by itself."""
    is_due: bool = False
    is_lost: bool = False

    @property
    def is_running(self) -> bool:
        """True while it runs."""
        return self.ended_at == 0 and not self.is_lost


class Machine:
    """A host: devices, processes, run directories that outlive its agent, and the agent itself."""

    def __init__(self, world: "World", name: str, devices: int) -> None:
        self.world = world
        self.node_id = NodeId(name)
        self.boots = 1
        self.processes: dict[RunId, Process] = {}
        """Also the run directories: an entry stays until RemoveRun."""
        self.is_up = True
        self.agent: Actor | None = None
        self.devices = tuple(
            ev.Device(
                uuid=DeviceUuid(f"GPU-{name}-{i}"),
                index=i,
                model="h100-80",
                memory_mib=81_920,
                modes=(Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE),
            )
            for i in range(devices)
        )
        self.snapshot: bytes | None = None
        self.start_agent()
        world.after(world.rng.randrange(1, 500) * MS, self.beat)

    def start_agent(self) -> None:
        """Start the agent anew: it looks at what is there before it does anything."""
        if not self.is_up:
            return
        author = agent_author(self.node_id)
        prefixes = tuple(p.removesuffix(">") for p in subjects.facts_for_agent(POOL, self.node_id, author))
        agent = Actor(
            self.world,
            author,
            agent_core.AgentCore(self.node_id),
            reads_wishes=False,
            wants=lambda subject: subject.startswith(prefixes),
            perform=lambda instruction: self.perform(agent, instruction),
            snapshot=self.snapshot if self.world.rng.random() < 0.7 else None,
        )
        self.agent = agent
        found = tuple(self._found(process) for process in self.processes.values())
        agent.observe(agent_core.Adopted(session=agent.session, found=found))
        agent.observe(
            agent_core.InventoryChanged(
                inventory=agent_core.Inventory(
                    boot_id=f"boot-{self.boots}",
                    devices=self.devices,
                    cpu_milli=64_000,
                    memory_mib=512_000,
                    simulated=True,
                )
            )
        )

    def _found(self, process: Process) -> agent_core.Found:
        started = agent_core.ProcessStarted(run_id=process.run_id, pid=process.pid, started_at=process.started_at)
        if process.is_running:
            return agent_core.Found(run_id=process.run_id, started=started)
        return agent_core.Found(run_id=process.run_id, started=started, ended=self._exit(process))

    def _exit(self, process: Process) -> agent_core.ProcessExited:
        if process.is_lost:
            return agent_core.ProcessExited(
                run_id=process.run_id, finished_at=self.world.now, started_at=process.started_at, detail="reboot"
            )
        return agent_core.ProcessExited(
            run_id=process.run_id,
            finished_at=process.ended_at,
            started_at=process.started_at,
            exit_code=None if process.signal else process.exit_code,
            signal=process.signal,
        )

    def perform(self, agent: Actor, instruction: Any) -> None:
        """Carry out an instruction; its effect outlives the agent, its report doesn't."""
        world = self.world
        match instruction:
            case agent_core.StartRun(order=order):
                world.after(world.rng.randrange(1, 30) * MS, lambda: self._start(agent, order))
            case agent_core.StopRun(run_id=run_id, grace_s=grace_s, checkpoint=checkpoint):
                if checkpoint is not None:
                    self._tell_of_checkpoint(agent, checkpoint)
                wait = world.rng.randrange(1, grace_s * 1000 + 2) * MS
                world.after(wait, lambda: self._end(run_id, signal=15))
            case agent_core.StillRun(run_id=run_id, is_still=is_still):
                boots = self.boots
                world.after(
                    world.rng.randrange(1, 50) * MS,
                    lambda: self._still(agent, run_id, is_still=is_still) if self.boots == boots else None,
                )
            case agent_core.CheckpointRun():
                self._tell_of_checkpoint(agent, instruction)
            case agent_core.ReleaseRun(order=order):
                world.after(
                    world.rng.randrange(1, 20) * MS,
                    lambda: self._tell(agent, agent_core.SlicesReleased(run_id=order.run_id, at=world.now)),
                )
            case agent_core.RemoveRun(run_id=run_id):
                if run_id in self.processes and self.processes[run_id].is_running:
                    raise Violation(f"{run_id} removed while its process runs")
                self.processes.pop(run_id, None)
            case _:
                raise AssertionError(instruction)

    def _still(self, agent: Actor, run_id: RunId, *, is_still: bool) -> None:
        process = self.processes.get(run_id)
        if process is None or not process.is_running:
            return
        process.is_still = is_still
        self._tell(agent, agent_core.Stilled(run_id=run_id, is_still=is_still, processes=1, at=self.world.now))
        if process.is_due and not is_still:
            self._end(run_id, signal=None)

    def _tell_of_checkpoint(self, agent: Actor, order: agent_core.CheckpointRun) -> None:
        wait = self.world.rng.randrange(1, order.plan.grace_s * 1000 + 2) * MS
        told = agent_core.Checkpointed(
            run_id=order.run_id,
            order_id=order.order_id,
            is_done=self.world.rng.random() < 0.7,
            at=self.world.now + wait,
            duration_ms=wait // MS,
        )
        self.world.after(wait, lambda: self._tell(agent, told))

    def _tell(self, agent: Actor, observation: Any) -> None:
        if agent.is_alive and self.agent is agent:
            agent.observe(observation)

    def _start(self, agent: Actor, order: ev.RunPlaced) -> None:
        # The agent's process asks the shim; if the agent died before that, nothing starts.
        if not agent.is_alive or self.agent is not agent or not self.is_up:
            return
        run_id = order.run_id
        if run_id in self.processes:
            raise Violation(f"{run_id}: its directory exists, and the agent asked to start it")
        fate = self.world.fate(run_id)
        if fate.refuses:
            # The program doesn't exist: the shim says so. Nothing ran, so an agent that died before it told tries anew.
            self._tell(
                agent,
                agent_core.StartFailed(
                    run_id=run_id, cause=RunCause.START_FAILED, detail="no such file", at=self.world.now
                ),
            )
            return
        self.world.pids += 1
        process = Process(
            run_id=run_id,
            pid=self.world.pids,
            started_at=self.world.now,
            ends_at=self.world.now + fate.duration,
            exit_code=fate.exit_code,
        )
        self.processes[run_id] = process
        self.world.checker.started(run_id, self.node_id)
        boots = self.boots
        self.world.at(process.ends_at, lambda: self._end(run_id, signal=None) if self.boots == boots else None)
        self._tell(agent, agent_core.ProcessStarted(run_id=run_id, pid=process.pid, started_at=process.started_at))

    def _end(self, run_id: RunId, *, signal: int | None) -> None:
        process = self.processes.get(run_id)
        if process is None or not process.is_running:
            return
        if process.is_still and signal is None:
            process.is_due = True
            return
        process.ended_at = self.world.now
        process.signal = signal
        agent = self.agent
        if agent is not None and agent.is_alive:
            self.world.after(self.world.rng.randrange(1, 10) * MS, lambda: self._tell(agent, self._exit(process)))

    def kill_agent(self) -> None:
        """Kill -9: what it saw and didn't say is gone; processes and directories stay."""
        if self.agent is not None:
            self.agent.keep_snapshot() if self.world.rng.random() < 0.5 else None
            self.snapshot = self.agent.last_snapshot or self.snapshot
            self.agent.is_alive = False
            self.agent = None

    def power_off(self) -> None:
        """The machine is gone, with everything that ran."""
        self.kill_agent()
        self.is_up = False
        self.boots += 1
        for process in self.processes.values():
            if process.is_running:
                process.is_lost = True

    def power_on(self) -> None:
        """It boots again."""
        if not self.is_up:
            self.is_up = True
            self.start_agent()

    def beat(self) -> None:
        """A heartbeat, on plain messages: lost whenever anything is wrong."""
        if self.world.is_over:
            return
        agent = self.agent
        if agent is not None and agent.is_alive and not agent.is_cut_off and self.is_up:
            self.world.heard(self.node_id, agent)
        self.world.after(1000 * MS, self.beat)


@dataclass
class Fate:
    """What becomes of a run's process, drawn from its id: the same however often the story is told."""

    duration: int
    exit_code: int
    refuses: bool


@dataclass
class World:
    """Everything, and the moments to come."""

    options: Options
    checker: Any
    rng: random.Random = field(init=False)
    now: int = START
    pids: int = 1000
    sessions: int = 0
    faults_on: bool = False
    is_over: bool = False
    requests_left: int = 0
    faults_made: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.options.seed)
        self.asides = random.Random(f"{self.options.seed} asides")
        """Of its own, so that who asks for such things changes nothing else in a run."""
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.bus = self.a_bus()
        self.checker.world = self
        self.services: dict[Author, Actor] = {}
        self.zombies: list[Actor] = []
        self.owners: dict[int, TenantId] = {}
        """Whose the job of each number is."""
        self.snapshots: dict[Author, bytes | None] = {}
        self._seen = {Stream.FACTS: 0, Stream.WISHES: 0}
        for author in (ADMISSION, PLACER, MONITOR):
            self.start_service(author)
        self.machines = [Machine(self, f"node-{i + 1}", self.options.devices) for i in range(self.options.nodes)]
        for queue in self._queues():
            self.wish(OPERATOR, queue)
        self.wish(OPERATOR, BOUNDED)
        self.requests_left = self.options.jobs
        self.after(200 * MS, self._request)
        self.after(500 * MS, self.tick)
        if self.options.faults:
            self.faults_on = True

    def a_bus(self) -> MemoryBus:
        """The streams."""
        return MemoryBus(self)

    def _queues(self) -> list[ev.QueueUpsertRequested]:
        """One queue above all, with less than the pool has; one for each tenant, guaranteed its part of some of it."""
        devices = self.options.nodes * self.options.devices
        most = max(1, devices * 3 // 4)
        promised = devices * 10 * self.options.guaranteed_pct
        each = promised // self.options.tenants
        # Whatever admission lets in must fit: so memory and compute are limited alike where jobs take whole devices.
        limits: list[dict[str, Any]] = [
            {"limit_compute_milli": 6_000, "guaranteed_compute_milli": min(each, 6_000)},
            {"limit_jobs": 3, "guaranteed_compute_milli": each},
            {"limit_model_milli": {"h100-80": most * 1000}, "guaranteed_compute_milli": each, "weight": 3},
        ]
        above = ev.QueueUpsertRequested(
            queue="all",
            limit_compute_milli=most * 1000,
            limit_memory_mib=most * 81_920,
            guaranteed_compute_milli=promised,
        )
        return [
            above,
            *(
                ev.QueueUpsertRequested(
                    queue=f"queue-{number}",
                    tenants=(f"tenant-{number}",),
                    parent="all",
                    **limits[number % len(limits)],
                )
                for number in range(self.options.tenants)
            ),
        ]

    # Moments

    def at(self, moment: int, action: Callable[[], None]) -> None:
        """Do something at an instant."""
        self._count += 1
        heapq.heappush(self._heap, (max(moment, self.now), self._count, action))

    def after(self, wait: int, action: Callable[[], None]) -> None:
        """Do something a while from now."""
        self.at(self.now + wait, action)

    def delay(self) -> int:
        """What a message takes: mostly a millisecond, now and then a second."""
        if self.faults_on and self.rng.random() < 0.01:
            return self.rng.randrange(50, 2000) * MS
        return self.rng.randrange(1, 4) * MS

    def step(self) -> bool:
        """The next moment; False where none is left."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        self._notify()
        return True

    def _notify(self) -> None:
        for stream, messages in self.bus.streams.items():
            seen = self._seen[stream]
            if len(messages) == seen:
                continue
            self._seen[stream] = len(messages)
            for actor in self.services.values():
                if stream is Stream.FACTS or actor.reads_wishes:
                    actor.deliver()
            if stream is Stream.FACTS:
                for machine in self.machines:
                    agent = machine.agent
                    if agent is not None and any(
                        agent.wants is None or agent.wants(m.subject) for m in messages[seen:]
                    ):
                        agent.deliver()

    # Services

    def start_service(self, author: Author) -> None:
        """A new session of a service, from its snapshot or from nothing."""
        cores: dict[Author, Any] = {ADMISSION: admission_core, PLACER: placer_core, MONITOR: monitor_core}
        self.services[author] = Actor(
            self,
            author,
            cores[author],
            reads_wishes=author != PLACER,
            config=self.config_of(author),
            snapshot=self.snapshots.get(author) if self.rng.random() < 0.7 else None,
        )

    def config_of(self, author: Author) -> dict[str, int | str]:
        """The settings that a service's decisions depend on."""
        if author == MONITOR:
            return {"suspect_ms": 2_500, "lease_ms": 5_000}
        if author == PLACER:
            placing = ("best_fit", "headroom", "fragmentation_gradient")[self.options.seed % 3]
            order = {1: "bidding:", 5: "bidding:", 6: "strict_priority:"}.get(self.options.seed % 8, "")
            return {"policy": f"{order}{placing}"}
        return {}

    def kill_service(self, author: Author) -> None:
        """Kill -9; its last snapshot stays."""
        actor = self.services[author]
        if self.rng.random() < 0.5 and actor.in_flight is None:
            actor.keep_snapshot()
        self.snapshots[author] = actor.last_snapshot
        actor.is_alive = False

    def heard(self, node: NodeId, agent: Actor) -> None:
        """A heartbeat reaches the monitor, if there is one that listens."""
        monitor = self.services[MONITOR]
        if monitor.is_alive and not monitor.is_paused and monitor.claim:
            monitor.observe(
                monitor_core.Heard(node=node, session=agent.session, epoch=agent.state.epoch, at_ns=self.now - START)
            )

    def tick(self) -> None:
        """Time passes for a monitor that listens."""
        if self.is_over:
            return
        monitor = self.services[MONITOR]
        if monitor.is_alive and monitor.claim:
            monitor.observe(monitor_core.Tick(at_ns=self.now - START))
        self.after(1000 * MS, self.tick)

    # Requests

    def wish(self, tenant: TenantId, event: ev.Wish, event_id: str = "") -> None:
        """Somebody asks for something."""
        self._count += 1
        self.bus.publish_wish(
            codec.encode_wish(POOL, event, tenant=tenant, event_id=event_id or f"w{self._count}", source="/simulation")
        )

    def _request(self) -> None:
        rng = self.rng
        if self.requests_left == 0:
            return
        self.requests_left -= 1
        number = self.options.jobs - self.requests_left
        tenant = rng.randrange(self.options.tenants)
        self.owners[number] = TenantId(f"tenant-{tenant}")
        name = f"job-x{number}"
        kind = rng.random()
        if kind < 0.55:
            resources = ev.Resources(
                gpu_milli=rng.choice((250, 700)),
                gpu_memory_mib=rng.choice((8_000, 60_000)),
            )
        else:
            resources = ev.Resources(gpu=min(rng.choice((1, 1, 2, 4)), self.options.devices))
        request = ev.JobRequested(
            queue=f"queue-{tenant}",
            job_id=name,
            workload=ev.Workload(command=("work",)),
            resources=resources,
            gang=ev.Gang(size=min(rng.choice((1, 1, 1, 1, 1, 1, 2, 3)), self._replicas_that_fit(resources))),
            priority=rng.choice((None, None, 100, 900)),
            retry=ev.Retry(
                limit=rng.choice((0, 2)),
                backoff_s=1,
                memory_factor_pct=rng.choice((None, 150)),
                avoid_same_node=rng.choice((None, True)),
            ),
            depends_on=self._followed(number) if rng.random() < 0.15 else (),
            time_limit_s=30 if rng.random() < 0.05 else None,
            max_wait_s=rng.choice((None, None, 5)),
            grace_s=2,
            checkpoint=ev.Checkpoint(signal="SIGUSR1", grace_s=1) if number % 3 == 0 else None,
            # Few before the others, and those small: what is asked must come to an end although they go first.
            service_class=rng.choice((None, None, None, None, ServiceClass.ONLINE, ServiceClass.SPOT)),
        )
        if request.service_class is ServiceClass.SPOT:
            request = msgspec.structs.replace(request, bid=ev.Bid(max_price_micro_per_gpu_hour=1 + number % 7))
        size = request.gang.size
        if size > 1 and number % 3:
            is_near = number % 2 == 0 and size * (resources.gpu or 1) <= self.options.devices
            gang = ev.Gang(size=size, min=1 + number % size, topology_key="node", required=is_near)
            request = msgspec.structs.replace(request, gang=gang)
        elif size == 1 and number % 7 == 0 and request.retry.memory_factor_pct is None:
            most = min(1 + number % 4, self._replicas_that_fit(resources))
            request = msgspec.structs.replace(request, elastic=ev.Elastic(max=most), gang=ev.Gang())
        id_ = f"r{number}"
        self.wish(TenantId(f"tenant-{tenant}"), request, id_)
        roll = rng.random()
        if roll < 0.05:  # the same wish again, past the broker's window
            body = codec.encode_wish(POOL, request, tenant=f"tenant-{tenant}", event_id=id_, source="/simulation")
            self.bus.publish_wish(
                Message(
                    subject=body.subject, headers={**body.headers, "Nats-Msg-Id": f"again-{number}"}, body=body.body
                )
            )
        elif roll < 0.05 + self.options.cancelled:
            self.after(
                rng.choice((2_000, 20_000)) * rng.randrange(1, 1000) * MS // 1000,
                lambda: self.wish(
                    TenantId(f"tenant-{tenant}"), ev.JobCancelRequested(job_id=name, reason="changed my mind")
                ),
            )
        elif roll < 0.08 + self.options.cancelled:
            subject = subjects.wish(POOL, TenantId(f"tenant-{tenant}"), ev.JobRequested)
            junk = rng.choice(
                (b"", b"{", b"\xff", b'{"queue":1}', b'{"queue":"q","workload":{},"gpus":1}', b"[" * 9000)
            )
            self.bus.publish_wish(Message(subject=subject, headers={}, body=junk))
        elif roll < 0.10 + self.options.cancelled:
            node = f"node-{rng.randrange(self.options.nodes) + 1}"
            self.wish(OPERATOR, ev.NodeDrainRequested(node_id=node, reason="kernel update", deadline_s=5))
            self.after(20 * S, lambda: self.wish(OPERATOR, ev.NodeUncordonRequested(node_id=node, reason="done")))
        if rng.random() < 0.2:
            self._change_a_job(number)
        if self.asides.random() < self.options.asides:
            self._ask_aside()
        self.after(int(rng.expovariate(1 / self.options.arrival_ms) * MS), self._request)

    def _followed(self, number: int) -> tuple[ev.Dependency, ...]:
        """One or two of the tenant's latest jobs, which may have ended; now and then one that there never was."""
        mine = [other for other in range(max(1, number - 12), number) if self.owners[other] == self.owners[number]]
        chosen = self.rng.sample(mine, min(len(mine), self.rng.choice((1, 1, 2))))
        names = [f"job-x{other}" for other in sorted(chosen)] or ["nobody"]
        conditions = tuple(ev.DependencyCondition)
        return tuple(ev.Dependency(job_id=name, condition=self.rng.choice(conditions)) for name in names)

    def _ask_aside(self) -> None:
        """Somebody suspends a running job for a while, or has it checkpoint."""
        rng = self.asides
        if rng.random() < 0.2:
            self._change_the_rules()
            return
        holding = sorted({placed.job_id for placed in self.checker.holding.values()})
        if not holding:
            return
        name = rng.choice(holding)
        tenant = OPERATOR if rng.random() < 0.5 else TenantId(name.partition("/")[0])
        is_dry = rng.random() < 0.1
        if rng.random() < 0.4:
            self.wish(tenant, ev.JobCheckpointRequested(job_id=name, dry_run=is_dry))
            return
        self.wish(tenant, ev.JobSuspendRequested(job_id=name, reason="a moment", dry_run=is_dry))
        # By the operator, who may resume any: a job that stays suspended never ends.
        resume = ev.JobResumeRequested(job_id=name)
        self.after(rng.randrange(1, 8_000) * MS, lambda: self.wish(OPERATOR, resume))

    def _change_the_rules(self) -> None:
        """An operator has others go first, or lowers a limit for a while, to less than is held or not."""
        rng = self.asides
        if (roll := rng.random()) < 0.4:
            rules = ev.PlacementRules(
                order=rng.choice((None, QueueOrder.CLASSES, QueueOrder.SEED)),
                between_queues=rng.choice((None, *BetweenQueues)),
                class_points={ServiceClass.SPOT: rng.randrange(20_000)} if rng.random() < 0.5 else {},
                kind_points={WorkloadKind.INFERENCE: rng.randrange(3_000)} if rng.random() < 0.5 else {},
                ageing_s=rng.choice((None, 0, 1, 60)),
                fair_half_life_s=rng.choice((None, 0, 30)),
                reserve_after_s=rng.choice((None, 0, 5)),
                preempt_spares_s=rng.choice((None, 1, 20)),
                preempt_per_minute=rng.choice((None, 3, 60)),
            )
            self.wish(OPERATOR, ev.PolicyUpsertRequested(placement=rules, reason="others first"))
            return
        on_lowered = rng.choice(tuple(OnLowered))
        lowered: ev.PolicyUpsertRequested | ev.QueueUpsertRequested
        before: ev.PolicyUpsertRequested | ev.QueueUpsertRequested
        if roll < 0.7:
            before = BOUNDED
            limits = {"limit_compute_milli": rng.randrange(3_000), "limit_jobs": rng.randrange(3)}
            lowered = msgspec.structs.replace(BOUNDED, on_lowered=on_lowered, **limits)
        else:
            before = rng.choice(self._queues()[1:])
            least = before.guaranteed_compute_milli or 0
            lowered = msgspec.structs.replace(
                before, limit_compute_milli=least + rng.randrange(3_000), on_lowered=on_lowered
            )
        self.wish(OPERATOR, lowered)
        # Back to what every job fits in: else one that waits for more would never end.
        self.after(rng.randrange(1, 10_000) * MS, lambda: self.wish(OPERATOR, before))

    def _change_a_job(self, last: int) -> None:
        """Somebody wants a job otherwise, a new one or one that runs; now and then only to know what would follow."""
        rng = self.rng
        number = rng.randrange(max(1, last - 20), last + 1)
        name = f"{self.owners[number]}/job-x{number}"
        wait = rng.randrange(1, 8_000) * MS
        holding = sorted({placed.job_id for placed in self.checker.holding.values()})
        if holding and rng.random() < 0.6:
            name, wait = rng.choice(holding), rng.randrange(1, 300) * MS
        tenant = OPERATOR if rng.random() < 0.5 else TenantId(name.partition("/")[0])
        wish: Any
        roll = rng.random()
        if roll < 0.3:
            wish = ev.JobHoldRequested(job_id=name, reason="not now")
            # By the operator, who may end any hold: a job that stays held never ends.
            release = ev.JobReleaseRequested(job_id=name, reason="now")
            self.after(8 * S + rng.randrange(1, 10_000) * MS, lambda: self.wish(OPERATOR, release))
        elif roll < 0.5:
            wish = ev.JobReprioritizeRequested(job_id=name, priority=rng.randrange(1001))
        elif roll < 0.75:
            wish = ev.JobPreemptRequested(job_id=name, reason="room for others", requeue=rng.random() < 0.8)
        else:
            # Of these, a queue that is empty takes any, so that the job still ends.
            wish = ev.JobResizeRequested(
                job_id=name, gpu_milli=rng.choice((100, 300, 600, 1000)), gpu_memory_mib=rng.choice((6_000, 70_000))
            )
        wish = msgspec.structs.replace(wish, dry_run=rng.random() < 0.15)
        self.after(wait, lambda: self.wish(tenant, wish))

    def _replicas_that_fit(self, resources: ev.Resources) -> int:
        """On an empty pool: whatever is asked here is feasible, so it must end."""
        return self.options.nodes * (self.options.devices // (resources.gpu or 1))

    def fate(self, run_id: RunId) -> Fate:
        """What the run's process does, from its id and the seed."""
        digest = hashlib.sha256(f"{self.options.seed} {run_id}".encode()).digest()
        duration = (50 + digest[0] * 40) * MS
        exit_code = 1 if digest[1] < 12 else 77 if digest[1] < 18 else 0
        return Fate(duration=duration, exit_code=exit_code, refuses=digest[2] < 4)

    def history_hash(self) -> str:
        """One hash over both streams: equal seeds give equal hashes."""
        sha = hashlib.sha256()
        for messages in self.bus.streams.values():
            for stored in messages:
                sha.update(stored.entry.event_id.encode())
                sha.update(msgspec.json.encode(stored.entry.event))
        return sha.hexdigest()
