"""Who used what, and what it costs: sums of the log's segments in a period, and their export."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_rows, say
from apportion.cli.wish_commands import ask_wish, wish_options

if TYPE_CHECKING:
    from apportion.cli.usage import Period

_KEYS: Final = "tenant, queue, model, mode, class, workload, pricing, job, node, device, day"


@cli.command()
@click.option("--by", "by", default="tenant", show_default=True, metavar="KEY,…", help=f"Sum by: {_KEYS}.")
@click.option("--from", "since", metavar="TIME", help="From this instant on. Default: the log's first event.")
@click.option("--to", "until", metavar="TIME", help="Up to this instant, excluded. Default: the log's last event.")
@click.option("--waste", is_flag=True, help="What was held and not used, the most first.")
@click.option(
    "--export", "export", type=click.Path(dir_okay=False), help="Write each segment: FILE.csv or FILE.parquet."
)
@click.option(
    "--columns",
    type=click.Choice(["own", "focus", "opencost"]),
    default="own",
    show_default=True,
    help="Whose column names the export has.",
)
@click.option(
    "--file", "file", type=click.Path(dir_okay=False, exists=True), help="This log file instead of the pool's."
)
@output_option
@pool_options
def usage(
    *,
    by: str,
    since: str | None,
    until: str | None,
    waste: bool,
    export: str | None,
    columns: str,
    file: str | None,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> None:
    """Who held how much for how long, what they had asked for and used of it, and what it costs.

    Figures are whole milli-GPU-ms and MiB-ms from the log; two periods that meet add up to the one that they make.
    """
    from apportion.cli import usage as metered
    from apportion.cli.log_commands import log_to_read
    from apportion.monitor.metering import KEYS

    keys = tuple(part.strip() for part in by.split(",") if part.strip())
    unknown = [key for key in keys if key not in KEYS]
    if unknown or not keys or len(set(keys)) != len(keys):
        raise CommandFailed(f"--by: expected different ones of {', '.join(KEYS)}; found {by!r}", code=Exit.USAGE)
    if export is not None and Path(export).suffix not in {".csv", ".parquet"}:
        raise CommandFailed(f"--export: expected FILE.csv or FILE.parquet, found {export!r}", code=Exit.USAGE)
    place = place_of(data_dir, pool, bus_url)
    period = metered.read(Path(file) if file else log_to_read(place), since, until)
    if export is not None:
        count = metered.export(period, Path(export), columns, pool=place.pool)
        say(f"{count} segments in {export}")
    _print(period, keys, is_waste=waste, output=output)


def _print(period: "Period", keys: tuple[str, ...], *, is_waste: bool, output: str) -> None:
    from apportion.cli import usage as metered

    rows = metered.rows(period, keys)
    if is_waste:
        rows.sort(key=lambda row: (-row["idle_milli_ms"], -row["over_asked_mib_ms"], *(row[key] for key in keys)))
    if output in {"table", "wide"}:
        shown = [metered.readable(row) for row in [*rows, {keys[0]: "(total)", **metered.total(period)}]]
        columns = metered.WASTE_COLUMNS if is_waste else metered.COLUMNS
        print_rows(shown, kind="usage", output=output, columns=(*keys, *columns), wide=metered.WIDE_COLUMNS)
        say(metered.period_text(period))
        return
    extra: dict[str, Any] = {
        "from_at": period.begin,
        "to_at": period.end,
        "total": metered.total(period),
        "path": str(period.path),
    }
    print_rows(rows, kind="usage", output=output, columns=keys, name=keys[0], extra=extra)


@cli.group(invoke_without_command=True)
@click.pass_context
def rates(context: click.Context) -> None:
    """What use is charged. Without a command: every card that was ever set."""
    if context.invoked_subcommand is None:
        context.invoke(rates_ls)


@rates.command("ls")
@output_option
@pool_options
def rates_ls(
    *, output: str = "table", data_dir: str | None = None, pool: str | None = None, bus_url: str | None = None
) -> None:
    """Every rate of every card, the newest card last."""
    from apportion.cli.question import ask_sql

    found = run(ask_sql(place_of(data_dir, pool, bus_url), "SELECT * FROM v_rates ORDER BY effective, ordinal"))
    columns = (
        "effective",
        "currency",
        "pricing",
        "model",
        "queues",
        "micro_per_gpu_hour",
        "micro_per_gib_hour",
        "actor",
    )
    print_rows(found.rows, kind="rates", output=output, columns=columns, wide=("reason",), name="ordinal")


@rates.command("set")
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@wish_options(is_reason_required=True)
def rates_set(*, file: Path, **options: Any) -> int:
    """Charge by the card in FILE from now on, or from its effective_at. Operators only.

    \b
    currency = "EUR"
    [[rates]]
    pricing = "on_demand"              # or spot, or reserved, which names its queues
    model = "h100-80"                  # left out: any model
    micro_per_gpu_hour = 2_500_000     # 2.50 for a whole device for an hour
    micro_per_gib_hour = 0
    """  # noqa: D301  \b is click's mark for a block that is not refilled
    import tomllib

    from apportion.contracts.events import RateCardChangeRequested

    try:
        card = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeError) as err:
        raise CommandFailed(f"{file}: expected TOML, found {err}", code=Exit.USAGE) from err
    if isinstance(card.get("effective_at"), datetime):
        card["effective_at"] = card["effective_at"].isoformat()
    return ask_wish(RateCardChangeRequested, options, **card)
