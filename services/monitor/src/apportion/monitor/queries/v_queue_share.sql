-- What each queue may hold and holds now, and how much of the pool that is (millionths of the devices that are registered).
WITH queue AS (
    SELECT body ->> '$.queue' AS queue, arg_max(body, ordinal) AS body FROM v_event WHERE kind = 'QueueUpserted' GROUP BY 1
), total AS (
    SELECT CAST(coalesce(sum(CAST(coalesce(device -> '$.compute_milli', '1000') AS BIGINT)), 0) AS BIGINT) AS compute_milli
    FROM (
        SELECT unnest(CAST(arg_max(body, ordinal) -> '$.devices' AS JSON[])) AS device FROM v_event WHERE kind = 'NodeRegistered' GROUP BY node_id
    )
), held AS (
    SELECT job.queue, CAST(sum(run.compute_milli) AS BIGINT) AS compute_milli, CAST(sum(run.memory_mib) AS BIGINT) AS memory_mib, count(*) AS runs
    FROM v_run AS run JOIN v_job AS job USING (job_id) WHERE run.freed_seq IS NULL GROUP BY 1
), live AS (
    SELECT queue, count(*) AS jobs FROM v_job WHERE outcome = 'live' GROUP BY 1
)
SELECT coalesce(queue.queue, live.queue, held.queue) AS queue,
    CAST(queue.body -> '$.tenants' AS VARCHAR[]) AS tenants,
    CAST(queue.body -> '$.limit_compute_milli' AS BIGINT) AS limit_compute_milli,
    CAST(queue.body -> '$.limit_memory_mib' AS BIGINT) AS limit_memory_mib,
    CAST(queue.body -> '$.limit_jobs' AS BIGINT) AS limit_jobs,
    coalesce(held.compute_milli, 0) AS held_compute_milli,
    coalesce(held.memory_mib, 0) AS held_memory_mib,
    coalesce(held.runs, 0) AS runs,
    coalesce(live.jobs, 0) AS live_jobs,
    CASE WHEN total.compute_milli > 0 THEN coalesce(held.compute_milli, 0) * 1000000 // total.compute_milli END AS share_ppm
FROM queue FULL JOIN live USING (queue) FULL JOIN held USING (queue) CROSS JOIN total
