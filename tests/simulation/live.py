"""The services' own asyncio code on virtual time: ``python -m tests.simulation.live --seed 7 --events 300000``.

What runs is what runs in a pool: reactor, bus module, library's JetStream context, vigil, admission's shell. What they
speak to is a server made here, which keeps the streams of ``world`` and answers JetStream's requests; between them is a
network that delays, loses requests, loses acknowledgements after the message was stored, loses deliveries, stands still
and breaks. Agents, machines, faults, requests and every rule are those of the simulated cores.
"""

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import nats.errors
import structlog
from nats.js import JetStreamContext

from apportion.admission import core as admission_core
from apportion.admission.__main__ import _Shell as AdmissionShell
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import ADMISSION, MONITOR, PLACER, Author
from apportion.monitor import core as monitor_core
from apportion.monitor import redeciding
from apportion.placer import core as placer_core
from apportion.runtime.access import matches
from apportion.runtime.reactor import Reactor
from apportion.runtime.standby import Vigil
from apportion.runtime.stream import Bus, Fenced
from tests.simulation import faults, virtual
from tests.simulation.checkers import Checker, must
from tests.simulation.run import CORPUS, LONG_EVENTS, PATIENCE_S, Outcome, RunBroken, _is_done, commit, keep, options_of
from tests.simulation.world import MS, POOL, START, MemoryBus, Options, S, World

CORPUS_LIVE: Final = CORPUS.with_name("corpus_live.txt")
HEARTBEAT_S: Final = 1.0
LOSSES: Final = {"request": 0.004, "acknowledgement": 0.006, "delivery": 0.003, "crash": 0.002}
"""How often, of what is sent while faults are on."""
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_MSG_ID: Final = "Nats-Msg-Id"


@dataclass
class Sent:
    """A message as the client's library would hand it on."""

    subject: str
    data: bytes
    reply: str = ""
    headers: dict[str, str] | None = None


@dataclass
class Consumer:
    """What one push consumer was sent."""

    client: "Client"
    stream: str
    inbox: str
    filters: tuple[str, ...]
    next_seq: int
    sent: int = 0
    is_over: bool = False

    def wants(self, subject: str) -> bool:
        """Whether the message is for it."""
        return not self.filters or any(matches(one, subject) for one in self.filters)


