//! The group consumer. It decides nothing by itself: where to start, what is done and what is
//! committed is said by the inbox, which asks its database.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::config::Config;
use crate::error::Error;
use crate::headers::Headers;
use crate::sys::{ConsumerClient, Polled, Rebalance};

/// A consumed record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Topic.
    pub topic: Arc<str>,
    /// Partition.
    pub partition: i32,
    /// Offset. The next record's is larger, but not always by one: transaction markers take
    /// offsets, too.
    pub offset: i64,
    /// Time of the record in milliseconds since the Unix epoch; −1 = it has none.
    pub timestamp_ms: i64,
    /// Key.
    pub key: Option<Bytes>,
    /// Payload; `None` is a tombstone.
    pub payload: Option<Bytes>,
    /// Headers in their order. They share their memory with key and payload.
    pub headers: Headers,
}

/// What [`Consumer::poll`] returns.
#[derive(Clone, Debug)]
pub enum ConsumerEvent {
    /// A record.
    Message(Message),
    /// The group gave us these partitions, besides those that we have. Nothing of them is fetched yet: take ownership, then
    /// call [`Consumer::start`] with their offsets.
    Assigned(Vec<(String, i32)>),
    /// These partitions are ours no more, the others still are: they are not fetched any more, and offsets can no longer
    /// be stored for them. What was stored has been committed, if the broker still takes it.
    Revoked(Vec<(String, i32)>),
    /// The position is outside the log: the topic was re-created or cut, or records expired. The
    /// partition is not fetched until it is started anew.
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
    /// The end of the partition was reached: there is nothing below this offset that was not
    /// returned. Other than the offset after the last message, it counts transaction markers.
    End {
        /// Topic.
        topic: Arc<str>,
        /// Partition.
        partition: i32,
        /// Where the next record will lie, or above.
        offset: i64,
    },
    /// Something failed. librdkafka goes on by itself unless [`Error::is_fatal`].
    Error(Error),
}

/// A group consumer, polled from one thread: blocking calls, no async.
///
/// No automatic commit, no automatic offset store, `auto.offset.reset=error`,
/// `isolation.level=read_committed`, cooperative assignment (`cooperative-sticky`, KIP-429): a rebalance stops only the
/// partitions that move. All members of a group must use it, so one of another kind joins only after those have left. A
/// committed offset is the next one to read. `queued.min.messages` defaults to 10000 instead of librdkafka's 100000, and
/// `queued.max.messages.kbytes` to 4096 instead of 65536: of each partition so many messages or so much may
/// wait in memory, whichever is reached first, and one more fetch. `fetch.queue.backoff.ms` defaults to 10 instead
/// of 1000: what is fetched ahead lasts for less than a second.
///
/// Dropping it leaves the group without committing; that happens on a thread of its own, for which
/// the drop waits at most 10 s.
pub struct Consumer {
    client: ConsumerClient,
}

impl Consumer {
    /// Joins the group.
    ///
    /// # Errors
    /// [`Error::Config`]. Everything that needs a broker comes later, from [`Self::poll`].
    pub fn subscribe(config: &Config, group: &str, topics: &[String]) -> Result<Self, Error> {
        let client = ConsumerClient::create(config, group, true)?;
        client.subscribe(topics)?;
        Ok(Self { client })
    }

    /// The next event, or `None` after the time-out. Must be called at least every
    /// `max.poll.interval.ms` (5 min), also while everything is paused; otherwise the group gives
    /// the partitions to somebody else.
    #[must_use]
    pub fn poll(&self, timeout: Duration) -> Option<ConsumerEvent> {
        match self.client.poll(timeout) {
            Polled::Nothing => None,
            Polled::Message(message) => Some(ConsumerEvent::Message(message)),
            Polled::Rebalance(Rebalance::Assigned(partitions)) => {
                Some(ConsumerEvent::Assigned(partitions))
            }
            Polled::Rebalance(Rebalance::Revoked(partitions)) => {
                Some(ConsumerEvent::Revoked(partitions))
            }
            Polled::OutOfRange {
                topic,
                partition,
                offset,
                reason,
            } => Some(ConsumerEvent::OutOfRange {
                topic,
                partition,
                offset,
                reason,
            }),
            Polled::End {
                topic,
                partition,
                offset,
            } => Some(ConsumerEvent::End {
                topic,
                partition,
                offset,
            }),
            Polled::Error(error) => Some(ConsumerEvent::Error(error)),
        }
    }

