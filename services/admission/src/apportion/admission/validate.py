"""The rules of one job request by itself: what its fields mean together, and every default filled in.

Knows nothing of tenants, queues or other jobs; types, ranges and grammars were checked when the request was decoded.
A field that placer and agents can't honour yet is refused by name: silently ignoring it would change what was asked.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from apportion.admission.learned import RUNS_MIN, Learned, corrected
from apportion.admission.model_spec import ModelSpecInvalid, parse_model
from apportion.admission.refusals import Refused, bounded
from apportion.admission.sizing import METHOD_VERSION, Parts, estimate
from apportion.admission.where import Demands, demands_of, share_of_profile
from apportion.contracts.causes import Mode, Refusal, RunCause, ServiceClass, WorkloadKind
from apportion.contracts.codec import instant_from_timestamp
from apportion.contracts.diagnosis import shown
from apportion.contracts.events import (
    Checkpoint,
    CheckpointPlan,
    Correction,
    Elastic,
    IsolationLevel,
    JobRequested,
    JobSpec,
    SecretRef,
    Sized,
    Workload,
)
from apportion.contracts.ids import QueueId
from apportion.contracts.units import MILLI_PER_DEVICE

MEMORY_MIB_MAX: Final = 2_147_483_647
DEVICES_MAX: Final = 1024
REPLICAS_MAX: Final = 900
"""A gang is placed by one batch of facts, of which the bus takes at most 1,000."""
INSTANT_MAX: Final = 9_223_372_036_854_775_807

RESERVED_ENV: Final = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "LD_AUDIT", "LD_PRELOAD")
"""Names with which a process could leave its slice, or look as if it had."""
RESERVED_ENV_PREFIXES: Final = ("APPORTION_", "CUDA_MPS_", "NVIDIA_")

SERVICE_CLASSES: Final[Mapping[WorkloadKind, ServiceClass]] = {
    WorkloadKind.TRAINING: ServiceClass.STANDARD,
    WorkloadKind.INFERENCE: ServiceClass.ONLINE,
    WorkloadKind.BATCH: ServiceClass.BATCH,
    WorkloadKind.INTERACTIVE: ServiceClass.STANDARD,
    WorkloadKind.HPC: ServiceClass.STANDARD,
}
MODES_SUPPORTED: Final = (Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE, Mode.MIG)
NO_RETRY_CAUSES: Final = (RunCause.SUCCESS, RunCause.CANCELLED, RunCause.DEPENDENCY_FAILED)
"""Ends after which nobody can want another attempt."""
GRACE_S_DEFAULT: Final = 10
BUFFER_PCT: Final = 10
BUFFER_PCT_MIN: Final = 10
BUFFER_PCT_MAX: Final = 20
"""What is booked above the p95 of a model's size: nothing else on the device may grow into it."""
SIZING: Final = METHOD_VERSION


class ShareDefaults(Struct, frozen=True):
    """What a share of a device is, where the request says only half of it."""

    compute_milli: int
    memory_mib: int


DEFAULT_SHARES: Final[Mapping[WorkloadKind, ShareDefaults]] = {
    WorkloadKind.TRAINING: ShareDefaults(compute_milli=800, memory_mib=32_768),
    WorkloadKind.INFERENCE: ShareDefaults(compute_milli=200, memory_mib=4_096),
    WorkloadKind.BATCH: ShareDefaults(compute_milli=800, memory_mib=32_768),
    WorkloadKind.INTERACTIVE: ShareDefaults(compute_milli=200, memory_mib=4_096),
    WorkloadKind.HPC: ShareDefaults(compute_milli=800, memory_mib=32_768),
}


MODES_OF_LEVEL: Final[Mapping[IsolationLevel, tuple[Mode, ...]]] = {
    IsolationLevel.NONE: (Mode.MPS, Mode.MIG, Mode.TIMESLICE, Mode.EXCLUSIVE),
    # Time slices have a watchdog alone, which acts once a neighbour has taken too much.
    IsolationLevel.MEMORY: (Mode.MIG, Mode.MPS, Mode.EXCLUSIVE),
    IsolationLevel.FAULT: (Mode.MIG, Mode.EXCLUSIVE),
    IsolationLevel.DEDICATED: (Mode.EXCLUSIVE,),
    IsolationLevel.CONFIDENTIAL: (Mode.EXCLUSIVE,),
}
"""Modes that keep neighbours from what the level names (DESIGN: a slice is three promises)."""

