"""The simulated driver: it enforces what was configured, and nothing else."""

import pytest

from apportion.node_agent.simgpu.model import (
    CONTEXT_MIB,
    MPS_SERVER_MIB,
    Client,
    ComputeMode,
    DriverError,
    MpsDaemon,
    SimNode,
)
from apportion.node_agent.simgpu.mps import control
from apportion.node_agent.simgpu.profiles import DRIVERS, profiles

PIPE = "/run/mps-0"
SERVER_PID = 501


def a_node(profile: str = "a100-40", devices: int = 2) -> SimNode:
    return SimNode(
        node_name="node-1",
        profile=profiles()[profile],
        devices=devices,
        driver_version="580.95.05",
        cuda_version=13000,
    )


def a_client(node: SimNode, pid: int, *, pipe: str = "/tmp/nvidia-mps", **env: str) -> Client:
    visible = env.get("visible", "0")
    return node.connect(
        pid=pid,
        start_ticks=pid,
        visible=visible,
        pipe_directory=pipe,
        thread_percentage=env.get("percentage"),
        pinned_limit=env.get("pinned"),
        partition=env.get("partition"),
    )


def with_mps(node: SimNode, *commands: str) -> MpsDaemon:
    daemon = node.add_daemon(PIPE, 500, node.devices[0].uuid)
    node.add_server(daemon, SERVER_PID)
    for command in commands:
        control(node, daemon, command, 0)
    return daemon


def allocate(node: SimNode, client: Client, mib: int) -> int:
    return node.allocate(node.context(client, 0, 0), mib)


def code_of(refused: "pytest.ExceptionInfo[DriverError]") -> str:
    return refused.value.code


def test_under_a_pinned_limit_only_the_offender_is_refused() -> None:
    node = a_node()
    with_mps(node, f"set_device_pinned_mem_limit {SERVER_PID} 0 10G")
    offender = a_client(node, 11, pipe=PIPE)
    allocate(node, offender, 10 * 1024 - CONTEXT_MIB)
    with pytest.raises(DriverError) as refused:
        allocate(node, offender, 1)
    assert code_of(refused) == "CUDA_ERROR_OUT_OF_MEMORY"
    allocate(node, a_client(node, 12, pipe=PIPE), 10 * 1024 - CONTEXT_MIB)


def test_without_a_limit_the_neighbour_runs_out_of_memory() -> None:
    """The negative control: an agent that forgets the limit must see somebody hurt."""
    node = a_node()
    with_mps(node)
    allocate(node, a_client(node, 11, pipe=PIPE), 39 * 1024)
    with pytest.raises(DriverError) as refused:
        allocate(node, a_client(node, 12, pipe=PIPE), 10 * 1024 - CONTEXT_MIB)
    assert code_of(refused) == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_client_with_the_wrong_pipe_directory_gets_the_whole_device() -> None:
    """MPS fails open; so does the simulator."""
    node = a_node()
    with_mps(node, f"set_device_pinned_mem_limit {SERVER_PID} 0 10G", f"set_active_thread_percentage {SERVER_PID} 25")
    escaped = a_client(node, 11, pipe="/run/mps-O")
    allocate(node, escaped, 30 * 1024)
    assert node.sms_of(escaped, node.devices[0]) == node.devices[0].profile.sms


def test_a_limit_that_names_a_device_out_of_sight_drops_all_limits() -> None:
    node = a_node()
    with_mps(node, f"set_device_pinned_mem_limit {SERVER_PID} 0 10G")
    allocate(node, a_client(node, 11, pipe=PIPE, pinned=f"{node.devices[1].uuid}=1G"), 20 * 1024)


def test_a_client_can_only_tighten_its_limits() -> None:
    node = a_node()
    with_mps(node, f"set_device_pinned_mem_limit {SERVER_PID} 0 10G", f"set_active_thread_percentage {SERVER_PID} 50")
    greedy = a_client(node, 11, pipe=PIPE, pinned="0=30G", percentage="100")
    modest = a_client(node, 12, pipe=PIPE, pinned="0=2G", percentage="25")
    limits = [node.context(client, 0, 0).pinned_mib for client in (greedy, modest)]
    assert limits == [10 * 1024, 2 * 1024]
    assert [node.sms_of(client, node.devices[0]) for client in (greedy, modest)] == [54, 26]


def test_what_is_set_on_a_server_binds_only_clients_that_come_later() -> None:
    node = a_node()
    daemon = with_mps(node, f"set_device_pinned_mem_limit {SERVER_PID} 0 20G")
    early = a_client(node, 11, pipe=PIPE)
    control(node, daemon, f"set_device_pinned_mem_limit {SERVER_PID} 0 1G", 0)
    late = a_client(node, 12, pipe=PIPE)
    allocate(node, early, 18 * 1024)
    with pytest.raises(DriverError):
        allocate(node, late, 1024)


