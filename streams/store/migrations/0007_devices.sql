-- Accelerators, fabric ports and the machine's inside get wide tables like the other families: a row a device, not a row a value. A node of
-- eight GPUs has some 280 such values a second, which were as many rows of other_ticks. What a source says beyond these columns still goes
-- there, and rows from before this migration stay there.

CREATE TABLE IF NOT EXISTS gpu_ticks
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
    gpu_util_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    sm_active_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tensor_active_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    dram_active_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    sm_clock_mhz Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    power_w Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    memory_temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fb_used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_rx_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_tx_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_link_gen Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_link_width Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_replay_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvlink_rx_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvlink_tx_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvlink_crc_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvlink_replays_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvlink_recoveries_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    ecc_correctable_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    ecc_uncorrectable_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    remapped_rows_correctable Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    remapped_rows_uncorrectable Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    row_remap_pending Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    row_remap_failure Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    clocks_event_reasons Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    thermal_violation_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    power_violation_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    xid_last Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    memory_clock_mhz Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    memory_util_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    power_average_w Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    energy_j_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    power_limit_w Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    temp_margin_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    temp_slowdown_margin_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    temp_shutdown_margin_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fb_total_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fb_used_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fb_reserved_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    ecc_correctable_aggregate_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    ecc_uncorrectable_aggregate_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    sram_threshold_exceeded Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    retired_pages_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_link_gen_max Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_link_width_max Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_correctable_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_uncorrectable_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvlink_active_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvlink_inactive_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fabric_state Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fabric_status Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fabric_health Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    recovery_action Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    sw_thermal_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    hw_thermal_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    hw_power_brake_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    sync_boost_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    compute_processes_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    xid_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    mig_enabled Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    health_state Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS gpu_instance_ticks
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
    gpu_util_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    sm_active_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tensor_active_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    dram_active_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fb_used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fb_used_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fb_total_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fb_reserved_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    compute_processes_count Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

ALTER TABLE nic_ticks ADD COLUMN IF NOT EXISTS link_recovery_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1));
ALTER TABLE nic_ticks ADD COLUMN IF NOT EXISTS retransmit_timeouts_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1));
ALTER TABLE nic_ticks ADD COLUMN IF NOT EXISTS cnp_sent_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1));
ALTER TABLE nic_ticks ADD COLUMN IF NOT EXISTS ecn_marked_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1));
ALTER TABLE nic_ticks ADD COLUMN IF NOT EXISTS saturated_count Nullable(Float32) CODEC(Delta(4), ZSTD(1));

CREATE TABLE IF NOT EXISTS port_ticks
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
    fec_corrected_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_power_dbm Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    module_temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fec_corrected_blocks_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fec_uncorrectable_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    bit_error_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    symbol_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcs_symbol_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    lane_errors_max_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_crc_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_discards_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tx_discards_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_out_of_buffer_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    buffer_discards_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    link_downed_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    ecn_marked_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_all_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_all_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_time_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_time_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_storms_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_prio0_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_prio1_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_prio2_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_prio3_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_prio4_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_prio5_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_prio6_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_rx_prio7_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_prio0_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_prio1_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_prio2_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_prio3_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_prio4_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_prio5_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_prio6_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pause_tx_prio7_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_stalled_read_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_stalled_write_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_overflows_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    pcie_signal_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    module_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    allowance_exceeded_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    link_speed_mbps Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    full_duplex Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fec_active Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tx_power_dbm Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_power_spread_db Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    bias_ma Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    module_voltage_v Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;


CREATE TABLE IF NOT EXISTS board_ticks
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
    inlet_temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    server_power_w Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    fan_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    power_supplies_ok Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cpu_clock_mhz Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    dimm_correctable_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    dimm_uncorrectable_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvme_media_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvme_spare_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvme_used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    disk_used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cpu_temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    dimm_temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nvme_temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    other_temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cpu_throttled_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    machine_checks_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    threshold_interrupts_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    thermal_interrupts_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    kubelet_ready Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS machine_ticks
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
    oom_kills_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    major_faults_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    allocation_stalls_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    compaction_stalls_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    swap_in_pages_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    swap_out_pages_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    interrupts_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    soft_interrupts_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    blocked_tasks Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    softnet_dropped_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    softnet_squeezed_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    conntrack_used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    file_handles_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    file_handles_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    hung_tasks_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    clock_source Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    clock_synced Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    clock_correction_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    clock_error_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    clock_frequency_ppm Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS pcie_ticks
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
    aer_corrected_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    aer_nonfatal_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    aer_fatal_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    link_speed_gts Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    link_width Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    link_narrow Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS nvme_ticks
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
    live Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    critical_warning Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    spare_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    spare_threshold_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    media_errors_count Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    temp_c Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;


CREATE TABLE IF NOT EXISTS mount_ticks
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
    stalled Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    waiting_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    answer_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    free_bytes Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    inodes_used_ratio Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    read_only Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    remote Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nfs_operations_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nfs_retransmits_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nfs_timeouts_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nfs_bad_xids_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nfs_round_trip_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nfs_queue_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    nfs_total_ms Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    read_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    write_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;


CREATE TABLE IF NOT EXISTS rdma_ticks
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
    state Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    phys_state Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    remote_physical_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    switch_relay_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_constraint_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    tx_constraint_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    local_link_integrity_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    buffer_overruns_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    management_dropped_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    packet_seq_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rnr_naks_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    implied_naks_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    duplicate_requests_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    out_of_buffer_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    adaptive_retransmits_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    adaptive_retransmit_timeouts_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    slow_restarts_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    slow_restart_cnps_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cnp_handled_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    cnp_ignored_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    retransmits_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    retransmitted_bytes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    request_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    response_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    flush_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    retries_exceeded_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rnr_retries_exceeded_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_icrc_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    rx_drops_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    protocol_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    unrecoverable_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    unresponsive_remotes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    impaired_remotes_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    read_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    write_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    command_errors_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    commands_unanswered_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1)),
    keep_alives_per_s Nullable(Float32) CODEC(Delta(4), ZSTD(1))
)
ENGINE = MergeTree
PARTITION BY toDate(arrived_at)
ORDER BY (job, toStartOfMinute(ts), node, device, ts)
TTL toDateTime(arrived_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