class Server(MemoryBus):
    """The world's streams, with JetStream's requests before them."""

    def __init__(self, world: "LiveWorld") -> None:
        super().__init__(world)
        self.world = world
        self.kept: dict[str, list[Sent]] = {name: [] for name in ("WISHES", "FACTS", "DLQ")}
        self.clients: list[Client] = []
        self.consumers: dict[str, Consumer] = {}
        self.is_up = True
        self._letters: dict[str, int] = {}
        self._batches: dict[str, list[Message]] = {}
        self._number = 0

    def _store(self, stream: Stream, message: Message) -> int:
        before = len(self.streams[stream])
        seq = super()._store(stream, message)
        if len(self.streams[stream]) > before:
            self._keep("WISHES" if stream is Stream.WISHES else "FACTS", message)
            self.world.stored_something()
        return seq

    def _keep(self, name: str, message: Message) -> int:
        headers = {key: value for key, value in message.headers.items() if not key.startswith("Nats-Expected")}
        at = str(self.world.now)
        self.kept[name].append(Sent(message.subject, message.body, at, headers or None))
        for consumer in list(self.consumers.values()):
            if consumer.stream == name:
                self._push(consumer)
        return len(self.kept[name])

    def answer(self, subject: str, body: bytes, headers: dict[str, str], client: "Client") -> dict[str, Any] | None:
        """What the server says to a request; None where it says nothing."""
        if subject.startswith("$JS.API."):
            return self._api(subject.split("."), body, client)
        message = Message(subject=subject, headers=headers, body=body)
        if (batch := headers.get("Nats-Batch-Id")) is not None:
            messages = self._batches.setdefault(batch, [])
            messages.append(message)
            if len(messages) != int(headers["Nats-Batch-Sequence"]):
                return _error(400, 10176, "batch is incomplete")
            if "Nats-Batch-Commit" not in headers:
                return None
            return self._fenced(self._batches.pop(batch))
        if ".dlq." in subject:
            id_ = headers.get(_MSG_ID, "")
            if id_ not in self._letters:
                self._letters[id_] = self._keep("DLQ", message)
            return {"stream": "DLQ", "seq": self._letters[id_]}
        if _EXPECTED not in headers:
            return {"stream": "WISHES", "seq": self.publish_wish(message)}
        if f"{_EXPECTED}-Subject" in headers:
            return self._fenced([message])
        return self._claim(message)

    def _claim(self, message: Message) -> dict[str, Any]:
        known = self._ids[Stream.FACTS].get(message.headers[_MSG_ID])
        if int(message.headers[_EXPECTED]) != self.leases.get(message.subject, 0):
            return _error(400, 10071, "wrong last sequence")  # also of one that was stored: one server says so first
        if known is not None:
            return {"stream": "FACTS", "seq": known, "duplicate": True}
        return {"stream": "FACTS", "seq": self.claim(_plain(message))}

    def _fenced(self, messages: list[Message]) -> dict[str, Any]:
        first = messages[0].headers
        lease, claim = first[f"{_EXPECTED}-Subject"], int(first[_EXPECTED])
        plain = [_plain(message) for message in messages]
        if self.leases.get(lease) == claim and all(m.headers[_MSG_ID] in self._ids[Stream.FACTS] for m in plain):
            if len(plain) > 1:
                return _error(400, 10201, "batch publish contains duplicate message id")
            return {"stream": "FACTS", "seq": self._ids[Stream.FACTS][plain[0].headers[_MSG_ID]], "duplicate": True}
        seq = self.publish(lease, claim, plain)
        return _error(400, 10071, "wrong last sequence") if seq is None else {"stream": "FACTS", "seq": seq}

    def _api(self, parts: list[str], body: bytes, client: "Client") -> dict[str, Any] | None:
        kept = self.kept.get(parts[-1].rpartition("_")[2], [])
        match parts[2:4]:
            case ["STREAM", "INFO"]:
                state = {"messages": len(kept), "bytes": 0, "first_seq": 1, "last_seq": len(kept), "consumer_count": 0}
                return {"config": {"name": parts[-1]}, "state": state, "created": "2026-09-01T00:00:00Z"}
            case ["STREAM", "MSG"]:
                return self._message(kept, json.loads(body))
            case ["CONSUMER", "CREATE"]:
                return self._create(parts[-1].rpartition("_")[2], json.loads(body)["config"], client)
            case ["CONSUMER", "DELETE"]:
                self._drop(parts[-1])
                return {"success": True}
        raise AssertionError(f"a request that this server doesn't know: {'.'.join(parts)}")

    def _message(self, kept: list[Sent], asked: dict[str, Any]) -> dict[str, Any]:
        seq = asked.get("seq") or next(
            (place for place in range(len(kept), 0, -1) if kept[place - 1].subject == asked["last_by_subj"]), 0
        )
        if not 0 < seq <= len(kept):
            return _error(404, 10037, "no message found")
        one = kept[seq - 1]
        lines = "".join(f"{name}: {value}\r\n" for name, value in (one.headers or {}).items())
        hdrs = base64.b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode()
        data = base64.b64encode(one.data).decode()
        time_ = "2026-09-01T00:00:00Z"
        return {"message": {"subject": one.subject, "seq": seq, "data": data, "hdrs": hdrs, "time": time_}}

    def _create(self, stream: str, config: dict[str, Any], client: "Client") -> dict[str, Any]:
        self._number += 1
        name = f"c{self._number}"
        filters = tuple(config.get("filter_subjects") or ())
        consumer = Consumer(client, stream, config["deliver_subject"], filters, int(config["opt_start_seq"]))
        self.consumers[name] = consumer
        self._push(consumer)
        self._beat(consumer)
        at_zero = {"consumer_seq": 0, "stream_seq": 0}
        return {
            "name": name, "stream_name": stream, "config": {}, "created": "2026-09-01T00:00:00Z",
            "delivered": at_zero, "ack_floor": at_zero, "num_pending": 0,
        }  # fmt: skip

    def _push(self, consumer: Consumer) -> None:
        kept = self.kept[consumer.stream]
        while consumer.next_seq <= len(kept):
            seq = consumer.next_seq
            consumer.next_seq += 1
            one = kept[seq - 1]
            if consumer.wants(one.subject):
                consumer.sent += 1
                reply = f"$JS.ACK.{consumer.stream}.c.1.{seq}.{consumer.sent}.{one.reply}.0"
                consumer.client.deliver(Sent(consumer.inbox, one.data, reply, one.headers), as_subject=one.subject)

    def _beat(self, consumer: Consumer) -> None:
        if consumer.is_over:
            return
        headers = {"Status": "100", "Nats-Last-Consumer": str(consumer.sent)}
        consumer.client.deliver(Sent(consumer.inbox, b"", "", headers))
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat, consumer)

    def _drop(self, name: str) -> None:
        consumer = self.consumers.pop(name, None)
        if consumer is not None:
            consumer.is_over = True

    def gone(self, client: "Client") -> None:
        """Its consumers end with its connection."""
        for name, consumer in list(self.consumers.items()):
            if consumer.client is client:
                self._drop(name)

    def publish_plain(self, sent: Sent) -> None:
        """To whoever listens."""
        for client in list(self.clients):
            client.deliver(sent)


