"""One job request by itself: what is filled in, and what is refused under which name."""

import itertools
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.admission import validate
from apportion.admission.refusals import Refused
from apportion.admission.validate import (
    DEFAULT_SHARES,
    DEFAULTS,
    ShareDefaults,
    job_spec,
    refusal,
    refusal_by_rules,
    sized,
)
from apportion.contracts.causes import Mode, Refusal, RunCause, ServiceClass, WorkloadKind
from apportion.contracts.events import (
    Bid,
    Checkpoint,
    Data,
    DataTier,
    Dependency,
    DeviceChoice,
    Elastic,
    Gang,
    Isolation,
    JobRequested,
    JobSpec,
    Model,
    ModelTraining,
    Placement,
    Resources,
    Retry,
    Runtime,
    SecretRef,
    Sized,
    Sla,
    Workload,
)
from apportion.contracts.testing import NOON, a_job_request

S = 1_000_000_000


def spec_of(request: JobRequested) -> JobSpec:
    spec = job_spec(request, NOON)
    assert isinstance(spec, JobSpec), spec
    return spec


def refusal_of(request: JobRequested) -> tuple[Refusal, str]:
    refused = job_spec(request, NOON)
    assert isinstance(refused, Refused), refused
    assert refused.message()
    return refused.code, refused.field


def with_resources(**fields: Any) -> JobRequested:
    return a_job_request(resources=Resources(**fields))


def with_kind(kind: WorkloadKind, **resources: Any) -> JobRequested:
    return a_job_request(
        workload=Workload(command=("/bin/true",), kind=kind), resources=Resources(**(resources or {"gpu": 1}))
    )


def test_a_plain_request_becomes_this_spec() -> None:
    """The whole outcome, so that a new default can't slip in unseen."""
    assert spec_of(a_job_request()) == JobSpec(
        queue=a_job_request().queue,  # type: ignore[arg-type]
        kind=WorkloadKind.BATCH,
        command=("/bin/true",),
        service_class=ServiceClass.BATCH,
        priority=500,
        preemptible=True,
        replicas=1,
        devices=1,
        compute_milli=250,
        memory_mib=4096,
        mode=None,
        retry_limit=0,
        backoff_s=1,
        grace_s=10,
    )


