"""Commands for those who look back: a job's whole story."""

from typing import TYPE_CHECKING, Any, Final

import click

from apportion.cli.app import cli, place_of, pool_options, run
from apportion.cli.exits import CommandFailed, Exit
from apportion.cli.output import output_option, print_rows, say

if TYPE_CHECKING:
    from apportion.cli.places import Place

FACTS_MAX: Final = 10_000
_STORY: Final = """
WITH own AS (
    SELECT ordinal, recorded, kind, said_by, actor, cause, run_id, node_id, body FROM v_job_timeline
    WHERE job_id = {job}
), around AS (
    SELECT ordinal, recorded, kind, author AS said_by, actor, cause, run_id, node_id, body FROM v_event
    WHERE recorded BETWEEN (SELECT min(recorded) FROM own) AND (SELECT max(recorded) FROM own) AND (
        kind IN ('FaultInjected', 'FaultCleared', 'ControlPlaneFrozen', 'ControlPlaneThawed')
        OR (kind = 'LeaseClaimed' AND body ->> '$.follows' <> '')
        OR (
            kind IN ('NodeSuspected', 'NodeTrusted', 'NodeLost', 'NodeRecovered', 'NodeDraining', 'NodeCordoned',
                'DeviceHealthChanged')
            AND node_id IN (SELECT node_id FROM own)
        )
    )
)
SELECT ordinal, strftime(recorded, '%Y-%m-%d %H:%M:%S.%g') AS at, epoch_ns(recorded) AS recorded_at, kind, said_by,
    actor, cause, run_id, node_id, body
FROM (FROM own UNION ALL FROM around) ORDER BY ordinal, run_id
"""
"""What was said of a job and its runs, and what befell the pool and the job's nodes meanwhile."""


@cli.command()
@click.argument("job")
@output_option
@pool_options
def audit(job: str, output: str, data_dir: str | None, pool: str | None, bus_url: str | None) -> None:
    """JOB's whole story from the log, in order and in plain words: who asked, who decided, why, and how it ended.

    What befell its nodes and the pool meanwhile is part of it: faults, takeovers, a node's silence. A job that was
    refused has a story, too. Each sentence names its row in the log and who said so.
    """
    from apportion.cli.log_commands import freshness_text
    from apportion.cli.story import story_lines

    found = run(_story(place_of(data_dir, pool, bus_url), job))
    if output in {"table", "wide"}:
        print("\n".join(story_lines(found["job_id"], found["story"])))
        say(freshness_text(found["freshness"]))
        return
    print_rows(
        found["story"],
        kind="story",
        output=output,
        columns=("ordinal", "recorded", "kind", "said_by", "text"),
        name="ordinal",
        extra={"job_id": found["job_id"], "freshness": found["freshness"], "truncated": found["truncated"]},
    )


async def _story(place: "Place", name: str) -> dict[str, Any]:
    import json

    from apportion.cli.question import ask_sql, job_named, literal
    from apportion.cli.story import told

    job = await job_named(place, name)
    found = await ask_sql(place, _STORY.format(job=literal(job)), limit=FACTS_MAX)
    if not found.rows:
        raise CommandFailed(f"nothing was ever said of {job}", code=Exit.NOT_FOUND)
    rows = [{**row, "body": json.loads(row["body"]) if row["body"] else None} for row in found.rows]
    return {"job_id": job, "story": told(rows), "freshness": found.freshness, "truncated": found.truncated}
