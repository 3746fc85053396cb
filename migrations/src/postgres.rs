//! The runner for PostgreSQL 14 and later.

use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

use crate::catalog::history_sql;
use crate::{Applied, Dialect, Error, Names, Report, Status};

const DIALECT: Dialect = Dialect::Postgres;

/// READ COMMITTED whatever the role's default is: the history is read after the lock was waited for, and must show what
/// the holder before us committed.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
/// Ends with the transaction, so it also works through a transaction pooler and cannot be left behind.
const LOCK: &str = "SELECT pg_advisory_xact_lock($1)";
const HISTORY_EXISTS: &str = "SELECT to_regclass($1) IS NOT NULL";

/// Brings the schema to the newest version this build knows.
///
/// Each version, its row in the history included, is one transaction under an advisory lock: any number of processes can
/// start at once, one applies, the others find it done. The schema is created when it does not exist. The role needs
/// `CREATE` on the schema (and on the database, to create the schema), once there is something to apply.
///
/// # Errors
///
/// See [`Error`]: an edited migration, a schema newer than this build, an open transaction on `conn`, or what the
/// database answered. Versions that were applied before the error stay applied.
///
/// # Cancel safety
///
/// Dropping the future rolls back the version that is being applied.
pub async fn migrate(conn: &mut PgConnection, names: &Names) -> Result<Report, Error> {
    let mut applied = Vec::new();
    loop {
        match apply_next(conn, names).await? {
            Step::Applied(version) => applied.push(version),
            Step::Nothing(version) => return Ok(Report { applied, version }),
        }
    }
}

/// Reads the history. Writes nothing; the role needs `SELECT` on the history table ([`grants`](crate::grants)).
///
/// # Errors
///
/// [`Error::Database`] only: what the history means says [`Status::check`].
///
/// # Cancel safety
///
/// Cancel safe.
pub async fn status(conn: &mut PgConnection, names: &Names) -> Result<Status, Error> {
    let table = names.history(DIALECT);
    let exists: bool = sqlx::query_scalar(HISTORY_EXISTS)
        .bind(&table)
        .fetch_one(&mut *conn)
        .await
        .map_err(Error::database("look for the migration history"))?;
    let mut applied = Vec::new();
    if exists {
        let select =
            format!("SELECT version, name, checksum, library FROM {table} ORDER BY version");
        let rows = sqlx::query(AssertSqlSafe(select))
            .persistent(false)
            .fetch_all(conn)
            .await
            .map_err(Error::database("read the migration history"))?;
        for row in rows {
            applied.push(Applied {
                version: row.get(0),
                name: row.get(1),
                checksum: row.get(2),
                library: row.get(3),
            });
        }
    }
    Ok(Status::new(DIALECT, table, applied))
}

enum Step {
    Applied(i64),
    Nothing(i64),
}

async fn apply_next(conn: &mut PgConnection, names: &Names) -> Result<Step, Error> {
    if conn.is_in_transaction() {
        return Err(Error::InTransaction);
    }
    let mut tx = conn
        .begin_with(BEGIN)
        .await
        .map_err(Error::database("begin a migration"))?;
    let step = in_transaction(&mut tx, names).await;
    // Said, not left to the drop: a dropped transaction ends when its connection is used again, and with it the lock.
    match step {
        Ok(Step::Applied(_)) => tx
            .commit()
            .await
            .map_err(Error::database("commit a migration"))?,
        Ok(Step::Nothing(_)) => tx
            .rollback()
            .await
            .map_err(Error::database("end a migration"))?,
        Err(_) => drop(tx.rollback().await),
    }
    step
}

async fn in_transaction(conn: &mut PgConnection, names: &Names) -> Result<Step, Error> {
    sqlx::query(LOCK)
        .bind(lock_key(names))
        .execute(&mut *conn)
        .await
        .map_err(Error::database("take the lock of the migrations"))?;
    let status = status(conn, names).await?;
    let Some(migration) = status.next()? else {
        return Ok(Step::Nothing(status.version));
    };
    if status.version == 0 {
        sqlx::raw_sql(AssertSqlSafe(history_sql(DIALECT, names)))
            .execute(&mut *conn)
            .await
            .map_err(Error::database("create the migration history"))?;
    }
    sqlx::raw_sql(AssertSqlSafe(migration.sql(DIALECT, names)))
        .execute(conn)
        .await
        .map_err(Error::database("apply a migration"))?;
    Ok(Step::Applied(migration.version))
}

/// Advisory locks share one space of numbers with the application: a namespaced hash keeps clear of it.
fn lock_key(names: &Names) -> i64 {
    let digest = Sha256::new()
        .chain_update(b"oncebox.migrations\0")
        .chain_update(names.history(DIALECT))
        .finalize();
    let mut key = [0; 8];
    key.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(key)
}
