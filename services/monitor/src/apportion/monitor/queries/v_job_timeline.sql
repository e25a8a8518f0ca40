-- Everything that was said of a job and of its runs, in the order of the log. The fencing that took its runs is part of it.
SELECT ordinal, recorded, job_id, run_id, node_id, coalesce(author, tenant) AS said_by, kind, cause, actor, body
FROM v_event WHERE job_id IS NOT NULL
UNION ALL
SELECT fenced.ordinal, fenced.recorded, regexp_replace(fenced.run_id, '/[^/]*/[^/]*$', '') AS job_id, fenced.run_id, fenced.node_id,
    fenced.author AS said_by, fenced.kind, fenced.cause, fenced.actor, fenced.body
FROM (
    SELECT ordinal, recorded, unnest(CAST(body -> '$.runs' AS VARCHAR[])) AS run_id, node_id, author, kind, cause, actor, body
    FROM v_event WHERE kind = 'NodeFenced'
) AS fenced
UNION ALL
-- A wish need not name its job: admission's answer does.
SELECT asked.ordinal, asked.recorded, admitted.job_id, asked.run_id, asked.node_id, coalesce(asked.author, asked.tenant), asked.kind, asked.cause, asked.actor, asked.body
FROM v_event AS asked JOIN (
    SELECT job_id, answers FROM v_event WHERE kind = 'JobAdmitted' AND answers IS NOT NULL
) AS admitted ON asked.kind = 'JobRequested' AND asked.job_id IS NULL AND asked.stream_seq = admitted.answers
