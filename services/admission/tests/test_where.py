"""What a request demands of nodes and devices: filled in whole, or refused by the field that is wrong."""

from typing import Any

import msgspec
import pytest

from apportion.admission.refusals import Refused
from apportion.admission.validate import job_spec
from apportion.contracts.causes import Mode, Refusal
from apportion.contracts.events import DeviceChoice, JobRequested, JobSpec, Model, Placement, Resources, Runtime
from apportion.contracts.testing import NOON, a_job_request


def with_resources(**resources: Any) -> JobRequested:
    return a_job_request(resources=Resources(**resources))


def test_every_demand_arrives_in_the_spec() -> None:
    """A field that is accepted and lost on the way would be ignored silently."""
    request = msgspec.structs.replace(
        with_resources(
            gpu=2,
            numa="strict",
            encoders=50,
            pcie_mbps=100,
            device=DeviceChoice(
                vendor="nvidia", min_arch="ampere", min_compute_capability="8.0", linked=True, distinct=True
            ),
        ),
        placement=Placement(
            required={"rack": "r1"},
            preferred={"disk": "nvme"},
            avoid_nodes=("node-9",),
            site="oslo",
            network_segment="a",
        ),
        runtime=Runtime(min_driver="550", min_cuda="12.4"),
    )
    spec = job_spec(request, NOON)
    assert isinstance(spec, JobSpec)
    assert (spec.vendor, spec.min_arch, spec.min_compute_capability, spec.linked) == ("nvidia", "ampere", "8.0", True)
    assert spec.distinct
    assert spec.required == {"rack": "r1", "site": "oslo", "network_segment": "a"}
    assert (spec.preferred, spec.avoid_nodes) == ({"disk": "nvme"}, ("node-9",))
    assert (spec.min_driver, spec.min_cuda, spec.numa, spec.encoders, spec.pcie_mbps) == (
        "550", "12.4", "strict", 50, 100,
    )  # fmt: skip


def test_a_profile_is_an_instance_of_it() -> None:
    """With as much of a board as any instance of that name has, which quota goes by until it is placed."""
    spec = job_spec(with_resources(mig_profile="2g.20gb"), NOON)
    assert isinstance(spec, JobSpec)
    assert (spec.mode, spec.mig_profile, spec.devices) == (Mode.MIG, "2g.20gb", 1)
    assert (spec.compute_milli, spec.memory_mib) == (250, 17_920)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            with_resources(gpu=1, device=DeviceChoice(min_arch="haswell")),
            (Refusal.FIELD_INVALID, "resources.device.min_arch"),
        ),
        (with_resources(gpu=1, encoders=101), (Refusal.FIELD_INVALID, "resources.encoders")),
        (
            with_resources(cpu_milli=1, encoders=1, device=DeviceChoice(kind="cpu")),
            (Refusal.FIELD_CONFLICT, "resources.encoders"),
        ),
        (
            with_resources(gpu_milli=100, device=DeviceChoice(kind="qpu")),
            (Refusal.FIELD_CONFLICT, "resources.device.kind"),
        ),
        (
            a_job_request(resources=Resources(device=DeviceChoice(kind="dpu")), model=Model(params_millions=1)),
            (Refusal.FIELD_CONFLICT, "resources.device.kind"),
        ),
        (with_resources(gpu=2, mode=Mode.MIG), (Refusal.FIELD_CONFLICT, "resources.gpu")),
        (with_resources(gpu=2, mig_profile="1g.10gb"), (Refusal.FIELD_CONFLICT, "resources.gpu")),
        (with_resources(mig_profile="1g.10gb", mode=Mode.MPS), (Refusal.FIELD_CONFLICT, "resources.mode")),
        (with_resources(mig_profile="1g.10gb", gpu_milli=1), (Refusal.FIELD_CONFLICT, "resources.gpu_milli")),
        (
            with_resources(mig_profile="1g.10gb", gpu_memory_mib=1),
            (Refusal.FIELD_CONFLICT, "resources.gpu_memory_mib"),
        ),
        (
            a_job_request(placement=Placement(required={"site": "oslo"}, site="bergen")),
            (Refusal.FIELD_CONFLICT, "placement.site"),
        ),
    ],
)
def test_what_no_pool_could_give_is_refused_with_its_field(
    request_: JobRequested, expected: tuple[Refusal, str]
) -> None:
    """It is said at once, and not by a wait that never ends."""
    refused = job_spec(request_, NOON)
    assert isinstance(refused, Refused), refused
    assert (refused.code, refused.field) == expected
