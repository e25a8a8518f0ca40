-- One row a run: where it was, what it held, and how it ended. 'lost' is a run whose node was fenced before its release, or had
-- been when it was placed: then it never held anything.
WITH placed AS (
    SELECT run_id, job_id, tenant, node_id, stream_seq AS placed_seq, recorded_at AS placed_at, body,
        CAST(body -> '$.node_epoch' AS BIGINT) AS node_epoch,
        list_sum(CAST(json_extract(body, '$.slices[*].compute_milli') AS BIGINT[])) AS compute_milli,
        list_sum(CAST(json_extract(body, '$.slices[*].memory_mib') AS BIGINT[])) AS memory_mib
    FROM v_event WHERE kind = 'RunPlaced'
), started AS (
    SELECT run_id, min(recorded_at) AS started_at, count(*) AS times FROM events WHERE type LIKE 'RunStarted.%' GROUP BY run_id
), finished AS (
    SELECT run_id, min(recorded_at) AS finished_at, arg_min(cause, ordinal) AS cause, arg_min(body, ordinal) AS body
    FROM v_event WHERE kind = 'RunFinished' GROUP BY run_id
), released AS (
    SELECT run_id, min(recorded_at) AS released_at, min(stream_seq) AS released_seq
    FROM events WHERE type LIKE 'RunReleased.%' GROUP BY run_id
), fenced AS (
    SELECT unnest(CAST(body -> '$.runs' AS VARCHAR[])) AS run_id, recorded_at AS lost_at, stream_seq AS lost_seq
    FROM v_event WHERE kind = 'NodeFenced'
), lost AS (
    SELECT run_id, min(lost_at) AS lost_at, min(lost_seq) AS lost_seq FROM (
        SELECT * FROM fenced
        UNION ALL
        -- Decided before the fencing was known and stored after it: no agent starts it.
        SELECT placed.run_id, placed.placed_at, placed.placed_seq
        FROM placed JOIN v_event AS before ON before.node_id = placed.node_id AND before.stream_seq < placed.placed_seq
        WHERE before.kind = 'NodeFenced' AND CAST(before.body -> '$.epoch' AS BIGINT) > placed.node_epoch
    ) GROUP BY run_id
), stopped AS (
    SELECT run_id, arg_min(cause, ordinal) AS stop FROM events WHERE type LIKE 'RunStopOrdered.%' GROUP BY run_id
)
SELECT
    placed.run_id, placed.job_id, placed.tenant, placed.node_id,
    placed.node_epoch,
    placed.compute_milli, placed.memory_mib,
    CASE
        WHEN lost.lost_seq < coalesce(released.released_seq, lost.lost_seq + 1) THEN 'lost'
        WHEN released.released_at IS NOT NULL THEN 'released'
        WHEN finished.finished_at IS NOT NULL THEN 'finished'
        WHEN started.started_at IS NOT NULL THEN 'started'
        ELSE 'placed'
    END AS state,
    make_timestamp_ns(placed.placed_at) AS placed,
    -- An agent that was killed before it could say so tells of the start with the end.
    make_timestamp_ns(coalesce(started.started_at, CASE
        WHEN coalesce(CAST(finished.body -> '$.was_started' AS BOOLEAN), true)
        THEN CAST(finished.body -> '$.started_at' AS BIGINT)
    END)) AS started,
    make_timestamp_ns(finished.finished_at) AS finished,
    make_timestamp_ns(released.released_at) AS released,
    make_timestamp_ns(lost.lost_at) AS lost,
    finished.cause,
    CAST(finished.body -> '$.exit_code' AS BIGINT) AS exit_code,
    CAST(finished.body -> '$.signal' AS BIGINT) AS signal,
    stopped.stop,
    coalesce(started.times, 0) AS start_facts,
    placed.placed_seq,
    -- The fact that freed its slices: its release, or the fencing of its node, whichever came first.
    least(released.released_seq, lost.lost_seq) AS freed_seq,
    coalesce(CAST(placed.body -> '$.cpu_milli' AS BIGINT), 0) AS cpu_milli
FROM placed
LEFT JOIN started USING (run_id)
LEFT JOIN finished USING (run_id)
LEFT JOIN released USING (run_id)
LEFT JOIN lost USING (run_id)
LEFT JOIN stopped USING (run_id)
