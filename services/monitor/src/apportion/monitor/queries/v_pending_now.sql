-- Jobs that wait for slices, and the newest reason that was given.
WITH newest AS (
    SELECT job_id, arg_max(kind, ordinal) AS kind, max(ordinal) AS ordinal, arg_max(recorded, ordinal) AS since, any_value(tenant) AS tenant
    FROM v_event
    WHERE kind IN ('JobAdmitted', 'JobRequeued', 'RunPlaced', 'JobStopping', 'JobSucceeded', 'JobFailed', 'JobCancelled', 'JobExpired')
    GROUP BY job_id
), reason AS (
    SELECT job_id, arg_max(cause, ordinal) AS code, arg_max(body, ordinal) AS body, max(ordinal) AS ordinal
    FROM v_event WHERE kind = 'JobPendingReasonChanged' GROUP BY job_id
)
SELECT
    newest.job_id, newest.tenant, newest.since,
    CASE WHEN reason.ordinal > newest.ordinal THEN reason.code ELSE 'PendingEvaluation' END AS code,
    CASE WHEN reason.ordinal > newest.ordinal THEN reason.body ->> '$.hint' END AS hint,
    CASE WHEN reason.ordinal > newest.ordinal THEN reason.body -> '$.requested' END AS requested,
    CASE WHEN reason.ordinal > newest.ordinal THEN reason.body -> '$.available' END AS available,
    CASE WHEN reason.ordinal > newest.ordinal THEN reason.body -> '$.limit' END AS "limit",
    CASE WHEN reason.ordinal > newest.ordinal THEN reason.body -> '$.blocking_ids' END AS blocking_ids
FROM newest LEFT JOIN reason USING (job_id)
WHERE newest.kind IN ('JobAdmitted', 'JobRequeued')
