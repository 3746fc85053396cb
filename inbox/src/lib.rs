//! The consumer's half of Oncebox: a message from Kafka has its effect in a SQL database exactly once, however often it is
//! delivered and whoever crashes when.
//!
//! ```no_run
//! # use oncebox_inbox::Inbox;
//! # use tokio_util::sync::CancellationToken;
//! # #[derive(serde::Deserialize)] struct OrderPaid { sku: String, quantity: i64 }
//! # async fn example(pool: sqlx::PgPool, kafka: oncebox_kafka::Config, shutdown: CancellationToken) -> Result<(), oncebox_inbox::Error> {
//! Inbox::new(pool, kafka)
//!     .consumer("inventory")
//!     .topic("orders")
//!     .handle(|tx, delivery| Box::pin(async move {
//!         let order: OrderPaid = delivery.json()?; // a payload that does not parse is fatal: dead letter, not a loop
//!         sqlx::query("UPDATE stock SET quantity = quantity - $1 WHERE sku = $2")
//!             .bind(order.quantity)
//!             .bind(order.sku)
//!             .execute(&mut **tx)
//!             .await?;
//!         Ok(())
//!     }))
//!     .run(shutdown)
//!     .await?;
//! # Ok(()) }
//! ```
//!
//! With an [`sqlx::SqlitePool`] the same lines work on SQLite:
//!
//! ```no_run
//! # use oncebox_inbox::Inbox;
//! # use tokio_util::sync::CancellationToken;
//! # #[derive(serde::Deserialize)] struct OrderPaid { customer: String, points: i64 }
//! # async fn example(pool: sqlx::SqlitePool, kafka: oncebox_kafka::Config, shutdown: CancellationToken) -> Result<(), oncebox_inbox::Error> {
//! Inbox::new(pool, kafka)
//!     .consumer("points")
//!     .topic("orders")
//!     .handle(|tx, delivery| Box::pin(async move {
//!         let order: OrderPaid = delivery.json()?;
//!         sqlx::query("UPDATE customer SET points = points + $1 WHERE name = $2")
//!             .bind(order.points)
//!             .bind(order.customer)
//!             .execute(&mut **tx)
//!             .await?;
//!         Ok(())
//!     }))
//!     .run(shutdown)
//!     .await?;
//! # Ok(()) }
//! ```
//!
//! # One message, one transaction
//!
//! ```text
//! BEGIN                                    SQLite: BEGIN IMMEDIATE
//! insert the mark (consumer, message id)   it was there: a duplicate, skip the handler
//! handler(tx)                              the effect; outbox.enqueue(tx, …) belongs here too
//! compare-and-set of the position          (owner, next, seq) that this process knows → next = offset + 1, seq + 1
//! COMMIT
//! store the offset for Kafka               informational: the database knows where we are
//! ```
//!
//! * Mark and effect commit together or not at all (guarantee G5), and the offset follows (G7).
//! * Taking a partition writes a new owner into its position row. A process that lost the partition without knowing it finds
//!   no row to set and rolls back (G6). On PostgreSQL the server ends its session if it stands still with a lock
//!   ([`Inbox::transaction_idle_limit`]).
//! * A lost answer to COMMIT is settled by reading the position row. A row that is behind what was committed means that the
//!   database was restored or failed over with loss: the consumer goes back and applies again what is missing.
//!
//! # Where a partition starts
//!
//! At the `next` of its position row. A partition without a row is new and starts at its first offset. What would need a guess
//! stops the consumer with [`Error::Position`], which names the missing range and the command that is the way out
//! ([`resume`]): Kafka has an offset for the group but the database has none, the topic was re-created, the partition ends below
//! the position or begins above it (G10).
//!
//! # When a handler fails
//!
//! Its writes are rolled back first, always.
//!
//! | reported | what follows |
//! |---|---|
//! | [`HandlerError::Retriable`], any [`sqlx::Error`] that is not about the data | called again as the [`RetryPolicy`] says; then a dead letter. Only this partition waits |
//! | [`HandlerError::Fatal`], a payload that does not parse, SQLSTATE class 22 or 23, a panic | a dead letter at once |
//! | the database or Kafka is away (a statement or request of ours failed) | waited out, without limit and without counting |
//!
//! A dead letter is a row of `oncebox_dead_letter` with the whole message. It is written with the mark and the position in one
//! transaction, and the partition goes on (G8). One that cannot be written stops the consumer.
//!
//! An envelope of an unknown version stops the consumer ([`Error::UnknownEnvelope`]): that is a deployment in the wrong order, and
//! a whole topic must not end up among the dead letters because of it. A record without any envelope is known as
//! [`ForeignId`] says.
//!
//! # Housekeeping
//!
//! The tables come from `oncebox migrate`. Marks stay until they are deleted: a mark must live longer than any redelivery,
//! retry or replay of its message can take, at least as long as the topic keeps its records.
//!
//! Counters: see [`Stats`].

mod breaker;
mod chain;
mod classify;
pub mod dead;
mod dedup;
mod delivery;
mod error;
mod feed;
mod foreign;
mod handler;
mod inbox;
mod lane;
pub mod operator;
mod partition;
mod position;
mod process;
pub mod reconcile;
pub mod record;
mod replay;
pub mod resume;
mod retry;
#[cfg(test)]
mod simulation;
mod start;
mod stats;
mod step;
mod store;
mod sweep;
mod worker;

#[doc(inline)]
pub use oncebox_gate::{Hint, Scope};
#[doc(inline)]
pub use oncebox_guard as guard;

pub use dedup::Dedup;
pub use delivery::Delivery;
pub use error::Error;
pub use foreign::ForeignId;
pub use handler::{BoxError, HandlerError, HandlerFuture};
pub use inbox::{Consumer, Inbox};
pub use retry::{OnFailure, RetryPolicy};
pub use start::Refusal;
pub use stats::Stats;
pub use step::{Step, StepHook, UnknownStep};

/// A database the inbox works with: [`sqlx::Postgres`] and [`sqlx::Sqlite`], each behind the feature of its name.
///
/// Sealed: the statements behind it are not part of the public interface.
pub trait InboxStore: store::Store {}

#[cfg(feature = "postgres")]
impl InboxStore for sqlx::Postgres {}
#[cfg(feature = "sqlite")]
impl InboxStore for sqlx::Sqlite {}
