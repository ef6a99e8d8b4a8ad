-- Who was told what, and how often it had to be tried
SELECT ts, receiver, incidents.kind AS kind, incidents.culprit AS culprit, revision, cause, deliveries.attempt AS attempt, deliveries.status AS status, deliveries.reason AS reason
FROM deliveries
LEFT JOIN (SELECT incident_id, kind, culprit FROM incidents) AS incidents USING (incident_id)
ORDER BY ts DESC
LIMIT 200
