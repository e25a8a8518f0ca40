"""Rates, full queues, isolation and defaults: what goes for whom, and how that is changed."""

import json
from pathlib import Path
from typing import Any, Final

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_rows, say
from apportion.cli.wish_commands import ask_wish, wish_options

NEWEST = """
WITH run AS (
    SELECT tenant, sum(compute_milli) AS compute_milli, sum(memory_mib) AS memory_mib, count(DISTINCT job_id) AS jobs
    FROM v_run WHERE freed_seq IS NULL GROUP BY tenant
)
SELECT coalesce(body ->> '$.for_tenant', '(pool)') AS for_tenant,
    CAST(body -> '$.limit_compute_milli' AS BIGINT) AS limit_compute_milli,
    CAST(coalesce(compute_milli, 0) AS BIGINT) AS held_compute_milli,
    CAST(body -> '$.limit_memory_mib' AS BIGINT) AS limit_memory_mib,
    CAST(coalesce(memory_mib, 0) AS BIGINT) AS held_memory_mib,
    CAST(body -> '$.limit_jobs' AS BIGINT) AS limit_jobs, CAST(coalesce(jobs, 0) AS BIGINT) AS held_jobs,
    CAST(body -> '$.limit_cpu_milli' AS BIGINT) AS limit_cpu_milli,
    coalesce(body -> '$.limit_model_milli', '{}') AS limit_model_milli,
    coalesce(body ->> '$.on_lowered', 'keep') AS on_lowered,
    CAST(body -> '$.wish_rate_per_min' AS BIGINT) AS wish_rate_per_min,
    CAST(body -> '$.wish_burst' AS BIGINT) AS wish_burst,
    CAST(body -> '$.rate_per_min' AS BIGINT) AS rate_per_min, CAST(body -> '$.burst' AS BIGINT) AS burst,
    CAST(body -> '$.pending_max' AS BIGINT) AS pending_max, body ->> '$.isolation' AS isolation,
    CAST(body -> '$.pool_pending_max' AS BIGINT) AS pool_pending_max,
    CAST(body -> '$.buffer_pct' AS BIGINT) AS buffer_pct,
    body -> '$.defaults' AS defaults, body -> '$.placement' AS placement,
    body ->> '$.actor' AS actor, body ->> '$.reason' AS reason, recorded
FROM v_event LEFT JOIN run ON run.tenant = body ->> '$.for_tenant'
WHERE kind = 'PolicyUpserted'
QUALIFY row_number() OVER (PARTITION BY body ->> '$.for_tenant' ORDER BY ordinal DESC) = 1
ORDER BY for_tenant
"""

_NESTED: Final = ("limit_model_milli", "defaults", "placement")


@cli.group()
def policy() -> None:
    """Rates, limits, bounds of waiting jobs, isolation and defaults, of the pool and of tenants."""


@policy.command("show")
@output_option
@pool_options
def policy_show(output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """What was set for the pool and for each tenant; the settings of admission and the placer go for the rest."""
    from apportion.cli.question import ask_sql

    found = run(ask_sql(place_of(data_dir, pool, bus_url), NEWEST))
    rows = found.rows
    if output in {"json", "jsonl"}:
        # SQL has them as JSON in a text: whoever reads JSON wants what is in it.
        rows = [{**row, **{name: json.loads(row[name] or "null") for name in _NESTED}} for row in rows]
    columns = (
        "for_tenant",
        "rate_per_min",
        "burst",
        "wish_rate_per_min",
        "pending_max",
        "isolation",
        "held_compute_milli",
        "limit_compute_milli",
        "held_memory_mib",
        "limit_memory_mib",
        "held_jobs",
        "limit_jobs",
    )
    wide = (
        "limit_cpu_milli",
        "limit_model_milli",
        "on_lowered",
        "wish_burst",
        "pool_pending_max",
        "buffer_pct",
        "defaults",
        "placement",
        "actor",
        "reason",
    )
    print_rows(rows, kind="policies", output=output, columns=columns, wide=wide, name="for_tenant")
    if not found.rows and output in {"table", "wide"}:
        say("No policy was set: the settings of admission and the placer go for all (`apportion config show`).")


@policy.command("set")
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@wish_options(is_reason_required=True)
def policy_set(*, file: Path, **options: Any) -> int:
    """State a whole policy, the pool's or one tenant's, from FILE, in place of the one before. Operators only.

    \b
    for_tenant = "acme"                # left out: the pool's
    rate_per_min = 120                 # jobs admitted a minute
    burst = 20
    wish_rate_per_min = 600            # wishes that are looked at, whatever they ask
    wish_burst = 100
    pending_max = 500                  # jobs that wait at once
    isolation = "fault"                # the least that its jobs get
    # A tenant's only: what it holds in all queues together (also limit_cpu_milli, limit_model_milli):
    limit_compute_milli = 8000
    limit_memory_mib = 600_000
    limit_jobs = 50
    on_lowered = "reclaim"             # what is beyond a lowered limit is preempted; keep: it runs on
    # The pool's only:
    pool_pending_max = 50_000
    buffer_pct = 15
    [defaults.training]
    compute_milli = 800
    memory_mib = 32768
    modes = ["mig", "exclusive"]
    [placement]                        # who goes first, who is stopped for whom: docs/queues.md
    order = "classes"
    ageing_s = 10
    preempt_per_minute = 30
    [placement.class_points]
    online = 9000
    """  # noqa: D301  \b is click's mark for a block that is not refilled
    import tomllib

    from apportion.contracts.events import PolicyUpsertRequested

    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeError) as err:
        raise CommandFailed(f"{file}: expected TOML, found {err}", code=Exit.USAGE) from err
    if said := sorted({"reason", "dry_run"} & content.keys()):
        raise CommandFailed(f"{file}: expected no {said[0]}, which is an option of the command", code=Exit.USAGE)
    return ask_wish(PolicyUpsertRequested, options, **content)
