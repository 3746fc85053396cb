//! The whole transaction again, after a conflict.

use std::error::Error as StdError;

use sqlx::{Pool, Transaction};

use crate::{Conflict, Dialect, Error};

/// Runs `work` in a transaction and commits it. On a [`Conflict`] everything is rolled back and `work` runs again, in a new
/// transaction that sees what the others have committed; `attempts` times in all, and at least once.
///
/// Only a conflict is done again, and it is found wherever it is among the error's sources. The error of the last attempt is
/// returned. SQLite transactions begin with `BEGIN IMMEDIATE`.
///
/// The inbox does the same for its handlers; this is for services without one. What `work` does outside of the transaction
/// happens as often as it runs.
///
/// ```no_run
/// # use oncebox_guard as guard;
/// # async fn example(pool: sqlx::PgPool, id: i64, amount: i64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// use oncebox_guard::{Versioned, key};
///
/// guard::redo(&pool, 5, async |tx| {
///     let (balance, version): (i64, i64) = sqlx::query_as("SELECT balance, version FROM account WHERE id = $1")
///         .bind(id)
///         .fetch_one(&mut **tx)
///         .await?;
///     let account = key("id", id).set("balance", balance + amount);
///     match guard::versioned(tx, "account", account, "version", version).await? {
///         Versioned::Applied { .. } => Ok(()),
///         Versioned::Missing => Err("no such account".into()),
///     }
/// })
/// .await
/// # }
/// ```
///
/// `E` can be a boxed error, `anyhow::Error`, [`Error`], or a type of yours that is `From<Error>` and `AsRef<dyn Error>`.
///
/// # Errors
///
/// What `work` returned, or [`Error::Transaction`] if a transaction could not begin or commit. A commit without an answer is
/// not done again: it may have happened.
///
/// # Cancel safety
///
/// When the future is dropped, the transaction at work is rolled back, unless its commit was already sent.
pub async fn redo<D, T, E, F>(pool: &Pool<D>, attempts: u32, mut work: F) -> Result<T, E>
where
    D: Dialect,
    F: AsyncFnMut(&mut Transaction<'static, D>) -> Result<T, E>,
    E: From<Error> + AsRef<dyn StdError + Send + Sync + 'static>,
{
    let mut attempt = 1;
    loop {
        let mut tx = D::begin(pool).await.map_err(failed("begin"))?;
        match work(&mut tx).await {
            Ok(value) => {
                tx.commit().await.map_err(failed("commit"))?;
                return Ok(value);
            }
            Err(error) => {
                // If this fails, the connection is broken, and the database rolls back without being told.
                let _ = tx.rollback().await;
                if attempt >= attempts || Conflict::find(error.as_ref()).is_none() {
                    return Err(error);
                }
            }
        }
        attempt += 1;
    }
}

fn failed(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Error {
    move |source| Error::Transaction { doing, source }
}
