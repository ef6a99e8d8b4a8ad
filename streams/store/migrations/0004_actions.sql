-- What was planned, done and told, who is where, what the operator changed, and what nobody could read.

CREATE TABLE IF NOT EXISTS plan_log
(
    plan_id String,
    ts DateTime64(3, 'UTC'),
    cluster LowCardinality(String),
    job LowCardinality(String),
    attempt UInt32,
    incident_id String,
    incident_revision UInt32,
    number UInt32,
    kind LowCardinality(String),
    verbs Array(String),
    targets Array(String),
    keys Array(String),
    mode LowCardinality(String),
    reason String,
    precondition String,
    expires_at Nullable(DateTime64(3, 'UTC')),
    fence UInt64,
    policy_revision String,
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
ORDER BY (plan_id, ts)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE VIEW IF NOT EXISTS plans AS
SELECT * FROM plan_log ORDER BY plan_id, ts DESC LIMIT 1 BY plan_id;

-- One row per change of state of a step of a plan, as the ledger published it.
CREATE TABLE IF NOT EXISTS action_log
(
    ts DateTime64(3, 'UTC'),
    cluster LowCardinality(String),
    job LowCardinality(String),
    incident_id String,
    plan_id String,
    key String,
    verb LowCardinality(String),
    target String,
    status LowCardinality(String),
    mode LowCardinality(String),
    rail LowCardinality(String),
    reason String,
    fence UInt64,
    started_at Nullable(DateTime64(3, 'UTC')),
    finished_at Nullable(DateTime64(3, 'UTC')),
    detail Map(String, String),
    seq UInt64,
    boot_id LowCardinality(String),
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
ORDER BY (incident_id, plan_id, ts, key, status, rail, boot_id, seq)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE VIEW IF NOT EXISTS actions AS
SELECT * FROM action_log FINAL;

CREATE TABLE IF NOT EXISTS delivery_log
(
    ts DateTime64(3, 'UTC'),
    cluster LowCardinality(String),
    incident_id String,
    revision UInt32,
    receiver LowCardinality(String),
    cause LowCardinality(String),
    attempt UInt32,
    status LowCardinality(String),
    reason String,
    seq UInt64,
    boot_id LowCardinality(String),
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
ORDER BY (incident_id, revision, receiver, cause, attempt, status, ts, boot_id, seq)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE VIEW IF NOT EXISTS deliveries AS
SELECT * FROM delivery_log FINAL;

-- rank_nodes[i], rank_devices[i] is where ranks[i] ran from valid_from on.
CREATE TABLE IF NOT EXISTS topology
(
    entity String,
    origin LowCardinality(String),
    valid_from DateTime64(3, 'UTC'),
    cluster LowCardinality(String),
    attempt UInt32,
    removed Bool,
    attributes Map(String, String),
    ranks Array(Int32),
    rank_nodes Array(String),
    rank_devices Array(String),
    seq UInt64,
    boot_id LowCardinality(String),
    node LowCardinality(String),
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
ORDER BY (entity, origin, valid_from, attempt, node, boot_id, seq)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS policy_changes
(
    ts DateTime64(3, 'UTC'),
    cluster LowCardinality(String),
    key String,
    value String,
    author String,
    comment String,
    expires_at Nullable(DateTime64(3, 'UTC')),
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
ORDER BY (key, ts, value, author)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS dead_letters
(
    ts DateTime64(3, 'UTC'),
    cluster LowCardinality(String),
    topic LowCardinality(String),
    partition Int32,
    offset Int64,
    reason String,
    key String,
    payload String CODEC(ZSTD(3)),
    arrived_at DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(arrived_at)
ORDER BY (topic, partition, offset, reason, cityHash64(payload))
TTL toDateTime(arrived_at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000;
