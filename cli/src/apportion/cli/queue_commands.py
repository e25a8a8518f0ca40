"""Queues: what each may hold, is guaranteed and holds; and how an operator changes that, one by one or from a file."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_object, print_rows, printable, say
from apportion.cli.wish_commands import answered, code_of_answer, wish_options

if TYPE_CHECKING:
    from apportion.cli.places import Place
    from apportion.contracts.events import QueueUpserted, QueueUpsertRequested

_RESOURCES: Final = ("compute_milli", "memory_mib", "cpu_milli", "jobs")
_AMOUNT: Final = "RESOURCE=AMOUNT"
_COLUMNS: Final = (
    "queue",
    "parent",
    "guaranteed_compute_milli",
    "held_compute_milli",
    "borrowed_compute_milli",
    "limit_compute_milli",
    "held_memory_mib",
    "limit_memory_mib",
    "held_jobs",
    "limit_jobs",
    "waiting",
    "weight",
    "dominant_ppm",
)
_WIDE: Final = (
    "guaranteed_memory_mib",
    "guaranteed_cpu_milli",
    "held_cpu_milli",
    "limit_cpu_milli",
    "guaranteed_jobs",
    "guaranteed_model_milli",
    "limit_model_milli",
    "weights",
    "on_lowered",
    "live_jobs",
    "runs",
    "is_cordoned",
    "tenants",
)
_UNITS: Final = (("compute_milli", "milli-GPU"), ("memory_mib", "MiB"), ("cpu_milli", "milli-CPU"), ("jobs", "jobs"))
_SHARE: Final = "SELECT * FROM v_queue_share WHERE queue = {queue}"
_POLICY: Final = """
SELECT arg_max(body, ordinal) AS body FROM v_event WHERE kind = 'QueueUpserted' AND body ->> '$.queue' = {queue}
"""
_WAITS: Final = """
SELECT pending.code, count(*) AS jobs
FROM v_pending_now AS pending JOIN v_job AS job USING (job_id) WHERE job.queue = {queue} GROUP BY 1 ORDER BY 2 DESC, 1
"""


@cli.group()
def queue() -> None:
    """Queues: what each may hold, what is guaranteed to it, and what it holds."""


@queue.command("ls")
@output_option
@pool_options
def list_queues(output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """All queues, each below the one above it; amounts include the queues below."""
    from apportion.cli.question import ask_sql

    place = place_of(data_dir, pool, bus_url)
    found = run(ask_sql(place, "SELECT * FROM v_queue_share ORDER BY queue"))
    rows = as_tree(found.rows)
    if output in {"table", "wide"}:
        rows = [{**row, "queue": "  " * row["level"] + row["queue"]} for row in rows]
    print_rows(rows, kind="queues", output=output, columns=_COLUMNS, wide=_WIDE, extra={"freshness": found.freshness})
    if not rows and output in {"table", "wide"}:
        say("There is no queue: `apportion queue set NAME --tenant TENANT` makes one.")


def as_tree(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The queues from above, each followed by those below it, with its ``level``; whoever is in no tree comes last."""
    below: dict[str | None, list[dict[str, Any]]] = {}
    for row in rows:
        below.setdefault(row["parent"], []).append(row)
    found: list[dict[str, Any]] = []
    left = [(row, 0) for row in reversed(below.get(None, []))]
    while left:
        row, level = left.pop()
        found.append({**row, "level": level})
        left += [(child, level + 1) for child in reversed(below.get(row["queue"], []))]
    seen = {row["queue"] for row in found}
    return found + [{**row, "level": 0} for row in rows if row["queue"] not in seen]