def _own(headers: dict[str, str]) -> dict[str, str]:
    """Without what a publish says to the server alone."""
    return {key: value for key, value in headers.items() if not key.startswith(("Nats-Expected", "Nats-Batch"))}


def _plain(message: Message) -> Message:
    """As it is stored."""
    return Message(subject=message.subject, headers=_own(message.headers), body=message.body)


def _error(code: int, err_code: int, description: str) -> dict[str, Any]:
    return {"error": {"code": code, "err_code": err_code, "description": description}}


def _settle(waiting: "asyncio.Future[dict[str, Any]]", answer: dict[str, Any]) -> None:
    if not waiting.done():  # whoever asked may have given up
        waiting.set_result(answer)


class _Version:
    major, minor = 2, 15


class _Subscription:
    def __init__(self, client: "Client", subject: str, callback: Callable[[Any], Awaitable[None]]) -> None:
        self.subject, self.callback = subject, callback
        self._client = client

    async def unsubscribe(self) -> None:
        """Hear no more."""
        with contextlib.suppress(ValueError):
            self._client.subscriptions.remove(self)


class Client:
    """What of the library's client a bus module uses; one process's connection."""

    connected_server_version = _Version

    def __init__(self, world: "LiveWorld", name: str) -> None:
        self.world, self.name = world, name
        self.subscriptions: list[_Subscription] = []
        self.bus: Bus | None = None
        self.die: Callable[[], None] = lambda: None
        self.is_dead = False
        self.is_down = False
        self.is_still = False
        """The process stands still, or nothing gets through: what is sent either way waits."""
        self._held: deque[Callable[[], None]] = deque()
        self._arrives_at = 0.0
        self._leaves_at = 0.0
        self._inboxes = 0
        world.server.clients.append(self)

    @property
    def is_connected(self) -> bool:
        """Whether it believes so."""
        return not (self.is_down or self.is_dead)

    def jetstream(self, **options: Any) -> JetStreamContext:
        """The library's own, on us."""
        return JetStreamContext(self, **options)  # type: ignore[arg-type]

    def new_inbox(self) -> str:
        """Where nobody else listens."""
        self._inboxes += 1
        return f"_INBOX.{self.name}.{self._inboxes}"

    async def subscribe(self, subject: str, *, cb: Callable[[Any], Awaitable[None]], **_options: Any) -> _Subscription:
        """Hear what is said there."""
        found = _Subscription(self, subject, cb)
        self.subscriptions.append(found)
        return found

    async def flush(self, **_options: Any) -> None:
        """Everything is out already."""

    async def publish(self, subject: str, payload: bytes = b"", *, headers: dict[str, str] | None = None) -> None:
        """Say it; nobody answers."""
        self._crash_at_times()
        if self.is_dead or self.is_down:
            raise nats.errors.ConnectionClosedError
        self._send(subject, payload, headers, None)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 2.0,  # noqa: ASYNC109 - the library's own
        headers: dict[str, str] | None = None,
    ) -> Sent:
        """The server's answer. Raises TimeoutError where none comes: also of what was stored."""
        self._crash_at_times()
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if not self.is_down:
            self._send(subject, payload, headers, answered)
        try:
            answer = await asyncio.wait_for(answered, timeout)
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        self._crash_at_times()
        return Sent(subject, json.dumps(answer).encode())

    def _crash_at_times(self) -> None:
        """The process dies here: before it sends, or after the answer came and before it is believed."""
        if self.world.faults_on and self.world.net.random() < LOSSES["crash"]:
            self.world.crashes += 1
            self.die()
            raise asyncio.CancelledError

    def _send(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, answered: "asyncio.Future[Any] | None"
    ) -> None:
        is_part = "Nats-Batch-Id" in (headers or {}) and answered is None
        if not is_part and self.world.loses("request"):
            return  # of a batch no part is lost alone: they share a connection

        def arrive() -> None:
            server = self.world.server
            if not server.is_up or self.is_dead:
                return
            if answered is None and not subject.startswith("$JS.") and "Nats-Batch-Id" not in (headers or {}):
                server.publish_plain(Sent(subject, payload, "", headers))
                return
            answer = server.answer(subject, payload, dict(headers or {}), self)
            if answer is not None and answered is not None and not self.world.loses("acknowledgement"):
                self._later(lambda: _settle(answered, answer), incoming=True)

        self._later(arrive, incoming=False)

    def _later(self, action: Callable[[], Any], *, incoming: bool) -> None:
        """After a network's moment, and in order."""
        loop = asyncio.get_running_loop()
        at = loop.time() + self.world.hop() / S
        # Two timers of one moment may go off in either order, and a connection keeps its own.
        if incoming:
            at = self._arrives_at = max(at, self._arrives_at + 1e-7)
        else:
            at = self._leaves_at = max(at, self._leaves_at + 1e-7)

        def act() -> None:
            if self.is_still:
                self._held.append(act)
            elif not self.is_dead:
                action()

        loop.call_at(at, act)

    def deliver(self, sent: Sent, *, as_subject: str = "") -> None:
        """Something for whoever listens on this connection."""
        found = [one for one in self.subscriptions if matches(one.subject, sent.subject)]
        if not found or self.is_down or self.world.loses("delivery"):
            return
        message = Sent(as_subject or sent.subject, sent.data, sent.reply, sent.headers)

        def hear() -> None:
            for subscription in found:
                if subscription in self.subscriptions:
                    self.world.spawn(subscription.callback(message))

        self._later(hear, incoming=True)

    def go_on(self) -> None:
        """What waited gets through."""
        self.is_still = False
        held, self._held = self._held, deque()
        for act in held:
            act()

    def lose(self) -> None:
        """The connection breaks."""
        if self.bus is not None and not self.is_down:
            self.is_down = True
            self.world.server.gone(self)
            self.world.spawn(self.bus.connection_lost())

    def regain(self) -> None:
        """And is there again."""
        if self.bus is not None and self.is_down and not self.is_dead:
            self.is_down = False
            self.world.spawn(self.bus.connection_back())

    async def close(self) -> None:
        """Leave."""
        self.is_dead = True


