-- Where the log contradicts itself. Must be empty, at every moment.
SELECT 'a sequence is missing or twice' AS what, stream AS entity, concat(count(*), ' rows from ', min(stream_seq), ' to ', max(stream_seq)) AS detail
FROM events GROUP BY stream HAVING count(*) <> max(stream_seq) - min(stream_seq) + 1
UNION ALL
SELECT 'the log does not begin at its first row', 'events', concat(count(*), ' rows, the last is ', max(ordinal))
FROM events HAVING count(*) <> max(ordinal)
UNION ALL
SELECT 'a wish has several answers', concat('wish ', wish_seq), concat(answering_facts, ' facts') FROM v_wish_answers WHERE answering_facts > 1
UNION ALL
SELECT 'an answer to no wish', concat(split_part(fact.type, '.', 1), ' at ', fact.stream_seq), concat('wish ', fact.answers)
FROM events AS fact LEFT JOIN events AS wish ON wish.stream = 'wishes' AND wish.stream_seq = fact.answers
WHERE fact.stream = 'facts' AND fact.answers > 0 AND wish.stream_seq IS NULL
UNION ALL
SELECT 'a job ended several times', job_id, concat(terminal_facts, ' facts') FROM v_job WHERE terminal_facts > 1
UNION ALL
SELECT 'a run started several times', run_id, concat(start_facts, ' facts') FROM v_run WHERE start_facts > 1
UNION ALL
SELECT 'a run was placed several times', run_id, concat(count(*), ' facts') FROM events WHERE type LIKE 'RunPlaced.%' GROUP BY run_id HAVING count(*) > 1
UNION ALL
SELECT 'a run of a job that nobody admitted', run.run_id, run.job_id FROM v_run AS run LEFT JOIN v_job AS job USING (job_id) WHERE job.job_id IS NULL
UNION ALL
SELECT 'a run told of by another node than its own', run.run_id, concat('placed on ', run.node_id, ', told by ', said.node_id)
FROM v_run AS run JOIN events AS said ON said.run_id = run.run_id AND said.author LIKE 'agent-%' AND said.node_id <> run.node_id
UNION ALL
SELECT 'two attempts of a replica at once', later.run_id, earlier.run_id
FROM v_run AS earlier JOIN v_run AS later
    ON later.job_id = earlier.job_id AND later.placed_seq > earlier.placed_seq
    AND regexp_replace(later.run_id, '/[^/]*$', '') = regexp_replace(earlier.run_id, '/[^/]*$', '')
WHERE later.placed_seq < coalesce(earlier.freed_seq, 9223372036854775807)
