"""Running a scenario file: pass or fail, with figures."""

import tempfile
from pathlib import Path

import click
import msgspec

from apportion.cli.app import cli
from apportion.cli.exits import Exit
from apportion.cli.output import output_option, print_rows, say


@cli.group()
def scenario() -> None:
    """What happens in a pool when, and what must be true afterwards, as a file."""


@scenario.command(name="run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Where the pool's files shall stay.")
@output_option
def run_file(*, file: Path, keep: Path | None, output: str) -> int:
    """Run FILE on a pool of its own, with simulated devices; ends with 1 where a check fails."""
    from apportion.cli.baselines import baselines
    from apportion.cli.pool_commands import quiet_logs
    from apportion.cli.scenario import load, log_of, run
    from apportion.cli.whatif import report

    found = load(file)
    quiet_logs()
    say(f"scenario: {found.name}")
    with tempfile.TemporaryDirectory(prefix="apportion-") as temporary:
        figures = run(found, keep or Path(temporary), say)
        compared = baselines(log_of(keep or Path(temporary)))
    rows = [{**msgspec.structs.asdict(figure), "verdict": "pass" if figure.passed else "FAIL"} for figure in figures]
    columns = ("verdict", "name", "value", "unit", "wanted", *(("baseline",) if found.baseline else ()))
    histories = [{"history": name, **report.plain(each)} for name, each in compared.items()]
    print_rows(rows, kind="scenario", output=output, columns=columns, name="name", extra={"histories": histories})
    if output in {"table", "wide"}:
        say("the same work decided by the same services without sharing, by simulation from the log:")
        print_rows(report.rows(compared), kind="figures", output=output, columns=("figure", *compared))
    failed = sum(not figure.passed for figure in figures)
    say(f"{'PASS' if not failed else 'FAIL'}: {len(figures) - failed} of {len(figures)} checks hold")
    return Exit.FAILURE if failed else Exit.OK
