"""What a node's agent states and does, given what the streams and the machine say."""

from typing import Any

import msgspec
import pytest

from apportion.contracts.causes import (
    DeviceHealth,
    IsolationFinding,
    IsolationTest,
    Mode,
    RunAction,
    RunCause,
    StopCause,
)
from apportion.contracts.events import (
    CheckpointPlan,
    DeviceHealthChanged,
    Fact,
    IsolationTestStarted,
    IsolationVerdict,
    LeaseClaimed,
    NodeFenced,
    NodeRegistered,
    RunActionOrdered,
    RunCheckpointed,
    RunFinished,
    RunPlaced,
    RunReleased,
    RunResumed,
    RunStarted,
    RunStopOrdered,
    RunSuspended,
)
from apportion.contracts.ids import MONITOR, DeviceUuid, NodeId, RunId, agent_author
from apportion.contracts.testing import NOON, a_device, a_placement, as_fact
from apportion.node_agent.core import (
    Adopted,
    AgentCore,
    Checkpointed,
    CheckpointRun,
    DeviceHealthSeen,
    Found,
    Instruction,
    Inventory,
    InventoryChanged,
    IsolationTried,
    MustStop,
    Observation,
    ProcessExited,
    ProcessStarted,
    ReleaseRun,
    RemoveRun,
    SlicesReleased,
    StartFailed,
    StartRun,
    State,
    Stilled,
    StillRun,
    StopRun,
    TryIsolation,
)

NODE = NodeId("node-1")
ME = agent_author(NODE)
RUN = RunId("acme/train-7/0/1")
INVENTORY = Inventory(boot_id="boot-1", devices=(a_device(0), a_device(1)), cpu_milli=4000, memory_mib=8192)


class Node:
    """One agent's core, its stream, and what its shell would have seen."""

    def __init__(self) -> None:
        self.core = AgentCore(NODE)
        self.state = self.core.initial()
        self.seq = 0

    def fold(self, *facts: Fact, author: str = "") -> None:
        for fact in facts:
            self.seq += 1
            by = author or (ME if str(getattr(fact, "AUTHOR", ME)) in {"node-agent", ME} else "")
            self.state = self.core.evolve(self.state, as_fact(fact, self.seq, author=by))

    def see(self, *observations: Observation) -> None:
        for observation in observations:
            self.state = self.core.observe(self.state, observation, NOON)

    def do(self) -> list[Instruction]:
        """What the shell is told, and hereby has been told."""
        told = self.core.instruct(self.state, NOON)
        for instruction in told:
            self.state = self.core.issued(self.state, instruction)
        return told

    def say(self) -> list[Fact]:
        """What is stated, and hereby has come round."""
        facts = self.core.decide(self.state, NOON)
        self.fold(*facts)
        assert self.core.decide(self.state, NOON) == []
        return facts

    def claim(self, session: str) -> None:
        self.fold(LeaseClaimed(author=ME, session=session, core="node-agent@1#0"))

    def restart(self, session: str, *found: Found, keeps_snapshot: bool = True) -> None:
        """A new agent over the same stream, which finds this on the machine."""
        if keeps_snapshot:
            self.state = self.core.restore(self.core.snapshot(self.state))
        self.see(Adopted(session=session, found=found), InventoryChanged(inventory=INVENTORY))
        self.claim(session)


def a_node_at_work() -> Node:
    node = Node()
    node.restart("s1")
    node.say()
    return node


def a_running_node(**order: Any) -> Node:
    node = a_node_at_work()
    node.fold(a_placement(**order))
    node.do()
    node.see(ProcessStarted(run_id=RUN, pid=77, started_at=NOON))
    node.say()
    return node


def exited(**how: Any) -> ProcessExited:
    return ProcessExited(**{"run_id": RUN, "finished_at": NOON + 5, **how})


def finished_of(facts: list[Fact]) -> RunFinished:
    return next(fact for fact in facts if isinstance(fact, RunFinished))


def test_an_agent_registers_once_it_knows_its_devices() -> None:
    """The placer may use a node from then on, so it isn't said a moment earlier."""
    node = Node()
    node.claim("s1")
    node.see(Adopted(session="s1"))
    assert node.say() == []
    node.see(InventoryChanged(inventory=INVENTORY))
    assert node.say() == [
        NodeRegistered(
            node_id=NODE,
            session="s1",
            boot_id="boot-1",
            epoch=0,
            devices=INVENTORY.devices,
            cpu_milli=4000,
            memory_mib=8192,
        ),
    ]


