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
    pcie_kbps: int | None = None
    """Both directions, kilobytes a second over a few milliseconds; None also where it wasn't asked just now."""


class DeviceSamples(Struct, frozen=True, kw_only=True):
    """All devices of one node at one instant."""

    at: int
    """By the node's wall clock; ns since the Unix epoch."""
    devices: tuple[DeviceSample, ...]


ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(DeviceSamples)
