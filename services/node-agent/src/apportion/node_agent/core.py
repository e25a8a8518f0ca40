"""Desired runs against observed processes: what a node's agent states, and what its shell shall do; pure.

The streams say which runs the node shall have (RunPlaced, RunStopOrdered, NodeFenced); observations say what became of
them on this machine. From both follow facts (``decide``) and instructions (``instruct``). How a process is started or a
slice enforced is the shell's business.

A run here, by what was observed of it::

    ordered ──► starting ──► running ──► ended ──► clear
       └────────────┴──────────────────────┘

Nothing is stated or done before three things are known: this session's own claim has come round (and with it every
earlier word of this agent), what earlier sessions left on the machine (``Adopted``), and the devices
(``InventoryChanged``). So an agent that reads its stream anew can't start again what ended long ago.
"""

import hashlib
from enum import StrEnum, unique
from typing import Final, TypeAlias, assert_never

import msgspec
from msgspec import Struct

from apportion.contracts.causes import DeviceHealth, RunAction, RunCause, StopCause
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.events import (
    CheckpointPlan,
    Device,
    DeviceHealthChanged,
    Enforced,
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
from apportion.contracts.ids import MONITOR, PLACER, DeviceUuid, NodeId, RunId, agent_author

OUT_OF_MEMORY_EXIT: Final = 77
"""The exit code with which a workload says that its device refused it memory (the workload client uses it)."""
FACTS_PER_RUN_MAX: Final = 6
"""Its start, its standing still, two answers about checkpoints (to a wish and to a stop), its end, its release."""
FACTS_MAX: Final = 900
"""Most facts of one decision: a batch on the bus holds 1,000."""
TRIED_FACTS_MAX: Final = 30
TRIAL_CODE: Final = "isolation-test"
"""Why a device that is well takes no new run."""

RULES: Final = (
    "act-after-own-claim-adoption-and-inventory",
    "order-of-another-epoch-is-stale",
    "fencing-kills-older-runs-before-registration",
    "stop-cause-where-the-stop-took-effect",
    "exit-77-is-out-of-memory",
    "a-kill-by-the-hosts-memory-limit-says-nothing-of-device-memory",
    "a-killed-shim-is-not-a-lost-node",
    "release-after-the-devices-show-nothing",
    "remove-after-the-release-was-folded",
    "device-on-trial-takes-no-new-run",
    "victim-of-a-failed-fault-domain-is-not-its-own-failure",
    "a-run-that-may-go-on-elsewhere-checkpoints-before-it-is-stopped",
)
POLICY: Final = "node-agent@1#" + hashlib.sha256("\n".join(RULES).encode()).hexdigest()[:12]

CAUSE_OF_STOP: Final[dict[StopCause, RunCause]] = {
    StopCause.CANCELLED: RunCause.CANCELLED,
    StopCause.TIME_LIMIT: RunCause.TIME_LIMIT,
    StopCause.PREEMPTED: RunCause.PREEMPTED,
    StopCause.DRAINED: RunCause.DRAINED,
    StopCause.GANG_BROKEN: RunCause.GANG_BROKEN,
    StopCause.DEADLINE: RunCause.TIME_LIMIT,
    # It starts again with another size: not its own doing, so at no cost.
    StopCause.RESIZED: RunCause.PREEMPTED,
    StopCause.SHRUNK: RunCause.SHRUNK,
}


CHECKPOINTED: Final = frozenset({RunCause.PREEMPTED, RunCause.DRAINED, RunCause.TIME_LIMIT})
"""What a run that is stopped for `causes.CHECKPOINTED_STOPS` ends of."""


# What the shell saw


class Inventory(Struct, frozen=True, kw_only=True):
    """The machine as its probes found it."""

    boot_id: str
    devices: tuple[Device, ...]
    cpu_milli: int
    memory_mib: int
    driver_version: str = ""
    simulated: bool = False
    labels: dict[str, str] = {}
    agent_version: str = ""
    cuda_version: str = ""
    capabilities: dict[str, str] = {}


class InventoryChanged(Struct, frozen=True, kw_only=True):
    """The machine has this now."""

    inventory: Inventory


class DeviceHealthSeen(Struct, frozen=True, kw_only=True):
    """A device's health, by its last sign. Where it failed, its runs are stopped."""

    device_uuid: DeviceUuid
    health: DeviceHealth
    code: str
    detail: str = ""
    wants_reboot: bool = False


class ProcessStarted(Struct, frozen=True, kw_only=True):
    """The run's process runs, and its slices had been read back before it did."""

    run_id: RunId
    pid: int
    started_at: int
    enforced: tuple[Enforced, ...] = ()
    cpus: tuple[int, ...] = ()
    """Those that it is kept to; none where it may use any."""


class StartFailed(Struct, frozen=True, kw_only=True):
    """The run's process never came to be, and no attempt to start it is under way any more."""

    run_id: RunId
    cause: RunCause
    detail: str = ""
    at: int = 0


class ProcessExited(Struct, frozen=True, kw_only=True):
    """No process of the run is left. Without exit code and signal nobody knows how it ended (``detail`` says why)."""

    run_id: RunId
    finished_at: int
    started_at: int = 0
    exit_code: int | None = None
    signal: int | None = None
    peak_memory_mib: int | None = None
    out_of_memory: bool = False
    """A device refused it memory, whatever its exit code."""
    host_out_of_memory: bool = False
    """The kernel killed a process of it at its limit of host memory."""
    is_victim: bool = False
    """Its fault domain had failed, and not by its doing (``detail`` has the evidence)."""
    is_shim_lost: bool = False
    """Its guardian was killed, so nobody knows how it would have ended (``detail`` says what was seen)."""
    detail: str = ""


class MustStop(Struct, frozen=True, kw_only=True):
    """The run broke its limits, or its fault domain broke: it is ended for this cause, which no order asked for."""

    run_id: RunId
    cause: RunCause
    detail: str
    grace_s: int = 0


class Stilled(Struct, frozen=True, kw_only=True):
    """No process of the run moves any more, or none stands still."""

    run_id: RunId
    is_still: bool
    processes: int
    at: int


class Checkpointed(Struct, frozen=True, kw_only=True):
    """What came of telling the run to checkpoint."""

    run_id: RunId
    order_id: str
    is_done: bool
    at: int
    duration_ms: int
    uri: str = ""
    step: int | None = None
    bytes: int | None = None
    detail: str = ""


class SlicesReleased(Struct, frozen=True, kw_only=True):
    """Nothing of the run is set up on its devices, and they show none of its processes."""

    run_id: RunId
    at: int


class IsolationTried(Struct, frozen=True, kw_only=True):
    """An isolation test is over: one verdict for each of its tests, or fewer where it could not be finished."""

    test_id: str
    verdicts: tuple[IsolationVerdict, ...]
    """All of them, and one at least: they end the test."""


class Found(Struct, frozen=True, kw_only=True):
    """What earlier sessions left of one run: running, ended, or (neither given) withdrawn before it was started."""

    run_id: RunId
    started: ProcessStarted | None = None
    ended: ProcessExited | StartFailed | None = None


class Adopted(Struct, frozen=True, kw_only=True):
    """The agent of this session looked at every run directory. What isn't among them was never started, or removed."""

    session: str
    found: tuple[Found, ...] = ()


Observation: TypeAlias = (
    InventoryChanged
    | DeviceHealthSeen
    | ProcessStarted
    | StartFailed
    | ProcessExited
    | MustStop
    | Stilled
    | Checkpointed
    | SlicesReleased
    | IsolationTried
    | Adopted
)


# What the shell shall do


class StartRun(Struct, frozen=True, kw_only=True):
    """Set up and read back the slices, then start the process: ProcessStarted or StartFailed follows."""

    order: RunPlaced


class StopRun(Struct, frozen=True, kw_only=True):
    """End the run's processes: SIGTERM, SIGKILL after the grace (0: at once). ProcessExited follows."""

    run_id: RunId
    grace_s: int
    checkpoint: "CheckpointRun | None" = None
    """What it is told first, within the grace."""


class StillRun(Struct, frozen=True, kw_only=True):
    """Have every process of the run stand still, or go on: Stilled follows, unless it ends."""

    run_id: RunId
    is_still: bool


class CheckpointRun(Struct, frozen=True, kw_only=True):
    """Tell the run to checkpoint: Checkpointed follows, unless it ends."""

    run_id: RunId
    order_id: str
    plan: CheckpointPlan


class ReleaseRun(Struct, frozen=True, kw_only=True):
    """Take down the slices of a run that has ended, and see that its devices agree: SlicesReleased follows."""

    order: RunPlaced


class RemoveRun(Struct, frozen=True, kw_only=True):
    """Forget the run's directory: everything about it has been stated. Nothing follows."""

    run_id: RunId


class TryIsolation(Struct, frozen=True, kw_only=True):
    """Try the isolation of a device that no run holds: IsolationTried follows."""

    order: IsolationTestStarted


Instruction: TypeAlias = StartRun | StopRun | StillRun | CheckpointRun | ReleaseRun | RemoveRun | TryIsolation


# State


@unique
class Phase(StrEnum):
    """Where a run is on this machine."""

    ORDERED = "ordered"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    CLEAR = "clear"
    """Ended, and nothing of it is left on any device."""


class Doom(Struct, frozen=True, kw_only=True):
    """Why a run has to end, and how soon."""

    cause: RunCause
    grace_s: int
    event_id: str = ""
    since_at: int = 0
    """When the order was recorded; 0 where no order but an observation led to it."""
    detail: str = ""
    is_checkpointed: bool = False
    """The order's checkpoint has its answer on record: another agent, which stops it anew, doesn't ask again."""


class Run(Struct, kw_only=True):
    """One run that this node was given and that is not released yet."""

    order: RunPlaced
    placed_seq: int
    last_event: str
    """Id of the newest fact about it."""
    doom: Doom | None = None
    is_started_stated: bool = False
    is_finished_stated: bool = False
    is_still_wanted: bool | None = None
    """As it was ordered last; None: nobody ever did."""
    is_still_stated: bool = False
    checkpoint: str = ""
    """Id of the newest order to checkpoint that has no answer."""
    # From here on: what this session saw and did. Never part of a snapshot, since adoption says it anew.
    phase: Phase = Phase.ORDERED
    process: ProcessStarted | None = None
    end: ProcessExited | StartFailed | None = None
    is_adopted: bool = False
    stop_grace_s: int | None = None
    """Grace of the last StopRun that was issued."""
    is_release_issued: bool = False
    released_at: int = 0
    is_still_issued: bool | None = None
    stilled: Stilled | None = None
    checkpoint_issued: str = ""
    checkpoints: dict[str, Checkpointed] = {}
    """What came of orders to checkpoint, and is not stated yet; by order."""


class Trial(Struct, kw_only=True):
    """An isolation test that was asked for and has no verdict yet."""

    order: IsolationTestStarted
    is_issued: bool = False
    """This session's own, as is what follows."""
    verdicts: tuple[IsolationVerdict, ...] | None = None


class Stray(Struct, kw_only=True):
    """A directory of a run that the stream holds no order for: released before, or of another pool."""

    is_running: bool
    is_stop_issued: bool = False


class State(Struct, kw_only=True):
    """Everything that the agent goes by."""

    facts_seq: int = 0
    epoch: int = 0
    session: str = ""
    """Of the newest claim to write as this agent."""
    registered: NodeRegistered | None = None
    """As last stated, with what was said of its devices' health since."""
    fenced_by: str = ""
    reboots: dict[DeviceUuid, None] = {}
    """Devices of which it was stated that only a reboot mends them, since the node booted."""
    runs: dict[RunId, Run] = {}
    """In the order in which they were placed, since the stream is folded in its order."""
    trials: dict[str, Trial] = {}
    """Isolation tests by their id, in the order in which they were asked for."""
    # This session's own.
    own_session: str = ""
    found: dict[RunId, Found] = {}
    """What adoption found; judged only once this session's claim has come round, and with it every earlier order."""
    is_settled: bool = False
    inventory: Inventory | None = None
    health: dict[DeviceUuid, DeviceHealthSeen] = {}
    strays: dict[RunId, Stray] = {}
    to_remove: dict[RunId, None] = {}


class _Snapshot(Struct, frozen=True, kw_only=True):
    facts_seq: int
    epoch: int
    session: str
    registered: NodeRegistered | None
    fenced_by: str
    runs: tuple["_RunSnapshot", ...]
    trials: tuple[IsolationTestStarted, ...] = ()
    reboots: tuple[DeviceUuid, ...] = ()


class _RunSnapshot(Struct, frozen=True, kw_only=True):
    order: RunPlaced
    placed_seq: int
    last_event: str
    doom: Doom | None
    is_started_stated: bool
    is_finished_stated: bool
    is_still_wanted: bool | None = None
    is_still_stated: bool = False
    checkpoint: str = ""


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final = msgspec.msgpack.Decoder(_Snapshot)


class AgentCore:
    """The core of one node's agent."""

    POLICY = POLICY

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.author = agent_author(node_id)
        self._agreed: tuple[NodeRegistered, Inventory] | None = None
        """The last two that were found to say the same; neither is ever changed, so it is no part of any state."""

    def initial(self) -> State:
        """Nothing known."""
        return State()

    # Believing the stream

    def evolve(self, state: State, entry: Entry) -> State:
        """The state after this fact, changed in place. Facts about other nodes change only the position."""
        if entry.stream is not Stream.FACTS or entry.seq <= state.facts_seq:
            return state
        state.facts_seq = entry.seq
        event = entry.event
        match event:
            case RunPlaced(node_id=self.node_id) if entry.author == PLACER:
                self._placed(state, entry, event)
            case RunStopOrdered(node_id=self.node_id) if entry.author == PLACER:
                self._stop_ordered(state, entry, event)
            case RunActionOrdered(node_id=self.node_id) if entry.author == PLACER:
                self._action_ordered(state, entry, event)
            case NodeFenced(node_id=self.node_id) if entry.author == MONITOR:
                self._fenced(state, entry, event)
            case IsolationTestStarted(node_id=self.node_id) if entry.author == MONITOR:
                state.trials.setdefault(event.test_id, Trial(order=event))
            case _ if entry.author == self.author:
                self._own(state, entry)
            case _:
                pass  # About others, or for others.
        return state

    def _placed(self, state: State, entry: Entry, event: RunPlaced) -> None:
        if event.run_id in state.runs:
            return
        run = Run(order=event, placed_seq=entry.seq, last_event=entry.event_id)
        if event.node_epoch != state.epoch:
            run.doom = Doom(
                cause=RunCause.STALE,
                grace_s=0,
                event_id=entry.event_id,
                since_at=entry.recorded_at,
                detail=f"ordered for epoch {event.node_epoch}, and the node is in epoch {state.epoch}",
            )
        state.runs[event.run_id] = run

    def _stop_ordered(self, state: State, entry: Entry, event: RunStopOrdered) -> None:
        run = state.runs.get(event.run_id)
        if run is None:
            return
        run.last_event = entry.event_id
        if run.doom is None:
            run.doom = Doom(
                cause=CAUSE_OF_STOP[event.cause],
                grace_s=event.grace_s,
                event_id=entry.event_id,
                since_at=entry.recorded_at,
                detail=event.reason,
            )
        elif event.grace_s < run.doom.grace_s:
            # The first cause stands; whoever is in a greater hurry is heard.
            run.doom = msgspec.structs.replace(run.doom, grace_s=event.grace_s)

    def _action_ordered(self, state: State, entry: Entry, event: RunActionOrdered) -> None:
        run = state.runs.get(event.run_id)
        if run is None:
            return
        run.last_event = entry.event_id
        match event.action:
            case RunAction.SUSPEND:
                run.is_still_wanted = True
            case RunAction.RESUME:
                run.is_still_wanted = False
            case RunAction.CHECKPOINT:
                run.checkpoint = entry.event_id

    def _fenced(self, state: State, entry: Entry, event: NodeFenced) -> None:
        if event.epoch <= state.epoch:
            return
        state.epoch = event.epoch
        state.fenced_by = entry.event_id
        for run in state.runs.values():
            run.last_event = entry.event_id
            if run.doom is None or run.doom.cause is not RunCause.STALE:
                run.doom = Doom(
                    cause=RunCause.NODE_LOST, grace_s=0, event_id=entry.event_id, since_at=entry.recorded_at
                )

    def _own(self, state: State, entry: Entry) -> None:
        match entry.event:
            case LeaseClaimed(session=session):
                state.session = session
                if session == state.own_session:
                    self._settle(state, entry.recorded_at)
            case NodeRegistered() as event:
                if state.registered is None or state.registered.boot_id != event.boot_id:
                    state.reboots = {}
                state.registered = event
                state.epoch = max(state.epoch, event.epoch)
            case DeviceHealthChanged(device_uuid=uuid, after=after, wants_reboot=wants_reboot):
                state.reboots.pop(uuid, None)
                if wants_reboot:
                    state.reboots[uuid] = None
                if state.registered is not None:
                    devices = tuple(_with_health(d, after) if d.uuid == uuid else d for d in state.registered.devices)
                    state.registered = msgspec.structs.replace(state.registered, devices=devices)
            case RunStarted(run_id=run_id) if (run := state.runs.get(run_id)) is not None:
                run.is_started_stated = True
                run.last_event = entry.event_id
            case RunFinished(run_id=run_id) if (run := state.runs.get(run_id)) is not None:
                run.is_finished_stated = True
                run.last_event = entry.event_id
            case RunSuspended(run_id=run_id) | RunResumed(run_id=run_id) if (run := state.runs.get(run_id)) is not None:
                run.is_still_stated = isinstance(entry.event, RunSuspended)
                run.last_event = entry.event_id
            case RunCheckpointed(run_id=run_id, caused_by=order) if (run := state.runs.get(run_id)) is not None:
                run.checkpoints.pop(order, None)
                if run.checkpoint == order:
                    run.checkpoint = ""
                if run.doom is not None and run.doom.event_id == order:
                    run.doom = msgspec.structs.replace(run.doom, is_checkpointed=True)
                run.last_event = entry.event_id
            case IsolationVerdict(test_id=test_id):
                # The first one ends it: all of a test's are stated at once.
                state.trials.pop(test_id, None)
            case RunReleased(run_id=run_id) if (run := state.runs.pop(run_id, None)) is not None:
                # One that was never started has no directory; removing what isn't there costs nothing and is safe.
                state.to_remove[run_id] = None
            case _:
                pass

    # Believing the shell

    def observe(self, state: State, observation: Observation, now: int) -> State:
        """The state after the shell saw this, changed in place; seeing it again changes nothing."""
        match observation:
            case InventoryChanged(inventory=inventory):
                state.inventory = inventory
            case DeviceHealthSeen():
                self._health_seen(state, observation)
            case Adopted(session=session):
                if session != state.own_session:
                    state.own_session = session
                    state.found = {one.run_id: one for one in observation.found}
                    state.is_settled = False
                    if session == state.session:
                        self._settle(state, now)
            case ProcessStarted(run_id=run_id):
                run = state.runs.get(run_id)
                if run is not None and run.phase in {Phase.ORDERED, Phase.STARTING}:
                    run.phase = Phase.RUNNING
                    run.process = observation
            case ProcessExited(run_id=run_id) | StartFailed(run_id=run_id):
                run = state.runs.get(run_id)
                if not state.is_settled:
                    if (one := state.found.get(run_id)) is not None and one.ended is None:
                        state.found[run_id] = msgspec.structs.replace(one, ended=observation)
                elif run is not None and run.phase not in {Phase.ENDED, Phase.CLEAR}:
                    run.phase = Phase.ENDED
                    run.end = observation
                elif (stray := state.strays.get(run_id)) is not None:
                    stray.is_running = False
            case MustStop(run_id=run_id):
                run = state.runs.get(run_id)
                if run is not None and run.doom is None and run.phase in {Phase.STARTING, Phase.RUNNING}:
                    run.doom = Doom(cause=observation.cause, grace_s=observation.grace_s, detail=observation.detail)
            case Stilled(run_id=run_id):
                if (run := state.runs.get(run_id)) is not None:
                    run.stilled = observation
            case Checkpointed(run_id=run_id, order_id=order_id):
                if (run := state.runs.get(run_id)) is not None:
                    run.checkpoints = {**run.checkpoints, order_id: observation}
            case SlicesReleased(run_id=run_id, at=at):
                run = state.runs.get(run_id)
                if run is not None and run.phase is Phase.ENDED:
                    run.phase = Phase.CLEAR
                    run.released_at = at
            case IsolationTried(test_id=test_id, verdicts=verdicts):
                if (trial := state.trials.get(test_id)) is not None:
                    trial.verdicts = verdicts
            case _:
                assert_never(observation)
        return state

    def _health_seen(self, state: State, seen: DeviceHealthSeen) -> None:
        state.health[seen.device_uuid] = seen
        self._doom_holders(state, seen)

    def _doom_holders(self, state: State, seen: DeviceHealthSeen) -> None:
        """Runs can't go on with a failed device."""
        if seen.health is not DeviceHealth.FAILED:
            return
        for run in state.runs.values():
            if run.doom is None and run.phase in {Phase.STARTING, Phase.RUNNING} and _holds(run, seen.device_uuid):
                run.doom = Doom(
                    cause=RunCause.DEVICE_FAULT, grace_s=run.order.grace_s, detail=f"{seen.code} {seen.detail}".strip()
                )

    def _settle(self, state: State, now: int) -> None:
        """Judge what adoption found by the orders, all of which are known now."""
        state.is_settled = True
        found, state.found = state.found, {}
        for run in state.runs.values():
            one = found.pop(run.order.run_id, None)
            run.is_adopted = True
            run.stop_grace_s = None
            run.is_release_issued = False
            run.is_still_issued = None
            run.stilled = None
            run.checkpoint_issued = ""
            run.checkpoints = {}
            run.process = None if one is None else one.started
            run.end = None if one is None else one.ended
            if run.end is not None:
                run.phase = Phase.ENDED
            elif run.process is not None:
                run.phase = Phase.RUNNING
            elif run.is_finished_stated:
                run.phase = Phase.ENDED
            elif run.is_started_stated:
                # It did run, and its directory is gone: whatever ended it, it must not be started a second time.
                run.phase = Phase.ENDED
                run.end = ProcessExited(run_id=run.order.run_id, finished_at=now, detail="its directory is gone")
            else:
                run.phase = Phase.ORDERED
        for run_id, one in found.items():
            state.strays[run_id] = Stray(is_running=one.started is not None and one.ended is None)
        for seen in state.health.values():
            self._doom_holders(state, seen)

    # Stating

    def decide(self, state: State, now: int) -> list[Fact]:
        """What has to be stated, in the order in which the runs were placed; silent once it was folded."""
        if not _is_active(state):
            return []
        facts: list[Fact] = []
        is_older_left = False
        is_complete = True
        for run in state.runs.values():
            if len(facts) > FACTS_MAX - FACTS_PER_RUN_MAX:
                is_complete = False
                break
            is_released = not _goes_on(run) and self._run_facts(state, run, now, facts)
            is_older_left |= run.order.node_epoch < state.epoch and not is_released
        if is_complete and len(facts) < FACTS_MAX - len(state.health):
            facts += self._node_facts(state, is_older_left=is_older_left)
            facts += [verdict for trial in state.trials.values() for verdict in trial.verdicts or ()][:TRIED_FACTS_MAX]
        return facts

    def _run_facts(self, state: State, run: Run, now: int, facts: list[Fact]) -> bool:
        """Append what the run has due; True where its release is stated with it."""
        order = run.order
        process = run.process
        if process is not None and not run.is_started_stated and not run.is_finished_stated:
            facts.append(
                RunStarted(
                    run_id=order.run_id,
                    node_id=self.node_id,
                    pid=process.pid,
                    started_at=process.started_at,
                    enforced=process.enforced,
                    cpus=process.cpus,
                    caused_by=run.last_event,
                ),
            )
        self._asides(run, facts)
        phase = run.phase
        is_never_to_start = phase is Phase.ORDERED and run.doom is not None
        if not (is_never_to_start or phase is Phase.ENDED or phase is Phase.CLEAR):
            return False
        if not run.is_finished_stated:
            facts.append(self._finished(state, run, now))
        if not (is_never_to_start or phase is Phase.CLEAR):
            return False
        facts.append(
            RunReleased(
                run_id=order.run_id,
                node_id=self.node_id,
                released_at=run.released_at or now,
                caused_by=run.last_event,
            ),
        )
        return True

    def _asides(self, run: Run, facts: list[Fact]) -> None:
        """What became of orders to a run that goes on; what was seen while it did is told also once it has ended."""
        stilled = run.stilled
        if run.is_finished_stated or (stilled is None and not run.checkpoints):
            return
        if run.phase is Phase.RUNNING and stilled is not None and stilled.is_still is not run.is_still_stated:
            told: Fact = (
                RunSuspended(
                    run_id=run.order.run_id,
                    node_id=self.node_id,
                    suspended_at=stilled.at,
                    processes=stilled.processes,
                    caused_by=run.last_event,
                )
                if stilled.is_still
                else RunResumed(
                    run_id=run.order.run_id,
                    node_id=self.node_id,
                    resumed_at=stilled.at,
                    processes=stilled.processes,
                    caused_by=run.last_event,
                )
            )
            facts.append(told)
        facts += [
            RunCheckpointed(
                run_id=run.order.run_id,
                node_id=self.node_id,
                is_done=one.is_done,
                finished_at=one.at,
                duration_ms=one.duration_ms,
                uri=one.uri,
                step=one.step,
                bytes=one.bytes,
                detail=one.detail,
                caused_by=order,
            )
            for order, one in sorted(run.checkpoints.items())[:2]
        ]

    def _finished(self, state: State, run: Run, now: int) -> RunFinished:
        order = run.order
        doom = run.doom
        end = run.end
        if not isinstance(end, ProcessExited):
            is_fenced = order.node_epoch < state.epoch and doom is not None
            cause = doom.cause if doom is not None and (end is None or is_fenced) else RunCause.UNKNOWN
            detail = "" if doom is None else doom.detail
            if end is not None and not is_fenced:
                cause, detail = end.cause, end.detail
            return RunFinished(
                run_id=order.run_id,
                node_id=self.node_id,
                cause=cause,
                was_started=False,
                finished_at=(0 if end is None else end.at) or now,
                detail=detail,
                caused_by=run.last_event,
            )
        took_effect = doom is not None and _took_effect(run, doom, end)
        return RunFinished(
            run_id=order.run_id,
            node_id=self.node_id,
            cause=doom.cause if doom is not None and took_effect else _own_cause(end),
            exit_code=end.exit_code,
            signal=end.signal,
            was_started=True,
            started_at=end.started_at or (run.process.started_at if run.process is not None else 0),
            finished_at=end.finished_at,
            peak_memory_mib=end.peak_memory_mib,
            detail=(doom.detail if doom is not None and took_effect else "") or end.detail,
            caused_by=run.last_event,
        )

    def _node_facts(self, state: State, *, is_older_left: bool) -> list[Fact]:
        inventory = state.inventory
        assert inventory is not None
        if is_older_left:
            return []  # Registered with the new epoch means: whatever is older is gone.
        on_trial = {trial.order.device_uuid for trial in state.trials.values() if trial.verdicts is None}
        devices = inventory.devices
        if state.health or on_trial:
            devices = tuple(_with_health(d, _health_of(state, d, on_trial)) for d in devices)
        stated = state.registered
        if stated is None or not self._is_stated(state, stated, inventory):
            is_first_of_epoch = stated is None or stated.epoch != state.epoch
            wanted = self._registration(state, inventory, devices)
            return [msgspec.structs.replace(wanted, caused_by=state.fenced_by if is_first_of_epoch else "")]
        return [
            DeviceHealthChanged(
                node_id=self.node_id,
                device_uuid=after.uuid,
                before=before.health,
                after=after.health,
                code=code,
                detail=detail,
                wants_reboot=_wants_reboot(state, after),
            )
            for before, after in zip(stated.devices, devices, strict=True)
            if before.health is not after.health or _wants_reboot(state, after) is not (after.uuid in state.reboots)
            for code, detail in (_reason_of(state, after, on_trial),)
        ]

    def _registration(self, state: State, inventory: Inventory, devices: tuple[Device, ...]) -> NodeRegistered:
        return NodeRegistered(
            node_id=self.node_id,
            session=state.session,
            boot_id=inventory.boot_id,
            epoch=state.epoch,
            devices=devices,
            cpu_milli=inventory.cpu_milli,
            memory_mib=inventory.memory_mib,
            driver_version=inventory.driver_version,
            simulated=inventory.simulated,
            labels=inventory.labels,
            agent_version=inventory.agent_version,
            cuda_version=inventory.cuda_version,
            capabilities=inventory.capabilities,
        )

    def _is_stated(self, state: State, stated: NodeRegistered, inventory: Inventory) -> bool:
        """Whether the registration says what there is, health left out; compared anew only where one of them is new."""
        if (stated.session, stated.epoch) != (state.session, state.epoch):
            return False
        agreed = self._agreed
        if agreed is not None and agreed[0] is stated and agreed[1] is inventory:
            return True
        wanted = self._registration(state, inventory, inventory.devices)
        if _but_health(stated) != _but_health(wanted):
            return False
        self._agreed = stated, inventory
        return True

    def wake_at(self, state: State, now: int) -> int | None:  # noqa: ARG002  the same for every core
        """Never: whatever is new here was folded or observed."""
        return None

    # Instructing

    def instruct(self, state: State, now: int) -> list[Instruction]:  # noqa: ARG002  the same for every core
        """What the shell shall do, ends before starts, since an end makes room; silent about what was issued."""
        if not _is_active(state):
            return []
        ends: list[Instruction] = []
        starts: list[Instruction] = []
        # A run that was placed before its placer heard of the test waits for the test's end.
        in_trial = {
            trial.order.device_uuid for trial in state.trials.values() if trial.is_issued and trial.verdicts is None
        }
        for run in state.runs.values():
            doom = run.doom
            match run.phase:
                case Phase.RUNNING:
                    # While it is starting there is nothing to stop yet; its start is bounded and ends in a word.
                    if doom is not None and (run.stop_grace_s is None or doom.grace_s < run.stop_grace_s):
                        ends.append(_stop(run, doom))
                    elif doom is None:
                        ends += _asked(run)
                case Phase.ORDERED:
                    if doom is None and not any(_holds(run, device) for device in in_trial):
                        starts.append(StartRun(order=run.order))
                case Phase.ENDED:
                    if not run.is_release_issued:
                        ends.append(ReleaseRun(order=run.order))
                case Phase.STARTING | Phase.CLEAR:
                    pass
                case _:
                    assert_never(run.phase)
        for run_id, stray in sorted(state.strays.items()):
            if not stray.is_running:
                ends.append(RemoveRun(run_id=run_id))
            elif not stray.is_stop_issued:
                ends.append(StopRun(run_id=run_id, grace_s=0))
        ends += [RemoveRun(run_id=run_id) for run_id in sorted(state.to_remove)]
        return ends + starts + self._trials(state, in_trial)

    def _trials(self, state: State, in_trial: set[DeviceUuid]) -> list[Instruction]:
        """The tests that can begin: their device was said to take no new run, and holds none."""
        found: list[Instruction] = []
        devices = {} if state.registered is None else {device.uuid: device for device in state.registered.devices}
        for trial in state.trials.values():
            uuid = trial.order.device_uuid
            device = devices.get(uuid)
            if trial.is_issued or uuid in in_trial or device is None or device.health is DeviceHealth.HEALTHY:
                continue
            if not any(_holds(run, uuid) for run in state.runs.values()):
                found.append(TryIsolation(order=trial.order))
                in_trial.add(uuid)
        return found

    def issued(self, state: State, instruction: Instruction) -> State:
        """The state once the shell has this instruction, changed in place."""
        match instruction:
            case StartRun(order=order):
                state.runs[order.run_id].phase = Phase.STARTING
            case StopRun(run_id=run_id, grace_s=grace_s):
                if (run := state.runs.get(run_id)) is not None:
                    run.stop_grace_s = grace_s
                elif (stray := state.strays.get(run_id)) is not None:
                    stray.is_stop_issued = True
            case StillRun(run_id=run_id, is_still=is_still):
                if (run := state.runs.get(run_id)) is not None:
                    run.is_still_issued = is_still
            case CheckpointRun(run_id=run_id, order_id=order_id):
                if (run := state.runs.get(run_id)) is not None:
                    run.checkpoint_issued = order_id
            case ReleaseRun(order=order):
                state.runs[order.run_id].is_release_issued = True
            case RemoveRun(run_id=run_id):
                state.strays.pop(run_id, None)
                state.to_remove.pop(run_id, None)
            case TryIsolation(order=order):
                if (trial := state.trials.get(order.test_id)) is not None:
                    trial.is_issued = True
            case _:
                assert_never(instruction)
        return state

    # Keeping

    def snapshot(self, state: State) -> bytes:
        """What the streams said, as bytes. What this session saw is left out: the next one looks for itself."""
        return _ENCODER.encode(
            _Snapshot(
                facts_seq=state.facts_seq,
                epoch=state.epoch,
                session=state.session,
                registered=state.registered,
                fenced_by=state.fenced_by,
                runs=tuple(
                    _RunSnapshot(
                        order=run.order,
                        placed_seq=run.placed_seq,
                        last_event=run.last_event,
                        # A doom without an order was seen by this session alone; the next one sees its own.
                        doom=run.doom if run.doom is not None and run.doom.event_id else None,
                        is_started_stated=run.is_started_stated,
                        is_finished_stated=run.is_finished_stated,
                        is_still_wanted=run.is_still_wanted,
                        is_still_stated=run.is_still_stated,
                        checkpoint=run.checkpoint,
                    )
                    for run in state.runs.values()
                ),
                trials=tuple(trial.order for trial in state.trials.values()),
                reboots=tuple(sorted(state.reboots)),
            ),
        )

    def restore(self, data: bytes) -> State:
        """The state that ``snapshot`` wrote, before anything is observed."""
        kept = _DECODER.decode(data)
        return State(
            facts_seq=kept.facts_seq,
            epoch=kept.epoch,
            session=kept.session,
            registered=kept.registered,
            fenced_by=kept.fenced_by,
            runs={
                run.order.run_id: Run(
                    order=run.order,
                    placed_seq=run.placed_seq,
                    last_event=run.last_event,
                    doom=run.doom,
                    is_started_stated=run.is_started_stated,
                    is_finished_stated=run.is_finished_stated,
                    is_still_wanted=run.is_still_wanted,
                    is_still_stated=run.is_still_stated,
                    checkpoint=run.checkpoint,
                )
                for run in kept.runs
            },
            trials={order.test_id: Trial(order=order) for order in kept.trials},
            reboots=dict.fromkeys(kept.reboots),
        )

    def position(self, state: State) -> tuple[int, int]:
        """How far the facts were folded; wishes are none of an agent's business."""
        return state.facts_seq, 0


def _is_active(state: State) -> bool:
    # A newer session's claim ends this one: from then on another agent speaks and acts for the node.
    return state.is_settled and state.session == state.own_session and state.inventory is not None


def _stop(run: Run, doom: Doom) -> StopRun:
    """Its first stop tells it to checkpoint, where it may go on elsewhere and has the time."""
    plan = run.order.checkpoint
    checkpoint = None
    if (
        plan is not None
        and doom.cause in CHECKPOINTED
        and doom.grace_s > 0
        and doom.event_id
        and not doom.is_checkpointed
        and run.stop_grace_s is None
    ):
        checkpoint = CheckpointRun(run_id=run.order.run_id, order_id=doom.event_id, plan=plan)
    return StopRun(run_id=run.order.run_id, grace_s=doom.grace_s, checkpoint=checkpoint)


def _asked(run: Run) -> list[Instruction]:
    """What a run that goes on was asked to do, and this session has not told it."""
    found: list[Instruction] = []
    if run.is_still_wanted is not None and run.is_still_issued is not run.is_still_wanted:
        found.append(StillRun(run_id=run.order.run_id, is_still=run.is_still_wanted))
    plan = run.order.checkpoint
    if run.checkpoint and run.checkpoint != run.checkpoint_issued and plan is not None:
        found.append(CheckpointRun(run_id=run.order.run_id, order_id=run.checkpoint, plan=plan))
    return found


def _goes_on(run: Run) -> bool:
    """True where nothing of the run is due: most of them, most of the time."""
    return (
        (run.phase is Phase.RUNNING or run.phase is Phase.STARTING)
        and (run.is_started_stated or run.process is None)
        and run.stilled is None
        and not run.checkpoints
    )


def _holds(run: Run, device: DeviceUuid) -> bool:
    return any(piece.device_uuid == device for piece in run.order.slices)


def _health_of(state: State, device: Device, on_trial: set[DeviceUuid]) -> DeviceHealth:
    seen = state.health.get(device.uuid)
    health = device.health if seen is None else seen.health
    return DeviceHealth.DEGRADED if health is DeviceHealth.HEALTHY and device.uuid in on_trial else health


def _wants_reboot(state: State, device: Device) -> bool:
    seen = state.health.get(device.uuid)
    return seen is not None and seen.wants_reboot


def _reason_of(state: State, device: Device, on_trial: set[DeviceUuid]) -> tuple[str, str]:
    """Why the device's health is what it is now: code and detail."""
    seen = state.health.get(device.uuid)
    is_well = seen is None or seen.health is DeviceHealth.HEALTHY
    if is_well and device.health is DeviceHealth.DEGRADED and device.uuid in on_trial:
        return TRIAL_CODE, "it takes no new run until its isolation was tried"
    return ("isolation-tested", "") if seen is None else (seen.code, seen.detail)


def _took_effect(run: Run, doom: Doom, end: ProcessExited) -> bool:
    """True where the run ended because it was made to."""
    if doom.cause is RunCause.NODE_LOST or run.stop_grace_s is not None:
        return True  # Fenced is lost, whatever its process did: others were told so.
    # An earlier session may have sent the stop and died before it could tell. An end after the order is put down to
    # it: to call half-done work a success would be worse than to call a success stopped.
    return run.is_adopted and doom.since_at > 0 and end.finished_at >= doom.since_at


def _own_cause(end: ProcessExited) -> RunCause:
    """Why the process ended, where nobody here made it."""
    if end.exit_code is None and end.signal is None:
        return RunCause.SHIM_LOST if end.is_shim_lost else RunCause.NODE_LOST
    if end.exit_code == 0:
        return RunCause.SUCCESS
    if end.is_victim:
        return RunCause.FAULT_DOMAIN_FAILED
    if end.host_out_of_memory:
        return RunCause.HOST_OUT_OF_MEMORY
    if end.out_of_memory or end.exit_code == OUT_OF_MEMORY_EXIT:
        return RunCause.OUT_OF_MEMORY
    return RunCause.KILLED if end.signal is not None else RunCause.USER_ERROR


def _with_health(device: Device, health: DeviceHealth) -> Device:
    return device if device.health is health else msgspec.structs.replace(device, health=health)


def _but_health(node: NodeRegistered) -> NodeRegistered:
    """The registration without what changes by a fact of its own."""
    devices = tuple(_with_health(device, DeviceHealth.HEALTHY) for device in node.devices)
    return msgspec.structs.replace(node, devices=devices, caused_by="")
