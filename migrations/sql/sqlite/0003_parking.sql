-- What cannot be published now: rows that Kafka refuses, and rows that wait behind them or for their topic.

-- A full copy of the outbox row, written by the leading relay before its position passes the row. The copy stays when the
-- outbox is cleaned up. The index finds the first parked row of a key: only rows behind it are blocked (G4).
CREATE TABLE "{prefix}parked" (
  id           INTEGER PRIMARY KEY,                   -- id of the outbox row
  message_id   BLOB    NOT NULL,
  topic        TEXT    NOT NULL,
  key          BLOB,
  payload      BLOB,
  headers      BLOB    NOT NULL,
  created_at   INTEGER NOT NULL,                      -- of the outbox row
  cause        TEXT    NOT NULL CHECK (cause IN ('refused', 'key', 'topic')), -- itself refused, behind its key, or for its topic
  reason       TEXT    NOT NULL,                      -- what Kafka said, or what it waits for
  attempts     INTEGER NOT NULL DEFAULT 0,            -- times that Kafka refused it
  request      TEXT    CHECK (request IN ('requeue', 'skip')), -- what an operator wants done with it
  parked_at    INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)
);
CREATE INDEX "{prefix}parked_key" ON "{prefix}parked" (topic, key, id);
CREATE INDEX "{prefix}parked_request" ON "{prefix}parked" (id) WHERE request IS NOT NULL;

-- Topics, or single keys, that are not published to. The relay pauses a topic that is missing or forbidden and tries it
-- again by itself; what an operator paused stays so until it is resumed.
CREATE TABLE "{prefix}paused" (
  topic     TEXT    NOT NULL,
  key       BLOB,                                     -- NULL = the whole topic
  by_relay  INTEGER NOT NULL,
  reason    TEXT    NOT NULL,
  paused_at INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)
);
CREATE UNIQUE INDEX "{prefix}paused_topic" ON "{prefix}paused" (topic) WHERE key IS NULL;
CREATE UNIQUE INDEX "{prefix}paused_key" ON "{prefix}paused" (topic, key) WHERE key IS NOT NULL;
