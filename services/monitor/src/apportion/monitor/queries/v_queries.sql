-- Who asked the log what, when, and how it was answered. A statement longer than 4,096 characters is cut; its digest isn't.
SELECT ordinal, recorded, actor,
    body ->> '$.query_id' AS query_id,
    body ->> '$.statement' AS statement,
    body ->> '$.statement_sha256' AS statement_sha256,
    coalesce(CAST(body -> '$.rows' AS BIGINT), 0) AS rows,
    coalesce(CAST(body -> '$.truncated' AS BOOLEAN), false) AS truncated,
    CAST(body -> '$.elapsed_ms' AS BIGINT) AS elapsed_ms,
    CAST(body -> '$.age_ms' AS BIGINT) AS age_ms,
    CAST(body -> '$.log_ordinal' AS BIGINT) AS log_ordinal,
    body ->> '$.refused' AS refused
FROM v_event WHERE kind = 'AuditQueryRun'