def test_limits_are_per_process_so_two_processes_take_twice_as_much() -> None:
    """Why a run needs a watchdog beside its pinned limit."""
    node = a_node()
    with_mps(node, f"set_device_pinned_mem_limit {SERVER_PID} 0 10G")
    for pid in (11, 12):
        allocate(node, a_client(node, pid, pipe=PIPE), 9 * 1024)
    assert node.devices[0].used_mib() == 2 * (9 * 1024 + CONTEXT_MIB) + MPS_SERVER_MIB


def test_the_end_of_a_process_frees_its_memory() -> None:
    node = a_node()
    client = a_client(node, 11)
    allocate(node, client, 20 * 1024)
    node.disconnect(client, 10)
    assert node.devices[0].used_mib() == 0


def test_an_illegal_access_takes_the_servers_clients_along() -> None:
    node = a_node()
    daemon = with_mps(node)
    offender, neighbour = a_client(node, 11, pipe=PIPE), a_client(node, 12, pipe=PIPE)
    node.context(neighbour, 0, 0)
    failed = node.illegal_access(node.context(offender, 0, 0), 5)
    assert {client.pid for client in failed} == {11, 12}
    with pytest.raises(DriverError) as refused:
        node.context(neighbour, 0, 6)
    assert code_of(refused) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert control(node, daemon, f"get_server_status {SERVER_PID}", 6).text == "FAULT"
    with pytest.raises(DriverError) as refused:
        a_client(node, 13, pipe=PIPE)
    assert code_of(refused) == "CUDA_ERROR_MPS_SERVER_NOT_READY"
    for client in (offender, neighbour):
        node.disconnect(client, 7)
    assert control(node, daemon, f"get_server_status {SERVER_PID}", 8).text == "ACTIVE"


def test_an_illegal_access_of_a_process_of_its_own_harms_nobody_else() -> None:
    node = a_node()
    offender, neighbour = a_client(node, 11), a_client(node, 12)
    node.context(neighbour, 0, 0)
    assert node.illegal_access(node.context(offender, 0, 0), 5) == [offender]
    allocate(node, neighbour, 1024)
    assert [(event.kind, event.data) for event in node.events] == [("xid", 31)]


def test_a_terminated_client_leaves_its_neighbours_alone() -> None:
    node = a_node()
    daemon = with_mps(node)
    ended, neighbour = a_client(node, 11, pipe=PIPE), a_client(node, 12, pipe=PIPE)
    allocate(node, ended, 10 * 1024)
    allocate(node, neighbour, 1024)
    control(node, daemon, f"terminate_client {SERVER_PID} 11", 5)
    assert control(node, daemon, f"get_client_list {SERVER_PID}", 5).text == "12"
    with pytest.raises(DriverError):
        node.context(ended, 0, 6)
    assert node.devices[0].used_mib() == 1024 + CONTEXT_MIB + MPS_SERVER_MIB


def test_the_end_of_the_daemon_is_the_end_of_its_clients_work() -> None:
    node = a_node()
    daemon = with_mps(node)
    client = a_client(node, 11, pipe=PIPE)
    node.context(client, 0, 0)
    assert node.remove_daemon(daemon, 1) == [client]
    with pytest.raises(DriverError):
        node.context(client, 0, 2)


def test_exclusive_process_keeps_others_out_unless_they_come_through_mps() -> None:
    node = a_node()
    node.devices[0].compute_mode = ComputeMode.EXCLUSIVE_PROCESS
    node.context(a_client(node, 11), 0, 0)
    with pytest.raises(DriverError) as refused:
        node.context(a_client(node, 12), 0, 0)
    assert code_of(refused) == "CUDA_ERROR_DEVICE_UNAVAILABLE"


def test_with_mps_exclusive_process_makes_an_escape_fail_closed() -> None:
    node = a_node()
    with_mps(node)
    node.devices[0].compute_mode = ComputeMode.EXCLUSIVE_PROCESS
    for pid in (11, 12):
        node.context(a_client(node, pid, pipe=PIPE), 0, 0)
    with pytest.raises(DriverError) as refused:
        node.context(a_client(node, 13), 0, 0)
    assert code_of(refused) == "CUDA_ERROR_DEVICE_UNAVAILABLE"


def test_visible_devices_end_at_the_first_that_is_not_there() -> None:
    node = a_node(devices=4)
    uuids = [device.uuid for device in node.devices]

    def seen(visible: str) -> list[int]:
        return [device.index for device in a_client(node, 11, visible=visible).devices]

    assert seen("2,0") == [2, 0]
    assert seen(f"{uuids[3]},{uuids[1][:12]}") == [3, 1]
    assert seen("1,9,0") == [1]
    assert seen("") == []


def test_a_lost_device_fails_everybody_and_comes_back_after_a_reset() -> None:
    node = a_node()
    client = a_client(node, 11)
    node.context(client, 0, 0)
    assert node.inject_xid(node.devices[0], 79, 5) == [client]
    assert node.devices[0].is_lost
    with pytest.raises(DriverError) as refused:
        node.reset(node.devices[0])
    assert code_of(refused) == "NVML_ERROR_IN_USE"
    node.disconnect(client, 6)
    node.reset(node.devices[0])
    allocate(node, a_client(node, 12), 1024)


