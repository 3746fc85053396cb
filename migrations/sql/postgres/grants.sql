-- The least rights of the three roles. They are given once, by the owner of the tables, after the migration.
-- Nobody needs more than this; nothing here is given to PUBLIC.

-- The role of a service that enqueues. INSERT and nothing else: the message id comes from the client, so nothing is
-- read back, and the identity column needs no right on its sequence.
GRANT USAGE ON SCHEMA "{schema}" TO {producer};
GRANT INSERT ON "{schema}"."{prefix}outbox" TO {producer};

-- The relay, and operators who skip, requeue, pause and resume. It never writes a message into the outbox: SELECT to read,
-- DELETE to clean up; what cannot be published moves to the table of parked rows. SELECT on the sequence is for
-- pg_sequence_last_value(); pg_locks, where it looks for open writers, is readable by everybody.
GRANT USAGE ON SCHEMA "{schema}" TO {relay};
GRANT SELECT, DELETE ON "{schema}"."{prefix}outbox" TO {relay};
GRANT SELECT ON SEQUENCE "{schema}"."{prefix}outbox_id_seq" TO {relay};
GRANT SELECT, UPDATE ON "{schema}"."{prefix}mark" TO {relay};
GRANT SELECT, INSERT, UPDATE, DELETE ON "{schema}"."{prefix}parked", "{schema}"."{prefix}paused" TO {relay};
GRANT SELECT ON "{schema}"."{prefix}migrations" TO {relay};

-- A consumer, and operators who replay or discard its dead letters, pause and resume. Its handlers need rights on the application's tables
-- besides, and the producer's if they enqueue. DELETE is for the retention and for the replay of dead letters. The daily
-- partitions of the record are made by their owner: run `oncebox record partitions` as the owner, or give the table to the
-- consumer; without them rows go to the default partition.
GRANT USAGE ON SCHEMA "{schema}" TO {consumer};
GRANT SELECT, INSERT, DELETE ON "{schema}"."{prefix}inbox" TO {consumer};
GRANT SELECT, INSERT, UPDATE ON "{schema}"."{prefix}position" TO {consumer};
GRANT SELECT, INSERT, UPDATE, DELETE ON "{schema}"."{prefix}dead_letter", "{schema}"."{prefix}blocked_key",
  "{schema}"."{prefix}attempt", "{schema}"."{prefix}breaker", "{schema}"."{prefix}inbox_paused" TO {consumer};
GRANT SELECT, INSERT, DELETE ON "{schema}"."{prefix}record" TO {consumer};
GRANT SELECT ON "{schema}"."{prefix}migrations" TO {consumer};
