"""Commands about what becomes of the log's older rows: sealed segments."""

import time
from typing import TYPE_CHECKING, Any

import click

from apportion.cli.app import place_of, pool_options
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.log_commands import log_group, log_of
from apportion.cli.output import output_option, print_rows, say
from apportion.cli.wish_commands import ask_wish, wish_options

if TYPE_CHECKING:
    from pathlib import Path

    from apportion.monitor.manifest import Segment

_COLUMNS = ("day", "rows", "first_ordinal", "last_ordinal", "file")


@log_group.command("seal")
@click.option("--before", metavar="TIME", help="Days that ended by then. Default: every day that has ended.")
@wish_options(is_reason_required=True)
def log_seal(*, before: str | None, **options: Any) -> int:
    """Make past days of the log segments: signed Parquet files beside it, a day each; operators only.

    Nothing that the log says changes: every question, `log verify` and `replay` go on over both. A running pool's
    monitor does it once the rows are signed; the log of a pool that is stopped is sealed at once.
    """
    from apportion.cli.moments import instant

    place = place_of(options["data_dir"], options["pool"], options["bus_url"])
    now = time.time_ns()
    before_at = now if before is None else instant(before, first_at=0, last_at=now, option="--before")
    if place.note is not None or options["dry_run"] or options["bus_url"] is not None:
        from datetime import UTC, datetime

        from apportion.contracts.events import LogSealRequested

        asked = None if before is None else datetime.fromtimestamp(before_at // 1_000_000_000, tz=UTC).isoformat()
        return ask_wish(LogSealRequested, options, before=asked)
    from apportion.monitor.log import EventLog
    from apportion.monitor.segments import seal
    from apportion.monitor.signing import key_path, signer_at

    path = log_of(place)
    if not path.exists():
        raise CommandFailed(f"expected an event log at {path}, found none", code=Exit.NOT_FOUND)
    with EventLog.open(path) as log:
        made = seal(log, min(before_at, now), signer_at(key_path(place.data_dir)).sign_manifest)
    print_rows(_shown(made), kind="segments", output=options["output"], columns=_COLUMNS, name="file")
    if options["output"] in {"table", "wide"}:
        say(f"{len(made)} days sealed" if made else "nothing to seal: no whole day before the newest row is signed")
    return Exit.OK


@log_group.command("segments")
@output_option
@pool_options
def log_segments(*, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """Sealed segments of the log, oldest first."""
    from apportion.monitor import manifest
    from apportion.monitor.segments import read

    folder = manifest.sealed_folder(log_of(place_of(data_dir, pool, bus_url)))
    made = read(folder).segments if folder.exists() else ()
    rows = _shown(made, folder)
    print_rows(rows, kind="segments", output=output, columns=(*_COLUMNS, "bytes"), wide=("sha256",), name="file")


def _shown(made: "tuple[Segment, ...]", folder: "Path | None" = None) -> list[dict[str, Any]]:
    import msgspec

    rows = []
    for one in made:
        row = {**msgspec.to_builtins(one), "rows": one.last_ordinal - one.first_ordinal + 1}
        if folder is not None:
            file = folder / one.file
            row["bytes"] = file.stat().st_size if file.exists() else None
        rows.append(row)
    return rows
