"""Who may share a device with whom: levels of isolation, the modes that give them, and what a kind prefers."""

from typing import Any

import msgspec
import pytest

from apportion.admission.refusals import Refused
from apportion.admission.testing import History
from apportion.admission.validate import DEFAULTS, MODES_OF_LEVEL, job_spec
from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, Refusal, WorkloadKind
from apportion.contracts.events import Isolation, IsolationLevel, JobRequested, JobSpec, Resources, Workload
from apportion.contracts.testing import NOON, a_device, a_job_request, a_node, a_queue

TRAINING, INFERENCE, BATCH = WorkloadKind.TRAINING, WorkloadKind.INFERENCE, WorkloadKind.BATCH


def a_request(kind: WorkloadKind = BATCH, level: IsolationLevel | None = None, **resources: Any) -> JobRequested:
    return a_job_request(
        workload=Workload(command=("/bin/true",), kind=kind),
        resources=Resources(**(resources or {"gpu_milli": 250, "gpu_memory_mib": 4096})),
        isolation=None if level is None else Isolation(level=level),
    )


def spec_of(request: JobRequested, isolation: IsolationLevel = IsolationLevel.NONE) -> JobSpec:
    spec = job_spec(request, NOON, msgspec.structs.replace(DEFAULTS, isolation=isolation))
    assert isinstance(spec, JobSpec), spec
    return spec


@pytest.mark.parametrize(
    ("kind", "resources", "modes"),
    [
        (INFERENCE, {"gpu_milli": 200}, (Mode.MPS, Mode.MIG, Mode.TIMESLICE)),
        (TRAINING, {"gpu_milli": 500}, (Mode.MIG, Mode.MPS, Mode.TIMESLICE)),
        (TRAINING, {"gpu_memory_mib": 9000}, (Mode.MIG, Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE)),
        (BATCH, {"gpu_milli": 500}, ()),
        (TRAINING, {"gpu": 1}, ()),
    ],
)
def test_each_kind_prefers_its_modes(kind: WorkloadKind, resources: dict[str, Any], modes: tuple[Mode, ...]) -> None:
    """Training wants a device or a partition to itself, inference neighbours; who asked for a share gets a share."""
    assert spec_of(a_request(kind, **resources)).modes == modes


@pytest.mark.parametrize(
    ("level", "modes"),
    [
        (IsolationLevel.MEMORY, (Mode.MIG, Mode.MPS, Mode.EXCLUSIVE)),
        (IsolationLevel.FAULT, (Mode.MIG, Mode.EXCLUSIVE)),
    ],
)
def test_a_level_leaves_the_modes_that_give_it(level: IsolationLevel, modes: tuple[Mode, ...]) -> None:
    """A whole device for a share comes last: it is what remains where nothing smaller isolates."""
    spec = spec_of(a_request(level=level))
    assert (spec.modes, spec.isolation, spec.dedicated, spec.compute_milli) == (modes, level, False, 250)


@pytest.mark.parametrize("level", [IsolationLevel.DEDICATED, IsolationLevel.CONFIDENTIAL])
def test_a_dedicated_job_has_its_device_to_itself(level: IsolationLevel) -> None:
    """Whatever share it named: nobody else may have the rest."""
    spec = spec_of(a_request(level=level))
    assert (spec.mode, spec.dedicated, spec.isolation) == (Mode.EXCLUSIVE, True, level)
    assert (spec.compute_milli, spec.memory_mib) == (1000, 4096)


def test_a_tenant_that_shares_nothing_is_isolated_without_asking() -> None:
    """What a tenant is bound to is the least; a job may ask for more, and not for less."""
    least = IsolationLevel.FAULT
    assert spec_of(a_request(INFERENCE), least).modes == (Mode.MIG, Mode.EXCLUSIVE)
    assert spec_of(a_request(level=IsolationLevel.MEMORY), least).isolation is least
    assert spec_of(a_request(level=IsolationLevel.DEDICATED), least).dedicated


