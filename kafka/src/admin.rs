//! Questions to the cluster and the little that Oncebox creates in it. Every function makes a
//! client of its own, on a thread of its own, and is bounded by a time-out.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::config::Config;
use crate::error::Error;
use crate::sys::{AdminClient, ConsumerClient, NativeTopic, Polled};
use crate::thread;

/// Time-out of the functions that take none.
const TIMEOUT: Duration = Duration::from_secs(20);

/// How to read a committed offset while a transaction that would change it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// Wait for the transaction's outcome (`RequireStable`, KIP-447); a time-out is an error.
    Stable,
    /// Take the last committed one.
    Any,
}

/// The committed offset of a group and its metadata. `Ok(None)` = there is none (never committed,
/// expired or deleted); an error = unknown, and nothing may be concluded from it.
///
/// # Errors
/// [`Error::Unreachable`], [`Error::Authentication`], [`Error::Authorization`], or [`Error::Kafka`]
/// with code `_TIMED_OUT` when a transaction stays open.
///
/// # Cancel safety
/// Cancel safe; the client ends by itself.
pub async fn committed(
    config: &Config,
    group: &str,
    topic: &str,
    partition: i32,
    stability: Stability,
    timeout: Duration,
) -> Result<Option<(i64, String)>, Error> {
    let topic = topic.to_owned();
    with_consumer(config, group, stability, timeout, move |consumer, left| {
        read_committed_offset(consumer, &topic, partition, Instant::now() + left)
    })
    .await
}

/// librdkafka waits for the group's coordinator until the time-out, also when it is told that this
/// principal may not know it; that comes as an event. So: ask in growing slices, and listen in
/// between.
fn read_committed_offset(
    consumer: &ConsumerClient,
    topic: &str,
    partition: i32,
    deadline: Instant,
) -> Result<Option<(i64, String)>, Error> {
    let mut slice = Duration::from_secs(1);
    loop {
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        let asked = Instant::now();
        let read = consumer.committed(topic, partition, left.min(slice));
        let again = read.as_ref().is_err_and(Error::is_retriable) && left > slice;
        if !again {
            return read;
        }
        while let Polled::Error(error) = consumer.poll(Duration::ZERO) {
            if error.is_authorization() || error.is_authentication() {
                return Err(error);
            }
        }
        if asked.elapsed() < slice {
            // An answer, not a time-out: the coordinator is being elected, or loads.
            std::thread::sleep(Duration::from_millis(50));
        } else {
            slice *= 2;
        }
    }
}

/// The payload of the record at this offset, committed or not; `None` = it is not there any more, or a tombstone.
///
/// # Errors
/// As [`committed`].
pub async fn record_at(
    config: &Config,
    topic: &str,
    partition: i32,
    offset: i64,
    timeout: Duration,
) -> Result<Option<Bytes>, Error> {
    let (topic, bootstrap) = (topic.to_owned(), config.bootstrap.clone());
    with_consumer(
        config,
        "oncebox",
        Stability::Any,
        timeout,
        move |consumer, left| {
            let deadline = Instant::now() + left;
            consumer.assign(&[(topic.clone(), partition, offset)])?;
            loop {
                match consumer.poll(Duration::from_millis(100)) {
                    Polled::Message(message) if message.offset == offset => {
                        return Ok(message.payload);
                    }
                    Polled::Message(_) | Polled::OutOfRange { .. } => return Ok(None),
                    Polled::Error(error) if !error.is_retriable() => return Err(error),
                    _ if Instant::now() > deadline => {
                        return Err(Error::Unreachable {
                            bootstrap,
                            reason: format!(
                                "{topic} [{partition}] returned nothing at offset {offset}"
                            ),
                        });
                    }
                    _ => {}
                }
            }
        },
    )
    .await
}

/// Low and high watermark of a partition: the first offset it still has, and the last stable one,
/// below which no transaction is open (the end of the log, if none is open at all).
///
/// # Errors
/// As [`committed`]; [`Error::UnknownTopic`] if there is no such topic.
///
/// # Cancel safety
/// Cancel safe; the client ends by itself.
pub async fn watermarks(
    config: &Config,
    topic: &str,
    partition: i32,
    timeout: Duration,
) -> Result<(i64, i64), Error> {
    let topic = topic.to_owned();
    with_consumer(
        config,
        "oncebox",
        Stability::Stable,
        timeout,
        move |consumer, left| consumer.watermarks(&topic, partition, left),
    )
    .await
}

/// The first offset of a partition whose record is not older than `timestamp_ms` (milliseconds
/// since the Unix epoch); `None` = all are older.
///
/// # Errors
/// As [`watermarks`].
///
/// # Cancel safety
/// Cancel safe; the client ends by itself.
pub async fn offset_for_time(
    config: &Config,
    topic: &str,
    partition: i32,
    timestamp_ms: i64,
    timeout: Duration,
) -> Result<Option<i64>, Error> {
    let topic = topic.to_owned();
    with_consumer(
        config,
        "oncebox",
        Stability::Stable,
        timeout,
        move |consumer, left| consumer.offset_for_time(&topic, partition, timestamp_ms, left),
    )
    .await
}

