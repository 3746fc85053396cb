-- The history of Oncebox's migrations. It is a table of Oncebox's own, so that the application's migration tool and its
-- version numbers never meet it.
DO $$
BEGIN
  -- Not CREATE SCHEMA IF NOT EXISTS: that asks for CREATE on the database even when the schema is there.
  IF to_regnamespace('"{schema}"') IS NULL THEN
    CREATE SCHEMA "{schema}";
  END IF;
END
$$;

CREATE TABLE IF NOT EXISTS "{schema}"."{prefix}migrations" (
  version    bigint      PRIMARY KEY,
  name       text        NOT NULL,
  checksum   text        NOT NULL,                    -- SHA-256 of the migration's template, lower-case hex
  library    text        NOT NULL,                    -- version of oncebox-migrations that applied it
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
