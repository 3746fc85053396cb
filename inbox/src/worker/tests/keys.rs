//! Blocked keys, and attempts that outlive a process (G8).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use uuid::Uuid;

use super::bench::{Bench, Options, effect, handler, until};
use crate::{HandlerError, OnFailure, RetryPolicy};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_a_blocked_key_waits_in_the_table_and_the_partition_goes_on() {
    let bench = Bench::new(1).await;
    for n in 0..30 {
        let key = format!("key {}", n % 3);
        let payload = format!("{key}/{n}");
        bench.kafka.append_keyed(0, Uuid::now_v7(), &key, &payload);
    }
    let options = || Options {
        handler: handler(|tx, delivery| {
            Box::pin(async move {
                effect(tx, delivery.clone()).await?;
                // Message 4 is of key 1.
                if delivery.offset == 4 {
                    return Err(HandlerError::fatal("poison"));
                }
                Ok(())
            })
        }),
        on_failure: OnFailure::BlockKey,
        batch: 4,
        ..Options::default()
    };
    let worker = bench.start(&[0], options());
    bench.settled(0, 30).await;
    let stats = worker.stats.clone();
    worker.stop().await.unwrap();
    let expected: Vec<String> = (0..30)
        .filter(|n| n % 3 != 1 || *n < 4)
        .map(|n| format!("key {}/{n}", n % 3))
        .collect();
    assert_eq!(bench.effects().await, expected);
    let parked: Vec<(i64, bool, String)> = sqlx::query_as(
        "SELECT record_offset, parked, error FROM oncebox_dead_letter ORDER BY record_offset",
    )
    .fetch_all(&bench.pool)
    .await
    .unwrap();
    let offsets: Vec<i64> = parked.iter().map(|(offset, ..)| *offset).collect();
    assert_eq!(offsets, (4..30).filter(|n| n % 3 == 1).collect::<Vec<_>>());
    assert!(parked.iter().all(|(_, parked, _)| *parked));
    assert_eq!(parked[0].2, "poison");
    assert!(parked[1].2.contains("blocked"), "{}", parked[1].2);
    assert_eq!((stats.parked(), stats.dead_letters()), (9, 0));
    assert_eq!(bench.marks().await, 30, "a redelivery of them does nothing");
    // Another process finds the key blocked.
    bench
        .kafka
        .append_keyed(0, Uuid::now_v7(), "key 1", "key 1/30");
    let worker = bench.start(&[0], options());
    bench.settled(0, 31).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_the_empty_key_is_a_key_that_can_be_blocked() {
    let bench = Bench::new(1).await;
    bench.kafka.append_keyed(0, Uuid::now_v7(), "", "poison");
    let options = Options {
        handler: handler(|_, _| Box::pin(async { Err(HandlerError::fatal("poison")) })),
        on_failure: OnFailure::BlockKey,
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 1).await;
    worker.stop().await.unwrap();
    // The empty key is a key.
    let blocked = bench
        .count("SELECT count(*) FROM oncebox_blocked_key")
        .await;
    assert_eq!(blocked, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a14_attempts_are_counted_on_after_a_restart() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "a");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let calls = Arc::new(AtomicU32::new(0));
    let options = || {
        let (seen, calls) = (Arc::clone(&seen), Arc::clone(&calls));
        Options {
            handler: handler(move |_, delivery| {
                seen.lock().unwrap().push(delivery.attempt);
                calls.fetch_add(1, Ordering::SeqCst);
                Box::pin(async { Err(HandlerError::retriable("not yet")) })
            }),
            retry: RetryPolicy {
                attempts: 4,
                initial: Duration::from_millis(600),
                max: Duration::from_millis(600),
                fast: 0,
            },
            ..Options::default()
        }
    };
    for restart in 1..4 {
        let worker = bench.start(&[0], options());
        until(async || {
            let written = bench.count("SELECT coalesce(max(attempts), 0) FROM oncebox_attempt");
            written.await >= restart
        })
        .await;
        worker.stop().await.unwrap();
    }
    let worker = bench.start(&[0], options());
    bench.settled(0, 1).await;
    worker.stop().await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [1, 2, 3, 4]);
    let letters = bench
        .count("SELECT attempts FROM oncebox_dead_letter WHERE first_failed_at IS NOT NULL")
        .await;
    assert_eq!(letters, 4);
    let left = bench.count("SELECT count(*) FROM oncebox_attempt").await;
    assert_eq!(left, 0, "they go with the message");
}
