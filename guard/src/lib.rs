//! Guards for the business tables: each answers, in the caller's transaction, whether an effect may still happen.
//!
//! A message that comes twice is caught by the inbox. What remains is the rest of the world: two messages about one order, a
//! message that overtook another, two services that write one row. A look before the write does not help, because two
//! transactions can both look before either writes. Each guard is one statement that decides and writes, and reports what it
//! found as an outcome.
//!
//! | question | guard | outcomes |
//! |---|---|---|
//! | has this order been created? | [`insert_once`] | [`Inserted`]: applied, duplicate |
//! | what does the row say, and will it still say so when I commit? | [`lock_row`] | [`Locked`]: row, missing |
//! | may it become `paid` now? | [`StateMachine`] | [`Transition`]: applied, already there, illegal, stale, missing |
//! | has anybody changed what I have read? | [`versioned`], [`redo`] | [`Versioned`]: applied, missing; [`Conflict`] |
//! | is there enough? | [`take`], [`give`] | [`Taken`]: applied, insufficient, missing |
//!
//! ```
//! # struct Order { sku: String, quantity: i64 }
//! # async fn example(tx: &mut sqlx::Transaction<'static, sqlx::Postgres>, order: Order) -> Result<(), oncebox_guard::Error> {
//! use oncebox_guard::{self as guard, Taken, key};
//!
//! match guard::take(tx, "stock", key("sku", &order.sku), "quantity", order.quantity).await? {
//!     Taken::Applied { left } => println!("{left} left"),
//!     Taken::Insufficient { .. } | Taken::Missing => println!("to be ordered"),
//! }
//! # Ok(()) }
//! ```
//!
//! # What they have in common
//!
//! * They work on the transaction that they are given, and only there: a pool or a connection does not compile. The effect
//!   counts when it commits.
//! * The columns of a [`key`] identify one row, and are declared unique in the table.
//! * Names of tables and columns are `&'static str`, checked and quoted: write them as the database stores them (PostgreSQL stores
//!   `CREATE TABLE Orders` as `orders`). A table may have its schema in front, `shop.orders`. Values are always bound.
//! * Amounts, versions and sequence numbers are integer columns, read as `i64`.
//! * PostgreSQL transactions run at READ COMMITTED, the default. At REPEATABLE READ a guard that has waited for another
//!   transaction fails with an error instead ([`Error::is_retriable`]).
//! * SQLite transactions begin with `pool.begin_with("BEGIN IMMEDIATE")`. A deferred one that has read, and was overtaken by
//!   another writer, fails with a retriable error.
//!
//! # Features
//!
//! * `postgres` (default): guards in `sqlx::Transaction<'_, sqlx::Postgres>`.
//! * `sqlite` (default): guards in `sqlx::Transaction<'_, sqlx::Sqlite>`; compiles the bundled SQLite.

mod dialect;
mod error;
mod insert_once;
mod lock_row;
mod name;
#[cfg(feature = "postgres")]
mod postgres;
mod redo;
mod row;
#[cfg(feature = "sqlite")]
mod sqlite;
mod state_machine;
mod statement;
mod stock;
mod versioned;

pub use dialect::Dialect;
pub use error::{Conflict, Error};
pub use insert_once::{Inserted, insert_once};
pub use lock_row::{Locked, lock_row};
pub use redo::redo;
pub use row::{Key, Row, key};
pub use state_machine::{Sequence, Sequenced, StateMachine, Transition};
pub use stock::{Given, Taken, give, take};
pub use versioned::{Versioned, versioned};
