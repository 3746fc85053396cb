-- The history of Oncebox's migrations. It is a table of Oncebox's own, so that the application's migration tool and its
-- version numbers never meet it.
CREATE TABLE IF NOT EXISTS "{prefix}migrations" (
  version    INTEGER PRIMARY KEY,
  name       TEXT    NOT NULL,
  checksum   TEXT    NOT NULL,                        -- SHA-256 of the migration's template, lower-case hex
  library    TEXT    NOT NULL,                        -- version of oncebox-migrations that applied it
  applied_at INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)
);
