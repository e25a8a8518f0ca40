"""Nodes that are kept: for a tenant from one instant to another, and for the job that has been blocked for longest."""

from typing import Any, Final

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_rows, say
from apportion.cli.wish_commands import ask_wish, wish_options

_RESERVED: Final = "SELECT * FROM v_reservations ORDER BY start_at NULLS FIRST, reservation"
_COLUMNS: Final = ("reservation", "tenant", "job_id", "start", "end", "wanted", "nodes")
_WIDE: Final = ("late", "devices", "models", "actor", "reason")


@cli.group()
def reservations() -> None:
    """Nodes that are kept for a tenant for a while, and for the job that has been blocked for longest."""


@reservations.command("ls")
@output_option
@pool_options
def list_reservations(output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """What is kept, for whom and from when to when; ``late`` are nodes where something may run on beyond its start."""
    from apportion.cli.question import ask_sql

    found = run(ask_sql(place_of(data_dir, pool, bus_url), _RESERVED))
    rows = [{**row, "start": _instant(row["start_at"]), "end": _instant(row["end_at"])} for row in found.rows]
    print_rows(rows, kind="reservations", output=output, columns=_COLUMNS, wide=_WIDE, name="reservation")
    if not rows and output in {"table", "wide"}:
        say("Nothing is reserved: `apportion reservations add NAME --tenant TENANT --from … --to …` reserves nodes.")


def _instant(at: int | None) -> str:
    from apportion.cli.past import at_text

    return at_text(at) if at else ""


@reservations.command("add")
@click.argument("name")
@click.option("--tenant", required=True, help="For whose jobs they are kept.")
@click.option("--from", "start", required=True, help="An instant in RFC 3339, such as 2026-09-01T12:00:00Z.")
@click.option("--to", "end", required=True, help="The same.")
@click.option("--nodes", type=click.IntRange(1, 1024), default=1, show_default=True, help="How many nodes.")
@click.option("--gpu", type=click.IntRange(0, 1024), default=0, help="Devices that each has, at least.")
@click.option("--model", "models", multiple=True, help="Of these models; may be given again.")
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="A label that each has; may be given again."
)
@wish_options(is_reason_required=True)
def add_reservation(*, name: str, tenant: str, labels: tuple[str, ...], **options: Any) -> int:
    """Ask that nodes are kept for TENANT under NAME; which ones, `apportion reservations ls` tells. Operators only."""
    from apportion.contracts.events import ReservationRequested

    pairs = [label.partition("=") for label in labels]
    if any(not key or not separator for key, separator, _ in pairs):
        raise CommandFailed(f"--label: expected KEY=VALUE, found {' '.join(labels)}", code=Exit.USAGE)
    fields = {field: options.pop(field) for field in ("start", "end", "nodes", "gpu", "models")}
    required = {key: value for key, _, value in pairs}
    return ask_wish(ReservationRequested, options, reservation=name, for_tenant=tenant, required=required, **fields)


@reservations.command("cancel")
@click.argument("name")
@wish_options(is_reason_required=False)
def cancel_reservation(*, name: str, **options: Any) -> int:
    """Ask that nothing is kept under NAME any more. Operators only."""
    from apportion.contracts.events import ReservationCancelRequested

    return ask_wish(ReservationCancelRequested, options, reservation=name)
