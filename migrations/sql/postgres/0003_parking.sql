-- What cannot be published now: rows that Kafka refuses, and rows that wait behind them or for their topic.

-- A full copy of the outbox row, written by the leading relay before its position passes the row. The copy stays when the
-- outbox is cleaned up. The index finds the first parked row of a key: only rows behind it are blocked (G4).
CREATE TABLE "{schema}"."{prefix}parked" (
  id           bigint      PRIMARY KEY,               -- id of the outbox row
  message_id   uuid        NOT NULL,
  topic        text        NOT NULL,
  key          bytea,
  payload      bytea,
  headers      bytea       NOT NULL,
  created_at   timestamptz NOT NULL,                  -- of the outbox row
  cause        text        NOT NULL CHECK (cause IN ('refused', 'key', 'topic')), -- itself refused, behind its key, or for its topic
  reason       text        NOT NULL,                  -- what Kafka said, or what it waits for
  attempts     integer     NOT NULL DEFAULT 0,        -- times that Kafka refused it
  request      text        CHECK (request IN ('requeue', 'skip')), -- what an operator wants done with it
  parked_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX "{prefix}parked_key" ON "{schema}"."{prefix}parked" (topic, key, id);
CREATE INDEX "{prefix}parked_request" ON "{schema}"."{prefix}parked" (id) WHERE request IS NOT NULL;

-- Topics, or single keys, that are not published to. The relay pauses a topic that is missing or forbidden and tries it
-- again by itself; what an operator paused stays so until it is resumed.
CREATE TABLE "{schema}"."{prefix}paused" (
  topic     text        NOT NULL,
  key       bytea,                                    -- NULL = the whole topic
  by_relay  boolean     NOT NULL,
  reason    text        NOT NULL,
  paused_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE UNIQUE INDEX "{prefix}paused_topic" ON "{schema}"."{prefix}paused" (topic) WHERE key IS NULL;
CREATE UNIQUE INDEX "{prefix}paused_key" ON "{schema}"."{prefix}paused" (topic, key) WHERE key IS NOT NULL;