def test_nothing_is_done_before_the_own_claim_came_round() -> None:
    """A stream that is read anew tells of runs that ended long ago; only past the claim is the story complete."""
    node = Node()
    node.see(Adopted(session="s2"), InventoryChanged(inventory=INVENTORY))
    node.claim("s1")
    node.fold(a_placement())
    assert (node.do(), node.say()) == ([], [])
    node.fold(
        RunFinished(run_id=RUN, node_id=NODE, cause=RunCause.SUCCESS, finished_at=NOON),
        RunReleased(run_id=RUN, node_id=NODE, released_at=NOON),
    )
    node.claim("s2")
    assert node.do() == [RemoveRun(run_id=RUN)]


def test_a_newer_session_silences_this_one() -> None:
    """Two agents of one node must not both act on an order."""
    node = a_node_at_work()
    node.claim("s2")
    node.fold(a_placement())
    assert (node.do(), node.say()) == ([], [])


def test_a_run_lives_from_order_to_release() -> None:
    """Each step is said once, when it happened; the directory goes last."""
    node = a_node_at_work()
    order = a_placement()
    node.fold(order)
    placed = f"fact-{node.seq}"
    assert node.do() == [StartRun(order=order)]
    assert (node.do(), node.say()) == ([], [])

    node.see(ProcessStarted(run_id=RUN, pid=77, started_at=NOON + 1))
    assert node.say() == [RunStarted(run_id=RUN, node_id=NODE, pid=77, started_at=NOON + 1, caused_by=placed)]

    node.see(exited(exit_code=0, peak_memory_mib=512))
    assert node.do() == [ReleaseRun(order=order)]
    assert node.say() == [
        RunFinished(
            run_id=RUN,
            node_id=NODE,
            cause=RunCause.SUCCESS,
            exit_code=0,
            started_at=NOON + 1,
            finished_at=NOON + 5,
            peak_memory_mib=512,
            caused_by=f"fact-{node.seq - 1}",
        ),
    ]
    assert node.do() == []
    node.see(SlicesReleased(run_id=RUN, at=NOON + 6))
    assert node.say() == [
        RunReleased(run_id=RUN, node_id=NODE, released_at=NOON + 6, caused_by=f"fact-{node.seq - 1}"),
    ]
    assert node.do() == [RemoveRun(run_id=RUN)]
    assert node.do() == []
    assert node.state.runs == {}


def test_a_short_run_is_told_in_one_batch() -> None:
    """What happened between two decisions costs one publish."""
    node = a_node_at_work()
    node.fold(a_placement())
    node.do()
    node.see(ProcessStarted(run_id=RUN, pid=77, started_at=NOON), exited(exit_code=0))
    node.do()
    node.see(SlicesReleased(run_id=RUN, at=NOON))
    assert [type(fact) for fact in node.say()] == [RunStarted, RunFinished, RunReleased]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"exit_code": 0}, RunCause.SUCCESS),
        ({"exit_code": 3}, RunCause.USER_ERROR),
        ({"exit_code": 77}, RunCause.OUT_OF_MEMORY),
        ({"exit_code": 1, "out_of_memory": True}, RunCause.OUT_OF_MEMORY),
        ({"signal": 9, "out_of_memory": True}, RunCause.OUT_OF_MEMORY),
        ({"signal": 9, "host_out_of_memory": True}, RunCause.HOST_OUT_OF_MEMORY),
        ({"exit_code": 0, "host_out_of_memory": True}, RunCause.SUCCESS),
        ({"signal": 11}, RunCause.KILLED),
        ({"detail": "lost: rebooted"}, RunCause.NODE_LOST),
        ({"detail": "lost: shim_gone", "is_shim_lost": True}, RunCause.SHIM_LOST),
    ],
)
def test_the_cause_is_what_was_seen(how: dict[str, Any], cause: RunCause) -> None:
    """Retries are charged by cause."""
    node = a_running_node()
    node.see(exited(**how))
    assert finished_of(node.say()).cause is cause


def a_stop(cause: StopCause = StopCause.CANCELLED, *, grace_s: int = 5) -> RunStopOrdered:
    return RunStopOrdered(run_id=RUN, node_id=NODE, cause=cause, grace_s=grace_s, actor="user:ann")


