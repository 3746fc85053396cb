//! The two limits of a relay: reading the rows alone, and publishing them alone.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Buf as _;
use futures_util::StreamExt as _;
use oncebox_integration_tests::services::Database;
use oncebox_kafka::{
    Config, Offsets, ProducerOptions, SourceTag, Stability, TopicSpec, Transaction,
    TransactionalProducer,
};
use oncebox_migrations::{Dialect, Names};
use serde::Serialize;

use crate::BATCH;
use crate::process::processor_time;
use crate::rows::Rows;

/// How fast one of the two was.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Limit {
    pub(crate) rows_per_second: f64,
    /// Processor time of this process per row, in microseconds.
    pub(crate) processor_micros: f64,
}

/// COPY OUT of all rows on one connection, by ranges of ids: the relay's columns, order and format.
pub(crate) async fn copy_out(database: &Database, rows: usize) -> Result<Limit> {
    let outbox = Names::default().outbox(Dialect::Postgres);
    let mut conn = database.connect().await;
    let (start, processor) = (Instant::now(), processor_time());
    let mut found = 0;
    for low in (0..rows).step_by(BATCH) {
        let statement = format!(
            "COPY (SELECT false, o.id, o.message_id, o.topic, o.key, o.payload, o.headers, o.created_at FROM {outbox} o \
             WHERE o.id > {low} AND o.id <= {high} ORDER BY o.id) TO STDOUT (FORMAT binary)",
            high = low + BATCH
        );
        let mut chunks = conn.copy_out_raw(&statement).await?;
        let mut header = 19;
        while let Some(chunk) = chunks.next().await {
            let mut chunk = chunk?;
            chunk.advance(header);
            header = 0;
            found += usize::from(is_row(&chunk));
        }
    }
    let limit = Limit::new(rows, start, processor);
    ensure!(
        found == rows,
        "{rows} rows expected in the outbox, COPY finds {found}"
    );
    Ok(limit)
}

/// A message holds one row, which begins with the number of its fields, or the trailer.
fn is_row(mut message: &[u8]) -> bool {
    message.try_get_i16() == Ok(8)
}

/// The relay's producer, fed from memory: the same records and headers, [`BATCH`] per transaction, a checkpoint in each.
pub(crate) async fn producer(
    bootstrap: &str,
    compression: &str,
    rows: &Rows,
    name: &str,
) -> Result<Limit> {
    let config = Config::new(bootstrap).set("compression.type", compression);
    let checkpoints = "oncebox.checkpoints";
    oncebox_kafka::ensure_topic(&config, checkpoints, &TopicSpec::new(1)).await?;
    let id = format!("oncebox.{name}");
    // As a relay does; on a broker that has no offsets yet, librdkafka would wait for ever for the group's coordinator.
    let (stability, patience) = (Stability::Any, Duration::from_secs(20));
    oncebox_kafka::committed(&config, &id, checkpoints, 0, stability, patience).await?;
    let source = SourceTag {
        source: name.into(),
        epoch: 1,
    };
    let transactions: Vec<_> = (0..rows.len())
        .step_by(BATCH)
        .zip(1..)
        .map(|(low, seq)| {
            let high = rows.len().min(low + BATCH);
            Transaction {
                source: Some(source.clone()),
                records: rows.records(low..high),
                offsets: Some(Offsets {
                    group: id.clone(),
                    topic: checkpoints.to_owned(),
                    partition: 0,
                    offset: seq,
                    metadata: format!("position {high}, as long as the relay's is without gaps"),
                }),
                ..Transaction::default()
            }
        })
        .collect();
    let producer = TransactionalProducer::open(&config, &id, ProducerOptions::default()).await?;
    let (start, processor) = (Instant::now(), processor_time());
    for transaction in transactions {
        let committed = producer.transact(transaction).await?;
        ensure!(
            committed.tainted.is_none(),
            "the producer is tainted: {committed:?}"
        );
    }
    let limit = Limit::new(rows.len(), start, processor);
    producer.close().await;
    Ok(limit)
}

impl Limit {
    #[allow(clippy::cast_precision_loss, reason = "counts of rows")]
    fn new(rows: usize, start: Instant, processor: Duration) -> Self {
        let (elapsed, used) = (start.elapsed(), processor_time() - processor);
        Self {
            rows_per_second: rows as f64 / elapsed.as_secs_f64(),
            processor_micros: used.as_secs_f64() * 1e6 / rows as f64,
        }
    }
}
