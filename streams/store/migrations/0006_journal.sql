-- The writer's journal: which offsets make up which batch, written before the batch is. A successor cuts the same batch again and the
-- store then recognises it by its token. state: 1 intended, 2 done, 3 withdrawn.
CREATE TABLE IF NOT EXISTS write_journal
(
    batch_id String,
    state UInt8,
    writer String,
    topic LowCardinality(String),
    partition Int32,
    first_offset Int64,
    next_offset Int64,
    first_hash UInt64,
    first_ms Int64,
    last_ms Int64,
    messages UInt32,
    written_at DateTime64(3, 'UTC')
)
ENGINE = MergeTree
PARTITION BY toDate(written_at)
ORDER BY (topic, partition, first_offset)
TTL toDateTime(written_at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;
