"""Scenario files: a pool of simulated nodes, what happens in it when, and what must be true of its log afterwards.

::

    name = "a node is lost during a gang"
    nodes = 3
    devices = 4
    must_hold = true                       # the checks of MUST_HOLD, too
    baseline = "whole-cards"               # run it again with whole devices only, and print both

    [[step]]
    at_s = 1
    submit = { name = "gang", count = 1 }
    job = { queue = "main", workload = { command = ["sleep", "20"] }, resources = { gpu = 4 }, gang = { size = 2 } }

    [[step]]
    at_s = 6
    fault = { kind = "node-loss", target = "node-2", for_s = 8 }

    [[check]]
    name = "the gang runs again within"
    unit = "s"
    sql = "SELECT max(downtime_ms) / 1000 FROM v_migrations"
    at_most = 15

The pool is real processes in a directory of its own; what is asked of it goes over its bus like anybody's wish.
"""

import asyncio
import contextlib
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from apportion.cli.queues import DEFAULT
from apportion.cli.supervisor import NodePlan, PoolPlan, Supervisor
from apportion.contracts import events as ev
from apportion.contracts.causes import FaultKind
from apportion.contracts.codec import decode_fact, encode_wish
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import OPERATOR, PoolId, TenantId
from apportion.runtime.stream import Bus

POOL: Final = PoolId("scenario")
TENANT: Final = TenantId("default")
SUSPECT_MS: Final = 1_000
LEASE_MS: Final = 3_000
WORKLOAD: Final = "@workload"
"""Stands for the simulated GPU workload's program, as the first word of a command."""
FOLDER: Final = "@folder"
"""Stands, where a job keeps its checkpoints, for a folder of this run of the scenario alone."""


class ScenarioInvalid(Exception):
    """A scenario file that can't be run; says where and what was expected."""

    exit_code = 2


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a scenario: a mistyped name is an error."""


class Submit(_Part, frozen=True, kw_only=True):
    """How many jobs of a kind, and how far apart."""

    name: str
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    every_ms: Annotated[int, Meta(ge=0, le=600_000)] = 0


class FaultStep(_Part, frozen=True, kw_only=True):
    """A fault, as `apportion fault inject` has it."""

    kind: FaultKind
    target: str = ""
    for_s: Annotated[int, Meta(ge=1, le=3_600)] = 10
    seed: int = 0
    xid: int | None = None


class Step(_Part, frozen=True, kw_only=True):
    """What happens at a moment: jobs, a fault, or an operator's wish."""

    at_s: float
    submit: Submit | None = None
    job: dict[str, Any] | None = None
    fault: FaultStep | None = None
    wish: dict[str, Any] | None = None
    """``{ type = "NodeDrainRequested", node_id = "node-1", … }``"""


class Check(_Part, frozen=True, kw_only=True):
    """One figure, and what it must be."""

    name: str
    sql: str
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    against: Literal["", "lower", "higher"] = ""
    """With a baseline: the figure must be lower, or higher, than the baseline's."""


class Scenario(_Part, frozen=True, kw_only=True):
    """A whole file."""

    name: str
    nodes: Annotated[int, Meta(ge=1, le=16)] = 2
    devices: Annotated[int, Meta(ge=1, le=16)] = 4
    profile: str = "h200"
    standby: bool = False
    settle_s: Annotated[int, Meta(ge=1, le=3_600)] = 60
    """How long after the last step everything may take to come to its end."""
    must_hold: bool = True
    baseline: Literal["", "whole-cards"] = ""
    step: tuple[Step, ...]
    check: tuple[Check, ...] = ()


MUST_HOLD: Final = (
    Check(name="jobs without an end", sql="SELECT count(*) FROM v_job WHERE ended IS NULL", at_most=0),
    Check(name="jobs with two ends", sql="SELECT count(*) FROM v_job WHERE terminal_facts > 1", at_most=0),
    Check(name="runs started twice", sql="SELECT count(*) FROM v_run WHERE start_facts > 1", at_most=0),
    Check(
        name="attempts of a replica at once",
        sql=(
            "SELECT count(*) FROM v_run AS a JOIN v_run AS b ON a.job_id = b.job_id"
            " AND split_part(a.run_id, '/', 3) = split_part(b.run_id, '/', 3)"
            " AND CAST(split_part(a.run_id, '/', 4) AS INT) < CAST(split_part(b.run_id, '/', 4) AS INT)"
            " WHERE a.started IS NOT NULL AND b.started IS NOT NULL"
            " AND coalesce(b.started < least(a.finished, a.lost), true)"
        ),
        at_most=0,
    ),
    Check(name="slices over-allocated", sql="SELECT count(*) FROM v_double_slice", at_most=0),
    Check(
        name="wishes without one answer",
        sql="SELECT count(*) FROM v_wish_answers WHERE answering_facts <> 1",
        at_most=0,
    ),
    Check(name="faults not cleared", sql=(
        "SELECT count(*) FILTER (kind = 'FaultInjected') - count(*) FILTER (kind = 'FaultCleared') FROM v_event"
    ), at_most=0),
    Check(
        name="lost node noticed after at most",
        unit="s",
        sql=(
            "SELECT coalesce(max(CAST(body -> '$.silent_ms' AS BIGINT)), 0) / 1000 FROM v_event"
            " WHERE kind = 'NodeLost'"
        ),
        at_most=LEASE_MS / 1000 + 2,
    ),
)  # fmt: skip
"""What must hold whatever was broken, once faults have stopped."""


