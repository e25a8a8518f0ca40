"""Every wish and every fact, as frozen tagged structs, and their unions.

A wish is what somebody asks; a fact is what a service states, and each kind of fact has exactly one publisher (AUTHOR).
Published fields keep their name, meaning and unit. A new optional field keeps the version; anything else is a new
version, with an upgrade in ``codec``.

Requests refuse unknown fields, since a mistyped name would change what was asked. Facts let them pass, so that an older
reader can follow a newer writer.
"""

from enum import StrEnum, unique
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from apportion.contracts.causes import (
    BetweenQueues,
    DeviceHealth,
    FaultEnd,
    FaultKind,
    IsolationFinding,
    IsolationTest,
    KeyChange,
    Mode,
    NodeRule,
    OnLowered,
    Pending,
    PreemptionKind,
    Pricing,
    QueueOrder,
    Refusal,
    RowOf,
    RunAction,
    RunCause,
    ServiceClass,
    Severity,
    StopCause,
    Thaw,
    Verdict,
    WorkloadKind,
)
from apportion.contracts.fields import (
    IMAGE,
    MIG_PROFILE,
    PLAIN,
    Argument,
    Count,
    Currency,
    EnvName,
    Instant,
    JobName,
    Key,
    Label,
    Micro,
    Milli,
    Name,
    Positive,
    Priority,
    RequestName,
    Seconds,
    Text,
    Timestamp,
    Uri,
    Version,
    WebUri,
    Weight,
    Word,
)
from apportion.contracts.ids import (
    ADMISSION,
    MONITOR,
    OPERATOR,
    PLACER,
    Author,
    DeviceUuid,
    JobId,
    NodeId,
    QueueId,
    RunId,
    TenantId,
)

AGENT: Final = Author("node-agent")
"""Stands for the agent of whichever node the fact is about."""


class Event(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True, gc=False):
    """What one message says. The envelope (who, when, in answer to what) is in its headers."""


# --------------------------------------------------------------------------------------------------------------------
# Wishes
# --------------------------------------------------------------------------------------------------------------------


Reason = Annotated[str, Meta(min_length=1, max_length=1024, pattern=PLAIN)]
"""Why something is asked that others will want to know the reason of."""


class Wish(Event, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that somebody asks. Exactly one fact answers each wish.

    With ``dry_run`` that fact is WishJudged or NodeWishJudged, which says what would have answered it, and nothing is
    done; a wish that can't be read at all is refused as ever.
    """

    ANSWERED_BY: ClassVar[Author] = ADMISSION


class Part(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A part of a request. It can hold no reference back to itself: the collector need not look at it."""


class SecretRef(Part, frozen=True, kw_only=True):
    """A value that the node looks up, so that it never stands in a request."""

    secret: Label


class Workload(Part, frozen=True, kw_only=True):
    """What to run: an argument vector, never a shell line."""

    command: Annotated[tuple[Argument, ...], Meta(max_length=256)] = ()
    env: Annotated[dict[EnvName, Argument | SecretRef], Meta(max_length=128)] = {}
    kind: WorkloadKind = WorkloadKind.BATCH
    image: Annotated[str, Meta(max_length=512, pattern=IMAGE)] | None = None
    mounts: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()


class DeviceChoice(Part, frozen=True, kw_only=True):
    """Which devices a job accepts; the order of ``models`` is its preference."""

    kind: Annotated[str, Meta(pattern=r"^[a-z]{1,16}$(?!\n)")] = "gpu"
    vendor: Name | None = None
    models: Annotated[tuple[Name, ...], Meta(max_length=32)] = ()
    min_arch: Name | None = None
    min_compute_capability: Annotated[str, Meta(pattern=r"^[0-9]{1,2}\.[0-9]$(?!\n)")] | None = None
    linked: bool | None = None
    """Whether the devices of a replica must reach each other over fast links (NVLink); they do so where they can."""
    distinct: bool | None = None
    """Whether no two replicas of the job may share a device."""


class Resources(Part, frozen=True, kw_only=True):
    """What each replica needs. Compute and memory of a share are asked independently, on the same device."""

    gpu: Annotated[int, Meta(ge=1, le=1024)] | None = None
    gpu_milli: Milli | None = None
    gpu_memory_mib: Positive | None = None
    mode: Mode | None = None
    mig_profile: Annotated[str, Meta(pattern=MIG_PROFILE)] | None = None
    device: DeviceChoice | None = None
    cpu_milli: Count | None = None
    memory_mib: Count | None = None
    disk_mib: Count | None = None
    encoders: Count | None = None
    pcie_mbps: Count | None = None
    numa: Annotated[str, Meta(pattern=r"^(none|preferred|strict)$(?!\n)")] | None = None
    cpu_bind: bool | None = None


class Gang(Part, frozen=True, kw_only=True):
    """Identical replicas that start all or none."""

    size: Annotated[int, Meta(ge=1, le=1024)] = 1
    min: Annotated[int, Meta(ge=1, le=1024)] | None = None
    topology_key: Label | None = None
    required: bool | None = None
    preferred: bool | None = None


class Retry(Part, frozen=True, kw_only=True):
    """How often a failed job is tried again, and for which causes. Losing a node or being preempted costs nothing."""

    limit: Annotated[int, Meta(ge=0, le=100)] = 0
    on: Annotated[tuple[RunCause, ...], Meta(max_length=16)] = ()
    backoff_s: Annotated[int, Meta(ge=0, le=86_400)] = 1
    avoid_same_node: bool | None = None
    memory_factor_pct: Annotated[int, Meta(ge=100, le=400)] | None = None


class ModelTraining(Part, frozen=True, kw_only=True):
    """How a model is trained. What isn't said takes admission's default, and `JobAdmitted.sized` tells."""

    method: Word | None = None
    """`none`, `full`, `lora` or `qlora`."""
    optimizer: Word | None = None
    rank: Positive | None = None
    target_modules: Word | None = None
    checkpointing: bool | None = None
    master_weights: bool | None = None
    zero_stage: Count | None = None
    data_parallel: Positive | None = None


class Model(Part, frozen=True, kw_only=True):
    """What the job runs, for admission to size: a known name, or a size, or an architecture; and how it is used."""

    name: Word | None = None
    params_millions: Positive | None = None
    precision: Word | None = None
    """How weights are stored: `bf16`, `fp8`, `gptq-int4`, … `dtype` says the same."""
    dtype: Word | None = None
    kv_dtype: Word | None = None
    group_size: Positive | None = None
    batch: Positive | None = None
    """Sequences at once on one device."""
    context_tokens: Positive | None = None
    """Tokens of one sequence, prompt and output together."""
    prompt_tokens: Positive | None = None
    training: ModelTraining | None = None
    tensor_parallel: Positive | None = None
    """Devices that share one replica."""
    engine: Word | None = None
    attention: Word | None = None
    kv_pool_mib: Count | None = None
    family: Word | None = None
    layers: Positive | None = None
    hidden: Positive | None = None
    intermediate: Positive | None = None
    heads: Positive | None = None
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    vocab: Positive | None = None
    mlp: Word | None = None
    tied_embeddings: bool | None = None
    experts_total: Positive | None = None
    experts_active: Positive | None = None
    moe_intermediate: Positive | None = None
    shared_intermediate: Count | None = None
    dense_layers: Count | None = None
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    rope_dim: Count | None = None
    v_head_dim: Count | None = None
    sliding_window: Count | None = None
    global_every: Count | None = None


class Elastic(Part, frozen=True, kw_only=True):
    """How many replicas the job can do with."""

    min: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max: Annotated[int, Meta(ge=1, le=1024)] | None = None
    step: Annotated[int, Meta(ge=1, le=1024)] | None = None


class Sla(Part, frozen=True, kw_only=True):
    """What an inference job promises its own users."""

    latency_ms: Positive | None = None
    percentile: Annotated[int, Meta(ge=1, le=99)] | None = None
    rps: Positive | None = None


class Bid(Part, frozen=True, kw_only=True):
    """The most that a spot job pays."""

    max_price_micro_per_gpu_hour: Positive


class Checkpoint(Part, frozen=True, kw_only=True):
    """Where the job keeps what it has done, and how it is told to."""

    uri: Uri | None = None
    interval_s: Seconds | None = None
    grace_s: Annotated[int, Meta(ge=0, le=3600)] | None = None
    signal: Word | None = None


@unique
class IsolationLevel(StrEnum):
    """What a job's neighbours must not be able to do; each level includes those before it."""

    NONE = "none"
    MEMORY = "memory"
    FAULT = "fault"
    DEDICATED = "dedicated"
    CONFIDENTIAL = "confidential"


class Isolation(Part, frozen=True, kw_only=True):
    """The least isolation that the job accepts."""

    level: IsolationLevel = IsolationLevel.NONE


class Placement(Part, frozen=True, kw_only=True):
    """Where the job may run, by labels of nodes."""

    required: Annotated[dict[Key, Text], Meta(max_length=32)] = {}
    preferred: Annotated[dict[Key, Text], Meta(max_length=32)] = {}
    avoid_nodes: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    site: Name | None = None
    network_segment: Name | None = None


class Runtime(Part, frozen=True, kw_only=True):
    """What the node's software must be at least."""

    min_driver: Version | None = None
    min_cuda: Version | None = None
    framework: Word | None = None


@unique
class DataTier(StrEnum):
    """How soon the job needs its data."""

    HOT = "hot"
    COLD = "cold"


class Data(Part, frozen=True, kw_only=True):
    """What the job reads."""

    inputs: Annotated[tuple[Uri, ...], Meta(max_length=64)] = ()
    tier: DataTier | None = None


@unique
class DependencyCondition(StrEnum):
    """How the other job must have ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ENDED = "ended"


class Dependency(Part, frozen=True, kw_only=True):
    """Another job of the tenant that has to end first."""

    job_id: Name
    condition: DependencyCondition = DependencyCondition.SUCCEEDED


class JobRequested(Wish, frozen=True, kw_only=True, tag="JobRequested.v1"):
    """A tenant asks for a job. Written by any system that may; answered by JobAdmitted, JobRejected or JobDuplicate."""

    queue: RequestName
    workload: Workload
    resources: Resources = Resources()
    job_id: RequestName | None = None
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=128, pattern=PLAIN)] | None = None
    tenant: Text | None = None
    """Where given it must equal the tenant of the subject; it grants nothing."""
    job_set: Name | None = None
    service_class: ServiceClass | None = None
    priority: Priority | None = None
    preemptible: bool | None = None
    min_runtime_s: Seconds | None = None
    model: Model | None = None
    """Where the memory isn't asked for, admission books what this needs."""
    gang: Gang = Gang()
    elastic: Elastic | None = None
    sla: Sla | None = None
    bid: Bid | None = None
    time_limit_s: Annotated[int, Meta(ge=1, le=2_147_483_647)] | None = None
    max_wait_s: Seconds | None = None
    not_before: Timestamp | None = None
    deadline: Timestamp | None = None
    retry: Retry = Retry()
    grace_s: Annotated[int, Meta(ge=0, le=3600)] | None = None
    checkpoint: Checkpoint | None = None
    isolation: Isolation | None = None
    placement: Placement | None = None
    runtime: Runtime | None = None
    data: Data | None = None
    depends_on: Annotated[tuple[Dependency, ...], Meta(max_length=64)] = ()
    labels: Annotated[dict[Key, Text], Meta(max_length=32)] = {}
    annotations: Annotated[dict[Key, Text], Meta(max_length=32)] = {}
    external_uri: WebUri | None = None
    dry_run: bool = False


class JobCancelRequested(Wish, frozen=True, kw_only=True, tag="JobCancelRequested.v1"):
    """Somebody asks that a job ends. Answered by JobCancelled, JobStopping or WishRejected."""

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    reason: Text = ""
    dry_run: bool = False


class JobHoldRequested(Wish, frozen=True, kw_only=True, tag="JobHoldRequested.v1"):
    """Somebody asks that a job isn't placed until it is released. Answered by JobHeld or WishRejected.

    A job that runs, runs on, and is held once it waits again: to have it wait at once, hold it and preempt it.
    """

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    reason: Text = ""
    dry_run: bool = False


class JobReleaseRequested(Wish, frozen=True, kw_only=True, tag="JobReleaseRequested.v1"):
    """Somebody asks that a held job may be placed again. Answered by JobReleased or WishRejected."""

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    reason: Text = ""
    dry_run: bool = False


class JobReprioritizeRequested(Wish, frozen=True, kw_only=True, tag="JobReprioritizeRequested.v1"):
    """Somebody asks that a job waits with another priority. Answered by JobReprioritized or WishRejected."""

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    priority: Priority
    reason: Text = ""
    dry_run: bool = False


class JobPreemptRequested(Wish, frozen=True, kw_only=True, tag="JobPreemptRequested.v1"):
    """Somebody asks that a running job gives its slices back. Answered by JobStopping or WishRejected."""

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    reason: Reason
    requeue: bool = True
    """Whether it waits for slices again, at no cost; else it ends, as cancelled."""
    dry_run: bool = False


class JobResizeRequested(Wish, frozen=True, kw_only=True, tag="JobResizeRequested.v1"):
    """Somebody asks that a job has another share of its devices. Answered by JobResized or WishRejected.

    What isn't named stays as it is. A job that runs is stopped, and starts again with its new size.
    """

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    gpu_milli: Milli | None = None
    gpu_memory_mib: Positive | None = None
    reason: Text = ""
    dry_run: bool = False


class JobSuspendRequested(Wish, frozen=True, kw_only=True, tag="JobSuspendRequested.v1"):
    """Somebody asks that a job's processes stand still. Answered by JobSuspended or WishRejected.

    They keep what they hold, and its time limit goes on: to have its slices back, hold the job and preempt it.
    """

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    reason: Text = ""
    dry_run: bool = False


class JobResumeRequested(Wish, frozen=True, kw_only=True, tag="JobResumeRequested.v1"):
    """Somebody asks that a suspended job goes on. Answered by JobResumed or WishRejected."""

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    reason: Text = ""
    dry_run: bool = False


class JobCheckpointRequested(Wish, frozen=True, kw_only=True, tag="JobCheckpointRequested.v1"):
    """Somebody asks that a running job keeps what it has done. Answered by JobCheckpointing or WishRejected."""

    job_id: JobName
    """The job's name; an operator gives ``<tenant>/<name>``."""
    reason: Text = ""
    dry_run: bool = False


class QueueUpsertRequested(Wish, frozen=True, kw_only=True, tag="QueueUpsertRequested.v1"):
    """An operator asks for a queue with these limits, new or changed. Answered by QueueUpserted or WishRejected.

    The whole queue is said at once: what is left out goes back to its default.
    """

    queue: Name
    tenants: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=256)] = ()
    """Who may submit to it; left out where jobs go to queues below it."""
    parent: Name | None = None
    """The queue above it, which there must be already; none for one at the top."""
    limit_compute_milli: Count | None = None
    """What its runs, and those of queues below it, hold at most; None: no limit but those above it."""
    limit_memory_mib: Count | None = None
    limit_cpu_milli: Count | None = None
    limit_jobs: Count | None = None
    """Jobs that hold something."""
    limit_model_milli: Annotated[dict[Name, Count], Meta(max_length=64)] = {}
    """Milli-GPU on devices of each model named."""
    guaranteed_compute_milli: Count | None = None
    """What is given back to it before anybody borrows, as soon as its jobs want it; None: nothing."""
    guaranteed_memory_mib: Count | None = None
    guaranteed_cpu_milli: Count | None = None
    guaranteed_jobs: Count | None = None
    guaranteed_model_milli: Annotated[dict[Name, Count], Meta(max_length=64)] = {}
    weight: Weight = 1
    """Its part of what no guarantee claims, beside its siblings'."""
    weights: Annotated[dict[Name, Weight], Meta(max_length=64)] = {}
    """The same of single resources: compute_milli, memory_mib, cpu_milli or a model; of others it is ``weight``."""
    order: QueueOrder | None = None
    """How its own jobs are ordered; None: as the pool's are."""
    is_fair: bool = True
    """Whether its tenants take turns by their shares; otherwise whose a job is makes no difference."""
    reclaim: bool = True
    """Whether runs that borrow its guaranteed share are preempted for it."""
    is_cordoned: bool = False
    """Nothing of it is placed; what runs, runs on."""
    on_lowered: OnLowered = OnLowered.KEEP
    """What becomes of runs beyond a limit that is set below what is held."""
    reason: Text = ""
    dry_run: bool = False


