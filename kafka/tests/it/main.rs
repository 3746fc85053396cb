//! Tests of the crate from outside. Those in `mock` run anywhere, on librdkafka's mock cluster; the
//! others need a real Apache Kafka and are skipped without one: `ONCEBOX_TEST_KAFKA` is its
//! bootstrap list.

#![allow(clippy::unwrap_used)]

mod cluster;
mod consuming;
mod mock;
mod rights;
mod settings;
mod speed;
mod support;
mod transactions;
