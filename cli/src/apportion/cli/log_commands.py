"""Commands about the event log: ask it, check its chain, go back to a moment, decide everything again."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_object, print_rows, say, to_json

if TYPE_CHECKING:
    from apportion.cli.places import Place
    from apportion.monitor.signing import Checkpoint


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
    v_stops, v_double_slice, v_wish_answers, v_queries, v_preemptions, v_migrations, v_alerts, v_isolation, v_waits,
    v_memory, v_queue_share, v_health, v_changes, v_orphans, v_reconciliation, v_reservations. A running pool records
    who asked what, before it answers.
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
@click.option("--key", metavar="HEX|FILE", help="The public key that must have signed it. Default: keys/log.pub.")
@click.option(
    "--anchors",
    "anchors",
    type=click.Path(dir_okay=False, exists=True),
    help="Checkpoints that were kept elsewhere, one a line. Default: the file beside the log.",
)
@output_option
@pool_options
def log_verify(
    *,
    file: str | None,
    key: str | None,
    anchors: str | None,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> int:
    """Recompute every hash of the log and check every signature over it.

    Ends with 9, naming the first bad sequence, where it is not what was written; sealed segments are held against their
    signed manifest, too. A key and anchors that were kept out
    of the reach of the log's own administrator prove most.
    """
    import msgspec

    from apportion.monitor import attest
    from apportion.monitor.checkpoints import side_file
    from apportion.monitor.signing import key_path, public_key_of, public_key_path

    if file is not None:
        path, public, own = Path(file), None, Path(file)
    else:
        place = place_of(data_dir, pool, bus_url)
        path, public, own = log_to_read(place), public_key_path(key_path(place.data_dir)), log_of(place)
    if key is not None:
        trusted: str | None = public_key_of(key)
    else:
        trusted = public_key_of(str(public)) if public is not None and public.exists() else None
    kept = Path(anchors) if anchors is not None else side_file(own)
    verdict = attest.verify(
        path,
        public_key=trusted,
        anchors=_kept_anchors(path, kept, is_given=anchors is not None),
        segments_of=own,
    )
    content = {"path": str(path), **msgspec.to_builtins(verdict)}

    def text() -> str:
        if verdict.first_bad is None:
            signed = (
                f"signed up to row {verdict.signed_ordinal} by {verdict.public_key[:16]} "
                f"({verdict.checkpoints} checkpoints, {verdict.anchors} anchors)"
                if verdict.checkpoints
                else "NOT SIGNED"
            )
            return f"ok: {verdict.rows} rows, no gap, chain whole, head {verdict.head_hash[:16]}, {signed} ({path})"
        bad = verdict.first_bad
        return (
            f"BAD: {bad.stream} sequence {bad.stream_seq} (row {bad.ordinal}): {bad.what}; "
            f"{verdict.rows} rows before it are good ({path})"
        )

    print_object(content, kind="verdict", output=output, text=text)
    return Exit.OK if verdict.ok else Exit.INTEGRITY


def _kept_anchors(path: Path, kept: Path, *, is_given: bool) -> "list[Checkpoint]":
    """The anchors to hold against a log; of a running pool those that its copy reaches, unless a file was named."""
    from apportion.monitor.attest import anchors_in
    from apportion.monitor.log import LogFile

    if not kept.exists():
        return []
    found = anchors_in(kept)
    if is_given or kept.parent == path.parent:
        return found
    log = LogFile.open(path)
    try:
        last = log.last_ordinal()
    finally:
        log.close()
    return [one for one in found if one.ordinal <= last]


@cli.command()
@click.option("--at", "at", metavar="TIME|SEQ", help="Show the pool as it was then.")
@click.option("--from", "since", metavar="TIME|SEQ", help="Play the facts after this moment.")
@click.option("--to", "until", metavar="TIME|SEQ", help="Stop playing there. Default: the log's end.")
@click.option("--speed", default="1x", show_default=True, help="How fast to play: 100x, or max.")
@click.option("--verify", "verify_it", is_flag=True, help="Recompute every decision and compare.")
@click.option(
    "--file", "file", type=click.Path(dir_okay=False, exists=True), help="This log file instead of the pool's."
)
@output_option
@pool_options
def replay(
    *,
    at: str | None,
    since: str | None,
    until: str | None,
    speed: str,
    verify_it: bool,
    file: str | None,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> int:
    """The pool as it was, from the log file alone, no bus needed: --at a moment, played --from one, or --verify all.

    TIME is an instant (2026-09-01T03:12:00Z; UTC where no zone is said), +00:10 after the first fact, or -15m before
    the last; SEQ a sequence in the stream of facts. --verify makes every decision again, and ends with 9 where one
    comes out otherwise. Nothing here can act: no bus is spoken to, unless a running pool is asked for a copy of its
    log.
    """
    asked = [name for name, given in (("--at", at), ("--from", since), ("--verify", verify_it)) if given]
    if len(asked) != 1 or (until is not None and since is None):
        raise CommandFailed(
            f"expected one of --at, --from and --verify (--to goes with --from), found {' and '.join(asked) or 'none'}",
            code=Exit.USAGE,
            hint="apportion replay --at -15m",
        )
    place = place_of(data_dir, pool, bus_url)
    path, folds = (Path(file), None) if file else (log_to_read(place), folds_of(place))
    if verify_it:
        return _verify(path, output)
    if at is not None:
        _show_past(path, folds, at, output)
    else:
        _play(path, folds, span=(since or "", until), speed=speed, output=output)
    return Exit.OK


def _verify(path: Path, output: str) -> int:
    from apportion.cli.replaying import replay_all, replay_lines

    report = replay_all(path)
    print_object(report, kind="replay", output=output, text=lambda: "\n".join(replay_lines(report)))
    return Exit.OK if not report["differences"] else Exit.INTEGRITY


def _show_past(path: Path, folds: Path | None, at: str, output: str) -> None:
    from apportion.cli import past
    from apportion.monitor.history import History

    with History.open(path, folds=folds) as history:
        then = history.at_seq(past.moment_of(history, at, option="--at"))
    print_object(past.content(then, path), kind="pool", output=output, text=lambda: "\n".join(past.lines(then)))


def _play(path: Path, folds: Path | None, *, span: tuple[str, str | None], speed: str, output: str) -> None:
    from apportion.cli import past
    from apportion.monitor.history import History

    times = past.speed_of(speed)
    since, until = span
    with History.open(path, folds=folds) as history:
        first = past.moment_of(history, since, option="--from")
        last = history.last_seq if until is None else past.moment_of(history, until, option="--to")
        if last < first:
            raise CommandFailed(
                f"--to: expected a moment at or after --from (fact {first}), found fact {last}", code=Exit.USAGE
            )
        is_table = output in {"table", "wide"}
        if is_table:
            print(past.headline(history.at_seq(first)), flush=True)
        played = (past.fact_shown(*one) for one in past.play(history, first=first, last=last, speed=times))
        if output == "json":
            print_rows(list(played), kind="facts", output=output, columns=(), extra={"path": str(path)})
            return
        for fact in played:
            print(
                fact["seq"] if output == "name" else past.fact_line(fact) if is_table else to_json(fact, indent=None),
                flush=True,
            )
        if is_table:
            print(past.headline(history.at_seq(last)))


def folds_of(place: "Place") -> Path:
    """Where folds of the pool's log are kept, whichever copy of it is read."""
    return log_of(place).with_suffix(".folds")


