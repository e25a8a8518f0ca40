"""A bus that comes back with less than it had: a whole pool stops, people are told, and the log mends it."""

import asyncio
import json
import os
import shutil
import signal
import textwrap
from pathlib import Path
from typing import Any, Final

from apportion.cli.places import log_file
from apportion.cli.queues import DEFAULT
from apportion.cli.restoring import restore
from apportion.cli.supervisor import AUTHORS, NodePlan, PoolPlan, Supervisor
from apportion.contracts import codec
from apportion.contracts import events as ev
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PoolId
from apportion.runtime.embedded import BINARY_ENV, find_binary
from apportion.runtime.stream import Bus

POOL: Final = PoolId("main")
WAIT_S: Final = 90.0
QUIET_S: Final = 3.0


class Ears:
    """A webhook that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            self.told.append(json.loads(await reader.readexactly(length)))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        finally:
            writer.close()


def a_plan(data_dir: Path, *, config_file: Path | None = None) -> PoolPlan:
    """One node, one queue."""
    return PoolPlan(
        pool=POOL,
        data_dir=data_dir,
        bus_port=0,
        nodes=(NodePlan(name="node-1", devices=2, profile="h200"),),
        queues=DEFAULT,
        config_file=config_file,
    )


async def ask_for(bus: Bus, numbers: range) -> None:
    """Short jobs."""
    for number in numbers:
        request = ev.JobRequested(
            queue="main",
            job_id=f"job-{number}",
            workload=ev.Workload(command=("/bin/true",)),
            resources=ev.Resources(gpu_milli=250, gpu_memory_mib=1024),
        )
        await bus.publish_wish(
            codec.encode_wish(POOL, request, tenant="default", event_id=f"w-{number}", source="/cluster")
        )


async def until_ended(bus: Bus, count: int) -> None:
    """Returns once so many jobs have succeeded, and the log has everything."""
    reader = await bus.reader(Stream.FACTS, after=0)
    ended = 0
    async with asyncio.timeout(WAIT_S):
        async for batch in reader.batches():
            for raw in batch:
                entry = codec.decode_fact(raw.subject, raw.headers, raw.body, seq=raw.seq, recorded_at=raw.recorded_at)
                ended += isinstance(entry.event, ev.JobSucceeded)
            if ended >= count:
                break
        while True:
            reply = await bus.client.request(f"apportion.v1.{POOL}.query.status", b"{}", timeout=5)
            if all(one["behind"] == 0 for one in json.loads(reply.data)["streams"].values()):
                break
            await asyncio.sleep(0.1)
    await reader.close()


async def measure(folder: Path) -> dict[str, Any]:
    """What stopped, who was told, and what a pool made of the log has."""
    data_dir, older = folder / "pool", folder / "older"
    store = data_dir / "bus" / "jetstream"
    script = folder / "nats-server"
    script.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            if [ -d {older} ]; then rm -rf {store} && mv {older} {store}; fi
            exec {find_binary(dict(os.environ))} "$@"
            """)
    )
    script.chmod(0o755)
    ears = Ears()
    hook = await asyncio.start_server(ears.serve, "127.0.0.1", 0)
    config = folder / "pool.toml"
    config.write_text(f'[monitor]\nwebhook_url = "http://127.0.0.1:{hook.sockets[0].getsockname()[1]}/"\n')
    was = os.environ.get(BINARY_ENV)
    os.environ[BINARY_ENV] = str(script)
    supervisor = Supervisor(a_plan(data_dir, config_file=config))
    found: dict[str, Any] = {}
    try:
        await supervisor.start()
        bus = await Bus.connect(
            supervisor.server.url, pool=POOL, name="shorter", key=supervisor.key_of("operator"), wait_s=30
        )
        try:
            await ask_for(bus, range(4))
            await until_ended(bus, 4)
            shutil.copytree(store, older)
            await ask_for(bus, range(4, 8))
            await until_ended(bus, 8)
            before = (await bus.position(Stream.FACTS)).last_seq
            pid = supervisor.server.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                while not supervisor.stopped_because or any(
                    supervisor.services[name].pid is not None for name in AUTHORS
                ):
                    await asyncio.sleep(0.1)
        finally:
            await bus.close()
        bus = await Bus.connect(
            supervisor.server.url, pool=POOL, name="after", key=supervisor.key_of("operator"), wait_s=30
        )
        try:
            after = (await bus.position(Stream.FACTS)).last_seq
            await asyncio.sleep(QUIET_S)
            found["written_afterwards"] = (await bus.position(Stream.FACTS)).last_seq - after
        finally:
            await bus.close()
        found |= {
            "facts_before": before,
            "facts_after": after,
            "stopped_because": supervisor.stopped_because[:160],
            "alerts": [told["rule"] for told in ears.told if told["rule"] == "log-disagrees"],
            "agent_lives": supervisor.services["node-agent-node-1"].pid is not None,
        }
    finally:
        await supervisor.stop()
        hook.close()
        if was is None:
            os.environ.pop(BINARY_ENV)
        else:
            os.environ[BINARY_ENV] = was
    found["restored"] = await _restored(folder, data_dir)
    found["holds"] = bool(
        after < before
        and found["written_afterwards"] == 0
        and found["alerts"]
        and found["restored"]["facts"] >= before
        and found["restored"]["jobs_again"]
    )
    return found


async def _restored(folder: Path, data_dir: Path) -> dict[str, Any]:
    """A pool made anew from the log: it has everything, and works."""
    anew = folder / "anew"
    made = await asyncio.to_thread(restore, log_file(data_dir, POOL), anew, POOL)
    supervisor = Supervisor(a_plan(anew))
    try:
        await supervisor.start()
        bus = await Bus.connect(
            supervisor.server.url, pool=POOL, name="restored", key=supervisor.key_of("operator"), wait_s=30
        )
        try:
            await ask_for(bus, range(8, 10))
            await until_ended(bus, 10)
        finally:
            await bus.close()
    finally:
        await supervisor.stop()
    return {"facts": made["streams"]["facts"], "jobs_again": 2}
