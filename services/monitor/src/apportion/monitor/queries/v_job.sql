-- One row a job that was admitted: what it asks for, when it began and ended, and how.
WITH admitted AS (
    SELECT job_id, any_value(tenant) AS tenant, arg_min(body, ordinal) AS body, min(recorded_at) AS admitted_at, min(answers) AS wish_seq
    FROM v_event WHERE kind = 'JobAdmitted' GROUP BY job_id
), wished AS (
    SELECT stream_seq, recorded_at AS requested_at FROM events WHERE stream = 'wishes'
), ran AS (
    SELECT job_id, min(recorded_at) AS first_started_at FROM events WHERE type LIKE 'RunStarted.%' GROUP BY job_id
), requeued AS (
    SELECT job_id, count(*) AS times FROM events WHERE type LIKE 'JobRequeued.%' GROUP BY job_id
), resized AS (
    SELECT job_id, arg_max(body, ordinal) AS body FROM v_event WHERE kind = 'JobResized' GROUP BY job_id
), latest_memory AS (
    -- An attempt that ran out of memory may have raised what the next one asks for.
    SELECT job_id, arg_max(CAST(body -> '$.memory_mib' AS BIGINT), ordinal) AS memory_mib
    FROM v_event WHERE kind = 'JobResized' OR (kind = 'JobRequeued' AND (body -> '$.memory_mib') IS NOT NULL) GROUP BY job_id
), ended AS (
    SELECT job_id, arg_min(kind, ordinal) AS kind, arg_min(cause, ordinal) AS cause, min(recorded_at) AS ended_at, arg_min(body, ordinal) AS body, count(*) AS times
    FROM v_event WHERE kind IN ('JobSucceeded', 'JobFailed', 'JobCancelled', 'JobExpired') GROUP BY job_id
)
SELECT
    admitted.job_id, admitted.tenant,
    admitted.body ->> '$.spec.queue' AS queue,
    admitted.body ->> '$.spec.kind' AS workload,
    coalesce(admitted.body ->> '$.spec.service_class', 'batch') AS service_class,
    coalesce(CAST(admitted.body -> '$.spec.replicas' AS BIGINT), 1) AS replicas,
    coalesce(CAST(admitted.body -> '$.spec.devices' AS BIGINT), 1) AS devices,
    coalesce(CAST(resized.body -> '$.compute_milli' AS BIGINT), CAST(admitted.body -> '$.spec.compute_milli' AS BIGINT), 1000) AS compute_milli,
    coalesce(latest_memory.memory_mib, CAST(admitted.body -> '$.spec.memory_mib' AS BIGINT), 0) AS memory_mib,
    make_timestamp_ns(wished.requested_at) AS requested,
    make_timestamp_ns(admitted.admitted_at) AS admitted,
    make_timestamp_ns(ran.first_started_at) AS first_started,
    make_timestamp_ns(ended.ended_at) AS ended,
    CASE ended.kind
        WHEN 'JobSucceeded' THEN 'succeeded' WHEN 'JobFailed' THEN 'failed' WHEN 'JobCancelled' THEN 'cancelled'
        WHEN 'JobExpired' THEN 'expired' ELSE 'live'
    END AS outcome,
    ended.cause,
    1 + coalesce(requeued.times, 0) AS attempts,
    CAST(ended.body -> '$.wait_ms' AS BIGINT) AS wait_ms,
    CAST(ended.body -> '$.run_ms' AS BIGINT) AS run_ms,
    coalesce(ended.times, 0) AS terminal_facts,
    admitted.wish_seq
FROM admitted
LEFT JOIN wished ON wished.stream_seq = admitted.wish_seq
LEFT JOIN ran USING (job_id)
LEFT JOIN requeued USING (job_id)
LEFT JOIN resized USING (job_id)
LEFT JOIN latest_memory USING (job_id)
LEFT JOIN ended USING (job_id)
