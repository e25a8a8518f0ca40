"""What people and tools may ask the monitor: SQL, jobs, one job's story, nodes, how the log stands, and the contract.

Each question is a request on its own subject and gets one JSON object. What lives is answered from the fold of the
facts, what has ended from the log; nothing here changes anything.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from apportion.contracts import subjects
from apportion.contracts.fields import PLAIN
from apportion.contracts.ids import JobId, tenant_of_job
from apportion.monitor import schemas, sql
from apportion.monitor.alerts import Alerts, silenced_by
from apportion.monitor.auditing import Recorder
from apportion.monitor.faults import Faults
from apportion.monitor.hearing import Skews
from apportion.monitor.log import Answer, EventLog, LogError
from apportion.monitor.replicas import Replicas
from apportion.monitor.shown import alert_shown, job_shown, node_shown
from apportion.monitor.sql_worker import plain
from apportion.monitor.writer import LogWriter
from apportion.pool.state import JobState, Pool
from apportion.runtime.clock import Clock
from apportion.runtime.stream import Bus

QUESTIONS_AT_ONCE: Final = 2
QUESTIONS_WAITING_MAX: Final = 8
ANSWER_BYTES_MAX: Final = 900 * 1024
"""A message of the bus holds 1 MiB."""
NS_PER_MS: Final = 1_000_000

Limit = Annotated[int, Meta(ge=1, le=sql.ROWS_MAX)]
T = TypeVar("T", bound=Struct)


class SqlAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody's own statement on a copy of the log."""

    statement: str
    limit: Limit = sql.ROWS_DEFAULT
    actor: Annotated[str, Meta(max_length=256, pattern=PLAIN)] = ""
    """Who asks, for the record; it grants nothing."""


class JobsAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs, of one tenant or all, in one state or all that have not ended."""

    tenant: str | None = None
    state: JobState | None = None
    limit: Limit = 500


class JobAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job's whole story."""

    job_id: str
    limit: Limit = 1_000


class SchemasAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event version's JSON Schema, or which there are."""

    name: str | None = None


