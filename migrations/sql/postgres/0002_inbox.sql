-- The consumer's side: dedup marks, positions and dead letters, in the database of the effects.

-- One row per (consumer, message), in the transaction of the effect (G5). Not partitioned: a message id must be unique
-- whatever its day.
CREATE TABLE "{schema}"."{prefix}inbox" (
  consumer   text        NOT NULL,
  message_id uuid        NOT NULL,
  seen_at    timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (consumer, message_id)
);

-- Rows arrive in the order of time: a BRIN index finds the old ones for the retention at almost no cost per insert.
CREATE INDEX "{prefix}inbox_seen_at" ON "{schema}"."{prefix}inbox" USING brin (seen_at);

-- Everything below next is settled. Every transaction of the partition ends with a compare-and-set on owner, next and
-- seq: that is the fence against a zombie (G6).
CREATE TABLE "{schema}"."{prefix}position" (
  consumer   text        NOT NULL,
  topic      text        NOT NULL,
  partition  integer     NOT NULL,
  topic_id   text        NOT NULL,                    -- Kafka's id of the topic: a re-created topic is another one
  next       bigint      NOT NULL,
  seq        bigint      NOT NULL,
  owner      uuid        NOT NULL,                    -- random token of the assignment
  updated_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (consumer, topic, partition)
) WITH (fillfactor = 50);

-- A message that could not be handled, in full (G8).
CREATE TABLE "{schema}"."{prefix}dead_letter" (
  id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  consumer      text        NOT NULL,
  message_id    uuid        NOT NULL,
  topic         text        NOT NULL,
  partition     integer     NOT NULL,
  record_offset bigint      NOT NULL,
  key           bytea,
  payload       bytea,
  headers       bytea       NOT NULL,                 -- encoded header list
  error         text        NOT NULL,
  attempts      integer     NOT NULL,
  failed_at     timestamptz NOT NULL DEFAULT now(),
  UNIQUE (consumer, topic, partition, record_offset)
);
