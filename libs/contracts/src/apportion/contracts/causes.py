"""Closed enums: why a job waits, why a wish is refused, why a run or a job ended.

Values are wire strings and stay for ever. A new member is a compatible change for writers only: readers keep unknown
facts as they came (see codec).
"""

from enum import StrEnum, unique
from typing import Final


@unique
class Pending(StrEnum):
    """Why an admitted job has no slices yet. Each comes with numbers in JobPendingReasonChanged."""

    PENDING_EVALUATION = "PendingEvaluation"
    """Admitted, and no round has looked at it yet."""
    PRIORITY = "Priority"
    """It would fit, and jobs that go first hold or reserve what it needs."""
    WAITING_FOR_QUOTA = "WaitingForQuota"
    """Its queue, or one above it, is at its hard limit; ends when runs there end."""
    QUEUE_CORDONED = "QueueCordoned"
    """Its queue, or one above it, is cordoned: nothing of it is placed until an operator opens it again."""
    INSUFFICIENT_GPU = "InsufficientGpu"
    """Too few devices with enough free on one node (or over the nodes, for a gang)."""
    INSUFFICIENT_GPU_MEMORY = "InsufficientGpuMemory"
    """No device has that much memory free."""
    INSUFFICIENT_COMPUTE = "InsufficientCompute"
    """Devices have the memory, and too little compute free."""
    FRAGMENTED_DEVICES = "FragmentedDevices"
    """The pool has enough free in sum, and no device has enough of both."""
    INSUFFICIENT_HOST = "InsufficientHost"
    """Devices fit, and the nodes that have them lack CPU or host memory."""
    GANG_INCOMPLETE = "GangIncomplete"
    """Some replicas fit, and not all."""
    NO_MATCHING_DEVICE = "NoMatchingDevice"
    """No device in the pool is of an accepted kind or size, free or not."""
    ISOLATION_UNAVAILABLE = "IsolationUnavailable"
    """No device in the pool offers an accepted slice mode."""
    VERSION_MISMATCH = "VersionMismatch"
    """No node's driver, CUDA or architecture is as new as asked."""
    NO_MATCHING_NODE = "NoMatchingNode"
    """No node has the labels that it requires, among those that it doesn't avoid."""
    TOPOLOGY_MISMATCH = "TopologyMismatch"
    """Enough devices, and too few of them on one NUMA node, or joined by fast links."""
    MIG_PLACEMENT = "MigPlacement"
    """No device has the memory slices free, together and where such an instance may begin."""
    CONCURRENCY_CAP_REACHED = "ConcurrencyCapReached"
    """Devices have room, and as many runs as one device may."""
    NO_NODES_IN_POOL = "NoNodesInPool"
    """No node has registered, or all are fenced."""
    NODES_CORDONED = "NodesCordoned"
    """Every node that could host it is cordoned or draining."""
    RESERVED_FOR_OTHER = "ReservedForOther"
    """What it needs is kept for an older blocked job."""
    WAITING_FOR_PREEMPTION = "WaitingForPreemption"
    """Victims were told to stop; their slices are held for it."""
    BACKOFF = "Backoff"
    """An attempt failed; the next may be placed later."""
    DEPENDENCY = "Dependency"
    """A job that it depends on has not ended as demanded."""
    NOT_BEFORE = "NotBefore"
    """It asked not to start before an instant."""
    HELD = "Held"
    """Somebody holds it; ends with JobReleased."""
    BID_TOO_LOW = "BidTooLow"
    """It would fit if others of its market had to go, and bids no more than any of them."""
    CONTROL_PLANE_FROZEN = "ControlPlaneFrozen"
    """Too much of the fleet fell silent at once: nothing is placed until it speaks."""


