"""The golden dump: the simulator still answers so, and where a real board is at hand it is laid beside it."""

import copy
import json
from pathlib import Path

import pytest

from apportion.node_agent.dump import FORMAT, differences, of_hardware, of_simulator
from apportion.node_agent.nvml import has_driver

GOLDEN = json.loads(Path(__file__).with_name("h200-simulated.json").read_text())


async def test_the_simulated_board_answers_as_the_golden_dump_says() -> None:
    """A change of the simulator is a change of this file, which shows in its review."""
    found = await of_simulator("h200", "580")
    assert GOLDEN["format"] == FORMAT
    assert list(differences(GOLDEN, found)) == []
    assert found["system"] == GOLDEN["system"]


def test_a_difference_is_told_by_its_call_and_a_measurement_is_none() -> None:
    other = copy.deepcopy(GOLDEN)
    answers = other["devices"][0]
    answers["nvmlDeviceGetName"] = "NVIDIA H200 NVL"
    answers["nvmlDeviceGetPowerUsage"] = 81_234
    answers["nvmlDeviceGetMigMode"] = {"error": "NotSupported"}
    del answers["nvmlDeviceGetRemappedRows"]
    assert [line.partition(":")[0] for line in differences(GOLDEN, other)] == [
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetName",
        "nvmlDeviceGetRemappedRows",
    ]


def test_a_real_board_answers_every_call_or_refuses_it_by_name() -> None:
    """Differences from the simulator are printed, and are findings: its figures were never seen on a board."""
    if not has_driver():
        pytest.skip("no NVIDIA driver here: nothing real to ask")
    found = of_hardware()
    for line in differences(GOLDEN, found):
        print(line)
    answers = found["devices"][0]
    assert isinstance(answers["nvmlDeviceGetUUID"], str)
    assert answers["nvmlDeviceGetMemoryInfo"]["total"] > 0
