-- Per job and attempt: share of wall time spent in steps that advanced the job, and time lost between attempts
WITH one_step AS
(
    SELECT job, attempt, step, min(ts) AS began, max(duration_ms) / 1000 AS took_s, any(phase) AS phase, max(checkpoint_ms) / 1000 AS saving_s
    FROM steps GROUP BY job, attempt, step
),
kept AS
(
    -- a step that a later attempt did again was lost
    SELECT *, attempt = max(attempt) OVER (PARTITION BY job, step) AS is_kept FROM one_step
)
SELECT
    job, attempt, min(began) AS first_step_at, min(step) AS first_step, max(step) AS last_step,
    round(date_diff('millisecond', min(began), max(began)) / 1000 + argMax(took_s, began), 2) AS wall_s,
    round(date_diff('millisecond', lagInFrame(toNullable(max(began))) OVER (PARTITION BY job ORDER BY attempt), min(began)) / 1000, 1) AS since_last_attempt_s,
    round(sumIf(took_s, is_kept), 2) AS kept_step_s,
    countIf(NOT is_kept) AS steps_done_again,
    round(sum(saving_s), 2) AS saving_s,
    round(100 * sumIf(took_s, is_kept) / nullIf(wall_s, 0), 1) AS goodput_percent
FROM kept
GROUP BY job, attempt
ORDER BY job, attempt
