"""A trace of jobs and a fleet, from two tables, made ready to be decided.

A trace has the columns ``job_id, submit_s, duration_s, gpus, tenant``, and may have ``gpu_milli, gpu_memory_mib,
service_class, priority``; a fleet ``nodes, devices, model, memory_mib``, and may have ``cpu_milli, host_memory_mib``.
Both may be gzipped. A job of more devices than a node has becomes a gang of equal parts.
"""

import csv
import gzip
import io
import re
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.whatif.engine import NS_PER_S, Fate, Happening, Simulation
from apportion.cli.whatif.sharing import ALONE
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.causes import Mode, ServiceClass
from apportion.contracts.envelope import Entry
from apportion.contracts.ids import ADMISSION, OPERATOR, PLACER, DeviceUuid, JobId, NodeId, PoolId, RunId, agent_author
from apportion.contracts.ids import job_of_run as job_of

POOL: Final = PoolId("simulated")
QUEUE: Final = "main"
START: Final = 1_767_225_600 * NS_PER_S
"""Second 0 of a trace: 2026-01-01 00:00 UTC."""
_NOT_A_NAME: Final = re.compile(r"[^a-z0-9_-]")


class Trace(Struct, kw_only=True):
    """What is asked, and of which fleet."""

    wishes: list[Entry]
    nodes: list[ev.NodeRegistered]
    works: dict[JobId, int]
    """Milliseconds at full speed, in thousandths."""
    asked_at: dict[int, int]
    devices: int
    end: int
    """When the last job was asked for."""

    def fate(self, run_id: RunId, ended: int) -> Fate:
        """Each run takes as long as the trace says, and ends well."""
        del ended
        return Fate(work=self.works[job_of(run_id)])


def read(trace: Path, fleet: Path, *, first_s: float = 0, last_s: float | None = None) -> Trace:
    """Jobs that were submitted in [first_s, last_s), and the fleet. Raises CommandFailed."""
    nodes = _nodes(fleet)
    largest = max((len(node.devices) for node in nodes), default=0)
    jobs = [
        row
        for row in _rows(trace, ("job_id", "submit_s", "duration_s", "gpus", "tenant"))
        if first_s <= float(row["submit_s"]) and (last_s is None or float(row["submit_s"]) < last_s)
    ]
    jobs.sort(key=lambda row: (float(row["submit_s"]), row["job_id"]))
    tenants = tuple(sorted({_name(row["tenant"]) for row in jobs}))
    found = Trace(wishes=[], nodes=nodes, works={}, asked_at={}, devices=sum(len(n.devices) for n in nodes), end=START)
    _ask(found, ev.QueueUpsertRequested(queue=QUEUE, tenants=tenants or ("none",)), OPERATOR, "queue", START)
    for row in jobs:
        tenant, name = _name(row["tenant"]), _name(row["job_id"])
        at = START + int((float(row["submit_s"]) - first_s) * NS_PER_S)
        try:
            wish = _request(row, name, largest)
        except ValueError as err:
            raise CommandFailed(f"{trace}: job {row['job_id']}: {err}", code=Exit.USAGE) from err
        _ask(found, wish, tenant, name, at)
        found.works[JobId(f"{tenant}/{name}")] = max(1, round(float(row["duration_s"]) * 1000)) * ALONE
        found.end = at
    return found


def simulated(trace: Trace, *, config: dict[str, int | str], until: int) -> Simulation:
    """The trace decided, up to an instant or until all is done."""
    simulation = Simulation(trace.fate, config={ADMISSION: {}, PLACER: config})
    simulation.begin(START, {}, {})
    happenings = [Happening(at=START, fact=node, author=agent_author(node.node_id)) for node in trace.nodes]
    happenings += [Happening(at=wish.recorded_at, wish=wish) for wish in trace.wishes]
    simulation.run(happenings, until)
    return simulation


def _ask(trace: Trace, wish: ev.Wish, tenant: str, name: str, at: int) -> None:
    message = codec.encode_wish(POOL, wish, tenant=tenant, event_id=name, source="/apportion/trace")
    seq = len(trace.wishes) + 1
    trace.wishes.append(codec.decode_wish(message.subject, message.headers, message.body, seq=seq, recorded_at=at))
    trace.asked_at[seq] = at


def _request(row: dict[str, Any], name: str, largest: int) -> ev.JobRequested:
    gpus = int(row["gpus"])
    parts = next((n for n in range(min(gpus, largest), 0, -1) if gpus % n == 0), 1)
    if row.get("gpu_milli"):
        memory = int(row["gpu_memory_mib"]) if row.get("gpu_memory_mib") else None
        resources = ev.Resources(gpu_milli=int(row["gpu_milli"]), gpu_memory_mib=memory)
    else:
        resources = ev.Resources(gpu=parts)
    return ev.JobRequested(
        queue=QUEUE,
        job_id=name,
        workload=ev.Workload(command=("/bin/true",)),
        resources=resources,
        gang=ev.Gang(size=max(1, gpus // parts)),
        service_class=ServiceClass(row["service_class"]) if row.get("service_class") else None,
        priority=int(row["priority"]) if row.get("priority") else None,
    )


def _nodes(fleet: Path) -> list[ev.NodeRegistered]:
    made: list[ev.NodeRegistered] = []
    for row in _rows(fleet, ("nodes", "devices", "model", "memory_mib")):
        for _ in range(int(row["nodes"])):
            node = NodeId(f"node-{len(made) + 1:04d}")
            devices = tuple(
                ev.Device(
                    uuid=DeviceUuid(f"GPU-{node}-{index}"),
                    index=index,
                    model=row["model"],
                    memory_mib=int(row["memory_mib"]),
                    modes=(Mode.EXCLUSIVE, Mode.MPS, Mode.TIMESLICE),
                )
                for index in range(int(row["devices"]))
            )
            made.append(
                ev.NodeRegistered(
                    node_id=node,
                    session="trace",
                    boot_id="trace",
                    epoch=0,
                    devices=devices,
                    cpu_milli=int(row.get("cpu_milli") or 64_000),
                    memory_mib=int(row.get("host_memory_mib") or 512_000),
                    simulated=True,
                )
            )
    return made


def _rows(path: Path, needed: tuple[str, ...]) -> list[dict[str, Any]]:
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    reader = csv.DictReader(io.StringIO(content.decode("utf-8")))
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise CommandFailed(f"{path}: expected the columns {', '.join(needed)}; missing: {missing}", code=Exit.USAGE)
    return list(reader)


def _name(text: str) -> str:
    """The text as a name of ours."""
    return _NOT_A_NAME.sub("-", text.lower()).strip("-_")[:63] or "x"