class Disk:
    """One author's snapshot, which a process that was killed no longer writes, and which may be torn."""

    def __init__(self, world: "LiveWorld", author: Author) -> None:
        self._world, self._author = world, author
        self.is_dead = False

    def load(self, *, policy: str, streams: str) -> bytes | None:
        """What is there."""
        del policy, streams
        return self._world.snapshots.get(self._author)

    def store(self, state: bytes, *, policy: str, streams: str) -> None:
        """Keep it."""
        del policy, streams
        if not self.is_dead:
            self._world.snapshots[self._author] = state


class _Clock:
    def __init__(self, world: "LiveWorld") -> None:
        self._world = world

    def now(self) -> int:
        return self._world.now

    def monotonic(self) -> int:
        return self._world.now - START


@dataclass
class Service:
    """One process of one author, as the world's faults know an actor."""

    world: "LiveWorld"
    author: Author
    core: Any
    reads_wishes: bool
    config: dict[str, int | str]
    client: Client = field(init=False)
    reactor: Reactor[Any] = field(init=False)
    is_alive: bool = True
    is_cut_off: bool = False
    in_flight: None = None

    def __post_init__(self) -> None:
        self.world.sessions += 1
        session = f"{self.author}-s{self.world.sessions}"
        self.client = Client(self.world, session)
        self.client.die = self._dies
        bus = self.client.bus = Bus(self.client, pool=POOL, url="simulated")  # type: ignore[arg-type]
        self.disk = Disk(self.world, self.author)
        clock = _Clock(self.world)
        self.shell: AdmissionShell | None = None
        if self.author == ADMISSION:
            self.shell = AdmissionShell(bus, clock, is_busy=lambda: self.reactor.lag > 0)
        self.reactor = Reactor(
            core=self.core, author=self.author, bus=bus, config=self.config, reads_wishes=self.reads_wishes,
            snapshots=self.disk, clock=clock, session=session, witness=self.shell,  # type: ignore[arg-type]
            vigil=Vigil(bus, self.author, is_standby=False, monotonic=clock.monotonic),
        )  # fmt: skip
        self.task = asyncio.get_running_loop().create_task(self._run(), name=session)

    async def _run(self) -> None:
        try:
            if self.shell is None:
                await self.reactor.run(asyncio.Event())
            else:
                async with self.shell.running(self.reactor.ready):
                    await self.reactor.run(asyncio.Event())
        except Fenced:
            pass
        except asyncio.CancelledError:
            raise
        except Exception as err:  # noqa: BLE001 - whatever ends a service by itself is what we look for
            self.world.failures.append(f"{self.author} ended with {type(err).__name__}: {err}")
        finally:
            self.is_alive = False
            self._leave()

    def _leave(self) -> None:
        self.disk.is_dead = True
        self.client.is_dead = True
        self.world.server.gone(self.client)
        with contextlib.suppress(ValueError):
            self.world.server.clients.remove(self.client)

    def kill(self) -> None:
        """Kill -9: nothing that it would still do on its way out reaches anything."""
        self._leave()
        self.is_alive = False
        self.task.cancel()

    def _dies(self) -> None:
        """It crashes at this very await; a supervisor starts it again."""
        if self.is_alive:
            self.kill()
            if self.world.services[self.author] is self:  # type: ignore[comparison-overlap]
                self.world.after(self.world.rng.randrange(10, 1500) * MS, lambda: self.world.start_service(self.author))

    @property
    def is_paused(self) -> bool:
        """Whether it stands still."""
        return self.client.is_still

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        if value:
            self.client.is_still = True
        else:
            self.client.go_on()

    @property
    def claim(self) -> int:
        """Of its lease; 0 until it has one."""
        lease = self.reactor.lease
        return 0 if lease is None or not self.reactor.ready.is_set() else lease.claim

    @property
    def state(self) -> Any:
        """What its core believes."""
        return self.reactor.state

    @property
    def last_snapshot(self) -> bytes | None:
        """What lies on its disk."""
        return self.world.snapshots.get(self.author)

    def keep_snapshot(self) -> None:
        """As the reactor does now and then."""
        self.reactor._store_snapshot()

    def deliver(self) -> None:
        """It hears of news by itself."""

    def observe(self, observation: Any) -> None:
        """The shell saw something."""
        if self.is_alive:
            self.reactor.feed(observation)