@unique
class Refusal(StrEnum):
    """Why a wish was refused. The fact names the field, what was expected and what was found."""

    NOT_JSON = "NotJson"
    NOT_UTF8 = "NotUtf8"
    TOO_LARGE = "TooLarge"
    TOO_DEEP = "TooDeep"
    TYPE_UNKNOWN = "TypeUnknown"
    TYPE_MISMATCH = "TypeMismatch"
    """Subject, header and body name different types."""
    ENVELOPE_INVALID = "EnvelopeInvalid"
    FIELD_UNKNOWN = "FieldUnknown"
    FIELD_MISSING = "FieldMissing"
    FIELD_INVALID = "FieldInvalid"
    FIELD_CONFLICT = "FieldConflict"
    NOT_SUPPORTED = "NotSupported"
    """The field is part of the contract, and this version can't honour it."""
    EXPIRED = "Expired"
    TENANT_UNKNOWN = "TenantUnknown"
    TENANT_MISMATCH = "TenantMismatch"
    """The payload names another tenant than the subject; the subject is right."""
    QUEUE_NOT_FOUND = "QueueNotFound"
    QUOTA_EXCEEDED = "QuotaExceeded"
    """One job asks for more than its queue may ever hold."""
    NO_MATCHING_DEVICE = "NoMatchingDevice"
    ISOLATION_UNAVAILABLE = "IsolationUnavailable"
    IDEMPOTENCY_CONFLICT = "IdempotencyConflict"
    JOB_ID_TAKEN = "JobIdTaken"
    JOB_NOT_FOUND = "JobNotFound"
    JOB_TERMINAL = "JobTerminal"
    JOB_STATE = "JobState"
    """The job is not in a state in which this can be done."""
    NODE_NOT_FOUND = "NodeNotFound"
    NODE_STATE = "NodeState"
    """The node is not in a state in which this can be done."""
    RESERVATION_NOT_FOUND = "ReservationNotFound"
    ALERT_NOT_FOUND = "AlertNotFound"
    FAULT_NOT_FOUND = "FaultNotFound"
    FAULTS_OFF = "FaultsOff"
    """The pool's monitor isn't told to inject faults."""
    REAL_DEVICES = "RealDevices"
    """A fault would meet devices that are not simulated, and the wish doesn't allow that."""
    HOLD_NOT_FOUND = "HoldNotFound"
    ERASED = "Erased"
    """Its payload was erased from the log by order: nobody is refused by it, and it is read so in a replay alone."""
    LEGAL_HOLD = "LegalHold"
    """A hold keeps what was to be erased."""
    POOL_STATE = "PoolState"
    """The pool is not in a state in which this can be done."""
    NOT_PERMITTED = "NotPermitted"
    DEPENDENCY_FAILED = "DependencyFailed"
    """A job that it is to follow has ended otherwise than it asks."""
    RATE_LIMITED = "RateLimited"
    BUSY = "Busy"


PUT_OFF: frozenset[Refusal] = frozenset({Refusal.RATE_LIMITED, Refusal.BUSY})
"""Refusals that say when to ask again: asked again, the wish is looked at anew."""


@unique
class RowOf(StrEnum):
    """Which of the two streams a row of the log came from."""

    WISHES = "wishes"
    FACTS = "facts"


@unique
class Verdict(StrEnum):
    """What a wish that is only tried would be answered."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"


@unique
class Severity(StrEnum):
    """How soon somebody should look at an alert."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@unique
class FaultKind(StrEnum):
    """What may be broken on purpose. What follows the dash is done; what precedes it is what a target names."""

    SERVICE_KILL = "service-kill"
    """SIGKILL; its supervisor starts it again."""
    SERVICE_RESTART = "service-restart"
    """SIGTERM: it drains and ends, and is started again."""
    SERVICE_PAUSE = "service-pause"
    """It stands still, and goes on when the fault ends."""
    PLACER_STALE = "placer-stale"
    """The placer stands still long enough for another to take over, and then goes on with what it had decided."""
    NODE_LOSS = "node-loss"
    """Everything of a node is killed at once, as if its power went; it comes back when the fault ends."""
    NODE_STALL = "node-stall"
    """The node's agent stands still while its runs go on: what a partition looks like to the pool."""
    NODE_FLAP = "node-flap"
    """The agent stalls and goes on, again and again, for times that the seed draws."""
    NODE_PARTITION = "node-partition"
    """No byte passes between the node's agent and the bus, in either direction; both go on."""
    DEVICE_XID = "device-xid"
    DEVICE_LOST = "device-lost"
    """It falls off the bus (Xid 79); a reset when the fault ends brings it back."""
    DEVICE_ECC = "device-ecc"
    """An uncorrectable memory error."""
    DEVICE_HEAT = "device-heat"
    """It is 60 degrees hotter than its load explains."""
    DEVICE_MPS_WEDGE = "device-mps-wedge"
    """A client of its MPS server is killed with work in flight: the server answers, and serves nobody any more."""
    DEVICE_MEMORY_HOG = "device-memory-hog"
    """A process that nobody placed takes all of its free memory."""
    DEVICE_COMPUTE_HOG = "device-compute-hog"
    """A process that nobody placed keeps all of its SMs busy without a gap."""
    BUS_RESTART = "bus-restart"
    """SIGKILL; its supervisor starts it again on what it had stored."""
    BUS_PAUSE = "bus-pause"
    BUS_SLOW = "bus-slow"
    """It stands still for most of each tenth of a second."""
    DISK_SLOW = "disk-slow"
    """Others write and sync beside the pool, on its disk, as fast as that takes it."""
    DISK_FULL = "disk-full"
    """Not a byte is left where the pool keeps its files."""
    MESSAGE_DELAY = "message-delay"
    """What a service or an agent reads comes late, by up to a second that the seed draws, and in its order."""
    MESSAGE_DUPLICATE = "message-duplicate"
    """What it reads comes twice, every second time."""
    MESSAGE_DROP = "message-drop"
    """Every tenth message that it reads never comes."""
    CLOCK_JUMP = "clock-jump"
    """Its wall clock is set on or back, by up to an hour that the seed draws, until the fault ends."""