DEFAULT_MODES: Final[Mapping[WorkloadKind, tuple[Mode, ...]]] = {
    WorkloadKind.TRAINING: (Mode.MIG, Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE),
    WorkloadKind.INFERENCE: (Mode.MPS, Mode.MIG, Mode.TIMESLICE),
    WorkloadKind.BATCH: (),
    WorkloadKind.INTERACTIVE: (),
    WorkloadKind.HPC: (),
}
"""What each kind prefers for a share of a device; empty: whatever the pool prefers."""


class Defaults(Struct, frozen=True, kw_only=True):
    """What a request that leaves something open gets."""

    shares: Mapping[WorkloadKind, ShareDefaults]
    modes: Mapping[WorkloadKind, tuple[Mode, ...]]
    isolation: IsolationLevel = IsolationLevel.NONE
    """The least that its tenant is bound to."""


DEFAULTS: Final = Defaults(shares=DEFAULT_SHARES, modes=DEFAULT_MODES)


def sized(
    request: JobRequested, learned: Learned | None = None, buffer_pct: int = BUFFER_PCT
) -> Sized | Refused | None:
    """What the request's model needs on each device, corrected by what was learned; None where it names none.

    Books the device's 95th percentile and a buffer, unless the request says itself how much memory it wants.
    """
    if request.model is None:
        return None
    try:
        sizing = estimate(parse_model(msgspec.to_builtins(request.model)))
    except ModelSpecInvalid as err:
        return Refused(
            code=err.code,
            field=err.path,
            expected=bounded(err.expected),
            found="nothing" if err.found is None else shown(err.found),
        )
    found = corrected(learned or Learned(), sizing, sizing.family)
    needed_mib = -(-found.memory_mib_p95_device * (100 + buffer_pct) // 100)
    asked_mib = request.resources.gpu_memory_mib
    if asked_mib is None and needed_mib > MEMORY_MIB_MAX:
        return Refused(
            code=Refusal.FIELD_INVALID,
            field="model",
            expected=f"a model of at most {MEMORY_MIB_MAX} MiB a device",
            found=f"{needed_mib} MiB",
        )
    return Sized(
        memory_mib_p50=found.memory_mib_p50,
        memory_mib_p95=found.memory_mib_p95,
        memory_mib_p95_device=found.memory_mib_p95_device,
        booked_mib=needed_mib if asked_mib is None else asked_mib,
        parts={part: mib for part in Parts.__struct_fields__ if (mib := getattr(sizing.parts, part))},
        method=found.method,
        buffer_pct=buffer_pct,
        family=sizing.family,
        memory_mib_device=sizing.memory_mib_device,
        correction=None
        if found.runs < RUNS_MIN
        else Correction(
            runs=found.runs,
            ratio_bp=found.ratio_bp,
            memory_mib_p50_before=sizing.memory_mib_p50,
            memory_mib_p95_before=sizing.memory_mib_p95,
        ),
    )


def job_spec(
    request: JobRequested,
    now: int,
    defaults: Defaults = DEFAULTS,
    size: Sized | None = None,
) -> JobSpec | Refused:
    """The request with every default filled in, or the first reason why it can't be honoured.

    ``size`` is what ``sized`` said of the request's model.
    """
    refused = refusal(request, now)
    if refused is not None:
        return refused
    demands = demands_of(request)
    if isinstance(demands, Refused):
        return demands
    share = _isolated(request, _share(request, demands, defaults.shares, size), defaults)
    if isinstance(share, Refused):
        return share
    # Who bids takes part in the market for what the other classes leave.
    usual = SERVICE_CLASSES[request.workload.kind] if request.bid is None else ServiceClass.SPOT
    service_class = request.service_class or usual
    resources, env = request.resources, request.workload.env
    least, most, step = _replicas(request)
    return JobSpec(
        queue=QueueId(request.queue),
        kind=request.workload.kind,
        command=request.workload.command,
        image=request.workload.image or "",
        env={name: value for name, value in env.items() if isinstance(value, str)} if env else {},
        service_class=service_class,
        priority=500 if request.priority is None else request.priority,
        preemptible=service_class is not ServiceClass.ONLINE if request.preemptible is None else request.preemptible,
        replicas=most,
        replicas_min=least if least < most else 0,
        replicas_step=step,
        topology_key=request.gang.topology_key or "",
        topology_required=bool(request.gang.required),
        devices=share.devices,
        compute_milli=share.compute_milli,
        memory_mib=share.memory_mib,
        mode=share.mode,
        modes=share.modes,
        dedicated=share.dedicated,
        isolation=share.isolation,
        models=demands.models,
        device_kind=demands.device_kind if share.devices else "gpu",
        vendor=demands.vendor,
        min_arch=demands.min_arch,
        min_compute_capability=demands.min_compute_capability,
        min_driver=demands.min_driver,
        min_cuda=demands.min_cuda,
        required=demands.required | ({CONTAINERS: "yes"} if request.workload.image else {}),
        preferred=demands.preferred,
        avoid_nodes=demands.avoid_nodes,
        numa=demands.numa,
        linked=demands.linked,
        distinct=demands.distinct,
        mig_profile=demands.mig_profile,
        encoders=demands.encoders,
        pcie_mbps=demands.pcie_mbps,
        cpu_milli=resources.cpu_milli or 0,
        host_memory_mib=resources.memory_mib or 0,
        cpu_bind=bool(resources.cpu_bind and share.devices),
        time_limit_s=request.time_limit_s or 0,
        not_before_at=_instant(request.not_before),
        deadline_at=_instant(request.deadline),
        retry_limit=request.retry.limit,
        retry_on=request.retry.on,
        backoff_s=request.retry.backoff_s,
        avoid_same_node=bool(request.retry.avoid_same_node),
        memory_factor_pct=request.retry.memory_factor_pct or 100,
        grace_s=GRACE_S_DEFAULT if request.grace_s is None else request.grace_s,
        checkpoint=_checkpoint_plan(request.checkpoint),
        min_runtime_s=request.min_runtime_s or 0,
        max_wait_s=request.max_wait_s or 0,
        latency_ms=0 if request.sla is None else request.sla.latency_ms or 0,
        bid_micro=0 if request.bid is None else request.bid.max_price_micro_per_gpu_hour,
        labels=request.labels,
    )


def refusal(request: JobRequested, now: int) -> Refused | None:
    """The first reason why the request can't be honoured, whoever sends it; None where it can."""
    return None if _is_ordinary(request) else refusal_by_rules(request, now)


def refusal_by_rules(request: JobRequested, now: int) -> Refused | None:
    """The same, rule by rule."""
    return (
        _unsupported(request)
        or _workload(request)
        or _resources(request)
        or _retry_and_gang(request)
        or _bid(request)
        or _instants(request, now)
        or _checkpoint(request.checkpoint)
    )


_NO_GANG: Final = JobRequested(queue="main", workload=Workload()).gang
"""What a request that doesn't name a gang holds: the same object each time."""


def _is_ordinary(request: JobRequested) -> bool:
    """True where nothing is asked that could be refused: one look, at what nearly all requests are.

    False says nothing yet. That the look lets nothing pass which the rules would refuse is for the tests to show.
    """
    workload, resources = request.workload, request.resources
    command, env, mode, gpu, milli = workload.command, workload.env, resources.mode, resources.gpu, resources.gpu_milli
    return (
        (milli is not None or gpu is not None or resources.gpu_memory_mib is not None)
        and (milli is None or (gpu is None and mode is not Mode.EXCLUSIVE))
        and mode is not Mode.MIG
        and bool(command and command[0])
        and request.gang is _NO_GANG
        and not request.retry.on
        and request.model is None
        and request.not_before is None
        and request.deadline is None
        and request.job_set is None
        and request.elastic is None
        and request.sla is None
        and request.bid is None
        and request.checkpoint is None
        and request.placement is None
        and request.runtime is None
        and request.data is None
        and workload.image is None
        and not workload.mounts
        and resources.device is None
        and resources.mig_profile is None
        and resources.disk_mib is None
        and resources.encoders is None
        and resources.pcie_mbps is None
        and resources.numa is None
        and resources.cpu_bind is None
        and (not env or _is_ordinary_env(env))
    )


def _is_ordinary_env(env: Mapping[str, str | SecretRef]) -> bool:
    for name, value in env.items():  # noqa: SIM110 - a generator would cost as much as all else that is looked at
        if type(value) is not str or _is_reserved(name):
            return False
    return True


@functools.lru_cache(maxsize=1024)
def _is_reserved(name: str) -> bool:
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def _unsupported(request: JobRequested) -> Refused | None:
    for field, found in _asked_and_unsupported(request):
        return Refused(
            code=Refusal.NOT_SUPPORTED, field=field, expected=_INSTEAD.get(field, "nothing"), found=bounded(found)
        )
    return None


_INSTEAD: Final[Mapping[str, str]] = {
    "checkpoint.interval_s": "a program that keeps its own time, or `apportion checkpoint` when it suits you",
}


def _asked_and_unsupported(request: JobRequested) -> Iterator[tuple[str, str]]:
    """Fields that ask for something which nobody can give yet. A zero, ``none`` or ``false`` asks for nothing."""
    workload, resources = request.workload, request.resources
    for name, value in workload.env.items():
        if isinstance(value, SecretRef):
            yield f"workload.env.{name}", f"secret {value.secret}"
    if workload.mounts:
        yield "workload.mounts", f"{len(workload.mounts)} mounts"
    if resources.disk_mib:
        yield "resources.disk_mib", str(resources.disk_mib)
    if request.job_set is not None:
        yield "job_set", request.job_set
    if request.runtime is not None and request.runtime.framework is not None:
        yield "runtime.framework", request.runtime.framework
    if request.checkpoint is not None and request.checkpoint.interval_s is not None:
        yield "checkpoint.interval_s", str(request.checkpoint.interval_s)
    for field in ("sla", "bid", "data"):
        yield from (part for part in _parts_asked(field, getattr(request, field)) if part[0] not in _HONOURED)


_HONOURED: Final = frozenset({"sla.latency_ms", "bid.max_price_micro_per_gpu_hour"})
"""Parts of objects of which the others can't be."""


def _parts_asked(field: str, asked: Struct | None) -> Iterator[tuple[str, str]]:
    """What is asked for in an object; an empty one asks for nothing."""
    if asked is None:
        return
    for part in asked.__struct_fields__:
        value = getattr(asked, part)
        if value not in {None, ()} if isinstance(value, str | int | tuple | None) else bool(value):
            yield f"{field}.{part}", shown(value if isinstance(value, str | int) else msgspec.to_builtins(value))


def _workload(request: JobRequested) -> Refused | None:
    command = request.workload.command
    if not command and request.workload.image is None:
        return Refused(
            code=Refusal.FIELD_MISSING,
            field="workload.command",
            expected="the program and its arguments, as an array of strings",
            found="nothing",
            hint="Only an image has a program of its own.",
        )
    if command and not command[0]:
        return Refused(
            code=Refusal.FIELD_INVALID, field="workload.command[0]", expected="a program", found="an empty string"
        )
    for name in request.workload.env:
        if _is_reserved(name):
            return Refused(
                code=Refusal.FIELD_INVALID,
                field=f"workload.env.{name}",
                expected="a name that the node does not set itself",
                found=name,
                hint="Leave it out: the node sets what confines the job to its slice.",
            )
    return None


def _resources(request: JobRequested) -> Refused | None:
    resources = request.resources
    is_cpu_only = resources.device is not None and resources.device.kind == "cpu"
    shares = (resources.gpu, resources.gpu_milli, resources.gpu_memory_mib)
    if is_cpu_only:
        if any(share is not None for share in shares) or resources.mode is not None or request.model is not None:
            return Refused(
                code=Refusal.FIELD_CONFLICT,
                field="resources.device.kind",
                expected="gpu, since a share of a GPU is asked",
                found="cpu",
            )
        if not resources.cpu_milli:
            return Refused(
                code=Refusal.FIELD_MISSING,
                field="resources.cpu_milli",
                expected="at least 1, for a job without a device",
                found=str(resources.cpu_milli or "nothing"),
            )
        return None
    if request.model is not None and request.model.tensor_parallel is not None:
        conflict = _parallel(request, request.model.tensor_parallel)
        if conflict is not None:
            return conflict
    if request.model is None and resources.mig_profile is None and all(share is None for share in shares):
        return Refused(
            code=Refusal.FIELD_MISSING,
            field="resources.gpu",
            expected="one of resources.gpu, gpu_milli, gpu_memory_mib, mig_profile (all in resources) and model",
            found="none of them",
            hint="Say how many devices or which share of one; a job without any says resources.device.kind: cpu.",
        )
    if resources.gpu is not None and resources.gpu > 1 and resources.gpu_milli is not None:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="resources.gpu_milli",
            expected="nothing beside gpu above 1",
            found=f"gpu {resources.gpu} and gpu_milli {resources.gpu_milli}",
            hint="A share is of one device: ask for whole devices, or make the job a gang of shares.",
        )
    if resources.mode is Mode.EXCLUSIVE and (resources.gpu_milli or MILLI_PER_DEVICE) < MILLI_PER_DEVICE:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="resources.mode",
            expected="mps or timeslice beside gpu_milli below 1000",
            found=f"exclusive and gpu_milli {resources.gpu_milli}",
            hint="An exclusive device is a whole one: ask for gpu 1, or let the mode out.",
        )
    return None


