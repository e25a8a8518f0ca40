"""MIG on a simulated node: instances at their placed starts, read back, and never one that nobody can name."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.contracts.causes import Mode
from apportion.contracts.events import MigPlacement, Slice
from apportion.contracts.ids import DeviceUuid, NodeId, RunId
from apportion.node_agent.enforce.mig import Mig
from apportion.node_agent.enforce.slices import EnforcementFailed, Slices
from apportion.node_agent.enforce.watchdog import Watchdog
from apportion.node_agent.machine import inventory_of, with_lost
from apportion.node_agent.nvml import Devices, NvmlFailed, open_devices
from apportion.node_agent.simgpu import client
from apportion.node_agent.simgpu.faults import Faults
from apportion.node_agent.simgpu.mig import MigBoard, MigSize, boards, free_starts
from apportion.node_agent.simnode import SimulatedNode

pytestmark = pytest.mark.integration

A, B = RunId("acme/a/0/1"), RunId("acme/b/0/1")
SMALL, HALF = MigPlacement(profile="1g.10gb", start=4, size=1), MigPlacement(profile="3g.40gb", start=0, size=4)
HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
import client
driver = client.Driver()
print(driver.devices[0].uuid, driver.devices[0].memory_mib, driver.devices[0].sms, flush=True)
for line in sys.stdin:
    try:
        print(driver.illegal_access(0) if line == "illegal\\n" else driver.alloc(0, int(line)), flush=True)
    except client.GpuError as error:
        print(error.code, flush=True)
"""


def feasible(board: MigBoard) -> set[tuple[str, ...]]:
    """Every multiset of plain sizes that has a placement."""
    plain = [size for size in board.profiles if not size.name.endswith("+me")]
    found: set[tuple[str, ...]] = set()
    seen: set[frozenset[tuple[str, int]]] = set()
    todo: list[list[tuple[MigSize, int]]] = [[]]
    while todo:
        taken = todo.pop()
        found.add(tuple(sorted(size.name for size, _ in taken)))
        for size in plain:
            for start in free_starts(board, size, taken):
                more = [*taken, (size, start)]
                key = frozenset((one.name, at) for one, at in more)
                if key not in seen:
                    seen.add(key)
                    todo.append(more)
    return found


@pytest.mark.parametrize(("board", "count"), [("a30", 4), ("h100-80", 28)])
def test_a_board_can_be_cut_in_as_many_ways_as_the_published_rules_give(board: str, count: int) -> None:
    """Starts and counts in the table are the ones that real listings show."""
    found = feasible(boards()[board])
    names = {name for one in found for name in one}
    maximal = [one for one in found if not any(tuple(sorted((*one, name))) in found for name in names)]
    assert len(maximal) == count


@given(st.sampled_from(sorted(boards())), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=12))
def test_instances_never_overlap(key: str, wishes: list[tuple[int, int]]) -> None:
    board = boards()[key]
    taken: list[tuple[MigSize, int]] = []
    for number, start in wishes:
        size = board.by_id(number)
        if size is not None and start in free_starts(board, size, taken):
            taken.append((size, start))
    covered = [place for size, start in taken for place in range(start, start + size.size)]
    assert len(covered) == len(set(covered))
    assert sum(size.compute_slices for size, _ in taken) <= board.compute_slices


class Bench:
    """One board in MIG mode."""

    def __init__(self, simulated: SimulatedNode, devices: Devices, directory: Path) -> None:
        self.devices = devices
        self.path = f"{simulated.tools}:{os.defpath}"
        self.env = {client.SOCKET_VARIABLE: str(simulated.socket_path)}
        self.directory = directory / "mig"
        self.watchdog = Watchdog(devices, session_of=lambda _: None)
        self.uuid = devices.inventory()[0].uuid
        self.holders: list[subprocess.Popen[str]] = []
        self.mig = self.an_agent()
        self.slices = Slices(devices, {Mode.MIG: self.mig}, usable={d.uuid: d for d in self.inventory().devices})

    def an_agent(self) -> Mig:
        """The enforcer of a new agent: it knows what its journal says."""
        return Mig(self.devices, self.watchdog, directory=self.directory)

    def inventory(self, mig: Mig | None = None) -> Any:
        foreign = None if mig is None else mig.foreign
        return inventory_of(self.devices, path=self.path, is_simulated=True, env=self.env, foreign=foreign)

    def there(self) -> list[tuple[str, int]]:
        state = self.devices.mig.state(self.uuid)
        assert state is not None
        return [(one.name, one.start) for one in state.instances]

    def hold(self, visible: str) -> "Holder":
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", HOLDER, str(Path(client.__file__).parent)],
            env={**self.env, "CUDA_VISIBLE_DEVICES": visible},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.holders.append(process)
        return Holder(process)