class LiveWorld(World):
    """The world, with the services' own code in it, on the running loop's clock."""

    def __init__(self, options: Options, checker: Checker) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_noticed = False
        self.failures: list[str] = []
        self.crashes = 0
        self.lost = 0
        self.outages = 0
        super().__init__(options, checker)

    @property
    def now(self) -> int:
        """Ns since the Unix epoch, by the loop's clock."""
        return START + round(self._loop.time() * S)

    @now.setter
    def now(self, value: int) -> None:
        """The loop's clock goes by itself."""

    def __post_init__(self) -> None:
        import random

        self.net = random.Random(f"{self.options.seed} network")
        super().__post_init__()
        self.after(4 * S, self._outage)

    @property
    def server(self) -> Server:
        """The bus."""
        assert isinstance(self.bus, Server)
        return self.bus

    def a_bus(self) -> MemoryBus:
        return Server(self)

    def at(self, moment: int, action: Callable[[], None]) -> None:
        """Do something at an instant."""
        self._count += 1
        self._loop.call_at(max(0.0, (moment - START) / S), action)

    def stored_something(self) -> None:
        """Agents hear of it."""
        if not self._is_noticed:
            self._is_noticed = True
            self._loop.call_soon(self._noticed)

    def _noticed(self) -> None:
        self._is_noticed = False
        self._notify()

    def spawn(self, doing: Awaitable[None]) -> None:
        """Something that nobody waits for."""
        task = asyncio.ensure_future(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hop(self) -> int:
        """What a message takes, in ns."""
        if self.faults_on and self.net.random() < 0.004:
            return self.net.randrange(50, 3000) * MS
        return self.net.randrange(200_000, 2 * MS)

    def loses(self, what: str) -> bool:
        """Whether this one is lost."""
        if self.faults_on and self.net.random() < LOSSES[what]:
            self.lost += 1
            return True
        return False

    def _outage(self) -> None:
        """The bus is away for a while: every connection breaks, and comes back."""
        if not self.faults_on:
            return
        self.outages += 1
        self.server.is_up = False
        for client in list(self.server.clients):
            client.lose()

        def back() -> None:
            self.server.is_up = True
            for client in list(self.server.clients):
                client.regain()

        self.after(self.net.randrange(100, 4000) * MS, back)
        self.after(self.net.randrange(8, 40) * S, self._outage)

    def start_service(self, author: Author) -> None:
        """A new process of a service."""
        cores: dict[Author, Any] = {ADMISSION: admission_core, PLACER: placer_core, MONITOR: monitor_core}
        if self.rng.random() >= 0.7:
            self.snapshots[author] = None
        self.services[author] = Service(  # type: ignore[assignment]
            self, author, cores[author], reads_wishes=author != PLACER, config=self.config_of(author)
        )

    def active(self, author: Author) -> Any:
        """The author's process that writes: a paused one may claim the lease after the one that took its place."""
        mine = [one for one in (self.services[author], *self.zombies) if one.author == author and one.is_alive]
        must(len(mine) == 1, f"one process of {author} writes", mine)
        return mine[0]

    def kill_service(self, author: Author) -> None:
        """Kill -9; its last snapshot stays."""
        service: Any = self.services[author]
        if self.rng.random() < 0.5 and service.is_alive:
            service.keep_snapshot()
        service.kill()


async def play(options: Options) -> tuple[Outcome, dict[str, int]]:
    """One whole run; raises AssertionError where a rule was broken."""
    checker = Checker()
    broken: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: broken.append(context.get("exception") or AssertionError(context)))
    world = LiveWorld(options, checker)

    async def until(is_so: Callable[[], bool], patience_s: float) -> None:
        deadline = loop.time() + patience_s
        while not is_so() and loop.time() < deadline:
            await asyncio.sleep(0.25)
            if broken:
                raise broken[0]
            must(not world.failures, "no service ends but by being fenced or killed", *world.failures)

    try:
        if options.faults:
            faults.arrange(world)
        await until(lambda: world.requests_left == 0, 100_000)
        await asyncio.sleep(5)
        faults.heal(world)
        await until(lambda: _is_done(world, checker), PATIENCE_S)
        world.is_over = True
        await until(lambda: False, 60)
        checker.at_rest()
        decisions = 0
        for author, core, again in (
            (ADMISSION, admission_core, admission_core),
            (PLACER, placer_core, placer_core),
            (MONITOR, monitor_core, redeciding),
        ):
            made, state = checker.replay(author, again)
            decisions += made
            live: Any = world.active(author)
            read = core.position(live.state)
            must(read == core.position(state), f"{author} has read to the end", read, core.position(state))
            must(core.snapshot(live.state) == core.snapshot(state), f"{author} live is {author} replayed")
    finally:
        for service in world.services.values():
            service.kill()  # type: ignore[attr-defined]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
    outcome = Outcome(
        seed=options.seed,
        events=checker.events,
        faults=world.faults_made,
        decisions=decisions,
        refused=world.bus.refused,
        digest=world.history_hash(),
        virtual_s=(world.now - START) // S,
    )
    return outcome, {"lost": world.lost, "crashes": world.crashes, "outages": world.outages}