def _parallel(request: JobRequested, ways: int) -> Refused | None:
    """Why a model that is spread over devices can't have those that are asked for."""
    resources = request.resources
    if ways > 1 and resources.gpu_milli is not None:
        field, found = "resources.gpu_milli", f"gpu_milli {resources.gpu_milli} and tensor_parallel {ways}"
        expected = "nothing beside a model that is spread over devices"
    elif resources.gpu is not None and resources.gpu < ways:
        field, found = "resources.gpu", str(resources.gpu)
        expected = f"at least model.tensor_parallel, {ways}"
    elif ways > DEVICES_MAX:
        field, found, expected = "model.tensor_parallel", str(ways), f"at most {DEVICES_MAX}"
    else:
        return None
    return Refused(code=Refusal.FIELD_CONFLICT, field=field, expected=expected, found=found)


def resized(spec: JobSpec, compute_milli: int | None, memory_mib: int | None) -> JobSpec | Refused:
    """The specification with another share of each device, or why the job can't have it. None stays as it is."""
    if compute_milli is None and memory_mib is None:
        return Refused(
            code=Refusal.FIELD_MISSING,
            field="gpu_milli",
            expected="at least one of gpu_milli and gpu_memory_mib",
            found="none of them",
            hint="Say what the job shall have instead of what it has.",
        )
    if spec.devices == 0:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="gpu_milli" if compute_milli is not None else "gpu_memory_mib",
            expected="nothing: the job has no device",
            found=str(compute_milli if compute_milli is not None else memory_mib),
        )
    compute_milli = spec.compute_milli if compute_milli is None else compute_milli
    memory_mib = spec.memory_mib if memory_mib is None else memory_mib
    if compute_milli < MILLI_PER_DEVICE and (spec.mode is Mode.EXCLUSIVE or spec.devices > 1):
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="gpu_milli",
            expected="1000, as the job has its devices to itself",
            found=str(compute_milli),
            hint="To share a device, cancel the job and ask for another.",
        )
    if compute_milli < MILLI_PER_DEVICE and not memory_mib:
        return Refused(
            code=Refusal.FIELD_MISSING,
            field="gpu_memory_mib",
            expected="the memory of the share, as the job has all of its device's now",
            found="nothing",
        )
    return msgspec.structs.replace(spec, compute_milli=compute_milli, memory_mib=memory_mib)


