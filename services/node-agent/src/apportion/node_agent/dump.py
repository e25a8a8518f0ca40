"""A device's answers to every NVML getter that Apportion knows, as one JSON file.

``python -m apportion.node_agent.dump`` writes it. What a real board answers can so be laid beside what the simulator
says (``--diff ONE OTHER``). Nothing is set, started or reset: every call here only asks. A refusal is an answer, too,
by NVML's name for it.

The format: ``{"format": 1, "source": {…}, "system": {call: answer}, "devices": [{call: answer}, …]}``. A call is the
function's name, with its arguments beyond the device where it has any; an answer is a number, a text, a list, an
object of a struct's fields, or ``{"error": name}``.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pynvml
import structlog

from apportion.contracts.ids import NodeId
from apportion.node_agent.simgpu.nvml import SimulatedNvml
from apportion.node_agent.simgpu.profiles import DRIVERS, profiles
from apportion.node_agent.simnode import SimulatedNode

FORMAT: Final = 1
SYSTEM_CALLS: Final = (
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount",
)
_FIELDS: Final = (
    pynvml.NVML_FI_DEV_REMAPPED_COR,
    pynvml.NVML_FI_DEV_REMAPPED_UNC,
    pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
)
DEVICE_CALLS: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    ("nvmlDeviceGetIndex", ()),
    ("nvmlDeviceGetUUID", ()),
    ("nvmlDeviceGetName", ()),
    ("nvmlDeviceGetSerial", ()),
    ("nvmlDeviceGetMinorNumber", ()),
    ("nvmlDeviceGetPciInfo_v3", ()),
    ("nvmlDeviceGetArchitecture", ()),
    ("nvmlDeviceGetCudaComputeCapability", ()),
    ("nvmlDeviceGetNumGpuCores", ()),
    ("nvmlDeviceGetNumaNodeId", ()),
    ("nvmlDeviceGetCpuAffinity", (2,)),
    ("nvmlDeviceGetMaxPcieLinkGeneration", ()),
    ("nvmlDeviceGetMaxPcieLinkWidth", ()),
    ("nvmlDeviceGetNvLinkState", (0,)),
    ("nvmlDeviceGetNvLinkState", (17,)),
    ("nvmlDeviceGetEncoderCapacity", (pynvml.NVML_ENCODER_QUERY_H264,)),
    ("nvmlDeviceGetMemoryInfo", ()),
    ("nvmlDeviceGetMemoryInfo", (pynvml.nvmlMemory_v2,)),
    ("nvmlDeviceGetUtilizationRates", ()),
    ("nvmlDeviceGetTemperature", (pynvml.NVML_TEMPERATURE_GPU,)),
    ("nvmlDeviceGetTemperatureThreshold", (pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,)),
    ("nvmlDeviceGetPowerUsage", ()),
    ("nvmlDeviceGetEnforcedPowerLimit", ()),
    ("nvmlDeviceGetTotalEnergyConsumption", ()),
    ("nvmlDeviceGetComputeMode", ()),
    ("nvmlDeviceGetPersistenceMode", ()),
    ("nvmlDeviceGetAccountingMode", ()),
    ("nvmlDeviceGetAccountingPids", ()),
    ("nvmlDeviceGetComputeRunningProcesses_v3", ()),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", ()),
    ("nvmlDeviceGetProcessUtilization", (0,)),
    ("nvmlDeviceGetSupportedEventTypes", ()),
    ("nvmlDeviceGetFieldValues", (list(_FIELDS),)),
    ("nvmlDeviceGetRemappedRows", ()),
    (
        "nvmlDeviceGetTotalEccErrors",
        (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
    ),
    ("nvmlDeviceGetMigMode", ()),
    ("nvmlDeviceGetMaxMigDeviceCount", ()),
    *(("nvmlDeviceGetGpuInstanceProfileInfo", (profile,)) for profile in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)),
)
MEASURED: Final = frozenset(
    {
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetSerial",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetAccountingPids",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetProcessUtilization",
    }
)
"""Of these only the form is compared: their values are another one's on another board, or at another moment."""


