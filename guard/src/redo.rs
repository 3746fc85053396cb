//! The whole transaction again, after a conflict.

use std::error::Error as StdError;

use crate::Conflict;

/// Runs `work`, which begins a transaction, does everything in it and commits it. On a [`Conflict`] `work` runs again, and reads
/// what the others have committed; `attempts` times in all, and at least once.
///
/// Only a conflict is done again, and it is found wherever it is among the error's sources. The error of the last attempt is
/// returned. The transaction of an attempt that failed is dropped with it, which rolls it back.
///
/// The inbox has retries of its own; this is for services without one. What `work` does outside of the transaction happens as
/// often as it runs.
///
/// ```no_run
/// # use oncebox_guard as guard;
/// # async fn example(pool: sqlx::PgPool, id: i64, amount: i64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// use oncebox_guard::{Versioned, key};
///
/// guard::redo(5, || async {
///     let mut tx = pool.begin().await?;
///     let (balance, version): (i64, i64) = sqlx::query_as("SELECT balance, version FROM account WHERE id = $1")
///         .bind(id)
///         .fetch_one(&mut *tx)
///         .await?;
///     let account = key("id", id).set("balance", balance + amount);
///     match guard::versioned(&mut tx, "account", account, "version", version).await? {
///         Versioned::Applied { .. } => Ok(tx.commit().await?),
///         Versioned::Missing => Err("no such account".into()),
///     }
/// })
/// .await
/// # }
/// ```
///
/// A transaction that began before does not compile: what it has read would be as old the second time.
///
/// ```compile_fail
/// # use oncebox_guard as guard;
/// # async fn example(pool: sqlx::PgPool) -> Result<(), guard::Error> {
/// # use oncebox_guard::key;
/// let mut tx = pool.begin().await.unwrap();
/// guard::redo(5, || async { guard::versioned(&mut tx, "account", key("id", 1), "version", 7).await }).await?;
/// # Ok(()) }
/// ```
///
/// `E` can be a boxed error, `anyhow::Error`, [`Error`](crate::Error), or a type of yours that is `AsRef<dyn Error>`.
///
/// # Errors
///
/// What `work` returned at last. A commit without an answer is not done again: it may have happened.
///
/// # Cancel safety
///
/// As safe as `work`.
pub async fn redo<T, E, F, W>(attempts: u32, mut work: F) -> Result<T, E>
where
    F: FnMut() -> W,
    W: Future<Output = Result<T, E>>,
    E: AsRef<dyn StdError + Send + Sync + 'static>,
{
    let mut attempt = 1;
    loop {
        let found = work().await;
        match &found {
            Err(error) if attempt < attempts && Conflict::find(error.as_ref()).is_some() => {}
            _ => return found,
        }
        attempt += 1;
    }
}
