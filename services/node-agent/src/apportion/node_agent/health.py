"""Whether a device may be used, from what its driver reports and what it reads; pure, with a way back for each reason.

A device has conditions, each with its own end: a reset that the driver confirms, a counter, a temperature, an answer.
It is as ill as its worst one. What a Xid means is data (xid_actions.json); what isn't in the catalogue is taken for a
reason to place nothing new, not for a reason to end what runs.
"""

from enum import StrEnum, unique
from functools import cache
from pathlib import Path
from typing import Final, assert_never

import msgspec

from apportion.contracts.causes import DeviceHealth
from apportion.contracts.ids import DeviceUuid

XID_LOST: Final = 79
REPEATS: Final = 5
REPEAT_WINDOW_NS: Final = 600 * 1_000_000_000
"""So many faults of single applications so close together are the board's, unless applications cause them by nature."""
COOLER_C: Final = 8
"""So far below its limit a hot board has cooled down."""


@unique
class XidPolicy(StrEnum):
    """What follows from a Xid."""

    LOG_ONLY = "log_only"
    TASK_FAILED_RESTART = "task_failed_restart"
    """The application's end is all: 13, 31, and 94, which the hardware contained."""
    GPU_DRAIN_RESET = "gpu_drain_reset"
    NODE_DRAIN_REBOOT = "node_drain_reboot"
    NODE_DRAIN_INSPECT = "node_drain_inspect"
    GPU_QUARANTINE = "gpu_quarantine"
    FOLLOW_OTHER_XID = "follow_other_xid"
    READ_RECOVERY_ACTION = "read_recovery_action"


class XidRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the catalogue."""

    xid: int
    name: str
    action: str
    """NVIDIA's advice for the moment."""
    policy: XidPolicy
    by_application: bool = False
    """Applications cause it by their own mistakes, so that repeats say nothing about the board."""


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    xids: tuple[XidRule, ...]


@cache
def xid_rules() -> dict[int, XidRule]:
    """The catalogue by Xid."""
    data = (Path(__file__).parent / "xid_actions.json").read_bytes()
    return {rule.xid: rule for rule in msgspec.json.decode(data, type=_Catalogue).xids}


def rule_of(xid: int) -> XidRule:
    """What the catalogue says of a Xid, or that it says nothing.

    >>> [str(rule_of(xid).policy) for xid in (94, 109, 9999)]
    ['task_failed_restart', 'gpu_drain_reset', 'gpu_quarantine']
    """
    unknown = XidRule(xid=xid, name="not in the catalogue", action="", policy=XidPolicy.GPU_QUARANTINE)
    return xid_rules().get(xid, unknown)


class HealthReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a device tells of its own health; None where its board or driver doesn't."""

    recovery_action: int | None = None
    """As NVML's field 230: 0 for none."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    uncorrectable: int | None = None
    """Uncorrectable memory errors since the last reset."""
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """The temperature at which it slows itself down."""


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One reason for a device not to be healthy."""

    code: str
    health: DeviceHealth
    detail: str
    since_at: int
    needs_reset: bool = False
    """It ends with a reset: when the driver has no recovery action left that it had, or we did it."""
    saw_action: bool = False
    needs_reboot: bool = False
    """A reset of the device alone would not do."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A device's health is another now, or is it for another reason."""

    device_uuid: DeviceUuid
    health: DeviceHealth
    code: str
    detail: str
    wants_reboot: bool = False


class _Device(msgspec.Struct, kw_only=True):
    conditions: dict[str, Condition] = {}
    faults: list[int] = []
    """When faults of single applications were seen that aren't their own mistakes."""
    told: DeviceHealth = DeviceHealth.HEALTHY
    told_code: str = ""
    told_reboot: bool = False


