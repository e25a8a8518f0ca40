-- What each job asks of a device's memory, what was expected of its model, and what its runs and earlier runs of its command used.
-- Counts runs that ended well, the newest 16 of a tenant's command; 'advice' is what admission says to whoever asks for it again.
WITH asked AS (
    SELECT job_id, tenant, arg_min(body ->> '$.spec.command', ordinal) AS command, arg_min(body, ordinal) AS body
    FROM v_event WHERE kind = 'JobAdmitted' GROUP BY ALL
), peak AS (
    -- A run tells the sum over its devices, which are alike.
    SELECT finished.job_id, asked.tenant, asked.command, finished.ordinal,
        CAST(ceil(CAST(finished.body -> '$.peak_memory_mib' AS BIGINT) / greatest(1, json_array_length(placed.body, '$.slices'))) AS BIGINT) AS mib
    FROM v_event AS finished
    JOIN v_event AS placed ON placed.run_id = finished.run_id AND placed.kind = 'RunPlaced'
    JOIN asked ON asked.job_id = finished.job_id
    WHERE finished.kind = 'RunFinished' AND finished.cause = 'Success' AND CAST(finished.body -> '$.peak_memory_mib' AS BIGINT) > 0
), own AS (
    SELECT job_id, max(mib) AS mib FROM peak GROUP BY job_id
), profile AS (
    SELECT tenant, command, count(*) AS runs, max(mib) AS mib
    FROM (SELECT *, row_number() OVER (PARTITION BY tenant, command ORDER BY ordinal DESC) AS age FROM peak) WHERE age <= 16 GROUP BY ALL
), figures AS (
    SELECT asked.job_id, asked.tenant, asked.command, job.memory_mib AS asked_mib,
        CAST(asked.body -> '$.sized.memory_mib_p50' AS BIGINT) AS expected_mib,
        CAST(asked.body -> '$.sized.memory_mib_p95' AS BIGINT) AS expected_p95_mib,
        asked.body ->> '$.sized.family' AS family,
        coalesce(CAST(asked.body -> '$.sized.correction.runs' AS BIGINT), 0) AS corrected_by_runs,
        own.mib AS used_mib, coalesce(profile.runs, 0) AS runs, profile.mib AS used_mib_max,
        -- 15 % above the largest peak, in steps of 256 MiB.
        ((profile.mib * 11500 + 9999) // 10000 + 255) // 256 * 256 AS suggested_mib,
        (job.memory_mib * 10 + 512) // 1024 AS asked_tenths, (profile.mib * 10 + 512) // 1024 AS used_tenths
    FROM asked JOIN v_job AS job USING (job_id) LEFT JOIN own USING (job_id)
    LEFT JOIN profile ON profile.tenant = asked.tenant AND profile.command = asked.command
)
SELECT job_id, tenant, command, asked_mib, family, expected_mib, expected_p95_mib, corrected_by_runs, used_mib, runs, used_mib_max,
    CASE WHEN runs >= 3 AND asked_mib > 0 THEN suggested_mib END AS suggested_mib,
    CASE
        WHEN runs < 3 OR asked_mib = 0 THEN NULL
        WHEN suggested_mib < asked_mib AND (asked_mib - used_mib_max) * 10000 >= asked_mib * 2500
            THEN format('asked {} GiB, never used more than {} GiB in {} runs', asked_text, used_text, runs)
        WHEN used_mib_max * 20 > asked_mib * 19
            THEN format('asked {} GiB, used up to {} GiB in {} runs: little is left', asked_text, used_text, runs)
    END AS advice
FROM (
    SELECT *,
        CASE WHEN asked_tenths % 10 = 0 THEN format('{}', asked_tenths // 10) ELSE format('{}.{}', asked_tenths // 10, asked_tenths % 10) END AS asked_text,
        CASE WHEN used_tenths % 10 = 0 THEN format('{}', used_tenths // 10) ELSE format('{}.{}', used_tenths // 10, used_tenths % 10) END AS used_text
    FROM figures
)
