"""Commands about what becomes of the log's older rows: sealed segments, legal holds, erased payloads."""

import time
from typing import TYPE_CHECKING, Any

import click

from apportion.cli.app import place_of, pool_options, run
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
        from apportion.contracts.events import LogSealRequested

        return ask_wish(LogSealRequested, options, before=_timestamp(before, "--before"))
    from apportion.monitor.log import EventLog
    from apportion.monitor.segments import seal
    from apportion.monitor.signing import key_path, signer_at

    path = log_of(place)
    if not path.exists():
        raise CommandFailed(f"expected an event log at {path}, found none", code=Exit.NOT_FOUND)
    with EventLog.open(path) as log:
        made = seal(log, min(before_at, now), signer_at(key_path(place.data_dir)).sign)
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


@log_group.command("hold")
@click.option("--tenant", help="Of this tenant alone.")
@click.option("--job", help="Of this job alone: <tenant>/<name>.")
@click.option("--since", metavar="TIME", help="Recorded from then on.")
@click.option("--until", metavar="TIME", help="Recorded before then.")
@wish_options(is_reason_required=True)
def log_hold(*, tenant: str | None, job: str | None, since: str | None, until: str | None, **options: Any) -> int:
    """Keep what the log says: nothing of it is erased until the hold is released. Operators only.

    What is given holds together; nothing given: everything.
    """
    from apportion.contracts.events import LegalHoldRequested

    at = {"since": _timestamp(since, "--since"), "until": _timestamp(until, "--until")}
    return ask_wish(LegalHoldRequested, options, tenant=tenant, job_id=job, **at)


@log_group.command("release")
@click.argument("hold_id")
@wish_options(is_reason_required=True)
def log_release(*, hold_id: str, **options: Any) -> int:
    """End a hold; `log holds` lists them. Erasures that it kept waiting are carried out then. Operators only."""
    from apportion.contracts.events import LegalHoldReleaseRequested

    return ask_wish(LegalHoldReleaseRequested, options, hold_id=hold_id)


@log_group.command("holds")
@click.option("--all", "is_all", is_flag=True, help="Also those that were released.")
@output_option
@pool_options
def log_holds(*, is_all: bool, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """Legal holds in force, oldest first: of what, by whom and why."""
    from apportion.cli.question import ask_sql

    states = "('holds', 'released')" if is_all else "('holds')"
    found = run(
        ask_sql(
            place_of(data_dir, pool, bus_url),
            "SELECT about AS hold_id, tenant, job_id, since, until, state, recorded, actor, reason FROM v_keeping "  # noqa: S608  constants
            f"WHERE what = 'hold' AND state IN {states} ORDER BY ordinal",
        )
    )
    columns = ("hold_id", "tenant", "job_id", "since", "until", "state", "actor", "reason")
    print_rows(found.rows, kind="holds", output=output, columns=columns, wide=("recorded",), name="hold_id")


@log_group.command("erase")
@click.argument("job")
@wish_options(is_reason_required=True)
def log_erase(*, job: str, **options: Any) -> int:
    """Have the log forget what JOB, which has ended, said: command, environment and all the rest. Operators only.

    Erased are the payloads that repeat its request (JobRequested, JobAdmitted, RunPlaced); their digests stay, so that
    the chain holds, and envelopes (whose job, when, which node). What was derived from them is gone, too: `usage` has
    nothing of its runs any more. Each row is a wish and a fact of its own. Nobody can bring it back; try --dry-run.
    """
    from apportion.cli.question import ask_sql, job_named, literal
    from apportion.contracts.events import PayloadEraseRequested

    place = place_of(options["data_dir"], options["pool"], options["bus_url"])

    async def rows() -> list[dict[str, Any]]:
        job_id = await job_named(place, job)
        found = await ask_sql(
            place,
            "SELECT stream, stream_seq AS seq, job_id, recorded_at FROM events "  # noqa: S608  quoted
            f"WHERE job_id = {literal(job_id)} AND split_part(type, '.', 1) IN "
            "('JobRequested', 'JobAdmitted', 'RunPlaced') AND payload IS NOT NULL ORDER BY ordinal",
        )
        return found.rows

    told = run(rows())
    if not told:
        raise CommandFailed(f"expected payloads of {job} that can be erased, found none", code=Exit.NOT_FOUND)
    worst = Exit.OK
    for row in told:
        worst = Exit(max(worst, ask_wish(PayloadEraseRequested, options, **row)))
    return worst


def _timestamp(text: str | None, option: str) -> str | None:
    from datetime import UTC, datetime

    from apportion.cli.moments import instant

    if text is None:
        return None
    at = instant(text, first_at=0, last_at=time.time_ns(), option=option)
    return datetime.fromtimestamp(at // 1_000_000_000, tz=UTC).isoformat()
