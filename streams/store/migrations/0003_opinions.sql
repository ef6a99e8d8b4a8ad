-- What the detectors think and what became of it. All of these are identified by what they say, so a redelivery replaces itself.

CREATE TABLE IF NOT EXISTS verdict_log
(
    verdict_id String,
    ts DateTime64(3, 'UTC'),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    rank Int32,
    node LowCardinality(String),
    entity String,
    kind LowCardinality(String),
    detector LowCardinality(String),
    version UInt32,
    config_hash LowCardinality(String),
    score Float64,
    value Nullable(Float64),
    low Nullable(Float64),
    high Nullable(Float64),
    confidence Float64,
    onset_at Nullable(DateTime64(3, 'UTC')),
    window_start Nullable(DateTime64(3, 'UTC')),
    window_end Nullable(DateTime64(3, 'UTC')),
    reach LowCardinality(String),
    text String,
    victims Array(String),
    clears Bool,
    evidence String,
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
PARTITION BY toYYYYMM(ts)
ORDER BY (verdict_id)
TTL toDateTime(arrived_at) + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000;

CREATE VIEW IF NOT EXISTS verdicts AS
SELECT * FROM verdict_log FINAL;

CREATE TABLE IF NOT EXISTS incident_revisions
(
    incident_id String,
    revision UInt32,
    ts DateTime64(3, 'UTC'),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    kind LowCardinality(String),
    status LowCardinality(String),
    severity LowCardinality(String),
    title String,
    culprit String,
    culprit_node String,
    culprit_rank Int32,
    confidence Float64,
    victims Array(String),
    causes Array(String),
    cause_probabilities Array(Float64),
    reach LowCardinality(String),
    remedy Array(String),
    report String,
    evidence String,
    verdict_ids Array(String),
    recurrence UInt32,
    last_step Int64,
    fault_at Nullable(DateTime64(3, 'UTC')),
    first_signal_at Nullable(DateTime64(3, 'UTC')),
    verdict_at Nullable(DateTime64(3, 'UTC')),
    decided_at Nullable(DateTime64(3, 'UTC')),
    acted_at Nullable(DateTime64(3, 'UTC')),
    recovered_at Nullable(DateTime64(3, 'UTC')),
    closed_at Nullable(DateTime64(3, 'UTC')),
    dedup_key String,
    superseded_by String,
    close_reason String,
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
ORDER BY (incident_id, revision, ts)
SETTINGS non_replicated_deduplication_window = 10000;

-- The present state: one row per incident.
CREATE VIEW IF NOT EXISTS incidents AS
SELECT
    *,
    (toUnixTimestamp64Milli(verdict_at) - toUnixTimestamp64Milli(fault_at)) / 1000 AS detect_s,
    (toUnixTimestamp64Milli(acted_at) - toUnixTimestamp64Milli(verdict_at)) / 1000 AS act_s,
    (toUnixTimestamp64Milli(recovered_at) - toUnixTimestamp64Milli(fault_at)) / 1000 AS recover_s
FROM
(
    SELECT * FROM incident_revisions ORDER BY incident_id, revision DESC, ts DESC LIMIT 1 BY incident_id
);
