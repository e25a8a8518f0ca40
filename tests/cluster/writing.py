"""Writers that never stop, and what they were promised: each notes when each of its messages was acknowledged."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from apportion.contracts import codec
from apportion.contracts.envelope import Stream
from apportion.contracts.ids import PoolId
from apportion.contracts.testing import a_job_request
from apportion.runtime.stream import Bus, BusError

POOL: Final = PoolId("main")
PAUSE_S: Final = 0.005


@dataclass
class Writer:
    """One client that says one wish after the other, each again under the same id until it is known to be stored."""

    bus: Bus
    name: str
    acked: dict[str, int] = field(default_factory=dict)
    """Sequence by id, of what was acknowledged."""
    at: list[float] = field(default_factory=list)
    """When, by the monotonic clock."""

    @property
    def server(self) -> str:
        """Host and port of the server that it speaks to; empty while it looks for one."""
        url = self.bus.client.connected_url
        return "" if url is None else str(url.netloc)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.one()
            await asyncio.sleep(PAUSE_S)

    async def one(self) -> int:
        """The sequence of one more wish, however long that takes."""
        event_id = f"{self.name}-{len(self.acked)}"
        message = codec.encode_wish(
            POOL, a_job_request(job_id=event_id), tenant="acme", event_id=event_id, source="/cluster"
        )
        while True:
            with contextlib.suppress(BusError):
                self.acked[event_id] = (await self.bus.store(message)).seq
                self.at.append(time.monotonic())
                return self.acked[event_id]

    def gap_s(self, since: float) -> float:
        """The longest time between two acknowledgements from ``since`` on; to now where none came any more."""
        marks = [since, *(at for at in self.at if at >= since)]
        return max((later - earlier for earlier, later in itertools.pairwise(marks)), default=0.0)


@contextlib.asynccontextmanager
async def writers(urls: Sequence[str]) -> AsyncIterator[list[Writer]]:
    """One writer for each server, which goes to the others when its own is lost."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for number in range(len(urls)):
            bus = await Bus.connect(
                ",".join([*urls[number:], *urls[:number]]), pool=POOL, name=f"writer-{number}", allow_plain=True
            )
            stack.push_async_callback(bus.close)
            found.append(Writer(bus, f"w{number}"))
        tasks = [asyncio.create_task(writer.run()) for writer in found]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until_written(found: Sequence[Writer], more: int, *, wait_s: float = 60.0) -> None:
    """Returns once each has been acknowledged ``more`` messages more."""
    wanted = [len(writer.acked) + more for writer in found]
    async with asyncio.timeout(wait_s):
        while any(len(writer.acked) < want for writer, want in zip(found, wanted, strict=True)):
            await asyncio.sleep(0.02)


async def lost(bus: Bus, found: Sequence[Writer]) -> list[str]:
    """What was acknowledged and isn't in the stream at that sequence, or is there twice; empty where all is well."""
    last = (await bus.position(Stream.WISHES)).last_seq
    reader = await bus.reader(Stream.WISHES, after=0)
    stored: dict[int, str] = {}
    async with asyncio.timeout(120):
        while len(stored) < last:
            await reader.ready.wait()
            for raw in reader.take():
                stored[raw.seq] = (raw.headers or {}).get("ce-id", "")
    await reader.close()
    wrong = [
        f"{event_id} at {seq}" for writer in found for event_id, seq in writer.acked.items() if stored[seq] != event_id
    ]
    # What was on its way when its writer ended may be stored beyond what we looked for.
    if sorted(stored) != list(range(1, len(stored) + 1)):
        wrong.append("a gap in the sequence")
    if len(set(stored.values())) != len(stored):
        wrong.append("an id stored twice")
    return wrong
