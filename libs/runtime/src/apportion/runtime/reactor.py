"""The shell that every core runs in: read, fold, decide, publish.

::

    snapshot ─► claim the lease ─► read up to the claim ─┐
        ┌────────────────────────────────────────────────┘
        └─► fold what came ─► carry out instructions ─► decide ─► publish as one fenced batch ─┐
             ▲                                                                                │
             └───────────────── wait for news, an observation, or the core's next instant ◄───┘

A standby folds and does nothing else, until the active process falls silent; then it claims, and goes on from there.

A core is a set of pure functions; clock, sockets, files and retries are here. The next decision waits until the last
one's events have come round, so that every decision is made from what the stream says and nothing else.
"""

import asyncio
import contextlib
import gc
import os
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import nats.errors
import structlog

from apportion.contracts import events as ev
from apportion.contracts import salvage
from apportion.contracts.codec import Message, encode_fact
from apportion.contracts.envelope import Basis, Entry, Stream
from apportion.contracts.ids import Author, JobId, RunId, job_of_run
from apportion.runtime.clock import Clock, SystemClock
from apportion.runtime.standby import Alive, Vigil
from apportion.runtime.stream import BATCH_EVENTS_MAX, Bus, Fenced, Lease, RawMessage, StreamReader

S = TypeVar("S")

SNAPSHOT_ENTRIES: Final = 10_000
SNAPSHOT_S: Final = 60.0
TRACES_KEPT: Final = 20_000
FOLD_AT_ONCE: Final = 2_000
"""Entries folded before the loop looks at anything else."""

log = structlog.get_logger()


class Core(Protocol[S]):
    """Pure functions that make up one service's mind; usually a module."""

    @property
    def POLICY(self) -> str:  # noqa: N802 - a constant of the module
        """``name@version#digest`` of the rules."""
        ...

    def initial(self) -> S:
        """The state before the first entry."""
        ...

    def evolve(self, state: S, entry: Entry) -> S:
        """The state after an entry; may change it in place."""
        ...

    def decide(self, state: S, now: int) -> Sequence[ev.Fact]:
        """What follows; silent once its answer has been folded."""
        ...

    def wake_at(self, state: S, now: int) -> int | None:
        """When ``decide`` may say something new without news; None for never."""
        ...

    def snapshot(self, state: S) -> bytes:
        """The state as bytes."""
        ...

    def restore(self, data: bytes) -> S:
        """The state from those bytes."""
        ...

    def position(self, state: S) -> tuple[int, int]:
        """Sequences of the last fact and the last wish folded."""
        ...


class CoreWithEffects(Core[S], Protocol[S]):
    """A core that also hears of the world and acts on it, through the shell."""

    def observe(self, state: S, observation: Any, now: int) -> S:
        """The state after something that the shell saw."""
        ...

    def instruct(self, state: S, now: int) -> Sequence[Any]:
        """What the shell shall do; silent for what was issued."""
        ...

    def issued(self, state: S, instruction: Any) -> S:
        """The state after an instruction was given to the shell."""
        ...


class Meter(Protocol):
    """What a round reports; aggregated, never per event."""

    def folded(self, entries: int, seconds: float) -> None:
        """Entries folded in one go."""

    def decided(self, facts: int, seconds: float) -> None:
        """Facts that one decision stated."""

    def published(self, facts: int, seconds: float) -> None:
        """Facts stored by one batch."""

    def trace(self, event_type: str, job_id: str, parent: str) -> str:
        """The trace context of a fact that follows from ``parent``; empty for none."""


class Witness(Protocol):
    """The service's own shell, told of each entry once it is folded. It must not wait, and must not raise."""

    def saw(self, raw: RawMessage, entry: Entry) -> None:
        """This message became this entry, and the core has folded it."""
        ...

    def is_settled(self) -> bool:
        """True where nothing that was seen would be lost if the process ended now: then a snapshot may be written."""
        ...


class InvariantBroken(Exception):
    """A core could not fold or decide: going on would write lies, so the process ends and folds again."""

    def __init__(self, *, author: Author, doing: str, detail: str) -> None:
        self.author = author
        self.doing = doing
        super().__init__(
            f"{author} stopped while {doing}: {detail}. Nothing was published for it; the streams hold everything that"
            " led here, so `apportion log verify` and this message are what a report needs"
        )


