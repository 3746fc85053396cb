//! Names, records and an independent reader.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use oncebox_kafka::{
    Config, Offsets, ProducerOptions, Record, TopicSpec, Transaction, TransactionalProducer,
};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

/// The real broker, or `None` after saying that the test is skipped.
pub(crate) fn kafka() -> Option<Config> {
    match std::env::var("ONCEBOX_TEST_KAFKA") {
        Ok(bootstrap) => Some(Config::new(bootstrap)),
        Err(_) => {
            println!("skipped: ONCEBOX_TEST_KAFKA is not set");
            None
        }
    }
}

/// A name that no other test and no earlier run uses.
pub(crate) fn unique(name: &str) -> String {
    let micros = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_micros();
    format!("{name}-{micros:x}")
}

pub(crate) async fn topic(config: &Config, name: &str, partitions: i32) -> String {
    let topic = unique(name);
    assert!(
        oncebox_kafka::ensure_topic(config, &topic, &TopicSpec::new(partitions))
            .await
            .unwrap()
    );
    topic
}

pub(crate) async fn open(config: &Config, id: &str) -> TransactionalProducer {
    let options = ProducerOptions {
        transaction_timeout: Duration::from_secs(10),
        ..ProducerOptions::default()
    };
    TransactionalProducer::open(config, id, options)
        .await
        .unwrap()
}

pub(crate) fn record(topic: &str, key: &str, payload: &[u8]) -> Record {
    Record {
        topic: Arc::from(topic),
        key: Some(Bytes::copy_from_slice(key.as_bytes())),
        payload: Some(Bytes::copy_from_slice(payload)),
        headers: Bytes::new(),
        envelope: None,
    }
}

pub(crate) fn records(topic: &str, payloads: &[&str]) -> Transaction {
    Transaction {
        records: payloads
            .iter()
            .map(|p| record(topic, "key", p.as_bytes()))
            .collect(),
        ..Transaction::default()
    }
}

pub(crate) fn offsets(group: &str, topic: &str, offset: i64, metadata: &str) -> Offsets {
    Offsets {
        group: group.into(),
        topic: topic.into(),
        partition: 0,
        offset,
        metadata: metadata.into(),
    }
}

/// A record as an independent client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) payload: Option<Vec<u8>>,
    pub(crate) headers: Vec<(String, Option<Vec<u8>>)>,
}

/// Everything that a reader of this isolation level sees, partition by partition.
pub(crate) fn read_all(bootstrap: &str, topic: &str, isolation: &str) -> Vec<Seen> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .set("group.id", "reader")
        .set("enable.auto.commit", "false")
        .set("isolation.level", isolation)
        .set("enable.partition.eof", "false")
        .create()
        .unwrap();
    let metadata = consumer
        .fetch_metadata(Some(topic), Duration::from_secs(10))
        .unwrap();
    let partitions = metadata.topics()[0].partitions().len();
    let mut list = TopicPartitionList::new();
    for partition in 0..i32::try_from(partitions).unwrap() {
        list.add_partition_offset(topic, partition, Offset::Beginning)
            .unwrap();
    }
    consumer.assign(&list).unwrap();
    drop(list);
    let mut seen = Vec::new();
    // No end marker under read_committed with an open transaction: read until it has been quiet for
    // a while.
    let mut last = Instant::now();
    while last.elapsed() < Duration::from_millis(1_500) {
        if let Some(message) = consumer.poll(Duration::from_millis(100)) {
            let message = message.unwrap();
            last = Instant::now();
            seen.push(Seen {
                partition: message.partition(),
                offset: message.offset(),
                key: message.key().map(<[u8]>::to_vec),
                payload: message.payload().map(<[u8]>::to_vec),
                headers: message.headers().map_or_else(Vec::new, |headers| {
                    headers
                        .iter()
                        .map(|h| (h.key.to_owned(), h.value.map(<[u8]>::to_vec)))
                        .collect()
                }),
            });
        }
    }
    seen.sort_by_key(|s| (s.partition, s.offset));
    seen
}

pub(crate) fn payloads(seen: &[Seen]) -> Vec<String> {
    seen.iter()
        .map(|s| String::from_utf8(s.payload.clone().unwrap()).unwrap())
        .collect()
}
