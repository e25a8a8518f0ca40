"""Starts agents fast: a process that has imported everything, and forks one whenever it is told to.

A round of torture is a start and a kill; most of a start would otherwise be imports. The agent that is forked is a
process like any other, with its own loop, bus connection and lock.
"""

import os
import sys
from typing import Final, Self

_STARTED: Final = b"started "


class Zygote:
    """The process that forks agents; made before any loop or thread is."""

    def __init__(self, log: str) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours_in)
            os.close(ours_out)
            _serve(theirs_in, theirs_out, log)
            os._exit(0)
        os.close(theirs_in)
        os.close(theirs_out)
        self._pid = pid
        self._in = os.fdopen(ours_in, "rb")
        self._out = os.fdopen(ours_out, "wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it; agents that still live are told by nobody."""
        self._out.close()
        self._in.close()
        os.waitpid(self._pid, 0)

    def start(self, arguments: list[str]) -> int:
        """A new agent's pid."""
        self._out.write(("start " + "\x1f".join(arguments) + "\n").encode())
        return int(self._in.readline().removeprefix(_STARTED))

    def reap(self, pid: int) -> int:
        """The exit status of an agent that has ended or is about to."""
        self._out.write(f"reap {pid}\n".encode())
        return int(self._in.readline())


def _serve(commands: int, answers: int, log: str) -> None:
    from apportion.node_agent.__main__ import main

    with os.fdopen(commands, "rb") as lines:
        for line in lines:
            word, _, rest = line.decode().rstrip("\n").partition(" ")
            if word == "reap":
                _, status = os.waitpid(int(rest), 0)
                os.write(answers, f"{status}\n".encode())
                continue
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                code = main(rest.split("\x1f"))
                sys.stdout.flush()
                os._exit(code)
            os.write(answers, _STARTED + f"{pid}\n".encode())