/// What a topic looks like when it is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSpec {
    /// Number of partitions.
    pub partitions: i32,
    /// Number of replicas; `None` = the broker's default.
    pub replication: Option<i16>,
    /// Topic configuration, for example `cleanup.policy`.
    pub properties: BTreeMap<String, String>,
}

impl TopicSpec {
    /// This many partitions, the broker's default replication, no configuration of its own.
    #[must_use]
    pub fn new(partitions: i32) -> Self {
        Self {
            partitions,
            replication: None,
            properties: BTreeMap::new(),
        }
    }

    /// Sets one property of the topic's configuration.
    #[must_use]
    pub fn set(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.insert(key.into(), value.into());
        self
    }
}

/// Creates a topic if it does not exist; `true` = it was created now. An existing topic is left as
/// it is. Needs DESCRIBE on the topic, and CREATE if it does not exist.
///
/// # Errors
/// [`Error::Authorization`], or what the broker has against the specification.
///
/// # Cancel safety
/// A dropped future may still create the topic.
pub async fn ensure_topic(config: &Config, topic: &str, spec: &TopicSpec) -> Result<bool, Error> {
    let (topic, spec) = (topic.to_owned(), spec.clone());
    with_admin(config, TIMEOUT, move |admin| {
        let start = Instant::now();
        // Asked first: a principal without the right to create may still use what is there.
        if admin.topic(&topic)?.is_some() {
            return Ok(false);
        }
        let replication = spec.replication.unwrap_or(-1);
        let created = admin.create_topic(&topic, spec.partitions, replication, &spec.properties)?;
        // The controller has it; wait until the brokers tell it to clients, too.
        while admin.topic(&topic)?.is_none() {
            std::thread::sleep(Duration::from_millis(20));
            if start.elapsed() > TIMEOUT {
                break;
            }
        }
        Ok(created)
    })
    .await
}

/// Deletes a topic with its records; `false` = there is none. For whoever made it: the demo, tests.
/// Needs DELETE and DESCRIBE on the topic.
///
/// # Errors
/// [`Error::Authorization`], or what the broker has against it.
///
/// # Cancel safety
/// A dropped future may still delete the topic.
pub async fn delete_topic(config: &Config, topic: &str) -> Result<bool, Error> {
    let topic = topic.to_owned();
    with_admin(config, TIMEOUT, move |admin| admin.delete_topic(&topic)).await
}

/// The cluster as this principal sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Cluster id; empty if the brokers have none.
    pub cluster_id: String,
    /// Number of live brokers.
    pub brokers: usize,
    /// Topics that this principal may describe.
    pub topics: Vec<TopicInfo>,
}

/// A topic in [`Cluster::topics`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicInfo {
    /// Name.
    pub name: String,
    /// Number of partitions.
    pub partitions: usize,
    /// Smallest number of replicas of a partition.
    pub replicas: usize,
}

/// Describes the cluster: the first thing to ask, since it says clearly what is wrong with the
/// connection.
///
/// # Errors
/// [`Error::Config`], [`Error::Unreachable`], [`Error::Authentication`].
///
/// # Cancel safety
/// Cancel safe; the client ends by itself.
pub async fn cluster(config: &Config, timeout: Duration) -> Result<Cluster, Error> {
    with_admin(config, timeout, |admin| {
        let native = admin.cluster()?;
        Ok(Cluster {
            cluster_id: native.cluster_id,
            brokers: native.broker_ids.len(),
            topics: native
                .topics
                .into_iter()
                .map(
                    |NativeTopic {
                         name,
                         partitions,
                         replicas,
                         ..
                     }| TopicInfo {
                        name,
                        partitions,
                        replicas,
                    },
                )
                .collect(),
        })
    })
    .await
}

/// The id of a topic (KIP-516), which changes when the topic is deleted and created again; `None` =
/// no such topic.
///
/// # Errors
/// As [`cluster`]; [`Error::Authorization`] without DESCRIBE on the topic.
///
/// # Cancel safety
/// Cancel safe; the client ends by itself.
pub async fn topic_id(config: &Config, topic: &str) -> Result<Option<String>, Error> {
    let topic = topic.to_owned();
    with_admin(config, TIMEOUT, move |admin| {
        Ok(admin.topic(&topic)?.map(|topic| topic.id))
    })
    .await
}

/// What `doctor` wants to know about a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSettings {
    /// Topic id (KIP-516).
    pub id: String,
    /// Number of partitions.
    pub partitions: usize,
    /// Smallest number of replicas of a partition; 1 = the loss of one disk loses acknowledged
    /// records (G2).
    pub replication: usize,
    /// Whether this principal may write; `None` = the broker does not say.
    pub may_write: Option<bool>,
    /// Whether this principal may read; `None` = the broker does not say.
    pub may_read: Option<bool>,
    /// The topic's configuration, defaults included; empty without the right DESCRIBE_CONFIGS.
    pub config: BTreeMap<String, String>,
}

