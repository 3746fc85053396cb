//! The Kafka side of [Oncebox](https://github.com/oncebox/oncebox): a transactional producer
//! driver, the checkpoint that travels in its transactions, envelope v1, Java-compatible
//! partitioning and a consumer that commits nothing by itself.

pub mod admin;
mod classify;
mod config;
mod consumer;
mod diagnosis;
mod driver;
pub mod envelope;
mod error;
pub mod partition;
mod producer;
mod record;
mod sys;
mod thread;
mod transact_error;

pub use admin::{
    BrokerSettings, Cluster, Stability, TopicInfo, TopicSettings, TopicSpec, broker_settings,
    cluster, committed, delete_topic, ensure_topic, offset_for_time, topic_id, topic_settings, watermarks,
};
pub use config::Config;
pub use consumer::{Consumer, ConsumerEvent, Message};
pub use error::Error;
pub use producer::{Committed, ProducerOptions, Step, TransactionalProducer};
pub use record::{Envelope, Offsets, Record, SourceTag, Transaction};
pub use transact_error::{Cause, Outcome, Refused, TransactError};
