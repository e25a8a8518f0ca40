"""What holds over any history of the monitor.

Repeats change nothing, wishes and facts commute, snapshots lose nothing, and what was said once is not said again.
"""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.contracts import events as ev
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import OPERATOR, NodeId, TenantId
from apportion.contracts.testing import ACME, NOON, a_node, as_fact, as_wish
from apportion.monitor import core
from apportion.monitor.core import Heard, Observation, Resumed, State, Tick
from apportion.monitor.due import Due
from apportion.monitor.wishes import NS_PER_S
from apportion.pool.state import NodeState

NODES = [f"node-{i}" for i in range(4)]
node = st.sampled_from(NODES)
wish = st.one_of(
    st.builds(ev.NodeCordonRequested, node_id=node, reason=st.just("r")),
    st.builds(ev.NodeDrainRequested, node_id=node, reason=st.just("r"), deadline_s=st.integers(0, 9)),
    st.builds(ev.NodeUncordonRequested, node_id=node, reason=st.just("r")),
    st.builds(ev.ControlPlaneThawRequested, reason=st.just("r")),
)
Step = tuple[str, object]
step = st.one_of(
    st.tuples(st.just("wish"), st.tuples(wish, st.sampled_from([OPERATOR, ACME]))),
    st.tuples(st.just("register"), node),
    st.tuples(st.just("hear"), st.tuples(node, st.integers(0, 8))),
    st.tuples(st.just("tick"), st.integers(0, 8)),
    st.tuples(st.just("resume"), st.integers(0, 30)),
    st.tuples(st.just("restart"), st.none()),
)


class World:
    """A monitor, its streams, and the nodes' agents as far as they know their epochs."""

    def __init__(self) -> None:
        self.state: State = core.initial()
        self.entries: list[Entry] = []
        self.clock_s = 0
        self.seqs = dict.fromkeys(Stream, 0)
        self.said: list[ev.Fact] = []

    def record(self, entry: Entry) -> None:
        self.seqs[entry.stream] = entry.seq
        self.entries.append(entry)
        self.state = core.evolve(self.state, entry)

    def fact(self, event: ev.Fact, author: str) -> None:
        self.record(as_fact(event, self.seqs[Stream.FACTS] + 1, author=author))

    def observe(self, observation: Observation) -> None:
        self.state = core.observe(self.state, observation, NOON)

    def step(self, what: str, value: object) -> None:
        match what, value:
            case "wish", (ev.Wish() as asked, str(tenant)):
                self.record(as_wish(asked, self.seqs[Stream.WISHES] + 1, tenant=TenantId(tenant)))
            case "register", str(name):
                known = self.state.pool.nodes.get(NodeId(name))
                self.fact(a_node(name, epoch=known.epoch if known else 0), f"agent-{name}")
            case "hear", (str(name), int(seconds)):
                self.clock_s += seconds
                known = self.state.pool.nodes.get(NodeId(name))
                epoch = known.epoch if known else 0
                self.observe(
                    Heard(
                        node=NodeId(name),
                        session=f"{name}-s1",
                        epoch=epoch,
                        at_ns=self.clock_s * NS_PER_S,
                    )
                )
            case "tick", int(seconds):
                self.clock_s += seconds
                self.observe(Tick(at_ns=self.clock_s * NS_PER_S))
            case "resume", int(seconds):
                self.clock_s += seconds
                self.observe(Resumed(at_ns=self.clock_s * NS_PER_S))
            case _:
                self.state = core.restore(core.snapshot(self.state))
        self.settle()

    def settle(self) -> None:
        for _ in range(30):
            facts = core.decide(self.state, NOON)
            assert facts == core.decide(self.state, NOON), "deciding changes nothing"
            assert facts == asking_everybody(self.state), "who was left out had nothing to say"
            if not facts:
                return
            for fact in facts:
                self.said.append(fact)
                self.fact(fact, "monitor")
        raise AssertionError("the monitor never falls silent")


