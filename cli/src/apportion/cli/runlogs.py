"""What runs wrote: asked of the agents that have it, over the bus; read from this machine where no pool runs."""

import asyncio
import base64
import functools
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import nats.errors
from msgspec import Struct

from apportion.cli.client import bus_of
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.places import Place, log_file
from apportion.cli.question import ask_sql, job_named, literal
from apportion.contracts import subjects
from apportion.contracts.events import TERMINAL
from apportion.contracts.ids import NodeId, RunId, TenantId, job_of_run

if TYPE_CHECKING:
    from apportion.runtime.stream import Bus

_ANSWER_S: Final = 5.0
_PAUSE_S: Final = 0.5
"""Between looks at what comes, while following."""

_TENANTS: Final = "tenant-"
_ENDS: Final = frozenset(kind.__name__ for kind in TERMINAL)

Look = Callable[[dict[RunId, "Source"]], Awaitable[bool]]
"""Adds the runs that are new; True once the job has ended."""
Ask = Callable[[NodeId, dict[str, Any]], Awaitable[dict[str, Any]]]
"""What a node's agent answers; raises CommandFailed where it doesn't."""


class Source(Struct, kw_only=True):
    """One run's output, and how far it was read."""

    run: RunId
    node: NodeId
    generation: int = 0
    offset: int = 0
    is_over: bool = False
    """Nothing more comes, or nothing of it is kept."""
    problem: str = ""


class Printer:
    """Puts pieces of several runs one after the other, each under its name where there is more than one."""

    def __init__(self, write: Callable[[bytes], object], *, stream: str, names: bool) -> None:
        self._write = write
        self._stream = stream
        self._names = names
        self._last = ""
        self._is_at_line = True

    def put(self, run: RunId, data: bytes, *, is_cut: bool) -> None:
        """Write some output of a run."""
        if not data:
            return
        if run != self._last:
            if self._last or self._names:
                newline = "" if self._is_at_line else "\n"
                self._write(f"{newline}==> {run} {self._stream} <==\n".encode())
            self._last = run
        if is_cut:
            self._write(b"... older output is not kept ...\n")
        self._write(data)
        self._is_at_line = data.endswith(b"\n")


async def drain(source: Source, ask: Ask, printer: Printer, *, stream: str) -> bool:
    """Print what the run's node has by now; True where there was anything."""
    had = False
    while not source.is_over:
        question = {
            "run": source.run,
            "stream": stream,
            "generation": source.generation,
            "offset": source.offset,
        }
        try:
            answer = await ask(source.node, question)
        except CommandFailed as err:
            source.problem = str(err.message)
            # A node that is away may come back; one that has nothing of the run never will.
            source.is_over = err.exit_code == Exit.NOT_FOUND
            return had
        source.problem = ""
        data = base64.b64decode(answer["data"])
        printer.put(source.run, data, is_cut=answer["is_cut"])
        source.generation, source.offset = answer["generation"], answer["offset"]
        if not data:
            source.is_over = not answer["is_live"]
            return had
        had = True
    return had


async def show_logs(place: Place, job: str, *, stream: str, follows: bool) -> None:
    """Print what the job's runs wrote, in the order of their attempts.

    Raises CommandFailed where nothing of it is kept, or nobody who has it answers.
    """
    if (tenant := tenant_of_key(place.key_file)) is not None:
        async with bus_of(place) as bus:
            await _show(_TenantsLook(bus, tenant, job), _asker(bus, tenant), job, stream=stream, follows=follows)
        return
    full = await job_named(place, job)
    if place.note is None and log_file(place.data_dir, place.pool).exists():
        _show_local(place, full, stream=stream)
        return
    async with bus_of(place) as bus:
        look = functools.partial(_look, place, full)
        await _show(look, _asker(bus), full, stream=stream, follows=follows)


def tenant_of_key(key_file: Path | None) -> TenantId | None:
    """Whose key it is, by the name that `apportion keys new` gave its file; None where it is no tenant's."""
    name = "" if key_file is None else key_file.name.removesuffix(".nk")
    return TenantId(name.removeprefix(_TENANTS)) if name.startswith(_TENANTS) else None


async def _show(look: Look, ask: Ask, job: str, *, stream: str, follows: bool) -> None:
    sources: dict[RunId, Source] = {}
    printer = None
    found_any = False
    while True:
        has_ended = await look(sources)
        if printer is None and sources:
            printer = Printer(_to_stdout, stream=stream, names=len(sources) > 1)
        for source in sources.values():
            assert printer is not None
            found_any |= await drain(source, ask, printer, stream=stream)
        sys.stdout.flush()
        if not follows or (has_ended and all(source.is_over or source.problem for source in sources.values())):
            break
        await asyncio.sleep(_PAUSE_S)
    problems = [f"{source.run} on {source.node}: {source.problem}" for source in sources.values() if source.problem]
    if not sources or (problems and not found_any):
        is_silent = any(source.problem and not source.is_over for source in sources.values())
        raise CommandFailed(
            problems[-1] if problems else f"no run of {job} was placed so far",
            code=Exit.BUS_UNREACHABLE if is_silent else Exit.NOT_FOUND,
            hint="`apportion show` says where its runs were; nodes keep output by `kept_logs_h` and `kept_logs_mib`.",
        )
    for problem in problems:
        print(f"apportion: {problem}", file=sys.stderr)


