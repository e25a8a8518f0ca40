"""Who may do what on the bus: every principal tries every operation on a real server."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from apportion.contracts.ids import PoolId
from apportion.runtime.access import Principal, Role, may_publish, may_subscribe, rights
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.keys import By, KeyInvalid, KeyRing, KeyUnsafe, PrincipalInvalid, options_of
from apportion.runtime.stream import Bus, BusRefused

POOL = PoolId("main")
P = "apportion.v1.main"
W, F, D = "APPORTION_MAIN_WISHES", "APPORTION_MAIN_FACTS", "APPORTION_MAIN_DLQ"

PRINCIPALS = {
    "admission": (Role.ADMISSION, ""),
    "placer": (Role.PLACER, ""),
    "monitor": (Role.MONITOR, ""),
    "agent-n1": (Role.AGENT, "n1"),
    "agent-n2": (Role.AGENT, "n2"),
    "operator": (Role.OPERATOR, ""),
    "admin": (Role.ADMIN, ""),
    "viewer-jo": (Role.VIEWER, "jo"),
    "tenant-acme": (Role.TENANT, "acme"),
    "tenant-globex": (Role.TENANT, "globex"),
    "gateway": (Role.GATEWAY, ""),
    "auditor": (Role.AUDITOR, ""),
    "replayer": (Role.REPLAYER, ""),
}
SERVICES = "admission placer monitor"
READERS = f"{SERVICES} operator admin auditor"

PUBLISH = {
    # Wishes: a tenant its own, and nobody another's or the operator's.
    f"{P}.wish.acme.JobRequested": "admission operator admin gateway tenant-acme",
    f"{P}.wish.globex.JobRequested": "admission operator admin gateway tenant-globex",
    f"{P}.wish.acme.JobCancelRequested": "admission operator admin gateway tenant-acme",
    f"{P}.wish.acme.JobHoldRequested": "admission operator admin tenant-acme",
    f"{P}.wish._operator.JobCancelRequested": "admission operator admin",
    f"{P}.wish._operator.QueueUpsertRequested": "admission operator admin",
    f"{P}.wish._operator.NodeDrainRequested": "admission operator admin",
    f"{P}.wish._operator.KeyChangeRequested": "admission admin",
    f"{P}.ask._operator.KeyChangeRequested": "admin",
    f"{P}.query.nodes": "operator admin auditor viewer-jo",
    f"{P}.wish.acme.a.JobRequested": "admission operator admin",
    f"{P}.ask.acme.JobRequested": "operator admin gateway tenant-acme",
    f"{P}.ask.globex.JobRequested": "operator admin gateway tenant-globex",
    f"{P}.ask._operator.JobRequested": "operator admin",
    # Facts: each author its own, and no operator any.
    f"{P}.fact.admission.job.acme.train": "admission",
    f"{P}.fact.placer.run.n1.acme.train.0.1": "placer",
    f"{P}.fact.monitor.node.n1": "monitor",
    f"{P}.fact.agent-n1.node.n1": "agent-n1",
    f"{P}.fact.agent-n2.run.n2.acme.train.0.1": "agent-n2",
    f"{P}.lease.admission": "admission",
    f"{P}.lease.placer": "placer",
    f"{P}.lease.monitor": "monitor",
    f"{P}.lease.agent-n1": "agent-n1",
    f"{P}.lease.agent-n2": "agent-n2",
    # Samples, questions, dead letters.
    f"{P}.sample.n1.heartbeat": "agent-n1",
    f"{P}.sample.n2.heartbeat": "agent-n2",
    f"{P}.alive.placer": "placer",
    f"{P}.alive.monitor.a1b2": "monitor",
    f"{P}.query.sql": "operator admin auditor",
    f"{P}.query.schemas": "operator admin auditor tenant-acme tenant-globex viewer-jo",
    f"{P}.read.acme.facts": "operator admin tenant-acme",
    f"{P}.read.globex.facts": "operator admin tenant-globex",
    f"{P}.node.n1.logs": "operator admin",
    f"{P}.node.n1.logs.acme": "operator admin tenant-acme",
    f"{P}.node.n2.logs.globex": "operator admin tenant-globex",
    f"{P}.dlq.admission.wishes.1": "admission operator admin",
    f"{P}.dlq.monitor.wishes.1": "monitor operator admin",
    # The streams themselves.
    f"$JS.API.STREAM.INFO.{F}": f"{READERS} agent-n1 agent-n2 replayer viewer-jo",
    f"$JS.API.STREAM.INFO.{W}": f"{READERS} agent-n1 agent-n2 replayer viewer-jo",
    f"$JS.API.CONSUMER.CREATE.{F}": f"{READERS} agent-n1 agent-n2 replayer viewer-jo",
    f"$JS.API.CONSUMER.CREATE.{W}": f"{READERS} replayer viewer-jo",
    f"$JS.API.CONSUMER.CREATE.{W}.mine.{P}.wish.globex.JobRequested": f"{READERS} replayer viewer-jo",
    f"$JS.API.DIRECT.GET.{W}": f"{READERS} replayer viewer-jo",
    f"$JS.API.STREAM.MSG.GET.{F}": f"{READERS} agent-n1 agent-n2 replayer viewer-jo",
    f"$JS.API.STREAM.CREATE.{F}": f"{SERVICES} operator admin",
    "$JS.API.STREAM.CREATE.OTHER": "operator admin",
    f"$JS.API.STREAM.UPDATE.{F}": "operator admin",
    f"$JS.API.STREAM.DELETE.{F}": "operator admin",
    f"$JS.API.STREAM.PURGE.{W}": "operator admin",
    f"$JS.API.STREAM.MSG.DELETE.{F}": "operator admin",
    f"$JS.API.CONSUMER.LIST.{F}": "operator admin",
    f"$JS.API.CONSUMER.MSG.NEXT.{D}.any": READERS,
    "$JS.API.INFO": "operator admin",
    # Replies to others, the server's own subjects, another pool.
    "_INBOX_somebody.1": "",
    "$SYS.REQ.SERVER.PING": "",
    "apportion.v1.other.wish.acme.JobRequested": "",
    "apportion.v1.other.fact.placer.job.acme.train": "",
}
SUBSCRIBE = {
    ">": "",
    "_INBOX.>": "",
    "_INBOX_somebody.>": "",
    "$JS.API.>": "",
    f"{P}.>": "operator admin auditor",
    f"{P}.wish.>": "operator admin auditor viewer-jo",
    f"{P}.wish.globex.*": "operator admin auditor viewer-jo",
    f"{P}.fact.>": "operator admin auditor viewer-jo",
    f"{P}.fact.*.job.acme.*": "operator admin auditor viewer-jo",
    f"{P}.ask.>": "admission operator admin auditor",
    f"{P}.query.>": "placer monitor operator admin auditor",
    f"{P}.read.>": "monitor operator admin auditor",
    f"{P}.node.n1.>": "agent-n1 operator admin auditor",
    f"{P}.sample.>": "monitor operator admin auditor viewer-jo",
    f"{P}.lease.>": "operator admin auditor viewer-jo",
    f"{P}.alive.placer.*": "placer monitor operator admin auditor viewer-jo",
    f"{P}.alive.>": "monitor operator admin auditor viewer-jo",
}
REVOKED = ("anonymous", "stranger", "revoked")


@dataclass
class Secured:
    server: EmbeddedServer
    ring: KeyRing
    revoked_seed: Path


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    data_dir = tmp_path / "secured"
    ring = KeyRing(data_dir, POOL)
    ring.ensure([*PRINCIPALS.values(), (Role.TENANT, "left")])
    kept = data_dir / "kept.nk"
    kept.touch(mode=0o600)
    kept.write_bytes(ring.seed_path("tenant-left").read_bytes())
    ring.revoke("tenant-left")
    async with EmbeddedServer(data_dir, port=0, access=ring.access_path) as server:
        yield Secured(server, ring, kept)


async def refused(server: EmbeddedServer, seed: Path, *, publish: list[str], subscribe: list[str]) -> set[str]:
    """The subjects that the server refused to whoever has the key."""
    said: list[str] = []

    async def noticed(error: Exception) -> None:
        said.append(str(error))

    client = await nats.connect(server.url, error_cb=noticed, allow_reconnect=False, **options_of(seed))
    try:
        for subject in subscribe:
            await client.subscribe(subject, cb=_nothing)
        await client.flush()
        for subject in publish:
            # No reply subject: what a request would do is another matter than whether it may be sent.
            await client.publish(subject)
        await client.flush()
        # The server says its refusals by the way, not before the flush's answer: until no more come.
        heard = -1
        while heard != len(said):
            heard = len(said)
            await asyncio.sleep(0.1)
            await client.flush()
    finally:
        await client.close()
    return {text.split('"')[1] for text in said if "permissions violation" in text.lower()}


async def _nothing(_: object) -> None:
    """Whatever it hears."""


@pytest.mark.integration
async def test_each_principal_may_do_what_the_table_says_and_nothing_else(secured: Secured) -> None:
    subjects = {"publish": list(PUBLISH), "subscribe": list(SUBSCRIBE)}
    found = {name: await refused(secured.server, secured.ring.seed_path(name), **subjects) for name in PRINCIPALS}
    expected = {
        # The client library says what it hears in lower case.
        name: {subject.lower() for subject, who in (PUBLISH | SUBSCRIBE).items() if name not in who.split()}
        for name in PRINCIPALS
    }
    assert found == expected


@pytest.mark.parametrize("name", PRINCIPALS)
def test_what_we_compute_is_what_the_server_does(name: str) -> None:
    role, of = PRINCIPALS[name]
    granted = rights(POOL, Principal(role=role, of=of, public="UX"))
    assert {s for s in PUBLISH if may_publish(granted, s)} == {s for s, who in PUBLISH.items() if name in who.split()}
    assert {s for s in SUBSCRIBE if may_subscribe(granted, s)} == {
        s for s, who in SUBSCRIBE.items() if name in who.split()
    }


def test_there_are_enough_cells() -> None:
    """reliability: about 480."""
    assert (len(PRINCIPALS) + len(REVOKED)) * (len(PUBLISH) + len(SUBSCRIBE)) >= 480


@pytest.mark.integration
@pytest.mark.parametrize("who", REVOKED)
async def test_whom_the_bus_does_not_know_it_does_not_let_in(secured: Secured, tmp_path: Path, who: str) -> None:
    key: Path | None = None
    if who == "stranger":
        ring = KeyRing(tmp_path / "elsewhere", POOL)
        key = ring.new(Role.OPERATOR)
    elif who == "revoked":
        key = secured.revoked_seed
    with pytest.raises(BusRefused, match="a key that it knows") as caught:
        await Bus.connect(secured.server.url, pool=POOL, name="test", key=key, wait_s=2)
    assert caught.value.exit_code == 7


async def _until_closed(client: Client) -> None:
    async with asyncio.timeout(60):
        while client.is_connected:
            await asyncio.sleep(0.01)


@pytest.mark.integration
async def test_a_revoked_key_is_cut_off_and_a_rotated_one_goes_on(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path, POOL)
    ring.ensure([(Role.OPERATOR, ""), (Role.TENANT, "acme")])
    old = tmp_path / "old.nk"
    old.touch(mode=0o600)
    old.write_bytes(ring.seed_path("tenant-acme").read_bytes())
    async with EmbeddedServer(tmp_path, port=0, access=ring.access_path) as server:
        with_old = await nats.connect(server.url, allow_reconnect=False, error_cb=_nothing, **options_of(old))
        ring.rotate("tenant-acme")
        server.reload()
        with_new = await _connected(server, ring.seed_path("tenant-acme"))
        assert with_old.is_connected  # both are let in until the old one is retired
        assert ring.retire("tenant-acme") == 1
        server.reload()
        await _until_closed(with_old)
        await with_new.flush()
        assert ring.revoke("tenant-acme") == 1
        server.reload()
        await _until_closed(with_new)
        with pytest.raises(BusRefused):
            await Bus.connect(server.url, pool=POOL, name="test", key=old, wait_s=2)
        for client in (with_old, with_new):
            with contextlib.suppress(nats.errors.Error):
                await client.close()


async def _connected(server: EmbeddedServer, seed: Path) -> Client:
    async with asyncio.timeout(60):
        while True:
            client = Client()
            try:
                await client.connect(server.url, allow_reconnect=False, error_cb=_nothing, **options_of(seed))
            except (nats.errors.Error, OSError):
                await client.close()
                await asyncio.sleep(0.02)  # the server has not read the new list yet
            else:
                return client


@pytest.mark.integration
async def test_the_bus_works_with_the_rights_that_services_have(tmp_path: Path) -> None:
    """Streams are made and followed by those who shall, with nothing refused on the way."""
    from apportion.contracts.envelope import Stream

    ring = KeyRing(tmp_path, POOL)
    ring.ensure(PRINCIPALS.values())
    async with EmbeddedServer(tmp_path, port=0, access=ring.access_path) as server:
        for name in ("admission", "placer", "monitor", "agent-n1"):
            bus = await Bus.connect(server.url, pool=POOL, name=name, key=ring.seed_path(name))
            await bus.provision()
            reader = await bus.reader(Stream.FACTS, after=0)
            await asyncio.sleep(0.05)
            await reader.close()
            assert (await bus.position(Stream.FACTS)).last_seq == 0
            await bus.close()
            assert (name, bus.last_error) == (name, "")


# ------------------------------------------------------------------------------------------------------ files


def test_seeds_are_private_and_a_list_never_holds_one(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    ring = KeyRing(tmp_path, POOL)
    ring.ensure([(Role.OPERATOR, ""), (Role.AGENT, "n1")])
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert [path.name for path in files] == [
        "access.conf",
        "agent-n1.nk",
        "operator.nk",
        "principals.json",
        "unsaid.json",
    ]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert ring.folder.stat().st_mode & 0o777 == 0o700
    seeds = [path.read_text().strip() for path in files if path.suffix == ".nk"]
    assert all(seed.startswith("SU") and len(seed) == 58 for seed in seeds)
    for path in files:
        if path.suffix != ".nk":
            assert not any(seed in path.read_text() for seed in seeds)


def test_ensuring_again_changes_no_key(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path, POOL)
    ring.ensure([(Role.OPERATOR, "")])
    before = ring.seed_path("operator").read_bytes()
    ring.ensure([(Role.OPERATOR, ""), (Role.TENANT, "acme")])
    assert ring.seed_path("operator").read_bytes() == before
    ring.seed_path("tenant-acme").unlink()
    ring.ensure([(Role.TENANT, "acme")])  # a seed that is lost is replaced, and the lost one is let in no more
    assert [one.principal.name for one in ring.held()] == ["operator", "tenant-acme"]


def test_each_change_of_keys_is_said_once_with_who_and_why(tmp_path: Path) -> None:
    """Also one that was made while no bus ran: it stays noted until it was said."""
    ring = KeyRing(tmp_path, POOL)
    ring.ensure([(Role.OPERATOR, "")], by=By(actor="service:supervisor", reason="started"))
    ring.new(Role.VIEWER, "jo", by=By(actor="user:ann", reason="she joined"))
    ring.rotate("viewer-jo", by=By(actor="user:ann", reason="each quarter"))
    ring.retire("viewer-jo", by=By(actor="user:ann", reason="each quarter"))
    ring.revoke("viewer-jo", by=By(actor="user:bob", reason="she left"))
    ring.ensure([(Role.OPERATOR, "")])  # changes nothing, and has nothing to say
    assert [(one.change.value, one.role, one.of, one.actor, one.reason) for one in ring.unsaid()] == [
        ("Made", "operator", "", "service:supervisor", "started"),
        ("Made", "viewer", "jo", "user:ann", "she joined"),
        ("Rotated", "viewer", "jo", "user:ann", "each quarter"),
        ("Retired", "viewer", "jo", "user:ann", "each quarter"),
        ("Revoked", "viewer", "jo", "user:bob", "she left"),
    ]
    first, *others = ring.unsaid()
    message = first.message(POOL)
    assert message.headers["ce-actor"] == "service:supervisor"
    assert may_publish(rights(POOL, Principal(role=Role.ADMIN, public="UX")), message.subject)
    ring.said({first.id})
    assert ring.unsaid() == others


def test_a_seed_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path, POOL)
    path = ring.new(Role.OPERATOR)
    path.chmod(0o644)
    with pytest.raises(KeyUnsafe, match=r"mode 0644.*chmod 600"):
        options_of(path)
    path.chmod(0o600)
    path.write_text("SUnothing\n")
    with pytest.raises(KeyInvalid, match="expected the seed"):
        options_of(path)
    with pytest.raises(KeyInvalid, match="nothing that can be read"):
        options_of(tmp_path / "none.nk")


def test_what_can_not_be_is_refused(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path, POOL)
    ring.new(Role.OPERATOR)
    for role, of in (
        (Role.TENANT, ""),
        (Role.TENANT, "Acme"),
        (Role.AGENT, "a.b"),
        (Role.TENANT, "*"),
        (Role.OPERATOR, ""),
    ):
        with pytest.raises(PrincipalInvalid):
            ring.new(role, of)
    with pytest.raises(PrincipalInvalid, match="nobody could let anybody in"):
        ring.revoke("operator")
    with pytest.raises(PrincipalInvalid, match="apportion keys ls"):
        ring.rotate("tenant-none")
