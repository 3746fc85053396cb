//! The worker against SQLite and a topic in memory: what it promises, without a broker.

#![cfg(feature = "sqlite")]

mod bench;
mod delayed;
mod failures;
mod hints;
mod keys;
mod lanes;
mod memory_kafka;
mod once;
mod positions;
mod replays;
