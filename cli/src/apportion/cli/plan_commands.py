"""``apportion plan``: what would become of a job before it is asked for; and the placer's word on one that waits."""

import sys
from typing import TYPE_CHECKING, Any, cast

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.job_commands import read_file, request_body, submitted
from apportion.cli.output import output_option, print_object, printable

if TYPE_CHECKING:
    from apportion.cli.places import Place


@cli.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--tenant", metavar="NAME", help="On whose behalf. Default: the setting `tenant`, else 'default'.")
@click.option(
    "--timeout", type=float, default=30.0, show_default=True, metavar="S", help="How long to wait for answers."
)
@output_option
@pool_options
def plan(
    *,
    file: str,
    tenant: str | None,
    timeout: float,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> int:
    """Whether the job in FILE would start now, where, and who would have to make room; else when. Nothing is done.

    Ends with 0 where it would start now, 3 where it would wait, 6 where it is refused.
    """
    place = place_of(data_dir, pool, bus_url)
    data = sys.stdin.buffer.read() if file == "-" else read_file(file)
    body = request_body(data, name=file, dry_run=True)
    whose = tenant or place.settings.tenant
    judged = run(submitted(place, body=body, tenant=whose, event_id=None, wait="admitted", timeout_s=timeout))
    if judged["outcome"] != "dry run":
        refusal = {"starts": "refused", **{name: judged.get(name) for name in ("code", "field", "message", "job_id")}}
        print_object(
            refusal, kind="plan", output=output, text=lambda: printable(f"It would be refused: {judged.get('message')}")
        )
        return Exit.REFUSED
    job_id = judged["job_id"] or f"{whose}/planned"
    question = {"job_id": job_id, "tenant": whose, "spec": judged["spec"]}
    answer = run(_ask(place, "plan", question, timeout))
    print_object(answer, kind="plan", output=output, text=lambda: "\n".join(plan_text(answer)))
    return Exit.OK if answer["starts"] == "now" else Exit.NOT_PLACED


@cli.command()
@click.option("--dry-run", is_flag=True, help="Say what would be moved, and move nothing. The only way there is yet.")
@click.option("--moves", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many moves.")
@click.option(
    "--timeout", type=float, default=30.0, show_default=True, metavar="S", help="How long to wait for the answer."
)
@output_option
@pool_options
def defrag(
    *,
    dry_run: bool,
    moves: int,
    timeout: float,
    output: str,
    data_dir: str | None,
    pool: str | None,
    bus_url: str | None,
) -> int:
    """Which few runs, moved, would leave the pool of more use to what it is asked for; each with gain and cost.

    Ends with 0, whether or not anything is worth moving. To move one: apportion preempt JOB.
    """
    if not dry_run:
        raise CommandFailed(
            "nothing is moved by itself: look at `apportion defrag --dry-run`, then `apportion preempt JOB`",
            code=Exit.USAGE,
        )
    answer = run(_ask(place_of(data_dir, pool, bus_url), "defrag", {"moves": moves}, timeout))
    print_object(answer, kind="defrag", output=output, text=lambda: "\n".join(defrag_text(answer)))
    return Exit.OK


def defrag_text(answer: dict[str, Any]) -> list[str]:
    """The plan in a few lines."""
    lines = [answer["text"]]
    for number, each in enumerate(answer.get("moves", ()), 1):
        freed = ", which is empty then" if each["frees_device"] else ""
        what = f"{each['compute_milli']}m, {each['memory_mib']} MiB, ran {each['ran_s']} s"
        way = f"from {each['from_node']} {each['from_device']}{freed} to {each['to_node']} {each['to_device']}"
        lines.append(f"{number:>3}. {each['job_id']} ({what}): {way}; gains {each['gain_milli']}")
    return [printable(line) for line in lines]


async def why_now(place: "Place", job_id: str) -> dict[str, Any] | None:
    """Why the job waits at this moment, by the placer; None where no placer answers or it knows no such job."""
    if place.note is None:
        return None
    try:
        return await _ask(place, "why", {"job_id": job_id}, 5.0)
    except CommandFailed:
        return None


async def _ask(place: "Place", name: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    from apportion.cli.client import ask, bus_of

    async with bus_of(place) as bus:
        return await ask(bus, name, question, timeout_s=timeout_s, of="placer")


def plan_text(answer: dict[str, Any]) -> list[str]:
    """The plan in a few lines."""
    from apportion.placer.words import score_words

    lines = [f"{answer['job_id']}: {answer['text']}"]
    for each in answer.get("places", ()):
        slices = ", ".join(map(slice_text, each["slices"])) or "no device"
        lines.append(f"  {each['run_id']} on {each['node_id']}: {slices}")
        for rank, one in enumerate(each["candidates"]):
            words = score_words(answer.get("policy", ""), one["parts"])
            lines.append(f"    {'chosen' if rank == 0 else 'or'} {one['node_id']}: {words}")
        if each["excluded"]:
            lines.append(f"    out: {', '.join(f'{count} {why}' for why, count in each['excluded'].items())}")
    lines += [
        f"  would be preempted: {each['run_id']} on {each['node_id']}, {each['grace_s']} s to end ({answer['rule']})"
        for each in answer.get("preempts", ())
    ]
    return [printable(line) for line in lines]


def slice_text(piece: dict[str, Any]) -> str:
    """One slice: how much of which device, and how."""
    cut = piece.get("mig")
    where = f" {cut['profile']} at {cut.get('start', 0)}" if cut else ""
    return (
        f"{piece['compute_milli']}m and {piece['memory_mib']} MiB of {piece['device_uuid']} "
        f"({cast('str', piece['mode'])}{where})"
    )
