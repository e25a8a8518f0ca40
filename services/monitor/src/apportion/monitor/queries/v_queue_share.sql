-- What each queue may hold, what is guaranteed to it and what it holds now, queues below it included; what of that it borrows; and
-- how much of the pool that is (millionths of what is registered, of milli-GPU and of whatever it has most of).
WITH RECURSIVE said AS (
    SELECT body ->> '$.queue' AS queue, arg_max(body, ordinal) AS body FROM v_event WHERE kind = 'QueueUpserted' GROUP BY 1
), mentioned AS (
    SELECT queue FROM said UNION SELECT queue FROM v_job
), queue AS (
    SELECT queue, body, body ->> '$.parent' AS parent FROM mentioned LEFT JOIN said USING (queue)
), above AS (
    -- Each queue with itself and those above it: who holds something in the one holds it in the other.
    SELECT queue AS held_in, queue, 0 AS levels FROM queue
    UNION ALL
    SELECT above.held_in, queue.parent, above.levels + 1 FROM above JOIN queue USING (queue) WHERE queue.parent IS NOT NULL AND above.levels < 8
), node AS (
    SELECT arg_max(body, ordinal) AS body FROM v_event WHERE kind = 'NodeRegistered' GROUP BY node_id
), device AS (
    SELECT unnest(CAST(body -> '$.devices' AS JSON[])) AS device FROM node
), total AS (
    SELECT CAST(coalesce(sum(CAST(coalesce(device -> '$.compute_milli', '1000') AS BIGINT)), 0) AS BIGINT) AS compute_milli,
        CAST(coalesce(sum(CAST(device -> '$.memory_mib' AS BIGINT)), 0) AS BIGINT) AS memory_mib,
        (SELECT CAST(coalesce(sum(CAST(body -> '$.cpu_milli' AS BIGINT)), 0) AS BIGINT) FROM node) AS cpu_milli
    FROM device
), run AS (
    SELECT job.queue, run.job_id, run.compute_milli, run.memory_mib, run.cpu_milli
    FROM v_run AS run JOIN v_job AS job USING (job_id) WHERE run.freed_seq IS NULL
), held AS (
    SELECT above.queue, CAST(sum(run.compute_milli) AS BIGINT) AS compute_milli, CAST(sum(run.memory_mib) AS BIGINT) AS memory_mib,
        CAST(sum(run.cpu_milli) AS BIGINT) AS cpu_milli, count(DISTINCT run.job_id) AS jobs, count(*) AS runs
    FROM run JOIN above ON above.held_in = run.queue GROUP BY 1
), live AS (
    SELECT above.queue, count(*) AS jobs, count(pending.job_id) AS waiting
    FROM v_job AS job JOIN above ON above.held_in = job.queue LEFT JOIN v_pending_now AS pending USING (job_id)
    WHERE job.outcome = 'live' GROUP BY 1
)
SELECT queue.queue,
    CAST(coalesce(queue.body -> '$.tenants', '[]') AS VARCHAR[]) AS tenants,
    CAST(queue.body -> '$.limit_compute_milli' AS BIGINT) AS limit_compute_milli,
    CAST(queue.body -> '$.limit_memory_mib' AS BIGINT) AS limit_memory_mib,
    CAST(queue.body -> '$.limit_jobs' AS BIGINT) AS limit_jobs,
    coalesce(held.compute_milli, 0) AS held_compute_milli,
    coalesce(held.memory_mib, 0) AS held_memory_mib,
    coalesce(held.runs, 0) AS runs,
    coalesce(live.jobs, 0) AS live_jobs,
    CASE WHEN total.compute_milli > 0 THEN coalesce(held.compute_milli, 0) * 1000000 // total.compute_milli END AS share_ppm,
    queue.parent,
    CAST(queue.body -> '$.guaranteed_compute_milli' AS BIGINT) AS guaranteed_compute_milli,
    CAST(queue.body -> '$.guaranteed_memory_mib' AS BIGINT) AS guaranteed_memory_mib,
    greatest(0, coalesce(held.compute_milli, 0) - coalesce(CAST(queue.body -> '$.guaranteed_compute_milli' AS BIGINT), 0)) AS borrowed_compute_milli,
    CAST(queue.body -> '$.limit_cpu_milli' AS BIGINT) AS limit_cpu_milli,
    coalesce(held.cpu_milli, 0) AS held_cpu_milli,
    coalesce(held.jobs, 0) AS held_jobs,
    coalesce(live.waiting, 0) AS waiting,
    coalesce(CAST(queue.body -> '$.weight' AS BIGINT), 1) AS weight,
    greatest(
        coalesce(held.compute_milli * 1000000 // nullif(total.compute_milli, 0), 0),
        coalesce(held.memory_mib * 1000000 // nullif(total.memory_mib, 0), 0),
        coalesce(held.cpu_milli * 1000000 // nullif(total.cpu_milli, 0), 0)
    ) AS dominant_ppm,
    coalesce(CAST(queue.body -> '$.is_cordoned' AS BOOLEAN), false) AS is_cordoned,
    CAST(queue.body -> '$.guaranteed_cpu_milli' AS BIGINT) AS guaranteed_cpu_milli,
    CAST(queue.body -> '$.guaranteed_jobs' AS BIGINT) AS guaranteed_jobs,
    coalesce(queue.body -> '$.guaranteed_model_milli', '{}') AS guaranteed_model_milli,
    coalesce(queue.body -> '$.limit_model_milli', '{}') AS limit_model_milli,
    coalesce(queue.body -> '$.weights', '{}') AS weights,
    coalesce(queue.body ->> '$.on_lowered', 'keep') AS on_lowered
FROM queue LEFT JOIN live USING (queue) LEFT JOIN held USING (queue) CROSS JOIN total
