"""What this node can enforce with, found by trying: the driver's answer counts, never its version number alone.

Each probe has a name and one short word as its result, which stand in the node's registration as they are.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from apportion.node_agent import tools
from apportion.node_agent.enforce.mps import CONTROL
from apportion.node_agent.nvml import Devices

MPS: Final = "mps"
"""``none``, ``v2``, or ``v3`` where namespaces are there as well."""
MPS_PARTITIONS: Final = "mps_sm_partitions"
"""``yes`` or ``no``: exclusive SMs for each client."""
MEMORY_LIMITS: Final = "memory_limits"
"""``ok``, or the name of NVML's refusal to tell a cgroup's device memory limits."""
CGROUP: Final = "cgroup"
"""``v2``, ``hybrid``, ``v1`` or ``none``."""
ROOT: Final = "root"
SYSTEMD: Final = "systemd"

_ANSWER_S_MAX: Final = 5.0
_CGROUPS: Final = Path("/sys/fs/cgroup")


def probe(devices: Devices, *, path: str, env: Mapping[str, str]) -> dict[str, str]:
    """All probes' results by name, in a fixed order."""
    usage = _usage(path, env, "-h")
    usage_v3 = _usage(path, env, "-p", "3", "-h") if usage else ""
    has_v3 = "namespace" in usage_v3 and "server" in usage_v3
    return {
        CGROUP: _cgroup(_CGROUPS),
        MEMORY_LIMITS: devices.memory_limits_answer(_own_cgroup()),
        MPS: "none" if not usage else "v3" if has_v3 else "v2",
        MPS_PARTITIONS: "yes" if "sm_partition" in usage else "no",
        ROOT: "yes" if os.geteuid() == 0 else "no",
        SYSTEMD: "yes" if Path("/run/systemd/system").is_dir() else "no",
    }


def _usage(path: str, env: Mapping[str, str], *arguments: str) -> str:
    """What the tool says of itself; nothing where there is none, or it refuses the question."""
    if shutil.which(CONTROL, path=path) is None:
        return ""
    try:
        done = tools.ask(["/usr/bin/env", CONTROL, *arguments], env={**env, "PATH": path}, s_max=_ANSWER_S_MAX)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def _cgroup(root: Path) -> str:
    if (root / "cgroup.controllers").exists():
        return "v2"
    if (root / "unified").is_dir():
        return "hybrid"
    return "v1" if (root / "memory").is_dir() or (root / "cpu").exists() else "none"


def _own_cgroup() -> str:
    """The path of this process's cgroup in the unified hierarchy; its root where it has none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return str(_CGROUPS)
    unified = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    return f"{_CGROUPS}{unified}".rstrip("/")