def _retry_and_gang(request: JobRequested) -> Refused | None:
    for index, cause in enumerate(request.retry.on):
        if cause in NO_RETRY_CAUSES:
            return Refused(
                code=Refusal.FIELD_INVALID,
                field=f"retry.on[{index}]",
                expected="a cause of failure",
                found=str(cause),
            )
    if (refused := _elastic(request)) is not None:
        return refused
    _, most, _ = _replicas(request)
    if most > REPLICAS_MAX:
        return Refused(
            code=Refusal.FIELD_INVALID,
            field="gang.size" if request.gang.size == most else "elastic.max",
            expected=f"at most {REPLICAS_MAX} replicas, as all of them are placed at once",
            found=str(most),
            hint="Ask for several jobs, or for more devices a replica.",
        )
    gang = request.gang
    if gang.topology_key is None and (gang.required or gang.preferred):
        return Refused(
            code=Refusal.FIELD_MISSING,
            field="gang.topology_key",
            expected="the label of which all replicas shall have one value, or node",
            found="nothing",
        )
    if gang.required and gang.preferred:
        return Refused(
            code=Refusal.FIELD_CONFLICT, field="gang.preferred", expected="nothing beside gang.required", found="true"
        )
    if request.gang.min is not None and request.gang.min > request.gang.size:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="gang.min",
            expected=f"at most the gang's size, {request.gang.size}",
            found=str(request.gang.min),
        )
    return None


