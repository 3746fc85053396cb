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
//! # One batch, one transaction
//!
//! ```text
//! BEGIN                                    SQLite: BEGIN IMMEDIATE
//! insert the marks (consumer, message id)  one that was there: a duplicate, no handler
//! blocked keys                             theirs are parked, no handler
//! handler(tx) …                            the effects; outbox.enqueue(tx, …) belongs here too
//! records                                  if asked for
//! compare-and-set of the position          (owner, next, seq) that this process knows → next, seq + 1
//! COMMIT
//! store the offset for Kafka               informational: the database knows where we are
//! ```
//!
//! * Marks and effects commit together or not at all (guarantee G5), and the offset follows (G7).
//! * A batch is what waits, up to [`Inbox::batch`] messages. A message that fails in one is redone alone, its neighbours without
//!   it. [`Inbox::handle`] is called for each message, [`Inbox::handle_batch`] once for all.
//! * [`Inbox::lanes`] run side by side, each with a transaction of its own. Messages of one key stay in one lane, in their order;
//!   the position does not pass a message that is open in any lane.
//! * Taking a partition writes a new owner into its position row. A process that lost the partition without knowing it finds
//!   no row to set and rolls back (G6). On PostgreSQL the server ends its session if it stands still with a lock
//!   ([`Inbox::transaction_idle_limit`]).
//! * A lost answer to COMMIT is settled by reading the position row; until then no lane commits. A row that is behind what was
//!   committed means that the database was restored or failed over with loss: the consumer goes back and applies again what is
//!   missing.
//!
//! # How a duplicate is known
//!
//! [`Dedup::ById`] keeps a mark for each message for [`Inbox::window`], [`Dedup::ByOffset`] the position alone (one lane, behind an
//! exactly-once producer), [`Dedup::None`] leaves it to the handler. A record without an Oncebox envelope is known as
//! [`ForeignId`] says. A [`Hint`] ([`Inbox::hint`]) may spare a message that comes again its transaction; it is never
//! believed without a look into the database. Two *different* messages about one thing are a matter for a [`guard`].
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
//! | [`HandlerError::Retriable`], any [`sqlx::Error`] that is not about the data, longer than [`Inbox::handler_limit`] | called again as the [`RetryPolicy`] says, then [`OnFailure`]. Only its lane waits |
//! | [`HandlerError::Conflict`], from a guard that lost a race | called again at once, up to ten times without counting; then as retriable |
//! | [`HandlerError::Fatal`], a payload that does not parse, SQLSTATE class 22 or 23, a panic | [`OnFailure`] at once |
//! | the database or Kafka is away (a statement or request of ours failed) | waited out, without limit and without counting |
//!
//! [`OnFailure::DeadLetter`] writes the whole message to `oncebox_dead_letter`, with the mark and the position in one transaction,
//! and the key goes on (G8). Where order does not matter, a message waits for its next attempt in that table instead of its lane
//! ([`Inbox::delayed_retries`]). [`OnFailure::BlockKey`] parks it there with every later message of its key. One that cannot be
//! written stops the consumer; so do many in a row ([`Inbox::breaker`]). What an operator orders to be replayed ([`dead`]) the
//! running consumer handles: the letter is deleted and the handler called in one transaction.
//!
//! An envelope of an unknown version stops the consumer ([`Error::UnknownEnvelope`]): that is a deployment in the wrong order, and
//! a whole topic must not end up among the dead letters because of it.
//!
//! # Housekeeping
//!
//! The tables come from `oncebox migrate`. The consumer deletes marks that are older than the window. A window shorter than the
//! retries or the outbox's retention is refused at the start. [`Inbox::record`] leaves a row for each settled message; its partitions
//! and its retention are an operator's ([`record`]), and [`reconcile`] compares both sides.
//!
//! Counters: see [`Stats`].

mod breaker;
mod chain;
mod classify;
pub mod dead;
mod dead_topic;
mod dedup;
mod delivery;
mod depth;
mod error;
mod feed;
mod foreign;
mod handler;
mod inbox;
mod lane;
pub mod operator;
mod partition;
pub mod pause;
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
pub trait InboxStore: store::Store + oncebox_outbox::Dialect {}

#[cfg(feature = "postgres")]
impl InboxStore for sqlx::Postgres {}
#[cfg(feature = "sqlite")]
impl InboxStore for sqlx::Sqlite {}