def test_a_stopped_run_ends_for_the_cause_of_its_stop() -> None:
    """Whatever exit code it chose when it was asked to go."""
    node = a_running_node()
    node.fold(a_stop(StopCause.DRAINED))
    stop = f"fact-{node.seq}"
    assert node.do() == [StopRun(run_id=RUN, grace_s=5)]
    assert node.do() == []
    node.see(exited(exit_code=0))
    finished = finished_of(node.say())
    assert (finished.cause, finished.exit_code, finished.caused_by) == (RunCause.DRAINED, 0, stop)


def test_a_run_that_ended_before_the_stop_keeps_its_own_end() -> None:
    """The stop took no effect."""
    node = a_running_node()
    node.see(exited(exit_code=0))
    node.fold(a_stop())
    assert finished_of(node.say()).cause is RunCause.SUCCESS


def test_a_run_that_is_stopped_before_it_was_started_never_starts() -> None:
    """Both orders may come in one read."""
    node = a_node_at_work()
    node.fold(a_placement(), a_stop())
    assert node.do() == []
    facts = node.say()
    assert [type(fact) for fact in facts] == [RunFinished, RunReleased]
    assert (finished_of(facts).cause, finished_of(facts).was_started) == (RunCause.CANCELLED, False)


def test_a_stop_waits_for_the_start_that_is_under_way() -> None:
    """A process that isn't there yet can't be stopped, and must not slip through."""
    node = a_node_at_work()
    node.fold(a_placement())
    node.do()
    node.fold(a_stop())
    assert node.do() == []
    node.see(ProcessStarted(run_id=RUN, pid=77, started_at=NOON))
    assert node.do() == [StopRun(run_id=RUN, grace_s=5)]


def test_an_impatient_stop_shortens_an_earlier_one() -> None:
    """The first cause stands."""
    node = a_running_node()
    node.fold(a_stop(StopCause.PREEMPTED, grace_s=60))
    node.do()
    node.fold(a_stop(StopCause.CANCELLED, grace_s=0))
    assert node.do() == [StopRun(run_id=RUN, grace_s=0)]
    node.see(exited(signal=9))
    assert finished_of(node.say()).cause is RunCause.PREEMPTED


def test_a_failed_start_is_an_end() -> None:
    """And its slices are taken down like any other's."""
    node = a_node_at_work()
    order = a_placement()
    node.fold(order)
    node.do()
    node.see(StartFailed(run_id=RUN, cause=RunCause.ENFORCEMENT_FAILED, detail="memory: asked 4096, read 0", at=NOON))
    finished = finished_of(node.say())
    assert (finished.cause, finished.was_started, finished.detail) == (
        RunCause.ENFORCEMENT_FAILED,
        False,
        "memory: asked 4096, read 0",
    )
    assert node.do() == [ReleaseRun(order=order)]


def test_an_order_of_another_epoch_is_stale() -> None:
    """It was decided when the node was another."""
    node = a_node_at_work()
    node.fold(a_placement(node_epoch=3))
    assert node.do() == []
    facts = node.say()
    assert [type(fact) for fact in facts] == [RunFinished, RunReleased]
    assert (finished_of(facts).cause, finished_of(facts).was_started) == (RunCause.STALE, False)


def test_a_fenced_node_kills_what_is_older_and_registers_anew() -> None:
    """Its runs may live elsewhere by now: they are ended without grace, and only then is the node of use again."""
    node = a_running_node()
    node.fold(a_stop(grace_s=60))
    node.do()
    node.fold(NodeFenced(node_id=NODE, epoch=1, runs=(RUN,)))
    fence = f"fact-{node.seq}"
    assert node.say() == []
    assert node.do() == [StopRun(run_id=RUN, grace_s=0)]
    node.see(exited(signal=9))
    finished = finished_of(node.say())
    assert (finished.cause, finished.signal, finished.caused_by) == (RunCause.NODE_LOST, 9, fence)
    assert [type(i) for i in node.do()] == [ReleaseRun]
    node.see(SlicesReleased(run_id=RUN, at=NOON))
    facts = node.say()
    assert [type(fact) for fact in facts] == [RunReleased, NodeRegistered]
    registered = facts[-1]
    assert isinstance(registered, NodeRegistered)
    assert (registered.epoch, registered.caused_by) == (1, fence)


