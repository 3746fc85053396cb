//! The tables of Oncebox: versioned SQL for PostgreSQL (14 and later) and SQLite, a runner, and the formats stored in them.
//!
//! # Running the migrations
//!
//! From a deployment: `oncebox migrate --database-url …`. From a program, at start ([`migrate`], or the function of
//! the same name in [`postgres`] and [`sqlite`] for a connection of yours):
//!
//! ```no_run
//! # async fn example() -> Result<(), oncebox_migrations::Error> {
//! use oncebox_migrations::{Names, migrate};
//!
//! let report = migrate("sqlite:shop.db", &Names::default()).await?;
//! assert_eq!(report.version, oncebox_migrations::LATEST);
//! # Ok(()) }
//! ```
//!
//! Or take the text and run it with your own tool: [`sql`].
//!
//! * Any number of processes may migrate at once.
//! * The history is a table of its own (`oncebox_migrations`): the application's migrations, by sqlx or any other tool,
//!   may use the same version numbers.
//! * A version and its history row are one transaction.
//! * A migration that was edited after it was applied, and a schema newer than the library, are errors that say so.
//!
//! # The tables
//!
//! [`Names`] says where they are: `oncebox_outbox`, `oncebox_mark`, `oncebox_inbox`, `oncebox_position`,
//! `oncebox_dead_letter`, `oncebox_migrations` in the schema `public`, unless told otherwise. Neither the outbox nor the
//! dedup marks are partitioned. [`grants`] prints the least rights of a producer, a relay and a consumer.
//!
//! # Features
//!
//! `postgres` and `sqlite` (both default) bring the runners. Without them the crate has no database driver and is names,
//! header codec and SQL text only.

mod catalog;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod error;
mod names;
mod print;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod status;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod url;

pub mod headers;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use catalog::LATEST;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use error::Error;
pub use names::{Names, NamesError};
pub use print::{grants, sql};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use status::{Applied, Report, Status};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use url::{migrate, status};

/// A database that Oncebox has SQL for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// PostgreSQL, 14 and later.
    Postgres,
    /// SQLite.
    Sqlite,
}
