"""``nvidia-smi`` of a simulated node: the queries and settings that scripts and operators use most."""

import json
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100,PTH120  a plain file beside the client
sys.path.insert(0, _HERE)
try:
    from apportion.node_agent.simgpu import client
except ModuleNotFoundError:  # Run as a plain file, without site: the client lies beside it.
    import client  # type: ignore[import-not-found,no-redef]

_MODES = {"0": "default", "DEFAULT": "default", "2": "prohibited", "PROHIBITED": "prohibited"}
_MODES |= {"3": "exclusive_process", "EXCLUSIVE_PROCESS": "exclusive_process"}
_MODE_NAMES = {"default": "Default", "prohibited": "Prohibited", "exclusive_process": "Exclusive_Process"}


class _Node:
    def __init__(self) -> None:
        self._channel = client.Channel()
        self.system: dict[str, Any] = self.ask(op="system")

    def ask(self, **request: object) -> Any:
        self._channel.send(json.dumps(request))
        answer = json.loads(self._channel.read_line() or b'{"error": "NVML_ERROR_UNKNOWN", "message": ""}')
        if "error" in answer:
            raise client.GpuError(answer["error"], answer["message"])
        return answer["ok"]

    def devices(self, which: str | None) -> list[dict[str, Any]]:
        """The devices that ``-i`` names by index or UUID; all of them without it."""
        found = []
        for index, uuid in enumerate(self.system["uuids"]):
            if which is None or which in (str(index), uuid):
                found.append({**self.ask(op="device", index=index), "index": index})
        if not found:
            raise client.GpuError("NVML_ERROR_NOT_FOUND", f"No devices were found for {which}")
        return found


def _field(node: _Node, device: dict[str, Any], name: str, *, units: bool) -> str:
    used = device["used_mib"]
    free = device["memory_mib"] - device["reserved_mib"] - used
    values: dict[str, tuple[object, str]] = {
        "index": (device["index"], ""),
        "uuid": (device["uuid"], ""),
        "gpu_uuid": (device["uuid"], ""),
        "name": (device["name"], ""),
        "driver_version": (node.system["driver_version"], ""),
        "memory.total": (device["memory_mib"], " MiB"),
        "memory.used": (used, " MiB"),
        "memory.free": (free, " MiB"),
        "memory.reserved": (device["reserved_mib"], " MiB"),
        "utilization.gpu": (device["gpu_percent"], " %"),
        "temperature.gpu": (device["temperature_c"], ""),
        "power.draw": (f"{device['power_mw'] / 1000:.2f}", " W"),
        "power.limit": (f"{device['limit_mw'] / 1000:.2f}", " W"),
        "compute_mode": (_MODE_NAMES[device["compute_mode"]], ""),
        "compute_cap": (".".join(map(str, device["compute_capability"])), ""),
        "mig.mode.current": (_mig(device, "mig_enabled"), ""),
        "mig.mode.pending": (_mig(device, "mig_pending"), ""),
    }
    if name not in values:
        raise client.GpuError("NVML_ERROR_INVALID_ARGUMENT", f'Field "{name}" is not a valid field to query.')
    value, unit = values[name]
    return f"{value}{unit if units else ''}"


def _mig(device: dict[str, Any], which: str) -> str:
    return ("Enabled" if device[which] else "Disabled") if device["mig_capable"] else "[N/A]"


def _mig_command(node: _Node, arguments: list[str], which: str | None) -> int:
    """The listings of ``nvidia-smi mig``: sizes (-lgip), places (-lgipp) and instances (-lgi)."""
    for device in node.devices(which):
        mig = node.ask(op="mig", index=device["index"])
        if not mig["enabled"]:
            print(f"No MIG-enabled devices found: MIG mode of GPU {device['index']} is Disabled.")
            continue
        names = {size["id"]: size["name"] for size in mig["sizes"]}
        if "-lgi" in arguments:
            for one in mig["instances"]:
                print(
                    f"GPU {device['index']}  MIG {names[one['profile_id']]}  profile {one['profile_id']}  "
                    f"instance {one['id']}  placement {one['start']}:{one['size']}  {one['uuid']}"
                )
            continue
        for size in mig["sizes"]:
            if "-lgipp" in arguments:
                starts = ",".join(map(str, size["starts"]))
                print(f"GPU {device['index']} Profile ID {size['id']} Placements: {{{starts}}}:{size['size']}")
            else:
                print(
                    f"GPU {device['index']}  MIG {size['name']}  ID {size['id']}  "
                    f"free {size['remaining']}/{size['instances_max']}  {size['memory_mib'] / 1024:.2f} GiB  "
                    f"SM {size['sms']}"
                )
    return 0


