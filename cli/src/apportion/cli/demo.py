"""The demo: a pool of simulated GPUs, a real day of work, a node that is lost on purpose, and the proof.

Everything is the product's own: `up`'s supervisor starts the processes, a publisher that knows only the bus sends the
requests, and the proof is asked of the log alone. What is simulated is the GPUs; the lines say so.
"""

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from apportion.cli import proof
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import clock, say, to_json
from apportion.cli.places import Place, demo_data_dir, find, log_file
from apportion.cli.question import ask_sql, literal
from apportion.cli.reasons import waiting_text
from apportion.cli.supervisor import NodePlan, PoolPlan, Supervisor
from apportion.cli.workload import (
    LAB_LIMIT_MILLI,
    LAB_QUEUE,
    LAB_TENANT,
    SERVING_QUEUE,
    SERVING_TENANT,
    TRAINING_QUEUE,
    training_tenants,
)
from apportion.contracts import events as ev
from apportion.contracts.causes import Pending
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import JobId, NodeId, PoolId, RunId
from apportion.runtime.stream import Bus

NODES: Final = 4
DEVICES: Final = 8
PROFILE: Final = "h200"
SUSPECT_MS: Final = 1_000
LEASE_MS: Final = 3_000
FAULT_AT_S: Final = 10.0
RETURN_AFTER_S: Final = 4.0
"""How long the lost node stays off after its fencing."""
WHY_FROM_S: Final = 4.0
LINE_EVERY_S: Final = 3.0
PATIENCE_S: Final = 150.0
"""After the last request: how long jobs may take to end before the demo gives up and says so."""
_STORY_WAITS: Final = frozenset({Pending.PENDING_EVALUATION, Pending.BACKOFF, Pending.NOT_BEFORE})
"""Reasons that teach little about a pool."""


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """What was asked for."""

    data_dir: Path
    seed: int
    is_fresh: bool
    port: int
    window_s: float
    stays: bool
    as_json: bool


