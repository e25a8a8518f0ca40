"""Which fact moves a job, a run, a node or a device from which state to which: the tables, drawn in docs/lifecycle.md.

``state.evolve`` is what happens; a property test holds it against these tables, and the documentation is drawn from
them, so that neither can say what the code doesn't do.
"""

from typing import Final, TypeAlias

from apportion.contracts import events as ev
from apportion.contracts.causes import DeviceHealth
from apportion.pool.state import JobState, NodeState, RunState

Moves: TypeAlias = dict[tuple[str, str], tuple[type[ev.Fact], ...]]
"""(from, to): the facts that move it so. ``""`` as the first state: it appears."""

JOB: Final[Moves] = {
    ("", JobState.QUEUED): (ev.JobAdmitted,),
    (JobState.QUEUED, JobState.RUNNING): (ev.RunPlaced,),
    (JobState.RUNNING, JobState.QUEUED): (ev.JobRequeued,),
    (JobState.RUNNING, JobState.STOPPING): (ev.JobStopping,),
    (JobState.QUEUED, JobState.STOPPING): (ev.JobStopping,),
    (JobState.STOPPING, JobState.QUEUED): (ev.JobRequeued,),
    (JobState.QUEUED, JobState.ENDED): (ev.JobCancelled, ev.JobExpired, ev.JobFailed),
    (JobState.RUNNING, JobState.ENDED): (ev.JobSucceeded, ev.JobFailed, ev.JobCancelled, ev.JobExpired),
    (JobState.STOPPING, JobState.ENDED): (ev.JobSucceeded, ev.JobFailed, ev.JobCancelled, ev.JobExpired),
}
RUN: Final[Moves] = {
    ("", RunState.PLACED): (ev.RunPlaced,),
    ("", RunState.LOST): (ev.RunPlaced,),
    (RunState.PLACED, RunState.STARTED): (ev.RunStarted,),
    (RunState.PLACED, RunState.FINISHED): (ev.RunFinished,),
    (RunState.STARTED, RunState.FINISHED): (ev.RunFinished,),
    (RunState.PLACED, RunState.RELEASED): (ev.RunReleased,),
    (RunState.STARTED, RunState.RELEASED): (ev.RunReleased,),
    (RunState.FINISHED, RunState.RELEASED): (ev.RunReleased,),
    (RunState.PLACED, RunState.LOST): (ev.NodeFenced,),
    (RunState.STARTED, RunState.LOST): (ev.NodeFenced,),
    (RunState.FINISHED, RunState.LOST): (ev.NodeFenced,),
}
NODE: Final[Moves] = {
    ("", NodeState.READY): (ev.NodeRegistered,),
    (NodeState.READY, NodeState.SUSPECTED): (ev.NodeSuspected,),
    (NodeState.CORDONED, NodeState.SUSPECTED): (ev.NodeSuspected,),
    (NodeState.DRAINING, NodeState.SUSPECTED): (ev.NodeSuspected,),
    (NodeState.SUSPECTED, NodeState.READY): (ev.NodeTrusted, ev.NodeRegistered),
    (NodeState.SUSPECTED, NodeState.CORDONED): (ev.NodeTrusted, ev.NodeRegistered),
    (NodeState.SUSPECTED, NodeState.DRAINING): (ev.NodeTrusted, ev.NodeRegistered),
    (NodeState.READY, NodeState.CORDONED): (ev.NodeCordoned,),
    (NodeState.DRAINING, NodeState.CORDONED): (ev.NodeCordoned,),
    (NodeState.READY, NodeState.DRAINING): (ev.NodeDraining,),
    (NodeState.CORDONED, NodeState.DRAINING): (ev.NodeDraining,),
    (NodeState.CORDONED, NodeState.READY): (ev.NodeUncordoned,),
    (NodeState.DRAINING, NodeState.READY): (ev.NodeUncordoned,),
    (NodeState.READY, NodeState.FENCED): (ev.NodeFenced,),
    (NodeState.SUSPECTED, NodeState.FENCED): (ev.NodeFenced,),
    (NodeState.CORDONED, NodeState.FENCED): (ev.NodeFenced,),
    (NodeState.DRAINING, NodeState.FENCED): (ev.NodeFenced,),
    (NodeState.FENCED, NodeState.READY): (ev.NodeRegistered,),
    (NodeState.FENCED, NodeState.CORDONED): (ev.NodeRegistered,),
    (NodeState.FENCED, NodeState.DRAINING): (ev.NodeRegistered,),
}
DEVICE: Final[Moves] = {
    ("", DeviceHealth.HEALTHY): (ev.NodeRegistered,),
    ("", DeviceHealth.DEGRADED): (ev.NodeRegistered,),
    ("", DeviceHealth.FAILED): (ev.NodeRegistered,),
    **{
        (before, after): (ev.DeviceHealthChanged, ev.NodeRegistered)
        for before in DeviceHealth
        for after in DeviceHealth
        if before is not after
    },
}
DIAGRAMS: Final[dict[str, Moves]] = {"Job": JOB, "Run": RUN, "Node": NODE, "Device": DEVICE}
