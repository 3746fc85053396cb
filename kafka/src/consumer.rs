//! The consumer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::config::Config;
use crate::error::Error;

/// A consumed record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Topic.
    pub topic: Arc<str>,
    /// Partition.
    pub partition: i32,
    /// Offset.
    pub offset: i64,
    /// Record time in milliseconds since the Unix epoch; −1 = none.
    pub timestamp_ms: i64,
    /// Key.
    pub key: Option<Bytes>,
    /// Payload; `None` is a tombstone.
    pub payload: Option<Bytes>,
    /// Headers in their order.
    pub headers: Vec<(String, Option<Bytes>)>,
}

/// What [`Consumer::poll`] returns.
#[derive(Clone, Debug)]
pub enum ConsumerEvent {
    /// A record.
    Message(Message),
    /// These partitions are ours: call [`Consumer::assign`] with offsets after taking ownership.
    Assigned(Vec<(String, i32)>),
    /// These partitions are not ours any more; already unassigned.
    Revoked(Vec<(String, i32)>),
    /// The position is outside the log.
    OutOfRange {
        /// Topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// The offset that was asked for, if known.
        offset: Option<i64>,
        /// What the broker said.
        reason: String,
    },
    /// Something failed; see [`Error::is_fatal`].
    Error(Error),
}

/// A group consumer.
#[derive(Debug)]
pub struct Consumer {}

impl Consumer {
    /// Subscribes.
    pub fn subscribe(_config: &Config, _group: &str, _topics: &[String]) -> Result<Self, Error> {
        todo!()
    }
    /// Polls.
    pub fn poll(&self, _timeout: Duration) -> Option<ConsumerEvent> {
        todo!()
    }
    /// Assigns.
    pub fn assign(&self, _partitions: &[(String, i32, i64)]) -> Result<(), Error> {
        todo!()
    }
    /// Seeks.
    pub fn seek(
        &self,
        _topic: &str,
        _partition: i32,
        _offset: i64,
        _timeout: Duration,
    ) -> Result<(), Error> {
        todo!()
    }
    /// Pauses.
    pub fn pause(&self, _partitions: &[(String, i32)]) -> Result<(), Error> {
        todo!()
    }
    /// Resumes.
    pub fn resume(&self, _partitions: &[(String, i32)]) -> Result<(), Error> {
        todo!()
    }
    /// Stores.
    pub fn store(&self, _topic: &str, _partition: i32, _next_offset: i64) -> Result<(), Error> {
        todo!()
    }
    /// Commits.
    pub fn commit_stored(&self) -> Result<(), Error> {
        todo!()
    }
    /// Low and high watermark.
    pub fn watermarks(
        &self,
        _topic: &str,
        _partition: i32,
        _timeout: Duration,
    ) -> Result<(i64, i64), Error> {
        todo!()
    }
    /// The group's committed offset.
    pub fn committed(
        &self,
        _topic: &str,
        _partition: i32,
        _timeout: Duration,
    ) -> Result<Option<i64>, Error> {
        todo!()
    }
    /// Closes.
    pub fn close(self) {
        todo!()
    }
}
