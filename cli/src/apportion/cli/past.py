"""The pool as it was, and the way from one moment to another: what `apportion replay` shows."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.moments import EXPECTED, instant, sequence
from apportion.cli.output import duration_text, table
from apportion.cli.story import sentence
from apportion.contracts.envelope import Entry, Undecodable
from apportion.contracts.ids import job_of_run
from apportion.monitor.history import History, NoSuchMoment
from apportion.monitor.projections import described
from apportion.monitor.shown import pool_shown
from apportion.pool.state import JobState, NodeState, Pool, evolve

NS_PER_S: Final = 1_000_000_000


def moment_of(history: History, text: str, *, option: str) -> int:
    """The sequence of the last fact at the moment that ``text`` names. Raises CommandFailed, NoSuchMoment."""
    seq = sequence(text)
    if seq is not None:
        if seq > history.last_seq:
            raise NoSuchMoment(asked=f"fact {seq}", last=str(history.last_seq))
        return seq
    first_at, last_at = history.span()
    at = instant(text, first_at=first_at, last_at=last_at, option=option)
    if at < first_at:
        raise CommandFailed(
            f"{option}: expected {EXPECTED}; found {text!r}, before the log's first fact", code=Exit.NOT_FOUND
        )
    return history.seq_at(at)


def content(pool: Pool, path: Path) -> dict[str, Any]:
    """The pool as one object for programs: instants in ns, every node, device, slice, job and queue."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(pool_shown(pool)))
    return {"path": str(path), **plain}


def lines(pool: Pool) -> Iterator[str]:
    """The pool for people: what it is in one line, then nodes, devices with their slices, and who waits and why."""
    yield headline(pool)
    shown = content(pool, Path())
    yield ""
    yield table(
        [
            {
                **node,
                "devices": len(node["devices"]),
                "runs": len(node["runs"]),
                "held_milli": sum(device["used_compute_milli"] for device in node["devices"]),
                "total_milli": sum(device["compute_milli"] for device in node["devices"]),
                "held_mib": sum(device["used_memory_mib"] for device in node["devices"]),
                "total_mib": sum(device["memory_mib"] for device in node["devices"]),
            }
            for node in shown["nodes"]
        ],
        ("node_id", "state", "epoch", "devices", "runs", "held_milli", "total_milli", "held_mib", "total_mib"),
    )
    slices = [
        {
            "device": piece["device_uuid"],
            "health": healths.get(piece["device_uuid"], ""),
            "mode": piece["mode"],
            "milli": piece["compute_milli"],
            "mib": piece["memory_mib"],
            "run": run["run_id"],
            "state": run["state"],
            "node": run["node_id"],
        }
        for healths in ({d["uuid"]: d["health"] for node in shown["nodes"] for d in node["devices"]},)
        for job in shown["jobs"]
        for run in job["runs"]
        if run["holds"]
        for piece in run["slices"]
    ]
    if slices:
        yield ""
        slices.sort(key=lambda row: (row["node"], row["device"], row["run"]))
        yield table(slices, ("node", "device", "health", "mode", "milli", "mib", "run", "state"))
    waiting = [
        {
            "job": job["job_id"],
            "queue": job["queue"],
            "attempt": job["attempt"],
            "waits": duration_text(max(0, pool.at - job["queued_at"]) / NS_PER_S),
            "reason": job["pending"],
            "hint": (job["pending_reason"] or {}).get("hint", ""),
        }
        for job in shown["jobs"]
        if job["state"] == JobState.QUEUED
    ]
    if waiting:
        yield ""
        yield table(waiting, ("job", "queue", "attempt", "waits", "reason", "hint"))


def headline(pool: Pool) -> str:
    """Where it stands, in one line."""
    ready = sum(1 for node in pool.nodes.values() if node.state is NodeState.READY)
    devices = [view for node in pool.nodes.values() for view in node.devices.values()]
    held = sum(view.used_compute_milli for view in devices)
    total = sum(view.device.compute_milli for view in devices)
    waiting = sum(1 for job in pool.jobs.values() if job.state is JobState.QUEUED)
    runs = sum(len(node.runs) for node in pool.nodes.values())
    frozen = ", FROZEN" if pool.frozen else ""
    return (
        f"fact {pool.seq}, {at_text(pool.at)}: {ready} of {len(pool.nodes)} nodes ready, {len(devices)} devices, "
        f"{held} of {total} milli-GPU held by {runs} runs, {waiting} jobs wait{frozen}"
    )


def play(
    history: History,
    *,
    first: int,
    last: int,
    speed: float | None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[Entry, Pool]]:
    """Each fact after ``first`` up to ``last``, and the pool after it, ``speed`` times as fast as it went.

    None: as fast as can be.
    """
    pool = history.at_seq(first)
    before = pool.at
    for entry in history.entries(after=first, to=last):
        if speed is not None and before and entry.recorded_at > before:
            sleep((entry.recorded_at - before) / NS_PER_S / speed)
        before = entry.recorded_at
        pool = evolve(pool, entry)
        yield entry, pool


def fact_shown(entry: Entry, pool: Pool) -> dict[str, Any]:
    """A fact that is played: what it says, and what is held and waits after it."""
    event = entry.event
    row: dict[str, Any] = {"actor": None, "cause": None, "run_id": None, "node_id": None, "kind": None, "body": None}
    if isinstance(event, Undecodable):
        row["cause"] = described(event)
    else:
        plain = msgspec.to_builtins(event)
        code = plain.get("cause", plain.get("code"))
        row |= {name: plain.get(name) for name in ("actor", "run_id", "node_id")}
        row |= {"kind": type(event).__name__, "cause": code, "body": plain}
    job = getattr(event, "job_id", None)
    if job is None and row["run_id"] is not None:
        job = job_of_run(row["run_id"])
    return {
        "seq": entry.seq,
        "recorded_at": entry.recorded_at,
        "said_by": entry.author,
        "kind": row["kind"],
        "job_id": job,
        "text": sentence({**row, "said_by": entry.author}),
        "held_milli": sum(view.used_compute_milli for node in pool.nodes.values() for view in node.devices.values()),
        "waiting": sum(1 for each in pool.jobs.values() if each.state is JobState.QUEUED),
        "body": row["body"],
    }


def fact_line(fact: dict[str, Any]) -> str:
    """The same for people."""
    about = f"{fact['job_id']}: " if fact["job_id"] else ""
    state = f"{fact['held_milli']:>7} milli held  {fact['waiting']:>4} wait"
    return f"{fact['seq']:>8}  {at_text(fact['recorded_at'])}  {state}  {about}{fact['text']}  [{fact['said_by']}]"


def at_text(instant_ns: int) -> str:
    """An instant for people, in UTC."""
    if not instant_ns:
        return "before the first fact"
    moment = time.gmtime(instant_ns // NS_PER_S)
    return time.strftime("%Y-%m-%d %H:%M:%S", moment) + f".{instant_ns // 1_000_000 % 1000:03d}Z"


def speed_of(text: str) -> float | None:
    """``100x``, ``0.5x`` or ``max``. Raises CommandFailed.

    >>> speed_of("100x"), speed_of("max")
    (100.0, None)
    """
    if text == "max":
        return None
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < 1e9:
        raise CommandFailed(f"--speed: expected such as 1x, 100x or max; found {text!r}", code=Exit.USAGE)
    return speed