DONE_BY_ITSELF: Final = frozenset({
    FaultKind.MESSAGE_DELAY,
    FaultKind.MESSAGE_DUPLICATE,
    FaultKind.MESSAGE_DROP,
    FaultKind.CLOCK_JUMP,
})  # fmt: skip
"""Faults that whoever they are done to does to itself: a service by its author's name, or a node's agent."""


@unique
class FaultEnd(StrEnum):
    """Why a fault was ended."""

    EXPIRED = "Expired"
    ASKED = "Asked"


@unique
class KeyChange(StrEnum):
    """What became of a key."""

    MADE = "Made"
    """It is let in from here on: somebody has a role now."""
    ROTATED = "Rotated"
    """A newer one of the same principal is let in beside the older ones."""
    RETIRED = "Retired"
    """It is let in no more; a newer one of the same principal is."""
    REVOKED = "Revoked"
    """It is let in no more, and its principal has none: somebody's role has ended."""


@unique
class Thaw(StrEnum):
    """Why a frozen control plane goes on."""

    HEARD = "Heard"
    """Half of the fleet or more speaks again: what was silent is judged from anew."""
    WAITED = "Waited"
    """It was frozen for long enough, and other nodes were heard over the same bus: those silent are gone."""
    ASKED = "Asked"
    """An operator says that those silent are gone."""


@unique
class NodeRule(StrEnum):
    """By which rule of its own the monitor cordoned a node."""

    FLAPPING = "Flapping"
    """It fell silent and came back again and again; ends by itself once the node was steady for long enough."""
    REBOOT_NEEDED = "RebootNeeded"
    """A device of it wants the node rebooted; ends once it has booted, or no device wants it any more."""
    FAILING_RUNS = "FailingRuns"
    """Runs of many jobs failed here and not elsewhere; ends when an operator says so."""


@unique
class RunCause(StrEnum):
    """Why a run ended. The agent states it, from what it saw."""

    SUCCESS = "Success"
    USER_ERROR = "UserError"
    """The process ended by itself with an exit code other than 0."""
    KILLED = "Killed"
    """A signal that nobody in Apportion sent ended the process."""
    OUT_OF_MEMORY = "OutOfMemory"
    """A device refused it memory."""
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    """The kernel killed a process of it at its limit of host memory; more device memory would not have helped."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """It used more device memory than its slice, and the watchdog stopped it."""
    START_FAILED = "StartFailed"
    """The process could not be started (no such program, no permission)."""
    ENFORCEMENT_FAILED = "EnforcementFailed"
    """What was read back of the slice differed from what was asked; the process never ran."""
    DEVICE_FAULT = "DeviceFault"
    FAULT_DOMAIN_FAILED = "FaultDomainFailed"
    """A neighbour in the same fault domain brought it down."""
    TIME_LIMIT = "TimeLimit"
    CANCELLED = "Cancelled"
    PREEMPTED = "Preempted"
    DRAINED = "Drained"
    GANG_BROKEN = "GangBroken"
    """Another replica of its gang ended early."""
    SHRUNK = "Shrunk"
    """Its elastic gang goes on without it: it was more than the gang needs at least, and somebody else needed it."""
    NODE_LOST = "NodeLost"
    """The node was fenced, rebooted, or lost track of the process."""
    SHIM_LOST = "ShimLost"
    """The process that guarded the run was killed, and the run with it: nobody knows how it would have ended."""
    STALE = "Stale"
    """The order to start carried an older epoch of the node, or the job no longer wants it."""
    DEPENDENCY_FAILED = "DependencyFailed"
    """Of a job that never ran: another, which it was to follow, ended otherwise than it asked."""
    UNKNOWN = "Unknown"


SPENDS_NO_RETRY: frozenset[RunCause] = frozenset(
    {
        RunCause.FAULT_DOMAIN_FAILED,
        RunCause.DEVICE_FAULT,
        RunCause.PREEMPTED,
        RunCause.DRAINED,
        RunCause.GANG_BROKEN,
        RunCause.SHRUNK,
        RunCause.NODE_LOST,
        RunCause.SHIM_LOST,
        RunCause.STALE,
        RunCause.ENFORCEMENT_FAILED,
    },
)
"""Ends that are not the job's own doing: it is placed again at no cost."""