def test_every_field_that_is_honoured_arrives_in_the_spec() -> None:
    """A field that is accepted and lost on the way would be ignored silently."""
    request = a_job_request(
        workload=Workload(command=("/bin/sh", "-c", "true"), env={"A": "1"}, kind=WorkloadKind.TRAINING),
        resources=Resources(
            gpu=2,
            gpu_memory_mib=40_000,
            mode=Mode.MPS,
            device=DeviceChoice(models=("h100-80", "a100-80"), vendor="nvidia"),
            cpu_milli=4000,
            memory_mib=16_000,
        ),
        service_class=ServiceClass.SPOT,
        priority=0,
        preemptible=False,
        gang=Gang(size=4, min=4),
        time_limit_s=60,
        max_wait_s=70,
        min_runtime_s=80,
        not_before="2026-09-01T12:00:01Z",
        deadline="2026-09-01T14:00:02.5+02:00",
        retry=Retry(limit=3, on=(RunCause.KILLED,), backoff_s=7, memory_factor_pct=100),
        grace_s=0,
        labels={"team": "a"},
    )
    assert spec_of(request) == JobSpec(
        queue=request.queue,  # type: ignore[arg-type]
        kind=WorkloadKind.TRAINING,
        command=("/bin/sh", "-c", "true"),
        env={"A": "1"},
        service_class=ServiceClass.SPOT,
        priority=0,
        preemptible=False,
        replicas=4,
        devices=2,
        compute_milli=1000,
        memory_mib=40_000,
        mode=Mode.MPS,
        models=("h100-80", "a100-80"),
        vendor="nvidia",
        cpu_milli=4000,
        host_memory_mib=16_000,
        time_limit_s=60,
        not_before_at=NOON + S,
        deadline_at=NOON + 2 * S + S // 2,
        retry_limit=3,
        retry_on=(RunCause.KILLED,),
        backoff_s=7,
        grace_s=0,
        min_runtime_s=80,
        max_wait_s=70,
        labels={"team": "a"},
    )


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"gpu": 4}, (4, 1000, 0, Mode.EXCLUSIVE)),
        ({"gpu": 1, "mode": Mode.TIMESLICE}, (1, 1000, 0, Mode.TIMESLICE)),
        ({"gpu": 2, "gpu_memory_mib": 70_000}, (2, 1000, 70_000, Mode.EXCLUSIVE)),
        ({"gpu": 1, "gpu_milli": 250}, (1, 250, 4096, None)),
        ({"gpu_milli": 250}, (1, 250, 4096, None)),
        ({"gpu_milli": 1000}, (1, 1000, 0, Mode.EXCLUSIVE)),
        ({"gpu_milli": 1000, "gpu_memory_mib": 512}, (1, 1000, 512, None)),
        ({"gpu_milli": 1, "gpu_memory_mib": 512, "mode": Mode.MPS}, (1, 1, 512, Mode.MPS)),
        ({"gpu_memory_mib": 512}, (1, 200, 512, None)),
        ({"gpu_memory_mib": 512, "mode": Mode.EXCLUSIVE}, (1, 1000, 512, Mode.EXCLUSIVE)),
    ],
)
def test_a_share_that_is_half_said_is_completed_by_kind(
    resources: dict[str, Any], expected: tuple[int, int, int, Mode | None]
) -> None:
    """Devices, milli-GPU, MiB (0: the whole device) and mode, of an inference service."""
    spec = spec_of(with_kind(WorkloadKind.INFERENCE, **resources))
    assert (spec.devices, spec.compute_milli, spec.memory_mib, spec.mode) == expected


def test_training_without_a_size_gets_more_than_inference() -> None:
    """80 % and 32 GiB against 20 % and 4 GiB."""
    by_memory = spec_of(with_kind(WorkloadKind.TRAINING, gpu_memory_mib=1024))
    by_compute = spec_of(with_kind(WorkloadKind.TRAINING, gpu_milli=500))
    assert (by_memory.compute_milli, by_compute.memory_mib) == (800, 32_768)


def test_a_pool_may_set_its_own_default_shares() -> None:
    """What a small share is depends on the devices that the pool has."""
    shares = {**DEFAULT_SHARES, WorkloadKind.BATCH: ShareDefaults(compute_milli=100, memory_mib=1000)}
    defaults = msgspec.structs.replace(DEFAULTS, shares=shares)
    spec = job_spec(with_resources(gpu_milli=300), NOON, defaults)
    assert isinstance(spec, JobSpec)
    assert (spec.compute_milli, spec.memory_mib) == (300, 1000)


@pytest.mark.parametrize(
    ("kind", "service_class", "preemptible"),
    [
        (WorkloadKind.INFERENCE, ServiceClass.ONLINE, False),
        (WorkloadKind.TRAINING, ServiceClass.STANDARD, True),
        (WorkloadKind.INTERACTIVE, ServiceClass.STANDARD, True),
        (WorkloadKind.HPC, ServiceClass.STANDARD, True),
        (WorkloadKind.BATCH, ServiceClass.BATCH, True),
    ],
)
def test_the_kind_sets_class_and_preemption(kind: WorkloadKind, service_class: ServiceClass, preemptible: bool) -> None:
    """Those who serve people go first, and aren't moved for others."""
    spec = spec_of(with_kind(kind))
    assert (spec.service_class, spec.preemptible) == (service_class, preemptible)


