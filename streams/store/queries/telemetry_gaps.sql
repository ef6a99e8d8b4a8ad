-- Nodes whose telemetry stopped, lags or has holes: newest tick, longest silence, ticks missing, sources that failed
WITH spaced AS
(
    SELECT node, ts, arrived_at, boot_id, seq,
        date_diff('millisecond', lagInFrame(ts, 1, ts) OVER (PARTITION BY node, boot_id ORDER BY seq ROWS BETWEEN 1 PRECEDING AND CURRENT ROW), ts) / 1000 AS silent_s
    FROM host_ticks
)
SELECT
    node, max(ts) AS newest_tick, count() AS ticks, round(max(silent_s), 1) AS longest_silence_s,
    round(quantile(0.99)(date_diff('millisecond', ts, arrived_at) / 1000), 2) AS delay_s_p99,
    sum(expected) - ticks AS missing, any(failed) AS failed_sources
FROM
(
    SELECT node, ts, arrived_at, silent_s,
        if(row_number() OVER (PARTITION BY node, boot_id ORDER BY seq DESC) = 1, max(seq) OVER (PARTITION BY node, boot_id) - min(seq) OVER (PARTITION BY node, boot_id) + 1, 0) AS expected
    FROM spaced
) AS ticks
LEFT JOIN (SELECT node, groupUniqArray(source || ': ' || reason) AS failed FROM gaps GROUP BY node) AS failures USING (node)
GROUP BY node
ORDER BY longest_silence_s DESC, node
