"""``apportion bench``: figures that anyone can take again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
@click.option(
    "--dimensions",
    default=1,
    show_default=True,
    type=click.IntRange(1, 2),
    help="2: memory apart from compute, by the service's own rules on a quarter of the fleet.",
)
@click.option(
    "--churn",
    metavar="PCT",
    type=click.IntRange(1, 1000),
    help="Tasks leave, and so much of the fleet is asked for at any time; by the service's own rules.",
)
@click.option("--scale", is_flag=True, help="What a decision costs instead: by nodes, and by jobs that wait.")
@click.option("-o", "--output", type=click.Choice(("table", "json")), default="table", show_default=True)
def placement(  # noqa: PLR0917  one argument an option, as click gives them
    trace: Path,
    variant: str,
    policy: str,
    seeds: int,
    learn: bool,
    mix: str | None,
    dimensions: int,
    churn: int | None,
    scale: bool,
    output: str,
) -> None:
    """How much of the fleet is allocated when arrivals reach 90 to 130 % of it, on the openb trace."""
    import json

    from apportion.placer import bench_openb, bench_pool

    is_pool = dimensions > 1 or churn is not None
    known = tuple(bench_pool.POLICIES) if is_pool else bench_openb.POLICIES
    if policy not in known or (scale and policy not in bench_pool.POLICIES):
        raise CommandFailed(f"no policy {policy!r}: expected one of {', '.join(known)}", code=Exit.USAGE)
    if is_pool and mix is not None:
        raise CommandFailed(
            "--mix: expected nothing beside --dimensions 2 and --churn, where the mix is learned", code=Exit.USAGE
        )
    range_ = range(bench_openb.FIRST_SEED, bench_openb.FIRST_SEED + seeds)
    try:
        read = bench_openb.read_trace(trace, variant)
        told = None if mix is None else bench_openb.read_trace(trace, mix).mix()
    except FileNotFoundError as err:
        raise CommandFailed(
            f"{err.filename} is not there: expected the trace's openb_node_list_gpu_node.csv and "
            f"openb_pod_list_{variant}.csv in {trace}",
            code=Exit.NOT_FOUND,
        ) from err
    if scale:
        curves = bench_pool.scale(read, policy=policy)
        click.echo(json.dumps(curves) if output == "json" else "\n".join(_scale_lines(curves)))
        return
    found: Mapping[str, Any] = (
        bench_pool.measure(read, variant=variant, policy=policy, seeds=range_, dimensions=dimensions, churn_pct=churn)
        if is_pool
        else bench_openb.measure(read, variant=variant, policy=policy, seeds=range_, learn=learn, mix=told)
    )
    if output == "json":
        click.echo(json.dumps(found))
        return
    rates = found["allocated_pct"]
    click.echo(f"{policy} on {variant}, {seeds} seeds{', learning' if found['learn'] else ''}")
    click.echo("  load %       " + "".join(f"{load:>8}" for load in rates))
    click.echo("  allocated %  " + "".join(f"{share:>8.2f}" for share in rates.values()))
    if is_pool:
        click.echo("  memory %     " + "".join(f"{share:>8.2f}" for share in found["memory_allocated_pct"].values()))
        click.echo(f"  served {found['served_pct']} % of what was asked (sd {found['served_pct_sd']})")
    else:
        click.echo(f"  declined {found['declined']}")
    click.echo(f"  {found['decisions_per_s']:,.0f} decisions/s of one core's CPU time")


def _scale_lines(curves: Mapping[str, Any]) -> list[str]:
    """The curves as a table."""
    lines = []
    for curve, what in (
        ("by_nodes", "the kernel, from an empty fleet to one that is full"),
        ("by_nodes_of_service", "the service, one job a round"),
    ):
        lines.append(f"     nodes   p50 us   p99 us   decisions/s ({what})")
        lines += [
            f"{row['nodes']:>10}{row['decision_us_p50']:>9}{row['decision_us_p99']:>9}{row['decisions_per_s']:>14,.0f}"
            for row in curves[curve]
        ]
    lines.append("   waiting   p50 us   p99 us   (a round of the service in which one run ended and one job came)")
    lines += [
        f"{row['waiting']:>10}{row['decision_us_p50']:>9}{row['decision_us_p99']:>9}" for row in curves["by_waiting"]
    ]
    return lines
