-- Seconds to detect, decide, act and recover, per kind of fault
SELECT
    kind, count() AS incidents, countIf(status IN ('recovered', 'closed')) AS healed,
    round(quantile(0.5)(detect_s), 2) AS detect_s_median, round(max(detect_s), 2) AS detect_s_worst,
    round(quantile(0.5)(act_s), 2) AS act_s_median,
    round(quantile(0.5)(recover_s), 2) AS recover_s_median, round(max(recover_s), 2) AS recover_s_worst
FROM incidents
WHERE status != 'superseded'
GROUP BY kind
ORDER BY incidents DESC, kind
