//! The Kafka side of a relay behind two small traits, so that the relay's own rules are tested without a broker.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncebox_kafka::{
    Offsets, ProducerOptions, SourceTag, Stability, TopicSpec, TransactError, Transaction,
    TransactionalProducer,
};

use crate::config::Config;
use crate::error::{Error, Stop};
use crate::position::Checkpoint;
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
        rows: Vec<Row>,
        checkpoint: &Checkpoint,
    ) -> impl Future<Output = Result<Option<String>, Error>> + Send;

    /// When it last completed a step.
    fn last_step(&self) -> Instant;

    /// Ends it.
    fn close(self) -> impl Future<Output = ()> + Send;
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
        let checkpoint = Checkpoint::decode(&metadata).map_err(unreadable)?;
        if checkpoint.position.high != offset {
            return Err(unreadable(crate::position::FormatError::Field("high")).into());
        }
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
        })
    }
}

/// The real producer.
pub(crate) struct KafkaProducer {
    producer: TransactionalProducer,
    config: Config,
    /// Topics that were seen to exist.
    known: Mutex<HashSet<Arc<str>>>,
}

impl Producer for KafkaProducer {
    async fn publish(
        &self,
        source_epoch: i64,
        rows: Vec<Row>,
        checkpoint: &Checkpoint,
    ) -> Result<Option<String>, Error> {
        self.check_topics(&rows).await?;
        let named: Vec<_> = rows
            .iter()
            .map(|row| (row.id, row.message_id, Arc::clone(&row.record.topic)))
            .collect();
        let transaction = Transaction {
            source: Some(SourceTag {
                source: self.config.source.as_str().into(),
                epoch: source_epoch,
            }),
            records: rows.into_iter().map(|row| row.record).collect(),
            // G3: the position travels in the same transaction as the rows.
            offsets: Some(Offsets {
                group: self.config.transactional_id(),
                topic: self.config.checkpoint_topic.clone(),
                partition: 0,
                offset: checkpoint.position.high,
                metadata: checkpoint.encode(),
            }),
        };
        match self.producer.transact(transaction).await {
            Ok(committed) => Ok(committed.tainted),
            Err(error) => Err(sort_transact(error, &named)),
        }
    }

    fn last_step(&self) -> Instant {
        self.producer.last_step()
    }

    async fn close(self) {
        self.producer.close().await;
    }
}

impl KafkaProducer {
    /// Asks once for every topic: librdkafka waits 30 s for one that does not exist.
    async fn check_topics(&self, rows: &[Row]) -> Result<(), Error> {
        let unknown = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let mut last: Option<&Arc<str>> = None;
            rows.iter().find(|row| {
                let topic = &row.record.topic;
                let new =
                    last.is_none_or(|last| !Arc::ptr_eq(last, topic)) && !known.contains(topic);
                last = Some(topic);
                new
            })
        };
        if unknown.is_none() {
            return Ok(());
        }
        let cluster = oncebox_kafka::cluster(&self.config.kafka, ADMIN_TIMEOUT)
            .await
            .map_err(sort)?;
        let there: HashSet<Arc<str>> = cluster
            .topics
            .iter()
            .map(|topic| topic.name.as_str().into())
            .collect();
        if let Some(row) = rows.iter().find(|row| !there.contains(&row.record.topic)) {
            return Err(Stop::MissingTopic {
                id: row.id,
                topic: row.record.topic.to_string(),
            }
            .into());
        }
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = there;
        Ok(())
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

fn sort_transact(error: TransactError, rows: &[(i64, uuid::Uuid, Arc<str>)]) -> Error {
    if let Some(refused) = error.refused() {
        let (id, message_id) = rows
            .get(refused.index)
            .map_or_else(Default::default, |row| (row.0, row.1));
        let reason = format!("{}: {}", refused.code, refused.reason);
        return Stop::Refused {
            id,
            message_id,
            topic: refused.topic.clone(),
            reason,
        }
        .into();
    }
    if let Some(topic) = error.topic() {
        // Found by name below; the first row of the topic is the one that stands still.
        let id = rows
            .iter()
            .find(|row| &*row.2 == topic)
            .map_or(0, |row| row.0);
        return Stop::TopicRefused {
            id,
            topic: topic.to_owned(),
            reason: error.to_string(),
        }
        .into();
    }
    Error::Publish(error)
}