def _replicas(request: JobRequested) -> tuple[int, int, int]:
    """The least and the most replicas, and by how many it grows and shrinks."""
    gang, elastic = request.gang, request.elastic
    if elastic is None or elastic.max is None:
        return gang.min or gang.size, gang.size, 1
    return elastic.min or 1, elastic.max, elastic.step or 1


def _elastic(request: JobRequested) -> Refused | None:
    gang, elastic = request.gang, request.elastic
    if elastic is None or elastic == Elastic():
        return None
    if elastic.max is None:
        return Refused(
            code=Refusal.FIELD_MISSING, field="elastic.max", expected="the most replicas that it uses", found="nothing"
        )
    least, most, step = _replicas(request)
    if gang.size > 1 or gang.min is not None:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="gang.size" if gang.min is None else "gang.min",
            expected="nothing beside elastic",
            found=str(gang.size if gang.min is None else gang.min),
            hint="elastic.min is how many start together, elastic.max how many it uses where there is room.",
        )
    if least > most:
        return Refused(
            code=Refusal.FIELD_CONFLICT, field="elastic.min", expected=f"at most elastic.max, {most}", found=str(least)
        )
    if (most - least) % step:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="elastic.step",
            expected=f"a number that divides {most - least}, from elastic.min to elastic.max",
            found=str(step),
        )
    return None


