//! Tests of the crate from outside. Those in `mock` run anywhere, on librdkafka's mock cluster; the others need a real
//! Apache Kafka and are skipped without one: `ONCEBOX_TEST_KAFKA` is its bootstrap list.

mod cluster;
mod consuming;
mod mock;
mod settings;
mod speed;
mod support;
mod transactions;
