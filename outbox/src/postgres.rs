//! PostgreSQL: one INSERT, and an advisory lock for the order of a key.

use std::sync::Arc;

use oncebox_migrations::{Dialect, Names};
use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, PgConnection, Postgres, SqlSafeStr, SqlStr};

use crate::check::Row;
use crate::dialect::{self, sealed::Store};

/// Held to the end of the transaction, and released by the database even if the process dies.
const LOCK: &str = "SELECT pg_advisory_xact_lock($1)";

#[derive(Debug, Clone)]
pub(crate) struct Statements {
    insert: SqlStr,
    insert_all: SqlStr,
}

impl Statements {
    pub(crate) fn new(names: &Names) -> Self {
        let outbox = names.outbox(Dialect::Postgres);
        // No RETURNING: the role of a producer has INSERT and nothing else.
        let insert = format!(
            "INSERT INTO {outbox} (message_id, topic, key, payload, headers) VALUES ($1, $2, $3, $4, $5)"
        );
        // ORDER BY: the ids are drawn in the order of the messages (G4 for several messages of one key).
        let insert_all = format!(
            "INSERT INTO {outbox} (message_id, topic, key, payload, headers) \
             SELECT m.message_id, m.topic, m.key, m.payload, m.headers \
             FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bytea[], $5::bytea[]) \
             WITH ORDINALITY AS m (message_id, topic, key, payload, headers, n) ORDER BY m.n"
        );
        Self {
            insert: AssertSqlSafe(Arc::<str>::from(insert)).into_sql_str(),
            insert_all: AssertSqlSafe(Arc::<str>::from(insert_all)).into_sql_str(),
        }
    }
}

impl Store for Postgres {
    async fn lock(
        conn: &mut PgConnection,
        _: &dialect::Statements,
        topic: &str,
        key: &[u8],
    ) -> sqlx::Result<()> {
        // G4: a statement of its own. In one statement with the INSERT, a writer that waits here would already hold its id.
        sqlx::query(LOCK)
            .bind(lock_number(topic, key))
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn insert(
        conn: &mut PgConnection,
        statements: &dialect::Statements,
        row: Row,
    ) -> sqlx::Result<()> {
        sqlx::query(statements.postgres.insert.clone())
            .bind(row.id.as_uuid())
            .bind(row.topic)
            .bind(row.key)
            .bind(row.payload)
            .bind(row.headers)
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn insert_all(
        conn: &mut PgConnection,
        statements: &dialect::Statements,
        rows: Vec<Row>,
    ) -> sqlx::Result<()> {
        let column = |pick: fn(&Row) -> Option<&[u8]>| rows.iter().map(pick).collect::<Vec<_>>();
        let ids: Vec<_> = rows.iter().map(|row| row.id.as_uuid()).collect();
        let topics: Vec<_> = rows.iter().map(|row| row.topic.as_str()).collect();
        sqlx::query(statements.postgres.insert_all.clone())
            .bind(ids)
            .bind(topics)
            .bind(column(|row| row.key.as_deref()))
            .bind(column(|row| row.payload.as_deref()))
            .bind(column(|row| Some(&row.headers)))
            .execute(conn)
            .await?;
        Ok(())
    }
}

/// The number of a key's advisory lock: the first 8 bytes, big-endian, of
/// `SHA-256("oncebox.key" 0x00 topic 0x00 key)`. Part of the public contract: a writer in another language must take the
/// same lock. Advisory locks share one space of numbers with the application, hence the namespace; two keys with one
/// number only wait for each other.
fn lock_number(topic: &str, key: &[u8]) -> i64 {
    let digest = Sha256::new()
        .chain_update(b"oncebox.key\0")
        .chain_update(topic)
        .chain_update([0])
        .chain_update(key)
        .finalize();
    let mut number = [0; 8];
    number.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(number)
}