def test_a_job_with_an_image_needs_a_node_that_can_start_it() -> None:
    """Where there is one it is placed there alone; else it is refused by name, and not left to wait for ever."""
    spec = spec_of(a_job_request(workload=Workload(image="team/train:1.2")))
    assert (spec.image, spec.command, spec.required) == ("team/train:1.2", (), {"containers": "yes"})
    assert validate.no_engine(spec, [{}, {"containers": "yes"}]) is None
    refused = validate.no_engine(spec, [{"site": "oslo"}])
    assert refused is not None
    assert (refused.code, refused.field, refused.found) == (
        Refusal.NOT_SUPPORTED,
        "workload.image",
        "team/train:1.2",
    )
    assert validate.no_engine(spec_of(a_job_request()), []) is None


def test_a_job_without_a_device_says_so_and_holds_none() -> None:
    """Preprocessing belongs into the same queue, and must not take a GPU."""
    spec = spec_of(with_resources(device=DeviceChoice(kind="cpu"), cpu_milli=500, memory_mib=64))
    assert (spec.devices, spec.compute_milli, spec.memory_mib, spec.mode, spec.cpu_milli) == (0, 0, 0, None, 500)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"workload": Workload(command=("a",), mounts=("/data",))}, "workload.mounts"),
        ({"resources": Resources(gpu=1, disk_mib=1)}, "resources.disk_mib"),
        ({"job_set": "nightly"}, "job_set"),
    ],
)
def test_what_nobody_can_honour_yet_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    """Silently ignored, it would be a promise that we break."""
    assert refusal_of(a_job_request(**changes)) == (Refusal.NOT_SUPPORTED, field)


def test_who_bids_takes_part_in_the_market_of_what_others_leave() -> None:
    """A bid makes a spot job, which may be stopped; beside what contradicts that, it is refused."""
    bid = Bid(max_price_micro_per_gpu_hour=2_000_000)
    spec = spec_of(a_job_request(bid=bid))
    assert (spec.bid_micro, spec.service_class, spec.preemptible) == (2_000_000, ServiceClass.SPOT, True)
    refused = refusal_of(a_job_request(bid=bid, service_class=ServiceClass.BATCH))
    assert refused == (Refusal.FIELD_CONFLICT, "service_class")
    assert refusal_of(a_job_request(bid=bid, preemptible=False)) == (Refusal.FIELD_CONFLICT, "preemptible")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gang": Gang(size=4, min=2)}, (4, 2, 1)),
        ({"gang": Gang(size=4, min=4)}, (4, 0, 1)),
        ({"elastic": Elastic(max=4)}, (4, 1, 1)),
        ({"elastic": Elastic(min=2, max=8, step=3)}, (8, 2, 3)),
    ],
)
def test_a_gang_may_run_with_fewer(changes: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """Asked for as a gang's least, or as an elastic job's range."""
    spec = spec_of(a_job_request(**changes))
    assert (spec.replicas, spec.replicas_min, spec.replicas_step) == expected


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"elastic": Elastic(min=2)}, Refusal.FIELD_MISSING, "elastic.max"),
        ({"elastic": Elastic(min=5, max=4)}, Refusal.FIELD_CONFLICT, "elastic.min"),
        ({"elastic": Elastic(min=1, max=4, step=2)}, Refusal.FIELD_CONFLICT, "elastic.step"),
        ({"elastic": Elastic(max=4), "gang": Gang(size=2)}, Refusal.FIELD_CONFLICT, "gang.size"),
        ({"elastic": Elastic(max=4), "gang": Gang(min=1)}, Refusal.FIELD_CONFLICT, "gang.min"),
        ({"elastic": Elastic(max=901)}, Refusal.FIELD_INVALID, "elastic.max"),
    ],
)
def test_an_elastic_job_that_contradicts_itself_is_refused(changes: dict[str, Any], code: Refusal, field: str) -> None:
    """By the part of it that is wrong."""
    assert refusal_of(a_job_request(**changes)) == (code, field)


