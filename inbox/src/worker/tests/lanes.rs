//! Batches, lanes, and the ways to know a duplicate.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use uuid::Uuid;

use super::bench::{Bench, Options, effect, handler, until, whole};
use crate::{Dedup, Error, HandlerError};

fn many() -> Options {
    Options {
        batch: 50,
        ..Options::default()
    }
}

fn fill(bench: &Bench, count: i32) {
    for n in 0..count {
        bench.kafka.append(0, Uuid::now_v7(), &n.to_string());
    }
}

fn numbers(count: i32) -> Vec<String> {
    (0..count).map(|n| n.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_batch_shares_a_transaction_and_a_duplicate_in_it_is_skipped() {
    let bench = Bench::new(1).await;
    let twice = Uuid::now_v7();
    for n in 0..40 {
        let id = if n % 10 == 3 { twice } else { Uuid::now_v7() };
        bench.kafka.append(0, id, &n.to_string());
    }
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&sizes);
    let options = Options {
        handler: whole(move |tx, deliveries| {
            seen.lock().unwrap().push(deliveries.len());
            Box::pin(async move {
                for delivery in deliveries {
                    effect(tx, delivery.clone()).await?;
                }
                Ok(())
            })
        }),
        ..many()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 40).await;
    let stats = worker.stats.clone();
    worker.stop().await.unwrap();
    let expected: Vec<String> = numbers(40)
        .into_iter()
        .filter(|n| !["13", "23", "33"].contains(&n.as_str()))
        .collect();
    assert_eq!(bench.effects().await, expected);
    assert_eq!((stats.effects(), stats.duplicates()), (37, 3));
    let sizes = sizes.lock().unwrap();
    assert!(sizes.iter().any(|n| *n > 5), "{sizes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_poison_in_a_batch_is_redone_alone_and_its_neighbours_have_their_effect() {
    for whole_batches in [false, true] {
        let bench = Bench::new(1).await;
        fill(&bench, 60);
        let fails = |payload: &[u8]| payload == b"17" || payload == b"41";
        let options = if whole_batches {
            Options {
                handler: whole(move |tx, deliveries| {
                    Box::pin(async move {
                        for delivery in deliveries {
                            effect(tx, delivery.clone()).await?;
                            if fails(delivery.payload.as_deref().unwrap()) {
                                return Err(HandlerError::fatal("poison"));
                            }
                        }
                        Ok(())
                    })
                }),
                ..many()
            }
        } else {
            Options {
                handler: handler(move |tx, delivery| {
                    Box::pin(async move {
                        effect(tx, delivery.clone()).await?;
                        if fails(delivery.payload.as_deref().unwrap()) {
                            return Err(HandlerError::fatal("poison"));
                        }
                        Ok(())
                    })
                }),
                ..many()
            }
        };
        let worker = bench.start(&[0], options);
        bench.settled(0, 60).await;
        let stats = worker.stats.clone();
        worker.stop().await.unwrap();
        let expected: Vec<String> = numbers(60)
            .into_iter()
            .filter(|n| n != "17" && n != "41")
            .collect();
        assert_eq!(bench.effects().await, expected, "{whole_batches}");
        assert_eq!((stats.dead_letters(), stats.effects()), (2, 58));
        let letters = bench
            .count("SELECT count(*) FROM oncebox_dead_letter WHERE record_offset IN (17, 41) AND attempts = 1")
            .await;
        assert_eq!(letters, 2, "a failure among neighbours is no attempt");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_what_a_handler_wrote_outside_of_its_lost_transaction_is_not_kept_for_its_neighbours() {
    // A handler that loses its transaction (on SQLite: a full disk whose error it swallows) must not let the next handler
    // of the batch work without one: its effect would stay although the marks are gone.
    let bench = Bench::new(1).await;
    fill(&bench, 30);
    let first = AtomicU32::new(0);
    let options = Options {
        handler: handler(move |tx, delivery| {
            let lose = delivery.offset == 20 && first.fetch_add(1, Ordering::SeqCst) == 0;
            Box::pin(async move {
                effect(tx, delivery).await?;
                if lose {
                    sqlx::query("ROLLBACK").execute(&mut **tx).await?;
                }
                Ok(())
            })
        }),
        ..many()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 30).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, numbers(30));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g4_a_slow_key_does_not_hold_the_other_lanes_and_keeps_its_order() {
    let bench = Bench::new(1).await;
    let mut expected: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for n in 0..60 {
        let key = format!("key {}", n % 6);
        let payload = format!("{key}/{n}");
        bench.kafka.append_keyed(0, Uuid::now_v7(), &key, &payload);
        expected.entry(key).or_default().push(payload);
    }
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let open = Arc::clone(&gate);
    let options = Options {
        handler: handler(move |tx, delivery| {
            let gate = Arc::clone(&gate);
            let waits = delivery.key.as_deref() == Some(b"key 0");
            Box::pin(async move {
                if waits {
                    // Before it writes: SQLite has one writer.
                    let permit = tokio::time::timeout(Duration::from_millis(20), gate.acquire());
                    permit
                        .await
                        .map_err(|_| HandlerError::retriable("not yet"))?
                        .unwrap()
                        .forget();
                }
                effect(tx, delivery).await
            })
        }),
        retry: crate::RetryPolicy {
            attempts: 1_000,
            initial: Duration::from_millis(30),
            max: Duration::from_millis(30),
            fast: 0,
        },
        lanes: 8,
        batch: 4,
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    // At least those of the lanes that the slow key is not in.
    until(async || bench.effects().await.len() >= 30).await;
    assert_eq!(
        bench.next(0).await,
        Some(0),
        "the first message is open: G7"
    );
    open.add_permits(100);
    bench.settled(0, 60).await;
    worker.stop().await.unwrap();
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for payload in bench.effects().await {
        let key = payload.split('/').next().unwrap().to_owned();
        found.entry(key).or_default().push(payload);
    }
    assert_eq!(found, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_crash_with_lanes_above_a_hole_repeats_nothing() {
    let bench = Bench::new(1).await;
    for n in 0..40 {
        bench
            .kafka
            .append_keyed(0, Uuid::now_v7(), &format!("{}", n % 8), &n.to_string());
    }
    let stuck = handler(|tx, delivery| {
        Box::pin(async move {
            if delivery.offset == 0 {
                return Err(HandlerError::retriable("stuck"));
            }
            effect(tx, delivery).await
        })
    });
    let options = Options {
        handler: stuck,
        retry: crate::RetryPolicy {
            attempts: 10_000,
            initial: Duration::from_millis(20),
            max: Duration::from_millis(20),
            fast: 0,
        },
        lanes: 8,
        batch: 4,
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    until(async || bench.effects().await.len() >= 20).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.next(0).await, Some(0));
    let worker = bench.start(&[0], many());
    bench.settled(0, 40).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.numbers().await, (0..40).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_by_offset_the_position_alone_keeps_redeliveries_and_zombies_out() {
    let bench = Bench::new(1).await;
    fill(&bench, 50);
    let options = || Options {
        dedup: Dedup::ByOffset,
        ..many()
    };
    let one = bench.start(&[0], options());
    bench.settled(0, 50).await;
    bench.kafka.redeliver(one.member, 30);
    until(async || one.stats.duplicates() >= 30).await;
    // Another one that believes to own it, too.
    let two = bench.start(&[0], options());
    for n in 50..150 {
        bench.kafka.append(0, Uuid::now_v7(), &n.to_string());
        if n % 20 == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    bench.settled(0, 150).await;
    one.stop().await.unwrap();
    two.stop().await.unwrap();
    assert_eq!(bench.effects().await, numbers(150), "each once, in order");
    assert_eq!(bench.marks().await, 0, "no row per message");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_by_offset_a_lost_transaction_does_not_advance_the_position() {
    let bench = Bench::new(1).await;
    fill(&bench, 3);
    let first = AtomicU32::new(0);
    let options = Options {
        dedup: Dedup::ByOffset,
        handler: handler(move |tx, delivery| {
            let lose = first.fetch_add(1, Ordering::SeqCst) == 0;
            Box::pin(async move {
                effect(tx, delivery).await?;
                if lose {
                    sqlx::query("ROLLBACK").execute(&mut **tx).await?;
                }
                Ok(())
            })
        }),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 3).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, numbers(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_dedup_a_redelivery_after_a_crash_is_handled_again_and_nothing_is_lost() {
    let bench = Bench::new(1).await;
    fill(&bench, 10);
    // The producer's duplicate is handled again: that is what was asked for.
    let id = Uuid::now_v7();
    bench.kafka.append(0, id, "10");
    bench.kafka.append(0, id, "10");
    let options = Options {
        dedup: Dedup::None,
        ..many()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 12).await;
    worker.stop().await.unwrap();
    let mut expected = numbers(11);
    expected.push("10".to_owned());
    assert_eq!(bench.effects().await, expected);
    assert_eq!(bench.marks().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g9_a_full_partition_is_paused_and_the_others_go_on() {
    let bench = Bench::new(2).await;
    for n in 0..3_000 {
        bench.kafka.append(0, Uuid::now_v7(), "slow");
        if n < 300 {
            bench.kafka.append(1, Uuid::now_v7(), &n.to_string());
        }
    }
    let options = Options {
        handler: handler(|tx, delivery| {
            Box::pin(async move {
                if delivery.payload.as_deref() == Some(b"slow") {
                    return Err(HandlerError::retriable("not now"));
                }
                effect(tx, delivery).await
            })
        }),
        retry: crate::RetryPolicy {
            attempts: 10_000,
            initial: Duration::from_millis(100),
            max: Duration::from_millis(100),
            fast: 0,
        },
        batch: 20,
        ..Options::default()
    };
    let worker = bench.start(&[0, 1], options);
    bench.settled(1, 300).await;
    // A hundred, and what was on its way before the pause.
    assert!(
        worker.stats.deliveries() < 300 + 1_000,
        "{} were taken in",
        worker.stats.deliveries()
    );
    worker.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g10_an_idle_partition_follows_the_end_that_has_no_messages() {
    let bench = Bench::new(1).await;
    fill(&bench, 5);
    // A transaction marker: an offset without a message, which retention deletes like everything else.
    bench.kafka.marker(0);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 6).await;
    worker.stop().await.unwrap();
    bench.kafka.expire(0, 6);
    fill(&bench, 1);
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 7).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await.len(), 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a23_a_record_is_written_with_the_effect() {
    let bench = Bench::new(1).await;
    fill(&bench, 4);
    let options = Options {
        handler: handler(|tx, delivery| {
            Box::pin(async move {
                match delivery.offset {
                    1 => Err(HandlerError::fatal("poison")),
                    2 if delivery.attempt == 1 => Err(HandlerError::retriable("not yet")),
                    _ => effect(tx, delivery).await,
                }
            })
        }),
        record: Some(Arc::new(|d| {
            d.payload
                .as_ref()
                .map(|p: &Bytes| format!("order {}", String::from_utf8_lossy(p)))
        })),
        ..many()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 4).await;
    worker.stop().await.unwrap();
    let rows: Vec<(i64, String, String, i32, Option<String>)> = sqlx::query_as(
        "SELECT record_offset, business_id, status, attempts, error FROM oncebox_record ORDER BY record_offset",
    )
    .fetch_all(&bench.pool)
    .await
    .unwrap();
    let row = |n: i64, status: &str, attempts, error: Option<&str>| {
        let business = format!("order {n}");
        (
            n,
            business,
            status.to_owned(),
            attempts,
            error.map(str::to_owned),
        )
    };
    assert_eq!(
        rows,
        [
            row(0, "effect", 1, None),
            row(1, "dead", 1, Some("poison")),
            row(2, "effect", 2, Some("not yet")),
            row(3, "effect", 1, None),
        ]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g8_many_failures_in_a_row_stop_the_consumer_instead_of_filling_the_dead_letters() {
    let bench = Bench::new(1).await;
    fill(&bench, 30);
    let options = Options {
        handler: handler(|tx, delivery| {
            Box::pin(async move {
                if delivery.offset < 3 {
                    return effect(tx, delivery).await;
                }
                Err(HandlerError::fatal("the downstream system is gone"))
            })
        }),
        breaker: Some(5),
        ..many()
    };
    let worker = bench.start(&[0], options);
    let ended = tokio::time::timeout(Duration::from_secs(10), worker.ended());
    let error = ended.await.expect("the consumer stops").unwrap_err();
    assert!(
        matches!(&error, Error::Breaker { failures: 5, .. }) && error.is_stop(),
        "{error}"
    );
    assert!(error.to_string().contains("--accept-failures"), "{error}");
    assert_eq!(bench.next(0).await, Some(7), "3 effects and 4 letters");
    let tripped = bench
        .count("SELECT failures FROM oncebox_breaker WHERE topic = 'orders'")
        .await;
    assert_eq!(tripped, 5, "a restart finds it");
}
