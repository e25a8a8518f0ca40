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
SELECT what, entity, detail FROM v_contradictions
