//! The runner for SQLite.

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection as _, Row as _, SqliteConnection};

use crate::catalog::history_sql;
use crate::{Applied, Dialect, Error, Names, Report, Status};

const DIALECT: Dialect = Dialect::Sqlite;

/// SQLite has no advisory lock, and a deferred transaction that reads before it writes fails at once when somebody else
/// wrote in between. IMMEDIATE takes the write lock first; the history is read under it.
const BEGIN: &str = "BEGIN IMMEDIATE";
const HISTORY_EXISTS: &str =
    "SELECT count(*) > 0 FROM sqlite_schema WHERE type = 'table' AND name = ?";

/// How long to wait for the write lock, beyond the connection's own busy time-out.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(20);

/// Brings the schema to the newest version this build knows.
///
/// Each version, its row in the history included, is one `BEGIN IMMEDIATE` transaction: any number of processes can start
/// at once, one applies, the others find it done. A busy database is tried again for 30 s, also when the connection's busy
/// time-out is 0. Journal mode and `synchronous` are left as they are: producers want WAL and `FULL`
/// (see [`migrate`](crate::migrate), which sets WAL).
///
/// # Errors
///
/// See [`Error`]: an edited migration, a schema newer than this build, an open transaction on `conn`, a database that
/// stays busy, or what the database answered. Versions that were applied before the error stay applied.
///
/// # Cancel safety
///
/// Dropping the future rolls back the version that is being applied.
pub async fn migrate(conn: &mut SqliteConnection, names: &Names) -> Result<Report, Error> {
    let mut applied = Vec::new();
    let mut busy_since = None;
    loop {
        match apply_next(conn, names).await {
            Ok(Step::Applied(version)) => {
                applied.push(version);
                busy_since = None;
            }
            Ok(Step::Nothing(version)) => return Ok(Report { applied, version }),
            Err(error) if is_busy(&error) => {
                let waited = busy_since.get_or_insert_with(Instant::now).elapsed();
                if waited >= PATIENCE {
                    return Err(Error::Busy { waited });
                }
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Reads the history. Writes nothing.
///
/// # Errors
///
/// [`Error::Database`] only: what the history means says [`Status::check`].
///
/// # Cancel safety
///
/// Cancel safe.
pub async fn status(conn: &mut SqliteConnection, names: &Names) -> Result<Status, Error> {
    let table = names.history(DIALECT);
    let exists: bool = sqlx::query_scalar(HISTORY_EXISTS)
        .bind(table.trim_matches('"'))
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

async fn apply_next(conn: &mut SqliteConnection, names: &Names) -> Result<Step, Error> {
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
        Ok(Step::Applied(_)) => {
            if let Err(error) = tx.commit().await {
                // A reader was in the way. The rollback waits in the connection's queue: a ping comes out behind it.
                let _ = conn.ping().await;
                return Err(Error::database("commit a migration")(error));
            }
        }
        Ok(Step::Nothing(_)) => tx
            .rollback()
            .await
            .map_err(Error::database("end a migration"))?,
        Err(_) => drop(tx.rollback().await),
    }
    step
}

async fn in_transaction(conn: &mut SqliteConnection, names: &Names) -> Result<Step, Error> {
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

/// Somebody else has a lock (`SQLITE_BUSY` and its extended codes): nothing was done, try again.
pub(crate) fn is_busy(error: &Error) -> bool {
    let Error::Database {
        source: sqlx::Error::Database(source),
        ..
    } = error
    else {
        return false;
    };
    const SQLITE_BUSY: i32 = 5;
    source
        .code()
        .and_then(|code| code.parse::<i32>().ok())
        .is_some_and(|code| code & 0xff == SQLITE_BUSY)
}

/// Switches the file to WAL. The switch needs the file for itself, and SQLite does not wait for that.
pub(crate) async fn use_wal(conn: &mut SqliteConnection) -> Result<(), Error> {
    let since = Instant::now();
    loop {
        let switched = sqlx::query("PRAGMA journal_mode = WAL")
            .execute(&mut *conn)
            .await
            .map_err(Error::database("switch the SQLite database to WAL"));
        match switched {
            Err(error) if is_busy(&error) && since.elapsed() < PATIENCE => {
                tokio::time::sleep(PAUSE).await;
            }
            switched => return switched.map(drop),
        }
    }
}
