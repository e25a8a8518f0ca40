-- Moments at which the runs on a device held more of it than it has. Must be empty.
-- In the order of the facts: a slice is held from RunPlaced until RunReleased or the fencing of the node.
WITH capacity AS (
    SELECT device ->> '$.uuid' AS device_uuid,
        max(CAST(coalesce(device -> '$.compute_milli', '1000') AS BIGINT)) AS compute_milli,
        max(CAST(device -> '$.memory_mib' AS BIGINT)) AS memory_mib
    FROM (SELECT unnest(CAST(body -> '$.devices' AS JSON[])) AS device FROM v_event WHERE kind = 'NodeRegistered')
    GROUP BY ALL
), held AS (
    SELECT run_id, placed_seq, freed_seq, device_uuid, compute_milli, memory_mib FROM v_usage
), change AS (
    SELECT device_uuid, run_id, placed_seq AS seq, compute_milli, memory_mib FROM held
    UNION ALL
    SELECT device_uuid, run_id, freed_seq, -compute_milli, -memory_mib FROM held WHERE freed_seq IS NOT NULL
), total AS (
    SELECT device_uuid, run_id, seq,
        sum(compute_milli) OVER upto AS compute_milli,
        sum(memory_mib) OVER upto AS memory_mib
    FROM change
    -- One fencing frees many slices at one sequence: only the sum after all of them counts.
    WINDOW upto AS (PARTITION BY device_uuid ORDER BY seq RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
)
SELECT total.device_uuid, total.seq AS fact_seq, total.run_id, total.compute_milli, total.memory_mib,
    capacity.compute_milli AS device_compute_milli, capacity.memory_mib AS device_memory_mib
FROM total LEFT JOIN capacity USING (device_uuid)
WHERE total.compute_milli > coalesce(capacity.compute_milli, 0) OR total.memory_mib > coalesce(capacity.memory_mib, 0)
