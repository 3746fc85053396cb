//! G4: messages of one key appear in Kafka in the order in which the transactions of that key were serialised. And G1 to
//! G3 together, under load, while the relay is being killed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use oncebox_integration_tests::source::{Source, begin};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::relays::{relay_with, until_empty};

const KEYS: usize = 3;

/// One writer: takes the key's row, counts it up, and says so in a message.
async fn write(
    source: Arc<Source>,
    seed: u64,
    until: Instant,
    ordered: bool,
    committed: Arc<Mutex<Vec<String>>>,
) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut conn = source.database.connect().await;
    while Instant::now() < until {
        let key = format!("key-{}", rng.random_range(0..KEYS));
        let mut tx = begin(&mut conn).await;
        let number = if ordered {
            // The product's lock orders the key; the number is drawn under it.
            source.enqueue_ordered(&mut tx, &key, "filler").await;
            next_number(&mut tx, &key).await
        } else {
            next_number(&mut tx, &key).await
        };
        let text = format!("{key}#{number:06}");
        source.enqueue(&mut tx, &key, &text).await;
        if rng.random_bool(0.05) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(1..30))).await;
        }
        if rng.random_bool(0.2) {
            tx.rollback().await.unwrap();
        } else {
            tx.commit().await.unwrap();
            committed.lock().unwrap().push(text);
        }
    }
}

async fn next_number(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>, key: &str) -> i32 {
    sqlx::query_scalar("UPDATE counters SET n = n + 1 WHERE key = $1 RETURNING n")
        .bind(key)
        .fetch_one(&mut **tx)
        .await
        .unwrap()
}

async fn run(ordered: bool, kills: bool) {
    let source = Arc::new(Source::create().await);
    let mut conn = source.database.connect().await;
    sqlx::query("CREATE TABLE counters (key text PRIMARY KEY, n integer NOT NULL)")
        .execute(&mut conn)
        .await
        .unwrap();
    for n in 0..KEYS {
        sqlx::query("INSERT INTO counters VALUES ($1, 0)")
            .bind(format!("key-{n}"))
            .execute(&mut conn)
            .await
            .unwrap();
    }
    let seed = std::env::var("ONCEBOX_TEST_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random::<u64>);
    eprintln!("seed: ONCEBOX_TEST_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let committed = Arc::new(Mutex::new(vec![]));
    let until = Instant::now() + Duration::from_secs(10);
    let writers: Vec<_> = (0..6)
        .map(|n| {
            tokio::spawn(write(
                Arc::clone(&source),
                seed ^ n,
                until,
                ordered,
                Arc::clone(&committed),
            ))
        })
        .collect();
    let mut killed = 0;
    while Instant::now() < until {
        let relay = relay_with(&source, &["--max-batch-rows", "50"]);
        let life = if kills {
            Duration::from_millis(rng.random_range(300..1500))
        } else {
            Duration::from_secs(10)
        };
        tokio::time::sleep(life).await;
        relay.kill().await;
        killed += 1;
    }
    for writer in writers {
        writer.await.unwrap();
    }
    until_empty(&source).await;
    let committed = committed.lock().unwrap().clone();
    check(&source, committed, killed).await;
}

async fn check(source: &Source, mut committed: Vec<String>, killed: usize) {
    let records = source.published().await;
    let mut last = BTreeMap::<&str, (&str, i64)>::new();
    let mut published = vec![];
    for record in &records {
        let (key, text) = (record.key_text().unwrap(), record.payload_text().unwrap());
        if text == "filler" {
            continue;
        }
        let id = record.header("oncebox-outbox-id").unwrap().parse().unwrap();
        if let Some((before, before_id)) = last.insert(key, (text, id)) {
            assert!(
                before < text && before_id < id,
                "{key}: {before} (id {before_id}) came before {text} (id {id})"
            );
        }
        published.push(text.to_owned());
    }
    committed.sort();
    published.sort();
    assert!(
        committed.len() > 200,
        "only {} transactions",
        committed.len()
    );
    assert_eq!(
        published, committed,
        "published (left) and committed (right) differ"
    );
    eprintln!("{} messages, {killed} relays killed", committed.len());
}

#[tokio::test]
async fn g4_a_hot_key_under_its_row_lock_keeps_its_order_while_the_relay_is_killed() {
    run(false, true).await;
}

#[tokio::test]
async fn g4_enqueue_ordered_keeps_the_order_of_a_key() {
    run(true, false).await;
}
