"""The bus, as Apportion uses it: fenced publishing, atomic batches, and reading from a sequence.

One place for what the client library leaves open: publishes whose outcome is unknown are settled, gaps in delivery are
noticed, and a reader that falls silent starts again from where it was. Decides nothing about events.
"""

import asyncio
import contextlib
import json
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import nats
import nats.errors
import stamina
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError, ServiceUnavailableError

from apportion.contracts import subjects
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import Author, PoolId
from apportion.runtime import transport
from apportion.runtime.access import matches
from apportion.runtime.clock import Clock, SystemClock
from apportion.runtime.disturbed import Disturbances

BATCH_EVENTS_MAX: Final = 1000
"""The server's limit on one atomic batch."""
REQUEST_TIMEOUT_S: Final = 2.0
"""Short on purpose: a request sent around a reconnect waits its whole timeout, so we ask again instead."""
RIDE_OUT_S: Final = 15.0
"""How long a bus may take to answer before a wish is given up: a cluster without a leader is back within this
(docs/reliability.md), and the same id is stored once."""
_TRIES_QUICK: Final = 5
_SURE_S: Final = 2.0
"""A server that has just begun to lead may not know the end of its stream for a moment."""
HEARTBEAT_S: Final = 1.0
SILENCE_S_MAX: Final = 2.5

_WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
_CONTAINS_DUPLICATE: Final = 10201
_STREAM_FULL: Final = 10077
_IN_PROCESS: Final = 10158
"""An earlier try with this id is on its way: a leader without a majority, or a disk that is slow, says so."""
_INCOMPLETE: Final = 10176
"""A server that was started again, or a connection that broke, has lost the first part of a batch."""

_EXPECTED_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence-Subject"


DEAD_LETTER_DAYS: Final = 30
DEAD_LETTER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Dead letters are copies: the oldest give way, while the streams of wishes and facts refuse what is too much."""

HEADER_NAMES_MAX: Final = 64
_HEADER_NAMES: dict[str, str] = {}


class BusError(Exception):
    """Something about the bus that the caller has to know."""


class Fenced(BusError):
    """Another session claimed the author's lease: this one may not write any more."""

    def __init__(self, *, author: Author, claim: int, detail: str) -> None:
        self.author = author
        self.claim = claim
        self.detail = detail
        super().__init__(
            f"{author} lost its lease (claimed at sequence {claim}): a newer session writes as {author} now; "
            f"stop this one, or start it again to take over ({detail})"
        )


class PublishRefused(BusError):
    """The server refused a publish for a reason that a retry won't mend."""

    def __init__(self, *, subject: str, code: int, detail: str) -> None:
        self.subject = subject
        self.code = code
        self.detail = detail
        super().__init__(f"publish to {subject} refused by the bus: {detail} (error {code})")


class BusUnreachable(BusError):
    """No server answered in time."""

    def __init__(self, *, url: str, waited_s: float, detail: str) -> None:
        self.url = url
        self.waited_s = waited_s
        super().__init__(
            f"no nats-server answered at {url} within {waited_s:g} s ({detail}): start one with `apportion up`, "
            "or give its address with --bus-url"
        )


class BusRefused(BusError):
    """A server answered, and does not let us in."""

    exit_code = 7

    def __init__(self, *, url: str, has_key: bool) -> None:
        self.url = url
        found = "a key that it doesn't know" if has_key else "no key"
        super().__init__(
            f"the bus at {url} does not let us in: expected a key that it knows, found {found}. "
            "Name the file of your key by APPORTION_BUS_KEY_FILE, or bus_key_file in apportion.toml; "
            "`apportion keys new` on the pool's machine makes one"
        )


class BusShorter(BusError):
    """The bus holds less than it had acknowledged: its store was damaged, or an older copy of it was put back."""

    exit_code = 9

    def __init__(self, *, stream: Stream, seen: int, found: int) -> None:
        self.stream = stream
        self.seen = seen
        self.found = found
        super().__init__(
            f"the bus is shorter than it was: {stream.value} were read up to {seen}, and end at {found}. Nothing is "
            "decided from here on, as sequences would be given out twice. Stop the pool, and put back the bus's store, "
            "or make the bus anew from the log: `apportion restore`"
        )


