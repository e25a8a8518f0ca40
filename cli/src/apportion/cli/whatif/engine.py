"""The cores on a virtual clock, and machines that take as long as they are told. Pure: the same input, the same facts.

Admission and the placer are the services' own; what a node does is reduced to when a run starts, how fast it goes
beside its neighbours, and when it ends. What happens to nodes is given, and isn't decided anew.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from apportion.admission import core as admission
from apportion.cli.whatif.sharing import ALONE, speed
from apportion.contracts import events as ev
from apportion.contracts.causes import RunCause
from apportion.contracts.envelope import Basis, Entry, Stream
from apportion.contracts.ids import (
    ADMISSION,
    PLACER,
    Author,
    DeviceUuid,
    JobId,
    NodeId,
    RunId,
    agent_author,
    job_of_run,
)
from apportion.node_agent.core import CAUSE_OF_STOP
from apportion.placer import core as placer
from apportion.pool.state import RunState

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
START_NS: Final = 100 * NS_PER_MS
"""From an order to a running process, where no record says."""
STOP_NS: Final = NS_PER_S
"""What a run takes to end once it was told to, or its grace where that is shorter."""
ROUNDS_MAX: Final = 10_000
"""Decisions at one instant: a core that never falls silent is a fault, not a long computation."""


class Fate(Struct, frozen=True, kw_only=True):
    """What becomes of a replica's run that nobody stops."""

    work: int
    """Milliseconds at full speed, in thousandths."""
    cause: RunCause = RunCause.SUCCESS
    exit_code: int | None = 0
    is_assumed: bool = False
    """True where the record doesn't say, as the run never came to an end by itself."""


Fates = Callable[[RunId, int], Fate]
"""The fate of a run, of whose replica so many earlier runs had come to an end by themselves."""


class Happening(Struct, frozen=True, kw_only=True):
    """Something that is given: a wish, or a fact about a node."""

    at: int
    wish: Entry | None = None
    fact: ev.Fact | None = None
    author: Author = Author("")


class _Process(Struct, kw_only=True):
    """A run on its machine."""

    order: ev.RunPlaced
    fate: Fate
    placed_at: int
    started_at: int = 0
    done: int = 0
    """Milliseconds at full speed, in thousandths."""
    speed: int = ALONE
    since: int = 0
    """When ``done`` was brought up to date; ns."""
    version: int = 0
    """Goes up whenever its end is planned anew: what was planned before doesn't count."""
    stop: RunCause | None = None