@pytest.mark.parametrize(
    ("level", "mode"),
    [(level, mode) for level in IsolationLevel for mode in Mode if mode is not Mode.MIG],
)
def test_a_mode_that_cannot_give_the_level_is_refused_with_those_that_can(level: IsolationLevel, mode: Mode) -> None:
    """Either the mode or the level would be a promise that we break."""
    milli: dict[str, Any] = {} if mode is Mode.EXCLUSIVE else {"gpu_milli": 300}
    found = job_spec(a_request(level=level, gpu_memory_mib=4096, mode=mode, **milli), NOON)
    if mode in MODES_OF_LEVEL[level]:
        assert isinstance(found, JobSpec)
        assert found.mode is mode
    else:
        assert isinstance(found, Refused)
        assert (found.code, found.field, found.found) == (Refusal.ISOLATION_UNAVAILABLE, "resources.mode", str(mode))
        assert "exclusive" in found.expected


def test_a_job_without_a_device_has_nothing_to_isolate() -> None:
    """It would be a promise about nothing."""
    resources = Resources(cpu_milli=1000, device=ev.DeviceChoice(kind="cpu"))
    found = job_spec(a_job_request(resources=resources, isolation=Isolation(level=IsolationLevel.FAULT)), NOON)
    assert isinstance(found, Refused)
    assert (found.code, found.field) == (Refusal.FIELD_CONFLICT, "isolation.level")


def test_what_no_device_offers_is_rejected_with_what_could_be_given() -> None:
    """Waiting for a mode that the pool doesn't have would be waiting for ever."""
    history = History()
    history.fact(a_queue())
    shared = tuple(a_device(i, modes=(Mode.MPS, Mode.TIMESLICE)) for i in range(2))
    history.fact(msgspec.structs.replace(a_node(), devices=shared))
    history.wish(a_request(level=IsolationLevel.FAULT))
    history.wish(a_request(level=IsolationLevel.MEMORY), event_id="w2")
    rejected, admitted = history.settle()
    assert isinstance(rejected, ev.JobRejected)
    assert (rejected.code, rejected.field) == (Refusal.ISOLATION_UNAVAILABLE, "isolation.level")
    assert rejected.expected == "fault, which mig or exclusive gives"
    assert rejected.found == "devices that offer mps, timeslice"
    assert "isolation.level memory" in rejected.message
    assert isinstance(admitted, ev.JobAdmitted)


def test_a_pool_without_nodes_promises_nothing_and_refuses_nothing() -> None:
    """Nodes may come; what they will offer is not known."""
    history = History()
    history.fact(a_queue())
    history.wish(a_request(level=IsolationLevel.FAULT))
    assert isinstance(history.settle()[0], ev.JobAdmitted)


def test_the_pool_may_prefer_other_modes() -> None:
    """The claim carries it, so that a replay prefers the same."""
    history = History()
    history.fact(a_queue())
    config: dict[str, int | str] = {"modes_batch": "timeslice,mps"}
    history.fact(ev.LeaseClaimed(author="admission", session="s", core="c", config=config))
    history.wish(a_request())
    admitted = history.settle()[0]
    assert isinstance(admitted, ev.JobAdmitted)
    assert admitted.spec.modes == (Mode.TIMESLICE, Mode.MPS)


def test_what_a_node_offers_that_is_away_is_no_ground_to_refuse() -> None:
    """It may come back: the job is let in, and the placer says what it waits for."""
    history = History()
    history.fact(a_queue())
    history.fact(msgspec.structs.replace(a_node("plain"), devices=(a_device(modes=(Mode.MPS,)),)))
    mig = msgspec.structs.replace(a_node("cut"), devices=(a_device(1, node="cut", modes=(Mode.MIG,)),))
    history.wish(a_request(level=IsolationLevel.FAULT))
    (refused,) = history.settle()
    assert isinstance(refused, ev.JobRejected)
    history.fact(mig)
    history.fact(ev.NodeFenced(node_id=mig.node_id, epoch=1, runs=()))
    history.wish(a_request(level=IsolationLevel.FAULT), event_id="w2")
    (admitted,) = history.settle()
    assert isinstance(admitted, ev.JobAdmitted)
