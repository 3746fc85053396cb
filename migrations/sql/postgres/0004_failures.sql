-- Failed messages of a consumer: persisted attempts, blocked keys, replay of dead letters, and the record of what was consumed.

-- A letter is dead (given up); parked: it waits, with every later message of its key, until an operator releases it; or delayed: it
-- failed, has attempts left, and its consumer tries it again by itself, where order does not matter.
-- replay_at is the next attempt of a delayed letter; of the others an operator's order. The consumer carries both out, not before that
-- time; replays counts the times that it began to.
ALTER TABLE "{schema}"."{prefix}dead_letter"
  ADD COLUMN parked           boolean     NOT NULL DEFAULT false,
  ADD COLUMN delayed          boolean     NOT NULL DEFAULT false,
  ADD COLUMN record_timestamp bigint,                 -- Kafka's timestamp of the record, ms
  ADD COLUMN first_failed_at  timestamptz,
  ADD COLUMN replay_at        timestamptz,
  ADD COLUMN replays          integer     NOT NULL DEFAULT 0;
CREATE INDEX "{prefix}dead_letter_replay" ON "{schema}"."{prefix}dead_letter" (consumer, replay_at) WHERE replay_at IS NOT NULL;
CREATE INDEX "{prefix}dead_letter_parked" ON "{schema}"."{prefix}dead_letter" (consumer, topic, key, partition, record_offset) WHERE parked;
-- The mark of a message stays for as long as there is a letter of it.
CREATE INDEX "{prefix}dead_letter_message" ON "{schema}"."{prefix}dead_letter" (consumer, message_id);

-- Since when messages above next may have been settled, by lanes that were faster than the first; NULL: none. Their marks stay.
ALTER TABLE "{schema}"."{prefix}position" ADD COLUMN hole_since timestamptz;

-- While a key is here, its messages are parked instead of handled. Read and locked after the marks, before the handler.
CREATE TABLE "{schema}"."{prefix}blocked_key" (
  consumer   text        NOT NULL,
  topic      text        NOT NULL,
  key        bytea       NOT NULL,
  reason     text        NOT NULL,
  blocked_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (consumer, topic, key)
);

-- A message that failed and will be tried again: a restart or a rebalance goes on counting.
CREATE TABLE "{schema}"."{prefix}attempt" (
  consumer      text        NOT NULL,
  topic         text        NOT NULL,
  partition     integer     NOT NULL,
  record_offset bigint      NOT NULL,
  message_id    uuid        NOT NULL,
  attempts      integer     NOT NULL,
  error         text        NOT NULL,
  first_at      timestamptz NOT NULL DEFAULT now(),
  due_at        timestamptz NOT NULL,                 -- not tried before this
  PRIMARY KEY (consumer, topic, partition, record_offset)
) WITH (fillfactor = 50);

-- Many messages failed in a row: that is an outage and not poison. The consumer stops until somebody accepts it.
CREATE TABLE "{schema}"."{prefix}breaker" (
  consumer   text        NOT NULL,
  topic      text        NOT NULL,
  failures   integer     NOT NULL,
  error      text        NOT NULL,
  tripped_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (consumer, topic)
);

-- Topics that a consumer does not work on until an operator lets it go on.
CREATE TABLE "{schema}"."{prefix}inbox_paused" (
  consumer  text        NOT NULL,
  topic     text        NOT NULL,
  reason    text        NOT NULL,
  paused_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (consumer, topic)
);

-- What was consumed, one row per settled message, in the transaction that settled it. Partitions of one day are made ahead
-- (`oncebox record partitions`); a row whose day has none lands in the default one, so that a message never fails for its record.
CREATE TABLE "{schema}"."{prefix}record" (
  consumer      text        NOT NULL,
  topic         text        NOT NULL,
  partition     integer     NOT NULL,
  record_offset bigint      NOT NULL,
  message_id    uuid        NOT NULL,
  business_id   text,
  status        text        NOT NULL CHECK (status IN ('effect', 'dead', 'parked')),
  attempts      integer     NOT NULL,
  first_at      timestamptz NOT NULL,                 -- of the first attempt
  settled_at    timestamptz NOT NULL DEFAULT now(),
  duration_us   bigint      NOT NULL,                 -- of the handler's last call, microseconds
  error         text
) PARTITION BY RANGE (settled_at);
-- Rows arrive in the order of time.
CREATE INDEX "{prefix}record_settled_at" ON "{schema}"."{prefix}record" USING brin (settled_at);
CREATE INDEX "{prefix}record_message" ON "{schema}"."{prefix}record" (message_id);
CREATE INDEX "{prefix}record_business" ON "{schema}"."{prefix}record" (business_id) WHERE business_id IS NOT NULL;
CREATE TABLE "{schema}"."{prefix}record_rest" PARTITION OF "{schema}"."{prefix}record" DEFAULT;
