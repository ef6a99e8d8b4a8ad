-- Opinions that belong to no incident, per detector: what a threshold would have woken somebody for
SELECT detector, version, kind, count() AS verdicts, uniqExact(entity) AS entities, round(avg(confidence), 2) AS confidence_mean, max(ts) AS newest
FROM verdicts
WHERE NOT clears AND verdict_id NOT IN (SELECT arrayJoin(verdict_ids) FROM incidents)
GROUP BY detector, version, kind
ORDER BY verdicts DESC
