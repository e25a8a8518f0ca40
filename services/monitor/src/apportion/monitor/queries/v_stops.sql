-- Every stop of a job or a run: who wanted it, why, and what was said about it.
SELECT ordinal, recorded, kind, tenant, job_id, run_id, node_id, actor, cause, body ->> '$.reason' AS reason, author AS said_by, caused_by
FROM v_event
WHERE kind IN ('JobCancelRequested', 'JobPreemptRequested', 'JobStopping', 'RunStopOrdered', 'JobCancelled', 'JobExpired', 'NodeDraining', 'NodeFenced')
