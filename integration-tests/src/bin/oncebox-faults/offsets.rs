//! What the consumers acknowledged to Kafka, and whether its effects were there.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use oncebox_integration_tests::history::{Acknowledged, Place};
use oncebox_integration_tests::services::Kafka;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{Offset, TopicPartitionList};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::consumer;
use crate::scene::PARTITIONS;
use crate::watch::Watch;

const EVERY: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(2);

/// Looks again and again, until it is asked for what it saw. While Kafka or the database is away, nothing is seen.
pub(crate) struct Offsets {
    stop: CancellationToken,
    looks: JoinHandle<Vec<Acknowledged>>,
}

impl Offsets {
    /// Of the consumers' group; the effects are seen by `watch`.
    pub(crate) fn watch(kafka: &Kafka, watch: Watch, topic: &str) -> Result<Self> {
        let group: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", kafka.bootstrap())
            .set("group.id", consumer::NAME)
            .set("log_level", "0")
            .create()?;
        let eye = Eye {
            group: Arc::new(group),
            topic: topic.to_owned(),
            watch,
        };
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let looks = tokio::spawn(async move {
            let mut seen = Vec::new();
            while stopped
                .run_until_cancelled(tokio::time::sleep(EVERY))
                .await
                .is_some()
            {
                if let Ok(acknowledged) = eye.look().await {
                    seen.extend(acknowledged);
                }
            }
            seen
        });
        Ok(Self { stop, looks })
    }

    pub(crate) async fn seen(self) -> Result<Vec<Acknowledged>> {
        self.stop.cancel();
        Ok(self.looks.await?)
    }
}

struct Eye {
    group: Arc<BaseConsumer>,
    topic: String,
    watch: Watch,
}

impl Eye {
    async fn look(&self) -> Result<Vec<Acknowledged>> {
        let (group, topic) = (Arc::clone(&self.group), self.topic.clone());
        let next = tokio::task::spawn_blocking(move || acknowledged(&group, &topic)).await??;
        // What is committed now may have been committed in between, so nothing is accused wrongly.
        let effects = tokio::time::timeout(PATIENCE, self.watch.highest()).await??;
        let effects: HashMap<_, _> = effects.into_iter().collect();
        Ok(next
            .into_iter()
            .map(|next| Acknowledged {
                next,
                effect: effects.get(&next.partition).copied(),
            })
            .collect())
    }
}

/// The committed offsets of the consumers' group. Blocks.
fn acknowledged(group: &BaseConsumer, topic: &str) -> Result<Vec<Place>> {
    let mut wanted = TopicPartitionList::new();
    wanted.add_partition_range(topic, 0, PARTITIONS - 1);
    let committed = group
        .committed_offsets(wanted, PATIENCE)
        .context("no answer about the offsets")?;
    Ok(committed
        .elements()
        .iter()
        .filter_map(|element| match element.offset() {
            Offset::Offset(offset) => Some(Place {
                partition: element.partition(),
                offset,
            }),
            _ => None,
        })
        .collect())
}
