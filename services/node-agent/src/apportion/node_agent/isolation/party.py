"""A process of an isolation test, and what it is told and tells."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

_PROGRAM: Final = Path(__file__).with_name("subject.py")
GROUP_VARIABLE: Final = "APPORTION_TEST_CGROUP"
"""The group that a party joins before it touches the device; a run is born in it."""
_ANSWER_S_MAX: Final = 60.0
_END_S_MAX: Final = 5.0


class PartyRefused(Exception):
    """The driver gave the process no device: ``code`` is CUDA's word."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Party:
    """One process on a device; ``start`` it, and ``end`` it whatever happened."""

    def __init__(self, process: asyncio.subprocess.Process, greeting: list[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.is_mps_client = greeting[0] == "mps"
        self.sms = int(greeting[2])
        self.context_mib = int(greeting[3])

    @classmethod
    async def start(cls, env: Mapping[str, str]) -> Self:
        """A process with this environment; raises PartyRefused where it gets no device."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_PROGRAM)),
            env=dict(env),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        words = await _line(process)
        if words[:1] != ["ok"]:
            await process.wait()
            raise PartyRefused(words[0] if words else "it ended without a word")
        return cls(process, words[1:])

    async def say(self, *words: object) -> list[str]:
        """Tell it something; its answer's words. Nothing where it has ended."""
        self.tell(*words)
        return await _line(self._process)

    def tell(self, *words: object) -> None:
        """Tell it something, and don't wait for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())

    async def number(self, *words: object) -> int | None:
        """The number in its answer; None for a refusal."""
        answer = await self.say(*words)
        return int(answer[1]) if answer[:1] == ["ok"] and len(answer) > 1 else None

    async def kernels(self, bound: str, sms: int, us: int, count: int) -> list[int]:
        """Microseconds of each kernel by the device's clock; fewer than asked for where it failed."""
        answer = await self.say("kernels", bound, sms, us, count)
        return [int(word) for word in answer[1:]] if answer[:1] == ["ok"] else []

    def kill(self) -> None:
        """At once, with whatever it has in flight."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def ended(self) -> int:
        """Its exit code, once it has ended by itself; negative for a signal."""
        return await asyncio.wait_for(self._process.wait(), _ANSWER_S_MAX)

    async def end(self) -> int:
        """Ask it to end, and make it where it doesn't."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return await asyncio.wait_for(self._process.wait(), _END_S_MAX)
        except TimeoutError:
            self.kill()
            return await self._process.wait()


async def _line(process: asyncio.subprocess.Process) -> list[str]:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), _ANSWER_S_MAX)).decode().split()