def dump(module: Any, source: Mapping[str, Any]) -> dict[str, Any]:
    """Every answer of the library that is open; ``source`` says whose they are."""
    devices = []
    for index in range(int(module.nvmlDeviceGetCount())):
        handle = module.nvmlDeviceGetHandleByIndex(index)
        answers = {_title(name, arguments): _ask(module, name, handle, *arguments) for name, arguments in DEVICE_CALLS}
        for size in _mig_sizes(answers):
            answers[f"nvmlDeviceGetGpuInstancePossiblePlacements({size})"] = _places(module, handle, size)
        devices.append(answers)
    return {
        "format": FORMAT,
        "source": {"nvidia_ml_py": version("nvidia-ml-py"), **source},
        "system": {name: _ask(module, name) for name in SYSTEM_CALLS},
        "devices": devices,
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """What the first device of one dump answers otherwise than that of the other: a line each.

    A refusal against an answer, another refusal, another form, and another value where it isn't a measurement.
    """
    ours, theirs = one["devices"][0], other["devices"][0]
    for call in sorted({*ours, *theirs}):
        mine, yours = ours.get(call, {"error": "not asked"}), theirs.get(call, {"error": "not asked"})
        is_measured = call.partition("(")[0] in MEASURED
        if _is_refusal(mine) or _is_refusal(yours):
            if mine != yours:
                yield f"{call}: {_short(mine)} against {_short(yours)}"
        elif _form(mine) != _form(yours) and not (isinstance(mine, list) and is_measured):
            yield f"{call}: form {_short(_form(mine))} against {_short(_form(yours))}"
        elif mine != yours and not is_measured:
            yield f"{call}: {_short(mine)} against {_short(yours)}"


def _ask(module: Any, name: str, *arguments: Any) -> Any:
    try:
        return plain(getattr(module, name)(*arguments))
    except pynvml.NVMLError as error:
        return {"error": type(error).__name__.removeprefix("NVMLError_")}


def plain(value: Any) -> Any:
    """A value of pynvml's as JSON has it: structs by field, arrays as lists, bytes as text.

    >>> plain(pynvml.c_nvmlUtilization_t(gpu=3, memory=1))
    {'gpu': 3, 'memory': 1}
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return value.decode(errors="replace")
        case ctypes.Union():
            return int(value.uiVal) if hasattr(value, "uiVal") else None  # the fields that are asked are all unsigned
        case ctypes.Structure():
            return {field[0]: plain(getattr(value, field[0])) for field in value._fields_ if field[0] not in _UNSTABLE}
        case ctypes.Array() | list() | tuple():
            return [plain(each) for each in value]
        case _:
            found = getattr(value, "value", None)
            return found if isinstance(found, int) else {k: plain(v) for k, v in sorted(vars(value).items())}


_UNSTABLE: Final = frozenset({"timestamp", "latencyUsec", "timeStamp"})


def _title(name: str, arguments: tuple[Any, ...]) -> str:
    return f"{name}({','.join(map(str, arguments))})" if arguments else name


def _mig_sizes(answers: Mapping[str, Any]) -> list[int]:
    found = [answer for call, answer in answers.items() if call.startswith("nvmlDeviceGetGpuInstanceProfileInfo")]
    return sorted({answer["id"] for answer in found if "id" in answer})


def _places(module: Any, handle: Any, size: int) -> Any:
    room, count = (pynvml.c_nvmlGpuInstancePlacement_t * 16)(), ctypes.c_uint(16)
    answer = _ask(
        module, "nvmlDeviceGetGpuInstancePossiblePlacements", handle, size, ctypes.byref(room), ctypes.byref(count)
    )
    return answer if _is_refusal(answer) else [plain(room[place]) for place in range(count.value)]


def _is_refusal(answer: Any) -> bool:
    return isinstance(answer, dict) and "error" in answer


def _form(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {key: _form(each) for key, each in answer.items()}
    if isinstance(answer, list):
        return [_form(answer[0]), len(answer)] if answer else []
    return type(answer).__name__


def _short(answer: Any) -> str:
    text = json.dumps(answer)
    return text if len(text) <= 160 else text[:157] + "..."


def of_hardware() -> dict[str, Any]:
    """This machine's own devices; raises pynvml.NVMLError where there is no driver."""
    pynvml.nvmlInit()
    try:
        return dump(pynvml, {"simulated": False})
    finally:
        pynvml.nvmlShutdown()


async def of_simulator(profile: str, driver: str) -> dict[str, Any]:
    """One simulated device."""
    with tempfile.TemporaryDirectory(prefix="dump-") as directory:
        node = SimulatedNode(NodeId("dump"), state_dir=Path(directory), devices=1, profile=profile, driver=driver)
        await node.open()
        try:
            module = SimulatedNvml(node.socket_path)
            module.nvmlInit()
            try:
                return dump(module, {"simulated": True, "profile": profile, "driver": driver})
            finally:
                module.nvmlShutdown()
        finally:
            await node.close()
            node.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(node.pid, 0)  # noqa: ASYNC222  it was killed a moment ago


def main(argv: list[str] | None = None) -> int:
    """Print a dump, or what two differ in; 1 where they do, 2 where there is no driver."""
    parser = argparse.ArgumentParser(prog="python -m apportion.node_agent.dump", description=__doc__)
    parser.add_argument("--simulated", metavar="PROFILE", choices=sorted(profiles()), help="a simulated board's")
    parser.add_argument("--driver", choices=sorted(DRIVERS), default="580", help="its driver")
    parser.add_argument("--diff", nargs=2, metavar=("ONE", "OTHER"), type=Path, help="compare two dumps")
    # Standard output is for the result alone.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    arguments = parser.parse_args(argv)
    if arguments.diff:
        one, other = (json.loads(path.read_text()) for path in arguments.diff)
        lines = list(differences(one, other))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return 1 if lines else 0
    try:
        found = (
            asyncio.run(of_simulator(arguments.simulated, arguments.driver)) if arguments.simulated else of_hardware()
        )
    except pynvml.NVMLError as error:
        sys.stderr.write(f"no driver answers here ({error}): --simulated h200 dumps a simulated board\n")
        return 2
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
