//! The publishing protocol of Oncebox as an executable model, searched to its end.
//!
//! A [`Scenario`] is a small world: a few transactions, one or two relays, and what may go wrong. A [`Protocol`] is a
//! scenario with all rules, or without one of them. The checker visits every schedule: with all rules no guarantee breaks;
//! without a rule it must find a schedule that breaks one, which shows what the rule is for (`tests/`).
//!
//! ```
//! use oncebox_protocol_model::{Protocol, Rule, Scenario, properties};
//! use stateright::{Checker, Model};
//!
//! let without = Protocol::without(Scenario::read_ahead(), Rule::ImmutableCheckpoint);
//! let found = without.checker().spawn_bfs().join();
//! assert!(found.discovery(properties::PUBLISHED).is_some());
//! ```
//!
//! | Module | What it models |
//! |---|---|
//! | [`rules`] | the rules that can be taken away |
//! | [`scenario`] | the small worlds |
//! | [`database`] | writers, outbox, mark, parked rows, identity check, failover (§1 to §4) |
//! | [`kafka`] | transactions V1 with late requests (§4) |
//! | [`position`] | position, checkpoint, the reader's machine (§2) |
//! | [`relay`], [`model`] | what a relay holds in memory, and every step that it takes |
//! | [`properties`] | the guarantees (§0) |

pub mod database;
pub mod kafka;
pub mod model;
pub mod position;
pub mod properties;
mod publisher;
mod reader;
pub mod relay;
pub mod rules;
pub mod scenario;
pub mod set;
mod start;

pub use model::{Action, Protocol, State, Step};
pub use rules::{Rule, Rules};
pub use scenario::Scenario;
