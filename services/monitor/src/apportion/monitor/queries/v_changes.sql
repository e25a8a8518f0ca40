-- Every change of the rules: who is let in and as what (key), queues and their limits, rates and defaults (limits), what use is charged, and which rules and settings each service decided by from then on.
SELECT ordinal, recorded, 'queue' AS what, body ->> '$.queue' AS name, actor, coalesce(body ->> '$.reason', '') AS reason, answers AS wish_seq,
    lag(body) OVER (PARTITION BY body ->> '$.queue' ORDER BY ordinal) AS before, body AS after
FROM v_event WHERE kind = 'QueueUpserted'
UNION ALL
SELECT ordinal, recorded, 'limits', coalesce(body ->> '$.for_tenant', 'the pool'), actor, coalesce(body ->> '$.reason', ''), answers,
    lag(body) OVER (PARTITION BY body ->> '$.for_tenant' ORDER BY ordinal), body
FROM v_event WHERE kind = 'PolicyUpserted'
UNION ALL
SELECT ordinal, recorded, 'rates', body ->> '$.currency', actor, coalesce(body ->> '$.reason', ''), answers,
    lag(body) OVER (ORDER BY ordinal), body
FROM v_event WHERE kind = 'RateCardChanged'
UNION ALL
SELECT ordinal, recorded, 'key', concat_ws('-', body ->> '$.role', nullif(body ->> '$.of', '')), actor, coalesce(body ->> '$.reason', ''), answers,
    lag(body) OVER (PARTITION BY body ->> '$.role', body ->> '$.of' ORDER BY ordinal), body
FROM v_event WHERE kind = 'KeyChanged'
UNION ALL
SELECT ordinal, recorded, 'policy', author, NULL, CASE WHEN is_other THEN 'other rules or settings' ELSE 'the same rules by a new session' END, NULL, before, body
FROM (
    SELECT *, lag(body) OVER mine AS before,
        lag(body ->> '$.core') OVER mine IS DISTINCT FROM body ->> '$.core'
            OR lag(body -> '$.config') OVER mine IS DISTINCT FROM body -> '$.config' AS is_other
    FROM v_event WHERE kind = 'LeaseClaimed' WINDOW mine AS (PARTITION BY author ORDER BY ordinal)
)
