//! The Kafka side as the worker needs it: a small trait, so that the worker's tests run without a broker.

use std::time::Duration;

use oncebox_kafka::{Config, Consumer, ConsumerEvent, Error};
use tokio::runtime::Handle;

use crate::start::Facts;

/// Longest wait for an answer to a question about a partition.
const PATIENCE: Duration = Duration::from_secs(3);

/// A group consumer, used from one thread.
pub(crate) trait Feed {
    /// The next event, or `None` after `timeout`.
    fn poll(&mut self, timeout: Duration) -> Option<ConsumerEvent>;
    /// Fetches these partitions, (topic, partition, first offset), also those that are fetched already; the others go on.
    fn start(&mut self, partitions: &[(String, i32, i64)]) -> Result<(), Error>;
    /// Stops fetching; what was fetched is thrown away.
    fn pause(&mut self, partitions: &[(String, i32)]) -> Result<(), Error>;
    /// Fetches again.
    fn resume(&mut self, partitions: &[(String, i32)]) -> Result<(), Error>;
    /// Says up to where the partition is settled, for the next commit.
    fn store(&mut self, topic: &str, partition: i32, next: i64) -> Result<(), Error>;
    /// Commits what was stored to the group.
    fn commit(&mut self) -> Result<(), Error>;
    /// What Kafka knows about a partition; `None`: the topic does not exist.
    fn facts(&mut self, topic: &str, partition: i32) -> Result<Option<Facts>, Error>;
    /// Commits what was stored and leaves the group.
    fn close(self);
}

/// The real one.
pub(crate) struct KafkaFeed {
    consumer: Consumer,
    config: Config,
    runtime: Handle,
}

impl KafkaFeed {
    /// Joins the group.
    pub(crate) fn subscribe(
        config: Config,
        group: &str,
        topics: &[String],
        runtime: Handle,
    ) -> Result<Self, Error> {
        Ok(Self {
            consumer: Consumer::subscribe(&config, group, topics)?,
            config,
            runtime,
        })
    }
}

impl Feed for KafkaFeed {
    fn poll(&mut self, timeout: Duration) -> Option<ConsumerEvent> {
        self.consumer.poll(timeout)
    }

    fn start(&mut self, partitions: &[(String, i32, i64)]) -> Result<(), Error> {
        self.consumer.start(partitions)
    }

    fn pause(&mut self, partitions: &[(String, i32)]) -> Result<(), Error> {
        self.consumer.pause(partitions)
    }

    fn resume(&mut self, partitions: &[(String, i32)]) -> Result<(), Error> {
        self.consumer.resume(partitions)
    }

    fn store(&mut self, topic: &str, partition: i32, next: i64) -> Result<(), Error> {
        self.consumer.store(topic, partition, next)
    }

    fn commit(&mut self) -> Result<(), Error> {
        self.consumer.commit_stored()
    }

    fn facts(&mut self, topic: &str, partition: i32) -> Result<Option<Facts>, Error> {
        let topic_id = self
            .runtime
            .block_on(oncebox_kafka::topic_id(&self.config, topic))?;
        let Some(topic_id) = topic_id else {
            return Ok(None);
        };
        let (low, high) = self.consumer.watermarks(topic, partition, PATIENCE)?;
        let committed = self.consumer.committed(topic, partition, PATIENCE)?;
        Ok(Some(Facts {
            topic_id,
            low,
            high,
            committed,
        }))
    }

    fn close(self) {
        self.consumer.close();
    }
}