def _bid(request: JobRequested) -> Refused | None:
    if request.bid is None:
        return None
    if request.service_class not in {None, ServiceClass.SPOT}:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="service_class",
            expected="spot, beside a bid",
            found=str(request.service_class),
            hint="Leave the bid out: the other classes go before the market.",
        )
    if request.preemptible is False:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="preemptible",
            expected="true, beside a bid",
            found="false",
            hint="Who is outbid makes room, with its grace as notice.",
        )
    return None


def _instants(request: JobRequested, now: int) -> Refused | None:
    not_before_at, deadline_at = _instant(request.not_before), _instant(request.deadline)
    for field, text, instant in (
        ("not_before", request.not_before, not_before_at),
        ("deadline", request.deadline, deadline_at),
    ):
        if instant < 0:
            return Refused(
                code=Refusal.FIELD_INVALID,
                field=field,
                expected="an instant in RFC 3339 between 1970 and 2262, such as 2026-09-01T12:00:00Z",
                found=text or "",
            )
    if deadline_at and deadline_at <= now:
        return Refused(
            code=Refusal.EXPIRED,
            field="deadline",
            expected="an instant that is still to come",
            found=request.deadline or "",
            hint="Ask with a later deadline, or without one.",
        )
    if deadline_at and not_before_at >= deadline_at:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="not_before",
            expected=f"an instant before the deadline, {request.deadline}",
            found=request.not_before or "",
            hint="Let the job start before it has to be done.",
        )
    return None


