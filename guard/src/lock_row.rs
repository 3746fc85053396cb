//! Look and keep: the row stays as it was read until the transaction ends.

use sqlx::{FromRow, Transaction};

use crate::row::Key;
use crate::statement::Values;
use crate::{Dialect, Error, name};

/// What [`lock_row`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the row may be missing"]
pub enum Locked<T> {
    /// The row, which nobody else changes before this transaction ends.
    Row(T),
    /// No row has the key. Nothing is locked: somebody else may insert one.
    Missing,
}

/// Reads a row and keeps everybody else from changing it until the transaction ends: for a decision that needs more than
/// one condition, such as the check in front of a payment callback.
///
/// On PostgreSQL that is `SELECT * … FOR UPDATE`. On SQLite the transaction becomes one that writes, of which there is one
/// at a time; begin it with `pool.begin_with("BEGIN IMMEDIATE")`, as the inbox does.
///
/// It protects a row that is there. Whether one is missing can change at once; to create it, [`insert_once`](crate::insert_once).
///
/// ```
/// # use oncebox_guard as guard;
/// # async fn example(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>, id: i64) -> Result<(), guard::Error> {
/// use oncebox_guard::{Locked, key};
///
/// #[derive(sqlx::FromRow)]
/// struct Payment { status: String, amount: i64 }
///
/// match guard::lock_row::<_, Payment>(tx, "payment", key("id", id)).await? {
///     Locked::Row(payment) if payment.status == "pending" && payment.amount > 0 => {
///         // still so when this transaction commits: settle it, and enqueue the confirmation
///     }
///     Locked::Row(_) => {} // settled before
///     Locked::Missing => {} // not ours
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`Error::Name`], [`Error::NullKey`], [`Error::ManyRows`], or the database's answer. On SQLite also when a deferred
/// transaction has read before and another one has written since ([`Error::is_retriable`]).
///
/// # Cancel safety
///
/// When the future is dropped, the row may or may not be locked until the transaction ends.
pub async fn lock_row<D: Dialect, T>(
    tx: &mut Transaction<'_, D>,
    table: &'static str,
    key: Key<'_, D>,
) -> Result<Locked<T>, Error>
where
    T: for<'r> FromRow<'r, D::Row>,
{
    const DOING: &str = "lock a row of";
    let (write_lock, select) = {
        let mut values = Values::new(table);
        let condition = values.key(&key)?;
        let quoted = name::table::<D>(table)?;
        let column = name::column::<D>(key.columns[0].name)?;
        let select = format!("SELECT * FROM {quoted} WHERE {condition}{}", D::FOR_UPDATE);
        (
            D::write_lock(&quoted, &column).map(|sql| Values::<D>::new(table).statement(sql)),
            // `*` means other columns after an ALTER TABLE.
            values.statement(select).prepared_once(),
        )
    };
    drop(key);
    if let Some(statement) = write_lock {
        statement.row(tx, DOING).await?;
    }
    match select.row(tx, DOING).await? {
        Some(row) => T::from_row(&row)
            .map(Locked::Row)
            .map_err(Error::database(DOING, table)),
        None => Ok(Locked::Missing),
    }
}
