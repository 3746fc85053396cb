//! SQLite: the write lock of the database is the lock of every key.

use std::sync::Arc;

use oncebox_migrations::{Dialect, Names};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr, Sqlite, SqliteConnection};

use crate::check::Row;
use crate::dialect::{self, sealed::Store};

/// Rows per statement: 5 parameters each, below the 999 that old builds of SQLite allow.
const CHUNK: usize = 150;

#[derive(Debug, Clone)]
pub(crate) struct Statements {
    insert: SqlStr,
    /// For a full chunk, so that a long batch is prepared once.
    insert_chunk: SqlStr,
    insert_prefix: String,
}

impl Statements {
    pub(crate) fn new(names: &Names) -> Self {
        let insert_prefix = format!(
            "INSERT INTO {} (message_id, topic, key, payload, headers) VALUES ",
            names.outbox(Dialect::Sqlite)
        );
        Self {
            insert: insert_rows(&insert_prefix, 1),
            insert_chunk: insert_rows(&insert_prefix, CHUNK),
            insert_prefix,
        }
    }
}

fn insert_rows(prefix: &str, rows: usize) -> SqlStr {
    let rows = vec!["(?, ?, ?, ?, ?)"; rows].join(", ");
    AssertSqlSafe(Arc::<str>::from(format!("{prefix}{rows}"))).into_sql_str()
}

impl Store for Sqlite {
    /// Nothing to do (G4): the INSERT that follows takes the write lock of the whole database before it draws its id, and
    /// keeps it until the transaction ends, also in a deferred transaction. So ids ascend in the order of the commits. A
    /// deferred transaction that read before, and was overtaken by another writer, cannot take the lock any more: its
    /// INSERT fails with SQLITE_BUSY_SNAPSHOT and nothing is written in the wrong order.
    async fn lock(
        _: &mut SqliteConnection,
        _: &dialect::Statements,
        _: &str,
        _: &[u8],
    ) -> sqlx::Result<()> {
        Ok(())
    }

    async fn insert(
        conn: &mut SqliteConnection,
        statements: &dialect::Statements,
        row: Row,
    ) -> sqlx::Result<()> {
        insert_chunk(conn, statements.sqlite.insert.clone(), true, [row]).await
    }

    async fn insert_all(
        conn: &mut SqliteConnection,
        statements: &dialect::Statements,
        rows: Vec<Row>,
    ) -> sqlx::Result<()> {
        // Several statements: the savepoint makes them all or nothing.
        let mut savepoint = sqlx::Connection::begin(conn).await?;
        let mut rows = rows.into_iter();
        while rows.len() >= CHUNK {
            let sql = statements.sqlite.insert_chunk.clone();
            insert_chunk(&mut savepoint, sql, true, rows.by_ref().take(CHUNK)).await?;
        }
        if rows.len() > 0 {
            let sql = insert_rows(&statements.sqlite.insert_prefix, rows.len());
            insert_chunk(&mut savepoint, sql, false, rows).await?;
        }
        savepoint.commit().await
    }
}

async fn insert_chunk(
    conn: &mut SqliteConnection,
    sql: SqlStr,
    persistent: bool,
    rows: impl IntoIterator<Item = Row>,
) -> sqlx::Result<()> {
    let mut query = sqlx::query(sql).persistent(persistent);
    for row in rows {
        query = query
            .bind(row.id.as_uuid())
            .bind(row.topic)
            .bind(row.key)
            .bind(row.payload)
            .bind(row.headers);
    }
    query.execute(conn).await?;
    Ok(())
}
