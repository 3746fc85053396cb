//! Measurements, printed: ratios count, absolute numbers are those of this machine.

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
async fn a_small_transaction_takes_milliseconds() {
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

#[tokio::test]
async fn a_large_transaction_runs_at_the_brokers_speed() {
    let Some(config) = kafka() else { return };
    for compression in ["lz4", "none"] {
        let (data, checkpoints) = (
            topic(&config, "rate", 4).await,
            topic(&config, "rate-checkpoints", 1).await,
        );
        let id = unique("oncebox.rate");
        let config = config.clone().set("compression.type", compression);
        let producer = TransactionalProducer::open(&config, &id, ProducerOptions::default())
            .await
            .unwrap();
        let name: Arc<str> = Arc::from(data.as_str());
        let records = batch(&name, 20_000);
        let mut rates = Vec::new();
        let before = cpu_seconds();
        for round in 0..12_i64 {
            let transaction = Transaction {
                source: source(),
                records: records.clone(),
                offsets: Some(offsets(&id, &checkpoints, round, "seq")),
            };
            let start = Instant::now();
            let committed = producer.transact(transaction).await.unwrap();
            assert_eq!((committed.records, committed.tainted), (20_000, None));
            rates.push(20_000.0 / start.elapsed().as_secs_f64());
        }
        let cpu = (cpu_seconds() - before) / 240_000.0 * 1e6;
        producer.close().await;
        rates.drain(..2);
        rates.sort_by(f64::total_cmp);
        println!(
            "20 000 records of 1 KiB and a checkpoint, {compression}: median {:.0} records/s, \
             {:.0} to {:.0}; {cpu:.1} µs of CPU per record in this process",
            rates[rates.len() / 2],
            rates[0],
            rates[rates.len() - 1]
        );
    }
}

/// User and system time of this process, which says more than the clock on a busy machine.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat
        .rsplit(") ")
        .next()
        .unwrap_or_default()
        .split(' ')
        .collect();
    let ticks = |i: usize| {
        fields
            .get(i)
            .and_then(|f| f.parse::<f64>().ok())
            .unwrap_or(0.0)
    };
    (ticks(11) + ticks(12)) / 100.0
}
