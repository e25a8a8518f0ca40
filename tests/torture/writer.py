"""The log's writer is killed again and again while the bus is busy: not one row is lost, doubled or out of its place.

``python -m tests.torture.writer [--rounds 200] [--seed N]``. A real bus, a real monitor, a real kill -9 at any moment,
now and then of the bus itself. At the end the log is held against the bus, message by message, and verified.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import nats.errors
import structlog

from apportion.contracts import codec, subjects
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PLACER, PoolId
from apportion.contracts.testing import a_job_request, a_placement
from apportion.monitor import attest
from apportion.monitor.checkpoints import side_file
from apportion.monitor.log import log_path, messages_of
from apportion.monitor.signing import key_path, public_key_of, public_key_path
from apportion.runtime.embedded import EmbeddedServer
from apportion.runtime.stream import Bus

POOL: Final = PoolId("main")
PAUSE_S: Final = 0.02
BUS_EVERY: Final = 20
"""Each so many rounds the bus is killed, too."""
PATIENCE_S: Final = 600.0


class Torture:
    """One bus, one monitor at a time, and what was acknowledged."""

    def __init__(self, server: EmbeddedServer, bus: Bus, data_dir: Path, chance: random.Random) -> None:
        self.server = server
        self.bus = bus
        self.data_dir = data_dir
        self.chance = chance
        self.acknowledged = dict.fromkeys(Stream, 0)
        self.stop = asyncio.Event()
        self.kills = 0
        self.monitor: asyncio.subprocess.Process | None = None

    async def publish(self) -> None:
        """A dozen facts and a wish at a time, until told to stop; what no answer came to is asked again."""
        while not self.stop.is_set():
            first = self.acknowledged[Stream.FACTS]
            facts = [
                codec.encode_fact(POOL, PLACER, a_placement(f"acme/j{n}"), event_id=f"f{n}")
                for n in range(first, first + 12)
            ]
            number = self.acknowledged[Stream.WISHES]
            wish = codec.encode_wish(
                POOL, a_job_request(job_id=f"j{number}"), tenant="acme", event_id=f"w{number}", source="/torture"
            )
            with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
                for message in [*facts, wish]:
                    await self.bus.jetstream.publish(message.subject, message.body, headers=message.headers, timeout=5)
                self.acknowledged[Stream.FACTS] += len(facts)
                self.acknowledged[Stream.WISHES] += 1
            await asyncio.sleep(PAUSE_S)

    async def start(self) -> None:
        """A monitor, as an operator would run it."""
        with (self.data_dir.parent / "monitor.err").open("ab") as err:
            self.monitor = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "apportion.monitor", "--bus-url", self.server.url,
                "--data-dir", str(self.data_dir), "--log-batch-ms", "20", stdout=err, stderr=err,
            )  # fmt: skip

    def last_words(self) -> str:
        """The end of what the monitors said."""
        return (self.data_dir.parent / "monitor.err").read_text(errors="replace")[-4_000:]

    async def end(self, sig: signal.Signals) -> int:
        """Its exit code."""
        assert self.monitor is not None
        with contextlib.suppress(ProcessLookupError):
            self.monitor.send_signal(sig)
        return await self.monitor.wait()

    async def logged(self) -> dict[str, Any]:
        """How the log stands, once the monitor says so."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
                    reply = await self.bus.client.request(subjects.query(POOL, "status"), b"{}", timeout=2)
                    answer: dict[str, Any] = msgspec.json.decode(reply.data)
                    if "streams" in answer:
                        return answer
                await asyncio.sleep(0.02)

    async def round(self, number: int) -> None:
        """Let it write for a moment, and kill it in the middle of it."""
        before = (await self.logged())["streams"]["facts"]["log_seq"]
        async with asyncio.timeout(PATIENCE_S):
            while (await self.logged())["streams"]["facts"]["log_seq"] <= before:
                await asyncio.sleep(0.01)
        await asyncio.sleep(self.chance.random() * 0.25)
        if number % BUS_EVERY == BUS_EVERY - 1 and self.server.pid is not None:
            os.kill(self.server.pid, signal.SIGKILL)
        code = await self.end(signal.SIGKILL)
        assert code == -signal.SIGKILL, f"the monitor had ended by itself with {code}"
        self.kills += 1
        await self.start()

    async def check(self) -> dict[str, int]:
        """Stop in order, and hold log and bus against each other. Raises AssertionError."""
        self.stop.set()
        async with asyncio.timeout(PATIENCE_S):
            while any(one["behind"] for one in (await self.logged())["streams"].values()):
                await asyncio.sleep(0.05)
        # Under load it may not be done in the time that it has, and says so by its code: the log is whole either way.
        stopped_with = await self.end(signal.SIGTERM)
        path = log_path(self.data_dir, POOL)
        key = public_key_of(str(public_key_path(key_path(self.data_dir))))
        verdict = attest.verify(path, public_key=key, anchors=attest.anchors_in(side_file(path)))
        assert verdict.ok, verdict.first_bad
        rows = 0
        for stream in Stream:
            stored = list(messages_of(path, stream))
            position = await self.bus.position(stream)
            assert [one.seq for one in stored] == list(range(1, position.last_seq + 1)), stream
            assert len(stored) >= self.acknowledged[stream], "what was acknowledged is in the log"
            reader = await self.bus.reader(stream, after=0)
            at = 0
            async with asyncio.timeout(PATIENCE_S):
                while at < len(stored):
                    await reader.ready.wait()
                    for message in reader.take():
                        same = stored[at]
                        assert (message.seq, message.recorded_at, message.subject, message.headers, message.body) == (
                            same.seq, same.recorded_at, same.subject, same.headers, same.body,
                        ), f"{stream} {message.seq}"  # fmt: skip
                        at += 1
            await reader.close()
            rows += len(stored)
        return {
            "rows": rows,
            "acknowledged": sum(self.acknowledged.values()),
            "checkpoints": verdict.checkpoints,
            "stopped_with": stopped_with,
        }


async def tortured(rounds: int, seed: int) -> dict[str, int]:
    """Kills and rows, once everything held. Raises AssertionError."""
    with tempfile.TemporaryDirectory(prefix="apportion-torture-") as folder:
        async with EmbeddedServer(Path(folder) / "bus", port=0) as server:
            bus = await Bus.connect(server.url, pool=POOL, name="torture")
            await bus.provision()
            torture = Torture(server, bus, Path(folder) / "monitor", random.Random(seed))
            await torture.start()
            publishing = asyncio.create_task(torture.publish())
            try:
                for number in range(rounds):
                    await torture.round(number)
                return {"kills": torture.kills, "bus_kills": server.restarts, **await torture.check()}
            except (AssertionError, TimeoutError):
                sys.stderr.write(f"after {torture.kills} kills; the monitor's last words:\n{torture.last_words()}\n")
                raise
            finally:
                torture.stop.set()
                publishing.cancel()
                await torture.end(signal.SIGKILL)
                await bus.close()


def main() -> None:
    """Print the seed first, and one line of JSON once everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    print(f"the log's writer, {given.rounds} rounds from seed {given.seed}", flush=True)
    began = time.monotonic()
    found = asyncio.run(tortured(given.rounds, given.seed))
    print(json.dumps({**found, "lost": 0, "doubled": 0, "wall_s": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
