"""Did the pool keep its word? Counted from the event log by SQL alone: no core, no fold, no service is asked.

Each count is one question. ``claims`` are the ones that must be zero; beside them stand the plain numbers of the story.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

COUNTS: Final[Mapping[str, str]] = {
    "jobs_requested": "SELECT count(*) FROM events WHERE stream = 'wishes' AND type LIKE 'JobRequested%'",
    "jobs_admitted": "SELECT count(*) FROM events WHERE type LIKE 'JobAdmitted.%'",
    "jobs_rejected": "SELECT count(*) FROM events WHERE type LIKE 'JobRejected.%'",
    "jobs_duplicate": "SELECT count(*) FROM events WHERE type LIKE 'JobDuplicate.%'",
    "jobs_succeeded": "SELECT count(*) FROM events WHERE type LIKE 'JobSucceeded.%'",
    "jobs_failed": "SELECT count(*) FROM events WHERE type LIKE 'JobFailed.%'",
    "jobs_cancelled": "SELECT count(*) FROM events WHERE type LIKE 'JobCancelled.%' OR type LIKE 'JobExpired.%'",
    "runs_placed": "SELECT count(*) FROM events WHERE type LIKE 'RunPlaced.%'",
    "runs_started": "SELECT count(*) FROM v_run WHERE started IS NOT NULL",
    # Runs that a fencing took and whose replica was placed again.
    "runs_moved": """
        SELECT count(*) FROM v_run AS gone WHERE gone.state = 'lost' AND EXISTS (
            SELECT 1 FROM v_run AS again
            WHERE again.job_id = gone.job_id AND again.placed_seq > gone.freed_seq
              AND regexp_replace(again.run_id, '/[^/]*$', '') = regexp_replace(gone.run_id, '/[^/]*$', '')
        )
    """,
    "nodes_fenced": "SELECT count(*) FROM events WHERE type LIKE 'NodeFenced.%'",
    "events": "SELECT count(*) FROM events",
}
"""Figures of the story."""

CLAIMS: Final[Mapping[str, str]] = {
    # A request that was stored and has no answer or several, or a job that was admitted and has no end or several.
    "lost": """
        SELECT (SELECT count(*) FROM v_wish_answers WHERE kind = 'JobRequested' AND answering_facts <> 1)
             + (SELECT count(*) FROM v_job WHERE terminal_facts <> 1)
    """,
    # A run that was stated to start more than once, or two attempts of one replica that held slices at the same time.
    "started_twice": """
        SELECT (SELECT count(*) FROM v_run WHERE start_facts > 1)
             + (SELECT count(*) FROM v_run AS one JOIN v_run AS other
                  ON one.job_id = other.job_id AND one.run_id <> other.run_id
                 AND regexp_replace(one.run_id, '/[^/]*$', '') = regexp_replace(other.run_id, '/[^/]*$', '')
                 AND one.placed_seq < other.placed_seq
                 AND (one.freed_seq IS NULL OR one.freed_seq > other.placed_seq))
    """,
    # Moments at which the slices placed on a device were more than it has, in memory or in compute.
    "over_allocated": "SELECT count(*) FROM v_double_slice",
    # A run that was placed on a node after its fencing with the epoch from before it.
    "placed_on_fenced": """
        SELECT count(*) FROM v_run JOIN (
            SELECT node_id, stream_seq, CAST(body -> '$.epoch' AS BIGINT) AS epoch
            FROM v_event WHERE kind = 'NodeFenced'
        ) AS fenced ON fenced.node_id = v_run.node_id
        WHERE v_run.placed_seq > fenced.stream_seq AND v_run.node_epoch < fenced.epoch
    """,
    "started_and_not_ended": "SELECT count(*) FROM v_run WHERE state IN ('placed', 'started', 'finished')",
}
"""Figures that must be zero once every job has ended."""

WAIT_P95_MS: Final = (
    "SELECT CAST(coalesce(quantile_disc(wait_ms, 0.95), 0) AS BIGINT) FROM v_job WHERE wait_ms IS NOT NULL"
)
GPU_S: Final = """
    SELECT coalesce(sum(compute_milli / 1e3 * (epoch_ns(ended) - epoch_ns(started)) / 1e9), 0)
    FROM (SELECT compute_milli, started, least(coalesce(finished, lost), coalesce(lost, finished)) AS ended FROM v_run)
    WHERE started IS NOT NULL AND ended > started
"""
"""GPU-seconds that runs held while they ran."""

REFUSALS: Final = """
    SELECT cause, count(*) AS times FROM events WHERE type LIKE 'JobRejected.%'
    GROUP BY cause ORDER BY times DESC, cause
"""

Ask = Callable[[str], list[tuple[Any, ...]]]


def figures(ask: Ask) -> dict[str, int]:
    """Every count and every claim, by name."""
    # One at a time: all in one statement would need the memory of all of them at once.
    return {name: int(ask(question)[0][0]) for name, question in {**COUNTS, **CLAIMS}.items()}


def broken(found: Mapping[str, int]) -> dict[str, int]:
    """The claims that don't hold, with how often."""
    return {name: found[name] for name in CLAIMS if found[name]}
