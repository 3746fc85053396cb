//! The consumer's half of Oncebox: a message from Kafka has its effect in a SQL database exactly once.
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

mod classify;
mod delivery;
mod error;
mod feed;
mod foreign;
mod handler;
mod inbox;
mod partition;
mod position;
mod process;
pub mod resume;
mod retry;
#[cfg(test)]
mod simulation;
mod start;
mod stats;
mod step;
mod store;
mod worker;
#[cfg(test)]
mod worker_tests;

pub use delivery::Delivery;
pub use error::Error;
pub use foreign::ForeignId;
pub use handler::{BoxError, HandlerError, HandlerFuture};
pub use inbox::{Consumer, Inbox};
pub use retry::RetryPolicy;
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