CHECKPOINT_SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGHUP")
"""Which a program may be told to checkpoint by: those that mean nothing else here."""


def _checkpoint(asked: Checkpoint | None) -> Refused | None:
    if asked is None or asked.signal is None or asked.signal in CHECKPOINT_SIGNALS:
        return None
    return Refused(
        code=Refusal.FIELD_INVALID,
        field="checkpoint.signal",
        expected=f"one of {', '.join(CHECKPOINT_SIGNALS)}",
        found=asked.signal,
    )


def _checkpoint_plan(asked: Checkpoint | None) -> CheckpointPlan | None:
    """How the runs are told; an empty object asks for nothing."""
    if asked is None or (asked.signal is None and asked.uri is None and asked.grace_s is None):
        return None
    default = CheckpointPlan()
    return CheckpointPlan(
        signal=asked.signal or default.signal,
        grace_s=default.grace_s if asked.grace_s is None else asked.grace_s,
        uri=asked.uri or "",
    )


def _instant(text: str | None) -> int:
    """The instant that a text names; 0 for none, -1 where it names none that can be."""
    if text is None:
        return 0
    try:
        instant = instant_from_timestamp(text)
    except (ValueError, OverflowError):
        return -1
    return instant if 0 <= instant <= INSTANT_MAX else -1


class _Share(Struct, frozen=True, kw_only=True):
    """What of which devices each replica gets, and how."""

    devices: int
    compute_milli: int
    memory_mib: int
    """0: all of it."""
    mode: Mode | None
    modes: tuple[Mode, ...] = ()
    dedicated: bool = False
    isolation: IsolationLevel = IsolationLevel.NONE
    is_default: bool = False
    """The request didn't say how much compute it wants."""


def _share(
    request: JobRequested, demands: Demands, defaults: Mapping[WorkloadKind, ShareDefaults], size: Sized | None
) -> _Share:
    """Devices per replica, milli-GPU and MiB of each, and the mode."""
    if demands.mig_profile:
        least_milli, least_mib = share_of_profile(demands.mig_profile)
        return _Share(devices=1, compute_milli=least_milli, memory_mib=least_mib, mode=Mode.MIG)
    resources = request.resources
    gpu, milli, memory_mib = resources.gpu, resources.gpu_milli, resources.gpu_memory_mib
    if size is not None:
        memory_mib = size.booked_mib
    ways = 1 if request.model is None else request.model.tensor_parallel or 1
    if gpu is None and ways > 1:
        gpu = ways
    if gpu is None and milli is None and memory_mib is None:
        return _Share(devices=0, compute_milli=0, memory_mib=0, mode=None)
    by_kind = defaults[request.workload.kind]
    is_default = milli is None and gpu is None
    if is_default:
        milli = MILLI_PER_DEVICE if resources.mode is Mode.EXCLUSIVE else by_kind.compute_milli
    if milli is None or (milli == MILLI_PER_DEVICE and resources.gpu_memory_mib is None):
        # Whole devices: nobody shares them unless the job says that it would.
        return _Share(
            devices=gpu or 1,
            compute_milli=MILLI_PER_DEVICE,
            memory_mib=memory_mib or 0,
            mode=resources.mode or Mode.EXCLUSIVE,
        )
    return _Share(
        devices=1,
        compute_milli=milli,
        memory_mib=by_kind.memory_mib if memory_mib is None else memory_mib,
        mode=resources.mode,
        is_default=is_default,
    )


