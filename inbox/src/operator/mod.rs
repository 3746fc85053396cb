//! What the commands of an operator need from a database: statements that are put together from parts, and rows read column by
//! column. [`dead`](crate::dead), [`record`](crate::record) and [`reconcile`](crate::reconcile) are built on it.
//!
//! Table names are checked identifiers, everything else is bound: nothing that an operator types becomes SQL.

mod ask;
mod columns;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(test)]
pub(crate) mod testing;

use oncebox_migrations::Names;
use sqlx::{Pool, Transaction};
use time::OffsetDateTime;

use crate::InboxStore;
use crate::error::Error;

pub(crate) use ask::{Ask, Sql, Value, tables};
pub(crate) use columns::Columns;

/// A database that an operator's commands work on: [`sqlx::Postgres`] and [`sqlx::Sqlite`].
///
/// Sealed: the statements behind it are not part of the public interface.
pub trait OperatorStore: InboxStore + Ask + crate::dead::Texts + crate::record::Texts {}

#[cfg(feature = "postgres")]
impl OperatorStore for sqlx::Postgres {}
#[cfg(feature = "sqlite")]
impl OperatorStore for sqlx::Sqlite {}

/// Checks that the tables are those of this build.
pub(crate) async fn check<D: OperatorStore>(pool: &Pool<D>, names: &Names) -> Result<(), Error> {
    crate::store::connect(pool, names).await.map(drop)
}

/// Begins a transaction that only reads.
pub(crate) async fn reading<D: OperatorStore>(
    pool: &Pool<D>,
) -> Result<Transaction<'static, D>, Error> {
    pool.begin_with(D::BEGIN_READ)
        .await
        .map_err(|e| Error::database("begin to read", e))
}

/// The rows of a query, in a transaction of their own that only reads.
pub(crate) async fn rows<D: OperatorStore>(
    pool: &Pool<D>,
    doing: &'static str,
    sql: Sql,
) -> Result<Vec<D::Row>, Error> {
    let failed = |e| Error::database(doing, e);
    let mut tx = reading(pool).await?;
    let rows = D::rows(&mut tx, sql).await.map_err(failed)?;
    tx.rollback().await.map_err(failed)?;
    Ok(rows)
}

/// Begins a transaction that writes.
pub(crate) async fn writing<D: OperatorStore>(
    pool: &Pool<D>,
) -> Result<Transaction<'static, D>, Error> {
    pool.begin_with(D::BEGIN_WRITE)
        .await
        .map_err(|e| Error::database("begin to write", e))
}

/// The database's clock.
pub(crate) async fn now<D: OperatorStore>(conn: &mut D::Connection) -> Result<i64, sqlx::Error> {
    let rows = D::rows(conn, Sql::new(format!("SELECT {}", D::NOW))).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    Columns::<D>::new(row).int()
}

/// Microseconds since the Unix epoch.
pub(crate) fn micros(at: OffsetDateTime) -> i64 {
    i64::try_from(at.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX)
}

/// The time of so many microseconds since the Unix epoch.
pub(crate) fn time(micros: i64) -> Result<OffsetDateTime, sqlx::Error> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1_000)
        .map_err(|e| sqlx::Error::Decode(e.into()))
}
