"""Who used what, and what it costs: sums of the log's segments in a period, and their export."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from apportion.cli.app import cli, place_of, pool_options
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_rows, say

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
