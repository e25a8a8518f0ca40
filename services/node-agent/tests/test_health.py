"""A device's health: what a fault means is data, one device's trouble is its own, and each reason has its end."""

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apportion.contracts.causes import DeviceHealth
from apportion.contracts.ids import DeviceUuid, JobId, NodeId
from apportion.node_agent import core
from apportion.node_agent.dcgm import JobMapping
from apportion.node_agent.health import REPEATS, HealthBook, HealthReading, XidPolicy, rule_of, xid_rules
from apportion.node_agent.health_watch import HealthWatch
from apportion.node_agent.nvml import open_devices
from apportion.node_agent.simgpu import client
from apportion.node_agent.simgpu.faults import Faults
from apportion.node_agent.simnode import SimulatedNode
from apportion.runtime.clock import SystemClock

ONE, TWO = DeviceUuid("GPU-1"), DeviceUuid("GPU-2")
HEALTHY, DEGRADED, FAILED = DeviceHealth.HEALTHY, DeviceHealth.DEGRADED, DeviceHealth.FAILED
SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("xid", "health"),
    [(13, None), (31, None), (43, None), (94, None), (109, FAILED), (48, FAILED), (79, FAILED), (54, DEGRADED)],
)
def test_a_xid_means_what_the_catalogue_says(xid: int, health: DeviceHealth | None) -> None:
    """109 wants a reset, though others overlook it; 94 was contained, though others give the board up for it."""
    changes = HealthBook().xid(ONE, xid, 1)
    assert [(one.device_uuid, one.health) for one in changes] == ([] if health is None else [(ONE, health)])


def test_every_xid_of_the_catalogue_has_a_policy_and_one_outside_it_ends_nothing() -> None:
    assert len(xid_rules()) > 100
    assert {rule.policy for rule in xid_rules().values()} == set(XidPolicy)
    assert [one.health for one in HealthBook().xid(ONE, 9999, 1)] == [DEGRADED]
    assert rule_of(31).by_application


def test_a_reset_that_the_driver_confirms_makes_a_device_healthy_again() -> None:
    """Only that: an answer alone proves nothing after a fault that wants a reset."""
    book = HealthBook()
    book.xid(ONE, 109, 1)
    assert book.answered(ONE, "") == []
    assert book.reading(ONE, HealthReading(recovery_action=0), 2) == []
    assert book.reading(ONE, HealthReading(recovery_action=1), 3) == []
    (change,) = book.reading(ONE, HealthReading(recovery_action=0), 4)
    assert (change.health, change.code) == (HEALTHY, "recovered")
    assert "xid-109" in change.detail


def test_a_device_is_as_ill_as_its_worst_condition() -> None:
    book = HealthBook()
    hot = HealthReading(temperature_c=91, slowdown_c=90)
    assert [(one.health, one.code) for one in book.reading(ONE, hot, 1)] == [(DEGRADED, "thermal")]
    assert [(one.health, one.code) for one in book.lost(ONE, "GpuIsLost", 2)] == [(FAILED, "lost")]
    assert [(one.health, one.code) for one in book.answered(ONE, "")] == [(DEGRADED, "thermal")]
    assert book.reading(ONE, HealthReading(temperature_c=85, slowdown_c=90), 3) == []
    cool = HealthReading(temperature_c=60, slowdown_c=90)
    assert [one.health for one in book.reading(ONE, cool, 4)] == [HEALTHY]
    assert book.now() == []


@pytest.mark.parametrize(
    ("reading", "health"),
    [
        (HealthReading(remap_failed=True), FAILED),
        (HealthReading(remap_pending=True), DEGRADED),
        (HealthReading(uncorrectable=2), DEGRADED),
        (HealthReading(recovery_action=7), FAILED),
        (HealthReading(recovery_action=3), DEGRADED),
        (HealthReading(), None),
    ],
)
def test_what_a_device_reads_decides(reading: HealthReading, health: DeviceHealth | None) -> None:
    book = HealthBook()
    assert [one.health for one in book.reading(ONE, reading, 1)] == ([] if health is None else [health])
    clear = HealthReading(recovery_action=0, remap_failed=False, remap_pending=False, uncorrectable=0)
    assert [one.health for one in book.reading(ONE, clear, 2)] == ([] if health is None else [HEALTHY])


def test_repeated_faults_of_applications_make_a_board_doubtful_until_they_stop() -> None:
    """But not those that applications cause by their own mistakes: a tenant could take boards away with them."""
    book = HealthBook()
    assert [one for at in range(20) for one in book.xid(TWO, 31, at)] == []
    changes = [one for at in range(REPEATS) for one in book.xid(ONE, 94, at * SECOND)]
    assert [(one.health, one.code) for one in changes] == [(DEGRADED, "xid-repeated")]
    assert book.quiet(ONE, "canary: ok", 100 * SECOND) == []
    assert [one.health for one in book.quiet(ONE, "canary: ok", 1000 * SECOND)] == [HEALTHY]