def test_a_new_session_finds_its_runs_again() -> None:
    """The agent's death is no event in a run's life."""
    node = a_running_node()
    node.restart("s2", Found(run_id=RUN, started=ProcessStarted(run_id=RUN, pid=77, started_at=NOON)))
    assert [type(fact) for fact in node.say()] == [NodeRegistered]
    assert node.do() == []
    node.see(exited(exit_code=0))
    assert finished_of(node.say()).cause is RunCause.SUCCESS


def test_an_end_that_came_while_the_agent_was_away_is_told() -> None:
    """With its exit code, and with the start that nobody told of."""
    node = a_node_at_work()
    node.fold(a_placement())
    node.do()
    started = ProcessStarted(run_id=RUN, pid=77, started_at=NOON)
    node.restart("s2", Found(run_id=RUN, started=started, ended=exited(exit_code=4)))
    facts = node.say()
    assert [type(fact) for fact in facts] == [RunStarted, RunFinished, NodeRegistered]
    assert finished_of(facts).exit_code == 4


def test_an_end_between_adoption_and_claim_is_not_missed() -> None:
    """The machine is looked at before the stream was read to the claim, and runs end meanwhile."""
    node = a_running_node()
    node.state = node.core.restore(node.core.snapshot(node.state))
    started = ProcessStarted(run_id=RUN, pid=77, started_at=NOON)
    node.see(Adopted(session="s2", found=(Found(run_id=RUN, started=started),)), exited(exit_code=0))
    node.see(InventoryChanged(inventory=INVENTORY))
    node.claim("s2")
    assert finished_of(node.say()).cause is RunCause.SUCCESS


def test_an_ordered_run_that_left_no_trace_is_started() -> None:
    """Its directory is made durable before it is started, so no directory means no start."""
    node = a_node_at_work()
    order = a_placement()
    node.fold(order)
    node.do()
    node.restart("s2")
    assert node.do() == [StartRun(order=order)]


def test_a_started_run_whose_directory_is_gone_is_lost() -> None:
    """Starting it again would run it twice."""
    node = a_running_node()
    node.restart("s2")
    assert [type(i) for i in node.do()] == [ReleaseRun]
    assert finished_of(node.say()).cause is RunCause.NODE_LOST


def test_a_stop_that_an_earlier_session_sent_explains_the_end() -> None:
    """The session that sent it died before it could tell."""
    node = a_running_node()
    node.fold(a_stop())
    node.do()
    node.restart(
        "s2",
        Found(
            run_id=RUN,
            started=ProcessStarted(run_id=RUN, pid=77, started_at=NOON),
            ended=exited(signal=15),
        ),
    )
    assert finished_of(node.say()).cause is RunCause.CANCELLED


def test_directories_without_an_order_are_cleared() -> None:
    """Released before, or left by another pool: nobody waits for them, and nothing is stated about them."""
    node = a_node_at_work()
    old, older = RunId("acme/old/0/1"), RunId("acme/older/0/1")
    node.restart(
        "s2",
        Found(run_id=old, started=ProcessStarted(run_id=old, pid=9, started_at=NOON)),
        Found(run_id=older, ended=ProcessExited(run_id=older, finished_at=NOON, exit_code=0)),
    )
    assert node.do() == [StopRun(run_id=old, grace_s=0), RemoveRun(run_id=older)]
    node.see(ProcessExited(run_id=old, finished_at=NOON, signal=9))
    assert node.do() == [RemoveRun(run_id=old)]
    assert [type(fact) for fact in node.say()] == [NodeRegistered]


def test_a_failed_device_ends_its_runs_and_is_told() -> None:
    """Only the runs that hold it."""
    other = RunId("acme/other/0/1")
    node = a_running_node(grace_s=3)
    node.fold(a_placement("acme/other", device=1))
    node.do()
    node.see(ProcessStarted(run_id=other, pid=78, started_at=NOON))
    node.say()
    uuid = DeviceUuid("GPU-node-1-0")
    node.see(DeviceHealthSeen(device_uuid=uuid, health=DeviceHealth.FAILED, code="xid-79", detail="fell off the bus"))
    assert node.say() == [
        DeviceHealthChanged(
            node_id=NODE,
            device_uuid=uuid,
            before=DeviceHealth.HEALTHY,
            after=DeviceHealth.FAILED,
            code="xid-79",
            detail="fell off the bus",
        ),
    ]
    assert node.do() == [StopRun(run_id=RUN, grace_s=3)]
    node.see(exited(signal=15))
    finished = finished_of(node.say())
    assert (finished.cause, finished.detail) == (RunCause.DEVICE_FAULT, "xid-79 fell off the bus")