class RawMessage(Struct, frozen=True, kw_only=True):
    """One stored message, as it came."""

    stream: Stream
    seq: int
    recorded_at: int
    """ns since the Unix epoch, by the server's clock."""
    subject: str
    headers: dict[str, str] | None
    body: bytes


class Lease(Struct, frozen=True, kw_only=True):
    """The right to write as an author, until another session claims it."""

    author: Author
    subject: str
    claim: int
    """Sequence of our claim: every batch demands that it is still the newest on the lease's subject."""


class Claim(Struct, frozen=True, kw_only=True):
    """The newest claim of a lease, as the stream holds it."""

    seq: int
    message_id: str
    body: bytes


class Stored(Struct, frozen=True, kw_only=True):
    """The server's word that a message is on disk."""

    seq: int
    is_repeat: bool
    """A message with the same ``Nats-Msg-Id`` was there: ``seq`` is that one's, whatever its subject was."""


class StreamPosition(Struct, frozen=True, kw_only=True):
    """Where a stream stands."""

    last_seq: int
    first_seq: int
    messages: int
    created: str
    """When the stream was made: a stream made anew is another stream, whatever its numbers."""


class _Client(Client):
    """The library's client with a cheaper reading of headers, which was the largest cost of folding a fact.

    The library looks at each character of each name on its own; a name with a space in it, which is all that this
    finds, is told by one comparison. Where the library stops calling this, it does its own again.
    """

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if colon:
                # Names repeat from message to message; a stranger's odd ones are not kept.
                key = _HEADER_NAMES.get(name)
                if key is None:
                    key = name.strip()
                    if not key.isascii() or len(key.split()) > 1:
                        continue
                    if name.startswith(("ce-", "Nats-")) and len(_HEADER_NAMES) < HEADER_NAMES_MAX:
                        _HEADER_NAMES[name] = key
                found[key] = value.strip()
        return found


class _FlowControl:
    """A request of the server to say when what precedes it was taken, by every reader."""

    __slots__ = ("left", "subject")

    def __init__(self, subject: str, readers: int) -> None:
        self.subject = subject
        self.left = readers


class StreamReader:
    """Follows one stream from a sequence, without losing or repeating a message.

    The server pushes; flow control is answered only once what came before it was taken, so that a slow reader slows the
    server instead of losing messages. Readers of the same stream on one connection share one delivery.
    """

    def __init__(self, delivery: "_Delivery", *, after: int, on_news: Callable[[], None] | None) -> None:
        self._delivery = delivery
        self._last = after
        self._buffer: deque[RawMessage | _FlowControl] = deque()
        self._ready = asyncio.Event()
        self._on_news = on_news
        self._error: BusShorter | None = None

    @property
    def last_seq(self) -> int:
        """Sequence of the last message received."""
        return self._last

    @property
    def waiting(self) -> int:
        """Messages received and not taken yet."""
        return len(self._buffer)

    @property
    def ready(self) -> asyncio.Event:
        """Set while there is something to take."""
        return self._ready

    @property
    def restarts(self) -> int:
        """How often delivery was started again (a gap, a silence, a reconnect)."""
        return self._delivery.restarts

    def take(self, limit: int = 1000) -> list[RawMessage]:
        """What has come, at most ``limit`` messages, in order; empty where nothing has. Raises BusShorter."""
        if self._error is not None:
            raise self._error
        taken: list[RawMessage] = []
        while self._buffer and len(taken) < limit:
            head = self._buffer.popleft()
            if isinstance(head, RawMessage):
                taken.append(head)
            else:
                self._delivery.passed(head)
        if not self._buffer:
            self._ready.clear()
        return taken

    async def batches(self, limit: int = 1000) -> AsyncIterator[list[RawMessage]]:
        """What comes, for ever, in lists of 1 to ``limit`` messages."""
        while True:
            await self._ready.wait()
            if taken := self.take(limit):
                yield taken

    async def close(self) -> None:
        """Stop following."""
        for item in self._buffer:
            if isinstance(item, _FlowControl):
                self._delivery.passed(item)
        self._buffer.clear()
        await self._delivery.detach(self)

    def fail(self, error: BusShorter) -> None:
        """Called by the delivery: nothing comes any more."""
        self._error = error
        self._ready.set()
        if self._on_news is not None:
            self._on_news()

    def push(self, item: "RawMessage | _FlowControl") -> None:
        """Called by the delivery: something came."""
        if isinstance(item, RawMessage):
            if item.seq <= self._last:
                return
            self._last = item.seq
        self._buffer.append(item)
        self._ready.set()
        if self._on_news is not None:
            self._on_news()


