-- What every run held of every device, and for how long: one row a slice, from RunPlaced until RunReleased or the fencing of its
-- node. Whole milliseconds by the stream's clock; a slice that is held still counts until the log's last row. Requested is what
-- the job asked for, allocated what it was given, used what it had while its process ran: the whole share of compute, and the
-- most memory that was seen in use (NULL where nobody looked).
WITH newest AS (
    SELECT coalesce(max(recorded_at), 0) AS at FROM main.events
), device AS (
    SELECT device ->> '$.uuid' AS device_uuid, arg_max(device ->> '$.model', ordinal) AS model
    FROM (SELECT unnest(CAST(body -> '$.devices' AS JSON[])) AS device, ordinal FROM v_event WHERE kind = 'NodeRegistered')
    GROUP BY 1
), asked AS (
    SELECT job_id, stream_seq AS asked_seq,
        coalesce(CAST(coalesce(body -> '$.spec.compute_milli', body -> '$.compute_milli') AS BIGINT), 1000) AS compute_milli,
        coalesce(CAST(coalesce(body -> '$.spec.memory_mib', body -> '$.memory_mib') AS BIGINT), 0) AS memory_mib
    FROM v_event WHERE kind IN ('JobAdmitted', 'JobResized')
), told AS (
    SELECT job_id, arg_min(body ->> '$.spec.queue', ordinal) AS queue,
        arg_min(coalesce(body ->> '$.spec.service_class', 'batch'), ordinal) AS service_class,
        arg_min(body ->> '$.spec.kind', ordinal) AS workload
    FROM v_event WHERE kind = 'JobAdmitted' GROUP BY job_id
), peak AS (
    SELECT run_id, arg_min(CAST(body -> '$.peak_memory_mib' AS BIGINT), ordinal) AS memory_mib FROM v_event WHERE kind = 'RunFinished' GROUP BY run_id
), slice AS (
    SELECT run_id, stream_seq AS placed_seq, place, slices[place] AS slice, len(slices) AS many
    FROM (
        SELECT run_id, stream_seq, slices, unnest(range(1, len(slices) + 1)) AS place
        FROM (SELECT run_id, stream_seq, CAST(body -> '$.slices' AS JSON[]) AS slices FROM v_event WHERE kind = 'RunPlaced')
    )
), held AS (
    SELECT run.*, slice.place, slice.many, slice.slice ->> '$.device_uuid' AS device_uuid, slice.slice ->> '$.mode' AS mode,
        CAST(slice.slice -> '$.compute_milli' AS BIGINT) AS slice_milli,
        CAST(slice.slice -> '$.memory_mib' AS BIGINT) AS slice_mib,
        epoch_ns(run.placed) AS held_from,
        CASE
            WHEN run.freed_seq IS NULL THEN NULL
            WHEN run.state = 'lost' THEN epoch_ns(run.lost)
            ELSE epoch_ns(run.released)
        END AS held_to
    FROM v_run AS run JOIN slice ON slice.run_id = run.run_id AND slice.placed_seq = run.placed_seq
), spent AS (
    SELECT held.*,
        coalesce(held.held_to, newest.at) // 1000000 - held.held_from // 1000000 AS held_ms,
        CASE WHEN held.started IS NULL THEN 0 ELSE greatest(0,
            least(coalesce(epoch_ns(held.finished), newest.at), coalesce(held.held_to, newest.at)) // 1000000
            - greatest(epoch_ns(held.started), held.held_from) // 1000000
        ) END AS running_ms,
        -- What was seen in use is a sum over the run's devices; parted so that the parts add up to it.
        peak.memory_mib * held.place // held.many - peak.memory_mib * (held.place - 1) // held.many AS peak_mib
    FROM held CROSS JOIN newest LEFT JOIN peak ON peak.run_id = held.run_id
)
SELECT spent.run_id, spent.job_id, spent.tenant, coalesce(told.queue, '') AS queue,
    coalesce(told.service_class, 'batch') AS service_class, coalesce(told.workload, '') AS workload,
    spent.mode, coalesce(device.model, '') AS model, spent.node_id, spent.device_uuid,
    coalesce(asked.compute_milli, spent.slice_milli) AS requested_compute_milli,
    coalesce(nullif(asked.memory_mib, 0), spent.slice_mib) AS requested_memory_mib,
    spent.slice_milli AS compute_milli, spent.slice_mib AS memory_mib, spent.peak_mib AS peak_memory_mib,
    make_timestamp_ns(spent.held_from) AS held_from, make_timestamp_ns(spent.held_to) AS held_to,
    spent.started, CASE WHEN spent.started IS NOT NULL THEN spent.finished END AS ended,
    spent.held_ms, spent.running_ms,
    requested_compute_milli * spent.held_ms AS requested_milli_ms,
    spent.slice_milli * spent.held_ms AS allocated_milli_ms,
    spent.slice_milli * spent.running_ms AS used_milli_ms,
    requested_memory_mib * spent.held_ms AS requested_mib_ms,
    spent.slice_mib * spent.held_ms AS allocated_mib_ms,
    spent.peak_mib * spent.running_ms AS used_mib_ms,
    spent.placed_seq, spent.freed_seq
FROM spent LEFT JOIN told USING (job_id) LEFT JOIN device USING (device_uuid)
ASOF LEFT JOIN asked ON asked.job_id = spent.job_id AND spent.placed_seq >= asked.asked_seq
