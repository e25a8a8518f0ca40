"""What a tenant's key reads: its own facts by asking, and nothing of anybody else's."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from apportion.client import Client, NotLetIn
from apportion.contracts import codec, subjects
from apportion.contracts import events as ev
from apportion.contracts.ids import ADMISSION, JobId, PoolId, TenantId
from apportion.contracts.testing import a_job
from apportion.monitor.reading import Reading
from apportion.runtime.access import Role
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.keys import KeyRing
from apportion.runtime.stream import Bus

pytestmark = pytest.mark.integration

POOL = PoolId("main")


@dataclass
class Secured:
    server: EmbeddedServer
    ring: KeyRing
    monitor: Bus
    admission: Bus

    async def state(self, event: ev.Fact, event_id: str) -> None:
        message = codec.encode_fact(POOL, ADMISSION, event, event_id=event_id)
        await self.admission.jetstream.publish(message.subject, message.body, headers=message.headers)

    async def client(self, tenant: str) -> Client:
        key = self.ring.seed_path(f"tenant-{tenant}")
        return await Client.connect(self.server.url, tenant=tenant, key_file=key)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    ring = KeyRing(tmp_path, POOL)
    ring.ensure([
        (Role.MONITOR, ""), (Role.ADMISSION, ""), (Role.OPERATOR, ""), (Role.TENANT, "acme"), (Role.TENANT, "globex"),
    ])  # fmt: skip
    async with EmbeddedServer(tmp_path, port=0, access=ring.access_path) as server:
        buses = {
            name: await Bus.connect(server.url, pool=POOL, name=name, key=ring.seed_path(name))
            for name in ("monitor", "admission")
        }
        await buses["monitor"].provision()
        reading = Reading(buses["monitor"])
        await reading.start()
        yield Secured(server, ring, buses["monitor"], buses["admission"])
        reading.close()
        for bus in buses.values():
            assert bus.last_error == ""
            await bus.close()


async def test_a_tenant_follows_its_job_to_the_end_and_sees_no_other(secured: Secured) -> None:
    for tenant in (TenantId("acme"), TenantId("globex")):
        await secured.state(a_job("train", tenant=tenant), f"admitted-{tenant}")
    async with await secured.client("acme") as client:
        assert [job.job_id for job in await client.jobs()] == ["acme/train"]

        async def ends() -> None:
            await asyncio.sleep(0.1)
            await secured.state(
                ev.JobCancelled(job_id=JobId("globex/train"), actor="tenant:globex", caused_by=""), "end-globex"
            )
            await secured.state(
                ev.JobCancelled(job_id=JobId("acme/train"), actor="tenant:acme", caused_by=""), "end-acme"
            )

        ending = asyncio.create_task(ends())
        said = [entry.event async for entry in client.watch("train")]
        await ending
        assert [type(event).__name__ for event in said] == ["JobAdmitted", "JobCancelled"]
        assert {event.job_id for event in said if isinstance(event, ev.JobAdmitted | ev.JobCancelled)} == {"acme/train"}
        with pytest.raises(NotLetIn, match="about tenant acme alone"):
            async for _ in client.watch("globex/train2"):
                pass


@pytest.mark.parametrize(
    "pattern",
    [
        "apportion.v1.main.fact.>",
        "apportion.v1.main.fact.*.job.globex.*",
        "apportion.v1.main.fact.*.job.*.*",
        "apportion.v1.main.fact.*.run.*.*.*.*.*",
        "apportion.v1.main.fact.*.wish.*",
        "apportion.v1.main.fact.*.node.n1",
        "apportion.v1.main.lease.placer",
        "apportion.v1.other.fact.*.job.acme.*",
        "apportion.v1.main.wish.acme.*",
    ],
)
async def test_others_facts_are_refused(secured: Secured, pattern: str) -> None:
    async with await secured.client("acme") as client:
        subject = subjects.read_facts(POOL, TenantId("acme"))
        reply = await client._connection.request(subject, json.dumps({"filters": [pattern]}).encode(), timeout=60)
    assert json.loads(reply.data)["error"]["code"] == "NotPermitted"


@pytest.mark.parametrize("body", [b"", b"{}", b"[", b'{"filters": []}', b'{"filters": ["a"], "after": -1}', b"\xff"])
async def test_a_bad_question_gets_an_answer(secured: Secured, body: bytes) -> None:
    async with await secured.client("acme") as client:
        reply = await client._connection.request(subjects.read_facts(POOL, TenantId("acme")), body, timeout=60)
    assert json.loads(reply.data)["error"]["code"] == "FieldInvalid"


async def test_nobody_asks_in_anothers_name(secured: Secured) -> None:
    async with await secured.client("acme") as client:
        question = json.dumps({"filters": list(subjects.facts_of_tenant(POOL, TenantId("globex")))}).encode()
        with pytest.raises(TimeoutError):
            await client._connection.request(subjects.read_facts(POOL, TenantId("globex")), question, timeout=0.3)


async def test_who_publishes_in_anothers_name_is_told_so_and_not_left_to_wait(secured: Secured) -> None:
    """What the bus refuses only ever times out: the client says what it was."""
    key = secured.ring.seed_path("tenant-acme")
    async with await Client.connect(secured.server.url, tenant="globex", key_file=key) as client:
        with pytest.raises(NotLetIn, match=r"may publish to \S*wish\.globex\.JobRequested.*nothing was stored"):
            await client.submit({"queue": "main"}, wait="stored", timeout_s=60)


async def test_without_a_known_key_nobody_is_let_in(secured: Secured, tmp_path: Path) -> None:
    with pytest.raises(NotLetIn, match="found none"):
        await Client.connect(secured.server.url, tenant="acme")
    stranger = KeyRing(tmp_path / "elsewhere", POOL).new(Role.TENANT, "acme")
    with pytest.raises(NotLetIn, match="doesn't know"):
        await Client.connect(secured.server.url, tenant="acme", key_file=stranger)
