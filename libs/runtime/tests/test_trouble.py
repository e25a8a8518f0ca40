"""What a server's store can do to us: it comes back with less than it had, and it is full."""

import asyncio
import os
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.codec import Message
from apportion.contracts.envelope import Entry, Stream
from apportion.contracts.ids import PLACER, PoolId
from apportion.contracts.testing import a_job_request, a_placement
from apportion.runtime.embedded import BINARY_ENV, EmbeddedServer, find_binary
from apportion.runtime.reactor import Reactor, SnapshotFile
from apportion.runtime.stream import Bus, BusShorter

pytestmark = pytest.mark.integration
POOL = PoolId("main")
TMPFS_MIB = 24
BALLAST = 10 * 1024 * 1024


class Folded(msgspec.Struct):
    facts: int = 0


class Last:
    """A core that knows how far it has read, and decides nothing."""

    POLICY = "last@1"

    def initial(self) -> Folded:
        return Folded()

    def evolve(self, state: Folded, entry: Entry) -> Folded:
        return Folded(facts=entry.seq)

    def decide(self, state: Folded, now: int) -> list[ev.Fact]:
        return []

    def wake_at(self, state: Folded, now: int) -> int | None:
        return None

    def snapshot(self, state: Folded) -> bytes:
        return msgspec.msgpack.encode(state)

    def restore(self, data: bytes) -> Folded:
        return msgspec.msgpack.decode(data, type=Folded)

    def position(self, state: Folded) -> tuple[int, int]:
        return state.facts, 0


def a_server_that_swaps(folder: Path) -> tuple[dict[str, str], Path]:
    """An environment whose nats-server takes the store named ``older`` for its own as it starts, where there is one."""
    script = folder / "nats-server"
    store, older = folder / "data" / "bus" / "jetstream", folder / "older"
    script.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            if [ -d {older} ]; then rm -rf {store} && mv {older} {store}; fi
            exec {find_binary(dict(os.environ))} "$@"
            """)
    )
    script.chmod(0o755)
    return {**os.environ, BINARY_ENV: str(script)}, older


def placements(label: str, count: int) -> list[Message]:
    return [
        codec.encode_fact(POOL, PLACER, a_placement(job=f"acme/{label}-{i}"), event_id=f"{label}.{i}")
        for i in range(count)
    ]


async def test_a_bus_that_comes_back_with_less_than_it_had_is_not_written_to(tmp_path: Path) -> None:
    """Sequences would be given out twice, and whoever read the first would never see the second."""
    environ, older = a_server_that_swaps(tmp_path)
    snapshots = SnapshotFile(tmp_path / "snapshot")
    async with EmbeddedServer(tmp_path / "data", port=0, environ=environ) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="test")
        try:
            await bus.provision()
            claim = ev.LeaseClaimed(author=PLACER, session="s1", core="test@1")
            lease = await bus.claim(PLACER, codec.encode_fact(POOL, PLACER, claim, event_id="claim"))
            await bus.publish_fenced(lease, placements("kept", 3))
            # fsync before each acknowledgement: what lies there now is what was acknowledged.
            shutil.copytree(tmp_path / "data" / "bus" / "jetstream", older)
            reader = await bus.reader(Stream.FACTS, after=0)
            last = await bus.publish_fenced(lease, placements("lost", 4))
            read = 0
            async with asyncio.timeout(60):
                while read < last:
                    await reader.ready.wait()
                    read += len(reader.take())
            created = (await bus.position(Stream.FACTS)).created, (await bus.position(Stream.WISHES)).created
            snapshots.store(msgspec.msgpack.encode(Folded(facts=last)), policy=Last.POLICY, streams=" ".join(created))
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(BusShorter, match=f"up to {last}, and end at {last - 4}"):
                async with asyncio.timeout(60):
                    await bus.publish_fenced(lease, placements("after", 2))
            with pytest.raises(BusShorter):
                reader.take()

            # Who was away meanwhile learns it from the snapshot, and claims nothing.
            other = await Bus.connect(server.url, pool=POOL, name="other")
            try:
                reactor = Reactor(core=Last(), author=PLACER, bus=other, snapshots=snapshots)
                with pytest.raises(BusShorter, match="facts were read up to"):
                    async with asyncio.timeout(60):
                        await reactor.run(asyncio.Event())
                assert (await other.position(Stream.FACTS)).last_seq == last - 4
            finally:
                await other.close()
        finally:
            await bus.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB, of which 10 can be freed."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be made here: {mounted.stderr.decode().strip()}")
    try:
        (place / "ballast").write_bytes(b"\0" * BALLAST)
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def a_large_wish(number: int) -> Message:
    message = codec.encode_wish(
        POOL, a_job_request(job_id=f"j{number}"), tenant="acme", event_id=f"w{number}", source="/test"
    )
    return msgspec.structs.replace(message, body=message.body + b" " * 500_000)


async def test_a_full_disk_loses_nothing_and_the_bus_goes_on_once_there_is_room(small_disk: Path) -> None:
    """A stream that could not write stays like that until its server starts again, and says so at /healthz alone."""
    async with EmbeddedServer(small_disk / "data", port=0) as server:
        bus = await Bus.connect(server.url, pool=POOL, name="test")
        try:
            await bus.provision()
            acked = 0
            while await bus._ask(*_parts(a_large_wish(acked))) is not None:
                acked += 1
            assert acked > 3
            assert "write error" in await server.health()
            assert await bus._ask(*_parts(a_large_wish(acked))) is None, "acknowledged without being stored"
            assert server.restarts == 0, "no use while there is no room"
            (small_disk / "ballast").unlink()
            async with asyncio.timeout(60):
                while server.restarts < 1:
                    await asyncio.sleep(0.05)
            # The one that was never acknowledged may be sent again, and all that were are there.
            assert (await bus.store(a_large_wish(acked))).seq == acked + 1
            assert (await bus.position(Stream.WISHES)).messages == acked + 1
            assert not await server.health()
        finally:
            await bus.close()


def _parts(message: Message) -> tuple[str, bytes, dict[str, str]]:
    return message.subject, message.body, message.headers