class HealthBook:
    """All devices' conditions. Every method answers with what has changed by it; nothing where nothing did."""

    def __init__(self, kept: bytes = b"") -> None:
        """``kept`` is what ``keep`` gave to an earlier agent of the same boot."""
        self._devices: dict[DeviceUuid, _Device] = (
            msgspec.json.decode(kept, type=dict[DeviceUuid, _Device]) if kept else {}
        )
        for device in self._devices.values():
            device.told, device.told_code, device.told_reboot = DeviceHealth.HEALTHY, "", False

    def keep(self) -> bytes:
        """The conditions, for the next agent."""
        return msgspec.json.encode(self._devices)

    def now(self) -> list[Changed]:
        """Every device that isn't healthy, for an agent that has just begun."""
        return [one for uuid in sorted(self._devices) for one in self._told(uuid, "")]

    def is_ill(self, uuid: DeviceUuid) -> bool:
        """True while it has any condition."""
        return uuid in self._devices and bool(self._devices[uuid].conditions)

    def needs_reset(self, uuid: DeviceUuid) -> bool:
        """True where a reset would end a condition."""
        found = self._devices.get(uuid)
        return found is not None and any(one.needs_reset for one in found.conditions.values())

    def xid(self, uuid: DeviceUuid, xid: int, at: int) -> list[Changed]:
        """The driver reports a fault."""
        rule = rule_of(xid)
        detail = f"{rule.name}: {rule.policy}"
        needs_reboot = rule.policy is XidPolicy.NODE_DRAIN_REBOOT
        if xid == XID_LOST:  # It has fallen off the bus, whether or not anybody asks it before it is back.
            changes = self._add(
                uuid, f"xid-{xid}", DeviceHealth.FAILED, detail, at, needs_reset=True, needs_reboot=needs_reboot
            )
            return [*changes, *self.lost(uuid, detail, at)]
        match rule.policy:
            case XidPolicy.LOG_ONLY | XidPolicy.FOLLOW_OTHER_XID | XidPolicy.READ_RECOVERY_ACTION:
                return []  # The recovery action is read with every reading.
            case XidPolicy.TASK_FAILED_RESTART:
                return [] if rule.by_application else self._repeated(uuid, xid, at)
            case XidPolicy.GPU_DRAIN_RESET | XidPolicy.NODE_DRAIN_REBOOT:
                return self._add(
                    uuid,
                    f"xid-{xid}",
                    DeviceHealth.FAILED,
                    detail,
                    at,
                    needs_reset=True,
                    needs_reboot=needs_reboot,
                )
            case XidPolicy.GPU_QUARANTINE | XidPolicy.NODE_DRAIN_INSPECT:
                return self._add(uuid, f"xid-{xid}", DeviceHealth.DEGRADED, detail, at, needs_reset=True)
            case _:
                assert_never(rule.policy)

    def lost(self, uuid: DeviceUuid, detail: str, at: int) -> list[Changed]:
        """It doesn't answer any more."""
        return self._add(uuid, "lost", DeviceHealth.FAILED, detail, at)

    def answered(self, uuid: DeviceUuid, detail: str) -> list[Changed]:
        """It answers; where it was lost, as one that fell off the bus, it has been reset."""
        found = self._devices.get(uuid)
        if found is None or "lost" not in found.conditions:
            return []
        return self._drop(uuid, {"lost", f"xid-{XID_LOST}"}, detail)

    def reset(self, uuid: DeviceUuid, detail: str) -> list[Changed]:
        """It was reset."""
        found = self._devices.get(uuid)
        ended = set() if found is None else {code for code, one in found.conditions.items() if one.needs_reset}
        return self._drop(uuid, ended, detail)

    def reading(self, uuid: DeviceUuid, reading: HealthReading, at: int) -> list[Changed]:
        """What it reads now."""
        return [
            *self._by_action(uuid, reading.recovery_action, at),
            *self._by_flag(
                uuid,
                "row-remap-failed",
                DeviceHealth.FAILED,
                reading.remap_failed,
                "a memory row can't be replaced",
                at,
            ),
            *self._by_flag(
                uuid, "row-remap-pending", DeviceHealth.DEGRADED, reading.remap_pending, "a reset replaces a row", at
            ),
            *self._by_flag(
                uuid,
                "ecc-uncorrectable",
                DeviceHealth.DEGRADED,
                None if reading.uncorrectable is None else reading.uncorrectable > 0,
                f"{reading.uncorrectable} uncorrectable memory errors since the last reset",
                at,
            ),
            *self._by_heat(uuid, reading, at),
        ]

    def quiet(self, uuid: DeviceUuid, detail: str, at: int) -> list[Changed]:
        """It was tried and works: what only repeats had made doubtful ends once they have stopped."""
        found = self._devices.get(uuid)
        if found is None or "xid-repeated" not in found.conditions:
            return []
        if found.faults and at - found.faults[-1] < REPEAT_WINDOW_NS:
            return []
        return self._drop(uuid, {"xid-repeated"}, detail)

    def _repeated(self, uuid: DeviceUuid, xid: int, at: int) -> list[Changed]:
        found = self._devices.setdefault(uuid, _Device())
        found.faults = [*(one for one in found.faults if at - one < REPEAT_WINDOW_NS), at]
        if len(found.faults) < REPEATS:
            return []
        detail = f"{len(found.faults)} faults in {REPEAT_WINDOW_NS // 1_000_000_000} s, the last one Xid {xid}"
        return self._add(uuid, "xid-repeated", DeviceHealth.DEGRADED, detail, at)

    def _by_action(self, uuid: DeviceUuid, action: int | None, at: int) -> list[Changed]:
        if action is None:
            return []
        found = self._devices.setdefault(uuid, _Device())
        if action:
            for code, one in found.conditions.items():
                found.conditions[code] = msgspec.structs.replace(one, saw_action=True)
            name = RECOVERY_ACTIONS.get(action, f"number {action}")
            health = DeviceHealth.DEGRADED if name.endswith(("P2P", "DOMAIN")) else DeviceHealth.FAILED
            # Asked anew each time: it may want more than it did.
            found.conditions.pop("recovery-action", None)
            return self._add(
                uuid,
                "recovery-action",
                health,
                f"the driver wants {name}",
                at,
                saw_action=True,
                needs_reboot=name.endswith("REBOOT"),
            )
        ended = {code for code, one in found.conditions.items() if one.saw_action}
        ended = {code for code in ended if found.conditions[code].needs_reset or code == "recovery-action"}
        return self._drop(uuid, ended, "the driver wants no recovery action any more")

    def _by_flag(  # noqa: PLR0917  one line of a table
        self,
        uuid: DeviceUuid,
        code: str,
        health: DeviceHealth,
        flag: bool | None,
        detail: str,
        at: int,
    ) -> list[Changed]:
        if flag is None:
            return []
        return self._add(uuid, code, health, detail, at) if flag else self._drop(uuid, {code}, f"{code} is over")

    def _by_heat(self, uuid: DeviceUuid, reading: HealthReading, at: int) -> list[Changed]:
        heat, limit = reading.temperature_c, reading.slowdown_c
        if heat is None or not limit:
            return []
        if heat >= limit:
            return self._add(uuid, "thermal", DeviceHealth.DEGRADED, f"{heat} C, and it slows down at {limit}", at)
        return self._drop(uuid, {"thermal"}, f"{heat} C") if heat <= limit - COOLER_C else []

    def _add(
        self,
        uuid: DeviceUuid,
        code: str,
        health: DeviceHealth,
        detail: str,
        at: int,
        *,
        needs_reset: bool = False,
        saw_action: bool = False,
        needs_reboot: bool = False,
    ) -> list[Changed]:
        found = self._devices.setdefault(uuid, _Device())
        if code not in found.conditions:
            found.conditions[code] = Condition(
                code=code,
                health=health,
                detail=detail,
                since_at=at,
                needs_reset=needs_reset,
                saw_action=saw_action,
                needs_reboot=needs_reboot,
            )
        return self._told(uuid, "")

    def _drop(self, uuid: DeviceUuid, codes: set[str], detail: str) -> list[Changed]:
        found = self._devices.get(uuid)
        if found is None or not codes & set(found.conditions):
            return []
        ended = sorted(codes & set(found.conditions))
        for code in ended:
            del found.conditions[code]
        return self._told(uuid, f"{', '.join(ended)} ended: {detail}")

    def _told(self, uuid: DeviceUuid, ended: str) -> list[Changed]:
        """What is to be said now, if it isn't what was said."""
        found = self._devices[uuid]
        worst = min(
            found.conditions.values(), key=lambda one: (_ORDER[one.health], one.since_at, one.code), default=None
        )
        health = DeviceHealth.HEALTHY if worst is None else worst.health
        code = "recovered" if worst is None else worst.code
        reboot = next((one for _, one in sorted(found.conditions.items()) if one.needs_reboot), None)
        if health is found.told and (reboot is not None) is found.told_reboot:
            return []
        detail = ended if worst is None else worst.detail
        if reboot is not None and not found.told_reboot:
            code, detail = reboot.code, reboot.detail  # Whatever it was ill of before: this is what is new.
        found.told, found.told_code, found.told_reboot = health, code, reboot is not None
        return [Changed(device_uuid=uuid, health=health, code=code, detail=detail, wants_reboot=reboot is not None)]


RECOVERY_ACTIONS: Final = {
    1: "GPU_RESET",
    2: "NODE_REBOOT",
    3: "DRAIN_P2P",
    4: "DRAIN_AND_RESET",
    5: "RECOVER_IMEX_DOMAIN",
    6: "BUS_RESET",
    7: "SYSTEM_REBOOT",
}
_ORDER: Final = {DeviceHealth.FAILED: 0, DeviceHealth.DEGRADED: 1, DeviceHealth.HEALTHY: 2}