def test_a_gang_may_be_wanted_near_each_other() -> None:
    """By one value of a label, which it names; required or, unless it says so, preferred."""
    spec = spec_of(a_job_request(gang=Gang(size=4, topology_key="rack", required=True)))
    assert (spec.topology_key, spec.topology_required) == ("rack", True)
    assert not spec_of(a_job_request(gang=Gang(size=4, topology_key="rack"))).topology_required
    refused = refusal_of(a_job_request(gang=Gang(size=4, required=True)))
    assert refused == (Refusal.FIELD_MISSING, "gang.topology_key")
    both = Gang(size=4, topology_key="rack", required=True, preferred=True)
    assert refusal_of(a_job_request(gang=both)) == (Refusal.FIELD_CONFLICT, "gang.preferred")


def test_a_latency_objective_is_kept() -> None:
    """The placer goes by it."""
    assert spec_of(a_job_request(sla=Sla(latency_ms=100))).latency_ms == 100


def test_cpus_next_to_devices_are_asked_for_where_there_are_devices() -> None:
    """Without one there is nothing to be near to."""
    assert spec_of(a_job_request(resources=Resources(gpu=1, cpu_bind=True))).cpu_bind
    assert not spec_of(a_job_request(resources=Resources(gpu=1))).cpu_bind


def test_asking_for_nothing_is_no_reason_to_refuse() -> None:
    """Publishers that write every field with its empty value are understood."""
    request = a_job_request(
        resources=Resources(gpu=1, disk_mib=0, encoders=0, pcie_mbps=0, numa="none", cpu_bind=False),
        gang=Gang(size=2, min=2, required=False),
        retry=Retry(avoid_same_node=False, memory_factor_pct=100),
    )
    assert spec_of(request).replicas == 2


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_AUDIT",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_MPS_PIPE_DIRECTORY",
        "NVIDIA_VISIBLE_DEVICES",
        "APPORTION_RUN",
    ],
)
def test_names_that_confine_the_job_are_the_nodes_to_set(name: str) -> None:
    """A process that chooses its own devices is in nobody's slice."""
    request = a_job_request(workload=Workload(command=("a",), env={"OK": "1", name: "x"}))
    assert refusal_of(request) == (Refusal.FIELD_INVALID, f"workload.env.{name}")


