-- What is kept now, for whom and from when to when: nodes for a tenant's reservation, and for the job that was blocked for longest.
WITH said AS (
    SELECT kind, body, ordinal, recorded, body ->> '$.reservation' AS reservation FROM v_event
    WHERE kind IN ('ReservationAdmitted', 'ReservationCancelled', 'NodesReserved')
), admitted AS (
    SELECT * FROM said WHERE kind = 'ReservationAdmitted'
    QUALIFY row_number() OVER (PARTITION BY reservation ORDER BY ordinal DESC) = 1
), placed AS (
    SELECT reservation, arg_max(body, ordinal) AS body, max(ordinal) AS ordinal FROM said
    WHERE kind = 'NodesReserved' AND reservation IS NOT NULL GROUP BY 1
), gone AS (
    SELECT reservation, max(ordinal) AS ordinal FROM said
    WHERE kind = 'ReservationCancelled' OR coalesce(CAST(body -> '$.is_over' AS BOOLEAN), false) GROUP BY 1
), job AS (
    SELECT arg_max(body, ordinal) AS body FROM said WHERE kind = 'NodesReserved' AND reservation IS NULL
)
SELECT admitted.reservation, admitted.body ->> '$.for_tenant' AS tenant, NULL AS job_id,
    CAST(admitted.body -> '$.start_at' AS BIGINT) AS start_at, CAST(admitted.body -> '$.end_at' AS BIGINT) AS end_at,
    CAST(admitted.body -> '$.nodes' AS BIGINT) AS wanted,
    CAST(coalesce(placed.body -> '$.nodes', '[]') AS VARCHAR[]) AS nodes,
    CAST(coalesce(placed.body -> '$.late', '[]') AS VARCHAR[]) AS late,
    coalesce(CAST(admitted.body -> '$.devices' AS BIGINT), 0) AS devices,
    CAST(coalesce(admitted.body -> '$.models', '[]') AS VARCHAR[]) AS models,
    admitted.body ->> '$.actor' AS actor, admitted.body ->> '$.reason' AS reason
FROM admitted LEFT JOIN gone ON gone.reservation = admitted.reservation AND gone.ordinal > admitted.ordinal
LEFT JOIN placed ON placed.reservation = admitted.reservation AND placed.ordinal > admitted.ordinal
WHERE gone.ordinal IS NULL
UNION ALL
SELECT '(oldest blocked job)', NULL, body ->> '$.job_id', CAST(body -> '$.start_at' AS BIGINT), NULL, NULL,
    CAST(body -> '$.nodes' AS VARCHAR[]), [], 0, [], 'service:placer', ''
FROM job WHERE (body -> '$.nodes') IS NOT NULL
