"""Runs a service that dies by SIGKILL at a named moment: ``crashing.py PLAN -m MODULE ARGUMENTS…``.

PLAN is a file that may hold the name of a moment; the process that comes to it removes the file and dies. The product
knows nothing of this: the moments are put around the functions of the runtime from outside.
"""

import asyncio
import os
import runpy
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from apportion.contracts.codec import Message
from apportion.runtime import reactor, stream

MOMENTS: Final = (
    "before_decode",
    "after_decode",
    "before_publish",
    "unacknowledged",
    "mid_batch",
    "committed",
    "snapshot",
    "reconnect",
    "replay",
    "claim",
)
SNAPSHOT_S: Final = 0.3
"""So that snapshots are written while somebody waits for one."""

_plan = Path()


def come_to(moment: str) -> None:
    """Die here, if that was planned."""
    if _is_planned(moment):
        die()


def _is_planned(moment: str) -> bool:
    try:
        planned = _plan.read_text()
    except OSError:
        return False
    return planned == moment


def die() -> NoReturn:
    """As the kernel's out-of-memory killer would end us: nothing is flushed, nothing is said."""
    _plan.unlink(missing_ok=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody outlives SIGKILL")


def plant() -> None:
    """Put the moments around the runtime's functions."""
    _plant_reading()
    _plant_publishing()
    _plant_keeping()


def _plant_reading() -> None:
    entry_of = reactor.Reactor._entry_of

    def decoding(self: Any, raw: Any) -> Any:
        if not self.is_in_place:
            come_to("replay")
        come_to("before_decode")
        entry = entry_of(self, raw)
        come_to("after_decode")
        return entry

    reactor.Reactor._entry_of = decoding  # type: ignore[method-assign]
    restart = stream._Delivery.restart

    def restarting(self: Any) -> None:
        come_to("reconnect")
        restart(self)

    stream._Delivery.restart = restarting  # type: ignore[method-assign]


def _plant_publishing() -> None:
    publish = stream.Bus.publish_fenced

    async def publishing(self: Any, lease: Any, messages: Sequence[Message]) -> int:
        come_to("before_publish")
        stored = await publish(self, lease, messages)
        come_to("committed")
        return stored

    stream.Bus.publish_fenced = publishing  # type: ignore[method-assign]
    try_batch = stream.Bus._try_batch

    async def trying(self: Any, fence: dict[str, str], messages: Sequence[Message]) -> Any:
        if len(messages) > 1 and _is_planned("mid_batch"):
            # All but the last, which would commit them: the server drops what it has.
            async with asyncio.timeout(2):
                await _without(self, try_batch(self, fence, messages))
        return await try_batch(self, fence, messages)

    stream.Bus._try_batch = trying  # type: ignore[method-assign]
    ask = stream.Bus._ask

    async def asking(self: Any, subject: str, body: bytes, headers: dict[str, str]) -> Any:
        if ".lease." in subject:
            come_to("claim")
        elif ".fact." in subject and _is_planned("unacknowledged"):
            await self.client.publish(subject, body, reply=self.client.new_inbox(), headers=headers)
            await self.client.flush(timeout=2)
            die()
        return await ask(self, subject, body, headers)

    stream.Bus._ask = asking  # type: ignore[method-assign]


async def _without(bus: Any, batch: Awaitable[Any]) -> None:
    """Send a batch up to its last message, which is what asks for an answer, and die there."""

    async def dying(*_: Any, **__: Any) -> None:
        await bus.client.flush(timeout=2)
        die()

    bus._ask = dying
    await batch


def _plant_keeping() -> None:
    reactor.SNAPSHOT_S = SNAPSHOT_S  # type: ignore[misc]
    replace: Callable[..., Any] = Path.replace

    def replacing(self: Path, target: Any) -> Any:
        if self.suffix == ".tmp" and Path(target).suffix == ".msgpack":
            come_to("snapshot")
        return replace(self, target)

    Path.replace = replacing  # type: ignore[method-assign]


def main() -> None:
    """Plant, and be the service."""
    global _plan
    plan, flag, module = sys.argv[1:4]
    assert flag == "-m", "crashing.py PLAN -m MODULE …"
    _plan = Path(plan)
    sys.argv = [module, *sys.argv[4:]]
    plant()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