impl TopicSettings {
    /// `min.insync.replicas`: how many replicas have a record before it is acknowledged.
    #[must_use]
    pub fn min_insync_replicas(&self) -> Option<u32> {
        self.config.get("min.insync.replicas")?.parse().ok()
    }

    /// `unclean.leader.election.enable`: whether acknowledged records may be lost on purpose.
    #[must_use]
    pub fn unclean_leader_election(&self) -> Option<bool> {
        self.config
            .get("unclean.leader.election.enable")?
            .parse()
            .ok()
    }

    /// `max.message.bytes`: the largest batch that the topic takes. Below the producer's
    /// `batch.size` (1 000 000) a whole batch of small records may be refused.
    #[must_use]
    pub fn max_message_bytes(&self) -> Option<u64> {
        self.config.get("max.message.bytes")?.parse().ok()
    }
}

/// Describes a topic, its configuration and what this principal may do with it; `None` = no such
/// topic.
///
/// # Errors
/// As [`topic_id`].
///
/// # Cancel safety
/// Cancel safe; the client ends by itself.
pub async fn topic_settings(config: &Config, topic: &str) -> Result<Option<TopicSettings>, Error> {
    let topic = topic.to_owned();
    with_admin(config, TIMEOUT, move |admin| {
        let Some(native) = admin.topic(&topic)? else {
            return Ok(None);
        };
        Ok(Some(TopicSettings {
            id: native.id,
            partitions: native.partitions,
            replication: native.replicas,
            may_write: native.may_write,
            may_read: native.may_read,
            config: optional(admin.topic_config(&topic))?,
        }))
    })
    .await
}

/// What `doctor` wants to know about the brokers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerSettings {
    /// Configuration by broker id, defaults included; empty without the right DESCRIBE_CONFIGS on
    /// the cluster.
    pub config: BTreeMap<i32, BTreeMap<String, String>>,
}

impl BrokerSettings {
    /// Whether every broker is Kafka 3.7 or newer, the floor of G3: older ones do not verify
    /// transactional offset commits (KIP-890 part 1), so that a late one may move the checkpoint
    /// back between two transactions. Told by `telemetry.max.bytes`, which 3.7 introduced
    /// (KIP-714). `None` = not known.
    #[must_use]
    pub fn verifies_offset_commits(&self) -> Option<bool> {
        (!self.config.is_empty()).then(|| {
            self.config
                .values()
                .all(|c| c.contains_key("telemetry.max.bytes"))
        })
    }

    /// The smallest value of a numeric setting among the brokers, for example
    /// `transaction.max.timeout.ms`, `offset.metadata.max.bytes`, `offsets.retention.minutes` or
    /// `transaction.state.log.replication.factor`.
    #[must_use]
    pub fn smallest(&self, setting: &str) -> Option<i64> {
        self.config
            .values()
            .filter_map(|c| c.get(setting)?.parse().ok())
            .min()
    }
}

/// Reads the configuration of every broker.
///
/// # Errors
/// As [`cluster`].
///
/// # Cancel safety
/// Cancel safe; the client ends by itself.
pub async fn broker_settings(config: &Config, timeout: Duration) -> Result<BrokerSettings, Error> {
    with_admin(config, timeout, |admin| {
        let mut all = BTreeMap::new();
        for id in admin.cluster()?.broker_ids {
            let config = optional(admin.broker_config(id))?;
            if !config.is_empty() {
                all.insert(id, config);
            }
        }
        Ok(BrokerSettings { config: all })
    })
    .await
}

/// A configuration that one may not read is empty, not an error: the right is not needed for the
/// work.
fn optional(
    config: Result<BTreeMap<String, String>, Error>,
) -> Result<BTreeMap<String, String>, Error> {
    match config {
        Err(error) if error.is_authorization() => Ok(BTreeMap::new()),
        other => other,
    }
}

async fn with_admin<T: Send + 'static>(
    config: &Config,
    timeout: Duration,
    ask: impl FnOnce(&AdminClient) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let config = config.clone();
    thread::run("ask Kafka", move || {
        ask(&AdminClient::connect(&config, timeout)?)
    })
    .await
}

async fn with_consumer<T: Send + 'static>(
    config: &Config,
    group: &str,
    stability: Stability,
    timeout: Duration,
    ask: impl FnOnce(&ConsumerClient, Duration) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (config, group) = (config.clone(), group.to_owned());
    thread::run("ask Kafka", move || {
        let start = Instant::now();
        let consumer = ConsumerClient::create(&config, &group, stability == Stability::Stable)?;
        consumer.client().connect(timeout)?;
        ask(
            &consumer,
            timeout
                .saturating_sub(start.elapsed())
                .max(Duration::from_millis(1)),
        )
    })
    .await
}
