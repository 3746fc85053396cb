//! The Kafka side of a relay behind two small traits, so that the relay's own rules are tested without a broker.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncebox_kafka::{
    ANCHOR, Committed, Offsets, ProducerOptions, Record, SourceTag, Stability, TopicSpec,
    TransactError, Transaction, TransactionalProducer,
};

use crate::config::Config;
use crate::error::{Error, Stop};
use crate::position::{Base, Checkpoint, Gaps, Stored};
use crate::session::Row;

/// How long an administrative request may take.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(15);

/// Where the messages and the checkpoint go.
pub(crate) trait Log: Send + Sync + Sized + 'static {
    /// Publishes as one leader.
    type Producer: Producer;

    /// Names the cluster.
    fn cluster_id(&self) -> impl Future<Output = Result<String, Error>> + Send;

    /// Sees to it that a checkpoint can be committed.
    fn prepare(&self) -> impl Future<Output = Result<(), Error>> + Send;

    /// Reads the checkpoint; `None` = there is none. An error means unknown: nobody may go on.
    fn checkpoint(
        &self,
        stability: Stability,
    ) -> impl Future<Output = Result<Option<Checkpoint>, Error>> + Send;

    /// Opens the producer: fences the one before and settles its open transaction.
    fn open(&self) -> impl Future<Output = Result<Self::Producer, Error>> + Send;
}

/// The one producer of a leader.
pub(crate) trait Producer: Send + Sync + 'static {
    /// Publishes the rows and the checkpoint in one transaction, or the checkpoint alone. `Some` = done, but the
    /// producer must be made anew before the next one, and why.
    fn publish(
        &self,
        source_epoch: i64,
        rows: &[&Row],
        checkpoint: &Checkpoint,
        how: How,
    ) -> impl Future<Output = Result<Option<String>, NotPublished>> + Send;

    /// Sends the rows in a transaction that is aborted: what do the brokers think of them? `Some` as above.
    fn rehearse(
        &self,
        source_epoch: i64,
        rows: &[&Row],
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<Option<String>, NotPublished>> + Send;

    /// When it last completed a step.
    fn last_step(&self) -> Instant;

    /// Ends it.
    fn close(self) -> impl Future<Output = ()> + Send;
}

/// How one transaction is made.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct How {
    /// Most records of a batch on the wire.
    pub(crate) records_per_batch: Option<NonZeroUsize>,
    /// Its deadline, if it is to be shorter than the transaction time-out.
    pub(crate) timeout: Option<Duration>,
}

/// Why a transaction was not committed, as far as the publisher can do something about it.
#[derive(Debug)]
pub(crate) enum NotPublished {
    /// Definitely refused for its size or its content.
    Refused(Refused),
    /// A topic is missing or forbidden.
    Topic(TopicRefused),
    /// Some topics got no acknowledgement while all others did.
    Silent(Silent),
    /// Passes by itself, or ends the relay.
    Other(Error),
}

/// Some of the rows, by their index, came back with a refusal.
#[derive(Debug)]
pub(crate) struct Refused {
    /// One = it is certain.
    pub(crate) suspects: Vec<usize>,
    /// The most likely of them.
    pub(crate) likely: usize,
    pub(crate) reason: String,
}

/// One of these topics is refused.
#[derive(Debug)]
pub(crate) struct TopicRefused {
    pub(crate) suspects: Vec<String>,
    pub(crate) reason: String,
}

/// These topics did not acknowledge.
#[derive(Debug)]
pub(crate) struct Silent {
    pub(crate) topics: Vec<String>,
    pub(crate) reason: String,
    pub(crate) error: Error,
}

impl From<NotPublished> for Error {
    /// Where nothing can be parked: the transaction failed.
    fn from(not: NotPublished) -> Self {
        let reason = match not {
            NotPublished::Other(error) | NotPublished::Silent(Silent { error, .. }) => {
                return error;
            }
            NotPublished::Refused(Refused { reason, .. })
            | NotPublished::Topic(TopicRefused { reason, .. }) => reason,
        };
        Self::Kafka(oncebox_kafka::Error::Kafka {
            operation: "publish".into(),
            code: "REFUSED".into(),
            reason,
            retriable: true,
            fatal: false,
        })
    }
}

/// The real one.
pub(crate) struct KafkaLog {
    config: Config,
}

impl KafkaLog {
    /// Connects to nothing yet.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            config: config.clone(),
        }
    }
}

impl KafkaLog {
    /// The gaps of a base record; `None` = it is gone.
    async fn base_gaps(&self, base: &Base, head: &Checkpoint) -> Result<Option<Gaps>, Error> {
        let topic = &self.config.checkpoint_topic;
        let (partition, offset) = (base.partition, base.offset);
        let record =
            oncebox_kafka::record_at(&self.config.kafka, topic, partition, offset, ADMIN_TIMEOUT);
        let Some(payload) = record.await.map_err(sort)? else {
            return Ok(None);
        };
        let text = std::str::from_utf8(&payload).unwrap_or_default();
        let whole = Checkpoint::decode(text).ok();
        Ok(whole
            .filter(|whole| whole.source_id == head.source_id)
            .map(|whole| whole.position.gaps))
    }
}

