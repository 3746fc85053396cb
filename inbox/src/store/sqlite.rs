//! SQLite.

use std::time::Duration;

use oncebox_migrations::{Dialect, Names};
use sqlx::Sqlite;

use super::{Statements, Store, Templates, implement_statements};

// updated_at is for people; the expression is the one of the column's default.
const SQL: Templates = Templates {
    mark: "INSERT INTO {inbox} (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING true",
    advance: "UPDATE {position} SET next = $7, seq = $8, \
              updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 \
              WHERE consumer = $1 AND topic = $2 AND partition = $3 AND owner = $4 AND next = $5 AND seq = $6 \
              AND EXISTS (SELECT 1 FROM {inbox} WHERE consumer = $1 AND message_id = $9)",
    take: "UPDATE {position} SET owner = $4, seq = seq + 1, \
           updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000 \
           WHERE consumer = $1 AND topic = $2 AND partition = $3 RETURNING topic_id, next, seq, owner",
    create: "INSERT INTO {position} (consumer, topic, partition, topic_id, next, seq, owner) \
             VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
    read: "SELECT topic_id, next, seq, owner FROM {position} WHERE consumer = $1 AND topic = $2 AND partition = $3",
    put: "INSERT INTO {position} AS p (consumer, topic, partition, topic_id, next, seq, owner) \
          VALUES ($1, $2, $3, $4, $5, $6, $7) \
          ON CONFLICT (consumer, topic, partition) DO UPDATE SET topic_id = excluded.topic_id, next = excluded.next, \
          seq = max(p.seq + 1, excluded.seq), owner = excluded.owner, \
          updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000",
    bury: "INSERT INTO {dead_letter} \
           (consumer, message_id, topic, partition, record_offset, key, payload, headers, error, attempts) \
           VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT DO NOTHING",
    buried: "SELECT message_id FROM {dead_letter} \
             WHERE consumer = $1 AND topic = $2 AND partition = $3 AND record_offset = $4",
};

impl Store for Sqlite {
    fn statements(names: &Names, _idle_limit: Duration) -> Statements {
        // A deferred transaction that reads before it writes fails with SQLITE_BUSY at once, whatever busy_timeout says.
        // SQLite cannot end an idle transaction: see the precondition of G6. Waiting is bounded by busy_timeout.
        const BEGIN: &str = "BEGIN IMMEDIATE";
        Statements::new(Dialect::Sqlite, names, BEGIN, BEGIN, &SQL)
    }

    async fn check(
        conn: &mut Self::Connection,
        names: &Names,
    ) -> Result<(), oncebox_migrations::Error> {
        oncebox_migrations::sqlite::status(conn, names)
            .await?
            .check()
    }

    implement_statements!(Sqlite);
}