def asking_everybody(state: State) -> list[ev.Fact]:
    """What is decided when each node is looked at, not only those that are due; ``state`` stays as it was."""
    due, doubted = state.due, state.misfits.doubted
    everybody = set(state.pool.nodes)
    state.due, state.misfits.doubted = Due(overdue=everybody), everybody
    try:
        return core.decide(state, NOON)
    finally:
        state.due, state.misfits.doubted = due, doubted


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=40))
def test_nobody_is_overlooked_and_the_monitor_wakes_in_time(steps: list[Step]) -> None:
    """Only those that are due are looked at: who they are is the same as by asking every node, after any history."""
    world = World()
    for what, value in steps:
        world.step(what, value)
        state = world.state
        nodes = state.pool.nodes
        assert state.suspected == {name for name, node in nodes.items() if node.state is NodeState.SUSPECTED}
        if state.clock_ns is None:
            continue
        listened = {name: node for name, node in nodes.items() if node.state is not NodeState.FENCED}
        silent_ms = {name: core._silent_ms(state, node, state.clock_ns) for name, node in listened.items()}
        assert state.due.overdue & listened.keys() == {
            name for name, silence in silent_ms.items() if silence >= state.suspect_ms
        }
        limits = {name: state.lease_ms if name in state.suspected else state.suspect_ms for name in listened}
        waits = [limits[name] - silence for name, silence in silent_ms.items() if silence < limits[name]]
        wake = core.wake_at(state, NOON)
        assert not waits or (wake is not None and wake <= NOON + min(waits) * core.NS_PER_MS)


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=40))
def test_every_wish_is_answered_once_in_order_and_fences_count_up(steps: list[Step]) -> None:
    """Also over restarts, and whatever happens to the nodes meanwhile."""
    world = World()
    for what, value in steps:
        world.step(what, value)
    answers = [answer for fact in world.said if (answer := getattr(fact, "answers", 0))]
    assert answers == list(range(1, world.seqs[Stream.WISHES] + 1))
    for name in NODES:
        epochs = [fact.epoch for fact in world.said if isinstance(fact, ev.NodeFenced) and fact.node_id == name]
        assert epochs == list(range(1, len(epochs) + 1))
    losses = [fact.node_id for fact in world.said if isinstance(fact, ev.NodeLost)]
    assert losses == [fact.node_id for fact in world.said if isinstance(fact, ev.NodeFenced)]


@settings(max_examples=80, deadline=None)
@given(st.lists(step, max_size=30), st.randoms(use_true_random=False))
def test_folding_again_or_in_another_interleaving_gives_the_same_state(steps: list[Step], random: Random) -> None:
    """Each stream is in order; how the two interleave, and what is delivered twice, must not matter."""
    world = World()
    for what, value in steps:
        world.step(what, value)
    by_stream = {s: [e for e in world.entries if e.stream is s] for s in Stream}
    states = []
    for order in (world.entries, [*by_stream[Stream.WISHES], *by_stream[Stream.FACTS]], _shuffled(by_stream, random)):
        state = core.initial()
        for entry in order:
            state = core.evolve(state, entry)
            state = core.evolve(state, entry)
        states.append(core.snapshot(state))
    assert states[0] == states[1] == states[2]


def _shuffled(by_stream: dict[Stream, list[Entry]], random: Random) -> list[Entry]:
    queues = [list(entries) for entries in by_stream.values() if entries]
    order = []
    while queues:
        queue = random.choice(queues)
        order.append(queue.pop(0))
        queues = [q for q in queues if q]
    return order


@settings(max_examples=80, deadline=None)
@given(st.lists(step, max_size=30))
def test_a_snapshot_is_the_state_less_what_was_heard(steps: list[Step]) -> None:
    """Restored twice it is the same bytes."""
    world = World()
    for what, value in steps:
        world.step(what, value)
    kept = core.snapshot(world.state)
    assert core.snapshot(core.restore(kept)) == kept
    assert core.position(core.restore(kept)) == core.position(world.state)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(node, st.integers(0, 4)), min_size=1, max_size=60))
def test_a_node_heard_within_the_suspicion_time_is_never_fenced(signs: list[tuple[str, int]]) -> None:
    """Whatever the others do: a node with a heartbeat every second or so keeps its runs."""
    world = World()
    for name in NODES:
        world.step("register", name)
    for name, seconds in signs:
        world.step("hear", ("node-0", 0))
        world.step("hear", (name, seconds))
    assert not [f for f in world.said if isinstance(f, ev.NodeFenced | ev.NodeSuspected) and f.node_id == "node-0"]