def test_a_contained_fault_is_only_reported() -> None:
    node = a_node()
    client = a_client(node, 11)
    node.context(client, 0, 0)
    assert node.inject_xid(node.devices[0], 94, 5) == []
    allocate(node, client, 1024)


def test_devices_of_a_node_keep_their_uuids() -> None:
    assert [device.uuid for device in a_node().devices] == [device.uuid for device in a_node().devices]
    assert len({device.uuid for device in a_node(devices=8).devices}) == 8


def test_forty_eight_clients_fit_and_no_more() -> None:
    node = a_node()
    with_mps(node)
    for pid in range(48):
        a_client(node, 100 + pid, pipe=PIPE)
    with pytest.raises(DriverError) as refused:
        a_client(node, 200, pipe=PIPE)
    assert code_of(refused) == "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"


def partitioned(node: SimNode, *chunks: int) -> list[str]:
    daemon = node.add_daemon(PIPE, 500, node.devices[0].uuid, is_partitioned=True)
    node.add_server(daemon, SERVER_PID)
    return [control(node, daemon, f"sm_partition add {node.devices[0].uuid} {one}", 0).text for one in chunks]


def a_newer_node(branch: str) -> SimNode:
    version, cuda = DRIVERS[branch]
    major, _, minor = cuda.partition(".")
    return SimNode(
        node_name="node-1",
        profile=profiles()["h100-80"],
        devices=1,
        driver_version=version,
        cuda_version=int(major) * 1000 + int(minor) * 10,
    )


def test_static_partitions_come_with_cuda_13_1() -> None:
    with pytest.raises(DriverError, match=r"13\.1"):
        partitioned(a_node(), 4)
    node = a_newer_node("590")
    first, second = partitioned(node, 8, 4)
    one, two = (a_client(node, pid, pipe=PIPE, partition=name) for pid, name in ((1, first), (2, second)))
    assert [node.sms_of(client, node.devices[0]) for client in (one, two)] == [64, 32]
    with pytest.raises(DriverError, match="no SM partition"):
        a_client(node, 3, pipe=PIPE)
    with pytest.raises(DriverError, match="clients"):
        control(node, node.daemons[PIPE], f"sm_partition rm {first}", 0)


@pytest.mark.parametrize(("branch", "harmed"), [("590", True), ("610", False)])
def test_a_fault_stays_within_its_partition_from_driver_610_on(branch: str, harmed: bool) -> None:
    node = a_newer_node(branch)
    names = partitioned(node, 4, 4)
    bad, good = (a_client(node, pid, pipe=PIPE, partition=name) for pid, name in enumerate(names))
    node.context(good, 0, 0)
    node.illegal_access(node.context(bad, 0, 0), 0)
    assert (good.fault is not None) == harmed
    assert (bad.fault, node.daemons[PIPE].server.faulted) == ("CUDA_ERROR_ILLEGAL_ADDRESS", harmed)  # type: ignore[union-attr]


@pytest.mark.parametrize(("is_busy", "is_clean", "harmed"), [(1, False, True), (1, True, False), (0, False, False)])
def test_a_client_killed_with_work_in_flight_wedges_its_server(is_busy: int, is_clean: bool, harmed: bool) -> None:
    """Its neighbours fail, and the server goes on to say that it is active."""
    node = a_node()
    daemon = with_mps(node)
    bad, good = a_client(node, 1, pipe=PIPE), a_client(node, 2, pipe=PIPE)
    node.context(good, 0, 0)
    context = node.context(bad, 0, 0)
    for _ in range(is_busy):
        context.device.clock.submit(context.number, 10, 1000, 0)
    assert node.disconnect(bad, 5, is_clean=is_clean) == ([good] if harmed else [])
    assert control(node, daemon, f"get_server_status {SERVER_PID}", 5).text == "ACTIVE"
    assert control(node, daemon, f"terminate_client {SERVER_PID} 2", 5).never_answers == harmed


def test_mig_instances_fail_apart() -> None:
    """Each has its own memory and its own faults, though the board reports them."""
    node = a_newer_node("580")
    device = node.devices[0]
    node.set_mig_mode(device, enabled=True)
    instances = [node.create_instance(device, 19, start, 1) for start in (0, 1)]
    for instance in instances:
        node.create_compute(instance)
    bad, good = (a_client(node, pid, visible=one.uuid) for pid, one in enumerate(instances))
    node.illegal_access(node.context(bad, 0, 0), 0)
    assert node.allocate(node.context(good, 0, 0), 9000)
    assert (node.events[-1].device, node.events[-1].instance) == (0, instances[0].number)
    with pytest.raises(DriverError, match="contexts"):
        node.destroy_compute(instances[0])
