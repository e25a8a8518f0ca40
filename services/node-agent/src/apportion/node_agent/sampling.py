"""How the node's devices are, as the sample that the monitor draws and measures from."""

import contextlib
from collections.abc import Iterable

from apportion.contracts import samples
from apportion.contracts.ids import DeviceUuid
from apportion.node_agent.nvml import Devices, NvmlFailed


def sampled(devices: Devices, uuids: Iterable[DeviceUuid], *, at: int) -> bytes:
    """A sample's body: every device that answers. ``at``: the node's wall clock, ns since the Unix epoch."""
    found = []
    for uuid in uuids:
        with contextlib.suppress(NvmlFailed):
            reading = devices.reading(uuid)
            found.append(
                samples.DeviceSample(
                    uuid=uuid,
                    used_mib=reading.used_mib,
                    free_mib=reading.free_mib,
                    busy_pct=reading.busy_percent,
                    temperature_c=reading.temperature_c,
                    power_mw=reading.power_mw,
                    energy_mj=reading.energy_mj,
                    pcie_sent_bytes=reading.pcie_sent_bytes,
                    pcie_received_bytes=reading.pcie_received_bytes,
                    ecc_corrected=reading.ecc_corrected,
                    ecc_uncorrected=reading.ecc_uncorrected,
                )
            )
    return samples.ENCODER.encode(samples.DeviceSamples(at=at, devices=tuple(found)))


__all__ = ["sampled"]
