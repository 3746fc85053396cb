-- The producer's side: messages that wait for the relay, and the relay's mark.
-- Times are microseconds since the Unix epoch; the clock of the defaults has milliseconds. Ids of the uuid kind are
-- 16 bytes.

-- Insert-only. AUTOINCREMENT is required: without it ids start again at 1 when the table was emptied, and the relay, who
-- reads behind its position, never sees them (G2).
CREATE TABLE "{prefix}outbox" (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  message_id BLOB    NOT NULL,                        -- UUIDv7, made by the client
  topic      TEXT    NOT NULL,
  key        BLOB,                                    -- the Kafka key, and the unit of order
  payload    BLOB,                                    -- NULL is a tombstone, an empty value is an empty payload
  headers    BLOB    NOT NULL,                        -- encoded header list
  created_at INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)
);

-- One row: the relay's lease, its confirmed position and the fence of its clean-up.
CREATE TABLE "{prefix}mark" (
  singleton           INTEGER NOT NULL PRIMARY KEY DEFAULT 1 CHECK (singleton = 1),
  source_id           BLOB    NOT NULL,               -- identity of this outbox, made once, here
  source              TEXT,                           -- name of the source, set by the first relay
  source_epoch        INTEGER NOT NULL DEFAULT 1,     -- +1 when ids may be issued a second time
  format              INTEGER NOT NULL DEFAULT 1,     -- format of the position and of the checkpoint
  epoch               INTEGER NOT NULL DEFAULT 0,     -- +1 at every change of the leader
  owner               TEXT,                           -- the leader, for people
  renewal             INTEGER NOT NULL DEFAULT 0,     -- counter of the lease
  position            TEXT    NOT NULL DEFAULT '',    -- settled so far, in the relay's text format
  seq                 INTEGER NOT NULL DEFAULT 0,     -- number of the position
  cluster_id          TEXT,                           -- the Kafka cluster it was published to
  low_water           INTEGER NOT NULL DEFAULT 0,     -- last deleted id
  deleted_count       INTEGER NOT NULL DEFAULT 0,
  deleted_fingerprint INTEGER NOT NULL DEFAULT 0,
  updated_at          INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)
);

INSERT INTO "{prefix}mark" (singleton, source_id) VALUES (1, randomblob(16));