def test_conditions_outlive_the_agent() -> None:
    """A new agent of the same boot says again what is wrong."""
    book = HealthBook()
    book.xid(ONE, 109, 1)
    book.reading(ONE, HealthReading(recovery_action=1), 2)
    later = HealthBook(book.keep())
    assert [(one.device_uuid, one.health, one.code) for one in later.now()] == [(ONE, FAILED, "xid-109")]
    assert later.now() == []
    assert [one.health for one in later.reading(ONE, HealthReading(recovery_action=0), 3)] == [HEALTHY]


@pytest.fixture
async def node() -> AsyncIterator[tuple[SimulatedNode, Path]]:
    with tempfile.TemporaryDirectory(prefix="na-") as directory:
        simulated = SimulatedNode(NodeId("node-1"), state_dir=Path(directory), devices=2, profile="h200")
        await simulated.open()
        yield simulated, Path(directory)
        await simulated.close()
        simulated.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(simulated.pid, 0)  # noqa: ASYNC222  it was killed a moment ago


async def test_a_failed_device_is_found_reset_and_used_again(node: tuple[SimulatedNode, Path]) -> None:
    """From the event to the reset, by the calls and the tool that hardware has; the other device is never in doubt."""
    simulated, directory = node
    told: list[core.DeviceHealthSeen] = []
    with open_devices(simulated.socket_path) as devices, Faults(simulated.socket_path) as faults:
        uuids = [info.uuid for info in devices.inventory()]
        watch = HealthWatch(
            devices,
            uuids,
            clock=SystemClock(),
            feed=lambda one: told.append(one) if isinstance(one, core.DeviceHealthSeen) else None,
            suspect=lambda *_: None,
            env={"PATH": f"{simulated.tools}:{os.defpath}", client.SOCKET_VARIABLE: str(simulated.socket_path)},
            file=directory / "health.json",
            may_reset=True,
        )
        watch.begin()
        faults.ecc(0, uncorrected=1)
        faults.xid(1, 31)
        for _ in range(5):
            watch.look()
        assert [(one.device_uuid, one.health, one.code) for one in told] == [
            (uuids[0], DEGRADED, "row-remap-pending"),
        ]
        assert devices.health(uuids[0]).uncorrectable == 1
        faults.reset(0)
        watch.look()
        assert [one.health for one in told] == [DEGRADED, HEALTHY]
        told.clear()
        faults.xid(1, 79)
        for _ in range(5):
            watch.look()
        assert [(one.device_uuid, one.health, one.code) for one in told] == [(uuids[1], FAILED, "lost")]
        faults.reset(1)
        watch.look()
        assert [one.health for one in told] == [FAILED, HEALTHY]


def test_each_device_has_a_file_with_its_jobs(tmp_path: Path) -> None:
    """As dcgm-exporter reads them; a device without a job has an empty one."""
    mapping = JobMapping(tmp_path / "jobs")
    mapping.write({0: [JobId("acme/b"), JobId("acme/a"), JobId("acme/a")], 1: []})
    assert (tmp_path / "jobs" / "0").read_text() == "acme/a\nacme/b\n"
    mapping.write({0: [], 1: [JobId("acme/c")]})
    assert [(tmp_path / "jobs" / name).read_text() for name in ("0", "1")] == ["", "acme/c\n"]
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == ["0", "1"]


def test_a_device_that_only_a_reboot_mends_is_told_as_that_whatever_it_was_ill_of_before() -> None:
    """The node is to be cordoned for it; and that it ended is told as well."""
    book = HealthBook()
    (lost,) = book.xid(ONE, 109, 1)
    assert (lost.health, lost.wants_reboot) == (DeviceHealth.FAILED, False)
    reboot = 151
    assert rule_of(reboot).policy is XidPolicy.NODE_DRAIN_REBOOT
    (told,) = book.xid(ONE, reboot, 2)
    assert (told.health, told.code, told.wants_reboot) == (DeviceHealth.FAILED, f"xid-{reboot}", True)
    assert book.xid(ONE, reboot, 3) == []
    (over,) = book.reset(ONE, "reset")
    assert (over.health, over.wants_reboot) == (DeviceHealth.HEALTHY, False)
    (wanted,) = book.reading(ONE, HealthReading(recovery_action=1), 4)
    assert not wanted.wants_reboot
    (more,) = book.reading(ONE, HealthReading(recovery_action=2), 5)
    assert (more.code, more.wants_reboot) == ("recovery-action", True)
    assert book.reading(ONE, HealthReading(recovery_action=2), 6) == []
    fell = HealthBook()
    (told,) = fell.xid(ONE, 79, 1)
    assert told.wants_reboot
    (back,) = fell.answered(ONE, "it answers")
    assert (back.health, back.wants_reboot) == (DeviceHealth.HEALTHY, False)