    /// Fetches these partitions from these offsets on; the others are fetched as before. What was fetched of them earlier is not
    /// returned any more. A partition that is not ours (any more) is left out: [`ConsumerEvent::Revoked`] says so.
    ///
    /// # Errors
    /// If an offset is negative, or the client is closing.
    pub fn start(&self, partitions: &[(String, i32, i64)]) -> Result<(), Error> {
        if let Some((topic, partition, offset)) =
            partitions.iter().find(|(_, _, offset)| *offset < 0)
        {
            // To librdkafka, negative offsets mean things like "the end".
            let reason =
                format!("is {offset} for {topic} [{partition}]; a position is never negative");
            return Err(Error::config("offset", reason));
        }
        self.client.start(partitions)
    }

    /// Goes on at another offset. Records that were fetched before are not returned any more.
    ///
    /// # Errors
    /// If the partition is not assigned, or the time-out passes.
    pub fn seek(
        &self,
        topic: &str,
        partition: i32,
        offset: i64,
        timeout: Duration,
    ) -> Result<(), Error> {
        self.client.seek(topic, partition, offset, timeout)
    }

    /// Stops fetching these partitions, and throws away what was fetched ahead.
    ///
    /// # Errors
    /// If a partition is not assigned.
    pub fn pause(&self, partitions: &[(String, i32)]) -> Result<(), Error> {
        self.client.pause(partitions)
    }

    /// Fetches these partitions again, after the last record that was returned.
    ///
    /// # Errors
    /// If a partition is not assigned.
    pub fn resume(&self, partitions: &[(String, i32)]) -> Result<(), Error> {
        self.client.resume(partitions)
    }

    /// Stores the next offset to read, exactly as given, for [`Self::commit_stored`]. To be called
    /// only after the database transaction with the effects of everything below it has been
    /// committed (G7).
    ///
    /// # Errors
    /// If the partition is not assigned (any more).
    pub fn store(&self, topic: &str, partition: i32, next_offset: i64) -> Result<(), Error> {
        self.client.store(topic, partition, next_offset)
    }

    /// Commits what is stored and waits for the broker's answer; nothing stored is fine.
    ///
    /// # Errors
    /// [`Error::Kafka`]; the offsets stay stored.
    pub fn commit_stored(&self) -> Result<(), Error> {
        self.client.commit_stored()
    }

    /// Low and high watermark: the first offset that the partition still has, and the last stable
    /// one, below which no transaction is open.
    ///
    /// # Errors
    /// [`Error::UnknownTopic`], [`Error::Kafka`].
    pub fn watermarks(
        &self,
        topic: &str,
        partition: i32,
        timeout: Duration,
    ) -> Result<(i64, i64), Error> {
        self.client.watermarks(topic, partition, timeout)
    }

    /// The offset that this group has committed; `Ok(None)` = none.
    ///
    /// # Errors
    /// As [`crate::committed`]: an error means unknown.
    pub fn committed(
        &self,
        topic: &str,
        partition: i32,
        timeout: Duration,
    ) -> Result<Option<i64>, Error> {
        Ok(self
            .client
            .committed(topic, partition, timeout)?
            .map(|(offset, _)| offset))
    }

    /// Commits what is stored, leaves the group and destroys the client; waits for it, at most 10
    /// s.
    pub fn close(self) {
        if let Err(error) = self.commit_stored() {
            tracing::info!(%error, "the last offsets were not committed; their records come again");
        }
        // `drop` does the rest.
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").finish_non_exhaustive()
    }
}
