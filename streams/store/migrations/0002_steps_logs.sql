-- Steps and log events as the jobs and nodes told them.

-- ts = start of the step. local_ms = from the start until the last gradient bucket was handed over: the rank's own time, before it
-- waits for the others. Microseconds, because the order of arrival within a step is decided by them.
CREATE TABLE IF NOT EXISTS steps
(
    ts DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    world UInt32,
    step UInt64 CODEC(Delta, ZSTD(1)),
    phase LowCardinality(String),
    duration_ms Nullable(Float32) CODEC(ZSTD(1)),
    local_ms Nullable(Float32) CODEC(ZSTD(1)),
    data_ms Nullable(Float32) CODEC(ZSTD(1)),
    forward_ms Nullable(Float32) CODEC(ZSTD(1)),
    backward_ms Nullable(Float32) CODEC(ZSTD(1)),
    wait_ms Nullable(Float32) CODEC(ZSTD(1)),
    optimizer_ms Nullable(Float32) CODEC(ZSTD(1)),
    checkpoint_ms Nullable(Float32) CODEC(ZSTD(1)),
    cpu_ms Nullable(Float32) CODEC(ZSTD(1)),
    handed_over_at Nullable(DateTime64(6, 'UTC')) CODEC(Delta, ZSTD(1)),
    loss Nullable(Float32) CODEC(ZSTD(1)),
    grad_norm_local Nullable(Float32) CODEC(ZSTD(1)),
    grad_norm Nullable(Float32) CODEC(ZSTD(1)),
    param_checksum Nullable(Float32) CODEC(ZSTD(1)),
    samples UInt32,
    finite Bool,
    seq UInt64 CODEC(Delta, ZSTD(1)),
    boot_id LowCardinality(String),
    arrived_at DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, attempt, step, rank, ts)
TTL toDateTime(arrived_at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS log_events
(
    ts DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    source LowCardinality(String),
    severity LowCardinality(String),
    code LowCardinality(String),
    line String CODEC(ZSTD(1)),
    template_id LowCardinality(String),
    attributes Map(LowCardinality(String), String),
    repeat UInt32,
    seq UInt64 CODEC(Delta, ZSTD(1)),
    boot_id LowCardinality(String),
    arrived_at DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (toStartOfHour(ts), node, source, ts)
TTL toDateTime(arrived_at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

-- Spread over the ranks of every step: who was slowest by its own time, and by how much.
CREATE VIEW IF NOT EXISTS step_spread AS
SELECT
    cluster, job, attempt, step, min(ts) AS started_at, count() AS ranks, any(world) AS world,
    quantile(0.5)(duration_ms) AS duration_ms_median, max(duration_ms) AS duration_ms_highest,
    quantile(0.5)(local_ms) AS local_ms_median, max(local_ms) AS local_ms_highest,
    argMax(rank, local_ms) AS slowest_rank, argMax(node, local_ms) AS slowest_node
FROM steps
GROUP BY cluster, job, attempt, step;
