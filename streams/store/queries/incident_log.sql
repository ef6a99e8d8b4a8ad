-- Incidents, newest first: culprit, state, and the moments by which healing is judged
SELECT
    incident_id, job, kind, severity, status, culprit, round(confidence, 2) AS confidence, fault_at, detect_s, act_s, recover_s, last_step,
    close_reason, title
FROM incidents
ORDER BY coalesce(fault_at, verdict_at, ts) DESC
LIMIT 100
