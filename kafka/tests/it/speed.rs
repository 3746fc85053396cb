//! Transactions back to back. What they take is printed; `cargo xtask bench relay` measures.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use oncebox_kafka::{
    Envelope, ProducerOptions, Record, SourceTag, Transaction, TransactionalProducer,
};
use uuid::Uuid;

use crate::support::{kafka, offsets, topic, unique};

fn source() -> Option<SourceTag> {
    Some(SourceTag {
        source: Arc::from("orders"),
        epoch: 1,
    })
}

/// Rows of about 1 KiB of JSON-like text, sliced out of one buffer as the relay does it.
fn batch(topic: &Arc<str>, rows: usize) -> Vec<Record> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut text = String::with_capacity(rows * 1_024);
    let mut ends = vec![0];
    for row in 0..rows {
        text.push_str(&format!(r#"{{"order":{row},"lines":["#));
        while text.len() - ends[row] < 980 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            text.push_str(&format!(
                r#"{{"sku":"A-{:06}","quantity":{},"price":{}}},"#,
                state % 997_003,
                state % 7,
                state % 99_991
            ));
        }
        text.push_str("]}");
        ends.push(text.len());
    }
    let all = Bytes::from(text);
    (0..rows)
        .map(|row| Record {
            topic: Arc::clone(topic),
            key: Some(Bytes::from(format!("order-{}", row % 1_000))),
            payload: Some(all.slice(ends[row]..ends[row + 1])),
            headers: Bytes::new(),
            envelope: Some(Envelope {
                message_id: Uuid::from_u128(row as u128),
                outbox_id: row as i64,
                created_at_micros: 1_795_983_713_123_456 + row as i64,
            }),
        })
        .collect()
}

#[tokio::test]
async fn small_transactions_back_to_back_do_not_taint() {
    let Some(config) = kafka() else { return };
    let (data, checkpoints) = (
        topic(&config, "latency", 4).await,
        topic(&config, "latency-checkpoints", 1).await,
    );
    let id = unique("oncebox.latency");
    let producer = TransactionalProducer::open(&config, &id, ProducerOptions::default())
        .await
        .unwrap();
    let name: Arc<str> = Arc::from(data.as_str());
    let (mut times, mut tainted) = (Vec::new(), 0);
    for round in 0..300_i64 {
        let transaction = Transaction {
            source: source(),
            records: batch(&name, 4),
            offsets: Some(offsets(&id, &checkpoints, round, "seq")),
            ..Transaction::default()
        };
        let start = Instant::now();
        let committed = producer.transact(transaction).await.unwrap();
        times.push(start.elapsed());
        tainted += usize::from(committed.tainted.is_some());
    }
    producer.close().await;
    times.drain(..20);
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!(
        "4 records and a checkpoint: p50 {:?}, p90 {:?}, p99 {:?}, max {:?}",
        at(50),
        at(90),
        at(99),
        at(100)
    );
    assert_eq!(tainted, 0, "a clean transaction must not cost a rebuild");
}
