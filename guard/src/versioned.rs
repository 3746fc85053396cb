//! Optimistic version: what was computed from a version is written only over that version.

use sqlx::Transaction;

use crate::error::Conflict;
use crate::row::Row;
use crate::statement::Values;
use crate::{Dialect, Error, name};

/// What [`versioned`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the row may be missing, and then nothing was written"]
pub enum Versioned {
    /// Written.
    Applied {
        /// The row's new version, one more than the old.
        version: i64,
    },
    /// No row has the key.
    Missing,
}

/// Writes the values into the row if it still has the version that they were computed from, and counts the version up.
///
/// Anything else is [`Error::Conflict`]. With `?` it leaves the handler, whose transaction is then rolled back and done
/// again from the read on: by the inbox, or by [`redo`](crate::redo) in a service of your own.
///
/// A version that came *with the message* is another matter: there a row that is ahead means that the message was applied
/// before, or is too late. Match [`Error::Conflict`] and skip when [`Conflict::found`] is above [`Conflict::expected`]; doing it
/// again cannot help.
///
/// ```
/// # use oncebox_guard as guard;
/// # async fn example(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>, id: i64, amount: i64) -> Result<(), Box<dyn std::error::Error>> {
/// use oncebox_guard::{Versioned, key};
///
/// let (balance, version): (i64, i64) = sqlx::query_as("SELECT balance, version FROM account WHERE id = $1")
///     .bind(id)
///     .fetch_one(&mut **tx)
///     .await?;
/// let account = key("id", id).set("balance", balance + amount);
/// match guard::versioned(tx, "account", account, "version", version).await? {
///     Versioned::Applied { version } => println!("now at {version}"),
///     Versioned::Missing => println!("deleted in between"),
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`Error::Conflict`], [`Error::Name`], [`Error::NullKey`], [`Error::ManyRows`], [`Error::Suppressed`], or the database's
/// answer.
///
/// # Cancel safety
///
/// When the future is dropped, the row may or may not be written: roll the transaction back.
pub async fn versioned<'v, D: Dialect>(
    tx: &mut Transaction<'_, D>,
    table: &'static str,
    row: impl Into<Row<'v, D>>,
    column: &'static str,
    expected: i64,
) -> Result<Versioned, Error> {
    const DOING: &str = "update";
    let (change, look) = {
        let row = row.into();
        let quoted = name::table::<D>(table)?;
        let column = name::column::<D>(column)?;
        let returned = format!("CAST({column} AS BIGINT)");

        let mut values = Values::<D>::new(table);
        let mut set = vec![format!("{column} = {column} + 1")];
        for value in &row.values {
            set.push(values.equals(value)?);
        }
        let set = set.join(", ");
        let key = values.key(&row.key)?;
        let seen = values.bind(expected)?;
        let change = values.statement(format!(
            "UPDATE {quoted} SET {set} WHERE {key} AND {column} = {seen} RETURNING {returned}"
        ));

        let mut values = Values::<D>::new(table);
        let key = values.key(&row.key)?;
        let look = values.statement(format!(
            "SELECT {returned} FROM {quoted} WHERE {key}{}",
            D::FOR_UPDATE
        ));
        (change, look)
    };
    for _ in 0..2 {
        if let Some(row) = change.row(tx, DOING).await? {
            let version = D::integer(&row, 0).map_err(Error::database(DOING, table))?;
            return Ok(Versioned::Applied { version });
        }
        let Some(row) = look.row(tx, DOING).await? else {
            return Ok(Versioned::Missing);
        };
        let found = D::integer(&row, 0).map_err(Error::database(DOING, table))?;
        if found != expected {
            return Err(Error::Conflict(Conflict {
                table,
                expected,
                found,
            }));
        }
        // Somebody created the row between the two statements. It is locked by now.
    }
    Err(Error::Suppressed { table })
}
