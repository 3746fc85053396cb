//! The Kafka side of [Oncebox](https://github.com/oncebox/oncebox).
//!
//! * [`TransactionalProducer`]: records and the relay's position (the *checkpoint*, a group offset
//!   with metadata) become visible in one Kafka transaction, or not at all. One OS thread owns the
//!   client; the handle is async.
//! * [`Consumer`]: a group consumer that commits, stores and moves nothing by itself.
//! * [`envelope`]: envelope v1, the headers that say which message a record is.
//! * [`partition`]: Java's choice of a partition, which is the default here.
//! * [`admin`]: the questions that `oncebox doctor` and a start ask.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use oncebox_kafka::{Config, ProducerOptions, Record, Transaction, TransactionalProducer};
//!
//! # async fn hello() -> Result<(), Box<dyn std::error::Error>> {
//! let config = Config::new("localhost:9092").set("compression.type", "zstd");
//! let id = "oncebox.hello";
//! let producer = TransactionalProducer::open(&config, id, ProducerOptions::default()).await?;
//! let record = Record {
//!     topic: Arc::from("greetings"),
//!     key: Some("world".into()),
//!     payload: Some("hello".into()),
//!     headers: Default::default(),
//!     envelope: None,
//! };
//! let transaction = Transaction { records: vec![record], ..Transaction::default() };
//! producer.transact(transaction).await?; // committed, once
//! producer.close().await;
//! # Ok(()) }
//! ```
//!
//! # Why a producer of its own
//!
//! librdkafka speaks transactions V1, in which a late `EndTxn` or `TxnOffsetCommit` takes effect in
//! whatever transaction is open when it arrives (KAFKA-17754): measured on Apache Kafka 4.1, that
//! loses or repeats messages, silently. So every request is watched, and a producer whose
//! transaction had one without an answer is *tainted*: [`Committed::tainted`] says so, and the next
//! transaction is refused until the producer has been re-created, which makes the brokers refuse the
//! late request. No higher client library lets a program watch; hence the thin one in `sys`, the only
//! unsafe code of Oncebox.
//!
//! # Features
//!
//! * `ssl`: TLS, SCRAM, OAUTHBEARER, with the system's OpenSSL; `ssl-vendored` builds OpenSSL.
//! * `gssapi`: Kerberos.
//!
//! Without them librdkafka builds with a C compiler alone. gzip, snappy, lz4 and zstd are always in.

pub mod admin;
mod classify;
mod config;
mod consumer;
mod diagnosis;
mod driver;
pub mod envelope;
mod error;
mod headers;
pub mod partition;
mod producer;
mod record;
mod sys;
mod thread;
mod transact_error;

pub use admin::{
    BrokerSettings, Cluster, Stability, TopicInfo, TopicSettings, TopicSpec, broker_settings,
    cluster, committed, delete_topic, ensure_topic, offset_for_time, record_at, topic_id,
    topic_settings, watermarks,
};
pub use config::Config;
pub use consumer::{Consumer, ConsumerEvent, Message};
pub use error::Error;
pub use headers::{HeaderIter, Headers};
pub use producer::{Committed, ProducerOptions, Step, TransactionalProducer};
pub use record::{ANCHOR, Envelope, Offsets, Record, SourceTag, Transaction};
pub use transact_error::{Cause, Outcome, Refused, TransactError};
