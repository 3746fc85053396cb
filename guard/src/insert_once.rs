//! A unique business key: insert first, and let the database say whether it was there.

use sqlx::Transaction;

use crate::row::Row;
use crate::statement::{Values, check_key};
use crate::{Dialect, Error, name};

/// What [`insert_once`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a duplicate is not reported in any other way"]
pub enum Inserted {
    /// The row is new.
    Applied,
    /// A row with the key was there; nothing was written.
    Duplicate,
}

/// Inserts a row, unless one with its key is there already.
///
/// There is no look before the insert, in which two transactions could both see nothing: a transaction that inserts the
/// same key at the same time waits for the other's end, and then is the duplicate, or the first if the other rolled back.
/// A duplicate does not abort a PostgreSQL transaction.
///
/// A trigger that keeps the row out (BEFORE INSERT, returning NULL) looks like a duplicate, and must not be there.
///
/// The columns of the [`key`](crate::key) need a primary key or a UNIQUE constraint on exactly them; without one
/// every call is an error.
///
/// ```
/// # use oncebox_guard as guard;
/// # async fn example(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>, order_no: &str) -> Result<(), guard::Error> {
/// use oncebox_guard::{Inserted, key};
///
/// let order = key("order_no", order_no).set("customer", "ann").set("amount", 300_i64);
/// match guard::insert_once(tx, "orders", order).await? {
///     Inserted::Applied => {} // the first time: what follows from an order belongs here
///     Inserted::Duplicate => return Ok(()),
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`Error::Name`], [`Error::NullKey`], or the database's answer: also for every other constraint that the row breaks (NOT
/// NULL, CHECK, a foreign key, another UNIQUE constraint). Those are no duplicates.
///
/// # Cancel safety
///
/// When the future is dropped, the row may or may not be in the transaction: roll it back.
pub async fn insert_once<'v, D: Dialect>(
    tx: &mut Transaction<'_, D>,
    table: &'static str,
    row: impl Into<Row<'v, D>>,
) -> Result<Inserted, Error> {
    let statement = {
        let row = row.into();
        check_key(table, &row.key)?;
        let mut values = Values::new(table);
        let mut names = Vec::new();
        let mut placeholders = Vec::new();
        for column in row.key.columns.iter().chain(&row.values) {
            names.push(name::column::<D>(column.name)?);
            placeholders.push(values.bind_column(column)?);
        }
        // The key's columns are the first. Named, so that another constraint stays an error.
        let key = names[..row.key.columns.len()].join(", ");
        values.statement(format!(
            "INSERT INTO {table} ({names}) VALUES ({placeholders}) ON CONFLICT ({key}) DO NOTHING RETURNING 1",
            table = name::table::<D>(table)?,
            names = names.join(", "),
            placeholders = placeholders.join(", "),
        ))
    };
    let inserted = statement.row(tx, "insert into").await?;
    Ok(match inserted {
        Some(_) => Inserted::Applied,
        None => Inserted::Duplicate,
    })
}
