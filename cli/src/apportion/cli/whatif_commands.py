"""Commands that ask what another policy, other settings or another fleet would have done."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from apportion.cli.app import cli, place_of, pool_options
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_rows, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from apportion.cli.whatif.figures import Figures
    from apportion.contracts.envelope import Entry

_POLICY: Final = click.option("--policy", metavar="NAME", help="How candidates are scored. Default: as recorded.")
_SET: Final = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Another setting of the placer; may be repeated."
)
_EXPORT: Final = click.option(
    "--export", "export", type=click.Path(file_okay=False, path_type=Path), help="Write each history's facts there."
)


@cli.command()
@_POLICY
@_SET
@click.option("--nodes", type=click.IntRange(1, 10_000), help="So many nodes: the first ones, or copies of the last.")
@click.option("--drop", multiple=True, metavar="NODE", help="Without this node; may be repeated.")
@click.option("--from", "since", default="0", metavar="TIME|SEQ", help="From here on. Default: the log's beginning.")
@click.option("--to", "until", metavar="TIME|SEQ", help="Up to here. Default: the log's end.")
@_EXPORT
@click.option(
    "--file", "file", type=click.Path(dir_okay=False, exists=True), help="This log file instead of the pool's."
)
@output_option
@pool_options
def whatif(
    *,
    policy: str | None,
    settings: tuple[str, ...],
    nodes: int | None,
    drop: tuple[str, ...],
    since: str,
    until: str | None,
    export: Path | None,
    file: str | None,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> None:
    """Decide a recorded stretch anew, with another policy, other settings or another fleet; from the log alone.

    Three columns: what was recorded; the same rules and fleet simulated, so that the model's own error is seen; and
    what was asked. The real cores decide; a run takes the work that its recorded facts had in it, slowed by neighbours
    as measured elsewhere. A run that never came to an end by itself is given the middle of all works, and counted.
    """
    from apportion.cli import past
    from apportion.cli.log_commands import folds_of, log_to_read
    from apportion.cli.usage import cards_in
    from apportion.cli.whatif import stretch as stretches
    from apportion.cli.whatif.figures import Reckoning
    from apportion.contracts.ids import NodeId
    from apportion.monitor.history import History

    place = place_of(data_dir, pool, bus_url)
    path, folds = (Path(file), None) if file else (log_to_read(place), folds_of(place))
    with History.open(path, folds=folds) as history:
        first = past.moment_of(history, since, option="--from")
        last = history.last_seq if until is None else past.moment_of(history, until, option="--to")
    if last <= first:
        raise CommandFailed(f"--to: expected a moment after --from (fact {first}), found {last}", code=Exit.USAGE)
    stretch = stretches.read(path, folds, first, last)
    changed = _config(policy, settings)
    fleet = stretches.Fleet(nodes=nodes, drop=frozenset(NodeId(name) for name in drop))
    cards = cards_in(path)
    model = stretches.simulated(stretch, config={}, fleet=stretches.Fleet())
    asked = stretches.simulated(stretch, config=changed, fleet=fleet)
    histories: dict[str, Sequence[Entry]] = {
        "recorded": stretch.facts,
        "resimulated": model.entries,
        "whatif": asked.entries,
    }
    found = {
        name: Reckoning(stretch.pool, stretch.begin, cards).reckon(entries, stretch.asked_at, stretch.end)
        for name, entries in histories.items()
    }
    if export is not None:
        from apportion.cli.whatif.report import export as export_histories

        export_histories(export, histories)
    assumed = sorted(asked.assumed | model.assumed)
    notes = {
        "facts": [first + 1, last],
        "config": changed,
        "fleet": {"nodes": nodes, "drop": sorted(drop)},
        "assumed_jobs": assumed,
        "decisions": asked.decisions,
    }
    _print(found, notes, output=output)
    if output in {"table", "wide"}:
        say(f"(facts {first + 1} to {last} of {path}; the work of {len(assumed)} jobs is assumed, not recorded)")


@cli.command()
@click.option("--trace", "trace", required=True, type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option("--fleet", "fleet", required=True, type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="A policy; may be repeated to compare.")
@_SET
@click.option("--from-s", type=float, default=0.0, show_default=True, help="Jobs submitted from this second on.")
@click.option("--to-s", type=float, help="Jobs submitted before this second.")
@_EXPORT
@output_option
def simulate(
    *,
    trace: Path,
    fleet: Path,
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    from_s: float,
    to_s: float | None,
    export: Path | None,
    output: str,
) -> None:
    """Decide a trace that was never run here, on a fleet that need not exist, by the real cores on a virtual clock.

    TRACE is CSV (.gz too) with job_id, submit_s, duration_s, gpus, tenant; FLEET has nodes, devices, model, memory_mib.
    It runs until every job has ended.
    """
    from apportion.cli.whatif import trace as traces
    from apportion.cli.whatif.figures import Reckoning
    from apportion.placer.policies import DEFAULT
    from apportion.pool.state import Pool

    asked = traces.read(trace, fleet, first_s=from_s, last_s=to_s)
    histories: dict[str, Sequence[Entry]] = {}
    found: dict[str, Figures] = {}
    for policy in policies or (None,):
        config = {"policy": DEFAULT.name} | _config(policy, settings)
        done = traces.simulated(asked, config=config, until=2**62)
        name = policy or "default"
        histories[name] = done.entries
        found[name] = Reckoning(Pool(), traces.START, ()).reckon(done.entries, asked.asked_at, done.now + 1)
    if export is not None:
        from apportion.cli.whatif.report import export as export_histories

        export_histories(export, histories)
    _print(found, {"jobs": len(asked.works), "devices": asked.devices}, output=output)
    if output in {"table", "wide"}:
        say(f"({len(asked.works)} jobs of {trace} on {asked.devices} devices of {fleet})")


def _print(found: "Mapping[str, Figures]", notes: "Mapping[str, Any]", *, output: str) -> None:
    from apportion.cli.whatif import report

    if output in {"table", "wide"}:
        print_rows(report.rows(found), kind="figures", output=output, columns=("figure", *found))
        return
    content = [{"history": name, **report.plain(figures)} for name, figures in found.items()]
    print_rows(content, kind="histories", output=output, columns=("history",), extra=dict(notes))


def _config(policy: str | None, settings: tuple[str, ...]) -> dict[str, int | str]:
    """The placer's settings that were given, checked against those that there are. Raises CommandFailed."""
    from apportion.placer.policies import PolicyUnknown, resolved
    from apportion.placer.state import Settings

    known = Settings()
    found: dict[str, int | str] = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        default = getattr(known, key, None) if key in Settings.__struct_fields__ else None
        if not sign or default is None:
            names = ", ".join(Settings.__struct_fields__)
            raise CommandFailed(f"--set: expected KEY=VALUE with a KEY of {names}; found {setting!r}", code=Exit.USAGE)
        try:
            found[key] = int(value) if isinstance(default, int) else value
        except ValueError as err:
            raise CommandFailed(f"--set {key}: expected a whole number, found {value!r}", code=Exit.USAGE) from err
    if found:
        # What is asked goes before what the pool's policy said then.
        found["pinned"] = ",".join(sorted(found))
    if policy is not None:
        found["policy"] = policy
    try:
        resolved(str(found.get("policy", known.policy)))
    except PolicyUnknown as err:
        raise CommandFailed(f"--policy: {err}", code=Exit.USAGE) from err
    return found
