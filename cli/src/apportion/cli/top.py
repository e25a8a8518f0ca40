"""The pool on one screen: how full it is, who waits and why, what is wrong. Frames are pure; drawing them is below.

No library: a frame is lines of text that go over the last ones, so that it works wherever a terminal does.
"""

import contextlib
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct

from apportion.cli.output import ago, duration_text, printable

if TYPE_CHECKING:
    from apportion.cli.places import Place

BAR: Final = 16
_STATES: Final = {"ready": "green", "suspected": "yellow", "cordoned": "yellow", "draining": "yellow", "fenced": "red"}
_SEVERITIES: Final = {"critical": "red", "warning": "yellow", "info": "blue"}


class Seen(Struct, frozen=True, kw_only=True):
    """What the monitor answered to one look."""

    pool: str
    nodes: list[dict[str, Any]]
    frozen: bool
    jobs: list[dict[str, Any]]
    jobs_total: int
    alerts: list[dict[str, Any]]
    faults: list[dict[str, Any]]
    behind: int
    """Messages that the log has not got yet."""


def frame(seen: Seen, *, width: int, height: int, now: int) -> list[str]:
    """The lines of one screen, at most ``height`` of at most ``width`` signs; ``now`` is ns since the Unix epoch."""
    devices = [device for node in seen.nodes for device in node["devices"]]
    lines = [
        (
            f"apportion  pool {seen.pool}   {len(seen.nodes)} nodes, {len(devices)} devices   "
            f"log {seen.behind} behind   {time.strftime('%H:%M:%S', time.gmtime(now / 1e9))} UTC   q ends"
        ),
    ]
    if seen.frozen:
        lines.append(_in("red", "FROZEN: most of the fleet is silent; nothing is placed or fenced (apportion thaw)"))
    lines += [
        _in("magenta", f"FAULT {one['kind']} {one.get('target', '')} by {printable(one['actor'])}")
        for one in seen.faults
    ]
    lines += [
        (
            f"compute {_bar(_sum(devices, 'used_compute_milli'), _sum(devices, 'compute_milli'))}   "
            f"memory {_bar(_sum(devices, 'used_memory_mib'), _sum(devices, 'memory_mib'))}   runs "
            f"{sum(len(node['runs']) for node in seen.nodes)}"
        ),
        "",
    ]
    below = [*_waiting(seen, now), "", *_alerts(seen, now)]
    room = max(3, height - len(lines) - len(below) - 1)
    lines += [*_nodes(seen.nodes, room), "", *below]
    return [_cut(line, width) for line in lines[:height]]


def _nodes(nodes: Sequence[dict[str, Any]], room: int) -> Iterator[str]:
    yield click.style(
        f"{'NODE':<16} {'STATE':<10} {'COMPUTE':<{BAR + 5}} {'MEMORY':<{BAR + 5}} RUNS  DEVICES", bold=True
    )
    shown = nodes if len(nodes) <= room - 1 else nodes[: room - 2]
    for node in shown:
        devices = node["devices"]
        ill = Counter(device["health"] for device in devices if device["health"] != "healthy")
        health = ", ".join(f"{count} {state}" for state, count in sorted(ill.items()))
        state = _in(_STATES.get(node["state"], "white"), f"{node['state']:<10}")
        yield (
            f"{printable(node['node_id'])[:16]:<16} {state} "
            f"{_bar(_sum(devices, 'used_compute_milli'), _sum(devices, 'compute_milli'))} "
            f"{_bar(_sum(devices, 'used_memory_mib'), _sum(devices, 'memory_mib'))} "
            f"{len(node['runs']):>4}  {len(devices)} {_in('red', health) if health else ''}".rstrip()
        )
    if len(shown) < len(nodes):
        yield f"… and {len(nodes) - len(shown)} more"


def _waiting(seen: Seen, now: int) -> Iterator[str]:
    waiting = [job for job in seen.jobs if job["state"] == "queued"]
    reasons = Counter(job["pending"] for job in waiting)
    said = "   ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    yield click.style(f"WAITING {len(waiting)} of {seen.jobs_total} jobs", bold=True) + (f"   {said}" if said else "")
    for job in waiting[:8]:
        age = duration_text(max(0, now - job["queued_at"]) / 1e9)
        yield f"  {printable(job['job_id'])[:40]:<40} {age:>8}  {job['pending']}"


def _alerts(seen: Seen, now: int) -> Iterator[str]:
    yield click.style(f"ALERTS {len(seen.alerts)}", bold=True)
    for alert in seen.alerts[:8]:
        about = f":{printable(alert['about'])}" if alert["about"] else ""
        severity = _in(_SEVERITIES.get(alert["severity"], "white"), f"{alert['severity']:<8}")
        unit = f" {alert['unit']}" if alert["unit"] else ""
        yield (
            f"  {severity} {alert['rule']}{about}  {alert['value']}{unit}  {ago(alert['raised_at'], now)}"
            f"  {alert['state']}"
        )


def _sum(devices: Sequence[dict[str, Any]], name: str) -> int:
    return sum(device[name] for device in devices)


def _bar(used: int, total: int) -> str:
    """How much of ``total`` is used.

    >>> _bar(1, 4)
    '████············  25%'
    """
    share = min(1.0, used / total) if total > 0 else 0.0
    full = round(share * BAR)
    return f"{'█' * full}{'·' * (BAR - full)} {round(share * 100):>3}%"


def _in(colour: str, text: str) -> str:
    return click.style(text, fg=colour)


def _cut(line: str, width: int) -> str:
    plain = click.unstyle(line)
    return line if len(plain) <= width else plain[:width]


# Drawing --------------------------------------------------------------------------------------------------------------


async def look(place: "Place", bus: Any) -> Seen:
    """Ask the monitor for everything on the screen."""
    from apportion.cli.client import ask

    nodes, jobs, alerts, faults, status = [
        await ask(bus, name, question)
        for name, question in (
            ("nodes", {}),
            ("jobs", {"limit": 1_000}),
            ("alerts", {}),
            ("faults", {}),
            ("status", {}),
        )
    ]
    return Seen(
        pool=place.pool,
        nodes=nodes["nodes"],
        frozen=nodes["frozen"],
        jobs=jobs["jobs"],
        jobs_total=jobs["total"],
        alerts=alerts["alerts"],
        faults=faults["faults"],
        behind=sum(stream["behind"] for stream in status["streams"].values()),
    )


@contextlib.contextmanager
def screen() -> Iterator[None]:
    """The terminal's other screen, and keys as they are pressed; all as it was afterwards."""
    import termios
    import tty

    is_keyboard = sys.stdin.isatty()
    before = termios.tcgetattr(sys.stdin) if is_keyboard else None
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        if is_keyboard:
            tty.setcbreak(sys.stdin)
        yield
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def draw(lines: Sequence[str]) -> None:
    """Put a frame over the last one, without a flicker."""
    sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
    sys.stdout.flush()


def is_over(seconds: float) -> bool:
    """Wait so long; True where q was pressed meanwhile."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in {"q", "Q", "\x1b"}
