-- Raw samples, one wide table per family: unit in the column name, NULL where the source had nothing to say (absent is absent, never
-- zero: avg() and count() then answer rightly). Metrics without a column land in other_ticks until a migration gives them one; a source
-- may never alter a table by itself.
--
-- Partitions and TTL follow arrival, not the sample's own time: a collector with a wild clock cannot scatter partitions, and a replayed
-- recording of last year is not deleted at once. Plain Delta + ZSTD: Gorilla was measured and lost on noisy metrics.

CREATE TABLE IF NOT EXISTS host_ticks
(
    ts DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    device LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    boot_id LowCardinality(String),
    spooled Bool,
    arrived_at DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    cpu_busy_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cpu_user_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cpu_system_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cpu_iowait_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cpu_steal_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    load1 Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    runnable_tasks Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    mem_available_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    mem_used_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    swap_used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    psi_cpu_some_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    psi_memory_some_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    psi_memory_full_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    psi_io_some_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    psi_io_full_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tcp_retrans_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    disk_read_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    disk_write_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    disk_busy_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    run_dir_free_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    context_switches_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    clock_offset_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS process_ticks
(
    ts DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    device LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    boot_id LowCardinality(String),
    spooled Bool,
    arrived_at DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    alive Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    state Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cpu_cores Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rss_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    threads_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    read_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    write_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    throttled_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    voluntary_switches_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    last_step Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    step_age_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    phase Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS nic_ticks
(
    ts DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    device LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    boot_id LowCardinality(String),
    spooled Bool,
    arrived_at DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    up Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    carrier Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tx_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_packets_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tx_packets_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tx_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_dropped_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tx_dropped_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    carrier_changes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    speed_mbps Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    role Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    symbol_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    link_downed_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_wait_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    out_of_sequence_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

-- device = name of the peer that was probed
CREATE TABLE IF NOT EXISTS mesh_ticks
(
    ts DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    device LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    boot_id LowCardinality(String),
    spooled Bool,
    arrived_at DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    rtt_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rtt_max_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    sent_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    lost_count Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS other_ticks
(
    ts DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    device LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    boot_id LowCardinality(String),
    spooled Bool,
    arrived_at DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    family LowCardinality(String),
    metric LowCardinality(String),
    value Float32 CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), family, metric, node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

-- Sources that had nothing to say in a tick, and why.
CREATE TABLE IF NOT EXISTS gaps
(
    ts DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    seq UInt64 CODEC(Delta, ZSTD(1)),
    boot_id LowCardinality(String),
    spooled Bool,
    arrived_at DateTime64(3, 'UTC') CODEC(DoubleDelta, ZSTD(1)),
    source LowCardinality(String),
    reason LowCardinality(String)
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (node, source, ts)
TTL toDateTime(arrived_at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

-- Meaning of the metrics, as the sources declare it.
CREATE TABLE IF NOT EXISTS metrics
(
    catalog_id String,
    family LowCardinality(String),
    source LowCardinality(String),
    position UInt16,
    metric String,
    unit LowCardinality(String),
    kind LowCardinality(String),
    help String,
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
ORDER BY (catalog_id, position);
