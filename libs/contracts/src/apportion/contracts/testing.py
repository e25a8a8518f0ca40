"""Builders for tests: valid by default, so that a test changes the one field that it is about."""

import hashlib
from typing import Any

import msgspec

from apportion.contracts.causes import Mode, WorkloadKind
from apportion.contracts.envelope import Basis, Entry, Stream
from apportion.contracts.events import (
    Device,
    Event,
    Fact,
    JobAdmitted,
    JobRequested,
    JobSpec,
    Mig,
    MigProfile,
    NodeRegistered,
    QueueUpserted,
    Resources,
    RunPlaced,
    Slice,
    Wish,
    Workload,
)
from apportion.contracts.ids import Author, DeviceUuid, JobId, NodeId, QueueId, TenantId, run_id, tenant_of_job

NOON = 1_788_264_000_000_000_000
"""An instant for tests: 2026-09-01 12:00 UTC."""
ACME = TenantId("acme")
MAIN_QUEUE = QueueId("main")


def a_job_request(**changes: Any) -> JobRequested:
    """A quarter of a device for a short batch job."""
    base = JobRequested(
        queue="main",
        job_id="train-7",
        workload=Workload(command=("/bin/true",)),
        resources=Resources(gpu_milli=250, gpu_memory_mib=4096),
    )
    return msgspec.structs.replace(base, **changes)


def a_spec(**changes: Any) -> JobSpec:
    """What a_job_request is admitted as."""
    base = JobSpec(
        queue=MAIN_QUEUE,
        kind=WorkloadKind.BATCH,
        command=("/bin/true",),
        compute_milli=250,
        memory_mib=4096,
    )
    return msgspec.structs.replace(base, **changes)


def a_job(name: str = "train-7", *, tenant: TenantId = ACME, answers: int = 1, **spec: Any) -> JobAdmitted:
    """A job that waits for slices."""
    return JobAdmitted(
        job_id=JobId(f"{tenant}/{name}"),
        tenant=tenant,
        answers=answers,
        wish_id=f"wish-of-{name}",
        spec=a_spec(**spec),
    )


def a_device(index: int = 0, *, node: str = "node-1", **changes: Any) -> Device:
    """A whole free device of 80 GiB that offers every mode that needs no hardware partition."""
    base = Device(
        uuid=DeviceUuid(f"GPU-{node}-{index}"),
        index=index,
        model="h100-80",
        memory_mib=81_920,
        sms=132,
        modes=(Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE),
    )
    return msgspec.structs.replace(base, **changes)


def a_board(**changes: Any) -> Mig:
    """What an H100 with 80 GB can be cut into, MIG mode on."""
    rows = (
        ("1g.10gb", (0, 1, 2, 3, 4, 5, 6), 1, 1, 9_984, 7),
        ("1g.10gb+me", (0, 1, 2, 3, 4, 5, 6), 1, 1, 9_984, 1),
        ("1g.20gb", (0, 2, 4, 6), 2, 1, 20_096, 4),
        ("2g.20gb", (0, 2, 4), 2, 2, 20_096, 3),
        ("3g.40gb", (0, 4), 4, 3, 40_192, 2),
        ("4g.40gb", (0,), 4, 4, 40_192, 1),
        ("7g.80gb", (0,), 8, 7, 81_152, 1),
    )
    profiles = tuple(
        MigProfile(
            name=name,
            starts=starts,
            size=size,
            memory_mib=memory_mib,
            sms=16 * compute,
            compute_slices=compute,
            instances_max=most,
        )
        for name, starts, size, compute, memory_mib, most in rows
    )
    return msgspec.structs.replace(Mig(enabled=True, memory_slices=8, compute_slices=7, profiles=profiles), **changes)


def a_node(name: str = "node-1", *, devices: int = 2, **changes: Any) -> NodeRegistered:
    """A healthy node at epoch 0."""
    base = NodeRegistered(
        node_id=NodeId(name),
        session=f"{name}-s1",
        boot_id="boot-1",
        epoch=0,
        devices=tuple(a_device(i, node=name) for i in range(devices)),
        cpu_milli=64_000,
        memory_mib=512_000,
        simulated=True,
    )
    return msgspec.structs.replace(base, **changes)


def a_queue(name: str = "main", *, tenants: tuple[str, ...] = ("acme",), **changes: Any) -> QueueUpserted:
    """A queue without limits."""
    base = QueueUpserted(
        queue=QueueId(name), tenants=tuple(TenantId(t) for t in tenants), answers=0, actor="service:test"
    )
    return msgspec.structs.replace(base, **changes)


def a_placement(
    job: str = "acme/train-7",
    *,
    node: str = "node-1",
    device: int = 0,
    replica: int = 0,
    attempt: int = 1,
    compute_milli: int = 250,
    memory_mib: int = 4096,
    mode: Mode = Mode.MPS,
    **changes: Any,
) -> RunPlaced:
    """One slice on one device."""
    job_id = JobId(job)
    base = RunPlaced(
        run_id=run_id(job_id, replica, attempt),
        job_id=job_id,
        tenant=tenant_of_job(job_id),
        node_id=NodeId(node),
        node_epoch=0,
        queue=MAIN_QUEUE,
        slices=(
            Slice(
                device_uuid=DeviceUuid(f"GPU-{node}-{device}"),
                compute_milli=compute_milli,
                memory_mib=memory_mib,
                mode=mode,
            ),
        ),
        command=("/bin/true",),
    )
    return msgspec.structs.replace(base, **changes)


def as_fact(event: Fact, seq: int, *, author: str = "", at: int = NOON, basis: Basis | None = None) -> Entry:
    """The event as the stream of facts recorded it."""
    return Entry(
        stream=Stream.FACTS,
        seq=seq,
        recorded_at=at,
        event=event,
        event_id=f"fact-{seq}",
        author=Author(author or str(getattr(type(event), "AUTHOR", "admission"))),
        basis=basis,
    )


def as_wish(event: Wish, seq: int, *, tenant: TenantId = ACME, at: int = NOON, **changes: Any) -> Entry:
    """The event as the stream of wishes recorded it."""
    base = Entry(
        stream=Stream.WISHES,
        seq=seq,
        recorded_at=at,
        event=event,
        event_id=f"wish-{seq}",
        tenant=tenant,
        source="/test",
        digest=hash_of(event),
        subject_type=type(event).__name__,
    )
    return msgspec.structs.replace(base, **changes)


def hash_of(event: Event) -> str:
    """The digest of a wish's body as our own encoder writes it."""
    return hashlib.sha256(msgspec.json.encode(event)).hexdigest()
