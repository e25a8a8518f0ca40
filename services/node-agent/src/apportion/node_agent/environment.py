"""The environment of a run: a few variables of the agent's, the job's own, and ours over both; pure.

A run inherits nothing by accident. What would loosen a slice or load foreign code is the agent's to set, or nobody's.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from apportion.contracts.events import Enforced, RunPlaced, Slice
from apportion.contracts.ids import attempt_of_run, replica_of_run

INHERITED: Final = ("HOME", "LANG", "LC_ALL", "LOGNAME", "TZ", "USER")
RESERVED_PREFIXES: Final = ("APPORTION_", "CUDA_MPS_", "CUDA_VISIBLE_", "NVIDIA_", "LD_AUDIT", "LD_PRELOAD")
"""What a job says under these names is dropped."""

SLICES_VARIABLE: Final = "APPORTION_SLICES"
ENFORCED_VARIABLE: Final = "APPORTION_ENFORCED"
CPUS_VARIABLE: Final = "APPORTION_CPUS"
"""All are kept with the run, so that a new agent knows what an earlier one set up."""

_SLICES: Final = msgspec.json.Decoder(tuple[Slice, ...])
_ENFORCED: Final = msgspec.json.Decoder(tuple[Enforced, ...])


def environment_of(
    order: RunPlaced,
    *,
    inherited: Mapping[str, str],
    path: str,
    slice_env: Mapping[str, str],
    enforced: tuple[Enforced, ...],
    node_env: Mapping[str, str],
    cpus: tuple[int, ...] = (),
    checkpoint: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Everything that the run's process is told; ``path`` is appended to a PATH of the job's own."""
    env = {name: inherited[name] for name in INHERITED if name in inherited}
    env |= {name: value for name, value in order.env.items() if not name.startswith(RESERVED_PREFIXES)}
    env["PATH"] = f"{order.env['PATH']}:{path}" if order.env.get("PATH") else path
    env |= {
        "APPORTION_JOB_ID": order.job_id,
        "APPORTION_TENANT": order.tenant,
        "APPORTION_NODE_ID": order.node_id,
        "APPORTION_REPLICA": str(replica_of_run(order.run_id)),
        "APPORTION_ATTEMPT": str(attempt_of_run(order.run_id)),
        # Of each device: all slices of a run are alike.
        "APPORTION_MEMORY_MIB": str(min((piece.memory_mib for piece in order.slices), default=0)),
        "APPORTION_COMPUTE_MILLI": str(min((piece.compute_milli for piece in order.slices), default=0)),
        "APPORTION_CPU_MILLI": str(order.cpu_milli),
        "APPORTION_HOST_MEMORY_MIB": str(order.host_memory_mib),
        CPUS_VARIABLE: ",".join(map(str, cpus)),
        SLICES_VARIABLE: msgspec.json.encode(order.slices).decode(),
        ENFORCED_VARIABLE: msgspec.json.encode(enforced).decode(),
        "NVIDIA_VISIBLE_DEVICES": slice_env.get("CUDA_VISIBLE_DEVICES", ""),
        **(checkpoint or {}),
        **slice_env,
        **node_env,
    }
    return env


def slices_in(env: Mapping[str, str]) -> tuple[Slice, ...]:
    """The slices of a run that an earlier agent started; none where it can't be read."""
    try:
        return _SLICES.decode(env.get(SLICES_VARIABLE, "[]"))
    except msgspec.MsgspecError:
        return ()


def enforced_in(env: Mapping[str, str]) -> tuple[Enforced, ...]:
    """What an earlier agent had read back before it started the run."""
    try:
        return _ENFORCED.decode(env.get(ENFORCED_VARIABLE, "[]"))
    except msgspec.MsgspecError:
        return ()


def cpus_in(env: Mapping[str, str]) -> tuple[int, ...]:
    """The CPUs that an earlier agent kept the run to; none where it may use any.

    >>> cpus_in({"APPORTION_CPUS": "0,2"})
    (0, 2)
    """
    return tuple(int(cpu) for cpu in env.get(CPUS_VARIABLE, "").split(",") if cpu.isdecimal())
