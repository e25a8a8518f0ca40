"""``apportion bench``: figures that anyone can take again."""

from pathlib import Path

import click

from apportion.cli.app import cli
from apportion.cli.exits import CommandFailed, Exit


@cli.group()
def bench() -> None:
    """Measure how well things are decided; the data is read from a directory of yours."""


@bench.command("placement")
@click.option(
    "--trace", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Directory with the openb files."
)
@click.option("--variant", default="default", show_default=True, help="Which list of tasks: openb_pod_list_<NAME>.csv.")
@click.option("--policy", default="headroom", show_default=True, help="Which policy decides.")
@click.option("--seeds", default=10, show_default=True, type=click.IntRange(1), help="How many runs, from seed 42 on.")
@click.option("--learn", is_flag=True, help="The policy learns the mix of demands from arrivals alone.")
@click.option("--mix", metavar="NAME", help="The policy is told another variant's mix instead.")
@click.option("-o", "--output", type=click.Choice(("table", "json")), default="table", show_default=True)
def placement(  # noqa: PLR0917  one argument an option, as click gives them
    trace: Path, variant: str, policy: str, seeds: int, learn: bool, mix: str | None, output: str
) -> None:
    """How much of the fleet is allocated when arrivals reach 90 to 130 % of it, on the openb trace."""
    import json

    from apportion.placer import bench_openb

    if policy not in bench_openb.POLICIES:
        expected = ", ".join(bench_openb.POLICIES)
        raise CommandFailed(f"no policy {policy!r}: expected one of {expected}", code=Exit.USAGE)
    try:
        found = bench_openb.measure(
            bench_openb.read_trace(trace, variant),
            variant=variant,
            policy=policy,
            seeds=range(bench_openb.FIRST_SEED, bench_openb.FIRST_SEED + seeds),
            learn=learn,
            mix=None if mix is None else bench_openb.read_trace(trace, mix).mix(),
        )
    except FileNotFoundError as err:
        raise CommandFailed(
            f"{err.filename} is not there: expected the trace's openb_node_list_gpu_node.csv and "
            f"openb_pod_list_{variant}.csv in {trace}",
            code=Exit.NOT_FOUND,
        ) from err
    if output == "json":
        click.echo(json.dumps(found))
        return
    rates = found["allocated_pct"]
    click.echo(f"{policy} on {variant}, {seeds} seeds{', learning' if learn else ''}")
    click.echo("  load %       " + "".join(f"{load:>8}" for load in rates))
    click.echo("  allocated %  " + "".join(f"{share:>8.2f}" for share in rates.values()))
    click.echo(f"  declined {found['declined']}; {found['decisions_per_s']:,.0f} decisions/s of one core's CPU time")
