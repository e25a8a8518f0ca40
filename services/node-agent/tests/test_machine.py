"""What a machine is, in the pool's terms."""

from typing import Any

import pytest

from apportion.contracts.ids import DeviceUuid
from apportion.node_agent.__main__ import labels_of
from apportion.node_agent.machine import link_groups
from apportion.node_agent.nvml import LINK_SWITCH, DeviceInfo
from apportion.runtime.settings import SettingsInvalid


def a_board(at: int, *peers: str) -> DeviceInfo:
    given: dict[str, Any] = {
        "uuid": DeviceUuid(f"GPU-{at}"), "index": at, "name": "board", "architecture": "hopper",
        "compute_capability": (9, 0), "memory_mib": 1, "usable_mib": 1, "sms": 1, "pci_bus_id": f"bus-{at}",
        "numa_node": 0, "cpus": (), "is_mig_capable": False, "is_mig_enabled": False, "pcie_generation": 5,
        "pcie_lanes": 16, "nvlinks": len(peers), "link_peers": peers, "encoder_percent": 0,
    }  # fmt: skip
    return DeviceInfo(**given)


def test_devices_on_the_switch_are_one_group_and_pairs_are_groups_of_their_own() -> None:
    """A job whose devices talk to each other is placed within a group."""
    switched = [a_board(0, LINK_SWITCH), a_board(1), a_board(2, LINK_SWITCH)]
    assert link_groups(switched) == ["nvlink-0", "", "nvlink-0"]
    pairs = [a_board(0, "bus-2"), a_board(1, "bus-3"), a_board(2, "bus-0"), a_board(3, "bus-1"), a_board(4, "")]
    assert link_groups(pairs) == ["nvlink-0", "nvlink-1", "nvlink-0", "nvlink-1", ""]


def test_labels_are_read_as_they_are_written() -> None:
    """And a part that is no label stops the agent before it registers as something else."""
    assert labels_of("site=oslo, rack=r7") == {"site": "oslo", "rack": "r7"}
    assert labels_of("") == {}
    for wrong in ("site", "=x", "si te=x", "a=1,b"):
        with pytest.raises(SettingsInvalid, match="name=value"):
            labels_of(wrong)
