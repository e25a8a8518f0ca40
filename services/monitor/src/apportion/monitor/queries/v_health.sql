-- Everything that was said of the health and use of nodes and devices, in order.
SELECT ordinal, recorded, node_id, body ->> '$.device_uuid' AS device_uuid, kind, author AS said_by,
    body ->> '$.before' AS before, body ->> '$.after' AS after,
    coalesce(body ->> '$.code', body ->> '$.rule', cause) AS code,
    coalesce(body ->> '$.reason', body ->> '$.detail', '') AS reason,
    actor,
    CAST(body -> '$.epoch' AS BIGINT) AS epoch,
    CAST(body -> '$.silent_ms' AS BIGINT) AS silent_ms,
    coalesce(json_array_length(body -> '$.runs'), 0) AS runs_lost
FROM v_event
WHERE kind IN (
    'NodeRegistered', 'DeviceHealthChanged', 'NodeSuspected', 'NodeTrusted', 'NodeLost', 'NodeFenced', 'NodeRecovered',
    'NodeCordoned', 'NodeDraining', 'NodeUncordoned', 'ControlPlaneFrozen', 'ControlPlaneThawed'
)