def test_a_device_that_recovers_is_told() -> None:
    """Health has a way back."""
    node = a_node_at_work()
    uuid = DeviceUuid("GPU-node-1-0")
    node.see(DeviceHealthSeen(device_uuid=uuid, health=DeviceHealth.FAILED, code="xid-79"))
    node.say()
    node.see(DeviceHealthSeen(device_uuid=uuid, health=DeviceHealth.HEALTHY, code="probe"))
    changes = node.say()
    assert [(type(c), getattr(c, "after", None)) for c in changes] == [(DeviceHealthChanged, DeviceHealth.HEALTHY)]


def a_trial(**changes: Any) -> IsolationTestStarted:
    base = IsolationTestStarted(
        test_id="isolation-9",
        node_id=NODE,
        device_uuid=DeviceUuid("GPU-node-1-0"),
        mode=Mode.MPS,
        actor="ann",
        answers=9,
    )
    return msgspec.structs.replace(base, **changes)


def a_verdict() -> IsolationVerdict:
    return IsolationVerdict(
        test_id="isolation-9",
        node_id=NODE,
        device_uuid=DeviceUuid("GPU-node-1-0"),
        mode=Mode.MPS,
        test=IsolationTest.CRASH,
        verdict=IsolationFinding.PASSED,
        checks=(),
        started_at=NOON,
        finished_at=NOON,
    )


def test_a_device_is_tried_once_it_takes_no_new_run_and_holds_none() -> None:
    """A run that was placed before the placer heard of it goes on, or waits for the test's end."""
    node = a_running_node()
    node.fold(a_trial(), author=MONITOR)
    assert node.do() == []
    (change,) = node.say()
    assert isinstance(change, DeviceHealthChanged)
    assert (change.after, change.code) == (DeviceHealth.DEGRADED, "isolation-test")
    assert node.do() == []
    node.see(exited(exit_code=0))
    node.say()
    node.do()
    node.see(SlicesReleased(run_id=RUN, at=NOON + 6))
    node.say()
    assert node.do()[-1] == TryIsolation(order=a_trial())
    node.fold(a_placement("acme/late"))
    assert node.do() == []
    node.see(IsolationTried(test_id="isolation-9", verdicts=(a_verdict(),)))
    change, verdict = node.say()
    assert isinstance(change, DeviceHealthChanged)
    assert (change.after, verdict) == (DeviceHealth.HEALTHY, a_verdict())
    assert [type(one) for one in node.do()] == [StartRun]


def test_a_test_that_died_with_its_agent_is_begun_anew() -> None:
    node = a_node_at_work()
    node.fold(a_trial(), author=MONITOR)
    node.say()
    assert node.do() == [TryIsolation(order=a_trial())]
    node.restart("s2")
    node.say()
    assert node.do() == [TryIsolation(order=a_trial())]


def test_a_test_of_another_node_is_none_of_ours() -> None:
    node = a_node_at_work()
    node.fold(a_trial(node_id=NodeId("node-2")), author=MONITOR)
    assert (node.say(), node.do()) == ([], [])


def test_a_victim_of_its_fault_domain_is_not_to_blame() -> None:
    node = a_running_node()
    node.see(exited(exit_code=78, is_victim=True, detail="fault domain of GPU-1: server status FAULT"))
    finished = finished_of(node.say())
    assert finished.cause is RunCause.FAULT_DOMAIN_FAILED
    assert finished.detail == "fault domain of GPU-1: server status FAULT"


def test_a_run_over_its_memory_ends_for_that() -> None:
    """The watchdog saw it; nobody ordered it."""
    node = a_running_node()
    node.see(MustStop(run_id=RUN, cause=RunCause.QUOTA_EXCEEDED, detail="used 5000 MiB of 4096"))
    assert node.do() == [StopRun(run_id=RUN, grace_s=0)]
    node.see(exited(signal=9))
    finished = finished_of(node.say())
    assert (finished.cause, finished.detail) == (RunCause.QUOTA_EXCEEDED, "used 5000 MiB of 4096")


def test_changed_devices_are_registered_anew() -> None:
    """In the same session and epoch."""
    node = a_node_at_work()
    node.see(InventoryChanged(inventory=msgspec.structs.replace(INVENTORY, devices=(a_device(0),))))
    assert [len(fact.devices) for fact in node.say() if isinstance(fact, NodeRegistered)] == [1]


