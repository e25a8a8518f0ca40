"""The client, for programs that use asyncio. ``sync`` has the same for those that don't.

Publishing is safe to repeat: a wish is known by (tenant, source, id), so that the same id again, however late, is the
same wish and finds its first answer. The client repeats by itself while the outcome of a try is unknown.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec
import nats.errors
from nats.aio.client import Client as Connection
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from apportion.client.answers import (
    Admitted,
    Answer,
    CancelAnswer,
    Cancelled,
    Direct,
    Duplicate,
    Finished,
    Judged,
    Rejected,
    Started,
    Stopping,
    Stored,
    Unanswered,
    answer_of,
)
from apportion.client.errors import (
    BusUnreachable,
    JobNotFound,
    NotLetIn,
    NotStored,
    OutcomeUnknown,
    PoolNotFound,
    RequestInvalid,
    TimedOut,
)
from apportion.client.following import Followed, follow, follow_by_asking
from apportion.client.jobs import Jobs, JobStatus
from apportion.contracts import events as ev
from apportion.contracts import subjects
from apportion.contracts.cloudevents import escaped
from apportion.contracts.codec import TYPE_PREFIX, Message, encode_body
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import JobId, NodeId, PoolId, RunId, TenantId, is_name

URL: Final = "nats://127.0.0.1:4222"
SOURCE: Final = "/apportion/client"
_TENANTS: Final = "tenant-"
"""How the names of those begin whose key opens no stream."""
TRY_S: Final = 2.0
"""How long one try waits for the bus's word; then the same id is sent again."""
IN_PROCESS: Final = 10158
"""The bus's error for a repeat whose first try is still on its way: neither stored nor refused."""
ASK_S: Final = 5.0
"""How long one request leaves admission to answer before it says `pending`."""
_CLOCK_SLACK_NS: Final = 60 * 1_000_000_000
"""The server's clock may have been set back between a wish and its answer."""

Wait: TypeAlias = Literal["stored", "admitted", "started", "finished"]
Request: TypeAlias = ev.JobRequested | Mapping[str, Any] | bytes


