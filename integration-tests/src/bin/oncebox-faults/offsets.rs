//! What the consumers acknowledged to Kafka, and whether its effects were there.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use oncebox_integration_tests::history::{Acknowledged, Place};
use oncebox_integration_tests::services::Kafka;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{Offset, TopicPartitionList};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::consumer;

const EVERY: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(2);

/// Looks again and again, until it is asked for what it saw. While Kafka or the database is away, nothing is seen.
pub(crate) struct Offsets {
    stop: CancellationToken,
    looks: JoinHandle<Vec<Acknowledged>>,
}

impl Offsets {
    pub(crate) fn watch(kafka: &Kafka, inventory: PgConnectOptions, topic: &str) -> Self {
        let eye = Eye {
            bootstrap: kafka.bootstrap().to_owned(),
            topic: topic.to_owned(),
            inventory,
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
        Self { stop, looks }
    }

    pub(crate) async fn seen(self) -> Result<Vec<Acknowledged>> {
        self.stop.cancel();
        Ok(self.looks.await?)
    }
}

struct Eye {
    bootstrap: String,
    topic: String,
    inventory: PgConnectOptions,
}

impl Eye {
    async fn look(&self) -> Result<Vec<Acknowledged>> {
        let (bootstrap, topic) = (self.bootstrap.clone(), self.topic.clone());
        let next = tokio::task::spawn_blocking(move || acknowledged(&bootstrap, &topic)).await??;
        // What is committed now may have been committed in between, so nothing is accused wrongly.
        let look = async {
            let mut conn = PgConnection::connect_with(&self.inventory).await?;
            sqlx::query_as::<_, (i32, i64)>("SELECT place, max(at) FROM effects GROUP BY place")
                .fetch_all(&mut conn)
                .await
        };
        let effects = tokio::time::timeout(PATIENCE, look).await??;
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
fn acknowledged(bootstrap: &str, topic: &str) -> Result<Vec<Place>> {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .set("group.id", consumer::NAME)
        .set("log_level", "0")
        .create()?;
    let mut wanted = TopicPartitionList::new();
    wanted.add_partition_range(topic, 0, crate::scene::PARTITIONS - 1);
    let committed = client
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