class ReservationRequested(Wish, frozen=True, kw_only=True, tag="ReservationRequested.v1"):
    """An operator asks that nodes are kept for a tenant for a while. Answered by ReservationAdmitted or WishRejected.

    Which nodes, the placer says (NodesReserved).
    """

    reservation: Name
    for_tenant: Name
    start: Timestamp
    """From when on nobody else's runs are there: until then, only those that have left by then."""
    end: Timestamp
    nodes: Annotated[int, Meta(ge=1, le=1024)] = 1
    gpu: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Devices that each of the nodes has, at least, whatever runs on them."""
    models: Annotated[tuple[Name, ...], Meta(max_length=32)] = ()
    """Of these models; empty: of any."""
    required: Annotated[dict[Key, Text], Meta(max_length=32)] = {}
    """Labels that each of the nodes has."""
    reason: Reason
    dry_run: bool = False


class ReservationCancelRequested(Wish, frozen=True, kw_only=True, tag="ReservationCancelRequested.v1"):
    """An operator asks that nodes are no longer kept. Answered by ReservationCancelled or WishRejected."""

    reservation: Name
    reason: Text = ""
    dry_run: bool = False


class KindDefaults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a job of one kind gets where its request leaves it open; what isn't named is the service's own."""

    compute_milli: Milli | None = None
    memory_mib: Positive | None = None
    modes: Annotated[tuple[Mode, ...], Meta(max_length=4)] | None = None
    """For a share of a device, the preferred one first."""


Points = Annotated[int, Meta(ge=0, le=1_000_000)]
"""What something is worth beside priority, which is worth 0 to 1000."""


class PlacementRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who goes first, who is stopped for whom, and how many share a device; what isn't named is the placer's own."""

    order: QueueOrder | None = None
    """Of queues that don't say theirs."""
    between_queues: BetweenQueues | None = None
    """Whose turn it is: by guarantees and shares, or first by the service class of who is next."""
    class_points: dict[ServiceClass, Points] = {}
    """What service classes are worth in points of priority."""
    kind_points: dict[WorkloadKind, Points] = {}
    """What kinds of work are worth in points of priority."""
    ageing_s: Seconds | None = None
    """Seconds of waiting that are worth one point; 0: only between equals."""
    fair_half_life_s: Seconds | None = None
    """Seconds after which half of what was held is forgotten; 0: shares are of what is held now."""
    seed_priority_weight: Points | None = None
    seed_waiting_weight: Points | None = None
    """Weights of priority and of waiting, each from 0 to 1, in the order ``seed``."""
    seed_waiting_s: Positive | None = None
    """Seconds of waiting that count as 1 in the order ``seed``."""
    reserve_after_s: Seconds | None = None
    """Seconds after which nodes are kept for the first job that is blocked."""
    runs_per_device_max: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """Runs that share a device, at most; 0: three for each core of its node."""
    preempt_victims_max: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Jobs that may be stopped for one; 0: nobody is."""
    preempt_spares_s: Positive | None = None
    """Seconds after its placement in which nobody is stopped for another."""
    preempt_per_minute: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    """Jobs that may be stopped for others within a minute, over the pool."""


class PolicyUpsertRequested(Wish, frozen=True, kw_only=True, tag="PolicyUpsertRequested.v1"):
    """An operator asks for these rates, sizes and defaults. Answered by PolicyUpserted or WishRejected.

    States the whole policy of the pool, or of one tenant: what isn't named has no rule there. A tenant's rule goes
    before the pool's, and the pool's before the settings of admission and of the placer.
    """

    for_tenant: Name | None = None
    """Whose it is; None: the pool's, for every tenant that has no rule of its own."""
    rate_per_min: Positive | None = None
    """Jobs that a tenant may have admitted in a minute."""
    burst: Positive | None = None
    """How many of them may come at once."""
    pending_max: Positive | None = None
    """Jobs of a tenant that may wait at once."""
    wish_rate_per_min: Positive | None = None
    """Wishes of a tenant that are looked at in a minute: all job requests, and what is refused or a dry run."""
    wish_burst: Positive | None = None
    """How many of them may come at once."""
    isolation: IsolationLevel | None = None
    """The least that a tenant's jobs get, whatever they ask."""
    limit_compute_milli: Count | None = None
    """What the tenant's runs hold at most, in all queues together. A tenant's only, like the other limits."""
    limit_memory_mib: Count | None = None
    limit_cpu_milli: Count | None = None
    limit_jobs: Count | None = None
    """Jobs that hold something."""
    limit_model_milli: Annotated[dict[Name, Count], Meta(max_length=64)] = {}
    """Milli-GPU on devices of each model named."""
    on_lowered: OnLowered = OnLowered.KEEP
    """What becomes of its runs beyond a limit that is set below what it holds."""
    pool_pending_max: Positive | None = None
    """Jobs that may wait at once, whosever they are. The pool's only, like what follows."""
    buffer_pct: Annotated[int, Meta(ge=10, le=20)] | None = None
    """What is booked above the p95 of a model's size."""
    defaults: dict[WorkloadKind, KindDefaults] = {}
    placement: PlacementRules | None = None
    """Goes before the placer's settings."""
    reason: Reason
    dry_run: bool = False


class NodeDrainRequested(Wish, frozen=True, kw_only=True, tag="NodeDrainRequested.v1"):
    """An operator asks that a node takes no more and is emptied. Answered by NodeDraining or WishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    node_id: Name
    reason: Reason
    deadline_s: Seconds = 0
    """Runs are told to stop at once; this long, at most, they may take (their own grace is shorter or equal)."""
    dry_run: bool = False


class NodeCordonRequested(Wish, frozen=True, kw_only=True, tag="NodeCordonRequested.v1"):
    """An operator asks that a node takes no more. Answered by NodeCordoned or WishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    node_id: Name
    reason: Reason
    dry_run: bool = False


class NodeUncordonRequested(Wish, frozen=True, kw_only=True, tag="NodeUncordonRequested.v1"):
    """An operator asks that a cordoned or draining node is used again. Answered by NodeUncordoned or WishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    node_id: Name
    reason: Reason
    dry_run: bool = False


class ControlPlaneThawRequested(Wish, frozen=True, kw_only=True, tag="ControlPlaneThawRequested.v1"):
    """An operator says that the silent nodes are gone, so that the frozen control plane fences them and goes on.

    Answered by ControlPlaneThawed or NodeWishRejected.
    """

    ANSWERED_BY: ClassVar[Author] = MONITOR
    reason: Reason
    dry_run: bool = False


class Rate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one kind of use costs. A rate that names a model goes before one for any."""

    pricing: Pricing
    model: Name | None = None
    """None: any model."""
    queues: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    """Of reserved capacity: whose runs it is for."""
    micro_per_gpu_hour: Micro
    """For a whole device for an hour; a share costs its share."""
    micro_per_gib_hour: Micro = 0
    """For the memory of the slice, beside."""


class RateCardChangeRequested(Wish, frozen=True, kw_only=True, tag="RateCardChangeRequested.v1"):
    """An operator asks that use is charged so from an instant on. Answered by RateCardChanged or NodeWishRejected.

    The whole card is said at once; it counts until the next one's instant.
    """

    ANSWERED_BY: ClassVar[Author] = MONITOR
    currency: Currency
    rates: Annotated[tuple[Rate, ...], Meta(min_length=1, max_length=256)]
    effective_at: Timestamp | None = None
    """None: from the answer on. One in the past changes what was charged since: the reason should say why."""
    reason: Reason
    dry_run: bool = False


class IsolationTestRequested(Wish, frozen=True, kw_only=True, tag="IsolationTestRequested.v1"):
    """An operator asks that slices of a device are tried against each other.

    Answered by IsolationTestStarted or NodeWishRejected.
    """

    ANSWERED_BY: ClassVar[Author] = MONITOR
    node_id: Name
    device_uuid: Text | None = None
    """None: one that offers the mode, without runs if there is such a one."""
    mode: Mode | None = None
    """None: mig where the device is in MIG mode, else mps where it is offered, else the last of its modes."""
    reason: Text = ""
    dry_run: bool = False


AlertRuleName = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9-]*$(?!\n)")]
AlertAbout = Annotated[str, Meta(max_length=128, pattern=PLAIN)]


class AlertAcknowledgeRequested(Wish, frozen=True, kw_only=True, tag="AlertAcknowledgeRequested.v1"):
    """An operator says that somebody looks at an alert. Answered by AlertAcknowledged or NodeWishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    rule: AlertRuleName
    about: AlertAbout = ""
    for_s: Annotated[int, Meta(ge=1, le=2_592_000)] = 3_600
    """After so long it counts as unseen again, if it still fires."""
    reason: Reason
    dry_run: bool = False


class AlertSilenceRequested(Wish, frozen=True, kw_only=True, tag="AlertSilenceRequested.v1"):
    """An operator wants to hear nothing of a rule for a while. Answered by AlertSilenced or NodeWishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    rule: AlertRuleName
    about: AlertAbout = ""
    """What of; empty: whatever the rule is about."""
    for_s: Annotated[int, Meta(ge=0, le=2_592_000)]
    """0 ends an earlier silence."""
    reason: Reason
    dry_run: bool = False


class FaultInjectionRequested(Wish, frozen=True, kw_only=True, tag="FaultInjectionRequested.v1"):
    """An operator asks that something is broken on purpose. Answered by FaultInjected or NodeWishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    kind: FaultKind
    target: AlertAbout = ""
    """A service (``placer``), a node (``node-1``), a device (``node-1/0``); nothing for the bus."""
    for_s: Annotated[int, Meta(ge=1, le=3_600)] = 30
    seed: Count = 0
    """What is drawn at random is drawn from this."""
    xid: Annotated[int, Meta(ge=1, le=1_000)] | None = None
    allow_real: bool = False
    """Also where devices are not simulated."""
    reason: Reason
    dry_run: bool = False


class FaultClearRequested(Wish, frozen=True, kw_only=True, tag="FaultClearRequested.v1"):
    """An operator asks that a fault is ended before its time. Answered by FaultCleared or NodeWishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    fault_id: Name
    reason: Reason
    dry_run: bool = False


class LogSealRequested(Wish, frozen=True, kw_only=True, tag="LogSealRequested.v1"):
    """An operator asks that past days of the log become segments. Answered by LogSealOrdered or NodeWishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    before: Timestamp | None = None
    """Days that ended by then. None: all days that have ended."""
    reason: Reason
    dry_run: bool = False


class LegalHoldRequested(Wish, frozen=True, kw_only=True, tag="LegalHoldRequested.v1"):
    """An operator asks that nothing of this is erased or dropped. Answered by LegalHoldPlaced or NodeWishRejected.

    What is said holds together: of this tenant, of this job, from then, until then. Nothing said: everything.
    """

    ANSWERED_BY: ClassVar[Author] = MONITOR
    tenant: Name | None = None
    job_id: JobName | None = None
    """With its tenant: ``acme/train-7``."""
    since: Timestamp | None = None
    until: Timestamp | None = None
    reason: Reason
    dry_run: bool = False


class LegalHoldReleaseRequested(Wish, frozen=True, kw_only=True, tag="LegalHoldReleaseRequested.v1"):
    """An operator asks that a hold ends. Answered by LegalHoldReleased or NodeWishRejected."""

    ANSWERED_BY: ClassVar[Author] = MONITOR
    hold_id: Name
    reason: Reason
    dry_run: bool = False


class PayloadEraseRequested(Wish, frozen=True, kw_only=True, tag="PayloadEraseRequested.v1"):
    """An operator asks that the log forgets a payload. Answered by PayloadEraseOrdered or NodeWishRejected.

    Whose row it is and when it was recorded are said with it, so that it is known whether a hold keeps it; where the
    row says otherwise, nothing is erased.
    """

    ANSWERED_BY: ClassVar[Author] = MONITOR
    stream: RowOf
    seq: Annotated[int, Meta(ge=1)]
    job_id: JobName
    """Of the row, with its tenant: ``acme/train-7``; a job that has ended."""
    recorded_at: Instant
    reason: Reason
    dry_run: bool = False


class LogRetentionChangeRequested(Wish, frozen=True, kw_only=True, tag="LogRetentionChangeRequested.v1"):
    """An operator asks that the log is kept so from now on. Answered by LogRetentionChanged or NodeWishRejected.

    What is not said goes back to what holds where nobody asks: sealed by hand, payloads kept for ever.
    """

    ANSWERED_BY: ClassVar[Author] = MONITOR
    payload_days: Annotated[int, Meta(ge=0, le=36_500)] = 0
    """What a job said is kept for so many days after its end; 0: for ever."""
    seal_daily: bool = False
    """Whether each day becomes a sealed segment once it has ended."""
    reason: Reason
    dry_run: bool = False


class KeyChangeRequested(Wish, frozen=True, kw_only=True, tag="KeyChangeRequested.v1"):
    """Whoever keeps the pool's keys says that who is let in has changed. Answered by KeyChanged or NodeWishRejected.

    The bus reads keys from a file, and lets in whom that names: what is said here has been done, or will be with the
    bus's next start. Only an admin's key may say it.
    """

    ANSWERED_BY: ClassVar[Author] = MONITOR
    change: KeyChange
    role: Name
    """Such as ``viewer``, ``operator``, ``auditor``, ``admin``, ``tenant``, ``agent``."""
    of: Annotated[str, Meta(max_length=63, pattern=r"^([a-z0-9]([a-z0-9_-]*[a-z0-9])?)?$(?!\n)")] = ""
    """Whose: the tenant, the node, the person; empty where there is one of the role."""
    public: Annotated[str, Meta(pattern=r"^U[A-Z2-7]{55}$(?!\n)")]
    """The public key."""
    reason: Reason
    dry_run: bool = False


# --------------------------------------------------------------------------------------------------------------------
# Facts
# --------------------------------------------------------------------------------------------------------------------


class Fact(Event, frozen=True, kw_only=True):
    """Something that a service states. It has happened, and nobody can argue with it, only add to it."""

    AUTHOR: ClassVar[Author]
    caused_by: str = ""
    """Id of the event that led to this one; empty where nothing in the streams did."""


class LeaseClaimed(Fact, frozen=True, kw_only=True, tag="LeaseClaimed.v1"):
    """This session writes as the author from here on; older sessions are fenced. Written by each author for itself."""

    author: str
    session: str
    core: str
    """Name, version and digest of the rules that decide, so that a replay knows which to run."""
    config: dict[str, int | str] = {}
    """The settings that decisions depend on: they reach the core by this fact alone."""
    follows: str = ""
    """The session whose place a standby took; empty where a process claimed as it started."""
    silent_ms: int = 0
    """How long that session had been silent, by the standby's own clock; 0 where it had said that it leaves."""