class _Numbers(Struct, frozen=True):
    """Where a message stands, as the server says it in the subject for its acknowledgement."""

    seq: int
    consumer_seq: int
    recorded_at: int


def _numbers_of(message: Msg) -> _Numbers | None:
    """None for what a consumer says of itself: flow control and heartbeats."""
    if not message.reply.startswith("$JS.ACK"):
        return None
    parts = message.reply.split(".")
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>, and the newer form
    # with the domain and the account's hash after ACK.
    offset = 0 if len(parts) == 9 else 2
    return _Numbers(int(parts[5 + offset]), int(parts[6 + offset]), int(parts[7 + offset]))


class _Delivery:
    """One push consumer of one stream, for all readers of it on this connection."""

    def __init__(self, bus: "Bus", stream: Stream, filters: tuple[str, ...]) -> None:
        self._bus = bus
        self._stream = stream
        self._name = bus.stream_name(stream)
        self._filters = filters
        self._last = 0
        self._consumer_last = 0
        self._readers: list[StreamReader] = []
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._heard_at = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._is_current = False
        self.restarts = 0

    @property
    def is_sound(self) -> bool:
        """True where the stream was seen to go on from where we were, since the connection was last lost."""
        return self._is_current or not self._readers

    def attach(self, reader: StreamReader) -> None:
        """One more reader; delivery begins anew where it wants what was delivered before."""
        is_first = not self._readers
        if is_first or reader.last_seq < self._last:
            self._last = reader.last_seq
            self.restarts += 1  # what the present consumer still sends lies beyond what the new reader wants
            self._again.set()
        self._readers.append(reader)
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep_going(), name=f"delivery-{self._name}")

    async def detach(self, reader: StreamReader) -> None:
        """One reader less; the last one ends delivery."""
        if reader in self._readers:
            self._readers.remove(reader)
        if self._readers:
            return
        watch, self._watch = self._watch, None
        if watch is not None:
            while not watch.done():
                # Before Python 3.12 ``wait_for`` drops a cancellation that comes with its result, so once may not do.
                watch.cancel()
                await asyncio.wait({watch}, timeout=0.1)
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        await self._drop_consumer()

    def restart(self) -> None:
        """Ask for everything after the last message again (used when the connection is back)."""
        self._is_current = False
        self._again.set()

    def doubt(self) -> None:
        """The connection is lost: what it comes back to may have less."""
        self._is_current = False

    def passed(self, mark: _FlowControl) -> None:
        """A reader took what precedes the mark; once all have, the server may go on."""
        mark.left -= 1
        if mark.left == 0:
            self._bus.send_soon(mark.subject)

    async def _keep_going(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._again.wait(), HEARTBEAT_S / 2)
            quiet = loop.time() - self._heard_at
            if not self._again.is_set() and (quiet < SILENCE_S_MAX or self._subscription is None):
                continue
            self._again.clear()
            try:
                await self._subscribe()
            except (TimeoutError, nats.errors.Error, OSError):
                # The bus is away or has no leader: ask again soon, not at once.
                self._heard_at = loop.time()
                await asyncio.sleep(0.2)
                self._again.set()
            except BusShorter as err:
                self._bus.found_shorter(err)
                for reader in self._readers:
                    reader.fail(err)
                return

    async def _subscribe(self) -> None:
        await self._drop_consumer()
        self.restarts += 1
        await self._bus.check_not_shorter(self._stream, self._last)
        self._is_current = True
        self._bus.found_sound()
        loop = asyncio.get_running_loop()
        inbox = self._bus.client.new_inbox()
        self._consumer_last = 0
        life = self.restarts

        def deliver(message: Msg) -> None:
            if life == self.restarts:
                self._arrived(message, loop.time())

        async def arrived(message: Msg) -> None:
            if (disturbances := self._bus.disturbances) is None:
                deliver(message)
            elif life == self.restarts:
                found = _numbers_of(message)
                disturbances.pass_on(message, None if found is None else found.recorded_at, deliver)

        self._subscription = await self._bus.client.subscribe(
            inbox, cb=arrived, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        config = api.ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._last + 1,
            ack_policy=api.AckPolicy.NONE,
            flow_control=True,
            idle_heartbeat=HEARTBEAT_S,
            inactive_threshold=30.0,
            mem_storage=True,
            num_replicas=1,
            filter_subjects=list(self._filters) or None,
        )
        self._heard_at = loop.time()
        info = await self._bus.jetstream.add_consumer(self._name, config)
        self._consumer = info.name

    async def _drop_consumer(self) -> None:
        subscription, self._subscription = self._subscription, None
        consumer, self._consumer = self._consumer, ""
        if subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
        if consumer and self._bus.client.is_connected:
            # Not awaited for its answer: the server drops it by itself when nobody listens.
            with contextlib.suppress(nats.errors.Error):
                await self._bus.client.publish(f"$JS.API.CONSUMER.DELETE.{self._name}.{consumer}")

    def _arrived(self, message: Msg, now: float) -> None:
        self._heard_at = now
        headers = message.headers
        numbers = _numbers_of(message)
        if numbers is None:
            if headers is None or headers.get("Status") != "100":
                return
            if message.reply:
                mark = _FlowControl(message.reply, len(self._readers))
                for reader in self._readers:
                    reader.push(mark)
            elif (stalled := headers.get("Nats-Consumer-Stalled")) is not None:
                self._bus.send_soon(stalled)
            elif int(headers.get("Nats-Last-Consumer", "0")) > self._consumer_last:
                self._again.set()  # what the heartbeat counts never came
            return
        if numbers.consumer_seq <= self._consumer_last:
            return  # twice on its way
        if numbers.consumer_seq != self._consumer_last + 1:
            self._again.set()
            return
        self._consumer_last = numbers.consumer_seq
        if numbers.seq <= self._last:
            return
        self._last = numbers.seq
        raw = RawMessage(
            stream=self._stream,
            seq=numbers.seq,
            recorded_at=numbers.recorded_at,
            subject=message.subject,
            headers=headers,
            body=message.data,
        )
        for reader in self._readers:
            reader.push(raw)


