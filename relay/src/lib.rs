//! The relay: carries committed outbox rows into Kafka exactly once.
//!
//! One relay leads one outbox table; any number of others stand by. The leader reads rows by id, remembers the
//! ids it has not seen ([`position`]), publishes them in Kafka transactions that carry the position with them,
//! and records the confirmed position in the mark row of the same database. The guarantees G1–G4, G9 and G10 of
//! `docs/guarantees.md` hang on this crate.
//!
//! ```no_run
//! # async fn example() -> Result<(), oncebox_relay::Error> {
//! use oncebox_relay::{Config, Database, Health, Mode};
//! use tokio_util::sync::CancellationToken;
//!
//! let database = Database::parse("postgres://relay@localhost/shop")?;
//! let kafka = oncebox_kafka::Config::new("localhost:9092");
//! let config = Config::new("shop", database, kafka);
//! oncebox_relay::run(config, Mode::Forever, Health::new(), CancellationToken::new()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! Where to look: `position` is pure (no I/O) and property-tested; `session` holds what is done to each database;
//! `leader` is start and recovery, which are one code path; `reader`, `publisher` and `keeper` are the three
//! machines that run while a relay leads.

mod config;
mod error;
mod health;
mod identity;
mod keeper;
mod leader;
mod log;
pub mod park;
mod parking;
pub mod position;
mod publisher;
mod reader;
pub mod rename;
pub mod resume;
mod run;
mod session;
mod step;
pub mod upgrade;

pub use config::{Config, Database};
pub use error::{Error, Stop};
pub use health::{Health, Role, Snapshot};
pub use run::{Exit, Mode, run};
pub use session::{Cause, Filter, Request};
pub use step::{Step, StepHook};