impl Log for KafkaLog {
    type Producer = KafkaProducer;

    async fn cluster_id(&self) -> Result<String, Error> {
        let cluster = oncebox_kafka::cluster(&self.config.kafka, ADMIN_TIMEOUT)
            .await
            .map_err(sort)?;
        Ok(cluster.cluster_id)
    }

    async fn prepare(&self) -> Result<(), Error> {
        let spec = TopicSpec {
            partitions: 1,
            replication: None,
            properties: [("cleanup.policy".to_owned(), "compact".to_owned())].into(),
        };
        oncebox_kafka::ensure_topic(&self.config.kafka, &self.config.checkpoint_topic, &spec)
            .await
            .map_err(sort)?;
        Ok(())
    }

    async fn checkpoint(&self, stability: Stability) -> Result<Option<Checkpoint>, Error> {
        let group = self.config.transactional_id();
        let topic = &self.config.checkpoint_topic;
        let stored = oncebox_kafka::committed(
            &self.config.kafka,
            &group,
            topic,
            0,
            stability,
            ADMIN_TIMEOUT,
        );
        let Some((offset, metadata)) = stored.await.map_err(sort)? else {
            return Ok(None);
        };
        let unreadable = |error| Stop::Unreadable {
            place: "checkpoint in Kafka",
            error,
        };
        let stored = Stored::decode(&metadata).map_err(unreadable)?;
        if stored.head.position.high != offset {
            return Err(unreadable(crate::position::FormatError::Field("high")).into());
        }
        let Some(base) = &stored.base else {
            return Ok(Some(stored.head));
        };
        // What is gone is found out only if the checkpoint is needed: mostly the mark knows as much.
        let gaps = self.base_gaps(base, &stored.head).await?;
        let mut checkpoint = stored.complete(gaps.as_ref().unwrap_or(&Gaps::default()));
        checkpoint.incomplete = gaps.is_none();
        Ok(Some(checkpoint))
    }

    async fn open(&self) -> Result<KafkaProducer, Error> {
        let on_step = self.config.on_step.clone().map(|hook| {
            let report: Arc<dyn Fn(oncebox_kafka::Step) + Send + Sync> =
                Arc::new(move |step| hook(step.into()));
            report
        });
        let mut options = ProducerOptions::default();
        (options.transaction_timeout, options.on_step) = (self.config.transaction_timeout, on_step);
        let id = self.config.transactional_id();
        let producer = TransactionalProducer::open(&self.config.kafka, &id, options)
            .await
            .map_err(sort)?;
        Ok(KafkaProducer {
            producer,
            config: self.config.clone(),
            known: Mutex::default(),
            base: Mutex::default(),
        })
    }
}

/// The real producer.
pub(crate) struct KafkaProducer {
    producer: TransactionalProducer,
    config: Config,
    /// Topics that were seen to exist.
    known: Mutex<HashSet<Arc<str>>>,
    /// The base record of the last checkpoints, when the gaps did not fit: its place and its gaps.
    base: Mutex<Option<(String, Gaps)>>,
}

impl Producer for KafkaProducer {
    async fn publish(
        &self,
        source_epoch: i64,
        rows: &[&Row],
        checkpoint: &Checkpoint,
        how: How,
    ) -> Result<Option<String>, NotPublished> {
        let (metadata, anchor) = self.encode(checkpoint);
        let transaction = Transaction {
            anchor,
            // G3: the position travels in the same transaction as the rows.
            offsets: Some(Offsets {
                group: self.config.transactional_id(),
                topic: self.config.checkpoint_topic.clone(),
                partition: 0,
                offset: checkpoint.position.high,
                metadata,
            }),
            records_per_batch: how.records_per_batch,
            timeout: how.timeout,
            ..self.transaction(source_epoch, rows)
        };
        let committed = self.transact(rows, transaction).await?;
        if let Some((partition, offset)) = committed.anchor {
            let gaps = checkpoint.position.gaps.clone();
            *self.base.lock().unwrap_or_else(PoisonError::into_inner) =
                Some((format!("{partition}:{offset}"), gaps));
        }
        Ok(committed.tainted)
    }

    async fn rehearse(
        &self,
        source_epoch: i64,
        rows: &[&Row],
        timeout: Option<Duration>,
    ) -> Result<Option<String>, NotPublished> {
        let transaction = Transaction {
            timeout,
            rehearsal: true,
            ..self.transaction(source_epoch, rows)
        };
        Ok(self.transact(rows, transaction).await?.tainted)
    }

    fn last_step(&self) -> Instant {
        self.producer.last_step()
    }

    async fn close(self) {
        self.producer.close().await;
    }
}

