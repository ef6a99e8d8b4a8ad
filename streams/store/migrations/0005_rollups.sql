-- One-minute roll-ups, fed as rows are inserted. They are deduplicated with their source (the writer's insert token reaches them), so a
-- redelivered batch does not count twice. *_1m hold the states, *_minutes are what people read: mean, lowest and highest per minute.

CREATE TABLE IF NOT EXISTS host_1m
(
    minute DateTime('UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    device LowCardinality(String),
    samples SimpleAggregateFunction(sum, UInt64),
    cpu_busy_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    cpu_busy_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    cpu_busy_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    cpu_busy_ratio_count SimpleAggregateFunction(sum, UInt64),
    cpu_user_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    cpu_user_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    cpu_user_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    cpu_user_ratio_count SimpleAggregateFunction(sum, UInt64),
    cpu_system_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    cpu_system_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    cpu_system_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    cpu_system_ratio_count SimpleAggregateFunction(sum, UInt64),
    cpu_iowait_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    cpu_iowait_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    cpu_iowait_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    cpu_iowait_ratio_count SimpleAggregateFunction(sum, UInt64),
    cpu_steal_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    cpu_steal_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    cpu_steal_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    cpu_steal_ratio_count SimpleAggregateFunction(sum, UInt64),
    load1_min SimpleAggregateFunction(min, Nullable(Float32)),
    load1_max SimpleAggregateFunction(max, Nullable(Float32)),
    load1_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    load1_count SimpleAggregateFunction(sum, UInt64),
    runnable_tasks_min SimpleAggregateFunction(min, Nullable(Float32)),
    runnable_tasks_max SimpleAggregateFunction(max, Nullable(Float32)),
    runnable_tasks_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    runnable_tasks_count SimpleAggregateFunction(sum, UInt64),
    mem_available_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    mem_available_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    mem_available_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    mem_available_ratio_count SimpleAggregateFunction(sum, UInt64),
    mem_used_bytes_min SimpleAggregateFunction(min, Nullable(Float32)),
    mem_used_bytes_max SimpleAggregateFunction(max, Nullable(Float32)),
    mem_used_bytes_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    mem_used_bytes_count SimpleAggregateFunction(sum, UInt64),
    swap_used_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    swap_used_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    swap_used_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    swap_used_ratio_count SimpleAggregateFunction(sum, UInt64),
    psi_cpu_some_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    psi_cpu_some_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    psi_cpu_some_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    psi_cpu_some_ratio_count SimpleAggregateFunction(sum, UInt64),
    psi_memory_some_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    psi_memory_some_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    psi_memory_some_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    psi_memory_some_ratio_count SimpleAggregateFunction(sum, UInt64),
    psi_memory_full_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    psi_memory_full_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    psi_memory_full_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    psi_memory_full_ratio_count SimpleAggregateFunction(sum, UInt64),
    psi_io_some_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    psi_io_some_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    psi_io_some_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    psi_io_some_ratio_count SimpleAggregateFunction(sum, UInt64),
    psi_io_full_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    psi_io_full_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    psi_io_full_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    psi_io_full_ratio_count SimpleAggregateFunction(sum, UInt64),
    tcp_retrans_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    tcp_retrans_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    tcp_retrans_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    tcp_retrans_per_s_count SimpleAggregateFunction(sum, UInt64),
    disk_read_bytes_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    disk_read_bytes_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    disk_read_bytes_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    disk_read_bytes_per_s_count SimpleAggregateFunction(sum, UInt64),
    disk_write_bytes_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    disk_write_bytes_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    disk_write_bytes_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    disk_write_bytes_per_s_count SimpleAggregateFunction(sum, UInt64),
    disk_busy_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    disk_busy_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    disk_busy_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    disk_busy_ratio_count SimpleAggregateFunction(sum, UInt64),
    run_dir_free_bytes_min SimpleAggregateFunction(min, Nullable(Float32)),
    run_dir_free_bytes_max SimpleAggregateFunction(max, Nullable(Float32)),
    run_dir_free_bytes_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    run_dir_free_bytes_count SimpleAggregateFunction(sum, UInt64),
    context_switches_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    context_switches_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    context_switches_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    context_switches_per_s_count SimpleAggregateFunction(sum, UInt64),
    clock_offset_ms_min SimpleAggregateFunction(min, Nullable(Float32)),
    clock_offset_ms_max SimpleAggregateFunction(max, Nullable(Float32)),
    clock_offset_ms_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    clock_offset_ms_count SimpleAggregateFunction(sum, UInt64)
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (job, minute, node, device, rank, attempt, cluster)
TTL minute + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS host_1m_feed TO host_1m AS
SELECT
    toStartOfMinute(toDateTime(ts, 'UTC')) AS minute, cluster, job, attempt, rank, node, device,
    count() AS samples,
    min(cpu_busy_ratio) AS cpu_busy_ratio_min, max(cpu_busy_ratio) AS cpu_busy_ratio_max, sum(toFloat64(cpu_busy_ratio)) AS cpu_busy_ratio_sum, count(cpu_busy_ratio) AS cpu_busy_ratio_count,
    min(cpu_user_ratio) AS cpu_user_ratio_min, max(cpu_user_ratio) AS cpu_user_ratio_max, sum(toFloat64(cpu_user_ratio)) AS cpu_user_ratio_sum, count(cpu_user_ratio) AS cpu_user_ratio_count,
    min(cpu_system_ratio) AS cpu_system_ratio_min, max(cpu_system_ratio) AS cpu_system_ratio_max, sum(toFloat64(cpu_system_ratio)) AS cpu_system_ratio_sum, count(cpu_system_ratio) AS cpu_system_ratio_count,
    min(cpu_iowait_ratio) AS cpu_iowait_ratio_min, max(cpu_iowait_ratio) AS cpu_iowait_ratio_max, sum(toFloat64(cpu_iowait_ratio)) AS cpu_iowait_ratio_sum, count(cpu_iowait_ratio) AS cpu_iowait_ratio_count,
    min(cpu_steal_ratio) AS cpu_steal_ratio_min, max(cpu_steal_ratio) AS cpu_steal_ratio_max, sum(toFloat64(cpu_steal_ratio)) AS cpu_steal_ratio_sum, count(cpu_steal_ratio) AS cpu_steal_ratio_count,
    min(load1) AS load1_min, max(load1) AS load1_max, sum(toFloat64(load1)) AS load1_sum, count(load1) AS load1_count,
    min(runnable_tasks) AS runnable_tasks_min, max(runnable_tasks) AS runnable_tasks_max, sum(toFloat64(runnable_tasks)) AS runnable_tasks_sum, count(runnable_tasks) AS runnable_tasks_count,
    min(mem_available_ratio) AS mem_available_ratio_min, max(mem_available_ratio) AS mem_available_ratio_max, sum(toFloat64(mem_available_ratio)) AS mem_available_ratio_sum, count(mem_available_ratio) AS mem_available_ratio_count,
    min(mem_used_bytes) AS mem_used_bytes_min, max(mem_used_bytes) AS mem_used_bytes_max, sum(toFloat64(mem_used_bytes)) AS mem_used_bytes_sum, count(mem_used_bytes) AS mem_used_bytes_count,
    min(swap_used_ratio) AS swap_used_ratio_min, max(swap_used_ratio) AS swap_used_ratio_max, sum(toFloat64(swap_used_ratio)) AS swap_used_ratio_sum, count(swap_used_ratio) AS swap_used_ratio_count,
    min(psi_cpu_some_ratio) AS psi_cpu_some_ratio_min, max(psi_cpu_some_ratio) AS psi_cpu_some_ratio_max, sum(toFloat64(psi_cpu_some_ratio)) AS psi_cpu_some_ratio_sum, count(psi_cpu_some_ratio) AS psi_cpu_some_ratio_count,
    min(psi_memory_some_ratio) AS psi_memory_some_ratio_min, max(psi_memory_some_ratio) AS psi_memory_some_ratio_max, sum(toFloat64(psi_memory_some_ratio)) AS psi_memory_some_ratio_sum, count(psi_memory_some_ratio) AS psi_memory_some_ratio_count,
    min(psi_memory_full_ratio) AS psi_memory_full_ratio_min, max(psi_memory_full_ratio) AS psi_memory_full_ratio_max, sum(toFloat64(psi_memory_full_ratio)) AS psi_memory_full_ratio_sum, count(psi_memory_full_ratio) AS psi_memory_full_ratio_count,
    min(psi_io_some_ratio) AS psi_io_some_ratio_min, max(psi_io_some_ratio) AS psi_io_some_ratio_max, sum(toFloat64(psi_io_some_ratio)) AS psi_io_some_ratio_sum, count(psi_io_some_ratio) AS psi_io_some_ratio_count,
    min(psi_io_full_ratio) AS psi_io_full_ratio_min, max(psi_io_full_ratio) AS psi_io_full_ratio_max, sum(toFloat64(psi_io_full_ratio)) AS psi_io_full_ratio_sum, count(psi_io_full_ratio) AS psi_io_full_ratio_count,
    min(tcp_retrans_per_s) AS tcp_retrans_per_s_min, max(tcp_retrans_per_s) AS tcp_retrans_per_s_max, sum(toFloat64(tcp_retrans_per_s)) AS tcp_retrans_per_s_sum, count(tcp_retrans_per_s) AS tcp_retrans_per_s_count,
    min(disk_read_bytes_per_s) AS disk_read_bytes_per_s_min, max(disk_read_bytes_per_s) AS disk_read_bytes_per_s_max, sum(toFloat64(disk_read_bytes_per_s)) AS disk_read_bytes_per_s_sum, count(disk_read_bytes_per_s) AS disk_read_bytes_per_s_count,
    min(disk_write_bytes_per_s) AS disk_write_bytes_per_s_min, max(disk_write_bytes_per_s) AS disk_write_bytes_per_s_max, sum(toFloat64(disk_write_bytes_per_s)) AS disk_write_bytes_per_s_sum, count(disk_write_bytes_per_s) AS disk_write_bytes_per_s_count,
    min(disk_busy_ratio) AS disk_busy_ratio_min, max(disk_busy_ratio) AS disk_busy_ratio_max, sum(toFloat64(disk_busy_ratio)) AS disk_busy_ratio_sum, count(disk_busy_ratio) AS disk_busy_ratio_count,
    min(run_dir_free_bytes) AS run_dir_free_bytes_min, max(run_dir_free_bytes) AS run_dir_free_bytes_max, sum(toFloat64(run_dir_free_bytes)) AS run_dir_free_bytes_sum, count(run_dir_free_bytes) AS run_dir_free_bytes_count,
    min(context_switches_per_s) AS context_switches_per_s_min, max(context_switches_per_s) AS context_switches_per_s_max, sum(toFloat64(context_switches_per_s)) AS context_switches_per_s_sum, count(context_switches_per_s) AS context_switches_per_s_count,
    min(clock_offset_ms) AS clock_offset_ms_min, max(clock_offset_ms) AS clock_offset_ms_max, sum(toFloat64(clock_offset_ms)) AS clock_offset_ms_sum, count(clock_offset_ms) AS clock_offset_ms_count
FROM host_ticks
GROUP BY minute, cluster, job, attempt, rank, node, device;

CREATE VIEW IF NOT EXISTS host_minutes AS
SELECT
    minute, cluster, job, attempt, rank, node, device, sum(host_1m.samples) AS samples,
    sum(cpu_busy_ratio_sum) / nullIf(sum(cpu_busy_ratio_count), 0) AS cpu_busy_ratio, min(cpu_busy_ratio_min) AS cpu_busy_ratio_lowest, max(cpu_busy_ratio_max) AS cpu_busy_ratio_highest,
    sum(cpu_user_ratio_sum) / nullIf(sum(cpu_user_ratio_count), 0) AS cpu_user_ratio, min(cpu_user_ratio_min) AS cpu_user_ratio_lowest, max(cpu_user_ratio_max) AS cpu_user_ratio_highest,
    sum(cpu_system_ratio_sum) / nullIf(sum(cpu_system_ratio_count), 0) AS cpu_system_ratio, min(cpu_system_ratio_min) AS cpu_system_ratio_lowest, max(cpu_system_ratio_max) AS cpu_system_ratio_highest,
    sum(cpu_iowait_ratio_sum) / nullIf(sum(cpu_iowait_ratio_count), 0) AS cpu_iowait_ratio, min(cpu_iowait_ratio_min) AS cpu_iowait_ratio_lowest, max(cpu_iowait_ratio_max) AS cpu_iowait_ratio_highest,
    sum(cpu_steal_ratio_sum) / nullIf(sum(cpu_steal_ratio_count), 0) AS cpu_steal_ratio, min(cpu_steal_ratio_min) AS cpu_steal_ratio_lowest, max(cpu_steal_ratio_max) AS cpu_steal_ratio_highest,
    sum(load1_sum) / nullIf(sum(load1_count), 0) AS load1, min(load1_min) AS load1_lowest, max(load1_max) AS load1_highest,
    sum(runnable_tasks_sum) / nullIf(sum(runnable_tasks_count), 0) AS runnable_tasks, min(runnable_tasks_min) AS runnable_tasks_lowest, max(runnable_tasks_max) AS runnable_tasks_highest,
    sum(mem_available_ratio_sum) / nullIf(sum(mem_available_ratio_count), 0) AS mem_available_ratio, min(mem_available_ratio_min) AS mem_available_ratio_lowest, max(mem_available_ratio_max) AS mem_available_ratio_highest,
    sum(mem_used_bytes_sum) / nullIf(sum(mem_used_bytes_count), 0) AS mem_used_bytes, min(mem_used_bytes_min) AS mem_used_bytes_lowest, max(mem_used_bytes_max) AS mem_used_bytes_highest,
    sum(swap_used_ratio_sum) / nullIf(sum(swap_used_ratio_count), 0) AS swap_used_ratio, min(swap_used_ratio_min) AS swap_used_ratio_lowest, max(swap_used_ratio_max) AS swap_used_ratio_highest,
    sum(psi_cpu_some_ratio_sum) / nullIf(sum(psi_cpu_some_ratio_count), 0) AS psi_cpu_some_ratio, min(psi_cpu_some_ratio_min) AS psi_cpu_some_ratio_lowest, max(psi_cpu_some_ratio_max) AS psi_cpu_some_ratio_highest,
    sum(psi_memory_some_ratio_sum) / nullIf(sum(psi_memory_some_ratio_count), 0) AS psi_memory_some_ratio, min(psi_memory_some_ratio_min) AS psi_memory_some_ratio_lowest, max(psi_memory_some_ratio_max) AS psi_memory_some_ratio_highest,
    sum(psi_memory_full_ratio_sum) / nullIf(sum(psi_memory_full_ratio_count), 0) AS psi_memory_full_ratio, min(psi_memory_full_ratio_min) AS psi_memory_full_ratio_lowest, max(psi_memory_full_ratio_max) AS psi_memory_full_ratio_highest,
    sum(psi_io_some_ratio_sum) / nullIf(sum(psi_io_some_ratio_count), 0) AS psi_io_some_ratio, min(psi_io_some_ratio_min) AS psi_io_some_ratio_lowest, max(psi_io_some_ratio_max) AS psi_io_some_ratio_highest,
    sum(psi_io_full_ratio_sum) / nullIf(sum(psi_io_full_ratio_count), 0) AS psi_io_full_ratio, min(psi_io_full_ratio_min) AS psi_io_full_ratio_lowest, max(psi_io_full_ratio_max) AS psi_io_full_ratio_highest,
    sum(tcp_retrans_per_s_sum) / nullIf(sum(tcp_retrans_per_s_count), 0) AS tcp_retrans_per_s, min(tcp_retrans_per_s_min) AS tcp_retrans_per_s_lowest, max(tcp_retrans_per_s_max) AS tcp_retrans_per_s_highest,
    sum(disk_read_bytes_per_s_sum) / nullIf(sum(disk_read_bytes_per_s_count), 0) AS disk_read_bytes_per_s, min(disk_read_bytes_per_s_min) AS disk_read_bytes_per_s_lowest, max(disk_read_bytes_per_s_max) AS disk_read_bytes_per_s_highest,
    sum(disk_write_bytes_per_s_sum) / nullIf(sum(disk_write_bytes_per_s_count), 0) AS disk_write_bytes_per_s, min(disk_write_bytes_per_s_min) AS disk_write_bytes_per_s_lowest, max(disk_write_bytes_per_s_max) AS disk_write_bytes_per_s_highest,
    sum(disk_busy_ratio_sum) / nullIf(sum(disk_busy_ratio_count), 0) AS disk_busy_ratio, min(disk_busy_ratio_min) AS disk_busy_ratio_lowest, max(disk_busy_ratio_max) AS disk_busy_ratio_highest,
    sum(run_dir_free_bytes_sum) / nullIf(sum(run_dir_free_bytes_count), 0) AS run_dir_free_bytes, min(run_dir_free_bytes_min) AS run_dir_free_bytes_lowest, max(run_dir_free_bytes_max) AS run_dir_free_bytes_highest,
    sum(context_switches_per_s_sum) / nullIf(sum(context_switches_per_s_count), 0) AS context_switches_per_s, min(context_switches_per_s_min) AS context_switches_per_s_lowest, max(context_switches_per_s_max) AS context_switches_per_s_highest,
    sum(clock_offset_ms_sum) / nullIf(sum(clock_offset_ms_count), 0) AS clock_offset_ms, min(clock_offset_ms_min) AS clock_offset_ms_lowest, max(clock_offset_ms_max) AS clock_offset_ms_highest
FROM host_1m
GROUP BY minute, cluster, job, attempt, rank, node, device;

CREATE TABLE IF NOT EXISTS process_1m
(
    minute DateTime('UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    device LowCardinality(String),
    samples SimpleAggregateFunction(sum, UInt64),
    alive_min SimpleAggregateFunction(min, Nullable(Float32)),
    alive_max SimpleAggregateFunction(max, Nullable(Float32)),
    alive_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    alive_count SimpleAggregateFunction(sum, UInt64),
    state_min SimpleAggregateFunction(min, Nullable(Float32)),
    state_max SimpleAggregateFunction(max, Nullable(Float32)),
    state_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    state_count SimpleAggregateFunction(sum, UInt64),
    cpu_cores_min SimpleAggregateFunction(min, Nullable(Float32)),
    cpu_cores_max SimpleAggregateFunction(max, Nullable(Float32)),
    cpu_cores_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    cpu_cores_count SimpleAggregateFunction(sum, UInt64),
    rss_bytes_min SimpleAggregateFunction(min, Nullable(Float32)),
    rss_bytes_max SimpleAggregateFunction(max, Nullable(Float32)),
    rss_bytes_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    rss_bytes_count SimpleAggregateFunction(sum, UInt64),
    threads_count_min SimpleAggregateFunction(min, Nullable(Float32)),
    threads_count_max SimpleAggregateFunction(max, Nullable(Float32)),
    threads_count_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    threads_count_count SimpleAggregateFunction(sum, UInt64),
    read_bytes_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    read_bytes_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    read_bytes_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    read_bytes_per_s_count SimpleAggregateFunction(sum, UInt64),
    write_bytes_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    write_bytes_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    write_bytes_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    write_bytes_per_s_count SimpleAggregateFunction(sum, UInt64),
    throttled_ratio_min SimpleAggregateFunction(min, Nullable(Float32)),
    throttled_ratio_max SimpleAggregateFunction(max, Nullable(Float32)),
    throttled_ratio_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    throttled_ratio_count SimpleAggregateFunction(sum, UInt64),
    voluntary_switches_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    voluntary_switches_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    voluntary_switches_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    voluntary_switches_per_s_count SimpleAggregateFunction(sum, UInt64),
    last_step_min SimpleAggregateFunction(min, Nullable(Float32)),
    last_step_max SimpleAggregateFunction(max, Nullable(Float32)),
    last_step_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    last_step_count SimpleAggregateFunction(sum, UInt64),
    step_age_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    step_age_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    step_age_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    step_age_s_count SimpleAggregateFunction(sum, UInt64),
    phase_min SimpleAggregateFunction(min, Nullable(Float32)),
    phase_max SimpleAggregateFunction(max, Nullable(Float32)),
    phase_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    phase_count SimpleAggregateFunction(sum, UInt64)
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (job, minute, node, device, rank, attempt, cluster)
TTL minute + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS process_1m_feed TO process_1m AS
SELECT
    toStartOfMinute(toDateTime(ts, 'UTC')) AS minute, cluster, job, attempt, rank, node, device,
    count() AS samples,
    min(alive) AS alive_min, max(alive) AS alive_max, sum(toFloat64(alive)) AS alive_sum, count(alive) AS alive_count,
    min(state) AS state_min, max(state) AS state_max, sum(toFloat64(state)) AS state_sum, count(state) AS state_count,
    min(cpu_cores) AS cpu_cores_min, max(cpu_cores) AS cpu_cores_max, sum(toFloat64(cpu_cores)) AS cpu_cores_sum, count(cpu_cores) AS cpu_cores_count,
    min(rss_bytes) AS rss_bytes_min, max(rss_bytes) AS rss_bytes_max, sum(toFloat64(rss_bytes)) AS rss_bytes_sum, count(rss_bytes) AS rss_bytes_count,
    min(threads_count) AS threads_count_min, max(threads_count) AS threads_count_max, sum(toFloat64(threads_count)) AS threads_count_sum, count(threads_count) AS threads_count_count,
    min(read_bytes_per_s) AS read_bytes_per_s_min, max(read_bytes_per_s) AS read_bytes_per_s_max, sum(toFloat64(read_bytes_per_s)) AS read_bytes_per_s_sum, count(read_bytes_per_s) AS read_bytes_per_s_count,
    min(write_bytes_per_s) AS write_bytes_per_s_min, max(write_bytes_per_s) AS write_bytes_per_s_max, sum(toFloat64(write_bytes_per_s)) AS write_bytes_per_s_sum, count(write_bytes_per_s) AS write_bytes_per_s_count,
    min(throttled_ratio) AS throttled_ratio_min, max(throttled_ratio) AS throttled_ratio_max, sum(toFloat64(throttled_ratio)) AS throttled_ratio_sum, count(throttled_ratio) AS throttled_ratio_count,
    min(voluntary_switches_per_s) AS voluntary_switches_per_s_min, max(voluntary_switches_per_s) AS voluntary_switches_per_s_max, sum(toFloat64(voluntary_switches_per_s)) AS voluntary_switches_per_s_sum, count(voluntary_switches_per_s) AS voluntary_switches_per_s_count,
    min(last_step) AS last_step_min, max(last_step) AS last_step_max, sum(toFloat64(last_step)) AS last_step_sum, count(last_step) AS last_step_count,
    min(step_age_s) AS step_age_s_min, max(step_age_s) AS step_age_s_max, sum(toFloat64(step_age_s)) AS step_age_s_sum, count(step_age_s) AS step_age_s_count,
    min(phase) AS phase_min, max(phase) AS phase_max, sum(toFloat64(phase)) AS phase_sum, count(phase) AS phase_count
FROM process_ticks
GROUP BY minute, cluster, job, attempt, rank, node, device;

CREATE VIEW IF NOT EXISTS process_minutes AS
SELECT
    minute, cluster, job, attempt, rank, node, device, sum(process_1m.samples) AS samples,
    sum(alive_sum) / nullIf(sum(alive_count), 0) AS alive, min(alive_min) AS alive_lowest, max(alive_max) AS alive_highest,
    sum(state_sum) / nullIf(sum(state_count), 0) AS state, min(state_min) AS state_lowest, max(state_max) AS state_highest,
    sum(cpu_cores_sum) / nullIf(sum(cpu_cores_count), 0) AS cpu_cores, min(cpu_cores_min) AS cpu_cores_lowest, max(cpu_cores_max) AS cpu_cores_highest,
    sum(rss_bytes_sum) / nullIf(sum(rss_bytes_count), 0) AS rss_bytes, min(rss_bytes_min) AS rss_bytes_lowest, max(rss_bytes_max) AS rss_bytes_highest,
    sum(threads_count_sum) / nullIf(sum(threads_count_count), 0) AS threads_count, min(threads_count_min) AS threads_count_lowest, max(threads_count_max) AS threads_count_highest,
    sum(read_bytes_per_s_sum) / nullIf(sum(read_bytes_per_s_count), 0) AS read_bytes_per_s, min(read_bytes_per_s_min) AS read_bytes_per_s_lowest, max(read_bytes_per_s_max) AS read_bytes_per_s_highest,
    sum(write_bytes_per_s_sum) / nullIf(sum(write_bytes_per_s_count), 0) AS write_bytes_per_s, min(write_bytes_per_s_min) AS write_bytes_per_s_lowest, max(write_bytes_per_s_max) AS write_bytes_per_s_highest,
    sum(throttled_ratio_sum) / nullIf(sum(throttled_ratio_count), 0) AS throttled_ratio, min(throttled_ratio_min) AS throttled_ratio_lowest, max(throttled_ratio_max) AS throttled_ratio_highest,
    sum(voluntary_switches_per_s_sum) / nullIf(sum(voluntary_switches_per_s_count), 0) AS voluntary_switches_per_s, min(voluntary_switches_per_s_min) AS voluntary_switches_per_s_lowest, max(voluntary_switches_per_s_max) AS voluntary_switches_per_s_highest,
    sum(last_step_sum) / nullIf(sum(last_step_count), 0) AS last_step, min(last_step_min) AS last_step_lowest, max(last_step_max) AS last_step_highest,
    sum(step_age_s_sum) / nullIf(sum(step_age_s_count), 0) AS step_age_s, min(step_age_s_min) AS step_age_s_lowest, max(step_age_s_max) AS step_age_s_highest,
    sum(phase_sum) / nullIf(sum(phase_count), 0) AS phase, min(phase_min) AS phase_lowest, max(phase_max) AS phase_highest
FROM process_1m
GROUP BY minute, cluster, job, attempt, rank, node, device;

CREATE TABLE IF NOT EXISTS nic_1m
(
    minute DateTime('UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    device LowCardinality(String),
    samples SimpleAggregateFunction(sum, UInt64),
    up_min SimpleAggregateFunction(min, Nullable(Float32)),
    up_max SimpleAggregateFunction(max, Nullable(Float32)),
    up_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    up_count SimpleAggregateFunction(sum, UInt64),
    carrier_min SimpleAggregateFunction(min, Nullable(Float32)),
    carrier_max SimpleAggregateFunction(max, Nullable(Float32)),
    carrier_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    carrier_count SimpleAggregateFunction(sum, UInt64),
    rx_bytes_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    rx_bytes_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    rx_bytes_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    rx_bytes_per_s_count SimpleAggregateFunction(sum, UInt64),
    tx_bytes_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    tx_bytes_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    tx_bytes_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    tx_bytes_per_s_count SimpleAggregateFunction(sum, UInt64),
    rx_packets_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    rx_packets_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    rx_packets_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    rx_packets_per_s_count SimpleAggregateFunction(sum, UInt64),
    tx_packets_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    tx_packets_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    tx_packets_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    tx_packets_per_s_count SimpleAggregateFunction(sum, UInt64),
    rx_errors_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    rx_errors_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    rx_errors_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    rx_errors_per_s_count SimpleAggregateFunction(sum, UInt64),
    tx_errors_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    tx_errors_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    tx_errors_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    tx_errors_per_s_count SimpleAggregateFunction(sum, UInt64),
    rx_dropped_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    rx_dropped_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    rx_dropped_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    rx_dropped_per_s_count SimpleAggregateFunction(sum, UInt64),
    tx_dropped_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    tx_dropped_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    tx_dropped_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    tx_dropped_per_s_count SimpleAggregateFunction(sum, UInt64),
    carrier_changes_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    carrier_changes_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    carrier_changes_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    carrier_changes_per_s_count SimpleAggregateFunction(sum, UInt64),
    speed_mbps_min SimpleAggregateFunction(min, Nullable(Float32)),
    speed_mbps_max SimpleAggregateFunction(max, Nullable(Float32)),
    speed_mbps_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    speed_mbps_count SimpleAggregateFunction(sum, UInt64),
    role_min SimpleAggregateFunction(min, Nullable(Float32)),
    role_max SimpleAggregateFunction(max, Nullable(Float32)),
    role_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    role_count SimpleAggregateFunction(sum, UInt64),
    symbol_errors_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    symbol_errors_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    symbol_errors_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    symbol_errors_per_s_count SimpleAggregateFunction(sum, UInt64),
    link_downed_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    link_downed_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    link_downed_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    link_downed_per_s_count SimpleAggregateFunction(sum, UInt64),
    rx_wait_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    rx_wait_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    rx_wait_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    rx_wait_per_s_count SimpleAggregateFunction(sum, UInt64),
    out_of_sequence_per_s_min SimpleAggregateFunction(min, Nullable(Float32)),
    out_of_sequence_per_s_max SimpleAggregateFunction(max, Nullable(Float32)),
    out_of_sequence_per_s_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    out_of_sequence_per_s_count SimpleAggregateFunction(sum, UInt64)
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (job, minute, node, device, rank, attempt, cluster)
TTL minute + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS nic_1m_feed TO nic_1m AS
SELECT
    toStartOfMinute(toDateTime(ts, 'UTC')) AS minute, cluster, job, attempt, rank, node, device,
    count() AS samples,
    min(up) AS up_min, max(up) AS up_max, sum(toFloat64(up)) AS up_sum, count(up) AS up_count,
    min(carrier) AS carrier_min, max(carrier) AS carrier_max, sum(toFloat64(carrier)) AS carrier_sum, count(carrier) AS carrier_count,
    min(rx_bytes_per_s) AS rx_bytes_per_s_min, max(rx_bytes_per_s) AS rx_bytes_per_s_max, sum(toFloat64(rx_bytes_per_s)) AS rx_bytes_per_s_sum, count(rx_bytes_per_s) AS rx_bytes_per_s_count,
    min(tx_bytes_per_s) AS tx_bytes_per_s_min, max(tx_bytes_per_s) AS tx_bytes_per_s_max, sum(toFloat64(tx_bytes_per_s)) AS tx_bytes_per_s_sum, count(tx_bytes_per_s) AS tx_bytes_per_s_count,
    min(rx_packets_per_s) AS rx_packets_per_s_min, max(rx_packets_per_s) AS rx_packets_per_s_max, sum(toFloat64(rx_packets_per_s)) AS rx_packets_per_s_sum, count(rx_packets_per_s) AS rx_packets_per_s_count,
    min(tx_packets_per_s) AS tx_packets_per_s_min, max(tx_packets_per_s) AS tx_packets_per_s_max, sum(toFloat64(tx_packets_per_s)) AS tx_packets_per_s_sum, count(tx_packets_per_s) AS tx_packets_per_s_count,
    min(rx_errors_per_s) AS rx_errors_per_s_min, max(rx_errors_per_s) AS rx_errors_per_s_max, sum(toFloat64(rx_errors_per_s)) AS rx_errors_per_s_sum, count(rx_errors_per_s) AS rx_errors_per_s_count,
    min(tx_errors_per_s) AS tx_errors_per_s_min, max(tx_errors_per_s) AS tx_errors_per_s_max, sum(toFloat64(tx_errors_per_s)) AS tx_errors_per_s_sum, count(tx_errors_per_s) AS tx_errors_per_s_count,
    min(rx_dropped_per_s) AS rx_dropped_per_s_min, max(rx_dropped_per_s) AS rx_dropped_per_s_max, sum(toFloat64(rx_dropped_per_s)) AS rx_dropped_per_s_sum, count(rx_dropped_per_s) AS rx_dropped_per_s_count,
    min(tx_dropped_per_s) AS tx_dropped_per_s_min, max(tx_dropped_per_s) AS tx_dropped_per_s_max, sum(toFloat64(tx_dropped_per_s)) AS tx_dropped_per_s_sum, count(tx_dropped_per_s) AS tx_dropped_per_s_count,
    min(carrier_changes_per_s) AS carrier_changes_per_s_min, max(carrier_changes_per_s) AS carrier_changes_per_s_max, sum(toFloat64(carrier_changes_per_s)) AS carrier_changes_per_s_sum, count(carrier_changes_per_s) AS carrier_changes_per_s_count,
    min(speed_mbps) AS speed_mbps_min, max(speed_mbps) AS speed_mbps_max, sum(toFloat64(speed_mbps)) AS speed_mbps_sum, count(speed_mbps) AS speed_mbps_count,
    min(role) AS role_min, max(role) AS role_max, sum(toFloat64(role)) AS role_sum, count(role) AS role_count,
    min(symbol_errors_per_s) AS symbol_errors_per_s_min, max(symbol_errors_per_s) AS symbol_errors_per_s_max, sum(toFloat64(symbol_errors_per_s)) AS symbol_errors_per_s_sum, count(symbol_errors_per_s) AS symbol_errors_per_s_count,
    min(link_downed_per_s) AS link_downed_per_s_min, max(link_downed_per_s) AS link_downed_per_s_max, sum(toFloat64(link_downed_per_s)) AS link_downed_per_s_sum, count(link_downed_per_s) AS link_downed_per_s_count,
    min(rx_wait_per_s) AS rx_wait_per_s_min, max(rx_wait_per_s) AS rx_wait_per_s_max, sum(toFloat64(rx_wait_per_s)) AS rx_wait_per_s_sum, count(rx_wait_per_s) AS rx_wait_per_s_count,
    min(out_of_sequence_per_s) AS out_of_sequence_per_s_min, max(out_of_sequence_per_s) AS out_of_sequence_per_s_max, sum(toFloat64(out_of_sequence_per_s)) AS out_of_sequence_per_s_sum, count(out_of_sequence_per_s) AS out_of_sequence_per_s_count
FROM nic_ticks
GROUP BY minute, cluster, job, attempt, rank, node, device;

CREATE VIEW IF NOT EXISTS nic_minutes AS
SELECT
    minute, cluster, job, attempt, rank, node, device, sum(nic_1m.samples) AS samples,
    sum(up_sum) / nullIf(sum(up_count), 0) AS up, min(up_min) AS up_lowest, max(up_max) AS up_highest,
    sum(carrier_sum) / nullIf(sum(carrier_count), 0) AS carrier, min(carrier_min) AS carrier_lowest, max(carrier_max) AS carrier_highest,
    sum(rx_bytes_per_s_sum) / nullIf(sum(rx_bytes_per_s_count), 0) AS rx_bytes_per_s, min(rx_bytes_per_s_min) AS rx_bytes_per_s_lowest, max(rx_bytes_per_s_max) AS rx_bytes_per_s_highest,
    sum(tx_bytes_per_s_sum) / nullIf(sum(tx_bytes_per_s_count), 0) AS tx_bytes_per_s, min(tx_bytes_per_s_min) AS tx_bytes_per_s_lowest, max(tx_bytes_per_s_max) AS tx_bytes_per_s_highest,
    sum(rx_packets_per_s_sum) / nullIf(sum(rx_packets_per_s_count), 0) AS rx_packets_per_s, min(rx_packets_per_s_min) AS rx_packets_per_s_lowest, max(rx_packets_per_s_max) AS rx_packets_per_s_highest,
    sum(tx_packets_per_s_sum) / nullIf(sum(tx_packets_per_s_count), 0) AS tx_packets_per_s, min(tx_packets_per_s_min) AS tx_packets_per_s_lowest, max(tx_packets_per_s_max) AS tx_packets_per_s_highest,
    sum(rx_errors_per_s_sum) / nullIf(sum(rx_errors_per_s_count), 0) AS rx_errors_per_s, min(rx_errors_per_s_min) AS rx_errors_per_s_lowest, max(rx_errors_per_s_max) AS rx_errors_per_s_highest,
    sum(tx_errors_per_s_sum) / nullIf(sum(tx_errors_per_s_count), 0) AS tx_errors_per_s, min(tx_errors_per_s_min) AS tx_errors_per_s_lowest, max(tx_errors_per_s_max) AS tx_errors_per_s_highest,
    sum(rx_dropped_per_s_sum) / nullIf(sum(rx_dropped_per_s_count), 0) AS rx_dropped_per_s, min(rx_dropped_per_s_min) AS rx_dropped_per_s_lowest, max(rx_dropped_per_s_max) AS rx_dropped_per_s_highest,
    sum(tx_dropped_per_s_sum) / nullIf(sum(tx_dropped_per_s_count), 0) AS tx_dropped_per_s, min(tx_dropped_per_s_min) AS tx_dropped_per_s_lowest, max(tx_dropped_per_s_max) AS tx_dropped_per_s_highest,
    sum(carrier_changes_per_s_sum) / nullIf(sum(carrier_changes_per_s_count), 0) AS carrier_changes_per_s, min(carrier_changes_per_s_min) AS carrier_changes_per_s_lowest, max(carrier_changes_per_s_max) AS carrier_changes_per_s_highest,
    sum(speed_mbps_sum) / nullIf(sum(speed_mbps_count), 0) AS speed_mbps, min(speed_mbps_min) AS speed_mbps_lowest, max(speed_mbps_max) AS speed_mbps_highest,
    sum(role_sum) / nullIf(sum(role_count), 0) AS role, min(role_min) AS role_lowest, max(role_max) AS role_highest,
    sum(symbol_errors_per_s_sum) / nullIf(sum(symbol_errors_per_s_count), 0) AS symbol_errors_per_s, min(symbol_errors_per_s_min) AS symbol_errors_per_s_lowest, max(symbol_errors_per_s_max) AS symbol_errors_per_s_highest,
    sum(link_downed_per_s_sum) / nullIf(sum(link_downed_per_s_count), 0) AS link_downed_per_s, min(link_downed_per_s_min) AS link_downed_per_s_lowest, max(link_downed_per_s_max) AS link_downed_per_s_highest,
    sum(rx_wait_per_s_sum) / nullIf(sum(rx_wait_per_s_count), 0) AS rx_wait_per_s, min(rx_wait_per_s_min) AS rx_wait_per_s_lowest, max(rx_wait_per_s_max) AS rx_wait_per_s_highest,
    sum(out_of_sequence_per_s_sum) / nullIf(sum(out_of_sequence_per_s_count), 0) AS out_of_sequence_per_s, min(out_of_sequence_per_s_min) AS out_of_sequence_per_s_lowest, max(out_of_sequence_per_s_max) AS out_of_sequence_per_s_highest
FROM nic_1m
GROUP BY minute, cluster, job, attempt, rank, node, device;

CREATE TABLE IF NOT EXISTS steps_1m
(
    minute DateTime('UTC') CODEC(DoubleDelta, ZSTD(1)),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    phase LowCardinality(String),
    steps SimpleAggregateFunction(sum, UInt64),
    samples SimpleAggregateFunction(sum, UInt64),
    not_finite SimpleAggregateFunction(sum, UInt64),
    first_step SimpleAggregateFunction(min, UInt64),
    last_step SimpleAggregateFunction(max, UInt64),
    duration_ms_max SimpleAggregateFunction(max, Nullable(Float32)),
    duration_ms_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    duration_ms_count SimpleAggregateFunction(sum, UInt64),
    local_ms_max SimpleAggregateFunction(max, Nullable(Float32)),
    local_ms_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    local_ms_count SimpleAggregateFunction(sum, UInt64),
    wait_ms_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    wait_ms_count SimpleAggregateFunction(sum, UInt64),
    data_ms_sum SimpleAggregateFunction(sum, Nullable(Float64)),
    data_ms_count SimpleAggregateFunction(sum, UInt64)
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (job, minute, attempt, rank, node, phase, cluster)
TTL minute + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS steps_1m_feed TO steps_1m AS
SELECT
    toStartOfMinute(toDateTime(ts, 'UTC')) AS minute, cluster, job, attempt, rank, node, phase,
    count() AS steps, sum(toUInt64(steps.samples)) AS samples, countIf(NOT finite) AS not_finite,
    min(step) AS first_step, max(step) AS last_step,
    max(duration_ms) AS duration_ms_max, sum(toFloat64(duration_ms)) AS duration_ms_sum, count(duration_ms) AS duration_ms_count,
    max(local_ms) AS local_ms_max, sum(toFloat64(local_ms)) AS local_ms_sum, count(local_ms) AS local_ms_count,
    sum(toFloat64(wait_ms)) AS wait_ms_sum, count(wait_ms) AS wait_ms_count,
    sum(toFloat64(data_ms)) AS data_ms_sum, count(data_ms) AS data_ms_count
FROM steps
GROUP BY minute, cluster, job, attempt, rank, node, phase;

CREATE VIEW IF NOT EXISTS step_minutes AS
SELECT
    minute, cluster, job, attempt, rank, node, phase,
    sum(steps_1m.steps) AS steps, sum(steps_1m.samples) AS samples, sum(steps_1m.not_finite) AS not_finite,
    min(steps_1m.first_step) AS first_step, max(steps_1m.last_step) AS last_step,
    sum(duration_ms_sum) / nullIf(sum(duration_ms_count), 0) AS duration_ms, max(duration_ms_max) AS duration_ms_highest,
    sum(local_ms_sum) / nullIf(sum(local_ms_count), 0) AS local_ms, max(local_ms_max) AS local_ms_highest,
    sum(wait_ms_sum) / nullIf(sum(wait_ms_count), 0) AS wait_ms, sum(data_ms_sum) / nullIf(sum(data_ms_count), 0) AS data_ms
FROM steps_1m
GROUP BY minute, cluster, job, attempt, rank, node, phase;