def test_ordinary_names_pass() -> None:
    """Only what the node sets is refused."""
    env: dict[str, str | SecretRef] = {"PATH": "/usr/bin", "CUDA_LAUNCH_BLOCKING": "1", "MY_NVIDIA_": "1"}
    assert spec_of(a_job_request(workload=Workload(command=("a",), env=env))).env == env


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"workload": Workload()}, (Refusal.FIELD_MISSING, "workload.command")),
        ({"workload": Workload(command=("", "x"))}, (Refusal.FIELD_INVALID, "workload.command[0]")),
        ({"resources": Resources()}, (Refusal.FIELD_MISSING, "resources.gpu")),
        ({"resources": Resources(cpu_milli=100)}, (Refusal.FIELD_MISSING, "resources.gpu")),
        ({"resources": Resources(gpu=2, gpu_milli=500)}, (Refusal.FIELD_CONFLICT, "resources.gpu_milli")),
        ({"resources": Resources(gpu_milli=500, mode=Mode.EXCLUSIVE)}, (Refusal.FIELD_CONFLICT, "resources.mode")),
        (
            {"resources": Resources(gpu=1, device=DeviceChoice(kind="cpu"), cpu_milli=1)},
            (Refusal.FIELD_CONFLICT, "resources.device.kind"),
        ),
        (
            {"resources": Resources(mode=Mode.MPS, device=DeviceChoice(kind="cpu"), cpu_milli=1)},
            (Refusal.FIELD_CONFLICT, "resources.device.kind"),
        ),
        (
            {"resources": Resources(device=DeviceChoice(kind="cpu"))},
            (Refusal.FIELD_MISSING, "resources.cpu_milli"),
        ),
        ({"gang": Gang(size=2, min=3)}, (Refusal.FIELD_CONFLICT, "gang.min")),
        ({"retry": Retry(on=(RunCause.KILLED, RunCause.SUCCESS))}, (Refusal.FIELD_INVALID, "retry.on[1]")),
        ({"retry": Retry(on=(RunCause.CANCELLED,))}, (Refusal.FIELD_INVALID, "retry.on[0]")),
        ({"deadline": "2026-09-01T12:00:00Z"}, (Refusal.EXPIRED, "deadline")),
        ({"deadline": "2026-02-31T12:00:00Z"}, (Refusal.FIELD_INVALID, "deadline")),
        ({"deadline": "9999-01-01T00:00:00Z"}, (Refusal.FIELD_INVALID, "deadline")),
        ({"not_before": "0001-01-01T00:00:00Z"}, (Refusal.FIELD_INVALID, "not_before")),
        ({"not_before": "2026-09-01T12:00:00+99:99"}, (Refusal.FIELD_INVALID, "not_before")),
        (
            {"not_before": "2026-09-01T13:00:00Z", "deadline": "2026-09-01T13:00:00Z"},
            (Refusal.FIELD_CONFLICT, "not_before"),
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_its_field(
    changes: dict[str, Any], expected: tuple[Refusal, str]
) -> None:
    """The publisher has to find the line that is wrong."""
    assert refusal_of(a_job_request(**changes)) == expected


def test_a_refusal_reads_as_plain_words_with_the_next_step() -> None:
    """It is read by people who don't know our code."""
    refused = job_spec(with_resources(gpu=2, gpu_milli=500), NOON)
    assert isinstance(refused, Refused)
    assert refused.message() == (
        "resources.gpu_milli: expected nothing beside gpu above 1, found gpu 2 and gpu_milli 500. "
        "A share is of one device: ask for whole devices, or make the job a gang of shares."
    )


# ---- fields that are part of the contract, and that nobody can honour yet --------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sla": Sla(latency_ms=100, rps=5)}, "sla.rps"),
        ({"checkpoint": Checkpoint(interval_s=0)}, "checkpoint.interval_s"),
        ({"runtime": Runtime(framework="torch")}, "runtime.framework"),
        ({"data": Data(tier=DataTier.HOT)}, "data.tier"),
        ({"workload": Workload(command=("a",), env={"TOKEN": SecretRef(secret="hub")})}, "workload.env.TOKEN"),
    ],
)
def test_what_nobody_can_honour_yet_is_refused_by_its_name(changes: dict[str, Any], field: str) -> None:
    """Ignored, it would run a job other than the one that was asked for."""
    assert refusal_of(a_job_request(**changes)) == (Refusal.NOT_SUPPORTED, field)


@pytest.mark.parametrize(
    "changes",
    [
        {"elastic": Elastic()},
        {"isolation": Isolation()},
        {"placement": Placement()},
        {"runtime": Runtime()},
        {"data": Data()},
        {"gang": Gang(preferred=False)},
    ],
)
def test_what_asks_for_nothing_is_not_refused(changes: dict[str, Any]) -> None:
    """Generated clients send empty objects."""
    assert spec_of(a_job_request(**changes)) == spec_of(a_job_request())


# ---- a model in place of a size --------------------------------------------------------------------------------------


def sized_spec(request: JobRequested) -> tuple[JobSpec, Sized]:
    size = sized(request)
    assert isinstance(size, Sized), size
    spec = job_spec(request, NOON, size=size)
    assert isinstance(spec, JobSpec), spec
    return spec, size


