//! Writes messages for Kafka in the business transaction: they are published if and only if it commits.
//!
//! This crate is all that a producing service needs. It knows sqlx and nothing of Kafka, and with its default features it
//! compiles no C. `oncebox relay` reads the rows and publishes them, each exactly once.
//!
//! ```no_run
//! # #[derive(serde::Serialize)]
//! # struct OrderPaid { id: i64, amount: i64 }
//! # async fn example(pool: sqlx::PgPool, id: i64, amount: i64) -> Result<(), Box<dyn std::error::Error>> {
//! use oncebox_outbox::{Config, Message, Outbox};
//!
//! let outbox = Outbox::new(Config::default());
//! let mut tx = pool.begin().await?;
//! sqlx::query("UPDATE orders SET paid = true WHERE id = $1").bind(id).execute(&mut *tx).await?;
//! outbox.enqueue(&mut tx, Message::json("orders", id, &OrderPaid { id, amount })?).await?;
//! tx.commit().await?; // the relay finds it; nothing else to call
//! # Ok(()) }
//! ```
//!
//! # What it promises
//!
//! * A message of a transaction that rolled back is never published (G1); one of a transaction that committed is (G2).
//! * Messages of one key keep their order, if every writer of the key takes the same lock before it enqueues: see
//!   [`Outbox::enqueue`] and [`Outbox::enqueue_ordered`] (G4).
//! * What Kafka would refuse is refused here, with an error that names the part, the limit and the size: see [`limits`].
//!
//! Commits must be durable: `synchronous_commit` not `off` on PostgreSQL, `synchronous = FULL` on SQLite. Begin SQLite
//! transactions with `pool.begin_with("BEGIN IMMEDIATE")`. Rows are only inserted through this crate, never by hand.
//!
//! # Features
//!
//! * `postgres` (default): enqueue in `sqlx::Transaction<'_, sqlx::Postgres>`.
//! * `sqlite`: enqueue in `sqlx::Transaction<'_, sqlx::Sqlite>`; compiles the bundled SQLite.
//!
//! The tables come from `oncebox migrate` or the crate `oncebox-migrations`.

#![cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    allow(dead_code, reason = "without a database nothing can be enqueued")
)]

mod check;
mod dialect;
mod error;
mod message;
mod outbox;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

pub mod limits;

pub use dialect::Dialect;
pub use error::Error;
pub use message::{Message, MessageId};
pub use oncebox_migrations::{Names, NamesError};
pub use outbox::{Config, Outbox};
