-- What the automation did and refused to do, newest first
SELECT
    ts, job, incidents.kind AS kind, incidents.culprit AS culprit, verb, target, actions.status AS status, mode, rail, reason,
    round((toUnixTimestamp64Milli(finished_at) - toUnixTimestamp64Milli(started_at)) / 1000, 2) AS took_s
FROM actions
LEFT JOIN (SELECT incident_id, kind, culprit FROM incidents) AS incidents USING (incident_id)
ORDER BY ts DESC, seq DESC
LIMIT 200
