-- What nobody looks after any more. Must be empty: a run that nobody placed; slices that are held for a job that ended, or by an
-- attempt that a later one follows, or on a node that was fenced, for more than a minute of the log's own time.
WITH newest AS (
    SELECT coalesce(max(recorded_at), 0) - 60000000000 AS minute_ago FROM main.events
), fenced AS (
    SELECT node_id, CAST(body -> '$.epoch' AS BIGINT) AS epoch, recorded_at FROM v_event WHERE kind = 'NodeFenced'
), holding AS (
    SELECT *, CAST(split_part(run_id, '/', -1) AS BIGINT) AS attempt FROM v_run WHERE freed_seq IS NULL
)
SELECT 'a run that nobody placed' AS what, said.run_id, said.node_id, min(said.recorded) AS since, said.job_id
FROM v_event AS said LEFT JOIN v_run AS run ON run.run_id = said.run_id
WHERE said.kind IN ('RunStarted', 'RunFinished') AND run.run_id IS NULL GROUP BY ALL
UNION ALL
SELECT 'slices of a job that ended', holding.run_id, holding.node_id, job.ended, holding.job_id
FROM holding JOIN v_job AS job USING (job_id) CROSS JOIN newest WHERE epoch_ns(job.ended) < newest.minute_ago
UNION ALL
SELECT 'slices of an attempt that another follows', holding.run_id, holding.node_id, holding.placed, holding.job_id
FROM holding CROSS JOIN newest
WHERE EXISTS (
    SELECT 1 FROM v_run AS later
    WHERE later.job_id = holding.job_id AND CAST(split_part(later.run_id, '/', -1) AS BIGINT) > holding.attempt
        AND epoch_ns(later.placed) < newest.minute_ago
)
UNION ALL
SELECT 'slices on a node that was fenced', holding.run_id, holding.node_id, make_timestamp_ns(min(fenced.recorded_at)), holding.job_id
FROM holding JOIN fenced ON fenced.node_id = holding.node_id AND fenced.epoch > holding.node_epoch CROSS JOIN newest
WHERE fenced.recorded_at > epoch_ns(holding.placed) AND fenced.recorded_at < newest.minute_ago GROUP BY ALL
