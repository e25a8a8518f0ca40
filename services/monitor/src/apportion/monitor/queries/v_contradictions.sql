-- Where what is said of a job contradicts itself. Must be empty, at every moment.
SELECT 'a job ended several times' AS what, job_id AS entity, concat(terminal_facts, ' facts') AS detail, job_id FROM v_job WHERE terminal_facts > 1
UNION ALL
SELECT 'a run started several times', run_id, concat(start_facts, ' facts'), job_id FROM v_run WHERE start_facts > 1
UNION ALL
SELECT 'a run was placed several times', run_id, concat(count(*), ' facts'), any_value(job_id) FROM events WHERE type LIKE 'RunPlaced.%' GROUP BY run_id HAVING count(*) > 1
UNION ALL
SELECT 'a run of a job that nobody admitted', run.run_id, run.job_id, run.job_id FROM v_run AS run LEFT JOIN v_job AS job USING (job_id) WHERE job.job_id IS NULL
UNION ALL
SELECT 'a run told of by another node than its own', run.run_id, concat('placed on ', run.node_id, ', told by ', said.node_id), run.job_id
FROM v_run AS run JOIN events AS said ON said.run_id = run.run_id AND said.author LIKE 'agent-%' AND said.node_id <> run.node_id
UNION ALL
SELECT 'two attempts of a replica at once', later.run_id, earlier.run_id, later.job_id
FROM v_run AS earlier JOIN v_run AS later
    ON later.job_id = earlier.job_id AND later.placed_seq > earlier.placed_seq
    AND regexp_replace(later.run_id, '/[^/]*$', '') = regexp_replace(earlier.run_id, '/[^/]*$', '')
WHERE later.placed_seq < coalesce(earlier.freed_seq, 9223372036854775807)
