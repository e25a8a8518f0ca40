-- Every alert that was raised: what of, how bad, when it cleared, and who had said that they look at it.
SELECT raised.ordinal, raised.recorded, raised.body ->> '$.rule' AS rule, coalesce(raised.body ->> '$.about', '') AS about,
    raised.body ->> '$.severity' AS severity, CAST(raised.body -> '$.value' AS BIGINT) AS value,
    CAST(raised.body -> '$.threshold' AS BIGINT) AS threshold, raised.body ->> '$.unit' AS unit,
    raised.body ->> '$.summary' AS summary, cleared.recorded AS cleared,
    (cleared.recorded_at - raised.recorded_at) // 1000000000 AS fired_s,
    (
        SELECT arg_max(seen.actor, seen.ordinal) FROM v_event AS seen
        WHERE seen.kind = 'AlertAcknowledged' AND seen.body ->> '$.rule' = raised.body ->> '$.rule'
            AND coalesce(seen.body ->> '$.about', '') = coalesce(raised.body ->> '$.about', '')
            AND seen.ordinal > raised.ordinal AND (cleared.ordinal IS NULL OR seen.ordinal < cleared.ordinal)
    ) AS acknowledged_by
FROM v_event AS raised LEFT JOIN v_event AS cleared
    ON cleared.kind = 'AlertCleared' AND CAST(cleared.body -> '$.raised_seq' AS BIGINT) = raised.stream_seq
WHERE raised.kind = 'AlertRaised'
