"""What holds for a node's agent whatever happens: starts, ends, stops, fencings, deaths and repeats at any moment."""

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts.causes import RunCause, StopCause
from apportion.contracts.envelope import Entry
from apportion.contracts.events import (
    Fact,
    LeaseClaimed,
    NodeFenced,
    NodeRegistered,
    RunFinished,
    RunReleased,
    RunStarted,
    RunStopOrdered,
)
from apportion.contracts.ids import NodeId, RunId, agent_author
from apportion.contracts.testing import NOON, a_device, a_placement, as_fact
from apportion.node_agent.core import (
    Adopted,
    AgentCore,
    Found,
    Inventory,
    InventoryChanged,
    Observation,
    ProcessExited,
    ProcessStarted,
    ReleaseRun,
    RemoveRun,
    SlicesReleased,
    StartRun,
    StopRun,
)

NODE = NodeId("node-1")
ME = agent_author(NODE)
INVENTORY = Inventory(boot_id="boot-1", devices=(a_device(0),), cpu_milli=1000, memory_mib=1000)
JOBS = ("a", "b", "c")


class Machine:
    """The agent's world: a stream, directories and processes that outlive it, and an agent that may die anywhere.

    It carries out instructions as the shell does, and counts what must happen once.
    """

    def __init__(self) -> None:
        self.core = AgentCore(NODE)
        self.stream: list[Entry] = []
        self.kept = self.core.snapshot(self.core.initial())
        self.epoch = 0
        self.sessions = 0
        self.placed = 0
        self.starts: Counter[RunId] = Counter()
        self.directories: dict[RunId, Found] = {}
        self.finished: set[RunId] = set()
        self.todo: list[object] = []
        self.seen: list[Observation] = []
        self.boot()

    def append(self, fact: Fact, author: str = "") -> None:
        self.stream.append(as_fact(fact, len(self.stream) + 1, author=author, at=NOON + len(self.stream)))

    def boot(self) -> None:
        self.sessions += 1
        session = f"s{self.sessions}"
        self.state = self.core.restore(self.kept)
        self.todo.clear()
        self.seen.clear()
        self.see(
            Adopted(session=session, found=tuple(self.directories.values())), InventoryChanged(inventory=INVENTORY)
        )
        self.append(LeaseClaimed(author=ME, session=session, core=self.core.POLICY), ME)

    def see(self, *observations: Observation) -> None:
        for observation in observations:
            self.state = self.core.observe(self.state, observation, NOON)
            self.seen.append(observation)

    def fold(self, limit: int = 1_000) -> None:
        position, _ = self.core.position(self.state)
        for entry in self.stream[position : position + limit]:
            self.state = self.core.evolve(self.state, entry)

    def is_caught_up(self) -> bool:
        return self.core.position(self.state) == (len(self.stream), 0)

    def act(self) -> None:
        for instruction in self.core.instruct(self.state, NOON):
            self.state = self.core.issued(self.state, instruction)
            self.todo.append(instruction)
        assert self.core.instruct(self.state, NOON) == []

    def say(self) -> None:
        """As the reactor does: only once all that was said before has come round."""
        self.fold()
        facts = self.core.decide(self.state, NOON)
        for fact in facts:
            self.append(fact, ME)
        self.fold()
        assert self.core.decide(self.state, NOON) == []

    def carry_out(self, limit: int = 1_000) -> None:
        for instruction in self.todo[:limit]:
            match instruction:
                case StartRun(order=order):
                    run = order.run_id
                    assert run not in self.finished, "started after its end was told"
                    assert run not in self.directories, "started while its directory was there"
                    self.starts[run] += 1
                    started = ProcessStarted(run_id=run, pid=self.starts.total(), started_at=NOON)
                    self.directories[run] = Found(run_id=run, started=started)
                    self.see(started)
                case StopRun(run_id=run):
                    self.end(run, signal=15)
                case ReleaseRun(order=order):
                    found = self.directories.get(order.run_id)
                    assert found is None or found.ended is not None, "released while it ran"
                    self.see(SlicesReleased(run_id=order.run_id, at=NOON))
                case RemoveRun(run_id=run):
                    gone = self.directories.pop(run, None)
                    assert gone is None or gone.ended is not None, "removed while it ran"
        del self.todo[:limit]

    def end(self, run: RunId, *, exit_code: int | None = None, signal: int | None = None) -> None:
        found = self.directories.get(run)
        if found is None or found.ended is not None:
            return
        ended = ProcessExited(run_id=run, finished_at=NOON + 10**9, exit_code=exit_code, signal=signal)
        self.directories[run] = msgspec.structs.replace(found, ended=ended)
        self.see(ended)

    def told(self, kind: type[Fact]) -> Counter[str]:
        return Counter(
            str(getattr(entry.event, "run_id", "")) for entry in self.stream if isinstance(entry.event, kind)
        )

    def check(self) -> None:
        self.finished = {RunId(run) for run in self.told(RunFinished)}
        for kind in (RunStarted, RunFinished, RunReleased):
            assert all(count == 1 for count in self.told(kind).values()), f"{kind.__name__} was told twice"
        assert all(count == 1 for count in self.starts.values()), "a run was started twice"
        assert set(self.told(RunReleased)) <= set(self.told(RunFinished))

    # What may happen

    def place(self, pick: int) -> None:
        self.placed += 1
        stale = pick % 7 == 6
        self.append(
            a_placement(f"acme/{JOBS[pick % 3]}-{self.placed}", node_epoch=self.epoch - 1 if stale else self.epoch)
        )

    def a_run(self, pick: int) -> RunId | None:
        runs = [e.event.run_id for e in self.stream if type(e.event).__name__ == "RunPlaced"]  # type: ignore[union-attr]
        return runs[pick % len(runs)] if runs else None

    def stop(self, pick: int) -> None:
        if (run := self.a_run(pick)) is not None:
            cause = list(StopCause)[pick % len(StopCause)]
            self.append(RunStopOrdered(run_id=run, node_id=NODE, cause=cause, grace_s=pick % 5, actor="user:ann"))

    def exit(self, pick: int) -> None:
        live = [run for run, found in sorted(self.directories.items()) if found.ended is None]
        if live:
            self.end(live[pick % len(live)], exit_code=pick % 2)

    def vanish(self, pick: int) -> None:
        """Somebody deletes the directory of a run that was told to have started and has ended."""
        told = self.told(RunStarted)
        ended = [run for run, found in sorted(self.directories.items()) if found.ended is not None and told[run]]
        if ended:
            del self.directories[ended[pick % len(ended)]]

    def fence(self) -> None:
        self.epoch += 1
        self.append(NodeFenced(node_id=NODE, epoch=self.epoch))

    def repeat(self, pick: int) -> None:
        """Everything comes twice: what the stream told and what the shell saw."""
        before = (
            self.core.snapshot(self.state),
            self.core.decide(self.state, NOON),
            self.core.instruct(self.state, NOON),
        )
        position, _ = self.core.position(self.state)
        for entry in self.stream[max(0, position - 1 - pick % 9) : position]:
            self.state = self.core.evolve(self.state, entry)
        for observation in self.seen[-1 - pick % 9 :]:
            self.state = self.core.observe(self.state, observation, NOON)
        after = self.core.snapshot(self.state), self.core.decide(self.state, NOON), self.core.instruct(self.state, NOON)
        assert before == after

    def die(self, pick: int) -> None:
        if pick % 2:
            self.kept = self.core.snapshot(self.state)
        self.boot()

    def step(self, what: str, pick: int) -> None:
        match what:
            case "place":
                self.place(pick)
            case "stop":
                self.stop(pick)
            case "exit":
                self.exit(pick)
            case "fence":
                self.fence()
            case "repeat":
                self.repeat(pick)
            case "die":
                self.die(pick)
            case "vanish":
                self.vanish(pick)
            case "fold":
                self.fold(1 + pick % 4)
            case "act":
                self.fold()
                self.act()
            case "work":
                self.carry_out(1 + pick % 3)
            case "say":
                self.say()
        self.check()

    def settle(self) -> None:
        for _ in range(6):
            self.fold()
            self.act()
            self.carry_out()
            self.say()
            for run in sorted(self.directories):
                self.end(run, exit_code=0)
            self.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                "place",
                "place",
                "stop",
                "exit",
                "exit",
                "fence",
                "vanish",
                "repeat",
                "die",
                "fold",
                "act",
                "act",
                "work",
                "work",
                "say",
            )
        ),
        st.integers(0, 1_000),
    ),
    min_size=40,  # short histories hold no start, no death and no fencing; shrinking makes the needless steps idle
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_every_run_starts_at_most_once_and_ends_exactly_once(steps: list[tuple[str, int]]) -> None:
    """Whenever the agent dies, whatever comes twice: and in the end nothing of any run is left."""
    machine = Machine()
    for what, pick in steps:
        machine.step(what, pick)
    machine.settle()
    placed = {str(e.event.run_id) for e in machine.stream if type(e.event).__name__ == "RunPlaced"}  # type: ignore[union-attr]
    assert set(machine.told(RunFinished)) == set(machine.told(RunReleased)) == placed
    assert machine.directories == {}
    assert machine.state.runs == {}
    assert machine.core.decide(machine.state, NOON) == []
    registered = [e.event for e in machine.stream if isinstance(e.event, NodeRegistered)]
    assert (registered[-1].epoch, registered[-1].session) == (machine.epoch, f"s{machine.sessions}")


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_fenced_node_registers_only_when_nothing_older_is_left(steps: list[tuple[str, int]]) -> None:
    """The placer gives its slices away again from the registration on."""
    machine = Machine()
    for what, pick in steps:
        machine.step(what, pick)
    machine.settle()
    open_runs: dict[str, int] = {}
    for entry in machine.stream:
        match entry.event:
            case RunReleased(run_id=run_id):
                open_runs.pop(run_id, None)
            case NodeRegistered(epoch=epoch):
                assert all(run_epoch >= epoch for run_epoch in open_runs.values())
            case event if type(event).__name__ == "RunPlaced":
                open_runs[str(event.run_id)] = event.node_epoch  # type: ignore[union-attr]
            case _:
                pass


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 200))
def test_a_replay_from_any_snapshot_equals_the_fold_from_the_start(steps: list[tuple[str, int]], at: int) -> None:
    """A snapshot is a cache of the stream, and of nothing else."""
    machine = Machine()
    for what, pick in steps:
        machine.step(what, pick)
    core = machine.core
    whole, part = core.initial(), core.initial()
    for entry in machine.stream:
        whole = core.evolve(whole, entry)
        if entry.seq == at:
            part = core.restore(core.snapshot(part))
        part = core.evolve(part, entry)
    assert core.snapshot(whole) == core.snapshot(part)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_stopped_and_fenced_runs_never_count_as_success(steps: list[tuple[str, int]]) -> None:
    """A success frees a job from ever running again, so it is told only of a run that nobody ended."""
    machine = Machine()
    for what, pick in steps:
        machine.step(what, pick)
    machine.settle()
    for entry in machine.stream:
        event = entry.event
        if isinstance(event, RunFinished) and event.cause is RunCause.SUCCESS:
            assert (event.exit_code, event.signal, event.was_started) == (0, None, True)
