//! The inbox on real PostgreSQL and real Apache Kafka. One module per promise.
//!
//! Needs `ONCEBOX_TEST_POSTGRES_URL` and `ONCEBOX_TEST_KAFKA` (bootstrap servers); without them every test says that it was
//! skipped.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod adoption;
mod ahead;
mod cut_wire;
mod once;
mod poison;
mod rebalance;
mod resume;
mod scene;
mod soak;
mod sqlite;
mod startup;
mod topics;
mod zombie;