@unique
class StopCause(StrEnum):
    """Why a run is told to stop; becomes the run's cause where the stop took effect."""

    CANCELLED = "Cancelled"
    TIME_LIMIT = "TimeLimit"
    PREEMPTED = "Preempted"
    DRAINED = "Drained"
    GANG_BROKEN = "GangBroken"
    DEADLINE = "Deadline"
    RESIZED = "Resized"
    """The job asked for another size, and starts again with it."""
    SHRUNK = "Shrunk"
    """Its elastic gang goes on with fewer replicas."""


@unique
class RunAction(StrEnum):
    """What is asked of a run that goes on."""

    SUSPEND = "suspend"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"


CHECKPOINTED_STOPS: frozenset[StopCause] = frozenset(
    {StopCause.PREEMPTED, StopCause.DRAINED, StopCause.RESIZED, StopCause.TIME_LIMIT}
)
"""Who is stopped for one of these is told to checkpoint first, where its job says how: it may go on elsewhere."""


@unique
class PreemptionKind(StrEnum):
    """By which right one job has others stopped."""

    PRIORITY = "priority"
    """Its service class comes before theirs."""
    RECLAIM = "reclaim"
    """Its queue takes back what is due to it."""
    MARKET = "market"
    """It bids more for what they hold."""
    SHRINK = "shrink"
    """They are elastic, and go on with fewer replicas: what they had above their least was on loan."""


@unique
class Mode(StrEnum):
    """How a slice is enforced (DESIGN: a slice is three promises)."""

    EXCLUSIVE = "exclusive"
    MIG = "mig"
    MPS = "mps"
    TIMESLICE = "timeslice"


@unique
class WorkloadKind(StrEnum):
    """What sort of work a job is; sets its defaults."""

    TRAINING = "training"
    INFERENCE = "inference"
    BATCH = "batch"
    INTERACTIVE = "interactive"
    HPC = "hpc"


@unique
class ServiceClass(StrEnum):
    """The first key of the order in which jobs are placed: online before standard before batch before spot."""

    ONLINE = "online"
    STANDARD = "standard"
    BATCH = "batch"
    SPOT = "spot"


@unique
class OnLowered(StrEnum):
    """What becomes of runs that hold more than a limit allows, as it was lowered or is new."""

    KEEP = "keep"
    """They run on until they end; until then nothing more is placed."""
    RECLAIM = "reclaim"
    """As many as are too many are preempted, with their grace; those that agreed to be."""


@unique
class QueueOrder(StrEnum):
    """In which order the jobs of one queue are placed."""

    CLASSES = "classes"
    """Service class, training before inference, priority; waiting earns points; then age."""
    SEED = "seed"
    """A weighted sum of priority and waiting, both from 0 to 1: 0.6 and 0.4 unless the pool says otherwise."""
    STRICT = "strict"
    """Service class, priority, age: waiting earns nothing. A higher priority has lower ones of its class stopped."""
    BIDS = "bids"
    """Service class, bid, age. A spot job has others stopped that bid less."""


@unique
class BetweenQueues(StrEnum):
    """Which queue's turn it is, of those below one parent."""

    FAIR = "fair"
    """By guarantees and shares."""
    CLASSES = "classes"
    """By the service class of who is next in each, then so."""


@unique
class Pricing(StrEnum):
    """Under which price a run's slices fall."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    """Jobs of the service class spot."""
    RESERVED = "reserved"
    """Jobs of a queue that the rate names."""


@unique
class DeviceHealth(StrEnum):
    """Whether slices may be placed on a device."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It works; nothing new is placed on it."""
    FAILED = "failed"
    """Its runs are lost; nothing is placed on it."""


@unique
class IsolationTest(StrEnum):
    """What a neighbour tries to do to another."""

    MEMORY = "memory"
    """Take more than its share, alone and as two processes."""
    COMPUTE = "compute"
    """Keep the device busy without a gap."""
    CRASH = "crash"
    """Die in the ways in which processes die on devices."""


@unique
class IsolationFinding(StrEnum):
    """What an isolation test, or one check of it, came to."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    """Its control, without enforcement, did no harm either, or none could be run: it proves nothing."""
    REPORTED = "reported"
    """Measured, and not promised by the mode."""