@queue.command("show")
@click.argument("name")
@output_option
@pool_options
def show_queue(*, name: str, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """One queue: its place, limits and guarantee, what it holds, who waits in it and why."""
    run(_show(place_of(data_dir, pool, bus_url), name, output))


async def _show(place: "Place", name: str, output: str) -> None:
    from apportion.cli.question import ask_sql, literal

    found = await ask_sql(place, _SHARE.format(queue=literal(name)))
    if not found.rows:
        raise CommandFailed(f"there is no queue {name}", code=Exit.NOT_FOUND, hint="`apportion queue ls` lists them.")
    said = await ask_sql(place, _POLICY.format(queue=literal(name)))
    waits = await ask_sql(place, _WAITS.format(queue=literal(name)))
    row = found.rows[0]
    content = {
        **row,
        "policy": _policy(said.rows[0]["body"] if said.rows else None),
        "waits": {each["code"]: each["jobs"] for each in waits.rows},
        "freshness": found.freshness,
    }
    print_object(content, kind="queue", output=output, text=partial(show_text, content))


def _policy(body: Any) -> dict[str, Any]:
    """The newest QueueUpserted with every default filled in."""
    import json

    import msgspec

    from apportion.contracts.events import QueueUpserted

    content = json.loads(body) if isinstance(body, str) else body
    if not content:
        return {}
    content.pop("type", None)
    event = msgspec.convert(content, QueueUpserted)
    return {name: msgspec.to_builtins(getattr(event, name)) for name in event.__struct_fields__}


def show_text(content: dict[str, Any]) -> str:
    """One queue for people."""
    policy = content["policy"]
    where = f" below {content['parent']}" if content["parent"] else ""
    lines = [f"queue {content['queue']}{where}" + (", cordoned" if content["is_cordoned"] else "")]
    weights = ", ".join(f"{weight} of {name}" for name, weight in sorted((policy.get("weights") or {}).items()))
    lines.append(
        f"  tenants {', '.join(content['tenants']) or 'none of its own'}; weight {content['weight']}"
        + (f", {weights}" if weights else "")
    )
    for name, unit in _UNITS:
        guaranteed, limit = policy.get(f"guaranteed_{name}"), policy.get(f"limit_{name}")
        said = f"  holds {content[f'held_{name}']} {unit}"
        said += "" if guaranteed is None else f", {guaranteed} guaranteed"
        said += "" if limit is None else f", {limit} at most"
        lines.append(said)
    for kind, words in (("guaranteed", "guaranteed"), ("limit", "at most")):
        for model, amount in sorted((policy.get(f"{kind}_model_milli") or {}).items()):
            lines.append(f"  of {model}: {amount} milli-GPU {words}")
    lines.append(
        f"  borrows {content['borrowed_compute_milli']} milli-GPU; dominant share "
        f"{content['dominant_ppm'] / 10_000:.2f} % of the pool"
    )
    lines.append(
        f"  order {policy.get('order') or 'as the pool'}, "
        f"{'tenants take turns' if policy.get('is_fair') else 'tenants take no turns'}, "
        f"{'takes back' if policy.get('reclaim') else 'does not take back'} what is guaranteed to it"
    )
    if policy.get("on_lowered") == "reclaim":
        lines.append("  what is beyond a limit is taken back")
    if policy.get("note"):
        lines.append(f"  {policy['note']}")
    waits = ", ".join(f"{jobs} {code}" for code, jobs in content["waits"].items())
    lines.append(f"  {content['waiting']} jobs wait here and below" + (f"; its own: {waits}" if waits else ""))
    if policy.get("actor"):
        lines.append(f"  set by {policy['actor']}" + (f": {policy['reason']}" if policy.get("reason") else ""))
    return "\n".join(printable(line) for line in lines)


@queue.command("set")
@click.argument("name")
@click.option("--tenant", "tenants", multiple=True, metavar="TENANT", help="Who may submit to it; may be repeated.")
@click.option("--parent", metavar="QUEUE", help="The queue above it; 'none' puts it at the top.")
@click.option("--limit", "limits", multiple=True, metavar=_AMOUNT, help="The most that it may hold; 'none' ends it.")
@click.option(
    "--guarantee", "guarantees", multiple=True, metavar=_AMOUNT, help="What is given back to it; 'none' ends it."
)
@click.option("--weight", type=click.IntRange(1, 1000), help="Its part of what no guarantee claims.")
@click.option(
    "--weight-of",
    "weights",
    multiple=True,
    metavar=_AMOUNT,
    help="Its part of one resource where that is another, 1 to 1000; 'none' ends it.",
)
@click.option(
    "--order", type=click.Choice(["classes", "seed", "strict", "bids", "pool"]), help="How its jobs are ordered."
)
@click.option("--fair/--unfair", "is_fair", default=None, help="Whether its tenants take turns.")
@click.option("--reclaim/--no-reclaim", default=None, help="Whether borrowers are stopped for its guarantee.")
@click.option(
    "--on-lowered",
    type=click.Choice(["keep", "reclaim"]),
    help="Whether runs beyond a limit that is set below what is held run on, or are preempted.",
)
@click.option("--cordon/--open", "is_cordoned", default=None, help="Whether nothing of it is placed.")
@wish_options(is_reason_required=False)
def set_queue(*, name: str, **options: Any) -> int:
    """Make queue NAME, or change what is given of it; the rest of it stays.

    RESOURCE is compute_milli, memory_mib, cpu_milli, jobs, or a device model for milli-GPU on devices of that model:
    --limit compute_milli=4000 --limit h100-80=2000 --guarantee compute_milli=1000 --weight-of memory_mib=2.
    """
    place = place_of(options["data_dir"], options["pool"], options["bus_url"])
    return run(_set(place, name, options))


async def _set(place: "Place", name: str, options: dict[str, Any]) -> int:
    import msgspec

    from apportion.cli.client import bus_of, newest_queue
    from apportion.cli.wish_commands import answer_text
    from apportion.contracts.events import QueueUpsertRequested

    async with bus_of(place) as bus:
        given = changed(await newest_queue(bus, name), name, options)
        try:
            wish = msgspec.convert(given, QueueUpsertRequested)
        except msgspec.ValidationError as err:
            raise CommandFailed(f"queue {name}: {err}", code=Exit.USAGE) from err
        answer = await answered(bus, wish)
    print_object(answer, kind="answer", output=options["output"], text=partial(answer_text, answer))
    return code_of_answer(answer)


def changed(before: "QueueUpserted | None", name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The wish for the queue with what the options say of it. Raises CommandFailed on an option that can't be read."""
    from apportion.cli.declared import as_wish

    given = {} if before is None else as_wish(before)
    given |= {"queue": name, "reason": options["reason"], "dry_run": options["dry_run"]}
    if options["tenants"]:
        given["tenants"] = list(options["tenants"])
    for field in ("weight", "is_fair", "reclaim", "is_cordoned", "on_lowered"):
        if options[field] is not None:
            given[field] = options[field]
    for field, none in (("parent", "none"), ("order", "pool")):
        if options[field] is not None:
            given[field] = None if options[field] == none else options[field]
    for kind, pairs in (("limit", options["limits"]), ("guaranteed", options["guarantees"])):
        for pair in pairs:
            _put(given, kind, pair)
    for pair in options["weights"]:
        resource, amount = _pair("--weight-of", pair)
        weights = dict(given.get("weights") or {})
        weights.pop(resource, None)
        given["weights"] = weights | ({} if amount is None else {resource: amount})
    return given


def _pair(option: str, pair: str) -> tuple[str, int | None]:
    """The resource and the amount, None where the option ends it. Raises CommandFailed."""
    resource, _, said = pair.partition("=")
    if not resource or not (said == "none" or said.isdecimal()):
        raise CommandFailed(
            f"{option}: expected {_AMOUNT}, a whole number or 'none', found {pair!r}",
            code=Exit.USAGE,
            hint=f"Such as {option} compute_milli={3 if 'weight' in option else 4000}.",
        )
    return resource, None if said == "none" else int(said)


def _put(given: dict[str, Any], kind: str, pair: str) -> None:
    resource, amount = _pair("--limit" if kind == "limit" else "--guarantee", pair)
    if resource in _RESOURCES:
        given[f"{kind}_{resource}"] = amount
        return
    models = dict(given.get(f"{kind}_model_milli") or {})
    if amount is None:
        models.pop(resource, None)
    else:
        models[resource] = amount
    given[f"{kind}_model_milli"] = models


@queue.command("apply")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@wish_options(is_reason_required=False)
def apply_queues(*, file: Path, **options: Any) -> int:
    """Make the queues as FILE has them: [[queue]] tables, as in apportion.toml. Others stay as they are.

    Each queue that differs is one wish, and so one event with an actor and a reason; those that are as the file has
    them already are left alone. A queue is said whole: what the file leaves out goes back to its default.
    """
    from apportion.cli.queues import from_file

    place = place_of(options["data_dir"], options["pool"], options["bus_url"])
    return run(_apply(place, from_file(file), options))


async def _apply(place: "Place", wanted: tuple["QueueUpsertRequested", ...], options: dict[str, Any]) -> int:
    from msgspec.structs import asdict, replace

    from apportion.cli.client import bus_of
    from apportion.cli.declared import declare_on

    asked = [replace(wish, reason=options["reason"] or wish.reason, dry_run=options["dry_run"]) for wish in wanted]
    async with bus_of(place) as bus:
        outcomes = await declare_on(bus, asked)
    rows = [{"queue": outcome.name, **asdict(outcome)} for outcome in outcomes]
    print_rows(rows, kind="queues", output=options["output"], columns=("queue", "result", "code", "field", "message"))
    return next((code for outcome in outcomes if (code := code_of_answer(asdict(outcome)))), Exit.OK)
