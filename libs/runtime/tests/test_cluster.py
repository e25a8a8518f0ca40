"""Three real servers that are one bus: the loss of one costs nothing that was acknowledged; strangers don't join."""

import asyncio
import os
import signal
import stat
from pathlib import Path

import pytest

from apportion.contracts import codec
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PoolId
from apportion.contracts.testing import a_job_request
from apportion.runtime.access import Role
from apportion.runtime.cluster import Cluster, OtherBusInDirectory, check_single
from apportion.runtime.keys import KeyRing
from apportion.runtime.stream import Bus, BusRefused

pytestmark = pytest.mark.integration
POOL = PoolId("main")


async def wish(bus: Bus, number: int) -> int:
    event_id = f"w{number}"
    return await bus.publish_wish(
        codec.encode_wish(POOL, a_job_request(job_id=event_id), tenant="acme", event_id=event_id, source="/test")
    )


async def until_led(bus: Bus) -> str:
    """The server that leads the wishes; once somebody does."""
    async with asyncio.timeout(60):
        while True:
            info = await bus.jetstream.stream_info(bus.stream_name(Stream.WISHES))
            if info.cluster is not None and info.cluster.leader:
                return str(info.cluster.leader)
            await asyncio.sleep(0.05)


async def answer_to_a_stranger(port: int) -> bytes:
    """What a server says to a route that doesn't know the secret, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await reader.readline()
        writer.write(
            b'CONNECT {"verbose":false,"pedantic":false,"name":"stranger","server_name":"stranger"}\r\nPING\r\n'
        )
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


async def test_a_bus_of_three_loses_nothing_with_its_leader_and_lets_no_stranger_in(tmp_path: Path) -> None:
    """Each message is on two disks before it is acknowledged, and clients find the servers that are left.

    How long nobody can write, and the other ways to lose a server, are `make cluster`'s.
    """
    ring = KeyRing(tmp_path, POOL)
    ring.ensure([(Role.OPERATOR, "")])
    async with Cluster(tmp_path, port=0, access=ring.access_path) as cluster:
        with pytest.raises(BusRefused):
            await Bus.connect(cluster.url, pool=POOL, name="stranger", wait_s=30)
        note = tmp_path / "cluster" / "cluster.json"
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
        assert b"Authorization" in await answer_to_a_stranger(cluster.route_ports[0])

        bus = await Bus.connect(cluster.url, pool=POOL, name="test", wait_s=30, key=ring.seed_path(str(Role.OPERATOR)))
        try:
            await bus.provision(replicas=cluster.replicas)
            before = [await wish(bus, number) for number in range(20)]
            lost = cluster.member(await until_led(bus))
            assert lost.pid is not None
            os.kill(lost.pid, signal.SIGKILL)
            after = [await wish(bus, number) for number in range(20, 25)]
            assert before + after == list(range(1, 26))
            assert (await bus.position(Stream.WISHES)).messages == 25
            async with asyncio.timeout(60):
                while cluster.restarts < 1 or await cluster.health():
                    await asyncio.sleep(0.05)
        finally:
            await bus.close()
    with pytest.raises(OtherBusInDirectory, match="--cluster 3"):
        check_single(tmp_path)
    with pytest.raises(OtherBusInDirectory, match="--cluster 3"):
        await Cluster(tmp_path, size=1).start()


async def test_a_single_servers_directory_is_not_taken_for_a_clusters(tmp_path: Path) -> None:
    """Its streams would be left behind, and the log would be ahead of an empty bus."""
    (tmp_path / "bus" / "jetstream").mkdir(parents=True)
    with pytest.raises(OtherBusInDirectory, match="without --cluster"):
        await Cluster(tmp_path).start()
    check_single(tmp_path)