async def _look(place: Place, job: str, sources: dict[RunId, Source]) -> bool:
    """Add the runs that are new; True once the job has ended."""
    runs = await ask_sql(
        place,
        f"SELECT run_id, node_id FROM v_run WHERE job_id = {literal(job)} ORDER BY placed_seq, run_id",  # noqa: S608  quoted
    )
    for row in runs.rows:
        run = RunId(str(row["run_id"]))
        sources.setdefault(run, Source(run=run, node=NodeId(str(row["node_id"]))))
    jobs = await ask_sql(place, f"SELECT outcome FROM v_job WHERE job_id = {literal(job)}")  # noqa: S608  quoted
    return bool(jobs.rows) and jobs.rows[0]["outcome"] != "live"


class _TenantsLook:
    """Looks for the runs of a tenant's job with the tenant's own key, which may ask for its own facts alone."""

    def __init__(self, bus: "Bus", tenant: TenantId, job: str) -> None:
        self._bus = bus
        self._tenant = tenant
        self._name = job.removeprefix(f"{tenant}/")
        self._after = 0
        self._has_ended = False

    async def __call__(self, sources: dict[RunId, Source]) -> bool:
        """Add the runs that are new; True once the job has ended."""
        if "/" in self._name:
            raise CommandFailed(f"expected a job of tenant {self._tenant}, found {self._name}", code=Exit.NOT_PERMITTED)
        while True:
            answer = await self._asked()
            for fact in answer["facts"]:
                self._after = fact["seq"]
                kind = fact["headers"].get("ce-type", "").split(".")
                subject = fact["subject"].split(".")
                if "RunPlaced" in kind:
                    run = RunId("/".join(subject[7:]))
                    sources.setdefault(run, Source(run=run, node=NodeId(subject[6])))
                self._has_ended |= bool(_ENDS & set(kind))
            if answer["is_last"]:
                return self._has_ended

    async def _asked(self) -> dict[str, Any]:
        job = f"{self._tenant}.{self._name}"
        prefix = f"{subjects.ROOT}.{self._bus.pool}.fact"
        question = {
            "filters": [f"{prefix}.placer.run.*.{job}.*.*", f"{prefix}.admission.job.{job}"],
            "after": self._after,
        }
        subject = subjects.read_facts(self._bus.pool, self._tenant)
        try:
            reply = await self._bus.client.request(subject, json.dumps(question).encode(), timeout=_ANSWER_S)
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError) as err:
            raise CommandFailed("the pool's monitor gives no answer", code=Exit.BUS_UNREACHABLE) from err
        answer: dict[str, Any] = json.loads(reply.data)
        if error := answer.get("error"):
            raise CommandFailed(str(error["message"]), code=Exit.FAILURE)
        return answer


def _asker(bus: "Bus", tenant: TenantId | None = None) -> Ask:
    async def ask(node: NodeId, question: dict[str, Any]) -> dict[str, Any]:
        subject = subjects.node_query(bus.pool, node, "logs")
        if tenant is not None:
            subject = subjects.logs_of_tenant(bus.pool, node, tenant)
        try:
            reply = await bus.client.request(subject, json.dumps(question).encode(), timeout=_ANSWER_S)
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError) as err:
            raise CommandFailed(f"node {node} gives no answer", code=Exit.BUS_UNREACHABLE) from err
        answer: dict[str, Any] = json.loads(reply.data)
        if error := answer.get("error"):
            code = Exit.NOT_FOUND if error["code"] == "LogNotFound" else Exit.FAILURE
            raise CommandFailed(str(error["message"]), code=code)
        return answer

    return ask


def _show_local(place: Place, job: str, *, stream: str) -> None:
    from apportion.node_agent.run_logs import generations
    from apportion.node_agent.run_records import run_of_directory

    found = []
    for directory in (*place.data_dir.glob("nodes/*/logs/*"), *place.data_dir.glob("nodes/*/runs/*")):
        run = run_of_directory(directory.name)
        if run is not None and job_of_run(run) == job and (files := generations(directory, stream)):
            found.append((run, list(files.values())))
    if not found:
        raise CommandFailed(
            f"no output of {job} is kept under {place.data_dir}, and the pool does not run",
            code=Exit.NOT_FOUND,
            hint="Start the pool: then the nodes are asked, wherever they are.",
        )
    printer = Printer(_to_stdout, stream=stream, names=len(found) > 1)
    for run, paths in sorted(found):
        printer.put(run, b"".join(path.read_bytes() for path in paths), is_cut=stream != paths[0].name)
    sys.stdout.flush()


def _to_stdout(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
