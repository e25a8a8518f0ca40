-- What use is charged, by whom it was set and why: one row a rate of each card. A card counts from its instant until the next one's.
SELECT ordinal, recorded, make_timestamp_ns(CAST(body -> '$.effective_at' AS BIGINT)) AS effective, body ->> '$.currency' AS currency,
    rate ->> '$.pricing' AS pricing, coalesce(rate ->> '$.model', '') AS model, coalesce(CAST(rate -> '$.queues' AS VARCHAR[]), []) AS queues,
    CAST(rate -> '$.micro_per_gpu_hour' AS BIGINT) AS micro_per_gpu_hour,
    coalesce(CAST(rate -> '$.micro_per_gib_hour' AS BIGINT), 0) AS micro_per_gib_hour, actor, body ->> '$.reason' AS reason
FROM (SELECT *, unnest(CAST(body -> '$.rates' AS JSON[])) AS rate FROM v_event WHERE kind = 'RateCardChanged')