def run(options: Options) -> tuple[Outcome, dict[str, int]]:
    """One whole run; raises RunBroken where a rule was broken."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        return virtual.run(play(options))
    except AssertionError as broken:
        raise RunBroken(
            options, 0, broken, again=f"python -m tests.simulation.live --seed {options.seed} --events 1"
        ) from broken
    finally:
        structlog.reset_defaults()


def corpus() -> list[int]:
    """Seeds that once failed here."""
    lines = CORPUS_LIVE.read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line.split("#")[0].strip()]


def main() -> int:
    """Run seeds until enough events were simulated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=300_000)
    asked = parser.parse_args()
    print(f"services on virtual time from seed {asked.seed}, {asked.events} events, commit {commit()}", flush=True)
    done, made, seeds, began = 0, 0, 0, time.perf_counter()
    kept = corpus() if asked.events >= LONG_EVENTS else []
    for seed in itertools.chain(kept, itertools.count(asked.seed)):
        if done >= asked.events:
            break
        try:
            outcome, network = run(options_of(seed))
        except RunBroken as broken:
            print(f"FAILED seed {seed}: {broken}\n  kept in {CORPUS_LIVE}", flush=True)
            keep(seed, str(broken).partition("\n")[0][:120], path=CORPUS_LIVE)
            return 1
        done += outcome.events
        made += outcome.faults + sum(network.values())
        print(
            f"seed {seed}: {outcome.events} events in {outcome.virtual_s} virtual s, {outcome.faults} faults, "
            f"{network['lost']} messages lost, {network['crashes']} crashes at an await, {network['outages']} outages, "
            f"{outcome.refused} batches of lost leases refused, history {outcome.digest[:12]}",
            flush=True,
        )
        seeds += 1
    took = time.perf_counter() - began
    print(f"{done} events, {made} faults, {seeds} seeds, 0 rules broken, {done / took:.0f} events/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