class Figure(Struct, frozen=True, kw_only=True):
    """One check with what was measured."""

    name: str
    unit: str
    value: float | None
    baseline: float | None = None
    wanted: str
    passed: bool


def load(path: Path) -> Scenario:
    """The scenario of a file. Raises ScenarioInvalid."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Scenario)
    except (OSError, ValueError) as err:
        raise ScenarioInvalid(f"{path}: {err}") from err
    for number, step in enumerate(found.step):
        if sum(what is not None for what in (step.submit, step.fault, step.wish)) != 1:
            raise ScenarioInvalid(f"{path}: step[{number}]: expected one of submit, fault, wish")
        try:
            _ = [*_jobs(step), _operators(step)]
        except (msgspec.ValidationError, KeyError, AttributeError) as err:
            raise ScenarioInvalid(f"{path}: step[{number}]: {err}") from err
    return found


def run(scenario: Scenario, folder: Path, say: Callable[[str], None]) -> list[Figure]:
    """Run it, and its baseline where it has one; every check with its figure."""
    ours = asyncio.run(_played(scenario, folder / "run", say))
    theirs = None
    if scenario.baseline:
        say("baseline: the same with whole devices, nothing shared")
        theirs = asyncio.run(_played(_whole_cards(scenario), folder / "baseline", say))
    return judged(scenario, ours, theirs)


def log_of(folder: Path) -> Path:
    """The log of the run that was kept in that folder."""
    from apportion.cli.places import log_file

    return log_file(folder / "run", POOL)


def judged(scenario: Scenario, ours: dict[str, float | None], theirs: dict[str, float | None] | None) -> list[Figure]:
    """The figures held against what was wanted of them."""
    found = []
    for check in (*(MUST_HOLD if scenario.must_hold else ()), *scenario.check):
        value = ours[check.name]
        base = None if theirs is None else theirs[check.name]
        wanted = []
        passed = value is not None
        if check.at_most is not None:
            wanted.append(f"at most {check.at_most:g}")
            passed = passed and value is not None and value <= check.at_most
        if check.at_least is not None:
            wanted.append(f"at least {check.at_least:g}")
            passed = passed and value is not None and value >= check.at_least
        if check.against and theirs is not None:
            wanted.append(f"{check.against} than the baseline")
            is_lower = check.against == "lower"
            passed = passed and value is not None and base is not None and (value < base if is_lower else value > base)
        found.append(
            Figure(
                name=check.name,
                unit=check.unit,
                value=value,
                baseline=base,
                wanted=", ".join(wanted) or "shown",
                passed=passed or not wanted,
            )
        )
    return found


def _whole_cards(scenario: Scenario) -> Scenario:
    """The same work where a device belongs to one job at a time."""

    def whole(step: Step) -> Step:
        if step.job is None:
            return step
        devices = step.job.get("resources", {}).get("gpu", 1)
        return replace(step, job={**step.job, "resources": {"gpu": devices, "mode": "exclusive"}})

    return replace(scenario, step=tuple(whole(step) for step in scenario.step))


async def _played(scenario: Scenario, data_dir: Path, say: Callable[[str], None]) -> dict[str, float | None]:
    supervisor = Supervisor(
        PoolPlan(
            pool=POOL,
            data_dir=data_dir,
            bus_port=0,
            nodes=tuple(
                NodePlan(name=f"node-{number}", devices=scenario.devices, profile=scenario.profile)
                for number in range(1, scenario.nodes + 1)
            ),
            queues=DEFAULT,
            suspect_ms=SUSPECT_MS,
            lease_ms=LEASE_MS,
            standby=scenario.standby,
            faults=True,
        )
    )
    try:
        await supervisor.start()
        bus = await Bus.connect(
            supervisor.server.url, pool=POOL, name="scenario", key=supervisor.key_of(str(OPERATOR).strip("_"))
        )
        try:
            scratch = data_dir / "scratch"
            scratch.mkdir(exist_ok=True)
            await _Play(scenario, bus, say, folder=scratch).run()
        finally:
            await bus.close()
    finally:
        await supervisor.stop()
    return await asyncio.to_thread(figures, scenario, data_dir)


def figures(scenario: Scenario, data_dir: Path) -> dict[str, float | None]:
    """What each check measures in the log of a pool that has stopped."""
    from apportion.cli.places import log_file
    from apportion.monitor.log import own_questions

    found: dict[str, float | None] = {}
    with own_questions(log_file(data_dir, POOL)) as ask:
        for check in (*(MUST_HOLD if scenario.must_hold else ()), *scenario.check):
            try:
                rows = ask(check.sql)
            except Exception as err:  # whatever the log has against the question, the file has to be changed
                raise ScenarioInvalid(f"check {check.name!r}: {err}") from err
            value = rows[0][0] if rows and rows[0] else None
            found[check.name] = None if value is None else float(value)
    return found


class _Play:
    """The timeline of one scenario, on one pool."""

    def __init__(self, scenario: Scenario, bus: Bus, say: Callable[[str], None], *, folder: Path) -> None:
        self._scenario = scenario
        self._bus = bus
        self._say = say
        self._folder = folder
        self._began = time.monotonic()
        self._live: set[str] = set()
        self._answered = 0
        self._asked = 0
        self._faults = 0

    async def run(self) -> None:
        """Everything in its time, and then until all has ended."""
        watching = asyncio.create_task(self._watch(), name="watch")
        try:
            await asyncio.gather(*(self._at(step) for step in self._scenario.step))
            until = time.monotonic() + self._scenario.settle_s
            while not self._is_quiet():
                if time.monotonic() > until:
                    self._tell(f"gave up after {self._scenario.settle_s} s: {len(self._live)} jobs have not ended")
                    break
                if watching.done():
                    watching.result()
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)  # what follows from the last end is said
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    def _is_quiet(self) -> bool:
        return self._answered >= self._asked and not self._live and not self._faults

    async def _at(self, step: Step) -> None:
        await asyncio.sleep(max(0.0, step.at_s - (time.monotonic() - self._began)))
        jobs = _jobs(step, folder=self._folder)
        if step.submit is not None:
            self._tell(f"{step.submit.count} jobs: {step.submit.name}")
        for number, wish in enumerate(jobs):
            if number and step.submit is not None and step.submit.every_ms:
                await asyncio.sleep(step.submit.every_ms / 1000)
            await self._ask(TENANT, wish)
        operators = _operators(step)
        if operators is not None:
            what = step.fault.kind.value if step.fault is not None else type(operators).__name__
            target = step.fault.target if step.fault is not None else ""
            self._tell(f"{what} {target}".rstrip())
            await self._ask(OPERATOR, operators)

    async def _ask(self, tenant: TenantId, wish: ev.Wish) -> None:
        self._asked += 1
        message = encode_wish(POOL, wish, tenant=tenant, event_id=f"step-{self._asked}", source="/apportion/scenario")
        await self._bus.publish_wish(message)

    async def _watch(self) -> None:
        reader = await self._bus.reader(Stream.FACTS, after=0)
        first = (await self._bus.position(Stream.WISHES)).last_seq
        async for batch in reader.batches():
            for raw in batch:
                event = decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at).event
                if getattr(event, "answers", 0) > first:
                    self._answered += 1
                match event:
                    case ev.JobAdmitted():
                        self._live.add(event.job_id)
                    case ev.JobSucceeded() | ev.JobFailed() | ev.JobCancelled() | ev.JobExpired():
                        self._live.discard(event.job_id)
                    case ev.FaultInjected():
                        self._faults += 1
                    case ev.FaultCleared():
                        self._faults -= 1
                    case ev.NodeFenced():
                        self._tell(f"{event.node_id} fenced, {len(event.runs)} runs")
                    case ev.MigrationCompleted():
                        self._tell(f"{event.job_id} moved, down {event.downtime_ms / 1000:.1f} s")
                    case ev.JobRejected() | ev.NodeWishRejected():
                        self._tell(f"refused: {event.code.value} {event.field} {event.expected} {event.found}")
                    case _:
                        pass

    def _tell(self, what: str) -> None:
        self._say(f"{time.monotonic() - self._began:6.1f} s  {what}")


def _jobs(step: Step, *, folder: Path = Path("/nowhere")) -> Sequence[ev.JobRequested]:
    if step.submit is None:
        return ()
    job = dict(step.job or {})
    workload = dict(job.get("workload", {}))
    command = list(workload.get("command", ()))
    if command and command[0] == WORKLOAD:
        from apportion.cli.demo import workload_program

        workload["command"] = [*workload_program(), *command[1:]]
    job["workload"] = workload
    if uri := job.get("checkpoint", {}).get("uri"):
        job["checkpoint"] = {**job["checkpoint"], "uri": uri.replace(FOLDER, str(folder))}
    return [
        msgspec.convert({"queue": "main", **job, "job_id": f"{step.submit.name}-{number}"}, ev.JobRequested)
        for number in range(1, step.submit.count + 1)
    ]


def _operators(step: Step) -> ev.Wish | None:
    if step.fault is not None:
        given = {**msgspec.structs.asdict(step.fault), "reason": "scenario"}
        return ev.FaultInjectionRequested(**given)
    if step.wish is not None:
        given = dict(step.wish)
        kind: type[ev.Wish] = getattr(ev, given.pop("type"))
        return msgspec.convert({"reason": "scenario", **given}, kind)
    return None