def _query(names: list[str], rows: list[dict[str, str]], formats: list[str]) -> None:
    if "noheader" not in formats:
        print(", ".join(names))
    for row in rows:
        print(", ".join(row[name] for name in names))


def _value(arguments: list[str], name: str) -> str | None:
    """The value of ``--name=value`` or ``-n value``; None without it."""
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and position + 1 < len(arguments):
            return arguments[position + 1]
    return None


def _run(arguments: list[str]) -> int:
    node = _Node()
    which = _value(arguments, "-i") or _value(arguments, "--id")
    formats = (_value(arguments, "--format") or "csv").split(",")
    units = "nounits" not in formats
    if arguments[:1] == ["mig"]:
        return _mig_command(node, arguments, which)
    mig = _value(arguments, "-mig") or _value(arguments, "--multi-instance-gpu")
    if mig is not None:
        for device in node.devices(which):
            node.ask(op="set_mig", index=device["index"], enabled=mig in {"1", "ENABLED"})
            print(f"{'Enabled' if mig in {'1', 'ENABLED'} else 'Disabled'} MIG Mode for GPU {device['index']}")
        return 0
    if "-r" in arguments or "--gpu-reset" in arguments:
        for index, uuid in enumerate(node.system["uuids"]):
            if which in (None, str(index), uuid):  # Not devices(): a lost one has no answer, and needs it most.
                node.ask(op="reset", index=index)
                print(f"GPU {uuid} was successfully reset.")
        return 0
    if "-L" in arguments:
        for device in node.devices(which):
            print(f"GPU {device['index']}: {device['name']} (UUID: {device['uuid']})")
            if device["mig_enabled"]:
                mig = node.ask(op="mig", index=device["index"])
                sizes = {size["id"]: size["name"] for size in mig["sizes"]}
                usable = [one for one in mig["instances"] if one["has_compute"]]
                for number, one in enumerate(usable):
                    print(f"  MIG {sizes[one['profile_id']]} Device {number}: (UUID: {one['uuid']})")
        return 0
    mode = _value(arguments, "-c") or _value(arguments, "--compute-mode")
    if mode is not None:
        if mode not in _MODES:
            raise client.GpuError("NVML_ERROR_INVALID_ARGUMENT", f"no compute mode {mode}")
        for device in node.devices(which):
            node.ask(op="set_compute_mode", index=device["index"], mode=_MODES[mode])
            print(f"Set compute mode to {mode} for GPU {device['index']}.")
        return 0
    fields = _value(arguments, "--query-gpu")
    if fields is not None:
        names = [name.strip() for name in fields.split(",")]
        rows = [{name: _field(node, device, name, units=units) for name in names} for device in node.devices(which)]
        _query(names, rows, formats)
        return 0
    fields = _value(arguments, "--query-compute-apps")
    if fields is not None:
        names = [name.strip() for name in fields.split(",")]
        rows = []
        for device in node.devices(which):
            for pid, mib, _ in node.ask(op="processes", index=device["index"], mps=False):
                known = {"pid": str(pid), "used_memory": f"{mib}{' MiB' if units else ''}", "gpu_uuid": device["uuid"]}
                rows.append({**dict.fromkeys(names, "[N/A]"), **known})
        _query(names, rows, formats)
        return 0
    if arguments and which is None:
        client.complain("nvidia-smi", f"Invalid combination of input arguments: {' '.join(arguments)}")
        return 2
    for device in node.devices(which):
        print(
            f"{device['index']}  {device['name']}  {device['temperature_c']} C  {device['power_mw'] / 1000:.0f} W  "
            f"{device['used_mib']} / {device['memory_mib']} MiB  {device['gpu_percent']} %"
        )
    return 0


def main(arguments: list[str]) -> int:
    """The tool's exit code; 6 where a device is not found, 15 where it is lost, as the original has it."""
    try:
        return _run(arguments)
    except client.GpuError as error:
        print(error.message or error.code)
        return {"NVML_ERROR_NOT_FOUND": 6, "NVML_ERROR_GPU_IS_LOST": 15}.get(error.code, 9)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
