-- Every event, newest last: what the log says of it, and its payload as JSON where it could be read.
SELECT
    ordinal, recorded, recorded_at, stream, stream_seq, split_part(type, '.', 1) AS kind, type, event_id, tenant, job_id,
    run_id, node_id, author, actor, cause, answers, caused_by, traceparent, basis_facts, basis_wishes, decided_at, policy,
    parse_error, headers, -- A stranger's bytes may decode for us and not for DuckDB: one such message must not spoil every question.
    CASE WHEN parse_error IS NULL THEN TRY_CAST(TRY(decode(payload)) AS JSON) END AS body
FROM events
