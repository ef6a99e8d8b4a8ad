-- Nodes by the time their faults cost in the last 30 days
SELECT
    culprit_node AS node, count() AS incidents, groupUniqArray(kind) AS kinds, max(recurrence) AS recurrence_highest,
    round(sum(recover_s), 1) AS lost_s, max(coalesce(fault_at, ts)) AS newest
FROM incidents
WHERE culprit_node != '' AND ts > now() - INTERVAL 30 DAY
GROUP BY node
ORDER BY lost_s DESC, incidents DESC
