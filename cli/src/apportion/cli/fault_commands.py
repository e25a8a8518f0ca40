"""Breaking things on purpose: what is broken now, one thing more, or all of it mended."""

from typing import Any

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.durations import Duration
from apportion.cli.exits import Exit
from apportion.cli.output import output_option, print_rows, say
from apportion.cli.wish_commands import ask_wish, wish_options


@cli.group()
def fault() -> None:
    """Break things on purpose, in a pool that was started for it (`apportion up --faults`).

    Each fault has an end, is a fact with an actor and a reason, and is mended also when whoever broke it dies.
    """


@fault.command()
@click.argument("kind")
@click.option("--target", default="", help="A service (placer), a node (node-1) or a device (node-1/0).")
@click.option("--for", "for_s", type=Duration(), default="30s", show_default=True, help="How long it lasts.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="What is drawn is drawn from it.")
@click.option("--xid", type=click.IntRange(1, 1000), help="Of device-xid: which.")
@click.option("--allow-real", is_flag=True, help="Also where devices are not simulated.")
@wish_options(is_reason_required=True)
def inject(*, kind: str, target: str, for_s: int, seed: int, xid: int | None, allow_real: bool, **options: Any) -> int:
    """Break something of KIND; `fault kinds` lists them."""
    from apportion.contracts import events as ev

    return ask_wish(
        ev.FaultInjectionRequested,
        options,
        kind=kind,
        target=target,
        for_s=for_s,
        seed=seed,
        xid=xid,
        allow_real=allow_real,
    )


@fault.command()
@output_option
def kinds(*, output: str) -> None:
    """What may be broken."""
    from apportion.contracts.causes import FaultKind

    rows = [{"kind": kind.value, "target": _TARGETS[kind.value.partition("-")[0]]} for kind in FaultKind]
    print_rows(rows, kind="fault_kinds", output=output, columns=("kind", "target"), name="kind")


_TARGETS = {
    "service": "a service",
    "node": "a node",
    "device": "<node>/<index>",
    "bus": "",
    "placer": "",
    "disk": "",
    "message": "a service or a node",
    "clock": "a service or a node",
}


@fault.command(name="ls")
@output_option
@pool_options
def ls(*, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """What is broken on purpose now."""
    import time

    found = _asked(data_dir, pool, bus_url)
    now = time.time_ns()
    rows = [
        {**one, "left_s": max(0, (one["until_at"] - now) // 1_000_000_000), "target": one.get("target", "")}
        for one in found["faults"]
    ]
    print_rows(
        rows,
        kind="faults",
        output=output,
        columns=("fault_id", "kind", "target", "left_s", "actor", "reason"),
        wide=("seed", "for_s"),
        name="fault_id",
        extra={"allowed": found["allowed"]},
    )
    if not rows and output in {"table", "wide"}:
        say("Nothing is broken on purpose." if found["allowed"] else "Faults are off in this pool.")


@fault.command()
@click.argument("fault_id", metavar="FAULT", required=False)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@wish_options(is_reason_required=False)
def clear(*, fault_id: str | None, everything: bool, **options: Any) -> int:
    """Mend FAULT before its time."""
    from apportion.contracts import events as ev

    if everything == (fault_id is not None):
        raise click.UsageError("name one fault, or --all")
    options = {**options, "reason": options["reason"] or "cleared by hand"}
    ids = [fault_id] if fault_id is not None else [one["fault_id"] for one in _asked_with(options)["faults"]]
    code: int = Exit.OK
    for one in ids:
        code = max(code, ask_wish(ev.FaultClearRequested, options, fault_id=one))
    return code


def _asked_with(options: dict[str, Any]) -> dict[str, Any]:
    return _asked(options["data_dir"], options["pool"], options["bus_url"])


def _asked(data_dir: str | None, pool: str | None, bus_url: str | None) -> dict[str, Any]:
    from apportion.cli.client import ask, bus_of

    place = place_of(data_dir, pool, bus_url)

    async def asked() -> dict[str, Any]:
        async with bus_of(place) as bus:
            return await ask(bus, "faults", {})

    return run(asked())
