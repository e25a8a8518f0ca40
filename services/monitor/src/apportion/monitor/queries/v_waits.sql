-- Every wait of a job for slices: one row an attempt, from its admission or requeue to its first start, with the reasons given.
WITH queued AS (
    SELECT job_id, 1 AS attempt, recorded_at AS queued_at, ordinal FROM v_event WHERE kind = 'JobAdmitted'
    UNION ALL
    SELECT job_id, CAST(body -> '$.attempt' AS BIGINT), recorded_at, ordinal FROM v_event WHERE kind = 'JobRequeued'
), span AS (
    SELECT *, lead(ordinal, 1, 9223372036854775807) OVER (PARTITION BY job_id ORDER BY ordinal) AS next_ordinal FROM queued
), run AS (
    SELECT job_id, CAST(split_part(run_id, '/', -1) AS BIGINT) AS attempt, min(epoch_ns(placed)) AS placed_at, min(epoch_ns(started)) AS started_at
    FROM v_run GROUP BY ALL
), reason AS (
    SELECT span.job_id, span.attempt, list(said.cause ORDER BY said.ordinal) AS codes
    FROM span JOIN events AS said ON said.job_id = span.job_id AND said.ordinal > span.ordinal AND said.ordinal < span.next_ordinal
    WHERE said.type LIKE 'JobPendingReasonChanged.%' GROUP BY ALL
)
SELECT span.job_id, job.tenant, job.queue, job.service_class, span.attempt,
    make_timestamp_ns(span.queued_at) AS queued, make_timestamp_ns(run.placed_at) AS placed, make_timestamp_ns(run.started_at) AS started,
    (run.placed_at - span.queued_at) // 1000000 AS placed_after_ms,
    (run.started_at - span.queued_at) // 1000000 AS wait_ms,
    coalesce(reason.codes, []) AS codes
FROM span JOIN v_job AS job USING (job_id) LEFT JOIN run USING (job_id, attempt) LEFT JOIN reason USING (job_id, attempt)