class Bus:
    """One connection to the bus of one pool."""

    def __init__(self, client: Client, *, pool: PoolId, url: str, disturbances: Disturbances | None = None) -> None:
        self.client = client
        self.disturbances = disturbances
        """Faults that we do to what we read; None where nobody may ask for any."""
        self.pool = pool
        self.url = url
        self.jetstream: JetStreamContext = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self._deliveries: dict[tuple[Stream, tuple[str, ...]], _Delivery] = {}
        self._readers: list[StreamReader] = []
        self._sends: set[asyncio.Task[None]] = set()
        self.errors = 0
        """Errors that the client reported aside (slow consumer, permissions): a healthy connection has none."""
        self.last_error = ""
        self.not_permitted = ""
        """What the server last said that we may not do: the request itself only ever times out."""
        self._shorter: BusShorter | None = None
        self._sound = asyncio.Event()
        """Cleared with the connection, until each stream that is followed was seen to go on from where we were."""
        self._sound.set()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        pool: PoolId,
        name: str,
        on_error: Callable[[Exception], None] | None = None,
        wait_s: float = 10.0,
        key: Path | None = None,
        ca_file: Path | None = None,
        allow_plain: bool = False,
        disturbances: Disturbances | None = None,
    ) -> "Bus":
        """A connection that reconnects for ever; raises BusUnreachable where nobody answers within ``wait_s``.

        ``key`` is the file of the seed to speak with, where the bus lets in whom it knows. Raises KeyProblem, and
        BusRefused where the bus doesn't know it. Beyond this machine the way there is TLS, trusted by ``ca_file`` or by
        the system, unless ``allow_plain``: raises PlainTextRefused.
        """
        options = transport.options(url, key=key, ca_file=ca_file, allow_plain=allow_plain)
        client = _Client()
        bus = cls(client, pool=pool, url=url, disturbances=disturbances)
        is_new, is_refused = True, False

        async def noticed(error: Exception) -> None:
            nonlocal is_refused
            bus.errors += 1
            bus.last_error = f"{type(error).__name__}: {error}"
            if "permissions violation" in str(error).lower():
                bus.not_permitted = str(error)
            if is_new and "authorization" in f"{type(error).__name__} {error}".lower():
                # The library would try again for ever with what was refused.
                is_refused = True
                client.options["allow_reconnect"] = False
            if on_error is not None:
                on_error(error)

        async def attempt() -> None:
            await client.connect(
                # The library takes several addresses as a list alone.
                url.split(","),
                name=name,
                error_cb=noticed,
                disconnected_cb=bus.connection_lost,
                reconnected_cb=bus.connection_back,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,  # type: ignore[arg-type]  # annotated int, slept as a float
                ping_interval=2,
                max_outstanding_pings=2,
                connect_timeout=2,
                allow_reconnect=True,
                pending_size=64 * 1024 * 1024,
                **options,
            )

        try:
            async with asyncio.timeout(wait_s):
                await attempt()
        except (TimeoutError, OSError, nats.errors.Error) as err:
            with contextlib.suppress(Exception):
                await client.close()
            if is_refused:
                raise BusRefused(url=url, has_key=key is not None) from err
            # The library goes on trying until the time is out: what kept it from getting through says more.
            detail = bus.last_error.partition(":")[0] or type(err).__name__
            raise BusUnreachable(url=url, waited_s=wait_s, detail=detail) from err
        is_new = False
        return bus

    @property
    def clock(self) -> Clock:
        """The process's clock: the machine's, unless a fault has it wrong."""
        return SystemClock() if self.disturbances is None else self.disturbances

    async def connection_lost(self) -> None:
        """Called by the client: until the streams are seen to go on, nothing that was decided is published."""
        self._sound.clear()
        for delivery in self._deliveries.values():
            delivery.doubt()
        self.found_sound()

    async def connection_back(self) -> None:
        """Called by the client: what came meanwhile is asked for."""
        for delivery in self._deliveries.values():
            delivery.restart()

    async def close(self) -> None:
        """Flush what was said and leave."""
        for reader in self._readers:
            await reader.close()
        with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError, OSError):
            if self.client.is_connected:
                await self.client.flush(timeout=2)
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.close()

    def stream_name(self, stream: Stream) -> str:
        """The server's name of one of the pool's streams."""
        return subjects.wishes_stream(self.pool) if stream is Stream.WISHES else subjects.facts_stream(self.pool)

    async def provision(self, *, replicas: int = 1) -> None:
        """Make the pool's streams, where they aren't there yet; never changes one that is."""
        common: dict[str, Any] = {
            "retention": api.RetentionPolicy.LIMITS,
            "storage": api.StorageType.FILE,
            "num_replicas": replicas,
            "deny_delete": True,
            "deny_purge": True,
            "allow_direct": True,
            "duplicate_window": 600,
        }
        truth = {**common, "discard": api.DiscardPolicy.NEW, "allow_atomic": True}
        copies = {
            **common,
            "discard": api.DiscardPolicy.OLD,
            "max_age": DEAD_LETTER_DAYS * 86_400,
            "max_bytes": DEAD_LETTER_BYTES_MAX,
        }
        wanted = (
            (subjects.wishes_stream(self.pool), [subjects.all_wishes(self.pool)], truth),
            (subjects.facts_stream(self.pool), list(subjects.all_facts(self.pool)), truth),
            (subjects.dead_letters_stream(self.pool), [subjects.all_dead_letters(self.pool)], copies),
        )
        for name, patterns, settings in wanted:
            # A cluster has no leader for a while after its start, and answers nothing or that it can't.
            absent = (nats.errors.TimeoutError, nats.errors.NoRespondersError, ServiceUnavailableError)
            async for attempt in stamina.retry_context(on=absent, attempts=10, timeout=30):
                with attempt:
                    try:
                        await self.jetstream.stream_info(name)
                    except NotFoundError:
                        await self.jetstream.add_stream(api.StreamConfig(name=name, subjects=patterns, **settings))

    async def position(self, stream: Stream) -> StreamPosition:
        """Where the stream stands now."""
        info = await self.jetstream.stream_info(self.stream_name(stream))
        return StreamPosition(
            last_seq=info.state.last_seq,
            first_seq=info.state.first_seq,
            messages=info.state.messages,
            created=str(info.created),
        )

    async def check_not_shorter(self, stream: Stream, seen: int) -> None:
        """Raises BusShorter where the stream ends before ``seen``, which it once held. Raises what the bus raises."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SURE_S
        while (found := (await self.position(stream)).last_seq) < seen:
            if loop.time() > deadline:
                raise BusShorter(stream=stream, seen=seen, found=found)
            await asyncio.sleep(0.2)

    def found_sound(self) -> None:
        """Called by a delivery: its stream goes on. Once all do, what was decided may be published."""
        if all(delivery.is_sound for delivery in self._deliveries.values()):
            self._sound.set()

    def found_shorter(self, error: BusShorter) -> None:
        """Called by a delivery: nothing is published from here on."""
        self._shorter = error
        self._sound.set()

    async def reader(
        self,
        stream: Stream,
        *,
        after: int,
        filters: tuple[str, ...] = (),
        on_news: Callable[[], None] | None = None,
    ) -> StreamReader:
        """Follow a stream from the message after ``after`` on; ``filters`` narrow it to these subjects.

        ``on_news`` is called whenever something came, for whoever waits for more than one thing.
        """
        delivery = self._deliveries.setdefault((stream, filters), _Delivery(self, stream, filters))
        reader = StreamReader(delivery, after=after, on_news=on_news)
        self._readers.append(reader)
        delivery.attach(reader)
        return reader

    def send_soon(self, subject: str, body: bytes = b"") -> None:
        """Publish on plain NATS without waiting; lost where the connection is down (samples, flow control)."""
        task = asyncio.get_running_loop().create_task(self._send(subject, body))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, subject: str, body: bytes) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.publish(subject, body)

    async def claim(self, author: Author, message: Message) -> Lease:
        """Claim the author's lease with this message (a LeaseClaimed); older sessions are fenced from here on."""
        while True:
            newest = await self.newest_claim(author)
            lease = await self.claim_after(author, message, after=0 if newest is None else newest.seq)
            if lease is not None:
                return lease
            # Somebody claimed between our look and our claim: the later one wins, so try again.

    async def newest_claim(self, author: Author) -> Claim | None:
        """The last claim of the author's lease; None where nobody ever claimed it. Waits for the bus."""
        subject = subjects.lease(self.pool, author)
        while True:
            try:
                last = await self.jetstream.get_last_msg(self.stream_name(Stream.FACTS), subject)
            except NotFoundError:
                return None
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.2)
                continue
            headers = last.headers or {}
            return Claim(seq=last.seq or 0, message_id=headers.get("Nats-Msg-Id", ""), body=last.data or b"")

    async def claim_after(self, author: Author, message: Message, *, after: int) -> Lease | None:
        """Claim the author's lease only where its newest claim is the one at ``after`` (0: none); None where it isn't.

        Waits until the outcome is known.
        """
        subject = subjects.lease(self.pool, author)
        headers = {**message.headers, _EXPECTED_SEQUENCE: str(after)}
        while True:
            answer = await self._ask(message.subject, message.body, headers)
            if answer is not None:
                error = answer.get("error")
                if error is None:
                    return Lease(author=author, subject=subject, claim=int(answer["seq"]))
                code = int(error.get("err_code", 0))
                if _has_no_leader(error):
                    answer = None
                    await asyncio.sleep(0.2)
                elif code not in _WRONG_LAST_SEQUENCE:
                    raise PublishRefused(subject=message.subject, code=code, detail=str(error.get("description")))
            # Unknown, or refused: an earlier try of ours may be what was stored.
            newest = await self.newest_claim(author)
            if newest is not None and newest.message_id == message.headers["Nats-Msg-Id"]:
                return Lease(author=author, subject=subject, claim=newest.seq)
            if answer is not None or (0 if newest is None else newest.seq) != after:
                return None

    async def publish_fenced(self, lease: Lease, messages: Sequence[Message]) -> int:
        """Store all of ``messages`` or none, and only while the lease is ours; the last one's sequence.

        Retries until the outcome is known: a try that timed out may have been stored, and then says so (duplicate).
        Raises Fenced where the lease was lost, PublishRefused where the server won't have it, BusShorter where what
        was decided rests on what the bus has lost.
        """
        assert 0 < len(messages) <= BATCH_EVENTS_MAX, f"a batch of {len(messages)} events"
        while True:
            await self._sound.wait()
            if self._shorter is not None:
                raise self._shorter
            answer = await self._try_batch(
                {_EXPECTED_SEQUENCE: str(lease.claim), _EXPECTED_SUBJECT: lease.subject}, messages
            )
            if answer is None:
                await asyncio.sleep(0.05)
                continue
            error = answer.get("error")
            if error is None:
                return int(answer["seq"])
            code = int(error.get("err_code", 0))
            if code == _CONTAINS_DUPLICATE:
                # An earlier try of this very batch was stored, as every id in it is ours and new.
                return await self._sequence_of(messages[-1])
            if code in _WRONG_LAST_SEQUENCE:
                raise Fenced(author=lease.author, claim=lease.claim, detail=str(error.get("description")))
            if int(error.get("code", 0)) == 503:
                await asyncio.sleep(0.2)  # no leader, or too many batches in flight: neither is for ever
                continue
            raise PublishRefused(subject=messages[0].subject, code=code, detail=str(error.get("description")))

    async def refill(self, messages: Sequence[Message], *, after: int) -> int:
        """Store all of ``messages`` of one stream, or none, where its last sequence is ``after``; the last one's.

        For a bus that is made anew from a log. Raises PublishRefused where the stream stands elsewhere: also where a
        try that timed out was stored, which shows in its position.
        """
        assert 0 < len(messages) <= BATCH_EVENTS_MAX, f"a batch of {len(messages)} events"
        answer = await self._try_batch({"Nats-Expected-Last-Sequence": str(after)}, messages)
        if answer is None:
            raise BusUnreachable(url=self.url, waited_s=REQUEST_TIMEOUT_S, detail="no acknowledgement of a batch")
        if (error := answer.get("error")) is not None:
            raise PublishRefused(
                subject=messages[0].subject, code=int(error.get("err_code", 0)), detail=str(error.get("description"))
            )
        return int(answer["seq"])

    async def _try_batch(self, fence: dict[str, str], messages: Sequence[Message]) -> dict[str, Any] | None:
        first = messages[0]
        if len(messages) == 1:
            # One message needs no batch, and costs a sixth of one.
            return await self._ask(first.subject, first.body, {**first.headers, **fence})
        batch = uuid.uuid4().hex
        try:
            for position, message in enumerate(messages[:-1], start=1):
                headers = {
                    **message.headers,
                    **(fence if position == 1 else {}),
                    "Nats-Batch-Id": batch,
                    "Nats-Batch-Sequence": str(position),
                }
                await self.client.publish(message.subject, message.body, headers=headers)
        except (nats.errors.Error, OSError):
            return None
        last = messages[-1]
        headers = {
            **last.headers,
            "Nats-Batch-Id": batch,
            "Nats-Batch-Sequence": str(len(messages)),
            "Nats-Batch-Commit": "1",
        }
        return await self._ask(last.subject, last.body, headers)

    async def _ask(self, subject: str, body: bytes, headers: dict[str, str]) -> dict[str, Any] | None:
        """The server's answer to one publish; None where none came, and the outcome is unknown."""
        try:
            reply = await self.client.request(subject, body, timeout=REQUEST_TIMEOUT_S, headers=headers)
        except (TimeoutError, nats.errors.Error, OSError):
            return None
        answer: dict[str, Any] = json.loads(reply.data)
        if int((answer.get("error") or {}).get("err_code", 0)) in {_IN_PROCESS, _INCOMPLETE}:
            await asyncio.sleep(0.2)
            return None  # nothing is wrong with what was asked: it is asked again
        return answer

    async def _sequence_of(self, message: Message) -> int:
        while True:
            try:
                last = await self.jetstream.get_last_msg(self.stream_name(Stream.FACTS), message.subject)
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.1)
                continue
            return int(last.seq or 0)

    async def publish_wish(self, message: Message) -> int:
        """Store a wish, and wait for the server's word that it is on disk; its sequence in the stream of wishes.

        A repeat within the server's window is stored once. Raises PublishRefused where the server won't have it, and
        BusUnreachable where its outcome stays unknown.
        """
        return (await self.store(message)).seq

    async def store(self, message: Message) -> Stored:
        """What ``publish_wish`` does, with the server's word whether it had the message before."""
        loop = asyncio.get_running_loop()
        began, tries = loop.time(), 0
        while True:
            answer = await self._ask(message.subject, message.body, message.headers)
            tries += 1
            error = None if answer is None else answer.get("error")
            if answer is not None and error is None:
                return Stored(seq=int(answer["seq"]), is_repeat=bool(answer.get("duplicate")))
            if error is not None and not _has_no_leader(error):
                raise PublishRefused(
                    subject=message.subject, code=int(error.get("err_code", 0)), detail=str(error.get("description"))
                )
            waited_s = loop.time() - began
            if waited_s > RIDE_OUT_S or (tries == _TRIES_QUICK and await self._is_taken_by_nobody(message.subject)):
                raise BusUnreachable(url=self.url, waited_s=round(waited_s, 1), detail="no acknowledgement")
            await asyncio.sleep(0.2)

    async def _is_taken_by_nobody(self, subject: str) -> bool:
        """True where there is no such pool, or its wishes' stream doesn't take the subject: waiting mends neither."""
        try:
            info = await self.jetstream.stream_info(self.stream_name(Stream.WISHES))
        except NotFoundError:
            return True
        except (TimeoutError, nats.errors.Error, OSError):
            return False
        return not any(matches(pattern, subject) for pattern in info.config.subjects or ())

    async def serve(self, subject: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer requests on ``subject`` for as long as the connection lives; a failure is answered, and counted."""

        async def answer(_subject: str, body: bytes) -> bytes:
            return await handler(body)

        await self.serve_all(subject, answer)

    async def serve_all(self, pattern: str, handler: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        """Answer requests on every subject of a pattern; the handler is told which: the broker checked who may."""

        async def asked(message: Msg) -> None:
            try:
                answer = await handler(message.subject, message.data)
            except Exception as err:  # noqa: BLE001 - one bad question must not end the service
                self.errors += 1
                self.last_error = f"{type(err).__name__}: {err}"
                answer = json.dumps({"error": {"code": "Internal", "message": f"{type(err).__name__}: {err}"}}).encode()
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.respond(answer)

        def started(message: Msg) -> asyncio.Task[None]:
            task = asyncio.get_running_loop().create_task(asked(message))
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)
            return task

        async def on_message(message: Msg) -> None:
            started(message)

        await self.client.subscribe(pattern, cb=on_message)


def _has_no_leader(error: dict[str, Any]) -> bool:
    """True where nobody can store it just now, and somebody will. A stream that is full says 503, too: not for ever."""
    return int(error.get("code", 0)) == 503 and int(error.get("err_code", 0)) != _STREAM_FULL


__all__ = [
    "Bus",
    "BusError",
    "BusRefused",
    "BusShorter",
    "BusUnreachable",
    "Claim",
    "Fenced",
    "Lease",
    "PublishRefused",
    "RawMessage",
    "Stored",
    "StreamPosition",
    "StreamReader",
]
