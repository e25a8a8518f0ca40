"""Runs in containers: the command lines as recorded, what is read back of them, and a whole life with a fake engine."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from apportion.contracts.ids import NodeId, RunId
from apportion.node_agent.containers import (
    Box,
    ContainerRefused,
    Containers,
    Engine,
    create_line,
    env_file,
    name_of,
    probe,
    read_back,
    start_line,
)
from apportion.node_agent.host_limits import Limits
from tests import engine_stand_in

NODE, RUN = NodeId("node-1"), RunId("acme/train/0/1")
DOCKER = Engine(name="docker", path="/usr/bin/docker", version="28.2.2")
PODMAN = Engine(name="podman", path="/usr/bin/podman", version="5.4.0")
WHOLE = Box(
    run_id=RUN,
    image="registry.example/team/train:1.2",
    command=("python", "train.py", "--epochs", "3"),
    env={"APPORTION_JOB_ID": "acme/train", "TEXT": "two\nlines"},
    devices=("GPU-1", "GPU-2"),
    limits=Limits(memory_mib=512, cpu_milli=1500, processes=64, cpus=(0, 2), nodes=(0,)),
    open_files_max=1024,
    user="1000:1000",
    work=Path("/data/nodes/node-1/runs/r/work"),
    mps_pipe="/data/nodes/node-1/mps/0",
)
RECORDED = (
    "create --name apportion-{name} --label io.apportion.node=node-1 --label io.apportion.run=acme/train/0/1"
    " --log-driver none --cap-drop ALL --security-opt no-new-privileges --ulimit core=0:0 --workdir /work"
    " --mount type=bind,source=/data/nodes/node-1/runs/r/work,target=/work --user 1000:1000 --ulimit nofile=1024:1024"
    " --pids-limit 64 --memory 512m --memory-swap 512m --cpus 1.500 --cpuset-cpus 0,2 --cpuset-mems 0 --ipc host"
    " --mount type=bind,source=/data/nodes/node-1/mps/0,target=/data/nodes/node-1/mps/0"
    " --device nvidia.com/gpu=GPU-1 --device nvidia.com/gpu=GPU-2 --env-file /dev/stdin --env TEXT=two\nlines"
    " --entrypoint python registry.example/team/train:1.2 train.py --epochs 3"
)


@pytest.mark.parametrize("engine", [DOCKER, PODMAN], ids=lambda engine: engine.name)
def test_the_command_lines_are_those_that_were_recorded(engine: Engine) -> None:
    """Every option is a promise: one that is lost is a limit that nobody holds."""
    name = name_of(NODE, RUN)
    wanted = RECORDED.format(name=name.removeprefix("apportion-")).split(" ")
    assert create_line(engine, NODE, WHOLE) == (engine.path, *wanted)
    assert start_line(engine, name) == (engine.path, "start", "--attach", "--sig-proxy=true", name)
    assert env_file(WHOLE.env) == "APPORTION_JOB_ID=acme/train\n"


def test_what_was_not_asked_for_is_not_on_the_line() -> None:
    """An image has a program of its own."""
    line = create_line(PODMAN, NODE, Box(run_id=RUN, image="a:1", work=Path("/w")))
    assert line[-3:] == ("--env-file", "/dev/stdin", "a:1")
    assert not {"--memory", "--cpus", "--cpuset-cpus", "--ipc", "--device", "--entrypoint", "--user"} & set(line)


def test_limits_are_believed_once_they_were_read_back() -> None:
    inspected = '{"Memory": 536870912, "NanoCpus": 1500000000, "PidsLimit": 64, "CpusetCpus": "0,2"}'
    found = {one.what: (one.asked, one.observed, one.by) for one in read_back(DOCKER, WHOLE, inspected)}
    assert found == {
        "host_memory": (512, 512, "docker"),
        "host_cpu": (1500, 1500, "docker"),
        "host_processes": (64, 64, "docker"),
        "host_cpus": (2, 2, "docker"),
    }


@pytest.mark.parametrize(
    "inspected",
    [
        '{"Memory": 0, "NanoCpus": 1500000000, "PidsLimit": 64, "CpusetCpus": "0,2"}',
        '{"Memory": 536870912, "NanoCpus": 1500000000, "PidsLimit": 64, "CpusetCpus": "0-3"}',
        '{"Memory": 536870912, "PidsLimit": null}',
        "[]",
        "what?",
    ],
)
def test_a_limit_that_reads_back_otherwise_fails_the_start(inspected: str) -> None:
    with pytest.raises(ContainerRefused) as refused:
        read_back(DOCKER, WHOLE, inspected)
    assert refused.value.is_unenforced


def test_a_client_without_its_engine_is_no_engine(tmp_path: Path) -> None:
    """Docker's client is there on many a machine whose server isn't."""
    tool = tmp_path / "docker"
    tool.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    tool.chmod(0o755)
    assert probe("auto", path=str(tmp_path), env={}) is None
    assert probe("none", path=str(tmp_path), env={}) is None


def test_the_real_client_takes_the_line() -> None:
    """As far as it looks at it before it asks its server; there is none."""
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("no docker client here: its own reading of the options can't be tried")
    engine = Engine(name="docker", path=docker, version="0")
    done = subprocess.run(
        create_line(engine, NODE, WHOLE),
        env={"PATH": os.defpath, "DOCKER_HOST": "unix:///no/such.sock"},
        input=env_file(WHOLE.env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "/no/such.sock" in done.stderr
    assert "flag" not in done.stderr


def fake_engine(directory: Path, name: str = "docker") -> Engine:
    """An engine on a path of its own, with its state in the same directory."""
    engine_stand_in.install(directory, name)
    found = probe("auto", path=str(directory), env={"HOME": str(directory)})
    assert found is not None
    return found


async def test_a_container_is_made_read_back_and_removed(tmp_path: Path) -> None:
    """And what an earlier agent left of a run that doesn't live."""
    engine = fake_engine(tmp_path, "podman")
    assert (engine.name, engine.version) == ("podman", "1.2.3")
    containers = Containers(engine, NODE, env={"HOME": str(tmp_path), "SECRET": "hush"})
    assert set(containers.env) == {"HOME"}
    box = Box(run_id=RUN, image="a:1", command=("true",), limits=Limits(memory_mib=64), work=tmp_path)
    (enforced,) = await containers.create(box)
    assert (enforced.what, enforced.observed, enforced.by) == ("host_memory", 64, "podman")
    assert await containers.recover({RUN}) == 0
    assert await containers.recover(set()) == 1
    assert list(tmp_path.glob("*.box")) == []
    assert await containers.remove(RUN)


@pytest.mark.parametrize(
    ("image", "is_unenforced", "said"),
    [
        ("no/such:image", False, "docker create: Error response from daemon: pull access denied for no/such"),
        ("half:memory", True, "host_memory: asked 64, docker has 32"),
    ],
)
async def test_a_container_that_is_not_as_it_was_asked_for_leaves_nothing(
    tmp_path: Path, image: str, is_unenforced: bool, said: str
) -> None:
    containers = Containers(fake_engine(tmp_path), NODE, env={"HOME": str(tmp_path)})
    box = Box(run_id=RUN, image=image, command=("true",), limits=Limits(memory_mib=64), work=tmp_path)
    with pytest.raises(ContainerRefused) as refused:
        await containers.create(box)
    assert (refused.value.is_unenforced, str(refused.value)) == (is_unenforced, f"{RUN}: {said}")
    assert list(tmp_path.glob("*.box")) == []
