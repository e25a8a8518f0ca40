"""The isolation tests: ask for one and wait for its verdicts, and list what the log has."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_object, print_rows, printable

if TYPE_CHECKING:
    from apportion.cli.places import Place

_TESTS: Final = 3
_COLUMNS: Final = ("recorded", "node_id", "model", "mode", "test", "check_name", "check_verdict", "driver_version")
_WIDE: Final = ("simulated", "device_uuid", "figures", "control", "detail", "test_id")


@cli.group()
def isolation() -> None:
    """What a neighbour can and can't do to another, tried on a device and stated with figures."""


@isolation.command("test")
@click.option("--node", help="Where. Default: the first node that is registered.")
@click.option("--device", metavar="UUID", help="Which device. Default: one that offers the mode, best without runs.")
@click.option("--mode", type=click.Choice(["exclusive", "mig", "mps", "timeslice"]), help="Default: mig, else mps.")
@click.option("--reason", default="", help="Why; kept in the log.")
@click.option("--dry-run", is_flag=True, help="Ask what would follow, and change nothing.")
@click.option("--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds to wait.")
@output_option
@pool_options
def isolation_test(*, output: str, timeout: int, **options: Any) -> int:
    """Try slices of a device against each other: memory, compute and crashes, each with a control without enforcement.

    The device takes no new run meanwhile, and the test begins once its runs have ended. Ends with 0 where every test
    passed, or its mode promises nothing; 1 where one failed; 3 where one proved nothing, or took too long.
    """
    place = place_of(options.pop("data_dir"), options.pop("pool"), options.pop("bus_url"))
    return run(_test(place, options, output=output, timeout_s=timeout))


@isolation.command("ls")
@click.option("--all", "everything", is_flag=True, help="Older verdicts, too.")
@output_option
@pool_options
def isolation_ls(*, everything: bool, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """The newest checks of each device, mode and test."""
    from apportion.cli.question import ask_sql

    where = "" if everything else "WHERE is_latest"
    found = run(
        ask_sql(place_of(data_dir, pool, bus_url), f"SELECT * FROM v_isolation {where} ORDER BY ordinal, check_name")  # noqa: S608  no input in it
    )
    print_rows(
        found.rows,
        kind="isolation",
        output=output,
        columns=_COLUMNS,
        wide=_WIDE,
        name="test_id",
        extra={"freshness": found.freshness},
    )


async def _test(place: "Place", options: dict[str, Any], *, output: str, timeout_s: float) -> int:
    import msgspec

    from apportion.cli.client import ANSWER_S, SOURCE, actor, bus_of, entries, fresh_id, publish
    from apportion.cli.wish_commands import answer_text, code_of_answer
    from apportion.contracts.codec import Message, encode_wish
    from apportion.contracts.envelope import Stream
    from apportion.contracts.events import IsolationTestRequested, IsolationTestStarted, IsolationVerdict
    from apportion.contracts.ids import OPERATOR, PoolId

    wish = msgspec.convert(
        {
            "node_id": options["node"] or await _first_node(place),
            "device_uuid": options["device"],
            "mode": options["mode"],
            "reason": options["reason"],
            "dry_run": options["dry_run"],
        },
        IsolationTestRequested,
    )
    like = encode_wish(PoolId(place.pool), wish, tenant=OPERATOR, event_id=fresh_id(), source=SOURCE)
    message = Message(subject=like.subject, headers={**like.headers, "ce-actor": actor()}, body=like.body)
    verdicts: list[dict[str, Any]] = []
    async with bus_of(place) as bus:
        position = (await bus.position(Stream.FACTS)).last_seq
        seq = await publish(bus, message)
        started: IsolationTestStarted | None = None
        until = time.monotonic() + timeout_s
        answer_by = time.monotonic() + ANSWER_S
        async for _, entry in entries(bus, Stream.FACTS, after=position, until=until):
            event = entry.event
            if getattr(event, "answers", None) == seq:
                if not isinstance(event, IsolationTestStarted):
                    answer = msgspec.to_builtins(event)
                    print_object(answer, kind="answer", output=output, text=partial(answer_text, answer))
                    return code_of_answer(answer)
                started = event
            elif started is None and time.monotonic() > answer_by:
                break
            elif isinstance(event, IsolationVerdict) and started is not None and event.test_id == started.test_id:
                verdicts.append(msgspec.to_builtins(event))
                if len(verdicts) == _TESTS:
                    content = {"test_id": started.test_id, "verdicts": verdicts}
                    print_object(content, kind="isolation", output=output, text=lambda: _text(verdicts))
                    return code_of(verdicts)
    raise CommandFailed(
        f"the wish is stored (number {seq}), and its test has no verdict after {timeout_s:g} s",
        code=Exit.NOT_PLACED,
        hint="It begins once no run holds the device: `apportion isolation ls` has its verdict then.",
    )


async def _first_node(place: "Place") -> str:
    from apportion.cli.question import ask_sql

    found = await ask_sql(place, "SELECT min(node_id) AS node_id FROM v_event WHERE kind = 'NodeRegistered'")
    node = found.rows[0]["node_id"] if found.rows else None
    if node is None:
        raise CommandFailed("no node has registered", code=Exit.NOT_FOUND, hint="`apportion nodes` lists them.")
    return str(node)


def _text(verdicts: Sequence[dict[str, Any]]) -> str:
    """The verdicts for people: a line a test, and under it one a check with what was measured."""
    lines = []
    for verdict in verdicts:
        what = "simulated " if verdict.get("simulated") else ""
        where = f"{what}{verdict.get('model', '')}, driver {verdict.get('driver_version', '')}"
        lines.append(f"{verdict['test']} in mode {verdict['mode']}: {verdict['verdict']} ({where})")
        for check in verdict["checks"]:
            figures = ", ".join(f"{name} {value}" for name, value in check.get("figures", {}).items())
            lines.append(f"  {check['name']}: {check['verdict']}: {figures or check.get('detail', '')}")
            if control := check.get("control"):
                lines.append(f"    without enforcement: {', '.join(f'{n} {v}' for n, v in control.items())}")
    return "\n".join(printable(line) for line in lines)


def code_of(verdicts: Sequence[dict[str, Any]]) -> int:
    """The command's code for what the tests came to.

    >>> int(code_of([{"verdict": "passed"}, {"verdict": "reported"}])), int(code_of([{"verdict": "inconclusive"}]))
    (0, 3)
    """
    found = {verdict["verdict"] for verdict in verdicts}
    if "failed" in found:
        return Exit.FAILURE
    return Exit.NOT_PLACED if "inconclusive" in found else Exit.OK
