"""Readings that agents publish on plain NATS each second: lost where the bus is, never part of the pool's state."""

import msgspec
from msgspec import Struct

from apportion.contracts.ids import DeviceUuid

DEVICES = "devices"
"""The kind of sample (see ``subjects.sample``) whose body is DeviceSamples."""


class DeviceSample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one device is; None where the board has no such sensor."""

    uuid: DeviceUuid
    used_mib: int
    """Memory held by processes."""
    free_mib: int
    busy_pct: int | None = None
    """Time in which any kernel ran. It says nothing about how many SMs were used."""
    temperature_c: int | None = None
    power_mw: int | None = None
    energy_mj: int | None = None
    """Since the driver was loaded."""
    pcie_sent_bytes: int | None = None
    """Over PCIe by the device, as the driver counts; it may begin again at 0."""
    pcie_received_bytes: int | None = None
    ecc_corrected: int | None = None
    """Memory errors since the driver was loaded."""
    ecc_uncorrected: int | None = None


class DeviceSamples(Struct, frozen=True, kw_only=True):
    """All devices of one node at one instant."""

    at: int
    """By the node's wall clock; ns since the Unix epoch."""
    devices: tuple[DeviceSample, ...]


ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(DeviceSamples)