/// Looks at a topic that is not there, before it is believed to be missing.
const LOOKS: usize = 3;

/// Pause between two of them.
const LOOK_AGAIN: Duration = Duration::from_millis(300);

impl KafkaProducer {
    fn transaction(&self, source_epoch: i64, rows: &[&Row]) -> Transaction {
        Transaction {
            source: Some(SourceTag {
                source: self.config.source.as_str().into(),
                epoch: source_epoch,
            }),
            records: rows.iter().map(|row| row.record.clone()).collect(),
            ..Transaction::default()
        }
    }

    /// The checkpoint's text, and the base record that it needs if it does not fit: the position in full.
    fn encode(&self, checkpoint: &Checkpoint) -> (String, Option<Record>) {
        let whole = checkpoint.encode();
        if whole.len() <= self.config.checkpoint_bytes {
            return (whole, None);
        }
        let base = self.base.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((place, gaps)) = &*base {
            let changes = checkpoint.encode_since(place, gaps);
            if changes.len() <= self.config.checkpoint_bytes {
                return (changes, None);
            }
        }
        let anchor = Record {
            topic: self.config.checkpoint_topic.as_str().into(),
            key: Some(self.config.source.clone().into()),
            payload: Some(whole.into()),
            headers: Bytes::new(),
            envelope: None,
        };
        let gaps = &checkpoint.position.gaps;
        (checkpoint.encode_since(ANCHOR, gaps), Some(anchor))
    }

    async fn transact(
        &self,
        rows: &[&Row],
        transaction: Transaction,
    ) -> Result<Committed, NotPublished> {
        self.check_topics(rows).await?;
        match self.producer.transact(transaction).await {
            Ok(committed) => Ok(committed),
            Err(error) => {
                // A topic may have been deleted.
                self.known().clear();
                Err(sort_transact(error))
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, HashSet<Arc<str>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks once for every topic: librdkafka waits for one that does not exist.
    async fn check_topics(&self, rows: &[&Row]) -> Result<(), NotPublished> {
        for look in 1.. {
            let Some(missing) = self.unknown_topic(rows) else {
                break;
            };
            let cluster = oncebox_kafka::cluster(&self.config.kafka, ADMIN_TIMEOUT);
            let cluster = cluster.await.map_err(|e| NotPublished::Other(sort(e)))?;
            let names = cluster
                .topics
                .iter()
                .map(|topic| topic.name.as_str().into());
            *self.known() = names.collect();
            if self.known().contains(&missing) {
                continue;
            }
            // A broker that has just started may not know any topic yet; the checkpoint's exists for certain.
            if !self.known().contains(&*self.config.checkpoint_topic) {
                let topic = &self.config.checkpoint_topic;
                return Err(NotPublished::Other(Error::Kafka(
                    oncebox_kafka::Error::Kafka {
                        operation: "look at the topics".into(),
                        code: "UNKNOWN_TOPIC_OR_PART".into(),
                        reason: format!(
                            "the broker does not know the checkpoint's topic {topic:?}, which exists"
                        ),
                        retriable: true,
                        fatal: false,
                    },
                )));
            }
            if look >= LOOKS {
                return Err(NotPublished::Topic(TopicRefused {
                    suspects: vec![missing.to_string()],
                    reason: "it does not exist or is not visible to this user: create it, or grant DESCRIBE and WRITE".to_owned(),
                }));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    fn unknown_topic(&self, rows: &[&Row]) -> Option<Arc<str>> {
        let known = self.known();
        let mut last: Option<&Arc<str>> = None;
        let unknown = rows.iter().find(|row| {
            let topic = &row.record.topic;
            let new = last.is_none_or(|last| !Arc::ptr_eq(last, topic)) && !known.contains(topic);
            last = Some(topic);
            new
        });
        unknown.map(|row| Arc::clone(&row.record.topic))
    }
}

/// What an operator must change, or what passes by itself.
pub(crate) fn sort(error: oncebox_kafka::Error) -> Error {
    if error.is_authentication() || error.is_authorization() || error.is_config() {
        Error::KafkaRefused(error)
    } else {
        Error::Kafka(error)
    }
}

fn sort_transact(error: TransactError) -> NotPublished {
    if let Some(refused) = error.refused() {
        return NotPublished::Refused(Refused {
            suspects: refused.suspects.clone(),
            likely: refused.index,
            reason: format!("{}: {}", refused.code, refused.reason),
        });
    }
    let (suspects, silent) = (error.suspected_topics(), error.silent_topics());
    if !suspects.is_empty() {
        return NotPublished::Topic(TopicRefused {
            suspects: suspects.to_vec(),
            reason: error.to_string(),
        });
    }
    if !silent.is_empty() {
        return NotPublished::Silent(Silent {
            topics: silent.to_vec(),
            reason: error.to_string(),
            error: Error::Publish(error),
        });
    }
    NotPublished::Other(Error::Publish(error))
}
