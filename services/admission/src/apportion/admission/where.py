"""What a request demands of nodes and devices beside room: labels, versions, kinds and nearness, checked and filled in.

Whether any node is like that is the placer's to say, of the pool as it is; here is judged what no pool could give.
"""

from typing import Final

from msgspec import Struct

from apportion.admission.refusals import Refused
from apportion.contracts.causes import Mode, Refusal
from apportion.contracts.events import DeviceChoice, JobRequested, Placement, Runtime
from apportion.contracts.units import ARCHITECTURES, MILLI_PER_DEVICE

ENCODERS_MAX: Final = 100
"""Percent of one device's encoding capacity."""


class Demands(Struct, frozen=True, kw_only=True):
    """Fields of the specification of the same names."""

    device_kind: str = "gpu"
    vendor: str = ""
    models: tuple[str, ...] = ()
    min_arch: str = ""
    min_compute_capability: str = ""
    min_driver: str = ""
    min_cuda: str = ""
    required: dict[str, str] = {}
    preferred: dict[str, str] = {}
    avoid_nodes: tuple[str, ...] = ()
    numa: str = ""
    linked: bool = False
    distinct: bool = False
    mig_profile: str = ""
    encoders: int = 0
    pcie_mbps: int = 0


_NONE: Final = Demands()


def demands_of(request: JobRequested) -> Demands | Refused:
    """What the request demands, or why nothing could be like that."""
    resources = request.resources
    if (
        resources.device is None
        and request.placement is None
        and request.runtime is None
        and resources.numa is None
        and resources.mig_profile is None
        and not resources.encoders
        and not resources.pcie_mbps
        and resources.mode is not Mode.MIG
    ):
        return _NONE
    device = resources.device or DeviceChoice()
    placement = request.placement or Placement()
    runtime = request.runtime or Runtime()
    required = _labels(placement)
    if isinstance(required, Refused):
        return required
    for refused in (_device(request, device), _partition(request)):
        if refused is not None:
            return refused
    return Demands(
        device_kind=device.kind,
        vendor=device.vendor or "",
        models=device.models,
        min_arch=device.min_arch or "",
        min_compute_capability=device.min_compute_capability or "",
        min_driver=runtime.min_driver or "",
        min_cuda=runtime.min_cuda or "",
        required=required,
        preferred=placement.preferred,
        avoid_nodes=placement.avoid_nodes,
        numa="" if resources.numa in {None, "none"} else str(resources.numa),
        linked=bool(device.linked),
        distinct=bool(device.distinct),
        mig_profile=resources.mig_profile or "",
        encoders=resources.encoders or 0,
        pcie_mbps=resources.pcie_mbps or 0,
    )


def share_of_profile(name: str) -> tuple[int, int]:
    """Milli-GPU and MiB that an instance of the profile has at least: the board that it is made on says exactly.

    >>> share_of_profile("1g.10gb")
    (125, 8960)
    """
    slices, _, rest = name.partition("g.")
    # Boards have at most eight memory slices, and their makers round the size in a profile's name up.
    return max(1, int(slices) * MILLI_PER_DEVICE // 8), int(rest.partition("gb")[0]) * 1024 * 7 // 8


def _labels(placement: Placement) -> dict[str, str] | Refused:
    required = dict(placement.required)
    for name, value in (("site", placement.site), ("network_segment", placement.network_segment)):
        if value is None:
            continue
        if required.get(name, value) != value:
            return Refused(
                code=Refusal.FIELD_CONFLICT,
                field=f"placement.{name}",
                expected=f"{required[name]}, as placement.required.{name} says",
                found=value,
                hint="Say it once.",
            )
        required[name] = value
    return required


def _device(request: JobRequested, device: DeviceChoice) -> Refused | None:
    resources = request.resources
    if device.min_arch is not None and device.min_arch not in ARCHITECTURES:
        return Refused(
            code=Refusal.FIELD_INVALID,
            field="resources.device.min_arch",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            found=device.min_arch,
        )
    if resources.encoders is not None and resources.encoders > ENCODERS_MAX:
        return Refused(
            code=Refusal.FIELD_INVALID,
            field="resources.encoders",
            expected=f"at most {ENCODERS_MAX}: percent of one device's encoding capacity",
            found=str(resources.encoders),
        )
    if device.kind == "cpu":
        for name, asked in (("encoders", resources.encoders), ("pcie_mbps", resources.pcie_mbps)):
            if asked:
                return Refused(
                    code=Refusal.FIELD_CONFLICT,
                    field=f"resources.{name}",
                    expected="nothing, for a job without a device",
                    found=str(asked),
                )
    elif device.kind != "gpu" and (resources.gpu_milli or resources.gpu_memory_mib or request.model is not None):
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="resources.device.kind",
            expected="gpu, since a share of a device is asked",
            found=device.kind,
            hint="Devices of other kinds are given as a whole: say how many with resources.gpu.",
        )
    return None


def _partition(request: JobRequested) -> Refused | None:
    resources = request.resources
    name = resources.mig_profile
    if name is None and resources.mode is not Mode.MIG:
        return None
    field = "resources.mode" if name is None else "resources.mig_profile"
    found = "mig" if name is None else name
    if (resources.gpu or 1) > 1:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="resources.gpu",
            expected=f"1 beside {field}, as a process can use one instance",
            found=str(resources.gpu),
            hint="Ask for a gang of replicas with an instance each.",
        )
    if name is None:
        return None
    if resources.mode not in {None, Mode.MIG}:
        return Refused(
            code=Refusal.FIELD_CONFLICT,
            field="resources.mode",
            expected=f"mig beside mig_profile {name}",
            found=str(resources.mode),
        )
    for other in ("gpu_milli", "gpu_memory_mib"):
        asked = getattr(resources, other)
        if asked is not None:
            return Refused(
                code=Refusal.FIELD_CONFLICT,
                field=f"resources.{other}",
                expected=f"nothing beside mig_profile, which says what the instance has ({found})",
                found=str(asked),
                hint="With resources.mode mig alone, the smallest instance with that much is given.",
            )
    return None
