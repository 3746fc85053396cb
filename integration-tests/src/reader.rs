//! A topic read to its end: what a consumer may see, in order.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};

/// Which records the reader may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// Records of committed transactions only: what G3 speaks of.
    ReadCommitted,
    /// Everything in the log, aborted and open transactions included.
    ReadUncommitted,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its partition.
    pub partition: i32,
    /// Its offset.
    pub offset: i64,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Its payload; `None` = tombstone.
    pub payload: Option<Vec<u8>>,
    /// Its headers, in order.
    pub headers: Vec<(String, Option<Vec<u8>>)>,
}

impl Record {
    /// The text of the first header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(n, _)| n == name)?;
        std::str::from_utf8(value.as_deref()?).ok()
    }

    /// The key as text.
    pub fn key_text(&self) -> Option<&str> {
        std::str::from_utf8(self.key.as_deref()?).ok()
    }

    /// The payload as text.
    pub fn payload_text(&self) -> Option<&str> {
        std::str::from_utf8(self.payload.as_deref()?).ok()
    }
}

/// Every record of the topic that is there now, partition by partition in offset order.
///
/// The end is determined first, so that the reading ends under load too. With [`Isolation::ReadCommitted`] it is the last
/// stable offset: a transaction that is open at the call is not waited for.
///
/// # Errors
/// The topic does not exist, or the end is not reached within 60 s.
pub async fn read(bootstrap: &str, topic: &str, isolation: Isolation) -> Result<Vec<Record>> {
    let (bootstrap, topic) = (bootstrap.to_owned(), topic.to_owned());
    tokio::task::spawn_blocking(move || read_blocking(&bootstrap, &topic, isolation)).await?
}

/// [`read`] with `read_committed`, for tests.
///
/// # Panics
/// As [`read`] fails.
pub async fn committed(bootstrap: &str, topic: &str) -> Vec<Record> {
    match read(bootstrap, topic, Isolation::ReadCommitted).await {
        Ok(records) => records,
        Err(reason) => panic!("cannot read {topic}: {reason:#}"),
    }
}

/// [`read`] with `read_uncommitted`, for tests.
///
/// # Panics
/// As [`read`] fails.
pub async fn uncommitted(bootstrap: &str, topic: &str) -> Vec<Record> {
    match read(bootstrap, topic, Isolation::ReadUncommitted).await {
        Ok(records) => records,
        Err(reason) => panic!("cannot read {topic}: {reason:#}"),
    }
}

/// How many records of the topic a `read_committed` consumer sees, without keeping them.
///
/// # Errors
/// As [`read`].
pub async fn count_committed(bootstrap: &str, topic: &str) -> Result<usize> {
    let (bootstrap, topic) = (bootstrap.to_owned(), topic.to_owned());
    tokio::task::spawn_blocking(move || {
        let mut count = 0;
        visit(&bootstrap, &topic, Isolation::ReadCommitted, |_| count += 1)?;
        Ok(count)
    })
    .await?
}

fn read_blocking(bootstrap: &str, topic: &str, isolation: Isolation) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    visit(bootstrap, topic, isolation, |message| {
        records.push(record(message));
    })?;
    records.sort_by_key(|r| (r.partition, r.offset));
    Ok(records)
}

fn visit(
    bootstrap: &str,
    topic: &str,
    isolation: Isolation,
    mut take: impl FnMut(&BorrowedMessage<'_>),
) -> Result<()> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .set("group.id", "oncebox-test-reader")
        .set("enable.auto.commit", "false")
        .set(
            "isolation.level",
            if isolation == Isolation::ReadCommitted {
                "read_committed"
            } else {
                "read_uncommitted"
            },
        )
        // control records occupy offsets and are never delivered: only this event says that the end was reached
        .set("enable.partition.eof", "true")
        .set("fetch.wait.max.ms", "50")
        .set("log_level", "0")
        .create()?;
    let patience = Duration::from_secs(60);
    let metadata = consumer.fetch_metadata(Some(topic), patience)?;
    let partitions = metadata
        .topics()
        .first()
        .map_or(0, |t| t.partitions().len());
    if partitions == 0 {
        bail!("topic {topic} does not exist");
    }
    let mut assignment = TopicPartitionList::new();
    let mut ends = HashMap::new();
    for partition in 0..i32::try_from(partitions)? {
        let (low, high) = consumer.fetch_watermarks(topic, partition, patience)?;
        if high > low {
            ends.insert(partition, high);
            assignment.add_partition_offset(topic, partition, Offset::Offset(low))?;
        }
    }
    consumer.assign(&assignment)?;
    let deadline = Instant::now() + patience;
    while !ends.is_empty() {
        if Instant::now() > deadline {
            bail!("the end of {topic} was not reached, still to come: {ends:?}");
        }
        match consumer.poll(Duration::from_millis(100)) {
            None => {}
            Some(Ok(message)) => {
                let (partition, offset) = (message.partition(), message.offset());
                if ends.get(&partition).is_some_and(|end| offset < *end) {
                    take(&message);
                }
                if ends.get(&partition).is_some_and(|end| offset + 1 >= *end) {
                    ends.remove(&partition);
                }
            }
            Some(Err(rdkafka::error::KafkaError::PartitionEOF(partition))) => {
                ends.remove(&partition);
            }
            // a broker that is gone or not there yet: librdkafka tries again
            Some(Err(rdkafka::error::KafkaError::MessageConsumption(
                RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::OperationTimedOut,
            ))) => {}
            Some(Err(other)) => return Err(other).context("cannot read"),
        }
    }
    Ok(())
}

fn record(message: &BorrowedMessage<'_>) -> Record {
    let headers = message.headers().map_or_else(Vec::new, |headers| {
        headers
            .iter()
            .map(|h| (h.key.to_owned(), h.value.map(<[u8]>::to_vec)))
            .collect()
    });
    Record {
        partition: message.partition(),
        offset: message.offset(),
        key: message.key().map(<[u8]>::to_vec),
        payload: message.payload().map(<[u8]>::to_vec),
        headers,
    }
}