@dataclass
class Seen:
    """What the streams have said so far, counted for the story. The proof doesn't use it."""

    counts: Counter[str] = field(default_factory=Counter)
    waiting: dict[JobId, str] = field(default_factory=dict)
    """Jobs without slices, and the newest reason."""
    live: set[JobId] = field(default_factory=set)
    runs: dict[RunId, tuple[NodeId, int]] = field(default_factory=dict)
    """Runs that hold slices: node and milli-GPU."""
    held_milli: int = 0
    lost_runs: set[RunId] = field(default_factory=set)
    fenced: dict[NodeId, ev.NodeFenced] = field(default_factory=dict)
    recovered: set[NodeId] = field(default_factory=set)
    moved: int = 0
    round_runs: int = 0
    round_ms: float = 0.0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever something was folded."""
    _round: tuple[int, int, int] = (0, 0, 0)
    _round_runs: int = 0

    def fold(self, entry: Entry) -> None:
        """Count one event."""
        event = entry.event
        self.news.set()
        if entry.stream is Stream.WISHES:
            self.counts["requested"] += entry.subject_type == "JobRequested"
            return
        self.counts[type(event).__name__] += 1
        match event:
            case ev.JobAdmitted(job_id=job) | ev.JobRequeued(job_id=job):
                self.live.add(job)
                self.waiting[job] = ""
            case ev.JobPendingReasonChanged(job_id=job, code=code):
                if job in self.waiting:
                    self.waiting[job] = str(code)
            case ev.RunPlaced() as placed:
                self._placed(placed, entry)
            case ev.RunReleased(run_id=run):
                self._freed(run)
            case ev.NodeFenced() as fenced:
                self.fenced[fenced.node_id] = fenced
                for run, (node, _) in list(self.runs.items()):
                    if node == fenced.node_id:
                        self.lost_runs.add(run)
                        self._freed(run)
            case ev.NodeRecovered(node_id=node):
                self.recovered.add(node)
            case (
                ev.JobSucceeded(job_id=job)
                | ev.JobFailed(job_id=job)
                | ev.JobCancelled(job_id=job)
                | ev.JobExpired(job_id=job)
            ):
                self.live.discard(job)
                self.waiting.pop(job, None)
            case _:
                pass

    def _placed(self, placed: ev.RunPlaced, entry: Entry) -> None:
        milli = sum(each.compute_milli for each in placed.slices)
        self.runs[placed.run_id] = (placed.node_id, milli)
        self.held_milli += milli
        self.waiting.pop(placed.job_id, None)
        replica = placed.run_id.rpartition("/")[0]
        self.moved += any(run.rpartition("/")[0] == replica for run in self.lost_runs)
        if entry.basis is None:
            return
        basis = (entry.basis.facts, entry.basis.wishes, entry.basis.decided_at)
        self._round_runs = self._round_runs + 1 if basis == self._round else 1
        self._round = basis
        if self._round_runs >= self.round_runs:
            self.round_runs = self._round_runs
            self.round_ms = max(0.0, (entry.recorded_at - entry.basis.decided_at) / 1e6)

    def _freed(self, run: RunId) -> None:
        node_and_milli = self.runs.pop(run, None)
        if node_and_milli is not None:
            self.held_milli -= node_and_milli[1]

    @property
    def ended(self) -> int:
        """Jobs that ended, in whatever way."""
        return sum(self.counts[kind.__name__] for kind in ev.TERMINAL)


class Demo:
    """One demo, from an empty directory to its proof."""

    def __init__(self, plan: DemoPlan) -> None:
        self.plan = plan
        self.supervisor = Supervisor(pool_plan(plan))
        self.seen = Seen()
        self.began = time.monotonic()
        self.story_began = self.began
        self.publisher_said: dict[str, Any] = {}
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """The demo's exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        _prepare(self.plan)
        main = asyncio.create_task(self._play())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({main, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done():
                self.tell("stopping")
                return Exit.INTERRUPTED
            code = main.result()
            if self.plan.stays:
                await self._stay()
            return code
        finally:
            for task in (main, stopping):
                task.cancel()
            await asyncio.gather(main, stopping, return_exceptions=True)
            await self.supervisor.stop()

    def tell(self, text: str, *, at: bool = False) -> None:
        """A line of the story; with ``at`` after the time since the first request."""
        line = f" {clock(time.monotonic() - self.story_began)}  {text}" if at else text
        if self.plan.as_json:
            say(line)
        else:
            print(line, flush=True)

    async def _play(self) -> int:
        from apportion.cli.pool_commands import banner

        await self.supervisor.start()
        for line in banner(self.supervisor)[:-1]:
            self.tell(line)
        self.tell("")
        bus = await Bus.connect(
            self.supervisor.server.url,
            pool=PoolId(self.supervisor.plan.pool),
            name="demo",
            key=self.supervisor.key_of("operator"),
        )
        try:
            facts, wishes = await bus.position(Stream.FACTS), await bus.position(Stream.WISHES)
            readers = [
                await bus.reader(Stream.FACTS, after=0 if self.plan.is_fresh else facts.last_seq),
                await bus.reader(Stream.WISHES, after=0 if self.plan.is_fresh else wishes.last_seq),
            ]
            self.story_began = time.monotonic()
            await self._story(readers)
            positions = {
                "facts": (await bus.position(Stream.FACTS)).last_seq,
                "wishes": (await bus.position(Stream.WISHES)).last_seq,
            }
            await self._until_logged(positions)
        finally:
            await bus.close()
        jobs_s = time.monotonic() - self.story_began
        self.tell(f"all {self.seen.counts['JobAdmitted']} admitted jobs ended", at=True)
        await self.supervisor.stop_services()
        return await self._prove(positions, jobs_s)

    async def _story(self, readers: list[Any]) -> None:
        """From the first request to the end of the last job. What fails in the background fails here."""
        try:
            async with self._publisher() as publishing, asyncio.TaskGroup() as group:
                beside = [
                    group.create_task(work) for work in (self._follow(readers), self._narrate(), self._answer_why())
                ]
                await self._fault_and_return()
                if await publishing != 0:
                    raise CommandFailed("the publisher failed; see above")
                await self._until_all_ended()
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several

    # The story ------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _publisher(self) -> AsyncIterator["asyncio.Task[int]"]:
        """The publisher's process, and a task that ends with its exit code."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "apportion.cli.publisher",
            *("--bus-url", self.supervisor.server.url, "--pool", self.supervisor.plan.pool),
            *("--key-file", str(self.supervisor.key_of("gateway"))),
            *("--seed", str(self.plan.seed), "--devices", str(NODES * DEVICES), "--seconds", str(self.plan.window_s)),
            "--",
            *workload_program(),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        reading = asyncio.create_task(self._hear_publisher(process))
        try:
            yield reading
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(reading, return_exceptions=True)

    async def _hear_publisher(self, process: asyncio.subprocess.Process) -> int:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            if said["what"] == "plan":
                self.tell(
                    f"publisher (process {process.pid}, nats-py alone) sends {said['requests']} requests:", at=True
                )
                for note in said["notes"]:
                    self.tell(f"        {note}")
            if said["what"] == "done":
                self.publisher_said = said
                self.tell(f"publisher done: {said['acknowledged']} requests acknowledged, each on disk first", at=True)
        return await process.wait()

    async def _follow(self, readers: list[Any]) -> None:
        from apportion.cli.client import decoded

        while True:
            waits = [asyncio.ensure_future(reader.ready.wait()) for reader in readers]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
            for reader in readers:
                for raw in reader.take():
                    self.seen.fold(decoded(raw))
            await asyncio.sleep(0)

    async def _narrate(self) -> None:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            seen, counts = self.seen, self.seen.counts
            share = 100 * seen.held_milli / (NODES * DEVICES * 1000)
            self.tell(
                f"requested {counts['requested']:>3}  admitted {counts['JobAdmitted']:>3}"
                f"  refused {counts['JobRejected']:>2}  waiting {len(seen.waiting):>3}  runs {len(seen.runs):>3}"
                f"  ended {seen.ended:>3}   allocated {share:.0f} %",
                at=True,
            )

    async def _answer_why(self) -> None:
        """One real answer of `apportion why`, for a job that waits for something: what the log says of it now."""
        place = self._place()
        dull = ", ".join(literal(str(code)) for code in sorted(_STORY_WAITS))
        await asyncio.sleep(WHY_FROM_S)
        while True:
            await asyncio.sleep(0.5)
            if not any(code and code not in _STORY_WAITS for code in self.seen.waiting.values()):
                continue
            with contextlib.suppress(CommandFailed):
                found = await ask_sql(
                    place,
                    f"SELECT * FROM v_pending_now WHERE code NOT IN ({dull}) ORDER BY since, job_id",  # noqa: S608
                    limit=1,
                )
                if found.rows:
                    job = found.rows[0]["job_id"]
                    first, *rest = waiting_text(job, found.rows[0])
                    self.tell(f"why? {first}", at=True)
                    for line in rest:
                        self.tell(f"        {line.strip()}")
                    self.tell(f"        $ apportion why {job}{self._where()}")
                    return

    def _where(self) -> str:
        """What other commands need to find this demo: nothing where it is in its usual place."""
        return "" if self.plan.data_dir == demo_data_dir() else f" --data-dir {self.plan.data_dir}"

    def _place(self) -> Place:
        return find({"data_dir": str(self.supervisor.data_dir)})

    async def _fault_and_return(self) -> None:
        seen = self.seen
        await asyncio.sleep(max(0.0, min(FAULT_AT_S, self.plan.window_s / 3) - (time.monotonic() - self.story_began)))
        await self._until("a run to be placed", lambda: bool(seen.runs))
        # The busiest one: an empty node would be a cheap loss.
        runs_of = Counter(node for node, _ in seen.runs.values())
        lost = min(runs_of, key=lambda node: (-runs_of[node], node))
        ended = await self.supervisor.lose_node(lost)
        self.tell(
            f"FAULT  {lost} loses its power: kill -9 of"
            f" {', '.join(f'{count} {kind}' for kind, count in ended.items())}; {runs_of[lost]} runs held slices there",
            at=True,
        )
        cut = time.monotonic()
        await self._until(f"{lost} to be fenced", lambda: lost in seen.fenced)
        fenced = seen.fenced[lost]
        self.tell(
            f"lease of {LEASE_MS / 1000:g} s ended: {lost} fenced {time.monotonic() - cut:.1f} s after the cut,"
            f" epoch {fenced.epoch}; {len(fenced.runs)} runs are lost and their jobs go on elsewhere",
            at=True,
        )
        await asyncio.sleep(RETURN_AFTER_S)
        self.supervisor.return_node(lost)
        await self._until(f"{lost} to come back", lambda: lost in seen.recovered)
        self.tell(
            f"{lost} is back with epoch {fenced.epoch}; {seen.moved} of its runs were placed again by now", at=True
        )

    async def _until(self, what: str, is_true: Callable[[], bool]) -> None:
        """Returns once the streams have made it true. Raises CommandFailed."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not is_true():
                    self.seen.news.clear()
                    await self.seen.news.wait()
        except TimeoutError as err:
            logs = self.supervisor.data_dir / "logs"
            raise CommandFailed(
                f"expected {what} within {PATIENCE_S:.0f} s, and it did not come",
                code=Exit.INTEGRITY,
                hint=f"The services' logs are in {logs}.",
            ) from err

    async def _until_all_ended(self) -> None:
        seen = self.seen
        asked = self.publisher_said["acknowledged"]
        until = time.monotonic() + PATIENCE_S
        while True:
            answered = seen.counts["JobAdmitted"] + seen.counts["JobRejected"] + seen.counts["JobDuplicate"]
            if answered >= asked and not seen.live and not seen.runs:
                return
            if time.monotonic() > until:
                self.tell(
                    f"GIVING UP after {PATIENCE_S:.0f} s: {answered} of {asked} answered, {len(seen.live)} jobs live, "
                    f"{len(seen.runs)} runs hold slices",
                    at=True,
                )
                return
            await asyncio.sleep(0.05)

    async def _until_logged(self, positions: dict[str, int]) -> None:
        """The log has what the bus has."""
        place = self._place()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            found = await ask_sql(place, "SELECT stream, max(stream_seq) AS seq FROM events GROUP BY stream")
            reached = {row["stream"]: row["seq"] for row in found.rows}
            if all(reached.get(stream, 0) >= seq for stream, seq in positions.items()):
                return
            await asyncio.sleep(0.3)

    # The proof ------------------------------------------------------------------------------------------------------

    async def _prove(self, positions: dict[str, int], jobs_s: float) -> int:
        path = log_file(self.supervisor.data_dir, self.supervisor.plan.pool)
        result = await asyncio.to_thread(proof_of, path, positions, self.publisher_said)
        result = {
            "schema": "apportion.demo/1",
            **result,
            "requests_acknowledged": self.publisher_said["acknowledged"],
            "seed": self.plan.seed,
            "nodes": NODES,
            "devices": NODES * DEVICES,
            "simulated": True,
            "largest_round_runs": self.seen.round_runs,
            "largest_round_ms": round(self.seen.round_ms, 1),
            "jobs_s": round(jobs_s, 1),
            "wall_s": round(time.monotonic() - self.began, 1),
            "log": str(path),
        }
        if self.plan.as_json:
            print(to_json(result), flush=True)
        for line in proof_lines(result):
            self.tell(line)
        return Exit.OK if result["holds"] else Exit.INTEGRITY

    async def _stay(self) -> None:
        await self.supervisor.restart_services()
        self.tell("")
        where = self._where()
        self.tell(f"The pool stays up. Next:  apportion nodes{where}    apportion jobs --all{where}")
        self.tell(f"                          {self.supervisor.monitor_url}/metrics    Ctrl-C stops")
        await self._stop.wait()


def pool_plan(plan: DemoPlan) -> PoolPlan:
    """The demo's pool: four simulated nodes, three queues, a short lease."""
    return PoolPlan(
        pool="demo",
        data_dir=plan.data_dir,
        bus_port=plan.port,
        nodes=tuple(
            NodePlan(name=f"node-{number}", devices=DEVICES, profile=PROFILE) for number in range(1, NODES + 1)
        ),
        queues=(
            ev.QueueUpsertRequested(
                queue=TRAINING_QUEUE, tenants=tuple(training_tenants()), reason="the trace's virtual clusters"
            ),
            ev.QueueUpsertRequested(queue=SERVING_QUEUE, tenants=(SERVING_TENANT,), reason="LLM conversations"),
            ev.QueueUpsertRequested(
                queue=LAB_QUEUE,
                tenants=(LAB_TENANT,),
                limit_compute_milli=LAB_LIMIT_MILLI,
                reason="a small quota, to be exceeded",
            ),
        ),
        suspect_ms=SUSPECT_MS,
        lease_ms=LEASE_MS,
        log_level="info",
        why_simulated="the demo always simulates",
    )


def workload_program() -> list[str]:
    """The simulated GPU workload's argv: a plain file without site, so that it starts as fast as a real binary."""
    import importlib.util

    found = importlib.util.find_spec("apportion.node_agent.simgpu.workload")
    if found is None or found.origin is None:
        raise CommandFailed("expected the node agent's simulated workload to be installed, found none")
    return [sys.executable, "-S", "-E", found.origin]


def proof_of(path: Path, positions: dict[str, int], publisher: dict[str, Any]) -> dict[str, Any]:
    """Every figure of the proof, from the log at ``path``, which nobody may be writing."""
    from apportion.cli.replaying import replay_all
    from apportion.monitor.log import own_questions, verify

    with own_questions(path) as ask:
        found = proof.figures(ask)
        last = ask("SELECT stream, max(stream_seq) FROM events GROUP BY stream")
        wait_p95_ms = int(ask(proof.WAIT_P95_MS)[0][0])
        gpu_s = float(ask(proof.GPU_S)[0][0])
        refusals = {str(code): int(times) for code, times in ask(proof.REFUSALS)}
    logged = {str(stream): int(seq) for stream, seq in last}
    # What the bus acknowledged and the log doesn't have is lost as well.
    found["lost"] += sum(max(0, seq - logged.get(stream, 0)) for stream, seq in positions.items())
    found["lost"] += max(0, int(publisher["last_seq"]) - logged.get("wishes", 0))
    verdict = verify(path)
    report = replay_all(path)
    broken = proof.broken(found)
    return {
        **found,
        "refusals": refusals,
        "wait_p95_ms": wait_p95_ms,
        "gpu_seconds": round(gpu_s, 1),
        "chain_ok": verdict.ok,
        "chain_head": verdict.head_hash,
        "replay_decisions": report["decisions"],
        "replay_differences": report["differences"],
        "broken": broken,
        "holds": not broken
        and verdict.ok
        and report["differences"] == 0
        and report["decisions"] > 0
        and found["jobs_requested"] > 0
        and found["jobs_requested"] == found["jobs_admitted"] + found["jobs_rejected"] + found["jobs_duplicate"],
    }


def proof_lines(result: dict[str, Any]) -> list[str]:
    """The proof, for people."""
    refused = ", ".join(f"{code} {count}" for code, count in result["refusals"].items())
    chain = "ok" if result["chain_ok"] else "BROKEN"
    verdict = "PASS" if result["holds"] else f"FAIL {result['broken'] or ''}".rstrip()
    jobs = "{jobs_requested} requested = {jobs_admitted} admitted + {jobs_rejected} refused".format_map(result)
    ends = "{jobs_succeeded} succeeded, {jobs_failed} failed, {jobs_cancelled} cancelled".format_map(result)
    replay = "{replay_decisions} decisions made again from the log alone: {replay_differences} differences"
    claims = "{lost} lost, {started_twice} started twice, {over_allocated} over-allocated".format_map(result)
    runs = (
        f"{result['runs_started']} started, {result['runs_moved']} moved off fenced nodes; largest round:"
        f" {result['largest_round_runs']} placed at once, stored {result['largest_round_ms']:.0f} ms after deciding"
    )
    return [
        "",
        f"jobs     {jobs} ({refused})",
        f"         {ends}; wait p95 {result['wait_p95_ms'] / 1000:.1f} s; {result['gpu_seconds']:.0f} GPU-s held",
        f"runs     {runs}",
        f"log      {result['events']} events, no gap, chain {chain}, head {result['chain_head'][:12]}",
        f"replay   {replay.format_map(result)}",
        f"{verdict}     {claims}   ({result['wall_s']:.0f} s)",
    ]


async def run_demo(plan: DemoPlan) -> int:
    """Run the demo; its exit code."""
    return int(await Demo(plan).run())


def _prepare(plan: DemoPlan) -> None:
    """An empty directory, unless the demo shall go on in it. Only a directory that a demo made is wiped."""
    marker = plan.data_dir / ".apportion-demo"
    if plan.is_fresh and plan.data_dir.exists() and any(plan.data_dir.iterdir()):
        if not marker.exists():
            raise CommandFailed(
                f"{plan.data_dir} is not empty and was not made by a demo: it is not wiped",
                code=Exit.USAGE,
                hint="Name an empty or new directory, or --keep to go on in this one.",
            )
        from apportion.cli.places import read_note

        if (note := read_note(plan.data_dir)) is not None:
            raise CommandFailed(
                f"a demo runs in {plan.data_dir} already (process {note.supervisor_pid})",
                code=Exit.USAGE,
                hint="Stop it first, or name another --data-dir.",
            )
        from apportion.cli.leftovers import Kind, end_all

        # A demo that was killed leaves processes; wiping their files under them would make a riddle.
        end_all(plan.data_dir, frozenset(Kind))
        shutil.rmtree(plan.data_dir)
    plan.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    marker.touch()
