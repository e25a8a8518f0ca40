-- Every run that was told to give its slices back so that others get them: who wanted it, what it held, what it had done; and
-- where the placer decided it, which job it was for, by which kind of preemption, and why that may.
WITH decided AS (
    SELECT run_id, arg_min(for_job, ordinal) AS for_job, arg_min(preemption, ordinal) AS preemption, arg_min(rule, ordinal) AS rule FROM (
        SELECT unnest(CAST(body -> '$.runs' AS VARCHAR[])) AS run_id, job_id AS for_job, body ->> '$.kind' AS preemption, body ->> '$.rule' AS rule, ordinal
        FROM v_event WHERE kind = 'PreemptionDecided'
    ) GROUP BY run_id
)
SELECT told.ordinal, told.recorded, told.job_id, told.run_id, run.tenant, told.node_id, told.actor,
    told.body ->> '$.reason' AS reason,
    coalesce(CAST(told.body -> '$.grace_s' AS BIGINT), 0) AS grace_s,
    told.caused_by, run.compute_milli, run.memory_mib, run.cause AS ended_as,
    (epoch_ns(run.finished) - told.recorded_at) // 1000000 AS stopped_after_ms,
    (epoch_ns(coalesce(run.finished, run.lost)) - epoch_ns(run.started)) // 1000000 AS ran_ms,
    decided.for_job, decided.preemption, decided.rule
FROM v_event AS told LEFT JOIN v_run AS run ON run.run_id = told.run_id LEFT JOIN decided ON decided.run_id = told.run_id
WHERE told.kind = 'RunStopOrdered' AND told.cause = 'Preempted'