class _Session(msgspec.Struct):
    """What of a claim names its session."""

    session: str


_SESSION: Final = msgspec.json.Decoder(_Session)


class NoMeter:
    """Reports nothing, and passes trace contexts on unchanged."""

    def folded(self, entries: int, seconds: float) -> None:
        """Nothing."""

    def decided(self, facts: int, seconds: float) -> None:
        """Nothing."""

    def published(self, facts: int, seconds: float) -> None:
        """Nothing."""

    def trace(self, event_type: str, job_id: str, parent: str) -> str:
        """``parent``."""
        del event_type, job_id
        return parent


class SnapshotFile:
    """One author's snapshot on disk: a cache, deleted freely, never believed where anything about it differs."""

    class _Content(msgspec.Struct, kw_only=True):
        policy: str
        streams: str
        state: bytes

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, *, policy: str, streams: str) -> bytes | None:
        """The state, where it was written by these rules for these streams; else None."""
        try:
            content = msgspec.msgpack.decode(self._path.read_bytes(), type=self._Content)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return content.state if (content.policy, content.streams) == (policy, streams) else None

    def store(self, state: bytes, *, policy: str, streams: str) -> None:
        """Replace the snapshot: whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            file.write(msgspec.msgpack.encode(self._Content(policy=policy, streams=streams, state=state)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


def correlation_of(event: ev.Event) -> str:
    """The job that the event belongs to; empty where it belongs to none."""
    job: JobId | None = getattr(event, "job_id", None)
    if job is not None:
        return job
    run: RunId | None = getattr(event, "run_id", None)
    return "" if run is None else job_of_run(run)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Nothing is garbage while a state is built: looking for it among ever more objects takes as long as the rest."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Reactor(Generic[S]):
    """One author's loop over one core."""

    def __init__(
        self,
        *,
        core: Core[S],
        author: Author,
        bus: Bus,
        config: dict[str, int | str] | None = None,
        reads_wishes: bool = False,
        filters: tuple[str, ...] = (),
        perform: Callable[[Any], None] | None = None,
        snapshots: SnapshotFile | None = None,
        clock: Clock | None = None,
        meter: Meter | None = None,
        session: str | None = None,
        witness: Witness | None = None,
        vigil: Vigil | None = None,
    ) -> None:
        self.state: S = core.initial()
        self.session = session or uuid.uuid4().hex[:12]
        self.lease: Lease | None = None
        self._core = core
        self._effects: CoreWithEffects[S] | None = core if hasattr(core, "observe") else None  # type: ignore[assignment]
        self._author = author
        self._bus = bus
        self._config = config or {}
        self._reads_wishes = reads_wishes
        self._filters = filters
        self._perform = perform
        self._snapshots = snapshots
        self._clock: Clock = clock or SystemClock()
        self._meter: Meter = meter or NoMeter()
        self._witness = witness
        self._vigil = vigil
        self._newest_claim = 0
        self._active_session = ""
        self.undecoded = 0
        """Messages on which decoding failed with an error of its own; 0 unless the codec has a fault."""
        self._news = asyncio.Event()
        self._observations: deque[Any] = deque()
        self._facts: StreamReader | None = None
        self._wishes: StreamReader | None = None
        self._published_seq = 0
        self._caught_up_at = (0, 0)
        self._since_snapshot = 0
        self._snapshot_at = time.monotonic()
        self._streams = ""
        self._traces: OrderedDict[str, str] = OrderedDict()
        self.ready = asyncio.Event()
        """Set once everything up to the claim was folded."""
        self.following = asyncio.Event()
        """Set once a standby has folded everything that there was when it began."""

    @property
    def is_in_place(self) -> bool:
        """True where the process does what it is for: decides, or follows as a standby."""
        return self.ready.is_set() or self.following.is_set()

    @property
    def role(self) -> str:
        """``active`` with the lease, else ``standby``."""
        return "standby" if self.lease is None else "active"

    def feed(self, observation: Any) -> None:
        """Tell the core of something that the shell saw. Call it from the loop's own thread."""
        self._observations.append(observation)
        self._news.set()

    @property
    def lag(self) -> int:
        """Entries received and not folded yet."""
        return sum(reader.waiting for reader in (self._facts, self._wishes) if reader is not None)

    async def run(self, stop: asyncio.Event) -> None:
        """Read, fold, decide and publish until ``stop``; raises Fenced where another session took over."""
        await self._begin()
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._news.set())
        try:
            while not stop.is_set():
                self._fold()
                if self.lease is None:
                    if self._is_caught_up() and await self._took_over():
                        continue
                elif self._is_caught_up():
                    self._act()
                    if await self._decide(stopping):
                        continue
                if self.lag or self._observations:
                    await asyncio.sleep(0)  # others on this loop get their turn
                    continue
                self._store_snapshot_if_due()
                await self._wait(stopping)
            if self._vigil is not None and self.lease is not None:
                await self._vigil.leave(self.session)
        finally:
            stopping.cancel()
            if self._vigil is not None:
                await self._vigil.close()
            self._store_snapshot()

    async def _begin(self) -> None:
        facts, wishes = await self._positions()
        self._streams = f"{facts.created} {wishes.created}"
        if self._snapshots is not None:
            stored = self._snapshots.load(policy=self._core.POLICY, streams=self._streams)
            if stored is not None:
                with _collector_off():
                    self.state = self._core.restore(stored)
        facts_seq, wishes_seq = self._core.position(self.state)
        await self._check_not_shorter(facts_seq, wishes_seq)
        if self._vigil is not None and self._vigil.is_standby:
            await self._stand_by(self._vigil, facts.last_seq, wishes.last_seq)
        else:
            self.lease = await self._bus.claim(self._author, self._claim())
            await self._claimed(self.lease)
        if self._reads_wishes:
            self._wishes = await self._bus.reader(Stream.WISHES, after=wishes_seq, on_news=self._news.set)
        self._facts = await self._bus.reader(
            Stream.FACTS, after=facts_seq, filters=self._filters, on_news=self._news.set
        )

    async def _check_not_shorter(self, facts_seq: int, wishes_seq: int) -> None:
        """Raises BusShorter where the snapshot knows more than the bus has: what comes next would be taken for old."""
        while True:
            try:
                await self._bus.check_not_shorter(Stream.FACTS, facts_seq)
                await self._bus.check_not_shorter(Stream.WISHES, wishes_seq if self._reads_wishes else 0)
            except (TimeoutError, nats.errors.Error, OSError) as err:
                log.warning("bus not ready", error=f"{type(err).__name__}: {err}")
                await asyncio.sleep(0.2)
            else:
                return

    def _claim(self, *, follows: str = "", silent_ms: int = 0) -> Message:
        claim = ev.LeaseClaimed(
            author=self._author,
            session=self.session,
            core=self._core.POLICY,
            config=self._config,
            follows=follows,
            silent_ms=silent_ms,
        )
        return encode_fact(self._bus.pool, self._author, claim, event_id=f"{self._author}.claim.{self.session}")

    async def _claimed(self, lease: Lease) -> None:
        """The lease is ours: what has to be folded before the first decision."""
        # Nothing that was decided from before the claim can be stored after it, so what we read up to it is complete.
        self._published_seq = lease.claim
        self._caught_up_at = (lease.claim, 0)
        if self._reads_wishes:
            _, wishes = await self._positions()
            self._caught_up_at = (lease.claim, wishes.last_seq)
        if self._vigil is not None:
            self._vigil.renew(self._alive)
        log.info("lease claimed", author=self._author, session=self.session, claim=lease.claim)

    def _alive(self) -> Alive:
        facts_seq, wishes_seq = self._core.position(self.state)
        return Alive(session=self.session, facts_seq=facts_seq, wishes_seq=wishes_seq if self._reads_wishes else None)

    async def _stand_by(self, vigil: Vigil, facts_seq: int, wishes_seq: int) -> None:
        newest = await self._bus.newest_claim(self._author)
        if newest is not None:
            # Whose claim it is matters little: one that we can't read has no signs of life that we would know.
            with contextlib.suppress(msgspec.MsgspecError):
                self._active_session = _SESSION.decode(newest.body).session
            self._newest_claim = newest.seq
        vigil.on_change = self._news.set
        await vigil.start()
        vigil.follow(self._active_session)
        self._caught_up_at = (facts_seq, wishes_seq if self._reads_wishes else 0)
        log.info("standing by", author=self._author, session=self.session, active=self._active_session)

    async def _took_over(self) -> bool:
        """Claim the lease where nobody seems to hold it; False where somebody does, or was faster."""
        vigil = self._vigil
        assert vigil is not None, "only a vigil makes a standby"
        # Nobody ever claimed: the first of several may begin at once.
        if self._newest_claim and not vigil.is_vacant:
            return False
        silent_ms, began = vigil.silent_ms, time.monotonic()
        message = self._claim(follows=self._active_session, silent_ms=silent_ms)
        self.lease = await self._bus.claim_after(self._author, message, after=self._newest_claim)
        if self.lease is None:
            newest = await self._bus.newest_claim(self._author)
            self._newest_claim = 0 if newest is None else newest.seq
            vigil.follow("")  # its session is known once its claim is folded
            return False
        self.following.clear()
        await self._claimed(self.lease)
        log.warning(
            "lease_taken_over",
            author=self._author,
            session=self.session,
            follows=self._active_session,
            silent_ms=silent_ms,
            claimed_in_ms=round((time.monotonic() - began) * 1000),
        )
        return True

    def _noticed_claim(self, seq: int, claim: ev.LeaseClaimed) -> None:
        """A claim of our own author went by. Raises Fenced where it is newer than ours."""
        if claim.session == self.session or seq < self._newest_claim:
            return
        if self.lease is not None:
            if seq > self.lease.claim:
                raise Fenced(
                    author=self._author, claim=self.lease.claim, detail=f"session {claim.session} claimed it at {seq}"
                )
            return
        self._newest_claim, self._active_session = seq, claim.session
        if self._vigil is not None:
            self._vigil.follow(claim.session)

    async def _positions(self) -> tuple[Any, Any]:
        while True:
            try:
                return await self._bus.position(Stream.FACTS), await self._bus.position(Stream.WISHES)
            except Exception as err:  # noqa: BLE001 - whatever it is, without the bus there is nothing to do
                log.warning("bus not ready", error=f"{type(err).__name__}: {err}")
                await asyncio.sleep(0.2)

    def _is_caught_up(self) -> bool:
        facts_seq, wishes_seq = self._core.position(self.state)
        caught_up = (
            facts_seq >= self._published_seq
            and facts_seq >= self._caught_up_at[0]
            and (not self._reads_wishes or wishes_seq >= self._caught_up_at[1])
        )
        reached = self.following if self.lease is None else self.ready
        if caught_up and not reached.is_set():
            reached.set()
            log.info("ready", author=self._author, role=self.role, facts=facts_seq, wishes=wishes_seq)
        return caught_up

    def _fold(self) -> None:
        started = time.perf_counter()
        count = 0
        for reader in (self._facts, self._wishes):
            if reader is None:
                continue
            for raw in reader.take(FOLD_AT_ONCE):
                entry = self._entry_of(raw)
                if entry.traceparent:
                    self._remember_trace(entry)
                try:
                    self.state = self._core.evolve(self.state, entry)
                except Exception as err:
                    raise InvariantBroken(
                        author=self._author,
                        doing=f"folding {raw.stream} {raw.seq} on {raw.subject}",
                        detail=f"{type(err).__name__}: {err}",
                    ) from err
                if self._witness is not None:
                    self._witness.saw(raw, entry)
                if isinstance(entry.event, ev.LeaseClaimed) and entry.author == self._author:
                    self._noticed_claim(entry.seq, entry.event)
                count += 1
        if self._effects is not None:
            while self._observations:
                observation = self._observations.popleft()
                self.state = self._effects.observe(self.state, observation, self._clock.now())
        if count:
            self._since_snapshot += count
            self._meter.folded(count, time.perf_counter() - started)

    def _entry_of(self, raw: RawMessage) -> Entry:
        try:
            return salvage.decode(
                raw.stream, raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at
            )
        except Exception as err:  # one message that the codec fails on must not end the service again and again
            self.undecoded += 1
            log.exception("message could not be decoded", stream=raw.stream, seq=raw.seq, subject=raw.subject)
            return salvage.undecoded(
                raw.stream, raw.subject, raw.body, seq=raw.seq, recorded_at=raw.recorded_at, error=err
            )

    def _remember_trace(self, entry: Entry) -> None:
        self._traces[entry.event_id] = entry.traceparent
        if len(self._traces) > TRACES_KEPT:
            self._traces.popitem(last=False)

    def _act(self) -> None:
        if self._effects is None or self._perform is None:
            return
        for instruction in self._effects.instruct(self.state, self._clock.now()):
            self.state = self._effects.issued(self.state, instruction)
            self._perform(instruction)

    async def _decide(self, stopping: "asyncio.Task[bool]") -> bool:
        started = time.perf_counter()
        now = self._clock.now()
        try:
            facts = self._core.decide(self.state, now)
        except Exception as err:
            raise InvariantBroken(
                author=self._author,
                doing="deciding after facts {} and wishes {}".format(*self._core.position(self.state)),
                detail=f"{type(err).__name__}: {err}",
            ) from err
        self._meter.decided(len(facts), time.perf_counter() - started)
        if not facts:
            return False
        assert len(facts) <= BATCH_EVENTS_MAX, f"{self._author} decided {len(facts)} facts at once"
        assert self.lease is not None
        facts_seq, wishes_seq = self._core.position(self.state)
        basis = Basis(facts=facts_seq, wishes=wishes_seq, decided_at=now, policy=self._core.POLICY)
        messages = [self._message(fact, index, basis) for index, fact in enumerate(facts)]
        started = time.perf_counter()
        publishing = asyncio.ensure_future(self._bus.publish_fenced(self.lease, messages))
        await asyncio.wait({publishing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not publishing.done():
            # Asked to stop in the middle: give the batch a moment, then leave. Its outcome is settled by reading.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(publishing), 3.0)
            if not publishing.done():
                publishing.cancel()
                return True
        self._published_seq = publishing.result()
        self._meter.published(len(facts), time.perf_counter() - started)
        return True

    def _message(self, fact: ev.Fact, index: int, basis: Basis) -> Message:
        # The id derives from what it was decided from: the same decision published twice is one event.
        job_id = correlation_of(fact)
        parent = self._traces.get(fact.caused_by, "") if fact.caused_by else ""
        trace = self._meter.trace(type(fact).__name__, job_id, parent) if job_id else ""
        return encode_fact(
            self._bus.pool,
            self._author,
            fact,
            event_id=f"{self._author}.{basis.facts}.{basis.wishes}.{index}",
            correlation_id=job_id,
            basis=basis,
            traceparent=trace or None,
        )

    async def _wait(self, stopping: "asyncio.Task[bool]") -> None:
        """Until there is news, an observation, or the core's next instant."""
        timeout = SNAPSHOT_S
        if self.lease is not None and self._is_caught_up():
            now = self._clock.now()
            wake = self._core.wake_at(self.state, now)
            if wake is not None:
                timeout = min(timeout, max(0.0, (wake - now) / 1e9))
        self._news.clear()
        if self._observations or self.lag or stopping.done():
            return
        # One timer and one event: a task for each thing waited for would cost more than folding what comes.
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(timeout):
                await self._news.wait()

    def _store_snapshot_if_due(self) -> None:
        due = time.monotonic() - self._snapshot_at
        if self._since_snapshot >= SNAPSHOT_ENTRIES or (self._since_snapshot and due >= SNAPSHOT_S):
            self._store_snapshot()

    def _store_snapshot(self) -> None:
        if self._snapshots is None or not self._since_snapshot or not self.is_in_place:
            return
        if self._witness is not None and not self._witness.is_settled():
            return  # what it still has to do for these entries would be forgotten with them
        self._snapshots.store(self._core.snapshot(self.state), policy=self._core.POLICY, streams=self._streams)
        self._since_snapshot = 0
        self._snapshot_at = time.monotonic()