def test_others_cannot_speak_for_the_placer() -> None:
    """Identity comes from the subject."""
    node = a_node_at_work()
    node.fold(a_placement(), author="agent-node-2")
    node.fold(NodeFenced(node_id=NODE, epoch=1), author="placer")
    assert (node.do(), node.say()) == ([], [])


def test_orders_for_other_nodes_pass_by() -> None:
    """An agent may be given the whole stream."""
    node = a_node_at_work()
    node.fold(a_placement(node="node-2"), NodeFenced(node_id=NodeId("node-2"), epoch=1))
    assert (node.do(), node.say()) == ([], [])
    assert node.core.position(node.state) == (node.seq, 0)


def test_a_decision_fits_one_batch() -> None:
    """What is left over is said after the first part came round."""
    node = a_node_at_work()
    orders: list[RunPlaced] = [a_placement(f"acme/job-{i}", node_epoch=9) for i in range(700)]
    node.fold(*orders)
    first = node.core.decide(node.state, NOON)
    assert len(first) <= 900
    node.fold(*first)
    second = node.core.decide(node.state, NOON)
    node.fold(*second)
    assert len(first) + len(second) == 1400
    assert node.core.decide(node.state, NOON) == []


@pytest.mark.parametrize("keeps_snapshot", [False, True])
def test_runs_are_started_and_told_in_the_order_in_which_they_were_placed(keeps_snapshot: bool) -> None:
    """Not by their names, and in the same order by an agent that read them from a snapshot."""
    node = a_node_at_work()
    orders = [a_placement(f"acme/{name}") for name in ("zebra", "ant", "mole")]
    node.fold(*orders)
    node.restart("s2", keeps_snapshot=keeps_snapshot)
    assert [told.order for told in node.do() if isinstance(told, StartRun)] == orders
    node.see(*(ProcessStarted(run_id=order.run_id, pid=77, started_at=NOON) for order in reversed(orders)))
    assert [fact.run_id for fact in node.say() if isinstance(fact, RunStarted)] == [order.run_id for order in orders]


def test_a_snapshot_is_the_state_of_the_stream() -> None:
    """Writing, reading and writing again gives the same bytes."""
    node = a_running_node()
    node.fold(a_stop())
    data = node.core.snapshot(node.state)
    restored: State = node.core.restore(data)
    assert node.core.snapshot(restored) == data
    assert node.core.position(restored) == (node.seq, 0)


PLAN = CheckpointPlan(signal="SIGUSR1", grace_s=20)


def asked(action: RunAction) -> RunActionOrdered:
    return RunActionOrdered(run_id=RUN, node_id=NODE, action=action, actor="tenant:acme")


def test_a_run_stands_still_and_goes_on_as_it_is_told_and_what_was_seen_is_stated() -> None:
    """Once for each change, and only what was seen."""
    node = a_running_node()
    node.fold(asked(RunAction.SUSPEND))
    assert node.do() == [StillRun(run_id=RUN, is_still=True)]
    assert (node.do(), node.say()) == ([], [])
    node.see(Stilled(run_id=RUN, is_still=True, processes=3, at=NOON + 1))
    (told,) = node.say()
    assert isinstance(told, RunSuspended)
    assert (told.processes, told.suspended_at) == (3, NOON + 1)
    node.fold(asked(RunAction.RESUME))
    assert node.do() == [StillRun(run_id=RUN, is_still=False)]
    node.see(Stilled(run_id=RUN, is_still=False, processes=3, at=NOON + 2))
    assert [type(fact) for fact in node.say()] == [RunResumed]


@pytest.mark.parametrize("keeps_snapshot", [True, False])
def test_a_new_agent_sees_to_it_that_a_suspended_run_stands_still(keeps_snapshot: bool) -> None:
    """The last one may have died in between; and nothing is stated twice."""
    node = a_running_node()
    node.fold(asked(RunAction.SUSPEND))
    node.do()
    node.see(Stilled(run_id=RUN, is_still=True, processes=1, at=NOON))
    node.say()
    started = ProcessStarted(run_id=RUN, pid=77, started_at=NOON)
    node.restart("s2", Found(run_id=RUN, started=started), keeps_snapshot=keeps_snapshot)
    assert node.do() == [StillRun(run_id=RUN, is_still=True)]
    node.see(Stilled(run_id=RUN, is_still=True, processes=1, at=NOON + 9))
    assert [type(fact) for fact in node.say()] == [NodeRegistered]


