//! What the inbox stands beside: the same rows without it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use oncebox_integration_tests::services::{Database, Kafka};
use oncebox_kafka::Record;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use sqlx::PgPool;
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::inbox::{BATCH, INSERT, effects};

/// The rows, with or without marks, written on one connection in transactions of [`BATCH`].
pub(crate) async fn rows(database: &Database, records: &[Record], marks: bool) -> Result<f64> {
    const MARKS: &str = "INSERT INTO oncebox_inbox (consumer, message_id) SELECT 'bench', unnest($1::uuid[]) \
                         ON CONFLICT DO NOTHING RETURNING message_id";
    let pool = PgPool::connect(database.url()).await?;
    let start = Instant::now();
    for chunk in records.chunks(BATCH) {
        let ids: Vec<Uuid> = chunk
            .iter()
            .filter_map(|r| Some(r.envelope.as_ref()?.message_id))
            .collect();
        let payloads: Vec<&[u8]> = chunk
            .iter()
            .map(|r| r.payload.as_deref().unwrap_or_default())
            .collect();
        let mut tx = pool.begin().await?;
        if marks {
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            let fresh = sqlx::query(MARKS).bind(sorted).fetch_all(&mut *tx).await?;
            ensure!(fresh.len() == chunk.len(), "they are all fresh");
        }
        sqlx::query(INSERT)
            .bind(ids)
            .bind(payloads)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
    }
    Ok(records.len() as f64 / start.elapsed().as_secs_f64())
}

/// A consumer such as one writes without the inbox: a thread that polls, a task that writes the rows and the offset in transactions of
/// [`BATCH`]. No fence, no retry, no rebalance: the least that fetching costs beside the rows. From the first message to the last commit.
pub(crate) async fn consumer(
    database: &Database,
    kafka: &Kafka,
    topic: &str,
    messages: usize,
) -> Result<f64> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", kafka.bootstrap())
        .set("group.id", "by-hand")
        .set("enable.auto.commit", "false")
        .set("isolation.level", "read_committed")
        // As the inbox does: the default is a second.
        .set("fetch.queue.backoff.ms", "10")
        .create()?;
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(topic, 0, Offset::Beginning)?;
    consumer.assign(&list)?;
    let (batches, mut waiting) = mpsc::channel(4);
    let fetching = tokio::task::spawn_blocking(move || {
        let (mut first, mut seen) = (None, 0);
        let (mut ids, mut payloads) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        while seen < messages {
            let Some(message) = consumer.poll(Duration::from_millis(100)) else {
                continue;
            };
            let message = message?;
            first.get_or_insert_with(Instant::now);
            let headers = message.headers().context("a record without headers")?;
            let id = headers.iter().find(|h| h.key == "oncebox-id");
            let id = id
                .and_then(|h| h.value)
                .context("a record without oncebox-id")?;
            ids.push(Uuid::try_parse_ascii(id)?);
            payloads.push(message.payload().unwrap_or_default().to_vec());
            seen += 1;
            if ids.len() == BATCH || seen == messages {
                let batch = (
                    std::mem::replace(&mut ids, Vec::with_capacity(BATCH)),
                    std::mem::replace(&mut payloads, Vec::with_capacity(BATCH)),
                    message.offset() + 1,
                );
                if batches.blocking_send(batch).is_err() {
                    break;
                }
            }
        }
        first.context("nothing was received")
    });
    let pool = PgPool::connect(database.url()).await?;
    sqlx::query("CREATE TABLE place AS SELECT 0::bigint AS next")
        .execute(&pool)
        .await?;
    while let Some((ids, payloads, next)) = waiting.recv().await {
        let mut tx = pool.begin().await?;
        sqlx::query(INSERT)
            .bind(ids)
            .bind(payloads)
            .execute(&mut *tx)
            .await?;
        sqlx::query("UPDATE place SET next = $1")
            .bind(next)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
    }
    let end = Instant::now();
    let first = fetching.await??;
    ensure!(effects(database).await? == messages, "all are there");
    Ok(messages as f64 / (end - first).as_secs_f64())
}
