"""Commands about the event log: ask it, check its chain, decide everything again."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_object, print_rows, say

if TYPE_CHECKING:
    from apportion.cli.places import Place


@cli.command()
@click.argument("statement")
@click.option("--limit", type=click.IntRange(1, 50_000), default=1_000, show_default=True, help="Most rows to print.")
@output_option
@pool_options
def sql(
    *, statement: str, limit: int, output: str, data_dir: str | None, pool: str | None, bus_url: str | None
) -> None:
    """Ask the event log one SELECT, while the pool runs or after; it can't write.

    How fresh the answer is comes on stderr, and in JSON with it.

    \b
    apportion sql "SELECT kind, count(*) FROM v_event GROUP BY ALL"
    Tables and views (docs/audit.md): events, v_event, v_job, v_run, v_job_timeline, v_pending_now, v_decisions,
    v_stops, v_double_slice, v_wish_answers, v_queries, v_preemptions, v_waits, v_queue_share, v_health,
    v_changes, v_orphans, v_reconciliation. A running pool records who asked what, before it answers.
    """  # noqa: D301  \b is click's mark for a block that is not refilled
    from apportion.cli.question import ask_sql

    found = run(ask_sql(place_of(data_dir, pool, bus_url), statement, limit=limit))
    print_rows(
        found.rows,
        kind="rows",
        output=output,
        columns=found.columns,
        extra={"columns": list(found.columns), "truncated": found.truncated, "freshness": found.freshness},
    )
    if output in {"table", "wide"}:
        say(freshness_text(found.freshness) + (f"; the first {limit} rows (--limit)" if found.truncated else ""))


def freshness_text(freshness: dict[str, Any]) -> str:
    """How fresh an answer is, in one line."""
    as_of = freshness.get("as_of")
    if as_of is None:
        return f"({freshness['source']})"
    return f"(the log up to row {as_of['ordinal']}, {as_of['age_ms']} ms ago)"


@cli.group("log")
def log_group() -> None:
    """The event log itself."""


@log_group.command("verify")
@click.option(
    "--file", "file", type=click.Path(dir_okay=False, exists=True), help="This log file instead of the pool's."
)
@output_option
@pool_options
def log_verify(file: str | None, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> int:
    """Recompute every hash of the log. Ends with 9, naming the first bad sequence, where it is not what was written."""
    import msgspec

    from apportion.monitor.damage import verify

    path = Path(file) if file else _log_to_read(place_of(data_dir, pool, bus_url))
    verdict = verify(path)
    content = {"path": str(path), **msgspec.to_builtins(verdict)}

    def text() -> str:
        if verdict.first_bad is None:
            return f"ok: {verdict.rows} rows, no gap, chain whole, head {verdict.head_hash[:16]} ({path})"
        bad = verdict.first_bad
        return (
            f"BAD: {bad.stream} sequence {bad.stream_seq} (row {bad.ordinal}): {bad.what}; "
            f"{verdict.rows} rows before it are good ({path})"
        )

    print_object(content, kind="verdict", output=output, text=text)
    return Exit.OK if verdict.ok else Exit.INTEGRITY


@cli.command()
@click.option("--verify", "verify_it", is_flag=True, help="Recompute every decision and compare.")
@click.option(
    "--file", "file", type=click.Path(dir_okay=False, exists=True), help="This log file instead of the pool's."
)
@output_option
@pool_options
def replay(
    *, verify_it: bool, file: str | None, output: str, data_dir: str | None, pool: str | None, bus_url: str | None
) -> int:
    """Decide everything again from the log file alone, no bus needed.

    Ends with 9 where a decision comes out otherwise.
    """
    from apportion.cli.replaying import replay_all, replay_lines

    if not verify_it:
        raise CommandFailed("expected --verify, found nothing to do", code=Exit.USAGE, hint="apportion replay --verify")
    path = Path(file) if file else _log_to_read(place_of(data_dir, pool, bus_url))
    report = replay_all(path)
    print_object(report, kind="replay", output=output, text=lambda: "\n".join(replay_lines(report)))
    return Exit.OK if not report["differences"] else Exit.INTEGRITY


def _log_to_read(place: "Place") -> Path:
    """The log where the pool is stopped, else the monitor's newest copy of it."""
    import json

    from apportion.cli.places import copies_dir, log_file

    path = log_file(place.data_dir, place.pool)
    if place.note is None:
        if not path.exists():
            raise CommandFailed(
                f"expected an event log at {path}, found none",
                code=Exit.NOT_FOUND,
                hint="Name another place: --data-dir DIR, or a file: --file FILE.",
            )
        return path
    newest = copies_dir(place.data_dir, place.pool) / "newest.json"
    # Asking anything makes the monitor bring a copy up to date.
    from apportion.cli.question import ask_sql

    run(ask_sql(place, "SELECT 1"))
    try:
        said = json.loads(newest.read_bytes())
    except OSError as err:
        raise CommandFailed(f"the pool runs, and the monitor has no copy of its log yet ({newest})") from err
    say(f"the pool runs: this is the monitor's copy up to row {said['ordinal']}")
    return newest.with_name(str(said["file"]))
