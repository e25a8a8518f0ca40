"""The boards that can be simulated, from ``profiles.json``."""

from functools import cache
from pathlib import Path
from typing import Final

import msgspec


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One board: what NVML says about it while nothing runs."""

    key: str
    name: str
    architecture: str
    """The tail of pynvml's constant, as in NVML_DEVICE_ARCH_HOPPER."""
    compute_capability: tuple[int, int]
    memory_mib: int
    reserved_mib: int
    """Part of memory_mib that the driver keeps for itself."""
    sms: int
    cores_per_sm: int
    idle_w: int
    limit_w: int
    mig_capable: bool
    pcie_generation: int
    nvlinks: int


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    profiles: tuple[Profile, ...]


@cache
def profiles() -> dict[str, Profile]:
    """All boards by key, in the order of their age."""
    data = (Path(__file__).parent / "profiles.json").read_bytes()
    return {profile.key: profile for profile in msgspec.json.decode(data, type=_File).profiles}


DRIVERS: Final = {
    "580": ("580.95.05", "13.0"),
    "590": ("590.48.01", "13.1"),
    "610": ("610.43.02", "13.3"),
    "615": ("615.71.09", "13.4"),
}
"""Driver and CUDA versions by branch. What each branch brought is the model's business (simgpu/model.py)."""
