//! The Kafka side of [Oncebox](https://github.com/oncebox/oncebox): a transactional producer driver, the checkpoint
//! that travels in its transactions, envelope v1, Java-compatible partitioning and a consumer that commits nothing by
//! itself.

pub mod admin;
mod config;
mod consumer;
pub mod envelope;
mod error;
pub mod partition;
mod producer;
mod record;
mod sys;
mod transact_error;

pub use admin::{
    Cluster, Stability, TopicInfo, TopicSpec, cluster, committed, ensure_topic, topic_id,
};
pub use config::Config;
pub use consumer::{Consumer, ConsumerEvent, Message};
pub use error::Error;
pub use producer::{Committed, ProducerOptions, Step, TransactionalProducer};
pub use record::{Envelope, Offsets, Record, SourceTag, Transaction};
pub use transact_error::{Cause, Outcome, Refused, TransactError};
