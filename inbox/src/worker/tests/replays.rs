//! Ordered replays: the letter is the licence.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use uuid::Uuid;

use super::bench::{Bench, Options, effect, handler, until};
use crate::position::Key;
use crate::replay::Replayed;
use crate::store::Store as _;
use crate::{HandlerError, OnFailure};

async fn order(bench: &Bench, filter: &'static str) {
    let sql = format!("UPDATE oncebox_dead_letter SET replay_at = 1 WHERE {filter}");
    sqlx::query(sqlx::AssertSqlSafe(sql))
        .execute(&bench.pool)
        .await
        .unwrap();
}

/// Fails for some messages until it is repaired.
fn broken(repaired: &Arc<AtomicBool>, on_failure: OnFailure) -> Options {
    let repaired = Arc::clone(repaired);
    Options {
        handler: handler(move |tx, delivery| {
            let broken = !repaired.load(Ordering::SeqCst);
            Box::pin(async move {
                effect(tx, delivery.clone()).await?;
                if broken && delivery.key.as_deref() == Some(b"broken") {
                    return Err(HandlerError::fatal("broken"));
                }
                Ok(())
            })
        }),
        on_failure,
        batch: 4,
        ..Options::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_replayed_letter_has_its_effect_once_however_many_consumers_there_are() {
    let bench = Bench::new(1).await;
    for n in 0..20 {
        let key = if n % 2 == 0 { "broken" } else { "fine" };
        bench
            .kafka
            .append_keyed(0, Uuid::now_v7(), key, &n.to_string());
    }
    let repaired = Arc::new(AtomicBool::new(false));
    let one = bench.start(&[0], broken(&repaired, OnFailure::DeadLetter));
    let two = bench.start(&[], broken(&repaired, OnFailure::DeadLetter));
    let three = bench.start(&[], broken(&repaired, OnFailure::DeadLetter));
    bench.settled(0, 20).await;
    assert_eq!(bench.effects().await.len(), 10);
    // In vain: the letters stay, and the order is taken back.
    order(&bench, "record_offset = 0").await;
    until(async || {
        let vain = bench.count("SELECT count(*) FROM oncebox_dead_letter WHERE replays > 0 AND replay_at IS NULL AND attempts > 1");
        vain.await == 1
    })
    .await;
    // Another one may still be at it, and would take the next order back with the first.
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    repaired.store(true, Ordering::SeqCst);
    order(&bench, "true").await;
    until(async || {
        bench
            .count("SELECT count(*) FROM oncebox_dead_letter")
            .await
            == 0
    })
    .await;
    // A redelivery of them does nothing: the marks have stayed.
    bench.kafka.redeliver(one.member, 20);
    until(async || one.stats.duplicates() >= 20).await;
    for worker in [one, two, three] {
        worker.stop().await.unwrap();
    }
    assert_eq!(bench.numbers().await, (0..20).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_released_key_is_handled_in_order_and_later_messages_wait_for_it() {
    let bench = Bench::new(1).await;
    for n in 0..10 {
        bench
            .kafka
            .append_keyed(0, Uuid::now_v7(), "broken", &n.to_string());
    }
    let repaired = Arc::new(AtomicBool::new(false));
    let worker = bench.start(&[0], broken(&repaired, OnFailure::BlockKey));
    bench.settled(0, 10).await;
    repaired.store(true, Ordering::SeqCst);
    // More of the key while it is released.
    order(&bench, "record_offset = 0").await;
    for n in 10..60 {
        bench
            .kafka
            .append_keyed(0, Uuid::now_v7(), "broken", &n.to_string());
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    bench.settled(0, 60).await;
    until(async || {
        bench
            .count("SELECT count(*) FROM oncebox_dead_letter")
            .await
            == 0
    })
    .await;
    worker.stop().await.unwrap();
    let expected: Vec<String> = (0..60).map(|n| n.to_string()).collect();
    assert_eq!(bench.effects().await, expected);
    assert_eq!(
        bench
            .count("SELECT count(*) FROM oncebox_blocked_key")
            .await,
        0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_letter_that_is_replayed_in_vain_again_and_again_is_left_alone() {
    let bench = Bench::new(1).await;
    bench.kafka.append_keyed(0, Uuid::now_v7(), "broken", "0");
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let options = Options {
        handler: handler(move |_, _| {
            count.fetch_add(1, Ordering::SeqCst);
            Box::pin(async { Err(HandlerError::fatal("broken")) })
        }),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 1).await;
    sqlx::query("UPDATE oncebox_dead_letter SET replays = 10")
        .execute(&bench.pool)
        .await
        .unwrap();
    order(&bench, "true").await;
    until(async || {
        let left = bench.count("SELECT count(*) FROM oncebox_dead_letter WHERE replay_at IS NULL AND error LIKE '%left alone%'");
        left.await == 1
    })
    .await;
    worker.stop().await.unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 1, "only the delivery");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_the_letter_is_the_licence_of_its_replay() {
    let bench = Bench::new(1).await;
    bench.kafka.append_keyed(0, Uuid::now_v7(), "broken", "0");
    let repaired = Arc::new(AtomicBool::new(false));
    let worker = bench.start(&[0], broken(&repaired, OnFailure::DeadLetter));
    bench.settled(0, 1).await;
    worker.stop().await.unwrap();
    repaired.store(true, Ordering::SeqCst);
    order(&bench, "true").await;
    // Two consumers have read the same letter.
    let processor = bench.processor(broken(&repaired, OnFailure::DeadLetter));
    let mut conn = bench.pool.acquire().await.unwrap();
    let letter = sqlx::Sqlite::due_letter(&mut conn, &processor.statements, "inventory")
        .await
        .unwrap()
        .unwrap();
    drop(conn);
    let key = Key {
        consumer: "inventory".into(),
        topic: "orders".into(),
        partition: 0,
    };
    let first = processor.replay(&key, &letter).await.unwrap();
    assert_eq!(first, Replayed::Effect);
    let second = processor.replay(&key, &letter).await.unwrap();
    assert_eq!(second, Replayed::Gone, "somebody else did it");
    assert_eq!(bench.effects().await, ["0"]);
}