class Holder:
    """A process on an instance, which does what it is told."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        self.uuid, memory_mib, sms = process.stdout.readline().split()
        self.memory_mib, self.sms = int(memory_mib), int(sms)

    def say(self, what: object) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="na-") as directory:
        simulated = SimulatedNode(NodeId("node-1"), state_dir=Path(directory), devices=1, profile="h100-80")
        await simulated.open()
        with open_devices(simulated.socket_path) as devices, Faults(simulated.socket_path) as faults:
            faults.set_mig(0, enabled=True)
            one = Bench(simulated, devices, Path(directory))
            try:
                yield one
            finally:
                for process in one.holders:
                    process.kill()
                    process.communicate()
        await simulated.close()
        simulated.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(simulated.pid, 0)  # noqa: ASYNC222  it was killed a moment ago


def a_slice(uuid: DeviceUuid, place: MigPlacement | None, **changes: Any) -> Slice:
    base = Slice(device_uuid=uuid, compute_milli=100, memory_mib=9000, mode=Mode.MIG, mig=place)
    return msgspec.structs.replace(base, **changes)


async def test_an_instance_is_made_where_it_was_placed_and_holds_its_run(bench: Bench) -> None:
    """What was asked, applied and observed is told; another instance has its own memory and its own faults."""
    piece = a_slice(bench.uuid, SMALL)
    set_up = await bench.slices.apply(A, (piece,))
    other = await bench.slices.apply(B, (a_slice(bench.uuid, HALF, memory_mib=40_000, compute_milli=428),))
    assert bench.there() == [("3g.40gb", 0), ("1g.10gb", 4)]
    assert {one.what: (one.asked, one.applied, one.observed, one.by) for one in set_up.enforced} == {
        "memory": (9000, 9984, 9984, "mig_instance"),
        "compute": (100, 143, 121, "mig_instance"),
        "fault_domain": (1, 1, 1, "mig_instance"),
    }
    offender, neighbour = (bench.hold(one.env["CUDA_VISIBLE_DEVICES"]) for one in (set_up, other))
    assert (offender.memory_mib, offender.sms) == (9984, 16)
    assert offender.say(9984) == "CUDA_ERROR_OUT_OF_MEMORY"  # less its context
    assert neighbour.say(39_000).isdecimal()
    assert offender.say("illegal") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert neighbour.say(100).isdecimal()
    with pytest.raises(NvmlFailed, match="InUse"):
        await bench.slices.release(A, (piece,))
    offender.end()
    await bench.slices.release(A, (piece,))
    assert bench.there() == [("3g.40gb", 0)]


async def test_what_cannot_be_had_is_refused_and_nothing_is_left(bench: Bench) -> None:
    """No place, a place that the size doesn't have, no such size, too little of it, and a place that is taken."""
    await bench.slices.apply(B, (a_slice(bench.uuid, HALF, memory_mib=40_000, compute_milli=428),))
    refused: tuple[tuple[MigPlacement | None, dict[str, Any], str], ...] = (
        (None, {}, "place of the MIG slice"),
        (MigPlacement(profile="1g.10gb", start=7, size=1), {}, "place on"),
        (MigPlacement(profile="9g.99gb", start=0, size=1), {}, "place on"),
        (SMALL, {"memory_mib": 20_000}, "share on"),
        (MigPlacement(profile="2g.20gb", start=2, size=2), {}, "MIG instance"),
    )
    for place, changes, what in refused:
        with pytest.raises(EnforcementFailed, match=what):
            await bench.slices.apply(A, (a_slice(bench.uuid, place, **changes),))
        assert bench.there() == [("3g.40gb", 0)]
        assert list(bench.mig.records()) == [B]


async def test_a_new_agent_takes_away_what_is_ours_and_nothing_else(bench: Bench) -> None:
    """Whatever the moment at which the earlier one died: a record without an instance, or one just made."""
    state = bench.devices.mig.state(bench.uuid)
    assert state is not None
    size = state.size_named("1g.10gb")
    assert size is not None
    bench.devices.mig.create(bench.uuid, size, 6)  # somebody else's
    await bench.slices.apply(A, (a_slice(bench.uuid, HALF, memory_mib=40_000, compute_milli=428),))
    await bench.slices.apply(B, (a_slice(bench.uuid, SMALL),))
    journal = bench.directory / "acme%2Fb%2F0%2F1"
    record = msgspec.json.decode(journal.read_bytes())
    del record["uuid"]  # It died before it could write down what the driver had made.
    journal.write_bytes(msgspec.json.encode(record))
    later = bench.an_agent()
    device = bench.inventory(later).devices[0]
    assert device.modes == (Mode.MIG,)
    assert [(one.profile, one.start) for one in device.mig.foreign] == [("1g.10gb", 6)]
    assert await later.reconcile({A}) == ()
    assert bench.there() == [("3g.40gb", 0), ("1g.10gb", 6)]
    assert await later.reconcile(()) == ()
    assert bench.there() == [("1g.10gb", 6)]
    assert list(bench.directory.iterdir()) == []


async def test_what_a_node_can_do_is_probed_and_a_lost_device_stays_its_own(bench: Bench) -> None:
    found = bench.inventory()
    device = found.devices[0]
    assert (device.pcie_generation, device.pcie_lanes, device.nvlinks, device.encoders) == (5, 16, 18, 0)
    assert (device.mig.memory_slices, device.mig.compute_slices, len(device.mig.profiles)) == (8, 7, 7)
    assert found.cuda_version == "13.0"
    assert found.capabilities["mps"] == "v2"
    assert found.capabilities["memory_limits"] == "FunctionNotFound"
    gone = msgspec.structs.replace(found, devices=())
    assert with_lost(gone, found).devices == found.devices
