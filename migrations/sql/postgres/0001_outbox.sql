-- The producer's side: messages that wait for the relay, and the relay's mark.

-- Insert-only: no status column, no update per row, one index. The id is the position and never a message id: a failover
-- may issue an id again. CACHE 1 is required: sessions with cached ranges of ids would break the order of a key (G4).
CREATE TABLE "{schema}"."{prefix}outbox" (
  id         bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
  message_id uuid        NOT NULL,                    -- UUIDv7, made by the client
  topic      text        NOT NULL,
  key        bytea,                                   -- the Kafka key, and the unit of order
  payload    bytea,                                   -- NULL is a tombstone, an empty value is an empty payload
  headers    bytea       NOT NULL,                    -- encoded header list
  created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row: the relay's lease, its confirmed position and the fence of its clean-up, in the database of the messages, so
-- that it fails over with them. fillfactor 50 keeps the frequent updates inside one page (heap-only tuples).
CREATE TABLE "{schema}"."{prefix}mark" (
  singleton           boolean     PRIMARY KEY DEFAULT true CHECK (singleton),
  source_id           uuid        NOT NULL,           -- identity of this outbox, made once, here
  source              text,                           -- name of the source, set by the first relay
  source_epoch        bigint      NOT NULL DEFAULT 1, -- +1 when ids may be issued a second time
  format              integer     NOT NULL DEFAULT 1, -- format of the position and of the checkpoint
  epoch               bigint      NOT NULL DEFAULT 0, -- +1 at every change of the leader
  owner               text,                           -- the leader, for people
  renewal             bigint      NOT NULL DEFAULT 0, -- counter of the lease
  position            text        NOT NULL DEFAULT '',-- settled so far, in the relay's text format
  seq                 bigint      NOT NULL DEFAULT 0, -- number of the position
  cluster_id          text,                           -- the Kafka cluster it was published to
  low_water           bigint      NOT NULL DEFAULT 0, -- last deleted id
  deleted_count       bigint      NOT NULL DEFAULT 0,
  deleted_fingerprint bigint      NOT NULL DEFAULT 0,
  updated_at          timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);

INSERT INTO "{schema}"."{prefix}mark" (source_id) VALUES (gen_random_uuid());