def _isolated(request: JobRequested, share: _Share, defaults: Defaults) -> _Share | Refused:
    """The share in the modes that keep the job as isolated as it asked or its tenant is bound to be."""
    asked = IsolationLevel.NONE if request.isolation is None else request.isolation.level
    level = max(asked, defaults.isolation, key=LEVELS.index)
    allowed = MODES_OF_LEVEL[level]
    if not share.devices:
        if asked is IsolationLevel.NONE:
            return share
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="isolation.level",
            expected="none, for a job without a device",
            found=str(asked),
        )
    if share.mode is not None and share.mode not in allowed:
        whose = "isolation.level" if level is asked else "the tenant's isolation"
        return Refused(
            code=Refusal.ISOLATION_UNAVAILABLE,
            field="resources.mode",
            expected=f"{' or '.join(sorted(allowed))}, which can give {whose} {level}",
            found=str(share.mode),
            hint="Leave the mode out and get one that can.",
        )
    if level in {IsolationLevel.DEDICATED, IsolationLevel.CONFIDENTIAL}:
        # The device is nobody else's, so all of it is the job's: a share of it would only leave the rest unused.
        return msgspec.structs.replace(
            share, compute_milli=MILLI_PER_DEVICE, mode=Mode.EXCLUSIVE, dedicated=True, isolation=level
        )
    if share.mode is not None:
        return msgspec.structs.replace(share, isolation=level)
    preferred = defaults.modes[request.workload.kind]
    if level is IsolationLevel.NONE:
        # Who asked for a share isn't given a whole device instead; who left it open may be.
        modes = tuple(mode for mode in preferred if share.is_default or mode is not Mode.EXCLUSIVE)
    else:
        modes = tuple(sorted(allowed, key=lambda mode: _rank(preferred, allowed, mode)))
    return msgspec.structs.replace(share, modes=modes, isolation=level)


def not_offered(spec: JobSpec, offers: Iterable[tuple[str, tuple[Mode, ...]]]) -> Refused | None:
    """Why no device of the pool can give the job a slice in a mode that it accepts; None where one can.

    ``offers`` are models and modes of the pool's devices. A pool without any says nothing of those that will come.
    """
    accepted = (spec.mode,) if spec.mode is not None else spec.modes
    if not accepted:
        return None
    offered = {mode for model, modes in offers if not spec.models or model in spec.models for mode in modes}
    if not offered or not offered.isdisjoint(accepted):
        return None
    could = [level for level in LEVELS if not offered.isdisjoint(MODES_OF_LEVEL[level])]
    is_isolated = spec.isolation is not IsolationLevel.NONE
    best = f"isolation.level {could[-1]}" if could else "nothing"
    return Refused(
        code=Refusal.ISOLATION_UNAVAILABLE,
        field="isolation.level" if is_isolated else "resources.mode",
        expected=f"{spec.isolation}, which {' or '.join(accepted)} gives" if is_isolated else " or ".join(accepted),
        found=f"devices that offer {', '.join(sorted(offered))}",
        hint=f"What could be given here is {best}: ask for no more, or for other devices.",
    )


CONTAINERS: Final = "containers"
"""The label, with the value ``yes``, that agents give their nodes where an engine for containers answers."""


def no_engine(spec: JobSpec, labels: Iterable[Mapping[str, str]]) -> Refused | None:
    """Why no node of the pool can start the job's image; None where one can. ``labels`` are those of its nodes."""
    if not spec.image or any(each.get(CONTAINERS) == "yes" for each in labels):
        return None
    return Refused(
        code=Refusal.NOT_SUPPORTED,
        field="workload.image",
        expected="workload.command, a program that the nodes have",
        found=bounded(spec.image),
        hint="No node has a container engine that answers: `apportion nodes -o json` has each one's container_engine.",
    )


def _rank(preferred: tuple[Mode, ...], allowed: tuple[Mode, ...], mode: Mode) -> tuple[int, int]:
    # A whole device for a share is what remains where nothing smaller isolates it.
    place = preferred.index(mode) if mode in preferred else len(preferred)
    return (len(preferred) + 1 if mode is Mode.EXCLUSIVE else place), allowed.index(mode)


LEVELS: Final = tuple(IsolationLevel)
"""Each level includes those before it."""