class Simulation:
    """One run of the cores over what happens."""

    def __init__(
        self,
        fates: Fates,
        *,
        config: Mapping[str, Mapping[str, int | str]],
        start_ns: int = START_NS,
        release_ns: int = 0,
    ) -> None:
        self.states: dict[Author, Any] = {ADMISSION: admission.initial(), PLACER: placer.initial()}
        self.entries: list[Entry] = []
        """Facts that were stated by the simulation, in order."""
        self.now = 0
        self.assumed: set[JobId] = set()
        """Jobs whose work is not known from the record, and was started all the same."""
        self.decisions = 0
        self._cores: dict[Author, Any] = {ADMISSION: admission, PLACER: placer}
        self._config = config
        self._fates = fates
        self._start_ns = start_ns
        self._release_ns = release_ns
        """From a process's end to the release of its slices."""
        self._seq = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._processes: dict[RunId, _Process] = {}
        self._sharing: defaultdict[DeviceUuid, set[RunId]] = defaultdict(set)
        self._ends: defaultdict[tuple[JobId, str], int] = defaultdict(int)
        """How many runs of a replica have come to an end by themselves."""
        self._wakes: dict[Author, int] = {}

    def fold(self, entry: Entry) -> None:
        """Believe what is recorded, before the simulation begins."""
        for author, core in self._cores.items():
            if author == ADMISSION or entry.stream is Stream.FACTS:  # the placer reads no wishes
                self.states[author] = core.evolve(self.states[author], entry)
        if entry.stream is Stream.FACTS:
            self._seq = entry.seq
            self.now = max(self.now, entry.recorded_at)

    def begin(self, at: int, done: Mapping[RunId, int], ends: Mapping[tuple[JobId, str], int]) -> None:
        """Take over at an instant: what runs goes on with what it has ``done``; each core begins a session."""
        self.now = at
        self._ends.update(ends)
        pool = self.states[PLACER].pool
        for job in list(pool.jobs.values()):
            for run in job.runs.values():
                if run.holds:
                    self._adopt(run, done)
        for author, core in self._cores.items():
            claim = ev.LeaseClaimed(
                author=author, session="whatif", core=core.POLICY, config=dict(self._config.get(author, {}))
            )
            self._state([claim], author)

    def run(self, happenings: Iterable[Happening], until: int) -> list[Entry]:
        """Every fact that is stated until an instant, or until nothing is left to happen."""
        for happening in happenings:
            self._at(happening.at, lambda one=happening: self._happen(one))  # type: ignore[misc]  # binds the loop's value
        self._settle()
        while self._heap and self._heap[0][0] <= until:
            self.now = self._heap[0][0]
            while self._heap and self._heap[0][0] == self.now:
                heapq.heappop(self._heap)[2]()
            self._settle()
        self.now = until if self._heap else self.now
        return self.entries

    # What happens ----------------------------------------------------------------------------------------------------

    def _at(self, at: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(at, self.now), self._count, action))

    def _happen(self, happening: Happening) -> None:
        if happening.wish is not None:
            self.states[ADMISSION] = admission.evolve(self.states[ADMISSION], happening.wish)
        if happening.fact is not None:
            fact = happening.fact
            if isinstance(fact, ev.NodeFenced):
                node = self.states[PLACER].pool.nodes.get(fact.node_id)
                fact = replace(fact, runs=tuple(sorted(node.runs)) if node is not None else ())
            self._state([fact], happening.author)

    def _state(self, facts: Sequence[ev.Fact], author: Author, basis: Basis | None = None) -> None:
        for fact in facts:
            self._seq += 1
            entry = Entry(
                stream=Stream.FACTS,
                seq=self._seq,
                recorded_at=self.now,
                event=fact,
                event_id=f"whatif-{self._seq}",
                author=author,
                basis=basis,
            )
            self.entries.append(entry)
            for each, core in self._cores.items():
                self.states[each] = core.evolve(self.states[each], entry)
            self._obey(fact)

    def _settle(self) -> None:
        """Let both cores decide until neither has more to say."""
        for _ in range(ROUNDS_MAX):
            said = False
            for author, core in self._cores.items():
                state = self.states[author]
                facts = core.decide(state, self.now)
                if facts:
                    said = True
                    self.decisions += 1
                    facts_seq, wishes_seq = core.position(state)
                    basis = Basis(facts=facts_seq, wishes=wishes_seq, decided_at=self.now, policy=core.POLICY)
                    self._state(facts, author, basis)
            if not said:
                break
        else:
            raise AssertionError(f"a core does not fall silent at {self.now}")
        for author, core in self._cores.items():
            wake = core.wake_at(self.states[author], self.now)
            if wake is not None and self._wakes.get(author) != wake:
                self._wakes[author] = wake
                self._at(max(wake, self.now + 1), lambda: None)

    # Machines --------------------------------------------------------------------------------------------------------

    def _obey(self, fact: ev.Fact) -> None:
        match fact:
            case ev.RunPlaced():
                self._accept(fact)
            case ev.RunStopOrdered(run_id=run_id):
                process = self._processes.get(run_id)
                if process is not None and process.stop is None:
                    process.stop = CAUSE_OF_STOP[fact.cause]
                    wait = min(STOP_NS, fact.grace_s * NS_PER_S)
                    self._at(self.now + wait, lambda: self._end(run_id, process.version, stopped=True))
            case ev.NodeFenced():
                for run_id in fact.runs:
                    self._vanish(run_id)
            case _:
                pass

    def _accept(self, order: ev.RunPlaced) -> None:
        node = self.states[PLACER].pool.nodes.get(order.node_id)
        if node is None or node.epoch != order.node_epoch:
            return  # no agent starts what was placed before the fencing was known
        self._processes[order.run_id] = _Process(
            order=order, fate=self._fate_of(order.run_id), placed_at=self.now, since=self.now
        )
        self._at(self.now + self._start_ns, lambda: self._start(order.run_id))

    def _fate_of(self, run_id: RunId) -> Fate:
        fate = self._fates(run_id, self._ends[replica_of(run_id)])
        if fate.is_assumed:
            self.assumed.add(job_of_run(run_id))
        return fate

    def _adopt(self, run: Any, done: Mapping[RunId, int]) -> None:
        """A run that the record left somewhere between its placement and its release."""
        order = ev.RunPlaced(
            run_id=run.run_id,
            job_id=run.job_id,
            tenant=self.states[PLACER].pool.jobs[run.job_id].tenant,
            node_id=run.node_id,
            node_epoch=run.node_epoch,
            slices=run.slices,
            command=(),
        )
        process = _Process(order=order, fate=self._fate_of(run.run_id), placed_at=run.placed_at, since=self.now)
        self._processes[run.run_id] = process
        if run.state is RunState.FINISHED:
            self._at(self.now, lambda: self._release(run.run_id))
            return
        process.stop = None if run.stop is None else CAUSE_OF_STOP[run.stop]
        if run.state is RunState.PLACED:
            self._at(self.now + self._start_ns, lambda: self._start(run.run_id))
        else:
            process.started_at = run.started_at or self.now
            process.done = done.get(run.run_id, 0)
            self._join(process)
        if process.stop is not None:
            self._at(self.now + STOP_NS, lambda: self._end(run.run_id, process.version, stopped=True))

    def _start(self, run_id: RunId) -> None:
        process = self._processes.get(run_id)
        if process is None or process.started_at or process.stop is not None:
            return
        process.started_at = self.now
        order = process.order
        self._join(process)
        started = ev.RunStarted(run_id=run_id, node_id=order.node_id, pid=1, started_at=self.now)
        self._state([started], agent_author(order.node_id))

    def _join(self, process: _Process) -> None:
        process.since = self.now
        for piece in process.order.slices:
            self._sharing[piece.device_uuid].add(process.order.run_id)
        self._pace(piece.device_uuid for piece in process.order.slices)
        if not process.order.slices:
            self._plan_end(process)

    def _leave(self, process: _Process) -> None:
        devices = [piece.device_uuid for piece in process.order.slices]
        for device in devices:
            self._sharing[device].discard(process.order.run_id)
        self._pace(devices)

    def _pace(self, devices: Iterable[DeviceUuid]) -> None:
        """Bring the runs on these devices up to date, and plan their ends by the speed that they have from now on."""
        for run_id in sorted({run_id for device in devices for run_id in self._sharing[device]}):
            process = self._processes[run_id]
            process.done += (self.now - process.since) // NS_PER_MS * process.speed
            process.since = self.now
            process.speed = min(speed(len(self._sharing[piece.device_uuid])) for piece in process.order.slices)
            self._plan_end(process)

    def _plan_end(self, process: _Process) -> None:
        process.version += 1
        version, run_id = process.version, process.order.run_id
        left_ms = -(-max(0, process.fate.work - process.done) // process.speed)
        self._at(self.now + left_ms * NS_PER_MS, lambda: self._end(run_id, version, stopped=False))

    def _end(self, run_id: RunId, version: int, *, stopped: bool) -> None:
        process = self._processes.get(run_id)
        if process is None or (not stopped and version != process.version):
            return
        cause, exit_code = process.fate.cause, process.fate.exit_code
        if stopped:
            assert process.stop is not None, "somebody ordered it"
            cause, exit_code = process.stop, None
        else:
            self._ends[replica_of(run_id)] += 1
        if process.started_at:
            self._leave(process)
        finished = ev.RunFinished(
            run_id=run_id,
            node_id=process.order.node_id,
            cause=cause,
            exit_code=exit_code,
            was_started=bool(process.started_at),
            started_at=process.started_at,
            finished_at=self.now,
        )
        process.started_at = 0
        self._state([finished], agent_author(process.order.node_id))
        if self._release_ns:
            self._at(self.now + self._release_ns, lambda: self._release(run_id))
        else:
            self._release(run_id)

    def _release(self, run_id: RunId) -> None:
        process = self._processes.pop(run_id, None)
        if process is not None:
            node = process.order.node_id
            self._state([ev.RunReleased(run_id=run_id, node_id=node, released_at=self.now)], agent_author(node))

    def _vanish(self, run_id: RunId) -> None:
        process = self._processes.pop(run_id, None)
        if process is not None and process.started_at:
            self._leave(process)


def replica_of(run_id: RunId) -> tuple[JobId, str]:
    """Job and replica of a run.

    >>> replica_of(RunId("acme/train-7/3/2"))
    ('acme/train-7', '3')
    """
    return job_of_run(run_id), run_id.rsplit("/", 2)[1]


NODE_FACTS: Final = (
    ev.NodeRegistered,
    ev.DeviceHealthChanged,
    ev.NodeSuspected,
    ev.NodeTrusted,
    ev.NodeLost,
    ev.NodeFenced,
    ev.NodeRecovered,
    ev.NodeCordoned,
    ev.NodeDraining,
    ev.NodeUncordoned,
    ev.ControlPlaneFrozen,
    ev.ControlPlaneThawed,
)
"""Facts that are given: what happens to nodes isn't decided anew."""


def about(fact: ev.Fact) -> NodeId | None:
    """The node that a fact is about."""
    node: NodeId | None = getattr(fact, "node_id", None)
    return node
