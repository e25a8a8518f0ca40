-- What was ordered of the log's older rows, by whom and why: days that are sealed, legal holds and their ends, payloads
-- that are erased, one by one (erase) or by the retention in force (forget), and that retention itself. 'state' of a hold is
-- 'holds' or 'released', of an erasure 'erased' or 'waits' (for the end of a hold, or its turn).
SELECT said.ordinal, said.recorded,
    CASE said.kind WHEN 'LogSealOrdered' THEN 'seal' WHEN 'LegalHoldPlaced' THEN 'hold' WHEN 'LegalHoldReleased' THEN 'release'
        WHEN 'PayloadsEraseOrdered' THEN 'forget' WHEN 'LogRetentionChanged' THEN 'retention' ELSE 'erase' END AS what,
    coalesce(said.body ->> '$.hold_id', CASE WHEN said.kind = 'PayloadEraseOrdered' THEN concat(said.body ->> '$.stream', ' ', said.body ->> '$.stream_seq') END,
        CASE WHEN said.kind = 'LogRetentionChanged' THEN concat('payload_days ', coalesce(said.body ->> '$.payload_days', '0'), ', seal_daily ', coalesce(said.body ->> '$.seal_daily', 'false')) END, '') AS about,
    said.tenant, said.job_id,
    make_timestamp_ns(nullif(CAST(said.body -> '$.since_at' AS BIGINT), 0)) AS since,
    make_timestamp_ns(nullif(coalesce(CAST(said.body -> '$.until_at' AS BIGINT), CAST(said.body -> '$.before_at' AS BIGINT)), 0)) AS until,
    CASE
        WHEN said.kind = 'LegalHoldPlaced' THEN CASE WHEN released.hold_id IS NULL THEN 'holds' ELSE 'released' END
        WHEN said.kind = 'PayloadEraseOrdered' THEN CASE WHEN erased.ordinal IS NULL THEN 'waits' ELSE 'erased' END
        ELSE 'ordered'
    END AS state,
    erased.ordinal AS erased_ordinal, said.actor, said.body ->> '$.reason' AS reason, said.answers AS wish_seq
FROM v_event AS said
LEFT JOIN (
    SELECT DISTINCT body ->> '$.hold_id' AS hold_id FROM v_event WHERE kind = 'LegalHoldReleased'
) AS released ON released.hold_id = said.body ->> '$.hold_id' AND said.kind = 'LegalHoldPlaced'
LEFT JOIN (SELECT ordinal, stream, stream_seq FROM events WHERE payload IS NULL) AS erased
    ON said.kind = 'PayloadEraseOrdered' AND erased.stream = said.body ->> '$.stream' AND erased.stream_seq = CAST(said.body -> '$.stream_seq' AS BIGINT)
WHERE said.kind IN ('LogSealOrdered', 'LegalHoldPlaced', 'LegalHoldReleased', 'PayloadEraseOrdered', 'PayloadsEraseOrdered', 'LogRetentionChanged')