def test_a_model_without_a_size_is_booked_at_its_p95_and_a_tenth() -> None:
    """Whoever knows the model need not know MiB, and an estimate that is a little low harms nobody."""
    spec, size = sized_spec(
        a_job_request(resources=Resources(gpu_milli=500), model=Model(params_millions=7_000, dtype="bf16"))
    )
    assert size.memory_mib_p50 == sum(size.parts.values())
    assert 13_000 < size.parts["weights"] < 14_000
    assert size.memory_mib_p95 > size.memory_mib_p50
    assert size.booked_mib == -(-size.memory_mib_p95_device * 11 // 10)
    assert (spec.devices, spec.compute_milli, spec.memory_mib) == (1, 500, size.booked_mib)


def test_a_model_alone_gets_the_compute_of_its_kind() -> None:
    """It is one of the three ways to say how much is asked."""
    request = a_job_request(
        workload=Workload(command=("a",), kind=WorkloadKind.INFERENCE),
        resources=Resources(),
        model=Model(params_millions=1_000),
    )
    spec, size = sized_spec(request)
    assert (spec.devices, spec.compute_milli, spec.memory_mib) == (1, 200, size.booked_mib)


def test_a_size_that_is_asked_for_stands_beside_a_model() -> None:
    """Who says both has measured."""
    spec, size = sized_spec(a_job_request(model=Model(params_millions=7_000)))
    assert (size.booked_mib, spec.memory_mib) == (4096, 4096)


def test_a_model_over_several_devices_takes_whole_ones_that_are_large_enough() -> None:
    """Each device holds its share of the model, and nobody else's."""
    request = a_job_request(resources=Resources(), model=Model(params_millions=70_000, tensor_parallel=4))
    spec, size = sized_spec(request)
    assert (spec.devices, spec.compute_milli, spec.mode) == (4, 1000, Mode.EXCLUSIVE)
    assert spec.memory_mib == size.booked_mib


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (Model(), "model"),
        (Model(name="no such model"), "model.name"),
        (Model(params_millions=1, precision="bf17"), "model.dtype"),
        (Model(params_millions=1, precision="bf16", dtype="bf16"), "model.dtype"),
        (Model(params_millions=1, batch=2_000_000_000), "model.batch"),
        (Model(params_millions=1, training=ModelTraining(method="magic")), "model.training.method"),
        (Model(params_millions=1, training=ModelTraining(zero_stage=4)), "model.training.zero_stage"),
    ],
)
def test_a_model_that_can_not_be_sized_is_refused_by_its_field(model: Model, field: str) -> None:
    """A guess in its place would book something else than was meant."""
    refused = sized(a_job_request(model=model))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.field) == (Refusal.FIELD_INVALID, field)


@pytest.mark.parametrize(
    ("resources", "field"),
    [(Resources(gpu=2), "resources.gpu"), (Resources(gpu_milli=500), "resources.gpu_milli")],
)
def test_a_model_over_more_devices_than_are_asked_for_is_refused(resources: Resources, field: str) -> None:
    """It could not be loaded."""
    request = a_job_request(resources=resources, model=Model(params_millions=70_000, tensor_parallel=4))
    assert refusal_of(request) == (Refusal.FIELD_CONFLICT, field)


def test_a_request_without_a_model_has_no_size() -> None:
    """There is nothing to tell."""
    assert sized(a_job_request()) is None