def test_a_run_is_told_to_checkpoint_and_what_came_of_it_is_stated_once() -> None:
    node = a_running_node(checkpoint=PLAN)
    node.fold(asked(RunAction.CHECKPOINT))
    order = f"fact-{node.seq}"
    assert node.do() == [CheckpointRun(run_id=RUN, order_id=order, plan=PLAN)]
    assert node.do() == []
    node.see(Checkpointed(run_id=RUN, order_id=order, is_done=True, at=NOON, duration_ms=40, step=7))
    (told,) = node.say()
    assert isinstance(told, RunCheckpointed)
    assert (told.is_done, told.step, told.duration_ms, told.caused_by) == (True, 7, 40, order)


@pytest.mark.parametrize(
    ("cause", "grace_s", "is_told"),
    [
        (StopCause.PREEMPTED, 30, True),
        (StopCause.RESIZED, 30, True),
        (StopCause.TIME_LIMIT, 30, True),
        (StopCause.PREEMPTED, 0, False),
        (StopCause.CANCELLED, 30, False),
    ],
)
def test_a_run_that_may_go_on_elsewhere_is_told_to_checkpoint_before_it_is_stopped(
    cause: StopCause, grace_s: int, is_told: bool
) -> None:
    """What came of it is stated before its end, which may follow at once."""
    node = a_running_node(checkpoint=PLAN)
    node.fold(RunStopOrdered(run_id=RUN, node_id=NODE, cause=cause, grace_s=grace_s, actor="operator"))
    (stop,) = node.do()
    assert isinstance(stop, StopRun)
    assert (stop.checkpoint is not None) is is_told
    if stop.checkpoint is not None:
        order = stop.checkpoint.order_id
        node.see(Checkpointed(run_id=RUN, order_id=order, is_done=False, at=NOON, duration_ms=9, detail="silent"))
    node.see(exited(exit_code=143))
    assert [type(fact) for fact in node.say()] == [RunCheckpointed, RunFinished] if is_told else [RunFinished]


@pytest.mark.parametrize("keeps_snapshot", [True, False])
def test_a_stop_that_another_agent_repeats_asks_for_no_second_checkpoint(keeps_snapshot: bool) -> None:
    """The order's answer is on record; what is left to do is to stop it."""
    node = a_running_node(checkpoint=PLAN)
    node.fold(RunStopOrdered(run_id=RUN, node_id=NODE, cause=StopCause.PREEMPTED, grace_s=30, actor="operator"))
    (stop,) = node.do()
    assert isinstance(stop, StopRun)
    assert stop.checkpoint is not None
    order = stop.checkpoint.order_id
    node.see(Checkpointed(run_id=RUN, order_id=order, is_done=True, at=NOON, duration_ms=9))
    assert [type(fact) for fact in node.say()] == [RunCheckpointed]
    started = ProcessStarted(run_id=RUN, pid=77, started_at=NOON)
    node.restart("s2", Found(run_id=RUN, started=started), keeps_snapshot=keeps_snapshot)
    assert node.do() == [StopRun(run_id=RUN, grace_s=30)]


def test_that_a_device_wants_a_reboot_is_stated_once_and_anew_only_after_one() -> None:
    """Also where its health was stated as failed before."""
    node = a_node_at_work()
    uuid = INVENTORY.devices[0].uuid
    seen = DeviceHealthSeen(device_uuid=uuid, health=DeviceHealth.FAILED, code="xid-109")
    node.see(seen)
    node.say()
    node.see(msgspec.structs.replace(seen, code="xid-95", wants_reboot=True))
    (told,) = node.say()
    assert isinstance(told, DeviceHealthChanged)
    assert (told.before, told.after, told.code, told.wants_reboot) == (
        DeviceHealth.FAILED,
        DeviceHealth.FAILED,
        "xid-95",
        True,
    )
    node.see(msgspec.structs.replace(seen, code="xid-95", wants_reboot=True))
    node.restart("s2")
    node.see(msgspec.structs.replace(seen, code="xid-95", wants_reboot=True))
    assert [type(fact) for fact in node.say()] == [NodeRegistered]
    node.state.health.clear()
    node.see(InventoryChanged(inventory=msgspec.structs.replace(INVENTORY, boot_id="boot-2")))
    assert [type(fact) for fact in node.say()] == [NodeRegistered]