class NothingAsked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question without parameters."""


class QueryService:
    """Answers questions until the connection closes. Use it from one event loop."""

    def __init__(
        self,
        *,
        bus: Bus,
        event_log: EventLog,
        replicas: Replicas,
        writer: LogWriter,
        recorder: Recorder,
        pool: Callable[[], Pool],
        alerts: Callable[[], Alerts],
        faults: Callable[[], Faults],
        skews: Skews,
        clock: Clock,
    ) -> None:
        self._bus = bus
        self._log = event_log
        self._replicas = replicas
        self._writer = writer
        self._recorder = recorder
        self._pool = pool
        self._alerts = alerts
        self._faults = faults
        self._skews = skews
        self._clock = clock
        self._slots = asyncio.Semaphore(QUESTIONS_AT_ONCE)
        self._asking = 0
        self._workers = sql.Workers()

    async def start(self) -> None:
        """Listen on each question's subject."""
        for name, handler in (
            ("sql", _handler(SqlAsked, self.sql)),
            ("jobs", _handler(JobsAsked, self.jobs)),
            ("job", _handler(JobAsked, self.job)),
            ("nodes", _handler(NothingAsked, self.nodes)),
            ("alerts", _handler(NothingAsked, self.alerts)),
            ("faults", _handler(NothingAsked, self.faults)),
            ("status", _handler(NothingAsked, self.status)),
            ("schemas", _handler(SchemasAsked, self.schemas)),
            ("asyncapi", _handler(NothingAsked, self.asyncapi)),
        ):
            await self._bus.serve(subjects.query(self._bus.pool, name), handler)

    def close(self) -> None:
        """End the questions that are being answered: a drain does not wait for them."""
        self._workers.close()

    async def sql(self, asked: SqlAsked) -> dict[str, Any]:
        """``columns``, ``rows``, ``truncated`` and ``as_of``, or ``error``: once it is recorded that it was asked."""
        if self._asking >= QUESTIONS_AT_ONCE + QUESTIONS_WAITING_MAX:
            return _error("Busy", f"{self._asking} questions are being answered; ask again in a moment")
        self._asking += 1
        try:
            async with self._slots, self._replicas.newest() as copy:
                began = self._clock.monotonic()
                answer = await asyncio.to_thread(self._workers.ask, copy.path, asked.statement, limit=asked.limit)
                ended = self._clock.monotonic()
            as_of = {
                "ordinal": copy.head.ordinal,
                "recorded_at": copy.head.recorded_at,
                "copied_at": copy.copied_at,
                "age_ms": max(0, self._clock.now() - copy.copied_at) // NS_PER_MS,
            }
            query_id = await self._recorder.record(
                statement=asked.statement,
                actor=asked.actor,
                rows=len(answer.get("rows", ())),
                truncated=bool(answer.get("truncated")),
                elapsed_ms=(ended - began) // NS_PER_MS,
                age_ms=as_of["age_ms"],
                log_ordinal=copy.head.ordinal,
                refused=str(answer["error"]["message"]) if "error" in answer else "",
            )
            return {**answer, "as_of": as_of, "query_id": query_id}
        finally:
            self._asking -= 1
            asyncio.get_running_loop().run_in_executor(None, self._workers.prepare)

    async def jobs(self, asked: JobsAsked) -> dict[str, Any]:
        """``jobs`` that have not ended, oldest first; or the last that have."""
        pool = self._pool()
        if asked.state is JobState.ENDED:
            return {"as_of": _as_of(pool), **await self._ended(asked)}
        live = sorted(
            (
                job
                for job in pool.jobs.values()
                if job.state is not JobState.ENDED
                and asked.tenant in {None, job.tenant}
                and asked.state in {None, job.state}
            ),
            key=lambda job: job.admitted_seq,
        )
        jobs = [job_shown(job) for job in live[: asked.limit]]
        return {"as_of": _as_of(pool), "jobs": jobs, "total": len(live), "truncated": len(jobs) < len(live)}

    async def _ended(self, asked: JobsAsked) -> dict[str, Any]:
        kinds = "('JobSucceeded.v1', 'JobFailed.v1', 'JobCancelled.v1', 'JobExpired.v1')"
        found = await asyncio.to_thread(
            self._log.ask,
            f"SELECT job_id, tenant, split_part(type, '.', 1) AS outcome, cause, recorded_at AS ended_at FROM events "  # noqa: S608 - a constant list
            f"WHERE type IN {kinds} AND (?::VARCHAR IS NULL OR tenant = ?) ORDER BY ordinal DESC LIMIT ?",
            [asked.tenant, asked.tenant, asked.limit + 1],
        )
        rows = _as_objects(found)
        return {
            "jobs": [{**row, "state": JobState.ENDED.value} for row in rows[: asked.limit]],
            "truncated": len(rows) > asked.limit,
        }

    async def job(self, asked: JobAsked) -> dict[str, Any]:
        """The job as it is (``job``, where it lives) and ``events``: all that was said of it, in order."""
        job_id = JobId(asked.job_id)
        found = await asyncio.to_thread(
            self._log.ask,
            "SELECT ordinal, recorded_at, kind, said_by, actor, cause, run_id, node_id, body FROM ("
            "  SELECT t.*, e.recorded_at FROM v_job_timeline AS t JOIN events AS e USING (ordinal) WHERE t.job_id = ?"
            ") ORDER BY ordinal LIMIT ?",
            [job_id, asked.limit + 1],
        )
        pool = self._pool()
        live = pool.jobs.get(job_id)
        if not found.rows and live is None:
            return _error("JobNotFound", f"nothing was ever said of a job {asked.job_id!r} (ids are <tenant>/<name>)")
        events = [{**row, "body": _parsed(row["body"])} for row in _as_objects(found)]
        return {
            "as_of": _as_of(pool),
            "job_id": job_id,
            "tenant": tenant_of_job(job_id),
            "job": None if live is None else job_shown(live, with_spec=True),
            "events": events[: asked.limit],
            "truncated": len(events) > asked.limit,
        }

    async def nodes(self, asked: NothingAsked) -> dict[str, Any]:
        """``nodes`` with their devices and what is held of them."""
        del asked
        pool = self._pool()
        skews = self._skews.seconds(pool.nodes)
        shown = [
            {**node_shown(node), "clock_skew_ms": round(skews[node_id] * 1000) if node_id in skews else None}
            for node_id, node in sorted(pool.nodes.items())
        ]
        return {"as_of": _as_of(pool), "frozen": pool.frozen, "nodes": shown}

    async def alerts(self, asked: NothingAsked) -> dict[str, Any]:
        """``alerts`` that are firing, the newest first, with who looks at them; and the ``silences`` in force."""
        del asked
        alerts, now = self._alerts(), self._clock.now()
        shown = [
            alert_shown(firing, silenced_by(alerts, firing.fact.rule, firing.fact.about, now), now)
            for firing in sorted(alerts.firing.values(), key=lambda one: -one.raised_seq)
        ]
        silences = [
            {"rule": one.rule, "about": one.about, "until_at": one.until_at, "actor": one.actor, "reason": one.reason}
            for _, one in sorted(alerts.silences.items())
            if one.until_at > now
        ]
        return {"as_of": _as_of(self._pool()), "alerts": shown, "silences": silences}

    async def faults(self, asked: NothingAsked) -> dict[str, Any]:
        """``faults`` in force, oldest first, and whether any may be injected (``allowed``)."""
        del asked
        faults = self._faults()
        shown = [msgspec.to_builtins(one) for one in sorted(faults.active.values(), key=lambda one: one.answers)]
        return {"as_of": _as_of(self._pool()), "allowed": faults.are_allowed, "faults": shown}

    async def status(self, asked: NothingAsked) -> dict[str, Any]:
        """How far the log stands behind the bus, the head of its chain, and how many of each type it holds."""
        del asked
        lag = await self._writer.lag()
        counts = await asyncio.to_thread(
            self._log.ask, "SELECT coalesce(type, ''), count(*) FROM events GROUP BY 1 ORDER BY 1"
        )
        broken = await asyncio.to_thread(self._log.ask, "SELECT count(*) FROM events WHERE parse_error IS NOT NULL")
        head = self._log.head
        return {
            "as_of": _as_of(self._pool()),
            "pool": self._bus.pool,
            "log": {
                "path": str(self._log.path),
                "ordinal": head.ordinal,
                "recorded_at": head.recorded_at,
                "hash": head.hash.hex(),
                "undecodable": broken.rows[0][0],
            },
            "streams": {
                stream.value: {"log_seq": at.log_seq, "bus_seq": at.bus_seq, "behind": at.bus_seq - at.log_seq}
                for stream, at in lag.items()
            },
            "counts": dict(counts.rows),
        }

    async def schemas(self, asked: SchemasAsked) -> dict[str, Any]:
        """The JSON Schema of one event version, such as ``JobRequested.v1``; without a name, which there are."""
        if asked.name is None:
            return schemas.listed()
        found = schemas.schemas().get(asked.name)
        if found is None:
            return _error("SchemaNotFound", f"no event is called {asked.name!r} (names are such as JobRequested.v1)")
        return found

    async def asyncapi(self, asked: NothingAsked) -> dict[str, Any]:
        """The pool as an AsyncAPI document."""
        del asked
        return schemas.asyncapi()


def _handler(kind: type[T], answer: Callable[[T], Awaitable[dict[str, Any]]]) -> Callable[[bytes], Awaitable[bytes]]:
    decoder = msgspec.json.Decoder(kind)

    async def handle(body: bytes) -> bytes:
        try:
            asked = decoder.decode(body or b"{}")
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as err:
            return msgspec.json.encode(_error("QuestionInvalid", str(err)))
        try:
            said = await answer(asked)
        except LogError as err:
            said = _error(type(err).__name__, str(err))
        encoded = msgspec.json.encode(said)
        if len(encoded) > ANSWER_BYTES_MAX:
            return msgspec.json.encode(
                _error("AnswerTooLarge", f"the answer has {len(encoded)} bytes: ask for less with a smaller limit")
            )
        return encoded

    return handle


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def _as_of(pool: Pool) -> dict[str, int]:
    return {"facts_seq": pool.seq, "recorded_at": pool.at}


def _as_objects(answer: Answer) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in zip(answer.columns, row, strict=True)} for row in answer.rows]


def _parsed(body: Any) -> Any:
    return msgspec.Raw(body.encode()) if isinstance(body, str) else body
