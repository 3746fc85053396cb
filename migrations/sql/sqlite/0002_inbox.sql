-- The consumer's side: dedup marks, positions and dead letters, in the database of the effects.

-- One row per (consumer, message), in the transaction of the effect (G5).
CREATE TABLE "{prefix}inbox" (
  consumer   TEXT    NOT NULL,
  message_id BLOB    NOT NULL,
  seen_at    INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000),
  PRIMARY KEY (consumer, message_id)
) WITHOUT ROWID;

-- For the retention.
CREATE INDEX "{prefix}inbox_seen_at" ON "{prefix}inbox" (seen_at);

-- Everything below next is settled. Every transaction of the partition ends with a compare-and-set on owner, next and
-- seq: that is the fence against a zombie (G6).
CREATE TABLE "{prefix}position" (
  consumer   TEXT    NOT NULL,
  topic      TEXT    NOT NULL,
  partition  INTEGER NOT NULL,
  topic_id   TEXT    NOT NULL,                        -- Kafka's id of the topic: a re-created topic is another one
  next       INTEGER NOT NULL,
  seq        INTEGER NOT NULL,
  owner      BLOB    NOT NULL,                        -- random token of the assignment
  updated_at INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000),
  PRIMARY KEY (consumer, topic, partition)
) WITHOUT ROWID;

-- A message that could not be handled, in full (G8).
CREATE TABLE "{prefix}dead_letter" (
  id            INTEGER PRIMARY KEY AUTOINCREMENT,
  consumer      TEXT    NOT NULL,
  message_id    BLOB    NOT NULL,
  topic         TEXT    NOT NULL,
  partition     INTEGER NOT NULL,
  record_offset INTEGER NOT NULL,
  key           BLOB,
  payload       BLOB,
  headers       BLOB    NOT NULL,                     -- encoded header list
  error         TEXT    NOT NULL,
  attempts      INTEGER NOT NULL,
  failed_at     INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000),
  UNIQUE (consumer, topic, partition, record_offset)
);