class Client:
    """One tenant's connection to one pool. Make it with ``connect``; use it in ``async with``, or close it."""

    def __init__(
        self,
        connection: Connection,
        *,
        url: str,
        tenant: TenantId,
        pool: PoolId,
        source: str,
        actor: str,
        opens_streams: bool = True,
        refused: set[str] | None = None,
    ) -> None:
        self.tenant = tenant
        self.pool = pool
        self.url = url
        self._source = source
        self._actor = actor
        self._connection = connection
        self._opens_streams = opens_streams
        self._refused = set() if refused is None else refused
        """What the server said that we may not do, in the library's words: a request that it refuses only times out."""
        self._jetstream = connection.jetstream(timeout=TRY_S)

    @classmethod
    async def connect(
        cls,
        url: str = URL,
        *,
        tenant: str,
        pool: str = "main",
        source: str = SOURCE,
        actor: str = "",
        name: str = "apportion-client",
        timeout_s: float = 5.0,
        key_file: str | PathLike[str] | None = None,
        **options: Any,
    ) -> Self:
        """A connection that reconnects by itself; ``options`` go to nats-py (``user_credentials``, ``tls``, …).

        ``key_file`` holds the seed of an nkey, under the name that `apportion keys new` gave it: it says whose it is.
        ``source`` says which system asks: ids are unique within it. Raises BusUnreachable, NotLetIn, RequestInvalid.
        """
        if not (is_name(tenant) or tenant == "_operator") or not is_name(pool):
            raise RequestInvalid(
                expected="tenant and pool as 1 to 63 lower-case letters, digits, - and _",
                found=f"tenant {tenant!r}, pool {pool!r}",
                next_step="Use the names that the pool's operator gave you.",
            )
        connection = Connection()
        principal = "" if key_file is None else Path(key_file).name.removesuffix(".nk")
        if key_file is not None:
            options = {"nkeys_seed": str(key_file), "inbox_prefix": f"_INBOX_{principal}", **options}
        kept_out = ""
        is_new, is_refused = True, False
        refused: set[str] = set()

        async def noticed(error: Exception) -> None:
            """Each call reports its own failures; here it is only why there is no connection yet."""
            nonlocal kept_out, is_refused
            kept_out = type(error).__name__
            if "permissions violation" in str(error).lower():
                refused.add(str(error).lower())
            if is_new and "authorization" in f"{kept_out} {error}".lower():
                # The library would try again for ever with what was refused.
                is_refused = True
                connection.options["allow_reconnect"] = False

        try:
            async with asyncio.timeout(timeout_s):
                await connection.connect(
                    # The library takes several addresses as a list alone.
                    url.split(","),
                    name=name,
                    error_cb=noticed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,  # type: ignore[arg-type]  # annotated int, slept as a float
                    ping_interval=5,
                    max_outstanding_pings=2,
                    connect_timeout=2,
                    **options,
                )
        except (TimeoutError, OSError, nats.errors.Error) as err:
            with contextlib.suppress(Exception):
                await connection.close()
            if is_refused:
                raise NotLetIn(
                    expected=f"a key that the bus at {url} knows",
                    found="none" if key_file is None else f"one that it doesn't know ({key_file})",
                    next_step="Give key_file=…; the pool's operator makes keys with `apportion keys new`.",
                ) from err
            raise BusUnreachable(
                expected=f"a nats-server at {url}",
                found=f"no answer within {timeout_s:g} s ({kept_out or type(err).__name__})",
                next_step="Check the address; `apportion up` starts a pool on this machine.",
            ) from err
        is_new = False
        return cls(
            connection,
            url=url,
            tenant=TenantId(tenant),
            pool=PoolId(pool),
            source=source,
            actor=actor,
            opens_streams=not principal.startswith(_TENANTS),
            refused=refused,
        )

    async def close(self) -> None:
        """Leave the bus."""
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
            if self._connection.is_connected:
                await self._connection.flush(timeout=2)
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---------------------------------------------------------------------------------------------- wishes

    async def submit(
        self,
        request: Request,
        *,
        id: str | None = None,  # noqa: A002 - CloudEvents' own name
        wait: Wait = "admitted",
        timeout_s: float = 60.0,
    ) -> Answer:
        """Ask for a job, and wait until it is so far, at most ``timeout_s``; the answer says how far it came.

        Give an ``id`` of your own that you can find again after a crash (an order's number): the same id again is the
        same job. A mapping or bytes are sent as they are and judged by admission, as any system's request is. Raises
        OutcomeUnknown (the same id again is safe), NotStored, RequestInvalid, PoolNotFound.
        """
        if isinstance(request, bytes):
            body = request
        elif isinstance(request, ev.JobRequested):
            body = encode_body(request)
        else:
            try:
                body = json.dumps(request, ensure_ascii=False, allow_nan=False).encode()
            except (TypeError, ValueError) as err:
                raise RequestInvalid(
                    expected="a request that JSON can say", found=str(err), next_step="Mend the request."
                ) from err
        until = time.monotonic() + timeout_s
        message, wish_id = self._message(ev.JobRequested, body, id)
        if wait == "stored":
            seq, is_repeat = await self._store(message, wish_id, until)
            return Stored(id=wish_id, wish_seq=seq, is_repeat=is_repeat)
        answer = await self._ask(message, wish_id, until)
        match answer:
            case Unanswered() | Rejected() | Judged():
                return answer
            case Admitted() | Duplicate():
                if wait == "admitted":
                    return answer
                return await self._progress(answer.job_id, wait, until, first=answer) or answer
            case _:
                raise AssertionError(f"a request for a job was answered by {type(answer.fact).__name__}")

    async def cancel(
        self,
        job: str,
        reason: str = "",
        *,
        id: str | None = None,  # noqa: A002 - CloudEvents' own name
        timeout_s: float = 15.0,
    ) -> CancelAnswer:
        """Ask that a job ends. It is over (Cancelled), will be (Stopping), or there is no such live job (Rejected)."""
        wish = ev.JobCancelRequested(job_id=job, reason=reason)
        message, wish_id = self._message(ev.JobCancelRequested, encode_body(wish), id)
        answer = await self._ask(message, wish_id, time.monotonic() + timeout_s)
        if isinstance(answer, Unanswered | Cancelled | Stopping | Rejected | Judged):
            return answer
        raise AssertionError(f"a wish to cancel was answered by {type(answer.fact).__name__}")

    def _message(self, kind: type[ev.Wish], body: bytes, given: str | None) -> tuple[Message, str]:
        wish_id = given or str(uuid.uuid4())
        headers = {
            # The bus tells repeats by this alone, whoever sends them: the tenant belongs to it.
            "Nats-Msg-Id": " ".join(escaped(part) for part in (self.tenant, self._source, wish_id)),
            "ce-specversion": "1.0",
            "ce-id": escaped(wish_id),
            "ce-source": escaped(self._source),
            "ce-type": TYPE_PREFIX + ev.type_name(kind),
            "content-type": "application/json",
        }
        if self._actor:
            headers["ce-actor"] = escaped(self._actor)
        return Message(subject=subjects.wish(self.pool, self.tenant, kind), headers=headers, body=body), wish_id

    async def _ask(self, message: Message, wish_id: str, until: float) -> Direct | Unanswered:
        """Have the wish stored and answered by request; by the stream where nobody serves requests."""
        subject = subjects.ask_of_wish(message.subject)
        tries = 0
        while (left := until - time.monotonic()) > 0:
            wait_s = min(ASK_S, left)
            headers = {**message.headers, "Apportion-Wait-Ms": str(max(1, int(wait_s * 1000)))}
            tries += 1
            try:
                reply = await self._connection.request(subject, message.body, timeout=wait_s + TRY_S, headers=headers)
            except nats.errors.NoRespondersError:
                # Admission is away. The wish can be stored all the same, and is answered when it is back.
                seq, _ = await self._store(message, wish_id, until)
                return await self._answer_to(seq, wish_id, until)
            except nats.errors.MaxPayloadError as err:
                raise _too_large(message) from err
            except (TimeoutError, nats.errors.Error, OSError):
                self._unless_refused(subject)
                await asyncio.sleep(min(0.2, max(0.0, until - time.monotonic())))
                continue
            answer: dict[str, Any] = json.loads(reply.data)
            if (error := answer.get("error")) is not None:
                if error["code"] in {"Busy", "OutcomeUnknown", "Internal"}:
                    await asyncio.sleep(min(0.2, max(0.0, until - time.monotonic())))
                    continue
                raise NotStored(
                    expected="a wish that the bus takes",
                    found=f"{error['code']}: {error['message']}",
                    next_step=str(error.get("next", "")),
                )
            seq = int(answer["wish_seq"])
            if answer.get("pending"):
                return await self._answer_to(seq, wish_id, until)
            return await self._direct(answer, wish_id, seq)
        raise self._unknown(wish_id, tries)

    async def _direct(self, answer: dict[str, Any], wish_id: str, seq: int) -> Direct:
        # The reply has all of the fact's fields and a few of its own; the fact itself is taken from the reply alone.
        fact_seq = int(answer.pop("fact_seq"))
        for name in ("answer", "wish_seq"):
            answer.pop(name)
        event = msgspec.convert(answer, ev.JobFact)
        entry = Entry(stream=Stream.FACTS, seq=fact_seq, recorded_at=0, event=event, event_id="")
        said = answer_of(entry, id=wish_id, wish_seq=seq)
        assert said is not None, f"fact {fact_seq} doesn't answer wish {seq}"
        return said

    async def _store(self, message: Message, wish_id: str, until: float) -> tuple[int, bool]:
        """The wish's sequence, and whether the bus had it before."""
        tries = 0
        found = "nothing"
        while True:
            tries += 1
            try:
                stored = await self._jetstream.publish(message.subject, message.body, headers=message.headers)
            except NoStreamResponseError:
                found = "no stream that takes it"
            except nats.errors.MaxPayloadError as err:
                raise _too_large(message) from err
            except APIError as err:
                if (err.code or 0) < 500 and err.err_code != IN_PROCESS:
                    raise NotStored(
                        expected="a wish that the bus takes",
                        found=f"{err.description} (error {err.err_code})",
                        next_step="Nothing was stored: mend it, or tell the pool's operator.",
                    ) from err
                found = str(err.description)
            except (TimeoutError, nats.errors.Error, OSError) as err:
                self._unless_refused(message.subject)
                found = type(err).__name__
            else:
                return int(stored.seq), bool(stored.duplicate)
            if time.monotonic() >= until:
                if found == "no stream that takes it":
                    raise PoolNotFound(
                        expected=f"a pool {self.pool!r} at {self.url}",
                        found=f"no stream that takes {message.subject}",
                        next_step="Check the pool's name, and that its services run.",
                    )
                raise self._unknown(wish_id, tries, found)
            await asyncio.sleep(0.2)

    def _unless_refused(self, subject: str) -> None:
        if any(f'"{subject.lower()}"' in words for words in self._refused):
            raise NotLetIn(
                expected=f"a key that may publish to {subject}",
                found=f"one that the bus at {self.url} refuses there",
                next_step=f"Use the key of tenant {self.tenant}, or ask the pool's operator; nothing was stored.",
            )

    def _unknown(self, wish_id: str, tries: int, found: str = "no answer") -> OutcomeUnknown:
        return OutcomeUnknown(
            id=wish_id,
            expected=f"the word of {self.url} that wish {wish_id} is stored",
            found=f"{found}, {tries} times",
            next_step="Send it again under the same id: it is stored once, and the first answer stands.",
        )

    async def _answer_to(self, seq: int, wish_id: str, until: float) -> Direct | Unanswered:
        """The answer from the stream of facts, wherever in it that is."""
        since = await self._stored_at(seq)
        facts = self._follow(subjects.answers(self.pool, self.tenant), since=since, until=until)
        async with contextlib.aclosing(facts):
            async for followed in facts:
                if followed.entry is not None and (said := answer_of(followed.entry, id=wish_id, wish_seq=seq)):
                    return said
        return Unanswered(id=wish_id, wish_seq=seq)

    async def _stored_at(self, seq: int) -> int:
        """From which instant on an answer to the wish can be there; ns since the Unix epoch."""
        if not self._opens_streams:
            return 1
        with contextlib.suppress(TimeoutError, nats.errors.Error, NotFoundError):
            stored = await self._jetstream.get_msg(subjects.wishes_stream(self.pool), seq)
            if stored.time is not None:
                return max(1, int(stored.time.timestamp() * 1_000_000_000) - _CLOCK_SLACK_NS)
        return 1  # from the beginning: slower, and as right

    # ------------------------------------------------------------------------------------------------- jobs

    async def wait(
        self, job: str, *, until: Literal["started", "finished"] = "finished", timeout_s: float = 3600.0
    ) -> Started | Finished:
        """How the job started, or ended. Raises JobNotFound, TimedOut."""
        job_id = self.job_id(job)
        reached = await self._progress(job_id, until, time.monotonic() + timeout_s)
        if reached is None or (until == "finished" and isinstance(reached, Started)):
            raise TimedOut(
                expected=f"{job_id} {until} within {timeout_s:g} s",
                found="it waits" if reached is None else "it runs",
                next_step="It goes on without us: wait again, or ask `apportion why`.",
            )
        return reached

    async def watch(self, job: str, *, after: int = 0) -> AsyncGenerator[Entry, None]:
        """What is said of a job and its runs, from the beginning (or behind fact ``after``), until it is over.

        Each item has the fact (``event``), who said it (``author``) and its place (``seq``), from which a later watch
        goes on. Raises JobNotFound where nothing was ever said of it.
        """
        job_id = self.job_id(job)
        facts = self._follow(subjects.facts_of_job(self.pool, job_id), after=after)
        async with contextlib.aclosing(facts):
            async for followed in facts:
                if followed.entry is None:
                    if not after:
                        raise self._no_such_job(job_id)
                    continue
                yield followed.entry
                if isinstance(followed.entry.event, ev.TERMINAL):
                    return

    async def jobs(self) -> list[JobStatus]:
        """The tenant's jobs as the facts of this moment have them, oldest first."""
        jobs = Jobs()
        facts = self._follow(subjects.facts_of_tenant(self.pool, self.tenant))
        async with contextlib.aclosing(facts):
            async for followed in facts:
                if followed.entry is not None:
                    jobs.fold(followed.entry)
                if followed.is_last:
                    break
        return jobs.list()

    def job_id(self, job: str) -> JobId:
        """The full id of one of the tenant's jobs, by its name or its id."""
        return JobId(job if "/" in job else f"{self.tenant}/{job}")

    async def _progress(
        self,
        job_id: JobId,
        wait: Literal["started", "finished"],
        until: float,
        *,
        first: Admitted | Duplicate | None = None,
    ) -> Started | Finished | None:
        """How far the job came until then: its end, that all of it runs, or None where it waits."""
        started: dict[RunId, tuple[NodeId, int]] = {}
        reached: Started | None = None
        attempt_nodes: tuple[NodeId, ...] = ()
        replicas = first.fact.spec.replicas_least if isinstance(first, Admitted) else 1
        detail = ""
        after = first.fact_seq - 1 if isinstance(first, Admitted) else 0
        facts = self._follow(subjects.facts_of_job(self.pool, job_id), after=after, until=until)
        async with contextlib.aclosing(facts):
            async for followed in facts:
                if followed.entry is None:
                    if first is None:
                        raise self._no_such_job(job_id)
                    continue
                seq, event = followed.entry.seq, followed.entry.event
                match event:
                    case ev.JobAdmitted():
                        replicas = event.spec.replicas_least
                    case ev.RunStarted():
                        started[event.run_id] = (event.node_id, seq)
                        attempt_nodes = tuple(sorted({node for node, _ in started.values()}))
                        if len(started) >= replicas:
                            reached = Started(job_id=job_id, fact_seq=seq, fact=event, nodes=attempt_nodes, first=first)
                    case ev.RunFinished():
                        detail = event.detail or detail
                    case ev.JobRequeued():
                        started.clear()
                        reached, attempt_nodes, detail = None, (), ""
                    case ev.JobSucceeded() | ev.JobFailed() | ev.JobCancelled() | ev.JobExpired():
                        return Finished(
                            job_id=job_id, fact_seq=seq, fact=event, nodes=attempt_nodes, detail=detail, first=first
                        )
                    case _:
                        pass
                # Of an old job we want its end, not that it once started: read to where nothing more is there.
                if wait == "started" and reached is not None and followed.is_last:
                    return reached
        return reached

    def _no_such_job(self, job_id: JobId) -> JobNotFound:
        return JobNotFound(
            expected=f"a job {job_id} of pool {self.pool!r}",
            found="no fact that names it",
            next_step="Check the name; `jobs()` lists the tenant's.",
        )

    def _follow(
        self, filters: tuple[str, ...], *, after: int = 0, since: int = 0, until: float | None = None
    ) -> AsyncGenerator[Followed, None]:
        if not self._opens_streams:
            subject = subjects.read_facts(self.pool, self.tenant)
            return follow_by_asking(
                self._connection, subject=subject, filters=filters, after=after, since=since, until=until
            )
        return follow(
            self._connection,
            self._jetstream,
            stream=subjects.facts_stream(self.pool),
            filters=filters,
            after=after,
            since=since,
            until=until,
        )


def _too_large(message: Message) -> RequestInvalid:
    return RequestInvalid(
        expected="a request of at most 64 KiB",
        found=f"{len(message.body)} bytes, more than the bus takes at all",
        next_step="Put what is large into a file and name its place.",
    )
