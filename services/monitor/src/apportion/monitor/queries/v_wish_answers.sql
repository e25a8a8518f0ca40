-- Every wish with the fact that answered it. Once a pool is at rest each has exactly one.
WITH answer AS (
    SELECT answers AS wish_seq, arg_min(split_part(type, '.', 1), ordinal) AS answer, arg_min(author, ordinal) AS answered_by,
        arg_min(cause, ordinal) AS cause, min(recorded_at) AS answered_at, count(*) AS facts
    FROM events WHERE stream = 'facts' AND answers IS NOT NULL GROUP BY answers
)
SELECT
    wish.stream_seq AS wish_seq, wish.ordinal, wish.recorded, wish.tenant, split_part(wish.type, '.', 1) AS kind, wish.event_id, wish.job_id,
    answer.answer, answer.answered_by, answer.cause, make_timestamp_ns(answer.answered_at) AS answered,
    (answer.answered_at - wish.recorded_at) // 1000000 AS latency_ms,
    coalesce(answer.facts, 0) AS answering_facts, wish.parse_error
FROM events AS wish LEFT JOIN answer ON answer.wish_seq = wish.stream_seq
WHERE wish.stream = 'wishes'
