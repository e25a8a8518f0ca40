-- Every check of every isolation test: what was measured, beside what its control measured without enforcement.
SELECT ordinal, recorded, body ->> '$.test_id' AS test_id, node_id, body ->> '$.device_uuid' AS device_uuid,
    body ->> '$.model' AS model, body ->> '$.mode' AS mode, body ->> '$.test' AS test, body ->> '$.verdict' AS verdict,
    part ->> '$.name' AS check_name, part ->> '$.verdict' AS check_verdict, part -> '$.figures' AS figures,
    part -> '$.control' AS control, part ->> '$.detail' AS detail, body ->> '$.driver_version' AS driver_version,
    body ->> '$.cuda_version' AS cuda_version, coalesce(CAST(body -> '$.simulated' AS BOOLEAN), false) AS simulated,
    ordinal = max(ordinal) OVER (PARTITION BY body ->> '$.device_uuid', body ->> '$.mode', body ->> '$.test') AS is_latest
FROM (SELECT *, unnest(CAST(body -> '$.checks' AS JSON[])) AS part FROM v_event WHERE kind = 'IsolationVerdict')