COUNTS = st.none() | st.integers(0, 2_147_483_647) | st.sampled_from([1, 2, 64, 128, 4096, 32_000])
WORDS = st.none() | st.sampled_from(
    ["bf16", "gptq-int4", "nf4", "swiglu", "llama-3.1-8b", "vllm", "lora", "decoder", "x"]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_model_is_sized_or_refused_by_a_field_of_it(data: st.DataObject) -> None:
    """The formulas meet numbers that no model has."""
    hints = get_type_hints(Model)
    fields = data.draw(st.sets(st.sampled_from(sorted(Model.__struct_fields__)), max_size=8)) - {"training"}
    values = {
        name: data.draw(WORDS if "str" in str(hints[name]) else st.booleans() if "bool" in str(hints[name]) else COUNTS)
        for name in sorted(fields)
    }
    model = Model(**values)  # type: ignore[arg-type]  # past the decoder on purpose
    size = sized(a_job_request(resources=Resources(), model=model))
    if isinstance(size, Refused):
        assert size.field.startswith("model")
        assert size.message()
    else:
        assert size is not None
        assert (
            0
            < size.memory_mib_p50
            <= size.memory_mib_p95
            <= size.memory_mib_p95_device
            < size.booked_mib
            <= 2_147_483_647
        )


PARTS: dict[str, list[Any]] = {
    "workload": [
        Workload(command=("a", "")),
        Workload(command=()),
        Workload(command=("",)),
        Workload(command=("a",), image="nginx"),
        Workload(command=("a",), mounts=("/data",)),
        Workload(command=("a",), env={"TOKEN": SecretRef(secret="hub")}),
        Workload(command=("a",), env={"LEVEL": "debug", "NVIDIA_X": "1"}),
        Workload(command=("a",), env={"LEVEL": "debug"}),
    ],
    "gang": [
        Gang(size=2),
        Gang(size=901),
        Gang(min=2),
        Gang(required=True),
        Gang(preferred=True),
        Gang(topology_key="a"),
    ],
    "retry": [Retry(limit=1), Retry(on=(RunCause.SUCCESS,)), Retry(avoid_same_node=True), Retry(memory_factor_pct=150)],
    "model": [Model(), Model(params_millions=1, tensor_parallel=4)],
    "not_before": ["2026-09-01T12:00:00Z", "2026-02-31T12:00:00Z"],
    "deadline": ["1970-01-01T00:00:01Z", "2100-09-01T12:00:00Z", "9999-09-01T12:00:00Z"],
    "job_set": ["a"],
    "elastic": [Elastic(), Elastic(max=4)],
    "sla": [Sla(latency_ms=100)],
    "bid": [Bid(max_price_micro_per_gpu_hour=1)],
    "checkpoint": [Checkpoint(interval_s=0)],
    "isolation": [Isolation()],
    "placement": [Placement(), Placement(site="a")],
    "runtime": [Runtime(min_cuda="12.4")],
    "data": [Data(tier=DataTier.HOT)],
    "depends_on": [(Dependency(job_id="other"),)],
}
SHARES: dict[str, list[Any]] = {
    "gpu": [1, 2],
    "gpu_milli": [None, 1000],
    "gpu_memory_mib": [1024],
    "mode": list(Mode),
    "mig_profile": ["1g.10gb"],
    "device": [DeviceChoice(), DeviceChoice(kind="cpu"), DeviceChoice(vendor="amd"), DeviceChoice(min_arch="hopper")],
    "cpu_milli": [1],
    "disk_mib": [0, 1],
    "encoders": [0, 1],
    "pcie_mbps": [0, 1],
    "numa": ["none", "strict"],
    "cpu_bind": [False, True],
}


def test_one_look_lets_nothing_pass_that_a_rule_refuses() -> None:
    """Nearly all requests are looked at once: the look must know every field that a rule could refuse."""
    parts: list[dict[str, Any]] = [{}, *({name: value} for name, values in PARTS.items() for value in values)]
    shares: list[dict[str, Any]] = [{}, *({name: value} for name, values in SHARES.items() for value in values)]
    for part, one, other in itertools.product(parts, shares, shares):
        resources = Resources(**({"gpu_milli": 250} | one | other))
        request = msgspec.structs.replace(a_job_request(), resources=resources, **part)
        assert refusal(request, NOON) == refusal_by_rules(request, NOON), request


def test_the_look_is_shown_every_field_of_a_request() -> None:
    """A new field has to be put to the test above, or to be named here as one that no rule can refuse."""
    harmless = {
        "queue", "job_id", "idempotency_key", "tenant", "service_class", "priority", "preemptible", "min_runtime_s",
        "time_limit_s", "max_wait_s", "grace_s", "labels", "annotations", "external_uri", "dry_run", "resources",
    }  # fmt: skip
    assert set(JobRequested.__struct_fields__) == set(PARTS) | harmless
    assert set(Resources.__struct_fields__) == set(SHARES) | {"memory_mib"}
