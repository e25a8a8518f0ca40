-- Every decision: who decided what, from which basis, by which rules, and what else was considered.
SELECT
    ordinal, recorded, stream_seq, author, kind, job_id, run_id, node_id, cause, basis_facts, basis_wishes,
    make_timestamp_ns(decided_at) AS decided, policy,
    body -> '$.candidates' AS candidates, body -> '$.excluded' AS excluded, event_id
FROM v_event
WHERE stream = 'facts' AND decided_at IS NOT NULL
