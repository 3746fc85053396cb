//! An amount that is never negative: compare and take in one statement.

use sqlx::Transaction;

use crate::row::Key;
use crate::statement::{Statement, Values};
use crate::{Dialect, Error, name};

/// What [`take`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "there may be too little, and then nothing was taken"]
pub enum Taken {
    /// Taken.
    Applied {
        /// What is left now.
        left: i64,
    },
    /// There is less than that; nothing was taken.
    Insufficient {
        /// What is there.
        left: i64,
    },
    /// No row has the key.
    Missing,
}

/// What [`give`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the row may be missing, and then nothing was given"]
pub enum Given {
    /// Given.
    Applied {
        /// What is there now.
        left: i64,
    },
    /// No row has the key.
    Missing,
}

/// Takes `amount` from an integer column, if that much is there: `stock >= amount` is a condition of the same UPDATE, so
/// that the column never falls below zero, however many transactions take at once.
///
/// Taking is not idempotent: within an inbox handler the dedup mark keeps a repeated message out; elsewhere
/// [`insert_once`](crate::insert_once) the reservation first, in the same transaction.
///
/// ```
/// # use oncebox_guard as guard;
/// # struct Order { sku: String, quantity: i64 }
/// # async fn example(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>, order: Order) -> Result<(), guard::Error> {
/// use oncebox_guard::{Taken, key};
///
/// match guard::take(tx, "stock", key("sku", &order.sku), "quantity", order.quantity).await? {
///     Taken::Applied { left } => println!("{left} left"),
///     Taken::Insufficient { left } => println!("only {left} are there"),
///     Taken::Missing => println!("{} is not for sale", order.sku),
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`Error::NegativeAmount`], [`Error::Name`], [`Error::NullKey`], [`Error::ManyRows`], [`Error::Suppressed`], or the
/// database's answer.
///
/// # Cancel safety
///
/// When the future is dropped, the amount may or may not be taken: roll the transaction back.
pub async fn take<D: Dialect>(
    tx: &mut Transaction<'_, D>,
    table: &'static str,
    key: Key<'_, D>,
    column: &'static str,
    amount: i64,
) -> Result<Taken, Error> {
    const DOING: &str = "take from";
    let sql = Sql::new(table, key, column, amount, |stock, amount| {
        (
            format!("{stock} - {amount}"),
            format!("{stock} >= {amount}"),
        )
    })?;
    for _ in 0..2 {
        if let Some(row) = sql.change.row(tx, DOING).await? {
            return Ok(Taken::Applied {
                left: sql.integer(&row, DOING)?,
            });
        }
        let Some(row) = sql.look.row(tx, DOING).await? else {
            return Ok(Taken::Missing);
        };
        let left = sql.integer(&row, DOING)?;
        if left < amount {
            return Ok(Taken::Insufficient { left });
        }
        // Somebody gave between the two statements. The row is locked by now.
    }
    Err(Error::Suppressed { table })
}

/// Gives `amount` back to an integer column: the reverse of [`take`], for a cancellation or a return.
///
/// ```
/// # use oncebox_guard as guard;
/// # async fn example(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>) -> Result<(), guard::Error> {
/// use oncebox_guard::{Given, key};
///
/// let given = guard::give(tx, "stock", key("sku", "apple"), "quantity", 3).await?;
/// assert_ne!(given, Given::Missing);
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// As [`take`], and [`Error::Overflow`] if the sum does not fit an `i64`.
///
/// # Cancel safety
///
/// As [`take`].
pub async fn give<D: Dialect>(
    tx: &mut Transaction<'_, D>,
    table: &'static str,
    key: Key<'_, D>,
    column: &'static str,
    amount: i64,
) -> Result<Given, Error> {
    const DOING: &str = "give to";
    // SQLite would go on with a floating-point number.
    let sql = Sql::new(table, key, column, amount, |stock, amount| {
        (
            format!("{stock} + {amount}"),
            format!("{stock} <= {} - {amount}", i64::MAX),
        )
    })?;
    for _ in 0..2 {
        if let Some(row) = sql.change.row(tx, DOING).await? {
            return Ok(Given::Applied {
                left: sql.integer(&row, DOING)?,
            });
        }
        let Some(row) = sql.look.row(tx, DOING).await? else {
            return Ok(Given::Missing);
        };
        if sql.integer(&row, DOING)? > i64::MAX - amount {
            return Err(Error::Overflow {
                table,
                column,
                amount,
            });
        }
    }
    Err(Error::Suppressed { table })
}

/// A change that has a condition, and the look at the row if it was not fulfilled. Both return the amount.
struct Sql<D: Dialect> {
    table: &'static str,
    change: Statement<D>,
    look: Statement<D>,
}

impl<D: Dialect> Sql<D> {
    /// `change` makes the new amount and the condition from the quoted column and the placeholder of the amount.
    #[expect(clippy::needless_pass_by_value, reason = "the key ends here")]
    fn new(
        table: &'static str,
        key: Key<'_, D>,
        column: &'static str,
        amount: i64,
        change: impl FnOnce(&str, &str) -> (String, String),
    ) -> Result<Self, Error> {
        if amount < 0 {
            return Err(Error::NegativeAmount { amount });
        }
        let quoted = name::table::<D>(table)?;
        let column = name::column::<D>(column)?;
        let returned = format!("CAST({column} AS BIGINT)");

        let mut values = Values::new(table);
        let row = values.key(&key)?;
        let (new, enough) = change(&column, &values.bind(amount)?);
        let change = values.statement(format!(
            "UPDATE {quoted} SET {column} = {new} WHERE {row} AND {enough} RETURNING {returned}"
        ));

        let mut values = Values::new(table);
        let row = values.key(&key)?;
        let look = values.statement(format!(
            "SELECT {returned} FROM {quoted} WHERE {row}{}",
            D::FOR_UPDATE
        ));
        Ok(Self {
            table,
            change,
            look,
        })
    }

    fn integer(&self, row: &D::Row, doing: &'static str) -> Result<i64, Error> {
        D::integer(row, 0).map_err(Error::database(doing, self.table))
    }
}