def log_of(place: "Place") -> Path:
    """The pool's log itself, whoever writes it."""
    from apportion.cli.places import log_file

    return log_file(place.data_dir, place.pool)


def _elsewhere(data_dir: Path) -> str:
    """Where pools run, for who looked in the wrong place; empty where none does."""
    from apportion.cli.places import running_elsewhere

    return "".join(
        f"Pool {note.pool} runs in {note.data_dir}: --data-dir says so. " for note in running_elsewhere(data_dir)
    )


def log_to_read(place: "Place") -> Path:
    """The log where the pool is stopped, else the monitor's newest copy of it."""
    import json

    from apportion.cli.places import copies_dir, log_file

    path = log_file(place.data_dir, place.pool)
    if place.note is None:
        if not path.exists():
            raise CommandFailed(
                f"expected an event log at {path}, found none",
                code=Exit.NOT_FOUND,
                hint=_elsewhere(place.data_dir) or "Name another place: --data-dir DIR, or a file: --file FILE.",
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


@log_group.command("export")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--file", "file", type=click.Path(dir_okay=False, exists=True), help="This log file instead of the pool's."
)
@output_option
@pool_options
def log_export(
    *, folder: Path, file: str | None, output: str, data_dir: str | None, pool: str | None, bus_url: str | None
) -> None:
    """Write the log as Parquet, a file a day, into the new FOLDER: a backup, and something that any engine reads."""
    import msgspec

    from apportion.monitor.segments import export

    path = Path(file) if file else log_to_read(place_of(data_dir, pool, bus_url))
    manifest = export(path, folder)
    rows = [{**msgspec.to_builtins(one), "rows": one.last_ordinal - one.first_ordinal + 1} for one in manifest.segments]
    print_rows(rows, kind="segments", output=output, columns=("day", "rows", "first_ordinal", "last_ordinal", "file"))
    if output in {"table", "wide"}:
        say(f"{manifest.rows} rows in {folder}")


@log_group.command("import")
@click.argument("folder", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@output_option
@pool_options
def log_import(
    *, folder: Path, file: Path | None, output: str, data_dir: str | None, pool: str | None, bus_url: str | None
) -> None:
    """Make the log FILE of an exported FOLDER; without FILE the pool's own log, where it has none.

    Ends with 9, and makes none, where its chain isn't whole. A pool's log goes with its bus: `apportion restore` makes
    both.
    """
    import msgspec

    from apportion.monitor.segments import import_

    path = file if file is not None else log_of(place_of(data_dir, pool, bus_url))
    verdict = import_(folder, path)
    content = {"path": str(path), **msgspec.to_builtins(verdict)}
    print_object(content, kind="verdict", output=output, text=lambda: f"ok: {verdict.rows} rows, chain whole ({path})")


@cli.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@output_option
@pool_options
def restore(source: Path, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """Make a pool of its log alone, in a new data directory: SOURCE is a log file, or an exported folder.

    The log is checked first. Its bus gets every message again, at the same sequence: start the pool with `apportion up`
    afterwards, and its services fold what they had folded; running jobs are found again by their nodes' agents.
    """
    from apportion.cli.pool_commands import quiet_logs
    from apportion.cli.restoring import restore as restored

    quiet_logs()
    place = place_of(data_dir, pool, bus_url)
    if place.note is not None:
        raise CommandFailed(
            f"expected a data directory in which no pool runs, found {place.data_dir}",
            code=Exit.USAGE,
            hint="Name a new one: --data-dir DIR.",
        )
    content = restored(source, place.data_dir, place.pool)
    print_object(
        content,
        kind="restored",
        output=output,
        text=lambda: (
            f"restored: {content['rows']} rows in {content['log']}, "
            f"{content['streams']['wishes']} wishes and {content['streams']['facts']} facts on the bus; "
            "`apportion up` goes on from there"
        ),
    )
    if output in {"table", "wide"}:
        say(
            f"first put the old pool's keys/ into {place.data_dir}: with a new log key `apportion log verify` ends "
            "with 9, unless --key names the old one"
        )
