-- Every job that lost its place and runs again: why, from where to where, for how long it was down, what it does again.
SELECT ordinal, recorded, job_id, tenant, cause, CAST(body -> '$.attempt' AS BIGINT) AS attempt,
    CAST(body -> '$.from_nodes' AS VARCHAR[]) AS from_nodes,
    CAST(body -> '$.to_nodes' AS VARCHAR[]) AS to_nodes,
    coalesce(CAST(body -> '$.downtime_ms' AS BIGINT), 0) AS downtime_ms,
    coalesce(CAST(body -> '$.lost_work_s' AS BIGINT), 0) AS lost_work_s,
    coalesce(CAST(body -> '$.kept_work_s' AS BIGINT), 0) AS kept_work_s, caused_by
FROM v_event WHERE kind = 'MigrationCompleted'
