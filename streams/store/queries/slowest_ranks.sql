-- Ranks by their own time per step over the last 1,000 steps: who computes longest, and who waits for whom
SELECT
    job, attempt, rank, node, count() AS steps,
    round(quantile(0.5)(local_ms), 2) AS local_ms_median,
    round(quantile(0.99)(local_ms), 2) AS local_ms_p99,
    round(quantile(0.5)(wait_ms), 2) AS wait_ms_median,
    round(quantile(0.5)(data_ms), 2) AS data_ms_median,
    round(quantile(0.5)(duration_ms), 2) AS duration_ms_median
FROM steps
INNER JOIN (SELECT job, max(attempt) AS attempt FROM steps GROUP BY job) AS newest USING (job, attempt)
WHERE (job, step) NOT IN (SELECT job, step FROM steps WHERE phase IN ('checkpoint', 'eval'))
    AND step > (SELECT max(step) FROM steps AS s) - 1000
GROUP BY job, attempt, rank, node
ORDER BY local_ms_median DESC, rank
LIMIT 50
