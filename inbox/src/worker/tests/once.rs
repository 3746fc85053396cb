//! One effect per message (G5), a zombie's work is rejected (G6), offsets follow the database (G7).

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use uuid::Uuid;

use super::bench::{Bench, Options, at, handler, until};
use crate::{Error, HandlerError, Stats, Step};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_duplicate_deliveries_have_one_effect() {
    let bench = Bench::new(1).await;
    let ids: Vec<Uuid> = (0..5).map(|_| Uuid::now_v7()).collect();
    // The producer's duplicates: the same id at another offset.
    for round in 0..3 {
        for (n, id) in ids.iter().enumerate() {
            bench.kafka.append(0, *id, &format!("{n} of round {round}"));
        }
    }
    let worker = bench.start(&[0], Options::default());
    bench.settled(0, 15).await;
    // Kafka's: everything again.
    bench.kafka.redeliver(worker.member, 15);
    until(async || worker.stats.deliveries() == 30).await;
    let stats = worker.stats.clone();
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await.len(), 5);
    assert_eq!(stats.effects(), 5);
    assert_eq!(stats.duplicates(), 25);
    assert_eq!(bench.marks().await, 5);
    assert_eq!(
        bench.next(0).await,
        Some(15),
        "a duplicate advances the position"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_crash_at_any_step_leaves_both_or_nothing() {
    for step in [
        Step::Received,
        Step::Marked,
        Step::Handled,
        Step::BeforeCommit,
        Step::Committed,
        Step::OffsetStored,
    ] {
        let bench = Bench::new(1).await;
        for n in 0..3 {
            bench.kafka.append(0, Uuid::now_v7(), &format!("{n}"));
        }
        // The end of the worker's task or thread stands for the end of the process.
        let options = Options {
            // Offsets that follow each other closely are stored as one.
            on_step: Some(at(
                step,
                if step == Step::OffsetStored { 1 } else { 2 },
                || panic!("the crash of this test"),
            )),
            ..Options::default()
        };
        let crashed = bench.start(&[0], options);
        let outcome = tokio::task::spawn(crashed.ended()).await;
        assert!(
            matches!(outcome, Err(_) | Ok(Err(Error::Thread))),
            "{step}: {outcome:?}"
        );
        // A COMMIT that was on its way may still land: all of it, or nothing.
        until(async || {
            let together = bench.count(
                "SELECT (SELECT count(*) FROM effect) = (SELECT count(*) FROM oncebox_inbox) \
                 AND (SELECT count(*) FROM effect) = coalesce((SELECT next FROM oncebox_position), 0)",
            );
            together.await == 1
        })
        .await;
        let worker = bench.start(&[0], Options::default());
        bench.settled(0, 3).await;
        worker.stop().await.unwrap();
        assert_eq!(bench.effects().await, ["0", "1", "2"], "{step}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_handlers_error_rolls_its_writes_back() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "a");
    let calls = Arc::new(AtomicU32::new(0));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (count, attempts) = (Arc::clone(&calls), Arc::clone(&seen));
    let options = Options {
        handler: handler(move |tx, delivery| {
            let n = count.fetch_add(1, Ordering::SeqCst);
            attempts.lock().unwrap().push(delivery.attempt);
            Box::pin(async move {
                super::bench::effect(tx, delivery).await?;
                if n < 2 {
                    return Err(HandlerError::retriable("not yet"));
                }
                Ok(())
            })
        }),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 1).await;
    let stats = worker.stats.clone();
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["a"]);
    assert_eq!(calls.load(Ordering::SeqCst), 3);
    assert_eq!(*seen.lock().unwrap(), [1, 2, 3]);
    assert_eq!((stats.retries(), stats.effects()), (2, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g5_a_transaction_that_was_rolled_back_behind_our_back_does_not_advance_the_position() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "a");
    let first = AtomicU32::new(0);
    let options = Options {
        // What SQLite does by itself when the disk is full and the handler swallows the error.
        handler: handler(move |tx, delivery| {
            let n = first.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move {
                super::bench::effect(tx, delivery).await?;
                if n == 0 {
                    sqlx::query("ROLLBACK").execute(&mut **tx).await?;
                }
                Ok(())
            })
        }),
        ..Options::default()
    };
    let worker = bench.start(&[0], options);
    bench.settled(0, 1).await;
    worker.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["a"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_a_zombie_cannot_commit_after_the_takeover() {
    let bench = Bench::new(1).await;
    bench.kafka.append(0, Uuid::now_v7(), "a");
    // The zombie has the message in its hands and stands still.
    let (wake, asleep) = channel::<()>();
    let stands_still = at(Step::Received, 1, {
        let asleep = Mutex::new(asleep);
        move || {
            let _ = asleep.lock().unwrap().recv();
        }
    });
    let handled = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&handled);
    let zombie = bench.start(
        &[0],
        Options {
            on_step: Some(Arc::new(move |step| {
                if step == Step::Handled {
                    count.fetch_add(1, Ordering::SeqCst);
                }
                stands_still(step);
            })),
            ..Options::default()
        },
    );
    until(async || zombie.stats.deliveries() == 1).await;
    // The new owner has taken over, and stands still before it has settled the message: the mark cannot help.
    let (go, waiting) = channel::<()>();
    let waiting = Mutex::new(waiting);
    let owner = bench.start(
        &[0],
        Options {
            on_step: Some(at(Step::Received, 1, move || {
                let _ = waiting.lock().unwrap().recv();
            })),
            ..Options::default()
        },
    );
    until(async || owner.stats.deliveries() == 1).await;
    wake.send(()).unwrap();
    // It works on, and only then hears that the partition is another's.
    until(async || handled.load(Ordering::SeqCst) == 1).await;
    bench.kafka.revoke(zombie.member, &[0]);
    until(async || zombie.stats.ownership() == 1 && zombie.stats.deliveries() == 1).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(
        bench.effects().await.is_empty(),
        "the zombie's effect was rejected"
    );
    assert_eq!(bench.marks().await, 0, "and its mark with it");
    go.send(()).unwrap();
    bench.settled(0, 1).await;
    assert_eq!(zombie.stats.effects(), 0);
    // A commit is visible before it is counted.
    until(async || owner.stats.effects() == 1).await;
    zombie.stop().await.unwrap();
    owner.stop().await.unwrap();
    assert_eq!(bench.effects().await, ["a"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g6_two_workers_that_both_believe_they_own_the_partition_have_one_effect_each_message() {
    let bench = Bench::new(1).await;
    let one = bench.start(&[0], Options::default());
    let two = bench.start(&[0], Options::default());
    for n in 0..200 {
        bench.kafka.append(0, Uuid::now_v7(), &format!("{n}"));
        if n % 20 == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    bench.settled(0, 200).await;
    // Counted after the stop: a commit is visible before it is counted.
    let stats = [one.stats.clone(), two.stats.clone()];
    one.stop().await.unwrap();
    two.stop().await.unwrap();
    let effects: u64 = stats.iter().map(Stats::effects).sum();
    let expected: Vec<String> = (0..200).map(|n| n.to_string()).collect();
    assert_eq!(bench.effects().await, expected, "each once, in order");
    assert_eq!(effects, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g7_an_offset_is_stored_only_after_the_commit() {
    let bench = Bench::new(1).await;
    for n in 0..20 {
        bench.kafka.append(0, Uuid::now_v7(), &format!("{n}"));
    }
    let kafka = bench.kafka.clone();
    let commits = Arc::new(AtomicI64::new(0));
    let wrong = Arc::new(AtomicU32::new(0));
    let (count, bad) = (Arc::clone(&commits), Arc::clone(&wrong));
    let worker = bench.start(
        &[0],
        Options {
            on_step: Some(Arc::new(move |step| {
                let stored = kafka.stores().last().map_or(0, |(_, next)| *next);
                let committed = count.load(Ordering::SeqCst);
                if stored > committed {
                    bad.fetch_add(1, Ordering::SeqCst);
                }
                if step == Step::Committed {
                    count.fetch_add(1, Ordering::SeqCst);
                }
            })),
            ..Options::default()
        },
    );
    bench.settled(0, 20).await;
    worker.stop().await.unwrap();
    assert_eq!(wrong.load(Ordering::SeqCst), 0);
    let stores: Vec<_> = bench.kafka.stores().into_iter().map(|(_, at)| at).collect();
    assert!(
        stores.is_sorted() && stores.last() == Some(&20),
        "{stores:?}"
    );
    assert_eq!(
        bench.kafka.committed(0),
        Some(20),
        "committed to the group at the end"
    );
    assert_eq!(bench.kafka.closed(), 1);
}
