"""The agent's way to hardware, through pynvml and a C library: what C wrote is what we read, field by field."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.node_agent.isolation import subject

SCRIPT = """
import json, msgspec
from apportion.contracts.ids import DeviceUuid
from apportion.node_agent.nvml import open_devices
with open_devices(None) as devices:
    (info,) = devices.inventory()
    uuid = info.uuid
    found = {
        "driver": msgspec.to_builtins(devices.driver()),
        "info": msgspec.to_builtins(info),
        "reading": msgspec.to_builtins(devices.reading(uuid)),
        "mode": devices.compute_mode(uuid),
        "processes": msgspec.to_builtins(devices.processes(uuid)),
        "health": msgspec.to_builtins(devices.health(uuid)),
        "limits": devices.memory_limits_answer("/sys/fs/cgroup"),
    }
    devices.watch_xids([uuid])
    found["events"] = [msgspec.to_builtins(devices.wait_xid(1)) for _ in range(3)]
    before = devices.mig.state(uuid)
    found["mig"] = msgspec.to_builtins(before)
    made = devices.mig.create(uuid, before.sizes[0], 4)
    found["made"] = msgspec.to_builtins(made)
    try:
        devices.mig.create(uuid, before.sizes[0], 5)
    except Exception as error:
        found["second"] = error.name
    devices.mig.destroy(uuid, made.number)
    devices.mig.destroy(uuid, made.number)
    found["after"] = msgspec.to_builtins(devices.mig.state(uuid).instances)
print(json.dumps(found))
"""


def compiled(directory: Path, source: str, library: str) -> None:
    """Compile a stub into the directory; skips where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here: the contract tests of marshalling need gcc")
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(directory / library)]
    subprocess.run([compiler, *options, Path(__file__).with_name(source)], check=True)


def test_what_the_library_writes_is_what_the_agent_reads(tmp_path: Path) -> None:
    compiled(tmp_path, "nvml_stub.c", "libnvidia-ml.so.1")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["driver"] == {
        "driver_version": "580.95.05",
        "driver_branch": 580,
        "cuda_version": [13, 0],
        "is_simulated": False,
    }
    info = found["info"]
    assert (info["uuid"], info["name"], info["architecture"], info["compute_capability"]) == (
        "GPU-stub",
        "NVIDIA H200",
        "hopper",
        [9, 0],
    )
    assert (info["memory_mib"], info["usable_mib"], info["sms"]) == (1000, 960, 132)
    assert (info["pci_bus_id"], info["numa_node"], info["cpus"]) == ("00000000:1A:00.0", 1, [0, 63, 65])
    assert (info["pcie_generation"], info["pcie_lanes"], info["nvlinks"], info["encoder_percent"]) == (5, 16, 2, 0)
    assert (found["reading"]["used_mib"], found["reading"]["free_mib"]) == (260, 700)
    assert found["reading"]["power_mw"] is None
    assert found["mode"] == "exclusive_process"
    assert found["processes"] == [
        {"pid": 101, "used_mib": 10, "is_mps_client": True},
        {"pid": 102, "used_mib": 11, "is_mps_client": False},
    ]
    assert found["health"] == {
        "recovery_action": 4,
        "remap_pending": True,
        "remap_failed": False,
        "uncorrectable": 32,
        "temperature_c": 61,
        "slowdown_c": 81,
    }
    assert found["limits"] == "FunctionNotFound"
    assert found["events"] == [{"uuid": "GPU-stub", "xid": 109}, {"uuid": "GPU-stub", "xid": 0}, None]
    size = {"name": "1g.18gb", "profile_id": 19, "starts": [0, 1, 2, 3, 4, 5, 6], "size": 1, "memory_mib": 16384}
    assert found["mig"] == {
        "is_enabled": True,
        "is_pending": False,
        "sizes": [{**size, "sms": 16, "compute_slices": 1, "instances_max": 7}],
        "instances": [],
    }
    assert found["made"] == {
        "number": 5,
        "name": "1g.18gb",
        "start": 4,
        "size": 1,
        "uuid": "MIG-stub",
        "memory_mib": 16384,
        "sms": 16,
    }
    assert (found["second"], found["after"]) == ("InsufficientResources", [])


def test_a_party_of_the_isolation_tests_speaks_to_libcuda(tmp_path: Path) -> None:
    """Its calls, not its kernels: those have never met a board."""
    compiled(tmp_path, "cuda_stub.c", "libcuda.so.1")
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(tmp_path)}
    lines = (
        "alloc 100",
        "churn 2 50",
        "alloc 2000",
        "kernels sm 66 2000 2",
        "kernels l2 66 2000 1",
        "kernels dram 66 2000 1",
        "crash access",
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", subject.__file__],
        env=env,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        check=False,
    )
    uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    greeting, first, *answers = done.stdout.splitlines()
    assert greeting == f"ok direct {uuid} 132 500", done.stderr
    assert first.startswith("ok ")
    assert answers == [
        "ok 0",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "ok 2000 2000",
        "ok 2000",
        "ok 2000",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
    ]
    assert done.returncode == 78
