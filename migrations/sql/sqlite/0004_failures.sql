-- Failed messages of a consumer: persisted attempts, blocked keys, replay of dead letters, and the record of what was consumed.

-- A letter is dead (given up); parked: it waits, with every later message of its key, until an operator releases it; or delayed: it
-- failed, has attempts left, and its consumer tries it again by itself, where order does not matter.
-- replay_at is the next attempt of a delayed letter; of the others an operator's order. The consumer carries both out, not before that
-- time; replays counts the times that it began to.
ALTER TABLE "{prefix}dead_letter" ADD COLUMN parked           INTEGER NOT NULL DEFAULT 0;
ALTER TABLE "{prefix}dead_letter" ADD COLUMN delayed          INTEGER NOT NULL DEFAULT 0;
ALTER TABLE "{prefix}dead_letter" ADD COLUMN record_timestamp INTEGER; -- Kafka's timestamp of the record, ms
ALTER TABLE "{prefix}dead_letter" ADD COLUMN first_failed_at  INTEGER;
ALTER TABLE "{prefix}dead_letter" ADD COLUMN replay_at        INTEGER;
ALTER TABLE "{prefix}dead_letter" ADD COLUMN replays          INTEGER NOT NULL DEFAULT 0;
CREATE INDEX "{prefix}dead_letter_replay" ON "{prefix}dead_letter" (consumer, replay_at) WHERE replay_at IS NOT NULL;
CREATE INDEX "{prefix}dead_letter_parked" ON "{prefix}dead_letter" (consumer, topic, key, partition, record_offset) WHERE parked;
-- The mark of a message stays for as long as there is a letter of it.
CREATE INDEX "{prefix}dead_letter_message" ON "{prefix}dead_letter" (consumer, message_id);

-- Since when messages above next may have been settled, by lanes that were faster than the first; NULL: none. Their marks stay.
ALTER TABLE "{prefix}position" ADD COLUMN hole_since INTEGER;

-- While a key is here, its messages are parked instead of handled.
CREATE TABLE "{prefix}blocked_key" (
  consumer   TEXT    NOT NULL,
  topic      TEXT    NOT NULL,
  key        BLOB    NOT NULL,
  reason     TEXT    NOT NULL,
  blocked_at INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000),
  PRIMARY KEY (consumer, topic, key)
) WITHOUT ROWID;

-- A message that failed and will be tried again: a restart or a rebalance goes on counting.
CREATE TABLE "{prefix}attempt" (
  consumer      TEXT    NOT NULL,
  topic         TEXT    NOT NULL,
  partition     INTEGER NOT NULL,
  record_offset INTEGER NOT NULL,
  message_id    BLOB    NOT NULL,
  attempts      INTEGER NOT NULL,
  error         TEXT    NOT NULL,
  first_at      INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000),
  due_at        INTEGER NOT NULL,                     -- not tried before this
  PRIMARY KEY (consumer, topic, partition, record_offset)
) WITHOUT ROWID;

-- Many messages failed in a row: that is an outage and not poison. The consumer stops until somebody accepts it.
CREATE TABLE "{prefix}breaker" (
  consumer   TEXT    NOT NULL,
  topic      TEXT    NOT NULL,
  failures   INTEGER NOT NULL,
  error      TEXT    NOT NULL,
  tripped_at INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000),
  PRIMARY KEY (consumer, topic)
) WITHOUT ROWID;

-- Topics that a consumer does not work on until an operator lets it go on.
CREATE TABLE "{prefix}inbox_paused" (
  consumer  TEXT    NOT NULL,
  topic     TEXT    NOT NULL,
  reason    TEXT    NOT NULL,
  paused_at INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000),
  PRIMARY KEY (consumer, topic)
) WITHOUT ROWID;

-- What was consumed, one row per settled message, in the transaction that settled it.
CREATE TABLE "{prefix}record" (
  id            INTEGER PRIMARY KEY,
  consumer      TEXT    NOT NULL,
  topic         TEXT    NOT NULL,
  partition     INTEGER NOT NULL,
  record_offset INTEGER NOT NULL,
  message_id    BLOB    NOT NULL,
  business_id   TEXT,
  status        TEXT    NOT NULL CHECK (status IN ('effect', 'dead', 'parked')),
  attempts      INTEGER NOT NULL,
  first_at      INTEGER NOT NULL,                     -- of the first attempt
  settled_at    INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000),
  duration_us   INTEGER NOT NULL,                     -- of the handler's last call, microseconds
  error         TEXT
);
CREATE INDEX "{prefix}record_message" ON "{prefix}record" (message_id);
CREATE INDEX "{prefix}record_business" ON "{prefix}record" (business_id) WHERE business_id IS NOT NULL;
CREATE INDEX "{prefix}record_settled_at" ON "{prefix}record" (settled_at);