class DependsOn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another job, and how it must have ended before this one may be placed."""

    job_id: JobId
    condition: DependencyCondition = DependencyCondition.SUCCEEDED


class CheckpointPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a run is told to keep what it has done, and for how long it is waited for."""

    signal: str = "SIGUSR1"
    """Sent to the run's first process, where that handles it."""
    grace_s: int = 30
    uri: str = ""
    """Where the job keeps it; its attempts are told."""


class JobSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job request with every default filled in: what the placer and the agents go by."""

    queue: QueueId
    kind: WorkloadKind
    command: tuple[str, ...]
    env: dict[str, str] = {}
    image: str = ""
    """Given: it runs in a container of it, the command in place of the image's own where there is one."""
    service_class: ServiceClass = ServiceClass.BATCH
    priority: int = 500
    preemptible: bool = True
    replicas: int = 1
    """The most that it runs with."""
    replicas_min: int = 0
    """The least that it runs with, where that is fewer; it grows where there is room, and shrinks for others. 0: all.
    """
    replicas_step: int = 1
    """It grows and shrinks by so many at once."""
    topology_key: str = ""
    """All replicas on nodes with one value of this label; ``node``: on one node."""
    topology_required: bool = False
    """Whether it waits until they can be; else they are spread over as few values as may be."""
    devices: int = 1
    """Devices per replica, all on one node; 0 for a job without one."""
    compute_milli: int = 1000
    """Share of each device."""
    memory_mib: int = 0
    """Memory of each device; 0 means the whole device."""
    mode: Mode | None = None
    """None: any that gives what was asked."""
    modes: tuple[Mode, ...] = ()
    """Modes that give what was asked, the preferred one first; empty: any, in the pool's own order."""
    dedicated: bool = False
    """Its devices are nobody else's while it runs, whatever share of them it asked for."""
    isolation: IsolationLevel = IsolationLevel.NONE
    """What was asked or what its tenant is bound to, whichever is more; `modes` and `dedicated` are how it is given."""
    models: tuple[str, ...] = ()
    """Accepted models, the preferred one first; empty means any."""
    device_kind: str = "gpu"
    vendor: str = ""
    min_arch: str = ""
    """One of ``units.ARCHITECTURES``: this one or a later."""
    min_compute_capability: str = ""
    min_driver: str = ""
    min_cuda: str = ""
    required: dict[str, str] = {}
    """Labels that the node must have; ``site`` and ``network_segment`` are labels of those names."""
    preferred: dict[str, str] = {}
    avoid_nodes: tuple[str, ...] = ()
    numa: str = ""
    """``preferred`` or ``strict``: whether all devices of a replica are on one NUMA node."""
    linked: bool = False
    """All devices of a replica are in one link group."""
    distinct: bool = False
    """No two replicas share a device."""
    mig_profile: str = ""
    encoders: int = 0
    """Percent of each device's encoding capacity."""
    pcie_mbps: int = 0
    """Megabits a second of each device's link to its host."""
    cpu_milli: int = 0
    host_memory_mib: int = 0
    cpu_bind: bool = False
    """Runs keep to the CPUs and memory next to their devices; with ``numa`` strict never elsewhere."""
    time_limit_s: int = 0
    """0: none."""
    not_before_at: int = 0
    deadline_at: int = 0
    """0: none."""
    retry_limit: int = 0
    retry_on: tuple[RunCause, ...] = ()
    backoff_s: int = 1
    avoid_same_node: bool = False
    """A node on which an attempt failed gets none of the later ones; JobRequeued names them."""
    memory_factor_pct: int = 100
    """After an attempt that ran out of device memory, the next asks for so much of what it had."""
    depends_on: tuple[DependsOn, ...] = ()
    grace_s: int = 10
    checkpoint: CheckpointPlan | None = None
    """Given: its runs are told to checkpoint before they are stopped for others' sake, or moved."""
    min_runtime_s: int = 0
    max_wait_s: int = 0
    latency_ms: int = 0
    """What a request to it may take; 0: nobody said. It is placed where requests meet the least other work."""
    bid_micro: int = 0
    """The most that it pays for a GPU and hour, in millionths of the pool's currency; 0: it takes part in no market."""
    labels: dict[str, str] = {}

    @property
    def replicas_least(self) -> int:
        """How many replicas start together, or none does."""
        return self.replicas_min or self.replicas


