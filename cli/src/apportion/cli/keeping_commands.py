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

    Nothing that the log says changes: every question, `log verify` and `replay` go on over both. The monitor does it
    once the rows are signed, and the order is a fact in the log; so nobody seals a pool that is stopped.
    `apportion log retention set --seal-daily` has it done each day.
    """
    from apportion.contracts.events import LogSealRequested

    place = place_of(options["data_dir"], options["pool"], options["bus_url"])
    if place.note is None and options["bus_url"] is None:
        raise CommandFailed(
            f"expected a running pool, whose log has who ordered what; found none in {place.data_dir}",
            code=Exit.USAGE,
            hint="Start it (apportion up) and ask again, or name its bus: --bus-url. A backup needs no sealing: "
            "apportion log export.",
        )
    return ask_wish(LogSealRequested, options, before=_timestamp(before, "--before"))


@log_group.group("retention", invoke_without_command=True)
@click.pass_context
def log_retention(context: click.Context) -> None:
    """How long the log keeps what, by itself. Without a command: what was said of it, the newest last."""
    if context.invoked_subcommand is None:
        context.invoke(log_retention_ls)


@log_retention.command("ls")
@output_option
@pool_options
def log_retention_ls(
    *, output: str = "table", data_dir: str | None = None, pool: str | None = None, bus_url: str | None = None
) -> None:
    """What was said of how long the log keeps what, the newest last: that one is in force."""
    from apportion.cli.question import ask_sql

    found = run(
        ask_sql(
            place_of(data_dir, pool, bus_url),
            "SELECT coalesce(CAST(body -> '$.payload_days' AS BIGINT), 0) AS payload_days, "
            "coalesce(CAST(body -> '$.seal_daily' AS BOOLEAN), false) AS seal_daily, recorded, actor, "
            "body ->> '$.reason' AS reason FROM v_event WHERE kind = 'LogRetentionChanged' ORDER BY ordinal",
        )
    )
    columns = ("payload_days", "seal_daily", "recorded", "actor", "reason")
    print_rows(found.rows, kind="retention", output=output, columns=columns, name="recorded")
    if not found.rows and output in {"table", "wide"}:
        say("nobody said anything: payloads are kept for ever, and days are sealed when somebody asks")


@log_retention.command("set")
@click.option(
    "--payload-days",
    type=click.IntRange(0, 36_500),
    default=0,
    help="Keep what a job said so many days after its end. Default: 0, for ever.",
)
@click.option("--seal-daily", is_flag=True, help="Seal each day once it has ended. Default: only when asked.")
@wish_options(is_reason_required=True)
def log_retention_set(*, payload_days: int, seal_daily: bool, **options: Any) -> int:
    """Have the monitor seal days and forget what jobs said, each midnight (UTC), from now on. Operators only.

    Each time is a fact with your name and reason. What is forgotten is what `log erase` erases, of every job that ended
    so long ago or was refused; a legal hold keeps what it covers. Nobody can bring it back; try --dry-run.
    """
    from apportion.contracts.events import LogRetentionChangeRequested

    return ask_wish(LogRetentionChangeRequested, options, payload_days=payload_days, seal_daily=seal_daily)


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
            f"SELECT stream, stream_seq AS seq, {literal(job_id)} AS job_id, recorded_at FROM events "  # noqa: S608  quoted
            f"WHERE payload IS NOT NULL AND ((job_id = {literal(job_id)} AND split_part(type, '.', 1) IN "
            "('JobRequested', 'JobAdmitted', 'RunPlaced')) OR (stream = 'wishes' AND job_id IS NULL AND stream_seq IN "
            f"(SELECT answers FROM events WHERE job_id = {literal(job_id)} "
            "AND split_part(type, '.', 1) = 'JobAdmitted'))) ORDER BY ordinal",
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
