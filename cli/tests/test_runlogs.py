"""What a person reads of a job's output, whoever has it."""

import base64
from typing import Any

from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.runlogs import Printer, Source, drain
from apportion.contracts.ids import NodeId, RunId

RUN, OTHER = RunId("acme/a/0/1"), RunId("acme/a/1/1")
NODE = NodeId("node-1")


def a_piece(data: bytes, *, offset: int, is_live: bool = True, is_cut: bool = False) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    return {"data": text, "generation": 0, "offset": offset, "is_live": is_live, "is_cut": is_cut}


async def test_a_run_is_read_to_its_end_and_no_further() -> None:
    """An empty piece of a live run is no end."""
    answers = [a_piece(b"one\n", offset=4), a_piece(b"", offset=4), a_piece(b"two\n", offset=8, is_live=False)]
    answers.append(a_piece(b"", offset=8, is_live=False))
    asked = []

    async def ask(node: NodeId, question: dict[str, Any]) -> dict[str, Any]:
        asked.append((node, question["run"], question["offset"]))
        return answers.pop(0)

    written: list[bytes] = []
    printer = Printer(written.append, stream="stdout", names=False)
    source = Source(run=RUN, node=NODE)
    assert await drain(source, ask, printer, stream="stdout")
    assert not source.is_over
    assert await drain(source, ask, printer, stream="stdout")
    assert source.is_over
    assert b"".join(written) == b"one\ntwo\n"
    assert asked == [(NODE, RUN, 0), (NODE, RUN, 4), (NODE, RUN, 4), (NODE, RUN, 8)]


async def test_a_node_that_is_away_may_come_back_and_what_is_gone_will_not() -> None:
    source = Source(run=RUN, node=NODE)
    printer = Printer(lambda _: None, stream="stdout", names=False)

    async def nobody(_node: NodeId, _question: dict[str, Any]) -> dict[str, Any]:
        raise CommandFailed("no answer", code=Exit.BUS_UNREACHABLE)

    async def gone(_node: NodeId, _question: dict[str, Any]) -> dict[str, Any]:
        raise CommandFailed("not kept", code=Exit.NOT_FOUND)

    assert not await drain(source, nobody, printer, stream="stdout")
    assert (source.is_over, source.problem) == (False, "no answer")
    assert not await drain(source, gone, printer, stream="stdout")
    assert (source.is_over, source.problem) == (True, "not kept")


def test_runs_are_told_apart_and_gaps_are_said() -> None:
    written: list[bytes] = []
    printer = Printer(written.append, stream="stdout", names=True)
    printer.put(RUN, b"half a line", is_cut=False)
    printer.put(OTHER, b"b\n", is_cut=True)
    printer.put(OTHER, b"", is_cut=False)
    printer.put(RUN, b"rest\n", is_cut=False)
    assert b"".join(written).decode() == (
        "==> acme/a/0/1 stdout <==\nhalf a line\n==> acme/a/1/1 stdout <==\n... older output is not kept ...\nb\n"
        "==> acme/a/0/1 stdout <==\nrest\n"
    )