class Correction(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the observed peaks of earlier runs made of an estimate."""

    runs: int
    """Runs of the family that were looked at, the newest."""
    ratio_bp: int
    """Their median of observed to estimated peak, in hundredths of a percent."""
    memory_mib_p50_before: int
    memory_mib_p95_before: int


class MemoryAdvice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What earlier runs of the same command used of the memory that is asked for again."""

    asked_mib: int
    peak_mib_max: int
    """The most that any of them used of one device."""
    runs: int
    suggested_mib: int
    text: str


class Sized(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What admission expects a model to need on each device, in MiB."""

    memory_mib_p50: int
    memory_mib_p95: int
    """What 19 of 20 runs stay below, in the same measure as p50 (`model.measure`)."""
    booked_mib: int
    """What the job asks for on this ground: the device's p95 and a buffer, or what the request said itself."""
    parts: dict[str, int] = {}
    """Where the expected MiB go; they sum to p50, as it is before any correction."""
    method: str
    buffer_pct: int = 0
    """What was booked above the device's p95."""
    family: str = ""
    """Whose runs correct the estimate, and are corrected by this one's."""
    memory_mib_device: int = 0
    """The formula's expected peak of the whole device: what an observed peak is compared with."""
    memory_mib_p95_device: int = 0
    """What 19 of 20 runs stay below on the whole device, with what lies beside tensors there."""
    correction: Correction | None = None
    """None where too few runs of the family have been seen."""


class JobAdmitted(Fact, frozen=True, kw_only=True, tag="JobAdmitted.v1"):
    """The job is accepted and waits for slices. Written by admission; it will end in exactly one terminal fact."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    tenant: TenantId
    answers: int
    """Sequence of the wish in the stream of wishes."""
    wish_id: str
    spec: JobSpec
    request_digest: str = ""
    """SHA-256 of what was asked, however it was written: what a repeat is compared with."""
    idempotency_key: str = ""
    quota_used_milli: int = 0
    quota_used_mib: int = 0
    """What the queue's runs held when this was decided."""
    external_uri: str = ""
    sized: Sized | None = None
    """How the memory was found, where the request gave a model."""
    advice: MemoryAdvice | None = None
    """Where earlier runs of the same command say that another size would do."""
    first_wish: int = 0
    """Sequence of the first wish with the same identity, where that was put off; 0 where this is the first."""
    waits_for: tuple[JobId, ...] = ()
    """Jobs that have to end before it may be placed: those of `spec.depends_on` that had not ended when it came in."""
    note: str = ""
    """What the publisher could do better; empty where there is nothing to say."""


class JobRejected(Fact, frozen=True, kw_only=True, tag="JobRejected.v1"):
    """The job request is refused, for this reason. Written by admission; nothing was or will be done."""

    AUTHOR: ClassVar[Author] = ADMISSION
    tenant: TenantId
    answers: int
    wish_id: str
    code: Refusal
    field: str = ""
    """Path in the request, such as ``resources.gpu``; empty where it is no field's fault."""
    expected: str = ""
    found: str = ""
    message: str = ""
    job_id: JobId | None = None
    """The id that the job would have had, where it could be read."""
    retry_after_s: int = 0
    """After how long it may be asked again, by the same identity or another; 0 where the answer stands."""
    first_wish: int = 0
    """Sequence of the first wish with the same identity, where that was put off; 0 where this is the first."""
    note: str = ""
    """What the publisher could do better beside; empty where there is nothing to say."""


class JobDuplicate(Fact, frozen=True, kw_only=True, tag="JobDuplicate.v1"):
    """The wish repeats an earlier one. Written by admission; the first answer stands."""

    AUTHOR: ClassVar[Author] = ADMISSION
    tenant: TenantId
    answers: int
    wish_id: str
    original_job_id: JobId
    first_wish: int
    """Sequence of the first wish."""


class WishRejected(Fact, frozen=True, kw_only=True, tag="WishRejected.v1"):
    """A wish other than a job request is refused by admission. Nothing was done."""

    AUTHOR: ClassVar[Author] = ADMISSION
    tenant: TenantId
    answers: int
    wish_id: str
    wish_type: str
    code: Refusal
    field: str = ""
    expected: str = ""
    found: str = ""
    message: str = ""
    retry_after_s: int = 0
    """After so many seconds the same may be asked again; 0: that would change nothing."""
    note: str = ""
    """What the publisher could do better beside; empty where there is nothing to say."""


class WishJudged(Fact, frozen=True, kw_only=True, tag="WishJudged.v1"):
    """What a wish with ``dry_run`` would be answered as things stand. Written by admission; nothing was done."""

    AUTHOR: ClassVar[Author] = ADMISSION
    tenant: TenantId
    answers: int
    wish_id: str
    wish_type: str
    verdict: Verdict
    fact: str
    """Name of the fact that would answer it."""
    would: tuple[str, ...] = ()
    """What would follow, in sentences."""
    code: Refusal | None = None
    field: str = ""
    expected: str = ""
    found: str = ""
    message: str = ""
    job_id: JobId | None = None
    """The job that it is about, where it has one already or names it."""
    spec: JobSpec | None = None
    """The job as it would be, where it would be new or have another size or priority."""
    sized: Sized | None = None


class NodeWishJudged(Fact, frozen=True, kw_only=True, tag="NodeWishJudged.v1"):
    """What a wish about a node with ``dry_run`` would be answered as things stand. By monitor; nothing was done."""

    AUTHOR: ClassVar[Author] = MONITOR
    tenant: TenantId
    answers: int
    wish_id: str
    wish_type: str
    verdict: Verdict
    fact: str
    """Name of the fact that would answer it."""
    would: tuple[str, ...] = ()
    """What would follow, in sentences."""
    code: Refusal | None = None
    field: str = ""
    expected: str = ""
    found: str = ""
    message: str = ""
    node_id: NodeId | None = None
    """The node, where there is one of that name."""
    runs: tuple[RunId, ...] = ()
    """Runs that would be told to stop, at most 100 of them."""


class NodeWishRejected(Fact, frozen=True, kw_only=True, tag="NodeWishRejected.v1"):
    """A wish that the monitor answers (about nodes, alerts, the control plane) is refused. Nothing was done."""

    AUTHOR: ClassVar[Author] = MONITOR
    tenant: TenantId
    answers: int
    wish_id: str
    wish_type: str
    code: Refusal
    field: str = ""
    expected: str = ""
    found: str = ""
    message: str = ""
    note: str = ""
    """What the publisher could do better beside; empty where there is nothing to say."""


class QueueUpserted(Fact, frozen=True, kw_only=True, tag="QueueUpserted.v1"):
    """The queue exists with these limits from here on. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    queue: QueueId
    tenants: tuple[TenantId, ...]
    parent: QueueId | None = None
    limit_compute_milli: int | None = None
    limit_memory_mib: int | None = None
    limit_cpu_milli: int | None = None
    limit_jobs: int | None = None
    limit_model_milli: dict[str, int] = {}
    guaranteed_compute_milli: int | None = None
    guaranteed_memory_mib: int | None = None
    guaranteed_cpu_milli: int | None = None
    guaranteed_jobs: int | None = None
    guaranteed_model_milli: dict[str, int] = {}
    weight: int = 1
    weights: dict[str, int] = {}
    order: QueueOrder | None = None
    is_fair: bool = True
    reclaim: bool = True
    is_cordoned: bool = False
    on_lowered: OnLowered = OnLowered.KEEP
    answers: int
    actor: str
    reason: str = ""
    note: str = ""
    """What an operator should know of it, with numbers: guarantees beyond what the pool has. Empty: nothing."""


class ReservationAdmitted(Fact, frozen=True, kw_only=True, tag="ReservationAdmitted.v1"):
    """Nodes of this sort are to be kept for the tenant, from ``start_at`` to ``end_at``. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    reservation: str
    for_tenant: TenantId
    start_at: Instant
    end_at: Instant
    nodes: int
    devices: int = 0
    models: tuple[str, ...] = ()
    required: dict[str, str] = {}
    answers: int
    actor: str
    reason: str = ""


class ReservationCancelled(Fact, frozen=True, kw_only=True, tag="ReservationCancelled.v1"):
    """Nothing is kept under this name any more. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    reservation: str
    answers: int
    actor: str
    reason: str = ""


class PolicyUpserted(Fact, frozen=True, kw_only=True, tag="PolicyUpserted.v1"):
    """These rates, sizes and defaults go from here on, in place of those before. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    for_tenant: TenantId | None = None
    """None: the pool's."""
    rate_per_min: int | None = None
    burst: int | None = None
    pending_max: int | None = None
    wish_rate_per_min: int | None = None
    wish_burst: int | None = None
    isolation: IsolationLevel | None = None
    limit_compute_milli: int | None = None
    limit_memory_mib: int | None = None
    limit_cpu_milli: int | None = None
    limit_jobs: int | None = None
    limit_model_milli: dict[str, int] = {}
    on_lowered: OnLowered = OnLowered.KEEP
    pool_pending_max: int | None = None
    buffer_pct: int | None = None
    defaults: dict[WorkloadKind, KindDefaults] = {}
    placement: PlacementRules | None = None
    answers: int
    actor: str
    reason: str = ""


class JobStopping(Fact, frozen=True, kw_only=True, tag="JobStopping.v1"):
    """The job's live runs must end. Written by admission; the placer orders the stops, and nothing more is placed."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    attempt: int
    cause: StopCause
    actor: str
    reason: str = ""
    answers: int = 0
    """Sequence of the wish that this answers; 0 where no wish asked for it."""
    requeue: bool = True
    """False where the job ends with these runs, whatever the cause that they are stopped for."""


class JobHeld(Fact, frozen=True, kw_only=True, tag="JobHeld.v1"):
    """The job isn't placed until it is released; what of it runs, runs on. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    actor: str
    by_operator: bool = False
    """Then its tenant can't release it."""
    reason: str = ""
    answers: int


class JobReleased(Fact, frozen=True, kw_only=True, tag="JobReleased.v1"):
    """The job may be placed again. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    actor: str
    reason: str = ""
    answers: int


class JobSuspended(Fact, frozen=True, kw_only=True, tag="JobSuspended.v1"):
    """The job's runs shall stand still until it is resumed; where it waits, it isn't placed. Written by admission.

    The placer orders the runs; each agent says when nothing of its run moves (RunSuspended).
    """

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    actor: str
    by_operator: bool = False
    """Then its tenant can't resume it."""
    reason: str = ""
    answers: int


class JobResumed(Fact, frozen=True, kw_only=True, tag="JobResumed.v1"):
    """The suspended job goes on. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    actor: str
    reason: str = ""
    answers: int


class JobCheckpointing(Fact, frozen=True, kw_only=True, tag="JobCheckpointing.v1"):
    """The job's started runs shall keep what they have done. By admission; a RunCheckpointed follows for each."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    attempt: int
    actor: str
    reason: str = ""
    answers: int


class JobReprioritized(Fact, frozen=True, kw_only=True, tag="JobReprioritized.v1"):
    """The job has this priority from here on, wherever it waits. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    before: int
    priority: int
    actor: str
    reason: str = ""
    answers: int


class JobResized(Fact, frozen=True, kw_only=True, tag="JobResized.v1"):
    """The job's next attempt has this share of each device; runs of another size are stopped. By admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    compute_milli: int
    memory_mib: int
    """0 means the whole device."""
    compute_milli_before: int
    memory_mib_before: int
    actor: str
    reason: str = ""
    answers: int


class JobRequeued(Fact, frozen=True, kw_only=True, tag="JobRequeued.v1"):
    """The job's attempt is over and it waits for slices again. Written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    attempt: int
    """The next attempt."""
    cause: RunCause
    not_before_at: Instant = 0
    """No run of it is placed before this instant (backoff)."""
    retries_left: int = 0
    avoid_nodes: tuple[NodeId, ...] = ()
    """Nodes on which its attempts failed, where the job asked not to meet them again: none of it is placed there."""
    memory_mib: int = 0
    """Memory of each device from this attempt on, where the last one ran out of it; 0: as before."""
    memory_mib_before: int = 0


class JobWaitExceeded(Fact, frozen=True, kw_only=True, tag="JobWaitExceeded.v1"):
    """The job has waited longer for slices than it said it could; it waits on. By admission, once an attempt."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    attempt: int
    max_wait_s: int
    since_at: Instant
    """From when on it could have been placed."""


class JobSucceeded(Fact, frozen=True, kw_only=True, tag="JobSucceeded.v1"):
    """Every replica ended well. Terminal; written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    attempts: int
    wait_ms: int
    """From the wish to the last attempt's first start."""
    run_ms: int


class JobFailed(Fact, frozen=True, kw_only=True, tag="JobFailed.v1"):
    """The job ended without success. Terminal; written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    attempts: int
    cause: RunCause
    exit_code: int | None = None
    signal: int | None = None
    run_id: RunId | None = None
    """The run that decided it."""
    reason: str = ""
    """In words, where no run decided it."""


class JobCancelled(Fact, frozen=True, kw_only=True, tag="JobCancelled.v1"):
    """The job ended because somebody asked. Terminal; written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    actor: str
    reason: str = ""
    answers: int = 0


class JobExpired(Fact, frozen=True, kw_only=True, tag="JobExpired.v1"):
    """The job's deadline passed before it succeeded. Terminal; written by admission."""

    AUTHOR: ClassVar[Author] = ADMISSION
    job_id: JobId
    deadline_at: int


class LateFactIgnored(Fact, frozen=True, kw_only=True, tag="LateFactIgnored.v1"):
    """A run's fact came when its outcome no longer counted. Written by admission; kept so that nobody wonders."""

    AUTHOR: ClassVar[Author] = ADMISSION
    run_id: RunId
    fact_seq: int
    why: str


class MigPlacement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where on its device a MIG instance lies, in memory slices: it covers ``start`` to ``start + size - 1``."""

    profile: str
    """As in ``1g.10gb``: the name by which the device's agent announced it."""
    start: int
    size: int


class Slice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A share of one device, and how it is enforced."""

    device_uuid: DeviceUuid
    compute_milli: int
    memory_mib: int
    mode: Mode
    mig: MigPlacement | None = None
    """Of a slice in MIG mode: the instance that the agent makes at exactly this place."""
    encoders: int = 0
    """Booked and not enforced, like the next one: percent of the device's encoding capacity."""
    pcie_mbps: int = 0


class Candidate(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way the run could have been placed, with what it scored (higher is better)."""

    node_id: NodeId
    devices: tuple[DeviceUuid, ...]
    score: int
    parts: dict[str, int] = {}


class RunPlaced(Fact, frozen=True, kw_only=True, tag="RunPlaced.v1"):
    """The run shall start on this node and holds these slices from here on. Written by placer; the agent obeys it."""

    AUTHOR: ClassVar[Author] = PLACER
    run_id: RunId
    job_id: JobId
    tenant: TenantId
    node_id: NodeId
    node_epoch: int
    """The agent refuses the order where its node's epoch is another."""
    queue: QueueId = QueueId("")
    """Whose limits the slices count against."""
    slices: tuple[Slice, ...]
    cpu_milli: int = 0
    host_memory_mib: int = 0
    cpu_bind: str = ""
    """``preferred`` or ``strict``: it runs on the CPUs and memory next to its devices; strict never elsewhere."""
    command: tuple[str, ...]
    env: dict[str, str] = {}
    grace_s: int = 10
    checkpoint: CheckpointPlan | None = None
    image: str = ""
    """Given: it is started in a container of it, and command may be empty."""
    candidates: tuple[Candidate, ...] = ()
    """The best few, the chosen one first."""
    excluded: dict[str, int] = {}
    """Why the other nodes were out: reason to count."""
    policy: str = ""
    """Name, version and digest of the policy that chose."""
    topology: str = ""
    """Of a gang that is to be near each other: where this replica is, such as ``rack=r7``."""
    price_micro: int = 0
    """Of a job that bids: what the market asked for a GPU and hour when this was decided (see PriceSet)."""


class RunStopOrdered(Fact, frozen=True, kw_only=True, tag="RunStopOrdered.v1"):
    """The run shall end: asked politely, then after its grace made to. Written by placer; the agent obeys it."""

    AUTHOR: ClassVar[Author] = PLACER
    run_id: RunId
    node_id: NodeId
    cause: StopCause
    grace_s: int
    actor: str
    reason: str = ""
    limit_of: str = ""
    """Where a limit was set below what is held: whose it is, ``queue train`` or ``tenant acme``."""


class RunActionOrdered(Fact, frozen=True, kw_only=True, tag="RunActionOrdered.v1"):
    """Something is asked of a run that goes on: to stand still, to go on, to checkpoint. By placer; the agent obeys."""

    AUTHOR: ClassVar[Author] = PLACER
    run_id: RunId
    node_id: NodeId
    action: RunAction
    actor: str
    reason: str = ""


class PreemptionDecided(Fact, frozen=True, kw_only=True, tag="PreemptionDecided.v1"):
    """Runs are told to stop so that a waiting job can be placed; what they free is kept for it. Written by placer.

    In one batch with a RunStopOrdered for each run. The victims are requeued at no cost.
    """

    AUTHOR: ClassVar[Author] = PLACER
    job_id: JobId
    """The job that waits."""
    kind: PreemptionKind
    victims: tuple[JobId, ...]
    """The jobs that are stopped, the newest first: none of them could be left out."""
    runs: tuple[RunId, ...]
    """All that they run."""
    nodes: tuple[NodeId, ...]
    """Where nothing else is placed until the job is, or until all of that is released and it does not fit."""
    needs: dict[str, int] = {}
    """What each of its replicas needs, and how many there are."""
    frees: dict[str, int] = {}
    """What the victims hold."""
    considered: int = 0
    """Jobs that might have been stopped."""
    rule: str = ""
    """Why it may, in words."""


class GangResized(Fact, frozen=True, kw_only=True, tag="GangResized.v1"):
    """An elastic gang that runs goes on with another number of replicas. Written by placer.

    In one batch with a RunPlaced for each replica that is added, or a RunStopOrdered for each that is told to leave.
    """

    AUTHOR: ClassVar[Author] = PLACER
    job_id: JobId
    before: int
    after: int
    """Replicas that hold slices and were not told to stop."""
    replicas_min: int
    replicas_max: int
    runs: tuple[RunId, ...]
    """Those that come, or leave."""
    for_job: JobId = JobId("")
    """Where it shrinks: for whom; empty where a limit takes back what is beyond it."""


class NodesReserved(Fact, frozen=True, kw_only=True, tag="NodesReserved.v1"):
    """These nodes, and no others, are kept for a reservation, or for the job that has been blocked for longest.

    Stated when they change. Written by placer. Others may be placed there if, by their own time limit, they will have
    left by ``start_at``.
    """

    AUTHOR: ClassVar[Author] = PLACER
    reservation: str = ""
    """Empty where it is for a job."""
    job_id: JobId = JobId("")
    nodes: tuple[NodeId, ...] = ()
    """None: nothing is kept for it any more, or nothing is there that could be."""
    start_at: Instant = 0
    """When the reservation begins, or all that runs there will have left at the latest; 0: nobody can say."""
    end_at: Instant = 0
    late: tuple[NodeId, ...] = ()
    """Of the nodes of a reservation: those where something may run on beyond its beginning."""
    missing: int = 0
    """Nodes that it should have beyond these."""
    is_over: bool = False
    """The reservation has ended."""


class PriceSet(Fact, frozen=True, kw_only=True, tag="PriceSet.v1"):
    """What the pool's market asks for a GPU and hour from here on, of all who run in it alike. Written by placer.

    What the highest bidder that is left out for want of room offers, and never more than any of those who run has bid;
    0 where nobody is left out. Stated when it changes.
    """

    AUTHOR: ClassVar[Author] = PLACER
    price_micro: int
    """Millionths of the pool's currency."""
    before_micro: int
    bids_in: int
    """Jobs that bid, and run."""
    lowest_in_micro: int = 0
    """The least that any of those who run has bid; 0 where none runs."""
    highest_out_micro: int = 0
    """The most that any of those left out has bid; 0 where none is."""


class JobPendingReasonChanged(Fact, frozen=True, kw_only=True, tag="JobPendingReasonChanged.v1"):
    """The job waits for this reason now. Written by placer when the reason changes, not at every round."""

    AUTHOR: ClassVar[Author] = PLACER
    job_id: JobId
    code: Pending
    requested: dict[str, int] = {}
    available: dict[str, int] = {}
    limit: dict[str, int] = {}
    blocking_ids: tuple[str, ...] = ()
    """Who holds what it needs, at most eight, the likeliest to end first."""
    nodes: dict[str, int] = {}
    """Why nodes are out: reason to count."""
    since_at: Instant
    hint: str = ""
    start_low_at: Instant = 0
    """When it may start at the soonest, as runs that hold what it needs are expected to end; 0: nobody can say."""
    start_high_at: Instant = 0
    """When its turn has come at the latest, as those runs end by their time limits; 0: nobody can say."""


class MigProfile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One size of MIG instance that the device offers, as its driver says it."""

    name: str
    """As in ``1g.10gb`` or ``1g.10gb+me``."""
    starts: tuple[int, ...]
    """Where an instance of it may begin, in memory slices."""
    size: int
    """How many memory slices it covers."""
    memory_mib: int
    sms: int
    compute_slices: int
    instances_max: int


class MigInstance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A MIG instance that is there."""

    uuid: str
    """Of the MIG device; another one each time that an instance is made."""
    profile: str
    start: int
    size: int


class Mig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a device that can be partitioned in hardware offers."""

    enabled: bool = False
    """MIG mode is on: it offers instances and nothing else. An operator's doing; Apportion never changes it."""
    memory_slices: int = 0
    compute_slices: int = 0
    profiles: tuple[MigProfile, ...] = ()
    """Sizes and places, also where the mode is off and its driver tells them."""
    foreign: tuple[MigInstance, ...] = ()
    """Instances that none of the pool's runs has: their places are taken, and nobody here destroys them."""


class Device(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device as its node's agent found it."""

    uuid: DeviceUuid
    index: int
    model: str
    memory_mib: int
    """What slices may be made of: the total less what the driver keeps for itself."""
    compute_milli: int = 1000
    sms: int = 0
    arch: str = ""
    compute_capability: str = ""
    numa_node: int = 0
    modes: tuple[Mode, ...]
    """Slice modes whose probe succeeded."""
    health: DeviceHealth = DeviceHealth.HEALTHY
    cpus: tuple[int, ...] = ()
    """CPUs near it; empty where its driver doesn't say."""
    pci_bus_id: str = ""
    pcie_generation: int = 0
    pcie_lanes: int = 0
    """Both as the slot and the board can do at most; 0 where its driver doesn't say."""
    nvlinks: int = 0
    """Links that are up."""
    encoders: int = 0
    """H.264 encoding capacity that is free, in percent of the board's; 0 where it has no encoder."""
    mig: Mig | None = None
    """None where the device can't be partitioned."""
    kind: str = "gpu"
    vendor: str = "nvidia"
    link_group: str = ""
    """Devices of a node with equal groups reach each other over fast links; empty: over the bus alone."""


class NodeRegistered(Fact, frozen=True, kw_only=True, tag="NodeRegistered.v1"):
    """The node's agent is at work with these devices. Written by the agent when it starts, and after each fencing."""

    AUTHOR: ClassVar[Author] = AGENT
    node_id: NodeId
    session: str
    boot_id: str
    epoch: int
    """The node's epoch as the agent knows it: the placer trusts the node where it is the current one."""
    devices: tuple[Device, ...]
    cpu_milli: int
    memory_mib: int
    driver_version: str = ""
    simulated: bool = False
    labels: dict[str, str] = {}
    agent_version: str = ""
    cuda_version: str = ""
    """The newest that the driver runs, as in ``13.0``."""
    capabilities: dict[str, str] = {}
    """What the node's probes found, by probe: which MPS there is, whether memory is limited by cgroup, and so on."""


class DeviceHealthChanged(Fact, frozen=True, kw_only=True, tag="DeviceHealthChanged.v1"):
    """A device's health is another now. Written by the agent."""

    AUTHOR: ClassVar[Author] = AGENT
    node_id: NodeId
    device_uuid: DeviceUuid
    before: DeviceHealth
    after: DeviceHealth
    code: str
    """Such as ``xid-79``."""
    detail: str = ""
    wants_reboot: bool = False
    """Only a reboot of its node mends it; told also where its health stays what it was."""


class Enforced(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One promise of one slice: what was asked, what was set, what was read back, and who enforces it."""

    device_uuid: DeviceUuid
    """Empty where the promise is the host's."""
    what: str
    """``memory``, ``compute`` or ``fault_domain`` of a device; of the host ``host_memory`` (MiB), ``host_cpu``
    (thousandths of a CPU), ``host_cpus`` (how many it is kept to) or ``host_processes``."""
    asked: int
    applied: int
    observed: int
    by: str


class RunStarted(Fact, frozen=True, kw_only=True, tag="RunStarted.v1"):
    """The run's process is running within its slices. Written by the agent; it states this once for a run."""

    AUTHOR: ClassVar[Author] = AGENT
    run_id: RunId
    node_id: NodeId
    pid: int
    started_at: Instant
    """By the node's clock."""
    enforced: tuple[Enforced, ...] = ()
    cpus: tuple[int, ...] = ()


class RunFinished(Fact, frozen=True, kw_only=True, tag="RunFinished.v1"):
    """The run's process is gone, or never came to be. Written by the agent; it states this once for a run."""

    AUTHOR: ClassVar[Author] = AGENT
    run_id: RunId
    node_id: NodeId
    cause: RunCause
    exit_code: int | None = None
    signal: int | None = None
    was_started: bool = True
    started_at: Instant = 0
    finished_at: Instant
    peak_memory_mib: int | None = None
    """Most device memory that was seen in use, over all its devices; None where nobody looked."""
    detail: str = ""


class RunSuspended(Fact, frozen=True, kw_only=True, tag="RunSuspended.v1"):
    """Every process of the run was seen to stand still. Written by the agent; what is on the device stays there."""

    AUTHOR: ClassVar[Author] = AGENT
    run_id: RunId
    node_id: NodeId
    suspended_at: Instant
    processes: int


class RunResumed(Fact, frozen=True, kw_only=True, tag="RunResumed.v1"):
    """The run's processes go on. Written by the agent."""

    AUTHOR: ClassVar[Author] = AGENT
    run_id: RunId
    node_id: NodeId
    resumed_at: Instant
    processes: int


class RunCheckpointed(Fact, frozen=True, kw_only=True, tag="RunCheckpointed.v1"):
    """The run was told to checkpoint, and this came of it. Written by the agent."""

    AUTHOR: ClassVar[Author] = AGENT
    run_id: RunId
    node_id: NodeId
    is_done: bool
    """It said so within its grace. What it said follows, and is believed to be no more than that."""
    finished_at: Instant
    duration_ms: int
    """From the signal to the report, or to the end of the grace."""
    uri: str = ""
    step: int | None = None
    bytes: int | None = None
    detail: str = ""
    """Why not, where it is not done."""


class RunReleased(Fact, frozen=True, kw_only=True, tag="RunReleased.v1"):
    """Nothing of the run is left on its devices: its slices are free. Written by the agent."""

    AUTHOR: ClassVar[Author] = AGENT
    run_id: RunId
    node_id: NodeId
    released_at: Instant


class NodeSuspected(Fact, frozen=True, kw_only=True, tag="NodeSuspected.v1"):
    """The node has been silent for longer than it should. Written by monitor; nothing new is placed on it."""

    AUTHOR: ClassVar[Author] = MONITOR
    node_id: NodeId
    epoch: int
    silent_ms: int
    """By the monitor's monotonic clock, from the last heartbeat's receipt."""
    lease_ms: int


class NodeTrusted(Fact, frozen=True, kw_only=True, tag="NodeTrusted.v1"):
    """A suspected node spoke before its lease ended. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    node_id: NodeId
    epoch: int
    silent_ms: int


class NodeLost(Fact, frozen=True, kw_only=True, tag="NodeLost.v1"):
    """The node's lease ended without a sign of it. Written by monitor, in one batch with NodeFenced."""

    AUTHOR: ClassVar[Author] = MONITOR
    node_id: NodeId
    silent_ms: int
    lease_ms: int
    rule: str


class NodeFenced(Fact, frozen=True, kw_only=True, tag="NodeFenced.v1"):
    """Runs of older epochs on the node no longer count, and their slices are free. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    node_id: NodeId
    epoch: int
    """The new epoch: the node is used again once its agent registers with it, having stopped what is older."""
    runs: tuple[RunId, ...] = ()
    reason: str = ""


class NodeRecovered(Fact, frozen=True, kw_only=True, tag="NodeRecovered.v1"):
    """A fenced node registered with its new epoch and is used again. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    node_id: NodeId
    epoch: int
    away_ms: int


class NodeCordoned(Fact, frozen=True, kw_only=True, tag="NodeCordoned.v1"):
    """Nothing new is placed on the node; what runs, runs on. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    node_id: NodeId
    actor: str
    reason: str
    answers: int = 0
    rule: NodeRule | None = None
    """The monitor's own rule; None where an operator asked."""
    evidence: tuple[str, ...] = ()
    """The runs, or the events, that the rule went by."""
    steady_ms: int = 0
    """Of a flapping node: it is used again once it was heard without a gap for so long."""


class NodeDraining(Fact, frozen=True, kw_only=True, tag="NodeDraining.v1"):
    """Nothing new is placed on the node, and its runs move elsewhere. By monitor; the placer orders the stops."""

    AUTHOR: ClassVar[Author] = MONITOR
    node_id: NodeId
    actor: str
    reason: str
    deadline_at: Instant
    answers: int = 0


class NodeUncordoned(Fact, frozen=True, kw_only=True, tag="NodeUncordoned.v1"):
    """The node is used again. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    node_id: NodeId
    actor: str
    reason: str
    answers: int = 0
    rule: NodeRule | None = None
    """The monitor's own rule, by which it had cordoned the node; None where an operator asked."""


class IsolationTestStarted(Fact, frozen=True, kw_only=True, tag="IsolationTestStarted.v1"):
    """The node's agent shall try the device's isolation once no run holds it. Written by monitor.

    The device takes no new run meanwhile; three IsolationVerdicts follow, one for each test.
    """

    AUTHOR: ClassVar[Author] = MONITOR
    test_id: str
    node_id: NodeId
    device_uuid: DeviceUuid
    mode: Mode
    actor: str
    reason: str = ""
    answers: int


class IsolationCheck(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One check of an isolation test, with what was measured and what its control measured without enforcement."""

    name: str
    verdict: IsolationFinding
    figures: dict[str, int] = {}
    """By name, which ends in the unit."""
    control: dict[str, int] = {}
    detail: str = ""


class IsolationVerdict(Fact, frozen=True, kw_only=True, tag="IsolationVerdict.v1"):
    """What an isolation test of a device came to, with its figures. Written by the agent that tried it."""

    AUTHOR: ClassVar[Author] = AGENT
    test_id: str
    node_id: NodeId
    device_uuid: DeviceUuid
    mode: Mode
    test: IsolationTest
    verdict: IsolationFinding
    """The worst of its checks; reported figures count for nothing."""
    checks: tuple[IsolationCheck, ...]
    model: str = ""
    driver_version: str = ""
    cuda_version: str = ""
    simulated: bool = False
    started_at: Instant
    finished_at: Instant


class ControlPlaneFrozen(Fact, frozen=True, kw_only=True, tag="ControlPlaneFrozen.v1"):
    """So much of the fleet is silent that the monitor doubts itself: nothing is fenced or placed. By monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    silent: int
    nodes: int


class ControlPlaneThawed(Fact, frozen=True, kw_only=True, tag="ControlPlaneThawed.v1"):
    """The control plane goes on: the fleet speaks again, or those silent are taken for gone. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    silent: int
    nodes: int
    why: Thaw = Thaw.HEARD
    presumed_lost: tuple[NodeId, ...] = ()
    """Nodes whose silence no longer freezes anything: they are fenced once their lease has ended."""
    frozen_ms: int = 0
    """For how long the monitor had listened meanwhile."""
    actor: str = ""
    reason: str = ""
    answers: int = 0


class MigrationCompleted(Fact, frozen=True, kw_only=True, tag="MigrationCompleted.v1"):
    """A job that lost its place runs again, all of its replicas. Written by monitor.

    It had been stopped by what is no doing of its own: a lost node, a device's fault, a drain.
    """

    AUTHOR: ClassVar[Author] = MONITOR
    job_id: JobId
    attempt: int
    """The one that runs now."""
    cause: RunCause
    from_nodes: tuple[NodeId, ...]
    to_nodes: tuple[NodeId, ...]
    downtime_ms: int
    """From the last moment in which all of it ran, as far as anybody heard, to the start of its last replica."""
    lost_work_s: int
    """What the stopped attempt has to do again, on the clock, not summed over replicas: since all of it ran, or since
    the last checkpoint that each of its replicas made when told to."""
    kept_work_s: int = 0
    """What it did before, and that checkpoint keeps."""


class RateCardChanged(Fact, frozen=True, kw_only=True, tag="RateCardChanged.v1"):
    """Use is charged so from this instant on, until the next card's. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    effective_at: Instant
    currency: str
    rates: tuple[Rate, ...]
    actor: str
    reason: str
    answers: int = 0


class AuditQueryRun(Fact, frozen=True, kw_only=True, tag="AuditQueryRun.v1"):
    """Somebody asked the event log this. Written by monitor before the answer is given: no record, no answer."""

    AUTHOR: ClassVar[Author] = MONITOR
    query_id: str
    actor: str
    """Who asked, as they named themselves: information, never a permission."""
    statement: str
    """Its first 4,096 characters."""
    statement_sha256: str
    """Of the whole statement."""
    rows: int = 0
    """How many were given."""
    truncated: bool = False
    elapsed_ms: int
    age_ms: int
    """How old the copy was that was asked, once the answer was there."""
    log_ordinal: int
    """The newest row of the log that the copy held."""
    refused: str = ""
    """Why there was no answer; empty where there was one."""


class LogSealOrdered(Fact, frozen=True, kw_only=True, tag="LogSealOrdered.v1"):
    """Days of the log that ended by this instant become sealed segments. Written by monitor.

    Nothing that the log says changes by it. Each log of the pool seals its own rows, once they are signed.
    """

    AUTHOR: ClassVar[Author] = MONITOR
    before_at: Instant
    actor: str
    reason: str
    answers: int
    """0: ordered by the retention in force, which ``caused_by`` names."""


class LegalHoldPlaced(Fact, frozen=True, kw_only=True, tag="LegalHoldPlaced.v1"):
    """Nothing of this is erased or dropped from the log until the hold is released. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    hold_id: str
    tenant: str | None = None
    job_id: JobId | None = None
    since_at: Instant = 0
    until_at: Instant = 0
    """0: no end."""
    actor: str
    reason: str
    answers: int


class LegalHoldReleased(Fact, frozen=True, kw_only=True, tag="LegalHoldReleased.v1"):
    """A hold on the log has ended. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    hold_id: str
    actor: str
    reason: str
    answers: int


class PayloadEraseOrdered(Fact, frozen=True, kw_only=True, tag="PayloadEraseOrdered.v1"):
    """The log forgets this payload, and keeps its digest, so that the chain still holds. Written by monitor.

    A row without its payload is good where such a fact names it. Where a hold keeps it, it stays until that ends.
    """

    AUTHOR: ClassVar[Author] = MONITOR
    stream: RowOf
    stream_seq: int
    job_id: JobId
    recorded_at: Instant
    actor: str
    reason: str
    answers: int


class PayloadsEraseOrdered(Fact, frozen=True, kw_only=True, tag="PayloadsEraseOrdered.v1"):
    """The log forgets what jobs that had ended by this instant had said, by the retention in force. Written by monitor.

    The payloads of their JobRequested, JobAdmitted and RunPlaced; digests stay, so that the chain still holds. What a
    hold keeps stays until that ends.
    """

    AUTHOR: ClassVar[Author] = MONITOR
    before_at: Instant
    actor: str
    """Who set the retention."""
    reason: str


class LogRetentionChanged(Fact, frozen=True, kw_only=True, tag="LogRetentionChanged.v1"):
    """The log is kept so from here on. Written by monitor, which orders by itself what is due each midnight (UTC)."""

    AUTHOR: ClassVar[Author] = MONITOR
    payload_days: int = 0
    """What a job said is kept for so many days after its end; 0: for ever."""
    seal_daily: bool = False
    actor: str
    reason: str
    answers: int


class KeyChanged(Fact, frozen=True, kw_only=True, tag="KeyChanged.v1"):
    """Who is let in on the bus has changed: a role was given, kept by a new key, or taken. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    change: KeyChange
    role: str
    of: str = ""
    public: str
    actor: str
    reason: str
    answers: int


class FaultInjected(Fact, frozen=True, kw_only=True, tag="FaultInjected.v1"):
    """This is broken on purpose until then. Written by monitor; the supervisor of the machine does it."""

    AUTHOR: ClassVar[Author] = MONITOR
    fault_id: str
    kind: FaultKind
    target: str = ""
    for_s: int
    until_at: Instant
    seed: int = 0
    xid: int | None = None
    allow_real: bool = False
    actor: str
    reason: str
    answers: int


class FaultCleared(Fact, frozen=True, kw_only=True, tag="FaultCleared.v1"):
    """A fault has ended: what it broke is mended, as far as that is anybody's to do. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    fault_id: str
    kind: FaultKind
    target: str = ""
    why: FaultEnd
    actor: str = ""
    reason: str = ""
    answers: int = 0


class AlertRaised(Fact, frozen=True, kw_only=True, tag="AlertRaised.v1"):
    """Something is as a rule says it should not be, and has been for long enough. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    rule: str
    about: str = ""
    """Which device, node, queue, class or consumer; empty where it is the pool."""
    severity: Severity
    value: int
    threshold: int
    unit: str
    """Of both, such as ``s`` or ``pct``."""
    for_s: int = 0
    """How long it had been so."""
    summary: str
    action: str = ""


class AlertCleared(Fact, frozen=True, kw_only=True, tag="AlertCleared.v1"):
    """What an alert was about is well again, and has been for long enough. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    rule: str
    about: str = ""
    value: int | None = None
    """None where it isn't measured any more."""
    threshold: int
    """It is well at or below this, which is less than what raised it."""
    raised_seq: int
    """Sequence of the AlertRaised."""


class AlertAcknowledged(Fact, frozen=True, kw_only=True, tag="AlertAcknowledged.v1"):
    """Somebody looks at the alert, until then. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    rule: str
    about: str = ""
    until_at: Instant
    actor: str
    reason: str
    answers: int


class AlertSilenced(Fact, frozen=True, kw_only=True, tag="AlertSilenced.v1"):
    """Nobody is told of the rule's alerts until then; they are raised and cleared all the same. Written by monitor."""

    AUTHOR: ClassVar[Author] = MONITOR
    rule: str
    about: str = ""
    """Empty: whatever the rule is about."""
    until_at: Instant
    actor: str
    reason: str
    answers: int


JobWish = (
    JobRequested
    | JobCancelRequested
    | JobHoldRequested
    | JobReleaseRequested
    | JobReprioritizeRequested
    | JobPreemptRequested
    | JobResizeRequested
    | JobSuspendRequested
    | JobResumeRequested
    | JobCheckpointRequested
    | QueueUpsertRequested
    | ReservationRequested
    | ReservationCancelRequested
    | PolicyUpsertRequested
)
NodeWish = NodeDrainRequested | NodeCordonRequested | NodeUncordonRequested | IsolationTestRequested
MonitorWish = (
    NodeWish
    | ControlPlaneThawRequested
    | RateCardChangeRequested
    | AlertAcknowledgeRequested
    | AlertSilenceRequested
    | FaultInjectionRequested
    | FaultClearRequested
    | LogSealRequested
    | LegalHoldRequested
    | LegalHoldReleaseRequested
    | PayloadEraseRequested
    | LogRetentionChangeRequested
    | KeyChangeRequested
)
AnyWish = JobWish | MonitorWish

JobFact = (
    JobAdmitted
    | JobRejected
    | JobDuplicate
    | WishRejected
    | WishJudged
    | QueueUpserted
    | ReservationAdmitted
    | ReservationCancelled
    | PolicyUpserted
    | JobHeld
    | JobReleased
    | JobSuspended
    | JobResumed
    | JobCheckpointing
    | JobReprioritized
    | JobResized
    | JobStopping
    | JobRequeued
    | JobWaitExceeded
    | JobSucceeded
    | JobFailed
    | JobCancelled
    | JobExpired
    | LateFactIgnored
)
PlacerFact = (
    RunPlaced
    | RunStopOrdered
    | RunActionOrdered
    | PreemptionDecided
    | GangResized
    | NodesReserved
    | PriceSet
    | JobPendingReasonChanged
)
AgentFact = (
    NodeRegistered
    | DeviceHealthChanged
    | RunStarted
    | RunSuspended
    | RunResumed
    | RunCheckpointed
    | RunFinished
    | RunReleased
    | IsolationVerdict
)
MonitorFact = (
    NodeWishRejected
    | NodeWishJudged
    | IsolationTestStarted
    | NodeSuspected
    | NodeTrusted
    | NodeLost
    | NodeFenced
    | NodeRecovered
    | NodeCordoned
    | NodeDraining
    | NodeUncordoned
    | ControlPlaneFrozen
    | ControlPlaneThawed
    | MigrationCompleted
    | FaultInjected
    | FaultCleared
    | AlertRaised
    | AlertCleared
    | AlertAcknowledged
    | AlertSilenced
    | RateCardChanged
    | AuditQueryRun
    | LogSealOrdered
    | LegalHoldPlaced
    | LegalHoldReleased
    | PayloadEraseOrdered
    | PayloadsEraseOrdered
    | LogRetentionChanged
    | KeyChanged
)
AnyFact = LeaseClaimed | JobFact | PlacerFact | AgentFact | MonitorFact

WISHES: Final[tuple[type[Wish], ...]] = AnyWish.__args__
FACTS: Final[tuple[type[Fact], ...]] = AnyFact.__args__
TERMINAL: Final = (JobSucceeded, JobFailed, JobCancelled, JobExpired)
"""A job is terminal once, and stays so."""


def type_name(kind: type[Event]) -> str:
    """The wire name of an event type.

    >>> type_name(JobRequested)
    'JobRequested.v1'
    """
    return str(kind.__struct_config__.tag)


def is_operator(tenant: TenantId) -> bool:
    """True for the principal that runs the pool."""
    return tenant == OPERATOR
